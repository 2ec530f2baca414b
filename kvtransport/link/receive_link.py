"""The receiving end of a link, for the threads of an engine process; `receiving` decides."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from ..errors import KVProtocolError, TransferAborted, TransferTimeout
from ..wire.channel import LinkRole
from ..wire.dial_path import DialPath
from ..wire.frames import KVFrame
from ..wire.signals import Chunk, Signal, frame_of
from ..wire.sockets import hang_up
from ..wire.tickets import LinkTicket, TransferTicket
from .links import LinkConnection, ThreadedLink, TransferHandle
from .receiving import ReceiveMachine, ReceiveProgress
from .settings import LinkSettings
from .transfers import EndState, FrameReady, LinkEvent, TransferComplete, TransferEnded


class _BufferPool:
    """Memory for frames, in powers of two, used again: fresh pages cost a fault per 4 KiB. Under
    the link's lock."""

    def __init__(self, limit_bytes: int) -> None:
        self._free: dict[int, list[bytearray]] = {}
        self._limit = limit_bytes
        self._pooled = 0

    def take(self, size: int) -> memoryview:
        rounded = max(4096, 1 << (size - 1).bit_length())
        free = self._free.get(rounded)
        if free:
            self._pooled -= rounded
            return memoryview(free.pop())[:size]
        return memoryview(bytearray(rounded))[:size]

    def give(self, view: memoryview) -> None:
        buffer = view.obj
        if isinstance(buffer, bytearray) and self._pooled + len(buffer) <= self._limit:
            self._pooled += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)


class IncomingTransfer(TransferHandle["ReceiveLink"]):
    """The receiving end of one transfer. Only one thread takes frames."""

    def __init__(self, link: ReceiveLink, ticket: TransferTicket, on_ready: Callable[[], None] | None) -> None:
        super().__init__(link, ticket)
        self.tokens: int | None = None  # once every frame has arrived
        self._on_ready = on_ready
        self._ready: queue.SimpleQueue[FrameReady | None] = queue.SimpleQueue()
        self._last: ReceiveProgress | None = None

    def grant(self, window_bytes: int | None = None, first: int = 0) -> None:
        """There is a place for the KV: so many bytes may be here that have not been taken and used.
        Nothing comes before the first grant, which also says that the positions before `first` are
        here already. None: as many as the link's settings say."""
        self._link.grant(self, window_bytes, first)

    def __iter__(self) -> Iterator[KVFrame]:
        """Every frame as it becomes whole, in any order. A payload is good until the next frame is
        asked for.

        Ends when the sender's last frame has been taken; raises TransferError when the transfer
        fails."""
        while (frame := self.take()) is not None:
            yield frame[1]
            self.consume(frame[0])

    def take(self, timeout: float | None = None) -> tuple[int, KVFrame] | None:
        """The next whole frame with its number, None after the last; `consume` must follow when its
        payload is no longer looked at. Raises TransferTimeout after `timeout`, TransferError when
        the transfer has failed."""
        try:
            ready = self._ready.get(timeout=timeout)
        except queue.Empty:
            raise TransferTimeout(f"no frame within {timeout} s") from None
        if ready is not None:
            return ready.frame, frame_of(ready.header, ready.payload)
        self._ready.put(None)  # for whoever asks again
        if self._state.name == "failed":
            raise TransferAborted(self._state.reason)
        return None

    def consume(self, frame: int) -> None:
        """The payload of a frame is no longer looked at: the sender may send as much more."""
        self._link.consume(self, frame)

    def acknowledge(self) -> None:
        """All of it has been taken: delivered here, soon at the sender. Raises TransferError if it
        failed meanwhile."""
        self._link.acknowledge(self)
        if self._state.name != "delivered":
            raise TransferAborted(self._state.reason)

    def progress(self) -> ReceiveProgress:
        """How far it is."""
        return self._link.progress(self)

    def _frame(self, ready: FrameReady) -> Callable[[], None] | None:
        self._ready.put(ready)
        return self._on_ready

    def _whole(self, tokens: int) -> Callable[[], None] | None:
        self.tokens = tokens
        self._ready.put(None)
        return self._on_ready

    def _end(self, state: EndState, last: ReceiveProgress) -> Callable[[], None]:
        self._state, self._last = state, last
        self._ready.put(None)
        self._ended.set()
        return self._on_ready or (lambda: None)


class ReceiveLink(ThreadedLink):
    """Connections from one sending process: give it arrivals (`attach`), or paths to dial."""

    _role = LinkRole.RECEIVER

    def __init__(self, ticket: LinkTicket, paths: Sequence[DialPath], settings: LinkSettings) -> None:
        self._pool = _BufferPool(settings.pooled_bytes)
        self._receiver = ReceiveMachine(settings, ticket.lease_s, time.monotonic(), self._pool.take)
        self._transfers: dict[bytes, IncomingTransfer] = {}
        super().__init__(ticket, self._receiver, paths)

    def expect(self, ticket: TransferTicket, on_ready: Callable[[], None] | None = None) -> IncomingTransfer:
        """A transfer will come. `on_ready`, called by the link's thread, must not block: a frame is
        whole, or the end. Raises TransferError for a link that is over or another's ticket."""
        self._require_own(ticket)
        incoming = IncomingTransfer(self, ticket, on_ready)
        with self._use_machine() as now:
            self._receiver.expect(ticket.transfer, now + ticket.deadline_s, now)
            self._transfers[ticket.transfer] = incoming
            self._timer.notify_all()
        return incoming

    # ---- for IncomingTransfer ---------------------------------------------------------------------------------------

    def grant(self, incoming: IncomingTransfer, window_bytes: int | None, first: int) -> None:
        """See `IncomingTransfer.grant`."""
        with self._use_machine():
            window = self._receiver.settings.window_bytes if window_bytes is None else window_bytes
            self._receiver.grant(incoming.ticket.transfer, window, first)

    def consume(self, incoming: IncomingTransfer, frame: int) -> None:
        """See `IncomingTransfer.consume`."""
        with self._use_machine():
            memory = self._receiver.consume(incoming.ticket.transfer, frame)
            if memory is not None:
                self._pool.give(memory)

    def acknowledge(self, incoming: IncomingTransfer) -> None:
        """See `IncomingTransfer.acknowledge`."""
        with self._use_machine():
            self._receiver.acknowledge(incoming.ticket.transfer)

    def progress(self, incoming: IncomingTransfer) -> ReceiveProgress:
        """See `IncomingTransfer.progress`."""
        with self._lock:
            last = incoming._last  # noqa: SLF001 (the other half of this)
            progress = last or self._receiver.progress(incoming.ticket.transfer)
        assert progress is not None, "what has not ended is known"
        return progress

    def check_integrity(self) -> None:
        """See `ReceiveMachine.check_integrity`."""
        with self._lock:
            self._receiver.check_integrity()

    # ---- for ThreadedLink ----------------------------------------------------------------------------------------

    def _handle(self, event: LinkEvent, later: list[Callable[[], None]]) -> None:
        call: Callable[[], None] | None = None
        match event:
            case FrameReady(transfer):
                incoming = self._transfers.get(transfer)
                call = None if incoming is None else incoming._frame(event)  # noqa: SLF001 (the other half of this)
            case TransferComplete(transfer, tokens):
                incoming = self._transfers.get(transfer)
                call = None if incoming is None else incoming._whole(tokens)  # noqa: SLF001
            case TransferEnded(transfer, state):
                incoming = self._transfers.pop(transfer, None)
                last = self._receiver.progress(transfer)
                self._receiver.forget(transfer)
                if incoming is not None and last is not None:
                    call = incoming._end(state, last)  # noqa: SLF001
            case _:
                raise AssertionError(f"{event} is no event of a receiver")
        if call is not None:
            later.append(call)

    def _on_connection(self, wire: LinkConnection) -> None:
        wire.scratch = memoryview(bytearray(self._receiver.settings.chunk_bytes))

    def _take_chunk(self, wire: LinkConnection, chunk: Chunk, now: float) -> None:
        with self._lock:
            placement = self._receiver.place_chunk(wire.number, chunk, now)
        if placement is None:
            if len(wire.scratch) < chunk.length:
                wire.scratch = memoryview(bytearray(chunk.length))
            wire.channel.open_payload(wire.scratch[: chunk.length])
            with self._lock:
                self._receiver.skip_chunk(wire.number)
            return
        try:
            wire.channel.open_payload(placement.into)
        except KVProtocolError:
            with self._use_machine():
                self._receiver.reject_chunk(placement)
            raise
        later: list[Callable[[], None]] = []
        with self._lock:
            self._receiver.finish_chunk(wire.number, placement, now)
            if self._receiver.has_events:
                self._handle_events(later)
        for call in later:
            call()

    def _flush(self) -> None:
        """Say what is to be said on the connection that was heard last."""
        if not self._receiver.has_control:
            return
        with self._lock:
            heard = sorted(self._receiver.connections.values(), key=lambda each: -each.heard_at)
            wire = next((self._wires[each.number] for each in heard if each.number in self._wires), None)
        if wire is not None:
            self._pump(wire)

    def _on_time(self) -> None:
        with self._lock:
            wires = list(self._wires.values())
        for wire in wires:
            self._pump(wire)

    def _before_read(self, wire: LinkConnection) -> None:
        """Confirm what has come: not each chunk while they come fast, but at once when no more
        does."""
        connection = self._receiver.connections.get(wire.number)
        if connection is None:
            return
        # On a long path the kernel opens the window only as bytes are taken out: waiting for more would starve it.
        if wire.near:
            self._mark(wire)
        news, settings = connection.handled - connection.told, self._receiver.settings
        if news >= settings.ack_chunks:
            self._pump(wire)
        elif news or connection.bytes_in - connection.bytes_told >= settings.ack_bytes:
            if wire.poll.poll(settings.ack_within_ms):
                return
            self._pump(wire)
        if wire.wakes_at > 1:
            # A blocking recv would take what is there and wait for the rest, of which the kernel then says nothing:
            # it wakes a reader only when as much as the mark is in the queue.
            wire.poll.poll()

    def _mark(self, wire: LinkConnection) -> None:
        """Let the kernel wake this thread when it is worth it. Each waking costs both sides more
        than the reading: while chunks come fast it sleeps until one is whole, else the sender is to
        hear of every `wake_bytes`."""
        now, settings = time.monotonic(), self._receiver.settings
        enough = max(wire.channel.missing, 1)
        if now - wire.read_at > settings.fast_s:
            enough = min(enough, settings.wake_bytes)
        wire.read_at = now
        if enough != wire.wakes_at:
            wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
            wire.wakes_at = enough

    def _pump(self, wire: LinkConnection) -> None:
        """Send what there is. It is little, and goes without waiting: a sender that lets this pile
        up is gone."""
        with wire.sending:
            with self._lock:
                if wire.dead:
                    return
                now, signals = time.monotonic(), list[Signal]()
                while (signal := self._receiver.next_signal(wire.number, now)) is not None:
                    signals.append(signal)
                over = self._receiver.ended is not None
            try:
                if signals:
                    data = b"".join([bytes(wire.channel.seal(signal)) for signal in signals])
                    if wire.sock.send(data, socket.MSG_DONTWAIT) != len(data):
                        raise BlockingIOError
                if over:
                    wire.sock.shutdown(socket.SHUT_WR)
            except OSError:
                hang_up(wire.sock)
