"""What is said so that gateways know which prefixes replicas hold.

A gateway that routes requests asks the head of each replica with `prefixes`, about once a second, and names how far it
has heard. The head answers with what has changed since, with all it holds where that is not known there any more, or
with nothing new. So nobody sends what nobody uses, what was missed is made up for, and each answer is bounded.
"""

from __future__ import annotations

from ...coordinator.bounds import ModelName
from ...coordinator.prefixes.held import PrefixNews, PrefixVersion
from ..messages import Message


class PrefixQuery(Message, frozen=True, kw_only=True):
    """Which prefixes does the replica of this node hold? `heard`: as far as the asker knows; None: nothing."""

    service: ModelName
    heard: PrefixVersion | None = None


class PrefixAnswer(Message, frozen=True, kw_only=True):
    """None: no more than was heard."""

    news: PrefixNews | None = None
