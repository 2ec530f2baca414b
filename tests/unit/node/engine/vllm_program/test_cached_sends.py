"""Prompts that are cached and only to be sent go first in vLLM's scheduler, and those under way leave them room."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

from p2pserve.node.engine.vllm_program.cached_sends import CachedSends

BLOCK, BUDGET = 16, 100


def request(tokens: int, computed: int = 0) -> Any:
    status = RequestStatus.RUNNING if computed else RequestStatus.WAITING
    return SimpleNamespace(
        num_tokens=tokens, num_prompt_tokens=tokens, num_computed_tokens=computed, status=status
    )  # fmt: skip


def scheduler_of(waiting: Sequence[Any], running: Sequence[Any] = (), usual: int = 0) -> Any:
    """What of vLLM's is looked at."""
    queue = FCFSRequestQueue()
    for each in waiting:
        queue.add_request(each)
    return SimpleNamespace(
        block_size=BLOCK,
        max_num_scheduled_tokens=BUDGET,
        running=list(running),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=usual),
        waiting=queue,
    )


def test_one_that_is_cached_but_for_a_block_goes_to_the_front() -> None:
    first, cached, longer = request(500), request(33), request(49)
    scheduler = scheduler_of([first, cached, longer])
    sends = CachedSends(scheduler)
    sends.add(cached, 32)
    sends.add(longer, 32)
    assert list(scheduler.waiting) == [cached, first, longer]


def test_a_short_prompt_of_which_nothing_is_cached_waits_its_turn() -> None:
    first, short = request(500), request(BLOCK)
    scheduler = scheduler_of([first, short], [request(500, 128)])
    sends = CachedSends(scheduler)
    sends.add(short, 0)
    sends.limit_running()
    assert list(scheduler.waiting) == [first, short]
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0


@pytest.mark.parametrize(("usual", "limit"), [(0, BUDGET - 1 - 1), (500, BUDGET - 1 - 1), (40, 40)])
def test_prompts_under_way_leave_it_its_tokens_until_it_runs(usual: int, limit: int) -> None:
    answering, prompt, cached = request(40, 40), request(500, 128), request(33)
    scheduler = scheduler_of([cached], [answering, prompt], usual)
    sends = CachedSends(scheduler)
    sends.add(cached, 32)
    sends.limit_running()
    assert scheduler.scheduler_config.long_prefill_token_threshold == limit
    cached.status = RequestStatus.RUNNING
    sends.limit_running()
    assert scheduler.scheduler_config.long_prefill_token_threshold == usual


def test_prompts_under_way_get_on_however_many_there_are() -> None:
    many = [request(32 + BLOCK) for _ in range(20)]
    scheduler = scheduler_of(many, [request(500, 128)])
    sends = CachedSends(scheduler)
    for each in many:
        sends.add(each, 32)
    sends.limit_running()
    assert scheduler.scheduler_config.long_prefill_token_threshold == BUDGET // 2
