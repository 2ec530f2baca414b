"""What goes wrong in a live run and in its simulation, and when: the same lines for both.

lose 3@20               the third node is lost 20 seconds after the first request may come
join 3@50               it is started again, with an empty engine
degrade 1:2=0.05@30     the links between the first two carry 0.05 Gb/s from then on
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Final, NoReturn

from ..errors import UsageError

LATEST_S: Final = 600.0
MAX_FAULTS: Final = 100
EXAMPLES: Final = {
    "lose": "3@20: the third node, after 20 seconds",
    "join": "3@50: the third node is back after 50 seconds",
    "degrade": "1:2=0.05@30: 0.05 Gb/s between the first two nodes, after 30 seconds",
}


class LiveFaultKind(StrEnum):
    """What happens to nodes, or to the links between two."""

    LOSE = "lose"
    JOIN = "join"
    DEGRADE = "degrade"


@dataclass(frozen=True, slots=True, order=True)
class ScheduledFault:
    """`at` seconds after the first request may come; `nodes` by their numbers, from 1 on; `gbps`: of links."""

    at: float
    kind: LiveFaultKind
    nodes: tuple[int, ...]
    gbps: float = 0.0

    def __str__(self) -> str:
        rate = f"={self.gbps:g}" if self.kind is LiveFaultKind.DEGRADE else ""
        return f"{self.kind} {':'.join(map(str, self.nodes))}{rate}@{self.at:g}"


Schedule = tuple[ScheduledFault, ...]
"""In order of time."""


def read_schedule(path: Path) -> Schedule:
    """The faults of a file: one in each line; what follows a `#` is left out. Raises UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"schedule: {path} cannot be read: {reason}") from error
    faults = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != len(("lose", "3@20")) or words[0] not in EXAMPLES:
            raise UsageError(f"schedule: line {number} of {path} is not like `lose 3@20`, `join 3@50` or `degrade ...`")
        try:
            faults.append(parse_fault(LiveFaultKind(words[0]), words[1]))
        except UsageError as error:
            raise UsageError(f"schedule: line {number} of {path}: {error}") from None
    if len(faults) > MAX_FAULTS:
        raise UsageError(f"schedule: {path} has {len(faults)} faults; {MAX_FAULTS} are the most")
    return tuple(sorted(faults))


def parse_fault(kind: LiveFaultKind, text: str) -> ScheduledFault:
    """Of the words behind its kind. Raises UsageError."""
    what, _, at = text.partition("@")
    ends, equals, rate = what.partition("=")
    has_rate = kind is LiveFaultKind.DEGRADE
    try:
        nodes = tuple(int(number) for number in ends.split(":"))
        found = ScheduledFault(float(at), kind, nodes, float(rate) if has_rate else 0.0)
    except ValueError:
        _refuse(kind, text)
    is_sound = bool(equals) is has_rate and len(nodes) == len(set(nodes)) == (2 if has_rate else 1)
    if not is_sound or not 0.0 <= found.at < LATEST_S or (has_rate and not (isfinite(found.gbps) and found.gbps > 0)):
        _refuse(kind, text)
    return found


def check_schedule(schedule: Iterable[ScheduledFault], nodes: int) -> None:
    """Raises UsageError where the nodes are not there, or are lost or started twice in a row."""
    running = set(range(1, nodes + 1))
    for fault in sorted(schedule):
        unknown = [number for number in fault.nodes if not 1 <= number <= nodes]
        if unknown:
            raise UsageError(f"{fault.kind}: there is no node {unknown[0]}; they have the numbers 1 to {nodes}")
        if fault.kind is LiveFaultKind.LOSE:
            if not running >= set(fault.nodes):
                raise UsageError(f"lose: node {fault.nodes[0]} is lost twice, and not started in between")
            running -= set(fault.nodes)
            if not running:
                raise UsageError("lose: one node has to be left")
        elif fault.kind is LiveFaultKind.JOIN:
            if running >= set(fault.nodes):
                raise UsageError(f"join: node {fault.nodes[0]} is running at {fault.at:g} s")
            running |= set(fault.nodes)


def needs_links(schedule: Sequence[ScheduledFault]) -> bool:
    """Whether links change, which loopback's cannot."""
    return any(fault.kind is LiveFaultKind.DEGRADE for fault in schedule)


def _refuse(kind: LiveFaultKind, text: str) -> NoReturn:
    raise UsageError(f"{kind}: {text!r} is not like {EXAMPLES[kind]}") from None
