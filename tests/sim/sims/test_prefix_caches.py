"""Prefix caches of simulated engines: what is not computed, room shared with sequences, and routes that follow them."""

import dataclasses
import random
from math import inf

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.workload import Service, Workload
from p2pserve.coordinator.routing.interface import RoutingSettings
from p2pserve.sims.engine.engine import Engine
from p2pserve.sims.engine.sequence import Sequence
from p2pserve.sims.engine.values import EngineSignal, SignalKind, SimEngineSettings
from p2pserve.sims.records import Trace, TraceError
from p2pserve.sims.results.outcomes import SimResult
from p2pserve.sims.scenario import BoxLost, ServiceRun, SimSettings, WorldError
from p2pserve.sims.workloads import mooncake
from p2pserve.sims.world import simulate

from ...linear_times import LinearTimes

TIMES = LinearTimes(step=1.0, token=0.01, request=0.1, context=0.001)
CACHED = SimEngineSettings(max_batched_tokens=100, max_sequences=8, block_tokens=4, prefix_blocks=2)


def engine_of(kv_tokens: int = 400, settings: SimEngineSettings = CACHED) -> Engine:
    return Engine(TIMES, settings, kv_tokens=kv_tokens)


def run(engine: Engine, now: float, *sequences: Sequence) -> list[EngineSignal]:
    for sequence in sequences:
        engine.submit(sequence, now)
    signals = []
    while engine.wake_at < inf:
        signals += engine.advance(engine.wake_at)
        engine.check_integrity()
    return signals


def first_token_s(signals: list[EngineSignal], begun: float) -> float:
    return next(signal.at for signal in signals if signal.kind is SignalKind.FIRST_TOKEN) - begun


def test_what_is_cached_is_not_computed_again() -> None:
    engine = engine_of()
    run(engine, 0.0, Sequence(1, 50, 4, prefix=(11, 12, 13, 14, 15, 16)))
    again = run(engine, 100.0, Sequence(2, 50, 4, prefix=(11, 12, 13, 77, 78, 79)))
    assert first_token_s(again, 100.0) == pytest.approx(1.0 + 0.01 * (50 - 24))
    assert (engine.counts.prompt_tokens, engine.counts.cached_tokens) == (50 + 26, 24)
    assert engine.free_tokens == 400  # what nobody uses is free


def test_the_last_token_is_computed_even_of_a_prompt_that_is_cached_whole() -> None:
    engine = engine_of()
    run(engine, 0.0, Sequence(1, 17, 2, prefix=(11, 12)))
    run(engine, 100.0, Sequence(2, 16, 2, prefix=(11, 12)))
    assert engine.counts.cached_tokens == 8


def test_sequences_that_run_together_share_what_is_cached() -> None:
    engine = engine_of(kv_tokens=120)  # 30 blocks: two of these prompts would take 2 x 25
    run(engine, 0.0, Sequence(1, 97, 2, prefix=tuple(range(12))))
    signals = run(engine, 100.0, *(Sequence(key, 97, 5, prefix=tuple(range(12))) for key in (2, 3)))
    moments = {signal.sequence.key: signal.at for signal in signals if signal.kind is SignalKind.FIRST_TOKEN}
    assert engine.counts.preemptions == 0
    assert list(moments.values()) == [pytest.approx(101.02)] * 2


def test_others_take_the_room_of_what_nobody_uses() -> None:
    engine = engine_of(kv_tokens=64)
    run(engine, 0.0, Sequence(1, 33, 2, prefix=(1, 2, 3, 4)))
    run(engine, 100.0, Sequence(2, 48, 2))
    run(engine, 200.0, Sequence(3, 33, 2, prefix=(1, 2, 3, 4)))
    assert engine.counts.cached_tokens == 8  # the end of a prompt goes first


def test_without_a_prefix_cache_everything_is_computed() -> None:
    engine = engine_of(settings=SimEngineSettings(max_batched_tokens=100, max_sequences=8, block_tokens=4))
    for key in range(3):
        run(engine, 100.0 * key, Sequence(key, 50, 4, prefix=(11, 12)))
    assert (engine.counts.prompt_tokens, engine.counts.cached_tokens) == (150, 0)


@pytest.mark.parametrize("seed", range(8))
def test_no_block_is_lost_or_held_twice(seed: int) -> None:
    rng = random.Random(seed)
    engine = engine_of(kv_tokens=rng.choice((80, 160, 400)))
    arrivals = []
    for key in range(60):
        prompt = rng.randrange(4, 60)
        prefix = tuple(100 * depth + rng.randrange(2) for depth in range(prompt // 8))
        arrivals.append((rng.uniform(0.0, 200.0), Sequence(key, prompt, rng.randrange(1, 20), prefix=prefix)))
    arrivals.sort(key=lambda item: item[0])
    while arrivals or engine.wake_at < inf:
        if arrivals and arrivals[0][0] <= engine.wake_at:
            at, sequence = arrivals.pop(0)
            engine.submit(sequence, at)
        else:
            engine.advance(engine.wake_at)
        engine.check_integrity()
    assert engine.free_tokens == engine.blocks * 4
    assert engine.counts.cached_tokens > 0


def test_cached_kv_is_sent_with_the_first_step() -> None:
    engine = engine_of()
    run(engine, 0.0, Sequence(1, 50, 2, prefix=(1, 2, 3, 4, 5, 6)))
    sent = Sequence(2, 50, 0, sends_kv=True, prefix=(1, 2, 3, 4, 5, 6))
    signals = run(engine, 100.0, sent)
    assert sum(signal.tokens for signal in signals if signal.kind is SignalKind.PREFILL_STEP) == 50
    engine.release_kv(sent, 200.0)
    engine.check_integrity()
    assert engine.free_tokens == 400


# ---- whole simulations ------------------------------------------------------------------------------------


def cluster_of(boxes: int) -> Cluster:
    apart = ~np.eye(boxes, dtype=bool)
    return Cluster(
        boxes=tuple(Box(id=f"box-{n}", gpu=gpu_table().find("A100-SXM4-80GB"), gpus=1) for n in range(boxes)),
        gbps=np.where(apart, 10.0, 0.0),
        rtt_s=np.where(apart, 0.001, 0.0),
        usd_per_gb=np.zeros((boxes, boxes)),
    )


def plan_of(boxes: int, prefill: int = 0) -> Plan:
    """Some that only prefill for the others, or all mixed."""
    layers = model_shape("qwen2-7b").layers
    names = [f"box-{n}" for n in range(boxes)]
    phases = [Phase.PREFILL] * prefill + [Phase.DECODE if prefill else Phase.MIXED] * (boxes - prefill)
    replicas = tuple(
        Replica(id=name, phase=phase, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=layers),))
        for name, phase in zip(names, phases, strict=True)
    )
    ends = [(p, d) for p in names[:prefill] for d in names[prefill:]] if prefill else [(name, name) for name in names]
    pairings = tuple(Pairing(prefill=p, decode=d, weight=1.0 / len(ends)) for p, d in ends)
    return Plan(epoch=1, version=1, service="chat", replicas=replicas, pairings=pairings, codec="kv4", why=())


def simulated(
    trace: Trace,
    *,
    weight: float,
    plan: Plan | None = None,
    boxes: int = 4,
    gateways: tuple[str, ...] = (),
    report_s: float = 0.0,
) -> SimResult:
    """Of five boxes one is lost on the way."""
    workload = Workload(name="chat", prompts=trace.prompt, outputs=trace.output, rate=1.0)
    service = Service(name="chat", model=model_shape("qwen2-7b"), workload=workload)
    return simulate(
        cluster_of(boxes),
        [ServiceRun(service=service, plan=plan or plan_of(boxes), trace=trace)],
        settings=SimSettings(
            engine=SimEngineSettings(prefix_blocks=32),
            routing=RoutingSettings(prefix_weight=weight),
            gateways=gateways,
            report_s=report_s,
        ),
        changes=[BoxLost(30.0, "box-1")] if boxes > 4 else [],
    )


def hit_share(result: SimResult) -> float:
    outcome = result.services[0].outcomes
    return sum(replica.counts.cached_tokens for replica in result.replicas) / float(outcome.trace.prompt.sum())


def test_routes_by_prefix_find_more_cached_and_first_tokens_come_sooner() -> None:
    trace = mooncake(rate=2.0, requests=400)
    blind, routed = (simulated(trace, weight=weight) for weight in (0.0, RoutingSettings().prefix_weight))
    assert hit_share(routed) > 1.5 * hit_share(blind) > 0.0
    assert routed.services[0].outcomes.ttft_s.mean() < blind.services[0].outcomes.ttft_s.mean()


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_prefill_replicas_have_prefix_caches_too(weight: float) -> None:
    result = simulated(mooncake(rate=1.0, requests=200), weight=weight, plan=plan_of(4, prefill=2))
    assert hit_share(result) > 0.03
    assert result.services[0].outcomes.completed.all()


@pytest.mark.parametrize("gateways", [(), ("box-0", "box-2")])
def test_requests_survive_the_loss_of_a_box_with_its_cache(gateways: tuple[str, ...]) -> None:
    trace = mooncake(rate=4.0, requests=300)
    result = simulated(trace, weight=4.0, boxes=5, gateways=gateways, report_s=1.0)
    assert result.services[0].outcomes.completed.all()
    assert (result.services[0].replays > 0).any()


def test_a_prefix_that_all_prompts_have_does_not_draw_them_all_to_one_box() -> None:
    count, head = 200, tuple(range(20))
    trace = Trace(
        ids=np.arange(count),
        arrival_s=np.linspace(0.0, 0.02 * count, count),
        prompt=np.full(count, 21 * 512 + 5),
        output=np.full(count, 20),
        lengths="one prefix for all",
        arrivals="every 0.02 s",
        prefixes=tuple((*head, 1000 + n) for n in range(count)),
        prefix_tokens=512,
    )
    result = simulated(trace, weight=RoutingSettings().prefix_weight)
    served = np.bincount(result.services[0].decode, minlength=4)
    assert served.max() < 0.5 * count
    assert (served > 0.2 * count).sum() >= 3


def test_mooncakes_trace() -> None:
    trace = mooncake(rate=5.0, requests=1000)
    assert (len(trace), trace.prefix_tokens) == (1000, 512)
    assert (trace.prompt[0], trace.output[0], trace.prefixes[0]) == (6758, 500, tuple(range(13)))
    assert all(len(names) == prompt // 512 for names, prompt in zip(trace.prefixes, trace.prompt, strict=True))
    assert trace.arrival_s[-1] == pytest.approx(999 / 5.0, rel=0.01)
    assert (np.diff(trace.arrival_s) > 0.0).all()


def test_a_trace_names_the_prefixes_of_all_its_requests_or_none() -> None:
    one, at = np.ones(2, dtype=np.int64), np.zeros(2)
    with pytest.raises(TraceError, match="prefixes"):
        Trace(ids=one, arrival_s=at, prompt=one, output=one, lengths="", arrivals="", prefixes=((1,),))


def test_a_cache_keeps_the_pieces_that_the_trace_names() -> None:
    trace = dataclasses.replace(mooncake(rate=1.0, requests=10), prefix_tokens=256)
    with pytest.raises(WorldError, match="pieces of 512 tokens, and the trace names those of 256"):
        simulated(trace, weight=1.0)
