"""The program that sends, receives and relays KV in a box of an emulated network: `kvtransport` and
no model.

It says its data port, then obeys orders (see `orders`) until its input ends. The payload is numbers
made from a seed, 1 MiB a frame, and the receiver checks that each frame is what it should be, and
that all have come.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from ....kvtransport.errors import TransferError
from ....kvtransport.link.endpoint import Endpoint
from ....kvtransport.link.receive_link import IncomingTransfer, ReceiveLink
from ....kvtransport.link.relay import Relay
from ....kvtransport.link.send_link import OutgoingTransfer, SendLink
from ....kvtransport.link.transfers import EndState
from ....kvtransport.probing.burst import BurstGate, dial_burst, read_burst_hello, receive_burst, send_burst
from ....kvtransport.probing.burst_ticket import BURST_MAGIC, BurstTicket
from ....kvtransport.wire.channel import LINK_MAGIC
from ....kvtransport.wire.dial_path import DialPath
from ....kvtransport.wire.frames import KVFrame
from ....kvtransport.wire.permits import RELAY_MAGIC
from ....kvtransport.wire.sockets import read_link_hello, read_relay_hello, receive_exactly
from . import orders
from .orders import Bulk, Order, OrderReply, TransferState

# 256 tokens of one layer of a model with 8 KV heads of 128 dimensions, in 16 bit: keys and values are 1 MiB.
TOKENS, HEADS, HEAD_DIM, LAYERS = 256, 8, 128, 32
FRAME_BYTES: Final = TOKENS * HEADS * HEAD_DIM * 2 * 2
RAW, BF16 = 0, 0  # numbers on the wire
WINDOW_BYTES: Final = 64 << 20
PING_MAGIC: Final = b"simPING\n"
PEEK_S: Final = 10.0
CONNECT_S: Final = 15.0
SEND_S: Final = 120.0
STEP: Final = 4096


class KVBox:
    """One box's data port, links and transfers."""

    def __init__(self, address: str) -> None:
        self._endpoint = Endpoint()
        self._relay = Relay()
        self._bursts: dict[bytes, BurstGate] = {}
        self._sent: dict[bytes, list[tuple[OutgoingTransfer, float, list[float]]]] = {}
        block = random.Random(0).randbytes(FRAME_BYTES)
        self._numbers = memoryview(block + block)
        self._sums: dict[int, int] = {}
        self._listener = socket.create_server((address, 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End every link and transfer."""
        self._listener.close()
        self._endpoint.close()

    def obey(self, order: Order) -> OrderReply:
        """Carry out an order. Raises TransferError or OSError."""
        match order:
            case orders.Listen(ticket):
                self._endpoint.open_receiver(ticket)
            case orders.Expect(link, transfers):
                self._receive(link, transfers)
            case orders.Connect(ticket, paths):
                # Transfers are timed from their start: connecting must be over by then.
                opened = self._endpoint.open_sender(ticket, paths)
                if not opened.wait_connected(sum(path.streams for path in paths), CONNECT_S):
                    why = opened.statistics().failures
                    raise TransferError(f"not all connections are up after {CONNECT_S:g} s: {why}")
            case orders.Send(link, transfers):
                self._send(link, transfers)
            case orders.SetPathsOrder(link, paths):
                self._sender(link).set_paths(paths)
            case orders.Watch(link):
                return self._watch(link)
            case orders.Forget(link):
                self._endpoint.forget(link)
                self._sent.pop(link, None)
            case orders.Admit(permit):
                self._relay.admit(permit)
            case orders.Relayed():
                return OrderReply(relayed=sum(use.bytes_forwarded for use in self._relay.statistics()))
            case orders.PingOrder(host, port, count):
                return OrderReply(rtt_s=_ping(host, port, count))
            case orders.ExpectBurst(burst):
                self._bursts[burst.burst] = BurstGate(burst)
                threading.Thread(target=self._receive_burst, args=(burst,), daemon=True).start()
            case orders.SendBurst(burst, host, port):
                with dial_burst(burst, DialPath(host, port), CONNECT_S) as ends:
                    return OrderReply(burst=send_burst(ends))
        return OrderReply()

    def _payload(self, frame: int) -> memoryview:
        start = frame * STEP % FRAME_BYTES
        return self._numbers[start : start + FRAME_BYTES]

    def _sum(self, frame: int) -> int:
        """The checksum of a frame; there are few kinds, so each is computed once."""
        start = frame * STEP % FRAME_BYTES
        if start not in self._sums:
            self._sums[start] = zlib.crc32(self._payload(frame))
        return self._sums[start]

    # ---- sending --------------------------------------------------------------------------------------------

    def _sender(self, link: bytes) -> SendLink:
        found = self._endpoint.link(link)
        if not isinstance(found, SendLink):
            raise TransferError(f"there is no sending link {link.hex()}")
        return found

    def _send(self, link: bytes, transfers: list[Bulk]) -> None:
        sender = self._sender(link)
        for bulk in transfers:
            ended: list[float] = []
            outgoing = sender.open(bulk.ticket, partial(_note_end, ended))
            self._sent.setdefault(link, []).append((outgoing, time.monotonic(), ended))
            threading.Thread(target=self._push, args=(outgoing, bulk.frames), daemon=True).start()

    def _push(self, outgoing: OutgoingTransfer, frames: int) -> None:
        try:
            for number in range(frames):
                layer, span = number % LAYERS, number // LAYERS
                frame = KVFrame(layer, 0, HEADS, span * TOKENS, TOKENS, RAW, BF16, HEAD_DIM, self._payload(number))
                outgoing.send(frame, timeout=SEND_S)
            outgoing.finish(-(-frames // LAYERS) * TOKENS)
        except TransferError as error:
            outgoing.abort(str(error))

    def _watch(self, link: bytes) -> OrderReply:
        states = []
        for outgoing, started, ended in self._sent.get(link, []):
            progress, state = outgoing.progress(), outgoing.state
            states.append(
                TransferState(
                    state=state.name,
                    reason=state.reason,
                    seconds=(ended[0] if ended else time.monotonic()) - started,
                    bytes=progress.bytes_queued,
                    acknowledged=progress.bytes_acknowledged,
                    resent=progress.bytes_resent,
                    by_path=progress.bytes_by_path,
                )
            )
        paths = self._sender(link).statistics().paths
        return OrderReply(transfers=states, connections={label: path.connections for label, path in paths.items()})

    # ---- receiving ------------------------------------------------------------------------------------------

    def _receive(self, link: bytes, transfers: list[Bulk]) -> None:
        receiver = self._endpoint.link(link)
        if not isinstance(receiver, ReceiveLink):
            raise TransferError(f"there is no receiving link {link.hex()}")
        for bulk in transfers:
            incoming = receiver.expect(bulk.ticket)
            incoming.grant(WINDOW_BYTES)
            threading.Thread(target=self._take, args=(incoming, bulk.frames), daemon=True).start()

    def _take(self, incoming: IncomingTransfer, frames: int) -> None:
        seen = set()
        try:
            for frame in incoming:
                number = frame.start // TOKENS * LAYERS + frame.layer
                if zlib.crc32(frame.payload) != self._sum(number):
                    incoming.abort(f"frame {number} is not what was sent")
                    return
                seen.add(number)
            if seen != set(range(frames)):
                incoming.abort(f"{len(seen)} of {frames} frames have come")
                return
            incoming.acknowledge()
        except TransferError as error:
            sys.stderr.write(f"a transfer was not received: {error}\n")

    # ---- the data port --------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._attach, args=(sock,), daemon=True).start()

    def _attach(self, sock: socket.socket) -> None:
        """Give a connection to whom its first bytes name."""
        try:
            sock.settimeout(PEEK_S)
            magic = sock.recv(len(LINK_MAGIC), socket.MSG_PEEK | socket.MSG_WAITALL)
            sock.settimeout(None)
            attach: dict[bytes, Callable[[socket.socket], object]] = {
                LINK_MAGIC: lambda sock: self._endpoint.attach(read_link_hello(sock, PEEK_S), sock),
                RELAY_MAGIC: lambda sock: self._relay.attach(read_relay_hello(sock, PEEK_S), sock),
                BURST_MAGIC: self._attach_burst,
                PING_MAGIC: _echo,
            }
            attach[magic](sock)
        except (KeyError, OSError, TransferError):
            sock.close()

    def _attach_burst(self, sock: socket.socket) -> None:
        hello = read_burst_hello(sock, PEEK_S)
        self._bursts[hello.burst].attach(sock, hello)

    def _receive_burst(self, ticket: BurstTicket) -> None:
        try:
            with self._bursts[ticket.burst].wait(CONNECT_S) as ends:
                receive_burst(ends)
        except TransferError as error:
            sys.stderr.write(f"a burst was not received: {error}\n")
        finally:
            del self._bursts[ticket.burst]


def _note_end(moments: list[float], outgoing: OutgoingTransfer, state: EndState) -> None:
    moments.append(time.monotonic())


def _ping(host: str, port: int, count: int) -> list[float]:
    took = []
    with socket.create_connection((host, port), timeout=CONNECT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            start = time.monotonic()
            sock.sendall(PING_MAGIC)
            receive_exactly(sock, len(PING_MAGIC), start + CONNECT_S)
            took.append(time.monotonic() - start)
    return took


def _echo(sock: socket.socket) -> None:
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := sock.recv(STEP):
            sock.sendall(data)


def main(argv: list[str]) -> int:
    """Run the box's program at the address `argv[0]`."""
    box = KVBox(argv[0])
    say = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    say.write(msgspec.json.encode(OrderReply(port=box.port)) + b"\n")
    for line in sys.stdin.buffer:
        try:
            answer = box.obey(msgspec.json.decode(line, type=Order))
        except (TransferError, OSError) as error:
            answer = OrderReply(error=str(error))
        say.write(msgspec.json.encode(answer) + b"\n")
    box.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
