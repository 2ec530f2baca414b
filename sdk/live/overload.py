"""What one client can take of another: latency beside thousands of requests, and a gateway's memory.

    python -m p2pserve.sdk.overload --format json

Starts an emulated node on this machine, which is the gateway too, and asks it for one answer after the other: first
undisturbed, then beside a client in another process that asks for thousands at once. Then another client sends prompts
of megabytes. Exits with 1 where the median answer takes longer than `--most` times what it takes undisturbed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import trio

from ..client import AsyncClient
from ..demo.box import DemoBox, open_box
from ..demo.report import covers
from ..environment import BOOTSTRAP
from ..errors import DemoFailed
from ..failures import explain
from ..requests import new_request_id

Say = Callable[[str], None]
PLAN_S: Final = 60.0
POLL_S: Final = 0.2
FLOOD_S: Final = 1.0  # from the first request of a flood until something is measured beside it
LONG_WORD: Final = "def f(x): return x + 1\n"  # of which the bundled tokenizer makes many tokens
MOST: Final = 2.0


class OverloadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One node with these emulated GPUs. `requests` at once of one client, tokens of their prompts and answers, and of
    those of the other client, which asks `rounds` times; `long_prompts` of so many bytes."""

    cards: str = "1xA40"
    model: str = "qwen2.5-14b"
    requests: int = 5000
    prompt: int = 128
    output: int = 64
    own_prompt: int = 128
    own_output: int = 32
    rounds: int = 10
    long_prompts: int = 24
    long_bytes: int = 3_000_000


class OverloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of whole answers and to first tokens, medians and the worst; MiB of the gateway's process."""

    settings: OverloadSettings
    undisturbed_s: float
    undisturbed_ttft_s: float
    beside_s: float
    beside_ttft_s: float
    worst_s: float
    ratio: float
    memory_mib: float
    flood_growth_mib: float
    long_prompts_growth_mib: float


async def run_overload(settings: OverloadSettings, say: Say) -> OverloadReport:
    """Measure. Raises DemoFailed or ClientError."""
    async with open_box(watch_memory=False) as box:
        await box.start_fork_server(1, backend="emulated")
        bootstrap = await box.start_bootstrap("kv4")
        token = bootstrap.tokens["client"]
        async with AsyncClient(token) as client:
            await _start(box, client, bootstrap.tokens["leader"], settings)
            await _answers(client, settings, 3)  # warm-up
            say(f"undisturbed: {settings.rounds} answers of {settings.own_output} tokens, one after the other")
            alone = await _answers(client, settings, settings.rounds)
            before = box.node_memory_mib()
            say(f"the same beside {settings.requests} requests of another client")
            async with _flooding(token, settings.requests, " x", settings.prompt, settings.output):
                await trio.sleep(FLOOD_S)
                beside = await _answers(client, settings, settings.rounds)
            flooded = box.node_memory_mib()
            say(f"{settings.long_prompts} prompts of {settings.long_bytes} bytes")
            words = settings.long_bytes // len(LONG_WORD)
            async with _flooding(token, settings.long_prompts, LONG_WORD, words, 1):
                await trio.sleep(FLOOD_S)
                await _answers(client, settings, max(3, settings.rounds // 2))
            filled = box.node_memory_mib()
    whole, ttft = [end for _, end in beside], [first for first, _ in beside]
    undisturbed = median(end for _, end in alone)
    return OverloadReport(
        settings=settings,
        undisturbed_s=undisturbed,
        undisturbed_ttft_s=median(first for first, _ in alone),
        beside_s=median(whole),
        beside_ttft_s=median(ttft),
        worst_s=max(whole),
        ratio=median(whole) / undisturbed,
        memory_mib=before,
        flood_growth_mib=flooded - before,
        long_prompts_growth_mib=filled - flooded,
    )


async def _start(box: DemoBox, client: AsyncClient, token: str, settings: OverloadSettings) -> None:
    options = ["--emulate", settings.cards, "--model", settings.model, "--codec", "kv4"]
    with trio.move_on_after(PLAN_S):
        peers = frozenset((await box.join_all(1, token, options, ())).values())
        while not covers(await client.status(), peers):  # noqa: ASYNC110 (seconds, of other processes)
            await trio.sleep(POLL_S)
        return
    raise DemoFailed(f"no plan with the node after {PLAN_S:g} s")


async def _answers(client: AsyncClient, settings: OverloadSettings, count: int) -> list[tuple[float, float]]:
    """Ask one after the other: seconds to each first token, and to the end."""
    found = []
    for _ in range(count):
        began = first = trio.current_time()
        async with client.generate(
            " y" * settings.own_prompt, stream=True, max_tokens=settings.own_output, cache_salt=new_request_id()
        ) as stream:
            async for delta in stream:
                if delta.tokens and first == began:
                    first = trio.current_time()
        found.append((first - began, trio.current_time() - began))
    return found


@asynccontextmanager
async def _flooding(token: str, requests: int, word: str, words: int, max_tokens: int) -> AsyncIterator[None]:
    """A flood of requests for the length of the body."""
    options = {"--requests": requests, "--word": word, "--words": words, "--max-tokens": max_tokens}
    command = [
        sys.executable,
        "-m",
        "p2pserve.sdk.live.flood",
        *(str(each) for pair in options.items() for each in pair),
    ]
    process = await trio.lowlevel.open_process(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, BOOTSTRAP: token, "HOME": str(Path.home())},
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        if not await process.stdout.receive_some():
            raise DemoFailed("the client that was to ask for too much has not joined")
        await process.stdin.send_all(b"\n")
        yield
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


def show(found: OverloadReport) -> str:
    """For people."""
    asked = found.settings
    return (
        f"an answer takes {found.undisturbed_s:.2f} s, its first token {found.undisturbed_ttft_s:.3f} s\n"
        f"beside {asked.requests} requests of one client {found.beside_s:.2f} s ({found.ratio:.2f} times as long), "
        f"{found.worst_s:.2f} s at worst; its first token {found.beside_ttft_s:.3f} s\n"
        f"the gateway's process has {found.memory_mib:.0f} MiB, {found.flood_growth_mib:+.0f} by that, and "
        f"{found.long_prompts_growth_mib:+.0f} by {asked.long_prompts} prompts of {asked.long_bytes} bytes"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """0: nobody waits too long; 1: somebody does, or the run failed; 2: wrong input."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.sdk.overload", description=__doc__)
    default = OverloadSettings()
    for name in default.__struct_fields__:
        value = getattr(default, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value, help=f"default: {value}")
    parser.add_argument("--most", type=float, default=MOST, metavar="TIMES", help=f"default: {MOST:g}")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    given = vars(parser.parse_args(argv))
    most, form = given.pop("most"), given.pop("format")
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    try:
        found = trio.run(
            run_overload,
            OverloadSettings(**given),
            lambda line: print(f"{time.monotonic() - began:5.1f} s  {line}", file=sys.stderr),
        )
    except (Exception, KeyboardInterrupt) as error:
        explained = explain(error)
        if explained is None:
            raise
        print(f"error: {explained[1]}", file=sys.stderr)
        return explained[0]
    print(json.dumps(msgspec.to_builtins(found)) if form == "json" else show(found))
    return 0 if found.ratio <= most else 1
