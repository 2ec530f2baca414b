"""KV as fluids: what is shared is shared exactly, what is not is not, and nothing gets lost."""

import random
from math import inf

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.sims.kv_transfers import KVTransfer, KVTransfers, LinkShare, TransferLinks
from p2pserve.sims.network import Flow, FluidError, FluidNetwork, link_capacities


def network(rows: list[list[float]]) -> FluidNetwork:
    return FluidNetwork(np.array(rows))


FOUR = [[0.0 if a == b else 10.0 for b in range(4)] for a in range(4)]


def drain(net: FluidNetwork) -> dict[int, float]:
    """When each flow ends, by its key."""
    ends: dict[int, float] = {}
    while net.wake_at < inf:
        now = net.wake_at
        net.check_integrity()
        for flow in net.advance(now):
            ends[flow.key] = now
    return ends


def test_two_equal_transfers_take_twice_as_long() -> None:
    net = network(FOUR)
    net.start(0, 1, 100.0, 0.0)
    assert list(drain(net).values()) == [pytest.approx(10.0)]
    net.start(0, 1, 100.0, 20.0)
    net.start(0, 1, 100.0, 20.0)
    assert list(drain(net).values()) == [pytest.approx(40.0), pytest.approx(40.0)]


@pytest.mark.parametrize(
    ("ways", "rates"),
    [
        ([(0, 1), (2, 3)], [10.0, 10.0]),  # nothing in common
        ([(0, 1), (0, 2)], [5.0, 5.0]),  # the sender
        ([(0, 2), (1, 2)], [5.0, 5.0]),  # the receiver
        ([(0, 1), (1, 0)], [10.0, 10.0]),  # both directions at once
        ([(0, 1), (0, 2), (3, 2), (3, 2)], [20 / 3, 10 / 3, 10 / 3, 10 / 3]),  # who is held back leaves it to others
    ],
)
def test_shares_are_fair(ways: list[tuple[int, int]], rates: list[float]) -> None:
    net = network(FOUR)
    flows = [net.start(a, b, 1000.0, 0.0) for a, b in ways]
    net.check_integrity()
    assert [flow.rate for flow in flows] == [pytest.approx(rate) for rate in rates]


def test_a_slow_link_leaves_the_rest_of_its_box_to_others() -> None:
    net = network([[0.0, 2.0, 10.0], [10.0, 0.0, 10.0], [10.0, 10.0, 0.0]])
    slow, fast = net.start(0, 1, 20.0, 0.0), net.start(0, 2, 80.0, 0.0)
    assert (slow.rate, fast.rate) == (2.0, 8.0)
    assert list(drain(net).values()) == [pytest.approx(10.0), pytest.approx(10.0)]


def test_who_leaves_makes_room() -> None:
    net = network(FOUR)
    first, second = net.start(0, 1, 50.0, 0.0), net.start(0, 2, 100.0, 0.0)
    assert net.wake_at == pytest.approx(10.0)
    assert net.advance(net.wake_at) == [first]
    assert second.rate == 10.0
    assert net.wake_at == pytest.approx(15.0)
    net.stop(second, 12.0)
    net.stop(second, 12.0)  # once more does nothing
    assert (len(net), net.wake_at) == (0, inf)


def test_inside_a_box_the_links_to_others_do_not_matter() -> None:
    net = network([[40.0, 10.0], [10.0, 40.0]])
    outside = net.start(0, 1, 100.0, 0.0)
    inside = [net.start(0, 0, 100.0, 0.0) for _ in range(2)]
    assert (outside.rate, [flow.rate for flow in inside]) == (10.0, [20.0, 20.0])


def test_a_limit_holds_until_it_is_lifted() -> None:
    net = network(FOUR)
    slow, other = net.start(0, 1, 30.0, 0.0, limit=2.0), net.start(0, 1, 40.0, 0.0)
    assert (slow.rate, other.rate) == (2.0, 8.0)
    assert net.advance(net.wake_at) == [other]
    net.lift_limit(slow, 6.0)
    assert net.wake_at == pytest.approx(6.0 + 18.0 / 10.0)


def test_at_least_so_much_is_left_when_a_limit_is_lifted() -> None:
    net = network(FOUR)
    flow = net.start(0, 1, 30.0, 0.0, limit=10.0)
    net.lift_limit(flow, 2.9, at_least=5.0)
    assert net.wake_at == pytest.approx(3.4)


def test_capacities_of_a_cluster_with_many_streams_and_with_few() -> None:
    gpu = gpu_table().find("A40")
    boxes = tuple(Box(id=name, gpu=gpu, gpus=2, gpu_link_gbps=160.0) for name in "ab")
    two = np.array([[0.0, 40.0], [40.0, 0.0]])
    cluster = Cluster(boxes=boxes, gbps=two, rtt_s=np.array([[0.0, 0.1], [0.1, 0.0]]), usd_per_gb=np.zeros((2, 2)))
    assert link_capacities(cluster)[0].tolist() == [20e9, 5e9]
    # a stream moves 2.6 MB in a round trip of 100 ms
    assert link_capacities(cluster, streams=4)[0].tolist() == [20e9, pytest.approx(4 * 26e6)]


def test_what_cannot_be_sent() -> None:
    net = network([[1.0, 0.0], [5.0, 1.0]])
    with pytest.raises(FluidError, match="no link from box 0 to box 1"):
        net.start(0, 1, 10.0, 0.0)
    with pytest.raises(FluidError, match="a flow of 0"):
        net.start(1, 0, 0.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_any_traffic_is_fair_and_arrives(seed: int) -> None:
    """Random flows, limits and stops: at every moment no capacity is exceeded and nobody is slow for no reason; and
    all bytes arrive."""
    rng = random.Random(seed)
    boxes = 5
    net = network([[rng.choice((3.0, 7.0, 10.0)) for _ in range(boxes)] for _ in range(boxes)])
    now, live, sent = 0.0, dict[int, tuple[Flow, float, float]](), 0
    for _ in range(120):
        now += rng.expovariate(1.0)
        while net.wake_at <= now:
            at = net.wake_at
            for flow in net.advance(at):
                _, size, begun = live.pop(flow.key)
                assert at - begun >= size / 10.0 - 1e-6  # no link is faster
        action = rng.random()
        if action < 0.7 or not live:
            size = rng.uniform(1.0, 40.0)
            flow = net.start(
                rng.randrange(boxes), rng.randrange(boxes), size, now, limit=rng.choice((inf, inf, 0.5, 2.0))
            )
            live[flow.key] = (flow, size, now)
            sent += 1
        elif action < 0.9:
            net.lift_limit(rng.choice(list(live.values()))[0], now)
        else:
            key = rng.choice(list(live))
            net.stop(live.pop(key)[0], now)
        net.check_integrity()
    assert drain(net).keys() == live.keys()
    assert len(net) == 0
    assert sent > 60


def test_kv_whose_next_chunk_is_put_off_arrives_all_the_same() -> None:
    network = FluidNetwork(np.full((2, 2), 1e9))
    transfers = KVTransfers(network, layerwise=True)
    transfer = KVTransfer(1, TransferLinks((LinkShare(0, 1, 1.0),), 0.0), 1e6, layers=4)
    transfer.has_room = True
    transfers.start_prefill_step(transfer, 100, 1.0, 0.0)  # 75 MB/s while it is read: all 100 MB have left after 1.33 s
    (early,) = network.advance(2.0)
    assert transfers.end_flow(early) is None
    transfers.start_prefill_step(transfer, 100, 3.0, 2.0)
    transfers.end_prefill(transfer, 3.0)
    ended = []
    while network.wake_at < inf:
        ended += [transfers.end_flow(flow) for flow in network.advance(network.wake_at)]
    assert ended[-1] is transfer
    assert transfers.sent_bytes == {(0, 1): pytest.approx(200e6)}
