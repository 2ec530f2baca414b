"""One member of a network as a process in a box of its own, for timing how soon all know what one has said.

    python -m p2pserve.bootstrap.dev.gossip_box PORT HOST [FIRST_HOST]

FIRST_HOST: the box of the member that is there already. It says that it is ready, then answers each order, a line of
JSON each, until its input ends: `publish` with when it began to say a number to all, `await` with when it first saw
that number. Times are of the machine's monotonic clock.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import trio

from ..addresses import Address
from ..errors import NetworkError
from ..network import Network
from ..streams.libp2p_host import Libp2pTransport
from ..trust.identity import Identity, NetworkKey
from ..trust.tokens import Bootstrap, Role

KEY: Final = NetworkKey(b"g" * 32)  # all members are the bench's
KIND: Final = "bench-number"
TOKEN_S: Final = 3600.0


class GossipOrder(msgspec.Struct, frozen=True):
    """What to do with a number: `publish` or `await` it."""

    op: str
    number: int


def say(answer: dict[str, Any]) -> None:
    """One line on the standard output, at once."""
    os.write(1, msgspec.json.encode(answer) + b"\n")


async def watch(network: Network, seen: dict[int, float]) -> None:
    """Note when each number was first there."""
    revision = -1
    while True:
        revision = await network.wait_changed(revision)
        now = time.monotonic()
        for payload in network.entries(KIND).values():
            seen.setdefault(int(payload), now)


async def obey(network: Network, order: GossipOrder, seen: dict[int, float]) -> dict[str, float]:
    """Carry out an order."""
    if order.op == "publish":
        began = time.monotonic()
        network.publish(KIND, str(order.number).encode())
        return {"began": began}
    revision = network.revision
    while order.number not in seen:
        revision = await network.wait_changed(revision)
        await trio.lowlevel.checkpoint()  # `watch` notes it
    return {"ended": seen[order.number]}


async def run(port: int, host: str, first: str | None) -> None:
    """Be a member until the input ends. Raises NetworkError."""
    identity, here = Identity.generate(), Address(host, port)
    bootstraps = () if first is None else (Bootstrap(first, port, None),)
    network = Network(
        transport=Libp2pTransport(identity, here, here),
        identity=identity,
        token=KEY.issue(bootstraps, Role.WORKER, time.time() + TOKEN_S, lead=True),
        network_key_public=KEY.public,
        role=Role.WORKER,
        announce=here,
        bootstraps=bootstraps,
        rng=random.Random(port),
    )
    async with network, trio.open_nursery() as nursery:
        seen: dict[int, float] = {}
        nursery.start_soon(watch, network, seen)
        say({"ready": True})
        while line := await trio.to_thread.run_sync(sys.stdin.buffer.readline, abandon_on_cancel=True):
            say(await obey(network, msgspec.json.decode(line, type=GossipOrder), seen))
        nursery.cancel_scope.cancel()


def main(arguments: Sequence[str]) -> int:
    """Run one member; what goes wrong is said in one line."""
    port, host, *first = arguments
    code = 0
    try:
        trio.run(run, int(port), host, first[0] if first else None)
    except* NetworkError as errors:
        say({"error": str(errors.exceptions[0])})
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
