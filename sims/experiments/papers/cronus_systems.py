"""The systems that Cronus is compared with, on its pairs of cards: each as the paper sets it up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....coordinator.costs.gpus import GpuSpec, Specs, gpu_table
from ....coordinator.costs.model_shape import ModelShape, model_shape
from ....coordinator.costs.replica import StageHardware, kv_capacity_tokens, replica_times
from ....coordinator.costs.step_times import StepTimes
from ....coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from ....coordinator.planning.model.cluster import Box, Cluster
from ....coordinator.planning.model.workload import Service, Slo, Workload
from ....coordinator.routing.interface import RoutingSettings
from ...engine.engine import Engine
from ...engine.sequence import Sequence as EngineSequence
from ...engine.values import SignalKind, SimEngineSettings, StepRecord
from ...records import Trace
from ...scenario import ServiceRun, SimAdmission, SimSettings
from ...world import simulate
from ..setting import lengths

Floats = NDArray[np.float64]

HIGH: Final = "A100-SXM4-80GB"
LINK_GBPS: Final = 100.0
LINK_RTT_S: Final = 10e-6
"""Of InfiniBand between two nodes."""

WHOLE_STEP_TOKENS: Final = 8192
"""Replicas that only prefill compute a prompt at once. All of a context of LLaMA3-8B, which is what vLLM's steps take
without chunked prefill."""

WEIGHTS: Final = (3.0, 1.0)
QUEUES: Final = (3, 1)
"""DP's shares of the requests, and how many may wait at each card."""

SEQUENCES: Final = 255
"""vLLM's 256, but one: a batch of 256 tokens has to leave one for prompts."""

ALONE_TOKENS: Final = SEQUENCES + 1
"""Of a step without chunks that takes one prompt, of any length; several only where they are as short together. Cronus'
partial-prefill instance holds two requests, one of which waits."""


@dataclass(frozen=True, slots=True)
class PairOfCards:
    """A model on an A100 and a lesser card; `layers`: of each under PP, as the paper splits them."""

    low: str
    model: str
    layers: tuple[int, int]

    @property
    def name(self) -> str:
        """As the paper has it."""
        return f"A100+{self.low.partition('-')[0]} {self.model}"


PAIRS: Final = (
    PairOfCards("A10-24GB", "llama3-8b", (23, 9)),
    PairOfCards("A10-24GB", "qwen2-7b", (20, 8)),
    PairOfCards("A30-24GB", "llama3-8b", (21, 11)),
    PairOfCards("A30-24GB", "qwen2-7b", (18, 10)),
)


class ServedTrace(NamedTuple):
    """What became of a trace: seconds to each request's first token, seconds between tokens, one
    for each token after the first, and when the last request had ended. `first_share`: of all
    tokens of prompts, what the card has computed that only prefills; None without one."""

    ttft_s: Floats
    tbt_s: Floats
    end_s: float
    first_share: float | None = None

    @property
    def rate(self) -> float:
        """Requests per second, of those that came at once."""
        return len(self.ttft_s) / self.end_s

    @property
    def ttft_p99_s(self) -> float:
        """The 99th percentile."""
        return float(np.quantile(self.ttft_s, 0.99))

    @property
    def tbt_p99_s(self) -> float:
        """The 99th percentile."""
        return float(np.quantile(self.tbt_s, 0.99))


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Tokens that a batch with chunks of prompts computes at most; `low`: on the lesser card under DP. `is_whole`:
    disaggregated prefill has no chunks, and nothing decodes beside prompts, those of preempted requests either; who
    prefills computes one prompt after the other."""

    tokens: int = 512
    low: int = 256
    is_whole: bool = True


PAPERS: Final = StepSizes()
"""Chunked prefill is enabled in PP, DP and Cronus."""
IN_CHUNKS: Final = StepSizes(is_whole=False)
"""And under disaggregated prefill, where several prompts are computed together."""
EQUAL: Final = StepSizes(2048, 2048, is_whole=False)
"""vLLM's own, for all."""

Run = Callable[[PairOfCards, Trace, StepSizes], ServedTrace]


def take_rows(count: int, first: int = 0, *, interval_s: float = 0.0) -> Trace:
    """So many conversations of Azure's trace from the `first` on, sent at a fixed interval; 0: all at once."""
    drawn = lengths("conversation")
    return Trace(
        ids=np.arange(count),
        arrival_s=np.arange(count, dtype=np.float64) * interval_s,
        prompt=drawn.prompt[first : first + count],
        output=drawn.output[first : first + count],
        lengths=drawn.source,
        arrivals=f"every {interval_s:g} s" if interval_s else "all at once",
    )


@cache
def card(name: str) -> GpuSpec:
    """With the shares of its rates that were measured on it, or on others."""
    return gpu_table().find(name, Specs.MEASURED)


@cache
def times_on(name: str, model: str) -> StepTimes:
    """Of the whole model on one card."""
    shape = model_shape(model)
    return replica_times(shape, [StageHardware(card(name), 1, shape.layers, 160.0)])


def run_cronus(pair: PairOfCards, trace: Trace, sizes: StepSizes = PAPERS) -> ServedTrace:
    """Prompts are split between the lesser card and the A100, which decodes."""
    return run_split(pair, trace, sizes, first=pair.low, second=HIGH, policy="cronus")


def run_high_low(pair: PairOfCards, trace: Trace, sizes: StepSizes = PAPERS) -> ServedTrace:
    """The A100 prefills, the lesser card decodes."""
    return run_split(pair, trace, sizes, first=HIGH, second=pair.low, policy="plan", is_whole=sizes.is_whole)


def run_low_high(pair: PairOfCards, trace: Trace, sizes: StepSizes = PAPERS) -> ServedTrace:
    """The lesser card prefills, the A100 decodes."""
    return run_split(pair, trace, sizes, first=pair.low, second=HIGH, policy="plan", is_whole=sizes.is_whole)


def run_pipeline(pair: PairOfCards, trace: Trace, sizes: StepSizes = PAPERS) -> ServedTrace:
    """One replica of two stages, with layers by the cards' FLOPS."""
    first, _ = pair.layers
    layers = model_shape(pair.model).layers
    stages = (
        Stage(peer="high", tp=1, first_layer=0, last_layer=first),
        Stage(peer="low", tp=1, first_layer=first, last_layer=layers),
    )
    replica = Replica(id="pipeline", phase=Phase.MIXED, stages=stages, step_tokens=sizes.tokens)
    plan = _plan((replica,), Pairing(prefill="pipeline", decode="pipeline", weight=1.0))
    return _simulate(pair, trace, plan, "plan")


def run_whole(
    pair: PairOfCards, trace: Trace, sizes: StepSizes, policy: str, admission: SimAdmission | None = None
) -> ServedTrace:
    """Both cards serve whole requests, each given to one of them by `policy` when it comes, or when its turn does."""
    layers = model_shape(pair.model).layers
    replicas = tuple(
        Replica(
            id=box,
            phase=Phase.MIXED,
            stages=(Stage(peer=box, tp=1, first_layer=0, last_layer=layers),),
            step_tokens=budget,
        )
        for box, budget in (("high", sizes.tokens), ("low", sizes.low))
    )
    pairings = (
        Pairing(prefill=replica.id, decode=replica.id, weight=weight / sum(WEIGHTS))
        for replica, weight in zip(replicas, WEIGHTS, strict=True)
    )
    return _simulate(pair, trace, _plan(replicas, *pairings), policy, admission=admission)


def run_data_parallel(pair: PairOfCards, trace: Trace, sizes: StepSizes = PAPERS) -> ServedTrace:
    """Both cards serve whole requests, which wait at the frontend while both queues are full."""
    ttft_s, steps = np.full(len(trace), inf), list[StepRecord]()
    engines = [
        _engine_on(name, pair.model, budget, steps) for name, budget in ((HIGH, sizes.tokens), (pair.low, sizes.low))
    ]
    waiting, coming = deque[int](), deque(range(len(trace)))
    sent, now = [0, 0], 0.0
    while True:
        while coming and trace.arrival_s[coming[0]] <= now:
            waiting.append(coming.popleft())
        while waiting and (number := _choose_engine(engines, sent)) is not None:
            row = waiting.popleft()
            sent[number] += 1
            engines[number].submit(EngineSequence(row, int(trace.prompt[row]), int(trace.output[row])), now)
        following = min((engine.wake_at for engine in engines), default=inf)
        if coming:
            following = min(following, float(trace.arrival_s[coming[0]]))
        if following == inf:
            return ServedTrace(ttft_s, _between_tokens(steps), now)
        now = following
        for engine in engines:
            if engine.wake_at <= now:
                for signal in engine.advance(now):
                    if signal.kind is SignalKind.FIRST_TOKEN:
                        ttft_s[signal.sequence.key] = signal.at - trace.arrival_s[signal.sequence.key]


def prefill_rate(name: str, model: str, trace: Trace) -> float:
    """Requests per second that a card prefills whose KV is gone at once."""
    engine, end_s = _engine_on(name, model, ALONE_TOKENS, [], is_whole=True), 0.0
    for row in range(len(trace)):
        engine.submit(EngineSequence(row, int(trace.prompt[row]), 0, sends_kv=True), 0.0)
    while engine.wake_at < inf:
        end_s = engine.wake_at
        for signal in engine.advance(end_s):
            if signal.kind is SignalKind.PREFILLED:
                engine.release_kv(signal.sequence, end_s)
    return len(trace) / end_s


def decode_rate(name: str, model: str, trace: Trace) -> float:
    """Requests per second that a card decodes whose KV is there at once."""
    engine, end_s = _engine_on(name, model, WHOLE_STEP_TOKENS, [], is_whole=True), 0.0
    for row in range(len(trace)):
        prompt = int(trace.prompt[row])
        sequence = EngineSequence(row, prompt, int(trace.output[row]), external=prompt - 1)
        engine.submit(sequence, 0.0)
        if engine.has_blocks_for(sequence):
            engine.receive_kv(sequence, 0.0)
    while engine.wake_at < inf:
        end_s = engine.wake_at
        for signal in engine.advance(end_s):
            if signal.kind is SignalKind.HAS_ROOM:
                engine.receive_kv(signal.sequence, end_s)
    return len(trace) / end_s


def _choose_engine(engines: Sequence[Engine], sent: Sequence[int]) -> int | None:
    """The one furthest behind its weight of those whose queue is not full; None: all are."""
    free = [number for number, engine in enumerate(engines) if engine.waiting < QUEUES[number]]
    return min(free, key=lambda number: (sent[number] + 1) / WEIGHTS[number], default=None)


def _engine_on(name: str, model: str, step_tokens: int, steps: list[StepRecord], *, is_whole: bool = False) -> Engine:
    """The whole model on one card; `steps` takes what it does."""
    settings = SimEngineSettings(max_batched_tokens=step_tokens, max_sequences=SEQUENCES, chunked_prefill=not is_whole)
    return Engine(times_on(name, model), settings, kv_tokens=kv_tokens_on(name, model), record=steps.append)


def kv_tokens_on(name: str, model: str) -> int:
    """That a card has room for beside the whole model."""
    shape = model_shape(model)
    return kv_capacity_tokens(shape, [StageHardware(card(name), 1, shape.layers, 160.0)])


def run_split(
    pair: PairOfCards,
    trace: Trace,
    sizes: StepSizes,
    *,
    first: str,
    second: str,
    policy: str,
    is_whole: bool = False,
    admission: SimAdmission | None = None,
) -> ServedTrace:
    """One card prefills, the other decodes; `policy` may do otherwise. `is_whole`: as that of `StepSizes`."""
    layers = model_shape(pair.model).layers
    replicas = tuple(
        Replica(
            id=phase.value,
            phase=phase,
            stages=(Stage(peer="high" if name == HIGH else "low", tp=1, first_layer=0, last_layer=layers),),
            step_tokens=budget,
        )
        for phase, name, budget in (
            (Phase.PREFILL, first, ALONE_TOKENS if is_whole else WHOLE_STEP_TOKENS),
            (Phase.DECODE, second, WHOLE_STEP_TOKENS if is_whole else sizes.tokens),
        )
    )
    plan = _plan(replicas, Pairing(prefill="prefill", decode="decode", weight=1.0))
    return _simulate(pair, trace, plan, policy, is_whole=is_whole, admission=admission)


def _plan(replicas: tuple[Replica, ...], *pairings: Pairing) -> Plan:
    return Plan(epoch=0, version=1, service="conversation", replicas=replicas, pairings=pairings, codec="raw", why=())


def _simulate(
    pair: PairOfCards,
    trace: Trace,
    plan: Plan,
    policy: str,
    *,
    is_whole: bool = False,
    admission: SimAdmission | None = None,
) -> ServedTrace:
    result = simulate(
        _cluster(pair),
        [ServiceRun(service=_service(model_shape(pair.model)), plan=plan, trace=trace)],
        settings=SimSettings(
            engine=SimEngineSettings(
                max_batched_tokens=WHOLE_STEP_TOKENS, max_sequences=SEQUENCES, chunked_prefill=not is_whole
            ),
            routing=RoutingSettings(policy=policy),
            admission=admission,
            first_token_at_decode=True,
        ),
        record=True,
    )
    computed = {replica.phase: replica.counts.prompt_tokens for replica in result.replicas}
    first = computed.get(Phase.PREFILL)
    return ServedTrace(
        result.services[0].outcomes.ttft_s,
        _between_tokens([log.step for log in result.steps]),
        result.end_s,
        None if first is None else first / sum(computed.values()),
    )


def _cluster(pair: PairOfCards) -> Cluster:
    boxes = (Box(id="high", gpu=card(HIGH), gpus=1), Box(id="low", gpu=card(pair.low), gpus=1))
    apart = 1.0 - np.eye(2)
    return Cluster(boxes=boxes, gbps=LINK_GBPS * apart, rtt_s=LINK_RTT_S * apart, usd_per_gb=0.0 * apart)


def _service(model: ModelShape) -> Service:
    trace = take_rows(1000)
    workload = Workload(name="conversation", prompts=trace.prompt, outputs=trace.output, rate=1.0)
    return Service(
        name="conversation", model=model, workload=workload, kv_bits=16.0, slo=Slo(ttft_s=1.0, tpot_s=1.0, e2e_s=100.0)
    )


def _between_tokens(steps: Sequence[StepRecord]) -> Floats:
    """A time for each token that a step has decoded: that of the step, and of those of prompts alone that its request
    stood still for since its last token. Where there are such, one engine alone may decode."""
    seconds, counts, stalls = list[float](), list[int](), list[float]()  # stalls: who joined first comes first
    for step in steps:
        each_s = (step.end_s - step.start_s) / step.steps
        if step.stalled:
            stalls = [sofar_s + each_s for sofar_s in stalls] + [each_s] * (step.stalled - len(stalls))
        if step.requests:
            held_up = stalls[: step.requests]  # the last to join may have been preempted
            seconds += [*(stall_s + each_s for stall_s in held_up), each_s]
            counts += [*(1 for _ in held_up), step.requests * step.steps - len(held_up)]
            stalls = []
    return np.repeat(seconds, counts)
