"""What goes into a request's machine and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

Tokens = Sequence[int]
"""Token ids. The simulator, whose tokens have no ids, uses ranges of positions: they cost nothing
to cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """How patient a gateway is. All times are seconds.

    `open_timeout_s`: how long a replica may take to accept a request; longer rides out a busy event
    loop, and loses as much time on a replica that hangs. `no_engine_grace_s`: how long a request
    waits while no engine is there nor being started; longer survives a restart, and keeps a client
    of a dead service waiting. `route_retry_s`: between two looks for a route where nothing has been
    heard. `figures_grace_s`: how long a complete answer waits for the report of its KV transfer,
    which comes from another node. `max_failures`: engines in a row that fail with a request before
    one adds to its answer; the request may be what ends them, so higher risks more engines of the
    other requests. `first_token_at_prefill`: who prefills all of a prompt samples the first token
    too (the simulator can do without). `may_split`: one replica may prefill and another decode it.
    `stall_floor_s`, `stall_factor`: a replica that has added nothing for the longer of the floor and
    so many times what was expected is left for another, where there is one (`stalls`). Higher:
    slow boxes are given up less often; lower: clients wait less for those that hang. `news_s`: a
    client in the network hears something of its request at least so often, if only that it is under
    way; shorter: it sooner asks another gateway than one that hangs, for 40 bytes each time.
    """

    open_timeout_s: float = 10.0
    no_engine_grace_s: float = 5.0
    route_retry_s: float = 1.0
    figures_grace_s: float = 0.5
    max_failures: int = 3
    first_token_at_prefill: bool = True
    may_split: bool = True
    stall_floor_s: float = 15.0
    stall_factor: float = 10.0
    news_s: float = 5.0


class Answer(Protocol):
    """The answer so far. It survives every change of engine."""

    @property
    def count(self) -> int:
        """Tokens of it."""
        ...

    @property
    def left(self) -> int:
        """How many tokens may still come."""
        ...

    @property
    def finish(self) -> str | None:
        """How it ended: stop or length; None while it goes on."""
        ...

    def take(self, tokens: Tokens, finish: str | None) -> ShowTokens | None:
        """Add tokens, and end where `finish`, the length or a stop string says so. Returns what the
        client may see."""
        ...


class FindRoute(msgspec.Struct, frozen=True, gc=False):
    """Look for a route for so many tokens; answer with `routed`, `not_routed` or `held`.

    `blamed`: the engines that have failed this request, by replica; the number is the one that the
    failure's event had. `leaving`: the replica that has it and does not answer now: only another
    one will do.
    """

    tokens: int
    blamed: Mapping[str, int]
    leaving: str = ""


class OpenDecode(msgspec.Struct, frozen=True, gc=False):
    """Ask a replica to serve the request to its end; answer with `decode_opened` or `open_failed`.

    With `prefill` it is to receive the KV of the first `split` tokens from there, and the first
    token of the answer if `first_token`; without, it computes all of the prompt. `cached`: of the tokens that the first
    of them is to compute, those that it is believed to have in its cache.
    """

    attempt: int
    decode: str
    prefill: str | None = None
    split: int = 0
    first_token: bool = False
    cached: int = 0


class OpenPrefill(msgspec.Struct, frozen=True, gc=False):
    """Compute the first `split` tokens and send their KV to the decode replica; `open_failed` on
    refusal. `first_token`: sample one more and tell the gateway."""

    attempt: int
    prefill: str
    split: int
    first_token: bool


class ShowTokens(msgspec.Struct, frozen=True, gc=False):
    """Send these to the client."""

    text: str
    tokens: Tokens


class PassFirstToken(msgspec.Struct, frozen=True, gc=False):
    """Tell the decode replica the token that the client has seen: its part begins after that."""

    attempt: int
    decode: str
    token: int


class CancelTransfer(msgspec.Struct, frozen=True, gc=False):
    """Tell the decode replica that no KV will come: it computes the prompt itself."""

    attempt: int
    decode: str
    reason: str


class CancelWork(msgspec.Struct, frozen=True, gc=False):
    """Tell a replica to forget this attempt."""

    attempt: int
    replica: str


class NoteStall(msgspec.Struct, frozen=True, gc=False):
    """A replica has stalled: it answers, and does not get on with the request. Trust it less."""

    replica: str


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """What a request was. `prefill`, `decode`: of the last attempt; `cached_tokens`: of the first
    decode replica; `tokens` came here from `first_at` to `last_at`."""

    prefill: str | None
    decode: str
    attempts: int
    recovered: tuple[str, ...]
    cached_tokens: int
    tokens: int
    arrived: float
    first_at: float
    last_at: float

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival to the first token."""
        return self.first_at - self.arrived

    @property
    def tpot_s(self) -> float:
        """Seconds between two tokens."""
        return (self.last_at - self.first_at) / max(1, self.tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Seconds from its arrival to the last token."""
        return self.last_at - self.arrived


class EndRequest(msgspec.Struct, frozen=True, gc=False):
    """Nothing follows. `finish`: stop, length or error (then `error` is a line); None: the client
    is gone. `record` is None without a route."""

    finish: str | None
    error: str
    record: RequestRecord | None


Action = (
    FindRoute
    | OpenDecode
    | OpenPrefill
    | ShowTokens
    | PassFirstToken
    | CancelTransfer
    | CancelWork
    | NoteStall
    | EndRequest
)  # fmt: skip


Ready = tuple[Action, ...]
"""What one step asks for, in this order: the client is shown a token before replicas are told, and
an attempt forgotten before the next begins."""
