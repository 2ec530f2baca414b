"""Emulated engines in one process: their turns are real, only the time and the tokens are made up."""

from __future__ import annotations

import msgspec
import pytest
import trio

from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineLost, EngineStartError
from p2pserve.node.engine.emulation import Throttling
from p2pserve.node.engine.settings import Sharing
from p2pserve.node.engine.trials.trial import Trial, TrialEngine

from ..test_emulated import CONFIG, EMULATION, SHAPE, answer_to, on_trial, prompt_of

pytestmark = pytest.mark.timeout(300)


def shared(service: str, **settings: float) -> protocol.EngineConfig:
    return msgspec.structs.replace(CONFIG, sharing=Sharing(service=service, **settings))  # type: ignore[arg-type]


def slowed(config: protocol.EngineConfig) -> protocol.EngineConfig:
    """A large model, whose steps take a thousand times as long as they should: seconds."""
    large = msgspec.structs.replace(SHAPE, layers=32, hidden=4096, intermediate=16384)
    emulation = msgspec.structs.replace(EMULATION, model=large, throttling=Throttling(after_s=0.0, factor=1000.0))
    return msgspec.structs.replace(config, options=msgspec.to_builtins(emulation))


def test_engines_take_turns_and_transfer_kv() -> None:
    """One of them with little memory, so that some lose their KV; KV comes from an engine elsewhere meanwhile."""

    async def work(trial: Trial) -> None:
        one = await trial.start(msgspec.structs.replace(shared("one"), kv_cache_mib=20))
        other, far = await trial.start(shared("other")), await trial.start(CONFIG)
        assert one.ready.pid == other.ready.pid != far.ready.pid
        asked = [
            (engine, prompt_of(length), engine.submit(prompt_of(length), 60))
            for engine in (one, other)
            for length in range(100, 900, 100)
        ]
        assert one.ready.kv_tokens < sum(range(100, 900, 100))
        send, receive = trial.transfer_ends(trial.join(other), "kv4", other.ready)
        moved = other.submit(prompt_of(950), 5, receive=receive, receive_tokens=950)
        far.submit(prompt_of(950), 1, send=send)
        for engine, prompt, request in asked:
            assert (await engine.answer(request)).tokens == answer_to(prompt, 60)
        answer = await other.answer(moved)
        assert (answer.tokens, answer.cached) == (answer_to(prompt_of(950), 5), 950)
        for engine in (one, other):
            await engine.until(lambda engine=engine: engine.stats is not None and engine.stats.running == 0)  # type: ignore[misc]

    on_trial(work)


def test_a_turn_that_hangs_ends_the_process_and_names_the_engine() -> None:
    async def work(trial: Trial) -> None:
        one = await trial.start(shared("one", hang_s=0.5))
        slow = await trial.start(slowed(shared("slow")))
        slow.submit(prompt_of(200), 5)
        for engine in (one, slow):
            with pytest.raises(EngineLost, match="ended with status 1"):
                await engine.until(lambda: False)
        assert [was_other(engine) for engine in (one, slow)] == [True, False]
        again = await trial.start(shared("one"))
        assert again.ready.pid != one.ready.pid
        assert (await again.generate(prompt_of(100), 5)).tokens == answer_to(prompt_of(100), 5)

    on_trial(work)


def was_other(engine: TrialEngine) -> bool:
    assert engine.link is not None
    return engine.link.ended_by_other


def test_an_engine_that_joins_one_that_leaves_gets_a_process() -> None:
    """Again and again, right after the last one has hung up: no start is lost with the process that ends."""

    async def work(trial: Trial) -> None:
        for number in range(10):
            engine = await trial.start(shared(f"engine {number % 2}"))
            assert (await engine.generate(prompt_of(50), 3)).tokens == answer_to(prompt_of(50), 3)
            engine.stop()
            await trio.sleep(0.002 * number)

    on_trial(work)


def test_stages_do_not_share() -> None:
    async def work(trial: Trial) -> None:
        with pytest.raises(EngineStartError, match="no pipeline"):
            await trial.start(msgspec.structs.replace(shared("one"), partition=(3, 3)))

    on_trial(work)
