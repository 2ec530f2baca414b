"""One end of a transfer by a peer of ours: plain TCP streams, NIXL or Mooncake's transfer engine.

    python peer_end.py raw|nixl|mooncake send|receive HOST MIB STREAMS

Runs as a file under any Python, that of an environment which has the peer and nothing of this
project: so it imports the standard library, and the peer. It says what the other end must know of
it, then obeys one JSON document a line until its input ends:

    {"op": "open", "peer": {...}}                 sender: connect to what the receiver has said of itself
    {"op": "expect", "mib": 256, "number": 3}     receiver: answers when all of that has arrived
    {"op": "move", "mib": 256, "number": 3}       sender: answers when the peer calls it sent

A move is in blocks of 1 MiB, each written to its place in the receiver's memory. Every block bears
the move's number at its end, and the receiver looks for it, so what is timed does not rest on
when a library says that it is done. Times are of the machine's monotonic clock, which all boxes of
an emulated network share.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

BLOCK = 1 << 20
POLL_S = 0.002
WAIT_S = 600.0
NUMBER = struct.Struct("<Q")


class Blocks:
    """Memory of so many MiB, and which blocks of it bear a move's number."""

    def __init__(self, mib: int) -> None:
        self.memory = mmap.mmap(-1, mib * BLOCK)
        noise = os.urandom(BLOCK)
        for block in range(mib):  # written once, so that no page is made while a move is timed
            self.memory[block * BLOCK : (block + 1) * BLOCK] = noise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def stamp(self, mib: int, number: int) -> None:
        """Give all blocks of a move its number."""
        for block in range(mib):
            NUMBER.pack_into(self.memory, (block + 1) * BLOCK - NUMBER.size, number)

    def has(self, block: int, number: int) -> bool:
        """Whether a block of that move is here. Bytes of a block arrive in order."""
        (found,) = NUMBER.unpack_from(self.memory, (block + 1) * BLOCK - NUMBER.size)
        return bool(found == number)

    def wait(self, mib: int, number: int) -> None:
        """Until all of a move is here."""
        until = time.monotonic() + WAIT_S
        block = 0
        while block < mib:
            if self.has(block, number):
                block += 1
                continue
            if time.monotonic() > until:
                raise RuntimeError(f"block {block} of {mib} has not come")
            time.sleep(POLL_S)


class PeerEnd(Protocol):
    """What a peer does at either end."""

    def about(self) -> dict[str, Any]: ...

    def open(self, peer: dict[str, Any]) -> None: ...

    def expect(self, mib: int, number: int) -> None: ...

    def move(self, mib: int) -> None: ...


class RawEnd:
    """Plain TCP connections, each with its part of the blocks, and a byte back when all has been read."""

    def __init__(self, blocks: Blocks, role: str, host: str, streams: int) -> None:
        self._blocks = blocks
        self._streams = streams
        self._socks: list[socket.socket] = []
        self._server = socket.create_server((host, 0), backlog=256) if role == "receive" else None

    def about(self) -> dict[str, Any]:
        return {"version": "", "port": self._server.getsockname()[1] if self._server else 0}

    def open(self, peer: dict[str, Any]) -> None:
        self._socks = [socket.create_connection((peer["host"], peer["port"])) for _ in range(self._streams)]

    def expect(self, mib: int, number: int) -> None:
        if not self._socks:
            assert self._server is not None
            self._socks = [self._server.accept()[0] for _ in range(self._streams)]
        self._each(mib, self._receive)
        self._blocks.wait(mib, number)
        self._socks[0].sendall(b"\0")

    def move(self, mib: int) -> None:
        self._each(mib, self._send)
        if not self._socks[0].recv(1):
            raise RuntimeError("the receiver hung up")

    def _each(self, mib: int, work: Any) -> None:
        """The streams share the bytes evenly, in the same way at both ends."""
        cuts = [mib * BLOCK * n // self._streams for n in range(self._streams + 1)]
        view = memoryview(self._blocks.memory)
        parts = [(sock, view[cuts[n] : cuts[n + 1]]) for n, sock in enumerate(self._socks)]
        threads = [threading.Thread(target=work, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @staticmethod
    def _send(sock: socket.socket, part: memoryview) -> None:
        sock.sendall(part)

    @staticmethod
    def _receive(sock: socket.socket, part: memoryview) -> None:
        while part:
            count = sock.recv_into(part)
            if not count:
                raise RuntimeError("the sender hung up")
            part = part[count:]


class NixlEnd:
    """NIXL's agent with its default settings and the UCX backend, which the environment holds to TCP."""

    def __init__(self, blocks: Blocks, role: str, host: str, streams: int) -> None:
        nixl = importlib.import_module("nixl_cu12._api")
        self._blocks, self._name = blocks, role
        self._agent = nixl.nixl_agent(role, nixl.nixl_agent_config(backends=["UCX"]))
        whole = [(blocks.address, len(blocks.memory), 0, "")]
        self._agent.register_memory(self._agent.get_reg_descs(whole, mem_type="cpu"))
        self._peer, self._there = "", 0

    def about(self) -> dict[str, Any]:
        metadata = self._agent.get_agent_metadata()
        version = importlib.import_module("importlib.metadata").version("nixl")
        return {"version": version, "metadata": metadata.hex(), "address": self._blocks.address}

    def open(self, peer: dict[str, Any]) -> None:
        name = self._agent.add_remote_agent(bytes.fromhex(peer["metadata"]))
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._there = peer["address"]

    def expect(self, mib: int, number: int) -> None:
        self._blocks.wait(mib, number)

    def move(self, mib: int) -> None:
        here, there = (
            self._agent.get_xfer_descs([(address + block * BLOCK, BLOCK, 0) for block in range(mib)], mem_type="cpu")
            for address in (self._blocks.address, self._there)
        )
        transfer = self._agent.initialize_xfer("WRITE", here, there, self._peer, b"")
        state = self._agent.transfer(transfer)
        while state not in ("DONE", "ERR"):
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(transfer)
        self._agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")


class MooncakeEnd:
    """Mooncake's transfer engine over TCP; all blocks of a move are one batch."""

    def __init__(self, blocks: Blocks, role: str, host: str, streams: int) -> None:
        self._blocks, self._host = blocks, host
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("the transfer engine did not initialise")
        if self._engine.register_memory(blocks.address, len(blocks.memory)) != 0:
            raise RuntimeError("the transfer engine did not register memory")
        self._peer, self._there = "", 0

    def about(self) -> dict[str, Any]:
        version = importlib.import_module("importlib.metadata").version("mooncake-transfer-engine-non-cuda")
        name = f"{self._host}:{self._engine.get_rpc_port()}"
        return {"version": version, "name": name, "address": self._blocks.address}

    def open(self, peer: dict[str, Any]) -> None:
        self._peer, self._there = peer["name"], peer["address"]

    def expect(self, mib: int, number: int) -> None:
        self._blocks.wait(mib, number)

    def move(self, mib: int) -> None:
        here, there = ([start + n * BLOCK for n in range(mib)] for start in (self._blocks.address, self._there))
        if self._engine.batch_transfer_sync_write(self._peer, here, there, [BLOCK] * mib) != 0:
            raise RuntimeError("the batch failed")


ENDS: dict[str, Callable[[Blocks, str, str, int], PeerEnd]] = {"raw": RawEnd, "nixl": NixlEnd, "mooncake": MooncakeEnd}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(end: PeerEnd, blocks: Blocks, say: Any) -> None:
    """Obey until the input ends."""
    say(end.about())
    for line in sys.stdin:
        order = json.loads(line)
        cpu = _cpu()
        if order["op"] == "open":
            end.open(order["peer"])
            say({})
            continue
        if order["op"] == "move":
            blocks.stamp(order["mib"], order["number"])
            cpu, began = _cpu(), time.monotonic()
            end.move(order["mib"])
        else:
            began = time.monotonic()
            end.expect(order["mib"], order["number"])
        say({"began": began, "ended": time.monotonic(), "cpu_s": _cpu() - cpu})


def main(argv: list[str], ends: dict[str, Callable[[Blocks, str, str, int], PeerEnd]] = ENDS) -> int:
    """Run one end; what goes wrong is said in one line."""
    # Libraries write to standard output as they please: the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    try:
        what, role, host, mib, streams = argv
        blocks = Blocks(int(mib))
        serve(ends[what](blocks, role, host, int(streams)), blocks, say)
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        raise
    os._exit(0)  # a library's threads may not keep the process


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
