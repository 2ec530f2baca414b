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

from ....linear_times import LinearTimes

FIRST_TOKEN, PREFILLED = SignalKind.FIRST_TOKEN, SignalKind.PREFILLED
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


def test_what_is_cached_and_only_to_be_sent_waits_for_no_prompt() -> None:
    engine = engine_of()
    run(engine, 0.0, Sequence(1, 50, 2, prefix=(1, 2, 3, 4, 5, 6)))
    long, other = Sequence(2, 290, 2), Sequence(3, 60, 2)
    send = Sequence(4, 49, 0, sends_kv=True, prefix=(1, 2, 3, 4, 5, 6))
    engine.submit(long, 100.0)
    engine.submit(other, 100.0)
    engine.advance(100.0)  # a step of 100 tokens is under way, and two more of the long prompt would follow
    engine.submit(send, 100.1)
    signals = run(engine, 100.1)
    at = {signal.sequence.key: signal.at for signal in signals if signal.kind in (FIRST_TOKEN, PREFILLED)}
    assert at[4] == pytest.approx(104.0)  # the end of the next step
    assert at[4] < at[2] < at[3]
    engine.release_kv(send, 200.0)
    engine.check_integrity()


def test_a_prompt_that_is_to_be_computed_before_it_is_sent_waits_for_its_turn() -> None:
    engine = engine_of()
    engine.submit(Sequence(2, 290, 2), 100.0)
    engine.submit(Sequence(4, 49, 0, sends_kv=True, prefix=(1, 2, 3, 4, 5, 6)), 100.0)
    at = {signal.sequence.key: signal.at for signal in run(engine, 100.0) if signal.kind in (FIRST_TOKEN, PREFILLED)}
    assert at[2] <= at[4]


def receive(engine: Engine, now: float, sequence: Sequence) -> list[EngineSignal]:
    """KV comes as soon as there is room for it."""
    engine.submit(sequence, now)
    if not engine.has_blocks_for(sequence):
        engine.advance(engine.wake_at)
    engine.receive_kv(sequence, now)
    return run(engine, now)


def test_what_another_engine_has_sent_is_cached_like_what_was_computed() -> None:
    engine = engine_of()
    receive(engine, 0.0, Sequence(1, 50, 2, external=33, prefix=(1, 2, 3, 4, 5, 6)))
    assert (engine.counts.received_tokens, engine.counts.prompt_tokens) == (33, 17)
    run(engine, 100.0, Sequence(2, 50, 2, prefix=(1, 2, 3, 4, 5, 6)))
    assert (engine.counts.cached_tokens, engine.counts.prompt_tokens) == (48, 17 + 2)
    assert engine.free_tokens == 400


def test_what_is_cached_here_need_not_be_sent() -> None:
    engine = engine_of()
    run(engine, 0.0, Sequence(1, 20, 2, prefix=(1, 2)))
    sequence = Sequence(2, 50, 2, external=33, prefix=(1, 2, 3, 4, 5, 6))
    receive(engine, 100.0, sequence)
    assert engine.counts.received_tokens == 33 - 16
    receive(engine, 200.0, Sequence(3, 50, 2, external=33, prefix=(1, 2, 3, 4, 5, 6)))
    assert engine.counts.received_tokens == 33 - 16 + 1  # the last token of what is asked for always comes
    assert engine.free_tokens == 400


@pytest.mark.parametrize("seed", range(8))
def test_no_block_is_lost_where_prompts_are_sent_and_received(seed: int) -> None:
    rng = random.Random(seed)
    engine = engine_of(kv_tokens=rng.choice((160, 400)))
    waiting: list[Sequence] = []
    for key in range(80):
        prompt = rng.randrange(4, 60)
        prefix = tuple(100 * depth + rng.randrange(2) for depth in range(prompt // 8))
        kind = rng.choice(("computed", "sent", "received"))
        sequence = Sequence(
            key,
            prompt,
            0 if kind == "sent" else rng.randrange(1, 20),
            sends_kv=kind == "sent",
            external=rng.randrange(1, prompt) if kind == "received" else 0,
            prefix=prefix,
        )
        engine.submit(sequence, float(key))
        if kind == "received":
            waiting.append(sequence)
        while engine.wake_at <= key + 1.0:
            for signal in engine.advance(engine.wake_at):
                if signal.kind is PREFILLED:
                    engine.release_kv(signal.sequence, engine.wake_at if engine.wake_at < inf else float(key))
            engine.check_integrity()
        for each in [each for each in waiting if engine.has_blocks_for(each)]:
            waiting.remove(each)
            (engine.receive_kv if rng.random() < 0.8 else engine.expect_no_kv)(each, key + 1.0)
            engine.check_integrity()


# ---- whole simulations ------------------------------------------------------------------------------------


def cluster_of(boxes: int, gbps: float) -> Cluster:
    apart = ~np.eye(boxes, dtype=bool)
    return Cluster(
        boxes=tuple(Box(id=f"box-{n}", gpu=gpu_table().find("A100-SXM4-80GB"), gpus=1) for n in range(boxes)),
        gbps=np.where(apart, gbps, 0.0),
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
    fetch: float = RoutingSettings().prefix_fetch,
    gbps: float = 10.0,
) -> SimResult:
    """Of five boxes one is lost on the way."""
    workload = Workload(name="chat", prompts=trace.prompt, outputs=trace.output, rate=1.0)
    service = Service(name="chat", model=model_shape("qwen2-7b"), workload=workload, kv_bits=4.5)
    return simulate(
        cluster_of(boxes, gbps),
        [ServiceRun(service=service, plan=plan or plan_of(boxes), trace=trace)],
        settings=SimSettings(
            engine=SimEngineSettings(prefix_blocks=32),
            routing=RoutingSettings(prefix_weight=weight, prefix_fetch=fetch),
            gateways=gateways,
            report_s=report_s,
            kv_wait_limit=1.5,
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


def received_tokens(result: SimResult) -> int:
    return sum(replica.counts.received_tokens for replica in result.replicas)


def test_prefixes_that_other_boxes_hold_come_from_there_and_less_is_computed() -> None:
    trace = mooncake(rate=4.0, requests=600)
    alone, fetched = (simulated(trace, weight=4.0, fetch=share) for share in (0.0, 1.0))
    computed = [sum(replica.counts.prompt_tokens for replica in result.replicas) for result in (alone, fetched)]
    assert received_tokens(alone) == 0 < received_tokens(fetched)
    assert computed[1] < computed[0]
    assert fetched.services[0].outcomes.completed.all()
    assert fetched.services[0].outcomes.ttft_s.mean() < alone.services[0].outcomes.ttft_s.mean()


def test_over_links_on_which_kv_takes_longer_than_computing_nothing_is_fetched() -> None:
    trace = mooncake(rate=4.0, requests=300)
    alone, slow = (simulated(trace, weight=4.0, gbps=1.0, fetch=share) for share in (0.0, 1.0))
    assert received_tokens(slow) == 0
    assert np.array_equal(slow.services[0].outcomes.ttft_s, alone.services[0].outcomes.ttft_s)


@pytest.mark.parametrize("gateways", [(), ("box-0", "box-2")])
def test_requests_survive_the_loss_of_a_box_whose_prefixes_they_wait_for(gateways: tuple[str, ...]) -> None:
    trace = mooncake(rate=6.0, requests=400)
    result = simulated(trace, weight=0.01, boxes=5, gateways=gateways, report_s=1.0 if gateways else 0.0)
    outcomes = result.services[0].outcomes
    assert received_tokens(result) > 0
    assert outcomes.completed.all()
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


def test_what_a_box_has_in_its_cache_is_no_queue_to_the_gateway_that_sends_it_there() -> None:
    """Twelve questions about one file within a report of loads: each leaves 5 tokens to compute, not 10,245."""
    count, head = 13, tuple(range(20))
    trace = Trace(
        ids=np.arange(count),
        arrival_s=np.array([0.0, *(20.1 + 0.001 * n for n in range(count - 1))]),
        prompt=np.full(count, 20 * 512 + 5),
        output=np.full(count, 20),
        lengths="one prefix for all",
        arrivals="one, then twelve",
        prefixes=(head,) * count,
        prefix_tokens=512,
    )
    result = simulated(trace, weight=1.0, gateways=("box-0",), report_s=1.0, fetch=0.0)
    assert len(set(result.services[0].decode)) == 1


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
