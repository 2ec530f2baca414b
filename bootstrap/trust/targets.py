"""Where to join: what people write after ``--bootstrap``, as a token and the members to ask.

    p2p_worker_kpLEs...                                  the members that the token names
    p2p_worker_kpLEs...,203.0.113.8:4001                 and any other member, by its address
    203.0.113.8:4001,198.51.100.2:4001/12D3KooW...       the same, with the token given apart

An address needs no peer id: whoever answers there must show a credential of the token's network.
"""

from dataclasses import dataclass

from ..addresses import parse_address
from ..errors import AddressError, TokenError
from .tokens import Bootstrap, JoinToken, parse_bootstrap

MAX_ADDRESSES = 16


@dataclass(frozen=True, slots=True)
class JoinTarget:
    """``token`` is None when only addresses were given; ``members``: those, then the token's."""

    token: str | None
    members: tuple[Bootstrap, ...]


def parse_join_target(text: str, token: str | None = None) -> JoinTarget:
    """Read ``--bootstrap``, and a ``token`` given apart. Raises AddressError or TokenError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    tokens = [part for part in parts if part.startswith("p2p_")]
    addresses = [part for part in parts if not part.startswith("p2p_")]
    if not parts:
        raise AddressError(f"bootstrap: {text!r} names nothing; give the token that `p2pserve bootstrap` printed")
    if len(tokens) > 1:
        raise TokenError(f"bootstrap: {len(tokens)} join tokens were given; give one, and addresses beside it")
    if len(addresses) > MAX_ADDRESSES:
        raise AddressError(f"bootstrap: {len(addresses)} addresses were given; at most {MAX_ADDRESSES} are asked")
    members = [parse_member(part, "bootstrap") for part in addresses]
    # A token inside the text is meant for this network; one that was given apart may stand in the environment.
    chosen = tokens[0] if tokens else token
    if chosen is not None:
        members += JoinToken.parse(chosen).bootstraps
    return JoinTarget(chosen, tuple(dict.fromkeys(members)))


def parse_member(text: str, field: str) -> Bootstrap:
    """``host:port``, with or without ``/peer-id``, as it was given for ``field``. Raises AddressError."""
    try:
        if "/" in text:
            return parse_bootstrap(text)
        address = parse_address(text)
    except AddressError as error:
        raise AddressError(f"{field}: {error}") from error
    if address.port == 0:
        raise AddressError(f"{field}: {text!r} has port 0; write the port that the node there printed")
    return Bootstrap(address.host, address.port)
