"""One connection of a link as a pure machine: bytes in, signals out; signals in, sealed bytes out.
No socket, no clock.

    dialling side                                   accepting side
    hello    "p2pKV/2\\n" link(16) nonce(16) role(1) 0(7)  ->
             <-  welcome  "p2pKA/2\\n" nonce(16)
    records  ->                                     <-  records

    record  =  sealed head (54 + 16)  [sealed payload (n + 16)]

*Keys.* HKDF-SHA256 of the link's secret, salted with both nonces, over the whole hello: one key for
each direction. Each side adds a fresh nonce of its own, so a hello that somebody replays leads to
keys nobody has, and no nonce of the cipher serves twice. The first record of each side is its
`LinkGreeting`; what does not open is not from the peer.

*Records.* AES-256-GCM with a counter as nonce, one count for head and payload alike, so a record
that is replayed, left out, put elsewhere or reflected fails to open. The head is sealed apart from
the payload: neither is copied to join the two, and nobody reserves memory for a payload whose head
has not proved itself. There is no plain text on the wire after the nonces, lengths included.

*Rekeying.* See `ciphers`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from ..errors import KVProtocolError
from .ciphers import TAG_BYTES, Cipher, Damaged, RekeyBounds, derive_ciphers
from .frames import MAX_REASON_BYTES
from .signals import CHUNK_KIND, HEAD_BYTES, MAX_CHUNK_BYTES, LinkGreeting, Signal, pack, payload_bytes, unpack
from .tickets import LinkTicket

LINK_MAGIC = b"p2pKV/2\n"
NONCE_BYTES = 16
_WELCOME_MAGIC = b"p2pKA/2\n"
_HELLO = struct.Struct("<8s16s16sB7s")
LINK_HELLO_BYTES = _HELLO.size
WELCOME_BYTES = len(_WELCOME_MAGIC) + NONCE_BYTES
SEALED_HEAD_BYTES = HEAD_BYTES + TAG_BYTES
CHUNK_OVERHEAD_BYTES = SEALED_HEAD_BYTES + TAG_BYTES
_INFO = b"p2pserve kv/2 keys "
_ZEROS = bytes(7)


class LinkRole(IntEnum):
    """What an end of a link does with KV."""

    SENDER = 0
    RECEIVER = 1


@dataclass(frozen=True, slots=True)
class LinkHello:
    """A connection's first bytes, from the dialling side: which link, and which end dials."""

    link: bytes
    nonce: bytes
    dials: LinkRole

    def pack(self) -> bytes:
        """The 48 bytes on the wire."""
        return _HELLO.pack(LINK_MAGIC, self.link, self.nonce, self.dials, _ZEROS)


def parse_link_hello(data: bytes) -> LinkHello:
    """Raises ProtocolError for what is no hello."""
    if len(data) != LINK_HELLO_BYTES or not data.startswith(LINK_MAGIC):
        raise KVProtocolError(f"not a connection of a KV link: it begins with {data[: len(LINK_MAGIC)]!r}")
    _, link, nonce, role, zeros = _HELLO.unpack(data)
    if role > 1 or zeros != _ZEROS:
        raise KVProtocolError(f"a hello with role {role} and reserved bytes {zeros.hex()}: of another version")
    return LinkHello(link, nonce, LinkRole(role))


class Channel:
    """The wire of one connection, at one of its ends.

    Reading: put bytes into `space()`, say how many with `note_received`, then take signals from
    `next_signal` until there is none. A `Chunk` leaves its payload sealed until `open_payload` says
    where to; the next signal comes after. Writing: `begin_handshake`, then `seal`. Reading and
    writing share nothing but the keys, so one thread may do each once the handshake is over.

    The first ProtocolError is final. `is_damaged` then tells bytes that do not open, which anybody
    on the path can cause and which cost the connection, from signals that the peer must not send,
    which cost the link."""

    def __init__(
        self,
        ticket: LinkTicket,
        role: LinkRole,
        nonce: bytes,
        *,
        hello: LinkHello | None = None,
        label: str = "",
        bounds: RekeyBounds | None = None,
    ) -> None:
        """`hello`: that of the peer, read from an accepted connection; without one this end dials."""
        self._ticket = ticket
        self._nonce = nonce
        self._bounds = RekeyBounds() if bounds is None else bounds
        self.dials = hello is None
        self.label = label
        self._hello = LinkHello(ticket.link, nonce, role) if hello is None else hello
        if hello is not None and (hello.link != ticket.link or hello.dials is role):
            raise KVProtocolError("the hello names another link, or the same end of this one")
        # A sender of KV never reads chunks: its buffer is small.
        self._largest = MAX_CHUNK_BYTES if role is LinkRole.RECEIVER else MAX_REASON_BYTES
        self._in = bytearray(2 * SEALED_HEAD_BYTES + self._largest + TAG_BYTES)
        self._view = memoryview(self._in)
        self._start = self._end = 0
        self._out = bytearray()
        self._head = bytearray(HEAD_BYTES)
        self._need = WELCOME_BYTES if hello is None else SEALED_HEAD_BYTES  # from `_start` on, of what is being read
        self._in_payload = False  # the head has been read
        self._chunk = False
        self._sealer: Cipher | None = None
        self._opener: Cipher | None = None
        self._error: KVProtocolError | None = None
        self.authenticated = False
        self.bytes_in = self.bytes_out = 0
        if hello is not None:
            self._derive(nonce)

    def __repr__(self) -> str:
        state = "failed" if self._error else "open" if self.authenticated else "shaking hands"
        return f"<Channel {state} {self.label!r} in={self.bytes_in} out={self.bytes_out}>"

    @property
    def is_damaged(self) -> bool:
        """Whether it was bytes that ended this channel, not what the peer said under its own key."""
        return isinstance(self._error, Damaged) or not self.authenticated

    @property
    def rekeyed(self) -> int:
        """How many keys have been replaced, both directions together."""
        return sum(cipher.rekeyed for cipher in (self._sealer, self._opener) if cipher is not None)

    def begin_handshake(self) -> bytes:
        """What this side sends first: hello, or welcome and greeting (the dialler's, once
        welcomed)."""
        data = self._hello.pack() if self.dials else _WELCOME_MAGIC + self._nonce
        self.bytes_out += len(data)
        return data if self.dials else data + bytes(self.seal(LinkGreeting("")))

    def space(self) -> memoryview:
        """Where the next bytes belong; never empty while `next_signal` has nothing. At most one
        head beyond the current record: chunks are decrypted in place."""
        last = self._start + self._need + SEALED_HEAD_BYTES
        if last > len(self._in):
            self._in[: self._end - self._start] = self._in[self._start : self._end]
            last -= self._start
            self._start, self._end = 0, self._end - self._start
        return self._view[self._end : last if self._in_payload else len(self._in)]

    @property
    def missing(self) -> int:
        """How many bytes more it takes until `next_signal` can have anything."""
        return self._start + self._need - self._end

    def note_received(self, count: int) -> None:
        """`count` bytes have been put into `space()`."""
        if self._error is not None:
            raise self._error
        self._end += count
        self.bytes_in += count

    def next_signal(self) -> Signal | None:
        """The next signal that has arrived whole, payload included; None if there is none yet."""
        if self._error is not None:
            raise self._error
        if self._chunk:
            raise RuntimeError("the payload of the last chunk has not been opened")
        try:
            while self._end - self._start >= self._need:
                if self._opener is None:
                    self._take_welcome()
                elif self._in_payload:
                    return self._take_signal()
                else:
                    self._take_head(self._opener)
        except KVProtocolError as error:
            self._error = error
            raise
        return None

    def open_payload(self, into: memoryview | bytearray) -> None:
        """Decrypt the payload of the chunk of `next_signal`, straight to where it belongs."""
        assert self._opener is not None
        assert self._chunk
        try:
            self._opener.open(self._view[self._start : self._start + self._need], into)
        except KVProtocolError as error:
            self._error = error
            raise
        self._chunk = False
        self._consume(SEALED_HEAD_BYTES)

    def seal(self, signal: Signal, payload: memoryview | None = None) -> memoryview:
        """The record to send, in a buffer good until the next call. A chunk has a payload."""
        if self._sealer is None:
            raise RuntimeError("nothing can be sealed before the handshake")
        head, text = pack(signal)
        body: bytes | memoryview = text if payload is None else payload
        size = SEALED_HEAD_BYTES + (len(body) + TAG_BYTES if len(body) else 0)
        if len(self._out) < size:
            self._out = bytearray(size)
        view = memoryview(self._out)
        self._sealer.seal(head, view[:SEALED_HEAD_BYTES])
        if len(body):
            self._sealer.seal(body, view[SEALED_HEAD_BYTES:size])
        self.bytes_out += size
        return view[:size]

    def _take_welcome(self) -> None:
        welcome = bytes(self._view[self._start : self._start + WELCOME_BYTES])
        if not welcome.startswith(_WELCOME_MAGIC):
            raise Damaged(f"no welcome: {welcome[: len(_WELCOME_MAGIC)]!r}")
        self._consume(SEALED_HEAD_BYTES)
        self._derive(welcome[len(_WELCOME_MAGIC) :])

    def _take_head(self, opener: Cipher) -> None:
        opener.open(self._view[self._start : self._start + SEALED_HEAD_BYTES], self._head)
        payload = payload_bytes(self._head, self._largest)
        self._consume(payload + TAG_BYTES if payload else 0)
        self._in_payload = True

    def _take_signal(self) -> Signal:
        head = bytes(self._head)
        if head[0] == CHUNK_KIND and self._need:
            signal = unpack(head, b"")
            self._chunk = True
        else:
            signal = unpack(head, self._take_text())
        if isinstance(signal, LinkGreeting) is self.authenticated:
            raise KVProtocolError("a greeting comes first, and once")
        if isinstance(signal, LinkGreeting):
            self.authenticated = True
            self.label = self.label if self.dials else signal.label
        return signal

    def _take_text(self) -> bytes:
        text = bytearray(max(self._need - TAG_BYTES, 0))
        if text:
            assert self._opener is not None
            self._opener.open(self._view[self._start : self._start + self._need], text)
        self._consume(SEALED_HEAD_BYTES)
        return bytes(text)

    def _consume(self, next_need: int) -> None:
        """What was needed has been read; so many bytes come next."""
        self._start += self._need
        if self._start == self._end:
            self._start = self._end = 0
        self._need = next_need
        self._in_payload = False

    def _derive(self, acceptor_nonce: bytes) -> None:
        salt = self._hello.nonce + acceptor_nonce
        info = _INFO + self._hello.pack()
        self._sealer, self._opener = derive_ciphers(self._ticket.secret, salt, info, self._bounds, dials=self.dials)
