"""What a contest asks for: prompts of Python's standard library, and when they come. Pure; text is read beforehand."""

from __future__ import annotations

import heapq
import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from ..errors import UsageError

SOURCES: Final = tuple(module.__file__ or "" for module in (heapq, random, textwrap))
"""Files whose text prompts are cut out of."""
SHORTEST, LONGEST = 200, 2400
"""Characters of a prompt; the bundled model makes a token of some three."""
FILES: Final = 6
"""Beginnings that prompts of `files` share."""
FILE_CHARACTERS: Final = 4500
"""Of such a beginning: 1,150 to 1,650 tokens, of the 2,048 that the model takes. Shorter ones are not fetched
(`coordinator.prefixes.fetching.LEAST_TOKENS`)."""
ASKED: Final = 4
"""Times in a row that a prompt of `turns` is about the same file."""
STRIDE: Final = 7001
"""Characters from one file of `turns` to the next."""
TURN_S: Final = 1.0
"""From one request of `turns` to the next: longer than an answer takes, so that nothing waits."""
OUTPUTS: Final = (8, 48)
"""Tokens of an answer, at least and at most."""


class ContestRequest(NamedTuple):
    """`at`: seconds after the beginning."""

    at: float
    prompt: str
    max_tokens: int


class ContestWorkload(NamedTuple):
    """`draw`: the prompt with this number, of the text; `gap`: seconds to the next, at so many requests a second."""

    draw: Callable[[random.Random, str, int], str]
    gap: Callable[[random.Random, float], float] = random.Random.expovariate


def read_sources() -> str:
    """The text that prompts are cut out of."""
    return "\n".join(Path(source).read_text("utf-8") for source in SOURCES)


def _draw_alone(rng: random.Random, text: str, number: int) -> str:
    """A prompt that begins like no other, of any length."""
    size = rng.randint(SHORTEST, LONGEST)
    begin = rng.randrange(len(text) - size)
    return text[begin : begin + size]


def _draw_of_file(rng: random.Random, text: str, number: int) -> str:
    """A question about one of a few files; the first is asked about most (by 1 / rank)."""
    file = rng.choices(range(FILES), [1.0 / (rank + 1) for rank in range(FILES)])[0]
    return _ask_about(rng, text, file * len(text) // FILES)


def _draw_in_turn(rng: random.Random, text: str, number: int) -> str:
    """A question about the same file as those before it, or about the next file."""
    return _ask_about(rng, text, number // ASKED * STRIDE % (len(text) - FILE_CHARACTERS))


def _ask_about(rng: random.Random, text: str, begin: int) -> str:
    return text[begin : begin + FILE_CHARACTERS] + f"\n\n\ndef answer_{rng.randrange(1_000_000)}("


WORKLOADS: Final[Mapping[str, ContestWorkload]] = MappingProxyType(
    {
        "alone": ContestWorkload(_draw_alone),
        "files": ContestWorkload(_draw_of_file),
        "turns": ContestWorkload(_draw_in_turn, lambda rng, rate: TURN_S),
    }
)
"""By what prompts share: nothing; all but their end with others about the same file; likewise, one at a time."""


def draw_requests(name: str, text: str, *, requests: int, rate: float, seed: int) -> Sequence[ContestRequest]:
    """So many requests of this workload, at `rate` a second (Poisson), but for `turns`. Raises UsageError."""
    workload = WORKLOADS.get(name)
    if workload is None:
        raise UsageError(f"workload: {name} is none of {', '.join(WORKLOADS)}")
    if not (requests >= 1 and 0.0 < rate < 1e6):
        raise UsageError(f"requests, rate: {requests} at {rate:g} a second is nothing to ask for")
    rng = random.Random(f"{seed} {name}")
    at, drawn = 0.0, []
    for number in range(requests):
        at += workload.gap(rng, rate)
        drawn.append(ContestRequest(at, workload.draw(rng, text, number), rng.randint(*OUTPUTS)))
    return drawn
