"""`p2pserve inspect plan`: the running plan as the network tells it, and where the planner is installed, what that
expects of it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import msgspec

from ...coordinator import Plan
from ...coordinator.names import naming, with_names
from ...node.messages import Status
from ..actions.network import client_of
from ..actions.status_view import open_console, plan_lines, print_prose
from ..explaining.plan_words import Explanation, explain_plan, explanation_json, print_explanation

if TYPE_CHECKING:
    from ...coordinator.planning.model.workload import Service

WITHOUT_PLANNER: Final = (
    "What limits each replica, and what else it could be: p2pserve plan --live --explain, with p2pserve[node]."
)


def inspect_plan(arguments: SimpleNamespace) -> int:
    """`p2pserve inspect plan`."""
    with client_of(arguments) as client:
        status = client.status()
    plan = status.plan
    explained = _explain_plan(status, plan) if arguments.explain and plan is not None else None
    called = naming([node.peer for node in status.nodes])
    if arguments.format == "json":
        told = msgspec.to_builtins(plan)
        print(json.dumps(told if explained is None else {**told, "explain": explanation_json(explained[0], called)}))
        return 0
    console = open_console()
    print_prose(plan_lines(status), console)
    if explained is not None and plan is not None:
        print_explanation(*explained, console, lambda text: with_names(text, plan.peers))
        if explained[1] is None:
            print(WITHOUT_PLANNER)
    return 0


def _explain_plan(status: Status, plan: Plan) -> tuple[Explanation, Service | None]:
    """With what is expected of each replica, where the planner is installed and its replicas can serve."""
    found = None
    if find_spec("scipy") is not None:
        from .plan import explain_running_plan

        found = explain_running_plan(status, plan)
    return found or (explain_plan(plan), None)
