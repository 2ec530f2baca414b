"""Which paths are chosen for what a node sends, and what reports of its engine change about them."""

import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.kvtransport.probing.estimates import LinkEstimator
from p2pserve.kvtransport.probing.figures import MAX_STREAMS, BoxFigures, LinkFigures
from p2pserve.kvtransport.routing.choices import ChoiceCache
from p2pserve.kvtransport.routing.paths import PathChoice
from p2pserve.node.engine import protocol
from p2pserve.node.links.kv_links import Ends
from p2pserve.node.links.link_knowledge import LinkKnowledge
from p2pserve.node.links.path_selection import DIRECT, NewPaths, PathSelector
from p2pserve.node.messages import LinkTable
from p2pserve.node.settings import WAN, BoxLinkSettings

OWN, T, R = PeerId("own"), PeerId("target"), PeerId("relay")
RANK = protocol.WorkerRank()
ENDS = Ends(T, RANK, RANK)
LINK, OTHER = b"l" * 16, b"o" * 16
MB = 1_000_000
SIZE = 500 * MB


def figures(gbps: float) -> LinkFigures:
    return LinkFigures(rtt_s=0.02, one_stream_gbps=min(gbps, 1.0), capacity_gbps=gbps)


class Selection:
    """A selector of a node with a slow link to the target, and a relay with two fast ones."""

    def __init__(self, direct_gbps: float = 0.1) -> None:
        estimators = {T: LinkEstimator(figures(direct_gbps)), R: LinkEstimator(figures(2.0))}
        settings = BoxLinkSettings(box=BoxFigures(up_usd_per_gb=2.0))
        self.knowledge = LinkKnowledge(OWN, settings, estimators=estimators)
        tables = {R: LinkTable(box=BoxFigures(relay_gbps=2.0), links={T: figures(2.0)}), T: LinkTable()}
        self.knowledge.learn(tables, [])
        self.can_dial = {T, R}
        self.selector = PathSelector(self.knowledge, self.can_dial.__contains__)

    def choose(self, now: float = 0.0) -> PathChoice:
        return self.selector.choose(self.selector.query(T, SIZE), LINK, ChoiceCache(), now)

    def begin(self, now: float = 0.0, link: bytes = LINK) -> PathChoice:
        query, choice = self.selector.query(T, SIZE), self.choose(now)
        self.selector.begin(link, ENDS, query, ChoiceCache(), choice, now)
        return choice

    def report(
        self, moved: int, waiting: int, now: float, label: str = DIRECT, blocked: bool = False
    ) -> NewPaths | None:
        paths = (protocol.PathReport(label, 4, moved, waiting, 0.0, None),)
        report = protocol.LinkReport(link=LINK, paths=paths, transfers=1, waiting_bytes=waiting, blocked=blocked)
        return self.selector.on_report(report, now)

    def stall(self) -> NewPaths:
        """The target's link moves nothing, until other paths are wanted."""
        for quarter in range(200):
            new = self.report(0, 100 * MB, quarter / 4, self.label)
            if new is not None:
                return new
        raise AssertionError("no other paths were wanted within 50 s")

    @property
    def label(self) -> str:
        (known,) = self.selector.links_to(T)
        return known.choice.paths[0].via or DIRECT


def vias(choice: PathChoice) -> set[str | None]:
    return {path.via for path in choice.paths}


def test_a_relay_that_refused_or_cannot_be_dialled_is_left_out_for_a_while() -> None:
    world = Selection()
    assert R in vias(world.choose())
    world.selector.refuse(R, T, 10.0)
    assert vias(world.choose(10.0 + WAN.relay_refused_s - 0.01)) == {None}
    assert R in vias(world.choose(10.0 + WAN.relay_refused_s))
    world.can_dial.discard(R)
    assert vias(world.choose(1000.0)) == {None}


def test_a_relay_that_hangs_is_left_out_until_it_answers() -> None:
    world = Selection()
    world.selector.peer_hung(R, True)
    assert vias(world.choose()) == {None}
    world.selector.peer_hung(R, False)
    assert R in vias(world.choose())
    world.selector.peer_hung(R, True)
    world.selector.forget_peer(R)  # gone: what joins under its key is another life of it
    assert R in vias(world.choose())


def test_links_move_while_something_waits_and_reports_are_fresh() -> None:
    world = Selection(direct_gbps=2.0)
    world.begin()
    assert world.selector.moving(0.0) == 0
    world.report(MB, 10 * MB, 1.0)
    assert world.selector.moving(1.0 + WAN.fresh_s - 0.01) == 1
    assert world.selector.moving(1.0 + WAN.fresh_s) == 0
    world.report(11 * MB, 0, 1.5)
    assert world.selector.moving(1.5) == 0


def test_what_a_link_is_still_sending_goes_over_the_new_choice_too() -> None:
    world = Selection(direct_gbps=2.0)
    world.begin()
    world.report(MB, 10 * MB, 1.0)
    world.begin(1.5)
    (known,) = world.selector.links_to(T)
    assert known.controller.remaining == SIZE + 10 * MB
    world.begin(1.0 + WAN.fresh_s)  # the report is too old to say anything
    (known,) = world.selector.links_to(T)
    assert known.controller.remaining == SIZE


def test_a_path_that_stalls_is_changed_once_and_confirmed() -> None:
    world = Selection()
    first = world.begin()
    new = world.stall()
    assert (new.link, new.peer) == (LINK, T)
    assert vias(new.choice) != vias(first)
    assert world.report(0, 100 * MB, 60.0, world.label) is None  # others are being made ready
    assert world.selector.confirm(new)
    (known,) = world.selector.links_to(T)
    assert (known.choice, known.is_changing) == (new.choice, False)


def test_new_paths_are_not_taken_when_a_newer_transfer_has_chosen() -> None:
    world = Selection()
    world.begin()
    new = world.stall()
    choice = world.begin(51.0)
    assert not world.selector.confirm(new)
    (known,) = world.selector.links_to(T)
    assert known.choice == choice


def test_paths_that_cannot_be_dialled_are_watched_for_anew() -> None:
    world = Selection()
    world.begin()
    new = world.stall()
    before = new.of.controller
    world.selector.reject(new, 51.0)
    assert not new.of.is_changing
    assert new.of.controller is not before


def test_a_transfer_is_billed_by_what_its_paths_carried_and_ends_what_waits() -> None:
    world = Selection(direct_gbps=2.0)
    world.begin()
    world.report(MB, 10 * MB, 1.0)
    report = protocol.TransferReport(
        transfer=b"t" * 16, delivered=True, reason="", frames=1, raw_bytes=1, wire_bytes=1, span_s=1.0, visible_s=0.1,
        hidden_fraction=0.9, link=LINK, mode="layerwise", paths={DIRECT: 500 * MB}, resent_bytes=0, blocked_s=0.0,
    )  # fmt: skip
    assert world.selector.end_transfer(T, report, 1.0) == pytest.approx(1.0)  # half a gigabyte at 2 dollars
    assert world.selector.moving(1.0) == 0


def test_links_are_forgotten_with_their_peer_their_engine_or_their_successor() -> None:
    world = Selection()
    for everybody in (False, True):
        world.begin()
        world.selector.forget_peer(R)
        assert len(world.selector.links_to(T)) == 1
        if everybody:
            world.selector.forget_all()
        else:
            world.selector.forget_peer(T)
        assert world.selector.links_to(T) == []
    world.begin()
    world.begin(link=OTHER)
    assert world.selector.replace_links(ENDS, OTHER) == [LINK]
    assert world.selector.replace_links(ENDS, OTHER) == []
    assert world.report(0, MB, 1.0) is None  # of a link that is not known any more


def test_a_link_that_set_the_pace_has_been_measured() -> None:
    for blocked, waiting, measured in ((False, 10 * MB, 1), (True, 10 * MB, 0), (False, MB, 0)):
        world = Selection(direct_gbps=2.0)
        world.begin()
        for moved, now in ((MB, 1.0), (2 * MB, 2.0), (20 * MB, 3.0)):
            world.report(moved, waiting, now, blocked=blocked)
        assert len(world.knowledge.take_measured()) == measured


def test_who_is_blocked_by_the_receiver_does_not_blame_its_paths() -> None:
    world = Selection()
    world.begin()
    assert all(world.report(0, 100 * MB, quarter / 4, world.label, blocked=True) is None for quarter in range(200))


def test_connections_of_late_are_warm_and_need_no_handshake() -> None:
    world = Selection(direct_gbps=2.0)
    world.begin(1000.0)
    warm, cold = world.choose(1000.0 + WAN.warm_s - 0.01), world.choose(1000.0 + WAN.warm_s)
    assert vias(warm) == vias(cold)
    assert warm.seconds < cold.seconds


def test_links_that_are_warm_share_the_streams_of_a_node() -> None:
    world = Selection(direct_gbps=2.0)
    assert world.selector.limit_streams(100, 0.0) == MAX_STREAMS
    for number in range(4):
        world.begin(float(number), link=bytes([number]) * 16)
    assert world.selector.limit_streams(100, 4.0) == MAX_STREAMS // 4
    assert world.selector.limit_streams(5, 4.0) == 5
    assert world.selector.limit_streams(100, 2.0 + WAN.warm_s) == MAX_STREAMS
    for number in range(100):
        world.begin(5.0, link=bytes([number]) * 16)
    assert world.selector.limit_streams(100, 5.0) == 1
