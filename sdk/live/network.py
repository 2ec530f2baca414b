"""A network of emulated nodes on this machine, and a trace replayed through it by the SDK. Only the
GPUs are emulated: processes, sockets, plan and KV bytes are real."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Final, NamedTuple

import numpy as np
import psutil
import trio
from numpy.typing import NDArray

from ...coordinator import Plan
from ...coordinator.plan import Deadlines
from ...node.messages import RequestFigures, Status
from ...sims.records import Outcomes, Trace
from ..client import AsyncClient
from ..demo.box import DemoBox, open_box
from ..demo.report import covers
from ..errors import ClientError, DemoFailed
from ..requests import new_request_id
from .nodes import LiveNodes, LiveSettings, open_places
from .schedule import ScheduledFault

POLL_S: Final = 0.3
WATCH_S: Final = 0.5  # between two looks at the plan
PLAN_S: Final = 60.0
SETTLE_S: Final = 5.0  # in which the nodes measure the links between them
WARM_UP: Final = 4  # requests for each pair of the plan, so that the links are there
WARM_UP_TOKENS: Final = (64, 8)
LONE: Final = 8  # requests, one after the other, that tell what messages take here
LONE_TOKENS: Final = (256, 4)
DEADLINE_S: Final = 600.0
WORD: Final = " x"  # one token of the bundled tokenizer, however often it is repeated
TOO_SLOW: Final = "too slow"  # as an emulated engine says it

Say = Callable[[str], None]
MakeTrace = Callable[[Status], Trace]
"""The requests of a run, from the network as it stands before them."""


@dataclass(frozen=True, slots=True)
class Happened:
    """A fault of the schedule as it was carried out: from when to when, in seconds from the first arrival that may be.
    `peers`: the nodes."""

    fault: ScheduledFault
    began: float
    ended: float
    peers: tuple[str, ...]


class LoneRequest(NamedTuple):
    """One that the network served when it had no other: seconds to its first token, and the nodes."""

    prompt: int
    ttft_s: float
    prefill: str | None
    decode: str


class Replayed(NamedTuple):
    """What the client saw, how many requests took several attempts, the nodes that wrote the answers, the ids of those
    that were answered, and by row the nodes that prefilled and decoded those that took one attempt."""

    outcomes: Outcomes
    recovered: int
    nodes: tuple[str, ...]
    ids: tuple[str, ...]
    served: Mapping[int, tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveRun:
    """What a replay has shown.

    `outcomes` by the client's clock from the trace's arrivals. `plans` with the moments they took effect. `numbers`:
    the nodes' peers by their numbers. `before`: the network's status at the beginning, when it served `lone` requests.
    `gateways`: the nodes that took the client's requests, the one with the most first. `served`: by row, the nodes that
    prefilled and decoded a request at its only attempt. `recovered`: requests with more than one attempt; `late`:
    engines behind their model. `cores` of this machine were busy on average, `own_cores` with this run."""

    outcomes: Outcomes
    plans: tuple[tuple[float, Plan], ...]
    before: Status
    numbers: Mapping[int, str]
    recovered: int
    late: int
    cores: float
    own_cores: float
    happened: tuple[Happened, ...] = ()
    lone: tuple[LoneRequest, ...] = ()
    gateways: tuple[str, ...] = ()
    served: Mapping[int, tuple[str, str]] = field(default_factory=dict)


async def run_live(settings: LiveSettings, make_trace: MakeTrace, say: Say) -> LiveRun:
    """Start the network, warm it up, replay the trace, end it. Raises DemoFailed or ClientError."""
    with open_places(settings) as links:
        async with open_box(watch_memory=False) as box:
            nodes = LiveNodes(box, settings, links)
            say(f"starting {settings.describe()} for {settings.model}, deadlines {settings.slo}")
            await nodes.start()
            async with AsyncClient(nodes.bootstrap.tokens["client"]) as client:
                plan = await wait_for_plan(client, nodes)
                say("warming up: every pair of the plan gets its link")
                await warm_up(client, plan)
                await trio.sleep(SETTLE_S)
                lone = [await ask_alone(client) for _ in range(LONE)]
                before = await client.status()
                trace = make_trace(before)
                say(f"replaying {len(trace)} requests of {trace.lengths}, {trace.arrivals}")
                with measure_cores(box) as cores:
                    async with _plans_followed(client) as plans, _harming(nodes, say) as happened:
                        replayed = await replay(client, trace, say, may_fail=bool(settings.schedule))
                gateways = await find_gateways(client, replayed.ids)
            return LiveRun(
                outcomes=replayed.outcomes,
                plans=tuple(plans),
                before=before,
                numbers=dict(nodes.peers),
                recovered=replayed.recovered,
                late=box.engine_logs().count(TOO_SLOW),
                cores=cores[0],
                own_cores=cores[1],
                happened=tuple(happened),
                lone=tuple(lone),
                gateways=gateways,
                served=replayed.served,
            )


async def wait_for_plan(client: AsyncClient, nodes: LiveNodes) -> Plan:
    """The plan that all nodes are in. Raises DemoFailed."""
    with trio.move_on_after(PLAN_S):
        while True:
            status = await client.status()
            if covers(status, frozenset(nodes.peers.values())) and status.plan is not None:
                return status.plan
            await trio.sleep(POLL_S)
    raise DemoFailed(f"no plan with all {len(nodes.peers)} nodes after {PLAN_S:g} s")


async def warm_up(client: AsyncClient, plan: Plan) -> None:
    """Some short requests for each pair of the plan."""
    prompt, output = WARM_UP_TOKENS
    async with trio.open_nursery() as nursery:
        for _ in range(WARM_UP * len(plan.pairings)):
            nursery.start_soon(ask, client, prompt, output)
            await trio.sleep(0.05)


async def ask_alone(client: AsyncClient) -> LoneRequest:
    """Ask one request, while there is no other."""
    prompt, output = LONE_TOKENS
    asked = trio.current_time()
    first, _, figures = await ask(client, prompt, output)
    return LoneRequest(prompt, first - asked, figures.prefill_node, figures.decode_node)


async def find_gateways(client: AsyncClient, requests: Sequence[str]) -> tuple[str, ...]:
    """The nodes that took these requests, as far as they still know of them; the one with the most first."""
    found = Counter[str]()
    for request in requests:
        trace = await client.trace(request)
        found[trace.gateway if trace is not None else ""] += 1
    return tuple(gateway for gateway, _ in found.most_common() if gateway)


def find_in_time(outcomes: Outcomes, deadlines: Deadlines) -> NDArray[np.bool_]:
    """Which requests have met all deadlines; of 0 there is none."""
    in_time = outcomes.completed
    for limit, values in (
        (deadlines.ttft_s, outcomes.ttft_s),
        (deadlines.tpot_s, outcomes.tpot_s),
        (deadlines.e2e_s, outcomes.e2e_s),
    ):
        if limit:
            in_time = in_time & (np.nan_to_num(values) <= limit)
    return in_time


async def replay(
    client: AsyncClient, trace: Trace, say: Say, *, may_fail: bool = False, service: str | None = None
) -> Replayed:
    """Replay the trace, where there are several services to one. `may_fail`: one that ends with an error has never
    happened."""
    nodes, ids, served = [""] * len(trace), list[str](), dict[int, tuple[str, str]]()
    ttft, e2e = np.full(len(trace), nan), np.full(len(trace), nan)
    recovered = done = 0
    began = trio.current_time()

    async def one(row: int) -> None:
        nonlocal recovered, done
        at = began + float(trace.arrival_s[row])
        await trio.sleep_until(at)
        attempts = 0
        try:
            first, last, figures = await ask(client, int(trace.prompt[row]), int(trace.output[row]), service)
            ttft[row], e2e[row], attempts = first - at, last - at, figures.attempts
            nodes[row] = figures.decode_node
            ids.append(figures.id)
            if attempts == 1:
                served[row] = figures.prefill_node or figures.decode_node, figures.decode_node
        except ClientError as error:
            if not may_fail:
                raise
            say(f"request {row + 1} was not answered: {error}")
        recovered, done = recovered + (attempts > 1), done + 1
        if done % 20 == 0 or done == len(trace):
            say(f"{done} of {len(trace)} requests have ended")

    async with trio.open_nursery() as nursery:
        for row in range(len(trace)):
            nursery.start_soon(one, row)
    return Replayed(Outcomes(trace=trace, ttft_s=ttft, e2e_s=e2e), recovered, tuple(nodes), tuple(ids), served)


@asynccontextmanager
async def _plans_followed(client: AsyncClient) -> AsyncIterator[list[tuple[float, Plan]]]:
    """The plan of now, and those that replace it while the body runs, with the seconds since then."""
    began = trio.current_time()
    status = await client.status()
    if status.plan is None:
        raise DemoFailed("the network has lost its plan")
    plans = [(0.0, status.plan)]

    async def watch() -> None:
        while True:
            await trio.sleep(WATCH_S)
            now = trio.current_time() - began
            plan = (await client.status()).plan
            if plan is not None and plan.number != plans[-1][1].number:
                plans.append((now, plan))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        yield plans
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _harming(nodes: LiveNodes, say: Say) -> AsyncIterator[list[Happened]]:
    """While the body runs the schedule is carried out; the list is of what has happened."""
    began, happened = trio.current_time(), list[Happened]()

    async def harm(fault: ScheduledFault) -> None:
        await trio.sleep_until(began + fault.at)
        say(str(fault))
        started = trio.current_time() - began
        await nodes.carry_out(fault)
        peers = tuple(nodes.peers[number] for number in fault.nodes)
        happened.append(Happened(fault, started, trio.current_time() - began, peers))

    async with trio.open_nursery() as nursery:
        for fault in nodes.schedule:
            nursery.start_soon(harm, fault)
        yield happened
        nursery.cancel_scope.cancel()


async def ask(
    client: AsyncClient, prompt: int, output: int, service: str | None = None
) -> tuple[float, float, RequestFigures]:
    """Ask one request of these lengths: times of first and last token, and the gateway's figures."""
    first = last = nan
    # All prompts begin alike, and none is to be found in a cache: what is simulated has none.
    salt = new_request_id()
    stream = client.generate(
        WORD * prompt, stream=True, max_tokens=output, deadline_s=DEADLINE_S, cache_salt=salt, service=service
    )
    async with stream:
        async for delta in stream:
            if delta.tokens:
                last = trio.current_time()
                first = last if isnan(first) else first
        figures = stream.result.figures
    if figures is None or (figures.prompt_tokens, figures.completion_tokens) != (prompt, output):
        raise DemoFailed(f"a request of {prompt} + {output} tokens was answered with {figures}")
    return first, last, figures


@contextmanager
def measure_cores(box: DemoBox) -> Iterator[list[float]]:
    """Cores busy during the body, and those of this run: the list is filled afterwards."""
    found: list[float] = []
    before, began = box.cpu_seconds(), trio.current_time()
    psutil.cpu_percent()
    yield found
    spent = sum(seconds - before.get(pid, 0.0) for pid, seconds in box.cpu_seconds().items())
    found += psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1), spent / (trio.current_time() - began)
