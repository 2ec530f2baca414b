"""The catalogue of commands: where each is declared, and what it does. Commands are imported when they run.

A new command is a module in `sdk/commands`, or a function in one, and a line here."""

from __future__ import annotations

from typing import Final, NamedTuple


class Declared(NamedTuple):
    """Where a command is declared, as the function of its name, and what it does."""

    module: str
    about: str


COMMANDS: Final[dict[str, Declared]] = {
    "demo": Declared("checks", "run a whole network on this machine, for real, and compare it with a single engine"),
    "bootstrap": Declared("node", "start a new network and be the place where others join it"),
    "join": Declared("node", "join a network with this box and serve a model"),
    "serve": Declared(
        "serve", "serve a model with an OpenAI API at once: a network of this one box, which others may join"
    ),
    "gateway": Declared("network", "serve the network's OpenAI API at a port of this machine, which needs no engine"),
    "leave": Declared("node", "let a node of this box finish its requests and stop"),
    "drain": Declared(
        "node", "let a box finish its requests and take no new ones; it stays in the network until --undo or `leave`"
    ),
    "price": Declared("node", "say what a node of this box costs, or that it costs something else from now on"),
    "token": Declared("token", "make, show, revoke and renew join tokens, on the box that ran `bootstrap`"),
    "generate": Declared(
        "network", "continue a prompt or a conversation; the text goes to stdout as it comes, figures to stderr"
    ),
    "status": Declared("network", "show nodes, coordinator and plan of a network"),
    "chat": Declared("network", "talk with a model of a network, in the terminal"),
    "models": Declared("models", "show which models a network serves, and say which it is to serve"),
    "path": Declared("network", "explain by which path KV would go from one node to another, and why"),
    "topology": Declared("seeing", "show sites, boxes, links and KV flows, as a table, a drawing or a live view"),
    "inspect": Declared("seeing", "say all that is known of a request, a box, a link, a path or the plan, and why"),
    "events": Declared("seeing", "show what has happened at a box, and what happens"),
    "logs": Declared(
        "node",
        "show what the node of this box has written to its log, or its engine printed (what happened in the "
        "network, at any box: `events`)",
    ),
    "plan": Declared(
        "planning",
        "say which GPUs should form replicas, what each should do and what to expect, for a described cluster or, with "
        "--live, for the running network",
    ),
    "sim": Declared(
        "planning",
        "simulate requests against a plan for a described cluster, in virtual time (for the running network: "
        "p2pserve plan --live)",
    ),
    "provision": Declared(
        "planning",
        "say how many machines of which kind, for prompts and for tokens, serve a workload within its SLOs, by "
        "simulating them (Splitwise's provisioning)",
    ),
    "bench": Declared("bench", "put load on the running network, and say how fast and at what cost it answers"),
    "rent": Declared(
        "renting", "say which offers of vast.ai or RunPod to rent for a model, within a budget, and with which commands"
    ),
    "doctor": Declared("checks", "say whether this box is fit to join, and what to do where it is not"),
    "selftest": Declared(
        "checks",
        "check that the vLLM of this box works with p2pserve; a node does so by itself with versions it does not know",
    ),
    "config": Declared("config", "show which settings hold and where each comes from, and check the config file"),
    "version": Declared("checks", "show the versions of p2pserve, vLLM, torch and Python"),
    "completion": Declared("completion", "print what makes a shell complete commands and options"),
}
"""In the order of the help."""
