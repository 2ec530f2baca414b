"""Measured tables as step times: Splitwise's `perf_model.csv`, Helix's times of a layer,
DistServe's fits.

Each covers a few models on a few cards. The files come with the project; `data/README.md` there
says where from.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from io import StringIO
from statistics import median
from typing import Final, Literal, NamedTuple, TypeVar

from .step_times import DecodeLine

Key = TypeVar("Key")
Value = TypeVar("Value")
Point = tuple[int, float]

MIXED_FACTOR: Final = 1.1  # Splitwise's simulator: a step that does both, over a prompt of as many tokens
SHARED_PROMPT, SHARED_OUTPUT = 512, 128  # of the rows of `perf_model.csv` that vary the batch


class TableError(ValueError):
    """What is asked for was not measured; the text lists what was."""


class InterpolatedTable:
    """Piecewise linear through points; beyond the ends, the first and the last segment go on."""

    def __init__(self, points: Mapping[int, float]) -> None:
        if len(points) < 2:
            raise TableError(f"a curve needs two points, not {len(points)}")
        self.xs = tuple(sorted(points))
        self.ys = tuple(points[x] for x in self.xs)

    def __call__(self, x: float) -> float:
        """The value at x."""
        end = min(max(bisect_left(self.xs, x), 1), len(self.xs) - 1)
        left, right = self.xs[end - 1], self.xs[end]
        low, high = self.ys[end - 1], self.ys[end]
        return low + (high - low) * (x - left) / (right - left)


def packaged_rows(file: str) -> Iterator[dict[str, str]]:
    """The rows of a CSV file of `coordinator/data`, by column."""
    text = (files(__package__.rpartition(".")[0]) / "data" / file).read_text(encoding="utf-8")
    yield from csv.DictReader(StringIO(text))


def _one_of(known: Mapping[Key, Value], key: Key, file: str) -> Value:
    found = known.get(key)
    if found is None:
        raise TableError(f"{file} has no {key}; it has {', '.join(map(str, known))}")
    return found


class PerfRow(NamedTuple):
    """One run of `perf_model.csv`: `batch` prompts of `prompt` tokens, `output` tokens each."""

    model: str
    hardware: str
    tp: int
    prompt: int
    batch: int
    output: int
    prefill_s: float
    decode_s: float


@cache
def perf_rows() -> tuple[PerfRow, ...]:
    """All runs, in the order of the file."""
    return tuple(
        PerfRow(
            row["model"], row["hardware"], int(row["tensor_parallel"]),
            int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"]),
            float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3,
        )
        for row in packaged_rows("perf_model.csv")
    )  # fmt: skip


class SplitwiseTimes:
    """StepTimes of `perf_model.csv` by the rules of Splitwise's public simulator.

    A prefill is looked up by all its tokens, whatever their prompts: the median over the runs with
    as many. `released` looks a decode step up on the same axis, with the number of requests as if
    it were prompt tokens, as the released simulator does; so it hardly depends on the batch.
    `measured` looks it up among the runs that vary the batch (1 to 64; beyond, the last segment
    goes on, but never down). A step that does both takes 1.1 times a prefill of the prompt tokens
    and one more for each request. The context does not count: it was not varied enough to be told
    from noise.
    """

    def __init__(self, model: str, hardware: str, tp: int, mode: Literal["released", "measured"] = "released") -> None:
        """Raises TableError."""
        runs = _one_of(_perf_groups(), (model, hardware, tp), "perf_model.csv")
        self._prefill = _median_curve((run.prompt * run.batch, run.prefill_s) for run in runs)
        if mode == "released":
            self._decode = _median_curve((run.prompt * run.batch, run.decode_s) for run in runs)
        else:
            shared = (run for run in runs if (run.prompt, run.output) == (SHARED_PROMPT, SHARED_OUTPUT))
            self._decode = _median_curve((run.batch, run.decode_s) for run in shared)
        self._least_decode_s = 0.0 if mode == "released" else min(self._decode.ys)
        self.source = f"perf_model.csv, {mode}, {model} on {hardware}, tp {tp}"

    def prefill_s(self, tokens: int, pairs: float) -> float:
        return max(0.0, self._prefill(tokens))

    def prefill_interval_s(self, tokens: int, pairs: float) -> float:
        return self.prefill_s(tokens, pairs)

    def decode_line(self, requests: int) -> DecodeLine:
        return DecodeLine(max(self._least_decode_s, self._decode(requests)), 0.0)

    def mixed_s(self, tokens: int, pairs: float, requests: int, context: float) -> float:
        return MIXED_FACTOR * self.prefill_s(tokens + requests, pairs)


@cache
def _perf_groups() -> Mapping[tuple[str, str, int], list[PerfRow]]:
    groups: dict[tuple[str, str, int], list[PerfRow]] = defaultdict(list)
    for row in perf_rows():
        groups[row.model, row.hardware, row.tp].append(row)
    return dict(groups)


def _median_curve(points: Iterable[Point]) -> InterpolatedTable:
    of_x: dict[int, list[float]] = defaultdict(list)
    for x, y in points:
        of_x[x].append(y)
    return InterpolatedTable({x: median(ys) for x, ys in of_x.items()})


class HelixLayer(NamedTuple):
    """Seconds of one layer of LLaMA-30B: by prefill tokens, and by decoding requests."""

    prefill: InterpolatedTable
    decode: InterpolatedTable


@cache
def helix_layers() -> Mapping[str, HelixLayer]:
    """By machine: a100 (40 GB), v100, l4, t4, and x2, x4 of them under tensor parallelism."""
    points: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: {"prompt": {}, "decode": {}})
    for row in packaged_rows("helix_llama30b_layer_times.csv"):
        tokens = int(row["batch_tokens"])
        if tokens:  # the rows at 0 say that nothing takes no time: no measurement
            points[row["machine"]][row["phase"]][tokens] = float(row["ms_per_layer"]) / 1e3
    return {
        machine: HelixLayer(InterpolatedTable(of["prompt"]), InterpolatedTable(of["decode"]))
        for machine, of in points.items()
    }


class DistserveFit(NamedTuple):
    """Fitted constants of an engine, in seconds: prefill `a + b sum(length) + c sum(length^2)`;
    decode `a + b sum(context) + c requests`, with `few` below `threshold` requests and `many` from
    there on."""

    prefill: tuple[float, float, float]
    few: tuple[float, float, float]
    many: tuple[float, float, float]
    threshold: int


@cache
def distserve_fits() -> Mapping[tuple[str, str, int], DistserveFit]:
    """By engine (distserve, vllm), model (opt-13b, opt-66b) and TP degree; A100 80 GB."""
    constants: dict[tuple[str, str, int], dict[str, tuple[float, float, float]]] = defaultdict(dict)
    thresholds: dict[tuple[str, str, int], int] = {}
    for row in packaged_rows("distserve_a100_fits.csv"):
        key = (row["engine"], row["model"].removeprefix("facebook/"), int(row["tp"]))
        constants[key][row["phase"]] = (float(row["a_ms"]) / 1e3, float(row["b"]) / 1e3, float(row["c"]) / 1e3)
        thresholds[key] = int(row["bs_threshold"])
    return {
        key: DistserveFit(of["prefill"], of["decoding_smallbs"], of["decoding_largebs"], thresholds[key])
        for key, of in constants.items()
    }


class DistserveTimes:
    """StepTimes of DistServe's fits, for whole prompts: squared lengths by their pairs."""

    def __init__(self, engine: str, model: str, tp: int) -> None:
        """Raises TableError."""
        self._fit = _one_of(distserve_fits(), (engine, model, tp), "distserve_a100_fits.csv")
        self.source = f"distserve_a100_fits.csv, {engine}, {model}, tp {tp}"

    def prefill_s(self, tokens: int, pairs: float) -> float:
        a, b, c = self._fit.prefill
        # One of the fits has c < 0: far beyond the lengths it was made for it would fall.
        return max(a, a + b * tokens + c * (2.0 * pairs - tokens))

    def prefill_interval_s(self, tokens: int, pairs: float) -> float:
        return self.prefill_s(tokens, pairs)

    def decode_line(self, requests: int) -> DecodeLine:
        a, b, c = self._fit.few if requests < self._fit.threshold else self._fit.many
        return DecodeLine(a + c * requests, b)

    def mixed_s(self, tokens: int, pairs: float, requests: int, context: float) -> float:
        """Not fitted: a prefill, and what the requests add to a decode step without any."""
        line = self.decode_line(requests)
        return self.prefill_s(tokens, pairs) + max(0.0, line.step_s(context) - self._fit.few[0])
