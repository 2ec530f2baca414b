"""One network for each policy and round: boxes with a vLLM engine each, the same requests for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan, nan
from typing import Final

import msgspec
import trio

from ...coordinator import Phase
from ..client import AsyncClient
from ..demo.box import DemoBox, open_box
from ..demo.report import covers
from ..errors import DemoFailed
from ..live.network import measure_cores
from ..requests import new_request_id
from .workloads import ContestRequest

Say = Callable[[str], None]
PLAN_S: Final = 90.0
POLL_S: Final = 0.3
SETTLE_S: Final = 6.0  # in which boxes measure their links
WARM_UP: Final = 12  # requests that nobody counts
CODEC: Final = "raw"  # with which answers are those of one engine
KV_CACHE_MIB: Final = 128  # 16,384 tokens: all that is asked about at once, on each box
FETCHED_BYTES: Final = 1_000_000
"""A prefix that is fetched has several times as much, a token that its holder computes beside it a hundredth."""


class ContestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a request: seconds, tokens, and KV that came to where it was decoded. `asked_at`: seconds after the
    workload's beginning. `cached_tokens` of its prompt were computed for another request; `fetched`: their KV came from
    another box; `late`: it should have."""

    asked_at: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int
    moved_bytes: int
    fetched: bool
    late: bool
    tokens: tuple[int, ...]


async def run_policy(
    policy: str, boxes: int, workloads: Sequence[Sequence[ContestRequest]], say: Say
) -> tuple[list[list[ContestAnswer]], tuple[float, float]]:
    """The answers to each workload in turn, in a network of its own; cores that were busy meanwhile, and those with it.
    Raises DemoFailed or ClientError."""
    async with open_box(watch_memory=False) as box:
        await box.start_fork_server(boxes)
        bootstrap = await box.start_bootstrap(CODEC)
        async with AsyncClient(bootstrap.tokens["client"]) as client:
            await _join(box, client, bootstrap.tokens["leader"], boxes, policy)
            await _warm_up(client)
            found = []
            with measure_cores(box) as cores:
                for requests in workloads:
                    say(f"{policy}: {len(requests)} requests")
                    found.append(await _replay(client, requests))
            return found, (cores[0], cores[1])


async def _join(box: DemoBox, client: AsyncClient, token: str, boxes: int, policy: str) -> None:
    options = ["--model", "bundled", "--codec", CODEC, "--threads", "1", "--routing", policy]
    options += ["--kv-cache-mib", str(KV_CACHE_MIB)]
    # Prefixes are fetched to boxes that serve a request whole; a plan may pair those that prefill with others.
    phases = (Phase.MIXED,)
    with trio.move_on_after(PLAN_S):
        peers = frozenset((await box.join_all(boxes, token, options, phases)).values())
        while not covers(await client.status(), peers):  # noqa: ASYNC110 (seconds, of other processes)
            await trio.sleep(POLL_S)
        return
    raise DemoFailed(f"no plan with all {boxes} boxes after {PLAN_S:g} s")


async def _warm_up(client: AsyncClient) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(WARM_UP):
            nursery.start_soon(
                _ask, client, ContestRequest(0.0, f"def warm_up_{number}():\n" * 20, 4), new_request_id()
            )
    await trio.sleep(SETTLE_S)


async def _replay(client: AsyncClient, requests: Sequence[ContestRequest]) -> list[ContestAnswer]:
    answers: dict[int, ContestAnswer] = {}
    began = trio.current_time()
    salt = new_request_id()  # of all: what was asked before is in no cache

    async def ask(number: int, request: ContestRequest) -> None:
        await trio.sleep_until(began + request.at)
        answers[number] = await _ask(client, request, salt)

    async with trio.open_nursery() as nursery:
        for number, request in enumerate(requests):
            nursery.start_soon(ask, number, request)
    return [answers[number] for number in range(len(requests))]


async def _ask(client: AsyncClient, request: ContestRequest, salt: str) -> ContestAnswer:
    asked = trio.current_time()
    first = last = nan
    tokens: list[int] = []
    stream = client.generate(
        request.prompt, stream=True, max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True, cache_salt=salt
    )
    async with stream:
        async for delta in stream:
            if delta.tokens:
                last = trio.current_time()
                first = last if isnan(first) else first
                tokens += delta.tokens
        figures = stream.result.figures
    if figures is None or len(tokens) != request.max_tokens:
        raise DemoFailed(f"a request for {request.max_tokens} tokens was answered with {len(tokens)}")
    moved = figures.transfer.raw_bytes if figures.transfer is not None else 0
    fetched = moved >= FETCHED_BYTES
    return ContestAnswer(
        asked_at=request.at,
        ttft_s=first - asked,
        tpot_s=(last - first) / max(1, len(tokens) - 1),
        e2e_s=last - asked,
        prompt_tokens=figures.prompt_tokens,
        cached_tokens=figures.cached_tokens,
        moved_bytes=moved,
        fetched=fetched,
        late=figures.prefill_node is not None and not moved,
        tokens=tuple(tokens),
    )
