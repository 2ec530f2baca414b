"""How fast a plan's replicas are, as arrays that all routes are predicted from at once."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...profile import ReplicaProfile

Floats = NDArray[np.float64]

UNTOLD_TOKENS: Final = 1e12
"""A replica that does not tell how much KV it has room for has enough, unless it reports that it is full."""

LEAST_S: Final = 1e-9
"""No prompt's token takes less, and no deadline is shorter: what is divided by it stays finite."""


class ReplicaSpeeds(NamedTuple):
    """The replicas' times as arrays, in the order of the live state.

    Seconds: `token_s` per token of a prompt, `prompt_s` for each besides, `begin_s` for a step of prompts alone; of a
    decode step `step_s`, with `request_s` and `context_s` for each request and each token that it holds, and `length_s`
    for each token of their mean length. `kv_tokens`: room, or UNTOLD_TOKENS.
    """

    token_s: Floats
    prompt_s: Floats
    begin_s: Floats
    step_s: Floats
    request_s: Floats
    context_s: Floats
    length_s: Floats
    kv_tokens: Floats

    def at_context(self, context: float) -> StepSeconds:
        """Of steps over requests that hold so many tokens each."""
        context_s = self.context_s * context
        return StepSeconds(
            begin_s=self.begin_s,
            token_s=self.token_s,
            context_s=context_s,
            step_s=self.step_s + self.length_s * context,
            request_s=context_s + self.request_s,
        )


class StepSeconds(NamedTuple):
    """By replica, for requests of one length, in seconds: of a decode step `step_s`, with `request_s` for each request;
    of one that computes prompts as well `begin_s`, with `token_s` for each of its tokens and `context_s` for each
    request."""

    begin_s: Floats
    token_s: Floats
    context_s: Floats
    step_s: Floats
    request_s: Floats

    def decode_step_s(self, requests: Floats) -> Floats:
        """Of a step over so many requests."""
        return np.asarray(self.step_s + self.request_s * requests)

    def mixed_step_s(self, tokens: Floats | float, requests: Floats) -> Floats:
        """Of one that computes so many tokens of prompts as well: each request costs one more, and its context."""
        return np.asarray(self.begin_s + self.token_s * (tokens + requests) + self.context_s * requests)


def tabulate_speeds(profiles: list[ReplicaProfile | None]) -> ReplicaSpeeds | None:
    """One that is not known counts as slow as the slowest; None where none is."""
    known = [each for each in profiles if each is not None]
    if not known:
        return None
    slowest = max(known, key=lambda each: sum(each.batch_s(8.0, 512.0, 128.0)))
    rows = [each if each is not None else slowest for each in profiles]
    return ReplicaSpeeds(
        # Fits to prompts that are mostly computed one at a time do not tell what is `length_s` of it.
        token_s=np.array([max(each.prefill.prompt_token_s, LEAST_S) for each in rows]),
        prompt_s=np.array([each.prefill.request_s for each in rows]),
        begin_s=np.array([each.prefill.step_s for each in rows]),
        step_s=np.array([each.decode.step_s for each in rows]),
        request_s=np.array([each.decode.request_s for each in rows]),
        context_s=np.array([each.decode.token_s for each in rows]),
        length_s=np.array([each.decode.length_s for each in rows]),
        kv_tokens=np.array([float(each.kv_tokens) or UNTOLD_TOKENS for each in rows]),
    )
