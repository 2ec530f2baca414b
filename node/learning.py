"""What a node learns of its own engine from the engine's steps: the profile that it advertises."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import trio

from ..coordinator.costs.profile_tracker import ProfileTracker
from ..coordinator.profile import LatencyProfile, StepSample
from ..coordinator.profile_fit import fit
from .engine.protocol import Iterations
from .settings import WAN


@final
class Learner:
    """Fits the profile to the engine's steps while new ones come, and at once where its speed has
    changed. `on_change` hears by what factor its steps take longer then."""

    def __init__(
        self, interval_s: float = WAN.profile_interval_s, on_change: Callable[[float], None] = lambda factor: None
    ) -> None:
        self._interval_s = interval_s
        self.on_change = on_change
        self._tracker = ProfileTracker()
        self._place: object = None
        self._has_news = False
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return f"<Learner {self._tracker}>"

    @property
    def profile(self) -> LatencyProfile | None:
        """What has been fitted last."""
        return self._tracker.profile

    def begin(self, place: object) -> None:
        """An engine runs at this place of the plan now. One that was started again for the same
        layers is as fast as before; one for others is not."""
        if place != self._place:
            self._place, self._tracker, self._has_news = place, ProfileTracker(), False

    def add(self, iterations: Iterations) -> None:
        """Steps of the engine."""
        factor = self._tracker.add(iterations.samples)
        self._has_news = self._has_news or bool(iterations.samples)
        if factor is not None:
            self.on_change(factor)
            self._changed.set()

    def samples(self) -> list[StepSample]:
        """What is kept of them."""
        return self._tracker.samples()

    async def refit(self) -> None:
        """Fit now, on a thread: it takes some ten milliseconds."""
        self._has_news = False
        tracker = self._tracker
        found = await trio.to_thread.run_sync(fit, tracker.samples(), tracker.weights())
        tracker.profile = found

    async def run(self) -> None:
        """Fit until cancelled."""
        while True:
            with trio.move_on_after(self._interval_s):
                await self._changed.wait()
            self._changed = trio.Event()
            if self._has_news:
                await self.refit()
