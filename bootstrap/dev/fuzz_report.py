"""What a fuzzer counts, and the limits that no single input may exceed."""

import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

MAX_INPUT_S: Final = 1.0
"""CPU seconds that one input may take, on a machine that has other things to do, too. Honest ones take microseconds."""

MAX_INPUT_MIB: Final = 100
"""How much the process's peak of memory may grow by one input."""


def peak_memory_mib() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass(slots=True)
class ControlFuzzReport:
    """What a run has done. `refused`: inputs that were answered with one of the errors that were declared."""

    inputs: int = 0
    refused: int = 0
    by_target: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest: str = ""
    most_memory_mib: float = 0.0
    peak_mib: float = field(default_factory=peak_memory_mib)
    seconds: float = 0.0

    def begin(self) -> float:
        """What was needed to make an input does not count: returns the time now, for `note`."""
        self.peak_mib = peak_memory_mib()
        return time.thread_time()

    @contextmanager
    def one(self, target: str) -> Iterator[None]:
        """Count one input, and see that it takes neither too long nor too much memory."""
        began = self.begin()
        yield
        self.note(target, time.thread_time() - began)

    def note(self, target: str, took_s: float) -> None:
        """Count one input that took so long, and as much memory as the process has grown by."""
        self.inputs += 1
        self.by_target[target] += 1
        if took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, target
        if took_s > MAX_INPUT_S:
            raise AssertionError(f"an input of {target} took {took_s:.1f} s of CPU")
        before, self.peak_mib = self.peak_mib, peak_memory_mib()
        grown = self.peak_mib - before
        self.most_memory_mib = max(self.most_memory_mib, grown)
        if grown > MAX_INPUT_MIB:
            raise AssertionError(f"an input of {target} took {grown:.0f} MiB")

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "inputs": self.inputs,
            "refused": self.refused,
            "by_target": dict(sorted(self.by_target.items())),
            "outcomes": dict(sorted(self.outcomes.items())),
            "slowest_s": round(self.slowest_s, 3),
            "slowest": self.slowest,
            "most_memory_of_an_input_mib": round(self.most_memory_mib, 1),
            "peak_memory_mib": round(self.peak_mib),
            "seconds": round(self.seconds, 1),
            "inputs_per_s": round(self.inputs / max(self.seconds, 1e-9)),
        }
