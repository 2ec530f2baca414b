"""The same sampling with a seed (`seeded`) on a machine without a GPU. To be imported only there: vLLM's module for CPU
workers replaces streams, events and pinned memory of torch by dummies, in the whole process.

Besides, a step that reads only a part of a prompt samples all the same, and forgets the token. vLLM takes back what
that has drawn by an offset that only generators on a GPU have: on a CPU it fails, and with it the engine and all its
requests.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.sample import sampler
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from .seeded import SeededGPUModelRunner, continue_answers


class SeededCPUModelRunner(SeededGPUModelRunner, CPUModelRunner):
    """A CPU's runner, which is made from the GPU's."""

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, which is to find nothing to take back."""
        batch = self.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            batch.generators = generators


def install() -> None:
    """For all workers on CPUs that this process and those that it forks will make."""
    cpu_worker.CPUModelRunner = SeededCPUModelRunner  # type: ignore[attr-defined]
    continue_answers()
    # Compiled at the first request for log probabilities, for half a minute; a CPU gains nothing by it.
    plain = getattr(batched_count_greater_than, "_torchdynamo_orig_callable", batched_count_greater_than)
    sampler.batched_count_greater_than = plain  # type: ignore[attr-defined]
