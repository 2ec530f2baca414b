"""Requests of vLLM's that come with a part of their answer, which another engine has sampled.

They are tokens of its answer, so penalties, `min_tokens` and constraints see them. vLLM's scheduler has a method for
that; its first model runner takes a request that is new to it for one without an answer, unless it finds the tokens
beside the sampling parameters (`seeded.ContinuedRequestState`). The second one is told by the scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.request import Request

ANSWERED: Final = "p2pserve_answered"  # in a request's `extra_args`: a list of tokens


def answered_tokens(request: Request) -> list[int]:
    """The tokens of its answer that a request has brought."""
    sampling = request.sampling_params
    extra = sampling.extra_args if sampling is not None else None
    return list(extra.get(ANSWERED, ())) if extra else []


def continue_answer(request: Request, token: int) -> None:
    """One more of them, for a request that has not been computed with yet."""
    sampling = request.sampling_params
    assert sampling is not None
    sampling.extra_args = {**(sampling.extra_args or {}), ANSWERED: [*answered_tokens(request), token]}
    request.append_output_token_ids(token)
