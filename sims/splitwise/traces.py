"""Request traces in the public simulator's format, and how they are drawn.

A trace is a CSV file with the columns of `COLUMNS`; an arrival is in seconds, lengths are in tokens
and the output counts its first token. `draw_trace` makes one as that simulator's generator does:
Poisson arrivals, and prompt and output lengths drawn independently, with replacement, from the
requests of a real trace. The same seed gives the same requests as `random.Random` on any machine.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np

from ..records import Trace, TraceError

DATA = Path(__file__).parent.parent / "data"

COLUMNS = (
    "request_id",
    "request_type",
    "application_id",
    "arrival_timestamp",
    "batch_size",
    "prompt_size",
    "token_size",
)
READ = ("request_id", "arrival_timestamp", "prompt_size", "token_size")


def read_trace(path: Path) -> Trace:
    """The trace in a file, in order of arrival; `TraceError` names the line and the field."""
    ids, arrivals, prompts, outputs = [], [], [], []
    for line, (number, arrival, prompt, output) in _records(path, READ):
        try:
            ids.append(int(number))
            arrivals.append(float(arrival))
            prompts.append(int(prompt))
            outputs.append(int(output))
        except ValueError as error:
            raise TraceError(f"{path.name}, line {line}: {error}") from None
    try:
        return Trace(
            ids=np.array(ids, np.int64),
            arrival_s=np.array(arrivals, np.float64),
            prompt=np.array(prompts, np.int64),
            output=np.array(outputs, np.int64),
            lengths=path.name,
            arrivals=path.name,
        )
    except TraceError as error:
        raise TraceError(f"{path.name}: {error}") from None


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace in this format."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(",".join(COLUMNS) + "\n")
        for number, arrival, prompt, output in zip(trace.ids, trace.arrival_s, trace.prompt, trace.output, strict=True):
            file.write(f"{number},2,0,{arrival:.9f},1,{prompt},{output}\n")


def azure_trace(workload: str, rate: float, *, seconds: float = 120.0, seed: int = 0) -> Trace:
    """A trace drawn from the Azure LLM inference trace of 2023 of a workload, "conv" or "code"."""
    return draw_trace(azure_lengths(workload), source=_azure_file(workload), rate=rate, seconds=seconds, seed=seed)


def azure_lengths(workload: str) -> list[tuple[int, int]]:
    """Prompt and output of each request of the Azure trace of a workload, "conv" or "code"."""
    records = _records(DATA / _azure_file(workload), ("ContextTokens", "GeneratedTokens"))
    return [(int(prompt), int(output)) for _, (prompt, output) in records]


def _azure_file(workload: str) -> str:
    return f"AzureLLMInferenceTrace_{workload}.csv"


def draw_trace(lengths: Sequence[tuple[int, int]], *, source: str, rate: float, seconds: float, seed: int) -> Trace:
    """Poisson arrivals at `rate`/s for `seconds`; `source` is for reports."""
    random = Random(seed)
    arrivals, prompts, outputs = [], [], []
    now = 0.0
    while True:
        now += -math.log(1.0 - random.random()) / rate
        prompt = lengths[int(random.random() * len(lengths))][0]
        output = lengths[int(random.random() * len(lengths))][1]
        if now >= seconds:
            break
        arrivals.append(round(now, 9))  # as the file has it
        prompts.append(prompt)
        outputs.append(output)
    return Trace(
        ids=np.arange(len(arrivals)),
        arrival_s=np.array(arrivals, np.float64),
        prompt=np.array(prompts, np.int64),
        output=np.array(outputs, np.int64),
        lengths=f"{source}, prompts and outputs drawn independently, seed {seed}",
        arrivals=f"Poisson, {rate:g} requests/s for {seconds:g} s, seed {seed}",
    )


def _records(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Line number and the fields of `columns`, of each line of a CSV file with a header."""
    try:
        opened = path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    with opened as file:
        reader = csv.reader(file)
        header = next(reader, [])
        missing = [name for name in columns if name not in header]
        if missing:
            raise TraceError(f"{path.name}: no column {', '.join(missing)}; its first line must name the columns")
        places = [header.index(name) for name in columns]
        for record in reader:
            if len(record) != len(header):
                raise TraceError(f"{path.name}, line {reader.line_num}: {len(record)} fields, not {len(header)}")
            yield reader.line_num, [record[place] for place in places]
