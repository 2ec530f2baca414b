"""Table IV: a request alone on a DGX-A100 and on a DGX-H100, Llama2-70B, by the measured times and by the roofline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from ...records import Trace
from ...splitwise.machine_types import LONE_CARDS, MachineCatalogue, lone_requests_on
from ...splitwise.traces import azure_lengths
from ..page import ResultRow

MODEL: Final = "llama2-70b"
WORKLOADS: Final[Mapping[str, str]] = {"code": "coding", "conv": "conversation"}
MACHINES: Final[Mapping[str, tuple[str, str]]] = {
    "perf_model.csv": ("A", "H"),
    "roofline": (LONE_CARDS, "8xH100-SXM5-80GB"),
}
"""A100 and H100, by what gives their times."""

S_PER_H: Final = 3600.0


class _Found(NamedTuple):
    """At the median: ms, ms, ms, US cents, Wh of the cards."""

    ttft: float
    tbt: float
    e2e: float
    cost: float
    energy: float


PAPER: Final = {
    "coding": (_Found(185.0, 52.0, 856.0, 0.42, 1.37), _Found(95.0, 31.0, 493.0, 0.52, 1.37)),
    "conversation": (_Found(155.0, 40.0, 4957.0, 2.4, 7.9), _Found(84.0, 28.0, 3387.0, 3.6, 9.4)),
}
UNITS: Final[Mapping[str, str]] = {
    "ttft": "TTFT, ms", "tbt": "TBT, ms", "e2e": "E2E, ms", "cost": "cost, cents", "energy": "energy, Wh",
}  # fmt: skip


class LoneMachineRow(ResultRow, frozen=True):
    """One figure of a lone request at the median, beside the paper's; ratios: H100 over A100."""

    workload: str
    times: str
    figure: str
    A100: float
    H100: float
    ratio: float
    paper_a100: float
    paper_h100: float
    paper_ratio: float


def lone_rows() -> Iterator[LoneMachineRow]:
    """Of all requests of Azure's traces."""
    for file, workload in WORKLOADS.items():
        trace = _trace(file)
        catalogue = MachineCatalogue(MODEL, trace)
        for times, machines in MACHINES.items():
            ours = [_lone(catalogue, name, price, trace) for name, price in zip(machines, "AH", strict=True)]
            for figure, unit in UNITS.items():
                (a100, h100), (paper_a100, paper_h100) = (
                    [getattr(each, figure) for each in both] for both in (ours, PAPER[workload])
                )
                yield LoneMachineRow(
                    workload=workload, times=times, figure=unit, A100=a100, H100=h100, ratio=h100 / a100,
                    paper_a100=paper_a100, paper_h100=paper_h100, paper_ratio=paper_h100 / paper_a100,
                )  # fmt: skip


def _lone(catalogue: MachineCatalogue, name: str, priced_as: str, trace: Trace) -> _Found:
    """Prices and watts of the paper's machine, `priced_as`, for both times."""
    lone, machine = lone_requests_on(catalogue.step_times(name), trace), catalogue.find(priced_as)
    e2e_s = float(np.median(lone.e2e_s(trace.output)))
    return _Found(
        ttft=1e3 * float(np.median(lone.ttft_s)),
        tbt=1e3 * float(np.median(lone.tbt_s)),
        e2e=1e3 * e2e_s,
        cost=100.0 * e2e_s * machine.prompt_usd_per_h / S_PER_H,
        energy=e2e_s * machine.watts / S_PER_H,
    )


def _trace(file: str) -> Trace:
    prompts, outputs = np.array(azure_lengths(file)).T
    return Trace(
        ids=np.arange(len(prompts)), arrival_s=np.arange(len(prompts), dtype=np.float64), prompt=prompts,
        output=outputs, lengths=f"Azure 2023 {file}", arrivals="one by one",
    )  # fmt: skip
