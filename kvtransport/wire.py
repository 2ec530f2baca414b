"""The wire of a KV transfer as two pure machines: messages in, sealed bytes out; bytes in, messages out. No
socket, no clock.

    connection  =  hello  record*            the side that dials says hello
    hello       =  "p2pKV/1\\n"  16-byte transfer id
    record      =  u32 length (little-endian)  ciphertext  16-byte tag
                   length counts ciphertext and tag, at most 8 MiB

A record holds one message (`messages`), sealed with AES-256-GCM under the ticket's key. The nonce is `u8
direction | 3 zero bytes | u64 counter, big-endian`: each direction counts its own records from 0, so no
nonce serves twice under one key and a record that is replayed, left out, put elsewhere or reflected fails
to open. The length is authenticated as associated data. A cut connection is no valid end: only `Ack` ends a
transfer well.

    from the sender      KVFrame*  End  [Abort]       or   KVFrame*  Abort
    from the receiver    Ack                          or   Abort
"""

from __future__ import annotations

import struct
from enum import IntEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .errors import ProtocolError
from .messages import (
    FRAME_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PLAINTEXT_BYTES,
    Abort,
    Ack,
    End,
    KVFrame,
    Message,
    encode_parts,
    parse,
)
from .tickets import TRANSFER_ID_BYTES

__all__ = [
    "DATA_MAGIC",
    "FRAME_HEADER_BYTES",
    "HELLO_BYTES",
    "LENGTH_BYTES",
    "MAX_PAYLOAD_BYTES",
    "MAX_RECORD_BYTES",
    "TAG_BYTES",
    "Abort",
    "Ack",
    "Direction",
    "End",
    "KVFrame",
    "Message",
    "Opener",
    "Sealer",
    "hello",
    "parse_hello",
    "record_bytes",
]

DATA_MAGIC = b"p2pKV/1\n"
HELLO_BYTES = len(DATA_MAGIC) + TRANSFER_ID_BYTES
LENGTH_BYTES = 4
TAG_BYTES = 16
MAX_RECORD_BYTES = MAX_PLAINTEXT_BYTES + TAG_BYTES
_LENGTH = struct.Struct("<I")
_NONCE = struct.Struct(">B3xQ")
_SMALLEST_RECORD = TAG_BYTES + 2


class Direction(IntEnum):
    """Who speaks: the first byte of every nonce."""

    FROM_SENDER = 0
    FROM_RECEIVER = 1


_MAY_SAY: dict[Direction, tuple[type[Message], ...]] = {
    Direction.FROM_SENDER: (KVFrame, End, Abort),
    Direction.FROM_RECEIVER: (Ack, Abort),
}
# What may still follow a message that ends a stretch; everything may follow a KVFrame.
_MAY_FOLLOW: dict[type[Message], tuple[type[Message], ...]] = {End: (Abort,), Ack: (), Abort: ()}


def hello(transfer: bytes) -> bytes:
    if len(transfer) != TRANSFER_ID_BYTES:
        raise ProtocolError(f"transfer id has {len(transfer)} bytes; it must have {TRANSFER_ID_BYTES}")
    return DATA_MAGIC + transfer


def parse_hello(data: bytes) -> bytes:
    """The transfer id in a hello."""
    if len(data) != HELLO_BYTES or not data.startswith(DATA_MAGIC):
        raise ProtocolError(f"not a KV connection: it begins with {data[: len(DATA_MAGIC)]!r}")
    return data[len(DATA_MAGIC) :]


def record_bytes(payload_bytes: int) -> int:
    """Bytes on the wire for a frame with that payload."""
    return LENGTH_BYTES + FRAME_HEADER_BYTES + payload_bytes + TAG_BYTES


class Sealer:
    """Turns messages of one direction into records. Its counter is its only state."""

    def __init__(self, key: bytes, direction: Direction) -> None:
        self._algorithm = algorithms.AES(key)
        self._direction = direction
        self._counter = 0
        self._allowed = _MAY_SAY[direction]

    def __repr__(self) -> str:
        return f"Sealer({self._direction.name}, records={self._counter})"

    def seal(self, message: Message) -> list[bytes | bytearray | memoryview]:
        """The buffers to send, in order. They are new each time and nothing of the message is copied before
        it is encrypted.
        """
        if not isinstance(message, self._allowed):
            name, role = type(message).__name__, self._direction.name.lower()
            raise ProtocolError(f"{name} may not be said here ({role}, record {self._counter})")
        header, body = encode_parts(message)
        body = memoryview(body).cast("B")
        plain = len(header) + body.nbytes
        length = _LENGTH.pack(plain + TAG_BYTES)
        record = bytearray(LENGTH_BYTES + plain + TAG_BYTES)
        view = memoryview(record)
        view[:LENGTH_BYTES] = length
        # Header and payload go into the cipher one after the other: joining them first would copy every
        # payload once more.
        nonce = _NONCE.pack(self._direction, self._counter)
        encryptor = Cipher(self._algorithm, modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(length)
        split = LENGTH_BYTES + len(header)
        encryptor.update_into(header, view[LENGTH_BYTES:split])
        if body.nbytes:
            encryptor.update_into(body, view[split : split + body.nbytes])
        encryptor.finalize()
        view[LENGTH_BYTES + plain :] = encryptor.tag
        self._counter += 1
        self._allowed = _MAY_FOLLOW.get(type(message), self._allowed)
        return [record]


class Opener:
    """Turns the bytes of one direction back into messages. The first error is final: every later call
    raises it again.
    """

    def __init__(self, key: bytes, direction: Direction) -> None:
        self._cipher = AESGCM(key)
        self._direction = direction
        self._counter = 0
        self._allowed = _MAY_SAY[direction]
        self._pending = bytearray()
        self._error: ProtocolError | None = None

    def __repr__(self) -> str:
        state = "failed" if self._error else "open"
        done, pending = self._counter, len(self._pending)
        return f"Opener({self._direction.name}, {state}, records={done}, pending={pending})"

    def feed(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """All messages that are complete now. If a record is bad, the good ones before it in `data` are
        lost with it.
        """
        self._raise_if_failed()
        self._pending += data
        messages: list[Message] = []
        taken = 0
        with memoryview(self._pending) as view:
            while len(view) - taken >= LENGTH_BYTES:
                begin = taken + LENGTH_BYTES
                length = self.length(view[taken:begin])
                if len(view) - begin < length:
                    break
                messages.append(self.open(view[begin : begin + length]))
                taken = begin + length
        del self._pending[:taken]
        return messages

    def length(self, prefix: bytes | bytearray | memoryview) -> int:
        """The length of the next record, bounded, so that the caller may reserve that much."""
        self._raise_if_failed()
        length = int(_LENGTH.unpack(prefix)[0])
        if not _SMALLEST_RECORD <= length <= MAX_RECORD_BYTES:
            raise self._fail(f"record of {length} bytes; allowed are {_SMALLEST_RECORD}..{MAX_RECORD_BYTES}")
        return length

    def open(self, sealed: bytes | bytearray | memoryview) -> Message:
        """The message in one whole record, its length prefix already taken by `length`."""
        self._raise_if_failed()
        nonce = _NONCE.pack(self._direction, self._counter)
        try:
            plain = self._cipher.decrypt(nonce, sealed, _LENGTH.pack(len(sealed)))
        except InvalidTag:
            text = f"record {self._counter} does not open: altered, replayed, reordered or of another key"
            raise self._fail(text) from None
        try:
            message = parse(plain)
        except ProtocolError as error:
            self._error = error
            raise
        if not isinstance(message, self._allowed):
            raise self._fail(f"{type(message).__name__} in record {self._counter} is out of turn")
        self._counter += 1
        self._allowed = _MAY_FOLLOW.get(type(message), self._allowed)
        return message

    def finish(self) -> None:
        """The connection has ended. An error if it did so inside a record."""
        self._raise_if_failed()
        if self._pending:
            raise self._fail(f"connection ended {len(self._pending)} bytes into record {self._counter}")

    def _fail(self, text: str) -> ProtocolError:
        self._error = ProtocolError(text)
        return self._error

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error
