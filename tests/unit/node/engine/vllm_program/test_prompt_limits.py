"""Prompts under way leave room in vLLM's steps: to answers, to those that go on here, to prompts that are cached."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

from p2pserve.node.engine.kv.step_work import OpenTransfer, transfer_params
from p2pserve.node.engine.vllm_program.prompt_limits import PromptLimits

BLOCK, BUDGET = 16, 100


def request(tokens: int, computed: int = 0, status: RequestStatus | None = None, name: str = "r") -> Any:
    usual = RequestStatus.RUNNING if computed else RequestStatus.WAITING
    return SimpleNamespace(
        request_id=name, num_tokens=tokens, num_prompt_tokens=tokens, num_computed_tokens=computed,
        status=status or usual, kv_transfer_params=None, num_preemptions=0,
    )  # fmt: skip


def scheduler_of(
    waiting: Sequence[Any], running: Sequence[Any] = (), usual: int = 0, holding: Sequence[Any] = ()
) -> Any:
    """What of vLLM's is looked at."""
    queues = FCFSRequestQueue(), FCFSRequestQueue()
    for queue, requests in zip(queues, (waiting, holding), strict=True):
        for each in requests:
            queue.add_request(each)
    return SimpleNamespace(
        block_size=BLOCK,
        max_num_scheduled_tokens=BUDGET,
        running=list(running),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=usual),
        waiting=queues[0],
        kv_holding_waiting=queues[1],
        finished_recving_kv_req_ids=set(),
    )


def limit_of(scheduler: Any) -> int:
    """Tokens of a prompt in the next step; 0: as many as there are."""
    PromptLimits(scheduler).limit_running()
    return int(scheduler.scheduler_config.long_prefill_token_threshold)


def test_one_that_is_cached_but_for_a_block_goes_to_the_front() -> None:
    first, cached, longer = request(500), request(33), request(49)
    scheduler = scheduler_of([first, cached, longer])
    limits = PromptLimits(scheduler)
    limits.add_send(cached, 32)
    limits.add_send(longer, 32)
    assert list(scheduler.waiting) == [cached, first, longer]


def test_a_short_prompt_of_which_nothing_is_cached_waits_its_turn() -> None:
    first, short = request(500), request(BLOCK)
    scheduler = scheduler_of([first, short], [request(500, 128)])
    limits = PromptLimits(scheduler)
    limits.add_send(short, 0)
    limits.limit_running()
    assert list(scheduler.waiting) == [first, short]
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0


@pytest.mark.parametrize(("usual", "limit"), [(0, BUDGET - 1 - 1), (500, BUDGET - 1 - 1), (40, 40)])
def test_prompts_under_way_leave_it_its_tokens_until_it_runs(usual: int, limit: int) -> None:
    answering, prompt, cached = request(40, 40), request(500, 128), request(33)
    scheduler = scheduler_of([cached], [answering, prompt], usual)
    limits = PromptLimits(scheduler)
    limits.add_send(cached, 32)
    limits.limit_running()
    assert scheduler.scheduler_config.long_prefill_token_threshold == limit
    cached.status = RequestStatus.RUNNING
    scheduler.running = [prompt]
    limits.limit_running()
    assert scheduler.scheduler_config.long_prefill_token_threshold == usual


def test_prompts_under_way_get_on_however_many_there_are() -> None:
    many = [request(32 + BLOCK) for _ in range(20)]
    scheduler = scheduler_of(many, [request(500, 128)])
    limits = PromptLimits(scheduler)
    for each in many:
        limits.add_send(each, 32)
    limits.limit_running()
    assert scheduler.scheduler_config.long_prefill_token_threshold == BUDGET // 2


def test_a_prompt_under_way_leaves_the_answers_behind_it_their_tokens() -> None:
    answering = [request(40, 40 + more) for more in range(3)]
    assert limit_of(scheduler_of([], [request(500, 128), *answering])) == BUDGET - 3
    assert limit_of(scheduler_of([request(500)], [request(500, 128)])) == 0, "it is first come, first served"


def test_it_leaves_a_token_to_each_answer_whose_kv_has_come() -> None:
    come, promoted = (
        request(40, 40, RequestStatus.WAITING_FOR_REMOTE_KVS, "come"),
        request(40, 39, RequestStatus.WAITING),
    )
    coming = request(40, 40, RequestStatus.WAITING_FOR_REMOTE_KVS, "coming")
    in_part = request(40, 40 - BLOCK - 1, RequestStatus.WAITING)
    scheduler = scheduler_of([], [request(500, 128)], holding=[coming, come, promoted, in_part])
    scheduler.finished_recving_kv_req_ids.add("come")
    assert limit_of(scheduler) == BUDGET - 2


def test_it_leaves_one_for_vllm_to_look_at_a_request_that_is_given_kv() -> None:
    far, lost = request(40), request(40)
    for each in (far, lost):
        each.kv_transfer_params = transfer_params(OpenTransfer(transfer=b"t", tokens=40))
    lost.num_preemptions = 1
    assert limit_of(scheduler_of([far, request(30)], [request(500, 128)])) == BUDGET - 1
    assert limit_of(scheduler_of([lost], [request(500, 128)])) == 0
    assert limit_of(scheduler_of([request(30), far], [request(500, 128)])) == 0, "another one is before it"


def test_two_prompts_under_way_leave_room_together() -> None:
    assert limit_of(scheduler_of([], [request(500, 128), request(400, 9), request(40, 40)])) == (BUDGET - 1) // 2
