"""What is exactly on the border of a rule, what an impossible path says, and which of two equals is taken.

Links have no round trip, so seconds are bytes over rate; rates are powers of two or five quarters: nothing is rounded.
"""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures
from p2pserve.kvtransport.routing.paths import (
    Candidate,
    CandidateVerdict,
    KVPath,
    PathChoice,
    PathNetwork,
    PathQuery,
    choose,
)
from p2pserve.kvtransport.routing.settings import PathSettings

SIZE = 1_250_000_000  # ten seconds at 1 Gb/s; 1.25 GB
ALL_WARM = frozenset({None, "r", "s", "t", "u"})
Vias = frozenset[str | None]


def link(gbps: float, *, sure: float = 1.0, usd: float | None = None, rtt_s: float = 0.0) -> LinkFigures:
    return LinkFigures(rtt_s=rtt_s, one_stream_gbps=gbps, capacity_gbps=gbps, rate_confidence=sure, usd_per_gb=usd)


def view(direct: LinkFigures, *, up: float | None = None, **relays: LinkFigures) -> PathNetwork:
    """Each relay's first leg is as given, the second free and just as fast."""
    links = {("a", "b"): direct}
    for name, first in relays.items():
        links["a", name] = first
        links[name, "b"] = msgspec.structs.replace(first, usd_per_gb=None, rtt_s=0.0)
    return PathNetwork(links, {"a": BoxFigures(up_gbps=up)})


def pick(
    network: PathNetwork,
    *,
    current: Vias | None = None,
    observed: dict[str | None, float] | None = None,
    unsteady: Vias = frozenset(),
    settings: PathSettings | None = None,
    usd_per_s: float | None = None,
    max_usd_per_gb: float | None = None,
) -> PathChoice:
    asked = PathQuery(source="a", target="b", bytes=SIZE, usd_per_s=usd_per_s, max_usd_per_gb=max_usd_per_gb)
    return choose(
        asked, network, current=current, observed=observed, warm=ALL_WARM, unsteady=unsteady, settings=settings
    )


def candidate(choice: PathChoice, label: str) -> Candidate:
    return next(one for one in choice.why if one.label == label)


def pairs(choice: PathChoice) -> set[str]:
    return {one.label for one in choice.why if len(one.paths) == 2}


DEAD = msgspec.structs.replace(link(1.0), reachable=False)


class TestBorders:
    def test_a_relay_that_is_faster_by_exactly_its_gain_is_not_taken(self) -> None:
        choice = pick(view(link(1.0), up=1.25, r=link(1.25)))
        assert choice.vias == {None}
        assert candidate(choice, "via r").verdict is CandidateVerdict.SMALL_GAIN

    def test_a_relay_in_use_that_is_as_fast_as_direct_stays(self) -> None:
        network = view(link(1.0), up=1.0, r=link(1.0))
        assert pick(network).vias == {None}
        assert pick(network, current=frozenset({"r"})).vias == {"r"}

    def test_what_is_better_by_exactly_the_gain_of_switching_is_not_switched_to(self) -> None:
        network = view(DEAD, up=1.25, r=link(1.0), s=link(1.25))
        choice = pick(network, current=frozenset({"r"}), settings=PathSettings(switch_gain=1.25))
        assert choice.vias == {"r"}
        assert candidate(choice, "via s").verdict is CandidateVerdict.KEPT_CURRENT

    @pytest.mark.parametrize("legs", [(0.25, 0.25), (1.0, 0.25), (0.25, 1.0)])
    def test_exactly_as_many_times_as_slow_as_is_given_up_is_not_worked_out(self, legs: tuple[float, float]) -> None:
        links = {("a", "b"): link(1.0), ("a", "r"): link(legs[0]), ("r", "b"): link(legs[1])}
        hopeless = candidate(pick(PathNetwork(links)), "via r")
        assert (hopeless.verdict, hopeless.detail) == (CandidateVerdict.SLOWER, "40.000 s at best")

    def test_what_was_observed_of_a_relay_is_worked_out_however_slow_it_is_believed_to_be(self) -> None:
        found = candidate(pick(view(link(1.0), r=link(0.125)), observed={"r": 0.5}), "via r")
        assert (found.seconds, found.limit, found.confidence) == (20.0, "observed", 1.0)

    def test_a_second_saved_may_cost_exactly_its_price(self) -> None:
        # Five seconds are saved for 1.25 dollars.
        network = view(link(1.0), up=2.0, r=link(2.0, usd=1.0))
        assert pick(network, usd_per_s=0.25, current=frozenset({"r"})).vias == {"r"}

    def test_exactly_as_dear_as_the_limit_is_allowed(self) -> None:
        network = view(link(1.0, usd=0.25), up=4.0, r=link(4.0, usd=0.5))
        assert pick(network, max_usd_per_gb=0.5).vias == {"r"}
        assert pick(network, max_usd_per_gb=0.25).vias == {None}
        assert pick(view(link(1.0)), max_usd_per_gb=0.0).vias == {None}, "what costs nothing is never too dear"

    @pytest.mark.parametrize(("up", "limit"), [(2.0, "link, first leg"), (1.75, "sender up")])
    def test_two_paths_that_fit_the_sender_are_not_limited_by_it(self, up: float, limit: str) -> None:
        pair = pick(view(link(1.0), up=up, r=link(1.0))).taken
        assert pair.vias == {None, "r"}
        assert (pair.gbps, pair.limit) == (up, limit)

    def test_where_both_ends_are_alike_the_sender_is_named(self) -> None:
        boxes = {"a": BoxFigures(up_gbps=0.5), "b": BoxFigures(down_gbps=0.5)}
        assert pick(PathNetwork({("a", "b"): link(1.0)}, boxes)).taken.limit == "sender up"


class TestPairs:
    """Which pairs are worked out at all: the others could not be better by what two paths must be."""

    @pytest.mark.parametrize(("up", "tried"), [(1.5, True), (1.25, False), (1.125, False)])
    def test_only_what_the_sender_could_make_worth_it(self, up: float, tried: bool) -> None:
        choice = pick(view(link(1.0), up=up, r=link(1.0)), settings=PathSettings(stripe_gain=1.25))
        assert bool(pairs(choice)) is tried

    def test_a_pair_in_use_is_worked_out_though_it_is_not_worth_it(self) -> None:
        choice = pick(view(link(1.0), up=1.0, r=link(1.0)), current=frozenset({None, "r"}))
        assert pairs(choice) == {"direct + via r"}

    def test_a_pair_begins_with_the_earlier_of_its_paths(self) -> None:
        # Ten seconds over the relay alone; five for both, counted from its start, and not from five seconds later.
        assert pairs(pick(view(link(1.0, rtt_s=5.0), r=link(1.0)))) == {"direct + via r"}

    @pytest.mark.parametrize(
        ("current", "tried"),
        [
            (None, {"direct + via u"}),
            (frozenset({"r"}), {"direct + via u"}),
            (frozenset({"r", "u"}), {"direct + via u", "direct + via r", "via u + via r"}),
        ],
    )
    def test_beside_the_best_relays_only_those_of_a_pair_in_use(self, current: Vias | None, tried: set[str]) -> None:
        network = view(link(1.0), r=link(1.0), s=link(1.125), t=link(1.25), u=link(1.5))
        assert pairs(pick(network, current=current, settings=PathSettings(striped_relays=1))) == tried

    def test_a_path_that_was_just_in_trouble_is_not_one_of_two(self) -> None:
        network = view(link(1.0), r=link(1.0), s=link(1.0))
        assert pairs(pick(network, unsteady=frozenset({"r"}))) == {"direct + via s"}

    def test_a_pair_is_as_sure_as_the_less_sure_of_its_paths(self) -> None:
        pair = candidate(pick(view(link(1.0, sure=0.5), r=link(1.0, sure=0.75))), "direct + via r")
        assert pair.confidence == 0.5

    def test_its_seconds_are_a_start_and_the_bytes_at_its_rate(self) -> None:
        # Both begin after half a second; the relay's round trip is that of its first leg.
        pair = candidate(pick(view(link(1.0, rtt_s=0.5), r=link(1.0, rtt_s=0.5))), "direct + via r")
        assert (pair.seconds, pair.alpha_s, pair.gbps) == pytest.approx((5.5, 0.5, 2.0))


class TestEquals:
    @pytest.mark.parametrize(
        ("r", "s", "taken"),
        [
            (link(2.0), link(2.0), "r"),
            (link(2.0, usd=0.5), link(2.0, usd=0.25), "s"),
            (link(2.0, usd=0.25), link(2.0, usd=0.5), "r"),
        ],
    )
    def test_the_cheaper_of_two_that_are_as_fast_else_the_first_by_name(
        self, r: LinkFigures, s: LinkFigures, taken: str
    ) -> None:
        choice = pick(view(link(0.25), up=2.0, r=r, s=s))
        assert choice.vias == {taken}
        other = candidate(choice, "via s" if taken == "r" else "via r")
        assert (other.verdict, other.detail) == (CandidateVerdict.SLOWER, f"1.00x the time of via {taken}")

    # 2.5 seconds for 0.125 dollars, or 5 seconds for nothing.
    @pytest.mark.parametrize(("usd_per_s", "taken"), [(0.02, "s"), (0.1, "r"), (None, "r")])
    @pytest.mark.parametrize("current", [None, frozenset({"s"})])
    def test_money_and_time_are_added_up(self, usd_per_s: float | None, taken: str, current: Vias | None) -> None:
        network = view(link(1.0), up=4.0, r=link(4.0, usd=0.1), s=link(2.0))
        choice = pick(network, current=current, usd_per_s=usd_per_s)
        assert choice.vias == {taken}
        if taken == "s":
            assert candidate(choice, "via r").verdict is CandidateVerdict.NOT_WORTH_IT

    def test_a_direct_path_that_is_too_dear_is_nothing_to_be_compared_with(self) -> None:
        choice = pick(view(link(4.0, usd=1.0), r=link(1.0)), max_usd_per_gb=0.5)
        assert choice.vias == {"r"}
        assert candidate(choice, "direct").verdict is CandidateVerdict.TOO_DEAR

    @pytest.mark.parametrize(
        ("direct", "relay", "counted"),
        [(1.0, 1.0, ""), (1.0, 0.5, ", counted as 1.10x"), (0.5, 1.0, ", counted as 1.10x")],
    )
    def test_a_gain_that_is_not_sure_is_told_as_it_counts(self, direct: float, relay: float, counted: str) -> None:
        choice = pick(view(link(1.0, sure=direct), up=1.2, r=link(1.2, sure=relay)))
        assert candidate(choice, "via r").detail == f"1.20x as fast{counted}; more than 1.25x is needed"

    def test_two_paths_that_gain_too_little_are_told_so(self) -> None:
        # The second path begins four seconds late: at its end both have moved what one does in 7 seconds, not 5.
        choice = pick(view(link(1.0), r=link(1.0, rtt_s=4.0)), settings=PathSettings(stripe_gain=1.75, relay_gain=1.0))
        pair = candidate(choice, "direct + via r")
        assert pair.seconds == pytest.approx(7.0)
        assert (pair.verdict, pair.detail) == (
            CandidateVerdict.SMALL_GAIN,
            "1.43x as fast as direct: too little for two paths",
        )


class TestTexts:
    def test_a_path_has_the_round_trips_of_its_hops(self) -> None:
        links = {("a", "b"): DEAD, ("a", "r"): link(1.0, rtt_s=0.25), ("r", "b"): link(1.0, rtt_s=0.5)}
        found = pick(PathNetwork(links)).taken
        assert (found.paths[0].rtt_s, found.alpha_s, found.seconds) == (0.75, 0.75, 10.75)

    def test_an_impossible_path_has_no_figures(self) -> None:
        found = candidate(pick(view(DEAD, r=link(1.0))), "direct")
        assert found == Candidate(
            (KVPath("a", "b", None, 0, 0.0),), inf, inf, 0.0, 0.0, "", 0.0, CandidateVerdict.UNREACHABLE, "a > b"
        )
        assert found.explain().split(maxsplit=2) == ["direct", "-", "unreachable: a > b"]

    def test_a_possible_path_tells_all_of_them(self) -> None:
        found = pick(view(link(1.0, usd=0.25, sure=0.5))).taken
        assert " ".join(found.explain().split()) == (
            "direct 10.000s 1.000 Gb/s 1 streams $0.312500 confidence 0.50 limit: link taken"
        )

    @pytest.mark.parametrize("legs", ["narrow, wide", "wide, narrow"])
    def test_the_leg_whose_windows_carry_least_is_the_limit(self, legs: str) -> None:
        kinds = {"wide": link(1.0), "narrow": msgspec.structs.replace(link(1.0), one_stream_gbps=1 / 128)}
        first, second = (kinds[name] for name in legs.split(", "))
        found = pick(PathNetwork({("a", "b"): DEAD, ("a", "r"): first, ("r", "b"): second})).taken
        assert (found.paths[0].streams, found.gbps, found.limit) == (64, 0.5, "window")

    def test_a_link_that_was_never_filled_gets_streams_for_twice_what_was_seen(self) -> None:
        floor = LinkFigures(rtt_s=0.0, one_stream_gbps=0.125, capacity_gbps=0.5, capacity_is_floor=True)
        assert pick(view(floor)).paths[0].streams == 8

    def test_a_relay_that_carries_nothing_is_unreachable(self) -> None:
        links = {("a", "b"): DEAD, ("a", "r"): link(1.0), ("r", "b"): link(0.0), ("a", "s"): link(1.0)}
        links["s", "b"] = link(0.5)
        choice = pick(PathNetwork(links))
        assert choice.vias == {"s"}
        assert candidate(choice, "via r").detail == "second leg leaves nothing"
