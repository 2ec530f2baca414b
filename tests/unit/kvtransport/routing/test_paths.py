"""Which path KV takes, and why no other."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.errors import FiguresError
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures, bytes_per_s
from p2pserve.kvtransport.routing.choices import ChoiceCache
from p2pserve.kvtransport.routing.paths import (
    Candidate,
    CandidateVerdict,
    NoPath,
    PathChoice,
    PathNetwork,
    PathQuery,
    RunningTransfer,
    choose,
)
from p2pserve.kvtransport.routing.settings import PathSettings

MB = 1_000_000


def link(rtt_ms: float, gbps: float, *, one: float | None = None, sure: float = 1.0, up: bool = True) -> LinkFigures:
    single = min(gbps, 20.8 / max(rtt_ms, 1e-3)) if one is None else one
    return LinkFigures(
        rtt_s=rtt_ms / 1e3, one_stream_gbps=single, capacity_gbps=gbps, rate_confidence=sure, reachable=up
    )


def job(size: int = 100 * MB, **more: object) -> PathQuery:
    return PathQuery(source="a", target="b", bytes=size, **more)  # type: ignore[arg-type]


def by_label(choice: PathChoice) -> dict[str, Candidate]:
    return {candidate.label: candidate for candidate in choice.why}


class TestDirect:
    def test_enough_streams_for_the_capacity(self) -> None:
        choice = choose(job(), PathNetwork({("a", "b"): link(100, 1.0)}))
        (path,) = choice.paths
        assert (path.via, path.streams, path.gbps) == (None, 5, 1.0)
        assert choice.taken.limit == "link"
        assert choice.seconds == pytest.approx(choice.taken.alpha_s + 100 * MB / bytes_per_s(1.0))

    def test_the_window_is_the_limit_of_the_longest_fastest_links(self) -> None:
        choice = choose(job(), PathNetwork({("a", "b"): link(300, 10.0)}))
        assert choice.paths[0].streams == 64
        assert choice.taken.limit == "window"
        assert choice.paths[0].gbps == pytest.approx(64 * 20.8 / 300)

    def test_the_boxes_are_the_limit(self) -> None:
        links = {("a", "b"): link(10, 10.0)}
        boxes = {"a": BoxFigures(up_gbps=2.0), "b": BoxFigures(down_gbps=3.0)}
        assert choose(job(), PathNetwork(links, boxes)).taken.limit == "sender up"
        boxes["b"] = BoxFigures(down_gbps=1.0)
        assert choose(job(), PathNetwork(links, boxes)).taken.limit == "receiver down"

    def test_other_flows_leave_a_fair_share(self) -> None:
        links = {("a", "b"): link(10, 10.0)}
        boxes = {"a": BoxFigures(up_gbps=3.0)}
        flows = (RunningTransfer("a", "x", 1.0), RunningTransfer("a", "y", 1.9), RunningTransfer("z", "a", 9.0))
        assert choose(job(), PathNetwork(links, boxes, flows)).paths[0].gbps == pytest.approx(1.0)  # a third
        slow = (RunningTransfer("a", "x", 0.2),)
        assert choose(job(), PathNetwork(links, boxes, slow)).paths[0].gbps == pytest.approx(2.8)  # what is unused

    def test_no_more_streams_than_there_are_bytes_for(self) -> None:
        network = PathNetwork({("a", "b"): LinkFigures(rtt_s=0.1, one_stream_gbps=0.2, capacity_gbps=10.0)})
        assert [choose(job(size), network).paths[0].streams for size in (1, 1 << 17, 5 << 17, 1 << 30)] == [1, 1, 5, 50]

    def test_busy_boxes_get_no_streams_for_the_time_that_they_take_to_answer(self) -> None:
        """Twice the least round trip may be the network's; what is beyond is theirs."""
        quiet = LinkFigures(rtt_s=0.02, rtt_min_s=0.01, one_stream_gbps=10.0, capacity_gbps=10.0)
        busy = msgspec.structs.replace(quiet, rtt_s=0.5)
        found = [choose(job(), PathNetwork({("a", "b"): each})).paths[0].streams for each in (quiet, busy)]
        assert found == [10, 10]

    def test_more_streams_where_the_link_was_never_filled(self) -> None:
        floor = msgspec.structs.replace(link(100, 1.0), capacity_is_floor=True)
        assert choose(job(), PathNetwork({("a", "b"): floor})).paths[0].streams == 10

    def test_nothing_known(self) -> None:
        with pytest.raises(FiguresError, match="nothing is known of the link a > b"):
            choose(job(), PathNetwork({}))

    def test_nothing_possible(self) -> None:
        links = {("a", "b"): link(10, 1, up=False), ("a", "r"): link(10, 1), ("r", "b"): link(10, 1, up=False)}
        with pytest.raises(NoPath, match="no path from a to b: direct: unreachable a > b; via r: unreachable r > b"):
            choose(job(), PathNetwork(links))

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"source": "b"}, "from b to itself"),
            ({"bytes": 0}, r"job\.bytes is 0"),
            ({"usd_per_s": -1.0}, r"job\.usd_per_s"),
            ({"max_usd_per_gb": inf}, r"job\.max_usd_per_gb"),
        ],
    )
    def test_bad_jobs(self, fields: dict[str, object], message: str) -> None:
        good: dict[str, object] = {"source": "a", "target": "b", "bytes": 1}
        with pytest.raises(FiguresError, match=message):
            PathQuery(**{**good, **fields})  # type: ignore[arg-type]


class TestRelay:
    LINKS: Mapping[tuple[str, str], LinkFigures] = {
        ("a", "b"): link(100, 0.1),
        ("a", "r"): link(50, 2.0),
        ("r", "b"): link(60, 2.0),
    }

    def test_a_fast_relay_beats_a_slow_link(self) -> None:
        choice = choose(job(), PathNetwork(self.LINKS))
        assert "r" in choice.vias
        assert choice.seconds < 8.0 / 3.0

    def test_a_relay_as_good_as_the_direct_link_is_not_taken(self) -> None:
        links = {("a", "b"): link(100, 2.0), ("a", "r"): link(50, 2.0), ("r", "b"): link(50, 2.0)}
        boxes = {"a": BoxFigures(up_gbps=2.0)}
        choice = choose(job(), PathNetwork(links, boxes))
        assert choice.vias == {None}
        assert by_label(choice)["via r"].verdict in (CandidateVerdict.SMALL_GAIN, CandidateVerdict.SLOWER)

    @pytest.mark.parametrize(("gain", "taken"), [(1.15, False), (1.45, True)])
    def test_it_must_win_by_a_quarter(self, gain: float, taken: bool) -> None:
        links = {("a", "b"): link(20, 1.0), ("a", "r"): link(10, gain), ("r", "b"): link(10, gain)}
        boxes = {"a": BoxFigures(up_gbps=gain)}  # so that two paths are no better
        choice = choose(job(1000 * MB), PathNetwork(links, boxes))
        assert (choice.vias == {"r"}) is taken
        if not taken:
            assert by_label(choice)["via r"].verdict is CandidateVerdict.SMALL_GAIN
            assert "more than 1.25x is needed" in by_label(choice)["via r"].explain()

    def test_or_be_the_only_way(self) -> None:
        links = {**self.LINKS, ("a", "b"): link(10, 5.0, up=False), ("r", "b"): link(60, 0.01)}
        choice = choose(job(), PathNetwork(links))
        assert choice.vias == {"r"}
        assert by_label(choice)["direct"].verdict is CandidateVerdict.UNREACHABLE

    def test_a_stalled_path_is_no_way(self) -> None:
        choice = choose(job(), PathNetwork(self.LINKS), observed={None: 0.0})
        assert choice.vias == {"r"}

    def test_little_known_gains_are_discounted(self) -> None:
        twice = {("a", "b"): link(20, 1.0), ("a", "r"): link(10, 2.0, sure=0.2), ("r", "b"): link(10, 2.0, sure=0.2)}
        boxes = {"a": BoxFigures(up_gbps=2.0)}
        choice = choose(job(1000 * MB), PathNetwork(twice, boxes))
        assert choice.vias == {None}
        assert "counted as 1.1" in by_label(choice)["via r"].detail
        tenfold = {pair: msgspec.structs.replace(one, capacity_gbps=20.0) for pair, one in twice.items()}
        tenfold["a", "b"] = twice["a", "b"]
        assert "r" in choose(job(1000 * MB), PathNetwork(tenfold)).vias

    def test_the_relay_is_the_limit(self) -> None:
        for box, limit in [
            (BoxFigures(up_gbps=0.5), "relay up"),
            (BoxFigures(down_gbps=0.5), "relay down"),
            (BoxFigures(relay_gbps=0.5), "relay limit"),
        ]:
            choice = choose(job(), PathNetwork(self.LINKS, {"r": box}))
            assert by_label(choice)["via r"].limit == limit
        flows = (RunningTransfer("x", "y", 1.5, via="r"),)
        choice = choose(job(), PathNetwork(self.LINKS, {"r": BoxFigures(relay_gbps=2.0)}, flows))
        assert by_label(choice)["via r"].gbps == pytest.approx(1.0)

    @pytest.mark.parametrize("box", [BoxFigures(relay_gbps=0.0), BoxFigures(relay_budget_bytes=MB)])
    def test_a_relay_that_may_not(self, box: BoxFigures) -> None:
        choice = choose(job(), PathNetwork(self.LINKS, {"r": box}))
        assert choice.vias == {None}
        assert by_label(choice)["via r"].verdict is CandidateVerdict.NO_BUDGET

    def test_only_the_relays_that_the_job_allows(self) -> None:
        assert choose(job(relays=frozenset()), PathNetwork(self.LINKS)).vias == {None}
        choice = choose(job(relays=frozenset({"stranger", "a", "b"})), PathNetwork(self.LINKS))
        assert by_label(choice)["via stranger"].verdict is CandidateVerdict.UNMEASURED

    def test_both_legs_get_the_streams_of_the_longer(self) -> None:
        choice = choose(job(), PathNetwork({**self.LINKS, ("r", "b"): link(160, 2.0)}))
        assert by_label(choice)["via r"].paths[0].streams == 16


class TestStripes:
    LINKS: Mapping[tuple[str, str], LinkFigures] = {
        ("a", "b"): link(40, 1.0),
        ("a", "r"): link(20, 1.0),
        ("r", "b"): link(20, 1.0),
    }

    def test_two_paths_add_up(self) -> None:
        choice = choose(job(1000 * MB), PathNetwork(self.LINKS))
        assert choice.vias == {None, "r"}
        assert choice.taken.gbps == pytest.approx(2.0)
        assert choice.seconds < 5.0 < by_label(choice)["direct"].seconds

    def test_as_far_as_the_sender_goes(self) -> None:
        choice = choose(job(1000 * MB), PathNetwork(self.LINKS, {"a": BoxFigures(up_gbps=1.5)}))
        assert choice.vias == {None, "r"}
        assert choice.taken.gbps == pytest.approx(1.5)
        assert choice.taken.limit == "sender up"
        assert sum(path.gbps for path in choice.paths) == pytest.approx(1.5)
        alone = choose(job(1000 * MB), PathNetwork(self.LINKS, {"b": BoxFigures(down_gbps=1.05)}))
        assert alone.vias == {None}

    def test_two_relays(self) -> None:
        links = {
            **self.LINKS,
            ("a", "b"): link(40, 0.01),
            ("a", "s"): link(20, 1.0),
            ("s", "b"): link(20, 1.0),
        }
        assert choose(job(1000 * MB), PathNetwork(links)).vias == {"r", "s"}


class TestPrice:
    LINKS: Mapping[tuple[str, str], LinkFigures] = {
        ("a", "b"): link(20, 1.0),
        ("a", "r"): link(10, 3.0),
        ("r", "b"): link(10, 3.0),
    }
    BOXES: Mapping[str, BoxFigures] = {
        name: BoxFigures(up_gbps=3.0, up_usd_per_gb=0.02, down_usd_per_gb=0.01) for name in "abr"
    }

    def test_speed_is_taken_where_money_does_not_matter(self) -> None:
        choice = choose(job(1000 * MB), PathNetwork(self.LINKS, self.BOXES))
        assert choice.vias == {"r"}
        assert choice.usd == pytest.approx(0.06)

    def test_a_second_must_be_worth_what_it_costs(self) -> None:
        # 5.3 s are saved for three cents.
        assert choose(job(1000 * MB, usd_per_s=0.01), PathNetwork(self.LINKS, self.BOXES)).vias == {"r"}
        choice = choose(job(1000 * MB, usd_per_s=0.004), PathNetwork(self.LINKS, self.BOXES))
        assert choice.vias == {None}
        assert by_label(choice)["via r"].verdict is CandidateVerdict.NOT_WORTH_IT

    def test_a_relay_in_use_that_is_not_worth_its_price_is_left(self) -> None:
        # Time and money together are within what keeps a path in use; the price of a second alone decides.
        network = PathNetwork(self.LINKS, self.BOXES)
        choice = choose(job(1000 * MB, usd_per_s=0.0055), network, current=frozenset({"r"}))
        assert choice.vias == {None}

    def test_dear_paths_are_out(self) -> None:
        choice = choose(job(1000 * MB, max_usd_per_gb=0.05), PathNetwork(self.LINKS, self.BOXES))
        assert None in choice.vias
        assert by_label(choice)["via r"].verdict is CandidateVerdict.TOO_DEAR
        with pytest.raises(NoPath, match="over max_usd_per_gb"):
            choose(job(max_usd_per_gb=0.01), PathNetwork(self.LINKS, self.BOXES))


class TestHysteresis:
    def links(self, r: float, s: float) -> dict[tuple[str, str], LinkFigures]:
        links = {("a", "b"): link(20, 0.05)}
        for name, gbps in (("r", r), ("s", s)):
            links["a", name] = links[name, "b"] = link(10, gbps)
        return links

    def test_what_is_in_use_stays_until_something_is_clearly_better(self) -> None:
        boxes = {"a": BoxFigures(up_gbps=1.0)}
        network = PathNetwork(self.links(0.95, 1.0), boxes)
        assert choose(job(1000 * MB), network).vias == {"s"}
        kept = choose(job(1000 * MB), network, current=frozenset({"r"}))
        assert kept.vias == {"r"}
        assert by_label(kept)["via s"].verdict is CandidateVerdict.KEPT_CURRENT
        better = PathNetwork(self.links(0.5, 1.0), boxes)
        assert choose(job(1000 * MB), better, current=frozenset({"r"})).vias == {"s"}

    def test_a_relay_in_use_stays_while_it_is_no_slower_than_direct(self) -> None:
        boxes = {"a": BoxFigures(up_gbps=1.1)}
        links = {("a", "b"): link(20, 1.0), ("a", "r"): link(5, 1.1), ("r", "b"): link(5, 1.1)}
        assert choose(job(1000 * MB), PathNetwork(links, boxes)).vias == {None}
        assert choose(job(1000 * MB), PathNetwork(links, boxes), current=frozenset({"r"})).vias == {"r"}
        links["a", "r"] = link(5, 0.8)
        assert choose(job(1000 * MB), PathNetwork(links, boxes), current=frozenset({"r"})).vias == {None}

    def test_what_is_observed_goes_before_what_is_believed(self) -> None:
        links = {("a", "b"): link(20, 1.0), ("a", "r"): link(10, 1.0), ("r", "b"): link(10, 1.0)}
        boxes = {"a": BoxFigures(up_gbps=1.0)}
        choice = choose(job(), PathNetwork(links, boxes), current=frozenset({None}), observed={None: 0.1})
        assert choice.vias == {"r"}
        assert by_label(choice)["direct"].limit == "observed"

    def test_a_warm_path_has_an_edge(self) -> None:
        network = PathNetwork({("a", "b"): link(100, 1.0)})
        cold, warm = choose(job(MB), network), choose(job(MB), network, warm=frozenset({None}))
        assert warm.seconds < cold.seconds / 3


def test_explains_every_candidate_in_one_line_each() -> None:
    links = {**TestRelay.LINKS, ("a", "x"): link(10, 1.0), ("x", "b"): link(10, 1.0, up=False)}
    choice = choose(job(), PathNetwork(links))
    lines = choice.explain().splitlines()
    assert len(lines) == len(choice.why) >= 3
    assert lines[0].endswith("taken")
    assert any("via x" in line and "unreachable: x > b" in line for line in lines)
    assert [one.verdict is CandidateVerdict.TAKEN for one in choice.why] == [True] + [False] * (len(lines) - 1)


RELAYS = "rstuv"
FIGURES = st.builds(
    link,
    st.sampled_from([0.2, 2.0, 20.0, 60.0, 100.0, 250.0]),
    st.sampled_from([0.05, 0.1, 0.5, 1.0, 1.3, 2.0, 10.0]),
    sure=st.sampled_from([1.0, 1.0, 0.8, 0.3]),
    up=st.sampled_from([True] * 9 + [False]),
)
BOX = st.builds(
    BoxFigures,
    up_gbps=st.sampled_from([None, 0.3, 1.0, 2.0]),
    down_gbps=st.sampled_from([None, 0.3, 1.0, 2.0]),
    up_usd_per_gb=st.sampled_from([0.0, 0.01, 0.1]),
    down_usd_per_gb=st.sampled_from([0.0, 0.01]),
    relay_gbps=st.sampled_from([None, None, 0.0, 0.5]),
)
FLOW = st.builds(
    RunningTransfer, st.sampled_from("ar"), st.sampled_from("bs"), st.floats(0.0, 2.0), st.sampled_from([None, "t"])
)


@st.composite
def networks(draw: st.DrawFn) -> PathNetwork:
    relays = draw(st.lists(st.sampled_from(RELAYS), unique=True, max_size=5))
    links = {("a", "b"): draw(FIGURES)}
    for name in relays:
        links["a", name], links[name, "b"] = draw(FIGURES), draw(FIGURES)
    boxes = {name: draw(BOX) for name in ["a", "b", *relays]}
    return PathNetwork(links, boxes, tuple(draw(st.lists(FLOW, max_size=3))))


def jobs() -> st.SearchStrategy[PathQuery]:
    return st.builds(
        job,
        st.sampled_from([10_000, MB, 50 * MB, 2000 * MB]),
        usd_per_s=st.sampled_from([None, None, 0.001, 1.0]),
        max_usd_per_gb=st.sampled_from([None, None, None, 0.05]),
    )


def decided(job: PathQuery, network: PathNetwork, **more: frozenset[str | None]) -> PathChoice:
    try:
        return choose(job, network, **more)  # type: ignore[arg-type]
    except NoPath:
        assume(False)
        raise


IN_USE = st.sampled_from([None, frozenset({None}), frozenset({"r"}), frozenset({None, "r"}), frozenset({"r", "s"})])


class TestProperties:
    @settings(max_examples=250, deadline=None)
    @given(jobs(), networks(), IN_USE)
    def test_never_slower_than_direct_and_relays_win_clearly(
        self, job: PathQuery, network: PathNetwork, current: frozenset[str | None] | None
    ) -> None:
        choice = decided(job, network) if current is None else decided(job, network, current=current)
        direct = by_label(choice).get("direct")
        assert direct is not None
        if direct.seconds == inf or direct.verdict is CandidateVerdict.TOO_DEAR:
            return
        assert choice.seconds <= direct.seconds * (1 + 1e-12)
        if choice.vias != {None} and choice.vias != current:
            assert direct.seconds > PathSettings().relay_gain * choice.seconds
        if choice.vias != {None} and job.usd_per_s is not None:
            assert choice.usd - direct.usd <= job.usd_per_s * (direct.seconds - choice.seconds) * (1 + 1e-9)

    @settings(max_examples=150, deadline=None)
    @given(jobs(), networks(), st.integers(0, 1 << 30))
    def test_the_order_of_the_tables_does_not_matter(self, job: PathQuery, network: PathNetwork, seed: int) -> None:
        choice = decided(job, network)
        rng = random.Random(seed)
        links, boxes, flows = list(network.links.items()), list(network.boxes.items()), list(network.flows)
        for table in (links, boxes, flows):
            rng.shuffle(table)
        again = choose(job, PathNetwork(dict(links), dict(boxes), network.flows))
        assert again == choice
        flowing = choose(job, PathNetwork(dict(links), dict(boxes), tuple(flows)))
        assert flowing.vias == choice.vias

    @settings(max_examples=200, deadline=None)
    @given(jobs(), networks(), st.data())
    def test_a_better_link_never_makes_a_prediction_worse(
        self, job: PathQuery, network: PathNetwork, data: st.DataObject
    ) -> None:
        """Of any candidate. The choice itself may go back to a direct path that is at most 25 % slower: that is the
        rule for relays, and the bound on what it costs.
        """
        before = decided(job, network)
        pair = data.draw(st.sampled_from(sorted(network.links)))
        one = network.links[pair]
        better = msgspec.structs.replace(
            one,
            rtt_s=one.rtt_s * data.draw(st.sampled_from([1.0, 0.9, 0.3])),
            capacity_gbps=one.capacity_gbps * data.draw(st.sampled_from([1.0, 1.1, 3.0])),
            one_stream_gbps=one.one_stream_gbps * data.draw(st.sampled_from([1.0, 1.1, 3.0])),
            reachable=True,
        )
        after = choose(job, PathNetwork({**network.links, pair: better}, network.boxes, network.flows))
        then = by_label(after)
        for label, candidate in by_label(before).items():
            if candidate.seconds < inf and label in then and then[label].seconds < inf:
                assert then[label].seconds <= candidate.seconds * (1 + 1e-6)
        if job.usd_per_s is None and all(link.rate_confidence == 1.0 for link in network.links.values()):
            assert after.seconds <= before.seconds * PathSettings().relay_gain * 1.2

    @settings(max_examples=100, deadline=None)
    @given(jobs(), networks())
    def test_what_is_predicted_fits_the_ends(self, job: PathQuery, network: PathNetwork) -> None:
        choice = decided(job, network)
        total = sum(path.gbps for path in choice.paths)
        up, down = network.boxes["a"].up_gbps, network.boxes["b"].down_gbps
        assert total <= min(up or inf, down or inf) * (1 + 1e-9)
        assert choice.seconds >= job.bytes / bytes_per_s(total)
        assert all(1 <= path.streams <= 64 for path in choice.paths)


class TestChoices:
    """What was chosen for a link holds until something changes, and is what `choose` would say."""

    @settings(max_examples=100, deadline=None)
    @given(jobs(), networks(), networks(), st.data())
    def test_what_is_kept_is_what_would_be_chosen_now(
        self, some: PathQuery, one: PathNetwork, two: PathNetwork, data: st.DataObject
    ) -> None:
        choices = ChoiceCache()
        may: dict[str, list[object]] = {
            "size": [10_000, MB, 50 * MB],  # far enough apart to be told from each other
            "links": [one.links, {**one.links, **two.links}],
            "boxes": [one.boxes, {**one.boxes, **two.boxes}],
            "flows": [(), (RunningTransfer("a", "b", 0.5),)],
            "current": [None, frozenset({None}), frozenset({"r"})],
            "warm": [frozenset(), frozenset({"r"})],
            "relays": [None, frozenset(RELAYS[:1])],
        }
        now: dict[str, Any] = {name: values[0] for name, values in may.items()}
        for name in data.draw(st.lists(st.sampled_from(sorted(may)), max_size=10)):
            now[name] = data.draw(st.sampled_from(may[name]))
            work = replace(some, bytes=now["size"], relays=now["relays"])
            network = PathNetwork(now["links"], now["boxes"], now["flows"])
            in_use = {"current": now["current"], "warm": now["warm"]}
            assert tried(choices.choose, work, network, **in_use) == tried(choose, work, network, **in_use)

    def test_sizes_that_are_nearly_the_same_share_a_choice_until_something_changes(self) -> None:
        choices, network = ChoiceCache(), PathNetwork({("a", "b"): link(20, 1.0)})
        first = choices.choose(job(50 * MB), network)
        assert choices.choose(job(48 * MB), network) is first
        assert choices.choose(job(64 * MB), network).seconds > first.seconds
        assert choices.choose(job(50 * MB), network) is first
        busy = replace(network, flows=(RunningTransfer("a", "b", 0.9),))
        assert choices.choose(job(50 * MB), busy).seconds > first.seconds


def tried(
    choosing: Callable[..., PathChoice], job: PathQuery, network: PathNetwork, **more: object
) -> PathChoice | str:
    """The choice, or why there is none."""
    try:
        return choosing(job, network, **more)
    except NoPath as error:
        return str(error)
