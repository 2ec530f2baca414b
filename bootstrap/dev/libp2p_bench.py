"""How fast one py-libp2p stream (Noise, yamux) moves bytes between two processes on loopback, for
comparison.

    python -m p2pserve.bootstrap.libp2p_bench --bytes 134217728 [--format json]

It is the control stream of `libp2p_host`, with frames of 256 KiB: what bulk data would have if it
went there.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Final

import trio

from ..addresses import Address
from ..streams.libp2p_host import Libp2pTransport
from ..streams.transport import PeerConnection
from ..trust.identity import Identity
from ..trust.keys import PeerId

_FRAME: Final = 256 * 1024
_WAIT_LIMIT_S: Final = 100
_LISTEN: Final = Address("127.0.0.1", 0)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _receive(size: int) -> None:
    """Announce where we listen, count one connection's bytes, answer, and say what it cost."""
    done = trio.Event()

    async def handle(connection: PeerConnection) -> None:
        connection.admit()
        left, cpu = size, _cpu()
        while left > 0:
            left -= len(await connection.receive())
        await connection.send(b"all")
        _say({"cpu_s": _cpu() - cpu})
        await trio.sleep(0.2)
        done.set()

    transport = Libp2pTransport(Identity.generate(), _LISTEN, _LISTEN)
    async with trio.open_nursery() as nursery:
        address: Address = await nursery.start(transport.serve, handle)
        _say({"port": address.port, "peer": transport.peer_id})
        with trio.move_on_after(_WAIT_LIMIT_S):
            await done.wait()
        nursery.cancel_scope.cancel()


def _measure(size: int) -> dict[str, float]:
    command = [sys.executable, "-m", __spec__.name, "--receive", "--bytes", str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        where = json.loads(child.stdout.readline())
        found = trio.run(_send, size, Address("127.0.0.1", where["port"]), PeerId(where["peer"]))
        found["cpu_s"] += json.loads(child.stdout.readline())["cpu_s"]
    return found


async def _send(size: int, address: Address, peer: PeerId) -> dict[str, float]:
    transport = Libp2pTransport(Identity.generate(), None, _LISTEN)
    found: dict[str, float] = {}
    async with trio.open_nursery() as nursery:
        await nursery.start(transport.serve, _nobody)
        connection = await transport.dial(address, peer)
        frame, left = bytes(_FRAME), size
        cpu, began = _cpu(), time.perf_counter()
        with trio.fail_after(_WAIT_LIMIT_S):
            while left > 0:
                await connection.send(frame)
                left -= _FRAME
            await connection.receive()
        found = {"seconds": time.perf_counter() - began, "cpu_s": _cpu() - cpu}
        nursery.cancel_scope.cancel()
    return found


async def _nobody(connection: PeerConnection) -> None:
    await connection.aclose()


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.bootstrap.libp2p_bench", description=__doc__)
    parser.add_argument("--bytes", type=int, default=128 << 20)
    parser.add_argument("--receive", action="store_true", help="be the other process")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if options.bytes < _FRAME:
        parser.error(f"--bytes is {options.bytes}; it must be at least {_FRAME}")
    if options.receive:
        trio.run(_receive, options.bytes)
        return 0
    found = _measure(options.bytes)
    rate = options.bytes / (1 << 20) / found["seconds"]
    if options.format == "json":
        _say({**found, "mib_s": round(rate, 1)})
    else:
        sys.stdout.write(f"one py-libp2p stream: {rate:.0f} MiB/s, {found['cpu_s']:.2f} CPU s\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
