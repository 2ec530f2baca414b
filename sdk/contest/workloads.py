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
FILE_CHARACTERS: Final = 2000
OUTPUTS: Final = (8, 48)
"""Tokens of an answer, at least and at most."""


class ContestRequest(NamedTuple):
    """`at`: seconds after the beginning."""

    at: float
    prompt: str
    max_tokens: int


Draw = Callable[[random.Random, str], str]


def read_sources() -> str:
    """The text that prompts are cut out of."""
    return "\n".join(Path(source).read_text("utf-8") for source in SOURCES)


def _draw_alone(rng: random.Random, text: str) -> str:
    """A prompt that begins like no other, of any length."""
    size = rng.randint(SHORTEST, LONGEST)
    begin = rng.randrange(len(text) - size)
    return text[begin : begin + size]


def _draw_of_file(rng: random.Random, text: str) -> str:
    """A question about one of a few files; the first is asked about most (by 1 / rank)."""
    number = rng.choices(range(FILES), [1.0 / (rank + 1) for rank in range(FILES)])[0]
    begin = number * len(text) // FILES
    return text[begin : begin + FILE_CHARACTERS] + f"\n\n\ndef answer_{rng.randrange(1_000_000)}("


WORKLOADS: Final[Mapping[str, Draw]] = MappingProxyType({"alone": _draw_alone, "files": _draw_of_file})
"""By what prompts share: nothing, or all but their end with others about the same file."""


def draw_requests(name: str, text: str, *, requests: int, rate: float, seed: int) -> Sequence[ContestRequest]:
    """So many requests of this workload, at `rate` a second on average (Poisson). Raises UsageError."""
    draw = WORKLOADS.get(name)
    if draw is None:
        raise UsageError(f"workload: {name} is none of {', '.join(WORKLOADS)}")
    if not (requests >= 1 and 0.0 < rate < 1e6):
        raise UsageError(f"requests, rate: {requests} at {rate:g} a second is nothing to ask for")
    rng = random.Random(f"{seed} {name}")
    at, drawn = 0.0, []
    for _ in range(requests):
        at += rng.expovariate(rate)
        drawn.append(ContestRequest(at, draw(rng, text), rng.randint(*OUTPUTS)))
    return drawn
