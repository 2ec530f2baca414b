"""What a client sees when a box that works for it is killed, or hangs.

    python -m p2pserve.sdk.losses --format json

Starts emulated nodes on this machine: one that prefills, which is the gateway, and two that decode. In the middle of an
answer it kills the box that decodes (SIGKILL) or stops it (SIGSTOP): the longest gap between two tokens. Kills
or stops the box that prefills, just before a request: the seconds to its first token. `gateway`: the box is the gateway
of a client of the SDK. `engine`: only the engine process is stopped. `leaves`: the box that decodes is told to leave
(SIGTERM) and sends its KV to the box that goes on; beside `decode killed`, where prompt and answer are computed again.
`busy` streams beside three busy loops, and counts the answers that were moved to another box without need.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from statistics import median
from typing import Final, final

import msgspec
import trio

from ...bootstrap import Address, Identity, JoinToken, PeerId, Role
from ...bootstrap.network import Network
from ...coordinator import Phase
from ...node.messages import AnswerUpdate, Generate, NodeStatus, RequestFigures, Status, StatusQuery
from ...node.methods import ANSWER, GENERATE, STATUS
from ..demo.box import DemoBox, open_box
from ..errors import DemoFailed
from ..failures import explain
from ..requests import TextDelta, new_request_id
from ..session import Session, open_session

Say = Callable[[str], None]
PARTS: Final = ("decode", "prefill", "gateway", "engine", "leaves", "busy")
PHASES: Final = (Phase.PREFILL, Phase.DECODE, Phase.DECODE)
WHOLE_S: Final = 60.0
POLL_S: Final = 0.1
ASK_S: Final = 5.0
ANSWER_S: Final = 120.0
ANYWHERE: Final = Address("127.0.0.1", 0)
BUSY_LOOPS: Final = 3
SPARE: Final = 12  # boxes that may be lost for each time that everything is measured
SETTLED_S: Final = 2.0  # after a box has come, for links and adverts

Figures = dict[str, float | int]


def make_request(settings: LossSettings) -> Generate:
    """One of the lengths of the settings; nothing of its prompt is in any cache."""
    request = new_request_id()
    return Generate(request=request, prompt=" y" * settings.prompt, max_tokens=settings.output, cache_salt=request)


class LossSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Boxes with these emulated GPUs. Tokens of prompts and answers; each loss is measured `times` times. `lost_at`:
    tokens of the answer that have come when its box is lost; `drain_s`: for so long a box that leaves may finish it,
    and its last third is to pass it on; `streams` beside busy loops, one after the other."""

    cards: str = "1xA40"
    model: str = "qwen2.5-14b"
    prompt: int = 256
    output: int = 160
    lost_at: int = 40
    times: int = 5
    streams: int = 10
    drain_s: float = 6.0


class Streamed(msgspec.Struct, frozen=True, kw_only=True):
    """One answer as its client saw it, in seconds."""

    ttft_s: float
    longest_gap_s: float
    figures: RequestFigures


@final
class Arrivals:
    """When the tokens of an answer came. `began`: when it was asked for."""

    def __init__(self, lost_at: int) -> None:
        self.began = 0.0
        self._lost_at = lost_at
        self._count = 0
        self._first = self._last = self._longest = 0.0

    def take(self, tokens: int, now: float) -> bool:
        """So many have come; whether it is time to lose a box."""
        if not tokens:
            return False
        before, self._count = self._count, self._count + tokens
        if before:
            self._longest = max(self._longest, now - self._last)
        else:
            self._first = now
        self._last = now
        return before < self._lost_at <= self._count

    def finish(self, figures: RequestFigures | None, wanted: int, error: str) -> Streamed:
        """That was all. Raises DemoFailed where it is not so many tokens."""
        if figures is None or self._count != wanted:
            raise DemoFailed(f"an answer ended after {self._count} of {wanted} tokens: {error}")
        return Streamed(ttft_s=self._first - self.began, longest_gap_s=self._longest, figures=figures)


@final
class Asker:
    """A client that chooses its gateway."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._inboxes: dict[str, trio.MemorySendChannel[AnswerUpdate]] = {}
        network.on_notice(ANSWER, self._on_update)

    async def status(self, peer: PeerId) -> Status:
        """The network as this node sees it."""
        return await self._network.request(peer, STATUS, StatusQuery(), ASK_S)

    async def stream(
        self, gateway: PeerId, settings: LossSettings, *, lose: Callable[[], None] | None = None
    ) -> Streamed:
        """One answer; `lose` is called when `lost_at` tokens have come."""
        body = make_request(settings)
        send, receive = trio.open_memory_channel[AnswerUpdate](float("inf"))
        self._inboxes[body.request] = send
        arrivals, error = Arrivals(settings.lost_at), ""
        figures: RequestFigures | None = None
        arrivals.began = trio.current_time()
        with trio.fail_after(ANSWER_S):
            await self._network.request(gateway, GENERATE, body, ASK_S)
            async for update in receive:
                if arrivals.take(len(update.tokens), trio.current_time()) and lose is not None:
                    lose()
                if update.finish is not None:
                    figures, error = update.figures, update.error
                    break
        return arrivals.finish(figures, settings.output, error)

    def _on_update(self, peer: PeerId, role: Role, update: AnswerUpdate) -> None:
        inbox = self._inboxes.get(update.request)
        if inbox is not None:
            inbox.send_nowait(update)


@asynccontextmanager
async def _open_asker(token: str) -> AsyncIterator[Asker]:
    from ...bootstrap.streams.libp2p_host import Libp2pTransport

    parsed, identity = JoinToken.parse(token), Identity.generate()
    network = Network(
        transport=Libp2pTransport(identity, None, ANYWHERE),
        identity=identity,
        token=token,
        network_key_public=parsed.network,
        role=Role.CLIENT,
        announce=ANYWHERE,
        bootstraps=parsed.bootstraps,
        rng=random.Random(),
    )
    asker = Asker(network)
    async with network:
        yield asker


@final
class _LossRun:
    """A network of three boxes, from which some are taken and put back."""

    def __init__(self, box: DemoBox, asker: Asker, bootstrap: PeerId, token: str, settings: LossSettings) -> None:
        self._box = box
        self._asker = asker
        self._bootstrap = bootstrap
        self._token = token
        self._settings = settings
        self._nodes = 0

    async def start(self) -> None:
        """The boxes, and one answer through each that decodes."""
        for phase in PHASES:
            await self._join(phase)
        await self._whole()
        for peer in await self._peers(Phase.DECODE):
            await self._asker.stream(peer, self._settings)

    async def lose_decode(self, number: signal.Signals, *, engine_only: bool = False) -> Streamed:
        """Lose the box that decodes an answer by this signal, and start another one. The gateway is the box that
        prefills."""
        gateway, reached = (await self._peers(Phase.PREFILL))[0], trio.Event()
        victims: list[NodeStatus] = []

        async def lose() -> None:
            await reached.wait()
            while not victims:
                running = [node for node in await self._nodes_of(Phase.DECODE) if _is_running(node)]
                victims.extend(running[:1])
            self._lose(victims[0], number, engine_only=engine_only)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            found = await self._asker.stream(gateway, self._settings, lose=reached.set)
            nursery.cancel_scope.cancel()
        if found.figures.attempts < 2:
            raise DemoFailed("a box was lost that had no part in an answer, or too late")
        await self._replace(victims[0])
        return found

    async def lose_prefill(self, number: signal.Signals, *, engine_only: bool = False) -> Streamed:
        """Lose the box that prefills, just before a request."""
        gateway, _ = await self._peers(Phase.DECODE)
        victim = await self._node((await self._peers(Phase.PREFILL))[0])
        self._lose(victim, number, engine_only=engine_only)
        found = await self._asker.stream(gateway, self._settings)
        await self._replace(victim)
        return found

    async def lose_gateway(self, session: Session, number: signal.Signals) -> Streamed:
        """Lose the box that is the gateway of an answer."""
        settings, arrivals = self._settings, Arrivals(self._settings.lost_at)
        victims: list[NodeStatus] = []
        nodes = {PeerId(node.peer): node for node in await self._nodes_of(None)}

        def take(delta: TextDelta) -> None:
            if arrivals.take(len(delta.tokens), trio.current_time()):
                victims.append(nodes[next(iter(session.asked))])
                self._lose(victims[0], number, engine_only=False)

        body = make_request(settings)
        arrivals.began = trio.current_time()
        generation = await session.generate(body, take)
        await self._replace(victims[0])
        return arrivals.finish(generation.figures, settings.output, "")

    async def undisturbed(self, count: int) -> list[Streamed]:
        """Answers, one after the other."""
        gateway, _ = await self._peers(Phase.DECODE)
        return [await self._asker.stream(gateway, self._settings) for _ in range(count)]

    def _lose(self, victim: NodeStatus, number: signal.Signals, *, engine_only: bool) -> None:
        agent, engine = self._pids(victim)
        if engine_only:
            self._box.signal(engine, number)
            return
        self._box.signal(agent, number)
        if number is signal.SIGTERM:
            return  # it needs its engine to the end
        with suppress(DemoFailed):  # it may have ended with its agent
            self._box.signal(engine, number)

    def _pids(self, node: NodeStatus) -> tuple[int, int]:
        """Of its agent, which may end from now on, and of its engine."""
        assert node.advert is not None
        assert node.advert.engine is not None
        return self._box.node_pid(node.peer), node.advert.engine.pid

    async def _replace(self, victim: NodeStatus) -> None:
        """Start another box for one that was lost."""
        for pid in self._pids(victim):
            if self._box.is_running(pid):
                self._box.signal(pid, signal.SIGKILL)
        assert victim.advert is not None
        assert victim.advert.phase is not None
        await self._join(victim.advert.phase)
        await self._whole()

    async def _join(self, phase: Phase) -> None:
        self._nodes += 1
        settings = self._settings
        options = ["--emulate", settings.cards, "--model", settings.model, "--codec", "kv4", "--phase", phase.value]
        await self._box.join(self._nodes, self._token, options, drain_s=settings.drain_s)

    async def _whole(self) -> None:
        """Wait until all boxes are in one plan, which all of them follow."""
        with trio.move_on_after(WHOLE_S):
            while not await self._is_whole():  # noqa: ASYNC110 (seconds, of other processes)
                await trio.sleep(POLL_S)
            await trio.sleep(SETTLED_S)
            return
        raise DemoFailed(f"the network was not whole after {WHOLE_S:g} s")

    async def _is_whole(self) -> bool:
        peers = [PeerId(node.peer) for node in await self._nodes_of(None)]
        seen = [await self._asker.status(peer) for peer in (self._bootstrap, *peers)]
        plans = [status.plan for status in seen]
        alive = [{node.peer for node in status.nodes if node.state == "alive"} for status in seen]
        return (
            len(peers) == len(PHASES)
            and plans[0] is not None
            and {replica.head for replica in plans[0].replicas} == set(peers)
            and all(plan == plans[0] for plan in plans)
            and all(each >= set(peers) for each in alive)
        )

    async def _peers(self, phase: Phase) -> list[PeerId]:
        return [PeerId(node.peer) for node in await self._nodes_of(phase)]

    async def _node(self, peer: PeerId) -> NodeStatus:
        return next(node for node in await self._nodes_of(None) if node.peer == peer)

    async def _nodes_of(self, phase: Phase | None) -> list[NodeStatus]:
        """The living boxes with a ready engine."""
        status = await self._asker.status(self._bootstrap)
        return [
            node
            for node in status.nodes
            if node.state == "alive"
            and node.advert is not None
            and node.advert.engine is not None
            and node.advert.engine.state == "ready"
            and (phase is None or node.advert.phase is phase)
        ]


async def run_losses(settings: LossSettings, parts: Sequence[str], say: Say) -> dict[str, Figures]:
    """Measure. Raises DemoFailed or NetworkError."""
    found: dict[str, Figures] = {}

    def note(name: str, figures: Figures) -> None:
        found[name] = figures
        say(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in figures.items()))

    async def measure(name: str, lose: Callable[[], Awaitable[Streamed]]) -> None:
        lost = []
        for _ in range(settings.times):
            lost.append(await lose())
            one = lost[-1]
            say(f"{name}: gap {one.longest_gap_s:.2f} s, ttft {one.ttft_s:.2f} s; {'; '.join(one.figures.recovered)}")
        note(name, _summarise(lost))

    async with open_box(watch_memory=False) as box:
        await box.start_fork_server(len(PHASES) + SPARE * settings.times, backend="emulated")
        bootstrap = await box.start_bootstrap("kv4")
        async with _open_asker(bootstrap.tokens["client"]) as asker:
            run = _LossRun(box, asker, PeerId(bootstrap.peer), bootstrap.tokens["worker"], settings)
            await run.start()
            note("undisturbed", _summarise(await run.undisturbed(settings.times)))
            if "busy" in parts:
                with _busy_loops():
                    streams = await run.undisturbed(settings.streams)
                moved = sum(each.figures.attempts > 1 or bool(each.figures.recovered) for each in streams)
                note("busy", {**_summarise(streams), "moved": moved})
            if "leaves" in parts:
                await measure("decode leaves", partial(run.lose_decode, signal.SIGTERM))
            for manner, number in (("stopped", signal.SIGSTOP), ("killed", signal.SIGKILL)):
                if "decode" in parts:
                    await measure(f"decode {manner}", partial(run.lose_decode, number))
                if "prefill" in parts:
                    await measure(f"prefill {manner}", partial(run.lose_prefill, number))
                if "gateway" in parts:
                    async with open_session(bootstrap.tokens["client"], None, WHOLE_S) as session:
                        await measure(f"gateway {manner}", partial(run.lose_gateway, session, number))
            if "engine" in parts:
                stop = signal.SIGSTOP
                await measure("decode engine stopped", partial(run.lose_decode, stop, engine_only=True))
                await measure("prefill engine stopped", partial(run.lose_prefill, stop, engine_only=True))
    return found


def _is_running(node: NodeStatus) -> bool:
    return node.advert is not None and node.advert.stats is not None and node.advert.stats.running > 0


def _summarise(streams: Sequence[Streamed]) -> Figures:
    gaps, ttft = [each.longest_gap_s for each in streams], [each.ttft_s for each in streams]
    return {
        "gap_s": median(gaps),
        "worst_gap_s": max(gaps),
        "ttft_s": median(ttft),
        "worst_ttft_s": max(ttft),
        "streams": len(streams),
    }


def _spin() -> None:
    while True:
        pass


@contextmanager
def _busy_loops() -> Iterator[None]:
    spawning = multiprocessing.get_context("spawn")
    loops = [spawning.Process(target=_spin, daemon=True) for _ in range(BUSY_LOOPS)]
    for each in loops:
        each.start()
    try:
        yield
    finally:
        for each in loops:
            each.terminate()
            each.join()


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured; 1: the run failed; 2: wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m p2pserve.sdk.losses", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = LossSettings()
    for name in default.__struct_fields__:
        value = getattr(default, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value, help=f"default: {value}")
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    given = vars(parser.parse_args(argv))
    parts, form = given.pop("parts"), given.pop("format")
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    said = sys.stderr if form == "json" else sys.stdout

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s  {line}", file=said, flush=True)

    try:
        found = trio.run(run_losses, LossSettings(**given), parts, say)
    except (Exception, KeyboardInterrupt) as error:
        explained = explain(error)
        if explained is None:
            raise
        print(f"error: {explained[1]}", file=sys.stderr)
        return explained[0]
    if form == "json":
        print(json.dumps(found))
    return 0


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if not set(parts) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} is not of {','.join(PARTS)}")
    return parts
