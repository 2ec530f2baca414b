"""The connector's instance beside a model, or a part of one: copies KV out of its paged cache and writes KV into it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from vllm.model_executor.models.utils import extract_layer_index

from ....kvtransport.errors import TransferError
from ..device import Device, device_of
from ..incoming import LayerPiece
from ..layout import CacheForm, LayerCache, LayoutError, Shard
from ..outgoing import LayerCopy, Outgoing
from ..protocol import Rank
from .step_work import Arrived, LoadProgress, LoadWork, Opening, SendWork, StepWork
from .switchboard import WorkerLine

if TYPE_CHECKING:
    import torch

    from ..hub import TransferHub

_log = logging.getLogger(__name__)

ConnectLine = Callable[[Shard], WorkerLine]


@final
class WorkerSide:
    """Called by vLLM's worker, on the one thread that runs the model. `heads` are the KV heads that it holds, as
    numbered in the model; `form` is that of their caches; `connect` makes the way to the agent once they are there."""

    def __init__(self, rank: Rank, heads: range, form: CacheForm, connect: ConnectLine) -> None:
        self._rank = rank
        self._heads = heads
        self._form = form
        self._connect = connect
        self._line: WorkerLine | None = None
        self._device: Device = device_of("cpu")
        self._told: set[bytes] = set()
        self._caches: list[LayerCache] = []  # as they are computed
        self._positions: dict[str, int] = {}
        self._step_began = 0.0
        self._held_up_s = 0.0
        self._rest: list[tuple[SendWork, list[Outgoing], float]] = []
        self._active: dict[str, LoadWork] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._invalid: set[int] = set()
        self._progress: LoadProgress | None = None

    def __repr__(self) -> str:
        return f"<WorkerSide {self._rank} loads={len(self._active)} {self._line}>"

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
        self._device = device_of("cuda" if next(iter(caches.values())).is_cuda else "cpu")
        self._line = self._connect(Shard(layers=numbers, heads=self._heads, head_dim=first.head_dim, dtype=first.dtype))

    def begin(self, work: StepWork) -> None:
        """A step begins: nothing of it has been computed yet."""
        self._step_began, self._held_up_s = time.monotonic(), 0.0
        for order in work.orders:
            if isinstance(order, Opening):
                self._open(order)
            else:
                self.hub.carry_out(order)

    def _open(self, opening: Opening) -> None:
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
        if not links <= self._told:
            self._told |= links
            assert self._line is not None
            self._line.holds(tuple(links))

    # ---- sending --------------------------------------------------------------------------------------------

    def save_layer(self, work: StepWork, name: str) -> None:
        """A layer has been computed: queue what is due of it and those before it, as each transfer's pacing says;
        encoding and sending happen elsewhere."""
        position = self._positions[name]
        for send in work.sends:
            due: dict[int, list[Outgoing]] = {}
            for outgoing in self.hub.outgoing(send.transfer):
                for each in outgoing.pacing.due(position, len(self._caches)):
                    if outgoing.wants(self._caches[each].index):
                        due.setdefault(each, []).append(outgoing)
            if due:
                self._hand_over(send, due, send.first)

    def end(self, work: StepWork) -> None:
        """All of the step has been computed. Say which prompts are complete, remember what is to leave in one piece,
        and note how long the step took."""
        if not work.sends:
            return
        computed_at = time.monotonic()
        open_ends = {send.transfer: self.hub.outgoing(send.transfer) for send in work.sends}
        for send in work.sends:
            if not send.final:
                continue
            serialised: list[Outgoing] = []
            for outgoing in open_ends[send.transfer]:
                if outgoing.pacing.layerwise:
                    outgoing.prefill_done(send.last, computed_at)
                else:
                    serialised.append(outgoing)
            if serialised:
                self._rest.append((send, serialised, computed_at))
        pacings = [outgoing.pacing for ends in open_ends.values() for outgoing in ends]
        tokens = sum(send.last - send.first for send in work.sends)
        self.hub.pacer.computed(pacings, tokens, max(0.0, computed_at - self._step_began - self._held_up_s))

    def hand_over_rest(self) -> None:
        """What leaves in one piece, once the tokens of its step have: nobody waits for it as the client does for them.
        Until then its blocks are those of its request, or free and not written to."""
        rest, self._rest = self._rest, []
        for send, outgoings, computed_at in rest:
            due = {
                position: takers
                for position, cache in enumerate(self._caches)
                if (takers := [outgoing for outgoing in outgoings if outgoing.wants(cache.index)])
            }
            if due:
                self._hand_over(send, due, 0)
            for outgoing in outgoings:
                outgoing.prefill_done(send.last, computed_at)

    def _hand_over(self, send: SendWork, due: dict[int, list[Outgoing]], start: int) -> None:
        """Queue copies of these layers' positions from `start` on, without those that no receiver wants."""
        begun = time.monotonic()
        takers = {outgoing for each in due.values() for outgoing in each}
        first = max(start, min(outgoing.first for outgoing in takers))
        if first >= send.last:
            return
        for position, outgoings in due.items():
            cache = self._caches[position]
            values = self._device.to_host(*cache.read(send.block_ids, first, send.last))
            for outgoing in outgoings:
                outgoing.push(LayerCopy(cache.index, first, values))
        held_up_s = time.monotonic() - begun
        self._held_up_s += held_up_s
        for codec in {outgoing.ticket.codec for outgoing in takers}:
            self.hub.pacer.held_up(codec, send.last - first, len(due), held_up_s)

    # ---- loading --------------------------------------------------------------------------------------------

    def load(self, work: StepWork) -> None:
        """Write what has arrived into the paged cache, while no model runs."""
        for transfer in work.present:
            self.hub.decline(transfer)
        for transfer in work.cancelled:
            self.hub.abort(transfer, "no longer needed")
        for load in work.loads:
            self._active[load.request] = load
        for load in tuple(self._active.values()):
            self._advance(load)
        for transfer in work.cancelled:
            self.hub.close_incoming(transfer)
        if work.report_progress:
            self._progress = LoadProgress(
                {
                    load.request: Arrived(*incoming.progress())
                    for load in self._active.values()
                    if (incoming := self.hub.incoming(load.transfer)) is not None
                }
            )

    def _advance(self, load: LoadWork) -> None:
        incoming = self.hub.incoming(load.transfer)
        if incoming is None:
            self._fail(load, load.first)
            return
        incoming.start(load.first)
        # The outcome first: pieces that arrive between the two calls then belong to the next step.
        outcome = incoming.outcome(time.monotonic())
        for piece in incoming.take():
            self._write(load, piece)
        if outcome is None:
            return
        if outcome:
            self._fail(load, load.first + incoming.progress()[1])
        else:
            incoming.applied()
            self._finish(load)

    def _write(self, load: LoadWork, piece: LayerPiece) -> None:
        cache = self._caches[piece.layer - self._caches[0].index]
        last = piece.start + piece.k.shape[0]
        k, v = self._device.to_device(piece.k, piece.v)
        if piece.k.shape[1] < cache.heads:
            # Several senders share a layer's heads, but a cache can only be written with all of them.
            part = slice(piece.head, piece.head + piece.k.shape[1])
            k_all, v_all = cache.read(load.block_ids, piece.start, last)
            k_all[:, part], v_all[:, part] = k, v
            k, v = k_all, v_all
        cache.write(cache.slots(load.block_ids, piece.start, last), k, v)

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
        assert self._line is not None
        self._line.tell_news()  # the scheduler hears of it after this step, and may then begin with the request

    # ---- what vLLM asks for after a step --------------------------------------------------------------------

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last step, each once, however they ended; and those of them of
        which nothing can be kept."""
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
