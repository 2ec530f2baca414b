"""`p2pserve demo --models`: one box that serves two models from one process, and two clients that ask at once.

demo --- fork server --- an engine for each model     (what the answers are compared with)
    |--- bootstrap
    `--- join --model bundled --model bundled-prose --- fork server --- one process, two engines
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Final, final

import msgspec
import trio
from rich.console import Console
from rich.table import Table

from ...coordinator.names import name_of
from ...node.box.hardware import probe
from ...node.box.start_checks import require_engine
from ...node.engine import protocol
from ...node.engine.agent_side.fork_server import open_fork_server
from ...node.messages import Status
from ...node.models import BUNDLED_MODELS, open_model
from ...node.models.text import TextModel
from ..actions.status_view import open_console
from ..client import AsyncClient
from ..requests import Generation
from .box import KV_CACHE_MIB, ON_LOOPBACK, DemoBox, open_box
from .demo import CODE_CHARACTERS, READ_LINES, STACK, describe_timeout, refuse_options
from .report import Watcher, agreeing
from .running import run_in_time
from .single_engine import SingleEngine

POLL_S: Final = 0.3
WIDTH: Final = 80
INDENT: Final = "    "
CODE: Final = "bundled"
PROSE: Final = "bundled-prose"
TEMPERATURE: Final = 0.6  # so small a model repeats itself if the likeliest token is taken each time
SEED: Final = 1
SHOWN_CHARACTERS: Final = 150  # of a prompt's end
CHAPTERS: Final = ("persuasion", "pride_and_prejudice")
CHAPTER_CHARACTERS: Final = 1400


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the box, beside that of an engine of the model's own. `prompt_end`: the last of the prompt."""

    client: int
    model: str
    prompt_end: str
    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    tpot_s: float
    tokens_agreeing: int
    identical_to_own_engine: bool


class ModelsDemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run found out. `services`: by the models' names; `engine_pids`: of the processes that their engines
    are in."""

    ok: bool
    problems: tuple[str, ...]
    services: dict[str, str]
    engine_pids: tuple[int, ...]
    answers: tuple[ModelAnswer, ...]
    asking_s: float
    engines_ready_s: float
    elapsed_s: float
    peak_memory_mib: float


@dataclass(frozen=True, slots=True)
class Question:
    """What one client asks one model for."""

    client: int
    model: str
    prompt: str


def run_models_demo(arguments: SimpleNamespace) -> int:
    """Run the command: 0 when everything worked, 1 when not, 130 when interrupted."""
    logging.disable(logging.CRITICAL if not arguments.debug else logging.NOTSET)
    refuse_options(arguments, ("nodes", "prompt", "codec", "model"), "--models")
    require_engine(probe(), os.environ)
    as_json = arguments.format == "json"
    console = open_console(stderr=as_json)
    report = trio.run(ModelsDemo(arguments.max_tokens, arguments.timeout_s, console).run)
    if report is None:
        return 130
    if as_json:
        print(json.dumps(msgspec.to_builtins(report)))
    else:
        show_models_report(report, console)
    return 0 if report.ok else 1


def questions() -> list[Question]:
    """Two of each client, one after the other: beginnings of texts that the models have not read."""
    source = Path(heapq.__file__).read_text("utf-8")
    code = [source[:CODE_CHARACTERS] + READ_LINES, source[CODE_CHARACTERS : 2 * CODE_CHARACTERS] + STACK]
    folder = BUNDLED_MODELS[PROSE] / "held_out"
    chapters = [(folder / f"{name}.txt").read_text("utf-8")[:CHAPTER_CHARACTERS] for name in CHAPTERS]
    prose = [chapter[: chapter.rindex(" ")] for chapter in chapters]  # as far as whole words go
    return [Question(1, CODE, prompt) for prompt in code] + [Question(2, PROSE, prompt) for prompt in prose]


@final
class ModelsDemo:
    """One run. `stage` says what it is doing, for the error when time runs out."""

    def __init__(self, max_tokens: int, timeout_s: float, console: Console) -> None:
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._console = console
        self._stage = "starting"
        self._started = time.monotonic()
        self._models = {name: open_model(name) for name in (CODE, PROSE)}

    async def run(self) -> ModelsDemoReport | None:
        """Run to the end; None when interrupted. Raises DemoFailed and what the network raises."""
        return await run_in_time(
            self._run,
            self._timeout_s,
            say=self._say,
            explain=lambda: describe_timeout(self._timeout_s, self._stage, "--models "),
        )

    async def _run(self) -> ModelsDemoReport:
        asked = questions()
        async with open_box() as box:
            self._stage = "the bootstrap and the box start"
            await box.start_fork_server(1)
            bootstrap = await box.start_bootstrap("raw")
            self._say(f"bootstrap: {name_of(bootstrap.peer)} at {bootstrap.address}")
            options = ["join", "--threads", "1", "--kv-cache-mib", str(len(self._models) * KV_CACHE_MIB)]
            options += [word for name in self._models for word in ("--model", name)]
            await box.start_elsewhere("1", options, listen=ON_LOOPBACK, token=bootstrap.tokens["worker"], inside=list)
            self._say("one box joins, with two models; it imports vLLM and loads both, which takes the longest")
            token = bootstrap.tokens["client"]
            async with AsyncClient(token) as first, AsyncClient(token) as second:
                self._stage = "the engines start"
                pids = await self._wait_ready(first)
                engines_ready_s = self._elapsed()
                self._stage = "both models answer"
                self._say("two clients ask, one for each model, both at once")
                began = time.monotonic()
                answers = await self._ask_both({1: first, 2: second}, asked)
                asking_s = time.monotonic() - began
            self._stage = "an engine of each model's own answers"
            self._say("the box leaves; an engine of each model's own, without a network, is asked for the same")
            left = await box.leave()
            alone = await self._ask_alone(box, asked)
            found = [_answer_of(*each) for each in zip(asked, answers, alone, strict=True)]
            problems = find_problems(found, pids)
            if not left:
                problems = (*problems, "not every node left in order")
            return ModelsDemoReport(
                ok=not problems,
                problems=problems,
                services={name: model.info.service for name, model in self._models.items()},
                engine_pids=pids,
                answers=tuple(found),
                asking_s=asking_s,
                engines_ready_s=engines_ready_s,
                elapsed_s=self._elapsed(),
                peak_memory_mib=box.peak_memory_mib,
            )

    async def _wait_ready(self, client: AsyncClient) -> tuple[int, ...]:
        """Until both models can be asked; the processes of their engines."""
        watcher = Watcher()
        while True:
            status = await client.status()
            for line in watcher.on_status(status):
                self._say(line)
            ready = _ready_engines(status)
            if ready.keys() >= {model.info.service for model in self._models.values()}:
                pids = tuple(sorted({*ready.values()}))
                self._say(f"both engines are in one process, {pids[0]}" if len(pids) == 1 else f"processes: {pids}")
                return pids
            await trio.sleep(POLL_S)

    async def _ask_both(self, clients: dict[int, AsyncClient], asked: list[Question]) -> list[Generation]:
        """Each client's questions one after the other, those of all clients at the same time."""
        answers: dict[Question, Generation] = {}

        async def ask(number: int) -> None:
            for question in asked:
                if question.client == number:
                    answers[question] = await clients[number].generate(
                        question.prompt,
                        service=question.model,
                        max_tokens=self._max_tokens,
                        temperature=TEMPERATURE,
                        seed=SEED,
                    )
                    self._say(f"client {number} has an answer of {question.model}")

        async with trio.open_nursery() as nursery:
            for number in clients:
                nursery.start_soon(ask, number)
        return [answers[question] for question in asked]

    async def _ask_alone(self, box: DemoBox, asked: list[Question]) -> list[tuple[int, ...]]:
        """One request after the other, each to its model's engine in a process of its own."""
        channel = box.take_channel()
        async with open_fork_server(log=None, threads=1, channel=channel.detach()) as server:
            engines = {}
            for name, model in self._models.items():
                single = SingleEngine()
                config = protocol.EngineConfig(model=str(model.folder), kv_cache_mib=KV_CACHE_MIB, threads=1)
                engines[name] = single, await server.start_engine(config, single.on_message)
            answers = []
            sampling = protocol.Sampling(max_tokens=self._max_tokens, temperature=TEMPERATURE, seed=SEED)
            for question in asked:
                single, link = engines[question.model]
                tokens = TextModel(self._models[question.model].folder).encode(question.prompt)
                answers.append(await single.ask(link, tuple(tokens), sampling))
            return answers

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _say(self, line: str) -> None:
        self._console.print(f"{self._elapsed():5.1f} s  {line}")


def _ready_engines(status: Status) -> dict[str, int]:
    """The process of each service's engine that is ready."""
    found = {}
    for node in status.nodes:
        advert = node.advert
        if advert is None or advert.model is None or advert.engine is None or advert.engine.state != "ready":
            continue
        found[advert.model.service] = advert.engine.pid
    return found


def _answer_of(question: Question, answer: Generation, alone: tuple[int, ...]) -> ModelAnswer:
    figures = answer.figures
    assert figures is not None  # a gateway sends them with the end of every answer it has routed
    return ModelAnswer(
        client=question.client,
        model=question.model,
        prompt_end=_end_of(question.prompt),
        text=answer.text,
        finish=answer.finish,
        prompt_tokens=figures.prompt_tokens,
        completion_tokens=figures.completion_tokens,
        ttft_s=figures.ttft_s,
        tpot_s=figures.tpot_s,
        tokens_agreeing=agreeing(answer.tokens, alone),
        identical_to_own_engine=answer.tokens == alone,
    )


def find_problems(answers: list[ModelAnswer], pids: tuple[int, ...]) -> tuple[str, ...]:
    """What did not go as it should have."""
    found = []
    if len(pids) != 1:
        found.append(f"the engines are in {len(pids)} processes")
    for answer in answers:
        if answer.finish not in ("stop", "length") or not answer.completion_tokens:
            found.append(f"{answer.model}: ended with {answer.finish!r} after {answer.completion_tokens} tokens")
        if not answer.identical_to_own_engine:
            found.append(f"{answer.model}: parts from an engine of its own after {answer.tokens_agreeing} tokens")
    return tuple(found)


def show_models_report(report: ModelsDemoReport, console: Console) -> None:
    """Answers and figures for people, at `WIDTH` columns."""
    for answer in report.answers:
        console.print(f"\nclient {answer.client} to {answer.model}: ...")
        for line in fold_lines(answer.prompt_end, INDENT):
            console.print(line)
        console.print("answer:")
        begun = answer.prompt_end[len(answer.prompt_end.rstrip(" ")) :]  # what the answer's first line begins with
        text = answer.text if "\n" in answer.prompt_end else answer.text.lstrip(" ")  # of code, blanks say something
        for line in fold_lines((begun + text).strip("\n"), INDENT):
            console.print(line)
    console.print()
    console.print(_table(report.answers))
    same = sum(answer.identical_to_own_engine for answer in report.answers)
    console.print(f"{same} of {len(report.answers)} answers are identical to those of an engine of the model's own")
    console.print(f"all were asked and answered in {report.asking_s:.1f} s")
    console.print(f"took {report.elapsed_s:.1f} s and {report.peak_memory_mib / 1024:.2f} GiB at most")
    for problem in report.problems:
        console.print(f"PROBLEM: {problem}")
    console.print("everything worked" if report.ok else "not everything worked")


def fold_lines(text: str, indent: str) -> list[str]:
    """Lines of at most `WIDTH` columns; one that is short enough stays as it is."""
    lines = []
    for line in text.splitlines():
        parts = [line] if len(indent + line) <= WIDTH else textwrap.wrap(line, WIDTH - len(indent))
        lines += [f"{indent}{part}".rstrip() for part in parts]
    return lines


def _end_of(prompt: str) -> str:
    """The last of a prompt, from the beginning of a line or a word on."""
    end = prompt[-SHOWN_CHARACTERS:]
    return end[end.find("\n") :].strip("\n") if "\n" in end else end[end.find(" ") + 1 :]


def _table(answers: tuple[ModelAnswer, ...]) -> Table:
    headers = ("client", "model", "tokens in + out", "TTFT", "TPOT", "as an engine of its own")
    table = Table(*headers, box=None, pad_edge=False, header_style="bold")
    for answer in answers:
        table.add_row(
            str(answer.client),
            answer.model,
            f"{answer.prompt_tokens} + {answer.completion_tokens}",
            f"{answer.ttft_s * 1000:.0f} ms",
            f"{answer.tpot_s * 1000:.1f} ms",
            f"{answer.tokens_agreeing} of {answer.completion_tokens} tokens",
        )
    return table
