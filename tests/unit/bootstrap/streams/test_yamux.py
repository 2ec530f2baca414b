"""Yamux with one stream: two sides that talk, what is refused, and when room is made."""

import random
import struct

import pytest

from p2pserve.bootstrap.errors import ProtocolError
from p2pserve.bootstrap.streams.yamux import Frames

FIRST, WINDOW = 256 * 1024, 16 * 1024 * 1024
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8


def header(kind: int, flags: int, stream: int, length: int, version: int = 0) -> bytes:
    return struct.pack("!BBHII", version, kind, flags, stream, length)


def pair() -> tuple[Frames, Frames]:
    """Both sides of a connection whose stream is open."""
    dialler, listener = Frames(dialler=True), Frames(dialler=False)
    assert listener.feed(dialler.open()) == b""
    assert dialler.feed(listener.answers) == b""
    listener.answers = b""
    assert dialler.stream == listener.stream == 1
    return dialler, listener


def test_both_sides_let_the_other_send_a_whole_window() -> None:
    dialler, listener = pair()
    assert dialler.credit == listener.credit == WINDOW
    assert dialler.answers == listener.answers == b""


@pytest.mark.parametrize("seed", range(5))
def test_data_arrives_however_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    dialler, listener = pair()
    said = [rng.randbytes(rng.choice((0, 1, 11, 12, 13, 5000, 65507))) for _ in range(30)]
    wire = b"".join(header(PING, SYN, 0, 7) + dialler.data(body) for body in said)
    heard = b""
    while wire:
        size = rng.choice((1, 5, 12, 100, 40_000))
        heard += listener.feed(wire[:size])
        wire = wire[size:]
    assert heard == b"".join(said)
    assert listener.answers == header(PING, ACK, 0, 7) * 30


def test_small_messages_are_not_answered_and_room_is_made_in_time() -> None:
    dialler, listener = pair()
    body = bytes(65_507)
    while not listener.answers:
        assert listener.feed(dialler.data(body)) == body
        assert dialler.credit > 0
    assert WINDOW // 2 - 65_507 <= dialler.credit < WINDOW // 2
    dialler.feed(listener.answers)
    assert dialler.credit == WINDOW


def test_the_end_is_seen_with_the_last_data() -> None:
    dialler, listener = pair()
    assert listener.feed(dialler.data(b"last") + dialler.finish()) == b"last"
    assert listener.ended
    for ending in (header(GO_AWAY, 0, 0, 0), header(WINDOW_UPDATE, RST, 1, 0), header(DATA, FIN, 1, 0)):
        _, other = pair()
        assert not other.ended
        other.feed(ending)
        assert other.ended


@pytest.mark.parametrize(
    "frame",
    [
        header(DATA, 0, 1, 5, version=1),
        header(4, 0, 1, 0),
        header(DATA, 0, 3, 5),
        header(WINDOW_UPDATE, SYN, 3, 0),
        header(WINDOW_UPDATE, SYN, 1, 0),
        header(DATA, 0, 1, WINDOW + 1),
        header(DATA, 0, 0, 5),
    ],
)
def test_what_is_against_the_rules_is_refused(frame: bytes) -> None:
    for side in pair():
        with pytest.raises(ProtocolError):
            side.feed(frame)


def test_who_pings_and_takes_no_answers_is_cut_off() -> None:
    """Or what is to be answered would grow, and growing it would hold up everything else of this process."""
    _, listener = pair()
    pings = header(PING, SYN, 0, 7) * 1000
    for _ in range(3):
        listener.feed(pings)
        assert len(listener.answers) == 12_000
        listener.answers = b""
    listener.feed(pings)
    with pytest.raises(ProtocolError, match="more yamux pings"):
        listener.feed(pings)
    assert len(listener.answers) < 20_000


def test_a_stream_is_opened_by_the_dialler_and_first() -> None:
    with pytest.raises(ProtocolError):
        Frames(dialler=False).feed(header(DATA, 0, 1, 5))
    with pytest.raises(ProtocolError):
        Frames(dialler=False).feed(header(WINDOW_UPDATE, SYN, 2, 0))
    with pytest.raises(ProtocolError):
        Frames(dialler=True).feed(header(WINDOW_UPDATE, SYN, 1, 0))


def test_no_more_comes_than_was_granted() -> None:
    listener = Frames(dialler=False)
    listener.feed(header(DATA, SYN, 1, 0))
    with pytest.raises(ProtocolError):
        listener.feed((header(DATA, 0, 1, FIRST) + bytes(FIRST)) * (WINDOW // FIRST) + header(DATA, 0, 1, WINDOW))


@pytest.mark.parametrize("seed", range(20))
def test_garbage_is_refused_or_ignored_and_never_breaks_anything_else(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        dialler, listener = pair()
        wire = bytearray(dialler.data(rng.randbytes(50)) * 3)
        for _ in range(rng.randrange(1, 5)):
            wire[rng.randrange(len(wire))] = rng.randrange(256)
        try:
            assert len(listener.feed(bytes(wire))) <= len(wire)
        except ProtocolError:
            continue
