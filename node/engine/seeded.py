"""vLLM's model runners, with requests that bring a seed: what a token is drawn with depends on the seed and on the
token's position alone.

vLLM gives each request a generator that starts anew in every engine and counts what was drawn there. So an answer would
depend on which engine wrote its first token, and go on in another way after its engine was lost.

Besides, a step that reads only a part of a prompt samples all the same, and forgets the token. vLLM takes back what
that has drawn by an offset that only generators on a GPU have: on a CPU it fails, and with it the engine and all its
requests.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.platforms import current_platform
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

__all__ = ["SeededCPUModelRunner", "SeededGPUModelRunner", "install", "seed_at"]

_WORD: Final = (1 << 64) - 1


def seed_at(seed: int, position: int) -> int:
    """64 bits for a generator. Mixed well (the end of SplitMix64), since generators on a CPU look at 32 of them."""
    mixed = (seed + 0x9E3779B97F4A7C15 * (position + 1)) & _WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return mixed ^ mixed >> 31


class SeededGPUModelRunner(GPUModelRunner):
    """vLLM's first one. Its second, which it prefers on GPUs, draws by seed and position itself, though other numbers.

    Not yet run on a GPU.
    """

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        for row, generator in batch.generators.items():
            sampling = self.requests[batch.req_ids[row]].sampling_params
            assert sampling is not None
            assert sampling.seed is not None
            # Tokens that are still to be computed count here, also when they are known to the device alone.
            generator.manual_seed(seed_at(sampling.seed, int(batch.num_tokens_no_spec[row])))
        return super()._sample(*args, **kwargs)


class SeededCPUModelRunner(SeededGPUModelRunner, CPUModelRunner):
    """The same on a CPU, whose runner is made from the GPU's."""

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
    if current_platform.is_cpu():
        from vllm.v1.worker import cpu_worker  # loads a library that machines with a GPU need not have

        cpu_worker.CPUModelRunner = SeededCPUModelRunner  # type: ignore[attr-defined]
    else:
        gpu_model_runner.GPUModelRunner = SeededGPUModelRunner  # type: ignore[misc]
