"""A network of emulated nodes on this machine, and a trace replayed through it by the SDK. Only the
GPUs are emulated: processes, sockets, plan and KV bytes are real."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from math import isnan, nan
from typing import Final

import numpy as np
import psutil
import trio
from numpy.typing import NDArray

from ...coordinator import Phase, Plan
from ...coordinator.plan import Deadlines
from ...node.messages import Status
from ...sims.records import Outcomes, Trace
from ..client import AsyncClient
from ..demo.box import DemoBox, open_box
from ..demo.report import covers
from ..errors import ClientError, DemoFailed

POLL_S: Final = 0.3
WATCH_S: Final = 0.5  # between two looks at the plan
PLAN_S: Final = 60.0
SETTLE_S: Final = 5.0  # in which the nodes measure the links between them
WARM_UP: Final = 4  # requests for each pair of the plan, so that the links are there
WARM_UP_TOKENS: Final = (64, 8)
DEADLINE_S: Final = 600.0
WORD: Final = " x"  # one token of the bundled tokenizer, however often it is repeated
MAX_REQUESTS: Final = 64  # of an engine at once
TOO_SLOW: Final = "too slow"  # as an emulated engine says it

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLoss:
    """`at` seconds after the first request may come the node with this number, from 1 on, is lost, agent and engine:
    killed, or (`silent`) stopped."""

    number: int
    at: float
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """`nodes` with `cards` each (`1xL4`, a GPU table column) serve `model`, pinned to `phases` in
    turn; `losses` are what becomes of them meanwhile. `load_gb_s`: GB/s that their engines read
    weights at; 0: in no time."""

    nodes: int
    cards: str
    specs: str
    model: str
    codec: str
    max_batched_tokens: int
    phases: Sequence[Phase] = ()
    losses: Sequence[LiveLoss] = ()
    load_gb_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveRun:
    """What a replay has shown.

    `outcomes` by the client's clock from the trace's arrivals. `plans` with the moments they took
    effect. `lost`: nodes, with the moments they were lost. `status` at the end. `recovered`: requests
    with more than one attempt; `late`: engines behind their model. `cores` of this machine were busy
    on average, `own_cores` with this run."""

    outcomes: Outcomes
    plans: tuple[tuple[float, Plan], ...]
    status: Status
    recovered: int
    late: int
    cores: float
    own_cores: float
    lost: tuple[tuple[float, str], ...] = ()


async def run_live(settings: LiveSettings, trace: Trace, say: Say) -> LiveRun:
    """Start the network, warm it up, replay the trace, end it. Raises DemoFailed or ClientError."""
    async with open_box(watch_memory=False) as box:
        await box.start_fork_server(settings.nodes, backend="emulated")
        bootstrap = await box.start_bootstrap(settings.codec)
        async with AsyncClient(bootstrap.tokens["client"]) as client:
            plan, peers = await start_nodes(box, client, bootstrap.tokens["leader"], settings, say)
            await trio.sleep(SETTLE_S)
            say("warming up: every pair of the plan gets its link")
            await warm_up(client, plan)
            say(f"replaying {len(trace)} requests of {trace.lengths}, {trace.arrivals}")
            with _cores(box) as cores:
                async with _plans_followed(client) as plans, _losing(box, client, settings.losses, peers, say) as lost:
                    outcomes, recovered = await replay(client, trace, say)
            status = await client.status()
        return LiveRun(
            outcomes=outcomes,
            plans=tuple(plans),
            status=status,
            recovered=recovered,
            late=box.engine_logs().count(TOO_SLOW),
            cores=cores[0],
            own_cores=cores[1],
            lost=tuple(lost),
        )


def node_options(settings: LiveSettings) -> list[str]:
    """What each node joins with."""
    options = ["--emulate", settings.cards, "--emulate-specs", settings.specs, "--model", settings.model]
    options += ["--codec", settings.codec, "--emulate-load-gb-s", str(settings.load_gb_s)]
    return [*options, "--max-num-batched-tokens", str(settings.max_batched_tokens), "--max-requests", str(MAX_REQUESTS)]


async def start_nodes(
    box: DemoBox, client: AsyncClient, token: str, settings: LiveSettings, say: Say
) -> tuple[Plan, Mapping[int, str]]:
    """Start the nodes; returns the plan that all of them are in, and them by number."""
    options = node_options(settings)
    say(f"starting {settings.nodes} emulated nodes of {settings.cards} ({settings.specs}) for {settings.model}")
    with trio.move_on_after(PLAN_S):
        peers = await box.join_all(settings.nodes, token, options, settings.phases)
        while True:
            status = await client.status()
            if covers(status, frozenset(peers.values())) and status.plan is not None:
                return status.plan, peers
            await trio.sleep(POLL_S)
    raise DemoFailed(f"no plan with all {settings.nodes} nodes after {PLAN_S:g} s")


async def warm_up(client: AsyncClient, plan: Plan) -> None:
    """Some short requests for each pair of the plan."""
    prompt, output = WARM_UP_TOKENS
    async with trio.open_nursery() as nursery:
        for _ in range(WARM_UP * len(plan.pairings)):
            nursery.start_soon(_ask, client, prompt, output)
            await trio.sleep(0.05)


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


async def replay(client: AsyncClient, trace: Trace, say: Say, *, may_fail: bool = False) -> tuple[Outcomes, int]:
    """Replay the trace: what the client saw, and how many requests took several attempts. `may_fail`: one that ends
    with an error has never happened."""
    ttft, e2e = np.full(len(trace), nan), np.full(len(trace), nan)
    recovered = done = 0
    began = trio.current_time()

    async def one(row: int) -> None:
        nonlocal recovered, done
        at = began + float(trace.arrival_s[row])
        await trio.sleep_until(at)
        attempts = 0
        try:
            first, last, attempts = await _ask(client, int(trace.prompt[row]), int(trace.output[row]))
            ttft[row], e2e[row] = first - at, last - at
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
    return Outcomes(trace=trace, ttft_s=ttft, e2e_s=e2e), recovered


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
async def _losing(
    box: DemoBox, client: AsyncClient, losses: Sequence[LiveLoss], peers: Mapping[int, str], say: Say
) -> AsyncIterator[list[tuple[float, str]]]:
    """While the body runs nodes are lost; the list is of those that are."""
    began, lost = trio.current_time(), list[tuple[float, str]]()

    async def lose(loss: LiveLoss) -> None:
        await trio.sleep_until(began + loss.at)
        peer = peers[loss.number]
        adverts = {node.peer: node.advert for node in (await client.status()).nodes}
        advert, number = adverts.get(peer), signal.SIGSTOP if loss.silent else signal.SIGKILL
        engine = advert.engine if advert is not None else None
        box.signal(box.node_pid(peer), number)
        if engine is not None:
            with suppress(DemoFailed):  # it may have ended with its agent
                box.signal(engine.pid, number)
        lost.append((trio.current_time() - began, peer))
        say(f"node {loss.number} was {'stopped' if loss.silent else 'killed'}")

    async with trio.open_nursery() as nursery:
        for loss in losses:
            nursery.start_soon(lose, loss)
        yield lost
        nursery.cancel_scope.cancel()


async def _ask(client: AsyncClient, prompt: int, output: int) -> tuple[float, float, int]:
    """Ask one request of these lengths: times of first and last token, and attempts."""
    first = last = nan
    stream = client.generate(WORD * prompt, stream=True, max_tokens=output, deadline_s=DEADLINE_S)
    async with stream:
        async for delta in stream:
            if delta.tokens:
                last = trio.current_time()
                first = last if isnan(first) else first
        figures = stream.result.figures
    if figures is None or (figures.prompt_tokens, figures.completion_tokens) != (prompt, output):
        raise DemoFailed(f"a request of {prompt} + {output} tokens was answered with {figures}")
    return first, last, figures.attempts


@contextmanager
def _cores(box: DemoBox) -> Iterator[list[float]]:
    """Cores busy during the body, and those of this run: the list is filled afterwards."""
    found: list[float] = []
    before, began = box.cpu_seconds(), trio.current_time()
    psutil.cpu_percent()
    yield found
    spent = sum(seconds - before.get(pid, 0.0) for pid, seconds in box.cpu_seconds().items())
    found += psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1), spent / (trio.current_time() - began)
