"""A client's requests against scripted gateways on the in-memory transport: what is retried, and what is said."""

import math

import pytest
import trio
import trio.testing

from p2pserve.bootstrap import PeerId, RemoteError
from p2pserve.coordinator.names import name_of
from p2pserve.node.messages import (
    Generate,
    Generating,
    StatusQuery,
)
from p2pserve.node.methods import STATUS
from p2pserve.sdk.errors import Busy, ConnectionFailed, DeadlineExceeded, InvalidRequest, RequestFailed
from p2pserve.sdk.requests import TextDelta
from p2pserve.sdk.session import DEADLINE_GRACE_S, OPENINGS, RETURN_S, Session, enter

from .client_world import (
    COMPLETE,
    WORDS,
    Death,
    Gateway,
    Script,
    World,
    in_virtual_time,
    let_pass,
    other_words,
    refuses,
    request,
    silent,
    whole,
    world,
)


def test_an_answer_arrives_in_pieces_and_whole() -> None:
    async def main() -> None:
        async with world(whole) as (made, session):
            pieces: list[TextDelta] = []
            assert await session.generate(request(), pieces.append) == COMPLETE
            assert pieces == [TextDelta(word, (number,)) for number, word in enumerate(WORDS, start=1)]
            assert made.gateways[0].stopped == []
            assert "requests=0" in repr(session)

    in_virtual_time(main)


@pytest.mark.parametrize("code", ["draining", "busy", "no-engine", "internal"])
def test_a_gateway_that_cannot_is_replaced(code: str) -> None:
    async def main() -> None:
        async with world(refuses(code), whole) as (made, session):
            assert await session.generate(request(), lambda delta: None) == COMPLETE
            assert [len(gateway.asked) for gateway in made.gateways] == [1, 1]

    in_virtual_time(main)


def test_a_gateway_that_dies_before_the_first_token_is_replaced_for_any_request() -> None:
    async def main() -> None:
        death = Death(0)
        async with world(death.script, whole) as (made, session):
            death.world = made
            assert await session.generate(request(temperature=1.0), death.deliver) == COMPLETE

    in_virtual_time(main)


def test_an_answer_goes_on_after_a_death_with_nothing_lost_repeated_or_changed() -> None:
    """Although the second gateway would begin with other words: it is told those that the client has."""

    async def main() -> None:
        death = Death(2)
        async with world(death.script, other_words) as (made, session):
            death.world = made
            assert await session.generate(request(), death.deliver) == COMPLETE
            pieces = death.pieces
            assert "".join(delta.text for delta in pieces) == "".join(WORDS)
            assert [token for delta in pieces for token in delta.tokens] == [1, 2, 3, 4]
            (first,), (continued,) = made.gateways[0].asked, made.gateways[1].continued
            assert continued.tokens == (1, 2)
            second = continued.generate
            assert first.request != second.request
            assert second.deadline_s <= first.deadline_s
            assert (second.prompt, second.service) == (first.prompt, "m-1")  # of whoever began
            assert made.gateways[1].asked == []

    in_virtual_time(main)


def test_a_sampled_answer_goes_on_by_the_seed_that_its_client_has_drawn() -> None:
    async def main() -> None:
        death = Death(2)
        async with world(death.script, other_words) as (made, session):
            death.world = made
            assert await session.generate(request(temperature=0.7), death.deliver) == COMPLETE
            (first,), (continued,) = made.gateways[0].asked, made.gateways[1].continued
            assert first.seed is not None
            assert continued.generate.seed == first.seed

    in_virtual_time(main)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_gateway_of_an_earlier_release_begins_anew_and_what_it_repeats_is_left_out(temperature: float) -> None:
    async def main() -> None:
        death = Death(2)
        async with world(death.script, whole, is_old=True) as (made, session):
            death.world = made
            assert await session.generate(request(temperature=temperature), death.deliver) == COMPLETE
            assert [token for delta in death.pieces for token in delta.tokens] == [1, 2, 3, 4]
            assert [len(gateway.asked) for gateway in made.gateways] == [1, 1]

    in_virtual_time(main)


def test_a_second_answer_that_differs_is_not_sewn_to_the_first() -> None:
    async def main() -> None:
        death = Death(2)
        async with world(death.script, other_words, is_old=True) as (made, session):
            death.world = made
            with pytest.raises(RequestFailed, match="answers otherwise"):
                await session.generate(request(), death.deliver)
            await made.gateways[1].was_stopped.wait()

    in_virtual_time(main)


def test_when_every_gateway_has_failed_all_are_named() -> None:
    async def main() -> None:
        async with world(refuses("draining"), refuses("busy")) as (made, session):
            with pytest.raises(RequestFailed, match="no gateway is left") as caught:
                await session.generate(request(), lambda delta: None)
            for gateway in made.gateways:
                assert name_of(gateway.network.peer_id) in str(caught.value)

    in_virtual_time(main)


async def heal_after(made: World, seconds: float) -> None:
    await let_pass(seconds)
    made.memory.heal()


@pytest.mark.parametrize("is_heard_again", [True, False])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_gateway_out_of_reach_for_a_moment_is_waited_for_before_none_is_left(
    is_known: bool, is_heard_again: bool
) -> None:
    async def main() -> None:
        death = Death(2)
        async with world(death.script, whole) as (made, session):
            death.world = made
            peers = [gateway.network.peer_id for gateway in made.gateways]
            if is_known:  # there is a session with it, which falls silent
                await session.ask(STATUS, StatusQuery(), 1.0, peers[1])
            made.memory.block(made.client, peers[1])
            await let_pass(5.0)  # it is suspect, and not yet dead
            if is_heard_again:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(heal_after, made, 1.5)
                    assert await session.generate(request(), death.deliver) == COMPLETE
                assert [len(gateway.continued) for gateway in made.gateways] == [0, 1]
                return
            with pytest.raises(RequestFailed, match="no gateway is left") as caught:
                await session.generate(request(), death.deliver)
            assert name_of(peers[0]) in str(caught.value)

    in_virtual_time(main)


@pytest.mark.parametrize("back_after_s", [4.0, None])
def test_a_gateway_that_comes_back_soon_after_the_last_one_was_lost_goes_on(back_after_s: float | None) -> None:
    async def main() -> None:
        death = Death(2)
        async with world(death.script, whole) as (made, session):
            death.world = made
            second = made.gateways[1].network.peer_id
            made.memory.block(made.client, second)
            await let_pass(60.0)  # it is taken for dead
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                if back_after_s is not None:
                    nursery.start_soon(heal_after, made, back_after_s)
                    assert await session.generate(request(), death.deliver) == COMPLETE
                    assert trio.current_time() - began >= back_after_s
                    assert [len(gateway.continued) for gateway in made.gateways] == [0, 1]
                else:
                    with pytest.raises(RequestFailed, match="no gateway is left"):
                        await session.generate(request(), death.deliver)
                    assert RETURN_S <= trio.current_time() - began <= 2.0 * RETURN_S

    in_virtual_time(main)


async def list_service(made: World, session: Session, name: str) -> None:
    """And wait until the client has heard of it."""
    made.list_service(name)
    with trio.fail_after(30.0):
        while not session._gateways.is_awaited(name):
            await let_pass(0.1)


@pytest.mark.parametrize("back_after_s", [5.0 * RETURN_S, None])
def test_a_service_of_the_catalogue_is_waited_for_until_the_deadline_when_its_last_gateway_was_lost(
    back_after_s: float | None,
) -> None:
    async def main() -> None:
        death = Death(2)
        async with world(death.script, whole) as (made, session):
            death.world = made
            await list_service(made, session, "chat")
            made.memory.block(made.client, made.gateways[1].network.peer_id)
            await let_pass(60.0)  # it is taken for dead
            began = trio.current_time()
            asked = request(service="chat", deadline_s=100.0)
            async with trio.open_nursery() as nursery:
                if back_after_s is not None:
                    nursery.start_soon(heal_after, made, back_after_s)
                    assert await session.generate(asked, death.deliver) == COMPLETE
                    assert trio.current_time() - began >= back_after_s
                    assert [len(gateway.continued) for gateway in made.gateways] == [0, 1]
                else:
                    with pytest.raises(RequestFailed):
                        await session.generate(asked, death.deliver)
                    assert 100.0 - 2.0 * RETURN_S <= trio.current_time() - began <= 100.0 + DEADLINE_GRACE_S

    in_virtual_time(main)


def drains(seconds: float) -> Script:
    """Refuses for so long after it was asked first, and takes requests then."""
    until = math.nan

    async def script(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
        nonlocal until
        if math.isnan(until):
            until = trio.current_time() + seconds
        if trio.current_time() < until:
            raise RemoteError("draining", "this node is draining")
        return await whole(gateway, client, body)

    return script


def test_boxes_that_have_left_a_service_of_the_catalogue_are_asked_again_when_they_may_be_back() -> None:
    async def main() -> None:
        async with world(drains(60.0), drains(30.0)) as (made, session):
            await list_service(made, session, "chat")
            began = trio.current_time()
            assert await session.generate(request(service="chat"), lambda delta: None) == COMPLETE
            assert trio.current_time() - began == pytest.approx(30.0, abs=1.0)
            assert [len(gateway.asked) for gateway in made.gateways] == [4, 4]

    in_virtual_time(main)


def test_what_every_gateway_of_a_service_fails_at_is_not_asked_again() -> None:
    async def main() -> None:
        async with world(refuses("internal"), refuses("internal")) as (made, session):
            await list_service(made, session, "chat")
            with pytest.raises(RequestFailed, match="no gateway is left"):
                await session.generate(request(service="chat"), lambda delta: None)
            assert [len(gateway.asked) for gateway in made.gateways] == [1, 1]

    in_virtual_time(main)


def busy(times: int, retry_after_s: float) -> Script:
    """Too busy for the first so many requests."""

    async def script(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
        if len(gateway.asked) <= times:
            raise RemoteError("busy", f"busy: try again in {retry_after_s:g} s", retry_after_s=retry_after_s)
        return await whole(gateway, client, body)

    return script


def test_a_gateway_that_is_busy_is_asked_again_when_it_says() -> None:
    async def main() -> None:
        async with world(busy(2, 3.0)) as (made, session):
            began = trio.current_time()
            assert await session.generate(request(), lambda delta: None) == COMPLETE
            assert trio.current_time() - began == pytest.approx(6.0, abs=0.1)
            ids = {body.request for body in made.gateways[0].asked}
            assert len(ids) == 3
            assert made.gateways[0].stopped == []  # it has nothing of what it refused

    in_virtual_time(main)


def test_a_client_does_not_ask_more_at_once_than_gateways_take() -> None:
    """However many requests it has: what else it says would find no place on the way."""
    asking = most = 0

    async def slow(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        with trio.move_on_after(0.1):
            await trio.sleep_forever()
        asking -= 1
        return await whole(gateway, client, body)

    async def main() -> None:
        async with world(slow) as (made, session), trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(session.generate, request(), lambda delta: None)
        assert most == OPENINGS
        assert len(made.gateways[0].asked) == 300

    in_virtual_time(main)


def test_another_gateway_is_asked_before_one_that_is_busy_is_waited_for() -> None:
    async def main() -> None:
        async with world(busy(1, 3.0), whole) as (made, session):
            began = trio.current_time()
            assert await session.generate(request(), lambda delta: None) == COMPLETE
            assert trio.current_time() - began < 1.0
            assert [len(gateway.asked) for gateway in made.gateways] == [1, 1]

    in_virtual_time(main)


def test_of_several_that_are_busy_the_first_that_is_free_is_asked_and_one_that_leaves_is_not() -> None:
    async def main() -> None:
        async with world(busy(1, 9.0), busy(1, 3.0), refuses("draining")) as (made, session):
            began = trio.current_time()
            assert await session.generate(request(), lambda delta: None) == COMPLETE
            assert trio.current_time() - began == pytest.approx(3.0, abs=0.1)
            assert [len(gateway.asked) for gateway in made.gateways] == [1, 2, 1]

    in_virtual_time(main)


def test_a_request_that_cannot_wait_so_long_is_told_how_long_it_would_be() -> None:
    async def main() -> None:
        async with world(busy(9, 20.0), refuses("draining")) as (_, session):
            began = trio.current_time()
            with pytest.raises(Busy, match="busy: try again in 20 s") as caught:
                await session.generate(request(deadline_s=10.0), lambda delta: None)
            assert trio.current_time() - began < 1.0
            assert caught.value.retry_after_s == pytest.approx(20.0, abs=0.1)
            assert isinstance(caught.value, RequestFailed)

    in_virtual_time(main)


def test_what_the_gateway_calls_invalid_is_not_tried_elsewhere() -> None:
    async def main() -> None:
        async with world(refuses("invalid"), whole) as (made, session):
            with pytest.raises(InvalidRequest, match=r"^a reason$"):
                await session.generate(request(), lambda delta: None)
            assert made.gateways[1].asked == []

    in_virtual_time(main)


@pytest.mark.parametrize(
    ("error", "kind"),
    [("no engine is left", RequestFailed), ("deadline: the answer was not complete", DeadlineExceeded)],
)
def test_the_gateways_last_word_is_the_error(error: str, kind: type[RequestFailed]) -> None:
    async def script(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
        gateway.say(client, body, "", finish="error", error=error)
        return Generating(service="m-1", prompt_tokens=3)

    async def main() -> None:
        async with world(script) as (_, session):
            with pytest.raises(kind, match=error):
                await session.generate(request(), lambda delta: None)

    in_virtual_time(main)


def test_a_gateway_that_falls_silent_meets_the_deadline_and_is_told_to_stop() -> None:
    async def main() -> None:
        async with world(silent) as (made, session):
            began = trio.current_time()
            with pytest.raises(DeadlineExceeded, match="after 5 s"):
                await session.generate(request(deadline_s=5.0), lambda delta: None)
            assert 5 <= trio.current_time() - began < 8
            await made.gateways[0].was_stopped.wait()
            assert made.gateways[0].stopped == [made.gateways[0].asked[0].request]

    in_virtual_time(main)


@pytest.mark.parametrize("news_s", [None, 5.0], ids=["of an earlier release", "that was to say something"])
def test_another_gateway_is_asked_than_one_that_falls_silent_in_mid_answer(news_s: float | None) -> None:
    async def script(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
        gateway.say(client, body, WORDS[0], 1)
        return Generating(service="m-1", prompt_tokens=3, news_s=news_s)

    async def main() -> None:
        async with world(script, other_words) as (made, session):
            began = trio.current_time()
            answer = await session.generate(request(deadline_s=100.0), lambda delta: None)
            assert answer == COMPLETE
            waited = trio.current_time() - began
            assert 20.0 <= waited < 21.0 if news_s else 50.0 <= waited < 51.0
            assert made.gateways[0].stopped == [made.gateways[0].asked[0].request]
            assert made.gateways[1].continued[0].tokens == (1,)

    in_virtual_time(main)


def test_a_gateway_that_only_says_that_a_request_is_under_way_is_left_when_half_of_its_time_is_over() -> None:
    async def main() -> None:
        async with world(talker, whole) as (_, session):
            began = trio.current_time()
            assert await session.generate(request(deadline_s=100.0), lambda delta: None) == COMPLETE
            assert 50.0 <= trio.current_time() - began < 51.0

    in_virtual_time(main)


def test_a_silent_gateway_is_kept_while_there_is_no_other() -> None:
    async def slow(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
        gateway.nursery.start_soon(late, gateway, client, body)
        return Generating(service="m-1", prompt_tokens=3, news_s=1.0)

    async def late(gateway: Gateway, client: PeerId, body: Generate) -> None:
        await let_pass(80.0)
        await whole(gateway, client, body)

    async def main() -> None:
        async with world(slow) as (made, session):
            assert await session.generate(request(deadline_s=100.0), lambda delta: None) == COMPLETE
            assert made.gateways[0].stopped == []

    in_virtual_time(main)


async def talker(gateway: Gateway, client: PeerId, body: Generate) -> Generating:
    """Accepts, and says again and again that the request is under way."""

    async def talk() -> None:
        while body.request not in gateway.stopped:
            gateway.say(client, body, "")
            await let_pass(1.0)

    gateway.nursery.start_soon(talk)
    return Generating(service="m-1", prompt_tokens=3, news_s=1.0)


def test_a_network_without_a_model_says_what_is_missing() -> None:
    async def main() -> None:
        async with world() as (_, session):
            with pytest.raises(RequestFailed, match="no node of this network serves a model"):
                await session.generate(request(), lambda delta: None)

    in_virtual_time(main)


def test_a_service_that_nobody_has_is_refused_at_once_with_what_is_served() -> None:
    async def main() -> None:
        async with world(whole) as (_, session):
            began = trio.current_time()
            with pytest.raises(InvalidRequest, match=r"^service: nobody serves gpt; this network serves m-1$"):
                await session.generate(request(service="gpt"), lambda delta: None)
            assert trio.current_time() == began

    in_virtual_time(main)


def test_status_comes_from_a_node() -> None:
    async def main() -> None:
        async with world(whole) as (made, session):
            status = await session.status()
            assert status.answered_by in made.peers
            assert len(made.gateways) == 1

    in_virtual_time(main)


def test_a_bootstrap_that_is_not_there() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            made = World(nursery)  # nothing is started
            with pytest.raises(ConnectionFailed, match=r"10\.0\.0\.1:4001"):
                async with enter(made.client_network(), 1.0):
                    pass

    in_virtual_time(main)
