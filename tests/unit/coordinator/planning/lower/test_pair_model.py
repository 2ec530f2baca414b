"""What becomes of requests on pairs of replicas: KV on its way, who joins when, who helps whom, what a pair loses."""

import numpy as np
import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.behaviour import LOADS, LoadRow
from p2pserve.coordinator.planning.lower.flow import LinkDemand, solve_quick
from p2pserve.coordinator.planning.lower.pair_model import REFERENCE_BUSY, busiest_link
from p2pserve.coordinator.planning.lower.queueing import Pool
from p2pserve.coordinator.planning.lower.replicas import REFERENCE_LOAD
from p2pserve.coordinator.planning.model.kv_cost import kv_gigabits
from p2pserve.coordinator.planning.model.problem import Group, Slice
from p2pserve.coordinator.planning.model.workload import Slo

from .test_orchestration import DEADLINES, MODEL, SPLIT, lower_level

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED

KV_GIGABITS = float(kv_gigabits(MODEL, 800.0, 4.5))
"""Of each prompt; every one of a layer, of its 32, takes as long."""


@pytest.mark.parametrize("late_token", [False, True])
def test_kv_on_its_way_is_slower_the_busier_its_link_and_waits_before_or_after_the_first_token(
    late_token: bool,
) -> None:
    """Two requests a second, of which each takes the link for a while and arrives half a millisecond later."""
    (found,) = lower_level(2.0, gbps=8.0, late_token=late_token).orchestrate(SPLIT, solver=solve_quick)
    assert found.flow.pair_rates.tolist() == pytest.approx([2.0])
    wire_s, prefill_s = KV_GIGABITS / 8.0, float(found.replicas[0].behaviour.prefill_s[0])
    assert (
        0.0 < prefill_s < wire_s
    )  # so the link is busy from the first layer on, and has most of the KV left in the end

    def visible(wire_s: float) -> float:
        return 5e-4 + wire_s / 32 + (wire_s - prefill_s) * 31 / 32

    sending, times, busy = found.times.sending, found.times, 2.0 * wire_s
    assert sending.busy.tolist() == pytest.approx([busy])
    decode = found.replicas[1].behaviour
    load, joins = float(found.flow.loads[1]), decode.table[:, LoadRow._fields.index("join_s")]
    join_s = float(np.interp(load, LOADS, joins))
    assert 0.0 < join_s < 0.5 * times.decoding.tpot_s[0], "half a step, and none where nothing is decoded"
    assert sending.least_s[0, 0] == pytest.approx(visible(wire_s) + join_s)
    later = visible(wire_s / (1.0 - busy)) + join_s
    assert sending.least_s[0, 0] + busy * sending.shared_s[0, 0] == pytest.approx(later)
    assert times.early.tolist() == [float(late_token)]
    assert times.step_s.tolist() == ([times.decoding.tpot_s[0]] if late_token else [0.0])
    assert times.admit_s[0, 0] == times.decoding.admit_s[0]


def test_a_replica_that_keeps_its_requests_sends_nothing_and_has_the_first_token_early() -> None:
    (found,) = lower_level(2.0).orchestrate((Group((Slice(0, 2),), M),), solver=solve_quick)
    assert found.times.early.tolist() == found.network.worth.tolist() == [1.0]
    assert found.times.step_s.tolist() == found.times.sending.busy.tolist() == [0.0]
    assert found.times.sending.mean_s.max() == 0.0
    assert found.attainment == pytest.approx(float(found.times.share_in_time(DEADLINES)[0]))


@pytest.mark.parametrize("across", [P, D])
def test_activations_between_boxes_take_their_share_of_the_link(across: Phase) -> None:
    """One of the replicas has half of its layers in each box, so half of the KV goes over the link; and for each token
    that it prefills or decodes, a hidden state: if in the same direction, both make the link busy."""
    both, alone = (Slice(0, 1), Slice(1, 1)), Slice(1 if across is P else 0, 1)
    phases = (Group(both, across), Group((alone,), D if across is P else P))
    (found,) = lower_level(0.5, gbps=8.0).orchestrate(phases, solver=solve_quick)
    (first, begin, half), (second, _, end) = found.replicas[0].holder.spans
    assert (begin, half, end) == (0.0, 0.5, 1.0)
    (demand,) = found.pairs.link_demands[0]
    assert tuple(demand) == pytest.approx((0, 1, KV_GIGABITS / 2))
    tokens = 800 if across is P else 60
    activations = tokens * 2 * MODEL.hidden * 8e-9 if (first, second) == (0, 1) else 0.0
    assert found.times.sending.busy.tolist() == pytest.approx([0.5 * (KV_GIGABITS / 2 + activations) / 8.0])


def test_what_a_pair_loses_to_its_link_is_in_its_worth() -> None:
    """Without deadlines nothing; where KV takes a minute and an answer ten seconds, all that its replicas do not."""
    (free,) = lower_level(1.0, slo=Slo()).orchestrate(SPLIT)
    assert free.network.worth.tolist() == pytest.approx([1.0])
    (slow,) = lower_level(1.0, gbps=KV_GIGABITS / 60).orchestrate(SPLIT)
    lost = [1.0 - float(curve.in_time_share[REFERENCE_LOAD]) for curve in slow.curves]
    assert slow.network.worth.tolist() == pytest.approx([sum(lost)], abs=1e-6)


UNLIKE = (Group((Slice(0, 1),), P), Group((Slice(0, 1),), M), Group((Slice(1, 2),), D))
"""Two that prefill, two that decode, one of them both."""


def test_prefill_replicas_help_each_other_with_prompts_and_decode_replicas_with_outputs() -> None:
    (found,) = lower_level(1.0).orchestrate(UNLIKE, solver=solve_quick)
    pairs, loads = found.pairs, np.array([0.6, 0.3, 0.5])
    rates = np.arange(1, len(pairs.prefill) + 1).astype(np.float64)
    prefills, decodes = found.model.pools(rates, loads)
    prompts, outputs = np.zeros(3), np.zeros(3)
    for rate, one, two in zip(rates, pairs.prefill, pairs.decode, strict=True):
        prompts[one] += rate
        outputs[two] += rate
    assert (prompts[2], outputs[0]) == (0.0, 0.0)
    for got, wanted in ((prefills, Pool.of_shares(prompts, loads)), (decodes, Pool.of_shares(outputs, loads))):
        assert got.servers.tolist() == wanted.servers.tolist()
        assert got.speedup.tolist() == wanted.speedup.tolist()
    assert prefills.servers.tolist() != decodes.servers.tolist()


def test_several_sets_of_loads_are_looked_at_as_each_by_itself() -> None:
    (found,) = lower_level(1.0, late_token=True).orchestrate(UNLIKE, solver=solve_quick)
    model, every = found.model, np.arange(len(found.pairs.prefill))
    loads, busy = np.array([[0.6, 0.3, 0.5], [0.9, 0.7, 0.8]]), np.linspace(0.0, 0.7, 2 * len(every)).reshape(2, -1)
    pools = model.pools(np.ones(len(every)), loads[0])
    together = model.times(every, loads, busy, pools).share_in_time(DEADLINES).reshape(2, -1)
    for number in range(2):
        alone = model.times(every, loads[number : number + 1], busy[number : number + 1], pools)
        assert alone.share_in_time(DEADLINES).tolist() == pytest.approx(together[number].tolist())
    assert (together[1] < together[0]).all()


def test_only_who_comes_with_kv_waits_for_the_end_of_a_step_and_decodes_the_first_token_there() -> None:
    (found,) = lower_level(1.0, late_token=True).orchestrate(UNLIKE, solver=solve_quick)
    every = np.arange(len(found.pairs.prefill))
    loads, nobody = np.array([[0.6, 0.3, 0.5]]), np.zeros((1, len(every)))
    times = found.model.times(every, loads, nobody, found.model.pools(np.ones(len(every)), loads[0]))
    kept = found.pairs.prefill == found.pairs.decode
    assert kept.tolist().count(True) == 1
    assert (times.step_s[kept] == 0.0).all()
    assert (times.sending.least_s[kept] == 0.0).all()
    assert times.early.tolist() == [1.0] * len(every)
    assert times.step_s[~kept].tolist() == times.decoding.tpot_s[~kept].tolist()
    assert times.control_s.tolist() == found.pairs.control_s.tolist()  # type: ignore[union-attr]
    row = [LoadRow(*(np.interp(load, LOADS, column) for column in one.behaviour.table.T))
           for load, one in zip(loads[0], found.replicas, strict=True)]  # fmt: skip
    for pair in np.flatnonzero(~kept).tolist():
        prefill, decode = int(found.pairs.prefill[pair]), int(found.pairs.decode[pair])
        wire_s = float(found.pairs.gigabit_s[pair]) * KV_GIGABITS
        prefill_s = float(found.replicas[prefill].behaviour.prefill_s[0])
        behind_s = max(0.0, wire_s - prefill_s) * (MODEL.layers - 1) / MODEL.layers
        sent_s = float(found.pairs.latency_s[pair]) + wire_s / MODEL.layers + behind_s
        assert float(times.sending.least_s[pair, 0]) == pytest.approx(sent_s + float(row[decode].join_s))


def test_a_pair_is_worth_what_it_has_in_time_beside_what_each_replica_loses() -> None:
    (found,) = lower_level(1.0, gbps=2.0).orchestrate(UNLIKE, solver=solve_quick)
    model, counts = found.model, (3, 1)
    worth = model.worth(found.curves, counts)
    cross = np.flatnonzero(found.pairs.prefill != found.pairs.decode)
    kept = np.flatnonzero(found.pairs.prefill == found.pairs.decode)
    assert worth[kept].tolist() == [1.0]
    busy = np.array([[REFERENCE_BUSY * bool(found.pairs.link_demands[pair]) for pair in cross.tolist()]])
    assert set(busy[0].tolist()) == {0.0, REFERENCE_BUSY}, "KV between replicas of a box takes no link"
    loads = np.full((1, 3), LOADS[REFERENCE_LOAD])
    pools = Pool.of_equals(3), Pool.of_equals(1)
    share = model.times(cross, loads, busy, pools).share_in_time(DEADLINES)
    alone = [float(curve.in_time_share[REFERENCE_LOAD]) for curve in found.curves]
    lost = [alone[int(found.pairs.prefill[pair])] + alone[int(found.pairs.decode[pair])] for pair in cross.tolist()]
    assert worth[cross].tolist() == pytest.approx((2.0 + share - np.array(lost)).tolist())


def test_a_pair_waits_for_the_busiest_of_its_links() -> None:
    (found,) = lower_level(1.0).orchestrate(UNLIKE, solver=solve_quick)
    demands: list[tuple[LinkDemand, ...]] = [
        (),
        (LinkDemand(0, 1, 1.0),),
        (LinkDemand(0, 1, 1.0), LinkDemand(1, 0, 2.0)),
    ]
    pairs = found.pairs._replace(link_demands=demands)
    busy = np.array([[0.0, 0.3], [0.6, 0.0]])
    assert busiest_link(pairs, np.array([0, 1, 2]), busy).tolist() == [0.0, 0.3, 0.6]
    assert busiest_link(pairs, np.array([2, 0]), busy).tolist() == [0.6, 0.0]
