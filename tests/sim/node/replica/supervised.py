"""Nodes with engines in memory on a virtual clock. Supervisors, workers and the talk between stages are real; an engine
in a pipeline ends when one at the other end of its pipes does."""

import itertools
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, PeerId
from p2pserve.coordinator import Stage
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineStartError
from p2pserve.node.methods import STAGE_OPEN
from p2pserve.node.models import ModelError, ModelInfo, WeightSizes
from p2pserve.node.replica.kv_transfers import KvTransfers
from p2pserve.node.replica.place import Place
from p2pserve.node.replica.stages import Stages, limits_of
from p2pserve.node.replica.supervisor import Supervisor
from p2pserve.node.replica.worker import Worker
from p2pserve.node.testing import READY, MemoryEngine, MemoryExchange, MemoryOutlets, MemoryStarter, dial_at

SERVICE = "tiny"
MODEL = ModelInfo(
    service=SERVICE,
    shape=ModelShape(
        name="tiny", layers=4, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
    ),
    max_model_len=512,
    weights=WeightSizes(layers=(1000,) * 4, embeddings=500, head=500),
)
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
    """What an engine says of itself: a stage that is no head takes no requests."""
    return READY if config.stage == 0 else msgspec.structs.replace(READY, max_model_len=0, kv_tokens=0)


@dataclass
class Box:
    """A node as far as its engine goes."""

    own: PeerId
    stages: Stages
    supervisor: Supervisor
    adverts: list[messages.EngineAdvert]
    transfers: KvTransfers
    worker: Worker
    processes: list[MemoryEngine] = field(default_factory=list)

    @property
    def state(self) -> str:
        return self.adverts[-1].state if self.adverts else ""

    @property
    def running(self) -> list[MemoryEngine]:
        return [process for process in self.processes if process.running]

    @property
    def config(self) -> protocol.EngineConfig:
        """Of the one engine that runs."""
        (process,) = self.running
        assert process.config is not None
        return process.config


def links_of(process: MemoryEngine) -> frozenset[bytes]:
    """Of the pipes to other stages."""
    return frozenset(end.ticket.link for end in process.config.pipes) if process.config is not None else frozenset()


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
        self.starters: list[MemoryStarter] = []  # the fork servers
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

        messenger = self.exchange.join(own)
        transfers = KvTransfers(model=MODEL, outlets=MemoryOutlets(), messenger=messenger)
        worker = Worker(service=SERVICE, transfers=transfers, messenger=messenger)
        found = Stages(
            service=SERVICE,
            messenger=messenger,
            path_to=dial_at(lambda peer: Address(f"{peer}.example", 7)),
            random=self._random,
        )
        adverts: list[messages.EngineAdvert] = []
        runs = Supervisor(
            protocol.EngineConfig(
                model="/elsewhere", backend="emulated", log_file=own, max_requests=64 + len(self.boxes)
            ),  # each box by its own lights
            worker=worker,
            stages=found,
            fetch=fetch,
            channel=None,
            on_change=adverts.append,
            open_server=self.fork_server,
        )
        self.boxes[own] = Box(own, found, runs, adverts, transfers, worker)

    @asynccontextmanager
    async def fork_server(
        self, *, log: Path | None, threads: int, channel: int | None, backend: str
    ) -> AsyncIterator[MemoryStarter]:
        self.servers += 1
        starter = MemoryStarter(partial(self._start, PeerId(str(log))))
        self.starters.append(starter)
        yield starter

    async def _start(self, own: PeerId, config: protocol.EngineConfig) -> MemoryEngine:
        process = MemoryEngine(None, config)
        self.boxes[own].processes.append(process)
        try:
            await elapse(FORK_S + (LOAD_S if config.stage == 0 else 0.0))
        except trio.Cancelled:
            process.end("ended")
            raise
        faults = self.start_faults.get(own)
        if faults or (config.stage == 0 and not self._connected(process, config)):
            process.end("failed")
            raise EngineStartError(faults.pop(0) if faults else "no pipe to a stage")
        process.ready = ready(config)
        self.nursery.start_soon(self._tie, process)
        return process

    def _others(self, process: MemoryEngine) -> list[MemoryEngine]:
        """The processes at the other ends of its pipes."""
        links = links_of(process)
        return [
            other
            for box in self.boxes.values()
            for other in box.processes
            if other is not process and links & links_of(other)
        ]

    def _connected(self, process: MemoryEngine, config: protocol.EngineConfig) -> bool:
        return len([other for other in self._others(process) if other.running]) == len(config.partition[1:])

    async def _tie(self, process: MemoryEngine) -> None:
        """Its end is the end of those that it is connected to."""
        await process.wait_gone()
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
            self.nursery.start_soon(box.supervisor.run_beside)

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
