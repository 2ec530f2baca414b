"""What admin API and dashboard show, and who tells it."""

from __future__ import annotations

from typing import Annotated, Final, Protocol

import msgspec

from ...coordinator import Plan
from ...coordinator.bounds import Counter, Name
from ...coordinator.plan import Deadlines, MorePlans
from ..observing.counts import NO_DEADLINES
from ..observing.values import (
    MAX_EVENTS,
    LinkSummary,
    NodeEvent,
    NodeSummary,
    RequestSummary,
    RequestTrace,
    UnixTime,
    Word,
)

MAX_REQUESTS: Final = 1024  # that one snapshot has


class SourceError(Exception):
    """The node does not tell what the network is like; the text says why, for people."""


class NetworkSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The network as one node sees it at `time`. Requests and events are the latest ones, the oldest first."""

    time: UnixTime
    answered_by: Name
    coordinator: Word = ""
    epoch: Counter = 0
    nodes: tuple[NodeSummary, ...] = ()
    plan: Plan | None = None
    other_plans: MorePlans = ()
    requests: Annotated[tuple[RequestSummary, ...], msgspec.Meta(max_length=MAX_REQUESTS)] = ()
    events: Annotated[tuple[NodeEvent, ...], msgspec.Meta(max_length=MAX_EVENTS)] = ()

    @property
    def deadlines(self) -> Deadlines:
        """What requests should keep at the gateway that answers, by the plan of its service; 0 where nothing is asked
        for."""
        own = next((node.service for node in self.nodes if node.id == self.answered_by), "")
        plans = sorted(self.plans, key=lambda plan: plan.service != own)
        return plans[0].deadlines if plans else NO_DEADLINES

    @property
    def plans(self) -> tuple[Plan, ...]:
        """One for each service."""
        return (*([self.plan] if self.plan is not None else ()), *self.other_plans)


class NetworkSource(Protocol):
    """A node that tells what it sees. All raise SourceError where it does not answer."""

    async def snapshot(self) -> NetworkSnapshot:
        """Everything but links."""

    async def links(self) -> tuple[LinkSummary, ...]:
        """Every directed link that anybody has told of."""

    async def trace(self, request: str) -> RequestTrace | None:
        """One request across boxes, or None where nobody remembers it."""
