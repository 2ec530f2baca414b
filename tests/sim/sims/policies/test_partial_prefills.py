"""Cronus in whole simulations: who says where a prompt is split, and when; two requests at the prefill replica at most,
whatever number of gateways there is; and that nothing is lost with boxes."""

from collections.abc import Hashable

import numpy as np
import pytest

from p2pserve.coordinator.plan import Phase, Plan
from p2pserve.coordinator.routing import balancer
from p2pserve.coordinator.routing.balancer import ChunkedPrefillState, ChunkLine, PrefillLine
from p2pserve.coordinator.routing.interface import RoutingSettings
from p2pserve.coordinator.routing.prefill_slots import SLOTS, PrefillSlots
from p2pserve.sims.engine.values import SimEngineSettings
from p2pserve.sims.policies import splits as splits_module
from p2pserve.sims.records import Trace
from p2pserve.sims.results.outcomes import SimResult
from p2pserve.sims.scenario import BoxJoined, BoxLost, Change, PlanChange, ReplicaModel, SimSettings
from p2pserve.sims.world import simulate

from ....linear_times import LinearTimes
from ..test_world import SPLIT, cluster_of, plan_of, run_of, trace_of

FAST = 1e9  # bits per second: a token's KV takes 5 us
ENGINE = SimEngineSettings(max_batched_tokens=64, max_sequences=8)
CRONUS = RoutingSettings(policy="cronus")
TWO_PAIRS = plan_of(
    {"p": Phase.PREFILL, "q": Phase.PREFILL, "d": Phase.DECODE, "e": Phase.DECODE},
    {("p", "d"): 0.5, ("q", "e"): 0.5},
)


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots were used whenever a prefill began."""
    found: list[int] = []
    enter = PrefillSlots.enter

    def noted(slots: PrefillSlots[Hashable], request: Hashable) -> None:
        enter(slots, request)
        found.append(slots.used)

    monkeypatch.setattr(PrefillSlots, "enter", noted)
    return found


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, ChunkedPrefillState]]:
    """Each decision: prompt, split, and how it stood at the decode replica."""
    found: list[tuple[int, int, ChunkedPrefillState]] = []

    def noted(prompt: int, prefill: PrefillLine, chunk: ChunkLine, state: ChunkedPrefillState) -> int:
        split = balancer.choose_split(prompt, prefill, chunk, state)
        found.append((prompt, split, state))
        return split

    monkeypatch.setattr(splits_module, "choose_split", noted)
    return found


def crowd(count: int, *, every_s: float = 0.0) -> Trace:
    rng = np.random.default_rng(5)
    return trace_of(*((every_s * n, int(rng.integers(2, 300)), int(rng.integers(1, 20))) for n in range(count)))


def go(
    trace: Trace, gateways: str = "", *changes: Change, plan: Plan = SPLIT, boxes: str = "pd", rtt_s: float = 0.0
) -> SimResult:
    """With a chunk of 64 tokens a step."""
    return simulate(
        cluster_of(boxes, bits_s=FAST, rtt_s=rtt_s),
        [run_of(plan, trace)],
        settings=SimSettings(engine=ENGINE, routing=CRONUS, gateways=tuple(gateways)),
        changes=changes,
        model_of=lambda cluster, service, replica: ReplicaModel(LinearTimes(step=1.0, token=0.02), 4096),
    )


def check_all_answered(result: SimResult, trace: Trace) -> None:
    found = result.services[0]
    assert np.isfinite(found.outcomes.e2e_s).all()
    assert len(found.outcomes.e2e_s) == len(trace)


def test_a_lone_request_is_split_as_the_balancer_says(splits: list[tuple[int, int, ChunkedPrefillState]]) -> None:
    found = go(trace_of((0.0, 200, 4)))
    ((prompt, split, state),) = splits
    assert (prompt, state.decoding, state.context_tokens, state.free_tokens) == (200, 0, 0, 4096)
    assert 1 <= split < 200
    prefill, decode = found.replicas
    assert (prefill.counts.prompt_tokens, decode.counts.prompt_tokens) == (split, 200 - split)


@pytest.mark.parametrize("gateways", ["", "a", "abcf"])
def test_at_most_two_are_at_the_prefill_replica_with_any_number_of_gateways(most: list[int], gateways: str) -> None:
    trace = crowd(60)
    check_all_answered(go(trace, gateways, boxes="pd" + gateways, rtt_s=0.05), trace)
    assert len(most) == 60
    assert max(most) == SLOTS


@pytest.mark.parametrize("gateways", ["", "a", "abcf"])
def test_splits_are_chosen_by_how_it_stands_when_the_replica_takes_the_request(
    splits: list[tuple[int, int, ChunkedPrefillState]], gateways: str
) -> None:
    trace = crowd(40)
    check_all_answered(go(trace, gateways, boxes="pd" + gateways, rtt_s=0.01), trace)
    assert sorted(prompt for prompt, _, _ in splits) == sorted(trace.prompt.tolist())
    # All came at once: by figures of their arrival, nobody would decode, and all memory be free.
    assert [state.decoding for _, _, state in splits[:2]] == [0, 0]
    assert max(state.decoding for _, _, state in splits) >= 4
    assert min(state.free_tokens for _, _, state in splits) < 4096 / 2


def test_who_waits_is_taken_in_order(splits: list[tuple[int, int, ChunkedPrefillState]]) -> None:
    trace = crowd(30, every_s=0.01)
    check_all_answered(go(trace, "abcf", boxes="pdabcf"), trace)
    assert [prompt for prompt, _, _ in splits] == trace.prompt.tolist()


def test_without_room_at_the_decode_replica_all_of_the_prompt_is_computed_first(
    splits: list[tuple[int, int, ChunkedPrefillState]],
) -> None:
    trace = trace_of(*((0.0, 300, 200) for _ in range(30)))
    check_all_answered(go(trace), trace)
    full = [(prompt, split) for prompt, split, state in splits if not state.has_room_for(prompt)]
    assert len(full) >= 3
    assert all(prompt == split for prompt, split in full)


def test_each_prefill_replica_has_its_own_slots(most: list[int]) -> None:
    trace = crowd(40)
    found = go(trace, plan=TWO_PAIRS, boxes="pqde")
    check_all_answered(found, trace)
    assert set(found.services[0].prefill.tolist()) == {0, 1}
    assert max(most) == SLOTS


@pytest.mark.parametrize("gateways", ["", "abcf"])
@pytest.mark.parametrize("lost", ["p", "d"])
@pytest.mark.parametrize("at", [0.5, 3.0, 11.0])
def test_who_waits_at_a_box_that_is_lost_is_served_elsewhere(lost: str, at: float, gateways: str) -> None:
    trace = crowd(40)
    found = go(trace, gateways, BoxLost(at, lost), plan=TWO_PAIRS, boxes="pqde" + gateways, rtt_s=0.02)
    check_all_answered(found, trace)


@pytest.mark.parametrize("at", [0.5, 3.0])
def test_without_a_prefill_replica_the_others_compute_all_of_the_prompts(at: float) -> None:
    trace = crowd(20)
    found = go(trace, "", BoxLost(at, "p"))
    check_all_answered(found, trace)
    assert (found.services[0].prefill == found.services[0].decode).any()


@pytest.mark.parametrize("at", [0.5, 4.0])
def test_another_plan_sends_who_waits_where_it_says(at: float) -> None:
    trace = crowd(30)
    other = plan_of({"p": Phase.MIXED, "d": Phase.MIXED}, {("p", "p"): 0.5, ("d", "d"): 0.5}, version=2)
    check_all_answered(go(trace, "", PlanChange(at, 0, other)), trace)
    away = plan_of({"q": Phase.PREFILL, "d": Phase.DECODE}, {("q", "d"): 1.0}, version=2)
    found = go(trace, "", BoxJoined(at / 2, "q"), PlanChange(at, 0, away), boxes="pdq")
    check_all_answered(found, trace)
