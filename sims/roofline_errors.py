"""How far the roofline is from what was measured: `python -m p2pserve.sims.roofline_errors --help`.

Every point of the three tables is computed once more, with one set of factors for each card.
`--fit` finds the three factors of each card that come nearest; `gpu_efficiency.csv` holds them,
rounded.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import log
from statistics import median
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from ..coordinator.costs.efficiency import Efficiency, efficiency_of
from ..coordinator.costs.gpus import GpuSpec, Specs, gpu_table
from ..coordinator.costs.model_shape import ModelShape, model_shape
from ..coordinator.costs.roofline import stage_cost
from ..coordinator.costs.tables import DistserveTimes, distserve_fits, helix_layers, perf_rows

Vector = NDArray[np.float64]

PERF, HELIX, DISTSERVE = "perf_model.csv", "helix_llama30b_layer_times.csv", "distserve_a100_fits.csv"
CAPPED: Final = "h100-80gb-pcap"
CAPPED_COMPUTE: Final = 1 / 1.3  # its prefill times are the H100's, times 1.3; its decode times are the H100's


class MeasuredMachine(NamedTuple):
    """A card, how many of them, and the Gb/s that two of them reach between each other."""

    gpu: str
    cards: int
    link_gbps: float


A100_LINK_GBPS, H100_LINK_GBPS = 1840.0, 2784.0  # NVLink: 64 MB from card to card at 228 and 348 GB/s (vidur)
PCIE_GBPS = 100.0  # 16 lanes of the third generation
HARDWARE: Final = {
    "a100-80gb": ("A100-SXM4-80GB", A100_LINK_GBPS),
    "h100-80gb": ("H100-SXM5-80GB", H100_LINK_GBPS),
    CAPPED: ("H100-SXM5-80GB", H100_LINK_GBPS),
}
HELIX_MACHINES: Final = {
    "a100": MeasuredMachine("A100-SXM4-40GB", 1, A100_LINK_GBPS),
    "v100": MeasuredMachine("V100-SXM2-16GB", 1, PCIE_GBPS),
    "l4": MeasuredMachine("L4-24GB", 1, PCIE_GBPS),
    "l4x2": MeasuredMachine("L4-24GB", 2, PCIE_GBPS),
    "t4": MeasuredMachine("T4-16GB", 1, PCIE_GBPS),
    "t4x2": MeasuredMachine("T4-16GB", 2, PCIE_GBPS),
    "t4x4": MeasuredMachine("T4-16GB", 4, PCIE_GBPS),
}
HELIX_LAYERS: Final = 60
HELIX_LENGTH: Final = 750
"""Tokens of prompt and context in Helix's tables, which do not say: Helix's planner's prompt.
Decode makes the share of bandwidth out of it."""

# Where a fit stands for points that are not published, it is evaluated at lengths and batches within its range.
FIT_PROMPTS, FIT_BATCHES, FIT_TOKENS = (128, 256, 512, 1024, 2048), (1, 2, 4, 8), 4096
FIT_CONTEXTS, FIT_REQUESTS = (256, 512, 1024), (1, 8, 32, 64, 128, 192)

ENGINE_WEIGHT: Final = {"vllm": 0.1}
"""In the fit. DistServe's copy of vLLM (2023) takes 1.4 times as long as DistServe's own engine on
the same cards: no set of factors is near both."""

BOUNDS: Final = ((0.2, 0.95), (0.7, 0.85), (0.0, 10.0))  # no card was seen to read weights outside of these shares
STARTS: Final = ((0.7, 0.78, 0.5), (0.5, 0.78, 1.5), (0.6, 0.72, 3.0))
LAYER_UNIT_S: Final = 1e-4  # makes the third number as big as the others


class Point(NamedTuple):
    """One measured step of the file's `engine`; with `last`, logits are part of it."""

    file: str
    engine: str
    gpu: GpuSpec
    model: ModelShape
    tp: int
    link_gbps: float
    last: bool
    tokens: int
    pairs: float
    requests: int
    context: float
    seconds: float

    @property
    def phase(self) -> str:
        """`prefill` or `decode`."""
        return "decode" if self.requests else "prefill"

    def predicted_s(self, efficiency: Efficiency) -> float:
        """By the roofline."""
        cost = stage_cost(
            self.model, self.gpu, efficiency,
            layers=self.model.layers, tp=self.tp, link_gbps=self.link_gbps, last=self.last,
        )  # fmt: skip
        return cost.step_s(self.tokens, self.pairs, self.requests, self.context)


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """|predicted / measured - 1| over `points` steps; `ratio`: median predicted / measured."""

    file: str
    engine: str
    gpu: str
    phase: str
    points: int
    median: float
    p90: float
    ratio: float


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """A card's factors, unrounded."""

    gpu: str
    compute_share: float
    bandwidth_share: float
    layer_us: float


def points() -> tuple[Point, ...]:
    """All measured steps, repeated ones by their median, without the capped H100."""
    return (*_perf_points(frozenset(HARDWARE) - {CAPPED}), *_helix_points(), *_distserve_points())


def capped_points() -> tuple[Point, ...]:
    """Those of the power-capped H100, which were computed, not measured."""
    return tuple(
        point._replace(gpu=msgspec.structs.replace(point.gpu, tflops=point.gpu.tflops * CAPPED_COMPUTE))
        for point in _perf_points(frozenset({CAPPED}))
    )


def _perf_points(hardware: frozenset[str]) -> Iterator[Point]:
    prefills: dict[tuple[str, str, int, int, int], list[float]] = defaultdict(list)
    decodes: dict[tuple[str, str, int, int, int, int], list[float]] = defaultdict(list)
    for row in perf_rows():
        if row.hardware in hardware:
            prefills[row[:5]].append(row.prefill_s)
            decodes[row[:6]].append(row.decode_s)

    def point(name: str, card: str, tp: int, *, tokens: int, pairs: float, requests: int, context: float,
              seconds: list[float]) -> Point:  # fmt: skip
        gpu, link_gbps = HARDWARE[card]
        return Point(PERF, card, _card(gpu), model_shape(name), tp, link_gbps, True, tokens, pairs, requests, context,
                     median(seconds))  # fmt: skip

    for (name, card, tp, prompt, batch), seconds in prefills.items():
        pairs = batch * prompt * (prompt + 1) / 2
        yield point(name, card, tp, tokens=batch * prompt, pairs=pairs, requests=0, context=0, seconds=seconds)
    for (name, card, tp, prompt, batch, output), seconds in decodes.items():
        context = batch * (prompt + output / 2)
        yield point(name, card, tp, tokens=0, pairs=0, requests=batch, context=context, seconds=seconds)


def _helix_points() -> Iterator[Point]:
    model = model_shape("llama-30b")
    for name, layer in helix_layers().items():
        gpu, cards, link_gbps = HELIX_MACHINES[name]
        base = Point(HELIX, name, _card(gpu), model, cards, link_gbps, False, 0, 0.0, 0, 0.0, 0.0)
        for tokens, seconds in zip(layer.prefill.xs, layer.prefill.ys, strict=True):
            pairs = tokens * (min(tokens, HELIX_LENGTH) + 1) / 2
            yield base._replace(tokens=tokens, pairs=pairs, seconds=HELIX_LAYERS * seconds)
        for requests, seconds in zip(layer.decode.xs, layer.decode.ys, strict=True):
            yield base._replace(requests=requests, context=requests * HELIX_LENGTH, seconds=HELIX_LAYERS * seconds)


def _distserve_points() -> Iterator[Point]:
    for engine, name, tp in distserve_fits():
        times = DistserveTimes(engine, name, tp)
        model, gpu = model_shape(name), _card("A100-SXM4-80GB")
        base = Point(DISTSERVE, engine, gpu, model, tp, A100_LINK_GBPS, True, 0, 0.0, 0, 0.0, 0.0)
        for batch in FIT_BATCHES:
            for prompt in FIT_PROMPTS:
                tokens, pairs = batch * prompt, batch * prompt * (prompt + 1) / 2
                if tokens <= FIT_TOKENS:
                    yield base._replace(tokens=tokens, pairs=pairs, seconds=times.prefill_s(tokens, pairs))
        for requests in FIT_REQUESTS:
            for length in FIT_CONTEXTS:
                context = requests * length
                seconds = times.decode_line(requests).step_s(context)
                yield base._replace(requests=requests, context=context, seconds=seconds)


def _card(name: str) -> GpuSpec:
    return gpu_table().find(name, Specs.MEASURED)


def errors(measured: Iterable[Point]) -> tuple[ErrorRow, ...]:
    """A row for each file, engine or machine, and phase; then for each file; then for all."""
    groups: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for point in measured:
        ratio = point.predicted_s(efficiency_of(point.gpu)) / point.seconds
        groups[point.file, point.engine, point.gpu.name, point.phase].append(ratio)
        groups[point.file, "all", "all", point.phase].append(ratio)
        groups["all", "all", "all", point.phase].append(ratio)
    order = sorted(groups, key=lambda group: (group[0] == "all", group[1] == "all"))
    return tuple(_error_row(*group, np.array(groups[group])) for group in order)


def _error_row(file: str, engine: str, gpu: str, phase: str, ratios: Vector) -> ErrorRow:
    off = np.abs(ratios - 1.0)
    return ErrorRow(
        file=file, engine=engine, gpu=gpu, phase=phase, points=len(ratios), median=float(np.median(off)),
        p90=float(np.quantile(off, 0.9)), ratio=float(np.median(ratios)),
    )  # fmt: skip


def fit(measured: Sequence[Point], gpu: str) -> Fitted:
    """The factors of one card that make the mean of |log(predicted / measured)| least; the others
    stay as they are.

    Engines and phases count the same, however many points they have, but for ENGINE_WEIGHT.
    """
    own = [point for point in measured if point.gpu.name == gpu]
    sizes = Counter((point.file, point.engine, point.phase) for point in own)
    weights = [ENGINE_WEIGHT.get(point.engine, 1.0) / sizes[point.file, point.engine, point.phase] for point in own]
    known = efficiency_of(own[0].gpu)

    def loss(factors: Vector) -> float:
        compute, bandwidth, layer = map(float, factors)
        efficiency = msgspec.structs.replace(
            known, compute_share=compute, bandwidth_share=bandwidth, layer_s=layer * LAYER_UNIT_S
        )
        return sum(
            weight * abs(log(point.predicted_s(efficiency) / point.seconds))
            for weight, point in zip(weights, own, strict=True)
        )

    options = {"xatol": 1e-3, "fatol": 1e-5}
    found = [minimize(loss, start, method="Nelder-Mead", bounds=BOUNDS, options=options) for start in STARTS]
    compute, bandwidth, layer = map(float, min(found, key=lambda one: float(one.fun)).x)
    return Fitted(gpu=gpu, compute_share=compute, bandwidth_share=bandwidth, layer_us=layer * LAYER_UNIT_S * 1e6)


def _table(rows: Sequence[ErrorRow]) -> str:
    lines = [f"{'file':<30} {'engine':<14} {'card':<14} {'phase':<7} points  median    p90  predicted/measured"]
    for row in rows:
        what = f"{row.file:<30} {row.engine:<14} {row.gpu:<14} {row.phase:<7}"
        lines.append(f"{what} {row.points:>6}  {row.median:>6.1%} {row.p90:>6.1%}  {row.ratio:.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m p2pserve.sims.roofline_errors",
        description="Compare the roofline with measured step times: errors for each file, card and phase.",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--fit", action="store_true", help="find the factors of each card anew (ten seconds)")
    arguments = parser.parse_args(argv)
    measured = points()
    rows: Sequence[ErrorRow | Fitted]
    if arguments.fit:
        rows = fitted = [fit(measured, gpu) for gpu in sorted({point.gpu.name for point in measured})]
        text = "\n".join(
            f"{one.gpu:<14}  compute {one.compute_share:.2f}  bandwidth {one.bandwidth_share:.2f}  "
            f"a layer {one.layer_us:.0f} us"
            for one in fitted
        )
    else:
        compared = errors(measured) + tuple(row for row in errors(capped_points()) if row.engine == CAPPED)
        rows, text = compared, _table(compared)
    sys.stdout.write((msgspec.json.encode(rows).decode() if arguments.format == "json" else text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
