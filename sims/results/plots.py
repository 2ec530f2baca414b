"""Pictures of results: attainment over deadlines of any length, and timelines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..records import Outcomes
from .outcomes import ServiceOutcome
from .report import ReportError

Floats = NDArray[np.float64]

SCALES: Final = np.geomspace(0.1, 10.0, 81)
"""Deadlines that a curve shows, as multiples of the service's."""

BINS: Final = 120

DECADE: Final = 10.0
"""From so many times the least value on, an axis is logarithmic: on a linear one the least would lie
on the axis."""

DASHES: Final = ("-", (0, (4, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))


def attainment_curve(outcome: ServiceOutcome, scales: Floats = SCALES) -> Floats:
    """The share of requests that meet their deadlines, for every multiple of them."""
    return np.array([outcome.met(float(scale)).mean() for scale in scales])


class Timeline:
    """A service over time, in equal spans: starts, requests and tokens per second, requests at each
    end, mean TTFT by arrival (NaN: none)."""

    def __init__(self, outcomes: Outcomes, bins: int = BINS) -> None:
        trace, done = outcomes.trace, outcomes.completed
        ends = trace.arrival_s + outcomes.e2e_s
        last = max(float(trace.arrival_s[-1]), float(ends[done].max()) if done.any() else 0.0)
        edges = np.linspace(0.0, max(last, 1e-9), bins + 1)
        width = edges[1] - edges[0]
        arrived, _ = np.histogram(trace.arrival_s, edges)
        finished, _ = np.histogram(ends[done], edges)
        tokens, _ = np.histogram(ends[done], edges, weights=trace.output[done].astype(np.float64))
        waited, _ = np.histogram(trace.arrival_s[done], edges, weights=outcomes.ttft_s[done])
        counted, _ = np.histogram(trace.arrival_s[done], edges)
        self.start_s: Floats = edges[:-1]
        self.arrived_s: Floats = arrived / width
        self.finished_s: Floats = finished / width
        self.tokens_s: Floats = tokens / width
        self.present: Floats = np.cumsum(arrived - finished).astype(np.float64)
        self.ttft_s: Floats = np.divide(waited, counted, out=np.full(bins, np.nan), where=counted > 0)


def plot_attainment(curves: Mapping[str, ServiceOutcome], path: Path) -> None:
    """A PNG with a curve for each named outcome. Raises ReportError."""
    figure, axes = _figure(1)
    axes = axes[0]
    for place, (name, outcome) in enumerate(curves.items()):
        axes.plot(SCALES, attainment_curve(outcome), label=name, **_style(place, len(curves)))
    for target in sorted({outcome.service.slo.target for outcome in curves.values()}):
        axes.axhline(target, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="deadlines, as multiples of the service's", ylabel="requests in time", ylim=(0, 1.02))
    _add_legend(figure, axes)
    _save(figure, path)


def plot_timeline(curves: Mapping[str, ServiceOutcome], path: Path) -> None:
    """A PNG of throughput, requests in the system and TTFT. Raises ReportError."""
    figure, axes = _figure(3)
    waits = []
    for place, (name, outcome) in enumerate(curves.items()):
        line, style = Timeline(outcome.outcomes), _style(place, len(curves))
        # what arrived lies below, wide and pale: where it is served at once, both lines are one
        axes[0].plot(
            line.start_s, line.arrived_s, color=f"C{place}", alpha=0.3, linewidth=4.0, label=f"{name}: arrived"
        )
        axes[0].plot(line.start_s, line.finished_s, color=f"C{place}", label=f"{name}: served", **style)
        axes[1].plot(line.start_s, line.present, color=f"C{place}", **style)
        # with points: a span between two in which nothing arrived has no line
        axes[2].plot(line.start_s, line.ttft_s, color=f"C{place}", marker=".", **style)
        waits.append(line.ttft_s[line.ttft_s > 0.0])
    for at, label in enumerate(("requests/s", "requests present", "mean TTFT (s)")):
        axes[at].set_ylabel(label)
    waited = np.concatenate(waits)
    if len(waited) and waited.max() >= DECADE * waited.min():
        axes[2].set_yscale("log")
    axes[2].set_xlabel("simulated seconds")
    _add_legend(figure, axes[0])
    _save(figure, path)


def _figure(rows: int) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # of the extra `plots`, and slow to import
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError("pictures need matplotlib: pip install 'p2pserve[plots]'") from error
    figure = Figure(figsize=(7.0, 1.6 + 2.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, 1, squeeze=False, sharex=True)[:, 0]


def _style(place: int, count: int) -> dict[str, Any]:
    """Each line thinner than those below it and dashed in its own way, so that equal ones all
    show."""
    return {"linewidth": 1.2 + 2.0 * (count - 1 - place) / max(1, count - 1), "linestyle": DASHES[place % len(DASHES)]}


def _add_legend(figure: Any, axes: Any) -> None:
    """Above the axes: inside them it would hide a line somewhere."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=min(4, len(names)), fontsize="small")


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120, metadata={"Software": None})
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}") from error
