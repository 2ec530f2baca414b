"""A client's upgrade of a connection: lines, payloads, and what a hostile listener may say."""

import pytest
import trio
import trio.testing

from p2pserve.bootstrap import Identity, PeerLost
from p2pserve.bootstrap.errors import ProtocolError
from p2pserve.bootstrap.reasons import MappedErrors
from p2pserve.bootstrap.streams.noise import (
    Read,
    encode_offer,
    encode_payload,
    encode_varint,
    read_agreement,
    read_payload,
    secure_outbound,
)

NOISE_KEY = b"n" * 32


def reader(data: bytes) -> Read:
    rest = bytearray(data)

    async def read(size: int) -> bytes:
        """One byte at a time, as a slow network brings them."""
        await trio.lowlevel.checkpoint()
        found = bytes(rest[: min(size, 1)])
        del rest[: min(size, 1)]
        return found

    return read


def test_an_offer_and_its_echo() -> None:
    offer = encode_offer("/noise")
    assert offer == b"\x13/multistream/1.0.0\n\x07/noise\n"
    trio.run(read_agreement, reader(offer), "/noise")


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (encode_offer("na"), ProtocolError, "does not speak /noise"),
        (b"HTTP/1.0 400 Bad Request\r\n" + b" " * 100, ProtocolError, "does not speak"),
        (b"\xff\xff\x03", ProtocolError, "a line of 65535 bytes"),
        (b"\xff" * 9, ProtocolError, "without end"),
        (b"\x13/multi", PeerLost, "closed"),
        (b"", PeerLost, "closed"),
    ],
)
def test_what_is_no_agreement(answer: bytes, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        trio.run(read_agreement, reader(answer), "/noise")


def test_a_payload_proves_one_identity_for_one_key() -> None:
    identity = Identity.generate()
    payload = encode_payload(identity, NOISE_KEY)
    assert read_payload(payload, NOISE_KEY) == identity.peer_id
    extended = payload + b"\x22\x02hi\x28\x07"  # extensions, and a number, which are not read
    assert read_payload(extended, NOISE_KEY) == identity.peer_id
    with pytest.raises(ProtocolError, match="does not prove"):
        read_payload(payload, b"m" * 32)
    other = encode_payload(Identity.generate(), NOISE_KEY)
    with pytest.raises(ProtocolError, match="does not prove"):
        read_payload(payload[:38] + other[38:], NOISE_KEY)


@pytest.mark.parametrize("cut", range(0, 104, 3))
def test_a_payload_that_is_cut_short_proves_nobody(cut: int) -> None:
    payload = encode_payload(Identity.generate(), NOISE_KEY)
    assert len(payload) == 104
    with pytest.raises(ProtocolError):
        read_payload(payload[:cut], NOISE_KEY)


@pytest.mark.parametrize("payload", [b"\xff" * 40, b"\x0a\xff\xff\xff\x7f", b"\x0b\x01", b"\x0a\x04\x08\x01\x12\x20"])
def test_garbage_proves_nobody(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_payload(payload, NOISE_KEY)


@pytest.mark.parametrize("size", [0, 1, 95, 96, 200])
def test_a_handshake_of_garbage_ends(size: int) -> None:
    """After agreeing on Noise the listener sends so many bytes that are none."""

    async def main() -> None:
        mine, theirs = trio.testing.memory_stream_pair()
        await theirs.send_all(encode_offer("/noise") + size.to_bytes(2, "big") + b"g" * size)
        await theirs.send_eof()
        with pytest.raises(PeerLost, match=r"^dialling \("), MappedErrors("dialling"):
            await secure_outbound(mine, Identity.generate())

    trio.run(main)


def test_lengths_are_as_protobuf_writes_them() -> None:
    assert [encode_varint(number).hex() for number in (0, 127, 128, 300, 1 << 21)] == [
        "00",
        "7f",
        "8001",
        "ac02",
        "80808001",
    ]
