"""When an engine that only waits for KV may sleep until there is news of it. Pure."""

from __future__ import annotations

from typing import final


@final
class IdleSteps:
    """Counts steps in a row in which no request ran.

    What a step finds is known to the scheduler once so many steps have been launched (`known_after`; with asynchronous
    scheduling it is one more than the step itself). Until then nothing that it has found would end a sleep::

        news of KV, step: all of it is there, step: the scheduler hears of that, step: the request runs
    """

    def __init__(self, known_after: int) -> None:
        self._known_after = known_after
        self._steps = 0

    def __repr__(self) -> str:
        return f"<IdleSteps {self._steps} of {self._known_after}>"

    def on_step(self, *, idle: bool) -> None:
        """A step has been launched; not idle: some request runs, or something has been said of one."""
        self._steps = self._steps + 1 if idle else 0

    def on_news(self) -> None:
        """There is something for the next step to find."""
        self._steps = 0

    @property
    def may_sleep(self) -> bool:
        """Whether all that was found is known."""
        return self._steps >= self._known_after
