"""What running transfers teach of links, when their paths change, and what is told of it, on a virtual clock."""

import math

import pytest
import trio

from p2pserve.bootstrap import RemoteError
from p2pserve.kvtransport.probing.figures import BoxFigures, Source
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.settings import WAN, BoxLinkSettings

from .kv_world import LONG, MB, MODEL, R2, R, S, T, World, elapse, figures, labels, open_world, play

# ---- measuring ----------------------------------------------------------------------------------------------


def test_a_transfer_that_the_link_holds_up_measures_it() -> None:
    async def main() -> None:
        async with open_world() as world:
            await world.outlet()
            before = world.table(None).links
            assert before == {}  # nothing measured, nothing told
            await world.run(4, lambda at: 0.6 * 1.25e8)
            found = world.table(None).links[T]
            assert found.source is Source.MEASURED
            assert found.capacity_gbps == pytest.approx(0.6, rel=0.1)
            assert world.knowledge.take_measured() == {T}
            assert world.knowledge.take_measured() == set()

    play(main)


@pytest.mark.parametrize("why", ["prefill is slow", "the receiver has no blocks"])
def test_a_transfer_that_something_else_holds_up_measures_no_more_than_a_floor(why: str) -> None:
    async def main() -> None:
        async with open_world() as world:
            world.link(S, T, figures(2.0))
            await world.outlet()
            slow = why == "prefill is slow"
            await world.run(8, lambda at: 0.05 * 1.25e8, waiting=100_000 if slow else 100 * MB, blocked=not slow)
            found = world.knowledge.estimator(T).figures(trio.current_time())
            assert found.capacity_gbps >= 1.9
            assert world.knowledge.take_measured() == set()

    play(main)


def test_round_trips_of_connections_are_measured_too() -> None:
    async def main() -> None:
        async with open_world() as world:
            await world.outlet()
            path = protocol.PathReport("direct", 2, 0, 0, 0.0, 0.123)
            report = protocol.LinkReport(
                link=world.links[T].link, paths=(path,), transfers=1, waiting_bytes=0, blocked=False
            )
            for _ in range(20):
                world.outlets.on_link_report(report)
                await elapse(0.25)
            assert world.knowledge.estimator(T).figures(trio.current_time()).rtt_s == pytest.approx(0.123, rel=0.05)

    play(main)


# ---- steering -----------------------------------------------------------------------------------------------


UP = BoxLinkSettings(box=BoxFigures(up_gbps=2.0))  # so that two paths carry no more than one


async def on_its_way(world: World, tokens: int = 10 * LONG) -> None:
    """A transfer that goes directly, although a good relay is there."""
    world.triangle(direct=1.9)
    assert labels(await world.outlet(tokens=tokens)) == {"direct"}


@pytest.mark.parametrize(("case", "part"), [("stalled", 0.0), ("degraded", 0.05)])
def test_a_transfer_leaves_a_path_that_fails_it(case: str, part: float) -> None:
    async def main() -> None:
        async with open_world(UP) as world:
            await on_its_way(world)
            rate = 1.9 * 1.25e8
            moved = await world.run(2, lambda at: rate * 0.9)
            assert world.paths == []
            begun = trio.current_time()
            await world.run(15, lambda at: rate * part, start=moved)
            ((link, paths),) = world.paths
            assert link == world.links[T].link
            assert R in {path.label for path in paths}
            assert any(path.relay is not None for path in paths)
            assert trio.current_time() - begun < 8
            choice = world.choice(T)
            assert choice is not None
            assert R in choice.vias

    play(main)


@pytest.mark.parametrize(
    ("waiting", "blocked", "rate"),
    [
        (100_000, False, 0.02),  # a layer now and then
        (0, False, 0.0),  # no layer yet
        (100 * MB, True, 0.0),  # the receiver's engine has no blocks yet
        (100 * MB, True, 0.02),
        (WAN.limited_bytes - 1, False, 0.02),
    ],
)
def test_no_path_is_blamed_for_what_is_slow_elsewhere(waiting: int, blocked: bool, rate: float) -> None:
    async def main() -> None:
        async with open_world(UP) as world:
            await on_its_way(world)
            await world.run(30, lambda at: rate * 1.25e8, waiting=waiting, blocked=blocked)
            assert world.paths == []

    play(main)


def test_a_link_that_has_begun_anew_is_not_taken_for_a_stalled_one() -> None:
    """Its counters start at nothing, below what they were at the last transfer."""

    async def main() -> None:
        async with open_world(UP) as world:
            await on_its_way(world)
            rate = 1.9 * 1.25e8
            await world.run(2, lambda at: rate)
            world.done({"direct": 400 * MB})
            await elapse(700)
            assert labels(await world.outlet()) == {"direct"}
            await world.run(3, lambda at: rate * 0.9)
            assert world.paths == []

    play(main)


def test_steering_onto_a_relay_that_refuses_stays_and_tries_the_next_one() -> None:
    async def main() -> None:
        async with open_world(UP) as world:
            await on_its_way(world)
            world.faults[R] = RemoteError("busy", "4096 permits are in use")
            moved = await world.run(10, lambda at: 0.0)
            assert world.paths == []
            assert world.asked.count((R, "relay.open")) == 1
            choice = world.choice(T)
            assert choice is not None
            assert choice.vias == {None}
            world.triangle(direct=1.9, relay=R2)
            (known,) = world.selector.links_to(T)
            assert not known.is_changing
            assert labels(await world.outlet()) <= {"direct", R2}
            await world.run(15, lambda at: 0.0, start=moved)
            assert (
                any(R2 in {path.label for path in paths} for _, paths in world.paths)
                or R2 in (world.choice(T) or choice).vias
            )

    play(main)


def test_reports_of_a_member_that_was_just_forgotten_do_no_harm() -> None:
    """It is suspected to be gone, and KV still moves to it."""

    async def main() -> None:
        async with open_world(UP) as world:
            await on_its_way(world)
            moved = await world.run(2, lambda at: 1.9 * 1.25e8 * 0.2)
            del world.tables[T]
            del world.lives[T]
            world.learn()
            assert T not in world.estimators
            await world.run(10, lambda at: 0.0, start=moved)

    play(main)


@pytest.mark.parametrize("codec", ["raw", "kv4"])
def test_a_transfer_is_watched_to_its_last_byte(codec: str) -> None:
    """Engines on CPUs keep KV in 32 bit: `raw` then has twice the bytes."""

    async def main() -> None:
        async with open_world(UP) as world:
            world.outlets.use_dtype("float32")
            await world.outlet(tokens=100, codec=codec)
            size = world.bytes_of(T)[0]
            values = 100 * MODEL.layers * 2 * MODEL.kv_heads * MODEL.head_dim
            assert size >= values * 4 if codec == "raw" else values // 2 <= size < values

    play(main)


# ---- telling ------------------------------------------------------------------------------------------------


def test_what_a_transfer_cost_by_the_boxes_own_prices() -> None:
    async def main() -> None:
        async with open_world(BoxLinkSettings(box=BoxFigures(up_usd_per_gb=0.01))) as world:
            world.triangle()
            world.member(T, down_usd_per_gb=0.02)
            world.member(R, up_usd_per_gb=0.05, down_usd_per_gb=0.03)
            await world.outlet()
            assert world.done({"direct": 10**9}) == pytest.approx(0.03)
            assert world.done({R: 10**9}) == pytest.approx(0.01 + 0.03 + 0.05 + 0.02)
            assert world.done({"direct": 10**8, R: 10**9}) == pytest.approx(0.003 + 0.11)
            assert world.done({}) == 0.0
            assert world.done({"nobody": 10**9}) == pytest.approx(0.03)  # prices that nobody told are none

    play(main)


def test_the_table_says_what_was_measured_and_hardly_ever_changes() -> None:
    async def main() -> None:
        settings = BoxLinkSettings(site="fra", box=BoxFigures(up_gbps=1.0))
        async with open_world(settings) as world:
            world.link(S, T, figures(1.0))
            world.knowledge.estimator(R)  # nothing measured: not told
            told = world.table(None)
            assert (told.site, told.box, set(told.links)) == ("fra", settings.box, {T})
            world.link(S, T, figures(1.1, rtt_s=0.021))
            assert world.table(told) == told
            world.link(S, T, figures(1.4))
            assert world.table(told).links[T].capacity_gbps == 1.4
            world.link(S, T, figures(1.0, rate_confidence=0.5))
            assert world.table(told) != told
            world.link(S, T, figures(1.0))
            for _ in range(3):
                world.knowledge.estimator(T).on_unreachable(now=trio.current_time())
            assert not world.table(told).links[T].reachable
            world.link(S, T, figures(math.nextafter(1.0, 2.0)))
            assert world.table(told) == told

    play(main)


def test_a_node_that_names_no_site_is_one_of_its_own() -> None:
    async def main() -> None:
        async with open_world() as world:
            world.tables[R] = messages.LinkTable(site="fra")
            world.learn()
            assert [world.knowledge.site_of(peer) for peer in (T, R, R2)] == [T, "fra", R2]

    play(main)
