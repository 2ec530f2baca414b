"""Names of boxes that people can say and type, like `amber-otter`: made of the peer id alone, so alike everywhere."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from .words import ANIMALS, QUALITIES

_ENDING: Final = 6  # characters of an id behind the name, where boxes have the same


def name_of(peer: str) -> str:
    """The name of a peer. Others may have the same: :func:`naming` tells those of one network apart."""
    number = int.from_bytes(hashlib.sha256(peer.encode()).digest()[:8])
    rest, quality = divmod(number, len(QUALITIES))
    return f"{QUALITIES[quality]}-{ANIMALS[rest % len(ANIMALS)]}"


def full_name_of(peer: str) -> str:
    """The name and the end of the id."""
    return f"{name_of(peer)}-{peer[-_ENDING:]}"


def naming(peers: Iterable[str]) -> Callable[[str], str]:
    """What to call the peers of one network: by their names, and with the end of the id where two have the same."""
    known = {peer: name_of(peer) for peer in set(peers)}
    count = Counter(known.values())
    unlike = {peer: name if count[name] == 1 else full_name_of(peer) for peer, name in known.items()}
    return lambda peer: unlike.get(peer) or name_of(peer)


def find_peers(given: str, peers: Iterable[str]) -> list[str]:
    """The peers that somebody may mean: by id, name, name with the end of the id, or else the end of the id alone."""
    known = sorted(set(peers))
    exact = [peer for peer in known if given == peer or _is_named(given, peer)]
    ending = given.removeprefix("..")
    return exact or [peer for peer in known if ending and peer.endswith(ending)]


def with_names(text: str, peers: Iterable[str]) -> str:
    """A text with names in place of the ids of these peers."""
    known = tuple(peers)
    name = naming(known)
    for peer in known:
        text = text.replace(peer, name(peer))
    return text


def count_of(number: int, noun: str) -> str:
    """ "1 box", "2 boxes"; for words whose plural ends in s."""
    ending = "es" if noun.endswith(("x", "s", "ch")) else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"


def _is_named(given: str, peer: str) -> bool:
    name = name_of(peer)
    head, ending = given[: len(name)].lower(), given[len(name) :]
    return head == name and (not ending or (len(ending) > 1 and ending[0] == "-" and peer.endswith(ending[1:])))
