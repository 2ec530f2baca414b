"""vLLM's KV connector: layers leave for the decode engine while the next ones are being computed.

vLLM builds two instances in this process, one for its scheduler and one for its worker, and carries a
metadata value from the first to the second with each step. What the instances share beyond that, the open
transfers, lives in a `TransferHub`. Requests are matched to transfers by the transfer id in
`kv_transfer_params`, never by vLLM's request id, which differs between engines.

Every load is reported to vLLM exactly once, whether it arrived, failed or was cancelled. After a failure the
blocks beyond the arrived prefix are reported as invalid and vLLM computes them (policy "recompute").
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.model_executor.models.utils import extract_layer_index

from .hub import TransferHub
from .layout import LayerCache
from .transfers import Geometry, LayerPiece, Outgoing

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

PARAMS_KEY = "p2pserve"


def send_params(transfer: bytes) -> dict[str, Any]:
    """`kv_transfer_params` of a request whose prompt's KV is pushed."""
    return {PARAMS_KEY: {"op": "send", "transfer": transfer}}


def receive_params(transfer: bytes, tokens: int) -> dict[str, Any]:
    """`kv_transfer_params` of a request whose first `tokens` positions of KV are expected."""
    return {PARAMS_KEY: {"op": "receive", "transfer": transfer, "tokens": tokens}}


@dataclass(slots=True)
class _Send:
    transfer: bytes
    tokens: int
    sent: int = 0


@dataclass(slots=True)
class _Receive:
    transfer: bytes
    tokens: int
    asked: bool = False  # blocks were allocated once; after a preemption there is nothing left to wait for


@dataclass(frozen=True, slots=True)
class SendWork:
    """Positions `[first, last)` that this step completes; `final` when the prompt ends with them."""

    transfer: bytes
    block_ids: list[int]
    first: int
    last: int
    final: bool


@dataclass(frozen=True, slots=True)
class LoadWork:
    """Positions `[first, last)` that are to be loaded into a request's blocks."""

    request: str
    transfer: bytes
    block_ids: list[int]
    first: int
    last: int


@dataclass
class StepWork(KVConnectorMetadata):
    """What the scheduler's instance tells the worker's with a step."""

    sends: list[SendWork] = field(default_factory=list)
    loads: list[LoadWork] = field(default_factory=list)
    cancelled: list[bytes] = field(default_factory=list)


class P2PConnector(KVConnectorBase_V1):
    """Push connector over p2pserve's own encrypted streams."""

    # vLLM constructs connectors by name, so the hub can only be found through the class. One engine lives in a
    # process; `run_engine` sets it before any request and nobody changes it after.
    hub: ClassVar[TransferHub | None] = None
    geometry: ClassVar[Geometry | None] = None

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = len(kv_cache_config.kv_cache_groups)
        if groups != 1:
            # This connector does not claim hybrid caches, so vLLM joins sliding windows and full attention in one
            # group; what it cannot join (state-space layers) has no KV that could be handed over.
            raise ValueError(f"this model keeps {groups} kinds of cache; only plain attention can be handed over")
        self._context = vllm_config.compilation_config.static_forward_context
        # Scheduler's side
        self._sends: dict[str, _Send] = {}
        self._receives: dict[str, _Receive] = {}
        self._loads: list[LoadWork] = []
        self._cancelled: list[bytes] = []
        # Worker's side
        self._caches: dict[str, LayerCache] = {}
        self._by_index: dict[int, LayerCache] = {}
        self._order: list[LayerCache] = []  # as they are computed
        self._positions: dict[str, int] = {}
        self._step_began = 0.0
        self._held_up_s = 0.0
        self._active: dict[str, LoadWork] = {}
        self._finished: set[str] = set()
        self._invalid: set[int] = set()

    # ---- scheduler's side -------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """Layers are copied before they are sent, so blocks may be freed at any time."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A fully captured graph would replay without the layer hooks, and no KV would ever leave."""
        return True

    def on_new_request(self, request: Request) -> None:
        """Note what the request's parameters ask for."""
        params = (request.kv_transfer_params or {}).get(PARAMS_KEY)
        if params is None:
            return
        if params["op"] == "send":
            self._sends[request.request_id] = _Send(params["transfer"], request.num_prompt_tokens)
        else:
            tokens = min(params["tokens"], request.num_prompt_tokens)
            self._receives[request.request_id] = _Receive(params["transfer"], tokens)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many positions after the local prefix hit will come from the other engine. Asked repeatedly."""
        receive = self._receives.get(request.request_id)
        if receive is None or receive.asked or receive.tokens <= num_computed_tokens:
            return 0, False
        return receive.tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks exist: the worker may load into them."""
        receive = self._receives.get(request.request_id)
        if receive is None or receive.asked:
            return
        receive.asked = True
        if num_external_tokens == 0:  # all of it was in the local prefix cache
            self._cancelled.append(receive.transfer)
            return
        self._loads.append(
            LoadWork(
                request=request.request_id,
                transfer=receive.transfer,
                block_ids=list(blocks.get_block_ids()[0]),
                first=receive.tokens - num_external_tokens,
                last=receive.tokens,
            )
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepWork:
        """Collect this step's work."""
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sends = []
        state = scheduler_output.kv_connector_block_state
        for request, scheduled in scheduler_output.num_scheduled_tokens.items():
            send = self._sends.get(request)
            if send is None or state is None:
                continue
            last = min(computed[request] + scheduled, send.tokens)
            if last <= send.sent:
                continue
            table = state.get_block_ids(request)
            if table is None:
                continue
            final = last == send.tokens
            sends.append(SendWork(send.transfer, list(table[0]), send.sent, last, final))
            send.sent = last
        work = StepWork(sends=sends, loads=self._loads, cancelled=self._cancelled)
        self._loads, self._cancelled = [], []
        return work

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over, for whatever reason. Nothing needs its blocks any more."""
        send = self._sends.pop(request.request_id, None)
        if send is not None and send.sent < send.tokens:
            self._cancelled.append(send.transfer)
        receive = self._receives.pop(request.request_id, None)
        if receive is not None:
            self._cancelled.append(receive.transfer)
        return False, None

    # ---- worker's side ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn each layer's cache and its layout."""
        for name, cache in kv_caches.items():
            layer = self._context[name]
            self._caches[name] = LayerCache(name, layer, cache, extract_layer_index(name))
        self._by_index = {cache.index: cache for cache in self._caches.values()}
        self._order = sorted(self._caches.values(), key=lambda cache: cache.index)
        self._positions = {cache.name: position for position, cache in enumerate(self._order)}
        first = next(iter(self._caches.values()))
        type(self).geometry = Geometry(
            layers=len(self._caches), heads=first.heads, head_dim=first.head_dim, dtype=first.dtype
        )

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Copy new positions out and queue them, as many layers at once as the transfer's pacing says; encoding and
        sending happen elsewhere."""
        work = self._work()
        if work is None or not work.sends or self.hub is None:
            return
        position = self._positions[layer_name]
        for send in work.sends:
            outgoing = self.hub.outgoing(send.transfer)
            if outgoing is not None:
                due = outgoing.pacing.due(position, len(self._order))
                if due:
                    self._hand_over(
                        outgoing, [self._order[each] for each in due], send.block_ids, send.first, send.last
                    )

    def wait_for_save(self) -> None:
        """Nothing to wait for: the copies are ours. Hand over what is to leave in one piece, say which prompts are
        complete, and note how long the step took."""
        work = self._work()
        if work is None or self.hub is None or not work.sends:
            return
        computed_s = time.monotonic() - self._step_began - self._held_up_s
        codecs: set[str] = set()
        for send in work.sends:
            outgoing = self.hub.outgoing(send.transfer)
            if outgoing is None:
                continue
            codecs.add(outgoing.ticket.codec)
            if send.final:
                if not outgoing.pacing.layerwise:
                    self._hand_over(outgoing, self._order, send.block_ids, 0, send.last)
                outgoing.prefill_done(send.last)
        tokens = sum(send.last - send.first for send in work.sends)
        self.hub.pacer.computed(codecs, tokens, max(0.0, computed_s))

    def _hand_over(
        self, outgoing: Outgoing, layers: list[LayerCache], block_ids: list[int], first: int, last: int
    ) -> None:
        """Queue copies of these layers' positions `[first, last)`."""
        begun = time.monotonic()
        for cache in layers:
            k, v = cache.read(block_ids, first, last)
            copied = None
            if k.is_cuda:
                copied = torch.cuda.Event()
                copied.record()
            outgoing.push(LayerPiece(cache.index, first, k, v, copied))
        held_up_s = time.monotonic() - begun
        self._held_up_s += held_up_s
        assert self.hub is not None
        self.hub.pacer.held_up(outgoing.ticket.codec, held_up_s)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Write what has arrived into the paged cache (between two forward passes)."""
        self._step_began, self._held_up_s = time.monotonic(), 0.0
        work = self._work()
        if work is None or self.hub is None:
            return
        for transfer in work.cancelled:
            self.hub.abort(transfer, "no longer needed")
        for load in work.loads:
            self._active[load.request] = load
        for load in tuple(self._active.values()):
            self._advance(load)
        for transfer in work.cancelled:
            self.hub.close_incoming(transfer)

    def _advance(self, load: LoadWork) -> None:
        assert self.hub is not None
        incoming = self.hub.incoming(load.transfer)
        if incoming is None:
            self._fail(load, 0)
            return
        incoming.start()
        # The outcome first: pieces that arrive between the two calls then belong to the next step.
        outcome = incoming.outcome(time.monotonic())
        for piece in incoming.take():
            first = max(piece.start, load.first)
            last = min(piece.start + piece.k.shape[0], load.last)
            if first < last:
                cache = self._by_index[piece.layer]
                part = slice(first - piece.start, last - piece.start)
                cache.write(cache.slots(load.block_ids, first, last), piece.k[part], piece.v[part])
        if outcome is None:
            return
        if outcome:
            self._fail(load, incoming.arrived_tokens())
        else:
            incoming.applied()
            self._finish(load)

    def _fail(self, load: LoadWork, arrived: int) -> None:
        """Keep whole blocks of the arrived prefix, report the others as invalid."""
        block_size = next(iter(self._caches.values())).block_size
        kept = max(arrived, load.first) // block_size
        self._invalid.update(load.block_ids[kept : -(-load.last // block_size)])
        self._finish(load)

    def _finish(self, load: LoadWork) -> None:
        assert self.hub is not None
        del self._active[load.request]
        self._finished.add(load.request)
        self.hub.close_incoming(load.transfer)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a forward pass never waits for the network."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that ended since the last step."""
        finished, self._finished = self._finished, set()
        return KVConnectorTransferResults(finished_recving=finished)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads that hold nothing useful."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def _work(self) -> StepWork | None:
        if not self.has_connector_metadata():
            return None
        work = self._get_connector_metadata()
        assert isinstance(work, StepWork)
        return work
