"""The connector beside vLLM's scheduler: which blocks are held for how long, and what workers are told to read."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from p2pserve.node.engine.kv.scheduler_side import SchedulerSide
from p2pserve.node.engine.kv.step_work import OpenTransfer, SendWork, YieldBlocks, transfer_params

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
    scheduler.sends_finished({"r", "another"})
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
