"""When exactly a running transfer leaves a path: the times and shares of the settings, to the moment.

All times are multiples of 1/8 s and all rates are whole numbers of bytes, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from p2pserve.kvtransport.errors import FiguresError
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures
from p2pserve.kvtransport.routing.paths import PathNetwork, PathQuery, choose
from p2pserve.kvtransport.routing.settings import PathSettings, SteeringSettings
from p2pserve.kvtransport.routing.steering import PathChange, PathController, TriggerKind

GBPS = 125_000_000  # bytes per second
TICK = 0.125
SIZE = 10**12
NEVER = SteeringSettings(look_s=1e6)  # nothing is looked for without cause
STALLS_ALONE = SteeringSettings(look_s=1e6, window_s=64.0)  # nor is a path called slow


def link(rtt_s: float, gbps: float) -> LinkFigures:
    return LinkFigures(rtt_s=rtt_s, one_stream_gbps=gbps, capacity_gbps=gbps)


def network(rtt_s: float = 0.125, relay: float = 0.8, direct: float = 1.0) -> PathNetwork:
    """One link, and one relay unless it has no rate. The sender's own limit makes two paths no better than one."""
    links = {("a", "b"): link(rtt_s, direct)}
    if relay:
        links |= {("a", "r"): link(rtt_s / 2, relay), ("r", "b"): link(rtt_s / 2, relay)}
    return PathNetwork(links, {"a": BoxFigures(up_gbps=1.0)})


@dataclass
class Drive:
    """A transfer that always has something to send, over paths that move what they are told to."""

    settings: SteeringSettings = NEVER
    view: PathNetwork = field(default_factory=network)
    now: float = 0.0
    acked: dict[str | None, float] = field(default_factory=dict)
    changes: list[PathChange] = field(default_factory=list)

    def __post_init__(self) -> None:
        query = PathQuery(source="a", target="b", bytes=SIZE)
        self.controller = PathController(query, choose(query, self.view), now=self.now, settings=self.settings)
        self.report(None)

    def report(self, via: str | None, backlog: int = 1) -> None:
        self.controller.on_progress(via, int(self.acked.get(via, 0)), backlog, now=self.now)

    def move(self, seconds: float, gbps: float | Mapping[str | None, float], backlog: int = 1) -> PathChange | None:
        """The first change within so many seconds, or None after them."""
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            for path in self.controller.choice.paths:
                rate = gbps if isinstance(gbps, float) else gbps[path.via]
                self.acked[path.via] = self.acked.get(path.via, 0.0) + rate * GBPS * TICK
                self.report(path.via, backlog)
            change = self.controller.step(self.view, now=self.now)
            if change is not None:
                self.changes.append(change)
                return change
        return None


class TestStalls:
    def test_a_second_of_silence_after_the_ramp(self) -> None:
        drive = Drive()
        assert drive.controller.wake_at() == 1.25 + 1.0, "ten round trips, and a second"
        assert drive.move(2.125, 0.0) is None
        change = drive.move(TICK, 0.0)
        assert change is not None
        seen = change.trigger
        assert (seen.kind, seen.via, seen.observed_gbps, seen.expected_gbps, seen.over_s) == (
            TriggerKind.STALLED,
            None,
            0.0,
            1.0,
            1.0,
        )
        assert (change.at, change.remaining_bytes) == (2.25, SIZE)

    def test_a_long_path_has_five_round_trips(self) -> None:
        drive = Drive(STALLS_ALONE, network(rtt_s=0.5))
        assert drive.controller.wake_at() == 5.0 + 2.5
        assert drive.move(7.5 - TICK, 0.0) is None
        change = drive.move(TICK, 0.0)
        assert change is not None
        assert change.trigger.over_s == 2.5

    def test_the_settings_say_how_long(self) -> None:
        drive = Drive(SteeringSettings(look_s=1e6, window_s=64.0, stall_s=3.0, ramp_rtts=2.0))
        assert drive.move(3.25 - TICK, 0.0) is None
        assert drive.move(TICK, 0.0) is not None

    def test_silence_counts_from_the_last_byte(self) -> None:
        drive = Drive(STALLS_ALONE)
        assert drive.move(2.0, 1.0) is None
        drive.acked[None] += 1
        assert drive.move(TICK, 0.0) is None
        assert drive.move(1.0 - TICK, 0.0) is None
        change = drive.move(TICK, 0.0)
        assert change is not None
        assert change.trigger.kind is TriggerKind.STALLED

    def test_one_byte_that_waits_is_something_to_send_and_none_is_not(self) -> None:
        drive = Drive()
        assert drive.move(10.0, 0.0, backlog=0) is None
        assert drive.move(1.0, 0.0) is None, "there is something to send only since the first of these reports"
        assert drive.move(TICK, 0.0) is not None

    def test_one_pause_in_what_there_is_to_send_starts_the_clock_anew(self) -> None:
        drive = Drive(STALLS_ALONE)
        assert drive.move(2.0, 0.0) is None
        drive.report(None, backlog=0)
        assert drive.move(1.0, 0.0) is None
        assert drive.move(TICK, 0.0) is not None

    def test_a_new_path_has_nothing_to_send_until_it_is_told(self) -> None:
        drive = Drive(STALLS_ALONE)
        assert drive.move(3.0, 0.0) is not None
        assert drive.controller.choice.vias == {"r"}
        assert drive.controller.wake_at() == 1e6 * 2 + drive.now

    def test_a_stall_goes_before_a_slow_path(self) -> None:
        """Both of two paths are in trouble: the one that moves nothing is told."""
        links = {("a", "b"): link(0.125, 1.0), ("a", "r"): link(0.0625, 1.0), ("r", "b"): link(0.0625, 1.0)}
        drive = Drive(view=PathNetwork(links))
        assert drive.controller.choice.vias == {None, "r"}
        drive.report("r")
        change = drive.move(3.0, {None: 0.1, "r": 0.0})
        assert change is not None
        assert (change.trigger.via, change.trigger.kind) == ("r", TriggerKind.STALLED)


class TestDegradedPaths:
    def test_a_whole_window_is_needed(self) -> None:
        drive = Drive()
        assert drive.move(1.25 + 1.0 - TICK, 0.1) is None
        change = drive.move(TICK, 0.1)
        assert change is not None
        assert (change.trigger.kind, change.trigger.over_s) == (TriggerKind.DEGRADED, 1.0)
        assert change.trigger.observed_gbps == pytest.approx(0.1)

    def test_a_window_has_at_least_four_round_trips(self) -> None:
        drive = Drive(view=network(rtt_s=0.5))
        assert drive.move(5.0 + 2.0 - TICK, 0.1) is None
        assert drive.move(TICK, 0.1) is not None

    @pytest.mark.parametrize(("gbps", "left"), [(0.5, False), (0.48, True)])
    def test_half_of_what_was_expected_is_enough(self, gbps: float, left: bool) -> None:
        drive = Drive()
        assert (drive.move(4.0, gbps) is not None) is left

    @pytest.mark.parametrize(("share", "left"), [(0.25, False), (0.75, True)])
    def test_the_settings_say_how_much_is_enough(self, share: float, left: bool) -> None:
        drive = Drive(SteeringSettings(look_s=1e6, slow_share=share))
        assert (drive.move(4.0, 0.6) is not None) is left

    def test_what_it_has_come_to_is_believed_not_the_mean(self) -> None:
        drive = Drive()
        assert drive.move(1.25, 1.0) is None
        assert drive.move(0.75, 0.4) is None
        change = drive.move(0.5, 0.2)
        assert change is not None
        assert change.trigger.observed_gbps == pytest.approx(0.2, abs=0.01)

    def test_what_it_did_before_the_window_does_not_count(self) -> None:
        drive = Drive()
        assert drive.move(4.0, 1.0) is None
        assert drive.controller.wake_at() == 4.0, "a window after its oldest point, which is one window old"
        change = drive.move(1.0, 0.1)
        assert change is not None
        assert change.trigger.over_s == 1.0
        assert change.at == 4.625, "5 of 8 points at a tenth and 3 at all of it are less than half"

    def test_between_two_reports_that_are_far_apart_the_mean_is_all_that_is_known(self) -> None:
        drive = Drive()
        for now in (1.25, 1.75, 2.25):
            drive.now, drive.acked[None] = now, 0.1 * GBPS * now
            drive.report(None)
        change = drive.controller.step(drive.view, now=2.25)
        assert change is not None
        assert change.trigger.observed_gbps == pytest.approx(0.1)

    def test_a_late_recovery_does_not_hide_the_mean(self) -> None:
        drive = Drive()
        assert drive.move(2.0, 0.1) is None
        change = drive.move(0.25, 0.9)
        assert change is not None
        assert change.trigger.observed_gbps == pytest.approx(0.75 * 0.1 + 0.25 * 0.9)


class TestTwoPaths:
    LINKS: Mapping[tuple[str, str], LinkFigures] = {
        ("a", "b"): link(0.125, 1.0),
        ("a", "r"): link(0.0625, 1.0),
        ("r", "b"): link(0.0625, 1.0),
    }

    def test_one_that_had_nothing_to_send_is_not_taken_for_dead_when_the_other_stalls(self) -> None:
        drive = Drive(STALLS_ALONE, PathNetwork(self.LINKS))
        drive.report("r")
        drive.report(None, backlog=0)
        drive.now = 2.25
        drive.report("r")
        drive.report(None, backlog=0)
        change = drive.controller.step(drive.view, now=2.25)
        assert change is not None
        assert change.trigger.via == "r"
        assert change.choice.vias == {None}

    def test_nothing_is_looked_for_before_both_have_shown_what_they_can(self) -> None:
        drive = Drive(SteeringSettings(look_s=4.0), PathNetwork(self.LINKS))
        drive.view = PathNetwork({**self.LINKS, ("a", "s"): link(0.0625, 9.0), ("s", "b"): link(0.0625, 9.0)})
        for _ in range(40):  # five seconds
            drive.now += TICK
            drive.acked[None] = GBPS * drive.now
            drive.report(None)
            drive.report("r", backlog=0)
            assert drive.controller.step(drive.view, now=drive.now) is None, "though a much better relay has come"


class TestWithoutAnythingBetter:
    def test_the_next_alarm_is_for_something_worse(self) -> None:
        drive = Drive(view=network(relay=0.0))
        assert drive.move(4.0, 0.4) is None
        drive.view = network()
        assert drive.move(4.0, 0.4) is None, "what it can do is known by now"
        change = drive.move(4.0, 0.1)
        assert change is not None
        assert change.trigger.expected_gbps == pytest.approx(0.4)

    def test_it_may_come_back_but_not_beyond_what_was_predicted(self) -> None:
        drive = Drive(view=network(relay=0.0))
        assert drive.move(4.0, 0.3) is None
        assert drive.move(4.0, 2.0) is None
        drive.view = network()
        change = drive.move(4.0, 0.4)
        assert change is not None, "a little less than half of 1 Gb/s is slow again"
        assert change.trigger.expected_gbps == 1.0

    def test_looking_for_something_better_in_vain_lowers_no_expectation(self) -> None:
        drive = Drive(SteeringSettings(look_s=3.0), network(relay=0.0))
        assert drive.move(4.0, 0.6) is None
        drive.view = network()
        change = drive.move(1.9, 0.35)
        assert change is not None, "less than half of 1 Gb/s, though not of 0.6"
        assert (change.trigger.kind, change.trigger.expected_gbps) == (TriggerKind.DEGRADED, 1.0)


class TestLooking:
    LOOKING = SteeringSettings(look_s=4.0)

    def test_something_better_is_taken_at_the_first_look(self) -> None:
        drive = Drive(self.LOOKING, network(direct=0.5, relay=0.0))
        assert drive.controller.wake_at() == 2.25
        drive.view = network(direct=0.5, relay=1.0)
        assert drive.move(4.0 - TICK, 0.5) is None
        change = drive.move(TICK, 0.5)
        assert change is not None
        assert (change.trigger.kind, change.trigger.via) == (TriggerKind.BETTER, None)
        assert change.trigger.observed_gbps == pytest.approx(0.5)
        assert change.choice.vias == {"r"}

    def test_each_change_doubles_the_time_to_the_next_look(self) -> None:
        drive = Drive(self.LOOKING, network(direct=0.5, relay=0.0))
        drive.view = network(direct=0.5, relay=1.0)
        assert drive.move(4.0, 0.5) is not None
        drive.view = network(direct=1.0, relay=0.5)
        assert drive.move(8.0 - TICK, 0.5) is None
        change = drive.move(TICK, 0.5)
        assert change is not None
        assert change.choice.vias == {None}
        assert len(drive.controller.changes) == 2

    def test_a_path_that_has_not_shown_what_it_can_is_not_compared(self) -> None:
        drive = Drive(self.LOOKING, network(direct=0.5, relay=0.0))
        drive.view = network(direct=0.5, relay=1.0)
        assert drive.move(4.0, 0.5, backlog=0) is None
        assert drive.move(4.0 - TICK, 0.5) is None, "put off by as much again"
        assert drive.move(TICK, 0.5) is not None

    def test_how_much_better_is_a_setting(self) -> None:
        eager = SteeringSettings(look_s=4.0, paths=PathSettings(relay_gain=1.0, switch_gain=1.0, stripe_gain=9.0))
        for settings, changed in ((self.LOOKING, False), (eager, True)):
            drive = Drive(settings, network(direct=0.9, relay=0.0))
            drive.view = network(direct=0.9, relay=1.0)
            assert (drive.move(5.0, 0.9) is not None) is changed


class TestTrust:
    @pytest.mark.parametrize(("limit", "second"), [(24.0, 24.0), (100.0, 32.0)])
    def test_a_path_that_was_left_is_not_trusted_for_its_hold(self, limit: float, second: float) -> None:
        drive = Drive(SteeringSettings(look_s=1.0, hold_s=16.0, hold_limit_s=limit), network(relay=0.3))
        away = drive.move(4.0, 0.0)
        assert away is not None
        assert away.choice.vias == {"r"}
        back = drive.move(40.0, 0.3)
        assert back is not None
        assert back.choice.vias == {None}
        assert 16.0 <= back.at - away.at < 16.0 + 2.0 + TICK
        away = drive.move(40.0, 0.0)
        assert away is not None
        back = drive.move(60.0, 0.3)
        assert back is not None
        assert second <= back.at - away.at < second + 8.0 + TICK, "twice as long, but for the limit"

    def test_what_it_moved_when_it_was_left_counts_for_it_meanwhile(self) -> None:
        """The relay turns out worse than what the direct path still did."""
        drive = Drive(SteeringSettings(look_s=1.0), network(relay=0.8))
        away = drive.move(4.0, 0.4)
        assert away is not None
        assert away.choice.vias == {"r"}
        back = drive.move(6.0, 0.1)
        assert back is not None
        assert back.choice.vias == {None}
        assert back.choice.taken.gbps == pytest.approx(0.4)


class TestSettings:
    def test_inside_a_site_a_second_is_long(self) -> None:
        lan, wan = SteeringSettings.lan(), SteeringSettings.wan()
        assert wan == SteeringSettings()
        for name in ("window_s", "stall_s", "look_s", "hold_s", "hold_limit_s"):
            assert getattr(lan, name) < getattr(wan, name)

    @pytest.mark.parametrize("name", ["window_rtts", "stall_rtts", "ramp_rtts", "hold_limit_s"])
    @pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
    def test_steering_names_what_is_wrong(self, name: str, value: float) -> None:
        with pytest.raises(FiguresError, match=f"steering.{name} is"):
            SteeringSettings(**{name: value})  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["relay_gain", "stripe_gain", "switch_gain", "give_up_factor"])
    def test_a_gain_is_at_least_one(self, name: str) -> None:
        assert getattr(PathSettings(**{name: 1.0}), name) == 1.0  # type: ignore[arg-type]
        for value in (0.99, float("inf")):
            with pytest.raises(FiguresError, match=f"paths.{name} is {value}"):
                PathSettings(**{name: value})  # type: ignore[arg-type]

    def test_no_relay_need_be_striped(self) -> None:
        assert PathSettings(striped_relays=0).striped_relays == 0
        with pytest.raises(FiguresError, match="striped_relays is -1"):
            PathSettings(striped_relays=-1)
