"""The sending end of a link: transfers, their frames cut into chunks, and which connection takes which. Pure.

    push(frame) --> queue of its transfer --DRR over transfers--> next(connection) --> in flight --Progress--> released
                        ^ resend <---------------- the connection died, was retired, or is overtaken

*Work stealing.* Nothing is assigned to a connection before it asks: whichever has room takes the next chunk, so fast
and slow connections, and two paths, share a transfer in proportion to what they carry.

*Fairness.* Deficit round robin over the transfers that have something to send and credit for it: each gets the same
bytes per round, whatever the size of its frames, and one that comes late sends on its first turn.

*Credit.* A chunk goes only when the receiver's limit covers all of it. The charge of a transfer is its payload bytes
plus `FRAME_CHARGE` for each frame, counted in the order of its frames; a resent chunk is not charged again.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import KVProtocolError, TransferError
from ..wire.frames import KVFrame
from ..wire.signals import Abort, Chunk, Credit, End, Result, Signal, frame_header
from .lanes import Connection, EndState, LinkMachine, LinkSettings, Released, TransferEnded, TransferGranted

__all__ = ["FRAME_CHARGE", "MAX_FRAMES_AHEAD", "OutgoingChunk", "SendMachine", "SendProgress"]

FRAME_CHARGE = 1024
"""What a frame costs of the credit besides its payload: the receiver keeps a record of each."""

MAX_FRAMES_AHEAD = 1 << 16
"""How far the newest frame on the way may be ahead of the oldest unconfirmed one."""

_MAX_EARLY = 1024
_MAX_OVER = 1 << 14


class _Source:
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

    def __init__(self, transfer: _Outgoing, source: _Source, offset: int, length: int) -> None:
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


class _Outgoing:
    """A transfer at its sender."""

    def __init__(self, transfer: bytes, deadline: float, now: float) -> None:
        self.id = transfer
        self.deadline = deadline
        self.opened_at = now
        self.state = EndState("open")
        self.uncut: deque[_Source] = deque()
        self.held: OrderedDict[int, _Source] = OrderedDict()  # not confirmed yet
        self.resend: deque[OutgoingChunk] = deque()
        self.frames = 0
        self.tokens: int | None = None
        self.end_said = False
        self.credit = 0
        self.charged = 0
        self.in_ring = False
        self.deficit = 0
        self.queued = 0
        self.acknowledged = 0
        self.resent = 0
        self.by_path: dict[str, int] = {}
        self.first_push_at: float | None = None
        self.first_sent_at: float | None = None
        self.last_acknowledged_at: float | None = None
        self.blocked_since: float | None = None
        self.blocked_s = 0.0

    def next_size(self, chunk_bytes: int) -> int:
        """Bytes of the next chunk that may go now; 0 if none may."""
        while self.resend and self.resend[0].done:
            self.resend.popleft()
        if self.resend:
            return self.resend[0].length
        if not self.uncut:
            return 0
        source = self.uncut[0]
        size = min(chunk_bytes, source.total - source.cut)
        ahead = source.index - next(iter(self.held))
        allowed = self.charged + self._charge(source, size) <= self.credit and ahead < MAX_FRAMES_AHEAD
        return size if allowed else 0

    def take(self, size: int) -> OutgoingChunk:
        """The chunk that `next_size` has measured."""
        if self.resend:
            return self.resend.popleft()
        source = self.uncut[0]
        self.charged += self._charge(source, size)
        piece = OutgoingChunk(self, source, source.cut, size)
        source.cut += size
        if source.cut == source.total:
            self.uncut.popleft()
        return piece

    def _charge(self, source: _Source, size: int) -> int:
        return size + (FRAME_CHARGE if source.cut == 0 else 0)


@dataclass(slots=True, eq=False)
class _Word:
    """A control signal on its way; said again if its connection dies, or is late."""

    signal: End | Abort
    repeated: bool = False


Cargo = OutgoingChunk | _Word


@dataclass(slots=True)
class _Early:
    """What the receiver has said of a transfer that this end has not opened yet."""

    credit: int = 0
    first: int = 0
    refused: str | None = None


class SendMachine(LinkMachine[Cargo]):
    """See the module's text. Every call on an unknown or ended transfer is harmless, except `open` of a known one."""

    def __init__(self, settings: LinkSettings, lease_s: float, now: float) -> None:
        super().__init__(settings, lease_s, now)
        self._transfers: dict[bytes, _Outgoing] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()
        self._early: OrderedDict[bytes, _Early] = OrderedDict()
        self._ring: deque[_Outgoing] = deque()
        self._words: deque[_Word] = deque()
        self.bytes_held = 0
        self.bytes_resent = 0

    def __repr__(self) -> str:
        state = self.ended or "open"
        return f"<SendMachine {state} lanes={len(self.lanes)} transfers={len(self._transfers)} held={self.bytes_held}>"

    # ---- transfers ------------------------------------------------------------------------------------------

    def open(self, transfer: bytes, deadline: float, now: float) -> None:
        """Begin a transfer that must have ended by `deadline`. Raises TransferError if the link is over."""
        if transfer in self._transfers or transfer in self._over:
            raise KVProtocolError(f"transfer {transfer.hex()} has been used before")
        if self.ended is not None:
            raise TransferError(f"the link is over: {self.ended}")
        outgoing = self._transfers[transfer] = _Outgoing(transfer, deadline, now)
        early = self._early.pop(transfer, None)
        if early is not None:
            if early.credit:
                self._grant(outgoing, early.credit, early.first)
            if early.refused is not None:
                self._fail(transfer, early.refused)

    def push(self, transfer: bytes, frame: KVFrame, now: float, release: Callable[[], None] | None = None) -> bool:
        """Queue a frame, whose payload must not change until it is released: at its confirmation or the transfer's end.

        False if it was not taken: the transfer has ended.
        """
        outgoing = self._transfers.get(transfer)
        if outgoing is None or outgoing.state.name != "open":
            return False
        if outgoing.tokens is not None:
            raise KVProtocolError("a frame after the end of its transfer")
        source = _Source(outgoing.frames, frame, release)
        outgoing.frames += 1
        outgoing.uncut.append(source)
        outgoing.held[source.index] = source
        outgoing.queued += source.total
        outgoing.first_push_at = now if outgoing.first_push_at is None else outgoing.first_push_at
        self.bytes_held += source.total
        self._enter(outgoing, now)
        return True

    def finish(self, transfer: bytes, tokens: int) -> None:
        """No frame follows. The transfer is delivered when the receiver says so."""
        outgoing = self._transfers.get(transfer)
        if outgoing is not None and outgoing.tokens is None and outgoing.state.name == "open":
            outgoing.tokens = tokens
            self._say_end(outgoing)

    def abort(self, transfer: bytes, reason: str) -> None:
        """Give a transfer up; the receiver is told why."""
        outgoing = self._transfers.get(transfer)
        if outgoing is not None and outgoing.state.name == "open":
            self._fail(transfer, reason)

    def forget(self, transfer: bytes) -> None:
        """Drop the record of an ended transfer."""
        outgoing = self._transfers.get(transfer)
        if outgoing is not None and outgoing.state.name != "open":
            del self._transfers[transfer]

    def progress(self, transfer: bytes, now: float) -> SendProgress | None:
        """A view of one transfer."""
        outgoing = self._transfers.get(transfer)
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
        """The bytes of the chunk that `next` has just given to a connection."""
        piece = self.lanes[number].flight[-1][0]
        assert isinstance(piece, OutgoingChunk)
        assert piece.source.view is not None
        return piece.source.view[piece.offset : piece.offset + piece.length]

    @property
    def has_words(self) -> bool:
        """Whether there is more than chunks to send."""
        return bool(self._words)

    @property
    def has_work(self) -> bool:
        """Whether any connection would be given something."""
        return bool(self._ring or self._words)

    def check_integrity(self) -> None:
        """Bytes held are those of frames held; nothing is held by what has ended; the ring holds what may send."""
        held = sum(source.total for transfer in self._transfers.values() for source in transfer.held.values())
        if held != self.bytes_held:
            raise AssertionError(f"{self.bytes_held} bytes counted as held, {held} are")
        for transfer in self._transfers.values():
            if transfer.state.name != "open" and (transfer.held or transfer.resend or transfer.uncut):
                raise AssertionError(f"{transfer.id.hex()} is {transfer.state} and still holds frames")
            if transfer.charged > transfer.credit:
                raise AssertionError(f"{transfer.id.hex()} sent {transfer.charged} on a credit of {transfer.credit}")
            idle = not transfer.in_ring and transfer.state.name == "open"
            if idle and transfer.next_size(self.settings.chunk_bytes):
                raise AssertionError(f"{transfer.id.hex()} could send and is not asked")
        if len(set(map(id, self._ring))) != len(self._ring):
            raise AssertionError("a transfer is in the ring twice")

    # ---- what LinkMachine asks for --------------------------------------------------------------------------

    def _next_item(self, lane: Connection[Cargo], now: float) -> Signal | None:
        if self._words and self._prompt(lane, now):
            word = self._words.popleft()
            lane.carries(word, 0, now)
            return word.signal
        if lane.retired:
            return None
        piece = self._pull(now) or self._overtake(lane, now)
        if piece is None:
            return None
        piece.copies += 1
        transfer, source = piece.transfer, piece.source
        if transfer.first_sent_at is None:
            transfer.first_sent_at = now
        lane.carries(piece, piece.length, now)
        grid = self.settings.chunk_bytes.bit_length() - 1
        return Chunk(transfer.id, source.index, piece.offset, source.total, grid, source.header, piece.length)

    def _pull(self, now: float) -> OutgoingChunk | None:
        """Deficit round robin over the ring."""
        step = self.settings.chunk_bytes
        while self._ring:
            transfer = self._ring[0]
            size = transfer.next_size(step)
            if not size:
                self._ring.popleft()
                transfer.in_ring = False
                self._enter(transfer, now)
            elif transfer.deficit < size:
                transfer.deficit += step
                self._ring.rotate(-1)
            else:
                transfer.deficit -= size
                piece = transfer.take(size)
                if not transfer.uncut:
                    self._say_end(transfer)
                return piece
        return None

    def _overtake(self, lane: Connection[Cargo], now: float) -> OutgoingChunk | None:
        """The chunk that another connection has had longest, if that is too long and this one is idle."""
        late = now - self.settings.hedge_s
        best: tuple[float, OutgoingChunk] | None = None
        for other in self.lanes.values():
            if other is lane:
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

    def _take(self, signal: Signal, now: float) -> None:
        match signal:
            case Credit():
                self._credit(signal, now)
            case Result(transfer, delivered, reason):
                self._result(transfer, delivered, reason, now)
            case _:
                raise KVProtocolError(f"{type(signal).__name__} does not come from a receiver")

    def _credit(self, credit: Credit, now: float) -> None:
        outgoing = self._transfers.get(credit.transfer)
        if outgoing is None:
            early = self._remember(credit.transfer)
            if early is not None and credit.limit > early.credit:
                early.credit, early.first = credit.limit, credit.first
            return
        if outgoing.state.name == "open" and credit.limit > outgoing.credit:
            self._grant(outgoing, credit.limit, credit.first)
            if outgoing.blocked_since is not None:
                outgoing.blocked_s += now - outgoing.blocked_since
                outgoing.blocked_since = None
            self._enter(outgoing, now)
            self._say_end(outgoing)

    def _grant(self, outgoing: _Outgoing, limit: int, first: int) -> None:
        if not outgoing.credit:
            self._events.append(TransferGranted(outgoing.id, first))
        outgoing.credit = limit

    def _result(self, transfer: bytes, delivered: bool, reason: str, now: float) -> None:
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            early = self._remember(transfer)
            if early is not None and not delivered:
                early.refused = f"the other side gave up: {reason}"
        elif outgoing.state.name == "open":
            if not delivered:
                self._settle(outgoing, EndState("failed", f"the other side gave up: {reason}"))
            elif not outgoing.end_said:
                raise KVProtocolError("a transfer was acknowledged before its end was sent")
            else:
                self._all_confirmed(outgoing, now)
                self._settle(outgoing, EndState("delivered"))

    def _all_confirmed(self, outgoing: _Outgoing, now: float) -> None:
        """The receiver has everything, although some connections have not said so yet."""
        for lane in self.lanes.values():
            for item, size, _ in lane.flight:
                if isinstance(item, OutgoingChunk) and item.transfer is outgoing:
                    self._confirmed(lane, item, size, now)

    def _remember(self, transfer: bytes) -> _Early | None:
        if transfer in self._over:
            return None
        early = self._early.setdefault(transfer, _Early())
        if len(self._early) > _MAX_EARLY:
            self._early.popitem(last=False)
        return early

    def _confirmed(self, lane: Connection[Cargo], item: Cargo, size: int, now: float) -> None:
        if isinstance(item, _Word):
            return
        transfer, source = item.transfer, item.source
        if item.done or transfer.state.name != "open":
            return
        item.done = True
        transfer.acknowledged += size
        transfer.by_path[lane.label] = transfer.by_path.get(lane.label, 0) + size
        transfer.last_acknowledged_at = now
        source.remaining -= size
        if not source.remaining:
            del transfer.held[source.index]
            self._let_go(source)
            self._enter(transfer)

    def _say_again(self, item: Cargo) -> None:
        if isinstance(item, _Word):
            self._words.append(item)
            return
        item.copies -= 1
        if not item.done and not item.copies and item.transfer.state.name == "open":
            item.transfer.resend.append(item)
            self._count_resent(item)
            self._enter(item.transfer)

    def _overdue(self, item: Cargo) -> None:
        if isinstance(item, _Word) and not item.repeated:
            item.repeated = True
            self._words.append(item)

    def _count_resent(self, piece: OutgoingChunk) -> None:
        piece.transfer.resent += piece.length
        self.bytes_resent += piece.length

    def _busy(self) -> bool:
        return any(transfer.state.name == "open" for transfer in self._transfers.values())

    def _next_deadline(self) -> float:
        return min((t.deadline for t in self._transfers.values() if t.state.name == "open"), default=math.inf)

    def _open_transfers(self) -> list[tuple[bytes, float]]:
        return [(t.id, t.deadline) for t in self._transfers.values() if t.state.name == "open"]

    def _since(self, transfer: bytes) -> float:
        return self._transfers[transfer].opened_at

    def _fail(self, transfer: bytes, reason: str) -> None:
        outgoing = self._transfers[transfer]
        if outgoing.state.name == "open":
            self._words.append(_Word(Abort(transfer, reason)))
            self._settle(outgoing, EndState("failed", reason))

    def wake_at(self, now: float) -> float:
        """As LinkMachine's; and when an idle connection may overtake."""
        at = super().wake_at(now)
        if any(lane.flight for lane in self.lanes.values()) and len(self.lanes) > 1:
            at = min(at, now + self.settings.hedge_s / 2)
        return at

    def _settle(self, outgoing: _Outgoing, state: EndState) -> None:
        """The one place where a transfer ends."""
        outgoing.state = state
        for source in outgoing.held.values():
            self._let_go(source)
        outgoing.held.clear()
        outgoing.uncut.clear()
        outgoing.resend.clear()
        self._over[outgoing.id] = None
        if len(self._over) > _MAX_OVER:
            self._over.popitem(last=False)
        self._events.append(TransferEnded(outgoing.id, state))

    def _let_go(self, source: _Source) -> None:
        source.view = None
        self.bytes_held -= source.total
        if source.release is not None:
            self._events.append(Released(source.release))
            source.release = None

    def _enter(self, transfer: _Outgoing, now: float | None = None) -> None:
        """With `now` it is noted since when it waits for more credit; the first says that the receiver is there."""
        if not transfer.in_ring and transfer.next_size(self.settings.chunk_bytes):
            transfer.in_ring, transfer.deficit = True, self.settings.chunk_bytes  # to send on its first turn
            self._ring.append(transfer)
        elif now is not None and transfer.uncut and transfer.credit and not transfer.in_ring:
            transfer.blocked_since = now if transfer.blocked_since is None else transfer.blocked_since

    def _say_end(self, transfer: _Outgoing) -> None:
        """End goes once everything has been cut, and not before the receiver has been heard of: it has to know the
        transfer by then."""
        if transfer.tokens is None or transfer.end_said or transfer.uncut or not transfer.credit:
            return
        transfer.end_said = True
        self._words.append(_Word(End(transfer.id, transfer.tokens, transfer.frames)))
