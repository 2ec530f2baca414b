"""Links over real sockets: resumption, striping, relays, aborts and credit."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from p2pserve.kvtransport.errors import TransferAborted
from p2pserve.kvtransport.link.relay import Relay
from p2pserve.kvtransport.link.transfers import EndState
from p2pserve.kvtransport.wire.channel import Channel
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.permits import Permit, Refusal, pack_relay_answer, pack_relay_hello
from p2pserve.kvtransport.wire.signals import Signal
from p2pserve.kvtransport.wire.sockets import dial, fresh_nonce

from .pairs import DELIVERED, SETTINGS, WAIT_LIMIT_S, WINDOW, Pair, frame, payloads, receive_all, send_all, until


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
    assert outgoing.wait(WAIT_LIMIT_S) == DELIVERED == incoming.wait(WAIT_LIMIT_S)
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
    assert outgoing.wait(WAIT_LIMIT_S) == DELIVERED
    assert links[0].wait_connected(3, WAIT_LIMIT_S), "dialled again"


def test_a_transfer_outlives_all_its_connections(pair: Pair) -> None:
    way = pair.forwarder()
    links = pair.links(DialPath("127.0.0.1", way.port, streams=2))
    outgoing, incoming = pair.begin(links)
    data = payloads(30, 500_000)
    incoming.grant(WINDOW)
    thread = send_all(outgoing, data)
    incoming.take(WAIT_LIMIT_S)
    way.cut()
    incoming.consume(0)
    count = 1 + sum(1 for _ in incoming)
    incoming.acknowledge()
    thread.join()
    assert count == 30
    assert outgoing.wait(WAIT_LIMIT_S) == DELIVERED
    assert links[0].statistics().connections_lost >= 2


def test_a_frozen_path_is_left_for_another(pair: Pair) -> None:
    way = pair.forwarder(limit=2_000_000)
    slow = DialPath("127.0.0.1", way.port, label="slow")
    links = pair.links(slow)
    outgoing, incoming = pair.begin(links)
    data = payloads(40, 500_000)
    thread = send_all(outgoing, data)
    incoming.grant(WINDOW)
    first = incoming.take(WAIT_LIMIT_S)
    assert first is not None
    until(lambda: way.frozen)
    links[0].set_paths([pair.direct(2)])
    incoming.consume(first[0])
    got = {first[1].layer} | {each.layer for each in incoming}
    assert got == set(range(40))
    incoming.acknowledge()
    thread.join()
    assert outgoing.wait(WAIT_LIMIT_S) == DELIVERED
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
    assert outgoing.wait(WAIT_LIMIT_S) == DELIVERED
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

    from p2pserve.kvtransport.errors import RelayRefused
    from p2pserve.kvtransport.wire.sockets import dial

    _, through = pair.relay(expires_s=60 if wrong else -1)
    assert through.relay is not None
    path = msgspec.structs.replace(through, relay=msgspec.structs.replace(through.relay, **wrong))
    with pytest.raises(RelayRefused) as caught:
        dial(path, WAIT_LIMIT_S)
    assert caught.value.code == refusal


def test_a_permit_that_is_revoked_takes_its_silent_connections_along() -> None:
    """And no others. They would keep the places of everybody else's."""
    here = ("127.0.0.1", 0)
    with Relay() as relay, socket.create_server(here) as target, socket.create_server(here) as front:
        port = target.getsockname()[1]
        ends = []
        for name in (b"a" * 16, b"b" * 16):
            permit = Permit(name, bytes(32), here[0], port, 1 << 30, 1e9, time.monotonic() + 60)
            relay.admit(permit, owner=name.decode())
            far = socket.create_connection(front.getsockname(), WAIT_LIMIT_S)
            assert relay.attach(pack_relay_hello(permit, fresh_nonce()), front.accept()[0])
            assert far.recv(2) == pack_relay_answer(Refusal.ACCEPTED)
            ends.append((far, target.accept()[0]))
        relay.revoke(b"a" * 16)
        assert [end.recv(1) for end in ends[0]] == [b"", b""]
        until(lambda: "connections=1 " in repr(relay))
        ends[1][0].sendall(b"x")
        assert ends[1][1].recv(1) == b"x"
        for end in (*ends[0], *ends[1]):
            end.close()


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_abort_reaches_the_other_side(pair: Pair, side: str) -> None:
    outgoing, incoming = pair.begin(pair.links())
    incoming.grant(WINDOW)
    outgoing.send(frame(0, bytes(200_000)))
    here, there = (outgoing, incoming) if side == "sender" else (incoming, outgoing)
    here.abort("the client went away")
    assert here.wait(WAIT_LIMIT_S) == EndState("failed", "the client went away")
    assert there.wait(WAIT_LIMIT_S) == EndState("failed", "the other side gave up: the client went away")
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
    assert "deadline" in outgoing.wait(WAIT_LIMIT_S).reason
    assert "deadline" in incoming.wait(WAIT_LIMIT_S).reason
    assert released.wait(WAIT_LIMIT_S)
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
    assert outgoing.wait(WAIT_LIMIT_S) == DELIVERED


def test_a_sender_that_cannot_keep_up_gives_the_transfer_up(pair: Pair) -> None:
    outgoing, incoming = pair.begin(pair.links())
    for layer in range(4):
        outgoing.send(frame(layer, bytes(8_000_000)))
    with pytest.raises(TransferAborted, match="cannot keep up"):
        outgoing.send(frame(4, bytes(8_000_000)))
    assert "cannot keep up" in incoming.wait(WAIT_LIMIT_S).reason
    assert pair.sender.budget.held == 0


class PausingChannel(Channel):
    """A connection's channel that waits before it reads a payload."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sealing, self.go_on = threading.Event(), threading.Event()
        self.read: list[bytes] = []

    def seal(self, signal: Signal, payload: memoryview | None = None) -> memoryview:
        if payload is not None:
            self.sealing.set()
            assert self.go_on.wait(WAIT_LIMIT_S)
            self.read.append(bytes(payload))
        return super().seal(signal, payload)


def test_memory_is_not_given_back_while_a_connection_reads_it(pair: Pair) -> None:
    """What its owner writes there next is not for this peer. Chunks that connections took up later do not matter."""
    pair.sender.settings = replace(SETTINGS, hedge_s=60.0)  # nothing is sent twice
    channels: list[PausingChannel] = []

    def make(*arguments: Any, **options: Any) -> PausingChannel:
        channels.append(PausingChannel(*arguments, **options))
        return channels[-1]

    pair.sender.make_channel = make
    links = pair.links(streams=2)
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
        assert outgoing.wait(WAIT_LIMIT_S).name == "failed"
        assert not released[number].is_set()
    reading[0].go_on.set()
    assert released[0].wait(WAIT_LIMIT_S)
    assert not released[1].is_set()
    reading[1].go_on.set()
    assert released[1].wait(WAIT_LIMIT_S)
    assert [each.read for each in reading] == [[b"0" * 50_000], [b"1" * 50_000]]


@pytest.mark.parametrize("most", [1220, 0])
def test_segments_are_as_small_as_the_path_says_at_both_ends(most: int) -> None:
    """Whatever the devices would take: that of loopback, 64 KiB."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        path = DialPath("127.0.0.1", listener.getsockname()[1], segment_bytes=most)
        with dial(path, WAIT_LIMIT_S) as near, listener.accept()[0] as far:
            sizes = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) for end in (near, far)]
    assert all(size <= most if most else size > 1460 for size in sizes)
