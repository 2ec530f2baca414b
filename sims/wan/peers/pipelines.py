"""A pipeline of ours and vLLM's own over Gloo: a stage in each box of an emulated network, the bundled model."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any, Final

from ..emulated import EmulatedWan
from ..scenario import Scenario, WanBox, WanPair
from .programs import PeerFailed, PeerProgram, WanSite

# Programs of the room of engines, which this one does not know otherwise.
OURS: Final = "p2pserve.node.engine.dev.stage_box"
VLLM: Final = "p2pserve.node.engine.dev.vllm_stage"
OUR_PORT, VLLM_PORT = 29_700, 29_501
LAYERS: Final = 8  # of the bundled model
RTTS_MS: Final = (20.0, 50.0)
PROMPT_TOKENS, WORDS = 32, 4000
START_S: Final = 150.0
ANSWER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class TokenPair:
    """Milliseconds between two tokens of one answer, and whether both gave the same tokens."""

    ours_ms: float
    vllm_ms: float
    same: bool


@dataclass(frozen=True, slots=True)
class PipelineTurns:
    """Pairs over one round trip, or why there are none."""

    stages: int
    rtt_ms: float
    pairs: Sequence[TokenPair] = ()
    failure: str = ""

    @property
    def ours_ms(self) -> float | None:
        """Median."""
        return median(pair.ours_ms for pair in self.pairs) if self.pairs else None

    @property
    def vllm_ms(self) -> float | None:
        """Median."""
        return median(pair.vllm_ms for pair in self.pairs) if self.pairs else None


def split_layers(stages: int) -> str:
    """As evenly as it goes, the first stages having the more."""
    return ",".join(str(LAYERS // stages + (stage < LAYERS % stages)) for stage in range(stages))


def measure_pipelines(
    stages: int, *, pairs: int, tokens: int, seconds: float, say: Callable[[str], None]
) -> Iterator[PipelineTurns]:
    """Both pipelines over each round trip in turn, the same prompt for both; vLLM stands still while ours computes.
    Yields one with its reason for each round trip that could not be measured. Raises WanError."""
    names = [f"stage{number}" for number in range(stages)]
    scenario = Scenario(boxes={name: WanBox() for name in names}, default=WanPair(rtt_ms=RTTS_MS[0]))
    until = time.monotonic() + seconds
    left = list(RTTS_MS)
    with EmulatedWan(scenario, kind="tun") as wan, ExitStack() as stack:
        try:
            # vLLM's are started last: they compute a little even when nothing is asked of them.
            ours = _start_ours(wan, names, stack)
            theirs = _start_vllm(wan, names, stack)
            say(f"{stages} stages of both are up")
            while left:
                for a, b in combinations(names, 2):
                    wan.set_pair(a, b, rtt_ms=left[0])
                found = _take_pairs(ours, theirs, pairs, tokens, until)
                turns = PipelineTurns(stages, left.pop(0), found)
                say(
                    f"{stages} stages, {turns.rtt_ms:g} ms: ours {turns.ours_ms:.1f}, vLLM {turns.vllm_ms:.1f} ms/token"
                )
                yield turns
        except PeerFailed as error:
            say(f"{stages} stages: {error}")
            yield from (PipelineTurns(stages, rtt_ms, failure=str(error)) for rtt_ms in left)


def _start(wan: EmulatedWan, names: Sequence[str], module: str, port: int, stage: int, stack: ExitStack) -> PeerProgram:
    hosts = [wan.address(name) for name in names]
    site = WanSite(wan, names[stage], names[stage])
    argv = [sys.executable, "-m", module, str(stage), split_layers(len(names)), str(port), *hosts]
    return stack.enter_context(PeerProgram(site, "send", argv, {"GLOO_SOCKET_IFNAME": site.device}))


def _start_ours(wan: EmulatedWan, names: Sequence[str], stack: ExitStack) -> PeerProgram:
    """The head of ours: the other stages first, which it dials."""
    later = [_start(wan, names, OURS, OUR_PORT, stage, stack) for stage in range(1, len(names))]
    for program in later:
        _answer(program, START_S, "a stage of ours")
    head = _start(wan, names, OURS, OUR_PORT, 0, stack)
    _answer(head, START_S, "our head")
    return head


def _start_vllm(wan: EmulatedWan, names: Sequence[str], stack: ExitStack) -> list[PeerProgram]:
    """All stages of vLLM's, the head first."""
    programs = [_start(wan, names, VLLM, VLLM_PORT, stage, stack) for stage in range(len(names))]
    _answer(programs[0], START_S, "vLLM's pipeline")
    return programs


def _answer(program: PeerProgram, seconds: float, whose: str) -> dict[str, Any]:
    try:
        return program.answer(seconds)
    except PeerFailed as error:
        raise PeerFailed(f"{whose}: {error}") from error


def _take_pairs(
    ours: PeerProgram, theirs: Sequence[PeerProgram], pairs: int, tokens: int, until: float
) -> list[TokenPair]:
    """A first pair, not counted, warms both. At least one is taken, and no other after `until`."""
    rng = random.Random(1)
    found: list[TokenPair] = []
    for _ in range(1 + pairs):
        order = {"prompt": [rng.randrange(1, WORDS) for _ in range(PROMPT_TOKENS)], "count": tokens}
        for program in theirs:
            program.pause()
        ours.tell(order)
        our_answer = _answer(ours, ANSWER_S, "our head")
        for program in theirs:
            program.go_on()
        theirs[0].tell(order)
        answer = _answer(theirs[0], ANSWER_S, "vLLM's pipeline")
        same = our_answer["tokens"] == answer["tokens"]
        found.append(TokenPair(our_answer["ms_per_token"], answer["ms_per_token"], same))
        if len(found) > 1 and time.monotonic() >= until:
            break
    return found[1:]
