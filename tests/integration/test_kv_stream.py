"""Transfers over real sockets: what both ends end up with, whatever happens in between."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from p2pserve.kernels.codec import Codec, decode, encode
from p2pserve.kvtransport import (
    Assembly,
    ConnectionClosed,
    KVFrame,
    ProtocolError,
    ReceiveStream,
    SendStream,
    Ticket,
    TransferAborted,
    TransferError,
    TransferTimeout,
    read_hello,
)
from p2pserve.kvtransport.testing import stream_pair, ticket_for_tests
from p2pserve.kvtransport.wire import DATA_MAGIC

ROOT = Path(__file__).resolve().parents[2]


def frame(layer: int = 0, start: int = 0, tokens: int = 512, payload: bytes = b"x" * 70_000) -> KVFrame:
    return KVFrame(layer, 0, 2, start, tokens, Codec.KV4.wire, 0, 64, payload)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def accept(server: socket.socket, ticket: Ticket, timeout: float = 5.0) -> ReceiveStream:
    sock, _ = server.accept()
    assert read_hello(sock, timeout) == ticket.transfer
    return ReceiveStream(sock, ticket, timeout=timeout)


def connected(server: socket.socket, ticket: Ticket, timeout: float = 5.0) -> tuple[SendStream, ReceiveStream]:
    sender = SendStream.connect(ticket, timeout=timeout)
    return sender, accept(server, ticket, timeout)


def ticket_to(server: socket.socket, *, codec: str = "raw", deadline_s: float = 30.0) -> Ticket:
    return ticket_for_tests(codec=codec, deadline_s=deadline_s, port=server.getsockname()[1])


def receive_all(stream: ReceiveStream) -> int:
    count = sum(1 for _ in stream)
    stream.acknowledge()
    return count


def failure(call: Callable[[], object]) -> TransferError:
    with pytest.raises(TransferError) as caught:
        call()
    return caught.value


def result_of(future: Future[TransferError]) -> TransferError:
    return future.result(timeout=10)


class TestDelivery:
    @pytest.mark.parametrize("codec", list(Codec))
    def test_a_prompt_layer_by_layer(self, server: socket.socket, pool: ThreadPoolExecutor, codec: Codec) -> None:
        """Three layers, 200 tokens in chunks, two shards of heads: assembled, decoded, acknowledged."""
        layers, heads, head_dim = range(3), 4, 64
        chunks, shards = ((0, 128), (128, 200)), ((0, 1), (1, 4))
        k = torch.randn(3, 200, heads, head_dim).to(torch.bfloat16)
        v = torch.randn(3, 200, heads, head_dim).to(torch.bfloat16)
        ticket = ticket_to(server, codec=codec.value)

        def receive() -> tuple[torch.Tensor, torch.Tensor]:
            got_k, got_v = torch.zeros_like(k), torch.zeros_like(v)
            assembly = Assembly(layers, heads, 200)
            with accept(server, ticket) as stream:
                for piece in stream:
                    assembly.add(piece)
                    part_k, part_v = decode(
                        Codec(ticket.codec),
                        memoryview(piece.payload),
                        tokens=piece.tokens,
                        heads=piece.heads,
                        head_dim=piece.head_dim,
                        dtype=torch.bfloat16,
                        start=piece.start,
                        layer=piece.layer,
                    )
                    at = (piece.layer, slice(piece.start, piece.end), slice(piece.head_first, piece.head_last))
                    got_k[at], got_v[at] = part_k, part_v
                assert assembly.done
                stream.acknowledge()
            assert stream.state.name == "delivered"
            return got_k, got_v

        future = pool.submit(receive)
        with SendStream.connect(ticket, timeout=5) as stream:
            for start, end in chunks:
                for layer in layers:
                    for first, last in shards:
                        at = (layer, slice(start, end), slice(first, last))
                        data = encode(codec, k[at], v[at], start=start, layer=layer)
                        tokens = end - start
                        stream.send(KVFrame(layer, first, last, start, tokens, codec.wire, 0, head_dim, data))
            stream.finish(200)
        assert stream.state.name == "delivered"
        assert str(stream.state) == "delivered"
        got_k, got_v = future.result(timeout=10)
        if codec is Codec.RAW:
            assert torch.equal(got_k, k)
            assert torch.equal(got_v, v)
        else:
            assert float((got_k - k).float().norm() / k.float().norm()) < 0.1
            assert float((got_v - v).float().norm() / v.float().norm()) < 0.1

    def test_both_ends_count_the_same_bytes(self, server: socket.socket, pool: ThreadPoolExecutor) -> None:
        sender, receiver = connected(server, ticket_to(server))
        with sender, receiver:
            future = pool.submit(receive_all, receiver)
            for layer in range(10):
                sender.send(frame(layer))
            sender.finish(512)
            assert future.result(timeout=10) == 10
        assert sender.bytes_sent == receiver.bytes_received + 24  # the hello was read by the acceptor
        assert sender.bytes_received == receiver.bytes_sent == 22
        text = "delivered frames=10 tokens=512"
        assert text in repr(sender)
        assert text in repr(receiver)

    def test_an_empty_transfer(self, pool: ThreadPoolExecutor) -> None:
        sender, receiver = stream_pair(ticket_for_tests())
        with sender, receiver:
            future = pool.submit(receive_all, receiver)
            sender.finish(0)
            assert future.result(timeout=10) == 0

    def test_bbr_is_only_a_wish(self, server: socket.socket) -> None:
        ticket = ticket_to(server)
        with SendStream.connect(ticket, timeout=5, bbr=True) as stream:
            assert stream.state.name == "open"

    def test_a_transfer_that_begins_in_the_middle_of_the_prompt(self, pool: ThreadPoolExecutor) -> None:
        sender, receiver = stream_pair(ticket_for_tests())
        with sender, receiver:
            future = pool.submit(receive_all, receiver)
            sender.send(frame(0, start=600, tokens=20))
            sender.send(frame(0, start=512, tokens=88))
            sender.finish(108)
            assert future.result(timeout=10) == 2


class TestGivingUp:
    def test_receiver_aborts_while_the_sender_sends(self, server: socket.socket, pool: ThreadPoolExecutor) -> None:
        sender, receiver = connected(server, ticket_to(server))

        def give_up() -> None:
            next(iter(receiver))
            receiver.abort("out of blocks")

        future = pool.submit(give_up)

        def send_for_ever() -> None:
            while True:
                sender.send(frame())

        error = failure(send_for_ever)
        future.result(timeout=10)
        # The reason arrives unless the kernel dropped it together with the bytes nobody read.
        assert isinstance(error, TransferAborted | ConnectionClosed)
        if isinstance(error, TransferAborted):
            assert (error.reason, error.by_peer) == ("out of blocks", True)
        assert sender.state.name == receiver.state.name == "failed"
        assert receiver.state.reason == "TransferAborted: out of blocks"

    def test_receiver_aborts_between_frames(self, server: socket.socket) -> None:
        sender, receiver = connected(server, ticket_to(server))
        sender.send(frame())
        next(iter(receiver))
        receiver.abort("cancelled")
        error = failure(lambda: sender.send(frame(1)))
        assert isinstance(error, TransferAborted)
        assert error.reason == "cancelled"
        assert failure(lambda: sender.finish(512)) is error
        sender.close()

    def test_receiver_aborts_instead_of_acknowledging(self, server: socket.socket, pool: ThreadPoolExecutor) -> None:
        sender, receiver = connected(server, ticket_to(server))
        sender.send(frame())
        future = pool.submit(failure, lambda: sender.finish(512))
        assert len(list(receiver)) == 1
        receiver.abort("does not fit")
        error = result_of(future)
        assert isinstance(error, TransferAborted)
        assert error.reason == "does not fit"

    def test_sender_aborts(self, server: socket.socket) -> None:
        sender, receiver = connected(server, ticket_to(server))
        sender.send(frame())
        sender.abort("preempted " + "x" * 1000)
        frames = iter(receiver)
        next(frames)
        error = failure(lambda: next(frames))
        assert isinstance(error, TransferAborted)
        assert error.reason.startswith("preempted xxx")
        assert len(error.reason) == 512
        assert receiver.state.name == "failed"
        receiver.close()

    def test_an_exception_in_the_block_tells_the_other_side(self, server: socket.socket) -> None:
        sender, receiver = connected(server, ticket_to(server))
        with pytest.raises(KeyError), sender:
            raise KeyError("layer 7")
        error = failure(lambda: list(receiver))
        assert "KeyError: 'layer 7'" in str(error)
        receiver.close()

    def test_closing_without_finishing_is_a_failure(self, server: socket.socket) -> None:
        sender, receiver = connected(server, ticket_to(server))
        with sender:
            sender.send(frame())
        assert str(sender.state) == "failed(ConnectionClosed: closed by this side)"
        frames = iter(receiver)
        next(frames)
        assert isinstance(failure(lambda: next(frames)), ConnectionClosed)
        receiver.close()

    def test_the_end_state_is_final(self, pool: ThreadPoolExecutor) -> None:
        sender, receiver = stream_pair(ticket_for_tests())
        future = pool.submit(receive_all, receiver)
        sender.send(frame())
        sender.finish(512)
        future.result(timeout=10)
        for stream in (sender, receiver):
            stream.abort("too late")
            stream.close()
            stream.close()
            assert stream.state.name == "delivered"
        assert isinstance(failure(lambda: sender.send(frame())), ProtocolError)


class TestOtherThreads:
    @pytest.mark.parametrize("how", ["close", "abort"])
    def test_wakes_a_thread_that_waits_for_frames(self, pool: ThreadPoolExecutor, how: str) -> None:
        sender, receiver = stream_pair(ticket_for_tests(), timeout=30)
        future = pool.submit(failure, lambda: list(receiver))
        time.sleep(0.05)
        began = time.monotonic()
        if how == "close":
            receiver.close()
            assert isinstance(result_of(future), ConnectionClosed)
        else:
            receiver.abort("cancelled")
            assert isinstance(result_of(future), TransferAborted)
        assert time.monotonic() - began < 2
        sender.close()

    def test_wakes_a_thread_that_waits_for_room(self, pool: ThreadPoolExecutor) -> None:
        sender, receiver = stream_pair(ticket_for_tests(), timeout=30)

        def send_for_ever() -> None:
            while True:
                sender.send(frame())

        future = pool.submit(failure, send_for_ever)
        time.sleep(0.05)
        sender.close()
        assert isinstance(result_of(future), ConnectionClosed)
        receiver.close()

    def test_wakes_a_thread_that_waits_for_the_acknowledgement(self, pool: ThreadPoolExecutor) -> None:
        sender, receiver = stream_pair(ticket_for_tests(), timeout=30)
        future = pool.submit(failure, lambda: sender.finish(0))
        time.sleep(0.05)
        sender.close()
        assert isinstance(result_of(future), ConnectionClosed)
        receiver.close()

    def test_any_race_settles_once(self, pool: ThreadPoolExecutor) -> None:
        """Close, abort and traffic at once: one end state each, only TransferErrors."""
        for round_number in range(60):
            sender, receiver = stream_pair(ticket_for_tests(round_number))

            def send(sender: SendStream = sender) -> str:
                try:
                    for layer in range(20):
                        sender.send(frame(layer))
                    sender.finish(512)
                except TransferError:
                    return "failed"
                return "delivered"

            def receive(receiver: ReceiveStream = receiver) -> str:
                try:
                    receive_all(receiver)
                except TransferError:
                    return "failed"
                return "delivered"

            outcomes = (pool.submit(send), pool.submit(receive))
            victim = (sender, receiver)[round_number % 2]
            end = pool.submit(victim.close) if round_number % 4 < 2 else pool.submit(victim.abort, "race")
            end.result(timeout=10)
            sent, received = (outcome.result(timeout=10) for outcome in outcomes)
            assert (sent, received) == (sender.state.name, receiver.state.name)
            assert (sent, received) != ("delivered", "failed")
            sender.close()
            receiver.close()


class TestTime:
    def test_a_silent_sender(self) -> None:
        sender, receiver = stream_pair(ticket_for_tests(), timeout=0.1)
        error = failure(lambda: list(receiver))
        assert isinstance(error, TransferTimeout)
        assert "no progress for 0.1 s" in str(error)
        told = failure(lambda: sender.send(frame()))
        assert isinstance(told, TransferAborted)  # the receiver said why it left
        receiver.close()

    def test_a_receiver_that_does_not_read(self) -> None:
        sender, receiver = stream_pair(ticket_for_tests(), timeout=0.1)

        def send_for_ever() -> None:
            while True:
                sender.send(frame())

        assert isinstance(failure(send_for_ever), TransferTimeout)
        sender.close()
        receiver.close()

    def test_the_acknowledgement_may_take_longer_than_the_timeout(self, pool: ThreadPoolExecutor) -> None:
        sender, receiver = stream_pair(ticket_for_tests(), timeout=0.1)
        future = pool.submit(sender.finish, 0)
        assert list(receiver) == []
        time.sleep(0.3)
        receiver.acknowledge()
        future.result(timeout=10)
        sender.close()
        receiver.close()

    def test_the_deadline_ends_the_wait_for_the_acknowledgement(self) -> None:
        sender, receiver = stream_pair(ticket_for_tests(deadline_s=0.2), timeout=5)
        began = time.monotonic()
        error = failure(lambda: sender.finish(0))
        assert isinstance(error, TransferTimeout)
        assert "deadline" in str(error)
        assert 0.1 < time.monotonic() - began < 2
        receiver.close()

    def test_the_clock_is_a_parameter(self) -> None:
        now = [100.0]
        left, right = socket.socketpair()
        stream = SendStream(left, ticket_for_tests(deadline_s=5), timeout=1, clock=lambda: now[0])
        stream.send(frame(payload=b"x"))
        now[0] = 106.0
        assert isinstance(failure(lambda: stream.send(frame())), TransferTimeout)
        right.close()

    def test_a_bad_timeout(self) -> None:
        left, right = socket.socketpair()
        with left, right, pytest.raises(ValueError, match="must be positive"):
            SendStream(left, ticket_for_tests(), timeout=0)


class TestBadPeers:
    @pytest.mark.parametrize(
        "data", [b"\0" * 4, b"\xff" * 64, b"\x20\0\0\0" + b"garbage!" * 4, b"GET / HTTP/1.1\r\n\r\n"]
    )
    def test_garbage_instead_of_records(self, data: bytes) -> None:
        left, right = socket.socketpair()
        receiver = ReceiveStream(right, ticket_for_tests(), timeout=1)
        left.sendall(data)
        assert isinstance(failure(lambda: list(receiver)), ProtocolError)
        assert receiver.state.name == "failed"
        left.close()

    def test_a_connection_that_ends_inside_a_record(self) -> None:
        left, right = socket.socketpair()
        receiver = ReceiveStream(right, ticket_for_tests(), timeout=1)
        left.sendall(b"\x20\0\0\0garbage")
        left.close()
        error = failure(lambda: list(receiver))
        assert isinstance(error, ConnectionClosed)
        assert "inside a record" in str(error)

    def test_the_wrong_key(self) -> None:
        left, right = socket.socketpair()
        sender = SendStream(left, ticket_for_tests(1), timeout=1)
        receiver = ReceiveStream(right, ticket_for_tests(2), timeout=1)
        sender.send(frame())
        assert isinstance(failure(lambda: list(receiver)), ProtocolError)
        assert isinstance(failure(lambda: sender.finish(512)), TransferError)

    def test_a_wrong_count_in_the_end(self) -> None:
        sender, receiver = stream_pair(ticket_for_tests())
        sender.send(frame())
        assert "cover 512 positions" in str(failure(lambda: sender.finish(511)))
        sender._coverage.frames = 7  # make it lie
        receiving: list[TransferError] = []
        thread = threading.Thread(target=lambda: receiving.append(failure(lambda: list(receiver))))
        thread.start()
        assert isinstance(failure(lambda: sender.finish(512)), TransferAborted)
        thread.join(timeout=10)
        assert "7 frames, 512 tokens sent; 1, 512 arrived" in str(receiving[0])

    def test_acknowledging_too_early(self) -> None:
        sender, receiver = stream_pair(ticket_for_tests())
        with pytest.raises(ProtocolError, match="before the End"):
            receiver.acknowledge()
        sender.close()
        receiver.close()

    def test_a_killed_sender_leaves_a_valid_prefix(self, server: socket.socket) -> None:
        """Kill -9 in the middle of a transfer: the receiver knows, soon, and what it has is whole."""
        code = """
import sys
from p2pserve.kvtransport import KVFrame, SendStream
from p2pserve.kvtransport.testing import ticket_for_tests
stream = SendStream.connect(ticket_for_tests(port=int(sys.argv[1])), timeout=30)
for i in range(10**6):
    stream.send(KVFrame(i % 2, 0, 2, 512 * (i // 2), 512, 1, 0, 64, b"x" * 70_000))
"""
        command = [sys.executable, "-c", code, str(server.getsockname()[1])]
        with subprocess.Popen(command, cwd=ROOT) as process:
            stream = accept(server, ticket_to(server), timeout=30)
            assembly = Assembly(range(2), 2, 512 * 500_000)
            try:
                with pytest.raises(TransferError) as caught:  # noqa: PT012 - the frames are the point
                    for count, piece in enumerate(stream):
                        assembly.add(piece)
                        if count == 30:
                            os.kill(process.pid, signal.SIGKILL)
            finally:
                process.kill()
        assert isinstance(caught.value, ConnectionClosed)
        assert assembly.complete_tokens() >= 15 * 512
        assert stream.state.name == "failed"
        stream.close()


class TestHello:
    def test_not_a_byte_more_than_the_hello(self) -> None:
        left, right = socket.socketpair()
        with left, right:
            left.sendall(DATA_MAGIC + b"0123456789abcdefnext")
            assert read_hello(right, 1) == b"0123456789abcdef"
            assert right.recv(100) == b"next"

    def test_something_else(self) -> None:
        left, right = socket.socketpair()
        with left, right:
            left.sendall(b"\x13/multistream/1.0.0\n     ")
            with pytest.raises(ProtocolError, match="not a KV connection"):
                read_hello(right, 1)

    def test_silence_and_a_trickle(self) -> None:
        left, right = socket.socketpair()
        with left, right:
            with pytest.raises(TransferTimeout):
                read_hello(right, 0.05)
            stop = threading.Event()

            def trickle() -> None:
                while not stop.wait(0.02):
                    left.send(b"p")

            thread = threading.Thread(target=trickle)
            thread.start()
            with pytest.raises(TransferTimeout):
                read_hello(right, 0.1)
            stop.set()
            thread.join()

    def test_hang_up(self) -> None:
        left, right = socket.socketpair()
        left.sendall(b"p2p")
        left.close()
        with right, pytest.raises(ConnectionClosed, match="3 bytes into its hello"):
            read_hello(right, 1)


class TestDialling:
    def test_nobody_listens(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ticket = ticket_to(listener)
        with pytest.raises(ConnectionClosed, match=r"cannot connect to 127\.0\.0\.1"):
            SendStream.connect(ticket, timeout=1)

    def test_a_name_that_cannot_be_one(self) -> None:
        ticket = Ticket(bytes(16), bytes(32), "a" * 70 + ".invalid", 1, "raw", 5)
        with pytest.raises(ConnectionClosed, match="cannot connect"):
            SendStream.connect(ticket, timeout=1)

    def test_buffer_sizes_are_left_to_the_kernel(self, server: socket.socket) -> None:
        plain = socket.create_connection(server.getsockname())
        server.accept()[0].close()
        sender, receiver = connected(server, ticket_to(server))
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            ours = sender._connection._sock.getsockopt(socket.SOL_SOCKET, option)
            assert ours == plain.getsockopt(socket.SOL_SOCKET, option)
        plain.close()
        sender.close()
        receiver.close()
