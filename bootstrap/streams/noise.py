"""The dialling end of libp2p's upgrade of a TCP connection, without libp2p: what a client needs of it, and no more.

The wire is that of https://github.com/libp2p/specs (multistream-select 1.0, Noise XX, Ed25519 identities), so that the
listening end may be any node. One upgrade::

    -> /multistream/1.0.0 /noise          <- the same
    -> e                                  <- e, ee, s, es, payload      -> s, se, payload
    and from here on in Noise messages, `u16 length | sealed`

A payload proves an identity: its public key, and its signature of the Noise key that was used.
"""

import secrets
import struct
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from noise.connection import Keypair, NoiseConnection

from ..errors import PeerLost, ProtocolError
from ..trust.identity import Identity
from ..trust.keys import KEY_BYTES, PeerId, peer_id_of, verify_raw

READ_BYTES: Final = 64 * 1024
NOISE_LENGTH: Final = struct.Struct("!H")
NOISE: Final = b"Noise_XX_25519_ChaChaPoly_SHA256"
_MULTISTREAM: Final = "/multistream/1.0.0"
_MAX_LINE: Final = 1024
_SIGNED: Final = b"noise-libp2p-static-key:"
_ED25519: Final = bytes.fromhex("08011220")  # how a public key of that kind begins, as a protobuf
_IDENTITY_KEY, _IDENTITY_SIGNATURE = 1, 2  # fields of a payload
_VARINT, _BYTES = 0, 2  # wire types

Read = Callable[[int], Awaitable[bytes]]
"""At most so many bytes, at least one; none at the end."""


class RawStream(Protocol):
    """What is needed of a socket."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray: ...
    async def send_all(self, data: bytes) -> None: ...
    async def aclose(self) -> None: ...


# -- multistream-select -----------------------------------------------------------------------------------------------


def encode_offer(protocol: str) -> bytes:
    """Both lines of a dialler that knows what it wants; it need not wait between them."""
    return b"".join(encode_varint(len(line) + 1) + line.encode() + b"\n" for line in (_MULTISTREAM, protocol))


async def read_agreement(read: Read, protocol: str) -> None:
    """The answer to an offer. Raises ProtocolError when it is another one, PeerLost at the end."""
    for expected in (_MULTISTREAM, protocol):
        size = await _read_varint(read)
        if size > _MAX_LINE:
            raise ProtocolError(f"a line of {size} bytes during the negotiation")
        line = await read_exactly(read, size)
        if line != expected.encode() + b"\n":
            raise ProtocolError(f"the peer does not speak {expected}: {line[:64]!r}")


async def read_exactly(read: Read, size: int) -> bytes:
    """So many bytes. Raises PeerLost at the end."""
    found = b""
    while len(found) < size:
        more = await read(size - len(found))
        if not more:
            raise PeerLost("the peer closed the connection")
        found += more
    return found


def encode_varint(number: int) -> bytes:
    """Seven bits a byte, the least first."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


async def _read_varint(read: Read) -> int:
    number = shift = 0
    while True:
        (byte,) = await read_exactly(read, 1)
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number
        if shift > 28:
            raise ProtocolError("a length without end during the negotiation")


# -- Noise ------------------------------------------------------------------------------------------------------------


def encode_payload(identity: Identity, noise_key: bytes) -> bytes:
    """What proves that `identity` uses this Noise key."""
    return _encode_field(_IDENTITY_KEY, _ED25519 + identity.public) + _encode_field(
        _IDENTITY_SIGNATURE, identity.sign(_SIGNED + noise_key)
    )


def read_payload(payload: bytes, noise_key: bytes) -> PeerId:
    """Who proves to use this Noise key. Raises ProtocolError."""
    fields = _decode_fields(payload)
    key = fields.get(_IDENTITY_KEY, b"")
    if len(key) != len(_ED25519) + KEY_BYTES or not key.startswith(_ED25519):
        raise ProtocolError("the peer's identity is no Ed25519 key")
    public = key[len(_ED25519) :]
    if not verify_raw(public, _SIGNED + noise_key, fields.get(_IDENTITY_SIGNATURE, b"")):
        raise ProtocolError("the peer does not prove its identity")
    return peer_id_of(public)


def _encode_field(number: int, value: bytes) -> bytes:
    return encode_varint(number << 3 | _BYTES) + encode_varint(len(value)) + value


def _decode_fields(data: bytes) -> dict[int, bytes]:
    """Fields of bytes by their number; those of numbers are skipped. Raises ProtocolError."""
    fields: dict[int, bytes] = {}
    at = 0

    def take_varint() -> int:
        nonlocal at
        number = shift = 0
        while at < len(data) and shift < 35:
            byte = data[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number
        raise ProtocolError("a malformed payload in the handshake")

    while at < len(data):
        tag = take_varint()
        size = take_varint()
        if tag & 7 == _BYTES:
            if at + size > len(data):
                raise ProtocolError("a payload that is cut short in the handshake")
            fields[tag >> 3] = data[at : at + size]
            at += size
        elif tag & 7 != _VARINT:
            raise ProtocolError(f"a field of type {tag & 7} in the handshake")
    return fields


class NoiseMessages:
    """The messages of a Noise session, straight on the socket. ``rest`` has been read and not been used."""

    is_initiator = True

    def __init__(
        self, socket: RawStream, encrypt: Callable[[bytes], bytes], decrypt: Callable[[bytes], bytes], rest: bytes = b""
    ) -> None:
        self._socket = socket
        self._encrypt, self._decrypt = encrypt, decrypt
        self._plain = rest
        self._sealed = bytearray()

    async def read(self) -> bytes:
        """At least one message, several as one. Raises PeerLost at the end; socket and Noise errors."""
        return await self.read_some(-1)

    async def read_some(self, size: int) -> bytes:
        """At most so many bytes of it; all there is for a negative number."""
        while not self._plain:
            received = await self._socket.receive_some(READ_BYTES)
            if not received:
                raise PeerLost("the peer closed the connection")
            self._sealed += received
            self._plain = self._open()
        end = len(self._plain) if size < 0 else size
        plain, self._plain = self._plain[:end], self._plain[end:]
        return plain

    def _open(self) -> bytes:
        """All messages that are there as a whole."""
        found, at = [], 0
        while len(self._sealed) - at >= NOISE_LENGTH.size:
            end = at + NOISE_LENGTH.size + NOISE_LENGTH.unpack_from(self._sealed, at)[0]
            if end > len(self._sealed):
                break
            found.append(self._decrypt(bytes(self._sealed[at + NOISE_LENGTH.size : end])))
            at = end
        del self._sealed[:at]
        return b"".join(found)

    async def write(self, data: bytes) -> None:
        """Send a message of at most 65519 bytes."""
        sealed = self._encrypt(data)
        await self._socket.send_all(NOISE_LENGTH.pack(len(sealed)) + sealed)

    async def close(self) -> None:
        """Close the socket."""
        await self._socket.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Not asked of a connection that was dialled here."""
        return None

    def get_transport_addresses(self) -> object:
        """The same."""
        return ()

    def get_connection_type(self) -> object:
        """The same."""
        return None


async def secure_outbound(socket: RawStream, identity: Identity) -> tuple[PeerId, NoiseMessages]:
    """Agree on Noise over a fresh connection, and on who is at its ends. Raises ProtocolError, PeerLost, socket and
    Noise errors."""

    async def read(size: int) -> bytes:
        return bytes(await socket.receive_some(size))

    await socket.send_all(encode_offer("/noise"))
    await read_agreement(read, "/noise")
    noise = NoiseConnection.from_name(NOISE)
    noise.set_keypair_from_private_bytes(Keypair.STATIC, secrets.token_bytes(KEY_BYTES))
    noise.set_as_initiator()
    noise.start_handshake()
    handshake = noise.noise_protocol.handshake_state
    own_key = bytes(handshake.s.public_bytes)

    async def send(payload: bytes) -> None:
        message = bytes(noise.write_message(payload))
        await socket.send_all(NOISE_LENGTH.pack(len(message)) + message)

    await send(b"")
    (size,) = NOISE_LENGTH.unpack(await read_exactly(read, NOISE_LENGTH.size))
    payload = bytes(noise.read_message(await read_exactly(read, size)))
    peer = read_payload(payload, bytes(handshake.rs.public_bytes))
    await send(encode_payload(identity, own_key))
    return peer, NoiseMessages(socket, noise.encrypt, noise.decrypt)
