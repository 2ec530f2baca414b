"""Frames and messages of the control stream, tokens, certificates and orders, mutated: whatever reads bytes from
others in this room."""

import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
import trio

from ..addresses import Address
from ..errors import AddressError, NetworkError, PeerLost, ProtocolError, TokenError
from ..handlers import Handlers
from ..members.election import decode_claim
from ..members.liveness import decode_heard
from ..settings import NetworkSettings
from ..streams import control
from ..streams.control import ControlStream, decode_greeting, encode_greeting
from ..streams.frames import MAX_FRAME, MAX_STRANGER_FRAME, FrameDecoder, encode_frame
from ..trust.entries import MEMBER_KIND, read_record, sign_entry
from ..trust.identity import Identity, NetworkKey
from ..trust.keys import PeerId, public_key_of
from ..trust.orders import Orders, Renewal, read_orders, sign_orders
from ..trust.targets import parse_join_target
from ..trust.tokens import Bootstrap, JoinToken, Role, admit, admit_credential, read_grant
from .fuzz_report import ControlFuzzReport
from .mutations import TEXTS, TypeMaker, mutated_bytes, mutated_encoding

_KEY: Final = NetworkKey(b"n" * 32)
_WHO: Final = Identity(b"w" * 32)
_TEXT: Final = _KEY.issue((Bootstrap("192.0.2.1", 4001, _WHO.peer_id),), Role.WORKER, 2e9)
_TOKEN: Final = JoinToken.parse(_TEXT)
_CREDENTIAL: Final = _TOKEN.credential(_WHO.peer_id)
_encode: Final = msgspec.msgpack.Encoder().encode
_GREETINGS: Final = TypeMaker(control.Greeting)
_MESSAGES: Final = TypeMaker(control.Message)
_ORDERS: Final = TypeMaker(Orders)
_ORDERED: Final = _encode(Orders(3, ("a" * 16,), {"b" * 16: Renewal(_TOKEN.certificate, _TOKEN.signature)}))
_HELLO: Final = encode_greeting(
    control.Hello(
        control.PROTOCOL_VERSION,
        _KEY.public,
        sign_entry(_WHO, MEMBER_KIND, 1, 1, b"\x95\xa6worker\xa3::1\xcd\x0f\xa1\xc0\xc2"),
        5,
        "1.0",
    )
)
_FRAMES_OF_A_STREAM: Final = 120


class WireAttack:
    """One input for one of the readers."""

    def __init__(self, rng: random.Random, report: ControlFuzzReport) -> None:
        self._rng = rng
        self._report = report
        # Each with all that it may raise.
        self._readers: tuple[tuple[str, Callable[[], None], tuple[type[Exception], ...]], ...] = (
            ("frames", self._frames, (ProtocolError,)),
            ("greetings", self._greeting, (ProtocolError,)),
            ("tokens", self._token, (TokenError, AddressError)),
            ("certificates", self._certificate, (TokenError,)),
            ("orders", self._orders, ()),
            ("payloads of membership", self._payload, ()),
        )

    def run(self) -> None:
        """One input."""
        target, read, declared = self._rng.choice(self._readers)
        began = time.thread_time()
        try:
            read()
        except declared:
            self._report.refused += 1
        self._report.note(target, time.thread_time() - began)

    def _frames(self) -> None:
        rng, decoder = self._rng, FrameDecoder()
        decoder.max_frame = rng.choice((MAX_FRAME, MAX_STRANGER_FRAME))
        said = [rng.randbytes(rng.choice((0, 1, 5, 300))) for _ in range(rng.randrange(1, 5))]
        data = b"".join(map(encode_frame, said))
        is_honest = rng.random() < 0.2
        if not is_honest:
            data = mutated_bytes(rng, data)
        cut = rng.randrange(len(data) + 1)
        got = [*decoder.feed(data[:cut]), *decoder.feed(data[cut:])]
        if is_honest and got != said:
            raise AssertionError("frames came out changed")

    def _greeting(self) -> None:
        honest = _HELLO if self._rng.random() < 0.5 else _GREETINGS.make(self._rng)
        decode_greeting(mutated_encoding(self._rng, honest))

    def _token(self) -> None:
        rng = self._rng
        at = rng.randrange(len(_TEXT))
        text = _TEXT[:at] + rng.choice((*TEXTS, "_", "=", "A", "-")) + _TEXT[at + rng.randrange(4) :]
        if rng.random() < 0.5:
            parse_join_target(rng.choice((text, f"{text},192.0.2.1:4001", f"{rng.choice(TEXTS)},{text}")), None)
        else:
            admit(text, _KEY.public, 1e9)

    def _certificate(self) -> None:
        """Most do not carry the network's signature; what reads one before that is checked, meets them all."""
        rng = self._rng
        certificate = mutated_encoding(rng, _TOKEN.certificate)
        read_grant(certificate)
        credential = msgspec.structs.replace(_CREDENTIAL, certificate=certificate)
        if rng.random() < 0.5:
            credential = msgspec.structs.replace(credential, signature=_KEY.sign(b"p2pserve-join-1\n" + certificate))
        admit_credential(credential, rng.choice((_WHO.peer_id, *TEXTS)), _KEY.public, 1e9)

    def _orders(self) -> None:
        rng = self._rng
        payload = mutated_encoding(rng, _ORDERED if rng.random() < 0.7 else _ORDERS.make(rng))
        signed = sign_orders(_KEY, Orders())
        if rng.random() < 0.5:
            signed = msgspec.structs.replace(signed, payload=payload)
        else:
            signed = msgspec.structs.replace(signed, payload=payload, signature=_KEY.sign(_DOMAIN + payload))
        read = read_orders(signed, _KEY.public)
        if read is not None:
            for renewal in read.renewed.values():
                read_grant(renewal.certificate)

    def _payload(self) -> None:
        rng = self._rng
        record = _encode(("worker", "192.0.2.1", 4001, (_TOKEN.certificate, b"s" * 64, b"p" * 64), False))
        read_record(mutated_encoding(rng, record))
        decode_claim(mutated_encoding(rng, b"\x92\x05\xc2"), (1, 1))
        decode_heard(mutated_bytes(rng, b"\x01" * 24))
        public_key_of(mutated_bytes(rng, _WHO.peer_id.encode()).decode("latin-1"))


_DOMAIN: Final = b"p2pserve-orders-1\n"


class _Script:
    """A connection on which a peer says what was written down before."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self.peer: PeerId = _WHO.peer_id
        self.remote: Address | None = None
        self.answers: list[bytes] = []
        self._frames = iter(frames)

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        frame = next(self._frames, None)
        if frame is None:
            raise PeerLost("the script is over")
        return frame

    async def send(self, frame: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.send_nowait(frame)

    def send_nowait(self, frame: bytes) -> None:
        self.answers.append(frame)

    def admit(self) -> None:
        pass

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


class StreamAttack:
    """A control stream with a node's handlers, at whose other end somebody says anything.

    Args:
        methods: the names of what may be asked and told, with bodies for each.
        add_handlers: what the node answers.
    """

    def __init__(
        self,
        rng: random.Random,
        report: ControlFuzzReport,
        methods: Sequence[tuple[str, Callable[[random.Random], bytes]]],
        add_handlers: Callable[[Handlers], None],
    ) -> None:
        self._rng = rng
        self._report = report
        self._methods = methods
        self._handlers = Handlers()
        add_handlers(self._handlers)
        self._settings = NetworkSettings(max_offences=1 << 30)

    def run(self) -> None:
        """One stream, of many inputs."""
        frames = [self._make_frame() for _ in range(_FRAMES_OF_A_STREAM)]
        script, role = _Script(frames), self._rng.choice(tuple(Role))
        began = self._report.begin()

        async def serve(method: str, body: msgspec.Raw) -> bytes:
            return await self._handlers.serve(_WHO.peer_id, role, method, body)

        def notice(method: str, body: msgspec.Raw) -> None:
            self._handlers.notify(_WHO.peer_id, role, method, body)

        trio.run(self._talk, script, serve, notice)
        took = (time.thread_time() - began) / len(frames)
        for _ in frames:
            self._report.note("control stream", took)

    async def _talk(
        self,
        script: _Script,
        serve: Callable[[str, msgspec.Raw], Awaitable[bytes]],
        notice: Callable[[str, msgspec.Raw], None],
    ) -> None:
        stream = ControlStream(script, serve=serve, notice=notice, settings=self._settings)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask, stream)
            await stream.run()
            nursery.cancel_scope.cancel()
        counted = stream.statistics()
        if counted.received != _FRAMES_OF_A_STREAM or counted.waiting:
            raise AssertionError(f"the stream ended early: {stream!r} {counted}")
        for answer in script.answers:
            msgspec.msgpack.decode(answer)
        self._report.refused += counted.malformed
        if self._handlers.failed:
            raise AssertionError("a handler failed with an error that is not declared; its traceback is in the log")

    async def _ask(self, stream: ControlStream) -> None:
        """A question of the node's own, which the other end may answer with anything."""
        for _ in range(3):
            try:
                await stream.request("status", b"\xc0", 60.0)
            except NetworkError as error:
                str(error)

    def _make_frame(self) -> bytes:
        rng = self._rng
        chance = rng.random()
        if chance < 0.2:
            return mutated_encoding(rng, _MESSAGES.make(rng))
        name, body = rng.choice(self._methods)
        data = body(rng)
        if rng.random() < 0.5:
            data = mutated_encoding(rng, data)
        if rng.random() < 0.05:
            name = rng.choice((*TEXTS, name + "2"))
        number = next(_NUMBERS)
        frame: Any = ["n", name, msgspec.Raw(data)] if rng.random() < 0.4 else ["q", number, name, msgspec.Raw(data)]
        if rng.random() < 0.1:
            frame = ["r", rng.choice((1, 2, 3, number)), msgspec.Raw(data)]
        elif rng.random() < 0.05:
            frame = ["f", rng.choice((1, 2, 3)), rng.choice(TEXTS), rng.choice(TEXTS), rng.choice((0.0, 1.0, 1e9))]
        encoded = _encode(frame)
        return (mutated_bytes(rng, encoded) if rng.random() < 0.1 else encoded)[:MAX_FRAME]


_NUMBERS: Final = itertools.count(1)
