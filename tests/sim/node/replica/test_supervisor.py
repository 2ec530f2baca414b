"""Which engine processes run on which boxes as plans come and go and processes die."""

import random
import socket

import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import PeerId, RemoteError, Role
from p2pserve.kvtransport.wire.channel import LinkHello, LinkRole
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineStartError
from p2pserve.node.models import ModelError
from p2pserve.node.replica.place import Place
from p2pserve.node.replica.stages import limits_of
from p2pserve.node.replica.sweep import EngineSweep
from p2pserve.node.settings import WAN

from .supervised import FORK_S, LOAD_S, World, elapse, links_of, opening, play, stages


def test_a_box_waits_until_a_plan_gives_it_layers() -> None:
    async def story(world: World) -> None:
        await elapse(1000.0)
        assert world.states("a") == ["waiting"]
        assert world.box("a").processes == []

    play("a")(story)


def test_what_takes_long_is_told_step_by_step() -> None:
    async def story(world: World) -> None:
        (starter,) = world.starters
        starter.version = ""  # the import takes longer than a moment
        starter.starting += [protocol.Starting(part="weights", file=file, files=2) for file in (1, 2)]
        starter.starting += [protocol.Starting(part="warm-up"), protocol.Starting(part="weights", file=1, files=1)]
        world.assign("a")
        await world.until("ready", "a")
        assert [advert.detail for advert in world.box("a").adverts if advert.state == "starting"] == [
            *("", "downloads 50 %", "imports emulated", "loads the model"),
            *("weights 1/2", "weights 2/2", "warms up", "weights"),
        ]
        assert world.box("a").adverts[-1].detail == ""

    play("a")(story)


def test_the_first_engine_alone_is_measured_before_it_serves() -> None:
    """One that is started again is waited for by requests."""

    async def story(world: World) -> None:
        box = world.box("a")
        box.supervisor.sweep = EngineSweep(box.worker.learner, 5.0)
        world.assign("a")
        await world.until("ready", "a")
        (first,) = box.running
        sent = first.take_sent()
        assert {message.request for message in sent if isinstance(message, protocol.Submit)} == {
            message.request for message in sent if isinstance(message, protocol.Cancel)
        }, "it answers nothing, and is to be free of it all the same"
        assert sent
        assert [advert.detail for advert in box.adverts if advert.state == "starting"][-1] == "measures how fast it is"
        first.end("died")
        await world.until("restarting", "a")
        await world.until("ready", "a")
        (second,) = box.running
        assert second is not first
        assert second.take_sent() == []

    play("a")(story)


def test_the_boxes_of_a_replica_start_together() -> None:
    async def story(world: World) -> None:
        world.assign("a", "b", "c")
        await world.until("ready", "a", "b", "c")
        for name in "abc":
            assert world.states(name) == ["waiting", "loading", "ready"]
            assert [stage.peer for stage in world.box(name).adverts[-1].stages] == ["a", "b", "c"]
            assert world.box(name).adverts[-1].starts == 1
        configs = [world.box(name).config for name in "abc"]
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
        assert world.box("b").transfers.place == Place(stages("a", "b", "c"), 1)
        for link in links_of(world.box("b").running[0]):  # its pipes are expected at the node's port
            hello = LinkHello(link, b"n" * 16, LinkRole.SENDER).pack()
            with socket.socket() as connection:
                assert world.box("b").worker.attach(hello, connection)
            assert world.box("b").running[0].hellos[-1] == hello
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
        assert all(world.box(name).transfers.place is None for name in "abc")
        await world.until("ready", "a", "b", "c")
        assert [world.box(name).adverts[-1].starts for name in "abc"] == [2, 2, 2]
        assert all(len(world.box(name).running) == 1 for name in "abc")

    play("a", "b", "c")(story)


def test_a_head_gives_up_on_a_replica_that_never_lives_with_the_reason() -> None:
    async def story(world: World) -> None:
        world.start_faults[PeerId("b")] = ["no memory"] * 100
        world.assign("a", "b")
        await world.until("failed", "a", within_s=600.0)
        assert world.box("a").adverts[-1].detail.startswith(f"gave up after {WAN.max_failures + 1} failures")
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
        assert [(world.box(name).config.stage, len(world.box(name).running)) for name in "bca"] == [
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
        assert sum(not process.gone for box in world.boxes.values() for process in box.processes) == 2

    play("a", "b", "c", "d")(story)


@pytest.mark.parametrize("replica", ["abc", "ca"])
def test_all_stages_have_the_limits_of_their_head(replica: str) -> None:
    async def story(world: World) -> None:
        world.assign(*replica)
        await world.until("ready", *replica)
        found = [limits_of(world.box(name).config).max_requests for name in replica]
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
        ends = world.box("b").config.pipes
        for stage in (1, 2, 500):
            pipes = (protocol.PipeEnd(stage=stage, kind="control", ticket=ends[0].ticket),)
            forged = opening(stages("a", "b"), 1, *pipes)
            with pytest.raises(RemoteError, match="do not exist"):
                await world.box("b").stages.on_open(PeerId("a"), Role.WORKER, forged)
        world.box("b").stages.on_stage_loaded(PeerId("c"), Role.WORKER, messages.StageLoaded())
        assert world.box("b").running

    play("a", "b", "c")(story)


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
            assert trio.current_time() - begun == pytest.approx(WAN.backoff_s(kills) + FORK_S + LOAD_S, abs=0.05)
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
            f"gave up after {WAN.max_failures + 1} failures, at last: the GPU has fallen off the bus; see a"
        )
        await elapse(1000.0)
        assert len(world.box("a").processes) == 1 + WAN.max_failures

    play("a")(story)


def test_an_engine_that_another_one_of_its_process_has_ended_comes_back_at_once_however_often() -> None:
    async def story(world: World) -> None:
        world.assign("a")
        for _ in range(3 * WAN.max_failures):
            await world.until("ready", "a")
            engine = world.box("a").running[0]
            engine.ended_by_other = True
            engine.end("was killed by SIGKILL, in the engine of chat")
            await world.until("restarting", "a")
            assert any(advert.detail.endswith("in the engine of chat") for advert in world.box("a").adverts)
            begun = trio.current_time()
            await world.until("ready", "a")
            assert trio.current_time() - begun == pytest.approx(FORK_S + LOAD_S, abs=0.05)

    play("a")(story)


def test_an_engine_that_ran_for_long_has_a_clean_slate() -> None:
    async def story(world: World) -> None:
        world.assign("a")
        for _ in range(3 * WAN.max_failures):
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
