"""Who is alive: whoever can be reached from here by what members say they hear. Pure.

Each member says, signed, whom it hears itself (an entry of kind ``hears``, told anew when it
changes). A member is alive when this node hears it, or one that is alive does. So a broken link
makes nobody dead who is heard elsewhere; a member that dies is dropped by all who heard it, and is
then out of everybody's reach; and of a partition's other side nothing is reachable any more.

That others hear a member is not enough for ever: it has to say something itself now and then, which
nobody can say for it.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final

import msgspec

from ..errors import DECODE_ERRORS
from ..trust.keys import PeerId

HEARS_KIND: Final = "hears"
MAX_HEARD: Final = 256

_heard = msgspec.msgpack.Decoder(
    Annotated[tuple[Annotated[str, msgspec.Meta(max_length=128)], ...], msgspec.Meta(max_length=MAX_HEARD)]
)


def encode_heard(peers: Iterable[PeerId]) -> bytes:
    """The payload of an entry: the same peers make the same bytes."""
    return msgspec.msgpack.encode(sorted(peers)[:MAX_HEARD])


def decode_heard(payload: bytes) -> tuple[PeerId, ...]:
    """Whom a member says that it hears; nobody when that is malformed."""
    try:
        return tuple(PeerId(peer) for peer in _heard.decode(payload))
    except DECODE_ERRORS:
        return ()


def find_living(
    heard: Iterable[PeerId], says: Mapping[PeerId, Collection[PeerId]], silent: Collection[PeerId]
) -> set[PeerId]:
    """Everybody alive.

    Args:
        heard: the members that this node hears itself.
        says: whom each member says that it hears.
        silent: members of whom nothing of their own has come for too long; they live only while this node hears them.
    """
    living = set(heard)
    edge = list(living)
    while edge:
        for peer in says.get(edge.pop(), ()):
            if peer not in living and peer not in silent:
                living.add(peer)
                edge.append(peer)
    return living
