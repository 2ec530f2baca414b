"""When links are measured, on a virtual clock; what a burst shows; and the bytes of its hello and result."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.errors import FiguresError, KVProtocolError, TicketError
from p2pserve.kvtransport.probing.burst_meter import BIN_S, BurstMeter
from p2pserve.kvtransport.probing.burst_ticket import (
    BURST_HELLO_BYTES,
    RESULT_HEAD_BYTES,
    BurstTicket,
    issue_burst,
    pack_hello,
    pack_result,
    parse_hello,
    parse_result,
    result_bytes,
)
from p2pserve.kvtransport.probing.estimates import BurstSample
from p2pserve.kvtransport.probing.figures import prior
from p2pserve.kvtransport.probing.probe import (
    Activity,
    BurstRefusal,
    BurstRequest,
    DeferReason,
    PeerLink,
    ProbeScheduler,
    ProbeSettings,
    ProbeStep,
    representatives,
)

IDLE, BUSY = Activity(), Activity(transfers=1)
FIGURES = prior(90, 0.23, 1.0)


def peer_link(name: str, site: str = "x", *, usd_per_gb: float = 0.0) -> PeerLink:
    return PeerLink(name, site, FIGURES, usd_per_gb)


def scheduler(peers: int = 3, *, usd_per_gb: float = 0.0, **options: Any) -> ProbeScheduler:
    made = ProbeScheduler("me", "home", random.Random(1), now=0.0, settings=ProbeSettings(**options))
    made.set_peers([peer_link(f"p{i}", usd_per_gb=usd_per_gb) for i in range(peers)], now=0.0)
    return made


@dataclass
class Day:
    """A scheduler run for a time; every burst succeeds after a second and takes all of its bytes."""

    probes: ProbeScheduler
    now: float = 0.0
    pings: list[tuple[float, str]] = field(default_factory=list)
    bursts: list[tuple[float, BurstRequest]] = field(default_factory=list)
    steps: int = 0

    def run(self, until: float, activity: Activity = IDLE, *, answered: bool = True) -> None:
        while (wake := self.probes.wake_at()) <= until:
            assert wake < inf
            self.now = max(wake, self.now)
            self.steps += 1
            step: ProbeStep = self.probes.step(activity, now=self.now)
            for peer in step.pings:
                self.pings.append((self.now, peer))
                self.probes.on_ping(peer, answered, now=self.now)
            if step.burst is not None:
                self.bursts.append((self.now, step.burst))
                assert self.probes.statistics().reserved_with == step.burst.peer
                self.probes.on_burst_done(step.burst.peer, step.burst.max_bytes, succeeded=True, now=self.now + 1.0)
        self.now = until


class TestPings:
    def test_every_peer_about_every_five_seconds(self) -> None:
        day = Day(scheduler(3))
        day.run(500)
        for name in ("p0", "p1", "p2"):
            times = [at for at, peer in day.pings if peer == name]
            assert 90 <= len(times) <= 111
            gaps = [b - a for a, b in pairwise(times)]
            assert min(gaps) >= 4.5
            assert max(gaps) <= 5.5
            assert len(set(gaps)) > 10  # jittered

    def test_never_more_than_its_rate_in_a_large_network(self) -> None:
        day = Day(scheduler(600, pings_per_s=20))
        day.run(120)
        assert len(day.pings) <= 20 * 120 * 1.15
        assert len({peer for _, peer in day.pings}) == 600

    def test_backs_off_from_who_does_not_answer(self) -> None:
        day = Day(scheduler(1, backoff_limit_s=300.0))
        day.run(3600, answered=False)
        assert len(day.pings) < 25
        gaps = [b[0] - a[0] for a, b in pairwise(day.pings)]
        assert gaps[-1] == pytest.approx(300, rel=0.11)
        assert gaps[0] < gaps[3] < gaps[5]
        assert day.bursts == [] or day.bursts[-1][0] < 40  # none to a peer that seems gone


class TestBursts:
    def test_each_link_about_every_quarter_of_an_hour(self) -> None:
        day = Day(scheduler(3))
        day.run(9000)
        for name in ("p0", "p1", "p2"):
            assert 9 <= sum(request.peer == name for _, request in day.bursts) <= 12
        assert day.steps < 9000  # it sleeps in between

    def test_asks_for_streams_that_would_show_a_better_link(self) -> None:
        day = Day(scheduler(1))
        day.run(60)
        _, request = day.bursts[0]
        assert request.streams == 9  # for twice a gigabit at 90 ms
        assert request.seconds == pytest.approx(1.4)
        assert request.max_bytes == 256_000_000
        assert not request.overdue

    def test_a_real_transfer_counts_as_a_burst(self) -> None:
        probes = scheduler(1)
        probes.on_measured("p0", now=0.0)
        day = Day(probes)
        day.run(800)
        assert day.bursts == []
        day.run(1000)
        assert len(day.bursts) == 1

    def test_serving_puts_them_off_and_only_so_long(self) -> None:
        day = Day(scheduler(2, postpone_s=600.0))
        day.run(590, BUSY)
        assert day.bursts == []
        assert day.steps < 600  # nor does it wake for nothing
        day.run(700, BUSY)
        assert {request.peer for _, request in day.bursts} == {"p0", "p1"}
        assert all(request.overdue and request.seconds < 0.8 for _, request in day.bursts)

    def test_after_serving_they_run_at_once(self) -> None:
        day = Day(scheduler(1))
        day.run(300, Activity(engine_busy=True))
        day.run(330, IDLE)
        assert len(day.bursts) == 1

    def test_one_at_a_time_here_as_well(self) -> None:
        probes = scheduler(5)
        assert [one for now in range(40, 60) if (one := probes.step(IDLE, now=now).burst)] != []
        step = probes.step(IDLE, now=60.0)
        assert step.burst is None
        assert {one.reason for one in step.deferred} == {DeferReason.RESERVED}

    def test_a_refusal_is_tried_again_later_and_costs_nothing(self) -> None:
        probes = scheduler(1, usd_per_gb=0.01)
        step = probes.step(IDLE, now=50.0)
        assert step.burst is not None
        spent = probes.statistics().usd_left
        probes.on_refused("p0", 30.0, now=50.1)
        assert probes.statistics().usd_left > spent
        assert probes.step(IDLE, now=60.0).burst is None
        assert probes.step(IDLE, now=90.0).burst is not None
        assert probes.statistics().refused == 1

    def test_the_wait_counts_from_the_first_time_it_was_due(self) -> None:
        probes = scheduler(1, postpone_s=100.0)
        now, overdue = 40.0, None
        while overdue is None:
            if (request := probes.step(IDLE, now=now).burst) is not None:
                overdue = now if request.overdue else None
                probes.on_refused("p0", 1e9, now=now)  # however long it is told to wait
            now += 10.0
            assert now < 2000.0

    def test_whoever_vanishes_in_a_burst_frees_the_box(self) -> None:
        probes = scheduler(1)
        assert probes.step(IDLE, now=40.0).burst is not None
        assert probes.wake_at() < 65.0
        probes.step(IDLE, now=70.0)
        assert probes.statistics().reserved_with is None


class TestMoney:
    def test_the_days_allowance_is_never_overdrawn(self) -> None:
        day = Day(scheduler(8, usd_per_gb=0.05, usd_per_day=0.10, burst_every_s=60.0))
        day.run(86_400)
        usd = sum(request.max_bytes for _, request in day.bursts) / 1e9 * 0.05
        assert 0.15 < usd <= 0.2 + 1e-9  # what it begins with, and what a day adds
        assert day.probes.statistics().usd_left >= -1e-12

    def test_even_when_overdue(self) -> None:
        day = Day(scheduler(2, usd_per_gb=0.05, usd_per_day=0.0, postpone_s=10.0))
        day.run(2000)
        assert day.bursts == []
        step = day.probes.step(IDLE, now=2100.0)
        assert {one.reason for one in step.deferred} == {DeferReason.BUDGET}

    def test_bytes_not_sent_are_not_paid(self) -> None:
        probes = scheduler(1, usd_per_gb=0.01)
        step = probes.step(IDLE, now=40.0)
        assert step.burst is not None
        probes.on_burst_done("p0", 10_000_000, succeeded=True, now=41.0)
        assert probes.statistics().usd_left == pytest.approx(0.10 - 0.0001, abs=1e-6)
        assert probes.statistics().burst_bytes == 10_000_000


class TestBeingAsked:
    REQUEST = BurstRequest("me", 8, 1.0, 100_000_000, False)

    def ask(self, probes: ProbeScheduler, now: float, activity: Activity = IDLE, **more: Any) -> BurstRefusal | None:
        request = msgspec.structs.replace(self.REQUEST, **more)
        return probes.on_asked(request, "p0", activity, usd_per_gb=0.01, now=now)

    def test_free_and_idle_it_takes_part_and_is_reserved(self) -> None:
        probes = scheduler(2)
        assert self.ask(probes, 1.0) is None
        refusal = self.ask(probes, 1.1)
        assert refusal is not None
        assert refusal.reason is DeferReason.RESERVED
        assert 0 < refusal.retry_s <= 22
        probes.on_burst_done("p0", 50_000_000, succeeded=True, now=2.0)
        assert self.ask(probes, 2.1) is None

    def test_two_that_ask_each_other_both_refuse_and_one_comes_through(self) -> None:
        boxes = {}
        for seed, (name, other) in enumerate((("a", "b"), ("b", "a"))):
            boxes[name] = ProbeScheduler(name, "s", random.Random(seed), now=0.0)
            boxes[name].set_peers([peer_link(other)], now=0.0)
        done: list[str] = []
        now = 30.0
        while len(done) < 2:
            asked = {name: box.step(IDLE, now=now).burst for name, box in boxes.items()}
            for name, request in asked.items():
                if request is None:
                    continue
                asked_one = boxes[request.peer]
                if (refusal := asked_one.on_asked(request, name, IDLE, usd_per_gb=0.0, now=now)) is not None:
                    boxes[name].on_refused(request.peer, refusal.retry_s, now=now)
                else:
                    done.append(name)
                    boxes[name].on_burst_done(request.peer, 1, succeeded=True, now=now + 1)
                    asked_one.on_burst_done(name, 1, succeeded=True, now=now + 1)
            now += 1.0
            assert now < 4000

    def test_busy_it_refuses_unless_it_is_overdue_and_not_again_soon(self) -> None:
        probes = scheduler(2, postpone_s=600.0)
        refusal = self.ask(probes, 1.0, BUSY)
        assert refusal is not None
        assert refusal.reason is DeferReason.BUSY
        assert self.ask(probes, 2.0, BUSY, overdue=True) is None
        probes.on_burst_done("p0", 1, succeeded=True, now=3.0)
        assert self.ask(probes, 100.0, BUSY, overdue=True) is not None
        assert self.ask(probes, 700.0, BUSY, overdue=True) is None

    def test_it_pays_for_what_it_receives(self) -> None:
        probes = scheduler(2, usd_per_day=0.0015)
        assert self.ask(probes, 1.0) is None
        probes.on_burst_done("p0", 100_000_000, succeeded=True, now=2.0)
        refusal = self.ask(probes, 3.0)
        assert refusal is not None
        assert refusal.reason is DeferReason.BUDGET

    def test_too_much(self) -> None:
        refusal = self.ask(scheduler(2), 1.0, max_bytes=1_000_000_000)
        assert refusal is not None
        assert refusal.reason is DeferReason.TOO_MUCH

    @pytest.mark.parametrize(
        ("field_", "value"), [("streams", 0), ("streams", 65), ("seconds", 0.0), ("seconds", 60.0), ("max_bytes", 0)]
    )
    def test_requests_that_cannot_be_meant(self, field_: str, value: float) -> None:
        with pytest.raises(FiguresError, match=f"burst.{field_} is"):
            msgspec.structs.replace(self.REQUEST, **{field_: value})


class TestLargeNetworks:
    SITES: Mapping[str, str] = {f"{site}{i}": site for site in ("paris", "nyc", "tokyo") for i in range(20)}

    def targets(self, me: str) -> set[str]:
        made = ProbeScheduler(me, self.SITES[me], random.Random(0), now=0.0)
        made.set_peers([PeerLink(box, site, FIGURES) for box, site in self.SITES.items()], now=0.0)
        day = Day(made)
        day.run(1000)
        return {request.peer for _, request in day.bursts}

    def test_representatives_measure_each_other_and_the_rest_one_link(self) -> None:
        chosen = representatives(self.SITES, 2)
        everybody = {box for boxes in chosen.values() for box in boxes}
        assert {len(boxes) for boxes in chosen.values()} == {2}
        for box in sorted(everybody):
            assert self.targets(box) == everybody - {box}
        for box in ("paris3", "paris7", "nyc11"):
            if box not in everybody:
                assert self.targets(box) == {chosen[self.SITES[box]][0]}

    def test_everybody_names_the_same_ones(self) -> None:
        turned = dict(reversed(list(self.SITES.items())))
        assert representatives(turned, 2) == representatives(self.SITES, 2)

    def test_one_that_leaves_moves_few(self) -> None:
        before = representatives(self.SITES, 2)
        gone = before["paris"][0]
        after = representatives({box: site for box, site in self.SITES.items() if box != gone}, 2)
        assert after["nyc"] == before["nyc"]
        assert before["paris"][1] in after["paris"]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 1 << 20),
    st.lists(
        st.tuples(st.sampled_from(["step", "done", "failed", "refused", "asked", "lost", "busy"]), st.floats(0, 400)),
        max_size=80,
    ),
)
def test_whatever_happens_there_is_one_burst_at_a_time_within_the_budget(
    seed: int, events: list[tuple[str, float]]
) -> None:
    probes = ProbeScheduler("me", "home", random.Random(seed), now=0.0)
    probes.set_peers([peer_link(f"p{i}", usd_per_gb=0.02) for i in range(4)], now=0.0)
    now, held = 0.0, ""
    for kind, wait in events:
        now += wait
        if kind in {"step", "busy"}:
            step = probes.step(BUSY if kind == "busy" else IDLE, now=now)
            if step.burst is not None:
                held = step.burst.peer
        elif kind == "asked":
            request = BurstRequest("me", 4, 1.0, 100_000_000, overdue=seed % 2 == 0)
            before = probes.statistics().reserved_with
            if probes.on_asked(request, "p1", IDLE, usd_per_gb=0.02, now=now) is None:
                assert before is None or now > 0
                held = "p1"
        elif kind in {"done", "failed"}:
            probes.on_burst_done(held, 1000, succeeded=kind == "done", now=now)
        elif kind == "refused":
            probes.on_refused(held, wait, now=now)
        else:
            probes.on_ping("p2", False, now=now)
        one = probes.statistics()
        assert -1e-9 <= one.usd_left <= 0.10 + 1e-9
        assert one.reserved_with in (None, held)


@pytest.mark.parametrize(
    "bad",
    [
        {"ping_every_s": 0.0},
        {"burst_every_s": inf},
        {"usd_per_day": -1.0},
        {"least_burst_bytes": 0},
        {"representatives": 0},
    ],
)
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(FiguresError, match=f"probe.{next(iter(bad))}"):
        ProbeSettings(**bad)


class TestMeter:
    @staticmethod
    def played(rates: list[float], rtt_s: float = 0.02, streams: int = 4) -> tuple[BurstMeter, float]:
        """Gb/s of the whole burst in steps of 10 ms, split evenly; ends when stable."""
        meter, now = BurstMeter(streams, rtt_s), 50.0
        for gbps in rates:
            for stream in range(streams):
                meter.add(stream, int(gbps * 1.25e8 * 0.01 / streams), now)
            now += 0.01
            if meter.is_stable(now):
                break
        return meter, now

    def test_slow_start_is_left_out(self) -> None:
        ramp = [min(1.0, 0.01 * 2 ** (i / 4)) for i in range(200)]
        meter, now = self.played(ramp)
        sample = meter.sample(now, "stable")
        assert sample.gbps == pytest.approx(1.0, rel=0.05)
        assert sample.stable
        assert sample.per_stream_gbps == pytest.approx([0.25] * 4, rel=0.06)
        assert sample.bytes / sample.seconds / 1.25e8 < 0.9  # the average would have said less
        assert now - 50.0 < 1.0

    def test_streams_that_send_a_window_per_round_trip(self) -> None:
        # All arrives in a tenth of each round trip of 100 ms.
        clumped = [10.0 if i % 10 == 0 else 0.0 for i in range(300)]
        meter, now = self.played(clumped, rtt_s=0.1)
        assert meter.sample(now, "stable").gbps == pytest.approx(1.0, rel=0.1)

    def test_a_wavering_rate_is_not_stable(self) -> None:
        # Each half of any stretch is far from the other.
        meter, now = self.played([0.01 * 1.03**i for i in range(150)])
        assert not meter.sample(now, "time").stable

    def test_silence_at_the_end_counts(self) -> None:
        meter, _ = self.played([1.0] * 30)
        assert meter.sample(50.0 + 3.0, "time").gbps < 0.5

    def test_over_at_once(self) -> None:
        meter = BurstMeter(2, 0.1)
        assert meter.sample(1.0, "nothing came") == BurstSample(
            bytes=0, seconds=0.0, streams=2, gbps=0.0, per_stream_gbps=(0.0, 0.0), stable=False, ended="nothing came"
        )
        meter.add(0, 1_000_000, 1.0)
        meter.add(1, 1_000_000, 1.0 + BIN_S / 2)
        sample = meter.sample(1.0 + BIN_S / 2, "closed by the sender")
        assert sample.gbps == pytest.approx(2_000_000 / (BIN_S / 2) / 1.25e8)
        assert not sample.stable

    @pytest.mark.parametrize(("rtt_s", "seconds"), [(0.02, 0.4), (0.2, 0.8), (0.5, 2.0)])
    def test_each_half_of_a_stable_burst_has_two_round_trips(self, rtt_s: float, seconds: float) -> None:
        meter, now = self.played([1.0] * 300, rtt_s)
        assert meter.is_stable(now)
        assert now - 50.0 == pytest.approx(seconds, abs=2.1 * BIN_S)

    def test_a_burst_of_one_read_is_taken_for_a_tenth_of_a_bin(self) -> None:
        meter = BurstMeter(1, 0.02)
        meter.add(0, 1000, 7.0)
        sample = meter.sample(7.0, "closed by the sender")
        assert sample.gbps == pytest.approx(1000 / (BIN_S / 10) / 1.25e8)
        assert sample.per_stream_gbps == pytest.approx((sample.gbps,))


class TestTicket:
    TICKET = issue_burst(streams=4, seconds=1.0, max_bytes=10**8, rtt_s=0.09, random=random.Random(5).randbytes)
    SAMPLE = BurstSample(bytes=1, seconds=1.0, streams=4, gbps=0.5, per_stream_gbps=(0.1, 0.1, 0.1, 0.2))

    def test_a_hello_proves_itself(self) -> None:
        data = pack_hello(self.TICKET, 3)
        assert len(data) == BURST_HELLO_BYTES
        hello = parse_hello(data)
        hello.check(self.TICKET)
        assert (hello.burst, hello.index) == (self.TICKET.burst, 3)
        other = msgspec.structs.replace(self.TICKET, key=bytes(32))
        with pytest.raises(KVProtocolError, match="does not prove"):
            hello.check(other)
        with pytest.raises(KVProtocolError, match="burst connection 4 of 4"):
            parse_hello(pack_hello(self.TICKET, 4)).check(self.TICKET)

    @given(st.integers(0, BURST_HELLO_BYTES - 1), st.integers(1, 255))
    def test_a_changed_hello_does_not(self, at: int, flip: int) -> None:
        data = bytearray(pack_hello(self.TICKET, 1))
        data[at] ^= flip
        with pytest.raises(KVProtocolError):
            parse_hello(bytes(data)).check(self.TICKET)

    def read(self, data: bytes) -> BurstSample:
        head = data[:RESULT_HEAD_BYTES]
        rest = data[RESULT_HEAD_BYTES : RESULT_HEAD_BYTES + result_bytes(head)]
        return parse_result(self.TICKET, head, rest)

    def test_a_result_comes_back(self) -> None:
        data = pack_result(self.TICKET, self.SAMPLE)
        assert RESULT_HEAD_BYTES + result_bytes(data[:RESULT_HEAD_BYTES]) == len(data)
        assert self.read(data) == self.SAMPLE

    @given(st.data())
    def test_a_changed_result_does_not(self, data: st.DataObject) -> None:
        made = bytearray(pack_result(self.TICKET, self.SAMPLE))
        made[data.draw(st.integers(0, len(made) - 1))] ^= data.draw(st.integers(1, 255))
        with pytest.raises(KVProtocolError):
            self.read(bytes(made))

    def test_a_result_that_cannot_be_meant(self) -> None:
        with pytest.raises(KVProtocolError, match="not a burst's result"):
            result_bytes(bytes(RESULT_HEAD_BYTES))
        with pytest.raises(KVProtocolError, match="result of 1000000 bytes"):
            result_bytes(b"p2pBR/1\n" + (1_000_000).to_bytes(4, "little"))
        with pytest.raises(KVProtocolError, match="not a burst connection"):
            parse_hello(b"GET / HTTP/1.1\r\n")

    @pytest.mark.parametrize(
        ("field_", "value"),
        [
            ("burst", b""),
            ("key", b"x"),
            ("streams", 0),
            ("streams", 65),
            ("seconds", 11.0),
            ("max_bytes", 0),
            ("rtt_s", -1.0),
            ("lease_s", float("nan")),
        ],
    )
    def test_bad_tickets(self, field_: str, value: Any) -> None:
        with pytest.raises(TicketError, match="burst"):
            msgspec.structs.replace(self.TICKET, **{field_: value})

    def test_travels_and_hides_its_key(self) -> None:
        data = msgspec.msgpack.encode(self.TICKET)
        assert msgspec.msgpack.decode(data, type=BurstTicket) == self.TICKET
        assert self.TICKET.key.hex() not in repr(self.TICKET)
        assert "hidden" in repr(self.TICKET)
