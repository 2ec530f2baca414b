"""What each report of a link means: what its transfer has left, what is measured, and who shares the wire."""

from typing import Any

import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.kvtransport.probing.estimates import LinkEstimator, TransferSample
from p2pserve.kvtransport.probing.figures import LinkFigures
from p2pserve.kvtransport.routing.choices import ChoiceCache
from p2pserve.kvtransport.routing.paths import PathChoice
from p2pserve.node.engine import protocol
from p2pserve.node.links.kv_links import Ends
from p2pserve.node.links.link_knowledge import LinkKnowledge
from p2pserve.node.links.path_selection import DIRECT, LinkInUse, NewPaths, PathSelector
from p2pserve.node.messages import LinkTable
from p2pserve.node.settings import WAN, BoxLinkSettings

OWN, T, U = PeerId("own"), PeerId("target"), PeerId("another")
RANK = protocol.WorkerRank()
LINK, OTHER = b"l" * 16, b"o" * 16
MB = 1_000_000
SIZE = 500 * MB


class Recorder:
    """The estimator of a link of 2 Gbit/s that remembers what it was told and learns nothing."""

    def __init__(self) -> None:
        self._estimator = LinkEstimator(LinkFigures(rtt_s=0.02, one_stream_gbps=1.0, capacity_gbps=2.0))
        self.samples: list[TransferSample] = []
        self.pings: list[tuple[float | None, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._estimator, name)

    def on_transfer(self, sample: TransferSample, *, now: float) -> bool:
        self.samples.append(sample)
        return sample.link_limited and sample.bytes >= MB

    def on_ping(self, rtt_s: float | None, *, now: float) -> None:
        self.pings.append((rtt_s, now))


class Reports:
    """A selector with a direct link to each of two nodes, and nobody to relay."""

    def __init__(self) -> None:
        self.estimator = Recorder()
        estimators: dict[PeerId, Any] = {T: self.estimator, U: Recorder()}
        self.knowledge = LinkKnowledge(OWN, BoxLinkSettings(), estimators=estimators)
        self.knowledge.learn({T: LinkTable(), U: LinkTable()}, [])
        self.selector = PathSelector(self.knowledge, lambda peer: True)

    def choose(self, now: float, link: bytes = LINK, peer: PeerId = T) -> PathChoice:
        return self.selector.choose(self.selector.query(peer, SIZE), link, ChoiceCache(), now)

    def begin(self, now: float, link: bytes = LINK, peer: PeerId = T) -> LinkInUse:
        query = self.selector.query(peer, SIZE)
        ends = Ends(peer, RANK, RANK)
        self.selector.begin(link, ends, query, ChoiceCache(), self.choose(now, link, peer), now)
        return self.selector.links_to(peer)[-1]

    def report(
        self, now: float, waiting: int, *paths: protocol.PathReport, link: bytes = LINK, blocked: bool = False
    ) -> NewPaths | None:
        report = protocol.LinkReport(link=link, paths=paths, transfers=1, waiting_bytes=waiting, blocked=blocked)
        return self.selector.on_report(report, now)


def path(
    moved: int, *, label: str = DIRECT, connections: int = 4, rtt_s: float | None = None, in_flight: int = MB
) -> protocol.PathReport:
    return protocol.PathReport(label, connections, moved, in_flight, 0.0, rtt_s)


def test_a_new_transfer_counts_from_what_its_link_had_moved_before() -> None:
    world = Reports()
    first = world.begin(0.0)
    world.report(1.0, 0, path(100 * MB))
    assert first.controller.remaining == SIZE - 100 * MB
    second = world.begin(2.0)
    assert second.controller.remaining == SIZE
    world.report(3.0, 0, path(150 * MB))
    assert second.controller.remaining == SIZE - 50 * MB


def test_a_link_that_has_begun_anew_counts_from_nothing() -> None:
    world = Reports()
    world.begin(0.0)
    world.report(1.0, 0, path(100 * MB))
    known = world.begin(2.0)
    world.report(3.0, 0, path(30 * MB))
    assert known.controller.remaining == SIZE - 30 * MB
    assert world.estimator.samples == []  # what it moved since when is not known
    world.report(4.0, 0, path(40 * MB))
    assert [sample.bytes for sample in world.estimator.samples] == [10 * MB]


def test_what_arrives_took_the_time_in_which_nothing_did() -> None:
    """A link that has become slow moves a piece in two or three reports: all of them are the time that it took."""
    world = Reports()
    world.begin(0.0)
    for at, moved in ((0.25, 10), (0.5, 11), (0.75, 12), (1.0, 12), (1.25, 12), (1.5, 13)):
        world.report(at, 50 * MB, path(moved * MB))
    assert [sample.seconds for sample in world.estimator.samples] == pytest.approx([0.25, 0.25, 0.75])
    assert [sample.link_limited for sample in world.estimator.samples] == [False, True, True]


def test_a_link_that_is_getting_going_is_not_slow() -> None:
    """Connections are dialled, first bytes are on their way: that takes long where a box is far away."""
    world = Reports()
    world.begin(0.0)
    for at, moved in ((0.25, 0), (0.5, 0), (0.75, 0), (1.0, 1), (1.25, 9)):
        world.report(at, 50 * MB, path(moved * MB, in_flight=MB if at > 0.25 else 0))
    limited = [(sample.bytes, sample.seconds) for sample in world.estimator.samples if sample.link_limited]
    assert limited == [(8 * MB, 0.25)]


def test_a_link_that_was_empty_gets_going_anew() -> None:
    """What the last transfer moved came long before the next one began."""
    world = Reports()
    world.begin(0.0)
    reports = ((0.25, 50, 10), (0.5, 0, 19), (9.0, 50, 20), (9.25, 50, 21), (9.5, 50, 22))
    for at, waiting, moved in reports:
        world.report(at, waiting * MB, path(moved * MB, in_flight=waiting * MB))
    assert [sample.link_limited for sample in world.estimator.samples] == [False, False, False, True]


def test_the_time_in_which_nothing_was_to_be_sent_is_nobodys() -> None:
    world = Reports()
    world.begin(0.0)
    reports = ((0.25, 50, 10), (0.5, 50, 11), (0.75, 50, 11), (1.0, 0, 11), (1.25, 50, 11), (1.5, 50, 12))
    for at, waiting, moved in reports:
        world.report(at, waiting * MB, path(moved * MB))
    assert [sample.seconds for sample in world.estimator.samples] == pytest.approx([0.25, 0.25])


def test_a_transfer_that_begins_keeps_the_time_in_which_nothing_arrived() -> None:
    world = Reports()
    world.begin(0.0)
    for at, moved in ((0.25, 10), (0.5, 11), (0.75, 11)):
        world.report(at, 50 * MB, path(moved * MB))
    world.begin(0.8)
    world.report(1.0, 50 * MB, path(12 * MB))
    assert [sample.seconds for sample in world.estimator.samples] == pytest.approx([0.25, 0.5])


def test_round_trips_behind_what_the_link_holds_up_are_not_the_links() -> None:
    world = Reports()
    world.begin(0.0)
    world.report(0.25, 50 * MB, path(10 * MB, rtt_s=0.02))
    world.report(0.5, 50 * MB, path(11 * MB, rtt_s=2.0))
    world.report(0.75, 0, path(12 * MB, rtt_s=0.03))
    assert world.estimator.pings == [(0.02, 0.25), (0.03, 0.75)]


def test_a_path_that_has_moved_nothing_yet_has_not_begun_anew() -> None:
    world = Reports()
    world.begin(0.0)
    world.report(1.0, 0, path(5 * MB))
    world.report(2.0, 0, path(6 * MB), path(0, label="relay"))
    assert [sample.bytes for sample in world.estimator.samples] == [MB]


@pytest.mark.parametrize(
    ("before", "now", "blocked", "limited"),
    [
        (WAN.limited_bytes, WAN.limited_bytes, False, True),
        (WAN.limited_bytes - 1, WAN.limited_bytes, False, False),
        (WAN.limited_bytes, WAN.limited_bytes - 1, False, False),
        (10 * MB, 10 * MB, True, False),
    ],
)
def test_a_link_is_measured_by_what_it_moved_between_two_reports(
    before: int, now: int, blocked: bool, limited: bool
) -> None:
    """The link set the pace where much was waiting at both."""
    world = Reports()
    world.begin(0.0)
    world.report(0.5, before, path(9 * MB))
    assert world.estimator.samples == []  # nobody knows how much of that moved since the transfer began
    world.report(1.0, before, path(10 * MB))
    world.report(3.0, now, path(14 * MB), blocked=blocked)
    assert world.estimator.samples[1:] == [TransferSample(bytes=4 * MB, seconds=2.0, streams=4, link_limited=limited)]
    assert world.knowledge.take_measured() == ({T} if limited else set())


def test_a_transfer_too_short_to_tell_a_rate_does_not_put_a_burst_off() -> None:
    world = Reports()
    world.begin(0.0)
    world.report(0.5, WAN.limited_bytes, path(9 * MB))
    world.report(1.0, WAN.limited_bytes, path(10 * MB))
    world.report(3.0, WAN.limited_bytes, path(10 * MB + 1000))
    assert [sample.link_limited for sample in world.estimator.samples] == [False, True]
    assert world.knowledge.take_measured() == set()


@pytest.mark.parametrize(
    ("second", "at", "streams"),
    [
        (path(11 * MB, connections=2), 2.0, [2]),
        (path(11 * MB, connections=0), 2.0, [1]),
        (path(10 * MB + 1), 2.0, [4]),
        (path(10 * MB), 2.0, []),  # nothing moved
        (path(11 * MB), 1.0, []),  # in no time
    ],
)
def test_a_sample_needs_bytes_and_time(second: protocol.PathReport, at: float, streams: list[int]) -> None:
    world = Reports()
    world.begin(0.0)
    world.report(1.0, 10 * MB, path(10 * MB))
    world.report(at, 10 * MB, second)
    assert [sample.streams for sample in world.estimator.samples] == streams


def test_round_trips_of_open_direct_paths_are_pings_and_links_of_relays_are_theirs_to_measure() -> None:
    world = Reports()
    world.begin(0.0)
    world.report(1.0, 0, path(MB, rtt_s=0.03), path(MB, rtt_s=0.9, label="relay"))
    world.report(2.0, 0, path(MB, rtt_s=0.04, connections=0), path(9 * MB, rtt_s=0.9, label="relay"))
    world.report(3.0, 0, path(MB, rtt_s=0.05, connections=1))
    world.report(4.0, 0, path(MB))
    assert world.estimator.pings == [(0.03, 1.0), (0.05, 3.0)]
    assert world.estimator.samples == []


def test_the_least_that_waits_is_moving() -> None:
    world = Reports()
    world.begin(0.0)
    world.report(1.0, 1, path(0))
    assert world.selector.moving(1.0) == 1
    world.report(1.1, 0, path(1))
    assert world.selector.moving(1.1) == 0


def test_what_another_link_moves_is_in_the_way_and_what_the_own_one_moves_is_not() -> None:
    world = Reports()
    idle = world.choose(0.0).seconds
    world.begin(0.0, OTHER)
    assert world.choose(0.0).seconds == idle  # it has not moved anything yet
    world.report(1.0, 10 * MB, path(MB), link=OTHER)
    assert world.choose(1.0).seconds > 1.5 * idle
    assert world.choose(1.0, OTHER).seconds <= idle
    assert world.choose(1.0 + WAN.fresh_s).seconds == idle


def test_choices_made_for_a_link_are_remembered_with_it() -> None:
    world = Reports()
    known = world.begin(0.0)
    assert world.selector.cache_of(LINK) is known.cache
    assert world.selector.cache_of(OTHER) is not known.cache


@pytest.mark.parametrize("case", ["under way", "all moved", "a newer transfer"])
def test_paths_are_watched_anew_after_a_rejection_only_where_something_is_left_to_move(case: str) -> None:
    world = Reports()
    known = world.begin(0.0)
    world.report(1.0, 0, path(SIZE if case == "all moved" else MB))
    if case == "a newer transfer":
        world.begin(1.5)
    before: Any = known.controller
    known.is_changing = True
    world.selector.reject(NewPaths(LINK, known, known.choice, "a test"), 2.0)
    assert not known.is_changing
    assert (known.controller is not before) is (case == "under way")
    if case == "under way":
        assert known.controller.remaining == SIZE - MB
        world.report(3.0, 0, path(3 * MB))
        assert known.controller.remaining == SIZE - 3 * MB


def test_links_are_told_apart_by_where_they_lead() -> None:
    world = Reports()
    known, other = world.begin(0.0), world.begin(0.0, OTHER, U)
    assert (world.selector.links_to(T), world.selector.links_to(U)) == ([known], [other])
    assert world.selector.replace_links(known.ends, LINK) == []
    assert world.selector.replace_links(other.ends, LINK) == [OTHER]
    assert (world.selector.links_to(T), world.selector.links_to(U)) == ([known], [])
