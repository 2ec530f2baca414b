"""The sending end of a link, for the threads of an engine process; `sending` decides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ..errors import TransferAborted, TransferTimeout
from ..routing.report import TransferTimes
from ..wire.channel import CHUNK_OVERHEAD_BYTES, Channel, LinkRole
from ..wire.dial_path import DialPath
from ..wire.frames import KVFrame
from ..wire.signals import Ack, Chunk, Signal
from ..wire.sockets import hang_up
from ..wire.tickets import LinkTicket, TransferTicket
from .budget import ByteBudget
from .links import LinkConnection, ThreadedLink, TransferHandle
from .sending import SendMachine, SendProgress
from .settings import LinkSettings
from .transfers import EndState, LinkEvent, Released, TransferEnded, TransferGranted

OnEnd = Callable[["OutgoingTransfer", EndState], None]


class OutgoingTransfer(TransferHandle["SendLink"]):
    """The sending end of one transfer."""

    def __init__(self, link: SendLink, ticket: TransferTicket, on_end: OnEnd | None) -> None:
        super().__init__(link, ticket)
        self._on_end = on_end
        self._granted = threading.Event()
        self._first = 0
        self._last: SendProgress | None = None
        self._prefill_done_at: float | None = None
        self._ended_at: float | None = None

    @property
    def times(self) -> TransferTimes | None:
        """The moments of a delivered transfer on the link's clock; None for any other."""
        progress = self._last
        if self._state.name != "delivered" or self._ended_at is None or progress is None:
            return None
        first = self._ended_at if progress.first_push_at is None else progress.first_push_at
        done = self._ended_at if self._prefill_done_at is None else self._prefill_done_at
        return TransferTimes(first_frame_at=first, prefill_done_at=done, acknowledged_at=self._ended_at)

    @property
    def first(self) -> int:
        """The receiver has the positions before this one already, as far as is known here."""
        return self._first

    def wait_for_credit(self, timeout: float) -> int:
        """The first position wanted, once the receiver has a place for the KV. Raises
        TransferTimeout after `timeout`, TransferError on failure."""
        if not self._granted.wait(timeout):
            raise TransferTimeout(f"the receiver had no place for the KV within {timeout:g} s")
        if self._state.name == "failed":
            raise TransferAborted(self._state.reason)
        return self._first

    def send(self, frame: KVFrame, *, release: Callable[[], None] | None = None, timeout: float | None = None) -> None:
        """Queue a frame. Its payload must not change until `release` is called, by a thread of the
        link: when the receiver has it, or when the transfer ends.

        Without `timeout` this never waits: when too much is held already, the transfer is aborted.
        With one it waits so long for room. Raises TransferError once the transfer has failed; the
        frame is then released."""
        self._link.push(self, frame, release, timeout)

    def finish(self, tokens: int) -> None:
        """All frames, covering `tokens` positions, have been queued."""
        self._prefill_done_at = self._link.finish(self, tokens)

    def progress(self) -> SendProgress:
        """How far it is."""
        return self._link.progress(self)

    def _grant(self, first: int) -> Callable[[], None]:
        """Under the link's lock. Returns what to do outside it."""
        self._first = first
        return self._granted.set

    def _end(self, state: EndState, last: SendProgress, now: float) -> Callable[[], None]:
        """Under the link's lock. Returns what to do outside it."""
        self._state, self._last, self._ended_at = state, last, now

        def tell() -> None:
            self._ended.set()
            self._granted.set()
            if self._on_end is not None:
                self._on_end(self, state)

        return tell


class SendLink(ThreadedLink):
    """Warm connections to one receiving process, shared by all transfers to it."""

    _role = LinkRole.SENDER

    def __init__(
        self,
        ticket: LinkTicket,
        paths: Sequence[DialPath],
        settings: LinkSettings,
        budget: ByteBudget,
        make_channel: Callable[..., Channel],
    ) -> None:
        self._sender = SendMachine(settings, ticket.lease_s, time.monotonic())
        self._budget = budget
        self._budgeted = 0
        self._transfers: dict[bytes, OutgoingTransfer] = {}
        self._idle = 0
        self._picked = 0  # chunks that were given to connections, all in all
        self._sealing: dict[int, int] = {}  # connection -> number of the chunk whose memory it reads now
        self._unsealed: list[tuple[int, Callable[[], None]]] = []  # releases that wait for chunks up to a number
        super().__init__(ticket, self._sender, paths, make_channel)

    def open(self, ticket: TransferTicket, on_end: OnEnd | None = None) -> OutgoingTransfer:
        """Begin a transfer; the link's thread calls `on_end(outgoing, state)` once, not to be held
        up. Raises TransferError for a link that is over or another's ticket."""
        self._require_own(ticket)
        outgoing = OutgoingTransfer(self, ticket, on_end)
        with self._use_machine() as now:
            self._sender.open(ticket.transfer, now + ticket.deadline_s, now)
            self._transfers[ticket.transfer] = outgoing
            self._timer.notify_all()
        return outgoing

    # ---- for OutgoingTransfer ---------------------------------------------------------------------------------------

    def push(
        self, outgoing: OutgoingTransfer, frame: KVFrame, release: Callable[[], None] | None, timeout: float | None
    ) -> None:
        """See `OutgoingTransfer.send`."""
        size = memoryview(frame.payload).nbytes
        if not self._budget.take(size, timeout or 0.0, lambda: outgoing.state.name == "open"):
            if timeout is None:
                outgoing.abort("the link cannot keep up and the send buffer is full")
            elif outgoing.state.name == "open":
                raise TransferTimeout(f"no room for {size} bytes within {timeout:g} s")
            self._refuse(outgoing, release)
        with self._use_machine() as now:
            self._budgeted += size
            taken = self._sender.push(outgoing.ticket.transfer, frame, now, release)
        if not taken:
            self._refuse(outgoing, release)

    def finish(self, outgoing: OutgoingTransfer, tokens: int) -> float:
        """See `OutgoingTransfer.finish`. Returns when that was."""
        with self._use_machine() as now:
            self._sender.finish(outgoing.ticket.transfer, tokens)
        return now

    def progress(self, outgoing: OutgoingTransfer) -> SendProgress:
        """See `OutgoingTransfer.progress`."""
        with self._lock:
            last = outgoing._last  # noqa: SLF001 (the other half of this class)
            progress = last or self._sender.progress(outgoing.ticket.transfer, time.monotonic())
        assert progress is not None, "what has not ended is known"
        return progress

    def wire_bytes(self, payload_bytes: int) -> int:
        """What a frame with that payload takes on its connections, sent once."""
        return payload_bytes + -(-payload_bytes // self._sender.settings.chunk_bytes) * CHUNK_OVERHEAD_BYTES

    def check_integrity(self) -> None:
        """What is held is what is open."""
        with self._lock:
            self._sender.check_integrity()
            if self._budgeted != self._sender.bytes_held:
                raise AssertionError(f"{self._budgeted} bytes of the budget for {self._sender.bytes_held} held")

    def _refuse(self, outgoing: OutgoingTransfer, release: Callable[[], None] | None) -> None:
        if release is not None:
            release()
        raise TransferAborted(outgoing.state.reason or "the transfer has ended")

    # ---- for ThreadedLink ----------------------------------------------------------------------------------------

    def _handle(self, event: LinkEvent, later: list[Callable[[], None]]) -> None:
        match event:
            case Released(release):
                self._release(release, later)
            case TransferGranted(transfer, first):
                outgoing = self._transfers.get(transfer)
                if outgoing is not None:
                    later.append(outgoing._grant(first))  # noqa: SLF001 (the other half of this class)
            case TransferEnded(transfer, state):
                outgoing = self._transfers.pop(transfer, None)
                now = time.monotonic()
                last = self._sender.progress(transfer, now)
                self._sender.forget(transfer)
                if outgoing is not None and last is not None:
                    later.append(outgoing._end(state, last, now))  # noqa: SLF001 (the other half of this class)

    def _release(self, release: Callable[[], None], later: list[Callable[[], None]]) -> None:
        """A frame's memory is not needed any more, under the lock. Not released while a connection
        reads it: its owner will write something else there, which is not for this peer."""
        if self._sealing:
            self._unsealed.append((self._picked, release))
        else:
            later.append(release)

    def _sealed(self, number: int) -> list[Callable[[], None]]:
        """A connection has read its chunk, under the lock. Returns what nobody reads any more."""
        del self._sealing[number]
        oldest = min(self._sealing.values(), default=self._picked + 1)
        free = [release for picked, release in self._unsealed if picked < oldest]
        self._unsealed = [(picked, release) for picked, release in self._unsealed if picked >= oldest]
        return free

    def _send_soon(self) -> None:
        freed = self._budgeted - self._sender.bytes_held
        if freed:
            self._budgeted -= freed
            self._budget.give(freed)
        if self._idle and self._sender.has_work:
            # Chunks go to whoever wakes; control signals only to connections that are not late.
            self._work.notify(len(self._wires) if self._sender.has_control else 1)

    def _on_connection(self, wire: LinkConnection) -> None:
        wire.writer = self._start(self._write, "write", wire)

    def _on_time(self) -> None:
        with self._work:
            self._work.notify_all()

    def _take_signal(self, wire: LinkConnection, signal: Signal, now: float) -> None:
        super()._take_signal(wire, signal, now)
        if type(signal) is not Ack:
            # Something has to be said on this very connection: a pong, a confirmation.
            with self._work:
                self._work.notify_all()

    def _write(self, wire: LinkConnection) -> None:
        try:
            while self._write_one(wire):
                pass
        except OSError:
            hang_up(wire.sock)  # its reading thread sees to the rest

    def _write_one(self, wire: LinkConnection) -> bool:
        payload: memoryview | None = None
        with self._work:
            while True:
                if wire.dead:
                    return False
                signal = self._sender.next_signal(wire.number, time.monotonic())
                if signal is not None:
                    break
                if self._sender.ended is not None:
                    wire.sock.shutdown(1)
                    return False
                self._idle += 1
                self._work.wait()
                self._idle -= 1
            if type(signal) is Chunk:
                payload = self._sender.payload(wire.number)
                self._picked += 1
                self._sealing[wire.number] = self._picked
                if self._idle and self._sender.has_work:
                    self._work.notify()  # each wakes the next as long as there is work
        try:
            sealed = wire.channel.seal(signal, payload)
        finally:
            if payload is not None:
                with self._work:
                    free = self._sealed(wire.number)
                for release in free:
                    release()
        wire.sock.sendall(sealed)
        return True
