"""The rules by which a path is taken or not, at their borders; and the settings that move these."""

from __future__ import annotations

from math import inf

import pytest

from p2pserve.kvtransport.errors import FiguresError
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures
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

SIZE = 1_250_000_000  # ten seconds at 1 Gb/s
RTT = 1e-9  # so that seconds are bytes over rate
WARM = frozenset({None, "r", "s", "t", "u"})


def link(gbps: float, sure: float = 1.0) -> LinkFigures:
    return LinkFigures(rtt_s=RTT, one_stream_gbps=gbps, capacity_gbps=gbps, rate_confidence=sure)


def view(direct: float, relays: dict[str, float], *, up: float | None = None, sure: float = 1.0) -> PathNetwork:
    links = {("a", "b"): link(direct)}
    for name, gbps in relays.items():
        links["a", name] = links[name, "b"] = link(gbps, sure)
    return PathNetwork(links, {"a": BoxFigures(up_gbps=up)})


def pick(
    network: PathNetwork,
    settings: PathSettings | None = None,
    current: frozenset[str | None] | None = None,
    **query: float,
) -> PathChoice:
    asked = PathQuery(source="a", target="b", bytes=SIZE, **query)  # type: ignore[arg-type]
    return choose(asked, network, settings=settings, current=current, warm=WARM)


def candidate(choice: PathChoice, label: str) -> Candidate:
    return next(one for one in choice.why if one.label == label)


class TestGains:
    @pytest.mark.parametrize(("gbps", "taken"), [(1.24, False), (1.26, True)])
    def test_a_relay_must_be_a_quarter_faster(self, gbps: float, taken: bool) -> None:
        choice = pick(view(1.0, {"r": gbps}, up=gbps))
        assert (choice.vias == {"r"}) is taken
        if not taken:
            assert candidate(choice, "via r").verdict is CandidateVerdict.SMALL_GAIN

    def test_how_much_is_a_setting(self) -> None:
        network = view(1.0, {"r": 1.24}, up=1.24)
        assert pick(network, PathSettings(relay_gain=1.2)).vias == {"r"}
        assert pick(view(1.0, {"r": 1.9}, up=1.9), PathSettings(relay_gain=2.0)).vias == {None}

    @pytest.mark.parametrize(("up", "taken"), [(2.18, False), (2.22, True)])
    def test_two_paths_must_be_a_tenth_faster_than_one(self, up: float, taken: bool) -> None:
        choice = pick(view(1.0, {"r": 2.0}, up=up))
        assert (len(choice.paths) == 2) is taken
        assert "r" in choice.vias

    @pytest.mark.parametrize(("gbps", "kept"), [(2.28, True), (2.32, False)])
    def test_what_is_in_use_stays_until_something_is_better_by_its_gain(self, gbps: float, kept: bool) -> None:
        choice = pick(view(0.01, {"r": 2.0, "s": gbps}, up=gbps), current=frozenset({"r"}))
        assert (choice.vias == {"r"}) is kept
        if kept:
            assert candidate(choice, "via s").verdict is CandidateVerdict.KEPT_CURRENT

    def test_switching_is_a_setting_too(self) -> None:
        network = view(0.01, {"r": 2.0, "s": 2.2}, up=2.2)
        assert pick(network, PathSettings(switch_gain=1.05), current=frozenset({"r"})).vias == {"s"}
        assert pick(network, PathSettings(switch_gain=1.2), current=frozenset({"r"})).vias == {"r"}

    @pytest.mark.parametrize(("sure", "taken"), [(1.0, True), (0.7, True), (0.6, False)])
    def test_a_gain_counts_as_far_as_it_is_known(self, sure: float, taken: bool) -> None:
        # 1.4 ** 0.7 is 1.27, 1.4 ** 0.6 is 1.22.
        assert (pick(view(1.0, {"r": 1.4}, up=1.4, sure=sure)).vias == {"r"}) is taken

    def test_the_direct_path_is_not_discounted_against_itself(self) -> None:
        network = PathNetwork({("a", "b"): link(1.0, sure=0.1)})
        assert pick(network).seconds == pytest.approx(10.0)


class TestHopelessRelays:
    def test_what_is_four_times_as_slow_is_not_worked_out(self) -> None:
        choice = pick(view(1.0, {"r": 0.24, "s": 0.26}))
        assert "s at best" in candidate(choice, "via r").detail
        assert candidate(choice, "via r").seconds == inf
        assert candidate(choice, "via s").seconds < inf

    def test_how_slow_is_a_setting(self) -> None:
        choice = pick(view(1.0, {"r": 0.24}), PathSettings(give_up_factor=5.0))
        assert candidate(choice, "via r").seconds < inf

    @pytest.mark.parametrize(("count", "pairs"), [(0, 0), (1, 1), (2, 3), (3, 6)])
    def test_stripes_are_tried_over_so_many_of_the_best_relays(self, count: int, pairs: int) -> None:
        network = view(1.0, {"r": 1.0, "s": 1.1, "t": 1.2, "u": 1.3})
        choice = pick(network, PathSettings(striped_relays=count))
        assert sum(len(one.paths) == 2 for one in choice.why) == pairs

    def test_a_pair_in_use_is_always_looked_at(self) -> None:
        network = view(1.0, {"r": 0.9, "s": 1.1, "t": 1.2, "u": 1.3})
        choice = pick(network, PathSettings(striped_relays=1), current=frozenset({"r", "u"}))
        assert any(one.vias == {"r", "u"} for one in choice.why)


class TestMoney:
    BOXES = {name: BoxFigures(up_usd_per_gb=0.01, down_usd_per_gb=0.01, up_gbps=2.0) for name in "abr"}  # noqa: RUF012

    def network(self) -> PathNetwork:
        links = {("a", "b"): link(1.0), ("a", "r"): link(2.0), ("r", "b"): link(2.0)}
        return PathNetwork(links, self.BOXES)

    # Five seconds are saved for 2.5 cents more: half a cent each.
    @pytest.mark.parametrize(("usd_per_s", "taken"), [(0.0051, True), (0.0049, False), (0.0, False)])
    def test_a_second_is_worth_its_price_and_no_more(self, usd_per_s: float, taken: bool) -> None:
        choice = pick(self.network(), usd_per_s=usd_per_s)
        assert (choice.vias == {"r"}) is taken
        assert candidate(choice, "direct").usd == pytest.approx(0.025)
        assert candidate(choice, "via r").usd == pytest.approx(0.05)
        if not taken:
            assert candidate(choice, "via r").verdict is CandidateVerdict.NOT_WORTH_IT

    @pytest.mark.parametrize(("limit", "vias"), [(0.0401, {"r"}), (0.0399, {None}), (0.02, {None})])
    def test_dearer_than_the_limit_is_out_and_as_dear_is_not(self, limit: float, vias: set[str | None]) -> None:
        assert pick(self.network(), max_usd_per_gb=limit).vias == vias

    def test_nothing_is_left_below_the_cheapest(self) -> None:
        with pytest.raises(NoPath, match="over max_usd_per_gb") as caught:
            pick(self.network(), max_usd_per_gb=0.0199)
        assert {one.verdict for one in caught.value.candidates} == {CandidateVerdict.TOO_DEAR}

    def test_a_pair_costs_by_what_each_path_moves(self) -> None:
        network = PathNetwork(self.network().links, {**self.BOXES, "a": BoxFigures(up_usd_per_gb=0.01)})
        pair = next(one for one in pick(network).why if len(one.paths) == 2)
        direct, relayed = 1.25 * 0.02, 1.25 * 0.04
        assert pair.usd == pytest.approx((direct * 1 + relayed * 2) / 3)


class TestShares:
    @pytest.mark.parametrize(("used", "left"), [(0.2, 0.8), (0.5, 0.5), (0.9, 0.5)])
    def test_the_unused_part_or_a_fair_share(self, used: float, left: float) -> None:
        network = PathNetwork({("a", "b"): link(1.0)}, flows=(RunningTransfer("a", "b", used),))
        assert pick(network).paths[0].gbps == pytest.approx(left)

    def test_a_relayed_transfer_uses_both_legs_the_relay_and_all_three_boxes(self) -> None:
        other = (RunningTransfer("x", "y", 1.0, via="r"),)
        for box, limit in (
            (BoxFigures(up_gbps=2.0), "relay up"),
            (BoxFigures(down_gbps=2.0), "relay down"),
            (BoxFigures(relay_gbps=2.0), "relay limit"),
        ):
            links = {("a", "b"): link(0.1), ("a", "r"): link(9.0), ("r", "b"): link(9.0)}
            found = candidate(pick(PathNetwork(links, {"r": box}, other)), "via r")
            assert found.gbps == pytest.approx(1.0)
            assert found.limit == limit

    def test_others_on_the_same_leg_count_once(self) -> None:
        links = {("a", "b"): link(0.1), ("a", "r"): link(2.0), ("r", "b"): link(9.0)}
        network = PathNetwork(links, flows=(RunningTransfer("a", "y", 1.5, via="r"),))
        found = candidate(pick(network), "via r")
        assert found.gbps == pytest.approx(1.0)
        assert found.limit == "first leg"

    @pytest.mark.parametrize(("budget", "allowed"), [(SIZE, True), (SIZE - 1, False)])
    def test_a_relay_with_just_enough_budget_may_forward(self, budget: int, allowed: bool) -> None:
        links = {("a", "b"): link(0.1), ("a", "r"): link(2.0), ("r", "b"): link(2.0)}
        choice = pick(PathNetwork(links, {"r": BoxFigures(relay_budget_bytes=budget)}))
        assert ("r" in choice.vias) is allowed
        if not allowed:
            assert candidate(choice, "via r").verdict is CandidateVerdict.NO_BUDGET


class TestQueries:
    @pytest.mark.parametrize(
        ("query", "message"),
        [
            ({"bytes": 0}, r"job\.bytes is 0"),
            ({"usd_per_s": -0.01}, r"job\.usd_per_s"),
            ({"max_usd_per_gb": inf}, r"job\.max_usd_per_gb"),
        ],
    )
    def test_what_cannot_be_meant(self, query: dict[str, float], message: str) -> None:
        good: dict[str, object] = {"source": "a", "target": "b", "bytes": 1}
        with pytest.raises(FiguresError, match=message):
            PathQuery(**{**good, **query})  # type: ignore[arg-type]

    def test_one_byte_may_be_asked_about(self) -> None:
        assert PathQuery(source="a", target="b", bytes=1, usd_per_s=0.0, max_usd_per_gb=0.0).bytes == 1
