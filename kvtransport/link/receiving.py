"""The receiving end of a link: which transfers are expected, where each chunk belongs, and how much
may come. Pure.

    chunk head --place_chunk--> where to decrypt --finish_chunk--> [frame whole: FrameReady] --consume--> credit
                  None: seen before, or of a transfer that is over: `skip_chunk`

*Credit.* A transfer may send nothing until `grant` gives it a window: the bytes that may have
arrived and not been consumed. The limit told to the sender is `consumed + window`, and only grows.
A frame larger than the window widens it, else it could never arrive.

*Bounds.* What a peer can make this end hold, whatever it says under its own key: for each expected
transfer its window and two frames, and one record for each frame that the charge has paid for; 1024
transfers that nobody expects yet; 64 labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import KVProtocolError
from ..wire.frames import MAX_PAYLOAD_BYTES
from ..wire.signals import MAX_CHUNK_BYTES, Abort, Chunk, Credit, End, Result, Signal, frame_of
from .machine import LinkMachine
from .sending import FRAME_CHARGE, MAX_FRAMES_AHEAD
from .settings import LinkSettings
from .transfers import FrameReady, Transfer, TransferComplete, TransferEvent, TransferStatus

MIN_WINDOW_BYTES = MAX_CHUNK_BYTES + FRAME_CHARGE
_EMPTY, _CLAIMED, _DONE = range(3)


class _IncomingFrame:
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
    """Where to decrypt a chunk; exactly one of `finish_chunk` and `reject_chunk` must follow."""

    transfer: bytes
    into: memoryview
    frame: int
    slot: int
    target: _IncomingFrame


@dataclass(frozen=True, slots=True)
class ReceiveProgress:
    """Where a transfer stands: bytes of payload, seconds on the caller's clock (None: not yet)."""

    frames: int
    bytes_received: int
    bytes_repeated: int
    bytes_by_path: dict[str, int]
    first_byte_at: float | None
    last_byte_at: float | None


class _ReceivingTransfer(Transfer):
    """A transfer at its receiver."""

    def __init__(self, transfer: bytes, deadline: float, now: float) -> None:
        super().__init__(transfer, deadline, now)
        self.window = 0
        self.first = 0
        self.widest = 0
        self.consumed = 0
        self.started = 0
        self.limit = 0
        self.limit_told = 0
        self.coming: dict[int, _IncomingFrame] = {}
        self.waiting: dict[int, _IncomingFrame] = {}  # whole, not consumed yet
        self.before = 0  # every frame before this one is whole
        self.beyond: set[int] = set()
        self.frames = 0
        self.end: End | None = None
        self.received = 0
        self.repeated = 0
        self.first_byte_at: float | None = None
        self.last_byte_at: float | None = None

    def has_whole(self, frame: int) -> bool:
        return frame < self.before or frame in self.beyond

    def new_limit(self) -> int:
        return self.consumed + max(self.window, self.widest) if self.window else 0


class ReceiveMachine(LinkMachine[_ReceivingTransfer]):
    """See the module's text. `allocate(n)` gives a writable view of n bytes for a frame."""

    def __init__(
        self, settings: LinkSettings, lease_s: float, now: float, allocate: Callable[[int], memoryview] | None = None
    ) -> None:
        super().__init__(settings, lease_s, now)
        self._allocate = allocate or (lambda size: memoryview(bytearray(size)))

    # ---- transfers ------------------------------------------------------------------------------------------

    def expect(self, transfer: bytes, deadline: float, now: float) -> None:
        """A transfer will come, to end by `deadline`. Raises TransferError if the link is over."""
        self._begin(_ReceivingTransfer(transfer, deadline, now))

    def grant(self, transfer: bytes, window_bytes: int, first: int = 0) -> None:
        """Let the transfer have so many bytes here that are not consumed yet; may be raised, not
        lowered. The first grant also says that the positions before `first` are not wanted; some
        may have been cut into frames by then."""
        if window_bytes < MIN_WINDOW_BYTES:
            raise ValueError(f"a window of {window_bytes} bytes; at least {MIN_WINDOW_BYTES}, a chunk, must fit")
        incoming = self.transfers.get_open(transfer)
        if incoming is not None:
            if incoming.status is TransferStatus.WAITING:
                incoming.first = first
            self.transfers.apply(incoming, TransferEvent.GRANTED)
            incoming.window = max(incoming.window, window_bytes)
            self._update_limit(incoming)

    def consume(self, transfer: bytes, frame: int) -> memoryview | None:
        """The payload of a `FrameReady` is done with. Returns its memory, to be used again."""
        incoming = self.transfers.get(transfer)
        done = None if incoming is None else incoming.waiting.pop(frame, None)
        if incoming is not None and done is not None:
            incoming.consumed += done.charge
            self._update_limit(incoming)
        return None if done is None else done.buffer

    def acknowledge(self, transfer: bytes) -> None:
        """Everything has been taken over: the transfer is delivered, and the sender is told. Raises
        KVProtocolError before everything has arrived."""
        incoming = self.transfers.get_open(transfer)
        if incoming is not None:
            self._end_transfer(incoming, TransferEvent.ACKNOWLEDGED)
            self._say_last(Result(transfer, True, ""))

    def progress(self, transfer: bytes) -> ReceiveProgress | None:
        """A view of one transfer."""
        incoming = self.transfers.get(transfer)
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
            for transfer in self.transfers.list_known()
            for frames in (transfer.coming, transfer.waiting)
            for frame in frames.values()
        )

    # ---- chunks ---------------------------------------------------------------------------------------------

    def place_chunk(self, number: int, chunk: Chunk, now: float) -> ChunkPlacement | None:
        """Where the payload of a chunk belongs. None: decrypt it anywhere, then say `skip_chunk`."""
        connection, incoming = self.connections.get(number), self.transfers.get(chunk.transfer)
        if connection is None or self.ended is not None:
            return None
        if incoming is None:
            if not self.transfers.is_over(chunk.transfer):
                raise KVProtocolError("a chunk of a transfer that has no credit")
            # It was on its way when the transfer ended here: no fault of a sender that has not heard.
            return None
        if not incoming.is_open:
            return None
        if incoming.has_whole(chunk.frame):
            incoming.repeated += chunk.length
            return None
        frame = incoming.coming.get(chunk.frame) or self._start_frame(incoming, chunk)
        if (frame.total, frame.grid, frame.header) != (chunk.total, chunk.grid, chunk.header):
            raise KVProtocolError(f"frame {chunk.frame} is described twice, differently")
        slot = chunk.offset >> chunk.grid
        if frame.states[slot] != _EMPTY:
            incoming.repeated += chunk.length
            # This copy is dropped and confirmed. Should the one that is being opened prove damaged,
            # nobody would send the chunk again.
            frame.damaged |= frame.states[slot] == _CLAIMED
            return None
        frame.states[slot] = _CLAIMED
        incoming.first_byte_at = now if incoming.first_byte_at is None else incoming.first_byte_at
        return ChunkPlacement(
            chunk.transfer, frame.buffer[chunk.offset : chunk.offset + chunk.length], chunk.frame, slot, frame
        )

    def finish_chunk(self, number: int, placement: ChunkPlacement, now: float) -> None:
        """A chunk has been decrypted where it belongs."""
        connection, frame = self.connections.get(number), placement.target
        if connection is not None:
            connection.handled += 1  # whatever became of its transfer: the sender waits for it
        frame.states[placement.slot] = _DONE
        frame.missing -= 1
        incoming = self.transfers.get_open(placement.transfer)
        if incoming is None:
            return
        size = len(placement.into)
        incoming.received += size
        label = "" if connection is None else connection.label
        incoming.by_path[label] = incoming.by_path.get(label, 0) + size
        incoming.last_byte_at = now
        if not frame.missing:
            self._finish_frame(incoming, frame)

    def reject_chunk(self, placement: ChunkPlacement) -> None:
        """A chunk did not open: its place is empty. Give its connection up, so that it comes again."""
        frame = placement.target
        frame.states[placement.slot] = _EMPTY
        if frame.damaged:
            # A second copy came while this one was being opened, and has been confirmed and dropped.
            self.abort(placement.transfer, f"frame {frame.index} was damaged in flight, twice")

    def skip_chunk(self, number: int) -> None:
        """A chunk that `place` had no place for has been read."""
        connection = self.connections.get(number)
        if connection is not None:
            connection.handled += 1

    def check_integrity(self) -> None:
        """Limits only grow and are never overrun; what has ended holds nothing."""
        for transfer in self.transfers.list_known():
            if transfer.limit_told > transfer.limit or transfer.received > transfer.started:
                raise AssertionError(f"{transfer.id.hex()}: limits or sums went backwards")
            if transfer.started > transfer.limit + MAX_PAYLOAD_BYTES + FRAME_CHARGE:
                raise AssertionError(f"{transfer.id.hex()} has begun {transfer.started} on {transfer.limit}")
            if not transfer.is_open and transfer.coming:
                raise AssertionError(f"{transfer.id.hex()} is {transfer.status} and still expects frames")
            if len(transfer.beyond) + len(transfer.coming) > 2 * MAX_FRAMES_AHEAD:
                raise AssertionError(f"{transfer.id.hex()} remembers {len(transfer.beyond)} frames")

    # ---- for LinkMachine ------------------------------------------------------------------------------------

    def _take(self, signal: Signal, now: float) -> None:
        match signal:
            case End():
                self._take_end(signal)
            case Abort(transfer, reason):
                self._take_refusal(transfer, reason)
            case _:
                raise KVProtocolError(f"{type(signal).__name__} does not come from a sender")

    def _news(self, transfer: bytes) -> Credit | None:
        incoming = self.transfers.get_open(transfer)
        if incoming is None:
            return None
        incoming.limit_told = incoming.limit
        return Credit(transfer, incoming.limit, incoming.first)

    def _refusal(self, transfer: bytes, reason: str) -> Result:
        return Result(transfer, False, reason)

    def _drop_held(self, transfer: _ReceivingTransfer) -> None:
        # Whole frames that wait stay until they are consumed: somebody may be reading them.
        transfer.coming.clear()
        transfer.beyond.clear()

    # ---- inside ---------------------------------------------------------------------------------------------

    def _start_frame(self, incoming: _ReceivingTransfer, chunk: Chunk) -> _IncomingFrame:
        """The first chunk of a frame: check everything before memory is reserved."""
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
        frame = incoming.coming[chunk.frame] = _IncomingFrame(chunk, self._allocate(chunk.total))
        incoming.widest = max(incoming.widest, charge)
        self._update_limit(incoming)
        return frame

    def _finish_frame(self, incoming: _ReceivingTransfer, frame: _IncomingFrame) -> None:
        incoming.frames += 1
        incoming.waiting[frame.index] = incoming.coming.pop(frame.index)
        incoming.beyond.add(frame.index)
        while incoming.before in incoming.beyond:
            incoming.beyond.remove(incoming.before)
            incoming.before += 1
        self._events.append(FrameReady(incoming.id, frame.index, frame.header, frame.buffer))
        self._check_complete(incoming)

    def _take_end(self, end: End) -> None:
        incoming = self.transfers.get(end.transfer)
        if incoming is None:
            if not self.transfers.is_over(end.transfer):
                raise KVProtocolError("the end of a transfer that has no credit")
            return
        if not incoming.is_open:
            return
        if incoming.end is not None and incoming.end != end:
            raise KVProtocolError("a transfer ends twice, differently")
        highest = max((*incoming.coming, *incoming.beyond, incoming.before - 1))
        if highest >= end.frames:
            raise KVProtocolError(f"the end of {end.frames} frames after frame {highest}")
        incoming.end = end
        self._check_complete(incoming)

    def _check_complete(self, incoming: _ReceivingTransfer) -> None:
        end = incoming.end
        if end is not None and incoming.before == end.frames and incoming.status is not TransferStatus.COMPLETE:
            self.transfers.apply(incoming, TransferEvent.COMPLETED)
            self._events.append(TransferComplete(incoming.id, end.tokens, end.frames))

    def _update_limit(self, incoming: _ReceivingTransfer) -> None:
        """Raise the limit. The sender is told by eighths of the window; and at once when nothing
        waits here whose consumption would tell it later, and what it has left could be less than
        its next chunk needs."""
        incoming.limit = max(incoming.limit, incoming.new_limit())
        news = incoming.limit - incoming.limit_told
        starves = not incoming.waiting and incoming.limit_told - incoming.started < MIN_WINDOW_BYTES
        if incoming.is_open and news and (starves or news * 8 >= incoming.window):
            self._say("news", incoming.id)
