"""The connector's instance beside vLLM's scheduler: which positions of which requests leave or come with each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from ....coordinator.profile import StepSample
from ..protocol import AbortTransfer, CloseLink, SetLinkPaths
from ..settings import TRANSFER_DEFAULTS, TransferSettings
from ..stats import count_computed
from ..transfers.wait_limits import WaitLimits
from .first_token import go_on_from
from .step_work import PARAMS_KEY, LoadProgress, LoadWork, OpenTransfer, SendWork, StepWork, YieldBlocks

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

NULL_BLOCK = 0  # stands where a sliding window has left a block behind


@dataclass(slots=True)
class _Send:
    transfer: bytes
    tokens: int
    announced: int = 0  # positions that the workers may read
    is_known: bool = False  # they have been told of the request, and will say when they read it no more


@dataclass(slots=True)
class _Receive:
    request: Request
    transfer: bytes
    tokens: int
    since: float  # when the request came
    awaits_first_token: bool  # until it has come, vLLM is not told that all KV is there
    has_had_blocks: bool = False  # after a preemption there is nothing left to wait for
    blocks: set[int] = field(default_factory=set)
    is_complete: bool = False  # all KV is, and vLLM has not been told


@final
class SchedulerSide:
    """Called by vLLM's scheduler, between two steps. `block_size`: positions in one block of the paged cache."""

    def __init__(
        self, block_size: int, clock: Callable[[], float], settings: TransferSettings = TRANSFER_DEFAULTS
    ) -> None:
        self._settings = settings
        self._block_size = block_size
        self._clock = clock
        self._sends: dict[str, _Send] = {}
        self._receives: dict[str, _Receive] = {}
        self._held: dict[str, bytes] = {}  # requests that are over and hold their blocks, with their transfers
        self._yielded_at = 0.0
        self._next = StepWork()
        self._wait_limits = WaitLimits(settings.wait_limits)
        self._checked_at = -settings.look_s

    def __repr__(self) -> str:
        requests = f"sends={len(self._sends)} held={len(self._held)} receives={len(self._receives)}"
        return f"<SchedulerSide {requests} {self._wait_limits}>"

    # ---- for the engine's loop --------------------------------------------------------------------------

    def queue_order(self, order: SetLinkPaths | CloseLink | AbortTransfer) -> None:
        """Something the agent wants of the workers, in order with the requests it has submitted."""
        self._next.orders.append(order)

    def set_first_token(self, transfer: bytes, token: int) -> bool:
        """The request that waits for this transfer goes on from this token. False when it does not wait any more."""
        receive = self._receiving(transfer)
        return receive is not None and go_on_from(receive.request, token)

    def stop_waiting_for_token(self, transfer: bytes) -> str | None:
        """The first token has come, or will not: vLLM's id of the request if all its KV is here."""
        receive = self._receiving(transfer)
        if receive is None:
            return None
        receive.awaits_first_token = False
        self._wait_limits.on_computed(receive.request.request_id)
        here, receive.is_complete = receive.is_complete, False
        return receive.request.request_id if here else None

    def on_step(self, step: StepSample) -> None:
        """A step has ended."""
        self._wait_limits.on_prefill(step.prefill_tokens, step.seconds)

    # ---- for vLLM's scheduler ---------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Have the ends of its transfer opened, before the request gets blocks."""
        opening: OpenTransfer | None = (request.kv_transfer_params or {}).get(PARAMS_KEY)
        if opening is None:
            return
        if opening.send:
            self._sends[request.request_id] = _Send(opening.transfer, opening.tokens)
        else:
            self._receives[request.request_id] = _Receive(
                request, opening.transfer, opening.tokens, self._clock(), opening.awaits_first_token
            )
        self._next.orders.append(opening)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many positions after the local prefix hit will come from the other engine. Asked repeatedly."""
        receive = self._receives.get(request.request_id)
        if receive is None or receive.has_had_blocks or receive.tokens <= num_computed_tokens:
            return 0, False
        return receive.tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks exist: the workers may load into them."""
        receive = self._receives.get(request.request_id)
        if receive is None or receive.has_had_blocks:
            return
        receive.has_had_blocks = True
        if num_external_tokens == 0:  # all of it was in the local prefix cache
            self._next.present.append(receive.transfer)
            return
        block_ids = list(blocks.get_block_ids()[0])
        receive.blocks = set(block_ids)
        behind = next((i for i, block in enumerate(block_ids) if block != NULL_BLOCK), len(block_ids))
        first = max(receive.tokens - num_external_tokens, min(behind * self._block_size, receive.tokens - 1))
        self._next.loads.append(
            LoadWork(
                request=request.request_id,
                transfer=receive.transfer,
                block_ids=block_ids,
                first=first,
                last=receive.tokens,
                all_or_nothing=behind > 0,
            )
        )
        is_computed = not receive.awaits_first_token
        self._wait_limits.begin(request.request_id, first, receive.tokens, self._clock(), is_computed=is_computed)

    @property
    def awaits_kv(self) -> bool:
        """Whether requests are to be given KV by other engines."""
        return bool(self._receives)

    @property
    def has_held_blocks(self) -> bool:
        """Whether requests are over whose KV has not been delivered: steps must go on, so that their end is heard."""
        return bool(self._held)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepWork:
        """Collect this step's work."""
        work, self._next = self._next, StepWork()
        work.computing = scheduler_output.total_num_scheduled_tokens > 0
        self._check_wait_limits(work)
        self._yield_blocks(work)
        if self._sends:
            self._withdraw_sends(work, scheduler_output.preempted_req_ids or ())
            self._add_sends(work, scheduler_output)
        return work

    def _receiving(self, transfer: bytes) -> _Receive | None:
        return next((receive for receive in self._receives.values() if receive.transfer == transfer), None)

    def _withdraw_sends(self, work: StepWork, preempted: Iterable[str]) -> None:
        """Requests that have lost their blocks will compute their prompts again, in others."""
        for request in preempted:
            send = self._sends.get(request)
            if send is not None and send.is_known:
                send.announced = 0
                work.withdrawn.append(send.transfer)

    def _add_sends(self, work: StepWork, scheduler_output: SchedulerOutput) -> None:
        computed = count_computed(scheduler_output)
        state = scheduler_output.kv_connector_block_state
        for request, scheduled in scheduler_output.num_scheduled_tokens.items():
            send = self._sends.get(request)
            if send is None or state is None:
                continue
            last = min(computed[request] + scheduled, send.tokens)
            table = state.get_block_ids(request)
            if last <= send.announced or table is None:
                continue
            final = last == send.tokens
            work.sends.append(SendWork(request, send.transfer, list(table[0]), scheduled, last, final=final))
            send.announced, send.is_known = last, True

    def _check_wait_limits(self, work: StepWork) -> None:
        """Now and then: ask how much has come, and give up what comes too late."""
        now = self._clock()
        if not self._wait_limits.waiting or now < self._checked_at + self._settings.look_s:
            return
        self._checked_at = now
        work.report_progress = True
        for request, reason in self._wait_limits.give_up(now).items():
            work.orders.append(AbortTransfer(transfer=self._receives[request].transfer, reason=reason))

    def _yield_blocks(self, work: StepWork) -> None:
        """Two engines whose prompts each wait for a place at the other would wait until their deadlines: the oldest of
        those that hold blocks here makes room, a second apart."""
        now = self._clock()
        if not self._held or now < self._yielded_at + self._settings.yield_apart_s:
            return
        if any(
            not receive.has_had_blocks and now > receive.since + self._settings.yield_after_s
            for receive in self._receives.values()
        ):
            self._yielded_at = now
            request = next(iter(self._held))
            self._held[request] = self._held.pop(request)  # another one next time: this may be under way
            work.orders.append(YieldBlocks(transfer=self._held[request]))

    def update_progress(
        self, progress: LoadProgress | None, finished: set[str], failed: set[str], invalid: set[int]
    ) -> set[str]:
        """What the workers have said after a step: which loads have ended, which of them have failed, and blocks that
        hold nothing useful. Returns the loads whose end vLLM may hear of now; the others wait for their first token."""
        for request, each in self._receives.items() if failed or invalid else ():
            if request in failed or not invalid.isdisjoint(each.blocks):
                each.awaits_first_token = False  # computing what is missing does not wait for anybody
        now = self._clock()
        for request, arrived in ({} if progress is None else progress.arrived).items():
            self._wait_limits.on_arrival(request, arrived.part, arrived.tokens, now)
        told = set()
        for request in finished:
            self._wait_limits.end(request)
            receive = self._receives.get(request)
            if receive is not None and receive.awaits_first_token:
                receive.is_complete = True
            else:
                told.add(request)
        return told

    def release_sent(self, requests: Iterable[str]) -> None:
        """No worker reads the blocks of these requests any more."""
        for request in requests:
            self._held.pop(request, None)

    def request_finished(self, request: Request) -> bool:
        """The request is over. Returns whether its blocks are held until `release_sent`."""
        send = self._sends.pop(request.request_id, None)
        if send is not None and send.announced < send.tokens:
            self._next.cancelled.append(send.transfer)
        if send is not None and send.is_known:
            self._held[request.request_id] = send.transfer
        receive = self._receives.pop(request.request_id, None)
        if receive is not None:
            self._next.cancelled.append(receive.transfer)
            self._wait_limits.end(request.request_id)
        return request.request_id in self._held
