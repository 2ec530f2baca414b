"""The sending end of a link: transfers, their frames cut into chunks, and which connection takes
which. Pure.

    push(frame) --> queue of its transfer --DRR over transfers--> next_signal --> in flight --Ack--> released
                        ^ resend <-------- the connection died, was retired, or is overtaken

*Work stealing.* Nothing is assigned to a connection before it asks: whichever has room takes the
next chunk, so fast and slow connections, and two paths, share a transfer in proportion to what they
carry.

*Fairness.* Deficit round robin over the transfers that have something to send and credit for it:
each gets the same bytes per round, whatever the size of its frames, and one that comes late sends
on its first turn.

*Credit.* A chunk goes only when the receiver's limit covers all of it. The charge of a transfer is
its payload bytes plus `FRAME_CHARGE` for each frame, counted in the order of its frames; a resent
chunk is not charged again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import KVProtocolError
from ..wire.frames import KVFrame
from ..wire.signals import Abort, Chunk, Credit, End, Result, Signal, frame_header
from .machine import Connection, LinkMachine
from .settings import LinkSettings
from .transfers import Released, Transfer, TransferEvent, TransferGranted, TransferStatus, next_status

FRAME_CHARGE = 1024
"""What a frame costs of the credit besides its payload: the receiver keeps a record of each."""

MAX_FRAMES_AHEAD = 1 << 16
"""How far the newest frame in flight may be ahead of the oldest unconfirmed one."""


class _OutgoingFrame:
    """A frame that is being sent, and its memory."""

    __slots__ = ("cut", "header", "index", "release", "remaining", "total", "view")

    def __init__(self, index: int, frame: KVFrame, release: Callable[[], None] | None) -> None:
        self.index = index
        self.header = frame_header(frame)
        self.view: memoryview | None = memoryview(frame.payload).cast("B")
        self.total = self.view.nbytes
        self.remaining = self.total
        self.cut = 0
        self.release = release


class OutgoingChunk:
    """One chunk of a frame, possibly on several connections at once."""

    __slots__ = ("copies", "done", "length", "offset", "source", "transfer")

    def __init__(self, transfer: _SendingTransfer, source: _OutgoingFrame, offset: int, length: int) -> None:
        self.transfer = transfer
        self.source = source
        self.offset = offset
        self.length = length
        self.copies = 0
        self.done = False

    @property
    def is_wanted(self) -> bool:
        return not self.done and self.source.view is not None


@dataclass(frozen=True, slots=True)
class SendProgress:
    """Where a transfer stands: bytes of payload, seconds on the caller's clock (None: not yet)."""

    frames: int
    bytes_queued: int
    bytes_acknowledged: int
    bytes_resent: int
    bytes_by_path: dict[str, int]
    first_push_at: float | None
    first_sent_at: float | None
    last_acknowledged_at: float | None
    blocked_s: float


class _SendingTransfer(Transfer):
    """A transfer at its sender."""

    def __init__(self, transfer: bytes, deadline: float, now: float) -> None:
        super().__init__(transfer, deadline, now)
        self.uncut: deque[_OutgoingFrame] = deque()
        self.held: OrderedDict[int, _OutgoingFrame] = OrderedDict()  # not confirmed yet
        self.resend: deque[OutgoingChunk] = deque()
        self.frames = 0
        self.tokens: int | None = None
        self.credit = 0
        self.charged = 0
        self.in_ring = False
        self.deficit = 0
        self.queued = 0
        self.acknowledged = 0
        self.resent = 0
        self.first_push_at: float | None = None
        self.first_sent_at: float | None = None
        self.last_acknowledged_at: float | None = None
        self.blocked_since: float | None = None
        self.blocked_s = 0.0

    def measure_next(self, chunk_bytes: int) -> int:
        """Bytes of the next chunk that may go now; 0 if none may."""
        # Another connection's copy may have been confirmed since these were queued.
        while self.resend and self.resend[0].done:
            self.resend.popleft()
        if self.resend:
            return self.resend[0].length
        if not self.uncut:
            return 0
        source = self.uncut[0]
        size = min(chunk_bytes, source.total - source.cut)
        # The receiver remembers every frame beyond the oldest one that it lacks: that has a bound.
        ahead = source.index - next(iter(self.held))
        allowed = self.charged + self._charge(source, size) <= self.credit and ahead < MAX_FRAMES_AHEAD
        return size if allowed else 0

    def cut_next(self, size: int) -> OutgoingChunk:
        """The chunk that `measure_next` has measured."""
        if self.resend:
            return self.resend.popleft()
        source = self.uncut[0]
        self.charged += self._charge(source, size)
        chunk = OutgoingChunk(self, source, source.cut, size)
        source.cut += size
        if source.cut == source.total:
            self.uncut.popleft()
        return chunk

    def _charge(self, source: _OutgoingFrame, size: int) -> int:
        return size + (FRAME_CHARGE if source.cut == 0 else 0)


class SendMachine(LinkMachine[_SendingTransfer]):
    """See the module. Calls on unknown or ended transfers are harmless; `open` of a known is not."""

    def __init__(self, settings: LinkSettings, lease_s: float, now: float) -> None:
        super().__init__(settings, lease_s, now)
        self._ring: deque[_SendingTransfer] = deque()  # transfers that could send now
        self.bytes_held = 0

    # ---- transfers ------------------------------------------------------------------------------------------

    def open(self, transfer: bytes, deadline: float, now: float) -> None:
        """Begin a transfer, to end by `deadline`. Raises TransferError if the link is over."""
        sending = _SendingTransfer(transfer, deadline, now)
        news = self._begin(sending)
        if news.credit and sending.is_open:
            self._grant(sending, news.credit, news.first)

    def push(self, transfer: bytes, frame: KVFrame, now: float, release: Callable[[], None] | None = None) -> bool:
        """Queue a frame; its payload must not change until released. False if not taken: the
        transfer has ended."""
        outgoing = self.transfers.get_open(transfer)
        if outgoing is None:
            return False
        if outgoing.tokens is not None:
            raise KVProtocolError("a frame after the end of its transfer")
        source = _OutgoingFrame(outgoing.frames, frame, release)
        outgoing.frames += 1
        outgoing.uncut.append(source)
        outgoing.held[source.index] = source
        outgoing.queued += source.total
        outgoing.first_push_at = now if outgoing.first_push_at is None else outgoing.first_push_at
        self.bytes_held += source.total
        self._queue(outgoing, now)
        return True

    def finish(self, transfer: bytes, tokens: int) -> None:
        """No frame follows. The transfer is delivered when the receiver says so."""
        outgoing = self.transfers.get_open(transfer)
        if outgoing is not None and outgoing.tokens is None:
            outgoing.tokens = tokens
            self._complete_if_cut(outgoing)

    def progress(self, transfer: bytes, now: float) -> SendProgress | None:
        """A view of one transfer."""
        outgoing = self.transfers.get(transfer)
        if outgoing is None:
            return None
        waiting = 0.0 if outgoing.blocked_since is None else now - outgoing.blocked_since
        return SendProgress(
            frames=outgoing.frames,
            bytes_queued=outgoing.queued,
            bytes_acknowledged=outgoing.acknowledged,
            bytes_resent=outgoing.resent,
            bytes_by_path=dict(outgoing.by_path),
            first_push_at=outgoing.first_push_at,
            first_sent_at=outgoing.first_sent_at,
            last_acknowledged_at=outgoing.last_acknowledged_at,
            blocked_s=outgoing.blocked_s + waiting,
        )

    def payload(self, number: int) -> memoryview:
        """The bytes of the chunk that `next_signal` has just given to a connection."""
        chunk = self.connections[number].flight[-1][0]
        assert isinstance(chunk, OutgoingChunk)
        assert chunk.source.view is not None
        return chunk.source.view[chunk.offset : chunk.offset + chunk.length]

    @property
    def has_work(self) -> bool:
        """Whether any connection would be given something."""
        return bool(self._ring) or self.has_control

    def check_integrity(self) -> None:
        """Bytes held are those of held frames; ended transfers hold none; the ring has all senders."""
        held = sum(source.total for transfer in self.transfers.list_known() for source in transfer.held.values())
        if held != self.bytes_held:
            raise AssertionError(f"{self.bytes_held} bytes counted as held, {held} are")
        for transfer in self.transfers.list_known():
            if not transfer.is_open and (transfer.held or transfer.resend or transfer.uncut):
                raise AssertionError(f"{transfer.id.hex()} is {transfer.status} and still holds frames")
            if transfer.charged > transfer.credit:
                raise AssertionError(f"{transfer.id.hex()} sent {transfer.charged} on a credit of {transfer.credit}")
            idle = not transfer.in_ring and transfer.is_open
            if idle and transfer.measure_next(self.settings.chunk_bytes):
                raise AssertionError(f"{transfer.id.hex()} could send and is not asked")
        if len(set(map(id, self._ring))) != len(self._ring):
            raise AssertionError("a transfer is in the ring twice")

    # ---- chunks ---------------------------------------------------------------------------------------------

    def _next_record(self, connection: Connection, now: float) -> Signal | None:
        return super()._next_record(connection, now) or self._next_chunk(connection, now)

    def _next_chunk(self, connection: Connection, now: float) -> Chunk | None:
        chunk = self._pull(now) or self._overtake(connection, now)
        if chunk is None:
            return None
        chunk.copies += 1
        transfer, source = chunk.transfer, chunk.source
        if transfer.first_sent_at is None:
            transfer.first_sent_at = now
        connection.carry(chunk, chunk.length, now)
        grid = self.settings.chunk_bytes.bit_length() - 1
        return Chunk(transfer.id, source.index, chunk.offset, source.total, grid, source.header, chunk.length)

    def _pull(self, now: float) -> OutgoingChunk | None:
        """Deficit round robin over the ring."""
        step = self.settings.chunk_bytes
        while self._ring:
            transfer = self._ring[0]
            size = transfer.measure_next(step)
            if not size:
                self._ring.popleft()
                transfer.in_ring = False
                self._queue(transfer, now)
            elif transfer.deficit < size:
                transfer.deficit += step
                self._ring.rotate(-1)
            else:
                transfer.deficit -= size
                chunk = transfer.cut_next(size)
                self._complete_if_cut(transfer)
                return chunk
        return None

    def _overtake(self, connection: Connection, now: float) -> OutgoingChunk | None:
        """Another connection's longest unconfirmed chunk, if that is too long and this one is idle."""
        late = now - self.settings.hedge_s
        best: tuple[float, OutgoingChunk] | None = None
        for other in self.connections.values():
            if other is connection:
                continue
            for item, _, sent_at in other.flight:
                if sent_at > late or (best is not None and sent_at >= best[0]):
                    break  # they are in the order of sending
                if isinstance(item, OutgoingChunk) and item.copies == 1 and item.is_wanted:
                    best = (sent_at, item)
        if best is None:
            return None
        self._count_resent(best[1])
        return best[1]

    def _confirm(self, connection: Connection, item: object, size: int, now: float) -> None:
        if not isinstance(item, OutgoingChunk):
            super()._confirm(connection, item, size, now)
            return
        transfer, source = item.transfer, item.source
        if item.done or not transfer.is_open:
            return
        item.done = True
        transfer.acknowledged += size
        transfer.by_path[connection.label] = transfer.by_path.get(connection.label, 0) + size
        transfer.last_acknowledged_at = now
        source.remaining -= size
        if not source.remaining:
            del transfer.held[source.index]
            self._release(source)
            # The oldest unconfirmed frame has moved on: one that was too far ahead may go now.
            self._queue(transfer)

    def _return_unconfirmed(self, item: object) -> None:
        if not isinstance(item, OutgoingChunk):
            super()._return_unconfirmed(item)
            return
        item.copies -= 1
        # Another copy may be under way, and is then as good.
        if not item.done and not item.copies and item.transfer.is_open:
            item.transfer.resend.append(item)
            self._count_resent(item)
            self._queue(item.transfer)

    def _count_resent(self, chunk: OutgoingChunk) -> None:
        chunk.transfer.resent += chunk.length
        self.bytes_resent += chunk.length

    # ---- what the receiver says -----------------------------------------------------------------------------

    def _take(self, signal: Signal, now: float) -> None:
        match signal:
            case Credit():
                self._take_credit(signal, now)
            case Result(transfer, True, _):
                self._take_delivered(transfer, now)
            case Result(transfer, False, reason):
                self._take_refusal(transfer, reason)
            case _:
                raise KVProtocolError(f"{type(signal).__name__} does not come from a receiver")

    def _take_credit(self, credit: Credit, now: float) -> None:
        sending = self.transfers.get(credit.transfer)
        if sending is None:
            news = self.transfers.note_early(credit.transfer)
            if news is not None and credit.limit > news.credit:
                news.credit, news.first = credit.limit, credit.first
        elif sending.is_open and credit.limit > sending.credit:
            self._grant(sending, credit.limit, credit.first)
            if sending.blocked_since is not None:
                sending.blocked_s += now - sending.blocked_since
                sending.blocked_since = None
            self._queue(sending, now)
            self._complete_if_cut(sending)

    def _grant(self, sending: _SendingTransfer, limit: int, first: int) -> None:
        if sending.status is TransferStatus.WAITING:
            self._events.append(TransferGranted(sending.id, first))
        self.transfers.apply(sending, TransferEvent.GRANTED)
        sending.credit = limit

    def _take_delivered(self, transfer: bytes, now: float) -> None:
        sending = self.transfers.get_open(transfer)
        if sending is None:
            return
        next_status(sending.status, TransferEvent.ACKNOWLEDGED)  # before anything is changed by what cannot be
        # The receiver has everything, although some connections have not said so yet.
        for connection in self.connections.values():
            for item, size, _ in connection.flight:
                if isinstance(item, OutgoingChunk) and item.transfer is sending:
                    self._confirm(connection, item, size, now)
        self._end_transfer(sending, TransferEvent.ACKNOWLEDGED)

    # ---- for LinkMachine ------------------------------------------------------------------------------------

    def _news(self, transfer: bytes) -> End | None:
        sending = self.transfers.get_open(transfer)
        return None if sending is None else End(transfer, sending.tokens or 0, sending.frames)

    def _refusal(self, transfer: bytes, reason: str) -> Abort:
        return Abort(transfer, reason)

    def _drop_held(self, transfer: _SendingTransfer) -> None:
        for source in transfer.held.values():
            self._release(source)
        transfer.held.clear()
        transfer.uncut.clear()
        transfer.resend.clear()

    def wake_at(self, now: float) -> float:
        """As LinkMachine's; and when an idle connection may overtake."""
        at = super().wake_at(now)
        if any(each.flight for each in self.connections.values()) and len(self.connections) > 1:
            at = min(at, now + self.settings.hedge_s / 2)
        return at

    def _release(self, source: _OutgoingFrame) -> None:
        source.view = None
        self.bytes_held -= source.total
        if source.release is not None:
            self._events.append(Released(source.release))
            source.release = None

    def _queue(self, transfer: _SendingTransfer, now: float | None = None) -> None:
        """Put a transfer in the ring if it could send. With `now` it is noted since when it waits
        for more credit; the first credit says that the receiver is there."""
        if not transfer.in_ring and transfer.measure_next(self.settings.chunk_bytes):
            transfer.in_ring, transfer.deficit = True, self.settings.chunk_bytes  # to send on its first turn
            self._ring.append(transfer)
        elif now is not None and transfer.uncut and transfer.credit and not transfer.in_ring:
            transfer.blocked_since = now if transfer.blocked_since is None else transfer.blocked_since

    def _complete_if_cut(self, transfer: _SendingTransfer) -> None:
        """End goes once everything is cut and the receiver, heard of, knows the transfer."""
        if transfer.status is TransferStatus.MOVING and transfer.tokens is not None and not transfer.uncut:
            self.transfers.apply(transfer, TransferEvent.COMPLETED)
            self._say("news", transfer.id)
