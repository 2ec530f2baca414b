"""Getting into a network: what a join string says, or the key of a new network."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import trio

from ..bootstrap import (
    Address,
    AddressError,
    Bootstrap,
    Identity,
    JoinToken,
    NetworkKey,
    Refused,
    Role,
    TokenError,
    Unreachable,
    parse_address,
)

__all__ = ["Invitation", "accept", "join_token", "new_network", "tokens"]

TOKEN_LIFETIME_S = 365 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What lets this node into its network."""

    network: bytes
    token: str
    role: Role
    bootstraps: tuple[Bootstrap, ...]
    key: NetworkKey | None


async def accept(bootstrap: str, token_text: str | None) -> Invitation:
    """Membership by a join token. Raises AddressError, TokenError, Unreachable or Refused."""
    text, bootstraps = await join_token(bootstrap, token_text)
    token = JoinToken.parse(text)
    if token.role is Role.CLIENT:
        raise TokenError("this is a client's token; a node joins with the worker line that the bootstrap printed")
    return Invitation(
        network=token.network, token=text, role=token.role, bootstraps=bootstraps or token.bootstraps, key=None
    )


def new_network(home: Path) -> Invitation:
    """Membership of the network whose key lies in `home`, made on first use. Raises IdentityError."""
    key = NetworkKey.load_or_create(home)
    token = key.issue((), Role.ADMIN, time.time() + TOKEN_LIFETIME_S)
    return Invitation(network=key.public, token=token, role=Role.ADMIN, bootstraps=(), key=key)


def tokens(membership: Invitation, address: Address, identity: Identity) -> dict[str, str]:
    """Join tokens of a new network, which name this node as the place to start from."""
    if membership.key is None:
        return {}
    here = (Bootstrap(address.host, address.port, identity.peer_id),)
    expires = time.time() + TOKEN_LIFETIME_S
    return {role.value: membership.key.issue(here, role, expires) for role in Role}


async def join_token(bootstrap: str, token: str | None) -> tuple[str, tuple[Bootstrap, ...]]:
    """Make sense of `--bootstrap` and `--token`: the token's text, and where to dial instead of what it names.

    `bootstrap` is a join token, or `host:port` with the token given apart. Raises AddressError, TokenError,
    Unreachable, Refused.
    """
    if bootstrap.startswith("p2p_"):
        JoinToken.parse(bootstrap)
        return bootstrap, ()
    try:
        address = parse_address(bootstrap)
    except AddressError as error:
        raise AddressError(f"bootstrap: {error}") from error
    if token is None:
        await _probe(address)
        raise Refused(
            f"bootstrap {address}: this network wants a token; use the whole line that `p2pserve bootstrap` printed"
        )
    named = JoinToken.parse(token).bootstraps
    if not named:
        raise TokenError("the join token names no bootstrap, so nobody can be authenticated at that address")
    return token, tuple(Bootstrap(address.host, address.port, each.peer_id) for each in named)


async def _probe(address: Address) -> None:
    """Tell an address where nobody listens from one where a token is missing."""
    reason = "no answer within 5 s"
    try:
        with trio.move_on_after(5):
            stream = await trio.open_tcp_stream(address.host, address.port)
            await stream.aclose()
            return
    except OSError as error:
        reason = str(error)
    raise Unreachable(f"bootstrap {address}: cannot be reached ({reason}); check the address and that it is up")
