"""In which cut the nodes of a box run, and what follows from how that goes."""

import pytest

from p2pserve.coordinator.regrouping.divisions import CutOffer
from p2pserve.sdk.replicas.cuts import MAX_WHY, CutKeeper

OFFERS = tuple(CutOffer(replicas=number, tp=4 // number, longest=8192) for number in (1, 2, 4))
NODES = ("a", "b")
EVERY_S = 600.0


def keeper(replicas: int = 2, offers: tuple[CutOffer, ...] = OFFERS) -> CutKeeper:
    return CutKeeper(replicas, offers, EVERY_S)


def on_trial(now: float = 1000.0) -> CutKeeper:
    found = keeper()
    assert found.want(4, NODES, now) == ""
    found.start_next(now)
    assert (found.replicas, found.next, found.is_on_trial) == (4, None, True)
    return found


def test_a_cut_is_kept_once_all_of_its_nodes_serve() -> None:
    found = on_trial()
    for node in ("node", "node-2", "node-3", "node-3"):
        assert not found.note_ready(node)
    assert found.note_ready("node-4")
    assert not found.is_on_trial
    assert not found.fail("node-2: killed")  # from now on a node that fails is started again
    assert (found.replicas, found.next) == (4, None)


def test_a_node_that_fails_on_trial_brings_back_the_cut_before_and_the_reason() -> None:
    found = on_trial()
    assert found.fail("node-3: " + "no memory " * 100)
    assert not found.fail("node-4: lost with the others")
    assert found.next == 2
    found.start_next(1010.0)
    assert (found.replicas, found.is_on_trial) == (2, False)
    told = found.describe(NODES)
    assert (told.division.nodes, told.division.refused) == (NODES, 4)
    assert told.division.why.startswith("node-3: no memory")
    assert len(told.division.why) == MAX_WHY
    assert not found.fail("node: of the cut that ran before")  # there is none to go back to


@pytest.mark.parametrize(
    ("replicas", "now", "why"),
    [
        (2, 9e9, "has 2 nodes already"),
        (3, 9e9, "does not offer 3 nodes"),
        (1, 1000.0 + EVERY_S - 1.0, "may be again in 1 s"),
        (1, 1000.0 + EVERY_S, ""),
    ],
)
def test_the_network_chooses_among_what_is_offered_and_not_too_often(replicas: int, now: float, why: str) -> None:
    found = on_trial(990.0)
    found.fail("node: no")
    found.start_next(1000.0)
    assert found.want(replicas, NODES, now).endswith(why)
    assert (found.next is None) == bool(why)


def test_one_change_at_a_time() -> None:
    found = on_trial()
    assert "already" in found.want(1, NODES, 9e9)
    waiting = keeper()
    assert waiting.want(4, NODES, 0.0) == ""
    assert "already" in waiting.want(1, NODES, 0.0)
    assert waiting.next == 4


def test_a_later_cut_forgets_what_was_refused_before() -> None:
    found = on_trial()
    found.fail("node-3: no")
    found.start_next(1000.0)
    assert found.want(1, NODES, 9e9) == ""
    found.start_next(9e9)
    assert found.describe(("a",)).division.refused == 0


def test_a_box_whose_owner_has_fixed_its_cut_takes_no_other() -> None:
    fixed = keeper(offers=())
    assert not fixed.is_open
    assert "does not offer" in fixed.want(4, NODES, 0.0)
