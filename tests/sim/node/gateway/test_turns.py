"""Clients that ask for more than their part: what is refused, what waits, and who is not made to wait."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from p2pserve.bootstrap import PeerId, RemoteError, Role
from p2pserve.coordinator import LatencyProfile, PhaseCost, PhaseFit
from p2pserve.coordinator.requests.fair_queue import OverQuota
from p2pserve.coordinator.requests.values import RequestSettings
from p2pserve.node import messages
from p2pserve.node.messages import MAX_PROMPT_BYTES
from p2pserve.node.requests.tokenizing import SHORT_BYTES, Tokenizing
from p2pserve.node.settings import ClientLimits

from .world import (
    ANSWER,
    CLIENT,
    LATENCY_S,
    PROMPT,
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

HOG = PeerId("hog")
PLACES = 32
SETTINGS = RequestSettings()


async def refusal(world: World, client: PeerId = CLIENT, **settings: Any) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        await world.ask(client, **settings)
    return caught.value


def decoding(world: World) -> int:
    return sum(job.kind == "decode" for job in world.jobs.values())


# ---- quotas -----------------------------------------------------------------------------------------------


def test_what_is_over_a_clients_quota_is_refused_at_once_with_a_time_to_try_again() -> None:
    async def main() -> None:
        async with open_world(P, D, limits=ClientLimits(requests=3)) as world:
            for _ in range(3):
                await world.ask(HOG)
            error = await refusal(world, HOG)
            assert error.code == "busy"
            assert error.retry_after_s is not None
            assert error.message == (
                f"busy: this client has 3 requests here, the most of one; try again in {error.retry_after_s:g} s"
            )
            assert (await world.answer()).finish == "length"  # another client's
            await world.ask(HOG)

    virtually(main)


def test_prompts_and_answers_count_by_their_tokens() -> None:
    async def main() -> None:
        size = len(PROMPT_TOKENS)
        async with open_world(D, limits=ClientLimits(tokens=2 * size + 4)) as world:
            await world.ask(HOG)
            await world.ask(HOG)
            await elapse(LATENCY_S + 4 * STEP_S)
            error = await refusal(world, HOG)
            assert error.code == "busy"
            assert "this client's requests have" in error.message
            await world.settle()
            await world.ask(HOG)

    virtually(main)


def test_all_clients_together_have_a_quota() -> None:
    async def main() -> None:
        async with open_world(D, limits=ClientLimits(all_requests=4)) as world:
            for number in range(4):
                await world.ask(PeerId(f"hog{number}"))
            error = await refusal(world)
            assert (error.code, error.message[:40]) == ("busy", "busy: 4 requests of all clients are here")

    virtually(main)


def test_an_answer_that_is_continued_counts_from_its_beginning() -> None:
    async def main() -> None:
        limits = ClientLimits(tokens=len(PROMPT_TOKENS) + 100)
        async with open_world(D, limits=limits) as world:
            await world.ask(HOG)
            body = messages.Generate(request="r", prompt=PROMPT, max_tokens=150)
            continued = messages.ContinueGenerate(generate=body, tokens=ANSWER[:101])
            with pytest.raises(RemoteError) as caught:
                await world.gateway.continue_answer(HOG, Role.CLIENT, continued)
            assert caught.value.code == "busy"
            await world.gateway.continue_answer(CLIENT, Role.CLIENT, continued)  # who has nothing else here may

    virtually(main)


# ---- text -------------------------------------------------------------------------------------------------


def test_text_that_is_too_long_is_refused_before_it_is_tokenised(threads: list[object]) -> None:
    async def main() -> None:
        async with open_world(D) as world:
            for size in (100_000, MAX_PROMPT_BYTES, MAX_PROMPT_BYTES + 1):
                error = await refusal(world, prompt="x" * size)
                assert error.code == "invalid"
                assert error.message.startswith(f"prompt: {size} ")
            assert threads == []

    virtually(main)


class Threads:
    """Work of a second each, in place of threads; `keys` in the order in which it began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running = self.most = 0
        monkeypatch.setattr(trio.to_thread, "run_sync", self._run_sync)

    async def _run_sync(self, function: Callable[[], Any], *, limiter: trio.CapacityLimiter) -> Any:
        async with limiter:
            found = function()
            self.running += 1
            self.most = max(self.most, self.running)
            await elapse(1.0)
            self.running -= 1
            return found


def tokenise_all(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[PeerId, int]], limits: ClientLimits | None = None
) -> tuple[list[PeerId], list[OverQuota], Threads]:
    """Whose prompts of these sizes were begun in which order, what was refused, and how many ran at once."""
    began: list[PeerId] = []
    refused: list[OverQuota] = []

    async def main() -> None:
        tokenizing = Tokenizing(limits or ClientLimits())

        async def one(number: int, client: PeerId, size: int) -> None:
            try:
                await tokenizing.run((client, str(number)), size, lambda: began.append(client))
            except OverQuota as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            for number, (client, size) in enumerate(asked):
                nursery.start_soon(one, number, client, size)
                await trio.testing.wait_all_tasks_blocked()
        assert "0 wait, 0 served" in repr(tokenizing)

    threads = Threads(monkeypatch)
    virtually(main)
    return began, refused, threads


def test_a_client_has_one_thread_and_others_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    began, _, threads = tokenise_all(monkeypatch, [(HOG, 1000)] * 6 + [(CLIENT, 1000)] * 2)
    assert began[:2] == [HOG, CLIENT]
    assert set(began[2:4]) == {HOG, CLIENT}
    assert threads.most == 2


def test_little_text_does_not_wait_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    began, _, _ = tokenise_all(monkeypatch, [(HOG, 1000)] * 3 + [(HOG, SHORT_BYTES)])
    assert began == [HOG] * 4
    began, _, threads = tokenise_all(monkeypatch, [(CLIENT, SHORT_BYTES)])
    assert (began, threads.most) == ([CLIENT], 0)


def test_so_many_bytes_are_tokenised_at_once_and_a_long_prompt_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ClientLimits(tokenizing_bytes=10_000)
    _, _, threads = tokenise_all(monkeypatch, [(HOG, 6000), (CLIENT, 6000)], limits)
    assert threads.most == 1
    _, _, threads = tokenise_all(monkeypatch, [(HOG, 6000), (CLIENT, 4000)], limits)
    assert threads.most == 2
    began, _, _ = tokenise_all(monkeypatch, [(HOG, 60_000)], limits)
    assert began == [HOG]


def test_text_that_waits_is_bounded_for_a_client_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ClientLimits(prompts=3, text_bytes=5000, all_text_bytes=8000)
    for asked, complaint in (
        ([(HOG, 600)] * 4, "this client has 3 prompts that wait to be tokenised here"),
        ([(HOG, 2500)] * 3, "this client's prompts that wait to be tokenised have 5000 bytes here"),
        ([(HOG, 5000), (PeerId("b"), 3000), (PeerId("c"), 600)], "of all clients have 8000 bytes here"),
    ):
        began, (error,), _ = tokenise_all(monkeypatch, asked, limits)
        assert complaint in str(error)
        assert len(began) == len(asked) - 1


def test_the_default_limits_let_the_longest_prompt_pass_and_answer_before_sessions_do() -> None:
    """A client with as many calls under way as its session serves would hear of no time to try again in line."""
    from p2pserve.bootstrap import NetworkSettings

    limits = ClientLimits()
    assert limits.text_bytes >= MAX_PROMPT_BYTES
    assert limits.tokenizing_bytes >= MAX_PROMPT_BYTES
    assert limits.prompts < NetworkSettings().max_requests


# ---- turns ------------------------------------------------------------------------------------------------


def test_engines_are_given_what_they_run_at_once_and_a_part_of_it_is_left_for_others() -> None:
    async def main() -> None:
        async with open_world(D, limits=ClientLimits(share=7.0)) as world:
            world.set_engine(D, places=PLACES)
            for _ in range(100):
                await world.ask(HOG)
            most = 0
            while not world.gateway.idle:
                most = max(most, decoding(world))
                await elapse(STEP_S / 2)
            assert most == PLACES * 7 // 8

    virtually(main)


def test_a_client_of_few_requests_is_not_made_to_wait_by_one_of_many() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.set_engine(D, places=PLACES)
            alone = figures_of(await world.answer())
            for _ in range(250):
                await world.ask(HOG, max_tokens=50)
            for _ in range(5):
                beside = figures_of(await world.answer_beside())
                assert beside.ttft_s <= 2 * alone.ttft_s
                assert beside.e2e_s <= 2 * alone.e2e_s
            assert decoding(world) > PLACES / 2
            world.gateway.peer_lost(HOG)

    virtually(main)


def test_what_waits_for_its_turn_misses_its_deadline_like_anything_else() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.set_engine(D, places=1)
            first = await world.ask(max_tokens=100)
            second = await world.ask(deadline_s=0.5)
            await elapse(0.6)
            assert world.chunks[second][-1].error.startswith("deadline: the answer was not complete after 0.5 s")
            assert world.ended[second] == pytest.approx(0.5)
            await world.settle()
            assert len(world.tokens(first)) == 100

    virtually(main)


@pytest.mark.parametrize("how", ["gone", "stops"])
def test_who_leaves_while_it_waits_is_not_waited_for(how: str) -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.set_engine(D, places=1)
            await world.ask()
            waiting = [await world.ask(HOG) for _ in range(3)]
            if how == "gone":
                world.gateway.peer_lost(HOG)
            else:
                for name in waiting:
                    world.gateway.stop(HOG, Role.CLIENT, messages.StopRequest(request=name))
            await world.ask()
            await world.settle()
            assert len(world.opened) == 2

    virtually(main)


def test_without_an_engine_nobody_waits_for_others() -> None:
    """All hear after the same time that there is none, however many they are."""

    async def main() -> None:
        async with open_world() as world:
            names = [await world.ask() for _ in range(100)]
            await elapse(SETTINGS.no_engine_grace_s + SETTINGS.route_retry_s)
            assert set(names) <= world.ended.keys()
            assert {world.chunks[name][-1].error[:17] for name in names} == {"no engine is left"}

    virtually(main)


def test_turns_begin_when_an_engine_comes_and_go_on_when_it_comes_back() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.set_engine(D, "starting")
            for _ in range(40):
                await world.ask(HOG)
            name = await world.ask()
            await elapse(1.0)
            assert world.opened == []
            world.set_engine(D, places=8)
            await elapse(LATENCY_S)
            assert decoding(world) <= 8
            world.engine_lost(D)
            await elapse(1.0)
            world.set_engine(D, places=8, starts=2)
            await world.settle()
            assert world.tokens(name) == ANSWER[:12]
            assert world.ended[name] < 3.5

    virtually(main)


def test_an_engine_that_fails_does_not_lose_its_requests_their_turns() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.set_engine(D, places=2)
            world.faults[D] = ["fail:3", "fail:3"]
            names = [await world.ask() for _ in range(6)]
            await world.settle()
            assert len(world.ended) == 6
            assert world.tokens(names[-1]) == ANSWER[:12]

    virtually(main)


def test_a_turn_comes_when_an_engine_should_be_nearly_done_though_nothing_is_heard_of_it() -> None:
    """So its next prompt is there when it is: the engine computes 2 tokens of a prompt in a tenth of a second."""
    seconds = len(PROMPT_TOKENS) / 20

    async def main() -> None:
        limits = ClientLimits(queued_s=seconds)
        async with open_world(D, limits=limits) as world:
            cost = PhaseFit(cost=PhaseCost(token_s=0.05), samples=100, error=0.0)
            world.view.adverts[D] = msgspec.structs.replace(world.view.adverts[D], profile=LatencyProfile(prefill=cost))
            world.gateway.network_changed()
            world.faults[D] = ["hang:0"] * 3
            for _ in range(3):
                await world.ask()
            await elapse(2 * LATENCY_S)
            assert decoding(world) == 2, "one that starts, and one that waits for it"
            await elapse(2 * seconds - 0.1)
            assert decoding(world) == 2
            await elapse(0.2)
            assert decoding(world) == 3
            world.gateway.peer_lost(CLIENT)

    virtually(main)
