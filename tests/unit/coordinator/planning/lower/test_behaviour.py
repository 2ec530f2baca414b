"""What a replica does on its own at every load, worked out for step times that are straight lines."""

from math import inf

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pserve.coordinator.costs.profiled_times import ProfiledTimes
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.behaviour import (
    LOADS,
    MAX_BATCH,
    MAX_CHUNK_TOKENS,
    Behaviour,
    LoadRow,
    model_replica,
)
from p2pserve.coordinator.planning.model.length_classes import Classes, classify_lengths
from p2pserve.coordinator.planning.model.workload import Workload
from p2pserve.coordinator.profile import MeasuredCosts, PhaseCost, PhaseCosts

from .....linear_times import LinearTimes


def classes(prompts: list[int], outputs: list[int]) -> Classes:
    return classify_lengths(Workload(name="w", prompts=np.array(prompts), outputs=np.array(outputs), rate=1.0))


def column(found: Behaviour, name: str) -> NDArray[np.float64]:
    return np.asarray(found.table[:, LoadRow._fields.index(name)])


EVEN = classes([1000] * 4, [50] * 4)
TIMES = LinearTimes(step=0.01, token=1e-4, request=1e-3)


def test_a_prefill_replica_by_hand() -> None:
    """A prompt alone takes a step and 1,000 tokens; 2.048 of them together share the step."""
    found = model_replica(Phase.PREFILL, TIMES, EVEN, kv_tokens=10**6)
    together = MAX_CHUNK_TOKENS / 1000
    occupied = (0.01 + 0.2048) / together
    assert found.prefill_s.tolist() == pytest.approx([0.11] * len(found.prefill_s))
    assert found.prefill_rate == pytest.approx(1.0 / occupied, rel=1e-3)
    assert (found.decode_rate, found.mixed_rate, found.max_batch) == (inf, inf, inf)
    assert found.rate == found.prefill_rate
    assert (found.does_prefill, found.does_decode) == (True, False)
    assert column(found, "rho").tolist() == LOADS.tolist()
    assert column(found, "occupied_s").tolist() == pytest.approx([occupied] * len(LOADS), rel=1e-3)
    assert found.prefill_cv2 == pytest.approx(0.0, abs=1e-9)
    assert found.batch_at(0.3) == pytest.approx(0.3)  # of its time, a prompt is there
    assert found.alone_s(EVEN) == pytest.approx(0.11)


def test_prompts_of_several_lengths_vary_as_their_times_do() -> None:
    found = model_replica(Phase.PREFILL, LinearTimes(token=1e-3), classes([1000, 2000], [5, 5]), kv_tokens=10**6)
    assert found.prefill_s.tolist() == pytest.approx([1.0, 2.0])
    # times of 1 and 2 s: a variance of 0.25 about a mean of 1.5
    assert found.prefill_cv2 == pytest.approx(0.25 / 1.5**2)


@pytest.mark.parametrize(("prompt", "chunks"), [(2048, 1), (2049, 2), (4096, 2), (4097, 3)])
def test_a_long_prompt_takes_a_step_for_each_of_its_chunks(prompt: int, chunks: int) -> None:
    found = model_replica(Phase.PREFILL, TIMES, classes([prompt], [5]), kv_tokens=10**6)
    assert found.prefill_s[0] == pytest.approx(chunks * 0.01 + prompt * 1e-4)


def test_a_decode_replica_by_hand() -> None:
    found = model_replica(Phase.DECODE, TIMES, EVEN, kv_tokens=10**7)
    assert found.max_batch == MAX_BATCH
    # at full load 256 requests share a step of 0.01 + 256 * 0.001 s, and each takes 50 of them
    assert found.decode_rate == pytest.approx(256 / (50 * 0.266))
    assert (found.prefill_rate, found.mixed_rate) == (inf, inf)
    assert (found.does_prefill, found.does_decode) == (False, True)
    assert column(found, "tpot_s")[0] == pytest.approx(0.011)
    assert column(found, "tpot_s")[-1] == pytest.approx(0.266)
    assert column(found, "batch")[-1] == pytest.approx(256)
    assert found.batch_at(1.0) == pytest.approx(256)
    assert column(found, "stall_s").tolist() == [0.0] * len(LOADS)
    assert found.alone_s(EVEN) == pytest.approx(50 * 0.011)


def test_who_comes_with_kv_joins_half_a_step_later_where_others_decode() -> None:
    found = model_replica(Phase.DECODE, TIMES, EVEN, kv_tokens=10**7)
    joins, tpot, batch = (column(found, name) for name in ("join_s", "tpot_s", "batch"))
    assert joins[0] == 0.0, "nobody decodes: it begins at once"
    assert joins[-1] == pytest.approx(0.5 * tpot[-1])
    assert (joins <= 0.5 * tpot).all()
    assert (np.diff(joins) > 0.0).all()
    assert joins[1] == pytest.approx(0.5 * tpot[1] * (1.0 - np.exp(-batch[1])), rel=0.05)


def test_prompts_that_are_prefilled_again_share_rounds_with_others() -> None:
    """So a pipeline whose memory is full loses no more by them than by as many tokens of longer prompts."""
    tight = model_replica(Phase.MIXED, TIMES, EVEN, kv_tokens=20_000)
    wide = model_replica(Phase.MIXED, TIMES, EVEN, kv_tokens=10**7)
    # up to 50 of 1,050 tokens are prefilled again, as prompts of 1,025: a twentieth more prompts
    again = 1025 / 1000 * 50 / 1050
    step_s, batch = 0.01 + tight.max_batch * 1e-3, tight.max_batch
    most = 1.0 / (50 * step_s / batch + (1.0 + again) * 0.1)
    assert tight.mixed_rate == pytest.approx(most, rel=0.1)
    assert tight.mixed_rate < wide.mixed_rate


def test_a_full_memory_stands_for_fewer_requests_and_prefills_some_again() -> None:
    wide = model_replica(Phase.DECODE, TIMES, EVEN, kv_tokens=10**7)
    tight = model_replica(Phase.DECODE, TIMES, EVEN, kv_tokens=20_000)
    # 1,025 tokens are held; a prompt of 1,000 is on its way for 0.11 s of a life of about 50 * 0.025 s
    assert tight.max_batch < 20_000 / 1025
    assert tight.max_batch >= 10
    assert tight.decode_rate < wide.decode_rate
    steps = 50 * (0.01 + tight.max_batch * 1e-3) / tight.max_batch
    assert tight.decode_rate < 1.0 / steps  # prefilled again where there is no room for what grew


def test_there_is_always_room_for_one_request() -> None:
    assert model_replica(Phase.DECODE, TIMES, EVEN, kv_tokens=1).max_batch == 1


def test_a_mixed_replica_does_both_for_the_price_of_one_step() -> None:
    found = model_replica(Phase.MIXED, TIMES, EVEN, kv_tokens=10**7)
    assert found.does_prefill
    assert found.does_decode
    # a request needs 1,000 tokens and its 50 shares of full steps
    assert found.rate == found.mixed_rate
    assert 1.0 / (0.1 + 0.01 + 50 * 0.266 / 256) < found.mixed_rate < 1.0 / (0.1 + 50 * 1e-3)
    assert (np.diff(column(found, "tpot_s")) >= -1e-9).all()
    stalled = column(found, "stalled_share")
    assert stalled[0] == pytest.approx(0.0, abs=0.05)
    assert ((stalled >= 0.0) & (stalled <= 1.0)).all()


def test_a_tight_deadline_cuts_prompts_smaller() -> None:
    slow = LinearTimes(step=0.01, token=1e-3)
    loose = model_replica(Phase.MIXED, slow, EVEN, kv_tokens=10**7)
    tight = model_replica(Phase.MIXED, slow, EVEN, kv_tokens=10**7, tpot_s=0.6)
    assert loose.prefill_rounds.tolist() == [1.0] * len(loose.prefill_rounds)
    assert tight.prefill_rounds.tolist() == [3.0] * len(tight.prefill_rounds)  # of 384 tokens
    assert column(tight, "stall_s").max() < column(loose, "stall_s").max()


@pytest.mark.parametrize("phase", list(Phase))
def test_faster_steps_carry_more(phase: Phase) -> None:
    slow, fast = (
        model_replica(phase, LinearTimes(step=0.01 * n, token=1e-4 * n, request=1e-3 * n), EVEN, kv_tokens=10**6)
        for n in (2, 1)
    )
    assert fast.rate == pytest.approx(2 * slow.rate, rel=0.02)


def test_an_engine_for_which_many_prompts_take_long_prefills_none_in_less_than_no_time() -> None:
    """Its constants say nothing of attention: what they say of many short prompts is not that."""
    kinds = classes([20, 2000], [10, 10])
    told, modelled = (PhaseCosts(PhaseCost(token_s=1e-4, request_s=each), None) for each in (0.2, 0.01))
    times = ProfiledTimes(TIMES, MeasuredCosts(told, modelled))
    prompt = round(kinds.mean_prompt)
    assert times.prefill_interval_s(prompt, 0.0) > times.prefill_interval_s(prompt, kinds.mean_pairs)
    assert (model_replica(Phase.MIXED, times, kinds, kv_tokens=100_000).prefill_s > 0.0).all()
