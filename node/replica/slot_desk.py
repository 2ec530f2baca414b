"""Where requests wait until a prefill replica takes them: `PrefillSlots` on the event loop. And those that have a place
in its pool, and are about to come."""

from __future__ import annotations

from typing import Final, final

import trio

from ...bootstrap import PeerId
from ...coordinator.routing.pools import PoolClaims
from ...coordinator.routing.prefill_slots import PrefillSlots

LEASE_S: Final = 10.0
"""For a gateway to ask again, or to send the request that has a slot. Longer: slower gateways keep their turn; shorter:
a slot of one that is gone is free sooner."""

Asked = tuple[PeerId, str]
"""A gateway, and the id of its request."""


@final
class SlotDesk:
    """One per replica; gateways wait here, and the worker says which requests are here."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._slots: PrefillSlots[Asked] = PrefillSlots(lease_s)
        self._changed = trio.Event()
        self.claims: PoolClaims[Asked] = PoolClaims()

    def __repr__(self) -> str:
        return f"<SlotDesk {self._slots!r}>"

    @property
    def used(self) -> int:
        """How many requests are being prefilled, or are about to come."""
        return self._slots.used

    async def wait(self, request: Asked, wait_s: float) -> bool:
        """Whether it has a slot after waiting so long at most; who has none keeps its turn until `lease_s` are over."""
        give_up = trio.current_time() + wait_s
        self._slots.ask(request, trio.current_time())
        while not self._slots.take(request, trio.current_time()):
            if trio.current_time() >= give_up:
                return False
            with trio.move_on_at(min(give_up, self._slots.wake_at())):
                await self._changed.wait()
        return True

    def enter(self, request: Asked) -> None:
        """Its prefill begins, whether or not it has asked."""
        self._slots.enter(request)
        self.claims.leave(request)

    def leave(self, request: Asked) -> None:
        """Its prefill is over, or it is wanted no more."""
        self.claims.leave(request)
        if self._slots.leave(request):
            self._wake()

    def clear(self) -> None:
        """The engine is gone, and all prefills with it."""
        self._slots.clear()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
