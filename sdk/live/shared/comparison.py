"""Three services on eight emulated boxes, two on each, live and by the simulator of `docs/results/sharing.md`.

    found = run_shared_comparison(SharedRun(), say)
    found.figures                                   # normalized latency, TTFT and TPOT of both

Each box is started with the models of two services, whose engines step one at a time in one process. A client asks all
services; the same requests are then served by `Fleet`, whose engines take turns by the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, NamedTuple

import msgspec
import numpy as np
import trio
from numpy.typing import NDArray

from ....coordinator.costs.gpus import Specs
from ....coordinator.costs.step_times import chunk_pairs
from ....coordinator.placement.values import GpuGroup, PlacementBox, PlacementProblem, PlacementService
from ....coordinator.planning.model.cluster_file import card_link_gbps
from ....coordinator.sharing.orders import DOUBLING_BUDGET
from ....node.engine.emulated.model import emulated_model, parse_cards
from ....sims.placement.fleet import ENGINE, Fleet, host_group, period_of
from ....sims.placement.routing import REPORT_S, AsRouted, FewestRequests, FleetRouting, GatewayRouting
from ....sims.records import Outcomes, Trace
from ...client import AsyncClient
from ...demo.box import ON_LOOPBACK, DemoBox, open_box
from ...errors import DemoFailed
from ..network import TOO_SLOW, Say, ask, measure_cores, replay

WAIT_S: Final = 180.0
POLL_S: Final = 1.0
SETTLE_S: Final = 5.0
PLANS_S: Final = 20.0  # between two looks at the plans
WARM_UP: Final = 3  # requests for each node of a service, at once
LONE: Final = 9  # requests, one after the other, that tell what messages take
SHORT: Final = (64, 4)  # tokens of both
SIMULATED: Final = 9
"""Runs by gateways' code. Which box a request goes to hangs on when the others' last reports came, and on which of
boxes as good is the first of a service's."""

FIGURES: Final = ("normalized latency", "TTFT", "TPOT")
ALL: Final = "all"


class AskedModel(NamedTuple):
    """A model that clients ask for: its part of all requests, and geometric means of its lengths in tokens."""

    model: str
    share: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """What is run. `pairs`: services, by number, of each box in turn. `rate`: requests per second of all services
    together; the first `lead` seconds fill the network and do not count."""

    services: Sequence[AskedModel] = (
        AskedModel("llama-7b", 0.5, 96, 40),
        AskedModel("qwen2-7b", 0.3, 320, 16),
        AskedModel("opt-6.7b", 0.2, 128, 64),
    )
    pairs: Sequence[tuple[int, int]] = ((0, 1), (0, 2), (1, 2), (0, 1), (0, 2), (0, 1), (0, 2), (1, 2))
    cards: str = "1xA40/12"
    kv_cache_mib: int = 8192
    rate: float = 0.4
    seconds: float = 1800.0
    lead: float = 90.0
    spread: float = 0.5
    seed: int = 0

    def traces(self) -> dict[int, Trace]:
        """By service: Poisson arrivals, log-normal lengths (`spread`: standard deviation of their logarithms)."""
        rng = np.random.default_rng(self.seed)
        found = {}
        for number, service in enumerate(self.services):
            count = round(self.rate * service.share * self.seconds)
            arrivals = np.sort(rng.uniform(0.0, self.seconds, count))
            prompt, output = (
                np.maximum(2, np.rint(mean * np.exp(self.spread * rng.standard_normal(count)))).astype(np.int64)
                for mean in (service.prompt, service.output)
            )
            found[number] = Trace(
                ids=np.arange(count), arrival_s=arrivals, prompt=prompt, output=output, lengths="log-normal",
                arrivals="Poisson",
            )  # fmt: skip
        return found

    def problem(self, traces: Mapping[int, Trace]) -> PlacementProblem:
        """Boxes, services and requests, for the simulator."""
        cards = parse_cards(self.cards, Specs.DENSE.value)
        box = PlacementBox(id="box", gpu=cards.gpu, gpus=cards.count, link_gbps=card_link_gbps(cards.gpu))
        services = [
            PlacementService(name=each.model, model=emulated_model(each.model, cards).emulation.model)
            for each in self.services
        ]
        return PlacementProblem(boxes=[box] * len(self.pairs), services=services, period=period_of(traces))


class SharedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Of one service, or of all. `simulated`: each request sent by gateways' code, mean of runs whose reports come at
    other moments, and whose boxes are in other orders; `spread`: standard deviation over mean of these; `fewest`: to
    the box that has the fewest, `as_routed`: as it went live. Seconds, and times that requests take alone."""

    service: str
    figure: str
    simulated: float
    spread: float
    fewest: float
    as_routed: float
    live: float


class SharedComparison(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run. `message_s`: what lies between client and engine, beside steps, of a request. `step_tokens`: what
    the plans have a step compute at most."""

    requests: int
    boxes: int
    cards: str
    rate: float
    message_s: float
    step_tokens: int = 0  # 0: not told, of runs before it was
    cores: float
    own_cores: float
    late: int
    retried: int
    figures: tuple[SharedFigure, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveShared:
    """What the client saw, by service. `where`: the box of each request, by its service and row. `step_tokens`: as in
    most plans that were seen."""

    outcomes: Mapping[int, Outcomes]
    where: Mapping[tuple[int, int], int]
    retried: int
    message_s: float
    step_tokens: int
    late: int
    cores: float
    own_cores: float


def run_shared_comparison(run: SharedRun, say: Say) -> SharedComparison:
    """Live, then simulated. Raises DemoFailed or ClientError."""
    traces = run.traces()
    problem = run.problem(traces)
    live = trio.run(_run_live, run, traces, problem, say)
    say("simulating the same requests")
    return SharedComparison(
        requests=sum(map(len, traces.values())),
        boxes=len(run.pairs),
        cards=run.cards,
        rate=run.rate,
        message_s=live.message_s,
        step_tokens=live.step_tokens,
        cores=live.cores,
        own_cores=live.own_cores,
        late=live.late,
        retried=live.retried,
        figures=_compare(run, problem, traces, live),
    )


def _compare(
    run: SharedRun, problem: PlacementProblem, traces: Mapping[int, Trace], live: LiveShared
) -> tuple[SharedFigure, ...]:
    def simulate(routing: FleetRouting) -> list[float]:
        return summarize(run, problem, serve(run, problem, traces, routing, live.step_tokens), live.message_s)

    ways = [GatewayRouting(first_s=REPORT_S * each / SIMULATED, seed=each) for each in range(SIMULATED)]
    own = np.array([simulate(each) for each in ways])
    rows = zip(
        [(name, figure) for name in (ALL, *(each.model for each in run.services)) for figure in FIGURES],
        own.mean(axis=0),
        own.std(axis=0),
        simulate(FewestRequests()),
        simulate(AsRouted(live.where)),
        summarize(run, problem, live.outcomes, 0.0),
        strict=True,
    )
    return tuple(
        SharedFigure(
            service=service,
            figure=figure,
            simulated=float(mean),
            spread=float(deviation / mean),
            fewest=fewest,
            as_routed=as_routed,
            live=seen,
        )
        for (service, figure), mean, deviation, fewest, as_routed, seen in rows
    )


def serve(
    run: SharedRun,
    problem: PlacementProblem,
    traces: Mapping[int, Trace],
    routing: FleetRouting,
    step_tokens: int = ENGINE.max_batched_tokens,
) -> dict[int, Outcomes]:
    """By the simulator."""
    fleet, settings = Fleet(traces, routing), replace(ENGINE, max_batched_tokens=step_tokens)
    for number, pair in enumerate(run.pairs):
        fleet.add(number, host_group(problem, GpuGroup(number, 1, tuple(sorted(pair))), DOUBLING_BUDGET, settings))
    return fleet.run()


def summarize(
    run: SharedRun, problem: PlacementProblem, outcomes: Mapping[int, Outcomes], message_s: float
) -> list[float]:
    """Means of FIGURES, of all services and of each, without those that came in the lead."""
    rows: list[NDArray[np.float64]] = []
    for number, found in sorted(outcomes.items()):
        kept = found.trace.arrival_s >= run.lead
        normalized = (found.e2e_s + message_s) / problem.usual_s[number]
        tpot = np.where(found.trace.output > 1, found.tpot_s, np.nan)
        rows.append(np.stack([normalized, found.ttft_s + message_s, tpot])[:, kept])
    return [float(value) for each in (np.concatenate(rows, axis=1), *rows) for value in np.nanmean(each, axis=1)]


async def _run_live(run: SharedRun, traces: Mapping[int, Trace], problem: PlacementProblem, say: Say) -> LiveShared:
    async with open_box(watch_memory=False) as box:
        say(f"starting {len(run.pairs)} boxes of {run.cards} with two services each")
        first = await box.start_elsewhere("0", ["bootstrap"], listen=ON_LOOPBACK, inside=list)
        async with trio.open_nursery() as nursery:
            for number in range(len(run.pairs)):
                nursery.start_soon(_join, box, run, number, first.tokens["leader"])
        async with AsyncClient(first.tokens["client"]) as client:
            boxes = await _wait_ready(client, run)
            say("warming up")
            async with trio.open_nursery() as nursery:
                for number, service in enumerate(run.services):
                    for _ in range(WARM_UP * sum(number in pair for pair in run.pairs)):
                        nursery.start_soon(_ask_short, client, service)
                        await trio.sleep(0.1)
            await trio.sleep(SETTLE_S)
            message_s = await _measure_messages(client, run, problem)
            say(f"messages take {message_s * 1e3:.1f} ms; {sum(map(len, traces.values()))} requests")
            outcomes, where, retried = dict[int, Outcomes](), dict[tuple[int, int], int](), 0
            step_tokens = Counter[int]()

            async def ask_service(number: int) -> None:
                nonlocal retried
                found = await replay(client, traces[number], say, service=_id_of(run.services[number]))
                outcomes[number] = found.outcomes
                retried += found.recovered
                where.update({(number, row): boxes[peer] for row, peer in enumerate(found.nodes)})
                check_boxes(run, where)

            with measure_cores(box) as cores:
                async with _counting_step_tokens(client, step_tokens), trio.open_nursery() as nursery:
                    for number in traces:
                        nursery.start_soon(ask_service, number)
        late = box.engine_logs().count(TOO_SLOW)
        return LiveShared(
            outcomes=outcomes, where=where, retried=retried, message_s=message_s,
            step_tokens=step_tokens.most_common(1)[0][0], late=late, cores=cores[0], own_cores=cores[1],
        )  # fmt: skip


@asynccontextmanager
async def _counting_step_tokens(client: AsyncClient, found: Counter[int]) -> AsyncIterator[None]:
    """By how many replicas have them in the plans that are looked at now and then."""

    async def look() -> None:
        while True:
            status = await client.status()
            plans = [plan for plan in (status.plan, *status.other_plans) if plan is not None]
            limits = (replica.step_tokens for plan in plans for replica in plan.replicas)
            found.update(limit or ENGINE.max_batched_tokens for limit in limits)
            await trio.sleep(PLANS_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        yield
        nursery.cancel_scope.cancel()


async def _join(box: DemoBox, run: SharedRun, number: int, token: str) -> None:
    models = [option for each in run.pairs[number] for option in ("--model", run.services[each].model)]
    options = ["--emulate", run.cards, "--kv-cache-mib", str(run.kv_cache_mib), "--phase", "mixed", "--codec", "kv4"]
    await box.start_elsewhere(
        str(number + 1), ["join", *models, *options], listen=ON_LOOPBACK, token=token, inside=list
    )


async def _wait_ready(client: AsyncClient, run: SharedRun) -> dict[str, int]:
    """Until every service is served by all of its nodes: the box of each, by its peer. Boxes are alike, so those of one
    pair are numbered as they come. Raises DemoFailed."""
    wanted = 2 * len(run.pairs)
    with trio.move_on_after(WAIT_S):
        while True:
            status = await client.status()
            plans = [plan for plan in (status.plan, *status.other_plans) if plan is not None]
            planned = {stage.peer for plan in plans for replica in plan.replicas for stage in replica.stages}
            hosted: dict[int, list[tuple[str, str]]] = {}
            for node in status.nodes:
                advert = node.advert
                if (
                    advert is not None
                    and advert.model is not None
                    and advert.engine is not None
                    and node.peer in planned
                ):
                    hosted.setdefault(advert.engine.pid, []).append((advert.model.service, node.peer))
            if sum(map(len, hosted.values())) == wanted:
                return number_boxes(run, hosted.values())
            await trio.sleep(POLL_S)
    raise DemoFailed(f"not all {wanted} nodes serve after {WAIT_S:g} s")


def number_boxes(run: SharedRun, hosted: Iterable[Sequence[tuple[str, str]]]) -> dict[str, int]:
    """The number of each node's box, by its peer: `hosted` has the services and peers of each engine process. Raises
    DemoFailed."""
    left, found = dict(enumerate(run.pairs)), dict[str, int]()
    for nodes in hosted:
        names = {service for service, _ in nodes}
        number = next((each for each, pair in left.items() if {_id_of(run.services[n]) for n in pair} == names), None)
        if number is None:
            raise DemoFailed(f"one engine process has {', '.join(sorted(names))}, which no box was started with")
        del left[number]
        found |= {peer: number for _, peer in nodes}
    return found


def check_boxes(run: SharedRun, where: Mapping[tuple[int, int], int]) -> None:
    """Every request was answered where its service is. Raises DemoFailed."""
    for (number, row), box in where.items():
        if number not in run.pairs[box]:
            raise DemoFailed(f"request {row + 1} to {run.services[number].model} was answered on a box without it")


def _id_of(service: AskedModel) -> str:
    return f"{service.model}-emulated"


async def _ask_short(client: AsyncClient, service: AskedModel) -> float:
    """Seconds to the first token."""
    asked = trio.current_time()
    first, _, _ = await ask(client, *SHORT, service=_id_of(service))
    return first - asked


async def _measure_messages(client: AsyncClient, run: SharedRun, problem: PlacementProblem) -> float:
    """What is left of lone requests' time to the first token, beside computing their prompts: the median."""
    left, kind = [], problem.boxes[0].kind
    for turn in range(LONE):
        number = turn % len(run.services)
        step_s = problem.times(kind, 1, number).prefill_s(SHORT[0], chunk_pairs(0, SHORT[0]))
        left.append(await _ask_short(client, run.services[number]) - step_s)
    return max(0.0, median(left))
