"""Getting into a network: what a join string says, or the key of a new network."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..bootstrap import (
    Bootstrap,
    JoinToken,
    NetworkKey,
    Role,
    TokenError,
)
from ..bootstrap.join_targets import read_join_target
from .ownership import Ownership


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What lets this node into its network. `owner`: of the key, where this is the box that has it."""

    network: bytes
    token: str
    role: Role
    bootstraps: tuple[Bootstrap, ...]
    owner: Ownership | None


async def accept_invitation(bootstrap: str, token_text: str | None) -> Invitation:
    """Membership by a join token. Raises AddressError, TokenError, Unreachable or Refused."""
    text, members = await read_join_target(bootstrap, token_text)
    token = JoinToken.parse(text)
    if token.role is Role.CLIENT:
        raise TokenError("this is a client's token; a node joins with a worker's line that the bootstrap printed")
    if not members:
        raise TokenError("this token names no member to ask; give the address of one beside it: --bootstrap TOKEN,ADDR")
    return Invitation(network=token.network, token=text, role=token.role, bootstraps=members, owner=None)


def new_network(home: Path, say: Callable[[str], None]) -> Invitation:
    """Membership of the network whose key lies in `home`, made on first use. Raises IdentityError, NodeError."""
    key = NetworkKey.load_or_create(home)
    owner = Ownership(home, key, say)
    token = owner.take_own_token(time.time())
    return Invitation(network=key.public, token=token, role=Role.ADMIN, bootstraps=(), owner=owner)
