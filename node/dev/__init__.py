"""Benchmarks, and the training of the bundled model. Nothing that a node runs."""
