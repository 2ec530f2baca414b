"""A prefill replica that says when it takes a request, and how much of the prompt it computes: policy `cronus` at a
gateway."""

from collections.abc import Awaitable, Callable

import pytest
import trio

from p2pserve.bootstrap import PeerId, PeerLost, RemoteError, Role
from p2pserve.node import messages
from p2pserve.node.replica.splitting import SLOT_WAIT_S

from .world import (
    ANSWER,
    CLIENT,
    LATENCY_S,
    P2,
    PROMPT_TOKENS,
    STEP_S,
    D,
    P,
    World,
    elapse,
    figures_of,
    open_world,
    virtually,
)

OCCUPANTS = (PeerId("another-gateway"), "x"), (PeerId("another-gateway"), "y")


def always(split: int) -> Callable[[], Awaitable[int]]:
    async def say() -> int:
        return split

    return say


def fails(error: Exception) -> Callable[[], Awaitable[int]]:
    async def say() -> int:
        raise error

    return say


def splits_of(world: World) -> list[int]:
    """Of each decode replica that was asked."""
    return [body.receive_tokens for _, _, body in world.opened if isinstance(body, messages.DecodeOpen)]


def test_the_prefill_replica_says_how_much_of_the_prompt_it_computes() -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:
            world.splits[P] = always(3)
            last = await world.answer()
            assert last.error == ""
            assert world.tokens() == ANSWER[:12]
            assert [kind for kind, _, _ in world.opened] == ["slot", "decode", "prefill"]
            assert splits_of(world) == [3]
            (prefilled,) = (body for _, _, body in world.opened if isinstance(body, messages.PrefillOpen))
            assert (prefilled.prompt, prefilled.sampling) == (PROMPT_TOKENS[:3], None)
            # the same id throughout, so that the slot is told from others'
            assert len({body.request for _, _, body in world.opened}) == 1  # type: ignore[attr-defined]
            figures = figures_of(last)
            assert (figures.prefill_node, figures.decode_node, figures.recovered) == (P, D, ())
            # the slot's question, two opens, a part of the prompt, and the first decode step
            assert figures.ttft_s == pytest.approx(3 * LATENCY_S + 2 * STEP_S)

    virtually(main)


def test_all_of_the_prompt_may_be_its_part() -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:
            assert (await world.answer()).error == ""
            assert splits_of(world) == [len(PROMPT_TOKENS)]
            assert world.sent("decode.first") == [D]

    virtually(main)


@pytest.mark.parametrize("wrong", [len(PROMPT_TOKENS) + 1, 1 << 20])
def test_more_than_all_of_the_prompt_is_all_of_it(wrong: int) -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:
            world.splits[P] = always(wrong)
            assert (await world.answer()).error == ""
            assert splits_of(world) == [len(PROMPT_TOKENS)]

    virtually(main)


def test_a_request_waits_for_its_turn_and_asks_again() -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:
            for occupant in OCCUPANTS:
                world.slots[P].enter(occupant)
            name = await world.ask()
            await elapse(2.5 * SLOT_WAIT_S)
            assert [kind for kind, _, _ in world.opened] == ["slot"] * 3
            assert world.chunks[name][-1].tokens == ()  # it hears that it is under way
            world.slots[P].leave(OCCUPANTS[0])
            await world.settle()
            assert world.tokens(name) == ANSWER[:12]
            world.slots[P].leave(OCCUPANTS[1])

    virtually(main)


def test_at_most_two_requests_of_a_gateway_are_there_at_once() -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:
            world.splits[P] = always(2)
            names = [await world.ask() for _ in range(7)]
            most = 0
            while not world.gateway.idle:
                most = max(most, sum(job.kind == "prefill" for job in world.jobs.values()))
                await elapse(STEP_S / 4)
            assert most == 2
            assert all(world.tokens(name) == ANSWER[:12] for name in names)

    virtually(main)


def test_who_waits_counts_where_the_next_request_is_sent() -> None:
    async def main() -> None:
        async with open_world(P, P2, D, policy="cronus") as world:
            for peer in (P, P2):
                for occupant in OCCUPANTS:
                    world.slots[peer].enter(occupant)
            for _ in range(4):
                await world.ask()
            await elapse(LATENCY_S * 2)
            asked = [peer for kind, peer, _ in world.opened if kind == "slot"]
            assert sorted(asked) == [P, P, P2, P2]
            for peer in (P, P2):
                world.slots[peer].clear()

    virtually(main)


@pytest.mark.parametrize("wait_s", [LATENCY_S / 2, LATENCY_S + 1.0, SLOT_WAIT_S + 2 * LATENCY_S])
def test_a_client_that_stops_gives_up_its_turn_or_slot(wait_s: float) -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:
            for occupant in OCCUPANTS:
                world.slots[P].enter(occupant)
            name = await world.ask()
            await elapse(wait_s)
            world.gateway.stop(CLIENT, Role.CLIENT, messages.StopRequest(request=name))
            assert world.gateway.idle
            assert P in world.sent("request.stop")
            world.slots[P].clear()
            await elapse(SLOT_WAIT_S)
            assert [kind for kind, _, _ in world.opened if kind != "slot"] == []

    virtually(main)


@pytest.mark.parametrize(
    "error", [RemoteError("draining", "this node is leaving"), PeerLost("it is gone"), RemoteError("internal", "bug")]
)
def test_a_prefill_replica_that_refuses_is_done_without(error: Exception) -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:
            world.splits[P] = fails(error)
            last = await world.answer()
            assert (last.error, figures_of(last).prefill_node, figures_of(last).attempts) == ("", None, 1)
            assert world.tokens() == ANSWER[:12]
            assert splits_of(world) == [0]

    virtually(main)


def test_one_of_an_earlier_release_computes_all_of_the_prompt() -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:
            world.splits[P] = fails(RemoteError("unknown_method", "this node does not answer 'prefill.slot'"))
            last = await world.answer()
            assert (last.error, figures_of(last).prefill_node) == ("", P)
            assert splits_of(world) == [len(PROMPT_TOKENS)]

    virtually(main)


def test_one_that_is_lost_while_requests_wait_is_done_without() -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:

            async def lose() -> int:
                world.lose(P)
                raise PeerLost("it is gone")

            world.splits[P] = lose
            names = [await world.ask() for _ in range(4)]
            await world.settle()
            assert all(world.tokens(name) == ANSWER[:12] for name in names)

    virtually(main)


def test_one_that_hangs_is_left_for_another() -> None:
    async def main() -> None:
        async with open_world(P, P2, D, policy="cronus") as world:
            for occupant in OCCUPANTS:
                world.slots[P].enter(occupant)
                world.slots[P2].enter(occupant)
            await world.ask()
            await elapse(1.0)
            (asked,) = (peer for kind, peer, _ in world.opened if kind == "slot")
            other = P2 if asked == P else P
            world.gateway.peer_hung(asked, True)
            await elapse(SLOT_WAIT_S + 1.0)
            assert [peer for kind, peer, _ in world.opened if kind == "slot"] == [asked, other]
            world.slots[other].clear()
            await world.settle()
            assert world.tokens() == ANSWER[:12]
            world.slots[asked].clear()

    virtually(main)


def test_a_decode_replica_that_refuses_frees_the_slot() -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:
            world.faults[D] = ["refuse"]
            await world.ask()
            await elapse(3 * LATENCY_S)
            assert world.slots[P].used == 0
            world.set_engine(D, starts=2)
            await world.settle()
            assert world.tokens() == ANSWER[:12]

    virtually(main)


@pytest.mark.parametrize("fault", ["refuse", "timeout", "fail", "gone"])
def test_a_prefill_that_fails_after_its_slot_is_computed_where_it_is_decoded(fault: str) -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:
            world.splits[P] = always(4)
            world.faults[P] = [fault]
            assert (await world.answer()).error == ""
            assert world.tokens() == ANSWER[:12]

    virtually(main)


def test_another_plan_is_followed_by_who_waits() -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:
            for occupant in OCCUPANTS:
                world.slots[P].enter(occupant)
            await world.ask()
            await elapse(1.0)
            world.follow(P2, D)
            world.slots[P].clear()
            await world.settle()
            assert world.tokens() == ANSWER[:12]
            assert P in world.sent("request.stop")
            assert [peer for kind, peer, _ in world.opened if kind == "prefill"] == [P2]

    virtually(main)


def test_the_deadline_ends_the_wait() -> None:
    async def main() -> None:
        async with open_world(P, D, policy="cronus") as world:
            for occupant in OCCUPANTS:
                world.slots[P].enter(occupant)
            began = trio.current_time()
            last = await world.answer(deadline_s=7.0)
            assert last.finish == "error"
            assert "deadline" in last.error
            assert trio.current_time() - began == pytest.approx(7.0, abs=0.1)
            world.slots[P].clear()

    virtually(main)
