"""How a request of vLLM's goes on from a token that another engine has sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm.v1.request import RequestStatus

from ..vllm.answered import continue_answer

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NOT_COMPUTED: Final = (
    RequestStatus.WAITING,
    RequestStatus.WAITING_FOR_REMOTE_KVS,
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
)


def go_on_from(request: Request, token: int) -> bool:
    """Make the token the next of its answer. False, and nothing changed, once the request has been
    computed with: vLLM has then told its workers of it."""
    if request.status not in _NOT_COMPUTED or request.num_preemptions:
        return False
    continue_answer(request, token)
    return True
