"""An engine that several services share: steps added up by hand, memory, and what is never lost."""

import random
from collections.abc import Callable, Mapping
from math import inf

import pytest

from p2pserve.coordinator.sharing.baselines import FirstComeFirstServed
from p2pserve.coordinator.sharing.doubling_budget import DoublingBudget
from p2pserve.coordinator.sharing.kv_shares import KvShares
from p2pserve.coordinator.sharing.orders import TURN_ORDERS
from p2pserve.coordinator.sharing.service_profile import ExpectedMoments, ExpectedService, ServiceProfile
from p2pserve.coordinator.sharing.turn_queue import TurnOrder
from p2pserve.sims.engine.sequence import Sequence
from p2pserve.sims.engine.shared_engine import SharedEngine, SharedService
from p2pserve.sims.engine.values import EngineSignal, SignalKind, SimEngineError, SimEngineSettings, StepRecord

from ....linear_times import LinearTimes

SMALL = SimEngineSettings(max_batched_tokens=100, max_sequences=8, block_tokens=4)
FAST = LinearTimes(step=1.0, token=0.01, request=0.1, context=0.001)
SLOW = LinearTimes(step=2.0, token=0.02, request=0.2, context=0.002)
MakeOrder = Callable[[Mapping[str, ServiceProfile]], TurnOrder]
LENGTHS = {"slow": (180, 16), "fast": (100, 2)}
Arrival = tuple[float, str, Sequence]


def profile(execution_s: float) -> ServiceProfile:
    return ServiceProfile(
        ExpectedService(
            execution=ExpectedMoments(execution_s, 0.0),
            prompt_tokens=ExpectedMoments(50.0, 0.0),
            output_tokens=ExpectedMoments(4.0, 0.0),
            prefill_token=ExpectedMoments(0.03, 0.0),
            decode_step=ExpectedMoments(1.1, 0.0),
        )
    )


def engine_of(make_order: MakeOrder, kv_tokens: int = 4000, steps: list[StepRecord] | None = None) -> SharedEngine:
    """A token of `slow` has twice the KV of one of `fast`."""
    services = {"fast": SharedService(FAST, 10, profile(5.0)), "slow": SharedService(SLOW, 20, profile(30.0))}
    return SharedEngine(
        services, make_order, SMALL, kv_bytes=10 * kv_tokens, record=None if steps is None else steps.append
    )


def run(engine: SharedEngine, arrivals: list[Arrival]) -> list[EngineSignal]:
    """Let everything happen, the engine whole after every step."""
    signals: list[EngineSignal] = []
    todo = sorted(arrivals, key=lambda item: item[0])
    while todo or engine.wake_at < inf:
        if todo and todo[0][0] <= engine.wake_at:
            at, service, sequence = todo.pop(0)
            engine.submit(service, sequence, at)
        else:
            signals += engine.advance(engine.wake_at)
        engine.check_integrity()
    return signals


def moments(signals: list[EngineSignal], kind: SignalKind) -> dict[int, float]:
    return {signal.sequence.key: signal.at for signal in signals if signal.kind is kind}


def random_arrivals(seed: int, count: int, rate: float) -> list[Arrival]:
    rng = random.Random(seed)
    now, arrivals = 0.0, list[Arrival]()
    for key in range(count):
        now += rng.expovariate(rate)
        service = rng.choice(("fast", "slow"))
        arrivals.append((now, service, Sequence(key, rng.randrange(1, 250), rng.randrange(1, 40))))
    return arrivals


@pytest.mark.parametrize("name", TURN_ORDERS)
def test_one_request_alone_takes_what_it_takes_in_an_engine_of_its_own(name: str) -> None:
    engine = engine_of(TURN_ORDERS[name])
    signals = run(engine, [(5.0, "fast", Sequence(7, 50, 4))])
    first = 5.0 + 1.0 + 0.5
    assert moments(signals, SignalKind.FIRST_TOKEN) == {7: pytest.approx(first)}
    # three more tokens over 50, 51 and 52 tokens of context
    assert moments(signals, SignalKind.DONE) == {7: pytest.approx(first + 3 * 1.1 + 0.153)}
    assert (engine.counts.prompt_tokens, engine.counts.output_tokens, engine.counts.steps) == (50, 4, 4)
    assert engine.shares.free == engine.shares.budget


def test_services_step_one_at_a_time_by_priority() -> None:
    """`slow` has a budget of 30 and O = 900 at first; `fast` 5 and 25, so it steps as soon as it is there."""
    steps: list[StepRecord] = []
    engine = engine_of(DoublingBudget, steps=steps)
    signals = run(engine, [(0.0, "slow", Sequence(1, 50, 3)), (0.5, "fast", Sequence(2, 50, 2))])
    assert [(step.kind, round(step.end_s - step.start_s, 3)) for step in steps] == [
        ("prefill", 3.0),  # slow: 2 + 50 * 0.02
        ("prefill", 1.5),  # fast: 1 + 50 * 0.01
        ("decode", 1.15),  # fast: 1 + 0.1 + 50 * 0.001
        ("decode", 2.3),  # slow: 2 + 0.2 + 50 * 0.002
        ("decode", 2.302),
    ]
    done = moments(signals, SignalKind.DONE)
    assert done == {2: pytest.approx(5.65), 1: pytest.approx(10.252)}


def test_in_order_of_arrival_the_long_request_blocks_the_short_one() -> None:
    arrivals: list[Arrival] = [(0.0, "slow", Sequence(1, 50, 3)), (0.5, "fast", Sequence(2, 50, 2))]
    signals = run(engine_of(lambda profiles: FirstComeFirstServed()), arrivals)
    done = moments(signals, SignalKind.DONE)
    assert done == {1: pytest.approx(3.0 + 2.3 + 2.302), 2: pytest.approx(7.602 + 1.5 + 1.15)}


def test_a_long_prompt_is_computed_in_chunks_between_which_others_have_turns() -> None:
    steps: list[StepRecord] = []
    engine = engine_of(DoublingBudget, steps=steps)
    run(engine, [(0.0, "slow", Sequence(1, 250, 1)), (0.5, "fast", Sequence(2, 50, 1))])
    assert [(step.kind, step.prompt_tokens) for step in steps] == [
        ("prefill", 100), ("prefill", 50), ("prefill", 100), ("prefill", 50),
    ]  # fmt: skip


def test_who_comes_last_in_order_loses_its_kv_and_computes_it_again() -> None:
    """Memory for 160 tokens of `fast`, or 80 of `slow`: a prompt of 100 has no room beside one of 60 that decodes."""
    steps: list[StepRecord] = []
    engine = engine_of(DoublingBudget, kv_tokens=160, steps=steps)
    signals = run(engine, [(0.0, "slow", Sequence(1, 60, 10)), (3.5, "fast", Sequence(2, 100, 2))])
    assert engine.counts.preemptions == 1
    assert [step.prompt_tokens for step in steps if step.kind == "prefill"] == [60, 100, 62]
    assert moments(signals, SignalKind.DONE)[2] < moments(signals, SignalKind.DONE)[1]
    assert engine.counts.output_tokens == 12


def test_a_service_keeps_the_kv_that_it_is_sure_of() -> None:
    """`slow` holds 20 of 80 tokens, its floor: the prompt of `fast` waits, though it goes first and needs more."""
    engine = engine_of(DoublingBudget, kv_tokens=160)
    signals = run(engine, [(0.0, "slow", Sequence(1, 16, 5)), (3.5, "fast", Sequence(2, 124, 2))])
    assert engine.counts.preemptions == 0
    assert moments(signals, SignalKind.DONE)[1] < moments(signals, SignalKind.FIRST_TOKEN)[2]


def test_a_flood_of_one_service_leaves_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of `slow` fill the memory for minutes; `fast` has its turn at once. With a pool of who comes first it
    waits until an answer has ended."""
    arrivals: list[Arrival] = [(0.0, "slow", Sequence(key, *LENGTHS["slow"])) for key in range(8)]
    arrivals.append((20.0, "fast", Sequence(9, *LENGTHS["fast"])))
    engine = engine_of(DoublingBudget, kv_tokens=800)
    first = moments(run(engine, arrivals), SignalKind.FIRST_TOKEN)[9]
    assert first < 20.0 + 10.0
    assert engine.counts.preemptions > 0

    monkeypatch.setattr(KvShares, "may_lose", lambda self, service, asker, **_: service == asker)
    naive = engine_of(DoublingBudget, kv_tokens=800)
    arrivals = [(at, service, Sequence(each.key, *LENGTHS[service])) for at, service, each in arrivals]
    assert moments(run(naive, arrivals), SignalKind.FIRST_TOKEN)[9] > 20.0 + 30.0


@pytest.mark.parametrize("name", TURN_ORDERS)
@pytest.mark.parametrize(("seed", "kv_tokens"), [(0, 4000), (1, 700), (2, 600), (3, 1000)])
def test_no_request_no_token_and_no_block_is_lost(name: str, seed: int, kv_tokens: int) -> None:
    """The scarcer the memory, the more are preempted; `run` checks the books after every step."""
    arrivals = random_arrivals(seed, 120, rate=0.5)
    prompts = sum(sequence.known for _, _, sequence in arrivals)
    answers = sum(sequence.left for _, _, sequence in arrivals)
    engine = engine_of(TURN_ORDERS[name], kv_tokens)
    signals = run(engine, arrivals)
    assert len(moments(signals, SignalKind.DONE)) == len(moments(signals, SignalKind.FIRST_TOKEN)) == 120
    assert engine.counts.output_tokens == answers
    assert engine.counts.prompt_tokens >= prompts
    assert (engine.counts.prompt_tokens > prompts) == (engine.counts.preemptions > 0)
    assert engine.shares.free == engine.shares.budget
    assert not engine.outstanding


@pytest.mark.parametrize("name", TURN_ORDERS)
def test_a_seed_gives_the_same_run_again(name: str) -> None:
    first, second = (run(engine_of(TURN_ORDERS[name], 700), random_arrivals(5, 60, rate=0.5)) for _ in range(2))
    assert [(signal.kind, signal.sequence.key, signal.at) for signal in first] == [
        (signal.kind, signal.sequence.key, signal.at) for signal in second
    ]


def test_latency_over_usual_execution_is_lowest_with_a_doubling_budget() -> None:
    latency = {}
    for name in TURN_ORDERS:
        arrivals = random_arrivals(3, 200, rate=0.03)
        usual = {sequence.key: (at, 25.0 if service == "fast" else 50.0) for at, service, sequence in arrivals}
        done = moments(run(engine_of(TURN_ORDERS[name]), arrivals), SignalKind.DONE)
        latency[name] = sum((done[key] - at) / execution for key, (at, execution) in usual.items()) / len(usual)
    assert min(latency, key=latency.__getitem__) == "db"
    assert latency["db"] < 0.9 * latency["fcfs"]


def test_a_request_that_never_fits_is_refused() -> None:
    engine = engine_of(DoublingBudget, kv_tokens=160)
    with pytest.raises(SimEngineError, match="of slow needs more KV than there is"):
        engine.submit("slow", Sequence(1, 90, 1), 0.0)
    engine.submit("fast", Sequence(1, 90, 1), 0.0)


def test_a_box_that_fails_gives_all_its_requests_back() -> None:
    engine = engine_of(DoublingBudget)
    sequences = [Sequence(key, 50, 4) for key in range(3)]
    for sequence in sequences:
        engine.submit("fast", sequence, 0.0)
    engine.advance(0.0)
    assert engine.stop() == sequences
    assert engine.wake_at == inf
