"""What a fuzzer counts, and the limits that no single input may exceed."""

import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

MAX_INPUT_S: Final = 2.0
"""CPU seconds that one input may take, on a machine that has other things to do, too. Honest ones take microseconds."""


@dataclass(slots=True)
class ControlFuzzReport:
    """What a run has done. `refused`: inputs that were answered with one of the errors that were declared."""

    inputs: int = 0
    refused: int = 0
    by_target: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest: str = ""
    seconds: float = 0.0

    @contextmanager
    def one(self, target: str, limit_s: float = MAX_INPUT_S) -> Iterator[None]:
        """Count one input, and see that it does not take too long."""
        began = time.thread_time()
        yield
        self.note(target, time.thread_time() - began, limit_s)

    def note(self, target: str, took_s: float, limit_s: float = MAX_INPUT_S) -> None:
        """Count one input that took so long."""
        self.inputs += 1
        self.by_target[target] += 1
        if took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, target
        if took_s > limit_s:
            raise AssertionError(f"an input of {target} took {took_s:.1f} s of CPU")

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "inputs": self.inputs,
            "refused": self.refused,
            "by_target": dict(sorted(self.by_target.items())),
            "outcomes": dict(sorted(self.outcomes.items())),
            "slowest_s": round(self.slowest_s, 3),
            "slowest": self.slowest,
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "seconds": round(self.seconds, 1),
            "inputs_per_s": round(self.inputs / max(self.seconds, 1e-9)),
        }
