"""Encrypted message pipes: what goes in comes out at the other end, and nothing else does."""

import random
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import pytest

from p2pserve.kvtransport.errors import (
    ConnectionClosed,
    KVProtocolError,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from p2pserve.kvtransport.wire.channel import LinkHello, LinkRole
from p2pserve.kvtransport.wire.ciphers import RekeyBounds
from p2pserve.kvtransport.wire.pipe import (
    MAX_BUFFERS,
    Pipe,
    PipeSettings,
    RecordHead,
    RecordKind,
    greet,
    parse_head,
    split,
)
from p2pserve.kvtransport.wire.tickets import LinkTicket, issue_link

PATIENT = PipeSettings(beat_s=30, lost_s=60)
PART = 128 << 10

Pair = tuple[Pipe, Pipe]
MakePair = Callable[[PipeSettings], Pair]


def shake(
    ours: socket.socket, theirs: socket.socket, settings: PipeSettings, other: LinkTicket | None = None
) -> list[Pipe | TransferError]:
    """Both ends of a pipe; `other` is the ticket of the accepting side, if it is not the same one."""
    ticket = issue_link(60, secrets.token_bytes)
    hello = LinkHello(ticket.link, secrets.token_bytes(16), LinkRole.SENDER)

    def end(sock: socket.socket, ticket: LinkTicket, dials: bool) -> Pipe | TransferError:
        try:
            if not dials:
                assert sock.recv(48, socket.MSG_WAITALL) == hello.pack()
            return greet(sock, ticket, hello, dials=dials, timeout=20, settings=settings)
        except TransferError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(end, (ours, theirs), (ticket, other or ticket), (True, False)))


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    made: list[Pipe] = []

    def make(settings: PipeSettings) -> Pair:
        one, two = shake(*socket.socketpair(), settings)
        assert isinstance(one, Pipe)
        assert isinstance(two, Pipe)
        made.extend((one, two))
        return one, two

    yield make
    for pipe in made:
        pipe.close()


def sent(pair: Pair, message: list[bytes]) -> list[bytes]:
    """What arrives of a message; large ones need somebody who reads while they are sent."""
    one, two = pair
    with ThreadPoolExecutor(1) as threads:
        arriving = threads.submit(two.receive)
        one.send(message)
        return [bytes(buffer) for buffer in arriving.result(30)]


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0,),
        (1,),
        (0, 1, 15, 16, 17, 0),
        (PART - 32,),
        (PART,),
        (PART + 1, 3),
        (5, 3 * PART + 7, 0, 2 * PART, 1),
        (1,) * MAX_BUFFERS,
    ],
)
def test_messages_arrive_as_they_were_sent(make_pair: MakePair, sizes: tuple[int, ...]) -> None:
    message = [random.Random(n).randbytes(size) for n, size in enumerate(sizes)]
    one, two = make_pair(PATIENT)
    assert sent((one, two), message) == message
    assert sent((two, one), message[::-1]) == message[::-1]


def test_buffers_arrive_aligned_and_belong_to_the_receiver(make_pair: MakePair) -> None:
    one, two = make_pair(PATIENT)
    one.send([b"abc", b"12345678"])
    first, second = two.receive()
    one.send([b"xyz", b"87654321"])
    two.receive()
    assert (bytes(first), bytes(second)) == (b"abc", b"12345678")
    first[:] = b"ABC"
    assert bytes(second) == b"12345678"


def test_random_messages_both_ways_at_once_under_keys_that_change(make_pair: MakePair) -> None:
    pair = make_pair(PipeSettings(beat_s=30, lost_s=60, bounds=RekeyBounds(seals=5, bytes=300_000)))

    def talk(me: Pipe, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            me.send([rng.randbytes(rng.choice((0, 10, 1000, PART, 300_000))) for _ in range(rng.randrange(4))])

    def listen(me: Pipe, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            wanted = [rng.randbytes(rng.choice((0, 10, 1000, PART, 300_000))) for _ in range(rng.randrange(4))]
            assert [bytes(buffer) for buffer in me.receive()] == wanted

    with ThreadPoolExecutor(4) as threads:
        tasks = [threads.submit(talk, pair[0], 1), threads.submit(talk, pair[1], 2)]
        tasks += [threads.submit(listen, pair[1], 1), threads.submit(listen, pair[0], 2)]
        for task in tasks:
            task.result(60)
    assert pair[0].rekeyed == pair[1].rekeyed > 10
    assert pair[0].bytes_out == pair[1].bytes_in


def test_many_threads_may_send(make_pair: MakePair) -> None:
    one, two = make_pair(PATIENT)
    with ThreadPoolExecutor(8) as threads:
        for n in range(100):
            threads.submit(one.send, [str(n).encode(), bytes(1000)])
        assert {int(bytes(two.receive()[0])) for _ in range(100)} == {*range(100)}


def test_a_message_that_is_too_large_is_refused_and_costs_nothing(make_pair: MakePair) -> None:
    one, two = make_pair(PipeSettings(max_bytes=1000, beat_s=30, lost_s=60))
    for message in ([bytes(1001)], [b""] * (MAX_BUFFERS + 1)):
        with pytest.raises(KVProtocolError, match="too large"):
            one.send(message)
    one.send([b"ok"])
    assert two.receive() == [b"ok"]


def test_closing_says_why(make_pair: MakePair) -> None:
    one, two = make_pair(PATIENT)
    one.send([b"last"])
    one.close("no more layers")
    assert two.receive() == [b"last"]
    for call in (two.receive, lambda: two.send([b""])):
        with pytest.raises(TransferAborted, match="no more layers") as caught:
            call()
        assert caught.value.by_peer
    with pytest.raises(TransferAborted, match="no more layers"):
        one.send([b""])
    assert "no more layers" in repr(one)


def test_closing_wakes_who_waits(make_pair: MakePair) -> None:
    one, _ = make_pair(PATIENT)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(one.receive)
        one.close("enough")
        with pytest.raises(TransferAborted, match="enough"):
            waiting.result(20)


def test_closing_wakes_who_sends_to_a_peer_that_does_not_read(make_pair: MakePair) -> None:
    one, _ = make_pair(PATIENT)
    sending = threading.Event()

    def send() -> None:
        while True:
            one.send([bytes(PART)])
            sending.set()

    with ThreadPoolExecutor(1) as threads:
        stuck = threads.submit(send)
        assert sending.wait(20)
        one.close()
        with pytest.raises(TransferError):
            stuck.result(20)


def test_a_peer_that_is_gone_is_noticed_at_once() -> None:
    ours, theirs = socket.socketpair()
    theirs_too = theirs.dup()
    one, two = shake(ours, theirs, PATIENT)
    assert isinstance(one, Pipe)
    assert isinstance(two, Pipe)
    theirs_too.shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that was killed
    theirs_too.close()
    with pytest.raises(ConnectionClosed):
        one.receive()
    with pytest.raises(ConnectionClosed):
        one.send([b""])
    one.close()
    two.close()


def held(message: list[memoryview] | None) -> list[bytes]:
    assert message is not None
    return [bytes(buffer) for buffer in message]


@pytest.mark.parametrize("look_s", [0, 20])
def test_a_wait_for_a_message_ends(make_pair: MakePair, look_s: float) -> None:
    one, two = make_pair(PATIENT)
    assert one.receive_within(0, look_s) is None
    assert one.receive_within(0.01, look_s) is None
    two.send([b"late"])
    assert held(one.receive_within(0, look_s)) == [b"late"]
    two.send([bytes(100)])
    assert held(one.receive_within(20, look_s)) == [bytes(100)]
    assert one.receive_within(0, look_s) is None
    assert not one.wait_gone(0)
    two.send([b"last"])
    two.close("enough")
    assert one.wait_gone(20)
    assert held(one.receive_within(0, look_s)) == [b"last"]
    with pytest.raises(TransferAborted, match="enough"):
        one.receive_within(0, look_s)


@pytest.mark.parametrize("look_s", [0, 1000])
def test_a_silent_peer_is_lost_and_a_busy_one_is_not(make_pair: MakePair, look_s: float) -> None:
    now = [0.0]
    one, two = make_pair(PipeSettings(beat_s=0.01, lost_s=60, clock=lambda: now[0]))
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(pipe.receive_within, 1000, look_s) for pipe in (one, two)]
        for moment in (40.0, 80.0, 120.0):  # neither has anything to say, but both are read, so both beat
            before = one.bytes_in, two.bytes_in
            now[0] = moment
            while one.bytes_in == before[0] or two.bytes_in == before[1]:
                assert not wait(waiting, timeout=0.01).done
        two.send([b"done at last"])
        assert held(waiting[0].result(20)) == [b"done at last"]
        one.send([b""])
        waiting[1].result(20)
        now[0] = 200.0  # nobody reads at the other end now
        with pytest.raises(TransferTimeout, match="nothing was heard"):
            one.receive()


def test_another_secret_is_refused_at_both_ends() -> None:
    ours, theirs = socket.socketpair()
    ticket = issue_link(60, secrets.token_bytes)
    first, second = shake(ours, theirs, PATIENT, other=ticket)
    assert isinstance(second, KVProtocolError)  # another link as well: it does not even answer
    assert isinstance(first, ConnectionClosed)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"p2pKA/2\n" + bytes(100)])
def test_what_is_no_end_of_a_pipe_is_refused(answer: bytes) -> None:
    ours, theirs = socket.socketpair()
    ticket = issue_link(60, secrets.token_bytes)
    with theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(TransferError):
            greet(ours, ticket, LinkHello(ticket.link, bytes(16), LinkRole.SENDER), dials=True, timeout=20)


def relayed(flip: int) -> TransferError | None:
    """A message over a connection in which somebody changes one bit of byte `flip`; what the receiver makes of it."""
    ours, near = socket.socketpair()
    far, theirs = socket.socketpair()

    def carry(source: socket.socket, target: socket.socket, flip: int) -> None:
        seen = 0
        with suppress(OSError):  # the receiver hangs up on what was changed
            while data := bytearray(source.recv(1 << 16)):
                if seen <= flip < seen + len(data):
                    data[flip - seen] ^= 1 << flip % 8
                seen += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    carriers = [
        threading.Thread(target=carry, args=(near, far, flip), daemon=True),
        threading.Thread(target=carry, args=(far, near, -1), daemon=True),
    ]
    for carrier in carriers:
        carrier.start()
    one, two = shake(ours, theirs, PATIENT)
    assert isinstance(one, Pipe)
    assert isinstance(two, Pipe)
    outcome: TransferError | None = None
    one.send([b"a message", bytes(200)])
    try:
        two.receive()
    except TransferError as error:
        outcome = error
    one.close()
    two.close()
    for carrier in carriers:
        carrier.join(20)
    near.close()
    far.close()
    return outcome


def test_no_bit_of_a_record_can_be_changed() -> None:
    before = 48 + 32  # hello and greeting
    rng = random.Random(4)
    assert relayed(-1) is None
    for flip in [before, before + 31, *(rng.randrange(before, before + 32 + 250) for _ in range(20))]:
        assert isinstance(relayed(flip), KVProtocolError), flip


def test_heads_survive_packing() -> None:
    for head in (
        RecordHead(RecordKind.GREETING),
        RecordHead(RecordKind.MESSAGE, 3, 64),
        RecordHead(RecordKind.BEAT),
        RecordHead(RecordKind.CLOSE, 0, 12),
    ):
        assert parse_head(head.pack(), 1000) == head


@pytest.mark.parametrize(
    "head",
    [
        RecordHead(RecordKind.GREETING, 0, 1),
        RecordHead(RecordKind.BEAT, 1, 0),
        RecordHead(RecordKind.MESSAGE, 1, 1001),
        RecordHead(RecordKind.MESSAGE, 5, 19),
        RecordHead(RecordKind.MESSAGE, MAX_BUFFERS + 1, 1 << 20),
        RecordHead(RecordKind.CLOSE, 0, 513),
        RecordHead(RecordKind.CLOSE, 2, 8),
    ],
)
def test_heads_that_no_peer_may_send(head: RecordHead) -> None:
    with pytest.raises(KVProtocolError):
        parse_head(head.pack(), max(1000, 1 << 21 if head.buffers > MAX_BUFFERS else 0))


def test_fuzzed_heads_and_tables_give_only_protocol_errors() -> None:
    rng = random.Random(9)
    taken = 0
    for _ in range(20_000):
        data = bytearray(RecordHead(RecordKind(rng.randrange(4)), rng.choice((0, 0, 2)), rng.choice((0, 0, 64))).pack())
        for _ in range(rng.randrange(2)):
            data[rng.randrange(16)] = rng.randrange(256)
        try:
            head = parse_head(data, 1 << 16)
            body = bytearray(head.size)
            struct.pack_into(f"<{head.buffers}I", body, 0, *(rng.choice((0, 16, 24, 60)) for _ in range(head.buffers)))
            taken += len(split(memoryview(body), head.buffers)) == head.buffers
        except KVProtocolError:
            pass
    assert 1000 < taken < 19_000
