"""What `p2pserve plan --live` says of other groups of boxes, and how `--apply` has the coordinator begin with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
from rich.console import Console

from ...coordinator import Plan, Stage
from ...coordinator.names import count_of, name_of
from ...coordinator.plan import GroupStages
from ...coordinator.regrouping.refusals import describe_refusal
from ...coordinator.regrouping.steps import PAYBACK_S, RegroupProposal
from ...node.adverts import plans_of
from ...node.messages import Status
from ...node.planning.messages import RegroupBegun, RegroupOrder
from ..actions.network import client_of
from ..actions.status_view import print_prose, regrouping_lines
from ..errors import NotReady


def apply_proposal(
    arguments: SimpleNamespace, status: Status, service: str, found: RegroupProposal | None
) -> RegroupBegun | None:
    """Have the coordinator begin with what was found; None: nothing was found. Raises RequestFailed for one that
    refuses, as it does without an admin's token, and NotReady while boxes are on their way already."""
    if any(plan.service == service and plan.regrouping is not None for plan in plans_of(status)):
        raise NotReady("apply: boxes are on their way to other groups already; see `p2pserve status`")
    if found is None:
        return None
    if status.coordinator is None:
        raise NotReady("apply: the network has no coordinator now; try again in some seconds")
    expected = found.regrouping
    order = RegroupOrder(
        service=service, groups=found.groups, recuts=found.recuts, before=expected.before, after=expected.after,
        reload_s=expected.reload_s,
    )  # fmt: skip
    with client_of(arguments) as client:
        return client.regroup(order, status.coordinator)


def proposal_json(found: RegroupProposal | None) -> dict[str, Any] | None:
    """Everything of it, for programs."""
    if found is None:
        return None
    return {
        "groups": msgspec.to_builtins(found.groups),
        "recuts": msgspec.to_builtins(found.recuts),
        "steps": msgspec.to_builtins(found.regrouping.steps),
        "before": found.regrouping.before,
        "phases_alone": found.light,
        "after": found.regrouping.after,
        "meanwhile": found.meanwhile,
        "reload_s": found.reload_s,
        "pays": found.pays,
    }


def print_proposal(
    found: RegroupProposal | None, plan: Plan | None, status: Status, begun: RegroupBegun | None, console: Console
) -> None:
    """For people: what is under way, or would change, per box, with what that gives and costs."""
    if plan is not None and plan.regrouping is not None:
        for line in regrouping_lines(status):
            console.print(line)
        return
    if plan is not None:
        print_prose(map(describe_refusal, plan.refused), console)
    if found is None or plan is None:
        return
    expected = found.regrouping
    console.print(f"\n{'boxes divided anew' if found.recuts else 'other groups of boxes'} would serve more:")
    for number, step in enumerate(expected.steps):
        if step.recut is not None:
            nodes = count_of(step.recut.replicas, "node")
            console.print(f"  step {number + 1}: the box of {name_of(step.recut.head)}: {step.recut.was} -> {nodes}")
        for group in step.form if step.recut is None else ():
            for stage in group:
                was = _describe(plan, stage.peer)
                console.print(f"  step {number + 1}: {name_of(stage.peer)}: {was} -> {_describe_stage(group, stage)}")
        console.print(
            f"  step {number + 1} takes about {found.reload_s[number]:.0f} s, while the others serve "
            f"{found.meanwhile[number]:.3g} requests/s in time"
        )
    console.print(
        f"  would give, of {found.rate:.3g} requests/s: {expected.before:.3g} -> {expected.after:.3g} in time "
        f"({found.light:.3g} with other phases alone)"
    )
    hours = f"{PAYBACK_S / 3600.0:g} h"
    console.print(f"  what is lost on the way is {'' if found.pays else 'not '}won back within {hours} of that")
    if begun is None:
        console.print("  p2pserve plan --live --apply, with an admin's token, begins with it")
    else:
        console.print("  the coordinator has begun with it: p2pserve status says how far it is")


def _describe(plan: Plan, peer: str) -> str:
    replica = plan.replica_of(peer)
    if replica is None:
        return "no part"
    return _describe_stage(replica.stages, next(stage for stage in replica.stages if stage.peer == peer))


def _describe_stage(group: GroupStages, stage: Stage) -> str:
    if len(group) == 1:
        return "alone"
    others = [name_of(each.peer) for each in group if each.peer != stage.peer]
    return f"layers {stage.first_layer}-{stage.last_layer - 1} with {', '.join(others)}"
