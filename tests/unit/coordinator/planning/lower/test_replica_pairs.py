"""Which replicas may be paired, which links their KV takes, and how busy those are."""

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.flow import LinkDemand
from p2pserve.coordinator.planning.lower.replica_pairs import ClusterLinks, KVHolder, ReplicaPairs, pair_replicas
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.length_classes import classify_lengths
from p2pserve.coordinator.planning.model.link_share import LEAST, MOST, LinkShares
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
CARD = gpu_table().find("A40-48GB", Specs.DENSE)


def links(gbps: list[list[float]], rtt_s: float | list[list[float]] = 0.01) -> ClusterLinks:
    size = len(gbps)
    cluster = Cluster(
        boxes=tuple(Box(id=f"b{number}", gpu=CARD, gpus=4, gpu_link_gbps=200.0) for number in range(size)),
        gbps=np.array(gbps), rtt_s=np.broadcast_to(rtt_s, (size, size)), usd_per_gb=np.zeros((size, size)),
    )  # fmt: skip
    workload = Workload(name="even", prompts=np.full(8, 1000), outputs=np.full(8, 2), rate=1.0)
    service = Service(name="s", model=model_shape("llama-7b"), workload=workload, slo=Slo(tpot_s=0.1))
    return ClusterLinks(cluster, LinkShares([(service, classify_lengths(workload))]))


def on(phase: Phase, *spans: tuple[int, float, float]) -> KVHolder:
    return KVHolder(phase, spans)


def whole(phase: Phase, box: int) -> KVHolder:
    return on(phase, (box, 0.0, 1.0))


def named(pairs: ReplicaPairs) -> set[tuple[int, int]]:
    return set(zip(pairs.prefill.tolist(), pairs.decode.tolist(), strict=True))


TWO = [[0.0, 10.0], [10.0, 0.0]]
THREE = [[0.0, 10.0, 2.0], [10.0, 0.0, 4.0], [1.0, 4.0, 0.0]]


def test_mixed_replicas_keep_their_requests_or_send_them_to_decode_replicas() -> None:
    holders = [whole(P, 0), whole(D, 1), whole(M, 0), whole(M, 1)]
    found = pair_replicas(holders, links(TWO), 1.0)
    assert named(found) == {(2, 2), (3, 3), (0, 1), (0, 2), (0, 3), (2, 1), (3, 1)}


def test_mixed_replicas_alone_are_only_paired_with_themselves() -> None:
    found = pair_replicas([whole(M, 0), whole(M, 1)], links(TWO), 1.0)
    assert named(found) == {(0, 0), (1, 1)}
    assert found.latency_s.tolist() == found.gigabit_s.tolist() == [0.0, 0.0]
    assert found.link_demands == [(), ()]


def test_requests_come_to_the_gateways_of_all_boxes_and_a_split_one_is_told_of_to_both_replicas() -> None:
    rtt_s = [[7.0, 0.1, 0.3], [0.1, 7.0, 0.2], [0.3, 0.2, 7.0]]  # of a box to itself it means nothing
    found = pair_replicas([whole(P, 0), whole(D, 1), whole(M, 2)], links(THREE, rtt_s), 1.0)
    control_s = dict(zip(zip(found.prefill.tolist(), found.decode.tolist(), strict=True), found.control_s, strict=True))
    p, d, m = (0.1 + 0.3) / 3, (0.1 + 0.2) / 3, (0.3 + 0.2) / 3  # one gateway of three is on the same box
    assert control_s == {
        (2, 2): pytest.approx(m),
        (0, 1): pytest.approx(p + d),
        (0, 2): pytest.approx(p + m),
        (2, 1): pytest.approx(m + d),
    }


@pytest.mark.parametrize("phase", [P, D])
def test_one_phase_alone_has_no_pairs(phase: Phase) -> None:
    assert named(pair_replicas([whole(phase, 0), whole(phase, 1)], links(TWO), 1.0)) == set()
    assert named(pair_replicas([whole(phase, 0), whole(M, 1)], links(TWO), 1.0)) == {
        (1, 1), (0, 1) if phase is P else (1, 0)
    }  # fmt: skip


def test_a_pair_without_a_link_is_left_out() -> None:
    one_way = [[0.0, 10.0], [0.0, 0.0]]
    assert named(pair_replicas([whole(P, 0), whole(D, 1)], links(one_way), 1.0)) == {(0, 1)}
    assert named(pair_replicas([whole(P, 1), whole(D, 0)], links(one_way), 1.0)) == set()


def test_kv_between_two_boxes_takes_half_a_round_trip_and_the_links_rate() -> None:
    found = pair_replicas([whole(P, 0), whole(D, 1)], links(TWO, rtt_s=0.04), 3.0)
    assert found.latency_s.tolist() == [0.02]
    assert found.gigabit_s.tolist() == [pytest.approx(0.1)]
    assert found.link_demands == [(LinkDemand(0, 1, 3.0),)]


def test_kv_inside_a_box_takes_no_link_of_the_cluster() -> None:
    found = pair_replicas([whole(P, 0), whole(D, 0)], links(TWO), 3.0)
    assert found.link_demands == [()]
    assert found.gigabit_s.tolist() == [pytest.approx(1 / 200.0)]
    assert found.latency_s[0] < 1e-3


def test_stages_send_the_layers_that_both_sides_hold_and_the_slowest_counts() -> None:
    """A quarter of the layers goes 0 -> 1, and three quarters 0 -> 2 and 1 -> 2, half of which comes from each."""
    prefill, decode = on(P, (0, 0.0, 0.5), (1, 0.5, 1.0)), on(D, (1, 0.0, 0.25), (2, 0.25, 1.0))
    found = pair_replicas([prefill, decode], links(THREE), 8.0)
    assert set(found.link_demands[0]) == {LinkDemand(0, 1, 2.0), LinkDemand(0, 2, 2.0), LinkDemand(1, 2, 4.0)}
    # seconds for one Gb of KV: 0.25 / 10, 0.25 / 2, 0.5 / 4, and 0.75 / 4 into the last box
    assert found.gigabit_s.tolist() == [pytest.approx(0.1875)]


def test_stages_that_share_no_layers_exchange_nothing() -> None:
    prefill, decode = on(P, (0, 0.0, 0.5), (1, 0.5, 1.0)), on(D, (0, 0.0, 0.5), (1, 0.5, 1.0))
    found = pair_replicas([prefill, decode], links(TWO), 8.0)
    assert found.link_demands == [()]  # each box has the layers that it needs


def test_of_several_pairs_each_has_its_own_figures() -> None:
    holders = [whole(P, 0), whole(P, 1), on(D, (1, 0.0, 0.5), (2, 0.5, 1.0)), whole(D, 2)]
    found = pair_replicas(holders, links(THREE), 1.0)
    by_pair = dict(zip(zip(found.prefill.tolist(), found.decode.tolist(), strict=True), found.gigabit_s, strict=True))
    assert by_pair == {
        (0, 2): pytest.approx(0.5 / 2.0), (0, 3): pytest.approx(1 / 2.0), (1, 2): pytest.approx(0.5 / 4.0),
        (1, 3): pytest.approx(1 / 4.0),
    }  # fmt: skip


def test_plans_count_on_a_part_of_each_links_rate_and_of_the_fastest_link_of_a_box() -> None:
    capacities = links(THREE).capacities
    rates = np.array(THREE)
    ratio = capacities.between[rates > 0.0] / rates[rates > 0.0]
    assert ((ratio >= LEAST) & (ratio <= MOST)).all()
    assert capacities.out[0] == pytest.approx(capacities.between[0].max())
    assert capacities.into[2] == pytest.approx(capacities.between[:, 2].max())


def test_a_link_is_as_busy_as_itself_or_either_of_its_boxes() -> None:
    found = links(THREE)
    used = np.zeros((3, 3))
    assert found.use(used).tolist() == used.tolist()
    used[0, 1], used[0, 2] = 4.0, 1.0
    busy = found.use(used)
    assert busy[0, 2] == pytest.approx(0.5)  # its own rate is 2; box 0 sends 5 of 10
    assert busy[0, 1] == pytest.approx(0.5)  # box 0 sends 5 of 10
    assert busy[1, 2] == pytest.approx(1.0 / 4.0)  # box 2 takes in 1 of 4
    used[0, 1] = 40.0
    assert found.use(used)[0, 1] == pytest.approx(4.1)  # more than there is: whoever asks sees by how much


def test_hops_are_among_the_boxes_that_are_asked_for() -> None:
    hops = links(THREE).hops([2, 0])
    assert (hops[0][1].gbps, hops[1][0].gbps) == (1.0, 2.0)
    assert hops[0][1].rtt_s == 0.01
    assert links(THREE).hops([1]) == ()


HALVES = ((0, 0.0, 0.5), (1, 0.5, 1.0))
FAST = [[0.0, 10.0, 10.0], [10.0, 0.0, 10.0], [10.0, 10.0, 0.0]]


@pytest.mark.parametrize(("prefill", "decode"), [(HALVES, ((2, 0.0, 1.0),)), (((2, 0.0, 1.0),), HALVES)])
def test_parts_that_one_box_takes_or_sends_share_what_it_has(
    prefill: tuple[tuple[int, float, float], ...], decode: tuple[tuple[int, float, float], ...]
) -> None:
    """Two links of 10 Gb/s each, but a box with no more than that in all."""
    found = pair_replicas([on(P, *prefill), on(D, *decode)], links(FAST), 1.0)
    assert found.gigabit_s == pytest.approx([0.1])


def test_what_stays_in_a_box_takes_none_of_its_rate() -> None:
    found = pair_replicas([on(P, *HALVES), whole(D, 1)], links(FAST), 1.0)
    assert found.gigabit_s == pytest.approx([0.05])


def test_a_slow_link_counts_where_it_takes_longer_than_its_ends() -> None:
    slow = [[0.0, 10.0, 1.0], [10.0, 0.0, 10.0], [10.0, 10.0, 0.0]]
    found = pair_replicas([on(P, *HALVES), whole(D, 2)], links(slow), 1.0)
    assert found.gigabit_s == pytest.approx([0.5]), "half of a request over 1 Gb/s"


def test_parts_between_the_same_boxes_go_one_beside_the_other() -> None:
    """Each of two boxes sends the other half of what it takes: nobody has two parts."""
    four = np.where(np.eye(4, dtype=bool), 0.0, 10.0).tolist()
    found = pair_replicas([on(P, *HALVES), on(D, (2, 0.0, 0.5), (3, 0.5, 1.0))], links(four), 1.0)
    assert found.gigabit_s == pytest.approx([0.05])
