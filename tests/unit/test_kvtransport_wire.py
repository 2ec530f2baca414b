"""The wire machines: every message survives the trip, nothing else gets through."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.errors import ProtocolError
from p2pserve.kvtransport.messages import (
    MAX_PAYLOAD_BYTES,
    MAX_REASON_BYTES,
    Abort,
    Ack,
    End,
    KVFrame,
    Message,
    parse,
)
from p2pserve.kvtransport.testing import EndpointPair, FaultyLink, ticket_for_tests
from p2pserve.kvtransport.wire import (
    DATA_MAGIC,
    HELLO_BYTES,
    MAX_RECORD_BYTES,
    Direction,
    Opener,
    Sealer,
    hello,
    parse_hello,
    record_bytes,
)

KEY = bytes(range(32))
FRAME = KVFrame(7, 2, 4, 512, 100, 1, 0, 64, b"payload")

frames = st.builds(
    lambda layer, first, heads, start, tokens, codec, dtype, head_dim, payload: KVFrame(
        layer, first, first + heads, start, tokens, codec, dtype, head_dim, payload
    ),
    st.integers(0, 65535),
    st.integers(0, 65000),
    st.integers(1, 535),
    st.integers(0, 2**30),
    st.integers(1, 2**30),
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(1, 1024),
    st.binary(min_size=1, max_size=200),
)


def sealed(*messages: Message, direction: Direction = Direction.FROM_SENDER) -> list[bytes]:
    sealer = Sealer(KEY, direction)
    return [b"".join(sealer.seal(message)) for message in messages]


def opener(direction: Direction = Direction.FROM_SENDER) -> Opener:
    return Opener(KEY, direction)


class TestRoundTrip:
    @settings(max_examples=60, deadline=None)
    @given(
        sent=st.lists(frames, max_size=5),
        seed=st.integers(0, 10**6),
        max_piece=st.integers(1, 300),
        end=st.one_of(st.builds(End, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), st.just(None)),
        reason=st.text(max_size=100),
    )
    def test_any_messages_in_any_pieces(
        self, sent: list[KVFrame], seed: int, max_piece: int, end: End | None, reason: str
    ) -> None:
        pair = EndpointPair(ticket_for_tests(), FaultyLink(seed=seed, max_piece=max_piece))
        messages: list[Message] = [*sent]
        if end is not None:
            messages.append(end)
        messages.append(Abort.because(reason))
        got = [out for message in messages for out in pair.to_receiver(message)]
        assert got == messages
        pair.hang_up()

    def test_the_way_back(self) -> None:
        pair = EndpointPair(ticket_for_tests())
        assert pair.to_sender(Ack()) == [Ack()]

    def test_several_records_in_one_piece(self) -> None:
        messages: list[Message] = [FRAME, replace(FRAME, layer=8), End(100, 2)]
        assert opener().feed(b"".join(sealed(*messages))) == messages

    def test_payload_types(self) -> None:
        data = bytearray(b"0123456789ab")
        wide = memoryview(data).cast("I")
        for payload in (bytes(data), data, memoryview(data), wide):
            (got,) = opener().feed(sealed(replace(FRAME, payload=payload))[0])
            assert isinstance(got, KVFrame)
            assert bytes(got.payload) == bytes(data)

    def test_size_is_known_beforehand(self) -> None:
        assert len(sealed(FRAME)[0]) == record_bytes(len(FRAME.payload))

    def test_layout_of_a_record(self) -> None:
        """The format by hand: a change of any byte is a new protocol version."""
        (record,) = sealed(FRAME)
        nonce = b"\x00" + bytes(3) + bytes(8)
        plain = struct.pack("<BBHHHIIBBH", 1, 1, 7, 2, 4, 512, 100, 1, 0, 64) + b"payload"
        length = struct.pack("<I", len(plain) + 16)
        assert record == length + AESGCM(KEY).encrypt(nonce, plain, length)

    def test_layout_of_the_way_back(self) -> None:
        (record,) = sealed(Ack(), direction=Direction.FROM_RECEIVER)
        length = struct.pack("<I", 18)
        assert record == length + AESGCM(KEY).encrypt(b"\x01" + bytes(11), b"\x01\x03", length)

    def test_the_largest_frame(self) -> None:
        frame = replace(FRAME, payload=bytes(MAX_PAYLOAD_BYTES))
        (record,) = sealed(frame)
        assert len(record) == 4 + MAX_RECORD_BYTES
        assert opener().feed(record) == [frame]


class TestForgery:
    @pytest.mark.parametrize("at", [0, 4, 5, 20, -17, -1])
    def test_a_flipped_bit(self, at: int) -> None:
        record = bytearray(sealed(FRAME)[0])
        record[at] ^= 1
        machine = opener()
        with pytest.raises(ProtocolError):
            # A changed length may ask for more than there is; the bytes behind it then fail to open.
            machine.feed(bytes(record) + bytes(64))

    def test_a_replayed_record(self) -> None:
        machine = opener()
        (record,) = sealed(FRAME)
        machine.feed(record)
        with pytest.raises(ProtocolError, match="record 1 does not open"):
            machine.feed(record)

    def test_reordered_and_missing_records(self) -> None:
        records = sealed(FRAME, FRAME, FRAME)
        with pytest.raises(ProtocolError):
            opener().feed(records[1])
        machine = opener()
        machine.feed(records[0])
        with pytest.raises(ProtocolError):
            machine.feed(records[2])

    def test_a_reflected_record(self) -> None:
        (record,) = sealed(Abort("x"))
        with pytest.raises(ProtocolError):
            opener(Direction.FROM_RECEIVER).feed(record)

    def test_another_key(self) -> None:
        with pytest.raises(ProtocolError):
            Opener(bytes(32), Direction.FROM_SENDER).feed(sealed(FRAME)[0])

    def test_the_first_error_is_final(self) -> None:
        machine = opener()
        with pytest.raises(ProtocolError, match="record of 0 bytes"):
            machine.feed(bytes(4))
        for _ in range(2):
            with pytest.raises(ProtocolError, match="record of 0 bytes"):
                machine.feed(sealed(FRAME)[0])
        with pytest.raises(ProtocolError, match="record of 0 bytes"):
            machine.finish()

    @pytest.mark.parametrize("length", [0, 17, MAX_RECORD_BYTES + 1, 2**32 - 1])
    def test_length_is_bounded_before_anything_is_reserved(self, length: int) -> None:
        with pytest.raises(ProtocolError, match=f"record of {length} bytes"):
            opener().length(struct.pack("<I", length))

    def test_a_truncated_connection(self) -> None:
        (record,) = sealed(FRAME)
        for cut in range(1, len(record)):
            machine = opener()
            assert machine.feed(record[:cut]) == []
            with pytest.raises(ProtocolError, match="connection ended"):
                machine.finish()

    def test_fuzz(self) -> None:
        """Whatever arrives, only messages or a ProtocolError come out, and never an altered message."""
        rng = random.Random(20)
        originals: list[Message] = [FRAME, replace(FRAME, layer=8), End(100, 2)]
        records = sealed(*originals)
        stream = b"".join(records)
        for _ in range(20_000):
            data = bytearray(stream)
            for _ in range(rng.randint(1, 3)):
                mutate(data, rng)
            machine = opener()
            got: list[Message] = []
            try:
                cut = rng.randint(0, len(data))
                got += machine.feed(data[:cut])
                got += machine.feed(data[cut:])
                machine.finish()
            except ProtocolError:
                pass
            assert got == originals[: len(got)]


def mutate(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data)) if data else 0
    match rng.randrange(5):
        case 0 if data:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at : at + rng.randint(1, 40)]
        case 2:
            data[at:at] = rng.randbytes(rng.randint(1, 40))
        case 3:
            data[at:at] = data[: rng.randint(0, len(data))]
        case _:
            data[: min(4, len(data))] = struct.pack("<I", rng.choice((0, 18, 40, 2**23, 2**31)))


class TestPlaintextFuzz:
    def test_a_peer_with_the_key_cannot_crash_us_either(self) -> None:
        rng = random.Random(21)
        plains = [
            struct.pack("<BBHHHIIBBH", 1, 1, 7, 2, 4, 512, 100, 1, 0, 64) + b"payload",
            struct.pack("<BBII", 1, 2, 100, 2),
            b"\x01\x03",
            b"\x01\x04because",
        ]
        for _ in range(20_000):
            data = bytearray(rng.choice(plains))
            for _ in range(rng.randint(1, 4)):
                mutate(data, rng)
            try:
                message = parse(bytes(data))
            except ProtocolError:
                continue
            assert isinstance(message, Message)


class TestTurns:
    @pytest.mark.parametrize(
        ("direction", "messages"),
        [
            (Direction.FROM_SENDER, [Ack()]),
            (Direction.FROM_SENDER, [End(0, 0), FRAME]),
            (Direction.FROM_SENDER, [End(0, 0), End(0, 0)]),
            (Direction.FROM_SENDER, [Abort(""), Abort("")]),
            (Direction.FROM_SENDER, [Abort(""), FRAME]),
            (Direction.FROM_RECEIVER, [FRAME]),
            (Direction.FROM_RECEIVER, [End(0, 0)]),
            (Direction.FROM_RECEIVER, [Ack(), Ack()]),
            (Direction.FROM_RECEIVER, [Ack(), Abort("")]),
        ],
    )
    def test_out_of_turn(self, direction: Direction, messages: list[Message]) -> None:
        sealer = Sealer(KEY, direction)
        for message in messages[:-1]:
            sealer.seal(message)
        with pytest.raises(ProtocolError, match="may not be said here"):
            sealer.seal(messages[-1])

    @pytest.mark.parametrize(
        ("plains", "message"),
        [
            ([b"\x01\x03"], "Ack in record 0 is out of turn"),
            ([struct.pack("<BBII", 1, 2, 0, 0)] * 2, "End in record 1 is out of turn"),
            ([b"\x01"], "record of 17 bytes"),
            ([b"\x02\x03"], "version 2"),
            ([b"\x01\x09"], "kind 9"),
            ([b"\x01\x04\xff"], "not UTF-8"),
            ([b"\x01\x04" + b"x" * 513], "reason length"),
            ([b"\x01\x01" + bytes(18)], "no payload"),
            ([b"\x01\x01" + bytes(19)], "head_last is 0"),
        ],
    )
    def test_a_peer_that_breaks_the_rules(self, plains: list[bytes], message: str) -> None:
        machine = opener()
        records = []
        for counter, plain in enumerate(plains):
            length = struct.pack("<I", len(plain) + 16)
            records.append(length + AESGCM(KEY).encrypt(struct.pack(">B3xQ", 0, counter), plain, length))
        with pytest.raises(ProtocolError, match=message):
            machine.feed(b"".join(records))

    def test_abort_may_follow_the_end(self) -> None:
        assert opener().feed(b"".join(sealed(End(0, 0), Abort("late")))) == [End(0, 0), Abort("late")]


class TestMessages:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("layer", -1),
            ("layer", 65536),
            ("head_last", 2),
            ("head_last", 65536),
            ("head_first", -1),
            ("start", -1),
            ("start", 2**31),
            ("tokens", 0),
            ("tokens", 2**31),
            ("codec", 2),
            ("dtype", 3),
            ("head_dim", 0),
            ("head_dim", 1025),
            ("payload", b""),
            ("payload", bytes(MAX_PAYLOAD_BYTES + 1)),
        ],
    )
    def test_a_bad_frame_cannot_exist(self, field: str, value: int | bytes) -> None:
        with pytest.raises(ProtocolError):
            replace(FRAME, **{field: value})  # type: ignore[arg-type]

    def test_bad_counts_and_reasons(self) -> None:
        with pytest.raises(ProtocolError):
            End(-1, 0)
        with pytest.raises(ProtocolError):
            End(0, 2**32)
        with pytest.raises(ProtocolError):
            Abort("x" * (MAX_REASON_BYTES + 1))

    def test_any_reason_is_cut_to_fit(self) -> None:
        reason = Abort.because("é" * 1000 + "\ud800").reason
        assert reason == "é" * 256

    def test_messages_are_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            FRAME.layer = 1  # type: ignore[misc]

    def test_repr_leaves_the_payload_out(self) -> None:
        assert repr(FRAME) == (
            "KVFrame(layer=7, heads=[2, 4), tokens=[512, 612), codec=1, dtype=0, head_dim=64, 7 bytes)"
        )


class TestHello:
    def test_round_trip(self) -> None:
        assert parse_hello(hello(bytes(16))) == bytes(16)
        assert hello(bytes(16)) == DATA_MAGIC + bytes(16)
        assert len(hello(bytes(16))) == HELLO_BYTES == 24

    @pytest.mark.parametrize("data", [b"", DATA_MAGIC, b"GET / HTTP/1.1\r\n\r\n      ", hello(bytes(16)) + b"x"])
    def test_anything_else(self, data: bytes) -> None:
        with pytest.raises(ProtocolError):
            parse_hello(data)

    def test_wrong_id(self) -> None:
        with pytest.raises(ProtocolError):
            hello(b"short")


class TestLink:
    def test_a_link_that_truncates(self) -> None:
        pair = EndpointPair(ticket_for_tests(), FaultyLink(truncate_at=30))
        assert pair.to_receiver(FRAME) == []
        assert pair.there.carried == 30
        with pytest.raises(ProtocolError, match="30 bytes into record 0"):
            pair.hang_up()

    @pytest.mark.parametrize("fault", ["loss", "corruption"])
    @pytest.mark.parametrize("seed", range(10))
    def test_a_link_that_loses_or_alters_never_delivers_something_else(self, fault: str, seed: int) -> None:
        link = FaultyLink(seed=seed, max_piece=20)
        setattr(link, fault, 0.2)
        pair = EndpointPair(ticket_for_tests(), link)
        messages = [replace(FRAME, layer=layer) for layer in range(20)]
        got: list[Message] = []
        with pytest.raises(ProtocolError):  # noqa: PT012 - which message it is that fails depends on the seed
            for message in messages:
                got += pair.to_receiver(message)
            pair.hang_up()
        assert got == messages[: len(got)]


def test_no_torch() -> None:
    """The agent process imports this room and must stay small."""
    root = Path(__file__).resolve().parents[2]
    code = "import sys, p2pserve.kvtransport, p2pserve.kvtransport.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=60).returncode == 0
