"""Decode replicas that fail, engines that are not there, and deadlines."""

import pytest
import trio

from p2pserve.bootstrap import PeerId, Role
from p2pserve.coordinator.requests.values import RequestSettings
from p2pserve.node import messages
from p2pserve.node.view import NetworkView

from .world import (
    ANSWER,
    D2,
    LATENCY_S,
    PROMPT_TOKENS,
    SERVICE,
    STEP_S,
    D,
    P,
    elapse,
    figures_of,
    open_world,
    text_of,
    virtually,
)

SETTINGS = RequestSettings()


# ---- decode fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["fail:5", "gone:5", "fail:0", "gone:0"])
def test_a_lost_decode_node_costs_no_token(fault: str) -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            world.faults[D] = [fault]
            last = await world.answer()
            done = max(1, int(fault.partition(":")[2]))  # the first token was the prefill node's
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:12]
            assert world.text() == text_of(12)
            figures = figures_of(last)
            assert (figures.attempts, figures.decode_node) == (2, D2)
            assert "decode node vivid-boar" in figures.recovered[0]
            again = world.opened[2][2]
            assert isinstance(again, messages.DecodeOpen)
            assert again.prompt == PROMPT_TOKENS + ANSWER[:done]
            assert again.sampling.max_tokens == 12 - done

    virtually(main)


def test_a_request_that_engines_end_with_is_given_up() -> None:
    """With the fourth it would have been answered; but it may be what ends them."""

    async def main() -> None:
        names = [PeerId(f"d{i}") for i in range(1, 6)]
        async with open_world(P, *names) as world:
            for name in names:
                world.faults[name] = ["fail:0"]
            last = await world.answer()
            assert last.finish == "error"
            assert last.error.startswith("given up: 3 engines in a row failed with it (decode node vivid-boar")
            assert last.error.count("the engine process ended") == 3
            assert sum(bool(faults) for faults in world.faults.values()) == 2  # the others have not been asked
            assert world.tokens() == ANSWER[:3]  # of prefill nodes

    virtually(main)


def test_engines_that_fail_one_after_the_other_and_add_to_an_answer_are_no_reason_to_give_up() -> None:
    async def main() -> None:
        names = [PeerId(f"d{i}") for i in range(1, 6)]
        async with open_world(P, *names) as world:
            for name in names[:4]:
                world.faults[name] = ["fail:2"]
            last = await world.answer()
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:12]

    virtually(main)


@pytest.mark.parametrize("fault", ["refuse", "timeout", "lost"])
def test_a_decode_node_that_refuses_is_passed_over(fault: str) -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            world.faults[D] = [fault]
            last = await world.answer()
            assert world.tokens() == ANSWER[:12]
            assert figures_of(last).decode_node == D2
            assert [(kind, peer) for kind, peer, _ in world.opened] == [("decode", D), ("decode", D2), ("prefill", P)]
            if fault == "timeout":  # it may have heard the request
                assert D in world.sent("request.stop")

    virtually(main)


def test_what_no_engine_would_serve_is_not_tried_at_the_next() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            world.faults[D] = ["never"]
            last = await world.answer()
            assert last.finish == "error"
            assert "the prompt is too long" in last.error
            assert [peer for kind, peer, _ in world.opened if kind == "decode"] == [D]
            assert world.sent("request.stop")  # at least the prefill that goes with it

    virtually(main)


def test_a_bug_costs_the_request_that_meets_it_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            other = await world.ask()
            await elapse(LATENCY_S)
            with monkeypatch.context() as patched:
                patched.setattr(NetworkView, "find_fault", None)
                last = await world.answer()
            assert last.error == "internal error: TypeError"
            assert world.chunks[other][-1].finish == "length"
            assert world.tokens(other) == ANSWER[:12]

    virtually(main)
    assert "Traceback" in caplog.text


def test_late_words_of_a_lost_attempt_are_not_heard() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            del world.view.adverts[P]  # decode nodes do all
            world.faults[D] = ["fail:3"]
            name = await world.ask()
            await elapse(2 * LATENCY_S + 4 * STEP_S)
            first, second = (body.request for _, _, body in world.opened if isinstance(body, messages.DecodeOpen))
            assert first != second
            for request, peer in ((first, D), (second, D), (second, P)):
                world.gateway.on_tokens(peer, Role.WORKER, messages.Tokens(request=request, tokens=(1, 2, 3)))
            await world.settle()
            assert world.tokens(name) == ANSWER[:12]

    virtually(main)


def test_an_engine_that_restarts_is_waited_for_and_used_again() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            name = await world.ask()
            await elapse(LATENCY_S + 4.5 * STEP_S)
            assert len(world.tokens()) == 4
            world.engine_lost(D)
            await elapse(10 * SETTINGS.no_engine_grace_s)
            assert name not in world.ended
            world.set_engine(D, "ready", starts=2)
            await world.settle()
            assert world.tokens() == ANSWER[:12]
            assert figures_of(world.chunks[name][-1]).attempts == 2

    virtually(main)


def test_the_engine_that_failed_is_not_asked_again_until_it_has_been_restarted() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.faults[D] = ["fail:2"]
            last = await world.answer()
            assert last.finish == "error"
            assert world.tokens() == ANSWER[:2]
            assert len(world.opened) == 1
            assert "no engine is left" in last.error
            assert "the engine process ended" in last.error

    virtually(main)


def test_a_node_that_comes_back_counts_its_starts_anew() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.set_engine(D, starts=4)
            world.faults[D] = ["fail:2"]
            await world.ask()
            await elapse(LATENCY_S + 3 * STEP_S)
            world.set_engine(D, starts=1)
            await world.settle()
            assert world.tokens() == ANSWER[:12]

    virtually(main)


def test_an_engine_that_sends_too_much_is_cut_off() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.faults[D] = ["wide:7"]
            last = await world.answer()
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:12]
            assert world.sent("request.stop") == [D]

    virtually(main)


# ---- no engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [None, "failed", "draining", "no plan"])
def test_no_engine_is_a_clear_error_in_time(state: str | None) -> None:
    async def main() -> None:
        async with open_world() as world:
            if state == "failed":
                world.follow(D)
                world.set_engine(D, "failed")
            elif state == "draining":
                world.follow(D)
                world.set_engine(D, draining=True)
            elif state == "no plan":
                world.set_engine(D)
            last = await world.answer()
            assert last.finish == "error"
            assert last.error.startswith(f"no engine is left for {SERVICE}: ")
            assert "\n" not in last.error
            assert last.figures is None
            assert SETTINGS.no_engine_grace_s <= world.ended["r1"] <= SETTINGS.no_engine_grace_s + 1.1
            assert world.tokens() == ()

    virtually(main)


def test_an_engine_that_comes_within_the_grace_is_used_at_once() -> None:
    async def main() -> None:
        async with open_world() as world:
            await world.ask()
            await elapse(SETTINGS.no_engine_grace_s - 0.5)
            world.follow(D)
            before = trio.current_time()
            await world.settle()
            assert world.tokens() == ANSWER[:12]
            assert world.ended["r1"] - before == pytest.approx(LATENCY_S + 12 * STEP_S)

    virtually(main)


@pytest.mark.parametrize("case", ["no engine", "starting for ever", "hangs", "opening hangs"])
def test_the_deadline_ends_every_wait(case: str) -> None:
    async def main() -> None:
        async with open_world() as world:
            if case == "starting for ever":
                world.set_engine(D, "starting", starts=0)
            elif case in ("hangs", "opening hangs"):
                world.follow(D)
                world.faults[D] = ["hang:3" if case == "hangs" else "timeout"]
            last = await world.answer(deadline_s=3.0)
            assert last.finish == "error"
            assert last.error.startswith("deadline: the answer was not complete after 3.0 s")
            assert world.ended["r1"] == pytest.approx(3.0)
            assert world.tokens() == ANSWER[: 3 if case == "hangs" else 0]
            if case in ("hangs", "opening hangs"):
                assert world.sent("request.stop") == [D]

    virtually(main)


def test_a_deadline_tells_what_went_wrong_before() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            world.faults.update({D: ["fail:2"], D2: ["hang:2"]})
            last = await world.answer(deadline_s=2.0)
            assert last.error.startswith("deadline: ")
            assert "decode node vivid-boar: the engine process ended" in last.error
            assert world.tokens() == ANSWER[:4]
            assert figures_of(last).completion_tokens == 4

    virtually(main)


def test_an_engines_own_deadline_leaves_the_last_word_to_the_gateway() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            world.faults[D] = ["hang:2"]
            await world.ask(deadline_s=1.0)
            await elapse(0.5)
            (job,) = world.jobs.values()
            world.gateway.on_tokens(D, Role.WORKER, messages.Tokens(request=job.request, finish="deadline"))
            await world.settle()
            assert world.chunks["r1"][-1].error.startswith("deadline: ")
            assert world.ended["r1"] == pytest.approx(1.0)

    virtually(main)
