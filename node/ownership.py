"""The box that holds a network's key: which tokens it hands out, renews and revokes.

    owner = Ownership.open(home)                    what `bootstrap` has made; TokenError elsewhere
    token = owner.create(Wish(uses=1, expires_at=...), now)

The catalogue lies beside the key. Commands change it, whether the network's node runs or not; a node
that runs follows it (:meth:`Ownership.follow`), and one that starts takes up what was changed.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, final

import msgspec
import trio

from ..bootstrap import Bootstrap, NetworkKey, NetworkSettings, TokenError
from ..bootstrap.address_book import AddressBook, merge_seen
from ..bootstrap.members.states import NetworkState
from ..bootstrap.state_file import StateFile
from ..bootstrap.trust import catalogue as catalogues
from ..bootstrap.trust.catalogue import OWN, Catalogue, Issued, Wish
from ..bootstrap.trust.entries import MemberRecord, read_record
from ..bootstrap.trust.kept_file import KeptFile
from ..bootstrap.trust.orders import Orders, SignedOrders, read_orders, sign_orders
from ..bootstrap.trust.tokens import Role, read_grant
from .box.errors import NodeError

_log = logging.getLogger(__name__)

REPEAT_S: Final = 60.0  # before a failure is told once more
FIRST_LIFE_S: Final = 365 * 86400.0  # of the tokens that `bootstrap` prints
MAX_NAMED: Final = 8  # members that a token names, its issuer included; each makes the token some 80 characters longer
GREETINGS: Final = {  # what `bootstrap` prints, by the word in its greeting
    "leader": (Role.WORKER, True),
    "worker": (Role.WORKER, False),
    "client": (Role.CLIENT, False),
    "admin": (Role.ADMIN, True),
}


class OwnersNetwork(Protocol):
    """What is asked of the network of the node that runs here."""

    @property
    def orders(self) -> Orders:
        """What it knows of the owner's."""

    def order(self, orders: SignedOrders) -> None:
        """Follow these, and tell everybody."""

    def boxes_by_certificate(self) -> Mapping[str, AbstractSet[str]]:
        """Who is in it."""


@final
class Ownership:
    """The key of one network and the catalogue of its tokens, in ``home``. ``say`` is told what was not read."""

    def __init__(self, home: Path, key: NetworkKey, say: Callable[[str], None] = _log.warning) -> None:
        self.home = home
        self.key = key
        name = f"network-{key.public.hex()[:16]}"
        self._say = say
        self._lock = home / f"{name}.lock"
        self._file = KeptFile(home / f"{name}.catalogue", Catalogue, b"p2pserve-catalogue-1\n", say)
        self._state = StateFile(home, key.public, say)
        self._book = AddressBook(home, key.public)

    @classmethod
    def open(cls, home: Path, say: Callable[[str], None] = _log.warning) -> Ownership:
        """That of a network that was made here. Raises TokenError, IdentityError."""
        if not (home / NetworkKey.FILE).exists():
            raise TokenError(
                f"home: {home} holds no network's key; run this on the box that ran `p2pserve bootstrap`, "
                "with the same --home"
            )
        return cls(home, NetworkKey.load_or_create(home), say)

    def __repr__(self) -> str:
        return f"<Ownership {self.key} in {self.home}>"

    # -- what commands do ---------------------------------------------------------------------------------------------

    def create(self, wish: Wish, now: float) -> Issued:
        """Issue a token. It names this box, and members that may lead and were seen last. Raises TokenError."""
        with self._editing() as catalogue:
            if not catalogue.addresses:
                raise TokenError(
                    "this network was never started, so that tokens name no address; run: p2pserve bootstrap"
                )
            named = self._named(catalogue)
            catalogue, token = catalogues.issue(self.key, catalogue, wish, named, now)
            self._save(catalogue)
        return token

    def revoke(self, text: str) -> Issued:
        """Withdraw a token. Raises TokenError."""
        with self._editing() as catalogue:
            catalogue, token = catalogues.revoke(catalogue, text)
            self._save(catalogue)
        return token

    def renew(self, text: str, expires_at: float, now: float) -> Issued:
        """Let a token end later. Raises TokenError."""
        with self._editing() as catalogue:
            named = self._named(catalogue)
            catalogue, token = catalogues.renew(self.key, catalogue, text, expires_at, named, now)
            self._save(catalogue)
        return token

    def write_document(self, kind: str, edit: Callable[[bytes], bytes], heard: Orders) -> Orders:
        """Have the whole network hold a document as `edit` makes it of the present one, b"" where there is none; the
        orders that say so. `heard`: what the network knows of this owner's orders. Raises NodeError, TokenError, and
        what `edit` does."""
        with self._editing() as held:
            catalogue = catalogues.absorb(held, heard)
            payload = edit(catalogue.orders.documents.get(kind, b""))
            catalogue = catalogues.write_document(catalogue, kind, payload)
            self._save(catalogue)
            return catalogue.orders

    def read(self) -> Catalogue:
        """What there is. Raises NodeError."""
        with self._editing() as catalogue:
            return catalogue

    def seen(self) -> dict[str, int]:
        """How many have used each certificate, as the node here has seen until some seconds ago."""
        return _count_holders(self._state.load())

    # -- what the node does -------------------------------------------------------------------------------------------

    def take_own_token(self, now: float) -> str:
        """The certificate by which this box itself is a member: the last one, or a new one."""
        with self._editing() as catalogue:
            token = catalogues.find_greeting(catalogue, OWN, {}, now)
            if token is None:
                wish = Wish(role=Role.ADMIN, lead=True, expires_at=now + FIRST_LIFE_S, name="this box")
                catalogue, token = catalogues.issue(self.key, catalogue, wish, (), now, greets_as=OWN)
                self._save(catalogue)
        return token.text

    def take_greetings(self, here: Bootstrap, also: tuple[Bootstrap, ...], now: float) -> dict[str, str]:
        """The tokens to print at the start: those of the last run, where somebody may still join with them; else new
        ones. They name this box as it can be reached now."""
        tokens: dict[str, str] = {}
        with self._editing() as catalogue:
            catalogue = msgspec.structs.replace(catalogue, addresses=merge_seen((here,), also, MAX_NAMED))
            named, seen = self._named(catalogue), self.seen()
            for word, (role, lead) in GREETINGS.items():
                token = catalogues.find_greeting(catalogue, word, seen, now)
                if token is None:
                    wish = Wish(role=role, lead=lead, expires_at=now + FIRST_LIFE_S, name=f"bootstrap's {word}")
                    catalogue, token = catalogues.issue(self.key, catalogue, wish, named, now, greets_as=word)
                catalogue, token = catalogues.rename_members(self.key, catalogue, token, named)
                tokens[word] = token.text
            self._save(catalogue)
        return tokens

    async def follow(self, network: OwnersNetwork, clock: Callable[[], float], settings: NetworkSettings) -> None:
        """Tell the network what commands change in the catalogue, and renew its members in time."""
        catalogue, read_at = Catalogue(), None
        while True:
            try:
                written_at = self._file.written_at()
                if written_at != read_at or network.orders.number > catalogue.orders.number:
                    catalogue = await trio.to_thread.run_sync(self._absorb, network.orders)
                    read_at = written_at
                boxes, now = network.boxes_by_certificate(), clock()
                if catalogues.renew_members(self.key, catalogue, boxes, now) is not catalogue:
                    catalogue = await trio.to_thread.run_sync(self._renew_members, boxes, now)
            except (NodeError, TokenError) as error:
                self._say(f"the catalogue of tokens was not followed: {error}")
                await trio.sleep(REPEAT_S)
            if catalogue.orders.number > network.orders.number:
                network.order(sign_orders(self.key, catalogue.orders))
            await trio.sleep(settings.catalogue_s)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _absorb(self, heard: Orders) -> Catalogue:
        with self._editing() as held:
            catalogue = catalogues.absorb(held, heard)
            if catalogue is not held:
                self._save(catalogue)
            return catalogue

    def _renew_members(self, boxes: Mapping[str, AbstractSet[str]], now: float) -> Catalogue:
        with self._editing() as held:
            catalogue = catalogues.renew_members(self.key, held, boxes, now)
            if catalogue is not held:
                self._save(catalogue)
            return catalogue

    def _named(self, catalogue: Catalogue) -> tuple[Bootstrap, ...]:
        """Whom tokens are to name: this box, and members that may lead, last seen first."""
        state = self._state.load()
        records = {entry.origin: read_record(entry.payload) for entry in state.entries} if state is not None else {}
        leading = {peer for peer, record in records.items() if record is not None and _leads(record)}
        return merge_seen(catalogue.addresses, (e for e in self._book.load() if e.peer_id in leading), MAX_NAMED)

    @contextmanager
    def _editing(self) -> Iterator[Catalogue]:
        """The catalogue, which nobody else changes meanwhile. Raises NodeError."""
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise NodeError(f"home {self.home}: cannot be used: {error.strerror}; give it with --home") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield self._load()
        finally:
            os.close(descriptor)

    def _load(self) -> Catalogue:
        try:
            catalogue = self._file.load() or Catalogue()
        except OSError as error:
            raise NodeError(f"{self._file.path}: cannot be read: {error.strerror}; mend its permissions") from error
        state = self._state.load()
        known = read_orders(state.orders, self.key.public) if state is not None and state.orders else None
        # After the catalogue was lost, what was revoked stays so: the network still knows.
        return catalogue if known is None else catalogues.absorb(catalogue, known)

    def _save(self, catalogue: Catalogue) -> None:
        try:
            self._file.save(catalogue)
        except OSError as error:
            raise NodeError(f"{self._file.path}: cannot be written: {error.strerror}; free some space there") from error


def _leads(record: MemberRecord) -> bool:
    grant = read_grant(record.credential.certificate) if record.credential is not None else None
    return grant is not None and grant.lead and not record.left


def _count_holders(state: NetworkState | None) -> dict[str, int]:
    return {} if state is None else {name: len(peers) for name, peers in state.holders.items()}
