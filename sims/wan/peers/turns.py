"""Contenders that move the same bytes over the same link in turn, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Protocol

from .programs import PeerFailed

OURS: Final = "ours"
WARM_MIB: Final = 32
SLACK: Final = 4.0
"""So often the expected time is waited for, at most."""

MIN_WAIT_S: Final = 30.0
GIGABITS_PER_MIB: Final = 8e-9 * (1 << 20)


@dataclass(frozen=True, slots=True)
class MoveSample:
    """So many MiB in so many seconds; `cpu_s`: of both ends together, where it is known."""

    mib: int
    seconds: float
    cpu_s: float | None = None

    @property
    def gbps(self) -> float:
        """Payload per time."""
        return GIGABITS_PER_MIB * self.mib / self.seconds

    @property
    def cpu_s_per_gb(self) -> float | None:
        """CPU seconds for each GB (1e9 bytes)."""
        return None if self.cpu_s is None else self.cpu_s / (self.mib * (1 << 20) * 1e-9)


class Mover(Protocol):
    """A contender whose two ends are up."""

    version: str

    def move(self, mib: int, seconds: float) -> MoveSample:
        """Move so many MiB. Raises PeerFailed, also when it takes longer than that."""


@dataclass(frozen=True, slots=True)
class Contender:
    """`open` starts both ends with room for so many MiB. `failure`: why that is not even tried."""

    name: str
    open: Callable[[int], AbstractContextManager[Mover]]
    failure: str = ""


@dataclass(slots=True)
class TurnsTaken:
    """A contender's samples by round, or why there are none."""

    name: str
    samples: dict[int, MoveSample] = field(default_factory=dict)
    version: str = ""
    failure: str = ""

    @property
    def gbps(self) -> float | None:
        """Median."""
        return median(sample.gbps for sample in self.samples.values()) if self.samples else None

    @property
    def cpu_s_per_gb(self) -> float | None:
        """Median, where it is known."""
        found = [each for sample in self.samples.values() if (each := sample.cpu_s_per_gb) is not None]
        return median(found) if found else None

    @property
    def mib(self) -> int:
        """The most that was moved at a time."""
        return max((sample.mib for sample in self.samples.values()), default=0)


def ratios(ours: TurnsTaken, peer: TurnsTaken) -> list[float]:
    """How often our rate is the peer's, in each round that both have."""
    rounds = ours.samples.keys() & peer.samples.keys()
    return [ours.samples[each].gbps / peer.samples[each].gbps for each in sorted(rounds)]


def size_in_time(warm: MoveSample, mib: int, seconds: float) -> int:
    """All of it, or what a slow contender moves in that time, as its first move says; never less than that."""
    return max(min(mib, warm.mib), min(mib, int(warm.mib / warm.seconds * seconds)))


def take_turns(
    contenders: Sequence[Contender],
    *,
    mib: int,
    rounds: int,
    seconds: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[TurnsTaken]:
    """Each contender in each round: its ends are started, warmed by a smaller move, timed, and ended. No further
    round is begun after `seconds`. One that fails has no further turn."""
    began = clock()
    turn_s = seconds / (rounds * len(contenders))
    taken = {each.name: TurnsTaken(each.name, failure=each.failure) for each in contenders}
    for number in range(rounds):
        for contender in contenders:
            turns = taken[contender.name]
            if turns.failure or (number and clock() - began >= seconds):
                continue
            try:
                sample = _take_turn(contender, turns, mib, turn_s)
            except PeerFailed as error:
                turns.failure = str(error)
                say(f"{contender.name}: {error}")
                continue
            turns.samples[number] = sample
            say(f"{contender.name}: {sample.mib} MiB in {sample.seconds:.2f} s, {sample.gbps:.3f} Gb/s")
    return list(taken.values())


def _take_turn(contender: Contender, turns: TurnsTaken, mib: int, turn_s: float) -> MoveSample:
    with contender.open(mib) as mover:
        turns.version = mover.version
        warm = mover.move(min(mib, WARM_MIB), max(MIN_WAIT_S, SLACK * turn_s))
        size = size_in_time(warm, mib, turn_s)
        return mover.move(size, max(MIN_WAIT_S, SLACK * turn_s))
