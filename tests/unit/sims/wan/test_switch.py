"""The emulated network in virtual time: rates, queues, delays, losses, outages and changes."""

from collections.abc import Callable
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.sims.wan import Outage, Scenario, ScenarioError, WanBox, WanPair
from p2pserve.sims.wan.control import Commands, EmulatorReply
from p2pserve.sims.wan.switch import BURST_S, DROPPED, RateMeter, Switch

SIZE = 9000
Network = Switch[int]


def two(pair: WanPair, *, gbps: float = 1.0, seed: int = 0, down: float | None = None) -> Scenario:
    return Scenario(
        boxes={"a": WanBox(up_gbps=gbps, down_gbps=gbps), "b": WanBox(up_gbps=gbps, down_gbps=down or gbps)},
        pairs={("a", "b"): pair},
        mtu=SIZE,
        seed=seed,
    )


def drain(switch: Network, start: float, stop: float = 1e9) -> list[tuple[float, str, int]]:
    """All arrivals until `stop`, each at its very moment."""
    arrived = []
    while (wake := switch.wake_at()) is not None and wake <= stop:
        now = max(start, wake)
        arrived += [(now, box, packet) for box, packet in switch.release(now)]
    return arrived


def offer(switch: Network, gbps: float, seconds: float, *, a: str = "a", b: str = "b") -> int:
    """Packets offered at a steady rate from time 0; returns how many were taken."""
    gap = SIZE * 8e-9 / gbps
    return sum(switch.enter(a, b, SIZE, i, i * gap) for i in range(int(seconds / gap)))


def test_a_meter_lets_through_its_rate_and_no_more_than_its_queue() -> None:
    meter = RateMeter(0.1, 10 * SIZE)
    took = SIZE * 8e-9 / 0.1
    times = [meter.admit(10.0, SIZE) for _ in range(20)]
    passed = [at for at in times if at != DROPPED]
    saved = int(BURST_S / took)
    assert 11 + saved <= len(passed) <= 12 + saved
    assert times[-1] == DROPPED
    assert passed[-1] == pytest.approx(10.0 + (len(passed) * took - BURST_S))
    assert passed[0] == 10.0, "an idle meter has saved a packet's time"
    meter.set_rate(None, 0)
    assert meter.admit(20.0, SIZE) == 20.0


@given(st.lists(st.tuples(st.floats(0, 0.01), st.integers(40, 65_000)), min_size=2, max_size=200), st.floats(0.01, 10))
@settings(max_examples=60, deadline=None)
def test_no_stretch_of_time_sees_more_than_the_rate_and_one_burst(steps: list[tuple[float, int]], gbps: float) -> None:
    meter, now = RateMeter(gbps, 1e6), 5.0
    left: list[tuple[float, int]] = []
    for gap, size in steps:
        now += gap
        at = meter.admit(now, size)
        if at != DROPPED:
            assert at >= now
            left.append((at, size))
    times = [at for at, _ in left]
    assert times == sorted(times)
    for i in range(len(left)):
        total = sum(size for _, size in left[i:])
        allowed = (left[-1][0] - left[i][0] + BURST_S) * gbps * 1e9 / 8 + left[i][1] + left[-1][1]
        assert total <= allowed * (1 + 1e-9)


def test_a_packet_takes_half_the_round_trip() -> None:
    switch = Network(two(WanPair(rtt_ms=100)))
    assert switch.enter("a", "b", SIZE, 1, 7.0)
    assert switch.wake_at() == pytest.approx(7.05)
    assert switch.release(7.049) == []
    assert switch.waiting("a", "b") == SIZE
    assert switch.release(7.0501) == [("b", 1)]
    assert switch.wake_at() is None
    assert switch.waiting("a", "b") == 0


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        (two(WanPair(rtt_ms=20), gbps=0.2), 0.2),
        (two(WanPair(rtt_ms=20, gbps=0.1), gbps=0.2), 0.1),
        (two(WanPair(rtt_ms=20), gbps=0.2, down=0.05), 0.05),
        (two(WanPair(rtt_ms=20), gbps=2.0), 0.5),
    ],
)
def test_the_smallest_cap_decides(scenario: Scenario, expected: float) -> None:
    switch = Network(scenario)
    offer(switch, 0.5, 2.0)
    arrived = [at for at, _, _ in drain(switch, 0) if 0.5 < at <= 1.5]
    assert len(arrived) * SIZE * 8e-9 == pytest.approx(expected, rel=0.02)


def test_a_full_queue_drops_and_never_delays_more_than_its_length() -> None:
    switch = Network(two(WanPair(rtt_ms=100), gbps=0.1))
    offer(switch, 0.4, 2.0)
    drain(switch, 0)
    box = switch.box_statistics()["a"]
    line = switch.line_statistics()["a", "b"]
    assert box.up_dropped > 0
    assert box.sent_bytes == line.bytes == line.packets * SIZE
    assert 90 < line.queue_ms_max < 102, "one bandwidth-delay product: 100 ms"
    assert line.waiting_bytes == 0


def test_two_flows_share_a_senders_cap_and_a_receivers() -> None:
    slow, fast = WanBox(up_gbps=0.2, down_gbps=0.2), WanBox(up_gbps=2, down_gbps=2)
    scenario = Scenario(boxes={"a": slow, "b": fast, "c": fast}, default=WanPair(rtt_ms=10), mtu=SIZE)
    gap, rng = SIZE * 8e-9 / 0.3, Random(0)
    for flows in ([("a", "b"), ("a", "c")], [("b", "a"), ("c", "a")]):
        switch = Network(scenario)
        offered = sorted((i * gap + rng.random() * gap, flow) for i in range(int(2 / gap)) for flow in (0, 1))
        for now, flow in offered:
            switch.enter(*flows[flow], SIZE, flow, now)
        arrived = [flow for at, _, flow in drain(switch, 0) if 0.5 < at < 1.5]
        rates = [arrived.count(flow) * SIZE * 8e-9 for flow in (0, 1)]
        assert sum(rates) == pytest.approx(0.2, rel=0.03)
        assert min(rates) > 0.08


def test_loss_is_as_asked_and_the_same_again_with_the_same_seed() -> None:
    def lost(seed: int) -> list[bool]:
        switch = Network(two(WanPair(rtt_ms=10, loss=0.05), gbps=10, seed=seed))
        return [switch.enter("a", "b", SIZE, i, i * 1e-3) for i in range(4000)]

    first = lost(1)
    assert 150 < first.count(False) < 250
    assert first == lost(1)
    assert first != lost(2)


def test_jitter_keeps_the_order_and_its_bounds() -> None:
    switch = Network(two(WanPair(rtt_ms=100, jitter_ms=20), gbps=10))
    for i in range(3000):
        switch.enter("a", "b", SIZE, i, i * 1e-3)
    arrived = drain(switch, 0)
    assert [packet for _, _, packet in arrived] == list(range(3000))
    delays = [at - packet * 1e-3 for at, _, packet in arrived]
    assert min(delays) >= 0.040 - 1e-9
    assert max(delays) <= 0.060 + 1e-4
    assert max(delays) - min(delays) > 0.015
    assert sum(delays) / len(delays) == pytest.approx(0.05, abs=0.002)


def test_an_outage_swallows_what_enters_and_lets_arrive_what_is_under_way() -> None:
    switch = Network(two(WanPair(rtt_ms=100)))
    switch.enter("a", "b", SIZE, 1, 0.0)
    switch.outage("b", "a", 2.0, 0.01)
    assert not switch.enter("a", "b", SIZE, 2, 0.02)
    assert not switch.enter("b", "a", SIZE, 3, 1.99)
    assert switch.enter("a", "b", SIZE, 4, 2.02)
    assert [packet for _, _, packet in drain(switch, 0)] == [1, 4]
    assert switch.line_statistics()["a", "b"].dead == 1
    switch.outage("a", "b", 5.0, 3.0)
    switch.outage("a", "b", 0.0, 3.1)
    assert switch.enter("a", "b", SIZE, 5, 3.2)


def test_changes_count_from_now_on_and_only_where_asked() -> None:
    switch = Network(two(WanPair(rtt_ms=100)))
    switch.enter("a", "b", SIZE, 1, 0.0)
    switch.set_pair("a", "b", {"rtt_ms": 20, "loss": 0.0}, both=False)
    assert (switch.rtt_ms("a", "b"), switch.rtt_ms("b", "a")) == (20, 100)
    switch.enter("a", "b", SIZE, 2, 0.001)
    switch.enter("a", "b", SIZE, 3, 1.0)
    arrived = drain(switch, 0)
    assert [round(at, 3) for at, _, _ in arrived] == [0.05, 0.05, 1.01], "no packet overtakes another"
    switch.set_box("a", {"up_gbps": 0.01})
    taken = [switch.enter("a", "b", SIZE, i, 5.0) for i in range(100)]
    assert taken.count(True) in range(14, 20), "the queue of a slow link is 128 KiB"
    first, *_, last = [at for at, _, _ in drain(switch, 5.0)]
    assert last - first == pytest.approx((taken.count(True) - 1) * SIZE * 8e-9 / 0.01, rel=0.05)


@pytest.mark.parametrize(
    "change",
    [
        lambda switch: switch.set_pair("a", "x", {"rtt_ms": 1}),
        lambda switch: switch.set_pair("a", "a", {"rtt_ms": 1}),
        lambda switch: switch.set_pair("a", "b", {"rtt_ms": -1}),
        lambda switch: switch.set_pair("a", "b", {"up_gbps": 1}),
        lambda switch: switch.set_box("x", {}),
        lambda switch: switch.set_box("a", {"up_gbps": 0}),
        lambda switch: switch.outage("a", "b", -1, 0),
        lambda switch: switch.outage("a", "b", float("nan"), 0),
    ],
)
def test_a_change_that_cannot_be_changes_nothing(change: Callable[[Network], None]) -> None:
    switch = Network(two(WanPair(rtt_ms=100)))
    with pytest.raises(ScenarioError):
        change(switch)
    switch.enter("a", "b", SIZE, 1, 0.0)
    assert switch.wake_at() == pytest.approx(0.05)


def test_a_byte_stream_is_delayed_but_loses_nothing() -> None:
    switch = Network(two(WanPair(rtt_ms=100, loss=0.5), gbps=0.1), lossless=True)
    switch.outage("a", "b", 2.0, 0.0)
    for i in range(500):
        assert switch.enter("a", "b", SIZE, i, 0.0)
    arrived = drain(switch, 0)
    assert [packet for _, _, packet in arrived] == list(range(500))
    assert arrived[0][0] == pytest.approx(2.05)
    # What waited at the box's cap meanwhile comes at once; nothing is faster than the cap in the mean.
    assert arrived[-1][0] >= 500 * SIZE * 8e-9 / 0.1


@given(st.integers(0, 2**32), st.integers(2, 4))
@settings(max_examples=25, deadline=None)
def test_every_packet_arrives_once_in_order_or_is_counted(seed: int, boxes: int) -> None:
    rng = Random(seed)
    names = [f"box{i}" for i in range(boxes)]
    scenario = Scenario(
        boxes={name: WanBox(up_gbps=rng.uniform(0.05, 1), down_gbps=rng.uniform(0.05, 1)) for name in names},
        default=WanPair(rtt_ms=rng.uniform(0, 50), loss=rng.choice([0, 0.1]), gbps=rng.choice([None, 0.2])),
        mtu=1500,
        seed=seed,
    )
    switch = Switch[tuple[str, str, int]](scenario)
    now, arrived, offered = 0.0, [], 0
    for i in range(1500):
        now += rng.expovariate(20_000)
        a, b = rng.sample(names, 2)
        offered += 1
        switch.enter(a, b, rng.randrange(40, 1500), (a, b, i), now)
        if rng.random() < 0.3:
            arrived += switch.release(now)
        if rng.random() < 0.01:
            switch.outage(a, b, rng.uniform(0, 0.01), now)
        if rng.random() < 0.01:
            switch.set_pair(a, b, {"rtt_ms": rng.uniform(0, 50)})
    arrived += switch.release(now + 100)
    lines, ends = switch.line_statistics(), switch.box_statistics()
    assert all(packet[1] == box for box, packet in arrived)
    for pair, line in lines.items():
        order = [packet[2] for _, packet in arrived if packet[:2] == pair]
        assert order == sorted(set(order))
        assert len(order) == line.packets
        assert line.waiting_bytes == 0
    gone = sum(line.lost + line.dropped + line.dead for line in lines.values())
    gone += sum(end.up_dropped + end.down_dropped for end in ends.values())
    assert len(arrived) + gone == offered
    assert sum(end.received_bytes for end in ends.values()) == sum(line.bytes for line in lines.values())
    assert switch.wake_at() is None


def test_lateness_is_told() -> None:
    switch = Network(two(WanPair(rtt_ms=100)))
    switch.enter("a", "b", SIZE, 1, 0.0)
    switch.release(0.06)
    assert switch.lateness_ms() == pytest.approx((10, 10))
    assert repr(switch) == "<Switch of 2 boxes: 1 packets released, 0 B under way>"


class Still:
    """An emulator that carries nothing."""

    kind = "still"
    strays = 3

    def route(self, a: str, b: str, port: int) -> int:
        return port + 1


def ask(commands: Commands, line: bytes) -> EmulatorReply:
    return msgspec.json.decode(commands.feed(line + b"\n"), type=EmulatorReply)


def test_commands_come_in_pieces_and_are_answered_one_by_one() -> None:
    clock = [10.0]
    switch = Network(two(WanPair(rtt_ms=100)))
    commands = Commands(switch, Still(), lambda: clock[0])
    change = b'{"type":"set_pair","a":"a","b":"b","changes":{"rtt_ms":30},"both":true}\n'
    assert commands.feed(change[:20]) == b""
    assert commands.feed(change[20:] + change).count(b"\n") == 2
    assert switch.rtt_ms("b", "a") == 30
    assert ask(commands, b'{"type":"set_box","box":"a","changes":{"up_gbps":0.5}}') == EmulatorReply()
    assert ask(commands, b'{"type":"route","a":"a","b":"b","port":80}').port == 81
    assert "no field 'x'" in ask(commands, b'{"type":"set_box","box":"a","changes":{"x":0.5}}').error
    assert ask(commands, b"{").error
    assert ask(commands, b'{"type":"reboot"}').error
    clock[0] = 14.0
    assert ask(commands, b'{"type":"outage","a":"a","b":"b","seconds":2}') == EmulatorReply()
    assert not switch.enter("a", "b", SIZE, 1, 15.0)
    report = ask(commands, b'{"type":"report"}').report
    assert report is not None
    assert (report.kind, report.elapsed_s, report.strays) == ("still", 4.0, 3)
    assert report.lines["a", "b"].dead == 1
    assert set(report.boxes) == {"a", "b"}


def test_outages_of_the_scenario_start_at_their_time() -> None:
    scenario = msgspec.structs.replace(
        two(WanPair(rtt_ms=100)),
        outages=(Outage(a="a", b="b", start_s=5, seconds=2), Outage(a="a", b="b", start_s=1, seconds=2)),
    )
    switch = Network(scenario)
    commands = Commands(switch, Still(), lambda: 100.0)
    assert commands.wake_at() == 101.0
    commands.on_timer(101.5)
    assert commands.wake_at() == 105.0
    assert not switch.enter("a", "b", SIZE, 1, 103.4)
    assert switch.enter("a", "b", SIZE, 1, 103.6)
    commands.on_timer(105.0)
    assert commands.wake_at() is None
