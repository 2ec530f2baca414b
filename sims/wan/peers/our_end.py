"""Our end of the same transfers: `kvtransport` over one link, each frame copied to its place as it comes.

    python -m p2pserve.sims.wan.peers.our_end ours send|receive HOST MIB STREAMS

It obeys what `peer_end` obeys. What is timed includes that everything is encrypted, since our links
always are, and ends when the sender has the receiver's acknowledgement.
"""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import suppress
from typing import Any, Final

from ....kvtransport.errors import TransferError
from ....kvtransport.link.endpoint import Endpoint
from ....kvtransport.link.receive_link import ReceiveLink
from ....kvtransport.link.send_link import SendLink
from ....kvtransport.wire.dial_path import DialPath
from ....kvtransport.wire.frames import KVFrame
from ....kvtransport.wire.sockets import read_link_hello
from ....kvtransport.wire.tickets import LinkTicket, TransferTicket
from . import peer_end
from .peer_end import BLOCK, WAIT_S, Blocks

# A block is 256 tokens of a layer of a model with 8 KV heads of 128 dimensions, in 16 bit.
TOKENS, HEADS, HEAD_DIM = 256, 8, 128
RAW, BF16 = 0, 0  # numbers on the wire
WINDOW_BYTES: Final = 64 << 20
HELLO_S: Final = 10.0
CONNECT_S: Final = 30.0
# Both ends are ours, on one machine: the ticket needs no secret.
LINK: Final = LinkTicket(bytes(16), bytes(32), 3600.0)


class OurEnd:
    """A link of `kvtransport` and its transfers, one at a time."""

    def __init__(self, blocks: Blocks, role: str, host: str, streams: int) -> None:
        self._blocks, self._streams = blocks, streams
        self._endpoint = Endpoint()
        self._sender: SendLink | None = None
        self._receiver: ReceiveLink | None = None
        self._moves = 0
        if role == "receive":
            self._server = socket.create_server((host, 0), backlog=256)
            self._receiver = self._endpoint.open_receiver(LINK)
            threading.Thread(target=self._accept, daemon=True).start()

    def about(self) -> dict[str, Any]:
        return {"version": "", "port": self._server.getsockname()[1] if self._receiver else 0}

    def open(self, peer: dict[str, Any]) -> None:
        path = DialPath(peer["host"], peer["port"], streams=self._streams)
        self._sender = self._endpoint.open_sender(LINK, [path])
        if not self._sender.wait_connected(self._streams, CONNECT_S):
            raise TransferError(f"not all connections are up after {CONNECT_S:g} s")

    def expect(self, mib: int, number: int) -> None:
        assert self._receiver is not None
        incoming = self._receiver.expect(self._ticket())
        incoming.grant(WINDOW_BYTES)
        for frame in incoming:
            place = frame.layer * BLOCK
            self._blocks.memory[place : place + BLOCK] = frame.payload
        incoming.acknowledge()
        self._blocks.wait(mib, number)

    def move(self, mib: int) -> None:
        assert self._sender is not None
        outgoing = self._sender.open(self._ticket())
        memory = memoryview(self._blocks.memory)
        for block in range(mib):
            payload = memory[block * BLOCK : (block + 1) * BLOCK]
            outgoing.send(KVFrame(block, 0, HEADS, 0, TOKENS, RAW, BF16, HEAD_DIM, payload), timeout=WAIT_S)
        outgoing.finish(TOKENS)
        state = outgoing.wait(WAIT_S)
        if state.name != "delivered":
            raise TransferError(f"the transfer {state}")

    def _ticket(self) -> TransferTicket:
        self._moves += 1
        return TransferTicket(self._moves.to_bytes(16, "big"), LINK.link, "raw", WAIT_S)

    def _accept(self) -> None:
        while True:
            sock, _ = self._server.accept()
            with suppress(TransferError):
                self._endpoint.attach(read_link_hello(sock, HELLO_S), sock)


def main(argv: list[str]) -> int:
    """Run one end."""
    return peer_end.main(argv, {"ours": OurEnd})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
