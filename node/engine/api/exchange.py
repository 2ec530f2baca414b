"""One HTTP request on its way through the API process, and what the network says of its parts. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, final

from .protocol import ApiOutcome, ApiRefused

MAX_SERVED: Final = 64  # parts of a request (n, prompts of a list) that are told apart


@final
@dataclass(slots=True, eq=False)
class Exchange:
    """What it is called, whose it is, and how long it may take."""

    id: str
    key: str
    deadline_s: float
    waiting: set[str] = field(default_factory=set)  # its requests that have not ended
    served: list[ApiOutcome] = field(default_factory=list)
    refusal: ApiRefused | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # none is waited for

    def begin(self, request: str) -> None:
        """A part of it has gone to the network."""
        self.waiting.add(request)
        self.settled.clear()

    def end(self, request: str, outcome: ApiOutcome | ApiRefused) -> None:
        """A part of it is over."""
        self.waiting.discard(request)
        if isinstance(outcome, ApiRefused):
            self.refusal = self.refusal or outcome
        elif len(self.served) < MAX_SERVED:
            self.served.append(outcome)
        if not self.waiting:
            self.settled.set()

    def describe(self) -> list[tuple[str, str]]:
        """What is known of it by now, as header fields."""
        if not self.served:
            return []
        fields = [
            ("X-P2P-Prefill-Node", _join(served.prefill_node for served in self.served)),
            ("X-P2P-Decode-Node", _join(served.decode_node for served in self.served)),
            ("X-P2P-KV-Bytes", str(sum(served.kv_bytes for served in self.served))),
            ("X-P2P-Cost-USD", f"{sum(served.usd for served in self.served):.9f}"),
        ]
        return [(name, value) for name, value in fields if value]


current_exchange: ContextVar[Exchange | None] = ContextVar("current_exchange", default=None)
"""The HTTP request that the running task is part of."""


def _join(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(name for name in names if name))
