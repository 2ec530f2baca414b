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


PROMPTS: Final = 6
"""Classes by prompt, of equally many requests each."""

OUTPUTS: Final = (0.25, 0.5, 0.75, 0.9, 0.97, 0.99)
"""Where the requests of a prompt's class are cut by output. A tenth of them may have most of the
tokens, and whether those end in time decides about the last percents."""


def classify_lengths(workload: Workload, *, prompts: int = PROMPTS, outputs: ArrayLike = OUTPUTS) -> Classes:
    """At most prompts * (outputs + 1) classes: `outputs` are cuts, fewer for a sample with fewer
    requests."""
    order = np.lexsort((workload.outputs, workload.prompts))
    cells = [
        rows[np.argsort(workload.outputs[rows], kind="stable")]
        for rows in np.array_split(order, min(prompts, len(order)))
    ]
    cells = [
        part for rows in cells for part in np.split(rows, np.round(np.array(outputs) * len(rows)).astype(np.intp))
        if len(part)
    ]  # fmt: skip
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
