"""Whose turn it is in a process of two models: `python -m p2pserve.node.engine.bench --orders-only`.

SeaLLM's doubling budget beside first come, first served (`LIVE_ORDERS`), each in a process of its own that holds the
same two bundled models. Both get the same requests at the same moments, one process after the other, so that a busy
machine falls on both; which goes first changes from pair to pair. One model is asked for short answers and the other
for long ones, for as much of the engine's time each; arrivals are Poisson. `load` is that time over the time there is,
if requests ran one after the other: batches make more than 1 possible.

- order_latency_ratio: normalized latency (SeaLLM, section 6.1) under first come, first served over that under the
  doubling budget, at each load. That of a request is its latency over the mean time that requests of its service take
  alone, measured before each pair; of a run it is the mean over the requests of all services.
- order_p99_ratio: the same of the 99th percentile of a run's normalized latencies. The pairs also have that of the
  latencies in seconds, which is the long answers', and each service's.

Figures are medians over the pairs; before them both engines learn what requests of theirs take.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Final, NamedTuple

import msgspec
import trio

from ....coordinator.sharing.orders import DOUBLING_BUDGET, FCFS
from ...models import open_model
from .. import protocol
from ..agent_side.fork_server import open_fork_server
from ..settings import Sharing
from ..trials.trial import TrialEngine, open_trial

LOADS: Final = (0.5, 1.0, 1.5)
SECONDS: Final = 20.0  # of arrivals in each run
ALONE: Final = 8  # requests of each service before each pair
KV_CACHE_MIB: Final = 64
ORDERS: Final = (DOUBLING_BUDGET, FCFS)
SPREAD: Final = 0.6  # of the logarithm of an answer's length


class AskedService(NamedTuple):
    """How long its prompts are, least and most, and its answers, on average and most."""

    prompt: tuple[int, int]
    answer: float
    most: int


SERVICES: Final = {
    "bundled-prose": AskedService(prompt=(16, 96), answer=24.0, most=96),
    "bundled": AskedService(prompt=(64, 512), answer=160.0, most=480),
}


class ShapedRequest(NamedTuple):
    """A request: when it comes, in seconds from the first moment, to which service, and how long it is."""

    at: float
    service: str
    prompt: tuple[int, ...]
    answer: int


class ServedRequest(NamedTuple):
    """How long one took, from when it was to come."""

    service: str
    latency_s: float
    ttft_s: float


class OrderFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run, and of each service in it. `p99`: of normalized latencies, `p99_s`: of seconds."""

    requests: int
    normalized: float
    p99: float
    p99_s: float
    service_normalized: dict[str, float]
    service_p99_s: dict[str, float]
    service_ttft_s: dict[str, float]


class OrdersPair(msgspec.Struct, frozen=True, kw_only=True):
    """The same requests under each order; `alone_s` of each service before."""

    load: float
    alone_s: dict[str, float]
    runs: dict[str, OrderFigures]


class OrdersReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures, by load, and what they were computed from."""

    order_latency_ratio: dict[str, float]
    order_p99_ratio: dict[str, float]
    order_pairs: list[OrdersPair]

    def describe(self) -> str:
        """For people."""
        lines = [f"load  order  normalized    P99  P99 s  of each service (P99 s), medians of {self._count()} pairs"]
        for load in self.order_latency_ratio:
            pairs = [pair for pair in self.order_pairs if f"{pair.load:g}" == load]
            for order in ORDERS:
                runs = [pair.runs[order] for pair in pairs]
                asked = [service for service in SERVICES if all(service in run.service_p99_s for run in runs)]
                each = ", ".join(
                    f"{service} {statistics.median(run.service_normalized[service] for run in runs):.2f} "
                    f"({statistics.median(run.service_p99_s[service] for run in runs):.2f} s)"
                    for service in asked
                )
                normalized, p99, p99_s = (
                    statistics.median(getattr(run, name) for run in runs) for name in ("normalized", "p99", "p99_s")
                )
                lines.append(f"{load:4}  {order:5}  {normalized:10.2f}  {p99:5.1f}  {p99_s:5.2f}  {each}")
            latency, p99 = self.order_latency_ratio[load], self.order_p99_ratio[load]
            lines.append(f"      {FCFS} over {DOUBLING_BUDGET}: {latency:.2f} times the latency, {p99:.2f} the P99")
        return "\n".join(lines)

    def _count(self) -> int:
        return len(self.order_pairs) // max(1, len(self.order_latency_ratio))


def measure_orders(repeats: int, config: protocol.EngineConfig) -> OrdersReport:
    """Start the engines and measure. Raises ModelError, EngineError or OSError."""
    return trio.run(_run, repeats, config)


def report_orders(pairs: list[OrdersPair]) -> OrdersReport:
    """The medians."""
    ratios: dict[str, dict[str, float]] = {"normalized": {}, "p99": {}}
    for load in sorted({pair.load for pair in pairs}):
        for name, found in ratios.items():
            found[f"{load:g}"] = statistics.median(
                getattr(pair.runs[FCFS], name) / getattr(pair.runs[DOUBLING_BUDGET], name)
                for pair in pairs
                if pair.load == load
            )
    return OrdersReport(order_latency_ratio=ratios["normalized"], order_p99_ratio=ratios["p99"], order_pairs=pairs)


def draw_requests(rng: random.Random, rates: Mapping[str, float], seconds: float) -> list[ShapedRequest]:
    """Poisson arrivals of each service, in order."""
    found = []
    for service, rate in rates.items():
        at = rng.expovariate(rate)
        while at < seconds:
            found.append(_shape(rng, service, at))
            at += rng.expovariate(rate)
    return sorted(found)


def figures_of(served: list[ServedRequest], alone_s: Mapping[str, float]) -> OrderFigures:
    """Of one run."""
    normalized = [each.latency_s / alone_s[each.service] for each in served]
    by_service: dict[str, list[ServedRequest]] = {}
    for each in served:
        by_service.setdefault(each.service, []).append(each)
    return OrderFigures(
        requests=len(served),
        normalized=statistics.fmean(normalized),
        p99=_p99(normalized),
        p99_s=_p99([each.latency_s for each in served]),
        service_normalized={
            service: statistics.fmean(each.latency_s for each in found) / alone_s[service]
            for service, found in by_service.items()
        },
        service_p99_s={service: _p99([each.latency_s for each in found]) for service, found in by_service.items()},
        service_ttft_s={
            service: statistics.fmean(each.ttft_s for each in found) for service, found in by_service.items()
        },
    )


def _p99(seconds: list[float]) -> float:
    """The least that 99 of 100 are not above."""
    ranked = sorted(seconds)
    return ranked[-(-99 * len(ranked) // 100) - 1]


def _shape(rng: random.Random, service: str, at: float) -> ShapedRequest:
    asked = SERVICES[service]
    prompt = tuple(rng.randrange(1, 2000) for _ in range(rng.randint(*asked.prompt)))
    length = rng.lognormvariate(math.log(asked.answer) - SPREAD**2 / 2, SPREAD)
    return ShapedRequest(at, service, prompt, max(1, min(asked.most, round(length))))


async def _run(repeats: int, config: protocol.EngineConfig) -> OrdersReport:
    async with AsyncExitStack() as stack:
        engines: dict[str, dict[str, TrialEngine]] = {}
        for order in ORDERS:
            server = await stack.enter_async_context(open_fork_server(log=None, threads=config.threads))
            trial = await stack.enter_async_context(open_trial(server))
            engines[order] = {
                service: await trial.start(
                    msgspec.structs.replace(
                        config,
                        model=str(open_model(service).fetch()),
                        kv_cache_mib=KV_CACHE_MIB,
                        sharing=Sharing(service=service, order=order),
                    )
                )
                for service in SERVICES
            }
        rng = random.Random(1)
        for order in ORDERS:
            await _time_alone(engines[order], rng)  # what vLLM does at its first requests; profiles are learned
        alone_s = await _time_alone(engines[DOUBLING_BUDGET], rng)
        loads = {load: {service: load / len(SERVICES) / alone_s[service] for service in SERVICES} for load in LOADS}
        pairs = []
        for number in range(repeats):
            for load, rates in loads.items():
                requests = draw_requests(rng, rates, SECONDS)
                alone_s = await _time_alone(engines[ORDERS[number % 2]], rng)
                runs = {}
                for order in ORDERS if number % 2 else reversed(ORDERS):
                    runs[order] = figures_of(await _serve(engines[order], requests), alone_s)
                pairs.append(OrdersPair(load=load, alone_s=alone_s, runs=runs))
        return report_orders(pairs)


async def _time_alone(engines: Mapping[str, TrialEngine], rng: random.Random) -> dict[str, float]:
    """Mean seconds of each service's requests, one after the other."""
    found = {}
    for service, engine in engines.items():
        seconds = []
        for _ in range(ALONE):
            request = _shape(rng, service, 0.0)
            began = time.monotonic()
            seconds.append((await engine.generate(request.prompt, request.answer)).last_at - began)
        found[service] = statistics.fmean(seconds)
    return found


async def _serve(engines: Mapping[str, TrialEngine], requests: list[ShapedRequest]) -> list[ServedRequest]:
    """Ask for each at its moment, until all are answered."""
    began, served = time.monotonic(), []

    async def ask(request: ShapedRequest) -> None:
        await trio.sleep(max(0.0, began + request.at - time.monotonic()))
        answer = await engines[request.service].generate(request.prompt, request.answer)
        due = began + request.at
        served.append(ServedRequest(request.service, answer.last_at - due, answer.first_at - due))

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(ask, request)
    return served
