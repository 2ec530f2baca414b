"""Does the emulated network behave as real ones were measured to? Expected beside measured, in one
table.

Everything is plain TCP or UDP between two boxes; nothing is computed from the emulator's own
figures but `late_ms`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from . import measure
from .emulated import EmulatedWan, Kind
from .scenario import Scenario, WanBox, WanPair

A, B, C = "paris", "nyc", "tokyo"
TOLERANCE = 0.15

# Measured with Linux's TCP and default buffers, without loss: (Gb/s, rtt ms, streams) -> Gb/s of payload.
WINDOW_LIMIT = ((1.0, 100.0, 1, 0.225), (1.0, 100.0, 4, 0.90), (1.0, 100.0, 16, 0.995), (1.0, 30.0, 1, 0.69))
REACH_GBPS = 2.0
LOSS = 0.02
DATAGRAMS = 4000
PINGS = 30


class CalibrationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure: expected, measured, and whether it is within `tolerance`."""

    what: str
    unit: str
    expected: float
    measured: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the figure is as near as it has to be."""
        return abs(self.measured - self.expected) <= self.tolerance * self.expected


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """All rows, what this emulation cannot show, and how late it was at worst."""

    kind: str
    cannot_show: tuple[str, ...]
    rows: tuple[CalibrationRow, ...]
    late_ms_mean: float
    late_ms_max: float

    @property
    def ok(self) -> bool:
        """Whether every row is."""
        return all(row.ok for row in self.rows)

    def to_json(self) -> str:
        """As one JSON document."""
        rows = [{**msgspec.structs.asdict(row), "ok": row.ok} for row in self.rows]
        document = {**msgspec.structs.asdict(self), "rows": rows, "ok": self.ok}
        return msgspec.json.encode(document).decode()


def calibrate(kind: Kind | None = None, *, seconds: float = 5.0, quick: bool = False) -> Calibration:
    """Measure it, with transfers of `seconds`; `quick`: one and four streams over 100 ms. Raises
    `WanUnavailable`."""
    rows: list[CalibrationRow] = []
    late: list[tuple[float, float]] = []
    limits: tuple[str, ...] = ()
    with EmulatedWan(_two(1.0, 100.0), kind=kind) as wan:
        kind, limits = wan.kind, wan.cannot_show
        rows += _round_trips(wan)
        for gbps, rtt_ms, number, expected in WINDOW_LIMIT[: 2 if quick else None]:
            wan.set_pair(A, B, rtt_ms=rtt_ms)
            rate = measure.bulk(wan, A, B, streams=number, seconds=seconds)
            what = f"{number} TCP stream{'s' if number > 1 else ''}, {gbps:g} Gb/s, rtt {rtt_ms:g} ms"
            rows.append(CalibrationRow(what=what, unit="Gb/s", expected=expected, measured=rate, tolerance=TOLERANCE))
        late.append(_lateness(wan))
    if not quick:
        rows += _rates(kind, seconds, late)
    if kind == "tun" and not quick:
        with EmulatedWan(_two(1.0, 20.0, loss=LOSS), kind=kind) as wan:
            lost = measure.loss(wan, A, B, count=DATAGRAMS)
            what = f"loss of {DATAGRAMS} datagrams"
            # Four standard deviations of a binomial count.
            tolerance = 4 * ((1 - LOSS) / LOSS / DATAGRAMS) ** 0.5
            rows.append(CalibrationRow(what=what, unit="part", expected=LOSS, measured=lost, tolerance=tolerance))
            late.append(_lateness(wan))
    mean, worst = max(mean for mean, _ in late), max(worst for _, worst in late)
    return Calibration(kind=kind, cannot_show=limits, rows=tuple(rows), late_ms_mean=mean, late_ms_max=worst)


def _two(gbps: float, rtt_ms: float, *, loss: float = 0.0) -> Scenario:
    box = WanBox(up_gbps=gbps, down_gbps=gbps)
    return Scenario(boxes={A: box, B: box}, pairs={(A, B): WanPair(rtt_ms=rtt_ms, loss=loss)})


def _round_trips(wan: EmulatedWan) -> Iterator[CalibrationRow]:
    """The least of many: others also waited for this machine (`late_ms_mean`)."""
    for rtt_ms in (100.0, 5.0):
        wan.set_pair(A, B, rtt_ms=rtt_ms)
        took = min(measure.rtt(wan, A, B, count=PINGS))
        yield CalibrationRow(
            what=f"round trip of {rtt_ms:g} ms", unit="ms", expected=rtt_ms, measured=took, tolerance=TOLERANCE
        )


def _rates(kind: Kind, seconds: float, late: list[tuple[float, float]]) -> Iterator[CalibrationRow]:
    """How fast it can be, and a sender's cap shared by two flows to different boxes."""
    with EmulatedWan(_two(REACH_GBPS, 50.0), kind=kind) as wan:
        rate = measure.bulk(wan, A, B, streams=16, seconds=seconds)
        what = f"16 TCP streams, {REACH_GBPS:g} Gb/s, rtt 50 ms"
        yield CalibrationRow(what=what, unit="Gb/s", expected=REACH_GBPS, measured=rate, tolerance=TOLERANCE)
        late.append(_lateness(wan))
    box = WanBox(up_gbps=0.4, down_gbps=1.0)
    three = Scenario(boxes={A: box, B: box, C: box}, default=WanPair(rtt_ms=20))
    with EmulatedWan(three, kind=kind) as wan, ThreadPoolExecutor(2) as pool:
        both = [pool.submit(measure.bulk, wan, A, other, streams=4, seconds=seconds) for other in (B, C)]
        rate = sum(future.result() for future in both)
        what = "2 flows to two boxes, sender's cap 0.4 Gb/s, sum"
        yield CalibrationRow(what=what, unit="Gb/s", expected=0.4, measured=rate, tolerance=TOLERANCE)
        late.append(_lateness(wan))


def _lateness(wan: EmulatedWan) -> tuple[float, float]:
    report = wan.statistics()
    return report.late_ms_mean, report.late_ms_max


def table(calibration: Calibration) -> str:
    """The rows for people, and what the emulation cannot show."""
    width = max(len(row.what) for row in calibration.rows)
    lines = [f"{'emulated by: ' + calibration.kind:<{width}}  expected  measured  ratio   within"]
    for row in calibration.rows:
        verdict = f"{row.tolerance:.0%}" if row.ok else f"NOT within {row.tolerance:.0%}"
        figures = f"{row.expected:>8.4g}  {row.measured:>8.4g}  {row.measured / row.expected:>5.2f}   {verdict}"
        lines.append(f"{row.what:<{width}}  {figures}  {row.unit}")
    lines.append(
        f"packets left {calibration.late_ms_mean:.2f} ms late in the mean, {calibration.late_ms_max:.1f} ms at most"
    )
    lines += ["cannot show:", *(f"- {limit}" for limit in calibration.cannot_show)]
    return "\n".join(lines)
