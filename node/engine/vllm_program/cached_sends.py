"""Prompts that are cached here and only to be sent go first in vLLM's scheduler, which is first come, first served.

Another engine waits for their KV (`coordinator.prefixes.fetching`), and a block at most is to be computed for it. So
they go to the front of the queue, and the prompts under way leave them their tokens of the next step: those would else
take all of it, step after step, until the longest of them is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from vllm.v1.request import Request


@final
class CachedSends:
    """Of one scheduler of vLLM's. `limit_running` before each step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._usual = int(scheduler.scheduler_config.long_prefill_token_threshold)
        self._waiting: list[tuple[Request, int]] = []  # with the tokens that they need

    def __repr__(self) -> str:
        return f"<CachedSends waiting={len(self._waiting)}>"

    def add(self, request: Request, cached: int) -> None:
        """A request that is to be sent is in the queue, with so many tokens of it cached."""
        tokens = request.num_tokens - cached
        if (
            not cached or tokens > self._scheduler.block_size
        ):  # a short prompt of which nothing is cached waits its turn
            return
        self._scheduler.waiting.remove_request(request)
        self._scheduler.waiting.prepend_request(request)
        self._waiting.append((request, tokens))

    def limit_running(self) -> None:
        """Have the next step leave them room, while there are some."""
        from vllm.v1.request import RequestStatus

        scheduler = self._scheduler
        self._waiting = [each for each in self._waiting if each[0].status == RequestStatus.WAITING]
        limit = self._usual
        if self._waiting:
            decoding = sum(each.num_computed_tokens >= each.num_prompt_tokens for each in scheduler.running)
            needed = decoding + sum(tokens for _, tokens in self._waiting)
            budget = scheduler.max_num_scheduled_tokens
            limit = max(1, budget // 2, budget - needed)  # prompts under way get on, however many come before them
            limit = min(limit, self._usual or limit)  # 0: they have no other limit
        scheduler.scheduler_config.long_prefill_token_threshold = limit
