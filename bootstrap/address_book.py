"""Addresses of members, kept in a file between runs: so a node or client gets in while its
bootstrap is away.

One file serves all networks that its folder was used for::

    {"<network's public key>": [["203.0.113.8", 4001, "12D3KooW..."], ...], ...}    last used, and last seen, first

The file is a convenience: one that is damaged or cannot be written is reported in the log, and
costs nothing else.
"""

import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import trio

from .errors import AddressError
from .settings import NetworkSettings
from .trust.keys import parse_peer_id
from .trust.tokens import Bootstrap

_log = logging.getLogger(__name__)

FILE: Final = "members.json"
MAX_NETWORKS: Final = 8
MAX_BYTES: Final = 256 * 1024
SAVE_EVERY_S: Final = 5.0


def merge_seen(seen: Iterable[Bootstrap], known: Iterable[Bootstrap], bound: int) -> tuple[Bootstrap, ...]:
    """What is seen now, then what was known before: each member once, at most ``bound`` in all."""
    by_peer: dict[str, Bootstrap] = {}
    for each in (*seen, *known):
        by_peer.setdefault(each.peer_id or str(each), each)  # a member that moved is known by where it is seen now
    return tuple(by_peer.values())[:bound]


class AddressBook:
    """The members of one network that ``folder`` remembers."""

    def __init__(self, folder: Path, network: bytes, settings: NetworkSettings | None = None) -> None:
        self._path = folder / FILE
        self._network = network.hex()
        self._bound = (settings or NetworkSettings()).max_remembered

    def load(self) -> tuple[Bootstrap, ...]:
        """Last seen first; nothing when there is no file or none of its entries can be read."""
        return self._read().get(self._network, ())[: self._bound]

    def save(self, seen: Iterable[Bootstrap]) -> None:
        """Remember who is seen now, before whoever was seen earlier."""
        networks = self._read()
        members = merge_seen(seen, networks.pop(self._network, ()), self._bound)
        if not members:
            return
        kept = {self._network: members, **dict(list(networks.items())[: MAX_NETWORKS - 1])}
        text = json.dumps({name: [[m.host, m.port, m.peer_id] for m in each] for name, each in kept.items()})
        temporary = self._path.with_name(f".{FILE}.{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)  # another process sees the old file or the new one, never a part
        except OSError as error:
            _log.info("%s was not written: %s", self._path, error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _read(self) -> dict[str, tuple[Bootstrap, ...]]:
        try:
            with self._path.open("rb") as file:
                found = json.loads(file.read(MAX_BYTES))
            return {str(name): tuple(_read_member(*each) for each in members) for name, members in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError, AddressError) as error:
            _log.info("%s was not read: %s", self._path, error)
            return {}

    def __repr__(self) -> str:
        return f"AddressBook({self._path}, network={self._network[:8]})"


def _read_member(host: object, port: object, peer: object) -> Bootstrap:
    if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError(f"{host!r}:{port!r} is no address")
    return Bootstrap(host, port, parse_peer_id(str(peer)))


class SeesMembers(Protocol):
    """What is asked of a network."""

    @property
    def revision(self) -> int:
        """Grows with every change."""
        ...

    async def wait_changed(self, revision: int) -> int:
        """Wait until it is another than this one."""
        ...

    def seen_members(self) -> tuple[Bootstrap, ...]:
        """Last heard first."""
        ...


async def keep_address_book(network: SeesMembers, book: AddressBook) -> None:
    """Save who is seen when that changes, at most every few seconds, and once more at the end."""
    saved: tuple[Bootstrap, ...] = ()
    revision = network.revision
    try:
        while True:
            seen = network.seen_members()
            if set(seen) - set(saved):
                # In a thread: a home folder may lie on a disk that takes its time, and this loop must answer pings.
                await trio.to_thread.run_sync(book.save, seen)
                saved = seen
            await trio.sleep(SAVE_EVERY_S)
            revision = await network.wait_changed(revision)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(book.save, network.seen_members())
