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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, final

from ....kernels.codecs import codec_named
from ....kernels.format import WINDOW_TOKENS, WireDtype, payload_bytes
from ....kvtransport.errors import FiguresError, TransferError
from ....kvtransport.link.receive_link import IncomingTransfer as ReceivingEnd
from ....kvtransport.link.receive_link import ReceiveLink
from ....kvtransport.link.receiving import MIN_WINDOW_BYTES
from ....kvtransport.link.send_link import SendLink
from ....kvtransport.routing.reslice import localise
from ....kvtransport.wire.assembly import Assembly
from ....kvtransport.wire.frames import MAX_PAYLOAD_BYTES, KVFrame
from ..protocol import Inlet, Outlet
from ..settings import TRANSFER_DEFAULTS, TransferSettings
from ..transfers.open_transfers import OpenTransfers, Tell
from ..transfers.sender import FrameToSend, SendReport, TransferSender

DTYPE: Final = WireDtype.BF16
_CONTENT: Final = memoryview(bytes(MAX_PAYLOAD_BYTES))


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
class EmulatedSend(TransferSender):
    """Sends a prompt's KV to one worker of another engine."""

    def __init__(self, outlet: Outlet, link: SendLink, shape: tuple[int, int], report: SendReport) -> None:
        """`shape`: layers of the model, channels of a head."""
        super().__init__(outlet, link, report)
        self._layers, self._head_dim = shape
        self._spans: queue.SimpleQueue[tuple[int, ComputedSpan] | None] = queue.SimpleQueue()
        self._sent_up_to = dict.fromkeys(outlet.slice.layers, 0)  # tokens of each layer
        self._ended = threading.Event()
        self._begin()

    def send_span(self, span: ComputedSpan) -> None:
        """Send these tokens while they are computed."""
        self._spans.put((self.withdrawals, span))

    def withdraw(self) -> None:
        """The request has been preempted: what has not been sent is lost, and is computed again."""
        self.withdrawals += 1

    def _stop(self, reason: str) -> None:
        self._ended.set()
        self._spans.put(None)

    @property
    def mode(self) -> str:
        """Serialised only if the outlet asks for it: sending layer by layer costs a modelled GPU nothing."""
        return "serialised" if self.outlet.pacing == "serialised" else "layerwise"

    def _frames(self) -> Iterator[FrameToSend]:
        serialised = self.mode == "serialised"
        while (item := self._spans.get()) is not None:
            withdrawals, span = item
            step = (span.ends - span.began) / self._layers
            if withdrawals == self.withdrawals and (not serialised or span.final):
                for layer in self.outlet.slice.layers:
                    ready_at = span.ends if serialised else span.began + (layer + 1) * step
                    if self._ended.wait(max(0.0, ready_at - time.monotonic())):
                        return
                    self._first_at = self._first_at or time.monotonic()
                    wanted = self._wait_for_credit()
                    for frame in self._layer(layer, max(wanted, self._sent_up_to[layer]), span.last):
                        if withdrawals != self.withdrawals:
                            break
                        self._sent_up_to[layer] = frame.end
                        self._prefill_done_at = span.ends
                        yield FrameToSend(frame, frame.tokens * self._bytes(frame.heads))
            if span.final and withdrawals == self.withdrawals:
                self._ended.wait(max(0.0, span.ends - time.monotonic()))
                self._end.finish(span.last)
                return

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
class EmulatedTransfers(OpenTransfers[EmulatedSend, PromptArrival]):
    """All transfers of an emulated engine; one process is all its workers. A transfer that arrives
    holds no more than `limit_bytes` either."""

    def __init__(
        self,
        *,
        layers: int,
        head_dim: int,
        limit_bytes: int,
        report: Tell,
        settings: TransferSettings = TRANSFER_DEFAULTS,
    ) -> None:
        super().__init__(limit_bytes, report, settings)
        self._shape = layers, head_dim

    def send(self, outlets: Sequence[Outlet], on_end: Callable[[], None]) -> None:
        """Open the sending ends of a prompt's KV; `on_end` is called once, by some thread, when all
        have ended. One that cannot be opened is reported as one that has failed."""
        ended = Countdown(len(outlets), on_end)
        for outlet in outlets:
            make = partial(self._make_sender, outlet)
            self._open_sender(outlet, make, ended.count_down)

    def send_span(self, transfer: bytes, span: ComputedSpan) -> None:
        """A step has begun that computes these tokens of a prompt that is sent."""
        for sender in self.outgoing(transfer):
            sender.send_span(span)

    def withdraw(self, transfer: bytes) -> None:
        """The prompt has been preempted: what has not been sent is computed again."""
        for sender in self.outgoing(transfer):
            sender.withdraw()

    def expect(self, inlets: Sequence[Inlet], tokens: int, on_end: Callable[[], None]) -> PromptArrival:
        """Open the receiving ends for the first `tokens` tokens of a prompt. Raises TransferError."""
        return self._open_receiver(inlets, lambda links: PromptArrival(links, tokens, self._limit_bytes, on_end))

    def _make_sender(self, outlet: Outlet, link: SendLink, report: SendReport) -> EmulatedSend:
        return EmulatedSend(outlet, link, self._shape, report)
