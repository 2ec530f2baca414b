"""The receiving end of a link: which transfers are expected, where each chunk belongs, and how much may come. Pure.

    chunk head --place--> where to decrypt --placed--> [frame whole: FrameReady] --consumed--> credit
                  None: seen before, or of a transfer that is over: it is dropped

*Credit.* A transfer may send nothing until `grant` gives it a window: the bytes that may have arrived and not been
consumed. The limit told to the sender is `consumed + window`, and only grows. A frame larger than the window widens
it, else it could never arrive.

*Bounds.* What a peer can make this end hold, whatever it says under its own key: for each expected transfer its
window and two frames, and one record for each frame that the charge has paid for; 1024 transfers that nobody expects
yet; 64 labels.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import KVProtocolError, TransferError
from ..wire.frames import MAX_PAYLOAD_BYTES
from ..wire.signals import MAX_CHUNK_BYTES, Abort, Chunk, Credit, End, Result, Signal, frame_of
from .lanes import Connection, EndState, FrameReady, LinkMachine, LinkSettings, TransferComplete, TransferEnded
from .sending import FRAME_CHARGE, MAX_FRAMES_AHEAD

__all__ = ["MIN_WINDOW_BYTES", "ChunkPlacement", "ReceiveMachine", "ReceiveProgress"]

MIN_WINDOW_BYTES = MAX_CHUNK_BYTES + FRAME_CHARGE
_MAX_REMEMBERED = 1024
_MAX_OVER = 1 << 14
_EMPTY, _CLAIMED, _DONE = range(3)


class _Frame:
    """A frame that is coming in."""

    __slots__ = ("buffer", "damaged", "grid", "header", "index", "missing", "states", "total")

    def __init__(self, chunk: Chunk, buffer: memoryview) -> None:
        self.index = chunk.frame
        self.header = chunk.header
        self.total = chunk.total
        self.grid = chunk.grid
        self.buffer = buffer
        self.missing = (chunk.total - 1 >> chunk.grid) + 1
        self.states = bytearray(self.missing)
        self.damaged = False

    @property
    def charge(self) -> int:
        return self.total + FRAME_CHARGE


@dataclass(slots=True)
class ChunkPlacement:
    """Where a chunk is to be decrypted. Exactly one of `placed` and `spoiled` must follow."""

    transfer: bytes
    into: memoryview
    frame: int
    slot: int
    _frame: _Frame


@dataclass(frozen=True, slots=True)
class ReceiveProgress:
    """Where a transfer stands: bytes of payload, seconds on the caller's clock (None: not yet)."""

    frames: int
    bytes_received: int
    bytes_repeated: int
    bytes_by_path: dict[str, int]
    first_byte_at: float | None
    last_byte_at: float | None


class _Incoming:
    """A transfer at its receiver."""

    def __init__(self, transfer: bytes, deadline: float, now: float) -> None:
        self.id = transfer
        self.deadline = deadline
        self.opened_at = now
        self.state = EndState("open")
        self.window = 0
        self.first = 0
        self.widest = 0
        self.consumed = 0
        self.started = 0
        self.limit = 0
        self.limit_told = 0
        self.coming: dict[int, _Frame] = {}
        self.waiting: dict[int, _Frame] = {}  # whole, not consumed yet
        self.before = 0  # every frame before this one is whole
        self.beyond: set[int] = set()
        self.frames = 0
        self.end: End | None = None
        self.complete = False
        self.received = 0
        self.repeated = 0
        self.by_path: dict[str, int] = {}
        self.first_byte_at: float | None = None
        self.last_byte_at: float | None = None

    def whole(self, frame: int) -> bool:
        return frame < self.before or frame in self.beyond

    def new_limit(self) -> int:
        return self.consumed + max(self.window, self.widest) if self.window else 0


@dataclass(slots=True, eq=False)
class Word:
    """A credit or result on its way; said again if its connection dies, or is late."""

    kind: Literal["credit", "result"]
    transfer: bytes
    repeated: bool = False


class ReceiveMachine(LinkMachine[Word]):
    """See the module's text. `allocate(n)` gives a writable view of n bytes for a frame."""

    def __init__(
        self, settings: LinkSettings, lease_s: float, now: float, allocate: Callable[[int], memoryview] | None = None
    ) -> None:
        super().__init__(settings, lease_s, now)
        self._allocate = allocate or (lambda size: memoryview(bytearray(size)))
        self._transfers: dict[bytes, _Incoming] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()
        self._early_aborts: OrderedDict[bytes, str] = OrderedDict()
        self._say: OrderedDict[tuple[Literal["credit", "result"], bytes], None] = OrderedDict()
        self._results: dict[bytes, Result] = {}

    def __repr__(self) -> str:
        state = self.ended or "open"
        held = sum(len(t.coming) + len(t.waiting) for t in self._transfers.values())
        return f"<ReceiveMachine {state} lanes={len(self.lanes)} transfers={len(self._transfers)} frames={held}>"

    # ---- transfers ------------------------------------------------------------------------------------------

    def expect(self, transfer: bytes, deadline: float, now: float) -> None:
        """A transfer will come, and must have ended by `deadline`. Raises TransferError if the link is over."""
        if transfer in self._transfers or transfer in self._over:
            raise KVProtocolError(f"transfer {transfer.hex()} has been used before")
        if self.ended is not None:
            raise TransferError(f"the link is over: {self.ended}")
        self._transfers[transfer] = _Incoming(transfer, deadline, now)
        reason = self._early_aborts.pop(transfer, None)
        if reason is not None:
            self._settle(self._transfers[transfer], EndState("failed", reason))

    def grant(self, transfer: bytes, window_bytes: int, first: int = 0) -> None:
        """Let the transfer have so many bytes here that are not consumed yet; may be raised, not lowered. The first
        grant also says that the positions before `first` are not wanted; some may have been cut into frames by then."""
        if window_bytes < MIN_WINDOW_BYTES:
            raise ValueError(f"a window of {window_bytes} bytes; at least {MIN_WINDOW_BYTES}, a chunk, must fit")
        incoming = self._open(transfer)
        if incoming is not None:
            if not incoming.window:
                incoming.first = first
            incoming.window = max(incoming.window, window_bytes)
            self._update_limit(incoming)

    def consumed(self, transfer: bytes, frame: int) -> memoryview | None:
        """The payload of a frame from `FrameReady` is no longer looked at. Returns its memory, to be used again."""
        incoming = self._transfers.get(transfer)
        done = None if incoming is None else incoming.waiting.pop(frame, None)
        if incoming is not None and done is not None:
            incoming.consumed += done.charge
            self._update_limit(incoming)
        return None if done is None else done.buffer

    def acknowledge(self, transfer: bytes) -> None:
        """Everything has been taken over: the transfer is delivered, and the sender is told."""
        incoming = self._open(transfer)
        if incoming is None:
            return
        if not incoming.complete:
            raise KVProtocolError("not everything has arrived: there is nothing to acknowledge")
        self._settle(incoming, EndState("delivered"))
        self._tell(transfer, Result(transfer, True, ""))

    def abort(self, transfer: bytes, reason: str) -> None:
        """No more is wanted; the sender is told why."""
        if self._open(transfer) is not None:
            self._fail(transfer, reason)

    def forget(self, transfer: bytes) -> None:
        """Drop the record of an ended transfer."""
        incoming = self._transfers.get(transfer)
        if incoming is not None and incoming.state.name != "open":
            del self._transfers[transfer]

    def state(self, transfer: bytes) -> EndState | None:
        incoming = self._transfers.get(transfer)
        return None if incoming is None else incoming.state

    def progress(self, transfer: bytes) -> ReceiveProgress | None:
        """A view of one transfer."""
        incoming = self._transfers.get(transfer)
        if incoming is None:
            return None
        return ReceiveProgress(
            frames=incoming.frames,
            bytes_received=incoming.received,
            bytes_repeated=incoming.repeated,
            bytes_by_path=dict(incoming.by_path),
            first_byte_at=incoming.first_byte_at,
            last_byte_at=incoming.last_byte_at,
        )

    @property
    def bytes_held(self) -> int:
        """Payload bytes reserved for frames that are coming or wait to be consumed."""
        return sum(
            frame.total
            for transfer in self._transfers.values()
            for frames in (transfer.coming, transfer.waiting)
            for frame in frames.values()
        )

    @property
    def has_words(self) -> bool:
        """Whether there is something to say on any connection."""
        return bool(self._say)

    # ---- chunks ---------------------------------------------------------------------------------------------

    def place(self, number: int, chunk: Chunk, now: float) -> ChunkPlacement | None:
        """Where the payload of a chunk belongs. None: decrypt it anywhere, then say `dropped`."""
        lane, incoming = self.lanes.get(number), self._transfers.get(chunk.transfer)
        if lane is None or self.ended is not None:
            return None
        if incoming is None:
            if chunk.transfer not in self._over:
                raise KVProtocolError("a chunk of a transfer that has no credit")
            return None
        if incoming.state.name != "open":
            return None
        if incoming.whole(chunk.frame):
            incoming.repeated += chunk.length
            return None
        frame = incoming.coming.get(chunk.frame) or self._begin(incoming, chunk)
        if (frame.total, frame.grid, frame.header) != (chunk.total, chunk.grid, chunk.header):
            raise KVProtocolError(f"frame {chunk.frame} is described in two ways")
        slot = chunk.offset >> chunk.grid
        if frame.states[slot] != _EMPTY:
            incoming.repeated += chunk.length
            frame.damaged |= frame.states[slot] == _CLAIMED
            return None
        frame.states[slot] = _CLAIMED
        incoming.first_byte_at = now if incoming.first_byte_at is None else incoming.first_byte_at
        return ChunkPlacement(
            chunk.transfer, frame.buffer[chunk.offset : chunk.offset + chunk.length], chunk.frame, slot, frame
        )

    def placed(self, number: int, placement: ChunkPlacement, now: float) -> None:
        """A chunk has been decrypted where it belongs."""
        lane, frame = self.lanes.get(number), placement._frame  # noqa: SLF001 (a value of this module)
        if lane is not None:
            lane.handled += 1
        frame.states[placement.slot] = _DONE
        frame.missing -= 1
        incoming = self._open(placement.transfer)
        if incoming is None:
            return
        size = len(placement.into)
        incoming.received += size
        label = "" if lane is None else lane.label
        incoming.by_path[label] = incoming.by_path.get(label, 0) + size
        incoming.last_byte_at = now
        if not frame.missing:
            self._whole(incoming, frame)

    def spoiled(self, placement: ChunkPlacement) -> None:
        """A chunk did not open: its place is empty again. Its connection is to be given up, so it comes once more."""
        frame = placement._frame  # noqa: SLF001 (a value of this module)
        frame.states[placement.slot] = _EMPTY
        if frame.damaged:
            # A second copy came while this one was being opened, and has been confirmed and dropped.
            self._fail(placement.transfer, f"frame {frame.index} was damaged on its way, twice")

    def dropped(self, number: int) -> None:
        """A chunk that `place` had no place for has been read."""
        lane = self.lanes.get(number)
        if lane is not None:
            lane.handled += 1

    def check_integrity(self) -> None:
        """Limits only grow and are never overrun; what has ended holds nothing."""
        for transfer in self._transfers.values():
            if transfer.limit_told > transfer.limit or transfer.received > transfer.started:
                raise AssertionError(f"{transfer.id.hex()}: limits or sums went backwards")
            if transfer.started > transfer.limit + MAX_PAYLOAD_BYTES + FRAME_CHARGE:
                raise AssertionError(f"{transfer.id.hex()} has begun {transfer.started} on {transfer.limit}")
            if transfer.state.name != "open" and transfer.coming:
                raise AssertionError(f"{transfer.id.hex()} is {transfer.state} and still expects frames")
            if len(transfer.beyond) + len(transfer.coming) > 2 * MAX_FRAMES_AHEAD:
                raise AssertionError(f"{transfer.id.hex()} remembers {len(transfer.beyond)} frames")

    # ---- what LinkMachine asks for --------------------------------------------------------------------------

    def _next_item(self, lane: Connection[Word], now: float) -> Signal | None:
        while self._say and self._prompt(lane, now):
            (kind, transfer), _ = self._say.popitem(last=False)
            signal: Signal | None = self._results.get(transfer)
            if kind == "credit":
                incoming = self._open(transfer)
                signal = None if incoming is None else Credit(transfer, incoming.limit, incoming.first)
                if incoming is not None:
                    incoming.limit_told = incoming.limit
            if signal is not None:
                lane.carries(Word(kind, transfer), 0, now)
                return signal
        return None

    def _take(self, signal: Signal, now: float) -> None:
        match signal:
            case End():
                self._end_of(signal)
            case Abort(transfer, reason):
                incoming = self._transfers.get(transfer)
                text = f"the other side gave up: {reason}"
                if incoming is None and transfer not in self._over:
                    self._early_aborts[transfer] = text
                    if len(self._early_aborts) > _MAX_REMEMBERED:
                        self._early_aborts.popitem(last=False)
                elif incoming is not None and incoming.state.name == "open":
                    self._settle(incoming, EndState("failed", text))
            case _:
                raise KVProtocolError(f"{type(signal).__name__} does not come from a sender")

    def _confirmed(self, lane: Connection[Word], item: Word, size: int, now: float) -> None:
        if item.kind == "result":
            self._results.pop(item.transfer, None)

    def _say_again(self, item: Word) -> None:
        self._say[item.kind, item.transfer] = None

    def _overdue(self, item: Word) -> None:
        if not item.repeated:
            item.repeated = True
            self._say_again(item)

    def _busy(self) -> bool:
        return any(transfer.state.name == "open" for transfer in self._transfers.values())

    def _next_deadline(self) -> float:
        return min((t.deadline for t in self._transfers.values() if t.state.name == "open"), default=math.inf)

    def _open_transfers(self) -> list[tuple[bytes, float]]:
        return [(t.id, t.deadline) for t in self._transfers.values() if t.state.name == "open"]

    def _since(self, transfer: bytes) -> float:
        return self._transfers[transfer].opened_at

    def _fail(self, transfer: bytes, reason: str) -> None:
        incoming = self._open(transfer)
        if incoming is not None:
            self._settle(incoming, EndState("failed", reason))
            self._tell(transfer, Result(transfer, False, reason))

    # ---- inside ---------------------------------------------------------------------------------------------

    def _open(self, transfer: bytes) -> _Incoming | None:
        incoming = self._transfers.get(transfer)
        return incoming if incoming is not None and incoming.state.name == "open" else None

    def _begin(self, incoming: _Incoming, chunk: Chunk) -> _Frame:
        """The first chunk of a frame: everything that could be wrong with it, before memory is reserved."""
        if incoming.end is not None and chunk.frame >= incoming.end.frames:
            raise KVProtocolError(f"frame {chunk.frame} of a transfer of {incoming.end.frames}")
        if chunk.frame - incoming.before >= MAX_FRAMES_AHEAD:
            raise KVProtocolError(f"frame {chunk.frame} while frame {incoming.before} has not arrived")
        charge = chunk.total + FRAME_CHARGE
        # The last frame that the limit reaches may reach beyond it: its rest waits for more credit.
        if (
            not incoming.limit_told
            or incoming.started + charge > incoming.limit_told + MAX_PAYLOAD_BYTES + FRAME_CHARGE
        ):
            raise KVProtocolError(f"frame {chunk.frame} overruns the credit of {incoming.limit_told} bytes")
        frame_of(chunk.header, memoryview(b"\0"))
        incoming.started += charge
        frame = incoming.coming[chunk.frame] = _Frame(chunk, self._allocate(chunk.total))
        incoming.widest = max(incoming.widest, charge)
        self._update_limit(incoming)
        return frame

    def _whole(self, incoming: _Incoming, frame: _Frame) -> None:
        incoming.frames += 1
        incoming.waiting[frame.index] = incoming.coming.pop(frame.index)
        incoming.beyond.add(frame.index)
        while incoming.before in incoming.beyond:
            incoming.beyond.remove(incoming.before)
            incoming.before += 1
        self._events.append(FrameReady(incoming.id, frame.index, frame.header, frame.buffer))
        self._check_complete(incoming)

    def _end_of(self, end: End) -> None:
        incoming = self._transfers.get(end.transfer)
        if incoming is None:
            if end.transfer not in self._over:
                raise KVProtocolError("the end of a transfer that has no credit")
            return
        if incoming.state.name != "open":
            return
        if incoming.end is not None and incoming.end != end:
            raise KVProtocolError("a transfer ends in two ways")
        highest = max((*incoming.coming, *incoming.beyond, incoming.before - 1))
        if highest >= end.frames:
            raise KVProtocolError(f"the end of {end.frames} frames after frame {highest}")
        incoming.end = end
        self._check_complete(incoming)

    def _check_complete(self, incoming: _Incoming) -> None:
        end = incoming.end
        if end is not None and incoming.before == end.frames and not incoming.complete:
            incoming.complete = True
            self._events.append(TransferComplete(incoming.id, end.tokens, end.frames))

    def _update_limit(self, incoming: _Incoming) -> None:
        """Raise the limit. The sender is told by eighths of the window; and at once when nothing waits here whose
        consumption would tell it later, and what it has left could be less than its next chunk needs."""
        incoming.limit = max(incoming.limit, incoming.new_limit())
        news = incoming.limit - incoming.limit_told
        starves = not incoming.waiting and incoming.limit_told - incoming.started < MIN_WINDOW_BYTES
        if incoming.state.name == "open" and news and (starves or news * 8 >= incoming.window):
            self._say["credit", incoming.id] = None

    def _tell(self, transfer: bytes, result: Result) -> None:
        self._results[transfer] = result
        self._say["result", transfer] = None

    def _settle(self, incoming: _Incoming, state: EndState) -> None:
        """The one place where a transfer ends. Whole frames that wait stay until they are consumed."""
        incoming.state = state
        incoming.coming.clear()
        incoming.beyond.clear()
        self._over[incoming.id] = None
        if len(self._over) > _MAX_OVER:
            self._over.popitem(last=False)
        self._events.append(TransferEnded(incoming.id, state))
