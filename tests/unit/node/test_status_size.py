"""What a node tells of its network fits a message, however large the network is and whatever its members say."""

import msgspec
import pytest

from p2pserve.bootstrap.streams.frames import MAX_FRAME
from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.kvtransport.probing.figures import LinkFigures
from p2pserve.node.adverts import MAX_STATUS_BYTES, fit_status
from p2pserve.node.messages import LinkTable, NodeStatus, Status

from .test_view import advert

LINK = LinkFigures(rtt_s=0.01, one_stream_gbps=0.2, capacity_gbps=8.0)
ALONE = Replica(id="a", phase=Phase.MIXED, stages=(Stage(peer="a", tp=1, first_layer=0, last_layer=4),))
PLAN = Plan(
    epoch=1,
    version=1,
    service="tiny",
    replicas=(ALONE,),
    pairings=(Pairing(prefill="a", decode="a", weight=1.0),),
    codec="kv4",
    why=(),
)


def status(count: int, *, links: int = 0, wordy: int = 0) -> Status:
    """Of so many nodes, with so many links each; `wordy` of them say as much of themselves as they can."""
    table = LinkTable(links={f"12D3KooW{number:044d}": LINK for number in range(links)}) if links else None
    nodes = tuple(
        NodeStatus(
            peer=f"peer {number}",
            role="worker",
            state="alive",
            address="192.0.2.1:4001",
            rtt_s=0.01,
            advert=advert(detail="x" * (2000 if number < wordy else 0)),
            links=table,
        )
        for number in range(count)
    )
    return Status(answered_by="peer 0", coordinator="peer 0", epoch=1, nodes=nodes, plan=PLAN)


def size(told: Status) -> int:
    return len(msgspec.msgpack.encode(told))


def test_what_fits_is_told_whole() -> None:
    told = status(30, links=29)
    assert fit_status(told) is told


def test_of_a_large_network_links_are_left_out() -> None:
    told = status(1000, links=200)
    assert size(told) > MAX_FRAME
    found = fit_status(told)
    assert size(found) <= MAX_STATUS_BYTES
    assert found.nodes == tuple(msgspec.structs.replace(node, links=None) for node in told.nodes)
    assert found.plan == PLAN


@pytest.mark.parametrize(("count", "wordy"), [(4000, 400), (4000, 4000)])
def test_those_that_say_most_are_left_out_first_and_all_members_are_named(count: int, wordy: int) -> None:
    told = status(count, wordy=wordy)
    assert size(told) > MAX_STATUS_BYTES
    found = fit_status(told)
    assert size(found) <= MAX_STATUS_BYTES
    assert [node.peer for node in found.nodes] == [node.peer for node in told.nodes]
    silent = {node.peer for node in found.nodes if node.advert is None}
    assert silent <= {f"peer {number}" for number in range(wordy)} or silent >= {
        f"peer {number}" for number in range(wordy)
    }
    assert found.plan == PLAN
