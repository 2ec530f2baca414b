"""Whole simulations: KV transfer added up by hand, losses, joins, plans that change, and that nothing gets lost."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.planning.model.cluster import Box, Cluster, ClusterError
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload
from p2pserve.coordinator.routing.interface import RoutingSettings
from p2pserve.sims.engine.values import SimEngineSettings
from p2pserve.sims.policies import PLAN, RANDOM, ROUND_ROBIN
from p2pserve.sims.records import Trace
from p2pserve.sims.results.outcomes import SimResult, summarise
from p2pserve.sims.results.report import write_requests
from p2pserve.sims.scenario import (
    BoxJoined,
    BoxLost,
    Change,
    PlanChange,
    ReplicaModel,
    ServiceRun,
    SimSettings,
    Situation,
    WorldError,
)
from p2pserve.sims.world import simulate

from ...linear_times import LinearTimes

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED

# A token has 2 * 1 * 16 elements of K and V in each of 10 layers: 640 bytes in 16 bit.
MODEL = ModelShape(name="toy", layers=10, hidden=16, heads=1, kv_heads=1, head_dim=16, intermediate=32, vocabulary=9)
TOKEN_BITS = 640 * 8
TIMES = LinearTimes(step=1.0)


def cluster_of(boxes: Sequence[str], *, bits_s: float = TOKEN_BITS, rtt_s: float = 0.0, gpus: int = 1) -> Cluster:
    """Links carry so many bits per second: by default one token's KV."""
    count = len(boxes)
    gpu = gpu_table().find("A40")
    return Cluster(
        boxes=tuple(Box(id=name, gpu=gpu, gpus=gpus, gpu_link_gbps=160.0) for name in boxes),
        gbps=np.full((count, count), bits_s * 1e-9),
        rtt_s=np.full((count, count), rtt_s),
        usd_per_gb=np.full((count, count), 0.01),
    )


def plan_of(
    phases: dict[str, Phase], pairs: dict[tuple[str, str], float], version: int = 1, service: str = "toy"
) -> Plan:
    replicas = tuple(
        Replica(id=name, phase=phase, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=10),))
        for name, phase in phases.items()
    )
    pairings = tuple(Pairing(prefill=a, decode=b, weight=weight) for (a, b), weight in pairs.items())
    return Plan(epoch=1, version=version, service=service, replicas=replicas, pairings=pairings, codec="raw", why=())


SPLIT = plan_of({"p": P, "d": D}, {("p", "d"): 1.0})
TWO_MIXED = plan_of({"a": M, "b": M}, {("a", "a"): 0.5, ("b", "b"): 0.5})


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    arrival, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    return Trace(
        ids=np.arange(len(requests)), arrival_s=arrival.astype(float), prompt=prompt, output=output,
        lengths="by hand", arrivals="by hand",
    )  # fmt: skip


def run_of(plan: Plan, trace: Trace, *, kv_bits: float = 16.0, slo: Slo | None = None) -> ServiceRun:
    workload = Workload(name="by hand", prompts=trace.prompt, outputs=trace.output, rate=1.0)
    service = Service(
        name=plan.service, model=MODEL, workload=workload, slo=slo or Slo(), codec=plan.codec, kv_bits=kv_bits
    )
    return ServiceRun(service=service, plan=plan, trace=trace)


def go(
    plan: Plan,
    trace: Trace,
    cluster: Cluster | None = None,
    *,
    times: LinearTimes = TIMES,
    kv_tokens: int = 1600,
    kv_bits: float = 16.0,
    settings: SimSettings | None = None,
    changes: Sequence[Change] = (),
) -> SimResult:
    return simulate(
        cluster or cluster_of([replica.head for replica in plan.replicas]),
        [run_of(plan, trace, kv_bits=kv_bits)],
        settings=settings,
        changes=changes,
        model_of=lambda *_: ReplicaModel(times, kv_tokens),
        record=True,
    )


SERIAL = SimSettings(layerwise=False)


def test_a_transfer_all_at_once() -> None:
    result = go(SPLIT, trace_of((0.0, 20, 4)), cluster_of("pd", rtt_s=0.5), settings=SERIAL)
    outcome = result.services[0]
    # prefilled in 1 s; 20 tokens of KV at a token a second, half a second until both sides know; three more tokens
    assert outcome.outcomes.ttft_s.tolist() == [1.0]
    assert outcome.kv_s.tolist() == [pytest.approx(20.5)]
    assert outcome.outcomes.e2e_s.tolist() == [pytest.approx(1.0 + 20.5 + 3.0)]
    assert (outcome.prefill.tolist(), outcome.decode.tolist()) == ([0], [1])
    assert result.sent_bytes == {(0, 1): pytest.approx(20 * 640)}
    assert result.traffic_usd == pytest.approx(20 * 640e-9 * 0.01)


def test_what_synchronising_layers_takes_comes_once_after_the_last_byte_of_a_layerwise_transfer() -> None:
    def ends(**settings: Any) -> float:
        return float(go(SPLIT, trace_of((0.0, 20, 4)), settings=SimSettings(**settings)).services[0].outcomes.e2e_s[0])

    assert ends(layer_sync_s=0.25) == pytest.approx(ends() + 0.25)
    assert ends(layer_sync_s=0.25, layerwise_from=20) == pytest.approx(ends() + 0.25)
    serialised = ends(layerwise=False)
    assert ends(layer_sync_s=0.25, layerwise_from=21) == pytest.approx(serialised), "too short a prompt"
    assert ends(layerwise=False, layer_sync_s=0.25) == pytest.approx(serialised)


@pytest.mark.parametrize("wrong", [{"layer_sync_s": -0.1}, {"layerwise_from": -1}])
def test_transfers_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(WorldError, match="it must not be negative"):
        SimSettings(**wrong)


@pytest.mark.parametrize(
    ("bits", "visible"),
    [(16.0, 20.0 - 0.9), (4.0, 5.0 - 0.9), (0.4, 0.05)],
    ids=["the link is slow", "codec", "the link is fast: one layer is left"],
)
def test_layer_by_layer_only_what_is_left_when_the_prompt_is_prefilled_takes_time(bits: float, visible: float) -> None:
    # during the prefill nine of ten layers may leave: as much as the link carries in 1 s, if there is so much
    result = go(SPLIT, trace_of((0.0, 20, 4)), kv_bits=bits)
    expected = visible if bits == 0.4 else 20.0 * bits / 16.0 - 1.0
    assert result.services[0].kv_s[0] == pytest.approx(expected)


def test_the_decode_side_generates_the_first_token_when_the_kv_is_there() -> None:
    settings = SimSettings(layerwise=False, first_token_at_decode=True)
    result = go(SPLIT, trace_of((0.0, 20, 4)), settings=settings)
    outcomes = result.services[0].outcomes
    assert outcomes.ttft_s.tolist() == [pytest.approx(1.0 + 20.0 + 1.0)]
    assert outcomes.e2e_s.tolist() == [pytest.approx(1.0 + 20.0 + 4.0)]


def test_an_answer_of_one_token_needs_no_kv_transfer() -> None:
    result = go(SPLIT, trace_of((0.0, 20, 1)))
    assert result.services[0].outcomes.e2e_s.tolist() == [1.0]
    assert result.sent_bytes == {}


def test_two_transfers_share_the_link() -> None:
    result = go(SPLIT, trace_of((0.0, 20, 2), (0.0, 20, 2)), settings=SERIAL)
    assert result.services[0].kv_s.tolist() == [pytest.approx(40.0), pytest.approx(40.0)]


def test_a_part_of_the_prompt_is_read_by_the_decode_side() -> None:
    replicas = SPLIT.replicas
    pairing = Pairing(prefill="p", decode="d", weight=1.0, prefill_share=0.5)
    plan = Plan(epoch=1, version=1, service="toy", replicas=replicas, pairings=(pairing,), codec="raw", why=())
    result = go(plan, trace_of((0.0, 20, 4)), settings=SERIAL)
    outcomes = result.services[0].outcomes
    # 10 tokens are prefilled in 1 s and sent in 10 s; the other half takes a step, which decodes the first token
    assert outcomes.ttft_s.tolist() == [pytest.approx(12.0)]
    assert outcomes.e2e_s.tolist() == [pytest.approx(15.0)]


def test_kv_waits_for_room_on_the_other_side_and_keeps_its_own() -> None:
    # the decode side holds one of these requests at a time, the prefill side as well
    result = go(SPLIT, trace_of((0.0, 40, 5), (0.0, 40, 5)), settings=SERIAL, kv_tokens=48)
    outcome = result.services[0]
    assert outcome.outcomes.e2e_s[0] == pytest.approx(1.0 + 40.0 + 4.0)
    # the second is read once the first has left the prefill side at 41, and sent when the other side is free at 45
    assert outcome.outcomes.ttft_s[1] == pytest.approx(42.0)
    assert outcome.outcomes.e2e_s[1] == pytest.approx(45.0 + 40.0 + 4.0)


@pytest.mark.parametrize("layerwise", [True, False])
def test_prompts_wait_for_the_room_of_kv_that_a_slow_link_has_not_carried_yet(layerwise: bool) -> None:
    rng = np.random.default_rng(5)
    prompts = rng.integers(5, 60, 30).tolist()
    trace = trace_of(*((0.5 * row, prompt, 2) for row, prompt in enumerate(prompts)))
    models = {P: ReplicaModel(TIMES, 160), D: ReplicaModel(TIMES, 100_000)}
    result = simulate(
        cluster_of("pd"),
        [run_of(SPLIT, trace)],
        settings=SimSettings(layerwise=layerwise),
        model_of=lambda _cluster, _service, replica: models[replica.phase],
        record=True,
    )
    outcome = result.services[0]
    assert outcome.outcomes.completed.all()
    assert outcome.replays.sum() == 0
    # From its first token, which comes with the end of the prefill, until it has arrived, a prompt has its blocks.
    read_at = (trace.arrival_s + outcome.outcomes.ttft_s).tolist()
    moments: list[tuple[float, int]] = []
    for transfer in result.transfers:
        blocks = -(-prompts[transfer.row] // 16)
        moments += [(read_at[transfer.row], blocks), (transfer.end_s, -blocks)]
    held = np.cumsum([change for _, change in sorted(moments)])
    assert len(result.transfers) == len(prompts)
    assert 160 // 16 - 4 < held.max() <= 160 // 16


def test_kv_for_a_replica_that_is_lost_gives_its_room_back() -> None:
    plan = plan_of({"p": P, "d": D, "e": D}, {("p", "d"): 0.9, ("p", "e"): 0.1})
    trace = trace_of((0.0, 40, 5), (3.0, 40, 5))
    kept = go(plan, trace, settings=SERIAL, kv_tokens=48)
    # the second is read when the first has left, at 41
    assert kept.services[0].outcomes.ttft_s.tolist() == [1.0, pytest.approx(39.0)]
    lost = go(plan, trace, settings=SERIAL, kv_tokens=48, changes=[BoxLost(10.0, "d")])
    outcome = lost.services[0]
    assert outcome.decode.tolist() == [2, 2]
    assert outcome.outcomes.ttft_s.tolist() == [1.0, pytest.approx(8.0)]  # prefilled from 10 on


def test_what_no_replica_can_hold_is_refused_and_counted() -> None:
    result = go(SPLIT, trace_of((0.0, 20, 2), (1.0, 2000, 2)))
    assert result.services[0].refused == 1
    assert np.isnan(result.services[0].outcomes.e2e_s[1])
    assert summarise(result.services[0], result).attainment == 0.5


def test_between_pipelines_every_stage_sends_to_those_that_hold_its_layers() -> None:
    def replica(name: str, phase: Phase, boxes: str, cuts: tuple[int, ...]) -> Replica:
        ends = (0, *cuts, 10)
        stages = tuple(
            Stage(peer=box, tp=1, first_layer=a, last_layer=b)
            for box, (a, b) in zip(boxes, pairwise(ends), strict=True)
        )
        return Replica(id=name, phase=phase, stages=stages)

    plan = Plan(
        epoch=1, version=1, service="toy", codec="raw", why=(),
        replicas=(replica("p", P, "ab", (4,)), replica("d", D, "cd", (7,))),
        pairings=(Pairing(prefill="p", decode="d", weight=1.0),),
    )  # fmt: skip
    result = go(plan, trace_of((0.0, 20, 2)), cluster_of("abcd"), settings=SERIAL)
    sent = {ends: size / 640 for ends, size in result.sent_bytes.items()}
    assert sent == {(0, 2): pytest.approx(8.0), (1, 2): pytest.approx(6.0), (1, 3): pytest.approx(6.0)}
    # b sends 12 tokens' worth and c receives 14 through one link's capacity
    assert result.services[0].kv_s.tolist() == [pytest.approx(14.0)]


def test_a_lost_box_costs_the_tokens_nothing() -> None:
    trace = trace_of((0.0, 20, 10), (0.0, 20, 10))
    result = go(TWO_MIXED, trace, changes=[BoxLost(4.5, "a")], settings=SimSettings(detect_s=2.0))
    outcome = result.services[0]
    assert outcome.replays.tolist() == [1, 0]
    assert outcome.outcomes.ttft_s.tolist() == [1.0, 1.0]
    # four tokens by 4.5; noticed at 6.5, prefilled again from 7 on beside the other's, the five others behind it
    assert outcome.outcomes.e2e_s.tolist() == [8.0 + 5.0, 10.0]
    assert outcome.decode.tolist() == [1, 1]


@pytest.mark.parametrize("box", ["p", "d"])
@pytest.mark.parametrize("at", [0.5, 5.0, 20.9, 22.5])
@pytest.mark.parametrize("first_token_at_decode", [True, False])
def test_a_loss_at_any_moment_of_a_transfer_is_made_good(box: str, at: float, first_token_at_decode: bool) -> None:
    plan = plan_of(
        {"p": P, "d": D, "q": P, "e": D},
        {("p", "d"): 0.4, ("p", "e"): 0.2, ("q", "d"): 0.2, ("q", "e"): 0.2},
    )
    settings = SimSettings(first_token_at_decode=first_token_at_decode)
    trace = trace_of(*((0.1 * row, 20, 6) for row in range(6)))
    result = go(plan, trace, changes=[BoxLost(at, box)], settings=settings)
    outcome = result.services[0]
    assert outcome.outcomes.completed.all()
    assert (outcome.outcomes.ttft_s <= outcome.outcomes.e2e_s).all()
    assert outcome.replays.sum() > 0 or (box == "p" and at > 20)
    assert "pdqe".index(box) not in outcome.decode[outcome.replays > 0]


def test_requests_wait_where_nobody_is_left_until_somebody_joins() -> None:
    plan = plan_of({"a": M}, {("a", "a"): 1.0})
    result = go(plan, trace_of((0.0, 20, 2), (5.0, 20, 2)), changes=[BoxJoined(10.0, "a")])
    assert result.services[0].outcomes.e2e_s.tolist() == [12.0, 7.0]
    result = go(plan, trace_of((0.0, 20, 2)), changes=[BoxLost(1.5, "a")])
    assert not result.services[0].outcomes.completed.any()
    result = go(plan, trace_of((0.0, 20, 2)), changes=[BoxLost(1.5, "a"), BoxJoined(20.0, "a")])
    assert result.services[0].outcomes.e2e_s.tolist() == [21.0]  # one token was there


def test_the_coordinator_is_asked_when_a_loss_is_noticed() -> None:
    asked: list[Situation] = []
    flipped = plan_of({"d": M}, {("d", "d"): 1.0}, version=2)

    def replan(situation: Situation) -> list[PlanChange]:
        asked.append(situation)
        return [PlanChange(situation.now + 3.0, 0, flipped)]

    result = simulate(
        cluster_of("pd"),
        [run_of(SPLIT, trace_of((0.0, 20, 8), (30.0, 20, 2)))],
        changes=[BoxLost(25.0, "p")],
        settings=SERIAL,
        replan=replan,
        model_of=lambda *_: ReplicaModel(TIMES, 1600),
    )
    assert [(situation.now, situation.missing, situation.plans) for situation in asked] == [
        (26.0, frozenset({"p"}), (SPLIT,))
    ]
    assert result.services[0].outcomes.e2e_s.tolist() == [28.0, 2.0]  # the first never noticed
    assert [replica.phase for replica in result.replicas] == [P, M]


def test_a_flip_keeps_the_engine_and_a_new_shape_has_to_load() -> None:
    flipped = plan_of({"a": D, "b": P}, {("b", "a"): 1.0}, version=2)
    result = go(TWO_MIXED, trace_of((0.0, 20, 9), (0.0, 20, 9)), changes=[PlanChange(3.5, 0, flipped)])
    assert result.services[0].outcomes.e2e_s.tolist() == [9.0, 9.0]
    assert len(result.replicas) == 2
    halves = (
        Stage(peer="a", tp=1, first_layer=0, last_layer=5),
        Stage(peer="b", tp=1, first_layer=5, last_layer=10),
    )
    joined = Plan(
        epoch=1, version=2, service="toy", codec="raw", why=(),
        replicas=(Replica(id="ab", phase=M, stages=halves),),
        pairings=(Pairing(prefill="ab", decode="ab", weight=1.0),),
    )  # fmt: skip
    result = go(TWO_MIXED, trace_of((0.0, 20, 9)), changes=[PlanChange(3.5, 0, joined, reload_s={"ab": 10.0})])
    # three tokens were there; the other six come from 13.5 on
    assert result.services[0].outcomes.e2e_s.tolist() == [19.5]
    assert [replica.id for replica in result.replicas] == ["a", "b", "ab"]


def test_a_plan_says_how_much_its_replicas_read_in_a_step() -> None:
    plan = plan_of({"a": M}, {("a", "a"): 1.0})

    def with_steps(tokens: int, version: int) -> Plan:
        replicas = tuple(msgspec.structs.replace(replica, step_tokens=tokens) for replica in plan.replicas)
        return msgspec.structs.replace(plan, replicas=replicas, version=version)

    trace = trace_of((0.0, 1024, 2))
    assert go(with_steps(0, 1), trace).services[0].outcomes.ttft_s.tolist() == [1.0]
    assert go(with_steps(512, 1), trace).services[0].outcomes.ttft_s.tolist() == [2.0]
    started = SimSettings(engine=SimEngineSettings(max_batched_tokens=256, max_sequences=8))
    assert go(with_steps(512, 1), trace, settings=started).services[0].outcomes.ttft_s.tolist() == [4.0]
    later = [PlanChange(0.5, 0, with_steps(260, 2))]
    assert go(with_steps(512, 1), trace, changes=later).services[0].outcomes.ttft_s.tolist() == [3.0]


def on_gpu(box: str, phase: Phase, gpu: int) -> Replica:
    stage = Stage(peer=box, tp=1, first_layer=0, last_layer=10, first_gpu=gpu)
    return Replica(id=f"{box}{gpu}", phase=phase, stages=(stage,))


def test_services_share_links_and_nothing_else() -> None:
    halves = [
        Plan(
            epoch=1, version=1, service=name, codec="raw", why=(),
            replicas=(on_gpu("p", P, gpu), on_gpu("d", D, gpu)),
            pairings=(Pairing(prefill=f"p{gpu}", decode=f"d{gpu}", weight=1.0),),
        )
        for gpu, name in enumerate(("one", "two"))
    ]  # fmt: skip
    cluster = cluster_of("pd", gpus=2)
    trace = trace_of((0.0, 20, 3))
    result = simulate(
        cluster,
        [run_of(plan, trace) for plan in halves],
        settings=SERIAL,
        model_of=lambda *_: ReplicaModel(TIMES, 1600),
    )
    for outcome in result.services:
        assert outcome.kv_s.tolist() == [pytest.approx(40.0)]
    with pytest.raises(WorldError, match="GPU 0 of box p is in the plans of one and x"):
        simulate(cluster, [run_of(halves[0], trace), run_of(plan_of({"p": M}, {("p", "p"): 1.0}, service="x"), trace)])


def test_what_does_not_fit_together_is_said_in_one_line() -> None:
    trace = trace_of((0.0, 20, 3))
    with pytest.raises(ClusterError, match="box d is not in the cluster"):
        go(SPLIT, trace, cluster_of("px"))
    both = Plan(
        epoch=1, version=1, service="toy", codec="raw", why=(),
        replicas=(on_gpu("p", P, 0), on_gpu("p", D, 1)),
        pairings=(Pairing(prefill="p0", decode="p1", weight=1.0),),
    )  # fmt: skip
    with pytest.raises(WorldError, match="replica p1: box p has no GPU 1"):
        go(both, trace, cluster_of("p"))
    cut = cluster_of("pd")
    cut.gbps[0, 1] = 0.0
    with pytest.raises(WorldError, match="pairing p -> d: there is no link from box p to box d"):
        go(SPLIT, trace, cut)
    with pytest.raises(WorldError, match="toy does not fit"):
        simulate(cluster_of("pd"), [run_of(SPLIT, trace)], model_of=lambda *_: _too_big())
    with pytest.raises(WorldError, match="streams is 0"):
        SimSettings(streams=0)


def _too_big() -> ReplicaModel:
    raise WorldError("replica p: toy does not fit its 1 GPU")


def busy_trace(count: int, seed: int = 4) -> Trace:
    rng = np.random.default_rng(seed)
    return trace_of(
        *zip(
            np.cumsum(rng.exponential(0.02, count)).tolist(),
            rng.integers(1, 300, count).tolist(),
            rng.integers(1, 60, count).tolist(),
            strict=True,
        )
    )


BUSY = plan_of(
    {"p": P, "q": P, "d": D, "e": D, "m": M},
    {("p", "d"): 0.3, ("q", "e"): 0.2, ("q", "d"): 0.1, ("m", "m"): 0.3, ("m", "e"): 0.1},
)
QUICK = LinearTimes(step=0.01, token=2e-5, pair=1e-8, request=1e-4, context=1e-7)


@pytest.mark.parametrize("kv_tokens", [800, 20_000])
@pytest.mark.parametrize("layerwise", [True, False])
def test_everything_ends_once_and_everything_is_given_back(kv_tokens: int, layerwise: bool) -> None:
    trace = busy_trace(400)
    changes: list[Change] = [BoxLost(2.0, "q"), BoxLost(3.0, "m"), BoxJoined(5.0, "q")]
    result = go(
        BUSY, trace, cluster_of("pqdem", bits_s=2e8), times=QUICK, kv_tokens=kv_tokens,
        settings=SimSettings(layerwise=layerwise, detect_s=0.3), changes=changes,
    )  # fmt: skip
    outcome = result.services[0]
    assert outcome.outcomes.completed.all()
    assert (outcome.replays > 0).any()
    assert (outcome.outcomes.ttft_s > 0.0).all()
    assert (outcome.outcomes.ttft_s <= outcome.outcomes.e2e_s).all()
    decoded = sum(replica.counts.output_tokens for replica in result.replicas)
    assert decoded <= trace.output.sum()  # those of KV transfers are made by no engine's decode
    if kv_tokens == 800:
        assert sum(replica.counts.preemptions for replica in result.replicas) > 0


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    trace = busy_trace(200)
    files = []
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        result = go(
            BUSY, trace, cluster_of("pqdem", bits_s=2e8), times=QUICK, kv_tokens=2000,
            settings=SimSettings(routing=RoutingSettings(policy=RANDOM), seed=seed), changes=[BoxLost(1.0, "m")],
        )  # fmt: skip
        write_requests(result.services[0], result, tmp_path / name)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]
    assert files[0] != files[2]


def test_dispatch_by_queues_beats_dispatch_in_turn_and_at_random() -> None:
    """Figure 12's comparison in small: one box is four times as fast, and only the plan knows."""
    plan = plan_of({"fast": M, "slow": M}, {("fast", "fast"): 0.8, ("slow", "slow"): 0.2})
    trace = busy_trace(300)
    fast, slow = QUICK, LinearTimes(step=0.04, token=8e-5, pair=4e-8, request=4e-4, context=4e-7)

    def mean_e2e(dispatch: str) -> float:
        result = simulate(
            cluster_of(["fast", "slow"]),
            [run_of(plan, trace)],
            settings=SimSettings(routing=RoutingSettings(policy=dispatch), engine=SimEngineSettings(max_sequences=16)),
            model_of=lambda cluster, service, replica: ReplicaModel(fast if replica.id == "fast" else slow, 20_000),
        )
        return float(result.services[0].outcomes.e2e_s.mean())

    routed = mean_e2e(PLAN)
    assert routed < 0.8 * mean_e2e(ROUND_ROBIN)
    assert routed < 0.8 * mean_e2e(RANDOM)


def test_progress_tells_of_the_last_request() -> None:
    heard: list[tuple[int, int]] = []
    simulate(
        cluster_of("ab"),
        [run_of(TWO_MIXED, trace_of((0.0, 20, 2), (1.0, 20, 2)))],
        model_of=lambda *_: ReplicaModel(TIMES, 1600),
        progress=lambda done, total, now: heard.append((done, total)),
    )
    assert heard == [(2, 2)]
