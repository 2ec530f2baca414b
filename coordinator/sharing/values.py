"""A request in an engine process that several services share, and the turn that some of them get."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import NamedTuple, Protocol, final

from ..plan import Phase


class SharingError(ValueError):
    """Services or settings that no engine process can be shared by; one line."""


@final
class SharedRequest:
    """An open request; the `TurnQueue` that it is in changes it.

    `phase` is what it needs next: PREFILL until all of its tokens so far have KV, then DECODE. `number` is its place
    in the order of arrival. `rank`: lower goes first among requests of its service and phase; what it means is the
    turn order's business, as are `budget` and `used_s`. `charged_s`: wall time of all iterations that it was in.
    `deadline`: when its answer is of no use any more; infinite: it has none.
    """

    __slots__ = (
        "budget", "charged_s", "deadline", "holds_kv", "is_open", "key", "number", "phase", "promoted_at",
        "prompt_tokens", "rank", "service", "turn", "used_s", "waits_since"
    )  # fmt: skip

    def __init__(
        self, key: Hashable, service: str, number: int, prompt_tokens: int, now: float, deadline: float = inf
    ) -> None:
        self.key = key
        self.service = service
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.phase = Phase.PREFILL
        self.rank = 0.0
        self.budget = 0.0
        self.used_s = 0.0
        self.charged_s = 0.0
        self.deadline = deadline
        self.waits_since = now  # since it came, or was last in a turn
        self.promoted_at = inf  # when it had waited for too long; infinite: it has not
        self.holds_kv = False
        self.is_open = True
        self.turn = -1  # the last one it was chosen for

    def __repr__(self) -> str:
        return f"<SharedRequest {self.key!r} of {self.service}, {self.phase.value}, rank {self.rank:.3g}>"

    @property
    def is_starved(self) -> bool:
        """Whether it goes first, having waited for too long."""
        return self.promoted_at < inf


class Turn(NamedTuple):
    """One iteration: one service, one phase, and its requests in the order in which they were taken."""

    service: str
    phase: Phase
    requests: list[SharedRequest]


class TurnRoom(Protocol):
    """The engine's side of a turn: what still fits into it."""

    def take(self, request: SharedRequest) -> bool:
        """Take it into the turn that is being chosen, with the KV memory that it needs for it; False: no room."""
        ...
