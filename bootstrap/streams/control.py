"""Requests, replies and notices multiplexed on one control stream.

Every frame is one MessagePack struct of a closed, tagged union. Bodies stay undecoded
(:class:`msgspec.Raw`) until the method is known, so an unknown method costs nothing and a
malformed body only its own request.

One class, two owners of time: the caller of :meth:`ControlStream.request` waits with a timeout of
its own, and :meth:`ControlStream.run` reads until the connection is lost. A timeout never touches
the connection.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
import trio
from msgspec import Meta

from ..errors import DECODE_ERRORS, NetworkError, OtherProtocol, PeerLost, ProtocolError, RemoteError, RequestTimeout
from ..settings import NetworkSettings
from ..trust.entries import Entry
from ..trust.keys import PeerId
from ..trust.orders import SignedOrders
from .transport import PeerConnection

_log = logging.getLogger(__name__)

_TURN_S: Final = 0.005  # so long a peer's frames are handled before others get their turn

PROTOCOL_VERSION: Final = 2  # other numbers do not understand each other; releases of one do
_MAX_METHOD_CHARS: Final = 128
_MAX_RETRY_S: Final = 3600.0
GOSSIP: Final = "p2p."  # how the names of the network's own notices begin


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """The first frame of the dialler. Unknown trailing fields are ignored, here and in all messages: a newer release
    may have more to say."""

    version: int
    network: bytes
    member: Entry  # the sender's own member record, which carries its credential
    born: int = 0  # tells this run of the node from all others; grows with the time it was started
    release: Annotated[str, Meta(max_length=64)] = ""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """The listener's answer when it lets the dialler in."""

    version: int
    network: bytes
    member: Entry
    born: int = 0
    release: Annotated[str, Meta(max_length=64)] = ""


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """The listener's answer when it does not. The connection closes after it."""

    reason: str
    holder_born: int = 0  # not 0: the dialler's identity is in use, by a node that was born then
    orders: SignedOrders | None = None  # the owner's, for a former member: they show that it was revoked


class Request(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """Please answer."""

    id: int
    method: str
    body: msgspec.Raw


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The answer to the request of this id."""

    id: int
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """There will be no other answer to the request of this id."""

    id: int
    code: str
    message: str
    retry_after_s: Annotated[float, Meta(ge=0.0, le=_MAX_RETRY_S)] = 0.0  # 0: trying again is not what helps


class NoticeFrame(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """For your information."""

    method: str
    body: msgspec.Raw


class ControlPing(msgspec.Struct, frozen=True, array_like=True, tag="i"):
    """Are you there?"""

    nonce: int


class ControlPong(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """I am."""

    nonce: int


class _AnyHello(msgspec.Struct, frozen=True, array_like=True):
    """How `Hello` and `Welcome` begin in every version of the protocol, whatever follows."""

    kind: Literal["h", "w"]
    version: int


Greeting = Hello | Welcome | Rejected
Message = Request | Reply | Failure | NoticeFrame | ControlPing | ControlPong

_KINDS: Final = frozenset("qrfnio")
_encoder = msgspec.msgpack.Encoder()
_greetings: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_any_hellos: msgspec.msgpack.Decoder[_AnyHello] = msgspec.msgpack.Decoder(_AnyHello)
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

RequestHandler = Callable[[str, msgspec.Raw], Awaitable[bytes]]
NoticeHandler = Callable[[str, msgspec.Raw], None]


def encode_body(body: msgspec.Struct | None) -> bytes:
    """A body as it travels; ``None`` is MessagePack nil."""
    return _encoder.encode(body)


def encode_notice(method: str, body: bytes) -> bytes:
    """A notice frame, to be sent to many peers."""
    return _encoder.encode(NoticeFrame(method, msgspec.Raw(body)))


def encode_greeting(greeting: Greeting) -> bytes:
    """A greeting frame."""
    return _encoder.encode(greeting)


def decode_greeting(frame: bytes) -> Greeting:
    """Read a greeting, or :class:`ProtocolError`, which is OtherProtocol where that is why it cannot be read."""
    try:
        return _greetings.decode(frame)
    except DECODE_ERRORS as error:
        with suppress(*DECODE_ERRORS):
            check_version(_any_hellos.decode(frame).version)
        raise ProtocolError(f"the peer's greeting is malformed ({error}); run the same p2pserve release") from error


def check_version(version: int, release: str = "") -> None:
    """Raise OtherProtocol unless a peer of this release speaks this node's version. The text is for both ends."""
    if version != PROTOCOL_VERSION:
        theirs = f"{version} (release {release})" if release else f"{version}"
        raise OtherProtocol(
            f"protocol versions {theirs} and {PROTOCOL_VERSION} do not understand each other; upgrade the box that "
            f"speaks version {min(version, PROTOCOL_VERSION)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStatistics:
    """What crossed one control stream so far."""

    sent: int
    received: int
    malformed: int
    shed: int
    waiting: int
    serving: int


class _Waiter:
    __slots__ = ("event", "outcome")

    def __init__(self) -> None:
        self.event = trio.Event()
        self.outcome: bytes | NetworkError | None = None

    def settle(self, outcome: bytes | NetworkError) -> None:
        self.outcome = outcome
        self.event.set()


class ControlStream:
    """RPC on one :class:`.transport.Connection`. ``serve`` answers requests (RemoteError becomes a
    Failure), ``notice`` takes notices; both get the undecoded body and may raise
    :class:`ProtocolError`."""

    def __init__(
        self,
        connection: PeerConnection,
        *,
        serve: RequestHandler,
        notice: NoticeHandler,
        settings: NetworkSettings | None = None,
    ) -> None:
        self.connection = connection
        self.peer: PeerId = connection.peer
        self.heard_at = self.used_at = trio.current_time()  # and when anything but gossip last went to or fro
        self.rtts: list[float] = []
        self._settings = settings or NetworkSettings()
        self._serve = serve
        self._notice = notice
        self._waiters: dict[int, _Waiter] = {}
        self._pings: dict[int, float] = {}
        self._next_id = 0
        self._serving = self._sent = self._received = self._malformed = self._offences = self._shed = 0
        self._lost: str | None = None
        self._reading = trio.CancelScope()

    @property
    def rtt_s(self) -> float | None:
        """The best of the recent round trips: the path's own time, without queues in front of it."""
        return min(self.rtts) if self.rtts else None

    @property
    def unanswered_at(self) -> float | None:
        """When it was first pinged after it was last heard; None when it was not."""
        return min((at for at in self._pings.values() if at > self.heard_at), default=None)

    @property
    def offences(self) -> int:
        """How often the peer misbehaved."""
        return self._offences

    @property
    def is_busy(self) -> bool:
        """Whether either end waits for an answer."""
        return bool(self._waiters) or self._serving > 0

    async def run(self) -> None:
        """Read until the connection is lost or misbehaves too often. Has a nursery for handlers."""
        try:
            with self._reading:
                await self._read()
        except* PeerLost as group:
            self._lose(f"the connection to {self.peer} was lost: {_first(group)}")
        finally:
            self._lose(f"the connection to {self.peer} was closed")

    async def _read(self) -> None:
        async with trio.open_nursery() as nursery:
            # Frames are handled in the order in which they came, one at a time. Only the body of a
            # request's handler runs beside it: a slow handler must not keep pings from being heard.
            turn_ends = 0.0
            while self._lost is None and self._offences < self._settings.max_offences:
                frame = await self.connection.receive()
                self._received += 1
                self.heard_at = trio.current_time()
                if self.heard_at > turn_ends:
                    # A thousand frames may have come: whoever sends so many does not keep the others waiting.
                    await trio.lowlevel.checkpoint()
                    turn_ends = trio.current_time() + _TURN_S
                begun = self._dispatch(frame, nursery)
                del frame  # or it would be kept until the next one comes
                if begun is not None:
                    await begun.wait()
            if self._lost is None:
                self._lose(f"{self.peer} sent {self._offences} malformed or forged messages and was disconnected")
            nursery.cancel_scope.cancel()

    def abandon(self, because: str) -> None:
        """Be lost from this moment: nothing more is sent or handled, who waits for an answer
        hears it at once, and :meth:`run` returns. Whoever runs it closes the connection."""
        self._lose(because)
        self._reading.cancel()

    async def request(self, method: str, body: bytes, timeout: float) -> bytes:
        """The encoded answer. Raises RemoteError, RequestTimeout or PeerLost."""
        self._check_open()
        self.used_at = trio.current_time()
        self._next_id += 1
        number = self._next_id
        waiter = self._waiters[number] = _Waiter()
        # The timeout covers sending, too: the queue to a peer that does not read may stay full. It is
        # never the connection's timeout: the answer that comes too late finds no waiter, and is dropped.
        try:
            with trio.move_on_after(max(timeout, 0.0)):
                await self.connection.send(_encoder.encode(Request(number, method, msgspec.Raw(body))))
                self._sent += 1
                await waiter.event.wait()
        finally:
            del self._waiters[number]
        if waiter.outcome is None:
            raise RequestTimeout(
                f"{self.peer} did not answer {method!r} within {timeout:g} s; try again or another peer"
            )
        if isinstance(waiter.outcome, NetworkError):
            raise waiter.outcome
        return waiter.outcome

    def send_nowait(self, frame: bytes) -> bool:
        """Send an encoded notice if there is room; False when it was shed, the peer too slow."""
        self._check_open()
        try:
            self.connection.send_nowait(frame)
        except trio.WouldBlock:
            self._shed += 1
            return False
        self._sent += 1
        return True

    def ping(self) -> None:
        """Ask for a sign of life, which also measures the round trip."""
        self._next_id += 1
        now = trio.current_time()
        # A peer that never answers would let this table grow for as long as it is connected.
        self._pings = {nonce: at for nonce, at in self._pings.items() if now - at < 30.0}
        if self.send_nowait(_encoder.encode(ControlPing(self._next_id))):
            self._pings[self._next_id] = now

    async def is_answering(self, timeout: float) -> bool:
        """Whether the peer answers a ping within ``timeout`` seconds."""
        try:
            self.ping()
        except PeerLost:
            return False
        # Requests and pings are numbered together, so a pong finds its waiter where a reply would.
        waiter = self._waiters[self._next_id] = _Waiter()
        nonce = self._next_id
        try:
            with trio.move_on_after(max(timeout, 0.0)):
                await waiter.event.wait()
        finally:
            del self._waiters[nonce]
        return isinstance(waiter.outcome, bytes)

    def blame(self, offences: int = 1) -> None:
        """Count misbehaviour of the peer that was found further up."""
        self._offences += offences

    def statistics(self) -> ControlStatistics:
        """Counts since the start."""
        return ControlStatistics(
            sent=self._sent,
            received=self._received,
            malformed=self._malformed,
            shed=self._shed,
            waiting=len(self._waiters),
            serving=self._serving,
        )

    def __repr__(self) -> str:
        return f"ControlStream({self.peer}, {self._lost or 'open'}, waiting={len(self._waiters)})"

    def _dispatch(self, frame: bytes, nursery: trio.Nursery) -> trio.Event | None:
        """Handle one frame; what to wait for, if anything, before the next one may be handled."""
        try:
            message = _messages.decode(frame)
        except DECODE_ERRORS as error:
            self._malformed += 1
            if _is_of_unknown_kind(frame):
                return None  # a newer release's
            # One bad frame is no reason to hang up; what counts is whether it goes on.
            self._offences += 1
            _log.warning("dropped a malformed message of %d bytes from %s: %s", len(frame), self.peer, error)
            return None
        if isinstance(message, Request | Reply) or (isinstance(message, NoticeFrame) and message.method[:4] != GOSSIP):
            self.used_at = self.heard_at
        match message:
            case Request():
                return self._accept_request(message, nursery)
            case Reply(id=number, body=body):
                if (waiter := self._waiters.get(number)) is not None:
                    waiter.settle(bytes(body))
            case Failure(id=number, code=code, message=text, retry_after_s=retry_s):
                if (waiter := self._waiters.get(number)) is not None:
                    waiter.settle(RemoteError(code, text, retry_after_s=retry_s or None))
            case NoticeFrame(method=method, body=body):
                try:
                    self._notice(method, body)
                except ProtocolError as error:
                    self._offences += 1
                    _log.warning("dropped a notice %.40r from %s: %s", method, self.peer, error)
            case ControlPing(nonce=nonce):
                self._answer(ControlPong(nonce))
            case ControlPong(nonce=nonce):
                sent_at = self._pings.pop(nonce, None)
                if sent_at is not None:
                    self.rtts = [*self.rtts[-7:], self.heard_at - sent_at]
                    if (waiter := self._waiters.get(nonce)) is not None:
                        waiter.settle(b"")
        return None

    def _accept_request(self, request: Request, nursery: trio.Nursery) -> trio.Event | None:
        """Serve it in a task of its own. Its handler must have run to its first wait before what
        the peer sent next is handled: a notice may be about what the request has begun."""
        if self._serving >= self._settings.max_requests:
            limit, retry_s = self._settings.max_requests, self._settings.busy_retry_s
            text = f"busy: {limit} requests of this peer are being served; try again in {retry_s:g} s"
            self._answer(Failure(request.id, "busy", text, retry_s))
        elif len(request.method) > _MAX_METHOD_CHARS:
            self._offences += 1
        else:
            self._serving += 1
            begun = trio.Event()
            nursery.start_soon(self._serve_request, request, begun)
            return begun
        return None

    async def _serve_request(self, request: Request, begun: trio.Event) -> None:
        begun.set()  # who waits for it runs only after this task, which now goes on to its first wait
        number, method = request.id, request.method
        serving = self._serve(method, request.body)
        # The frame, which may have megabytes, is of no use once it is decoded; its handler may run for long.
        del request
        answer: Reply | Failure
        # Served until there is room for the answer: who asks on and reads nothing has no more answers waiting here.
        try:
            try:
                answer = Reply(number, msgspec.Raw(await serving))
            except RemoteError as error:
                answer = Failure(number, error.code, error.message, min(error.retry_after_s or 0.0, _MAX_RETRY_S))
            except ProtocolError as error:
                self._offences += 1
                answer = Failure(number, "malformed", str(error))
            await self._send_answer(answer, method)
        finally:
            self._serving -= 1

    async def _send_answer(self, answer: Reply | Failure, method: str) -> None:
        try:
            await self.connection.send(_encoder.encode(answer))
            self._sent += 1
        except PeerLost:
            _log.debug("%s was gone before it got the answer to %r", self.peer, method)
        except ProtocolError as error:  # its own answer exceeds a frame: whoever waits should hear why
            await self.connection.send(_encoder.encode(Failure(answer.id, "too_large", str(error))))

    def _answer(self, message: Failure | ControlPong) -> None:
        try:
            self.send_nowait(_encoder.encode(message))
        except PeerLost:
            _log.debug("%s was gone before it got an answer", self.peer)

    def _check_open(self) -> None:
        if self._lost is not None:
            raise PeerLost(self._lost)

    def _lose(self, because: str) -> None:
        if self._lost is None:
            self._lost = because
            for waiter in self._waiters.values():  # they would wait for their timeouts otherwise
                waiter.settle(PeerLost(because))


def _is_of_unknown_kind(frame: bytes) -> bool:
    """Whether this may be a message that this release does not know."""
    try:
        kind, *_ = msgspec.msgpack.decode(frame, type=list[msgspec.Raw])
        return msgspec.msgpack.decode(kind, type=str) not in _KINDS
    except (ValueError, *DECODE_ERRORS):
        return False


def _first(group: BaseExceptionGroup[PeerLost]) -> str:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
