"""KV transfers over the simulated network: when bytes leave, over which links, and when a transfer is complete."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.plan import Phase, Replica, Stage
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.sims.kv_transfers import KVTransfer, KVTransfers, LinkShare, TransferLinks, links_between
from p2pserve.sims.network import FluidNetwork
from p2pserve.sims.scenario import WorldError

ONE_LINK = TransferLinks((LinkShare(0, 1, 1.0),), 0.0)


class Bench:
    """Transfers of ten-layer models whose token is 10 bytes of KV, over links of 100 bytes per second."""

    def __init__(self, *, layerwise: bool = True, boxes: int = 3) -> None:
        self.network = FluidNetwork(np.full((boxes, boxes), 100.0))
        self.transfers = KVTransfers(self.network, layerwise=layerwise)

    def transfer(self, links: TransferLinks = ONE_LINK, *, layers: int = 10, room: bool = True) -> KVTransfer:
        transfer = KVTransfer(7, links, 10.0, layers)
        transfer.has_room = room
        return transfer

    def drain(self) -> list[tuple[object, KVTransfer]]:
        """All transfers that complete, and when."""
        done: list[tuple[object, KVTransfer]] = []
        while self.network.wake_at < inf:
            now = self.network.wake_at
            found = [self.transfers.end_flow(flow) for flow in self.network.advance(now)]
            done += [(now, transfer) for transfer in found if transfer is not None]
        return done


def test_serialised_kv_leaves_after_the_prefill() -> None:
    bench = Bench(layerwise=False)
    transfer = bench.transfer()
    bench.transfers.start_prefill_step(transfer, 20, 1.0, 0.0)
    assert len(bench.network) == 0
    bench.transfers.end_prefill(transfer, 1.0)
    assert transfer.begun_at == 1.0
    assert bench.drain() == [(pytest.approx(3.0), transfer)]  # 200 bytes


def test_layerwise_kv_leaves_while_it_is_computed_and_the_last_layer_after_it() -> None:
    bench = Bench()
    transfer = bench.transfer()
    bench.transfers.start_prefill_step(transfer, 20, 10.0, 0.0)
    # Nine of ten layers are sent within the step, so another flow has the rest of the link.
    other = bench.network.start(0, 1, 1e6, 0.0)
    assert other.rate == pytest.approx(100.0 - 200 * 0.9 / 10.0)
    bench.network.stop(other, 5.0)
    bench.transfers.end_prefill(transfer, 10.0)
    assert bench.drain() == [(pytest.approx(10.0 + 20.0 / 100.0), transfer)]
    assert transfer.begun_at == 0.0


def test_kv_is_late_when_computing_takes_less_than_what_is_left_of_it() -> None:
    bench = Bench(layerwise=False)
    limited = KVTransfers(bench.network, layerwise=False, wait_limit=2.0)
    transfer = bench.transfer(room=False)
    limited.start_prefill_step(transfer, 20, 1.0, 0.0)
    limited.end_prefill(transfer, 1.0)
    assert not limited.is_late(transfer, 0.0, 1.5)  # there is no room for it yet
    limited.grant_room(transfer, 2.0)  # two seconds on the link
    assert [limited.is_late(transfer, 0.9, now) for now in (2.0, 2.05, 2.15)] == [True, True, False]
    assert not limited.is_late(transfer, 1.0, 2.0)
    assert limited.may_be_late
    assert not bench.transfers.may_be_late
    assert not bench.transfers.is_late(transfer, 0.01, 2.0)


def test_a_link_that_is_slower_than_the_prefill_is_what_limits() -> None:
    bench = Bench()
    transfer = bench.transfer()
    bench.transfers.start_prefill_step(transfer, 100, 1.0, 0.0)
    bench.transfers.end_prefill(transfer, 1.0)
    assert bench.drain() == [(pytest.approx(10.0), transfer)]


@pytest.mark.parametrize(("layers", "until"), [(1, 5.0), (10, 0.0)])
def test_one_layer_and_a_step_without_time_are_not_sent_early(layers: int, until: float) -> None:
    bench = Bench()
    transfer = bench.transfer(layers=layers)
    bench.transfers.start_prefill_step(transfer, 20, until, 0.0)
    assert (len(bench.network), transfer.unsent) == (0, 20)


def test_nothing_leaves_before_the_decode_replica_has_room() -> None:
    bench = Bench()
    transfer = bench.transfer(room=False)
    bench.transfers.start_prefill_step(transfer, 20, 1.0, 0.0)
    bench.transfers.end_prefill(transfer, 1.0)
    assert (len(bench.network), transfer.unsent) == (0, 20)
    bench.transfers.grant_room(transfer, 5.0)
    assert bench.drain() == [(pytest.approx(7.0), transfer)]


def test_room_in_the_middle_of_a_prefill_lets_later_steps_leave_early() -> None:
    bench = Bench()
    transfer = bench.transfer(room=False)
    bench.transfers.start_prefill_step(transfer, 20, 1.0, 0.0)
    bench.transfers.grant_room(transfer, 0.5)
    assert len(bench.network) == 0  # the first step's KV waits for the end of the prefill
    bench.transfers.start_prefill_step(transfer, 10, 2.0, 1.0)
    assert len(bench.network) == 1
    bench.transfers.end_prefill(transfer, 2.0)
    assert transfer.unsent == 0
    ((at, done),) = bench.drain()
    assert done is transfer
    assert bench.transfers.sent_bytes == {(0, 1): pytest.approx(300.0)}
    assert at == pytest.approx(2.0 + (200 + 10) / 100.0)


def test_a_transfer_is_complete_with_the_last_of_its_links() -> None:
    bench = Bench()
    links = TransferLinks((LinkShare(0, 1, 0.25), LinkShare(2, 1, 0.75)), 0.0)
    transfer = bench.transfer(links)
    bench.transfers.end_prefill(transfer, 0.0)  # an empty prompt has nothing to send
    assert bench.drain() == []
    bench.transfers.start_prefill_step(transfer, 20, 0.0, 0.0)
    bench.transfers.end_prefill(transfer, 0.0)
    # Both share what box 1 receives: 50 bytes stop sharing after a second, 150 take two in all.
    assert bench.drain() == [(pytest.approx(2.0), transfer)]
    assert bench.transfers.sent_bytes == {(0, 1): pytest.approx(50.0), (2, 1): pytest.approx(150.0)}


def test_an_abandoned_transfer_leaves_the_links_to_others() -> None:
    bench = Bench()
    gone, other = bench.transfer(), bench.transfer()
    for transfer in (gone, other):
        bench.transfers.start_prefill_step(transfer, 20, 0.0, 0.0)
        bench.transfers.end_prefill(transfer, 0.0)
    bench.transfers.abandon(gone, 2.0)
    assert len(bench.network) == 1
    assert bench.drain() == [(pytest.approx(3.0), other)]  # 100 bytes at half the rate, 100 at all of it
    assert bench.transfers.sent_bytes[0, 1] == pytest.approx(400.0)  # what was begun counts


def replica(*stages: tuple[str, int, int]) -> Replica:
    return Replica(
        id=stages[0][0],
        phase=Phase.PREFILL,
        stages=tuple(
            Stage(peer=peer, tp=1, first_layer=first, last_layer=last, first_gpu=number)
            for number, (peer, first, last) in enumerate(stages)
        ),
    )


def cluster(rtt_s: float = 0.1, gbps: float = 1.0) -> Cluster:
    gpu = gpu_table().find("A40")
    return Cluster(
        boxes=tuple(Box(id=name, gpu=gpu, gpus=4, gpu_link_gbps=160.0) for name in "abc"),
        gbps=np.full((3, 3), gbps),
        rtt_s=np.array([[0.0, rtt_s, 2 * rtt_s], [rtt_s, 0.0, rtt_s], [2 * rtt_s, rtt_s, 0.0]]),
        usd_per_gb=np.zeros((3, 3)),
    )


def test_stages_send_the_layers_that_the_other_side_holds() -> None:
    links = links_between(cluster(), replica(("a", 0, 6), ("b", 6, 10)), replica(("b", 0, 4), ("c", 4, 10)))
    assert {(share.source, share.target): share.fraction for share in links.shares} == {
        (0, 1): pytest.approx(0.4),
        (0, 2): pytest.approx(0.2),
        (1, 2): pytest.approx(0.4),
    }
    assert links.rtt_s == pytest.approx(0.2)


def test_stages_of_one_box_share_its_links_and_take_no_round_trip() -> None:
    links = links_between(cluster(), replica(("a", 0, 5), ("a", 5, 10)), replica(("a", 0, 10)))
    assert links == TransferLinks((LinkShare(0, 0, 1.0),), 0.0)


def test_boxes_without_a_link_cannot_be_paired() -> None:
    with pytest.raises(WorldError, match="pairing a -> b: there is no link from box a to box b"):
        links_between(cluster(gbps=0.0), replica(("a", 0, 10)), replica(("b", 0, 10)))
    links_between(cluster(gbps=0.0), replica(("a", 0, 10)), replica(("a", 0, 10)))  # needs none


def test_a_short_prompt_is_sent_after_its_prefill_and_a_long_one_meanwhile() -> None:
    bench = Bench()
    short, long = bench.transfer(), bench.transfer()
    short.is_short = True
    for transfer in (short, long):
        bench.transfers.start_prefill_step(transfer, 20, 10.0, 0.0)
    assert (len(bench.network), short.unsent, long.unsent) == (1, 20, 0)
    assert (short.is_layerwise, long.is_layerwise) == (False, True)
