"""vLLM's scheduler for an engine that steps when it is its turn, with the requests of that turn alone.

vLLM computes all that runs, takes from what waits while there is room, and mixes prompts with decodes. Here a step has
the requests of one turn (`coordinator.sharing`), in its order, and of one phase. What is ready and not in the turn is
kept where vLLM does not look: what waits for its turn in `_ready`, what runs and is paused, with its KV, out of
`running` while a step is made up. Blocks are those of a pool that all engines of the process share (`kv_pool`). When
they run out, KV of a paused request goes, of this engine or of another, the last in the order first; where none may go,
vLLM takes that of the last in the turn.

With asynchronous scheduling (`AsyncTurnScheduler`) a step may be scheduled while the one before it computes
(`process.TurnEngine`). KV that such a step writes stays until its output is known.

What waits for something else, KV of another box or a grammar, stays in vLLM's queues, and gets its blocks in whatever
step comes, if that leaves the other engines what they are sure of. It is ready when that is here.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast, final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from .kv_pool import PagedBlockPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm.v1.request import Request

    from ..sharing.turns import ServiceTurns


class TurnScheduler(Scheduler):
    """See the module. `turns` is set before the first request comes, and `deadline_of`: when a request is given up, on
    the clock of the process."""

    turns: ServiceTurns
    deadline_of: Callable[[str], float]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._ready: dict[str, Request] = {}  # wait for nothing but their turn
        self._awaiting: dict[str, Request] = {}  # wait for something else, in vLLM's queues
        self._paused: list[Request] = []  # run, and are not in the step that is made up
        self._turn: tuple[str, ...] = ()
        self.scheduled_tokens = 0
        """Of the last step."""
        self._schedules_nothing = False
        self._places, self._tokens = 0, 0  # left in the turn that is chosen
        self._reserved = 0  # blocks, to those that were taken into it
        self._allocate = self.kv_cache_manager.allocate_slots
        cast("Any", self.kv_cache_manager).allocate_slots = self._allocate_or_evict

    @property
    def awaits(self) -> bool:
        """Whether steps of nobody are needed: for what waits for something else, or has ended and is not cleaned up."""
        if not self.requests:
            return bool(self.finished_req_ids)
        return bool(self._awaiting) or self.has_finished_requests()

    # ---- the turn -------------------------------------------------------------------------------------------

    def begin_choice(self) -> None:
        """Look at what was awaited; all of a batch is free."""
        for request in tuple(self._awaiting.values()):
            if self._is_ready(request):
                del self._awaiting[request.request_id]
                self._announce(request)
        self._places = self.max_num_active_reqs - len(self.running)
        self._tokens = self.max_num_scheduled_tokens
        self._reserved = 0

    def take(self, request_id: str) -> bool:
        """See `sharing.process.TurnEngine`."""
        request = self.requests[request_id]
        if self._is_last_in_flight(request):
            return True  # vLLM passes it over
        runs = request.status == RequestStatus.RUNNING
        if self._tokens <= 0 or not (runs or self._places > 0):
            return False
        known = request.num_tokens + request.num_output_placeholders
        tokens = min(self._tokens, known - request.num_computed_tokens)
        # vLLM begins a prompt only where all of it has room.
        missing = self._count_missing(request, request.num_computed_tokens + tokens if runs else request.num_tokens)
        while missing and (lacking := self._reserved + missing - self._pool.get_num_free_blocks()) > 0:
            if not self.turns.make_room(request_id, lacking * self._pool.block_bytes):
                return False
        self._places -= not runs
        self._reserved += missing
        self._tokens -= tokens
        return True

    def has_room_again(self, decodes: int) -> bool:
        """See `sharing.process.TurnEngine`: each takes one block more at most of each kind."""
        if self._awaiting or self.finished_req_ids or len(self.requests) != decodes:
            return False
        return decodes * self.kv_cache_manager.num_kv_cache_groups <= self._pool.get_num_free_blocks()

    def can_lose_kv(self, request_id: str) -> bool:
        """See `sharing.turns.KvHolder`. Where KV is being written, from another box or by a step, it stays."""
        request = self.requests.get(request_id)
        if request is None or (request.status != RequestStatus.RUNNING and request_id not in self._ready):
            return False
        return self._count_held(request) > 0 and not request.num_in_flight_tokens

    def freed_bytes(self, request_ids: Sequence[str], *, for_others: bool) -> int:
        """See `sharing.turns.KvHolder`."""
        losing = filter(self.can_lose_kv, request_ids)
        held = (chain.from_iterable(self.kv_cache_manager.get_block_ids(each)) for each in losing)
        return self._pool.count_freed_bytes(chain.from_iterable(held), for_others=for_others)

    def evict(self, request_id: str) -> None:
        """See `sharing.turns.KvHolder`."""
        request = self.requests[request_id]
        assert not request.num_in_flight_tokens, "a step would write where others have KV"
        if request.status == RequestStatus.RUNNING:
            (self._paused if request in self._paused else self.running).remove(request)
            self._preempt_request(request, time.monotonic())
            return
        # Its KV has come from another box, and it has had no turn yet: for vLLM, it has not begun.
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._update_waiting_for_remote_kv(request)
            request.status = RequestStatus.WAITING
        self.kv_cache_manager.free(request)
        self._inflight_prefills.discard(request)
        request.num_computed_tokens = 0
        self.turns.lose_kv(request_id)

    def set_turn(self, requests: tuple[str, ...]) -> None:
        """Those of the next step, in order."""
        self._turn = requests

    def note_turn(self) -> None:
        """The step is over: say which of its requests have KV, and which decode now."""
        for request_id in self._turn:
            if self.turns.knows_decode(request_id):
                continue
            request = self.requests.get(request_id)
            if request is not None and request.status == RequestStatus.RUNNING:
                self._note_kv(request)

    @contextmanager
    def scheduling_nothing(self) -> Iterator[None]:
        """vLLM's core looks for outputs alone in the body."""
        self._schedules_nothing = True
        try:
            yield
        finally:
            self._schedules_nothing = False

    # ---- vLLM's ---------------------------------------------------------------------------------------------

    def has_requests(self) -> bool:
        """Whether the core is to schedule a step."""
        return not self._schedules_nothing and super().has_requests()

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Make up a step of the turn's requests."""
        if not self._ready and tuple(request.request_id for request in self.running) == self._turn:
            made: Any = super().schedule(throttle_prefills)  # nobody waits or is paused
            self.scheduled_tokens = int(made.total_num_scheduled_tokens)
            return made
        running = {request.request_id: request for request in self.running}
        chosen = [running.pop(name) for name in self._turn if name in running]
        self._paused, self.running = list(running.values()), chosen
        for name in reversed(self._turn):
            if (request := self._ready.pop(name, None)) is not None:
                queue = self.kv_holding_waiting if self._holds_kv_blocks(request) else self.waiting
                queue.prepend_request(request)
        most = self.max_num_active_reqs
        self.max_num_active_reqs = most - len(self._paused)
        try:
            made = super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = most
            self.running += self._paused
            self._paused = []
        self.scheduled_tokens = int(made.total_num_scheduled_tokens)
        for name in self._turn:
            request = self.requests.get(name)  # None: it has ended since it was taken
            if request is not None and request.status != RequestStatus.RUNNING and name not in self._ready:
                self._take_out(request)
                self._ready[name] = request
        return made

    def add_request(self, request: Request) -> None:
        """It waits for its turn, or first for something else."""
        super().add_request(request)
        if self._is_ready(request):
            self._announce(request)
        else:
            self._awaiting[request.request_id] = request

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting, those that wait for their turn included."""
        running, waiting = super().get_request_counts()
        return running, waiting + len(self._ready)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        """They are cancelled."""
        ended: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._ready.pop(request.request_id, None)
            self._awaiting.pop(request.request_id, None)
            self.turns.remove(request.request_id)
        return ended

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._awaiting.pop(request.request_id, None)
        if request.status != RequestStatus.FINISHED_ABORTED:
            self.turns.finish(request.request_id, request.num_output_tokens)
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        # Between two steps, which vLLM does not: it would take the worker to know the tokens still.
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        self._take_out(request)
        self._ready[request.request_id] = request
        self.turns.lose_kv(request.request_id)

    # ---- inside ---------------------------------------------------------------------------------------------

    def _is_last_in_flight(self, request: Request) -> bool:
        """Whether the last token that it may have is being computed."""
        coming = request.num_output_placeholders
        return coming > 0 and request.num_output_tokens + coming >= request.max_tokens

    def _note_kv(self, request: Request) -> None:
        self.turns.hold_kv(request.request_id)
        if request.num_computed_tokens >= request.num_tokens - 1:
            self.turns.begin_decode(request.request_id)

    def _announce(self, request: Request) -> None:
        """One whose KV was in the prefix cache after all has begun without a turn."""
        self.turns.add(request.request_id, request.num_prompt_tokens, self.deadline_of(request.request_id))
        if request.status == RequestStatus.RUNNING:
            self._note_kv(request)
        else:
            self._take_out(request)
            self._ready[request.request_id] = request
            if self._count_held(request):
                self.turns.hold_kv(request.request_id)

    def _is_ready(self, request: Request) -> bool:
        """Whether it waits for nothing but its turn."""
        match request.status:
            case RequestStatus.WAITING_FOR_REMOTE_KVS:
                return request.request_id in self.finished_recving_kv_req_ids
            case RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                asked = request.structured_output_request
                return asked is not None and asked.grammar is not None
        if request.num_computed_tokens or self.connector is None:
            return True
        tokens, _ = self.connector.get_num_new_matched_tokens(request, 0)
        return tokens == 0

    def _take_out(self, request: Request) -> None:
        """Out of vLLM's queues of what waits."""
        self.waiting.remove_requests((request,))
        self.kv_holding_waiting.remove_requests((request,))
        self.deferred_waiting.discard(request)

    def _allocate_or_evict(self, request: Request, *arguments: Any, **settings: Any) -> Any:
        """Blocks for a request of the turn, or for one whose KV comes from another box; those of other requests if
        there are too few. None: none may go."""
        name = request.request_id
        make_room: Callable[[int], bool]
        if name in self._turn:
            make_room = partial(self.turns.make_room, name)
        elif name in self._awaiting and self._pool.leaves_floors(self._count_missing(request, request.num_tokens)):
            make_room = self.turns.make_room_for_kv
        else:
            return None
        while (blocks := self._allocate(request, *arguments, **settings)) is None:
            if not make_room(self._pool.block_bytes):
                return None
        return blocks

    @property
    def _pool(self) -> PagedBlockPool:
        pool = self.kv_cache_manager.block_pool
        assert isinstance(pool, PagedBlockPool)
        return pool

    def _count_missing(self, request: Request, tokens: int) -> int:
        """Blocks that it has not, of those for so many tokens."""
        groups = self.kv_cache_manager.num_kv_cache_groups
        return max(0, groups * -(-tokens // self.block_size) - self._count_held(request))

    def _count_held(self, request: Request) -> int:
        return sum(map(len, self.kv_cache_manager.get_block_ids(request.request_id)))


@final
class AsyncTurnScheduler(TurnScheduler, AsyncScheduler):
    """A step may be scheduled before the output of the one before it is known."""
