"""How a request of vLLM's goes on from a token that another engine has written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request


def go_on_from(request: Request, token: int) -> bool:
    """Put the token at the end of the prompt. False, and nothing changed, once the request has been
    computed with: vLLM has then told its workers of the prompt."""
    if request.status not in (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS) or request.num_preemptions:
        return False
    sampling = request.sampling_params
    assert sampling is not None
    assert sampling.max_tokens is not None
    assert request.prompt_token_ids is not None
    request.prompt_token_ids = [*request.prompt_token_ids, token]  # the list is not the request's alone
    request.num_prompt_tokens += 1
    request._all_token_ids.append(token)  # noqa: SLF001 (vLLM has a method for tokens of the answer only)
    request.update_block_hashes()
    request.max_tokens -= 1
    sampling.max_tokens -= 1
    return True
