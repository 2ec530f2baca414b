"""The papers' evaluations again, ThunderServe's most of all: figures and tables from this project's
planner and simulator.

    python -m p2pserve.sims.experiments --help

Each module has one experiment: a function from a `Scope` to a `Page`, with typed rows, the paper's
figures beside them, and what agrees, what does not and why. The pages are in docs/results.
"""
