"""One try at a request, on one route: what is known of it, for the request's machine."""

from __future__ import annotations

from typing import final

from .stalls import ExpectedTimes, stall_limit_s
from .values import OpenDecode, RequestSettings, Tokens


@final
class Attempt:
    """Written by the machine alone."""

    __slots__ = (
        "decoding", "expected", "got_on_at", "is_hung", "leaves", "opening", "prefill_hung", "prefill_over",
        "prefilling", "shown", "stalled_s", "tokens", "without_kv",
    )  # fmt: skip

    def __init__(self, opening: OpenDecode, tokens: int, expected: ExpectedTimes, now: float) -> None:
        self.opening = opening
        self.tokens = tokens  # that the decode replica was given
        self.expected = expected
        self.got_on_at = now  # when something was last heard that brings the answer nearer
        self.prefilling = False  # the prefill replica may be at work
        self.decoding = False  # the decode replica has told of tokens
        self.shown: Tokens = ()  # the first token, told by the prefill replica before that
        self.prefill_over = opening.prefill is None  # nothing is expected of it any more
        self.without_kv = self.prefill_over  # the decode replica computes all of the prompt
        self.is_hung = False  # the decode replica does not answer
        self.leaves = False  # it is about to leave
        self.stalled_s = 0.0  # it has been silent about this for so long, which is too long; 0: it has not
        self.prefill_hung = False  # the prefill replica does not answer, which has not been asked yet

    @property
    def in_doubt(self) -> bool:
        """Whether the decode replica is given up as soon as there is another route."""
        return self.is_hung or self.leaves or self.stalled_s > 0.0

    @property
    def can_send_kv(self) -> bool:
        """Whether the decode replica, in doubt, can send what it has computed to the next one."""
        return self.leaves and self.decoding and not self.is_hung and not self.stalled_s

    @property
    def doubt(self) -> str:
        """Why, for people."""
        if self.is_hung:
            return "it did not answer"
        return f"it stalled for {self.stalled_s:.0f} s" if self.stalled_s else "it is about to leave"

    @property
    def awaits_prefill(self) -> bool:
        """Whether the prefill replica is the one that has yet to be heard."""
        return self.prefilling and not (self.shown or self.decoding)

    def stalls_at(self, stalls: int, settings: RequestSettings) -> float:
        """When the silence of its replicas is too long, if it lasts, for a request that has had so many stalls."""
        expected_s = self.expected.next_token_s if self.decoding else self.expected.first_token_s
        return self.got_on_at + stall_limit_s(expected_s, stalls, settings)
