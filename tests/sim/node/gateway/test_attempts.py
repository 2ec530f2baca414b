"""Attempts at a request: both sides, the first token, and prefill replicas that fail."""

import msgspec
import pytest
import trio

from p2pserve.bootstrap import PeerId, RemoteError, Role
from p2pserve.coordinator.requests.values import RequestSettings
from p2pserve.node import messages
from p2pserve.node.requests.tokenizing import SHORT_BYTES

from .world import (
    ANSWER,
    CLIENT,
    D2,
    FIGURES,
    LATENCY_S,
    MODEL,
    PART,
    PROMPT_TOKENS,
    STEP_S,
    D,
    P,
    elapse,
    figures_of,
    open_world,
    plan_of,
    text_of,
    virtually,
)

SETTINGS = RequestSettings()


# ---- the way it should be ---------------------------------------------------------------------------------


def test_a_split_request() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            last = await world.answer()
            assert (last.finish, last.error) == ("length", "")
            assert world.tokens() == ANSWER[:12]
            assert world.text() == text_of(12)
            figures = figures_of(last)
            assert (figures.prefill_node, figures.decode_node, figures.attempts) == (P, D, 1)
            assert figures.transfer == FIGURES
            assert figures.recovered == ()
            assert (figures.prompt_tokens, figures.completion_tokens) == (len(PROMPT_TOKENS), 12)
            # two opens, a prefill step, then a decode step for each token but the first
            assert figures.ttft_s == pytest.approx(2 * LATENCY_S + STEP_S)
            assert figures.tpot_s == pytest.approx(STEP_S)
            assert figures.e2e_s == pytest.approx(2 * LATENCY_S + 12 * STEP_S)
            assert world.sent("decode.first") == [D]
            assert [kind for kind, _, _ in world.opened] == ["decode", "prefill"]
            assert world.sent("request.stop") == []
            assert world.sent("transfer.stop") == []

    virtually(main)


def test_only_long_prompts_are_tokenised_on_a_thread(threads: list[object]) -> None:
    async def main() -> None:
        async with open_world(D) as world:
            for size, hops in ((SHORT_BYTES, 0), (SHORT_BYTES + 1, 1)):
                with pytest.raises(RemoteError, match="max_tokens"):  # found out when the prompt has become tokens
                    await world.ask(prompt="a" * size, max_tokens=100_000)
                assert len(threads) == hops

    virtually(main)


def test_demand_is_what_clients_ask_for_and_nothing_when_they_no_longer_do() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            for _ in range(40):
                await world.answer(max_tokens=2)
                await elapse(1.0)
            demand = world.gateway.demand
            assert demand is not None
            assert 0.5 < demand.requests_s < 1.0
            assert set(demand.lengths) == {(len(PROMPT_TOKENS), 2)}
            await elapse(600.0)
            assert world.gateway.demand == msgspec.structs.replace(demand, requests_s=0.0)

    virtually(main)


def test_a_prefill_node_whose_part_is_over_is_free_for_the_next_request() -> None:
    """Although the first request's answer is still being written."""

    async def main() -> None:
        async with open_world(PeerId("p1"), PeerId("p2"), D) as world:
            for name in ("r1", "r2"):
                assert await world.ask(max_tokens=40) == name
                while not world.chunks[name]:
                    await elapse(STEP_S)
            assert [peer for kind, peer, _ in world.opened if kind == "prefill"] == ["p1", "p1"]
            await world.ask(max_tokens=40)
            await world.ask(max_tokens=40)  # at the same time
            await elapse(2 * LATENCY_S)
            assert {peer for kind, peer, _ in world.opened[4:] if kind == "prefill"} == {"p1", "p2"}

    virtually(main)


def test_one_box_alone_needs_no_transfer() -> None:
    async def main() -> None:
        async with open_world(D) as world:
            last = await world.answer()
            assert world.tokens() == ANSWER[:12]
            assert figures_of(last).prefill_node is None
            assert [(kind, peer) for kind, peer, _ in world.opened] == [("decode", D)]

    virtually(main)


def test_requests_in_flight_spread_over_decode_nodes_before_any_report() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            for _ in range(10):
                await world.ask()
            await elapse(3 * LATENCY_S)
            decodes = [peer for kind, peer, _ in world.opened if kind == "decode"]
            assert {decodes.count(D), decodes.count(D2)} == {5}
            await world.settle()

    virtually(main)


# ---- prefill fails ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["refuse", "timeout", "lost", "fail", "gone"])
def test_a_failed_prefill_is_computed_at_the_decode_node(fault: str) -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = [fault]
            last = await world.answer()
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:12]
            assert world.sent("transfer.stop") == [D]
            figures = figures_of(last)
            assert figures.attempts == 1
            assert figures.transfer is None
            assert len(figures.recovered) == 1
            assert "prefill node summer-sheep" in figures.recovered[0]

    virtually(main)


def test_a_prefill_node_that_leaves_after_its_work_has_not_failed() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            await world.ask()
            await elapse(2 * LATENCY_S + 2.5 * STEP_S)
            assert len(world.tokens()) == 2
            world.lose(P)
            await world.settle()
            figures = figures_of(world.chunks["r1"][-1])
            assert figures.recovered == ()
            assert figures.transfer == FIGURES
            assert world.sent("transfer.stop") == []

    virtually(main)


def test_a_prefill_that_may_have_been_accepted_is_stopped() -> None:
    """Its answer was lost, or the client left while it was on its way: it must not compute for
    nobody."""

    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = ["timeout", "timeout"]
            await world.answer()
            assert P in world.sent("request.stop")
            name = await world.ask()
            await elapse(3 * LATENCY_S)
            assert {job.kind for job in world.jobs.values()} == {"decode", "prefill"}
            world.gateway.stop(CLIENT, Role.CLIENT, messages.StopRequest(request=name))
            await world.settle()
            assert world.jobs == {}

    virtually(main)


def test_an_answer_does_not_wait_long_for_figures_that_do_not_come() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = ["late-silent"]
            name = await world.ask()
            await elapse(5 * LATENCY_S)
            (decode,) = [job for job in world.jobs.values() if job.kind == "decode"]
            decode.kv.set()  # the KV has arrived; only the sender's report is missing
            assert world.tokens() == ANSWER[:1]
            begun = trio.current_time()
            await world.settle()
            assert world.ended[name] - begun == pytest.approx(11 * STEP_S + SETTINGS.figures_grace_s)
            assert world.tokens() == ANSWER[:12]
            assert world.sent("request.stop") == [P]

    virtually(main)


@pytest.mark.parametrize(("share", "split"), [(1.0, len(PROMPT_TOKENS)), (0.5, -(-len(PROMPT_TOKENS) // 2)), (1e-9, 1)])
def test_the_prefill_node_reads_its_share_of_the_prompt(share: float, split: int) -> None:
    """Any part from the first token on; the decode node has all of the prompt and reads the rest."""

    async def main() -> None:
        async with open_world(P, D) as world:
            world.view.plans[MODEL.service] = plan_of(P, D, prefill_share=share)
            await world.answer()
            assert world.tokens() == ANSWER[:12]
            (_, _, decode), (_, _, prefill) = world.opened
            assert isinstance(decode, messages.DecodeOpen)
            assert (decode.prompt, decode.receive_tokens) == (PROMPT_TOKENS, split)
            whole = split == len(PROMPT_TOKENS)
            assert decode.awaits_first_token is whole
            assert [stage.peer for stage in decode.prefill] == [P]
            assert isinstance(prefill, messages.PrefillOpen)
            assert (prefill.prompt, prefill.slices) == (PROMPT_TOKENS[:split], (PART,))
            assert prefill.sampling == (decode.sampling if whole else None)
            assert world.sent("decode.first") == ([D] if whole else [])

    virtually(main)


# ---- the first token is the prefill node's ----------------------------------------------------------------


@pytest.mark.parametrize("fault", ["late-fail", "late-gone"])
def test_the_answer_goes_on_from_a_token_whose_kv_never_comes(fault: str) -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = [fault]
            last = await world.answer()
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:12]
            figures = figures_of(last)
            assert figures.ttft_s == pytest.approx(2 * LATENCY_S + STEP_S)
            assert figures.attempts == 1
            assert "prefill node summer-sheep" in figures.recovered[0]
            told = [method for peer, method, _ in world.notices if peer == D]
            assert told == ["decode.first", "transfer.stop"]  # in this order: the token counts

    virtually(main)


def test_the_decode_node_is_told_the_token_and_whoever_goes_on_has_the_same_seed() -> None:
    async def main() -> None:
        async with open_world(P, D, D2) as world:
            world.faults[D] = ["fail:0"]
            await world.answer(temperature=1.0, seed=5)
            told = next(message for _, _, message in world.notices if isinstance(message, messages.FirstToken))
            decode, replay = (body for kind, _, body in world.opened if kind == "decode")
            assert isinstance(decode, messages.DecodeOpen)
            assert isinstance(replay, messages.DecodeOpen)
            assert (told.request, told.token) == (decode.request, ANSWER[0])
            assert replay.sampling.seed == decode.sampling.seed == 5

    virtually(main)


def test_an_answer_that_begins_differently_at_the_decode_node_goes_on_from_what_was_shown() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[D] = ["other"]
            last = await world.answer()
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:12]
            figures = figures_of(last)
            assert figures.attempts == 2
            assert "began with another token" in figures.recovered[0]
            again = world.opened[2][2]
            assert isinstance(again, messages.DecodeOpen)
            assert again.prompt == PROMPT_TOKENS + ANSWER[:1]
            assert again.sampling.max_tokens == 11
            assert D in world.sent("request.stop")

    virtually(main)


def test_a_decode_node_that_does_not_wait_for_the_first_token_writes_the_same_one() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[D] = ["alone"]
            last = await world.answer()
            assert world.tokens() == ANSWER[:12]
            assert figures_of(last).attempts == 1

    virtually(main)


def test_a_first_token_that_comes_when_the_decode_node_has_begun_is_not_heard() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults.update({P: ["silent"], D: ["alone"]})
            await world.ask()
            await elapse(3 * LATENCY_S)
            decode, prefill = sorted(world.jobs.values(), key=lambda job: job.kind)
            decode.kv.set()
            await elapse(2.5 * STEP_S)
            begun = world.tokens()
            assert begun == ANSWER[: len(begun)] != ()
            late = messages.Tokens(request=prefill.request, tokens=(ANSWER[0] ^ 1,))
            world.gateway.on_tokens(P, Role.WORKER, late)
            await world.settle()
            assert world.tokens() == ANSWER[:12]
            assert world.sent("decode.first") == []

    virtually(main)


@pytest.mark.parametrize("how", ["end of text", "stop string"])
def test_an_answer_that_ends_with_its_first_token_needs_no_decode_node(how: str) -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = ["end" if how == "end of text" else "late-silent"]
            last = await world.answer(stop=() if how == "end of text" else (text_of(1),))
            assert (last.finish, last.error) == ("stop", "")
            assert world.tokens() == ANSWER[:1]
            assert world.text() == (text_of(1) if how == "end of text" else "")
            assert world.ended["r1"] == pytest.approx(2 * LATENCY_S + STEP_S)
            assert D in world.sent("request.stop")
            assert world.sent("decode.first") == []
            figures = figures_of(last)
            assert (figures.completion_tokens, figures.tpot_s, figures.recovered) == (1, 0.0, ())

    virtually(main)


def test_a_single_token_is_decoded_by_whoever_prefills() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            last = await world.answer(max_tokens=1)
            assert last.finish == "length"
            assert world.tokens() == ANSWER[:1]
            assert [(kind, peer) for kind, peer, _ in world.opened] == [("decode", P)]
            assert (figures_of(last).prefill_node, figures_of(last).decode_node) == (None, P)
            world.view.plans[MODEL.service] = plan_of(P, D, prefill_share=0.5)
            await world.answer(max_tokens=1)
            assert [(kind, peer) for kind, peer, _ in world.opened[1:]] == [("decode", D), ("prefill", P)]

    virtually(main)


def test_a_prefill_node_that_has_been_given_up_is_not_heard() -> None:
    async def main() -> None:
        async with open_world(P, D) as world:
            world.faults[P] = ["fail"]
            await world.ask()
            await elapse(2 * LATENCY_S + 1.5 * STEP_S)
            (decode,) = world.jobs.values()
            assert world.tokens() == ()
            late = messages.Tokens(request=decode.request, tokens=(ANSWER[0] ^ 1,))
            world.gateway.on_tokens(P, Role.WORKER, late)
            await world.settle()
            assert world.tokens() == ANSWER[:12]

    virtually(main)
