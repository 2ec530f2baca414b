"""A request's life as scripts: every text file beside this one is a list of events, each followed
by what it brings about.

    0.10 tokens 1 7 8         <- at second 0.10, attempt 1: the decode replica has tokens 7 and 8
        show 7 8              <- what the machine asks for, in this order
        wake at 60            <- and when it wants to be woken, where that has changed

With REWRITE_SCRIPTS=1 in the environment the outputs are written anew, to be read before they are
kept.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import pytest

from p2pserve.coordinator.requests.machine import RequestMachine
from p2pserve.coordinator.requests.stalls import ExpectedTimes
from p2pserve.coordinator.requests.values import (
    Action,
    CancelTransfer,
    CancelWork,
    EndRequest,
    FindRoute,
    NoteStall,
    OpenDecode,
    OpenPrefill,
    PassFirstToken,
    Ready,
    RequestSettings,
    ShowTokens,
    Tokens,
)
from p2pserve.coordinator.routing.interface import Route

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))
FINISHES = frozenset({"stop", "length", "deadline"})


@dataclass
class ScriptedAnswer:
    """Tokens as numbers; `stops` ends it, and what comes with it is not shown."""

    left_at_first: int
    stops: int | None
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def left(self) -> int:
        return self.left_at_first - len(self.tokens)

    def take(self, tokens: Tokens, finish: str | None) -> ShowTokens | None:
        taken = list(tokens)[: self.left]
        if self.stops in taken:
            taken, finish = taken[: taken.index(self.stops)], "stop"
        self.tokens += taken
        self.finish = finish or (None if self.left else "length")
        return ShowTokens("", tuple(taken)) if taken else None


class Interpreter:
    """Runs one script. The number of an engine is how often its replica has been restarted so far."""

    def __init__(self) -> None:
        self.machine: RequestMachine | None = None
        self.wake_at = inf
        self.engines: dict[str, int] = {}

    def run(self, line: str) -> Iterator[str]:
        """The outputs of one event."""
        at, name, *words = line.split()
        now = float(at)
        ready = self.start(words, now) if name == "request" else self.event(name, words, now)
        if ready is None:
            return
        yield from map(describe, ready)
        assert self.machine is not None
        if self.machine.wake_at != self.wake_at:
            self.wake_at = self.machine.wake_at
            yield "wake never" if self.wake_at == inf else f"wake at {self.wake_at:g}"

    def start(self, words: list[str], now: float) -> Ready:
        given = dict(word.split("=") for word in words)
        answer = ScriptedAnswer(int(given["max"]), int(given["stop"]) if "stop" in given else None)
        if "so-far" in given:
            answer.take([int(token) for token in given["so-far"].split(",")], None)
        self.machine = RequestMachine(
            answer,
            service="tiny",
            prompt_tokens=int(given["prompt"]),
            now=now,
            deadline=float(given.get("deadline", "60")),
            settings=RequestSettings(first_token_at_prefill=given.get("first-token", "prefill") == "prefill"),
        )
        return self.machine.start(now)

    def event(self, name: str, words: list[str], now: float) -> Ready | None:
        machine, rest = self.machine, " ".join(words)
        assert machine is not None, "a script begins with `request`"
        if name == "restarted":  # the replica's engine, outside of the machine
            self.engines[rest] = self.engines.get(rest, 0) + 1
            return None
        alone: dict[str, Callable[[], Ready]] = {
            "routed": lambda: machine.routed(route_of(words), now, expected_of(words)),
            "not-routed": lambda: machine.not_routed(rest, now, is_hopeful=False),
            "not-yet-routed": lambda: machine.not_routed(rest, now, is_hopeful=True),
            "network-changed": lambda: machine.network_changed(now),
            "peer-lost": lambda: machine.peer_lost(rest, self.engines.get(rest, 0), now),
            "peer-hung": lambda: machine.peer_hung(rest, now),
            "peer-leaves": lambda: machine.peer_hung(rest, now, leaves=True),
            "peer-answers": lambda: machine.peer_answers(rest, now),
            "wake": lambda: machine.wake(now),
            "stop": lambda: machine.stop(now),
        }
        return alone[name]() if name in alone else self.of_attempt(machine, name, words, now)

    def of_attempt(self, machine: RequestMachine, name: str, words: list[str], now: float) -> Ready:
        number, words = int(words[0]), words[1:]
        tokens = tuple(int(word) for word in words if word.isdigit())
        finish = words[-1] if words and words[-1] in FINISHES else None
        match name:
            case "decode-opened":
                return machine.decode_opened(number, now, receives=words != ["without", "KV"])
            case "open-failed":
                engine = self.engines.get(words[0], 0)
                return machine.open_failed(number, words[0], " ".join(words[1:]), engine, now)
            case "first-token":
                return machine.first_token(number, tokens, finish, now)
            case "tokens":
                return machine.decoded(number, tokens, finish, now)
            case "cached-tokens":
                return machine.decoded(number, tokens[1:], finish, now, cached=tokens[0])
            case "tokens-since":
                return machine.decoded(number, tokens, finish, now, first_at=float(words[0]))
            case "decode-failed":
                return machine.decode_failed(number, " ".join(words), 0, now)
            case "refused":
                return machine.refused(number, " ".join(words), now)
            case "prefill-ended":
                return machine.prefill_ended(number, " ".join(words), 0, now)
        raise AssertionError(f"no event is called {name}")


def route_of(words: list[str]) -> Route:
    """`d1`, or `p1 d1 10`."""
    words = [word for word in words if not word.startswith("expect=")]
    if len(words) == 1:
        return Route(prefill=None, decode=words[0])
    return Route(prefill=words[0], decode=words[1], split=int(words[2]))


def expected_of(words: list[str]) -> ExpectedTimes:
    """`expect=0.5,0.05`: so many seconds to the first token and from token to token."""
    for word in words:
        if word.startswith("expect="):
            return ExpectedTimes(*map(float, word.removeprefix("expect=").split(",")))
    return ExpectedTimes()


def describe(action: Action) -> str:
    match action:
        case FindRoute(tokens, blamed, leaving):
            without = "".join(f" without {replica}:{engine}" for replica, engine in blamed.items())
            return f"find route for {tokens} tokens{without}{f' away from {leaving}' if leaving else ''}"
        case OpenDecode(attempt, decode, prefill, split, first_token):
            kv = f": KV of {split} tokens from {prefill}" if prefill is not None else ""
            return f"open decode {attempt} at {decode}{kv}{', and the first token' if first_token else ''}"
        case OpenPrefill(attempt, prefill, split, first_token):
            return f"open prefill {attempt} at {prefill}: {split} tokens{', and one more' if first_token else ''}"
        case ShowTokens(_, tokens):
            return f"show {' '.join(map(str, tokens))}"
        case PassFirstToken(attempt, decode, token):
            return f"pass first token {attempt} to {decode}: {token}"
        case CancelTransfer(attempt, decode, reason):
            return f"cancel transfer {attempt} at {decode}: {reason}"
        case CancelWork(attempt, replica):
            return f"cancel work {attempt} at {replica}"
        case NoteStall(replica):
            return f"note a stall of {replica}"
        case EndRequest(finish, error, record):
            if record is None:
                return f"end {finish}, never routed{': ' + error if error else ''}"
            route = record.decode if record.prefill is None else f"{record.prefill} {record.decode}"
            times = f"ttft {record.ttft_s:.3g} tpot {record.tpot_s:.3g} e2e {record.e2e_s:.3g}"
            more = f" cached {record.cached_tokens}" if record.cached_tokens else ""
            more += "".join(f"; {what}" for what in record.recovered)
            return f"end {finish} at {route}, attempts {record.attempts}, {times}{more}{': ' + error if error else ''}"


def rewritten(text: str) -> str:
    """The script with the outputs that its events have now."""
    interpreter, lines = Interpreter(), []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [f"    {output}" for output in interpreter.run(line)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_a_script_runs_as_it_is_written(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = rewritten(text)
    if os.environ.get("REWRITE_SCRIPTS"):
        path.write_text(found, encoding="utf-8")
    assert found.splitlines() == text.splitlines()


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 8
