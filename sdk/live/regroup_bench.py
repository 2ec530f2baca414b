"""What requests lose while boxes change their groups: `python -m p2pserve.sdk.live_comparison --regroup`.

    pair 1   the same requests, the plan kept      box 1 alone, box 2 alone, others
             again, and a change in the middle     box 1 and box 2 become one pipeline
    pair 2   the plan kept, then                   they part again
    ...

With `--regroup cut` the GPUs of one box are divided anew instead, among another number of nodes, and back.

A change counts from its order until its last box is ready. Of the requests that come in that time, as many are to be in
time as with the plan that is kept on the same boxes, but for 5 %. Emulated engines take as long to load as they would.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import Final, NamedTuple

import msgspec
import numpy as np
import trio
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ...coordinator import Phase, Plan, Stage
from ...coordinator.plan import BoxRecut, Deadlines, Groups
from ...node.adverts import divided_boxes
from ...node.engine.emulated.model import parse_cards
from ...node.messages import Status
from ...node.planning.messages import RegroupOrder
from ...node.view import NetworkView
from ...sims.records import Outcomes, Trace
from ..client import AsyncClient
from ..demo.box import ON_LOOPBACK, DemoBox, open_box
from ..errors import DemoFailed, UsageError
from .network import (
    PLAN_S,
    POLL_S,
    SETTLE_S,
    TOO_SLOW,
    Replayed,
    Say,
    find_in_time,
    replay,
    wait_for_plan,
    warm_up,
)
from .nodes import LiveNodes, LiveSettings, node_options

TARGET: Final = 0.95
LEAST_NODES: Final = 3  # two change, and somebody has to go on
LEAD: Final = 0.2  # of the trace, before the order: by then the boxes are as busy as they will be
CHANGE_S: Final = 300.0
PIPELINE: Final = "pipeline"
CUT: Final = "cut"
CHANGES: Final = (PIPELINE, CUT)
DIVISIBLE: Final = ("--replicas", "auto", "--recut-every", "1s")

Rows = NDArray[np.bool_]


class RegroupPair(msgspec.Struct, frozen=True, kw_only=True):
    """The same requests with the plan kept, and with a change. `asked` while the change was under way, for `change_s`;
    of those in time `kept` and `changed`, and of all requests `all_kept` and `all_changed`. `moved`: requests that
    needed more than one attempt during the changed run; `failed`: those that were never answered."""

    change: str
    change_s: float
    asked: int
    kept: int
    changed: int
    all_asked: int
    all_kept: int
    all_changed: int
    moved: int
    failed: int

    @property
    def ratio(self) -> float:
        """Of requests in time during the change, changed over kept; 1 where there are none to lose."""
        return self.changed / self.kept if self.kept else 1.0


class RegroupBench(msgspec.Struct, frozen=True, kw_only=True):
    """What all pairs have shown. `ratio`: of all requests in time during changes; `median_ratio`: over pairs. `late`:
    how often engines fell behind what they emulate, because this machine was too slow."""

    ok: bool
    target: float
    emulated: str
    lengths: str
    arrivals: str
    ratio: float
    median_ratio: float
    late: int
    pairs: tuple[RegroupPair, ...]


class GroupsChange(NamedTuple):
    """These groups take the place of those that run."""

    name: str
    groups: Groups

    def order(self, service: str) -> RegroupOrder:
        """What the coordinator is told."""
        return RegroupOrder(service=service, groups=self.groups)

    def is_over(self, status: Status, plan: Plan) -> bool:
        """Whether this plan, which is on its way to no other, has them."""
        return {replica.stages for replica in plan.replicas} >= set(self.groups)


class CutChange(NamedTuple):
    """The box of this head is divided anew."""

    name: str
    recut: BoxRecut

    def order(self, service: str) -> RegroupOrder:
        """What the coordinator is told."""
        return RegroupOrder(service=service, recuts=(self.recut,))

    def is_over(self, status: Status, plan: Plan) -> bool:
        """Whether its nodes are in this plan, which is on its way to no other."""
        nodes = nodes_of_box(status, self.recut.head)
        return len(nodes) == self.recut.replicas and set(nodes) <= set(plan.peers)


def nodes_of_box(status: Status, head: str) -> tuple[str, ...]:
    """The nodes of a box that lets the network divide it; none where it is not all there."""
    view = NetworkView.of_status(status)
    divided = divided_boxes(view.adverts, status.plan.service if status.plan is not None else "")
    return divided[head].nodes if head in divided else ()


def check_settings(settings: LiveSettings, pairs: int, kind: str = PIPELINE) -> None:
    """Raises UsageError or GpuError."""
    cards = settings.cards_of(settings.nodes)
    if kind == CUT and parse_cards(cards, settings.specs).count < 2:
        raise UsageError(f"cards: {cards} cannot be divided; take two or more, such as 2xRTX A6000")
    if settings.nodes < LEAST_NODES:
        raise UsageError(f"nodes: two change their group; {settings.nodes} leave nobody to go on, take {LEAST_NODES}")
    if set(settings.phases) - {Phase.MIXED}:
        raise UsageError("phases: emulated stages transfer no KV, so all nodes are mixed; leave it out")
    if settings.schedule:
        kind = settings.schedule[0].kind
        raise UsageError(f"{kind}: nothing goes wrong while groups change; leave it out")
    if pairs < 1:
        raise UsageError(f"pairs: {pairs} is not above 0")


def run_regroup_bench(settings: LiveSettings, traces: Iterable[Trace], say: Say, kind: str = PIPELINE) -> RegroupBench:
    """A pair for each trace, on one network; the change is of this kind. Raises DemoFailed, ClientError."""
    taken = list(traces)
    pairs, late = trio.run(_run_pairs, replace(settings, phases=(Phase.MIXED,)), taken, say, kind)
    return summarise_pairs(pairs, settings.describe(), taken[0], late)


def summarise_pairs(pairs: Iterable[RegroupPair], emulated: str, trace: Trace, late: int = 0) -> RegroupBench:
    """The figure that counts, beside its target."""
    found = tuple(pairs)
    kept, changed = sum(pair.kept for pair in found), sum(pair.changed for pair in found)
    ratio = changed / kept if kept else 1.0
    return RegroupBench(
        ok=ratio >= TARGET and kept > 0,
        target=TARGET,
        emulated=emulated,
        lengths=trace.lengths,
        arrivals=trace.arrivals,
        ratio=ratio,
        median_ratio=median(pair.ratio for pair in found),
        late=late,
        pairs=found,
    )


def compare_runs(
    change: str, kept: Outcomes, changed: Outcomes, deadlines: Deadlines, span: tuple[float, float], moved: int
) -> RegroupPair:
    """Both runs of one trace, of which the change took this span of seconds."""
    arrivals = kept.trace.arrival_s
    during: Rows = (arrivals >= span[0]) & (arrivals <= span[1])
    first, second = find_in_time(kept, deadlines), find_in_time(changed, deadlines)
    return RegroupPair(
        change=change,
        change_s=span[1] - span[0],
        asked=int(during.sum()),
        kept=int(first[during].sum()),
        changed=int(second[during].sum()),
        all_asked=len(arrivals),
        all_kept=int(first.sum()),
        all_changed=int(second.sum()),
        moved=moved,
        failed=int((~changed.completed).sum()),
    )


async def _run_pairs(settings: LiveSettings, traces: list[Trace], say: Say, kind: str) -> tuple[list[RegroupPair], int]:
    pairs: list[RegroupPair] = []
    async with open_box(watch_memory=False) as box:
        alike = settings if kind != CUT else replace(settings, nodes=settings.nodes - 1)
        nodes = LiveNodes(box, alike, None)
        say(f"starting {settings.describe()} for {settings.model}")
        await nodes.start()
        tokens, peers = nodes.bootstrap.tokens, nodes.peers
        async with AsyncClient(tokens["client"]) as client, AsyncClient(tokens["admin"]) as admin:
            plan = await wait_for_plan(client, nodes)
            head = await _start_divisible(box, client, tokens["leader"], settings, say) if kind == CUT else ""
            await trio.sleep(SETTLE_S)
            for number, trace in enumerate(traces):
                plan = (await client.status()).plan or plan
                change = (
                    await _choose_cut(client, head)
                    if kind == CUT
                    else make_change(plan, peers[1], peers[2], joins=number % 2 == 0)
                )
                await warm_up(client, plan)
                say(f"pair {number + 1}, plan kept: {len(trace)} requests of {trace.lengths}")
                kept, *_ = await replay(client, trace, say, may_fail=True)
                say(f"pair {number + 1}, {change.name}: the same requests")
                run = _ChangedRun(admin, client, change, say)
                changed, moved, *_ = await run.replay(trace)
                pairs.append(compare_runs(change.name, kept, changed, plan.deadlines, run.span, moved))
                say(f"{pairs[-1].changed} of {pairs[-1].kept} requests in time meanwhile ({change.name})")
        return pairs, box.engine_logs().count(TOO_SLOW)


async def _start_divisible(box: DemoBox, client: AsyncClient, token: str, settings: LiveSettings, say: Say) -> str:
    """Start one box more, whose GPUs may be divided anew; its first node, when the plan has all of them. Raises
    DemoFailed."""
    say("starting a box whose GPUs may be divided anew")
    options = ["join", *node_options(settings, settings.nodes), "--phase", Phase.MIXED.value, *DIVISIBLE]
    head = (await box.start_elsewhere("divisible", options, listen=ON_LOOPBACK, token=token, inside=list)).peer
    with trio.move_on_after(PLAN_S):
        while True:
            status = await client.status()
            nodes = nodes_of_box(status, head)
            if nodes and status.plan is not None and set(nodes) <= set(status.plan.peers):
                return head
            await trio.sleep(POLL_S)
    raise DemoFailed(f"no plan with the box that may be divided anew after {PLAN_S:g} s")


async def _choose_cut(client: AsyncClient, head: str) -> CutChange:
    """Half as many nodes as the box has, or two of one. Raises DemoFailed where it is not there."""
    nodes = nodes_of_box(await client.status(), head)
    if not nodes:
        raise DemoFailed("the box that is to be divided anew is not there")
    was, replicas = len(nodes), max(1, len(nodes) // 2) if len(nodes) > 1 else 2
    return CutChange(f"{was} -> {replicas} nodes", BoxRecut(head=head, replicas=replicas, was=was))


def make_change(plan: Plan, first: str, second: str, *, joins: bool) -> GroupsChange:
    """Both boxes join, or part. Raises DemoFailed where the plan lacks one."""
    return GroupsChange("join" if joins else "part", make_groups(plan, first, second, joins=joins))


def make_groups(plan: Plan, first: str, second: str, *, joins: bool) -> Groups:
    """Both boxes as one pipeline of two halves, or each alone. Raises DemoFailed where the plan lacks one."""
    layers, tp = plan.layers, {stage.peer: stage.tp for replica in plan.replicas for stage in replica.stages}
    if first not in tp or second not in tp:
        raise DemoFailed("a box that is to change has no part in the plan")
    if joins:
        half = layers // 2
        return (
            (
                Stage(peer=first, tp=tp[first], first_layer=0, last_layer=half),
                Stage(peer=second, tp=tp[second], first_layer=half, last_layer=layers),
            ),
        )
    return tuple((Stage(peer=peer, tp=tp[peer], first_layer=0, last_layer=layers),) for peer in (first, second))


class _ChangedRun:
    """A replay in which groups change. `span`: of the change, in seconds from the first arrival that may be."""

    def __init__(self, admin: AsyncClient, client: AsyncClient, change: GroupsChange | CutChange, say: Say) -> None:
        self._admin = admin
        self._client = client
        self._wanted = change
        self._say = say
        self.span = (0.0, 0.0)

    async def replay(self, trace: Trace) -> Replayed:
        """Returns what the client saw once both are over, the requests and the change."""
        found: list[Replayed] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._change, LEAD * float(trace.arrival_s[-1]))
            found.append(await replay(self._client, trace, self._say, may_fail=True))
        return found[0]

    async def _change(self, at: float) -> None:
        began = trio.current_time()
        await trio.sleep(at)
        status = await self._client.status()
        if status.plan is None or status.coordinator is None:
            raise DemoFailed("the network has lost its plan or its coordinator")
        begun = await self._admin.regroup(self._wanted.order(status.plan.service), status.coordinator)
        self._say(f"{begun.boxes} boxes are told to change")
        with trio.move_on_after(CHANGE_S):
            while not await self._is_over():  # noqa: ASYNC110 (of other processes)
                await trio.sleep(POLL_S)
            self.span = (at, trio.current_time() - began)
            self._say(f"the change took {self.span[1] - self.span[0]:.1f} s")
            return
        raise DemoFailed(f"boxes have not changed after {CHANGE_S:g} s")

    async def _is_over(self) -> bool:
        """Whether the change is. Raises DemoFailed where it was given up."""
        status = await self._client.status()
        plan = status.plan
        if plan is None or plan.regrouping is not None:
            return False
        if self._wanted.is_over(status, plan):
            return True
        given_up = next((line for line in plan.why if "given up" in line), "")
        if given_up:
            raise DemoFailed(given_up)
        return False


def show_bench(found: RegroupBench, console: Console) -> None:
    """Print it for people."""
    console.print(f"{found.emulated}; lengths: {found.lengths}; arrivals: {found.arrivals}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns: tuple[tuple[str, Callable[[RegroupPair], str]], ...] = (
        ("change", lambda pair: pair.change),
        ("took, s", lambda pair: f"{pair.change_s:.1f}"),
        ("asked meanwhile", lambda pair: str(pair.asked)),
        ("in time: plan kept", lambda pair: str(pair.kept)),
        ("changed", lambda pair: str(pair.changed)),
        ("ratio", lambda pair: f"{pair.ratio:.3f}"),
        ("all requests", lambda pair: f"{pair.all_kept}, {pair.all_changed} of {pair.all_asked}"),
        ("moved", lambda pair: str(pair.moved)),
        ("failed", lambda pair: str(pair.failed)),
    )
    for name, _ in columns:
        table.add_column(name, justify="left" if name == "change" else "right")
    for pair in found.pairs:
        table.add_row(*(show(pair) for _, show in columns))
    console.print(table)
    if found.late:
        console.print(f"note: emulated engines fell behind their model {found.late} times: this machine was too slow")
    verdict = "" if found.ok else "  too few"
    console.print(
        f"requests in time during changes: {found.ratio:.3f} of those with the plan kept (median of pairs "
        f"{found.median_ratio:.3f}; target: {found.target:g} at least){verdict}"
    )


def print_bench(found: RegroupBench, form: str, console: Console) -> None:
    """As a table, or as JSON with each pair's ratio."""
    if form == "json":
        told = msgspec.to_builtins(found)
        for shown, pair in zip(told["pairs"], found.pairs, strict=True):
            shown["ratio"] = pair.ratio
        print(json.dumps(told))
    else:
        show_bench(found, console)
    sys.stdout.flush()
