"""Getting in while the bootstrap is away, and one identity for two nodes."""

import random

import pytest
import trio
import trio.testing

from p2pserve.bootstrap import (
    Address,
    Bootstrap,
    IdentityInUse,
    Network,
    NetworkKey,
    NetworkSettings,
    PeerId,
    Refused,
    Role,
    TokenError,
    Unreachable,
)

from .worlds import KEY, PEOPLE, World, elapse, simulate, world


def place(index: int, *, named: bool = False) -> Bootstrap:
    """A member by its address, with its peer id or without."""
    return Bootstrap("192.0.2.1", 4000 + index, PEOPLE[index].peer_id if named else None)


async def grown(w: World, count: int = 4) -> None:
    for index in range(count):
        await w.start(index)
    await elapse(5)


@pytest.mark.parametrize("role", [Role.WORKER, Role.CLIENT])
def test_any_member_lets_in_while_the_bootstrap_is_away(role: Role) -> None:
    async def main() -> None:
        async with world() as w:
            await grown(w)
            w.kill(0)
            with pytest.raises(Unreachable, match=r"nobody listens at 192\.0\.2\.1:4000"):
                await w.start(5, role=role)
            before = trio.current_time()
            await w.start(5, role=role, ask=(place(2), place(0, named=True)))
            assert trio.current_time() - before < 1.0
            await elapse(3)
            assert w.names(5) == {1, 2, 3, 5}
            if role is Role.WORKER:
                w.check_agreement([1, 2, 3, 5])

    simulate(main)


def test_a_token_may_name_several_of_whom_one_is_enough() -> None:
    async def main() -> None:
        async with world() as w:
            await grown(w)
            w.kill(0)
            named = tuple(place(index, named=True) for index in (0, 3))
            await w.start(5, token=KEY.issue(named, Role.WORKER, 1e6, lead=True), ask=named)
            await elapse(3)
            w.check_agreement([1, 2, 3, 5])

    simulate(main)


def test_members_known_from_before_are_asked_when_the_named_ones_are_away() -> None:
    async def main() -> None:
        async with world() as w:
            await grown(w)
            client = await w.start(5, role=Role.CLIENT)
            await elapse(5)
            remembered = client.seen_members()
            assert {each.peer_id for each in remembered} == {PEOPLE[index].peer_id for index in range(4)}
            w.kill(5)
            w.kill(0)
            await elapse(1)
            again = await w.start(5, role=Role.CLIENT, remembered=remembered)
            await elapse(1)
            assert w.names(5) == {1, 2, 3, 5}
            assert len(again.connected()) <= 3

    simulate(main)


def test_members_known_from_before_are_left_alone_while_a_named_one_answers() -> None:
    async def main() -> None:
        async with world() as w:
            await grown(w)
            remembered = tuple(place(index, named=True) for index in (1, 2, 3))
            client = await w.start(5, role=Role.CLIENT, remembered=remembered)
            await elapse(5)
            assert client.connected() == {PEOPLE[0].peer_id}

    simulate(main)


def test_a_blackholed_bootstrap_costs_the_head_start_and_not_the_join() -> None:
    async def main() -> None:
        async with world() as w:
            await grown(w)
            w.air.block(PEOPLE[0].peer_id, PEOPLE[5].peer_id)
            before = trio.current_time()
            await w.start(5, remembered=(place(2, named=True),))
            assert 1.0 <= trio.current_time() - before < 1.5

    simulate(main)


def test_when_nobody_is_left_the_error_names_whom_it_asked() -> None:
    async def main() -> None:
        async with world() as w:
            with pytest.raises(Unreachable) as caught:
                await w.start(5, ask=(place(1), place(2)), remembered=(place(3, named=True),))
            text = str(caught.value)
            assert text.startswith("none of 2 bootstraps can be reached, nor any of 1 members known from before: ")
            assert "192.0.2.1:4001" in text
            assert "192.0.2.1:4002" in text
            assert text.endswith("any other member lets in, too: --bootstrap TOKEN,HOST:PORT")
            assert "\n" not in text

    simulate(main)


def left_s(said: list[str]) -> list[int]:
    """How long each line says that is still waited, for what is away."""
    assert all("192.0.2.1:4000" in line and "\n" not in line for line in said)
    return [int(line.removeprefix("waiting for the network, for ").split(" s more: ")[0]) for line in said]


def test_joining_goes_on_until_the_bootstrap_comes_and_says_what_it_waits_for() -> None:
    async def main() -> None:
        async with world() as w:
            said: list[str] = []

            async def come_back() -> None:
                await elapse(25)
                await w.start(0)

            w.nursery.start_soon(come_back)
            await w.start(5, settings=NetworkSettings(join_s=60.0), say=said.append)
            assert 25.0 <= trio.current_time() < 28.0
            soon, later = left_s(said)
            assert 55 <= soon <= 57
            assert 43 <= later <= 47

    simulate(main)


def test_joining_gives_up_when_its_time_is_over() -> None:
    async def main() -> None:
        async with world() as w:
            said: list[str] = []
            with pytest.raises(Unreachable, match=r"nobody listens at 192\.0\.2\.1:4000"):
                await w.start(5, settings=NetworkSettings(join_s=60.0), say=said.append)
            assert trio.current_time() == pytest.approx(60.0, abs=0.1)
            assert len(left_s(said)) == 6

    simulate(main)


def test_an_address_of_another_network_lets_nobody_in_and_is_not_believed() -> None:
    """Who answers at an address without a peer id must show a credential of our network."""

    async def main() -> None:
        async with world() as w:
            other = NetworkKey(b"x" * 32)
            address = Address("192.0.2.1", 4007)
            stranger = Network(
                transport=w.air.transport(PEOPLE[7], address),
                identity=PEOPLE[7],
                token=other.issue((), Role.ADMIN, 1e6),
                network_key_public=other.public,
                role=Role.ADMIN,
                announce=address,
                bootstraps=(),
                rng=random.Random(0),
                clock=lambda: 1000.0,
            )
            async with stranger:
                with pytest.raises((Refused, TokenError), match="another network"):
                    await w.start(5, ask=(place(7),))
                assert stranger.statistics().members == 1

    simulate(main)


def test_its_own_address_is_no_way_in() -> None:
    async def main() -> None:
        async with world() as w:
            with pytest.raises(Unreachable, match="this node itself"):
                await w.start(5, ask=(place(5),))

    simulate(main)


def test_a_token_that_names_only_the_node_itself_starts_no_network_of_its_own() -> None:
    async def main() -> None:
        async with world() as w:
            with pytest.raises(TokenError, match=r"names only this node itself .*; delete identity\.key"):
                await w.start(5, ask=(place(5, named=True),))

    simulate(main)


@pytest.mark.parametrize("remembers", [True, False])
def test_a_restarted_bootstrap_shows_the_network_within_three_seconds(remembers: bool) -> None:
    async def main() -> None:
        async with world() as w:
            await grown(w, 5)
            leader = w.nodes[1].coordinator
            remembered = w.nodes[0].seen_members() if remembers else ()
            w.kill(0)
            await elapse(300)
            await w.start(0, remembered=remembered)
            await elapse(0.5 if remembers else 3.0)
            assert w.names(0) == set(range(5))
            await elapse(3)
            w.check_agreement(range(5))
            w.check_full_mesh()
            assert w.nodes[0].coordinator is not None
            assert leader is not None

    simulate(main)


def test_a_bootstrap_that_remembers_the_dead_starts_alone() -> None:
    async def main() -> None:
        async with world() as w:
            before = trio.current_time()
            await w.start(0, remembered=(place(1, named=True), place(2, named=True)))
            assert trio.current_time() == before
            await elapse(5)
            w.check_agreement([0])

    simulate(main)


def test_who_was_seen_last_is_remembered_first() -> None:
    async def main() -> None:
        async with world() as w:
            await grown(w)
            w.kill(3)
            await elapse(20)
            seen = [each.peer_id for each in w.nodes[1].seen_members()]
            assert seen[-1] == PEOPLE[3].peer_id
            assert set(seen) == {PEOPLE[index].peer_id for index in (0, 2, 3)}
            await w.nodes[2].leave()
            await elapse(1)
            assert PEOPLE[2].peer_id not in {each.peer_id for each in w.nodes[1].seen_members()}

    simulate(main)


# -- one identity for two nodes ---------------------------------------------------------------------------------------


def test_a_cloned_box_is_refused_with_the_fix_and_the_first_one_stays() -> None:
    async def main() -> None:
        async with world() as w:
            await grown(w)
            lost: list[PeerId] = []
            for node in w.nodes.values():
                node.on_peer_lost(lost.append)
            clone = w.build(2, port=4900)
            with pytest.raises(IdentityInUse) as caught:
                async with clone:
                    pass
            text = str(caught.value)
            assert "another node at 192.0.2.1:4002 is in the network with this node's identity" in text
            assert "delete identity.key in the home folder" in text
            assert "\n" not in text
            await elapse(20)
            assert lost == []
            w.check_agreement(range(4))
            w.check_full_mesh()

    simulate(main)


@pytest.mark.parametrize("asked", [0, 3])
def test_a_clone_of_the_member_that_it_asks_is_refused_too(asked: int) -> None:
    async def main() -> None:
        async with world() as w:
            await grown(w)
            clone = w.build(asked, port=4900, ask=(place(1, named=True),))
            with pytest.raises(IdentityInUse, match="another node"):
                async with clone:
                    pass
            await elapse(5)
            w.check_agreement(range(4))

    simulate(main)


def test_of_clones_that_start_together_one_gets_in() -> None:
    async def main() -> None:
        async with world() as w:
            await grown(w, 3)
            refused: list[int] = []

            async def run(port: int) -> None:
                try:
                    async with w.build(5, port=port) as network:
                        network.publish("name", b"5")
                        await elapse(60)
                except* IdentityInUse:
                    refused.append(port)

            async with trio.open_nursery() as nursery:
                for port in (4901, 4902, 4903):
                    nursery.start_soon(run, port)
                await elapse(30)
                assert len(refused) == 2
                assert w.names(1) == {0, 1, 2, 5}
                assert w.nodes[0].statistics().entries_forged == 0

    simulate(main)


def test_of_two_that_both_got_in_somewhere_the_later_one_goes() -> None:
    async def main() -> None:
        async with world() as w:
            await grown(w, 3)
            ended: list[int] = []

            async def run(port: int, ask: int) -> None:
                try:
                    async with w.build(5, port=port, ask=(place(ask, named=True),)):
                        await elapse(100)
                except* IdentityInUse:
                    ended.append(port)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, 4901, 1)
                await elapse(0.01)
                nursery.start_soon(run, 4902, 2)
                await elapse(0.2)
                assert PEOPLE[5].peer_id in w.nodes[1].connected() & w.nodes[2].connected()
                await elapse(60)
                assert ended == [4902]
                nursery.cancel_scope.cancel()

    simulate(main)


def test_a_restart_whose_old_connection_nobody_missed_gets_in_after_the_check() -> None:
    """As when a box loses power: its connection stays open at the others until somebody asks."""

    async def main() -> None:
        async with world() as w:
            await grown(w, 3)
            for index in (0, 1):
                w.air.end_of(PEOPLE[2].peer_id, PEOPLE[index].peer_id).sever("the box lost power")
            w.scopes.pop(2).cancel()
            del w.nodes[2]
            await trio.testing.wait_all_tasks_blocked()
            assert PEOPLE[2].peer_id in w.nodes[0].connected()
            before = trio.current_time()
            await w.start(2)
            waited = trio.current_time() - before
            assert NetworkSettings().identity_check_s <= waited < 5.0
            await elapse(5)
            w.check_agreement(range(3))
            w.check_full_mesh()

    simulate(main)
