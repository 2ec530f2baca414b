"""KV transfers of an emulated engine: real bytes over real links, in the sizes and at the moments
of a real engine's.

Only their content is made up. A layer is sent when the step that computes it would have computed it;
the codecs cost no time, as on a GPU that is busy with other work.

Nothing is queued for a receiver that has no blocks for it yet, and the links together hold a limited
number of bytes: a frame waits until it fits. A transfer ends by delivery, abort, deadline or loss,
and never for want of memory.
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

from ....kernels.codecs import codec_named
from ....kernels.format import WINDOW_TOKENS, WireDtype, payload_bytes
from ....kvtransport.errors import FiguresError, KVProtocolError, TransferError
from ....kvtransport.link.endpoint import Endpoint
from ....kvtransport.link.receive_link import IncomingTransfer as ReceivingEnd
from ....kvtransport.link.receive_link import ReceiveLink
from ....kvtransport.link.receiving import MIN_WINDOW_BYTES
from ....kvtransport.link.send_link import OutgoingTransfer as SendingEnd
from ....kvtransport.link.send_link import SendLink
from ....kvtransport.link.sending import SendProgress
from ....kvtransport.link.settings import LinkSettings
from ....kvtransport.link.transfers import EndState
from ....kvtransport.routing.report import TransferTimes
from ....kvtransport.routing.reslice import localise
from ....kvtransport.wire.assembly import Assembly
from ....kvtransport.wire.channel import parse_link_hello
from ....kvtransport.wire.frames import MAX_PAYLOAD_BYTES, KVFrame
from ..protocol import AbortTransfer, CloseLink, Inlet, LinkReport, Outlet, SetLinkPaths, TransferReport
from ..settings import TRANSFER_DEFAULTS, TransferSettings
from ..transfers.reports import SentTotals, link_report, sent_report, unopened_report

DTYPE: Final = WireDtype.BF16
_CONTENT: Final = memoryview(bytes(MAX_PAYLOAD_BYTES))

Report = Callable[[TransferReport | LinkReport], None]


class ComputedSpan(NamedTuple):
    """Tokens `[first, last)` of a prompt, whose layers a step computes one after the other from
    `began` to `ends` (monotonic seconds); `final`: the prompt ends with them."""

    first: int
    last: int
    began: float
    ends: float
    final: bool


@final
class Countdown:
    """Calls `done` when `count_down` has been called so often; thread-safe."""

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._left = count
        self._done = done
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Countdown {self._left}>"

    def count_down(self) -> None:
        """Count one; the last caller runs `done`."""
        with self._lock:
            self._left -= 1
            over = not self._left
        if over:
            self._done()


@final
class EmulatedSend:
    """Sends a prompt's KV to one worker of another engine; always ends with one report."""

    def __init__(
        self, outlet: Outlet, link: SendLink, shape: tuple[int, int], report: Callable[[TransferReport], None]
    ) -> None:
        """`shape`: layers of the model, channels of a head."""
        self.outlet = outlet
        self.link = link
        self._layers, self._head_dim = shape
        self._report = report
        self._spans: queue.SimpleQueue[tuple[int, ComputedSpan] | None] = queue.SimpleQueue()
        self._withdrawn = 0  # number of preemptions; spans computed before the last one are lost
        self._sent_up_to = dict.fromkeys(outlet.slice.layers, 0)  # tokens of each layer
        self._ended = threading.Event()
        self._sent = SentTotals(0, 0, 0)
        self._first_at = 0.0  # when the first frame could leave
        self._waiting_since: float | None = None  # for the receiver's credit
        self._waited_s = 0.0
        self._end = link.open(outlet.ticket, self._on_end)
        name = f"kv-send-{outlet.ticket.transfer.hex()[:8]}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def send_span(self, span: ComputedSpan) -> None:
        """Send these tokens while they are computed."""
        self._spans.put((self._withdrawn, span))

    def withdraw(self) -> None:
        """The request has been preempted: what has not been sent is lost, and is computed again."""
        self._withdrawn += 1

    def abort(self, reason: str) -> None:
        """Give up the transfer; the receiver is told if it can be reached."""
        self._end.abort(reason)
        self._stop()

    def progress(self) -> SendProgress:
        """How far it is, with the wait for credit, which the link does not see."""
        progress, since = self._end.progress(), self._waiting_since
        waits_s = 0.0 if since is None else time.monotonic() - since
        return replace(progress, blocked_s=progress.blocked_s + self._waited_s + waits_s)

    def _on_end(self, end: SendingEnd, state: EndState) -> None:
        if state.name == "failed":
            self._stop()

    def _stop(self) -> None:
        self._ended.set()
        self._spans.put(None)

    def _run(self) -> None:
        deadline_s = self.outlet.ticket.deadline_s
        done_at = 0.0
        reason = "a bug in the sending engine; its log has the details"  # replaced at every end below
        try:
            for frame, done_at in self._frames():  # noqa: B007 (the last one counts)
                self._end.send(frame, timeout=deadline_s)
                self._count(frame)
            state = self._end.wait(deadline_s)
            reason = "" if state.name == "delivered" else state.reason or "not delivered before the deadline"
        except (TransferError, OSError) as error:
            reason = str(error) or type(error).__name__
        finally:
            if reason:
                self._end.abort(reason)  # does nothing to one that has ended
            now = time.monotonic()
            times = TransferTimes(
                first_frame_at=self._first_at or now, prefill_done_at=done_at or now, acknowledged_at=now
            )
            ticket, progress = self.outlet.ticket, self.progress()
            self._report(sent_report(ticket, self._sent, times, progress, mode=self._mode, reason=reason))

    @property
    def _mode(self) -> str:
        """Serialised only if the outlet asks for it: sending layer by layer costs a modelled GPU nothing."""
        return "serialised" if self.outlet.pacing == "serialised" else "layerwise"

    def _frames(self) -> Iterator[tuple[KVFrame, float]]:
        """All frames, each when it may be sent, with the moment when its span has been computed."""
        serialised = self._mode == "serialised"
        while (item := self._spans.get()) is not None:
            turn, span = item
            step = (span.ends - span.began) / self._layers
            if turn == self._withdrawn and (not serialised or span.final):
                for layer in self.outlet.slice.layers:
                    ready_at = span.ends if serialised else span.began + (layer + 1) * step
                    if self._ended.wait(max(0.0, ready_at - time.monotonic())):
                        return
                    self._wait_for_credit()
                    for frame in self._layer(layer, max(self._end.first, self._sent_up_to[layer]), span.last):
                        if turn != self._withdrawn:
                            break
                        self._sent_up_to[layer] = frame.end
                        yield frame, span.ends
            if span.final and turn == self._withdrawn:
                self._ended.wait(max(0.0, span.ends - time.monotonic()))
                self._end.finish(span.last)
                return

    def _wait_for_credit(self) -> None:
        """Wait until the receiver has blocks; its first position. Raises TransferError at the end."""
        began = self._waiting_since = time.monotonic()
        self._first_at = self._first_at or began
        self._end.wait_for_credit(self.outlet.ticket.deadline_s)
        self._waiting_since, self._waited_s = None, self._waited_s + time.monotonic() - began

    def _layer(self, layer: int, first: int, last: int) -> Iterator[KVFrame]:
        held, codec = self.outlet.slice, codec_named(self.outlet.ticket.codec)
        heads = held.last_head - held.first_head
        most = max(1, MAX_PAYLOAD_BYTES // 2 // self._bytes(heads) // WINDOW_TOKENS) * WINDOW_TOKENS
        for start in range(first, last, most):
            tokens = min(most, last - start)
            size = payload_bytes(codec, DTYPE, start=start, tokens=tokens, heads=heads, head_dim=self._head_dim)
            yield KVFrame(
                layer=layer,
                head_first=held.first_head,
                head_last=held.last_head,
                start=start,
                tokens=tokens,
                codec=codec.wire,
                dtype=DTYPE.wire,
                head_dim=self._head_dim,
                payload=_CONTENT[:size],
            )

    def _bytes(self, heads: int) -> int:
        """Bytes of K and V of one token in one layer, before they are encoded."""
        return 2 * heads * self._head_dim * DTYPE.itemsize

    def _count(self, frame: KVFrame) -> None:
        raw = frame.tokens * self._bytes(frame.heads)
        wire = self.link.wire_bytes(memoryview(frame.payload).nbytes)
        sent = self._sent
        self._sent = SentTotals(sent.raw_bytes + raw, sent.wire_bytes + wire, sent.frames + 1)


@final
class PromptArrival:
    """What comes for one prompt, from all workers; `on_end` is called once, by any thread."""

    def __init__(
        self, inlets: Sequence[tuple[Inlet, ReceiveLink]], tokens: int, limit_bytes: int, on_end: Callable[[], None]
    ) -> None:
        """Expect the first `tokens` tokens. Raises TransferError when a link has ended."""
        self.transfer = inlets[0][0].ticket.transfer
        self.deadline = time.monotonic() + min(inlet.ticket.deadline_s for inlet, _ in inlets)
        self._tokens = tokens
        self._limit = limit_bytes
        self._on_end = on_end
        self._lock = threading.Lock()
        self._ends: list[tuple[Inlet, ReceivingEnd, Assembly]] = []
        self._incomplete = len(inlets)
        self._ended = self._started = False
        try:
            for inlet, link in inlets:
                heads = inlet.slice.last_head - inlet.slice.first_head
                self._ends.append((inlet, link.expect(inlet.ticket), Assembly(inlet.slice.layers, heads, tokens)))
        except TransferError as error:
            self.abort(str(error))
            raise

    def start(self) -> None:
        """There are blocks for it: the senders may send."""
        with self._lock:
            if self._ended or self._started:
                return
            self._started = True
        window = max(self._limit // len(self._ends), MIN_WINDOW_BYTES)
        for inlet, end, assembly in self._ends:
            name = f"kv-receive-{self.transfer.hex()[:8]}"
            threading.Thread(target=self._run, args=(inlet, end, assembly), name=name, daemon=True).start()
            end.grant(window)

    def progress(self) -> tuple[float, int]:
        """The fraction of all bytes that is here, and how many tokens are complete."""
        with self._lock:
            fractions = [assembly.fraction for _, _, assembly in self._ends]
            return sum(fractions) / len(fractions), min(assembly.complete_tokens() for _, _, assembly in self._ends)

    def abort(self, reason: str) -> None:
        """Stop receiving; tokens that are complete from the first one on are kept."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
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
            self._complete_end(assembly)
        except (TransferError, FiguresError, OSError) as error:
            self.abort(str(error) or type(error).__name__)

    def _complete_end(self, assembly: Assembly) -> None:
        with self._lock:
            if not assembly.is_done:
                raise TransferError(f"the transfer ended after {assembly.complete_tokens()} complete positions")
            self._incomplete -= 1
            if self._incomplete or self._ended:
                return
            self._ended = True
        for _, end, _ in self._ends:
            with contextlib.suppress(TransferError):  # the KV is here all the same
                end.acknowledge()
        self._on_end()


@final
class EmulatedTransfers:
    """All transfers of an emulated engine, and the links that they take; one process is all its
    workers.

    `limit_bytes`: what all links together hold that is not delivered; a transfer that arrives holds
    no more either. `report` is called by threads: with the end of everything that is sent, once for
    each link of a transfer, and several times a second with how each link gets on that has one.
    """

    def __init__(
        self,
        *,
        layers: int,
        head_dim: int,
        limit_bytes: int,
        report: Report,
        settings: TransferSettings = TRANSFER_DEFAULTS,
    ) -> None:
        self._report_s = settings.report_s
        self._shape = layers, head_dim
        self._limit = limit_bytes
        self._report = report
        self.endpoint = Endpoint(settings=LinkSettings(limit_bytes=limit_bytes))
        self._lock = threading.Lock()
        self._senders: dict[tuple[bytes, bytes], EmulatedSend] = {}  # (transfer, link)
        self._arrivals: dict[bytes, PromptArrival] = {}
        self._sending = threading.Event()
        threading.Thread(target=self._report_links, name="kv-reporter", daemon=True).start()

    def __repr__(self) -> str:
        return f"<EmulatedTransfers sending={len(self._senders)} receiving={len(self._arrivals)} {self.endpoint}>"

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """Take an accepted socket whose hello has been read, maybe before its link is known."""
        try:
            self.endpoint.attach(parse_link_hello(hello), connection)
        except KVProtocolError:
            connection.close()

    def obey(self, order: SetLinkPaths | CloseLink | AbortTransfer) -> None:
        """Do what the agent wants of a link or a transfer, if it is known here."""
        match order:
            case SetLinkPaths(link=link, paths=paths):
                known = self.endpoint.link(link)
                if isinstance(known, SendLink):
                    known.set_paths(paths)
            case CloseLink(link=link, reason=reason):
                # Closing waits for the other end, which the engine's own thread must not do.
                name = f"kv-close-{link.hex()[:8]}"
                threading.Thread(target=self.endpoint.forget, args=(link, reason), name=name, daemon=True).start()
            case AbortTransfer(transfer=transfer, reason=reason):
                self.abort(transfer, reason)

    def abort(self, transfer: bytes, reason: str) -> None:
        """End a transfer in either direction."""
        for sender in self.senders_of(transfer):
            sender.abort(reason)
        with self._lock:
            arrivals = self._arrivals.get(transfer)
        if arrivals is not None:
            arrivals.abort(reason)

    def send(self, outlets: Sequence[Outlet], on_end: Callable[[], None]) -> None:
        """Open the sending ends of a prompt's KV; `on_end` is called once, by some thread, when all
        have ended. One that cannot be opened is reported as one that has failed."""
        ended = Countdown(len(outlets), on_end)
        for outlet in outlets:
            try:
                self._open(outlet, ended)
            except TransferError as error:
                self._report(unopened_report(outlet, str(error)))
                ended.count_down()

    def send_span(self, transfer: bytes, span: ComputedSpan) -> None:
        """A step has begun that computes these tokens of a prompt that is sent."""
        for sender in self.senders_of(transfer):
            sender.send_span(span)

    def withdraw(self, transfer: bytes) -> None:
        """The prompt has been preempted: what has not been sent is computed again."""
        for sender in self.senders_of(transfer):
            sender.withdraw()

    def expect(self, inlets: Sequence[Inlet], tokens: int, on_end: Callable[[], None]) -> PromptArrival:
        """Open the receiving ends for the first `tokens` tokens of a prompt. Raises TransferError."""
        links = []
        for inlet in inlets:
            link = self.endpoint.link(inlet.link.link)
            if not isinstance(link, ReceiveLink) or link.ended is not None:
                link = self.endpoint.open_receiver(inlet.link)
            links.append((inlet, link))
        arrivals = PromptArrival(links, tokens, self._limit, on_end)
        with self._lock:
            self._arrivals[arrivals.transfer] = arrivals
        return arrivals

    def forget(self, transfer: bytes) -> None:
        """An expected transfer is over, or is not waited for any more."""
        with self._lock:
            self._arrivals.pop(transfer, None)

    def senders_of(self, transfer: bytes) -> list[EmulatedSend]:
        """Those of one transfer that have not ended, one for each worker of the receiver."""
        with self._lock:
            return [sender for (found, _), sender in self._senders.items() if found == transfer]

    def _open(self, outlet: Outlet, ended: Countdown) -> None:
        link = self.endpoint.link(outlet.link.link)
        if isinstance(link, SendLink) and link.ended is None:
            link.set_paths(outlet.paths)
        else:
            link = self.endpoint.open_sender(outlet.link, outlet.paths)

        def report(sent: TransferReport) -> None:
            with self._lock:
                self._senders.pop((sent.transfer, sent.link), None)
                if not self._senders:
                    self._sending.clear()
            self._report(sent)
            ended.count_down()

        with self._lock:  # the sender's thread may end and call `report` before it is listed here
            self._senders[outlet.ticket.transfer, outlet.ticket.link] = EmulatedSend(outlet, link, self._shape, report)
            self._sending.set()

    def _report_links(self) -> None:
        """Report the progress of links with open transfers, while there are any."""
        blocked_s: dict[EmulatedSend, float] = {}
        while True:
            self._sending.wait()
            with self._lock:
                senders = list(self._senders.values())
            for link in {each.outlet.link.link: each.link for each in senders}.values():
                self._report(
                    link_report(link, [each for each in senders if each.link is link], blocked_s, self._report_s)
                )
            blocked_s = {each: each.progress().blocked_s for each in senders}
            time.sleep(self._report_s)
