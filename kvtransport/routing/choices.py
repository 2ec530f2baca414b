"""What `choose` said, for as long as everything that it followed from stays the same.

A path is chosen for every prompt that leaves, and working one out takes longer the more boxes could
forward it; between two prompts hardly anything changes. So choices are kept by what went into them.
Only sizes are taken together: those that agree in their first three binary digits, less than a
quarter apart, share what was found for the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, final

from ..probing.figures import BoxFigures, LinkFigures
from .paths import PathChoice, PathNetwork, PathQuery, choose

_DIGITS: Final = 3


@final
class ChoiceCache:
    """Of one link, whose transfers all ask for a path at a time of their own."""

    def __init__(self) -> None:
        self._basis: tuple[object, ...] | None = None  # whatever a choice follows from, but for the size
        self._links: Mapping[tuple[str, str], LinkFigures] = {}
        self._boxes: Mapping[str, BoxFigures] = {}
        self._made: dict[tuple[int, int], PathChoice] = {}

    def __repr__(self) -> str:
        return f"<ChoiceCache for {len(self._made)} sizes>"

    def choose(
        self,
        job: PathQuery,
        network: PathNetwork,
        *,
        current: frozenset[str | None] | None = None,
        warm: frozenset[str | None] = frozenset(),
    ) -> PathChoice:
        """As `paths.choose`. The tables of `network` count as unchanged while they are the same
        objects: they must not be changed in place."""
        basis = (replace(job, bytes=1), current, warm, network.flows)
        if basis != self._basis or network.links is not self._links or network.boxes is not self._boxes:
            self._basis, self._links, self._boxes = basis, network.links, network.boxes
            self._made.clear()
        size = _size(job.bytes)
        made = self._made.get(size)
        if made is None:
            made = self._made[size] = choose(job, network, current=current, warm=warm)
        return made


def _size(size: int) -> tuple[int, int]:
    """The first binary digits, and how many follow."""
    rest = max(0, size.bit_length() - _DIGITS)
    return size >> rest, rest
