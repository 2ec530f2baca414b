"""What other services have on the box of a node, as its gateways know it."""

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.node.engine.protocol import EngineStats
from p2pserve.node.messages import Advert
from p2pserve.node.view import Queue

from .test_view import A, B, C, advert, view_of


def sharing(stats: EngineStats | None, *beside: PeerId) -> Advert:
    return msgspec.structs.replace(advert(stats=stats), beside=beside)


def stats_of(running: int, tokens: int) -> EngineStats:
    return EngineStats(running, 0, 0.1, 500, tokens)


def test_what_other_services_have_on_a_box_counts_beside_a_nodes_own_load() -> None:
    view = view_of(a=sharing(stats_of(1, 0), A, B), b=sharing(stats_of(3, 900), A, B), c=advert(stats=stats_of(5, 50)))
    view.weigh_reports({B: Queue(1, 300)})
    loads = {load.replica: load for load in view.loads({A: Queue(2, 40), B: Queue(1, 300)})}
    assert loads[A].beside == (3, 900)
    assert loads[B].beside == (1 + 2, 40)
    assert loads[C].beside == (0, 0)
    assert loads[A].outstanding == 3


@pytest.mark.parametrize(
    "hostile",
    [
        sharing(stats_of(0, 0), A, B),  # B knows nothing of it
        sharing(stats_of(0, 0), B),
        sharing(stats_of(0, 0), A, A, B),
        sharing(None, A, PeerId("nobody")),
    ],
)
def test_a_node_that_says_it_shares_another_ones_box_burdens_neither(hostile: Advert) -> None:
    view = view_of(a=hostile, b=advert(stats=stats_of(2**40, 2**40)))
    view.weigh_reports({})
    assert [load.beside for load in view.loads({})] == [(0, 0), (0, 0)]


def test_work_of_an_engine_that_has_ended_does_not_count_beside() -> None:
    view = view_of(a=sharing(stats_of(0, 0), A, B), b=sharing(stats_of(3, 900), A, B))
    view.weigh_reports({})
    view.adverts[B] = sharing(None, A, B)
    assert [load.beside for load in view.loads({})] == [(0, 0), (0, 0)]
