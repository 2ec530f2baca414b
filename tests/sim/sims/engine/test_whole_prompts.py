"""An engine without chunked prefill, as vLLM 0.6.0 by default: steps added up by hand, and random requests against its
rules written down one step at a time."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace

import pytest

from p2pserve.sims.engine.engine import Engine
from p2pserve.sims.engine.sequence import Sequence
from p2pserve.sims.engine.values import EngineSignal, SignalKind, SimEngineError, SimEngineSettings, StepRecord

from ....linear_times import LinearTimes
from .test_engine import TIMES, moments, run

WHOLE = SimEngineSettings(max_batched_tokens=100, max_sequences=8, block_tokens=4, chunked_prefill=False)
SECOND = LinearTimes(step=1.0)


def recorded(
    arrivals: list[tuple[float, Sequence]],
    *,
    times: LinearTimes = SECOND,
    kv_tokens: int = 4000,
    settings: SimEngineSettings = WHOLE,
) -> tuple[list[EngineSignal], list[StepRecord], Engine]:
    steps: list[StepRecord] = []
    engine = Engine(times, settings, kv_tokens=kv_tokens, record=steps.append)
    return run(engine, arrivals), steps, engine


def kinds(steps: list[StepRecord]) -> list[tuple[str, int, int, int]]:
    return [(step.kind, step.prompt_tokens, step.requests, step.steps) for step in steps]


def test_a_prompt_is_computed_alone_and_decoding_waits_for_it() -> None:
    news, steps, engine = recorded([(0.0, Sequence(1, 10, 20)), (2.5, Sequence(2, 20, 1))], times=TIMES)
    assert kinds(steps) == [("prefill", 10, 0, 1), ("decode", 0, 1, 2), ("prefill", 20, 0, 1), ("decode", 0, 1, 17)]
    begins = 1.1 + (1.1 + 0.010) + (1.1 + 0.011)  # the second ends after 2.5
    assert moments(news, SignalKind.FIRST_TOKEN) == {1: pytest.approx(1.1), 2: pytest.approx(begins + 1.2)}
    # 19 decode steps over 10 to 28 tokens of context, and 1.2 s in which it stood still
    assert moments(news, SignalKind.DONE)[1] == pytest.approx(1.1 + 1.2 + 19 * 1.1 + 0.361)
    assert [step.stalled for step in steps] == [0, 0, 1, 0]
    assert engine.counts.prefill_s == pytest.approx(2.3)
    assert engine.counts.mixed_s == 0.0


def test_prompts_that_keep_coming_stop_all_decoding() -> None:
    later = [(number + 0.5, Sequence(2 + number, 10, 1)) for number in range(3)]
    news, steps, _ = recorded([(0.0, Sequence(1, 10, 3)), *later])
    assert [step.kind for step in steps] == ["prefill"] * 4 + ["decode"]
    assert moments(news, SignalKind.DONE) == {1: 6.0, 2: 2.0, 3: 3.0, 4: 4.0}


def test_prompts_of_a_step_are_whole_and_in_order() -> None:
    asked = [(0.0, Sequence(number, prompt, 1)) for number, prompt in enumerate((60, 50, 30, 40))]
    _, steps, _ = recorded(asked)
    # 50 do not fit beside 60; the 40 would, but come later; nor do they fit beside 50 + 30
    assert [step.prompt_tokens for step in steps] == [60, 80, 40]


def test_a_prompt_longer_than_the_budget_is_computed_alone() -> None:
    _, steps, _ = recorded([(0.0, Sequence(1, 20, 1)), (0.0, Sequence(2, 130, 1)), (0.0, Sequence(3, 10, 1))])
    assert [step.prompt_tokens for step in steps] == [20, 130, 10]


def test_what_decodes_has_a_place_and_keeps_prompts_waiting() -> None:
    settings = replace(WHOLE, max_sequences=1)
    news, _, _ = recorded([(0.0, Sequence(1, 10, 4)), (0.0, Sequence(2, 10, 1))], settings=settings)
    assert moments(news, SignalKind.DONE) == {1: 4.0, 2: 5.0}


def test_the_latest_is_preempted_and_computed_again_when_it_fits() -> None:
    news, steps, engine = recorded([(0.0, Sequence(1, 16, 10)), (0.0, Sequence(2, 16, 10))], kv_tokens=40)
    # After four steps 20 tokens of each fill the 10 blocks. 2 loses its five; its 21 tokens need six, while 1 has six.
    expected = [("prefill", 32, 0, 1), ("decode", 0, 2, 4), ("decode", 0, 1, 1), ("decode", 0, 1, 4)]
    assert kinds(steps) == [*expected, ("prefill", 21, 0, 1), ("decode", 0, 1, 4)]
    assert moments(news, SignalKind.DONE) == {1: 10.0, 2: 15.0}
    assert moments(news, SignalKind.FIRST_TOKEN) == {1: 1.0, 2: 1.0}
    assert engine.counts.preemptions == 1


@pytest.mark.parametrize(("prompt", "begins"), [(392, 0), (396, 5)])
def test_a_hundredth_of_the_blocks_is_kept_for_what_decodes(prompt: int, begins: int) -> None:
    settings = replace(WHOLE, max_batched_tokens=1000)
    news, _, _ = recorded(
        [(0.0, Sequence(1, 400, 5)), (0.0, Sequence(2, prompt, 1))], kv_tokens=800, settings=settings
    )  # 1 has 100 of 200 blocks, 2 wants 98 or 99, and 2 are kept
    assert moments(news, SignalKind.DONE)[2] == begins + 1


def test_who_is_alone_may_have_all_blocks() -> None:
    news, _, _ = recorded([(0.0, Sequence(1, 800, 1))], kv_tokens=800)
    assert moments(news, SignalKind.DONE) == {1: 1.0}


def test_pipelines_are_not_simulated_so() -> None:
    with pytest.raises(SimEngineError, match="2 stages without chunked prefill"):
        Engine(SECOND, WHOLE, kv_tokens=400, stages=2)


@dataclass
class Written:
    """A request as the rules below see it."""

    key: int
    prompt: int
    answer: int
    generated: int = 0
    computed: int = 0


def compute_by_rules(
    asked: list[tuple[int, int, int]], settings: SimEngineSettings, blocks: int
) -> tuple[dict[int, int], dict[int, int], int]:
    """`asked`: step of arrival, prompt and answer. When each had its first and its last token, and how often one was
    preempted; each step takes a second."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    preempted = 0
    waiting: deque[Written] = deque()
    running: list[Written] = []
    coming = deque(Written(key, prompt, answer) for key, (_, prompt, answer) in enumerate(asked))

    def count_blocks(tokens: int) -> int:
        return -(-tokens // settings.block_tokens)

    def count_free() -> int:
        return blocks - sum(count_blocks(each.computed) for each in running)

    step = 0
    while coming or waiting or running:
        while coming and asked[coming[0].key][0] <= step:
            waiting.append(coming.popleft())
        computed: list[Written] = []
        budget = settings.max_batched_tokens
        while waiting:
            head = waiting[0]
            tokens = head.prompt + head.generated
            left = count_free() - count_blocks(tokens)
            if tokens > budget or len(running) >= settings.max_sequences:
                break
            if left < (int(blocks * 0.01) if running else 0):
                break
            head.computed = tokens
            budget -= tokens
            running.append(waiting.popleft())
            computed.append(head)
        if not computed:
            while sum(each.computed % settings.block_tokens == 0 for each in running) > count_free():
                loser = running.pop()
                loser.computed = 0
                waiting.appendleft(loser)
                preempted += 1
            computed = list(running)
            for each in computed:
                each.computed += 1
        step += 1
        for each in computed:
            each.generated += 1
            first.setdefault(each.key, step)
            if each.generated == each.answer:
                running.remove(each)
                last[each.key] = step
    return first, last, preempted


def draw(seed: int) -> tuple[list[tuple[int, int, int]], SimEngineSettings, int]:
    """Random requests, and an engine that each of them fits, but not all."""
    rng = random.Random(seed)
    asked = sorted((rng.randint(0, 60), rng.randint(1, 60), rng.randint(1, 40)) for _ in range(rng.randint(2, 30)))
    block_tokens = rng.choice((1, 4, 16))
    largest = max(-(-(prompt + answer - 1) // block_tokens) for _, prompt, answer in asked)
    settings = replace(
        WHOLE, max_batched_tokens=rng.randint(100, 150), max_sequences=rng.randint(1, 8), block_tokens=block_tokens
    )
    return asked, settings, rng.randint(largest, 4 * largest)


@pytest.mark.parametrize("seed", range(80))
def test_random_requests_go_by_the_rules(seed: int) -> None:
    asked, settings, blocks = draw(seed)
    engine = Engine(SECOND, settings, kv_tokens=blocks * settings.block_tokens)
    news = run(engine, [(float(step), Sequence(key, *lengths)) for key, (step, *lengths) in enumerate(asked)])
    first, last, preempted = compute_by_rules(asked, settings, blocks)
    assert moments(news, SignalKind.FIRST_TOKEN) == first
    assert moments(news, SignalKind.DONE) == last
    assert engine.counts.preemptions == preempted


def test_random_requests_have_what_that_is_about() -> None:
    preempted = [compute_by_rules(*draw(seed))[2] for seed in range(80)]
    assert sum(times > 0 for times in preempted) > 20
