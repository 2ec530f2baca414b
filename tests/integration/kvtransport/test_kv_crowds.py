"""Links over real sockets: many transfers at once, strangers, replays and ends."""

from __future__ import annotations

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from p2pserve.kvtransport.errors import TransferError, TransferTimeout
from p2pserve.kvtransport.link.receive_link import IncomingTransfer
from p2pserve.kvtransport.link.send_link import OutgoingTransfer
from p2pserve.kvtransport.link.transfers import EndState
from p2pserve.kvtransport.wire.channel import Channel, LinkHello, LinkRole
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.sockets import read_link_hello

from .pairs import (
    DELIVERED,
    SETTINGS,
    WAIT_LIMIT_S,
    WINDOW,
    Listener,
    Pair,
    frame,
    payloads,
    receive_all,
    send_all,
    until,
)


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
        outgoing.wait_for_credit(WAIT_LIMIT_S)
    for outgoing, _ in both:
        for layer, payload in enumerate(data):
            outgoing.send(frame(layer, payload), timeout=WAIT_LIMIT_S)
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
    assert all(outgoing.wait(WAIT_LIMIT_S) == DELIVERED for outgoing, _ in both)


def test_32_transfers_at_once_over_four_connections_all_arrive(pair: Pair) -> None:
    links = pair.links(streams=4)
    both = [pair.begin(links) for _ in range(32)]
    data = payloads(4, 250_000)
    with ThreadPoolExecutor(len(both)) as threads:
        received = [threads.submit(receive_all, incoming, data) for _, incoming in both]
        sending = [send_all(outgoing, data) for outgoing, _ in both]
        for each in received:
            each.result(WAIT_LIMIT_S)
    for thread in sending:
        thread.join()
    assert all(outgoing.wait(WAIT_LIMIT_S) == DELIVERED for outgoing, _ in both)


def test_the_receiver_may_dial(pair: Pair) -> None:
    listener = Listener(lambda connection: pair.sender.attach(read_link_hello(connection, WAIT_LIMIT_S), connection))
    pair.others.append(listener)
    sending = pair.sender.open_sender(pair.ticket)
    receiving = pair.receiver.open_receiver(pair.ticket, [DialPath("127.0.0.1", listener.port, streams=2)])
    assert sending.wait_connected(2, WAIT_LIMIT_S)
    outgoing, incoming = pair.begin((sending, receiving))
    data = payloads(5, 100_000)
    thread = send_all(outgoing, data)
    receive_all(incoming, data)
    thread.join()
    assert outgoing.wait(WAIT_LIMIT_S) == DELIVERED


def test_connections_may_come_before_their_link_is_known(pair: Pair) -> None:
    sending = pair.sender.open_sender(pair.ticket, [pair.direct(2)])
    until(lambda: pair.listener.accepted == 2)
    receiving = pair.receiver.open_receiver(pair.ticket)
    assert sending.wait_connected(2, WAIT_LIMIT_S)
    assert receiving.wait_connected(2, WAIT_LIMIT_S)


def test_strangers_are_dropped_and_disturb_nobody(pair: Pair) -> None:
    pair.receiver.settings = replace(SETTINGS, authenticate_s=0.5)
    links = pair.links()
    hello = LinkHello(pair.ticket.link, secrets.token_bytes(16), LinkRole.SENDER).pack()
    address = ("127.0.0.1", pair.listener.port)
    with socket.create_connection(address) as silent, socket.create_connection(address) as loud:
        silent.sendall(hello)
        loud.sendall(hello + secrets.token_bytes(4096))
        for stranger in (silent, loud):
            stranger.settimeout(WAIT_LIMIT_S)
            with suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
    assert links[1].connections == 2
    outgoing, incoming = pair.begin(links)
    thread = send_all(outgoing, [b"x" * 1000])
    receive_all(incoming, [b"x" * 1000])
    thread.join()
    assert outgoing.wait(WAIT_LIMIT_S) == DELIVERED


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
        shake_hands(real, channel, WAIT_LIMIT_S)
        assert receiving.wait_connected(1, WAIT_LIMIT_S)
    with socket.create_connection(address) as replay:
        replay.settimeout(WAIT_LIMIT_S)
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
    assert outgoing.wait(WAIT_LIMIT_S) == EndState("failed", "the engine stops")
    assert "the engine stops" in incoming.wait(WAIT_LIMIT_S).reason
    with pytest.raises(TransferError, match="the engine stops"):
        links[0].open(pair.transfer())


def test_without_any_connection_a_transfer_fails_after_the_grace(pair: Pair) -> None:
    pair.sender.settings = pair.receiver.settings = replace(SETTINGS, grace_s=0.5)
    way = pair.forwarder()
    links = pair.links(DialPath("127.0.0.1", way.port))
    outgoing, incoming = pair.begin(links)
    way.listener.close()
    way.cut()
    assert outgoing.wait(WAIT_LIMIT_S).reason == "no connection for 0.5 s"
    assert incoming.wait(WAIT_LIMIT_S).reason == "no connection for 0.5 s"
    until(lambda: "refused" in links[0].statistics().failures.get("direct", ""))
