"""Where to split a prompt between a partial-prefill replica and the chunked-prefill replica that
decodes it: the balancer of Cronus (algorithm 1 of its appendix).

Both replicas are busy all the time if the first takes as long for its part of a prompt as the
second for the rest, which it computes in chunks beside the answers that it decodes. Of 512 parts of
the prompt, the balancer takes the one for which the two times differ least. Where the second has no
room for the prompt's KV, the first computes all of it.

The paper's listing is followed with these corrections:

- The times of chunks are an arithmetic series that begins where the second part does, so their mean
  is at the context (L_p + L_last) / 2; the listing has (L_in + L_last) / 2.
- Of a step's tokens B, decoding requests take one each, so B - n_d are left for a chunk. The
  listing's header calls n_d and L_ctxd (their context) n_p and L_ctxp, and then defines n_p again.
- The last chunk begins N_iter - 1 chunks behind the first. The listing has floor(L_c / n_p) chunks,
  which is one too many where the last chunk is full.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ..bounds import Count, Seconds

CANDIDATES: Final = 512
"""Parts of a prompt that are compared."""

MAX_BLOCK_TOKENS: Final = 1 << 20


class PrefillLine(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a prefill that has the replica for itself: `token_s` per token and `base_s`
    besides. The paper's k_p and b_p."""

    token_s: Seconds
    base_s: Seconds

    def seconds(self, tokens: float) -> float:
        """Of a prompt, or a part of one from its beginning."""
        return self.token_s * tokens + self.base_s


class ChunkLine(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step that is filled up with a chunk of a prompt, beside decoding requests:
    `prefill_context_s` per token of the prompt before the chunk, `decode_context_s` per token that
    the decoding requests hold, and `base_s` besides. The paper's k_ctxp, k_ctxd and b_c."""

    prefill_context_s: Seconds
    decode_context_s: Seconds
    base_s: Seconds

    def seconds(self, prefill_context: float, decode_context: float) -> float:
        """Of one step."""
        return self.prefill_context_s * prefill_context + self.decode_context_s * decode_context + self.base_s


class ChunkedPrefillState(msgspec.Struct, frozen=True, kw_only=True):
    """How it stands at a chunked-prefill replica.

    `decoding` requests, which hold `context_tokens` of KV together; room for `free_tokens` more, in
    blocks of `block_tokens`. A step computes `step_tokens` at most.
    """

    decoding: Count
    context_tokens: Count
    free_tokens: Count
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_TOKENS)]
    step_tokens: Count

    def has_room_for(self, tokens: int) -> bool:
        """Whether its free blocks hold so many tokens' KV."""
        return self.free_tokens // self.block_tokens >= -(-tokens // self.block_tokens)


def choose_split(prompt_tokens: int, prefill: PrefillLine, chunk: ChunkLine, state: ChunkedPrefillState) -> int:
    """How many tokens of a prompt, from its beginning, the partial-prefill replica computes: from 1
    to all of them."""
    tokens_of_a_chunk = state.step_tokens - state.decoding
    if prompt_tokens <= 1 or tokens_of_a_chunk < 1 or not state.has_room_for(prompt_tokens):
        return prompt_tokens
    decode_s = chunk.decode_context_s * state.context_tokens + chunk.base_s

    def difference_s(part: int) -> float:
        chunks = -(-(prompt_tokens - part) // tokens_of_a_chunk)
        last_context = part + (chunks - 1) * tokens_of_a_chunk
        chunked_s = chunks * (chunk.prefill_context_s * (part + last_context) / 2.0 + decode_s)
        return abs(prefill.seconds(part) - chunked_s)

    parts = (-(-number * prompt_tokens // CANDIDATES) for number in range(1, CANDIDATES + 1))  # each rounded up
    return min(parts, key=difference_s)  # the first of the least
