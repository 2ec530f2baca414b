"""What nodes say to each other so that a box is reached whose port nobody can dial.

A node that has joined asks members to dial the address that it announces, with `dial.back`: it learns whether they
meet it there, and from which address they see it come. Whoever wants a connection to the port of a node that cannot be
dialled asks it with `call.back`: that node dials, and both go on as if it had been dialled. `bandwidth` carries some
bytes there and back, and `token.places` tells of its join token, for a box that has not joined yet.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ...bootstrap.trust.tokens import MAX_USES
from ...coordinator.bounds import Text
from ..observing.values import UnixTime

CALL_ID_BYTES: Final = 16
CARRIED_BYTES: Final = 256 << 10  # little enough that others' messages are not held up for long

CallId = Annotated[bytes, msgspec.Meta(min_length=CALL_ID_BYTES, max_length=CALL_ID_BYTES)]
Carried = Annotated[bytes, msgspec.Meta(max_length=CARRIED_BYTES)]
Host = Annotated[str, msgspec.Meta(max_length=255)]
Port = Annotated[int, msgspec.Meta(ge=1, lt=65536)]


class DialBack(msgspec.Struct, frozen=True, kw_only=True):
    """Dial the address that this node announces, which is this one: the question may come before the news."""

    host: Host
    port: Port


class DialledBack(msgspec.Struct, frozen=True, kw_only=True):
    """`met`: the asker has proved its key there. `seen`: the IP address that it comes from. `why` it was not met, where
    it comes from the address that it announces. `now`: what this node's clock shows; 0: it does not say."""

    met: bool
    seen: Host = ""
    why: Text = ""
    now: UnixTime = 0.0


class CallBack(msgspec.Struct, frozen=True, kw_only=True):
    """Dial the node that asks, at the address that it announces, and begin with this number."""

    call: CallId


class CalledBack(msgspec.Struct, frozen=True, kw_only=True):
    """The connection is made."""


class PlacesQuery(msgspec.Struct, frozen=True, kw_only=True):
    """How many places are left of the worker's join token with which the asker looks around, and whether this peer has
    one of them."""

    peer: Annotated[str, msgspec.Meta(max_length=128)] = ""


class PlacesLeft(msgspec.Struct, frozen=True, kw_only=True):
    """The token is for so many boxes, and so many places are taken. `is_holder`: the peer has one of them."""

    uses: Annotated[int, msgspec.Meta(ge=1, le=MAX_USES)]
    taken: Annotated[int, msgspec.Meta(ge=0, le=MAX_USES)]
    is_holder: bool


class CarryBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Take these bytes, and send back so many."""

    payload: Carried = b""
    wanted: Annotated[int, msgspec.Meta(ge=0, le=CARRIED_BYTES)] = 0


class CarriedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Those that were wanted."""

    payload: Carried
