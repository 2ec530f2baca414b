"""What a node learns of its own engine from the engine's steps: the profile that it advertises."""

from __future__ import annotations

from typing import final

import trio

from ..coordinator.profile import LatencyProfile, StepSample
from ..coordinator.profile_fit import SampleBook, fit
from .engine.protocol import Iterations
from .settings import WAN


@final
class Learner:
    """Keeps samples of the engine's steps and fits the profile to them while new ones come."""

    def __init__(self, interval_s: float = WAN.profile_interval_s) -> None:
        self._interval_s = interval_s
        self.profile: LatencyProfile | None = None
        self._book = SampleBook()
        self._news = False

    def __repr__(self) -> str:
        return f"<Learner {self._book}>"

    def add(self, iterations: Iterations) -> None:
        """Steps of the engine."""
        self._book.add(iterations.samples)
        self._news = self._news or bool(iterations.samples)

    def samples(self) -> list[StepSample]:
        """What is kept of them."""
        return self._book.samples()

    def forget(self) -> None:
        """The engine has gone, and the next one may hold other layers."""
        self.profile, self._book, self._news = None, SampleBook(), False

    async def run(self) -> None:
        """Fit until cancelled."""
        while True:
            await trio.sleep(self._interval_s)
            if self._news:
                self._news = False
                book = self._book
                profile = await trio.to_thread.run_sync(fit, book.samples())
                if book is self._book:
                    self.profile = profile
