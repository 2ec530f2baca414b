"""The connector's instance beside a model, or a part of one: has transfers read its paged cache, and writes into it."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

from vllm.model_executor.models.utils import extract_layer_index

from ....kernels.codec import load_built, warm_up
from ....kvtransport.errors import TransferError
from ..protocol import WorkerRank
from ..settings import TRANSFER_DEFAULTS, TransferSettings
from ..transfers.incoming import LayerKv
from ..transfers.outgoing import Prefilled, PromptSender, ReadKv
from ..transfers.pacing import Pacing
from ..vllm.device import CpuDevice, Device, DeviceKind, Mark, device_of
from ..vllm.layout import CacheForm, LayerCache, LayoutError, Shard
from .step_work import LoadedPart, LoadProgress, LoadWork, OpenTransfer, SendWork, StepWork, YieldBlocks
from .switchboard import WorkerLine

if TYPE_CHECKING:
    import torch

    from ..transfers.hub import TransferHub

_log = logging.getLogger(__name__)

ConnectLine = Callable[[Shard, Device, ReadKv], WorkerLine]


def warm_up_codec(codec: str, device: Device, shard: Shard) -> None:
    """Compile what transfers in this codec run on a GPU, and make its copy streams: some seconds, which would else be
    the first request's. Before vLLM captures graphs, which no other thread may disturb."""
    from triton.errors import TritonError  # heavy, and of no use without a GPU

    try:
        with device.copy_stream() as stream:
            warm_up(codec, heads=len(shard.heads), head_dim=shard.head_dim, dtype=shard.dtype, device=stream.device)
    except TritonError as error:  # a transfer will say the same, and its prompt be computed where it goes
        _log.warning("%s does not work on this GPU for heads of %d: %s", codec, shard.head_dim, error)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A step that has read `tokens` of prompts whose KV leaves like this."""

    pacings: list[Pacing]
    tokens: int
    began: Mark
    ended: Mark
    held_up_s: float


@final
class WorkerSide:
    """Called by vLLM's worker, on the one thread that runs the model. `heads` are the KV heads that it holds, as
    numbered in the model; `form` is that of their caches; `connect` makes the line to the agent once they are there;
    `codec` is the one that transfers are expected to use."""

    def __init__(
        self,
        rank: WorkerRank,
        heads: range,
        form: CacheForm,
        connect: ConnectLine,
        *,
        codec: str,
        clock: Callable[[], float] = time.monotonic,
        make_device: Callable[[DeviceKind], Device] = device_of,
        settings: TransferSettings = TRANSFER_DEFAULTS,
    ) -> None:
        self._settings = settings
        self._codec = codec
        self._rank = rank
        self._heads = heads
        self._form = form
        self._connect = connect
        self._clock = clock
        self._make_device = make_device
        self._line: WorkerLine | None = None
        self._device: Device = CpuDevice()
        self._claimed_links: set[bytes] = set()
        self._caches: list[LayerCache] = []  # as they are computed
        self._positions: dict[str, int] = {}
        self._step_began: Mark | None = None
        self._held_up_s = 0.0
        self._prefills: deque[_Prefill] = deque()  # whose times are not known yet
        self._rest: list[tuple[SendWork, Mark]] = []  # prompts that leave all at once, when their tokens have
        self._sends: dict[str, bytes] = {}  # request -> transfer, while the request is not over
        self._held: dict[str, bytes] = {}  # the same, of requests that are over and hold their blocks
        self._active: dict[str, LoadWork] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._invalid: set[int] = set()
        self._progress: LoadProgress | None = None

    def __repr__(self) -> str:
        return f"<WorkerSide {self._rank} held={len(self._held)} loads={len(self._active)} {self._line}>"

    @property
    def hub(self) -> TransferHub:
        """This worker's transfers."""
        assert self._line is not None, "register_kv_caches comes first"
        return self._line.hub

    def register(self, layers: dict[str, Any], caches: dict[str, torch.Tensor]) -> None:
        """Learn each layer's cache and its layout, and connect to the agent. Raises LayoutError."""
        named = [
            LayerCache(name, layers[name], cache, extract_layer_index(name), self._form)
            for name, cache in caches.items()
        ]
        self._caches = sorted(named, key=lambda cache: cache.index)
        self._positions = {cache.name: position for position, cache in enumerate(self._caches)}
        first = self._caches[0]
        numbers = range(first.index, first.index + len(self._caches))
        if [cache.index for cache in self._caches] != list(numbers):
            raise LayoutError(f"layers {[cache.index for cache in self._caches]} have KV, and those between have none")
        for cache in self._caches:
            if (cache.heads, cache.head_dim, cache.dtype) != (len(self._heads), first.head_dim, first.dtype):
                raise LayoutError(
                    f"layer {cache.name} has {cache.heads} KV heads of {cache.head_dim} {cache.dtype} values here; "
                    f"expected are {len(self._heads)} of {first.head_dim} {first.dtype} in every layer"
                )
        self._device = self._make_device("cuda" if next(iter(caches.values())).is_cuda else "cpu")
        shard = Shard(layers=numbers, heads=self._heads, head_dim=first.head_dim, dtype=first.dtype)
        if self._device.kind == "cuda":
            sys.setswitchinterval(self._settings.thread_switch_s)
            warm_up_codec(self._codec, self._device, shard)
        else:
            load_built(self._codec)
        self._line = self._connect(shard, self._device, self.read_kv)

    def read_kv(self, layer: int, block_ids: list[int], first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """By any thread: a copy of a layer's K and V."""
        return self._cache_of(layer).read(block_ids, first, last)

    def _cache_of(self, layer: int) -> LayerCache:
        return self._caches[layer - self._caches[0].index]

    def begin(self, work: StepWork) -> None:
        """A step begins: nothing of it has been computed yet."""
        self._step_began, self._held_up_s = self._device.mark() if work.sends else None, 0.0
        for send in work.sends:
            self._sends[send.request] = send.transfer
        for order in work.orders:
            match order:
                case OpenTransfer():
                    self._open(order)
                case YieldBlocks(transfer=transfer):
                    self.hub.abort_unless_granted(transfer)
                case _:
                    self.hub.carry_out(order)

    def _open(self, opening: OpenTransfer) -> None:
        for outlet in opening.send:
            if outlet.rank == self._rank:
                self.hub.send(outlet, opening.tokens)
        inlets = [inlet for inlet in opening.receive if inlet.rank == self._rank]
        if not inlets:
            return
        links = {inlet.link.link for inlet in inlets}
        try:
            self.hub.expect(inlets, opening.tokens)
        except TransferError as error:  # its load will find nothing, and the prompt is computed
            _log.warning("transfer %s cannot be received: %s", opening.transfer.hex(), error)
        if not links <= self._claimed_links:
            self._claimed_links |= links
            assert self._line is not None
            self._line.claim_links(tuple(links))

    # ---- sending --------------------------------------------------------------------------------------------

    def withdraw(self, work: StepWork) -> None:
        """Prompts that have lost their blocks: when this returns, nobody reads those any more."""
        for transfer in work.withdrawn:
            self._rest = [(send, mark) for send, mark in self._rest if send.transfer != transfer]
            for outgoing in self.hub.outgoing(transfer):
                outgoing.withdraw()

    def stop_reading(self, request: str | None = None) -> None:
        """Of this request, or of all: when this returns, nobody reads the blocks of those that are sent any more."""
        everything = self._sends | self._held
        sent = [everything.get(request)] if request is not None else [*everything.values()]
        self.withdraw(StepWork(withdrawn=[transfer for transfer in sent if transfer is not None]))

    def save_layer(self, work: StepWork, name: str) -> None:
        """A layer has been computed: announce what is due. Reading and sending happen elsewhere."""
        position = self._positions[name]
        mark: Mark | None = None
        for send in work.sends:
            for outgoing in self.hub.outgoing(send.transfer):
                due = outgoing.pacing.layers_due(position, len(self._caches))
                if due:
                    mark = self._device.mark() if mark is None else mark
                    self._announce(outgoing, due, send, mark)

    def end(self, work: StepWork) -> None:
        """All of the step has been computed, or is queued on the device. Announce what no hook has (graphs that are
        captured as a whole have none), say which prompts are complete, remember which leave all at once, and how long
        the step took."""
        self._report_prefills()
        if not work.sends:
            return
        mark = self._device.mark()
        pacings: list[Pacing] = []
        for send in work.sends:
            ends = self.hub.outgoing(send.transfer)
            pacings += [outgoing.pacing for outgoing in ends]
            layerwise = [outgoing for outgoing in ends if outgoing.pacing.layerwise]
            self._announce_all(send, layerwise, mark)
            if send.final and len(layerwise) < len(ends):
                self._rest.append((send, mark))
        assert self._step_began is not None
        tokens = sum(send.computed for send in work.sends)
        self._prefills.append(_Prefill(pacings, tokens, self._step_began, mark, self._held_up_s))

    def announce_rest(self) -> None:
        """What leaves all at once, after the step's tokens, for which the client waits."""
        rest, self._rest = self._rest, []
        for send, mark in rest:
            ends = self.hub.outgoing(send.transfer)
            self._announce_all(send, [outgoing for outgoing in ends if not outgoing.pacing.layerwise], mark)

    def _announce_all(self, send: SendWork, ends: list[PromptSender], mark: Mark) -> None:
        for outgoing in ends:
            self._announce(outgoing, range(len(self._caches)), send, mark)
            if send.final:
                outgoing.prefill_done(send.last, mark)

    def _announce(self, outgoing: PromptSender, positions: range, send: SendWork, mark: Mark) -> None:
        """Let a transfer read the layers at these positions, and note for how long that keeps the model."""
        begun = self._clock()
        fresh = outgoing.announce_layers(self._layers(positions), Prefilled(send.block_ids, send.last, mark))
        held_up_s = self._clock() - begun
        self._held_up_s += held_up_s
        if fresh:
            self.hub.pacer.on_hold_up(outgoing.pacing.codec, send.computed, fresh, held_up_s)

    def _layers(self, positions: range) -> range:
        first = self._caches[0].index
        return range(first + positions.start, first + positions.stop)

    def _report_prefills(self) -> None:
        """Tell the pacer of steps that the device is done with."""
        while self._prefills and self._prefills[0].ended.reached:
            step = self._prefills.popleft()
            seconds = max(0.0, step.ended.seconds_since(step.began) - step.held_up_s)
            self.hub.pacer.on_prefill(step.pacings, step.tokens, seconds)

    def take_sent(self, finished: set[str]) -> set[str]:
        """Requests whose blocks are free now, each once. `finished`: over since the last step."""
        for request in finished:
            transfer = self._sends.pop(request, None)
            if transfer is not None:
                self._held[request] = transfer
        sent = {request for request, transfer in self._held.items() if not self.hub.outgoing(transfer)}
        for request in sent:
            del self._held[request]
        return sent

    # ---- loading --------------------------------------------------------------------------------------------

    def load(self, work: StepWork) -> None:
        """Write what has arrived into the paged cache, between two forward passes, for a short while."""
        for transfer in work.present:
            self.hub.decline(transfer)
        for transfer in work.cancelled:
            self.hub.abort(transfer, "no longer needed")
        for load in work.loads:
            self._active[load.request] = load
        until = self._clock() + (self._settings.write_s if work.computing else self._settings.idle_write_s)
        for load in tuple(self._active.values()):
            self._advance(load, until)
        for transfer in work.cancelled:
            self.hub.close_incoming(transfer)
        if work.report_progress:
            self._progress = LoadProgress(
                {
                    load.request: LoadedPart(*incoming.progress())
                    for load in self._active.values()
                    if (incoming := self.hub.incoming(load.transfer)) is not None
                }
            )

    def _advance(self, load: LoadWork, until: float) -> None:
        incoming = self.hub.incoming(load.transfer)
        if incoming is None:
            self._fail(load, load.first)
            return
        self.hub.start(incoming, load.first, partial(self._find_slots, load.block_ids))
        # The outcome first: pieces that arrive between the two calls then belong to the next step.
        outcome = incoming.outcome(self._clock())
        while (piece := incoming.take()) is not None:
            self._write(piece)
            if self._clock() >= until:
                break
        if incoming.waiting_pieces:
            self._tell_news()  # the rest in the next step, which is not to wait for anything
        elif outcome:
            self._fail(load, load.first + incoming.progress()[1])
        elif outcome is not None:
            incoming.confirm_applied()
            self._finish(load)

    def _find_slots(self, block_ids: list[int], first: int, last: int) -> torch.Tensor:
        """By any thread."""
        return self._caches[0].slots(block_ids, first, last)

    def _write(self, piece: LayerKv) -> None:
        cache = self._cache_of(piece.layer)
        self._device.adopt(piece.k, piece.v, piece.slots)
        k, v = piece.k, piece.v
        if k.shape[1] < cache.heads:
            # Several senders share a layer's heads, but a cache can only be written with all of them.
            part = slice(piece.head, piece.head + k.shape[1])
            k_all, v_all = cache.read_slots(piece.slots)
            k_all[:, part], v_all[:, part] = k, v
            k, v = k_all, v_all
        cache.write(piece.slots, k, v)

    def _fail(self, load: LoadWork, arrived: int) -> None:
        """Keep whole blocks of the positions up to `arrived`, report the others as invalid."""
        if load.all_or_nothing:
            self._failed.add(load.request)
        else:
            block_size = self._caches[0].block_size
            self._invalid.update(load.block_ids[arrived // block_size : -(-load.last // block_size)])
        self._finish(load)

    def _finish(self, load: LoadWork) -> None:
        del self._active[load.request]
        self._finished.add(load.request)
        self.hub.close_incoming(load.transfer)
        self._tell_news()  # the scheduler hears of it after this step, and may then begin with the request

    def _tell_news(self) -> None:
        assert self._line is not None
        self._line.tell_news()

    # ---- what vLLM asks for after a step --------------------------------------------------------------------

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, each once, and those of which nothing can be kept."""
        finished, failed = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return finished, failed

    def take_invalid(self) -> set[int]:
        """Blocks of failed loads that hold nothing useful."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_progress(self) -> LoadProgress | None:
        """How far the other loads are, if that was asked for."""
        progress, self._progress = self._progress, None
        return progress

    def close(self) -> None:
        """The worker ends."""
        if self._line is not None:
            self._line.close()
