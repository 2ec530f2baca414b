"""Which engine processes run on which boxes as plans come and go and processes die, on a virtual clock.

Supervisors and the talk between stages are real; fork servers and engine processes are scripted: a process that is in
a pipeline ends when one at the other end of its pipes does.
"""

import itertools
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, PeerId, RemoteError, Role
from p2pserve.coordinator import Stage
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.methods import STAGE_OPEN
from p2pserve.node.models import ModelError
from p2pserve.node.replica.engine_link import EngineLink, EngineStartError
from p2pserve.node.replica.place import Place
from p2pserve.node.replica.stages import Stages, limits_of
from p2pserve.node.replica.supervisor import MAX_FAILURES, Supervisor, backoff_s
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
            protocol.EngineConfig(model="/elsewhere", max_requests=64 + len(self.boxes)),  # each box by its own lights
            worker=cast(Worker, self._worker(own)),
            stages=found,
            fetch=fetch,
            log=Path(own),
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


def test_a_box_waits_until_a_plan_gives_it_layers() -> None:
    async def story(world: World) -> None:
        await elapse(1000.0)
        assert world.states("a") == ["waiting"]
        assert world.box("a").processes == []

    play("a")(story)


def test_the_boxes_of_a_replica_start_together() -> None:
    async def story(world: World) -> None:
        world.assign("a", "b", "c")
        await world.until("ready", "a", "b", "c")
        for name in "abc":
            assert world.states(name) == ["waiting", "loading", "ready"]
            assert [stage.peer for stage in world.box(name).adverts[-1].stages] == ["a", "b", "c"]
            assert world.box(name).adverts[-1].starts == 1
        configs = [world.box(name).running[0].config for name in "abc"]
        assert [(config.stage, config.partition, config.model) for config in configs] == [
            (stage, (1, 1, 1), "/model") for stage in range(3)
        ]
        ends = [{(end.kind, end.stage): end for end in config.pipes} for config in configs]
        assert [sorted(each) for each in ends] == [
            [("control", 1), ("control", 2), ("data", 1)],
            [("control", 0), ("data", 0), ("data", 2)],
            [("control", 0), ("data", 1)],
        ]
        pairs = [
            (ends[0]["control", 1], ends[1]["control", 0], "b"),
            (ends[0]["control", 2], ends[2]["control", 0], "c"),
        ]
        pairs += [(ends[0]["data", 1], ends[1]["data", 0], "b"), (ends[1]["data", 2], ends[2]["data", 1], "c")]
        for lower, higher, dialled in pairs:
            assert lower.ticket == higher.ticket
            assert lower.dial is not None
            assert lower.dial.host == f"{dialled}.example"
            assert higher.dial is None
        assert len({end.ticket.link for each in ends for end in each.values()}) == 4
        place, pipes = world.box("b").used[-1]
        assert place == Place(stages("a", "b", "c"), 1)
        assert pipes == {end.ticket.link for end in configs[1].pipes}
        assert world.servers == 3

    play("a", "b", "c")(story)


def test_the_head_waits_for_stages_that_do_not_know_the_plan_yet_or_still_download() -> None:
    async def story(world: World) -> None:
        world.fetch_s[PeerId("c")] = 30.0
        world.box("a").supervisor.assign(Place(stages("a", "b", "c"), 0))
        await elapse(5.0)
        assert world.box("a").state == "loading"
        assert "stage 3/3" in world.box("a").adverts[-1].detail
        world.assign("a", "b", "c")
        await elapse(20.0)
        assert world.box("c").adverts[-1].detail == "downloads 50 %"
        assert world.box("a").processes == []
        await world.until("ready", "a", "b", "c", within_s=20.0)

    play("a", "b", "c")(story)


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_a_replica_that_loses_a_process_starts_again_as_a_whole(victim: str) -> None:
    async def story(world: World) -> None:
        world.assign("a", "b", "c")
        await world.until("ready", "a", "b", "c")
        world.box(victim).running[0].end("was killed by SIGKILL")
        await elapse(0.3)
        assert not any(world.box(name).running for name in "abc")
        assert world.box("a").state == "restarting"
        assert all(world.box(name).lost for name in "abc")
        await world.until("ready", "a", "b", "c")
        assert [world.box(name).adverts[-1].starts for name in "abc"] == [2, 2, 2]
        assert all(len(world.box(name).running) == 1 for name in "abc")

    play("a", "b", "c")(story)


def test_a_head_gives_up_on_a_replica_that_never_lives_with_the_reason() -> None:
    async def story(world: World) -> None:
        world.start_faults[PeerId("b")] = ["no memory"] * 100
        world.assign("a", "b")
        await world.until("failed", "a", within_s=600.0)
        assert world.box("a").adverts[-1].detail.startswith(f"gave up after {MAX_FAILURES + 1} failures")
        assert "stage 2 on b: no memory" in world.box("a").adverts[-1].detail
        opened = len(world.opened)
        await elapse(1000.0)
        assert len(world.opened) == opened
        world.start_faults.clear()
        world.assign("a", "c")  # another plan is another chance
        await world.until("ready", "a", "c")

    play("a", "b", "c")(story)


def test_a_plan_that_takes_the_layers_away_ends_the_replica() -> None:
    async def story(world: World) -> None:
        world.assign("a", "b")
        await world.until("ready", "a", "b")
        world.assign()
        await world.until("waiting", "a", "b")
        assert not world.box("a").running
        assert not world.box("b").running
        assert world.box("a").adverts[-1].stages == ()

    play("a", "b")(story)


def test_a_stage_outlives_its_place_until_its_head_has_finished() -> None:
    """The head may be draining: it keeps its place then."""

    async def story(world: World) -> None:
        world.assign("a", "b")
        await world.until("ready", "a", "b")
        world.box("b").supervisor.assign(None)
        await elapse(100.0)
        assert world.box("b").running
        world.box("a").running[0].end("ended")
        await world.until("waiting", "b")
        assert not world.box("b").running

    play("a", "b")(story)


def test_boxes_change_from_one_replica_to_another() -> None:
    async def story(world: World) -> None:
        world.assign("a", "b")
        await world.until("ready", "a", "b")
        world.assign("b", "c", "a")
        await world.until("ready", "b", "c")
        await elapse(60.0)
        assert [(world.box(name).running[0].config.stage, len(world.box(name).running)) for name in "bca"] == [
            (0, 1),
            (1, 1),
            (2, 1),
        ]
        assert world.box("a").state == "ready"

    play("a", "b", "c")(story)


def test_plans_that_change_all_the_time_leave_no_process_behind() -> None:
    rng = random.Random(11)

    async def story(world: World) -> None:
        for _ in range(60):
            replica = rng.sample("abcd", rng.choice((0, 2, 3, 4)))
            world.assign(*replica)
            await elapse(rng.choice((0.0, 0.02, 0.4, 1.0, 5.0)))
            if rng.random() < 0.3:
                for process in world.box(rng.choice("abcd")).running:
                    process.end("was killed by SIGKILL")
        world.assign("d", "b")
        await world.until("ready", "b", "d", within_s=200.0)
        await world.until("waiting", "a", "c")
        assert [len(world.box(name).running) for name in "abcd"] == [0, 1, 0, 1]
        assert sum(not process.gone.is_set() for box in world.boxes.values() for process in box.processes) == 2

    play("a", "b", "c", "d")(story)


@pytest.mark.parametrize("replica", ["abc", "ca"])
def test_all_stages_have_the_limits_of_their_head(replica: str) -> None:
    async def story(world: World) -> None:
        world.assign(*replica)
        await world.until("ready", *replica)
        found = [limits_of(world.box(name).running[0].config).max_requests for name in replica]
        assert found == [64 + "abc".index(replica[0])] * len(replica)

    play("a", "b", "c")(story)


def test_nobody_but_the_head_starts_a_stage() -> None:
    async def story(world: World) -> None:
        world.assign("a", "b")
        await world.until("ready", "a", "b")
        body = opening(stages("a", "b"), 1)
        for peer, wrong in (
            ("c", body),
            ("a", opening(stages("a", "c", "b"), 2)),
            ("a", opening(stages("a", "b"), 9)),
        ):
            with pytest.raises(RemoteError) as caught:
                await world.box("b").stages.on_open(PeerId(peer), Role.WORKER, wrong)
            assert caught.value.code == "not-yet"
        ends = world.box("b").running[0].config.pipes
        for stage in (1, 2, 500):
            pipes = (protocol.PipeEnd(stage=stage, kind="control", ticket=ends[0].ticket),)
            forged = opening(stages("a", "b"), 1, *pipes)
            with pytest.raises(RemoteError, match="do not exist"):
                await world.box("b").stages.on_open(PeerId("a"), Role.WORKER, forged)
        world.box("b").stages.on_stage_loaded(PeerId("c"), Role.WORKER, messages.StageLoaded())
        assert world.box("b").running

    play("a", "b", "c")(story)


# ---- a box that serves alone --------------------------------------------------------------------------------


def test_an_engine_that_is_killed_twice_comes_back_twice_and_says_so() -> None:
    async def story(world: World) -> None:
        world.assign("a")
        await world.until("ready", "a")
        assert world.states("a") == ["waiting", "starting", "ready"]
        for kills in (1, 2):
            world.box("a").running[0].end("was killed by SIGKILL")
            await world.until("restarting", "a")
            assert world.box("a").adverts[-1].detail == "the engine process was killed by SIGKILL"
            assert world.box("a").adverts[-1].pid == 0
            begun = trio.current_time()
            await world.until("ready", "a")
            assert trio.current_time() - begun == pytest.approx(backoff_s(kills) + FORK_S + LOAD_S, abs=0.05)
            assert world.box("a").adverts[-1].starts == kills + 1
        assert world.servers == 1  # vLLM is not imported again

    play("a")(story)


def test_an_engine_that_dies_again_and_again_is_given_up_with_a_reason() -> None:
    async def story(world: World) -> None:
        world.assign("a")
        await world.until("ready", "a")
        world.start_faults[PeerId("a")] = ["the GPU has fallen off the bus"] * 100
        world.box("a").running[0].end("was killed by SIGKILL")
        await world.until("failed", "a", within_s=300.0)
        assert world.box("a").adverts[-1].detail == (
            f"gave up after {MAX_FAILURES + 1} failures, at last: the GPU has fallen off the bus; see a"
        )
        await elapse(1000.0)
        assert len(world.box("a").processes) == 1 + MAX_FAILURES

    play("a")(story)


def test_an_engine_that_ran_for_long_has_a_clean_slate() -> None:
    async def story(world: World) -> None:
        world.assign("a")
        for _ in range(3 * MAX_FAILURES):
            await world.until("ready", "a")
            await elapse(400.0)
            world.box("a").running[0].end("was killed by SIGKILL")
            await world.until("restarting", "a")
        await world.until("ready", "a", within_s=10.0)

    play("a")(story)


@pytest.mark.parametrize("kind", ["start", "fetch"])
def test_a_box_that_serves_alone_and_cannot_start_at_all_tells_its_user(kind: str) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            world = World(nursery, "a")
            (world.start_faults if kind == "start" else world.fetch_faults)[PeerId("a")] = ["no such model"]
            world.assign("a")
            with pytest.raises((EngineStartError, ModelError), match="no such model"):
                await world.box("a").supervisor.run()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_stage_whose_download_fails_tries_again() -> None:
    async def story(world: World) -> None:
        world.fetch_faults[PeerId("b")] = ["no space left on the disk"]
        world.assign("a", "b")
        await world.until("restarting", "b")
        assert world.box("b").adverts[-1].detail == "no space left on the disk"
        await world.until("ready", "a", "b")

    play("a", "b")(story)
