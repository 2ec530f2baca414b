"""When exactly a box pings, bursts, refuses and pays. The random generator gives the middle of what it is asked for."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from p2pserve.kvtransport.errors import FiguresError
from p2pserve.kvtransport.probing.figures import LinkFigures
from p2pserve.kvtransport.probing.probe import (
    Activity,
    BurstRefusal,
    BurstRequest,
    DeferReason,
    PeerLink,
    ProbeScheduler,
    ProbeSettings,
)

IDLE, BUSY = Activity(), Activity(engine_busy=True)
FIGURES = LinkFigures(rtt_s=0.125, one_stream_gbps=0.25, capacity_gbps=1.0)
DAY = 86_400.0
TIMES = {"ping_every_s": 4.0, "retry_s": 16.0, "burst_every_s": 512.0, "postpone_s": 1024.0, "backoff_limit_s": 40.0}


class Even(Random):
    """No jitter: nothing is spread, nothing is stretched."""

    def random(self) -> float:
        return 0.0

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def scheduler(
    peers: int = 1, *, usd_per_gb: float = 0.0, figures: LinkFigures = FIGURES, **options: float
) -> ProbeScheduler:
    settings = ProbeSettings(**{**TIMES, **options})  # type: ignore[arg-type]
    made = ProbeScheduler("me", "here", Even(), now=0.0, settings=settings)
    made.set_peers([PeerLink(f"p{n}", "there", figures, usd_per_gb) for n in range(peers)], now=0.0)
    return made


def begin(probes: ProbeScheduler, now: float = 0.0, activity: Activity = IDLE) -> BurstRequest:
    burst = probes.step(activity, now=now).burst
    assert burst is not None
    return burst


def reasons(probes: ProbeScheduler, now: float, activity: Activity = IDLE) -> dict[str, DeferReason]:
    step = probes.step(activity, now=now)
    assert step.burst is None
    return {one.peer: one.reason for one in step.deferred}


class TestPings:
    def test_the_next_one_is_due_at_its_moment(self) -> None:
        probes = scheduler(2)
        assert probes.step(IDLE, now=0.0).pings == ("p0", "p1")
        assert probes.step(IDLE, now=3.99).pings == ()
        assert probes.step(IDLE, now=4.0).pings == ("p0", "p1")
        assert probes.statistics().pings == 4

    def test_it_counts_from_the_answer(self) -> None:
        probes = scheduler(1)
        probes.step(IDLE, now=0.0)
        probes.on_ping("p0", True, now=1.0)
        assert probes.wake_at() == 5.0
        probes.on_ping("stranger", True, now=2.0)
        assert probes.wake_at() == 5.0

    @pytest.mark.parametrize(("rate", "gap"), [(2.0, 4.0), (1.0, 8.0)])
    def test_a_box_never_sends_more_than_its_rate(self, rate: float, gap: float) -> None:
        probes = scheduler(8, pings_per_s=rate)
        probes.step(IDLE, now=0.0)
        assert probes.step(IDLE, now=gap - 0.01).pings == ()
        assert len(probes.step(IDLE, now=gap).pings) == 8

    def test_the_gap_doubles_without_an_answer_up_to_its_limit(self) -> None:
        probes = scheduler(1, burst_every_s=1e6)
        probes.on_measured("p0", now=0.0)
        now, gaps = 0.0, []
        for _ in range(6):
            probes.on_ping("p0", False, now=now)
            gaps.append(probes.wake_at() - now)
            now = probes.wake_at()
        assert gaps == [8.0, 16.0, 32.0, 40.0, 40.0, 40.0]
        probes.on_ping("p0", True, now=now)
        assert probes.wake_at() - now == 4.0

    def test_a_crowd_is_not_pinged_more_often_for_being_silent(self) -> None:
        probes = scheduler(8, pings_per_s=0.1, burst_every_s=1e6)
        for n in range(8):
            probes.on_ping(f"p{n}", False, now=0.0)
            probes.on_measured(f"p{n}", now=0.0)
        assert probes.wake_at() == 80.0


class TestBursts:
    def test_how_long_and_how_wide(self) -> None:
        burst = begin(scheduler())
        assert burst == BurstRequest("p0", streams=13, seconds=0.5 + 10 * 0.125, max_bytes=256_000_000, overdue=False)

    def test_its_length_follows_the_settings(self) -> None:
        assert begin(scheduler(burst_s=0.25, burst_rtts=4.0)).seconds == 0.75
        assert begin(scheduler(burst_limit_s=1.0)).seconds == 1.0

    def test_a_slow_link_takes_twice_what_it_carries_and_at_least_the_least(self) -> None:
        slow = LinkFigures(rtt_s=0.125, one_stream_gbps=0.016, capacity_gbps=0.016)
        assert begin(scheduler(figures=slow)).max_bytes == int(2 * 2_000_000 * 1.75)
        slower = LinkFigures(rtt_s=0.125, one_stream_gbps=0.004, capacity_gbps=0.004)
        burst = begin(scheduler(figures=slower))
        assert (burst.max_bytes, burst.streams) == (4_000_000, 4)
        assert begin(scheduler(figures=slower, least_streams=7)).streams == 7

    def test_one_at_a_time_in_the_order_of_waiting(self) -> None:
        probes = scheduler(3)
        assert begin(probes).peer == "p0"
        probes.on_burst_done("p0", 1, succeeded=True, now=1.0)
        assert begin(probes, 1.0).peer == "p1"
        assert probes.statistics().reserved_with == "p1"
        probes.on_burst_done("p0", 1, succeeded=True, now=2.0)
        assert probes.statistics().reserved_with == "p1", "another's end frees nobody"

    @pytest.mark.parametrize(("succeeded", "gap"), [(True, 512.0), (False, 16.0)])
    def test_the_next_one(self, succeeded: bool, gap: float) -> None:
        probes = scheduler()
        begin(probes)
        probes.on_burst_done("p0", 1, succeeded=succeeded, now=2.0)
        assert probes.step(IDLE, now=2.0 + gap - 0.01).burst is None
        assert begin(probes, 2.0 + gap).peer == "p0"

    def test_a_transfer_puts_it_off_by_as_much(self) -> None:
        probes = scheduler()
        probes.on_measured("p0", now=8.0)
        assert probes.step(IDLE, now=519.9).burst is None
        assert begin(probes, 520.0).peer == "p0"

    def test_serving_puts_it_off_until_it_is_overdue(self) -> None:
        probes = scheduler()
        assert reasons(probes, 0.0, BUSY) == {"p0": DeferReason.BUSY}
        assert reasons(probes, 15.9, BUSY) == {}
        assert reasons(probes, 16.0, BUSY) == {"p0": DeferReason.BUSY}
        assert reasons(probes, 1020.0, BUSY) == {"p0": DeferReason.BUSY}
        burst = begin(probes, 1024.0, BUSY)
        assert burst.overdue
        assert (burst.seconds, burst.max_bytes) == (1.75 / 2, 128_000_000), "shortened: it disturbs"

    def test_idle_it_runs_whole_though_it_is_overdue(self) -> None:
        probes = scheduler()
        assert reasons(probes, 0.0, BUSY) == {"p0": DeferReason.BUSY}
        burst = begin(probes, 1024.0)
        assert burst.overdue
        assert burst.seconds == 1.75

    def test_not_to_who_has_missed_three_pings(self) -> None:
        probes = scheduler()
        for _ in range(2):
            probes.on_ping("p0", False, now=0.0)
        begin(probes)
        probes.on_refused("p0", 1.0, now=0.0)
        probes.on_ping("p0", False, now=0.5)
        assert reasons(probes, 8.0) == {"p0": DeferReason.UNREACHABLE}
        probes.on_ping("p0", True, now=9.0)
        assert begin(probes, 24.0).peer == "p0"

    def test_a_refusal_says_when_and_is_kept_within_reason(self) -> None:
        for told, waited in ((0.1, 1.0), (30.0, 30.0), (1e6, 512.0)):
            probes = scheduler()
            begin(probes)
            probes.on_refused("other", told, now=1.0)
            probes.on_refused("p0", told, now=1.0)
            assert probes.step(IDLE, now=1.0 + waited - 0.01).burst is None
            assert begin(probes, 1.0 + waited).peer == "p0"
            assert probes.statistics().refused == 1

    def test_a_reservation_ends_by_itself(self) -> None:
        probes = scheduler()
        begin(probes)
        until = 1.75 + 16.0
        probes.step(IDLE, now=until - 0.01)
        assert probes.statistics().reserved_with == "p0"
        probes.step(IDLE, now=until)
        assert probes.statistics().reserved_with is None
        assert begin(probes, until + 16.0).peer == "p0"

    def test_nobody_else_is_waited_for_meanwhile(self) -> None:
        probes = scheduler(2, ping_every_s=1000.0)
        begin(probes)
        assert probes.wake_at() == 1.75 + 16.0


class TestMoney:
    def test_a_burst_takes_what_is_left(self) -> None:
        probes = scheduler(usd_per_gb=0.1, usd_per_day=0.01)
        assert begin(probes).max_bytes == pytest.approx(100_000_000, abs=1)
        assert probes.statistics().usd_left == pytest.approx(0.0, abs=1e-9)

    @pytest.mark.parametrize(("usd", "enough"), [(0.0004, True), (0.00039, False)])
    def test_below_the_least_it_does_not_begin(self, usd: float, enough: bool) -> None:
        probes = scheduler(usd_per_gb=0.1, usd_per_day=usd)
        if enough:
            assert begin(probes).max_bytes == 4_000_000
        else:
            assert reasons(probes, 0.0) == {"p0": DeferReason.BUDGET}

    def test_what_was_not_sent_comes_back_and_a_day_fills_it_up(self) -> None:
        probes = scheduler(usd_per_gb=0.1, usd_per_day=0.01)
        begin(probes)
        probes.on_burst_done("p0", 40_000_000, succeeded=True, now=0.0)
        assert probes.statistics().usd_left == pytest.approx(0.006)
        probes.on_asked(ASKED, "p0", IDLE, usd_per_gb=0.0, now=DAY / 5)
        assert probes.statistics().usd_left == pytest.approx(0.008)
        probes.on_burst_done("p0", 0, succeeded=True, now=DAY)
        probes.on_asked(ASKED, "p0", IDLE, usd_per_gb=0.0, now=5 * DAY)
        assert probes.statistics().usd_left == pytest.approx(0.01), "no more than a day's"

    def test_a_refusal_costs_nothing(self) -> None:
        probes = scheduler(usd_per_gb=0.1, usd_per_day=0.01)
        begin(probes)
        probes.on_refused("p0", 1.0, now=0.0)
        assert probes.statistics().usd_left == pytest.approx(0.01)


class Ends(Random):
    """Gives the ends of what it is asked for, in turn."""

    def random(self) -> float:
        return 0.5

    def uniform(self, a: float, b: float) -> float:
        self.low = not getattr(self, "low", False)
        return a if self.low else b


class TestSpread:
    def test_new_peers_begin_spread_over_a_gap_and_a_retry(self) -> None:
        settings = ProbeSettings(**TIMES)  # type: ignore[arg-type]
        probes = ProbeScheduler("me", "here", Ends(), now=0.0, settings=settings)
        probes.set_peers([PeerLink("p0", "there", FIGURES)], now=100.0)
        assert probes.wake_at() == 102.0, "half of four seconds"
        probes.on_ping("p0", True, now=109.0)
        assert probes.wake_at() == 110.0, "and half of sixteen more for the burst"

    def test_gaps_are_a_tenth_shorter_or_longer(self) -> None:
        settings = ProbeSettings(**TIMES)  # type: ignore[arg-type]
        probes = ProbeScheduler("me", "here", Ends(), now=0.0, settings=settings)
        probes.set_peers([PeerLink("p0", "there", FIGURES)], now=0.0)
        for gap in (4 * 0.9, 4 * 1.1):
            probes.on_ping("p0", True, now=0.0)
            assert probes.wake_at() == pytest.approx(gap)


ASKED = BurstRequest("me", 8, 2.0, 100_000_000, overdue=False)
OVERDUE = BurstRequest("me", 8, 2.0, 100_000_000, overdue=True)


class TestBeingAsked:
    def ask(
        self,
        probes: ProbeScheduler,
        now: float,
        request: BurstRequest = ASKED,
        activity: Activity = IDLE,
        usd: float = 0.0,
    ) -> BurstRefusal | None:
        return probes.on_asked(request, "p0", activity, usd_per_gb=usd, now=now)

    def test_who_is_taken_says_for_how_long(self) -> None:
        probes = scheduler(retry_s=16.0)
        assert self.ask(probes, 0.0) is None
        assert self.ask(probes, 1.0) == BurstRefusal(DeferReason.RESERVED, 16.0)
        assert self.ask(probes, 17.0) == BurstRefusal(DeferReason.RESERVED, 1.0)
        assert self.ask(probes, 17.99) == BurstRefusal(DeferReason.RESERVED, 0.1)
        assert self.ask(probes, 18.0) is None, "two seconds of burst, and the time to try again"

    def test_as_many_bytes_as_it_would_send_itself(self) -> None:
        probes = scheduler(burst_bytes=100_000_000)
        assert self.ask(probes, 0.0) is None
        probes = scheduler(burst_bytes=99_999_999)
        assert self.ask(probes, 0.0) == BurstRefusal(DeferReason.TOO_MUCH, 512.0)

    def test_serving_goes_before_unless_it_is_overdue_and_once_in_a_while(self) -> None:
        probes = scheduler()
        assert self.ask(probes, 0.0, activity=BUSY) == BurstRefusal(DeferReason.BUSY, 16.0)
        assert self.ask(probes, 0.0, OVERDUE, BUSY) is None
        probes.on_burst_done("p0", 1, succeeded=True, now=2.0)
        assert self.ask(probes, 1023.9, OVERDUE, BUSY) == BurstRefusal(DeferReason.BUSY, 16.0)
        assert self.ask(probes, 1024.0, OVERDUE, BUSY) is None

    def test_an_overdue_burst_that_disturbs_nobody_is_not_held_against_it(self) -> None:
        probes = scheduler()
        assert self.ask(probes, 0.0, OVERDUE) is None
        probes.on_burst_done("p0", 1, succeeded=True, now=2.0)
        assert self.ask(probes, 3.0, OVERDUE, BUSY) is None

    def test_it_pays_what_it_receives_and_says_when_it_can_again(self) -> None:
        probes = scheduler(usd_per_day=0.01)
        assert self.ask(probes, 0.0, usd=0.0999999) is None
        assert probes.statistics().usd_left == pytest.approx(0.0, abs=1e-7)
        probes.on_burst_done("p0", 100_000_000, succeeded=True, now=0.0)
        wait = self.ask(probes, 0.0, usd=0.0999999)
        assert wait == BurstRefusal(DeferReason.BUDGET, 512.0), "a day, but within reason"
        refusal = self.ask(probes, DAY - 100.0, usd=0.0999999)
        assert refusal is not None
        assert refusal.retry_s == pytest.approx(100.0, abs=1.0)
        refusal = self.ask(probes, DAY - 1.0, usd=0.0999999)
        assert refusal is not None
        assert refusal.retry_s == 16.0
        assert self.ask(probes, DAY + 1.0, usd=0.0999999) is None

    def test_without_any_allowance_it_is_asked_again_when_a_burst_would_be_due_anyway(self) -> None:
        probes = scheduler(usd_per_day=0.0)
        assert self.ask(probes, 0.0, usd=0.001) == BurstRefusal(DeferReason.BUDGET, 512.0)
        assert self.ask(probes, 0.0) is None, "what is free needs none"

    @pytest.mark.parametrize(("stays", "again"), [(True, BurstRefusal(DeferReason.BUSY, 16.0)), (False, None)])
    def test_how_lately_it_was_disturbed_is_known_as_long_as_the_peer_is(
        self, stays: bool, again: BurstRefusal | None
    ) -> None:
        probes = scheduler()
        assert self.ask(probes, 0.0, OVERDUE, BUSY) is None
        probes.on_burst_done("p0", 7, succeeded=True, now=2.0)
        assert (probes.statistics().bursts, probes.statistics().burst_bytes) == (1, 7)
        probes.set_peers([PeerLink("p0" if stays else "p1", "there", FIGURES)], now=3.0)
        assert self.ask(probes, 4.0, OVERDUE, BUSY) == again


class TestPeers:
    @pytest.mark.parametrize(("peers", "targets"), [(8, 8), (9, 2)])
    def test_in_a_small_network_everybody_measures_everybody(self, peers: int, targets: int) -> None:
        probes = scheduler(peers, representatives=2, everybody_below=8)
        assert probes.statistics().peers == peers
        assert probes.statistics().bursts_to == targets

    def test_who_is_gone_is_forgotten_and_who_stays_keeps_its_times(self) -> None:
        probes = scheduler(2)
        probes.step(IDLE, now=0.0)
        probes.set_peers([PeerLink("p1", "there", FIGURES), PeerLink("me", "here", FIGURES)], now=1.0)
        assert probes.statistics().peers == 1
        assert probes.step(IDLE, now=3.9).pings == ()
        assert probes.step(IDLE, now=4.0).pings == ("p1",)

    def test_alone_there_is_nothing_to_wake_for(self) -> None:
        assert scheduler(0).wake_at() == float("inf")


class TestSettings:
    def test_inside_a_site_traffic_is_free_and_links_hardly_change(self) -> None:
        lan, wan = ProbeSettings.lan(), ProbeSettings.wan()
        assert wan == ProbeSettings()
        assert lan.usd_per_day == 0.0
        for name in ("ping_every_s", "backoff_limit_s", "burst_s"):
            assert getattr(lan, name) < getattr(wan, name)
        assert lan.burst_every_s > wan.burst_every_s

    @pytest.mark.parametrize(
        "values",
        [
            {"usd_per_day": 0.0},
            {"postpone_s": 0.0},
            {"least_burst_bytes": 1},
            {"least_burst_bytes": 256_000_000},
            {"representatives": 1, "failures_to_unreachable": 1, "least_streams": 1},
            {"burst_s": 1e-9},
            {"burst_s": 10.0, "burst_limit_s": 10.0},
        ],
    )
    def test_just_allowed(self, values: dict[str, float]) -> None:
        settings = ProbeSettings(**values)  # type: ignore[arg-type]
        assert {name: getattr(settings, name) for name in values} == values

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"usd_per_day": -0.01}, "usd_per_day and probe.postpone_s must not be negative"),
            ({"usd_per_day": inf}, "usd_per_day and probe.postpone_s must not be negative"),
            ({"postpone_s": -1.0}, "usd_per_day and probe.postpone_s must not be negative"),
            ({"postpone_s": inf}, "usd_per_day and probe.postpone_s must not be negative"),
            ({"least_burst_bytes": 0}, "least_burst_bytes is 0"),
            ({"least_burst_bytes": 256_000_001}, "least_burst_bytes is 256000001"),
            ({"burst_s": 1.0, "burst_limit_s": 10.5}, "burst_s is 1.0"),
        ],
    )
    def test_just_not_allowed(self, values: dict[str, float], message: str) -> None:
        with pytest.raises(FiguresError, match=message):
            ProbeSettings(**values)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("name", "least", "most"), [("streams", 1, 64), ("seconds", 0.001, 10.0), ("max_bytes", 1, 4_000_000_000)]
    )
    def test_what_may_be_asked_for(self, name: str, least: float, most: float) -> None:
        good = {"peer": "b", "streams": 1, "seconds": 1.0, "max_bytes": 1, "overdue": False}
        for value in (least, most):
            assert getattr(BurstRequest(**{**good, name: value}), name) == value  # type: ignore[arg-type]
        for value in (0, most + 1):
            with pytest.raises(FiguresError, match=f"burst.{name} is {value}"):
                BurstRequest(**{**good, name: value})  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("name", "value"),
        [("failures_to_unreachable", 0), ("least_streams", 0), ("burst_s", 0.0), ("burst_s", 4.0), ("retry_s", -1.0)],
    )
    def test_bad_values_are_named(self, name: str, value: float) -> None:
        with pytest.raises(FiguresError, match=f"probe.{name} is {value}"):
            ProbeSettings(**{name: value})  # type: ignore[arg-type]
