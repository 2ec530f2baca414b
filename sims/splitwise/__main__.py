"""Hold this simulator against the public one: `python -m p2pserve.sims.splitwise --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from time import process_time

from .reference import (
    BLOOM_LIMITS,
    LIMITS_STEP,
    ReferenceComparison,
    ReferenceRun,
    axis_cases,
    compare,
    meets_slo,
    released_cases,
)

Record = dict[str, str | float | bool]

EPILOG = """\
ROW is the name of a table's row, or its beginning: conv, "conv 130", "conv 130 HH"; figures in brackets are the public
simulator's

exit codes: 0 everything agrees; 1 something does not; 2 wrong input."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        records = list(_shown(arguments.records(arguments.row), arguments.format == "json"))
    except LookupError as error:
        sys.stderr.write(f"splitwise: error: {error.args[0]}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0 if all(record["agrees"] for record in records) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m p2pserve.sims.splitwise",
        description="Hold this simulator against the public Splitwise simulator, on the same requests.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, records: Callable[[Sequence[str]], Iterator[Record]], text: str) -> None:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("row", nargs="*", metavar="ROW", help="only rows that begin like this")
        command.add_argument("--format", choices=("table", "json"), default="table")
        command.set_defaults(records=records)

    add("check", _check, "48 runs as released: all figures of a run, against those of the public simulator")
    add("measured", _measured, "16 runs with decode times by the measured batch axis, and then with real KV caches")
    add("limits", _limits, "BLOOM-176B, conversations: the highest rate that meets the SLO")
    return parser


def _check(rows: Sequence[str]) -> Iterator[Record]:
    for comparison, cpu_s in _compared(released_cases(), rows):
        figure, off = comparison.worst
        yield {
            "row": comparison.case.name,
            "worst figure": figure,
            "off by": f"{off:.1e}",
            "allowed": f"{comparison.case.tolerance:.0%}",
            "events": int(comparison.figures["events"]),
            "SLO": "missed" if comparison.missed else "met",
            "CPU s": f"{cpu_s:.2f}",
            "agrees": comparison.agrees,
        }


def _measured(rows: Sequence[str]) -> Iterator[Record]:
    for axis, _ in _compared(axis_cases(), rows):
        start = process_time()
        real = compare(replace(axis.case, mode="measured"))
        cpu_s = process_time() - start
        public, found, final = axis.case.figures, axis.figures, real.figures
        record: Record = {"row": axis.case.name}
        for name, heading, scale, digits in (
            ("tbt_p50", "TBT p50 ms", 1e3, 1),
            ("tbt_p99", "TBT p99 ms", 1e3, 1),
            ("e2e_p50", "E2E p50 s", 1.0, 2),
        ):
            there = f" ({scale * public[name]:.{digits}f})" if name in public else ""
            record[heading] = f"{scale * found[name]:.{digits}f}{there}"
            record[f"real KV, {heading}"] = f"{scale * final[name]:.{digits}f}"
        record["real KV, SLO missed"] = " ".join(real.missed) or "none"
        record["M tokens/CPU s"] = f"{final['out_tok_s'] / final['rps'] * final['n'] / cpu_s / 1e6:.1f}"
        record["agrees"] = axis.agrees
        yield record


def _limits(rows: Sequence[str]) -> Iterator[Record]:
    for setup in _chosen(list(BLOOM_LIMITS), rows):
        limit = BLOOM_LIMITS[setup]
        there, beyond = meets_slo(setup, limit), meets_slo(setup, limit + LIMITS_STEP)
        yield {
            "row": setup,
            "public limit, req/s": limit,
            "SLO there": "met" if there else "missed",
            f"SLO at {LIMITS_STEP} more": "met" if beyond else "missed",
            "agrees": there and not beyond,
        }


def _compared(cases: Iterable[ReferenceRun], rows: Sequence[str]) -> Iterator[tuple[ReferenceComparison, float]]:
    """The chosen cases, run, and the CPU seconds that each took with drawing its trace."""
    by_name = {case.name: case for case in cases}
    for name in _chosen(list(by_name), rows):
        start = process_time()
        comparison = compare(by_name[name])
        yield comparison, process_time() - start


def _chosen(names: Sequence[str], rows: Sequence[str]) -> list[str]:
    """The names that one of `rows` begins; all without rows."""
    for row in rows:
        if not any(name.startswith(row) for name in names):
            raise LookupError(f"no row {row!r}; there are {', '.join(names)}")
    return [name for name in names if not rows or any(name.startswith(row) for row in rows)]


def _shown(records: Iterable[Record], as_json: bool) -> Iterator[Record]:
    """The records, each written out as soon as it is there."""
    for number, record in enumerate(records):
        if as_json:
            sys.stdout.write(json.dumps(record) + "\n")
        else:
            if number == 0:
                sys.stdout.write(_line(record) + "\n" + _line(["---"] * len(record)) + "\n")
            sys.stdout.write(_line(record.values()) + "\n")
        sys.stdout.flush()
        yield record


def _line(cells: Iterable[str | float | bool]) -> str:
    """A line of a Markdown table."""
    texts = ({True: "yes", False: "NO"}[cell] if isinstance(cell, bool) else str(cell) for cell in cells)
    return f"| {' | '.join(texts)} |"


if __name__ == "__main__":
    sys.exit(main())
