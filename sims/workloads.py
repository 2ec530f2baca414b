"""Requests to simulate: measured traces, replayed or drawn from, or a user's file. `Trace.lengths`
and `Trace.arrivals` say which in every report."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..coordinator.planning.model.workload import Workload
from .records import Trace, TraceError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

AZURE: Final[Mapping[str, str]] = {
    "coding": "AzureLLMInferenceTrace_code.csv",
    "conversation": "AzureLLMInferenceTrace_conv.csv",
}
"""Azure's traces of November 2023 (Splitwise), by the name of the workload."""

MOONCAKE: Final = "mooncake_conversation.csv"
MOONCAKE_BLOCK: Final = 512
"""Tokens of a prompt's block there."""

_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "arrival": ("arrival", "arrival_s", "arrival_timestamp"),
    "prompt": ("prompt", "prompt_tokens", "prompt_size"),
    "output": ("output", "output_tokens", "token_size"),
}
"""What a user's columns may be called; the last are those of Splitwise's own traces."""
MOST_TOKENS: Final = 1 << 31
"""Of a request's prompt or answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Lengths to draw requests from, and where they come from."""

    prompt: Ints
    output: Ints
    source: str


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A trace as it was measured: lengths, and seconds from its first request on."""

    lengths: Lengths
    arrival_s: Floats

    @property
    def rate(self) -> float:
        """Requests per second, on average."""
        return (len(self.arrival_s) - 1) / float(self.arrival_s[-1])

    @property
    def gap_cv(self) -> float:
        """Coefficient of variation of the times between arrivals; 1 for Poisson."""
        gaps = np.diff(self.arrival_s)
        return float(gaps.std() / gaps.mean())


def azure(name: str) -> Recorded:
    """Azure's `coding` or `conversation` trace. Raises TraceError for another name."""
    if name not in AZURE:
        raise TraceError(f"workload {name!r} is none of {', '.join(AZURE)}")
    text = (files(__package__) / "data" / AZURE[name]).read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    seconds = np.array([datetime.fromisoformat(f"{row['TIMESTAMP'][:26]}+00:00").timestamp() for row in rows])
    order = np.argsort(seconds, kind="stable")
    prompt = np.array([int(row["ContextTokens"]) for row in rows], dtype=np.int64)[order]
    output = np.array([int(row["GeneratedTokens"]) for row in rows], dtype=np.int64)[order]
    return Recorded(Lengths(prompt, output, f"Azure 2023 {name}"), seconds[order] - seconds[order][0])


def mooncake(*, rate: float, requests: int | None = None) -> Trace:
    """Mooncake's conversation trace with its prefixes: the first so many requests, stretched to the
    mean rate `rate`. Requests of one moment are spread over the time until the next: the trace has
    its moments in seconds."""
    text = (files(__package__) / "data" / MOONCAKE).read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))[:requests]
    moments = np.array([int(row["timestamp"]) for row in rows]) / 1000.0
    prompt = np.array([int(row["input_length"]) for row in rows], dtype=np.int64)
    each, place, count = np.unique(moments, return_index=True, return_counts=True)
    following = np.append(each[1:], each[-1] + 1.0)
    spread = np.repeat((following - each) / count, count) * (np.arange(len(rows)) - np.repeat(place, count))
    arrival = (moments + spread) * (
        (len(rows) - 1) / max(float(moments[-1] - moments[0]), 1.0) / _positive("rate", rate)
    )
    return Trace(
        ids=np.arange(len(rows)),
        arrival_s=arrival,
        prompt=prompt,
        output=np.array([max(1, int(row["output_length"])) for row in rows], dtype=np.int64),
        lengths="Mooncake conversation, as recorded",
        arrivals=f"as recorded, time scaled to {rate:g} requests/s",
        prefixes=tuple(
            tuple(_unfold(row["hash_ids"]))[: tokens // MOONCAKE_BLOCK]
            for row, tokens in zip(rows, prompt.tolist(), strict=True)
        ),
        prefix_tokens=MOONCAKE_BLOCK,
    )


def begin_alike(trace: Trace, *, piece_tokens: int, rng: np.random.Generator) -> Trace:
    """The same requests, with prompts that begin as others' did in as many successive requests of Mooncake's trace,
    from a random one on: of each as much, as a share of the prompt, is the beginning of the same earlier one, as far
    as that goes. Names stand for pieces of so many tokens."""
    rows, count = _mooncakes_prefixes(), len(trace)
    if count > len(rows):
        raise TraceError(f"Mooncake's trace has {len(rows)} requests; {count} are to begin alike")
    latest: dict[int, int] = {}  # by a block's name: the latest request with it
    fresh, named = 0, list[tuple[int, ...]]()
    begin = int(rng.integers(len(rows) - count + 1))
    for row, prompt in enumerate(trace.prompt.tolist()):
        theirs = rows[begin + row]
        shared = next((depth for depth, name in enumerate(theirs) if name not in latest), len(theirs))
        pieces = prompt // piece_tokens
        earlier = named[latest[theirs[shared - 1]]] if shared else ()
        kept = earlier[: round(pieces * shared / len(theirs))] if shared else ()
        named.append((*kept, *range(fresh, fresh + pieces - len(kept))))
        fresh += pieces - len(kept)
        latest.update(dict.fromkeys(theirs, row))
    return replace(trace, prefixes=tuple(named), prefix_tokens=piece_tokens)


@cache
def _mooncakes_prefixes() -> tuple[tuple[int, ...], ...]:
    return mooncake(rate=1.0).prefixes


def _unfold(ranges: str) -> Iterator[int]:
    """The numbers that ranges such as `0-3 7` stand for."""
    for part in ranges.split():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def replay(recorded: Recorded, *, rate: float | None = None, seconds: float | None = None) -> Trace:
    """The trace itself, stretched to the mean rate `rate`, up to `seconds`."""
    scale = 1.0 if rate is None else recorded.rate / _positive("rate", rate)
    arrival = recorded.arrival_s * scale
    if seconds is not None:
        arrival = arrival[arrival < _positive("seconds", seconds)]
    count = len(arrival)
    stretched = "" if rate is None else f", time scaled to {rate:g} requests/s"
    return Trace(
        ids=np.arange(count),
        arrival_s=arrival,
        prompt=recorded.lengths.prompt[:count],
        output=recorded.lengths.output[:count],
        lengths=f"{recorded.lengths.source}, as recorded",
        arrivals=f"as recorded{stretched}",
    )


class _Gaps(NamedTuple):
    """Times between arrivals: gamma-distributed; exponential where the CV is 1."""

    rate: float
    cv: float

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        if self.cv == 0.0:
            return np.full(count, 1.0 / self.rate)
        if self.cv == 1.0:
            return rng.exponential(1.0 / self.rate, count)
        shape = 1.0 / self.cv**2
        return rng.gamma(shape, 1.0 / (self.rate * shape), count)

    def __str__(self) -> str:
        if self.cv == 0.0:
            return f"every {1.0 / self.rate:g} s"
        kind = "Poisson" if self.cv == 1.0 else f"gamma-distributed gaps with CV {self.cv:.2f}"
        return f"{kind}, {self.rate:g} requests/s"


def draw(
    lengths: Lengths,
    *,
    rate: float,
    rng: np.random.Generator,
    requests: int | None = None,
    seconds: float | None = None,
    cv: float = 1.0,
    is_even: bool = False,
) -> Trace:
    """So many requests, or those of so many seconds, with lengths drawn from `lengths` with
    replacement; `is_even`: drawn evenly, so that long ones are as many as they are there, as far as so
    few requests can.

    `cv` is of the times between arrivals: 1 for Poisson, 0 for a fixed interval, `Recorded.gap_cv`
    for a trace's own burstiness.
    """
    if (requests is None) == (seconds is None):
        raise TraceError("give either a number of requests or of seconds")
    if not (isfinite(cv) and cv >= 0.0):
        raise TraceError(f"cv is {cv}; it must not be negative")
    gaps = _Gaps(_positive("rate", rate), cv)
    if requests is not None:
        if requests < 1:
            raise TraceError(f"requests is {requests}; it must be at least 1")
        arrival = np.cumsum(gaps.draw(requests, rng))
    else:
        arrival = _arrivals_until(_positive("seconds", seconds or 0.0), gaps, rng)
    count = len(arrival)
    # Prompt and output of one request stay together: long prompts have other outputs than short ones.
    rows = _even_rows(lengths, count, rng) if is_even else rng.integers(len(lengths.prompt), size=count)
    return Trace(
        ids=np.arange(count),
        arrival_s=arrival,
        prompt=lengths.prompt[rows],
        output=lengths.output[rows],
        lengths=lengths.source,
        arrivals=str(gaps),
    )


def _even_rows(lengths: Lengths, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Every so manieth of those in order of their prompts, and of outputs where prompts are alike."""
    order = np.lexsort((lengths.output, lengths.prompt))
    alike = np.array_split(order, min(len(order), max(1, round(count**0.5))))
    line = np.concatenate([rows[np.argsort(lengths.output[rows], kind="stable")] for rows in alike])
    spots = ((np.arange(count) + rng.random()) * (len(line) / count)).astype(np.intp)
    return rng.permutation(line[spots])


def _arrivals_until(seconds: float, gaps: _Gaps, rng: np.random.Generator) -> Floats:
    parts: list[Floats] = []
    reached = 0.0
    while reached < seconds:
        more = reached + np.cumsum(gaps.draw(max(16, int((seconds - reached) * gaps.rate * 1.1)), rng))
        parts.append(more)
        reached = float(more[-1])
    arrival = np.concatenate(parts)
    arrival = arrival[arrival < seconds]
    if not len(arrival):
        raise TraceError(f"no request arrives within {seconds:g} s at {gaps.rate:g} requests/s")
    return arrival


def chain_traces(parts: Sequence[tuple[float, Trace]]) -> Trace:
    """Traces one after the other, each from a moment on; later moments come later."""
    traces = [trace for _, trace in parts]
    several = len(parts) > 1
    return Trace(
        ids=np.arange(sum(map(len, traces))),
        arrival_s=np.concatenate([at + trace.arrival_s for at, trace in parts]),
        prompt=np.concatenate([trace.prompt for trace in traces]),
        output=np.concatenate([trace.output for trace in traces]),
        lengths="; ".join(f"from {at:g} s on {trace.lengths}" if several else trace.lengths for at, trace in parts),
        arrivals="; ".join(f"from {at:g} s on {trace.arrivals}" if several else trace.arrivals for at, trace in parts),
    )


def read_requests(path: Path) -> Trace:
    """A user's requests: CSV with a header, or JSON objects line by line (`.jsonl`), in any order.

    Fields `arrival` (s), `prompt` and `output` (tokens, at least 1), or by the names of Splitwise's
    traces; others are left alone. Raises TraceError that names file, line and field.
    """
    columns = _read_columns(path, tuple(_COLUMNS))
    arrival = np.array(columns["arrival"])
    # Stable: requests of the same moment stay in the order of the file.
    order = np.argsort(arrival, kind="stable")
    return Trace(
        ids=order.astype(np.int64),
        arrival_s=arrival[order],
        prompt=np.array(columns["prompt"], dtype=np.int64)[order],
        output=np.array(columns["output"], dtype=np.int64)[order],
        lengths=f"{path.name}, as recorded",
        arrivals="as recorded",
    )


def workload_from(path: Path, rate: float) -> Workload:
    """What the planner needs of a user's requests, when so many come in a second. A file as that of
    `read_requests`, or one without arrivals: then requests come independently of each other.
    Raises TraceError."""
    if _has_arrivals(path):
        return replace(workload_of(read_requests(path)), rate=rate)
    columns = _read_columns(path, ("prompt", "output"))
    prompt, output = (np.array(columns[field], dtype=np.int64) for field in ("prompt", "output"))
    return Workload(name=f"{path.name}, lengths as recorded", prompts=prompt, outputs=output, rate=rate)


def _has_arrivals(path: Path) -> bool:
    _, row = next(_rows(path, ()), (0, dict[str, Any]()))
    return not set(_COLUMNS["arrival"]).isdisjoint(row)


def _read_columns(path: Path, fields: Sequence[str]) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {field: [] for field in fields}
    for line, row in _rows(path, fields):
        at = f"{path}, line {line}"
        for field, column in columns.items():
            value = _number(at, row, field)
            if field == "arrival" and value < 0.0:
                raise TraceError(f"{at}: arrival is {value:g}; it must not be negative")
            if field != "arrival" and not (1.0 <= value <= MOST_TOKENS and value == int(value)):
                most = f"at most {MOST_TOKENS:,}" if value > MOST_TOKENS else "at least 1"
                raise TraceError(f"{at}: {field} is {value:g}; it must be a whole number of tokens, {most}")
            column.append(value)
    if not columns[fields[0]]:
        raise TraceError(f"{path}: there are no requests in it")
    return columns


def _rows(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each with the number of its line. A CSV must have a column for each of `fields`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    is_json = path.suffix.lower() in (".jsonl", ".ndjson")
    return _json_rows(path, text) if is_json else _csv_rows(path, text, fields)


def _csv_rows(path: Path, text: str, fields: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    header = reader.fieldnames or []
    for field in fields:
        names = _COLUMNS[field]
        if not set(names) & set(header):
            wanted, there = " or ".join(names), ", ".join(header) or "none"
            raise TraceError(f"{path}, line 1: no column for {field} ({wanted}); there are: {there}")
    for row in reader:
        yield reader.line_num, row


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except ValueError as error:
            raise TraceError(f"{path}, line {line}: no JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{path}, line {line}: not an object with arrival, prompt and output")
        yield line, row


def _number(at: str, row: Mapping[str, Any], field: str) -> float:
    value = next((row[name] for name in _COLUMNS[field] if row.get(name) not in (None, "")), None)
    if value is None:
        raise TraceError(f"{at}: {field} is missing")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{at}: {field} is {value!r}, which is no number") from error
    if isinstance(value, bool) or not isfinite(number):
        raise TraceError(f"{at}: {field} is {value!r}; it must be a finite number")
    return number


def workload_of(trace: Trace, *, cv: float | None = None) -> Workload:
    """What the planner needs of a trace: lengths, mean rate, burstiness (`cv`)."""
    gaps = np.diff(trace.arrival_s)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    if not mean > 0.0:
        raise TraceError("a trace whose requests all arrive at once has no rate")
    return Workload(
        name=f"{trace.lengths}; {trace.arrivals}",
        prompts=trace.prompt,
        outputs=trace.output,
        rate=1.0 / mean,
        arrival_cv=float(gaps.std()) / mean if cv is None else cv,
    )


def _positive(name: str, value: float) -> float:
    if not (isfinite(value) and value > 0.0):
        raise TraceError(f"{name} is {value:g}; it must be above 0")
    return value
