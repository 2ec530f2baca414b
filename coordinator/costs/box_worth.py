"""What is said of a box beside its price: a value that nodes and clients print. `worth` computes it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..bounds import Figure, Name, Text


class BoxWorth(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a box that has a price.

    `mtok_per_hour`: million tokens, in and out, alone and busy; `usd_per_mtok`: what one costs,
    without traffic; `median_usd_per_mtok`: of all boxes with a price, None for one alone. `faults`:
    what is not as it should be, by kind (compute, memory, steps, up, down, price), each a part of a
    sentence.
    """

    peer: Name
    usd_per_hour: Figure
    mtok_per_hour: Figure
    usd_per_mtok: Figure
    median_usd_per_mtok: Figure | None = None
    faults: Annotated[dict[Name, Text], msgspec.Meta(max_length=16)] = {}

    def __str__(self) -> str:
        text = (
            f"{self.usd_per_hour:.3g} $/h, expected {self.mtok_per_hour:.3g} M tokens/h here: "
            f"{self.usd_per_mtok:.3g} $/M"
        )
        middle = self.median_usd_per_mtok
        return "; ".join([text, *([f"the network's median {middle:.3g}"] if middle else []), *self.faults.values()])
