"""Whether to go on waiting for a prompt's KV or to compute here what has not come. Pure.

A decode engine can always take the prefix that is there and compute the rest, so KV that comes too slowly is worth
nothing. Two predictions are compared, and waiting must look worse for a while before it is given up::

    wait      what is missing / the rate at which KV came in the last `window_s`
    compute   positions that are not complete x seconds per position of this engine's own prefills

Layers come one after the other, so nothing may be complete although most of it is there: that speaks for waiting.
Before anything has come there is no rate. The prefill engine may have a queue, and computing here holds up decodes
that are to be kept apart from prefills; so it is given several times what computing would take. While it computes, KV
comes as fast as its steps are, whatever the link could carry: until it has told the first token, only KV that stops
coming is given up, after as long.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import final

LEARNED_FROM_TOKENS = 32  # steps with fewer prefill tokens say more about the decodes beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitLimitSettings:
    """How late KV may be.

    `window_s`: how far back the rate looks; longer rides out longer pauses of a link, and notices a stall later.
    `gain`: waiting is given up when it takes so many times as long as computing, plus `margin_s`; higher keeps prefills
    away from this engine and costs time to the first token. `hold_s`: for so long it must stay that way.
    `first_gain`, `first_margin_s`: the same while nothing has come, or nothing new of a prompt that is being computed.
    `unmeasured_s`, `unmeasured_token_s`: until a prefill has been measured here, a prompt is taken to need the former,
    and a long one the latter for each token. Higher waits longer for the KV of a first prompt; lower has a box that
    shall only decode compute it.
    """

    window_s: float = 1.0
    gain: float = 1.5
    margin_s: float = 0.1
    hold_s: float = 0.25
    first_gain: float = 4.0
    first_margin_s: float = 2.0
    unmeasured_s: float = 5.0
    unmeasured_token_s: float = 0.001


@dataclass(slots=True)
class _Wait:
    tokens: int
    grew_at: float  # when the latest KV came
    is_computed: bool
    complete: int = 0
    samples: deque[tuple[float, float]] = field(default_factory=deque)  # (when, part), `part` grows
    worse_since: float | None = None


@final
class WaitLimits:
    """Of one engine, for all prompts whose KV it waits for. `now` is any clock that never goes back."""

    def __init__(self, settings: WaitLimitSettings | None = None) -> None:
        self.settings = WaitLimitSettings() if settings is None else settings
        self._token_s: float | None = None
        self._waits: dict[str, _Wait] = {}

    def __repr__(self) -> str:
        rate = "not measured" if self._token_s is None else f"{1 / self._token_s:.0f} tokens/s"
        return f"<WaitLimits waiting={len(self._waits)} prefill {rate}>"

    @property
    def waiting(self) -> bool:
        """Whether any KV is waited for."""
        return bool(self._waits)

    def on_prefill(self, tokens: int, seconds: float) -> None:
        """A step read `tokens` of prompts here and took so long, with the decodes beside them."""
        if tokens >= LEARNED_FROM_TOKENS and seconds > 0.0:
            measured = seconds / tokens
            self._token_s = measured if self._token_s is None else 0.7 * self._token_s + 0.3 * measured

    def begin(self, request: str, first: int, last: int, now: float, *, is_computed: bool = True) -> None:
        """There are blocks for the positions `[first, last)`: from now on the sender may send. `is_computed`: it has
        computed them, or does not say when it has; else see `on_computed`."""
        self._waits[request] = _Wait(last - first, now, is_computed, samples=deque([(now, 0.0)]))

    def on_computed(self, request: str) -> None:
        """The sender has: what is missing waits for the link alone. Unknown ones: nothing."""
        if (wait := self._waits.get(request)) is not None:
            wait.is_computed = True

    def on_arrival(self, request: str, part: float, complete: int, now: float) -> None:
        """`part` of the KV is there, `complete` positions in every layer. Unknown ones: nothing."""
        wait = self._waits.get(request)
        if wait is not None:
            wait.complete = complete
            if part > wait.samples[-1][1]:
                wait.grew_at = now
            wait.samples.append((now, part))

    def end(self, request: str) -> None:
        """Nothing more is waited for. Again is no matter."""
        self._waits.pop(request, None)

    def give_up(self, now: float) -> dict[str, str]:
        """The requests whose KV is too late, with the reason; they are not waited for any longer."""
        late = {}
        for request, wait in self._waits.items():
            reason = self._late(wait, now)
            if reason:
                late[request] = reason
        for request in late:
            del self._waits[request]
        return late

    def _late(self, wait: _Wait, now: float) -> str:
        """Why this KV is too late; empty: it is not, or not for long enough."""
        settings = self.settings
        compute_s = self._compute_s(wait.tokens - wait.complete)
        while len(wait.samples) > 1 and wait.samples[1][0] <= now - settings.window_s:
            wait.samples.popleft()
        (since, before), (_, part) = wait.samples[0], wait.samples[-1]
        if part < 1.0 and not (part and wait.is_computed):
            waited = now - wait.grew_at
            bound = settings.first_gain * compute_s + settings.first_margin_s
            return f"no KV came in {waited:.1f} s" if waited > bound else ""
        grown = part - before
        wait_s = (1.0 - part) / grown * (now - since) if grown > 0.0 else math.inf
        if part >= 1.0 or wait_s <= settings.gain * compute_s + settings.margin_s:
            wait.worse_since = None
            return ""
        wait.worse_since = now if wait.worse_since is None else wait.worse_since
        if now - wait.worse_since < settings.hold_s:
            return ""
        predicted = "stopped coming" if math.isinf(wait_s) else f"would take {wait_s:.1f} s more"
        return f"KV {predicted} with {part:.0%} of it there; computing the rest takes {compute_s:.1f} s"

    def _compute_s(self, tokens: int) -> float:
        if self._token_s is None:
            return max(self.settings.unmeasured_s, tokens * self.settings.unmeasured_token_s)
        return tokens * self._token_s
