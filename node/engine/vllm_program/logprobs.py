"""vLLM's log probabilities as values that cross processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..sampling import TopTokens

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors


def top_tokens(lists: LogprobsLists | None) -> TopTokens | None:
    """Of sampled tokens; None where none were asked for."""
    if lists is None or not len(lists.sampled_token_ranks):
        return None
    return _pack(lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks)


def prompt_top_tokens(tensors: LogprobsTensors | None) -> TopTokens | None:
    """Of the prompt's tokens but the first."""
    if tensors is None or not len(tensors.selected_token_ranks):
        return None
    return _pack(tensors.logprob_token_ids.numpy(), tensors.logprobs.numpy(), tensors.selected_token_ranks.numpy())


def _pack(ids: np.ndarray[Any, Any], logprobs: np.ndarray[Any, Any], ranks: np.ndarray[Any, Any]) -> TopTokens:
    return TopTokens(
        width=int(ids.shape[1]),
        ids=ids.astype("<i4").tobytes(),
        logprobs=logprobs.astype("<f4").tobytes(),
        ranks=ranks.astype("<i4").tobytes(),
    )
