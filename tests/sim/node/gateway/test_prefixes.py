"""A gateway sends requests where their prefixes are."""

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator.prefixes.held import HeldPrefixes
from p2pserve.coordinator.prefixes.naming import prefix_names
from p2pserve.node.prefixes.asking import INTERVAL_S
from p2pserve.node.prefixes.salts import CacheSalts
from p2pserve.node.requests.local_clients import local_client

from .world import CLIENT, P2, PROMPT_TOKENS, D, P, World, elapse, open_world, virtually

BLOCK = 4


def hold(world: World, peer: PeerId, client: PeerId = CLIENT) -> None:
    """The peer says that it has what this client's prompt begins with."""
    salt = world.gateway.salts.salt_for(client, "")
    world.held[peer] = HeldPrefixes(life=1, block_tokens=BLOCK)
    world.held[peer].change(prefix_names(PROMPT_TOKENS, BLOCK, salt), [])


def prefilled_by(world: World) -> list[PeerId]:
    return [peer for method, peer, _ in world.opened if method == "prefill"]


def test_a_request_goes_where_its_prefix_is() -> None:
    async def main() -> None:
        async with open_world(P, P2, D) as world:
            hold(world, P2)
            await world.answer()
            await elapse(INTERVAL_S)
            for _ in range(3):
                await world.answer()
            assert prefilled_by(world)[1:] == [P2] * 3

    virtually(main)


def test_replicas_are_told_whose_cache_it_may_use() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.gateway.salts = CacheSalts(network=b"n", gateway="g")
            await world.answer()
            salts = {getattr(body, "cache_salt", None) for _, _, body in world.opened}
            assert salts == {world.gateway.salts.salt_for(CLIENT, "")}
            await world.answer(cache_salt="mine")
            later = {getattr(body, "cache_salt", None) for _, _, body in world.opened} - salts
            assert later == {world.gateway.salts.salt_for(CLIENT, "mine")}

    virtually(main)


def test_what_is_held_for_another_tenant_draws_no_requests() -> None:
    async def main() -> None:
        async with open_world(P, P2, D) as world:
            hold(world, P2, local_client("alice"))
            for _ in range(2):
                await world.answer()
                await elapse(INTERVAL_S)
            assert prefilled_by(world) == [P] * 2

    virtually(main)


def test_without_anybody_who_knows_the_question_all_is_as_before() -> None:
    async def main() -> None:
        async with open_world(P, P2, D) as world:
            for _ in range(3):
                await world.answer()
            assert {peer for peer, _ in world.asked} == {P, P2, D}
            assert len(world.asked) == 3
            assert P in prefilled_by(world)

    virtually(main)
