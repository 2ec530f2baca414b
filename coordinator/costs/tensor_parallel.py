"""Over how many GPUs each instance on a machine is spread (Xiong et al., section 3): what each degree
leaves for KV, and the throughput that it would have, estimated from an instance's eight constants.

Corrected as against the paper's print: `delta_engine` is taken on each GPU, so an instance of t has
it t times (equation 1); a token's KV is of the KV heads, which are fewer than the heads that `2 l h`
stands for; equation 2 has it on its right side, too; a batch of algorithm 1 counts for all of its
requests, and the last one ends the loop; and the system's throughput is `TP_s u / t`, as the text
has it, not `t TP_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ..profile import ReplicaProfile
from .model_shape import ModelShape

GIB: Final = 1 << 30


class ThroughputError(ValueError):
    """No throughput can be estimated; one line that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What an engine takes of a GPU: this share (`phi_usage`), of which `engine_gib` on each GPU are
    for neither weights nor KV (`delta_engine`)."""

    share: float = 0.9
    engine_gib: float = 2.0

    def kv_tokens(self, model: ModelShape, gpu_gib: float, degree: int) -> int:
        """Equation 1, in tokens; 0 where the weights do not fit."""
        room = degree * (gpu_gib * self.share - self.engine_gib) * GIB - model.weight_bytes
        return max(0, int(room // model.kv_bytes_per_token))


class RequestLengths(NamedTuple):
    """Tokens of a prompt and of its answer."""

    prompt: int
    output: int


class DegreeEstimate(NamedTuple):
    """A degree of tensor parallelism on a machine: its instances, the tokens that each has room
    for, and tokens per second of all of them."""

    degree: int
    instances: int
    kv_tokens: int
    tokens_s: float


def group_into_batches(requests: Sequence[RequestLengths], kv_tokens: int) -> list[Sequence[RequestLengths]]:
    """Algorithm 1, lines 4 to 15: in order, batches as big as the KV cache holds, each answer
    counted as the longest of its batch. Raises ThroughputError for a request that does not fit."""
    batches: list[Sequence[RequestLengths]] = []
    begin = 0
    while begin < len(requests):
        prompts, longest, end = 0, 0, begin
        while end < len(requests):
            prompts, longest = prompts + requests[end].prompt, max(longest, requests[end].output)
            if prompts + (end - begin + 1) * longest > kv_tokens:
                break
            end += 1
        if end == begin:
            prompt, output = requests[begin]
            raise ThroughputError(f"a request of {prompt} and {output} tokens does not fit {kv_tokens} tokens of KV")
        batches.append(requests[begin:end])
        begin = end
    return batches


def estimate_instance_tokens_s(profile: ReplicaProfile, requests: Sequence[RequestLengths]) -> float:
    """Algorithm 1: `TP_s`, tokens per second of one instance, prompts and answers, as if each batch
    ran to its end before the next begins. Raises ThroughputError."""
    seconds = 0.0
    for batch in group_into_batches(requests, profile.kv_tokens):
        prompt, output = max(each.prompt for each in batch), max(each.output for each in batch)
        seconds += sum(profile.batch_s(len(batch), prompt, output))
    if not seconds > 0.0:
        raise ThroughputError("without requests, or with constants of 0, there is no throughput")
    return sum(map(sum, requests)) / seconds


def estimate_degrees(
    gpus: int,
    degrees: Iterable[int],
    requests: Sequence[RequestLengths],
    profile_of: Callable[[int], ReplicaProfile],
) -> list[DegreeEstimate]:
    """The search of section 3.2 on one machine: every degree that divides its GPUs and has room for
    the longest prompt with the longest answer (equation 2), the best first. Machines have nothing in
    common, so the best system is the best of each.

    `profile_of`: of an instance of that degree. Raises ThroughputError where no degree will do.
    """
    longest = max((each.prompt for each in requests), default=0) + max((each.output for each in requests), default=0)
    found = []
    for degree in degrees:
        if degree < 1 or gpus % degree:
            continue
        profile = profile_of(degree)
        if profile.kv_tokens < longest:
            continue
        instances = gpus // degree
        tokens_s = instances * estimate_instance_tokens_s(profile, requests)
        found.append(DegreeEstimate(degree, instances, profile.kv_tokens, tokens_s))
    if not found:
        raise ThroughputError(f"on {gpus} GPUs no degree leaves room for {longest} tokens of KV")
    return sorted(found, key=lambda each: -each.tokens_s)
