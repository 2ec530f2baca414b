"""What the owner of a network has issued and ordered, and what may be changed about it. Pure: values
in, values out.

    catalogue, token = issue(key, catalogue, Wish(name="rented", uses=1, expires_at=now + 86400), addresses, now)
    catalogue = revoke(catalogue, "3f2a")

A token's end bounds joining with it. Boxes that are in the network by then stay members: shortly before
the end their certificates are renewed, for them alone (:func:`renew_members`). Who is away for so long
that the network has forgotten it needs a new token.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ..errors import TokenError
from .identity import NetworkKey
from .orders import MAX_ORDERS_BYTES, MAX_RENEWED, MAX_REVOKED, Orders, Renewal
from .tokens import DEFAULT_USES, Bootstrap, Grant, JoinToken, Role

MAX_ISSUED: Final = 4096
MAX_NAME_CHARS: Final = 64
SHORTEST_ID: Final = 4  # characters of an id that must be given
MAX_MARGIN_S: Final = 86400.0  # members are renewed so long before the end, or a third of the token's life


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A token that is to be issued."""

    role: Role = Role.WORKER
    expires_at: float
    lead: bool = False
    uses: int = DEFAULT_USES
    name: str = ""
    renews: bool = True


class Issued(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was issued. ``text`` is the token itself: a secret, as the file is.

    ``renews``: members that have joined with it are renewed before its end. ``greets_as``: the word under which a
    bootstrap shows it; of its own certificate, :data:`OWN`."""

    text: str
    name: str
    grant: Grant
    created_at: float
    life_s: float  # from when it was made, or renewed by hand, to its end
    renews: bool = True
    greets_as: str = ""

    @property
    def id(self) -> str:
        """What commands call it."""
        return self.grant.certificate


OWN: Final = "own"


class Catalogue(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``addresses``: where the owner's box is, and others that its tokens shall name."""

    issued: Annotated[tuple[Issued, ...], Meta(max_length=MAX_ISSUED)] = ()
    orders: Orders = Orders()
    addresses: tuple[Bootstrap, ...] = ()


# -- reading ----------------------------------------------------------------------------------------------------------


def find_issued(catalogue: Catalogue, text: str) -> Issued:
    """The token that an id, or its beginning, names. Raises TokenError."""
    wanted = text.strip().lower()
    found = [each for each in catalogue.issued if each.id.startswith(wanted)]
    if len(wanted) < SHORTEST_ID:
        raise TokenError(f"id: {text!r} is too short; give at least {SHORTEST_ID} characters of the id")
    if not found:
        raise TokenError(f"id: no token {text!r} was issued here; `p2pserve token list` shows those that were")
    if len(found) > 1:
        raise TokenError(f"id: {text!r} begins {len(found)} tokens; give more of the id")
    return found[0]


def find_greeting(catalogue: Catalogue, greets_as: str, seen: Mapping[str, int], now: float) -> Issued | None:
    """The latest token of this kind by which somebody may still join."""
    for each in reversed(catalogue.issued):
        if each.greets_as == greets_as and describe_state(catalogue, each, seen.get(each.id, 0), now) == "valid":
            return each
    return None


def describe_state(catalogue: Catalogue, token: Issued, seen: int, now: float) -> str:
    """In a word what a token is good for; ``seen``: how many boxes have used it."""
    if token.id in catalogue.orders.revoked:
        return "revoked"
    if now >= token.grant.expires_at:
        return "expired"
    return "used up" if seen >= token.grant.uses and token.greets_as != OWN else "valid"


def find_members_end(catalogue: Catalogue, token: Issued) -> int:
    """Until when those that have joined with it are members without being renewed (unix seconds)."""
    renewal = catalogue.orders.renewed.get(token.id)
    renewed = renewal.grant() if renewal is not None else None
    return max(token.grant.expires_at, renewed.expires_at if renewed is not None else 0)


# -- changing ---------------------------------------------------------------------------------------------------------


def issue(
    key: NetworkKey,
    catalogue: Catalogue,
    wish: Wish,
    addresses: Iterable[Bootstrap],
    now: float,
    *,
    greets_as: str = "",
) -> tuple[Catalogue, Issued]:
    """A new token. Raises TokenError."""
    _check_end(wish.expires_at, now)
    if len(wish.name) > MAX_NAME_CHARS or not wish.name.isprintable():
        raise TokenError(f"name: write at most {MAX_NAME_CHARS} characters that can be printed, on one line")
    kept = catalogue.issued
    if len(kept) >= MAX_ISSUED:  # those by which nobody is a member or can become one are only a record
        kept = tuple(each for each in kept if find_members_end(catalogue, each) > now)
    if len(kept) >= MAX_ISSUED:
        raise TokenError(f"this network has {MAX_ISSUED} tokens that are valid; wait until some have ended")
    text = key.issue(tuple(addresses), wish.role, wish.expires_at, lead=wish.lead, uses=wish.uses)
    token = Issued(
        text=text,
        name=wish.name,
        grant=JoinToken.parse(text).grant,
        created_at=now,
        life_s=wish.expires_at - now,
        renews=wish.renews,
        greets_as=greets_as,
    )
    return msgspec.structs.replace(catalogue, issued=(*kept, token)), token


def rename_members(
    key: NetworkKey, catalogue: Catalogue, token: Issued, addresses: tuple[Bootstrap, ...]
) -> tuple[Catalogue, Issued]:
    """The same token, naming other members to ask: who has the old text is not told."""
    held = JoinToken.parse(token.text)
    if held.bootstraps == addresses:
        return catalogue, token
    return _replace_certificate(key, catalogue, token, addresses, token.grant.expires_at)


def revoke(catalogue: Catalogue, text: str) -> tuple[Catalogue, Issued]:
    """Withdraw a token: whoever has joined with it is hung up on. Raises TokenError."""
    token = find_issued(catalogue, text)
    orders = catalogue.orders
    if token.greets_as == OWN:
        raise TokenError(f"id: {token.id} is the certificate of this very box; stop its node instead: p2pserve leave")
    if token.id in orders.revoked:
        return catalogue, token
    if len(orders.revoked) >= MAX_REVOKED:
        raise TokenError(f"id: {MAX_REVOKED} tokens of this network are revoked, and no more can be; start a new one")
    renewed = {name: each for name, each in orders.renewed.items() if name != token.id}
    return _with_orders(catalogue, (*orders.revoked, token.id), renewed), token


def renew(
    key: NetworkKey, catalogue: Catalogue, text: str, expires_at: float, addresses: Iterable[Bootstrap], now: float
) -> tuple[Catalogue, Issued]:
    """Let a token end later: for those that have joined with it and, by its new text, for others. Raises TokenError."""
    token = find_issued(catalogue, text)
    _check_end(expires_at, now)
    if token.id in catalogue.orders.revoked:
        raise TokenError(f"id: {token.id} was revoked, which is for good; make another one: p2pserve token create")
    token = msgspec.structs.replace(token, life_s=expires_at - now)
    catalogue, token = _replace_certificate(key, catalogue, token, tuple(addresses), expires_at)
    return _with_renewals(key, catalogue, {token.id: (expires_at, ())}, now), token


def renew_members(key: NetworkKey, catalogue: Catalogue, members: Mapping[str, Iterable[str]], now: float) -> Catalogue:
    """Renew the certificates of members that are here shortly before these end, and of those that have come back with
    one that has. ``members``: by certificate, who is in the network. The same catalogue where there is nothing to do.
    """
    due: dict[str, tuple[float, tuple[str, ...]]] = {}
    for token in catalogue.issued:
        here = set(members.get(token.id, ()))
        if not token.renews or not here or token.id in catalogue.orders.revoked:
            continue
        margin_s = min(token.life_s / 3, MAX_MARGIN_S)
        if now < token.grant.expires_at - margin_s:
            continue
        renewal = catalogue.orders.renewed.get(token.id)
        ends = find_members_end(catalogue, token)
        if now >= ends - margin_s:
            due[token.id] = (max(now, ends) + token.life_s, tuple(sorted(here)))
        elif renewal is not None and not here <= set(renewal.peers) and renewal.peers:
            due[token.id] = (ends, tuple(sorted(here | set(renewal.peers))))
    return _with_renewals(key, catalogue, due, now) if due else catalogue


def write_document(catalogue: Catalogue, kind: str, payload: bytes) -> Catalogue:
    """Tell the whole network this, in place of what it was told of the kind before. Raises TokenError."""
    orders = catalogue.orders
    return _with_orders(catalogue, orders.revoked, orders.renewed, documents={**orders.documents, kind: payload})


def absorb(catalogue: Catalogue, heard: Orders) -> Catalogue:
    """Take up orders of this owner that the network knows and this catalogue does not: it was lost, or damaged."""
    mine = catalogue.orders
    if heard == mine or heard.number < mine.number:
        return catalogue
    revoked = tuple(dict.fromkeys((*mine.revoked, *heard.revoked)))[:MAX_REVOKED]
    renewed = {name: each for name, each in {**mine.renewed, **heard.renewed}.items() if name not in revoked}
    # Each order holds all documents: those of the higher number are the later ones.
    later = heard if heard.number > mine.number else mine
    orders = Orders(heard.number, revoked, renewed, later.documents)
    if orders == heard:
        return msgspec.structs.replace(catalogue, orders=heard)
    return _with_orders(msgspec.structs.replace(catalogue, orders=orders), revoked, renewed)


# -- inside -----------------------------------------------------------------------------------------------------------


def _check_end(expires_at: float, now: float) -> None:
    if expires_at <= now:
        raise TokenError("expires: the token would have ended already; give a time from now, such as 7d")


def _replace_certificate(
    key: NetworkKey, catalogue: Catalogue, token: Issued, addresses: tuple[Bootstrap, ...], expires_at: float
) -> tuple[Catalogue, Issued]:
    held = token.grant
    secret = JoinToken.parse(token.text).secret
    text = key.issue(addresses, held.role, expires_at, lead=held.lead, uses=held.uses, secret=secret)
    changed = msgspec.structs.replace(token, text=text, grant=JoinToken.parse(text).grant)
    issued = tuple(changed if each.id == token.id else each for each in catalogue.issued)
    return msgspec.structs.replace(catalogue, issued=issued), changed


def _with_renewals(
    key: NetworkKey, catalogue: Catalogue, due: Mapping[str, tuple[float, tuple[str, ...]]], now: float
) -> Catalogue:
    renewed = dict(catalogue.orders.renewed)
    tokens = {each.id: each for each in catalogue.issued}
    for name, (expires_at, peers) in due.items():
        held, secret = tokens[name].grant, JoinToken.parse(tokens[name].text).secret
        # Members know each other's addresses: the certificate need not name any, and is short.
        text = key.issue((), held.role, expires_at, lead=held.lead, uses=held.uses, secret=secret)
        token = JoinToken.parse(text)
        renewed[name] = Renewal(token.certificate, token.signature, peers)
    ends = {name: grant.expires_at for name, each in renewed.items() if (grant := each.grant()) is not None}
    lasting = {name: renewed[name] for name in sorted(ends, key=lambda name: -ends[name]) if ends[name] > now}
    if len(lasting) > MAX_RENEWED:
        raise TokenError(f"more than {MAX_RENEWED} tokens would be renewed; revoke some that are not needed")
    return _with_orders(catalogue, catalogue.orders.revoked, lasting)


def _with_orders(
    catalogue: Catalogue,
    revoked: tuple[str, ...],
    renewed: dict[str, Renewal],
    documents: dict[str, bytes] | None = None,
) -> Catalogue:
    """With the next order: it says this, and of documents what the order before said unless others are given."""
    held = catalogue.orders
    orders = Orders(held.number + 1, revoked, renewed, held.documents if documents is None else documents)
    if len(msgspec.msgpack.encode(orders)) > MAX_ORDERS_BYTES:
        raise TokenError("the orders of this network would be too long to be told; revoke tokens that are not needed")
    return msgspec.structs.replace(catalogue, orders=orders)
