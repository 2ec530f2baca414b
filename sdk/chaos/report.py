"""What a run has shown: a value, and a table of 80 columns. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from .records import TimeSpread

GAP_S: Final = 5.0
"""The P99 of the longest gaps in streams may not be longer."""
COMPLETED: Final = 0.995
"""Of the requests, at least, complete."""
GROWTH: Final = 1.15
GROWTH_MIB: Final = 16.0
"""An agent's memory may be larger at the end than before by this factor and so many MiB: what it remembers of the run
is bounded, but it fills up first."""
MORE_FILES: Final = 24
"""As many more files may it have open: sessions and links that it did not have before, but no more each minute."""
WIDTH: Final = 80


class AgentFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of the agent that runs from beginning to end: MiB of memory and open files, once the network was whole and
    used, and at the end."""

    memory_before_mib: float
    memory_after_mib: float
    files_before: int
    files_after: int


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """`faults`: how many of which kind hit whom. `requests` asked, `completed` with the right tokens, of which `moved`
    were gone on with elsewhere; `lied`: by the `liar`, if there is one; `failed`: why others were not, and how many.
    `wrong`, `lost`, `left_over` and `troubles` must not be. `recovery`: from a fault to the first token after it, of
    answers that were moved; `gap`: the longest in each stream; `away`: from the end of a box until it serves again."""

    seed: int
    seconds: float
    faults: dict[str, int]
    requests: int
    completed: int
    lied: int
    liar: bool
    moved: int
    failed: dict[str, int]
    wrong: tuple[str, ...]
    lost: tuple[str, ...]
    left_over: tuple[str, ...]
    troubles: tuple[str, ...]
    recovery: TimeSpread
    gap: TimeSpread
    ttft: TimeSpread
    away: TimeSpread
    starts: int
    agent: AgentFigures

    @property
    def problems(self) -> tuple[str, ...]:
        """What must not be; a run with none has passed."""
        return tuple(_problems(self))


def _problems(report: ChaosReport) -> Iterator[str]:
    yield from report.wrong
    yield from report.lost
    yield from report.left_over
    yield from report.troubles
    # Whom the liar lets wait has an error by its deadline: no more can be asked for.
    if not report.liar and report.completed < COMPLETED * report.requests:
        yield f"{report.completed} of {report.requests} requests were completed, less than {COMPLETED:.1%}"
    if report.gap.p99_s > GAP_S:
        yield f"P99 of the longest gap in a stream is {report.gap.p99_s:.1f} s, more than {GAP_S:g} s"

    agent = report.agent
    if agent.memory_after_mib > GROWTH * agent.memory_before_mib + GROWTH_MIB:
        yield f"an agent's memory grew from {agent.memory_before_mib:.0f} to {agent.memory_after_mib:.0f} MiB"
    if agent.files_after > agent.files_before + MORE_FILES:
        yield f"an agent had {agent.files_before} files open before, and {agent.files_after} after"


def table_lines(report: ChaosReport) -> Iterator[str]:
    """The table."""
    yield f"seed {report.seed}: {sum(report.faults.values())} faults in {report.seconds:.0f} s"
    yield ""
    yield from _fault_lines(report.faults)
    yield ""
    yield f"{'requests':<26}{report.requests:>7}"
    yield f"{'  complete, all right':<26}{report.completed:>7}   {report.completed / report.requests:.2%}"
    yield f"{'  of these moved':<26}{report.moved:>7}"
    if report.lied:
        yield f"{'  answered by the liar':<26}{report.lied:>7}"
    yield f"{'  ended with an error':<26}{sum(report.failed.values()):>7}"
    for reason, count in sorted(report.failed.items(), key=lambda item: -item[1]):
        yield f"    {count} x {reason}"[:WIDTH]
    yield f"{'  wrong tokens':<26}{len(report.wrong):>7}"
    yield f"{'  lost':<26}{len(report.lost):>7}"
    yield ""
    yield f"{'seconds':<26}{'count':>7}{'P50':>9}{'P90':>9}{'P99':>9}{'worst':>9}"
    for name, spread in (
        ("fault to next token", report.recovery),
        ("longest gap in a stream", report.gap),
        ("first token", report.ttft),
        ("box away until it serves", report.away),
    ):
        figures = "".join(f"{value:>9.2f}" for value in (spread.p50_s, spread.p90_s, spread.p99_s, spread.worst_s))
        yield f"{name:<26}{spread.count:>7}{figures}"
    agent = report.agent
    yield ""
    yield f"an agent's memory, MiB: {agent.memory_before_mib:.0f} before, {agent.memory_after_mib:.0f} after"
    yield f"an agent's open files:  {agent.files_before} before, {agent.files_after} after"
    yield f"agents were started {report.starts} times; left over: {len(report.left_over)}"
    for problem in report.problems:
        yield f"PROBLEM: {problem}"


def _fault_lines(faults: dict[str, int]) -> Iterator[str]:
    """In two columns."""
    cells = [f"{count:>4} {what:<34}" for what, count in sorted(faults.items())]
    for first in range(0, len(cells), 2):
        yield "".join(cells[first : first + 2]).rstrip()
