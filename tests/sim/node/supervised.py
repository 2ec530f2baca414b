"""Nodes with scripted engine processes on a virtual clock. Supervisors and the talk between stages are real; a process
in a pipeline ends when one at the other end of its pipes does."""

import itertools
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, PeerId
from p2pserve.coordinator import Stage
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineLink, EngineStartError
from p2pserve.node.methods import STAGE_OPEN
from p2pserve.node.models import ModelError
from p2pserve.node.replica.place import Place
from p2pserve.node.replica.stages import Stages, limits_of
from p2pserve.node.replica.supervisor import Supervisor
from p2pserve.node.replica.worker import Worker
from p2pserve.node.testing import MemoryExchange

SERVICE = "tiny"
LATENCY_S = 0.01
FORK_S = 0.5
LOAD_S = 2.0


async def elapse(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def stages(*peers: str) -> tuple[Stage, ...]:
    return tuple(Stage(peer=peer, tp=1, first_layer=i, last_layer=i + 1) for i, peer in enumerate(peers))


def opening(of: tuple[Stage, ...], stage: int, *pipes: protocol.PipeEnd) -> messages.StageOpen:
    limits = limits_of(protocol.EngineConfig(model="/model"))
    return messages.StageOpen(service=SERVICE, stages=of, stage=stage, pipes=pipes, limits=limits)


def ready(config: protocol.EngineConfig) -> protocol.EngineReady:
    head = config.stage == 0
    return protocol.EngineReady(
        pid=7,
        engine="scripted",
        device="cpu",
        dtype="float32",
        layers=1,
        kv_heads=1,
        head_dim=1,
        vocabulary=1,
        max_model_len=512 if head else 0,
        kv_tokens=1000 if head else 0,
        eos_tokens=(),
        load_s=0.0,
        tflops=1.0 if head else 0.0,
        memory_gbps=1.0 if head else 0.0,
    )


class Process:
    """An engine process, and the agent's link to it."""

    def __init__(self, config: protocol.EngineConfig) -> None:
        self.config = config
        self.ready: protocol.EngineReady | None = None
        self.gone = trio.Event()
        self.how = "ended"

    @property
    def running(self) -> bool:
        return self.ready is not None and not self.gone.is_set()

    def end(self, how: str) -> None:
        if not self.gone.is_set():
            self.how = how
            self.gone.set()

    def close(self) -> None:
        self.end("ended")

    async def wait_gone(self) -> str:
        await self.gone.wait()
        return self.how

    def exit_text(self) -> str:
        return self.how


@dataclass
class Box:
    """A node as far as its engine goes."""

    own: PeerId
    stages: Stages
    supervisor: Supervisor
    adverts: list[messages.EngineAdvert]
    used: list[tuple[Place, frozenset[bytes]]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)

    @property
    def state(self) -> str:
        return self.adverts[-1].state if self.adverts else ""

    @property
    def running(self) -> list[Process]:
        return [process for process in self.processes if process.running]


class World:
    """Some boxes, and what goes wrong there."""

    def __init__(self, nursery: trio.Nursery, *peers: str) -> None:
        self.nursery = nursery
        self.boxes: dict[PeerId, Box] = {}
        self.exchange = MemoryExchange(latency_s=LATENCY_S)
        self.start_faults: dict[PeerId, list[str]] = {}
        self.fetch_faults: dict[PeerId, list[str]] = {}
        self.fetch_s: dict[PeerId, float] = {}
        self.servers = 0
        self._random = random.Random(4).randbytes
        for peer in peers:
            self._add(PeerId(peer))

    @property
    def opened(self) -> list[PeerId]:
        """Who was asked for the process of a stage."""
        return [peer for peer, _ in self.exchange.asked_of(STAGE_OPEN)]

    def _add(self, own: PeerId) -> None:
        async def fetch(place: Place, say: Callable[[str], None]) -> Path:
            faults = self.fetch_faults.get(own)
            if faults:
                raise ModelError(faults.pop(0))
            say("downloads 50 %")
            await elapse(self.fetch_s.get(own, 0.0))
            return Path("/model")

        found = Stages(
            service=SERVICE,
            messenger=self.exchange.join(own),
            where=lambda peer: Address(f"{peer}.example", 7),
            random=self._random,
        )
        adverts: list[messages.EngineAdvert] = []
        runs = Supervisor(
            protocol.EngineConfig(
                model="/elsewhere", log_file=own, max_requests=64 + len(self.boxes)
            ),  # each box by its own lights
            worker=cast(Worker, self._worker(own)),
            stages=found,
            fetch=fetch,
            channel=None,
            on_change=adverts.append,
            open_server=self.fork_server,
        )
        self.boxes[own] = Box(own, found, runs, adverts)

    def _worker(self, own: PeerId) -> Any:
        world = self

        class Told:
            def use(self, link: EngineLink, place: Place, pipes: frozenset[bytes]) -> None:
                world.boxes[own].used.append((place, pipes))

            def engine_lost(self, how: str) -> None:
                world.boxes[own].lost.append(how)

            def on_engine_message(self, message: protocol.EngineMessage) -> None:
                raise AssertionError

        return Told()

    @asynccontextmanager
    async def fork_server(
        self, *, log: Path | None, threads: int, channel: int | None, backend: str
    ) -> AsyncIterator[Any]:
        self.servers += 1
        own, world = PeerId(str(log)), self

        class Server:
            gone = False
            version = "0.32.0"

            async def wait_ready(self) -> None:
                await trio.lowlevel.checkpoint()

            async def start_engine(self, config: protocol.EngineConfig, on_message: object) -> Process:
                return await world._start(own, config)

        yield Server()

    async def _start(self, own: PeerId, config: protocol.EngineConfig) -> Process:
        process = Process(config)
        self.boxes[own].processes.append(process)
        try:
            await elapse(FORK_S + (LOAD_S if config.stage == 0 else 0.0))
        except trio.Cancelled:
            process.end("ended")
            raise
        faults = self.start_faults.get(own)
        if faults or (config.stage == 0 and not self._connected(process)):
            process.end("failed")
            raise EngineStartError(faults.pop(0) if faults else "no pipe to a stage")
        process.ready = ready(config)
        self.nursery.start_soon(self._tie, process)
        return process

    def _others(self, process: Process) -> list[Process]:
        """The processes at the other ends of its pipes."""
        links = {end.ticket.link for end in process.config.pipes}
        return [
            other
            for box in self.boxes.values()
            for other in box.processes
            if other is not process and links & {end.ticket.link for end in other.config.pipes}
        ]

    def _connected(self, process: Process) -> bool:
        return len([other for other in self._others(process) if other.running]) == len(process.config.partition[1:])

    async def _tie(self, process: Process) -> None:
        """Its end is the end of those that it is connected to."""
        await process.gone.wait()
        await elapse(0.05)
        for other in self._others(process):
            other.end("ended: a stage was lost")

    def assign(self, *replica: str) -> None:
        """What a plan with this replica means to every box."""
        for peer, box in self.boxes.items():
            place = Place(stages(*replica), replica.index(peer)) if peer in replica else None
            box.supervisor.assign(place)

    def box(self, name: str) -> Box:
        return self.boxes[PeerId(name)]

    def run(self) -> None:
        for box in self.boxes.values():
            self.nursery.start_soon(box.supervisor.run)

    async def until(self, state: str, *names: str, within_s: float = 60.0) -> None:
        with trio.fail_after(within_s):
            while any(self.box(name).state != state for name in names):
                await elapse(0.01)

    def states(self, name: str) -> list[str]:
        """Each state once, as they followed one another."""
        return [state for state, _ in itertools.groupby(advert.state for advert in self.box(name).adverts)]


def play(*peers: str) -> Callable[[Callable[[World], Coroutine[Any, Any, None]]], None]:
    """Run a story with these boxes, all of them waiting."""

    def run(story: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                world = World(nursery, *peers)
                world.run()
                await elapse(0.01)
                await story(world)
                nursery.cancel_scope.cancel()

        trio.run(main, clock=MockClock(autojump_threshold=0))

    return run
