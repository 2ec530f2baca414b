"""A replica's engine: steps added up by hand, queues against theory, memory, preemption, and skipping ahead."""

import random
from math import inf

import numpy as np
import pytest

from p2pserve.sims.engine.engine import Engine
from p2pserve.sims.engine.sequence import DecodeBatch, Sequence
from p2pserve.sims.engine.values import EngineSignal, SignalKind, SimEngineError, SimEngineSettings, StepRecord

from ....linear_times import LinearTimes

TIMES = LinearTimes(step=1.0, token=0.01, request=0.1, context=0.001)
SMALL = SimEngineSettings(max_batched_tokens=100, max_sequences=8, block_tokens=4)


def engine_of(
    times: LinearTimes = TIMES, settings: SimEngineSettings = SMALL, kv_tokens: int = 4000, stages: int = 1
) -> Engine:
    return Engine(times, settings, kv_tokens=kv_tokens, stages=stages)


def run(engine: Engine, arrivals: list[tuple[float, Sequence]]) -> list[EngineSignal]:
    """Let everything happen; the news in order, the engine whole after every step."""
    news: list[EngineSignal] = []
    todo = sorted(arrivals, key=lambda item: item[0])
    while todo or engine.wake_at < inf:
        if todo and todo[0][0] <= engine.wake_at:
            at, sequence = todo.pop(0)
            engine.submit(sequence, at)
        else:
            news += engine.advance(engine.wake_at)
        engine.check_integrity()
    return news


def moments(news: list[EngineSignal], kind: SignalKind) -> dict[int, float]:
    return {signal.sequence.key: signal.at for signal in news if signal.kind is kind}


def test_one_request_alone() -> None:
    engine = engine_of()
    news = run(engine, [(5.0, Sequence(7, 50, 4))])
    first = 5.0 + 1.0 + 0.5
    assert moments(news, SignalKind.FIRST_TOKEN) == {7: pytest.approx(first)}
    # three more tokens over 50, 51 and 52 tokens of context
    assert moments(news, SignalKind.DONE) == {7: pytest.approx(first + 3 * 1.1 + 0.153)}
    assert (engine.counts.prompt_tokens, engine.counts.output_tokens, engine.counts.steps) == (50, 4, 4)
    assert engine.counts.peak_blocks == 14  # 53 tokens: the last is never put into the cache
    assert engine.free_tokens == 4000


def test_a_long_prompt_is_prefilled_in_chunks_and_a_short_one_rides_along() -> None:
    steps: list[StepRecord] = []
    times = LinearTimes(step=1.0, token=0.01, pair=0.001)
    engine = Engine(times, SMALL, kv_tokens=4000, record=steps.append)
    news = run(engine, [(0.0, Sequence(1, 130, 1)), (0.0, Sequence(2, 40, 1))])
    assert [(step.kind, step.prompt_tokens) for step in steps] == [("prefill", 100), ("prefill", 70)]
    first = 1.0 + 1.0 + 5.05
    pairs = 30 * 100 + 30 * 31 / 2 + 40 * 41 / 2
    second = first + 1.0 + 0.7 + pairs / 1000
    assert moments(news, SignalKind.DONE) == {1: pytest.approx(second), 2: pytest.approx(second)}


def test_who_arrives_joins_at_the_next_step_and_is_prefilled_beside_the_decoding() -> None:
    steps: list[StepRecord] = []
    engine = Engine(TIMES, SMALL, kv_tokens=4000, record=steps.append)
    news = run(engine, [(0.0, Sequence(1, 10, 20)), (2.5, Sequence(2, 20, 1))])
    # 1 writes its first token at 1.1, decodes until 1.1 + 1.11 = 2.21 and 3.321, then 2 is read beside it
    assert [(step.kind, step.steps, step.requests) for step in steps] == [
        ("prefill", 1, 0),
        ("decode", 2, 1),
        ("mixed", 1, 1),
        ("decode", 16, 1),
    ]
    assert steps[1].end_s == pytest.approx(3.321)
    assert moments(news, SignalKind.FIRST_TOKEN)[2] == pytest.approx(3.321 + 1.0 + 0.2 + 0.1 + 0.012)


def test_an_arrival_on_a_boundary_joins_there() -> None:
    steps: list[StepRecord] = []
    times = LinearTimes(step=1.0)
    engine = Engine(times, SMALL, kv_tokens=4000, record=steps.append)
    run(engine, [(0.0, Sequence(1, 10, 9)), (3.0, Sequence(2, 10, 1))])
    assert [(step.kind, step.end_s) for step in steps] == [
        ("prefill", 1.0),
        ("decode", 3.0),
        ("mixed", 4.0),
        ("decode", 9.0),
    ]


def test_the_token_budget_leaves_prompts_what_decoding_does_not_take() -> None:
    steps: list[StepRecord] = []
    engine = Engine(LinearTimes(step=1.0), SMALL, kv_tokens=4000, record=steps.append)
    run(engine, [*((0.0, Sequence(key, 10, 50)) for key in range(6)), (1.5, Sequence(9, 150, 1))])
    mixed = [(step.prompt_tokens, step.requests) for step in steps if step.kind == "mixed"]
    assert mixed == [(94, 6), (56, 6)]


def test_no_more_sequences_than_max_requests() -> None:
    settings = SimEngineSettings(max_batched_tokens=100, max_sequences=2, block_tokens=4)
    engine = engine_of(LinearTimes(step=1.0), settings)
    news = run(engine, [(0.0, Sequence(key, 5, 3)) for key in range(4)])
    assert moments(news, SignalKind.DONE) == {0: 3.0, 1: 3.0, 2: 6.0, 3: 6.0}


def test_the_last_to_join_loses_its_memory_and_computes_again() -> None:
    # 6 blocks of 4: two prompts of 8 fill 4, and each grows by a block every 4 tokens
    engine = engine_of(LinearTimes(step=1.0), kv_tokens=24)
    news = run(engine, [(0.0, Sequence(1, 8, 9)), (0.0, Sequence(2, 8, 9))])
    assert engine.counts.preemptions == 1
    done = moments(news, SignalKind.DONE)
    # 4 steps later both want a fourth block: 2 goes, with 5 tokens decoded, and starts again when 1 is done at 9
    assert done == {1: 9.0, 2: 9.0 + 1.0 + 3.0}
    assert moments(news, SignalKind.FIRST_TOKEN) == {1: 1.0, 2: 1.0}  # told once
    assert engine.counts.prompt_tokens == 8 + 8 + 13
    assert engine.counts.output_tokens == 18


def test_a_prompt_waits_for_memory_and_those_behind_it_wait_too() -> None:
    engine = engine_of(LinearTimes(step=1.0), kv_tokens=40)
    news = run(engine, [(0.0, Sequence(1, 20, 5)), (0.5, Sequence(2, 30, 1)), (0.6, Sequence(3, 4, 1))])
    first = moments(news, SignalKind.FIRST_TOKEN)
    assert first[2] == first[3] == 6.0


def test_what_never_fits_is_refused() -> None:
    engine = engine_of(kv_tokens=40)
    assert engine.can_fit(Sequence(1, 40, 1))
    assert not engine.can_fit(Sequence(1, 40, 2))
    with pytest.raises(SimEngineError, match="needs more KV than the 10 blocks"):
        engine.submit(Sequence(1, 41, 1), 0.0)
    with pytest.raises(SimEngineError, match="less than a block"):
        engine_of(kv_tokens=3)
    with pytest.raises(SimEngineError, match="no token of a step would be left"):
        SimEngineSettings(max_batched_tokens=64, max_sequences=64)


def test_a_prompt_that_is_transferred_keeps_its_memory_until_it_is_released() -> None:
    engine = engine_of(kv_tokens=40)
    sequence = Sequence(1, 30, 0, sends_kv=True)
    news = run(engine, [(0.0, sequence)])
    assert [(signal.kind, signal.at, signal.tokens) for signal in news] == [
        (SignalKind.PREFILL_STEP, 1.3, 30),
        (SignalKind.PREFILLED, 1.3, 0),
    ]
    assert engine.free_tokens == 8
    engine.submit(Sequence(2, 20, 1), 2.0)
    assert engine.advance(2.0) == []
    assert engine.wake_at == inf
    engine.release_kv(sequence, 3.0)
    assert engine.wake_at == 3.0
    assert engine.advance(3.0) == []
    assert engine.wake_at == pytest.approx(4.2)


def test_kv_from_elsewhere_is_decoded_from_the_step_after_it_came() -> None:
    engine = engine_of()
    whole, part = Sequence(1, 31, 2, fresh=False, external=30), Sequence(2, 50, 1, external=30)
    engine.submit(whole, 0.0)
    engine.submit(part, 0.0)
    assert engine.has_blocks_for(whole)
    assert engine.has_blocks_for(part)
    assert engine.wake_at == inf
    engine.receive_kv(whole, 1.0)
    engine.receive_kv(part, 1.0)
    engine.check_integrity()
    news = run(engine, [])
    # 20 tokens of the second are prefilled beside the first's step over 30 tokens of context
    mixed = 1.0 + 1.0 + 0.2 + 0.1 + 0.03
    assert moments(news, SignalKind.FIRST_TOKEN) == {2: pytest.approx(mixed)}
    assert moments(news, SignalKind.DONE)[2] == pytest.approx(mixed)
    assert moments(news, SignalKind.DONE)[1] == pytest.approx(mixed + 1.0 + 0.1 + 0.031)
    assert engine.free_tokens == 4000


def test_the_first_token_of_kv_from_elsewhere_is_told_when_its_step_begins() -> None:
    engine = engine_of(LinearTimes(step=1.0))
    sequence = Sequence(1, 31, 5, external=30)
    engine.submit(sequence, 0.0)
    engine.receive_kv(sequence, 2.0)
    news = run(engine, [])
    assert moments(news, SignalKind.FIRST_TOKEN) == {1: 3.0}
    assert moments(news, SignalKind.DONE) == {1: 7.0}


def test_room_is_made_for_kv_when_somebody_ends() -> None:
    engine = engine_of(LinearTimes(step=1.0), kv_tokens=40)
    waits = Sequence(2, 25, 1, external=24)
    news = run(engine, [(0.0, Sequence(1, 20, 5)), (0.5, waits)])
    assert [signal.kind for signal in news if signal.sequence is waits] == [SignalKind.HAS_ROOM]
    assert engine.has_blocks_for(waits)


def test_what_no_kv_comes_for_is_computed_here() -> None:
    engine = engine_of(LinearTimes(step=1.0), kv_tokens=40)
    has_room, queued = Sequence(1, 25, 2, external=24), Sequence(2, 21, 2, external=20)
    engine.submit(has_room, 0.0)
    engine.submit(queued, 0.0)
    assert [engine.has_blocks_for(sequence) for sequence in (has_room, queued)] == [True, False]
    engine.expect_no_kv(queued, 1.0)
    engine.expect_no_kv(has_room, 1.0)  # has had its turn: it comes before the other one
    news = run(engine, [])
    assert moments(news, SignalKind.FIRST_TOKEN) == {1: 2.0, 2: 4.0}
    assert moments(news, SignalKind.DONE) == {1: 3.0, 2: 5.0}
    assert engine.free_tokens == 40
    engine.check_integrity()


def test_in_a_pipeline_prompts_follow_each_other() -> None:
    times = LinearTimes(step=4.0, interval_share=0.25)
    engine = engine_of(times, SimEngineSettings(max_batched_tokens=10, max_sequences=8, block_tokens=4), stages=4)
    news = run(engine, [(0.0, Sequence(key, 10, 1)) for key in range(3)])
    assert moments(news, SignalKind.DONE) == {0: 4.0, 1: 5.0, 2: 6.0}
    assert engine.counts.prefill_s == 3.0  # of the first stage


def test_in_a_pipeline_a_prompt_enters_as_soon_as_the_first_stage_is_free() -> None:
    times = LinearTimes(step=4.0, interval_share=0.25)
    engine = engine_of(times, SimEngineSettings(max_batched_tokens=10, max_sequences=8, block_tokens=4), stages=4)
    news = run(engine, [(0.0, Sequence(0, 10, 1)), (0.5, Sequence(1, 10, 1)), (2.5, Sequence(2, 10, 1))])
    assert moments(news, SignalKind.DONE) == {0: 4.0, 1: 5.0, 2: 6.5}


def test_in_a_pipeline_each_batch_prefills_within_its_own_budget() -> None:
    times = LinearTimes(token=0.4, request=1.0, interval_share=0.25)
    steps: list[StepRecord] = []
    settings = SimEngineSettings(max_batched_tokens=10, max_sequences=8, block_tokens=4)
    engine = Engine(times, settings, kv_tokens=4000, stages=4, record=steps.append)
    run(engine, [*((0.0, Sequence(key, 5, 9)) for key in range(4)), (9.0, Sequence(9, 27, 1))])
    (mixed,) = [step for step in steps if step.kind == "mixed"]
    # three of four batches prefill 9 tokens each; the slowest stage works 3 * 0.9 s longer than the 4 s of decoding
    assert mixed.prompt_tokens == 27
    assert mixed.end_s - mixed.start_s == pytest.approx(max(9 * 0.4 + 4.0, 4.0 + 3 * 0.9))


def test_a_lost_engine_says_how_far_it_had_got() -> None:
    engine = engine_of(LinearTimes(step=1.0))
    for key in (1, 2):
        engine.submit(Sequence(key, 10, 20), 0.0)
    engine.submit(Sequence(3, 30, 0, sends_kv=True), 0.0)
    engine.advance(0.0)
    engine.advance(1.0)
    engine.submit(Sequence(4, 10, 5, external=9), 2.0)
    lost = {sequence.key: sequence for sequence in engine.stop(5.5)}
    assert sorted(lost) == [1, 2, 3, 4]
    assert (lost[1].known, lost[1].left) == (15, 15)  # one token when it was prefilled, four since
    assert (lost[4].known, lost[4].left) == (10, 5)
    assert engine.wake_at == inf


def test_waiting_as_theory_has_it() -> None:
    """M/D/1, one prompt a step: the mean wait is rho / (2 (1 - rho)) service times. M/M/1: twice that."""
    count, rho = 40_000, 0.7
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(1.0 / rho, count)).tolist()
    settings = SimEngineSettings(max_batched_tokens=1000, max_sequences=1, block_tokens=1)
    engine = Engine(LinearTimes(step=1.0), settings, kv_tokens=1000)
    news = run_fast(engine, [(at, Sequence(key, 1000, 1)) for key, at in enumerate(arrivals)])
    done = moments(news, SignalKind.DONE)
    wait = np.mean([done[key] - arrivals[key] for key in range(count)]) - 1.0
    assert wait == pytest.approx(rho / (2 * (1 - rho)), rel=0.07)
    # the same load, but exponential service: prompts of one chunk with that many tokens
    tokens = np.maximum(1, np.rint(rng.exponential(1000.0, count))).astype(int)
    settings = SimEngineSettings(max_batched_tokens=30_000, max_sequences=1, block_tokens=1)
    engine = Engine(LinearTimes(token=1e-3), settings, kv_tokens=30_000)
    news = run_fast(engine, [(at, Sequence(key, int(tokens[key]), 1)) for key, at in enumerate(arrivals)])
    done = moments(news, SignalKind.DONE)
    stay = np.mean([done[key] - arrivals[key] for key in range(count)])
    assert stay == pytest.approx(1.0 / (1 - rho), rel=0.1)


def run_fast(engine: Engine, arrivals: list[tuple[float, Sequence]]) -> list[EngineSignal]:
    """`run`, without looking at every block after every step."""
    news: list[EngineSignal] = []
    for at, sequence in arrivals:
        while engine.wake_at < at:
            news += engine.advance(engine.wake_at)
        engine.submit(sequence, at)
    while engine.wake_at < inf:
        news += engine.advance(engine.wake_at)
    engine.check_integrity()
    return news


@pytest.mark.parametrize("seed", range(12))
def test_skipping_ahead_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same engine that takes every decode step by itself, under little and plenty of memory."""
    rng = random.Random(seed)
    kv_tokens = rng.choice((160, 400, 4000))
    arrivals = []
    for key in range(60):
        prompt = rng.randint(1, 90)
        arrivals.append((rng.uniform(0, 120), key, prompt, rng.randint(1, min(60, 150 - prompt))))

    def outcome() -> tuple[dict[int, float], dict[int, float], tuple[int, ...]]:
        engine = engine_of(kv_tokens=kv_tokens)
        news = run(engine, [(at, Sequence(key, prompt, output)) for at, key, prompt, output in arrivals])
        totals = engine.counts
        counts = (totals.steps, totals.prompt_tokens, totals.output_tokens, totals.preemptions)
        assert engine.free_tokens == kv_tokens
        return moments(news, SignalKind.FIRST_TOKEN), moments(news, SignalKind.DONE), counts

    fast = outcome()
    monkeypatch.setattr(DecodeBatch, "steps_to_ending", lambda batch: 1)
    plain = outcome()
    assert len(fast[1]) == 60
    assert fast[0] == pytest.approx(plain[0])
    assert fast[1] == pytest.approx(plain[1])
    assert fast[2] == plain[2]


def test_blocks_of_a_batch_as_counted_one_by_one() -> None:
    rng = random.Random(1)
    for _ in range(50):
        size = rng.randint(1, 7)
        batch = DecodeBatch(size)
        batch.step = rng.randint(0, 20)
        computed = [rng.randint(1, 30) for _ in range(rng.randint(1, 9))]
        for key, tokens in enumerate(computed):
            sequence = Sequence(key, tokens + 1, 100)
            sequence.computed = tokens
            batch.join(sequence)

        def taken(steps: int, size: int = size, computed: list[int] = computed) -> int:
            return sum(-(-(tokens + steps) // size) - -(-tokens // size) for tokens in computed)

        assert [batch.blocks_for(steps) for steps in range(25)] == [taken(steps) for steps in range(25)]
        for blocks in range(12):
            steps = batch.steps_within(blocks)
            assert taken(steps) <= blocks < taken(steps + 1)
