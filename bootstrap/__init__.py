"""Finding and trusting each other: identity, tokens, addresses, membership, election, the network.
Cheap to import: an event loop or libp2p is loaded when first asked for."""

import importlib
from typing import TYPE_CHECKING

from .addresses import Address, announced_address, default_route_address, parse_address
from .errors import (
    DECODE_ERRORS,
    AddressError,
    IdentityError,
    IdentityInUse,
    NetworkError,
    PeerLost,
    PortInUse,
    ProtocolError,
    Refused,
    RemoteError,
    RequestTimeout,
    TokenError,
    Unreachable,
)
from .settings import NetworkSettings, TransportSettings
from .trust.identity import Identity, NetworkKey
from .trust.keys import PeerId, parse_peer_id, verify
from .trust.targets import JoinTarget, parse_join_target
from .trust.tokens import Bootstrap, JoinToken, Role, admit, parse_bootstrap

if TYPE_CHECKING:
    from .members.states import Member, MemberState, NetworkStatistics
    from .network import Network
    from .streams.libp2p_host import Libp2pTransport

__all__ = [
    "DECODE_ERRORS",
    "Address",
    "AddressError",
    "Bootstrap",
    "Identity",
    "IdentityError",
    "IdentityInUse",
    "JoinTarget",
    "JoinToken",
    "Libp2pTransport",
    "Member",
    "MemberState",
    "Network",
    "NetworkError",
    "NetworkKey",
    "NetworkSettings",
    "NetworkStatistics",
    "PeerId",
    "PeerLost",
    "PortInUse",
    "ProtocolError",
    "Refused",
    "RemoteError",
    "RequestTimeout",
    "Role",
    "TokenError",
    "TransportSettings",
    "Unreachable",
    "admit",
    "announced_address",
    "default_route_address",
    "parse_address",
    "parse_bootstrap",
    "parse_join_target",
    "parse_peer_id",
    "verify",
]

_LAZY = {  # name -> module; `import trio` takes 0.1 s and `import libp2p` 0.4 s and 83 MB
    "Member": "members.states",
    "MemberState": "members.states",
    "Network": "network",
    "NetworkStatistics": "members.states",
    "Libp2pTransport": "streams.libp2p_host",
}


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{module}", __name__), name)
