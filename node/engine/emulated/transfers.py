"""KV transfers of an emulated engine: real bytes over real links, in the sizes and at the moments of a real engine's.

Only their content is made up. A layer leaves when the step that computes it would have computed it; the codecs cost no
time, as on a GPU that is busy with other things.

KV stays with its engine until it can leave: nothing is queued for a receiver that has no place for it yet, and links
hold so many bytes, which the next frame waits for. A transfer ends by delivery, abort, deadline or loss, and never for
want of memory.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, final

from ....kernels.format import KEY_SPAN_TOKENS, Codec, WireDtype, payload_bytes
from ....kvtransport.errors import FiguresError, KVProtocolError, TransferError
from ....kvtransport.link.endpoint import Endpoint
from ....kvtransport.link.lanes import EndState, LinkSettings
from ....kvtransport.link.receive_link import IncomingTransfer as ReceivingEnd
from ....kvtransport.link.receive_link import ReceiveLink
from ....kvtransport.link.receiving import MIN_WINDOW_BYTES
from ....kvtransport.link.reslice import localise
from ....kvtransport.link.send_link import OutgoingTransfer as SendingEnd
from ....kvtransport.link.send_link import SendLink
from ....kvtransport.link.sending import SendProgress
from ....kvtransport.routing.report import TransferTimes
from ....kvtransport.wire.assembly import Assembly
from ....kvtransport.wire.channel import parse_link_hello
from ....kvtransport.wire.frames import MAX_PAYLOAD_BYTES, KVFrame
from ..protocol import AbortTransfer, CloseLink, Inlet, LinkReport, Outlet, SetLinkPaths, TransferReport
from ..transfers.reports import REPORT_INTERVAL_S, SentTotals, link_report, sent_report, unopened_report

__all__ = ["ComputedSpan", "EmulatedTransfers", "PromptArrival"]

DTYPE: Final = WireDtype.BF16
_CONTENT: Final = memoryview(bytes(MAX_PAYLOAD_BYTES))

Report = Callable[[TransferReport | LinkReport], None]


class ComputedSpan(NamedTuple):
    """Positions `[first, last)` of a prompt, whose layers are computed one after the other from `began` to `ends`
    (monotonic seconds); `final`: the prompt ends with it."""

    first: int
    last: int
    began: float
    ends: float
    final: bool


@final
class Countdown:
    """Calls `done`, by whichever thread is the last, when so many things have ended."""

    def __init__(self, things: int, done: Callable[[], None]) -> None:
        self._left = things
        self._done = done
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Countdown {self._left}>"

    def one(self) -> None:
        """One of them has."""
        with self._lock:
            self._left -= 1
            over = not self._left
        if over:
            self._done()


@final
class EmulatedSend:
    """What goes to one worker of another engine. Exactly one report is made, whatever happens."""

    def __init__(
        self, outlet: Outlet, link: SendLink, shape: tuple[int, int], report: Callable[[TransferReport], None]
    ) -> None:
        """`shape`: layers of the model, channels of a head."""
        self.outlet = outlet
        self.link = link
        self._layers, self._head_dim = shape
        self._report = report
        self._chunks: queue.SimpleQueue[tuple[int, ComputedSpan] | None] = queue.SimpleQueue()
        self._withdrawn = 0  # so many times; chunks of an earlier time are not there any more
        self._read = dict.fromkeys(outlet.slice.layers, 0)  # positions of each layer that have left the cache
        self._over = threading.Event()
        self._sent = SentTotals(0, 0, 0)
        self._first_at = 0.0  # when the first frame could leave
        self._waits_since: float | None = None  # for the receiver to have a place
        self._waited_s = 0.0
        self._end = link.open(outlet.ticket, self._on_end)
        name = f"kv-send-{outlet.ticket.transfer.hex()[:8]}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def compute(self, chunk: ComputedSpan) -> None:
        """These positions are being computed."""
        self._chunks.put((self._withdrawn, chunk))

    def withdraw(self) -> None:
        """What has been computed and not read is lost, and will be computed again."""
        self._withdrawn += 1

    def abort(self, reason: str) -> None:
        """Give the transfer up; the receiver is told if it can be."""
        self._end.abort(reason)
        self._stop()

    def progress(self) -> SendProgress:
        """How far it is. Nothing is queued before the receiver has a place, so the link does not see that wait."""
        progress, since = self._end.progress(), self._waits_since
        waits_s = 0.0 if since is None else time.monotonic() - since
        return replace(progress, blocked_s=progress.blocked_s + self._waited_s + waits_s)

    def _on_end(self, end: SendingEnd, state: EndState) -> None:
        if state.name == "failed":
            self._stop()

    def _stop(self) -> None:
        self._over.set()
        self._chunks.put(None)

    def _run(self) -> None:
        deadline_s = self.outlet.ticket.deadline_s
        done_at = 0.0
        reason = "a bug in the sending engine; its log has the details"  # unless one of the ends below is reached
        try:
            for frame, done_at in self._frames():  # noqa: B007 (the last one counts)
                self._end.send(frame, timeout=deadline_s)
                self._note(frame)
            state = self._end.wait(deadline_s)
            reason = "" if state.name == "delivered" else state.reason or "not delivered before the deadline"
        except (TransferError, OSError) as error:
            reason = str(error) or type(error).__name__
        finally:
            if reason:
                self._end.abort(reason)  # no matter to one that has ended
            now = time.monotonic()
            times = TransferTimes(
                first_frame_at=self._first_at or now, prefill_done_at=done_at or now, acknowledged_at=now
            )
            ticket, progress = self.outlet.ticket, self.progress()
            self._report(sent_report(ticket, self._sent, times, progress, mode=self._mode, reason=reason))

    @property
    def _mode(self) -> str:
        """In one piece only where that is asked for: a hand-over of a layer costs a modelled GPU nothing."""
        return "serialised" if self.outlet.pacing == "serialised" else "layerwise"

    def _frames(self) -> Iterator[tuple[KVFrame, float]]:
        """All frames, each when it may leave, with the moment when its chunk has been computed."""
        serialised = self._mode == "serialised"
        while (item := self._chunks.get()) is not None:
            turn, chunk = item
            step = (chunk.ends - chunk.began) / self._layers
            if turn == self._withdrawn and (not serialised or chunk.final):
                for layer in self.outlet.slice.layers:
                    ready_at = chunk.ends if serialised else chunk.began + (layer + 1) * step
                    if self._over.wait(max(0.0, ready_at - time.monotonic())):
                        return
                    self._wait_for_place()
                    for frame in self._layer(layer, max(self._end.first, self._read[layer]), chunk.last):
                        if turn != self._withdrawn:
                            break
                        self._read[layer] = frame.end
                        yield frame, chunk.ends
            if chunk.final and turn == self._withdrawn:
                self._over.wait(max(0.0, chunk.ends - time.monotonic()))
                self._end.finish(chunk.last)
                return

    def _wait_for_place(self) -> None:
        """Until the receiver has one, and has said what it has already. Raises TransferError once it will not."""
        began = self._waits_since = time.monotonic()
        self._first_at = self._first_at or began
        self._end.wait_for_credit(self.outlet.ticket.deadline_s)
        self._waits_since, self._waited_s = None, self._waited_s + time.monotonic() - began

    def _layer(self, layer: int, first: int, last: int) -> Iterator[KVFrame]:
        part, codec = self.outlet.slice, Codec(self.outlet.ticket.codec)
        heads = part.last_head - part.first_head
        most = max(1, MAX_PAYLOAD_BYTES // 2 // self._bytes(heads) // KEY_SPAN_TOKENS) * KEY_SPAN_TOKENS
        for start in range(first, last, most):
            tokens = min(most, last - start)
            size = payload_bytes(codec, DTYPE, start=start, tokens=tokens, heads=heads, head_dim=self._head_dim)
            yield KVFrame(
                layer=layer,
                head_first=part.first_head,
                head_last=part.last_head,
                start=start,
                tokens=tokens,
                codec=codec.wire,
                dtype=DTYPE.wire,
                head_dim=self._head_dim,
                payload=_CONTENT[:size],
            )

    def _bytes(self, heads: int) -> int:
        """K and V of one position in one layer, before they are encoded."""
        return 2 * heads * self._head_dim * DTYPE.itemsize

    def _note(self, frame: KVFrame) -> None:
        raw = frame.tokens * self._bytes(frame.heads)
        wire = self.link.wire_bytes(memoryview(frame.payload).nbytes)
        sent = self._sent
        self._sent = SentTotals(sent.raw_bytes + raw, sent.wire_bytes + wire, sent.frames + 1)


@final
class PromptArrival:
    """What comes for one prompt, from all workers of the other engine; `on_end` is called once, by one of its threads
    or by whoever gives it up."""

    def __init__(
        self, inlets: Sequence[tuple[Inlet, ReceiveLink]], tokens: int, limit_bytes: int, on_end: Callable[[], None]
    ) -> None:
        """Expect the first `tokens` positions. Raises TransferError when one of the links is over."""
        self.transfer = inlets[0][0].ticket.transfer
        self.deadline = time.monotonic() + min(inlet.ticket.deadline_s for inlet, _ in inlets)
        self._tokens = tokens
        self._limit = limit_bytes
        self._on_end = on_end
        self._lock = threading.Lock()
        self._ends: list[tuple[Inlet, ReceivingEnd, Assembly]] = []
        self._coming = len(inlets)
        self._over = self._started = False
        try:
            for inlet, link in inlets:
                heads = inlet.slice.last_head - inlet.slice.first_head
                self._ends.append((inlet, link.expect(inlet.ticket), Assembly(inlet.slice.layers, heads, tokens)))
        except TransferError as error:
            self.abort(str(error))
            raise

    def start(self) -> None:
        """There is room for it: the senders may send."""
        with self._lock:
            if self._over or self._started:
                return
            self._started = True
        window = max(self._limit // len(self._ends), MIN_WINDOW_BYTES)
        for inlet, end, assembly in self._ends:
            name = f"kv-receive-{self.transfer.hex()[:8]}"
            threading.Thread(target=self._run, args=(inlet, end, assembly), name=name, daemon=True).start()
            end.grant(window)

    def progress(self) -> tuple[float, int]:
        """Which part of everything is there, and how many positions every layer and head has."""
        with self._lock:
            parts = [assembly.part for _, _, assembly in self._ends]
            return sum(parts) / len(parts), min(assembly.complete_tokens() for _, _, assembly in self._ends)

    def abort(self, reason: str) -> None:
        """No more is wanted, or no more will come; what has come as a whole prefix is kept."""
        with self._lock:
            if self._over:
                return
            self._over = True
        for _, end, _ in self._ends:
            end.abort(reason)
        self._on_end()

    def _run(self, inlet: Inlet, end: ReceivingEnd, assembly: Assembly) -> None:
        heads = range(inlet.slice.first_head, inlet.slice.last_head)
        try:
            for frame in end:
                local = localise(frame, heads)
                with self._lock:
                    assembly.add(local)
            self._one_is_whole(assembly)
        except (TransferError, FiguresError, OSError) as error:
            self.abort(str(error) or type(error).__name__)

    def _one_is_whole(self, assembly: Assembly) -> None:
        with self._lock:
            if not assembly.done:
                raise TransferError(f"the transfer ended after {assembly.complete_tokens()} complete positions")
            self._coming -= 1
            if self._coming or self._over:
                return
            self._over = True
        for _, end, _ in self._ends:
            with contextlib.suppress(TransferError):  # it has come all the same
                end.acknowledge()
        self._on_end()


@final
class EmulatedTransfers:
    """All transfers of an emulated engine, and the links that they take; one process is all its workers.

    `limit_bytes`: what all links together hold that is not delivered; a transfer that arrives holds no more either.
    `report` is called by threads: with the end of everything that is sent, once for each link of a transfer, and
    several times a second with how each link gets on that has one.
    """

    def __init__(self, *, layers: int, head_dim: int, limit_bytes: int, report: Report) -> None:
        self._shape = layers, head_dim
        self._limit = limit_bytes
        self._report = report
        self._endpoint = Endpoint(settings=LinkSettings(limit_bytes=limit_bytes))
        self._lock = threading.Lock()
        self._senders: dict[tuple[bytes, bytes], EmulatedSend] = {}  # (transfer, link)
        self._arrivals: dict[bytes, PromptArrival] = {}
        self._sending = threading.Event()
        threading.Thread(target=self._tell, name="kv-reporter", daemon=True).start()

    def __repr__(self) -> str:
        return f"<EmulatedTransfers sending={len(self._senders)} receiving={len(self._arrivals)} {self._endpoint}>"

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """Hand over an accepted socket whose hello has been read; it may come before its link is known here."""
        try:
            self._endpoint.attach(parse_link_hello(hello), connection)
        except KVProtocolError:
            connection.close()

    def carry_out(self, order: SetLinkPaths | CloseLink | AbortTransfer) -> None:
        """What the agent wants of a link or a transfer; what is not known here is no matter."""
        match order:
            case SetLinkPaths(link=link, paths=paths):
                known = self._endpoint.link(link)
                if isinstance(known, SendLink):
                    known.set_paths(paths)
            case CloseLink(link=link, reason=reason):
                # Goodbyes are said by a thread: the engine's must not wait for them.
                name = f"kv-close-{link.hex()[:8]}"
                threading.Thread(target=self._endpoint.forget, args=(link, reason), name=name, daemon=True).start()
            case AbortTransfer(transfer=transfer, reason=reason):
                self.abort(transfer, reason)

    def abort(self, transfer: bytes, reason: str) -> None:
        """End a transfer in either direction."""
        for sender in self._of(transfer):
            sender.abort(reason)
        with self._lock:
            arrivals = self._arrivals.get(transfer)
        if arrivals is not None:
            arrivals.abort(reason)

    def send(self, outlets: Sequence[Outlet], on_end: Callable[[], None]) -> None:
        """Open the sending ends of a prompt's KV; `on_end` is called once, by some thread, when all have ended. One
        that cannot be opened is reported as one that has failed."""
        ended = Countdown(len(outlets), on_end)
        for outlet in outlets:
            try:
                self._open(outlet, ended)
            except TransferError as error:
                self._report(unopened_report(outlet, str(error)))
                ended.one()

    def compute(self, transfer: bytes, chunk: ComputedSpan) -> None:
        """A step has begun that computes these positions of what is sent."""
        for sender in self._of(transfer):
            sender.compute(chunk)

    def withdraw(self, transfer: bytes) -> None:
        """What has been computed of this prompt and not read is not there any more. It will be computed again."""
        for sender in self._of(transfer):
            sender.withdraw()

    def expect(self, inlets: Sequence[Inlet], tokens: int, on_end: Callable[[], None]) -> PromptArrival:
        """Open the receiving ends for the first `tokens` positions of a prompt. Raises TransferError."""
        links = []
        for inlet in inlets:
            link = self._endpoint.link(inlet.link.link)
            if not isinstance(link, ReceiveLink) or link.ended is not None:
                link = self._endpoint.receiving(inlet.link)
            links.append((inlet, link))
        arrivals = PromptArrival(links, tokens, self._limit, on_end)
        with self._lock:
            self._arrivals[arrivals.transfer] = arrivals
        return arrivals

    def forget(self, transfer: bytes) -> None:
        """What was expected has come, or is not waited for any more."""
        with self._lock:
            self._arrivals.pop(transfer, None)

    def _of(self, transfer: bytes) -> list[EmulatedSend]:
        with self._lock:
            return [sender for (found, _), sender in self._senders.items() if found == transfer]

    def _open(self, outlet: Outlet, ended: Countdown) -> None:
        link = self._endpoint.link(outlet.link.link)
        if isinstance(link, SendLink) and link.ended is None:
            link.set_paths(outlet.paths)
        else:
            link = self._endpoint.sending(outlet.link, outlet.paths)

        def report(sent: TransferReport) -> None:
            with self._lock:
                self._senders.pop((sent.transfer, sent.link), None)
                if not self._senders:
                    self._sending.clear()
            self._report(sent)
            ended.one()

        with self._lock:  # its thread may be done, and want to say so, before this one is
            self._senders[outlet.ticket.transfer, outlet.ticket.link] = EmulatedSend(outlet, link, self._shape, report)
            self._sending.set()

    def _tell(self) -> None:
        """Tell the agent how links with open transfers get on, while there are any."""
        blocked_s: dict[EmulatedSend, float] = {}
        while True:
            self._sending.wait()
            with self._lock:
                senders = list(self._senders.values())
            for link in {each.outlet.link.link: each.link for each in senders}.values():
                self._report(link_report(link, [each for each in senders if each.link is link], blocked_s))
            blocked_s = {each: each.progress().blocked_s for each in senders}
            time.sleep(REPORT_INTERVAL_S)
