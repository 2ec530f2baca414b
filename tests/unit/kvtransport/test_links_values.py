"""What links are made of, one by one: channels, permits, dialling, the fuzzer's short run."""

from __future__ import annotations

import random

import pytest

from p2pserve.kvtransport.dev.fuzz import fuzz
from p2pserve.kvtransport.errors import KVProtocolError, TicketError
from p2pserve.kvtransport.wire.channel import LINK_HELLO_BYTES, Channel, LinkHello, LinkRole, parse_link_hello
from p2pserve.kvtransport.wire.ciphers import RekeyBounds
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.signals import (
    MAX_CHUNK_BYTES,
    Abort,
    Ack,
    Chunk,
    Credit,
    End,
    Goodbye,
    LinkGreeting,
    Ping,
    Pong,
    Result,
    Signal,
    pack,
    payload_bytes,
    unpack,
)
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket

TICKET = LinkTicket(bytes(range(16)), bytes(range(32)), 60.0)
KEY = b"t" * 16


def channels(bounds: RekeyBounds | None = None) -> tuple[Channel, Channel]:
    """A sender that dials and a receiver, the handshake behind them."""
    hello = LinkHello(TICKET.link, b"d" * 16, LinkRole.SENDER)
    dials = Channel(TICKET, LinkRole.SENDER, hello.nonce, label="direct", bounds=bounds)
    accepts = Channel(TICKET, LinkRole.RECEIVER, b"a" * 16, hello=hello, bounds=bounds)
    assert dials.begin_handshake() == hello.pack()
    assert give(dials, accepts.begin_handshake()) == [LinkGreeting("")]
    assert give(accepts, bytes(dials.seal(LinkGreeting("direct")))) == [LinkGreeting("direct")]
    assert accepts.label == "direct"
    return dials, accepts


def give(channel: Channel, data: bytes, payload: bytearray | None = None) -> list[Signal]:
    found: list[Signal] = []
    view = memoryview(data)
    while view:
        space = channel.space()
        count = min(len(space), len(view))
        space[:count] = view[:count]
        view = view[count:]
        channel.note_received(count)
        while (signal := channel.next_signal()) is not None:
            found.append(signal)
            if isinstance(signal, Chunk):
                channel.open_payload(payload if payload is not None else bytearray(signal.length))
    return found


@pytest.mark.parametrize(
    "signal",
    [
        Chunk(KEY, 3, 4096, 5000, 12, bytes(18), 904),
        End(KEY, 1500, 32),
        Abort(KEY, "für immer"),
        Credit(KEY, 1 << 40, 0),
        Credit(KEY, 5, (1 << 32) - 1),
        Result(KEY, True, ""),
        Result(KEY, False, "no blocks"),
        Ack(1 << 40, 1 << 50),
        Ping(7),
        Pong(7),
        LinkGreeting("relay"),
        Goodbye("the engine stops"),
    ],
)
def test_a_signal_survives_its_head(signal: Signal) -> None:
    head, text = pack(signal)
    assert len(head) == 54
    assert payload_bytes(head, MAX_CHUNK_BYTES) == (904 if isinstance(signal, Chunk) else len(text))
    assert unpack(head, text) == signal


def test_long_reasons_are_cut_and_bad_text_is_refused() -> None:
    head, text = pack(Abort(KEY, "ü" * 600))
    assert len(text) == 512
    assert unpack(head, text) == Abort(KEY, "ü" * 256)
    with pytest.raises(KVProtocolError, match="UTF-8"):
        unpack(head, b"\xff" * 512)


def test_channels_carry_signals_and_payloads_both_ways() -> None:
    dials, accepts = channels()
    payload = random.Random(1).randbytes(5000)
    chunk = Chunk(KEY, 0, 0, 5000, 20, bytes(18), 5000)
    into = bytearray(5000)
    data = bytes(dials.seal(chunk, memoryview(payload))) + bytes(dials.seal(Ping(3)))
    assert payload[100:132] not in data, "nothing travels in the clear"
    assert give(accepts, data, into) == [chunk, Ping(3)]
    assert into == payload
    assert give(dials, bytes(accepts.seal(Credit(KEY, 5, 0)))) == [Credit(KEY, 5, 0)]


def test_keys_are_replaced_at_the_bounds_on_both_sides() -> None:
    dials, accepts = channels(RekeyBounds(seals=5, bytes=1 << 30))
    for n in range(40):
        assert give(accepts, bytes(dials.seal(Ping(n)))) == [Ping(n)]
    assert dials.rekeyed == accepts.rekeyed == 8
    dials, accepts = channels(RekeyBounds(seals=1 << 30, bytes=54 * 4))
    for n in range(20):
        assert give(accepts, bytes(dials.seal(Ping(n)))) == [Ping(n)]
    assert dials.rekeyed == accepts.rekeyed > 3


def test_ends_with_other_bounds_or_secrets_do_not_understand_each_other() -> None:
    hello = LinkHello(TICKET.link, b"d" * 16, LinkRole.SENDER)
    other = LinkTicket(TICKET.link, bytes(32), 60.0)
    dials = Channel(other, LinkRole.SENDER, hello.nonce)
    accepts = Channel(TICKET, LinkRole.RECEIVER, b"a" * 16, hello=hello)
    with pytest.raises(KVProtocolError, match="does not open"):
        give(dials, accepts.begin_handshake())
    assert dials.is_damaged


def test_a_reflected_record_does_not_open() -> None:
    dials, _ = channels()
    with pytest.raises(KVProtocolError, match="does not open"):
        give(dials, bytes(dials.seal(Ping(1))))


def test_a_second_greeting_and_a_missing_one_are_refused() -> None:
    dials, accepts = channels()
    with pytest.raises(KVProtocolError, match="greeting"):
        give(accepts, bytes(dials.seal(LinkGreeting("again"))))
    assert not accepts.is_damaged, "the peer said this under its own key"
    hello = LinkHello(TICKET.link, b"d" * 16, LinkRole.SENDER)
    rude = Channel(TICKET, LinkRole.SENDER, hello.nonce)
    accepts = Channel(TICKET, LinkRole.RECEIVER, b"a" * 16, hello=hello)
    opening = accepts.begin_handshake()
    give(rude, opening)
    with pytest.raises(KVProtocolError, match="greeting"):
        give(accepts, bytes(rude.seal(Ping(1))))


@pytest.mark.parametrize(
    "data",
    [b"", b"p2pKV/1\n" + bytes(40), b"p2pKV/2\n" + bytes(32) + b"\2" + bytes(7), b"p2pKV/2\n" + bytes(39) + b"\1"],
)
def test_what_is_no_hello(data: bytes) -> None:
    with pytest.raises(KVProtocolError):
        parse_link_hello(data)


def test_a_hello_survives_and_names_its_end() -> None:
    hello = LinkHello(TICKET.link, b"n" * 16, LinkRole.RECEIVER)
    assert len(hello.pack()) == LINK_HELLO_BYTES
    assert parse_link_hello(hello.pack()) == hello
    with pytest.raises(KVProtocolError, match="same end"):
        Channel(TICKET, LinkRole.RECEIVER, b"a" * 16, hello=hello)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LinkTicket(b"", bytes(32), 1.0), "link id"),
        (lambda: LinkTicket(bytes(16), b"", 1.0), "secret"),
        (lambda: LinkTicket(bytes(16), bytes(32), 0.0), "lease"),
        (lambda: TransferTicket(bytes(16), bytes(16), "raw", 1.0), "transfer id"),
        (lambda: TransferTicket(KEY, b"", "raw", 1.0), "link id"),
        (lambda: TransferTicket(KEY, bytes(16), "zip", 1.0), "codec"),
        (lambda: TransferTicket(KEY, bytes(16), "raw", float("nan")), "deadline"),
        (lambda: DialPath("", 1), "host"),
        (lambda: DialPath("h", 0), "port"),
        (lambda: DialPath("h", 1, label=""), "label"),
        (lambda: DialPath("h", 1, streams=65), "streams"),
        (lambda: DialPath("h", 1, pace_bytes_s=-1), "pace_bytes_s"),
        (lambda: DialPath("h", 1, segment_bytes=535), "segment_bytes is 535; it must be 0 or 536 to 32767"),
        (lambda: DialPath("h", 1, segment_bytes=32768), "segment_bytes"),
    ],
)
def test_tickets_and_paths_name_what_is_wrong_with_them(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(TicketError, match=field):
        make()
    assert TICKET.secret.hex() not in repr(TICKET)


def test_a_short_fuzz_finds_nothing() -> None:
    report = fuzz(20_000, seed=7)
    assert report.inputs >= 20_000
    assert len(report.by_mutation) == 14
    assert report.refused > 1000
    assert report.transfers_delivered > 10
    assert fuzz(2_000, seed=7).by_mutation == fuzz(2_000, seed=7).by_mutation
