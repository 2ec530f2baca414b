"""vLLM's model runner, with requests that bring a seed: what a token is drawn with depends on the seed and on the
token's position alone.

vLLM gives each request a generator that starts anew in every engine and counts what was drawn there. So an answer would
depend on which engine wrote its first token, and go on in another way after its engine was lost.

That is so in vLLM's first model runner. The second one, which only GPUs have, draws from the seed and the position by
itself, though not the same: the two would go on differently with one another's answers.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from .answered import ANSWERED

_WORD: Final = (1 << 64) - 1


def seed_at(seed: int, position: int) -> int:
    """64 bits for a generator. Mixed well (the end of SplitMix64), since generators on a CPU look at 32 of them."""
    mixed = (seed + 0x9E3779B97F4A7C15 * (position + 1)) & _WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return mixed ^ mixed >> 31


class ContinuedRequestState(CachedRequestState):
    """A request as a worker of vLLM's first model runner holds it, with the part of its answer that it brings."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        extra = self.sampling_params.extra_args if self.sampling_params is not None else None
        if extra and ANSWERED in extra:
            self.output_token_ids = list(extra[ANSWERED])


class SeededGPUModelRunner(GPUModelRunner):
    """vLLM's first one; the second, for GPUs, draws by seed and position itself. Not yet run on a
    GPU."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        for row, generator in batch.generators.items():
            sampling = self.requests[batch.req_ids[row]].sampling_params
            assert sampling is not None
            assert sampling.seed is not None
            # Tokens that are still to be computed count here, also when they are known to the device alone.
            generator.manual_seed(seed_at(sampling.seed, int(batch.num_tokens_no_spec[row])))
        return super()._sample(*args, **kwargs)


def install() -> None:
    """For all workers on GPUs that this process and those that it forks will make."""
    gpu_model_runner.GPUModelRunner = SeededGPUModelRunner  # type: ignore[misc]
    continue_answers()


def continue_answers() -> None:
    """The first model runner, on CPUs too, makes its requests with this."""
    gpu_model_runner.CachedRequestState = ContinuedRequestState  # type: ignore[attr-defined]
