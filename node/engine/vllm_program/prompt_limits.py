"""Prompts under way leave tokens of each step to others, in vLLM's scheduler, which is first come, first served.

It goes through the requests that run, then through those that wait, and a prompt that is longer than a step takes all
tokens that are left of it, step after step. Until it is computed none would be left for

- answers that run behind it,
- requests whose KV has come from another engine, but for a block at most: their answers have begun there,
- requests that want blocks for such KV: without a token left vLLM does not look at the queue,
- prompts that are only to be sent and cached here but for a block at most, which go to the front of the queue: another
  engine waits for their KV (`coordinator.prefixes.fetching`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ..kv.step_work import PARAMS_KEY

if TYPE_CHECKING:
    from vllm.v1.request import Request


@final
class PromptLimits:
    """Of one scheduler of vLLM's. `limit_running` before each step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._usual = int(scheduler.scheduler_config.long_prefill_token_threshold)
        self._cached_sends: list[tuple[Request, int]] = []  # that wait, with the tokens that they need

    def __repr__(self) -> str:
        return f"<PromptLimits cached sends={len(self._cached_sends)}>"

    def add_send(self, request: Request, cached: int) -> None:
        """A request that is to be sent is in the queue, with so many tokens of it cached."""
        tokens = request.num_tokens - cached
        if (
            not cached or tokens > self._scheduler.block_size
        ):  # a short prompt of which nothing is cached waits its turn
            return
        self._scheduler.waiting.remove_request(request)
        self._scheduler.waiting.prepend_request(request)
        self._cached_sends.append((request, tokens))

    def limit_running(self) -> None:
        """Have the next step leave the others room, while there are some."""
        scheduler = self._scheduler
        decoding = sum(each.num_computed_tokens >= each.num_prompt_tokens for each in scheduler.running)
        needed, limit = self._count_next_tokens(), self._usual
        if decoding or needed:
            left = scheduler.max_num_scheduled_tokens - decoding
            left = max(left // 2, left - needed)  # prompts under way get on, however many come before them
            limit = max(1, left // max(1, len(scheduler.running) - decoding))
            limit = min(limit, self._usual or limit)  # 0: they have no other limit
        scheduler.scheduler_config.long_prefill_token_threshold = limit

    def _count_next_tokens(self) -> int:
        """That are lacking of those which are next and lack few."""
        from vllm.v1.request import RequestStatus

        scheduler = self._scheduler
        self._cached_sends = [each for each in self._cached_sends if each[0].status == RequestStatus.WAITING]
        lacking = sum(tokens for _, tokens in self._cached_sends)
        for request in scheduler.kv_holding_waiting:
            has_come = request.request_id in scheduler.finished_recving_kv_req_ids
            if has_come or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                lacks = max(1, request.num_tokens - request.num_computed_tokens)
                lacking += lacks if lacks <= scheduler.block_size else 0
        first = next(iter(scheduler.waiting), None)
        return lacking + (first is not None and _wants_blocks_for_kv(first))


def _wants_blocks_for_kv(request: Request) -> bool:
    """It computes what it has lost when it was preempted."""
    opening = (request.kv_transfer_params or {}).get(PARAMS_KEY)
    return opening is not None and not opening.send and not request.num_preemptions
