"""What a gateway keeps of a request while it is under way: its progress over all attempts, and each attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, final

import trio

from ...bootstrap import PeerId
from ...coordinator import Stage
from .. import messages
from .request import LiveRequest

__all__ = ["Attempt", "Chosen", "Event", "First", "Progress"]


class First(NamedTuple):
    """The prefill node has written the first token."""

    told: messages.Tokens


Event = messages.Tokens | First | messages.PrefillEnded | str  # a str is the id of a peer that was lost


class Chosen(NamedTuple):
    """Where a request goes: the heads of two replicas, or of one."""

    decode: PeerId
    prefill: PeerId | None
    stages: tuple[Stage, ...]  # of the replica that prefills
    split: int  # tokens of the prompt that it reads; the decode node reads the rest
    prefill_writes: bool  # the first token, having read all of the prompt


@final
@dataclass(slots=True)
class Attempt:
    """One try at a request, on one route. `id` is new for each, so that late messages of another are told apart."""

    id: str
    route: Chosen
    codec: str
    send: trio.MemorySendChannel[Event]
    events: trio.MemoryReceiveChannel[Event]
    unread: dict[PeerId, int]  # who is at work on it, as far as is known, with so many tokens of the prompt to read
    prefill_open: bool = False
    decoding: bool = False  # the decode node has told of tokens
    shown: tuple[messages.Token, ...] = ()  # before that, by the prefill node

    @property
    def decode(self) -> PeerId:
        """The node that writes the tokens."""
        return self.route.decode

    @property
    def prefill(self) -> PeerId | None:
        """The node that reads the prompt, if it is another one."""
        return self.route.prefill


@final
@dataclass(slots=True)
class Progress:
    """Bookkeeping of a request over all its attempts."""

    client: PeerId
    arrived: float
    deadline: float
    first_token: float | None = None
    last_token: float | None = None
    attempts: int = 0
    failures: int = 0  # of engines that were to decode it, since one has added to the answer
    codec: str = "raw"
    cached_tokens: int | None = None  # at the first node that decoded
    route: tuple[PeerId | None, PeerId] | None = None
    recovered: list[str] = field(default_factory=list)
    failed: dict[PeerId, int] = field(default_factory=dict)  # peer -> start of the engine that failed us
    transfer: messages.TransferFigures | None = None

    def figures(self, live: LiveRequest, now: float) -> messages.RequestFigures | None:
        """What the request was, at its end; None when it never had a route."""
        if self.route is None:
            return None
        prefill, decode = self.route
        first = self.first_token if self.first_token is not None else now
        last = self.last_token if self.last_token is not None else first
        return messages.RequestFigures(
            prompt_tokens=len(live.prompt),
            completion_tokens=len(live.tokens),
            ttft_s=first - self.arrived,
            tpot_s=(last - first) / max(1, len(live.tokens) - 1),
            e2e_s=last - self.arrived,
            prefill_node=prefill,
            decode_node=decode,
            codec=self.codec,
            attempts=self.attempts,
            recovered=tuple(self.recovered),
            cached_tokens=self.cached_tokens or 0,
            transfer=self.transfer,
        )
