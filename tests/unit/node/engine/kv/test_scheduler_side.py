"""The connector beside vLLM's scheduler: which blocks are held for how long, and what workers are told to read."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from p2pserve.node.engine.kv.scheduler_side import SchedulerSide
from p2pserve.node.engine.kv.step_work import (
    LoadedPart,
    LoadProgress,
    LoadWork,
    OpenTransfer,
    SendWork,
    YieldBlocks,
    transfer_params,
)
from p2pserve.node.engine.protocol import AbortTransfer

from .sides import BLOCK, SETTINGS, Clock, receiving, sending


@dataclass
class Request:
    """What of a request of vLLM's is looked at."""

    request_id: str
    kv_transfer_params: dict[str, Any]


def step(computed: dict[str, tuple[int, int]], preempted: set[str] | None = None) -> Any:
    """What vLLM's scheduler has decided: for each request, the positions computed before and in this step."""
    tables = {request: ([7, 8, 9],) for request in computed}
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(computed), num_computed_tokens=[before for before, _ in computed.values()]
        ),
        num_scheduled_tokens={request: now for request, (_, now) in computed.items()},
        total_num_scheduled_tokens=sum(now for _, now in computed.values()),
        preempted_req_ids=preempted or set(),
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scheduler(clock: Clock) -> SchedulerSide:
    return SchedulerSide(BLOCK, clock)


def begin(scheduler: SchedulerSide, name: str, opening: OpenTransfer) -> Any:
    request = Request(name, transfer_params(opening))
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    return request


def test_a_prompts_blocks_are_held_from_its_end_until_no_worker_reads_them(scheduler: SchedulerSide) -> None:
    request = begin(scheduler, "r", sending(b"t" * 16, 40))
    work = scheduler.build_connector_meta(step({"r": (0, 32)}))
    assert work.sends == [SendWork("r", b"t" * 16, [7, 8, 9], 32, 32, final=False)]
    work = scheduler.build_connector_meta(step({"r": (32, 8)}))
    assert work.sends == [SendWork("r", b"t" * 16, [7, 8, 9], 8, 40, final=True)]
    held = [scheduler.has_held_blocks]
    assert scheduler.request_finished(request) is True
    held.append(scheduler.has_held_blocks)
    assert scheduler.build_connector_meta(step({})).cancelled == []
    scheduler.release_sent({"r", "another"})
    assert [*held, scheduler.has_held_blocks] == [False, True, False]


@pytest.mark.parametrize("begun", [False, True])
def test_a_prompt_that_is_called_off_is_held_only_if_workers_may_read_it(scheduler: SchedulerSide, begun: bool) -> None:
    request = begin(scheduler, "r", sending(b"t" * 16, 40))
    if begun:
        scheduler.build_connector_meta(step({"r": (0, 32)}))
    assert scheduler.request_finished(request) is begun
    assert scheduler.build_connector_meta(step({})).cancelled == [b"t" * 16]


def test_a_prompt_that_loses_its_blocks_is_withdrawn_and_read_again_from_its_beginning(
    scheduler: SchedulerSide,
) -> None:
    begin(scheduler, "r", sending(b"t" * 16, 40))
    scheduler.build_connector_meta(step({"r": (0, 32)}))
    work = scheduler.build_connector_meta(step({}, preempted={"r", "another"}))
    assert (work.withdrawn, work.sends) == ([b"t" * 16], [])
    (send,) = scheduler.build_connector_meta(step({"r": (16, 24)})).sends  # 16 were found in the prefix cache
    assert (send.computed, send.last, send.final) == (24, 40, True)


def test_a_step_that_computes_says_so(scheduler: SchedulerSide) -> None:
    assert scheduler.build_connector_meta(step({"other": (5, 1)})).computing
    assert not scheduler.build_connector_meta(step({})).computing


def test_prompts_that_are_held_make_room_one_by_one_when_kv_waits_for_blocks(
    scheduler: SchedulerSide, clock: Clock
) -> None:
    """Else two engines, each full of prompts for the other, would wait until the deadlines."""
    for name in ("a", "b"):
        request = begin(scheduler, name, sending(name.encode() * 16, 16))
        scheduler.build_connector_meta(step({name: (0, 16)}))
        scheduler.request_finished(request)

    def gave_way() -> list[bytes]:
        orders = scheduler.build_connector_meta(step({})).orders
        return [order.transfer for order in orders if isinstance(order, YieldBlocks)]

    clock.now += 1000.0
    assert gave_way() == []  # nobody waits
    waiting = begin(scheduler, "r", receiving(b"r" * 16, 16))
    assert gave_way() == []
    clock.now += SETTINGS.yield_after_s + 0.01
    assert gave_way() == [b"a" * 16]
    assert gave_way() == []
    clock.now += SETTINGS.yield_apart_s
    assert gave_way() == [b"b" * 16]
    clock.now += SETTINGS.yield_apart_s
    assert gave_way() == [b"a" * 16]  # it was on its way to its receiver, and stayed
    blocks: Any = SimpleNamespace(get_block_ids=lambda: ([3],))
    scheduler.update_state_after_alloc(waiting, blocks, 16)
    clock.now += SETTINGS.yield_apart_s
    assert gave_way() == []


# ---- KV that comes from another engine ------------------------------------------------------------------------


def blocks_of(*table: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(table),))


@pytest.mark.parametrize(
    ("computed", "expected"), [(0, (40, True)), (16, (24, True)), (39, (1, True)), (40, (0, False)), (48, (0, False))]
)
def test_only_what_the_prefix_cache_has_not_is_waited_for(
    scheduler: SchedulerSide, computed: int, expected: tuple[int, bool]
) -> None:
    request = begin(scheduler, "r", receiving(b"t" * 16, 40))
    assert scheduler.awaits_kv
    assert scheduler.get_num_new_matched_tokens(request, computed) == expected


def test_a_request_without_a_transfer_waits_for_nothing(scheduler: SchedulerSide) -> None:
    request: Any = Request("r", {})
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, blocks_of(3), 0)
    assert not scheduler.awaits_kv
    work = scheduler.build_connector_meta(step({}))
    assert (work.orders, work.loads, work.present) == ([], [], [])


def test_a_load_begins_when_there_are_blocks_for_it_and_once(scheduler: SchedulerSide) -> None:
    request = begin(scheduler, "r", receiving(b"t" * 16, 40))
    assert scheduler.build_connector_meta(step({})).loads == []
    scheduler.update_state_after_alloc(request, blocks_of(7, 8, 9), 24)
    scheduler.update_state_after_alloc(request, blocks_of(7, 8, 9), 24)  # vLLM says so again
    (load,) = scheduler.build_connector_meta(step({})).loads
    assert load == LoadWork("r", b"t" * 16, [7, 8, 9], 16, 40, all_or_nothing=False)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (
        0,
        False,
    )  # after a preemption it is not asked for again


def test_a_load_that_the_prefix_cache_has_whole_is_declined(scheduler: SchedulerSide) -> None:
    request = begin(scheduler, "r", receiving(b"t" * 16, 40))
    scheduler.update_state_after_alloc(request, blocks_of(7, 8, 9), 0)
    work = scheduler.build_connector_meta(step({}))
    assert (work.loads, work.present) == ([], [b"t" * 16])


@pytest.mark.parametrize(
    ("table", "first", "last"),
    [((0, 8, 9), 16, 40), ((0, 0, 9), 32, 40), ((0, 0, 0), 39, 40), ((7, 0, 9), 0, 40)],
    ids=["one block", "two blocks", "all blocks", "none at the front"],
)
def test_what_a_sliding_window_has_left_behind_is_not_loaded(
    scheduler: SchedulerSide, table: tuple[int, ...], first: int, last: int
) -> None:
    request = begin(scheduler, "r", receiving(b"t" * 16, 40))
    scheduler.update_state_after_alloc(request, blocks_of(*table), 40)
    (load,) = scheduler.build_connector_meta(step({})).loads
    assert (load.first, load.last, load.all_or_nothing) == (first, last, table[0] == 0)


def waiting_for_first(scheduler: SchedulerSide) -> Any:
    """A request whose KV and first token both come from another engine."""
    opening = receiving(b"t" * 16, 40)
    opening = OpenTransfer(transfer=opening.transfer, tokens=40, receive=opening.receive, awaits_first_token=True)
    request = begin(scheduler, "r", opening)
    scheduler.update_state_after_alloc(request, blocks_of(7, 8, 9), 40)
    scheduler.build_connector_meta(step({}))
    return request


def test_vllm_hears_of_kv_once_the_first_token_has_been_told(scheduler: SchedulerSide) -> None:
    waiting_for_first(scheduler)
    assert scheduler.update_progress(None, {"r"}, set(), set()) == set()
    assert scheduler.stop_waiting_for_token(b"x" * 16) is None
    assert scheduler.stop_waiting_for_token(b"t" * 16) == "r"
    assert scheduler.stop_waiting_for_token(b"t" * 16) is None  # it has been told


def test_a_first_token_that_comes_before_the_kv_does_not_end_the_wait_for_it(scheduler: SchedulerSide) -> None:
    waiting_for_first(scheduler)
    assert scheduler.stop_waiting_for_token(b"t" * 16) is None
    assert scheduler.update_progress(None, {"r"}, set(), set()) == {"r"}


@pytest.mark.parametrize(("failed", "invalid"), [({"r"}, set()), (set(), {9, 99})])
def test_a_load_that_fails_waits_for_no_first_token(
    scheduler: SchedulerSide, failed: set[str], invalid: set[int]
) -> None:
    waiting_for_first(scheduler)
    assert scheduler.update_progress(None, set(), failed, invalid) == set()
    assert scheduler.update_progress(None, {"r"}, set(), set()) == {"r"}


@pytest.mark.parametrize(("failed", "invalid"), [({"other"}, set()), (set(), {99})])
def test_a_load_of_another_request_that_fails_changes_nothing(
    scheduler: SchedulerSide, failed: set[str], invalid: set[int]
) -> None:
    waiting_for_first(scheduler)
    assert scheduler.update_progress(None, {"other"}, failed, invalid) == {"other"}
    assert scheduler.update_progress(None, {"r"}, set(), set()) == set()


def test_kv_that_is_too_late_is_given_up_at_the_next_look(scheduler: SchedulerSide, clock: Clock) -> None:
    waiting_for_first(scheduler)
    clock.now += SETTINGS.look_s
    work = scheduler.build_connector_meta(step({}))
    assert work.report_progress
    assert work.orders == []
    clock.now += SETTINGS.look_s / 2
    assert not scheduler.build_connector_meta(step({})).report_progress
    limits = SETTINGS.wait_limits
    clock.now += limits.first_gain * limits.unmeasured_s + limits.first_margin_s
    (order,) = scheduler.build_connector_meta(step({})).orders
    assert isinstance(order, AbortTransfer)
    assert (order.transfer, "no KV came" in order.reason) == (b"t" * 16, True)
    clock.now += 1000.0
    work = scheduler.build_connector_meta(step({}))
    assert (work.orders, work.report_progress) == ([], False)  # nothing is waited for any more


def test_kv_is_slow_only_once_its_prompt_is_computed(scheduler: SchedulerSide, clock: Clock) -> None:
    """A hundredth of it comes each second: the prefill engine's steps may be as slow as that."""

    def wait(part: float) -> list[object]:
        clock.now += 1.0
        scheduler.update_progress(LoadProgress({"r": LoadedPart(part, 0)}), set(), set(), set())
        return list(scheduler.build_connector_meta(step({})).orders)

    waiting_for_first(scheduler)
    assert [wait(part / 100) for part in range(1, 10)] == [[]] * 9
    scheduler.stop_waiting_for_token(b"t" * 16)
    assert wait(0.1) == []
    (order,) = wait(0.11)
    assert isinstance(order, AbortTransfer)
    assert "would take" in order.reason


def test_what_comes_counts_against_the_wait(scheduler: SchedulerSide, clock: Clock) -> None:
    waiting_for_first(scheduler)
    limits = SETTINGS.wait_limits
    late_s = limits.first_gain * limits.unmeasured_s + limits.first_margin_s
    clock.now += late_s
    scheduler.update_progress(LoadProgress({"r": LoadedPart(0.9, 30)}), set(), set(), set())
    clock.now += SETTINGS.look_s
    assert scheduler.build_connector_meta(step({})).orders == []


def test_a_request_that_ends_is_waited_for_no_longer(scheduler: SchedulerSide, clock: Clock) -> None:
    request = waiting_for_first(scheduler)
    assert scheduler.request_finished(request) is False
    assert not scheduler.awaits_kv
    assert scheduler.build_connector_meta(step({})).cancelled == [b"t" * 16]
    clock.now += 1000.0
    assert scheduler.build_connector_meta(step({})).orders == []


def test_orders_of_the_agent_travel_with_the_next_step(scheduler: SchedulerSide) -> None:
    order = AbortTransfer(transfer=b"t" * 16, reason="nobody wants it")
    scheduler.queue_order(order)
    assert scheduler.build_connector_meta(step({})).orders == [order]
    assert scheduler.build_connector_meta(step({})).orders == []
