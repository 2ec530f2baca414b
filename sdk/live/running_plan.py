"""`p2pserve inspect plan`: the running plan as the network tells it, and where the planner is installed, what that
expects of it."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import msgspec

from ...coordinator import Plan
from ...coordinator.names import naming, with_names
from ...node.adverts import plans_of
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
    plans = plans_of(status)
    explained = {plan.service: _explain_plan(status, plan) for plan in plans if arguments.explain}
    called = naming([node.peer for node in status.nodes])
    if arguments.format == "json":
        told = [
            {**msgspec.to_builtins(plan)}
            | ({"explain": explanation_json(explained[plan.service][0], called)} if arguments.explain else {})
            for plan in plans
        ]
        others = {"other_plans": told[1:]} if told[1:] else {}
        print(json.dumps({**told[0], **others} if told else None))
        return 0
    console = open_console()
    print_prose(plan_lines(status), console)
    for plan in plans if arguments.explain else ():
        if len(plans) > 1:
            console.print(f"\n{plan.service}:")
        print_explanation(*explained[plan.service], console, partial(with_names, peers=plan.peers))
    if any(service is None for _, service in explained.values()):
        print(WITHOUT_PLANNER)
    return 0


def _explain_plan(status: Status, plan: Plan) -> tuple[Explanation, Service | None]:
    """With what is expected of each replica, where the planner is installed and its replicas can serve."""
    found = None
    if find_spec("scipy") is not None:
        from .plan import explain_running_plan

        found = explain_running_plan(status, plan)
    return found or (explain_plan(plan), None)
