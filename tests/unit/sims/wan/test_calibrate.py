"""What is measured to calibrate an emulated network, with measuring programs that answer at once."""

import io
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import pytest

from p2pserve.sims.wan import EmulatedWan, Kind, Scenario, WanBox, WanError, WanPair, WanStatistics, calibrate, measure

EXPECTED = {100.0: {1: 0.225, 4: 0.90, 16: 0.995}, 30.0: {1: 0.69}, 50.0: {16: 2.0}, 20.0: {4: 0.2}}


class Program:
    """A measuring program that has said everything already."""

    def __init__(self, text: str) -> None:
        self.stdout = io.StringIO(text)
        self.killed = self.reaped = False

    def kill(self) -> None:
        self.killed = True

    def communicate(self) -> None:
        assert self.killed
        self.reaped = True


class MeasuredWan(EmulatedWan):
    """A network on which the measuring programs report what real networks were measured to do."""

    late_ms = (0.2, 3.0)
    """In the mean and at most; the next network is later."""
    networks = 0
    scale = 1.0

    def __init__(self, scenario: Scenario, *, kind: Kind | None = None) -> None:
        super().__init__(scenario, kind=kind or "tun")
        self.started: list[tuple[str, list[str]]] = []
        self.programs: list[Program] = []
        self.pair = next(pair for _, _, pair in scenario.directions())
        self.silent = ""

    def __enter__(self) -> Self:
        type(self).networks += 1
        self.cannot_show = ("the moon",)
        return self

    def __exit__(self, *exc: object) -> None:
        assert all(program.reaped for program in self.programs), "nothing stays behind"

    def address(self, box: str) -> str:
        return f"at {box}"

    def route(self, a: str, b: str, port: int) -> tuple[str, int]:
        return f"{a}>{b}", port + 1

    def set_pair(self, a: str, b: str, *, both: bool = True, **changes: float | None) -> None:
        self.pair = WanPair(rtt_ms=changes["rtt_ms"] or 0.0)

    def statistics(self) -> WanStatistics:
        mean, worst = self.late_ms
        return WanStatistics(
            kind=self.kind, elapsed_s=1, cpu_s=1, late_ms_mean=mean / self.networks,
            late_ms_max=worst * self.networks, strays=0, boxes={}, rows=[],
        )  # fmt: skip

    def popen(self, box: str, argv: Sequence[str], **options: Any) -> Any:
        assert argv[1:3] == ["-m", "p2pserve.sims.wan.traffic"]
        role, *arguments = argv[3:]
        self.started.append((box, [role, *arguments]))
        says = "" if role == self.silent else self._say(role, arguments)
        program = Program(says)
        self.programs.append(program)
        return program

    def _say(self, role: str, arguments: list[str]) -> str:
        match role:
            case "receive":
                streams = int(arguments[2])
                return "ready\n" + json.dumps({"gbps": self.scale * EXPECTED[self.pair.rtt_ms][streams]}) + "\n"
            case "ping":
                rtt_ms = self.pair.rtt_ms
                return json.dumps({"rtt_ms": [rtt_ms + 9, rtt_ms + 1, rtt_ms * 2 + 5]}) + "\n"
            case "count":
                return "ready\n" + json.dumps({"received": 3920}) + "\n"
            case "echo":
                return "ready\n"
        return ""


@pytest.fixture
def wans(monkeypatch: pytest.MonkeyPatch) -> type[MeasuredWan]:
    monkeypatch.setattr(calibrate, "EmulatedWan", MeasuredWan)
    monkeypatch.setattr(MeasuredWan, "networks", 0)
    return MeasuredWan


def two() -> MeasuredWan:
    return MeasuredWan(Scenario(boxes={"paris": WanBox(), "nyc": WanBox()}, default=WanPair(rtt_ms=100)))


def test_the_whole_calibration_has_every_figure_and_the_worst_lateness(wans: type[MeasuredWan]) -> None:
    found = calibrate.calibrate("tun")
    assert Counter(row.unit for row in found.rows) == {"ms": 2, "Gb/s": 6, "part": 1}
    rows = {row.what: row for row in found.rows}
    assert rows["16 TCP streams, 2 Gb/s, rtt 50 ms"].measured == 2.0
    assert rows["2 flows to two boxes, sender's cap 0.4 Gb/s, sum"].measured == pytest.approx(0.4), "of both flows"
    assert rows["loss of 4000 datagrams"].measured == pytest.approx(0.02)
    assert rows["round trip of 100 ms"].measured == 101, "the least of many"
    assert found.cannot_show == ("the moon",)
    assert (found.late_ms_mean, found.late_ms_max) == (0.2, 12.0), "of the first network and of the fourth"
    assert {row.what for row in found.rows if not row.ok} == {"round trip of 5 ms"}, "1 ms more is 20 %"
    assert not found.ok


def test_a_quick_one_looks_at_one_stream_and_four_over_one_network(wans: type[MeasuredWan]) -> None:
    found = calibrate.calibrate("tun", quick=True)
    assert wans.networks == 1
    assert [row.what for row in found.rows if row.unit == "Gb/s"] == [
        "1 TCP stream, 1 Gb/s, rtt 100 ms",
        "4 TCP streams, 1 Gb/s, rtt 100 ms",
    ]


def test_a_proxy_is_not_asked_for_loss(wans: type[MeasuredWan]) -> None:
    found = calibrate.calibrate("proxy")
    assert found.kind == "proxy"
    assert not any("loss" in row.what for row in found.rows)
    assert any("2 flows" in row.what for row in found.rows)


def test_rates_that_are_too_low_are_told(wans: type[MeasuredWan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wans, "scale", 0.8)
    missed = [row for row in calibrate.calibrate("tun").rows if not row.ok and row.unit == "Gb/s"]
    assert len(missed) == 6


@pytest.mark.parametrize(
    ("measured", "ok"), [(0.020, True), (0.0111, False), (0.0114, True), (0.0286, True), (0.0289, False)]
)
def test_loss_may_lie_four_standard_deviations_off(measured: float, ok: bool) -> None:
    tolerance = 4 * ((1 - 0.02) / 0.02 / 4000) ** 0.5
    row = calibrate.CalibrationRow(what="loss", unit="part", expected=0.02, measured=measured, tolerance=tolerance)
    assert row.ok is ok


def test_a_bulk_transfer_is_counted_where_it_arrives_and_sent_for_longer_than_that() -> None:
    wan = two()
    assert measure.bulk(wan, "paris", "nyc", streams=4, seconds=5) == 0.90
    (listener, receive), (dialler, send) = wan.started
    assert (listener, dialler) == ("nyc", "paris")
    assert receive[:2] == ["receive", "at nyc"]
    assert send[:2] == ["send", "paris>nyc"]
    assert int(send[2]) == int(receive[2]) + 1, "the port that leads there, not the one that listens"
    assert receive[3:] == ["4", "5"]
    assert send[3:] == ["4", "65"]


def test_each_measurement_has_a_port_of_its_own() -> None:
    wan = two()
    measure.bulk(wan, "paris", "nyc", streams=1, seconds=1)
    measure.bulk(wan, "paris", "nyc", streams=1, seconds=1)
    ports = [argv[2] for _, argv in wan.started if argv[0] == "receive"]
    assert len(set(ports)) == 2


def test_round_trips_are_reported_by_the_one_that_pings() -> None:
    wan = two()
    assert measure.rtt(wan, "paris", "nyc", count=3) == [109, 101, 205]
    assert wan.started[1][1][3:] == ["3"]


def test_loss_is_the_part_that_did_not_arrive() -> None:
    assert measure.loss(two(), "paris", "nyc", count=4000) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("silent", "says"), [("receive", "in nyc did not start"), ("ping", "between paris and nyc ended without a figure")]
)
def test_programs_that_say_nothing_are_an_error_and_do_not_stay(silent: str, says: str) -> None:
    wan = two()
    wan.silent = silent
    with pytest.raises(WanError, match=says):
        measure.rtt(wan, "paris", "nyc", count=3) if silent == "ping" else measure.bulk(
            wan, "paris", "nyc", streams=1, seconds=1
        )
    assert all(program.reaped for program in wan.programs)
