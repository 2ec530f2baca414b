"""A workload's requests in a few classes by length: what estimates are computed over instead of
every request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .workload import Workload

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """Requests by length: `prompt` and `output` tokens on average, their standard deviation within
    the class, and the class's share of all requests.

    `held` is the context that a decoding request has on average, `held_var` its variance: long
    outputs are met more often. `life` is how many tokens a request that is met has still to come,
    on average.
    """

    prompt: Array
    prompt_sd: Array
    output: Array
    output_sd: Array
    share: Array
    mean_prompt: float
    mean_pairs: float
    mean_output: float
    held: float
    held_var: float
    life: float

    @property
    def uneven(self) -> float:
        """Squared coefficient of variation of the contexts of decoding requests."""
        return self.held_var / self.held**2

    @property
    def pairs(self) -> Array:
        """Query-key pairs of a prefill, by class."""
        return self.prompt * (self.prompt + 1) / 2 + self.prompt_sd**2 / 2


PROMPTS: Final = (1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 0.9, 0.95)
OUTPUTS: Final = (0.2, 0.4, 0.55, 0.7, 0.8, 0.84, 0.88, 0.91, 0.94, 0.96, 0.98, 0.99, 0.995)
"""Where requests are cut into classes by prompt, and those of each by output. Finer among the longest:
whether those are in time decides about the last percents, and where a service bounds lengths, or
deadlines fall among them, one normal class of all of them has many late that are not."""


def classify_lengths(workload: Workload, *, prompts: ArrayLike = PROMPTS, outputs: ArrayLike = OUTPUTS) -> Classes:
    """At most (prompts + 1) * (outputs + 1) classes, which are cut there: fewer for a sample with fewer
    requests."""
    order = np.lexsort((workload.outputs, workload.prompts))
    cells = [
        part
        for rows in _cut(order, prompts)
        for part in _cut(rows[np.argsort(workload.outputs[rows], kind="stable")], outputs)
    ]
    prompt = [workload.prompts[cell].astype(np.float64) for cell in cells]
    output = [workload.outputs[cell].astype(np.float64) for cell in cells]
    p, n = workload.prompts.astype(np.float64), workload.outputs.astype(np.float64)
    held = float((n * (p + n / 2)).sum() / n.sum())
    held_square = float((n * (p * p + p * n + n * n / 3)).sum() / n.sum())
    return Classes(
        prompt=np.array([cell.mean() for cell in prompt]),
        prompt_sd=np.array([cell.std() for cell in prompt]),
        output=np.array([cell.mean() for cell in output]),
        output_sd=np.array([cell.std() for cell in output]),
        share=np.array([len(cell) for cell in cells]) / len(order),
        mean_prompt=workload.mean_prompt,
        mean_pairs=workload.mean_pairs,
        mean_output=workload.mean_output,
        held=held,
        held_var=max(0.0, held_square - held * held),
        life=float((n * n).sum() / (2 * n.sum())),
    )


def _cut(rows: NDArray[np.intp], shares: ArrayLike) -> list[NDArray[np.intp]]:
    """The parts between these shares of the rows, without empty ones."""
    ends = np.round(np.asarray(shares) * len(rows)).astype(np.intp)
    return [part for part in np.split(rows, ends) if len(part)]
