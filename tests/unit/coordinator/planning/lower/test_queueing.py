"""Waiting, prefill and decode under load, against exact results and against a plain simulation."""

from dataclasses import replace
from math import exp, inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from p2pserve.coordinator.costs.step_times import DecodeLine
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.behaviour import LOADS, MAX_BATCH, Behaviour, LoadRow, model_replica
from p2pserve.coordinator.planning.lower.queueing import (
    DecodeTimes,
    KVDelays,
    Pool,
    PrefillTimes,
    ReplicaTables,
    RequestTimes,
    chance_in_time,
    in_time_by_load,
    waiting_times,
)
from p2pserve.coordinator.planning.model.length_classes import Classes, classify_lengths
from p2pserve.coordinator.planning.model.workload import Slo, Workload

from .....linear_times import LinearTimes


class PlainTimes:
    """A millisecond per prompt token; a decode step of `step_s`, and `request_s` more for each request."""

    source = "test"

    def __init__(self, step_s: float = 0.02, request_s: float = 0.0, interval: float = 1.0) -> None:
        self.step_s, self.request_s, self.interval = step_s, request_s, interval

    def prefill_s(self, tokens: int, pairs: float) -> float:
        return 1e-3 * tokens

    def prefill_interval_s(self, tokens: int, pairs: float) -> float:
        return 1e-3 * tokens * self.interval

    def decode_line(self, requests: int) -> DecodeLine:
        return DecodeLine(self.step_s + self.request_s * requests, 0.0)

    def mixed_s(self, tokens: int, pairs: float, requests: int, context: float) -> float:
        return self.prefill_s(tokens, pairs) + self.step_s + self.request_s * requests


def classes(prompt: int = 1000, output: int = 101) -> Classes:
    return classify_lengths(Workload(name="x", prompts=np.full(4, prompt), outputs=np.full(4, output), rate=1.0))


def single(behaves: Behaviour, *args: Any, **kwargs: Any) -> NDArray[np.float64]:
    """`in_time_by_load` for one replica."""
    return np.asarray(in_time_by_load([behaves], *args, **kwargs)[0])


def at(behaves: Behaviour, column: str, load: float) -> float:
    return float(np.interp(load, LOADS, behaves.table[:, LoadRow._fields.index(column)]))


def test_classes_keep_shares_and_means() -> None:
    rng = np.random.default_rng(3)
    workload = Workload(
        name="x", prompts=rng.integers(1, 5000, 997), outputs=rng.integers(1, 500, 997), rate=1.0
    )  # fmt: skip
    found = classify_lengths(workload)
    assert len(found.share) == 42
    assert found.share.sum() == pytest.approx(1.0)
    assert found.share @ found.prompt == pytest.approx(workload.mean_prompt)
    assert found.share @ found.output == pytest.approx(workload.mean_output)
    assert found.share @ found.pairs == pytest.approx(workload.mean_pairs)
    few = classify_lengths(Workload(name="x", prompts=np.array([5]), outputs=np.array([1]), rate=1.0))
    assert few.share.tolist() == [1.0]


def test_context_that_is_met_is_that_of_long_answers() -> None:
    # one request in two decodes 10 tokens, the other 990: 99 of 100 tokens are the latter's, halfway through on average
    workload = Workload(name="x", prompts=np.array([100, 100]), outputs=np.array([10, 990]), rate=1.0)
    found = classify_lengths(workload)
    assert found.held == pytest.approx((10 * 105 + 990 * 595) / 1000)
    assert found.life == pytest.approx((10**2 + 990**2) / 2000)


@given(st.floats(0.05, 0.95), st.floats(0.01, 10))
def test_one_exponential_server_is_exact(rho: float, service: float) -> None:
    busy, wait = waiting_times(np.array([rho]), np.array([service]), 1.0, Pool.of_equals(1))
    assert busy[0] == pytest.approx(rho)
    assert busy[0] * wait[0] == pytest.approx(rho * service / (1 - rho))  # M/M/1
    late = 1.0 - chance_in_time(np.array([2.0 * service]), np.array([0.0]), busy, wait)
    assert late[0] == pytest.approx(rho * exp(-2.0 * (1 - rho)), rel=1e-3)


def test_one_server_of_fixed_service_has_the_mean_of_pollaczek_and_khinchine() -> None:
    busy, wait = waiting_times(np.array([0.8]), np.array([0.5]), 0.5, Pool.of_equals(1))
    assert busy[0] * wait[0] == pytest.approx(0.8 * 0.5 / (2 * 0.2))


@pytest.mark.parametrize(("servers", "rho", "exact"), [(2, 0.8, 0.7111), (4, 0.9, 0.7878), (8, 0.7, 0.2706)])
def test_several_servers_wait_about_as_often_as_erlang_says(servers: int, rho: float, exact: float) -> None:
    busy, _ = waiting_times(np.array([rho]), np.array([1.0]), 1.0, Pool.of_equals(servers))
    assert busy[0] == pytest.approx(exact, abs=0.06)


def test_a_wait_and_a_normal_time_add_up_as_in_a_sample() -> None:
    rng = np.random.default_rng(7)
    sample = rng.normal(0.0, 0.3, 400_000) + np.where(
        rng.random(400_000) < 0.7, rng.exponential(0.5, 400_000), 0.0
    )  # fmt: skip
    for slack in (-0.2, 0.1, 0.6, 1.5):
        known = chance_in_time(np.array([slack]), np.array([0.3]), np.array([0.7]), np.array([0.5]))
        assert known[0] == pytest.approx(float((sample <= slack).mean()), abs=4e-3)


@given(st.floats(-100, 100), st.floats(0, 10), st.floats(0, 1), st.floats(0, 1e6))
def test_a_chance_is_a_chance(slack: float, sd: float, busy: float, wait: float) -> None:
    found = chance_in_time(np.array([slack]), np.array([sd]), np.array([busy]), np.array([wait]))[0]
    assert -1e-12 <= found <= 1.0


def test_a_reader_reads_as_many_prompts_as_its_time_allows() -> None:
    one = model_replica(Phase.PREFILL, PlainTimes(), classes(), kv_tokens=10**6)
    assert one.prefill_rate == pytest.approx(1.0)
    assert not one.does_decode
    pipeline = model_replica(Phase.PREFILL, PlainTimes(interval=0.5), classes(), kv_tokens=10**6)
    assert pipeline.prefill_rate == pytest.approx(2.0)
    assert pipeline.prefill_s[0] == pytest.approx(1.0)


def test_the_chunks_of_a_long_prompt_follow_each_other_through_a_pipeline() -> None:
    found = model_replica(Phase.PREFILL, PlainTimes(interval=0.5), classes(prompt=4096), kv_tokens=10**6)
    assert found.prefill_s[0] == pytest.approx(2.048 + 1.024)


def test_a_writer_obeys_littles_law_at_every_load() -> None:
    known = classes()
    found = model_replica(Phase.DECODE, PlainTimes(request_s=1e-3), known, kv_tokens=10**7)
    assert found.max_batch == MAX_BATCH
    assert found.decode_rate == pytest.approx(256 / (101 * (0.02 + 0.256)), rel=1e-6)
    for load in (0.2, 0.5, 0.9, 1.0):
        batch, tpot = at(found, "batch", load), at(found, "tpot_s", load)
        assert batch == pytest.approx(load * found.decode_rate * known.mean_output * tpot, rel=0.03)
        assert tpot == pytest.approx(0.02 + 1e-3 * max(batch, 1.0), rel=0.03)


def test_memory_limits_the_batch_and_is_partly_taken_by_prompts_on_their_way() -> None:
    known = classes()
    found = model_replica(Phase.DECODE, PlainTimes(), known, kv_tokens=20_000)
    # a request holds 1050.5 tokens; prefill takes 1 s, decoding 101 * 20 ms = 2.02 s
    assert found.max_batch == int(20_000 / (1050.5 + 1000 / 2.02))


def test_prefill_takes_time_from_decoding_on_a_mixed_replica() -> None:
    known = classes(prompt=1024)
    decode = model_replica(Phase.DECODE, PlainTimes(), known, kv_tokens=10**7)
    mixed = model_replica(Phase.MIXED, PlainTimes(), known, kv_tokens=10**7)
    assert mixed.rate < decode.decode_rate
    assert mixed.rate < 1.0 / 1.024
    # nearly all of the time goes to prompts: half a chunk each, every chunk with a step of 20 ms
    assert mixed.rate == pytest.approx(1.0 / (1.024 + 0.02 * 0.5), rel=1e-3)
    assert at(mixed, "rho", 1.0) == pytest.approx(1.0)
    assert at(mixed, "tpot_s", 0.0) == pytest.approx(0.02)


def test_no_deadline_is_met_always_and_an_impossible_one_never() -> None:
    known = classes()
    found = model_replica(Phase.MIXED, PlainTimes(), known, kv_tokens=10**7)
    assert single(found, known, Slo(), 1.0).tolist() == [1.0] * len(LOADS)
    assert single(found, known, Slo(ttft_s=0.5), 1.0).max() < 1e-9


DEADLINES = (Slo(ttft_s=3.0), Slo(tpot_s=0.05), Slo(e2e_s=8.0), Slo(ttft_s=2.0, tpot_s=0.1, e2e_s=9.0))


@pytest.mark.parametrize("slo", DEADLINES)
@pytest.mark.parametrize("phase", list(Phase))
def test_more_load_is_never_better_and_more_replicas_never_worse(slo: Slo, phase: Phase) -> None:
    known = classes()
    found = model_replica(phase, PlainTimes(request_s=5e-4), known, kv_tokens=60_000)
    one, four = (single(found, known, slo, 1.0, phase_counts=(n, n)) for n in (1, 4))
    assert (np.diff(one) <= 1e-6).all()
    assert (np.diff(four) <= 1e-6).all()
    assert (four >= one - 1e-3)[one > 0.6].all()


def test_bursts_wait_longer() -> None:
    known = classes()
    found = model_replica(Phase.PREFILL, PlainTimes(), known, kv_tokens=10**6)
    even, bursts = (single(found, known, Slo(ttft_s=4.0), cv) for cv in (1.0, 4.0))
    assert (bursts[1:-1] < even[1:-1]).all()


def test_a_queue_in_a_plain_simulation_is_as_estimated() -> None:
    rng = np.random.default_rng(11)
    prompts = rng.integers(200, 2000, 4000)
    workload = Workload(name="x", prompts=prompts, outputs=np.full(4000, 1), rate=0.6)
    known = classify_lengths(workload)
    found = model_replica(Phase.PREFILL, PlainTimes(), known, kv_tokens=10**6)
    load = workload.rate / found.prefill_rate
    arrivals = np.cumsum(rng.exponential(1 / workload.rate, 100_000))
    service = rng.choice(prompts, 100_000) * 1e-3
    work = np.cumsum(service)
    # Lindley: the end of service is the work so far, plus the longest idle time before it
    ends = work + np.maximum.accumulate(arrivals - work + service)
    for deadline in (1.5, 3.0, 5.0):
        estimate = np.interp(load, LOADS, single(found, known, Slo(ttft_s=deadline), 1.0))
        assert estimate == pytest.approx(float((ends - arrivals <= deadline).mean()), abs=0.04)


def test_replicas_looked_up_together_are_as_alone() -> None:
    known = classes()
    both = [model_replica(phase, PlainTimes(), known, kv_tokens=10**6) for phase in (Phase.MIXED, Phase.DECODE)]

    def decoding(tables: ReplicaTables, index: list[int], load: list[float]) -> DecodeTimes:
        which, loads = np.array(index), np.array(load)
        return tables.decode_times(which, loads, tables.at(which, loads), Pool.of_equals(2))

    together = decoding(ReplicaTables.of(both, known, 1.0), [1, 0, 1], [0.3, 0.5, 1.0])
    apart = decoding(ReplicaTables.of(both[1:], known, 1.0), [0, 0], [0.3, 1.0])
    assert together.tpot_s[[0, 2]].tolist() == apart.tpot_s.tolist()
    assert together.admit_s[2] < inf


@pytest.mark.parametrize("phase", list(Phase))
def test_many_replicas_at_once_fare_exactly_as_one_after_the_other(phase: Phase) -> None:
    known = classes()
    found = [model_replica(phase, PlainTimes(request_s=cost), known, kv_tokens=60_000) for cost in (0.0, 5e-4, 2e-3)]
    slo = Slo(ttft_s=2.0, tpot_s=0.1, e2e_s=9.0)
    together = in_time_by_load(found, known, slo, 1.0, phase_counts=(3, 2))
    assert together.tolist() == [single(one, known, slo, 1.0, phase_counts=(3, 2)).tolist() for one in found]


def test_prefill_and_decode_together_take_less_than_apart() -> None:
    times = LinearTimes(step=0.05, token=1e-4, request=1e-3)  # the step is taken once for both
    found = model_replica(Phase.MIXED, times, classes(), kv_tokens=20_000)
    assert found.mixed_rate < min(found.prefill_rate, found.decode_rate)
    assert found.mixed_rate > 1.03 / (1.0 / found.prefill_rate + 1.0 / found.decode_rate)


def test_few_tokens_see_prompts_or_none_and_many_see_the_average() -> None:
    def paced(output: int) -> float:
        known = classes(output=output)
        found = model_replica(Phase.MIXED, PlainTimes(), known, kv_tokens=10**7, tpot_s=10.0)
        return float(np.interp(0.5, LOADS, single(found, known, Slo(tpot_s=0.45), 1.0)))

    # a prompt takes a second: between five tokens one is too much, and the replica prefills half of the time
    assert 0.35 < paced(5) < 0.75
    assert paced(400) > 0.95


def test_kv_that_shares_its_link_is_later_as_in_a_sample() -> None:
    none, one = np.zeros(1), np.ones((1, 1))
    known = classes(output=11)
    prefilling = PrefillTimes(0.0 * one, 0.0 * one, none, none)
    decoding = DecodeTimes(none + 0.1, 0.1 * one, 0.1 * one, 0.01 * one, none, none)
    sending = KVDelays(0.5 * one, none + 0.6, 2.0 * one)
    fates = RequestTimes(
        replace(known, output=known.output[:1]), prefilling, decoding, sending, 0.0 * one, none, none
    )  # fmt: skip
    rng = np.random.default_rng(5)
    waited = 0.5 + np.where(rng.random(200_000) < 0.6, rng.exponential(2.0, 200_000), 0.0)
    assert sending.mean_s[0, 0] == pytest.approx(waited.mean(), rel=0.02)
    assert sending.variance[0, 0] == pytest.approx(waited.var(), rel=0.03)
    tpot = 0.1 + 0.01 * rng.normal(size=200_000) + waited / 10
    for deadline in (0.16, 0.25, 0.5):
        assert fates.pace_within(deadline)[0, 0] == pytest.approx(float((tpot <= deadline).mean()), abs=0.01)


def test_equally_busy_replicas_wait_together_by_their_speed() -> None:
    """Three at half of their time: 2, 2 and 1 requests per second are 4, 4 and 2 at most, ten together."""
    pool = Pool.of_shares(np.array([2.0, 2.0, 1.0]), np.full(3, 0.5))
    assert pool.speedup.tolist() == pytest.approx([2.5, 2.5, 5.0])
    assert pool.servers.tolist() == pytest.approx([100 / 36] * 3)
    equal = Pool.of_shares(np.full(4, 3.0), np.full(4, 0.7))
    assert equal.servers.tolist() == pytest.approx([4.0] * 4) == equal.speedup.tolist()


def test_a_replica_that_has_less_to_do_helps_as_much_less() -> None:
    """Both take at most one request per second. The idle one takes a fifth of what the busy one does; that one, which
    is busier than it, is a whole one to it."""
    pool = Pool.of_shares(np.array([0.8, 0.16]), np.array([0.8, 0.16]))
    assert pool.speedup.tolist() == pytest.approx([1.2, 2.0])
    assert pool.servers.tolist() == pytest.approx([1.2, 2.0])


def test_who_takes_no_requests_helps_nobody() -> None:
    pool = Pool.of_shares(np.array([0.5, 0.0, 0.0]), np.array([0.5, 0.9, 0.0]))
    assert pool.servers.tolist() == pool.speedup.tolist() == [1.0, 1.0, 1.0]
