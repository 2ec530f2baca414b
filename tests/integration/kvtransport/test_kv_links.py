"""Links over real sockets: resumption, striping, relays, aborts, credit, fairness, and nothing left behind."""

from __future__ import annotations

import gc
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path as FilePath

import pytest

from p2pserve.kvtransport import (
    DialPath,
    Endpoint,
    EndState,
    IncomingTransfer,
    KVFrame,
    LinkSettings,
    LinkTicket,
    OutgoingTransfer,
    Permit,
    ReceiveLink,
    Refusal,
    Relay,
    SendLink,
    TransferAborted,
    TransferError,
    TransferTicket,
    TransferTimeout,
    issue_link,
    issue_transfer,
    read_link_hello,
)
from p2pserve.kvtransport.wire.channel import Channel, LinkHello, LinkRole
from p2pserve.kvtransport.wire.signals import Signal

WINDOW = 16 << 20
SETTINGS = LinkSettings(chunk_bytes=64 * 1024, ping_s=0.2, hedge_s=0.4, limit_bytes=32 << 20)
PATIENCE_S = 30.0  # for what comes at once, unless the machine is very busy


class Listener:
    """Accepts on loopback and hands every connection over; counts what it accepts."""

    def __init__(self, handle: Callable[[socket.socket], None]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._handle = handle
        self.accepted = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.accepted += 1
            self._handle(connection)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(PATIENCE_S)


def until(condition: Callable[[], object]) -> None:
    """Wait for what threads do without a word."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


class Forwarder:
    """A path that can be cut, or freezes after `limit` bytes: forwards each connection to `port`, in threads."""

    def __init__(self, port: int, limit: float = math.inf) -> None:
        self._port = port
        self._limit = limit
        self._ending = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.listener = Listener(self._serve)
        self.port = self.listener.port
        self.carried = 0

    def _serve(self, client: socket.socket) -> None:
        onward = socket.create_connection(("127.0.0.1", self._port))
        self._sockets += [client, onward]
        for pair in ((client, onward), (onward, client)):
            self._threads.append(threading.Thread(target=self._pour, args=pair))
            self._threads[-1].start()

    def _pour(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(16 * 1024):
                if self.frozen:
                    self._ending.wait()
                sink.sendall(data)
                self.carried += len(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    @property
    def frozen(self) -> bool:
        """Whether nothing passes any more."""
        return self.carried >= self._limit

    def cut(self, count: int | None = None) -> None:
        """Break the oldest `count` connections, or all."""
        for each in self._sockets[: None if count is None else 2 * count]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._ending.set()
        self.listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for each in self._sockets:
            each.close()


@dataclass
class Pair:
    """A sending and a receiving process in one, with the listener of the receiving box."""

    sender: Endpoint = field(default_factory=lambda: Endpoint(settings=SETTINGS))
    receiver: Endpoint = field(default_factory=lambda: Endpoint(settings=SETTINGS))
    ticket: LinkTicket = field(default_factory=lambda: issue_link(60, secrets.token_bytes))
    others: list[Listener | Forwarder | Relay] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = Listener(self._accept)
        self.others.append(self.listener)

    def _accept(self, connection: socket.socket) -> None:
        try:
            self.receiver.attach(read_link_hello(connection, PATIENCE_S), connection)
        except TransferError:
            connection.close()

    def links(self, *paths: DialPath, streams: int = 2) -> tuple[SendLink, ReceiveLink]:
        receiving = self.receiver.open_receiver(self.ticket)
        sending = self.sender.open_sender(self.ticket, paths or [self.direct(streams)])
        count = sum(path.streams for path in paths) or streams
        assert sending.wait_connected(count, PATIENCE_S), sending.statistics()
        assert receiving.wait_connected(count, PATIENCE_S), receiving.statistics()
        return sending, receiving

    def direct(self, streams: int = 1, pace: int = 0) -> DialPath:
        return DialPath("127.0.0.1", self.listener.port, streams=streams, pace_bytes_s=pace)

    def forwarder(self, limit: float = math.inf) -> Forwarder:
        found = Forwarder(self.listener.port, limit)
        self.others.append(found)
        return found

    def relay(self, *, budget: int = 1 << 30, rate: float = 1e9, expires_s: float = 60) -> tuple[Relay, DialPath]:
        relay = Relay()
        listener = Listener(relay.attach)
        self.others += [listener, relay]
        where = ("127.0.0.1", self.listener.port)
        permit = Permit(secrets.token_bytes(16), secrets.token_bytes(32), *where, budget, rate, time.time() + expires_s)
        relay.admit(permit)
        return relay, DialPath("127.0.0.1", listener.port, label="relay", relay=permit)

    def transfer(self, deadline_s: float = 60) -> TransferTicket:
        return issue_transfer(self.ticket.link, "raw", deadline_s, secrets.token_bytes)

    def begin(
        self, links: tuple[SendLink, ReceiveLink], deadline_s: float = 60
    ) -> tuple[OutgoingTransfer, IncomingTransfer]:
        ticket = self.transfer(deadline_s)
        return links[0].open(ticket), links[1].expect(ticket)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for other in self.others:
            other.close()


def open_files() -> int:
    return len(list(FilePath("/proc/self/fd").iterdir()))


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two endpoints; afterwards every thread and file descriptor that they made must be gone."""
    gc.collect()
    threads, files = set(threading.enumerate()), open_files()
    made = Pair()
    yield made
    made.sender.check_integrity()
    made.receiver.check_integrity()
    made.close()
    assert made.sender.budget.held == 0
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.is_alive()]
    gc.collect()
    assert open_files() <= files


def frame(layer: int, payload: bytes | memoryview) -> KVFrame:
    return KVFrame(layer, 0, 1, 0, 1, 0, 0, 64, payload)


def payloads(count: int, size: int) -> list[bytes]:
    return [os.urandom(size) for _ in range(count)]


def send_all(outgoing: OutgoingTransfer, data: list[bytes]) -> threading.Thread:
    def run() -> None:
        with suppress(TransferError):
            for layer, payload in enumerate(data):
                outgoing.send(frame(layer, payload), timeout=PATIENCE_S)
            outgoing.finish(1)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def receive_all(incoming: IncomingTransfer, data: list[bytes]) -> None:
    incoming.grant(WINDOW)
    seen = set()
    for each in incoming:
        assert each.payload == data[each.layer]
        assert each.layer not in seen
        seen.add(each.layer)
    assert len(seen) == len(data)
    incoming.acknowledge()


DELIVERED = EndState("delivered")


@pytest.mark.parametrize("streams", [1, 4])
def test_frames_arrive_and_both_ends_say_delivered(pair: Pair, streams: int) -> None:
    links = pair.links(streams=streams)
    ended: list[EndState] = []
    ticket = pair.transfer()
    outgoing = links[0].open(ticket, on_end=lambda _, state: ended.append(state))
    incoming = links[1].expect(ticket)
    released: list[int] = []
    data = payloads(20, 300_001)
    incoming.grant(WINDOW)
    for layer, payload in enumerate(data):
        outgoing.send(frame(layer, payload), release=partial(released.append, layer))
    outgoing.finish(7)
    receive_all(incoming, data)
    assert outgoing.wait(PATIENCE_S) == DELIVERED == incoming.wait(PATIENCE_S)
    assert incoming.tokens == 7
    assert sorted(released) == list(range(20))
    assert ended == [DELIVERED]
    progress, arrived = outgoing.progress(), incoming.progress()
    assert progress.bytes_acknowledged == arrived.bytes_received == sum(map(len, data))
    assert progress.bytes_by_path == arrived.bytes_by_path == {"direct": sum(map(len, data))}
    assert outgoing.times is not None
    assert outgoing.times.span > 0
    statistics = links[0].statistics()
    assert statistics.transfers == 0
    assert statistics.paths["direct"].connections == streams
    assert "2 connections" in repr(links[0]) or streams != 2


def test_connections_that_die_in_mid_transfer_are_replaced(pair: Pair) -> None:
    way = pair.forwarder()
    links = pair.links(DialPath("127.0.0.1", way.port, streams=3))
    outgoing, incoming = pair.begin(links)
    data = payloads(40, 500_000)
    timers = [threading.Timer(0.05, way.cut, (1,)), threading.Timer(0.15, way.cut, (2,))]
    for timer in timers:
        timer.start()
    thread = send_all(outgoing, data)
    receive_all(incoming, data)
    for each in (thread, *timers):
        each.join()
    assert outgoing.wait(PATIENCE_S) == DELIVERED
    assert links[0].wait_connected(3, PATIENCE_S), "dialled again"


def test_a_transfer_outlives_all_its_connections(pair: Pair) -> None:
    way = pair.forwarder()
    links = pair.links(DialPath("127.0.0.1", way.port, streams=2))
    outgoing, incoming = pair.begin(links)
    data = payloads(30, 500_000)
    incoming.grant(WINDOW)
    thread = send_all(outgoing, data)
    incoming.take(PATIENCE_S)
    way.cut()
    incoming.consume(0)
    count = 1 + sum(1 for _ in incoming)
    incoming.acknowledge()
    thread.join()
    assert count == 30
    assert outgoing.wait(PATIENCE_S) == DELIVERED
    assert links[0].statistics().connections_lost >= 2


def test_a_frozen_path_is_left_for_another(pair: Pair) -> None:
    way = pair.forwarder(limit=2_000_000)
    slow = DialPath("127.0.0.1", way.port, label="slow")
    links = pair.links(slow)
    outgoing, incoming = pair.begin(links)
    data = payloads(40, 500_000)
    thread = send_all(outgoing, data)
    incoming.grant(WINDOW)
    first = incoming.take(PATIENCE_S)
    assert first is not None
    until(lambda: way.frozen)
    links[0].set_paths([pair.direct(2)])
    incoming.consume(first[0])
    got = {first[1].layer} | {each.layer for each in incoming}
    assert got == set(range(40))
    incoming.acknowledge()
    thread.join()
    assert outgoing.wait(PATIENCE_S) == DELIVERED
    by_path = outgoing.progress().bytes_by_path
    assert by_path["direct"] > by_path.get("slow", 0)
    assert links[0].statistics().paths["slow"].connections == 0


def test_striping_over_direct_and_relay(pair: Pair) -> None:
    relay, through = pair.relay(rate=12e6)
    links = pair.links(pair.direct(1, pace=12_000_000), through)
    outgoing, incoming = pair.begin(links)
    data = payloads(60, 250_000)  # many times what the kernel's buffers hold
    thread = send_all(outgoing, data)
    receive_all(incoming, data)
    thread.join()
    assert outgoing.wait(PATIENCE_S) == DELIVERED
    by_path = outgoing.progress().bytes_by_path
    assert sum(by_path.values()) == sum(incoming.progress().bytes_by_path.values()) == 15_000_000
    assert min(by_path.values()) > 0.25 * sum(by_path.values()), by_path
    assert relay.statistics()[0].bytes_forwarded > by_path["relay"]


def test_a_relay_stops_at_its_budget_and_says_why(pair: Pair) -> None:
    relay, through = pair.relay(budget=1_000_000)
    links = pair.links(through)
    outgoing, incoming = pair.begin(links)
    thread = send_all(outgoing, payloads(8, 500_000))
    incoming.grant(WINDOW)
    until(lambda: "budget" in links[0].statistics().failures.get("relay", ""))
    assert relay.statistics()[0].refused > 0
    assert relay.statistics()[0].bytes_forwarded <= 1_000_000
    assert outgoing.state.name == incoming.state.name == "open"
    outgoing.abort("no other path")
    thread.join()


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        ({"secret": bytes(32)}, Refusal.FORGED),
        ({"permit": bytes(16)}, Refusal.UNKNOWN),
        ({}, Refusal.EXPIRED),
    ],
)
def test_a_relay_refuses_with_a_reason(pair: Pair, wrong: dict[str, bytes], refusal: Refusal) -> None:
    import msgspec

    from p2pserve.kvtransport import RelayRefused
    from p2pserve.kvtransport.wire.sockets import dial

    _, through = pair.relay(expires_s=60 if wrong else -1)
    assert through.relay is not None
    path = msgspec.structs.replace(through, relay=msgspec.structs.replace(through.relay, **wrong))
    with pytest.raises(RelayRefused) as caught:
        dial(path, PATIENCE_S)
    assert caught.value.code == refusal


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_abort_reaches_the_other_side(pair: Pair, side: str) -> None:
    outgoing, incoming = pair.begin(pair.links())
    incoming.grant(WINDOW)
    outgoing.send(frame(0, bytes(200_000)))
    here, there = (outgoing, incoming) if side == "sender" else (incoming, outgoing)
    here.abort("the client went away")
    assert here.wait(PATIENCE_S) == EndState("failed", "the client went away")
    assert there.wait(PATIENCE_S) == EndState("failed", "the other side gave up: the client went away")
    with pytest.raises(TransferAborted, match="the client went away"):
        outgoing.send(frame(1, b"x"))
    with pytest.raises(TransferAborted, match="the client went away"):
        for _ in incoming:
            pass


def test_a_deadline_ends_a_transfer_that_gets_no_credit(pair: Pair) -> None:
    links = pair.links()
    outgoing, incoming = pair.begin(links, deadline_s=0.4)
    released = threading.Event()
    outgoing.send(frame(0, bytes(100_000)), release=released.set)
    outgoing.finish(1)
    assert "deadline" in outgoing.wait(PATIENCE_S).reason
    assert "deadline" in incoming.wait(PATIENCE_S).reason
    assert released.wait(PATIENCE_S)
    assert links[0].statistics().paths["direct"].bytes_acknowledged == 0, "nothing may go without credit"


def test_a_receiver_that_does_not_consume_holds_the_sender_back(pair: Pair) -> None:
    outgoing, incoming = pair.begin(pair.links())
    data = payloads(30, 400_000)
    thread = send_all(outgoing, data)
    incoming.grant(4 << 20)
    until(lambda: outgoing.progress().blocked_s > 0.2)
    assert outgoing.progress().bytes_acknowledged <= 4 << 20
    count = sum(1 for _ in incoming)
    incoming.acknowledge()
    thread.join()
    assert count == 30
    assert outgoing.wait(PATIENCE_S) == DELIVERED


def test_a_sender_that_cannot_keep_up_gives_the_transfer_up(pair: Pair) -> None:
    outgoing, incoming = pair.begin(pair.links())
    for layer in range(4):
        outgoing.send(frame(layer, bytes(8_000_000)))
    with pytest.raises(TransferAborted, match="cannot keep up"):
        outgoing.send(frame(4, bytes(8_000_000)))
    assert "cannot keep up" in incoming.wait(PATIENCE_S).reason
    assert pair.sender.budget.held == 0


class PausingChannel:
    """A connection's channel that waits before it reads a payload."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.sealing, self.go_on = threading.Event(), threading.Event()
        self.read: list[bytes] = []

    def seal(self, signal: Signal, payload: memoryview | None = None) -> memoryview:
        if payload is not None:
            self.sealing.set()
            assert self.go_on.wait(PATIENCE_S)
            self.read.append(bytes(payload))
        return self._channel.seal(signal, payload)

    def __getattr__(self, name: str) -> object:
        return getattr(self._channel, name)


def test_memory_is_not_given_back_while_a_connection_reads_it(pair: Pair) -> None:
    """What its owner writes there next is not for this peer. Chunks that connections took up later do not matter."""
    pair.sender.settings = replace(SETTINGS, hedge_s=60.0)  # nothing is sent twice
    links = pair.links(streams=2)
    channels = [PausingChannel(wire.channel) for wire in links[0]._wires.values()]
    for wire, channel in zip(links[0]._wires.values(), channels, strict=True):
        wire.channel = channel  # type: ignore[assignment]
    released = [threading.Event(), threading.Event()]
    memory = [bytearray(b"%d" % number * 50_000) for number in range(2)]

    def reuse(number: int) -> None:
        memory[number][:] = bytes(50_000)
        released[number].set()

    reading: list[PausingChannel] = []

    def taken_up() -> bool:
        reading.extend(each for each in channels if each.sealing.is_set() and each not in reading)
        return len(reading) == number + 1

    for number in range(2):
        outgoing, incoming = pair.begin(links)
        incoming.grant(WINDOW)
        outgoing.send(frame(0, memoryview(memory[number])), release=partial(reuse, number))
        until(taken_up)
        outgoing.abort("the client went away")
        assert outgoing.wait(PATIENCE_S).name == "failed"
        assert not released[number].is_set()
    reading[0].go_on.set()
    assert released[0].wait(PATIENCE_S)
    assert not released[1].is_set()
    reading[1].go_on.set()
    assert released[1].wait(PATIENCE_S)
    assert [each.read for each in reading] == [[b"0" * 50_000], [b"1" * 50_000]]


def test_waiting_for_room_is_bounded(pair: Pair) -> None:
    outgoing, _ = pair.begin(pair.links())
    for layer in range(4):
        outgoing.send(frame(layer, bytes(8_000_000)))
    with pytest.raises(TransferTimeout, match="no room"):
        outgoing.send(frame(4, bytes(8_000_000)), timeout=0.1)
    assert outgoing.state.name == "open"
    outgoing.abort("done")


def test_32_transfers_share_a_connection_fairly(pair: Pair) -> None:
    # Frames of one chunk on one connection arrive in the order of sending, however busy the machine is.
    sending, receiving = pair.links(pair.direct(1, pace=16_000_000))
    data = payloads(15, SETTINGS.chunk_bytes)
    come: list[int] = []  # whose frame
    both: list[tuple[OutgoingTransfer, IncomingTransfer]] = []
    for number in range(32):
        ticket = pair.transfer()
        both.append((sending.open(ticket), receiving.expect(ticket, partial(come.append, number))))
    for _, incoming in both:
        incoming.grant(WINDOW)
    for outgoing, _ in both:
        outgoing.wait_for_credit(PATIENCE_S)
    for outgoing, _ in both:
        for layer, payload in enumerate(data):
            outgoing.send(frame(layer, payload), timeout=PATIENCE_S)
    # What has been sent by now is of those that were queued first. From here on all want the same.
    [path] = sending.statistics().paths.values()
    before = (path.bytes_acknowledged + path.bytes_in_flight) // SETTINGS.chunk_bytes
    until(lambda: len(come) == 32 * len(data))
    turns = come[before:]
    for number in range(32):
        last = -1
        for turn in [turn for turn, each in enumerate(turns) if each == number]:
            others = turns[last + 1 : turn]
            assert len(others) == len(set(others)), f"{number} waited while another had two turns: {others}"
            last = turn
    for outgoing, incoming in both:
        outgoing.finish(1)
        receive_all(incoming, data)
    assert all(outgoing.wait(PATIENCE_S) == DELIVERED for outgoing, _ in both)


def test_32_transfers_at_once_over_four_connections_all_arrive(pair: Pair) -> None:
    links = pair.links(streams=4)
    both = [pair.begin(links) for _ in range(32)]
    data = payloads(4, 250_000)
    with ThreadPoolExecutor(len(both)) as threads:
        received = [threads.submit(receive_all, incoming, data) for _, incoming in both]
        sending = [send_all(outgoing, data) for outgoing, _ in both]
        for each in received:
            each.result(PATIENCE_S)
    for thread in sending:
        thread.join()
    assert all(outgoing.wait(PATIENCE_S) == DELIVERED for outgoing, _ in both)


def test_the_receiver_may_dial(pair: Pair) -> None:
    listener = Listener(lambda connection: pair.sender.attach(read_link_hello(connection, PATIENCE_S), connection))
    pair.others.append(listener)
    sending = pair.sender.open_sender(pair.ticket)
    receiving = pair.receiver.open_receiver(pair.ticket, [DialPath("127.0.0.1", listener.port, streams=2)])
    assert sending.wait_connected(2, PATIENCE_S)
    outgoing, incoming = pair.begin((sending, receiving))
    data = payloads(5, 100_000)
    thread = send_all(outgoing, data)
    receive_all(incoming, data)
    thread.join()
    assert outgoing.wait(PATIENCE_S) == DELIVERED


def test_connections_may_come_before_their_link_is_known(pair: Pair) -> None:
    sending = pair.sender.open_sender(pair.ticket, [pair.direct(2)])
    until(lambda: pair.listener.accepted == 2)
    receiving = pair.receiver.open_receiver(pair.ticket)
    assert sending.wait_connected(2, PATIENCE_S)
    assert receiving.wait_connected(2, PATIENCE_S)


def test_strangers_are_dropped_and_disturb_nobody(pair: Pair) -> None:
    pair.receiver.settings = replace(SETTINGS, authenticate_s=0.5)
    links = pair.links()
    hello = LinkHello(pair.ticket.link, secrets.token_bytes(16), LinkRole.SENDER).pack()
    address = ("127.0.0.1", pair.listener.port)
    with socket.create_connection(address) as silent, socket.create_connection(address) as loud:
        silent.sendall(hello)
        loud.sendall(hello + secrets.token_bytes(4096))
        for stranger in (silent, loud):
            stranger.settimeout(PATIENCE_S)
            with suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
    assert links[1].connections == 2
    outgoing, incoming = pair.begin(links)
    thread = send_all(outgoing, [b"x" * 1000])
    receive_all(incoming, [b"x" * 1000])
    thread.join()
    assert outgoing.wait(PATIENCE_S) == DELIVERED


def test_a_replayed_connection_authenticates_nobody(pair: Pair) -> None:
    """Everything that a sender once said on a connection, said again: the answer's fresh nonce makes other keys."""
    receiving = pair.receiver.open_receiver(pair.ticket)
    recorded: list[bytes] = []
    channel = Channel(pair.ticket, LinkRole.SENDER, secrets.token_bytes(16), label="direct")
    address = ("127.0.0.1", pair.listener.port)
    from p2pserve.kvtransport.wire.sockets import shake_hands

    class Tap(socket.socket):
        def sendall(self, data: object, flags: int = 0) -> None:
            recorded.append(bytes(data))  # type: ignore[call-overload]
            super().sendall(data, flags)  # type: ignore[arg-type]

    with Tap(socket.AF_INET, socket.SOCK_STREAM) as real:
        real.connect(address)
        shake_hands(real, channel, PATIENCE_S)
        assert receiving.wait_connected(1, PATIENCE_S)
    with socket.create_connection(address) as replay:
        replay.settimeout(PATIENCE_S)
        replay.sendall(b"".join(recorded))
        with suppress(ConnectionResetError):
            while replay.recv(4096):
                pass
    assert len(recorded) == 2
    until(lambda: not receiving.connections)
    assert receiving.statistics().connections_lost == 1


def test_closing_one_end_ends_the_other(pair: Pair) -> None:
    links = pair.links()
    outgoing, incoming = pair.begin(links)
    links[0].close("the engine stops")
    assert outgoing.wait(PATIENCE_S) == EndState("failed", "the engine stops")
    assert "the engine stops" in incoming.wait(PATIENCE_S).reason
    with pytest.raises(TransferError, match="the engine stops"):
        links[0].open(pair.transfer())


def test_without_any_connection_a_transfer_fails_after_the_grace(pair: Pair) -> None:
    pair.sender.settings = pair.receiver.settings = replace(SETTINGS, grace_s=0.5)
    way = pair.forwarder()
    links = pair.links(DialPath("127.0.0.1", way.port))
    outgoing, incoming = pair.begin(links)
    way.listener.close()
    way.cut()
    assert outgoing.wait(PATIENCE_S).reason == "no connection for 0.5 s"
    assert incoming.wait(PATIENCE_S).reason == "no connection for 0.5 s"
    until(lambda: "refused" in links[0].statistics().failures.get("direct", ""))
