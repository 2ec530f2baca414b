"""What a box costs: its owner says so when the node starts, and anew while it runs.

    p2pserve price 0.35       on the box itself

The new price holds until the node ends; the next start takes the one that it is told then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

import msgspec

from ...bootstrap import PeerId
from .questions import OwnerAnswer, OwnerQuestion


@final
class PriceTag:
    """One per node. `apply` hears of each change: the price before, and from now on."""

    def __init__(self, usd_per_hour: float, apply: Callable[[float, float], None]) -> None:
        self._usd_per_hour = usd_per_hour
        self._apply = apply

    def __repr__(self) -> str:
        return f"<PriceTag {describe_price(self._usd_per_hour)}>"

    @property
    def usd_per_hour(self) -> float:
        """What the box costs now; 0: its owner does not say."""
        return self._usd_per_hour

    async def answer(
        self, question: OwnerQuestion, own: PeerId, others: Callable[[OwnerQuestion], Awaitable[OwnerAnswer]]
    ) -> OwnerAnswer:
        """Take a new price, if the owner says one, and leave the rest of the question to `others`: what they say of
        this box gets its price."""
        wanted = question.usd_per_hour
        if wanted is not None and question.box:
            return OwnerAnswer(failed="box: only its own owner says what a box costs; run it there", fault="usage")
        if wanted is not None and wanted != self._usd_per_hour:
            before, self._usd_per_hour = self._usd_per_hour, wanted
            self._apply(before, wanted)
        answer = await others(question)
        return msgspec.structs.replace(answer, usd_per_hour=self._usd_per_hour) if answer.node == own else answer


def describe_price(usd_per_hour: float) -> str:
    """For people: `$0.35/h`."""
    return f"${usd_per_hour:.4g}/h" if usd_per_hour else "no price"
