"""vLLM's model runner for a CPU, with requests that bring a seed.

A step that reads only a part of a prompt samples all the same, and forgets the token. So that an answer does not depend
on how its prompt was cut, vLLM takes back what that has drawn from the request's own generator: by an offset that only
generators on a GPU have. On a CPU it fails, and with it the engine and all its requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

__all__ = ["SeededCPUModelRunner", "install"]


class SeededCPUModelRunner(CPUModelRunner):
    """Takes back by the generator's state what is drawn for tokens that do not count."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        discarded = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]
        drawing = [batch.generators[i] for i in discarded.tolist() if i in batch.generators]
        before = [generator.get_state() for generator in drawing]
        output = super()._sample(*args, **kwargs)
        for generator, state in zip(drawing, before, strict=True):
            generator.set_state(state)
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, which is to find nothing to take back."""
        batch = self.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            batch.generators = generators


def install() -> None:
    """For all workers that this process and those that it forks will make."""
    cpu_worker.CPUModelRunner = SeededCPUModelRunner  # type: ignore[attr-defined]
