"""Decisions of an engine process that several services share, with many requests waiting, to be timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

from ..plan import Phase
from ..sharing.orders import TURN_ORDERS
from ..sharing.service_profile import ExpectedMoments, ExpectedService, ServiceProfile
from ..sharing.turn_queue import TurnQueue
from ..sharing.values import SharedRequest

SERVICES: Final = ("chat", "code", "summaries", "agents")
BATCH: Final = 256
STEP_TOKENS: Final = 2048
PROMPT_TOKENS: Final = 128
TURNS: Final = 400
ROUNDS: Final = 5


@final
class _BatchRoom:
    """vLLM's limits of a step, with memory for everybody."""

    def __init__(self) -> None:
        self.requests, self.tokens = BATCH, STEP_TOKENS

    def take(self, request: SharedRequest) -> bool:
        """See `TurnRoom`."""
        tokens = 1 if request.phase is Phase.DECODE else request.prompt_tokens
        if not self.requests or tokens > self.tokens:
            return False
        self.requests -= 1
        self.tokens -= tokens
        return True


class TurnTimes(NamedTuple):
    """Microseconds of the processor, for each turn."""

    choose_us: float
    charge_us: float


def turn_rows(waiting: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """By order: of a decision among so many requests that wait, and of charging the turn; medians of rounds."""
    rows = []
    for name in TURN_ORDERS:
        rounds = [_time_turns(name, waiting, clock) for _ in range(ROUNDS)]
        rows.append({
            "order": name,
            "waiting": waiting,
            "choose_us": round(statistics.median(each.choose_us for each in rounds), 1),
            "charge_us": round(statistics.median(each.charge_us for each in rounds), 1),
        })  # fmt: skip
    return rows


def _time_turns(name: str, waiting: int, clock: Callable[[], float]) -> TurnTimes:
    """Prompts that have had their turn decode, a request ends in every fourth turn, and others come in its place."""
    profiles = {service: _profile(1.0 + place) for place, service in enumerate(SERVICES)}
    queue = TurnQueue(TURN_ORDERS[name](profiles), profiles)
    number, now, choose_s, charge_s = 0, 0.0, 0.0, 0.0
    decoding: list[SharedRequest] = []
    for turn_number in range(TURNS):
        while len(queue.requests) - len(decoding) < waiting:
            queue.add(number, SERVICES[number % len(SERVICES)], PROMPT_TOKENS, now)
            number += 1
        room = _BatchRoom()
        began = clock()
        turn = queue.choose(now, room)
        choose_s += clock() - began
        assert turn is not None
        began = clock()
        queue.charge(turn, 0.02, now + 0.02, len(turn.requests) * PROMPT_TOKENS)
        charge_s += clock() - began
        now += 0.02
        if turn.phase is Phase.PREFILL:
            for request in turn.requests:
                queue.begin_decode(request)
            decoding += turn.requests
        if turn_number % 4 == 0 or len(decoding) > BATCH:
            for request in decoding[: max(1, len(decoding) - BATCH)]:
                queue.finish(request, 64)
            del decoding[: max(1, len(decoding) - BATCH)]
    return TurnTimes(1e6 * choose_s / TURNS, 1e6 * charge_s / TURNS)


def _profile(execution_s: float) -> ServiceProfile:
    return ServiceProfile(
        ExpectedService(
            execution=ExpectedMoments(execution_s, execution_s / 2.0),
            prompt_tokens=ExpectedMoments(PROMPT_TOKENS, 0.0),
            output_tokens=ExpectedMoments(64.0, 32.0),
            prefill_token=ExpectedMoments(1e-4, 0.0),
            decode_step=ExpectedMoments(0.02, 0.0),
        )
    )
