"""Real engines: whatever shapes an answer (penalties, constraints, least lengths) shapes it in the same way wherever it
goes on, and says the same probabilities."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

import p2pserve.node.bundled as bundled
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.fork_server import open_fork_server
from p2pserve.node.engine.sampling import Constraint, Sampling
from p2pserve.node.engine.trials.trial import TrialAnswer, TrialEngine, open_trial
from p2pserve.node.models import open_model
from p2pserve.node.models.text import TextModel
from p2pserve.node.replica.jobs import first_token_of

from .devices import BLOCK, SETTINGS
from .kv_engines import Engine, Result, accepted, engines, listening

BUNDLED = Path(bundled.__file__).parent
COUNT = 24
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
        "required": ["name", "size"],
    }
)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2, "temperature": 0.8, "seed": 7},
    "repetition": {"repetition_penalty": 1.3},
    "least": {"min_tokens": 12, "logit_bias": {0: 100.0}, "ignore_eos": False},
    "bias": {"logit_bias": {300: 40.0, 301: 30.0}, "frequency_penalty": 2.0},
    "allowed": {"allowed_token_ids": tuple(range(300, 340))},
    "bad words": {"bad_words_token_ids": ((300,), (301, 302)), "logit_bias": {300: 20.0, 301: 20.0, 302: 20.0}},
    "json": {"constraint": Constraint(kind="json", text=SCHEMA)},
    "regex": {"constraint": Constraint(kind="regex", text="[0-9]{3}-[a-z]{4,8}"), "temperature": 1.0, "seed": 3},
    "choice": {"constraint": Constraint(kind="choice", text='["positive", "negative"]')},
    "min_p": {"min_p": 0.2, "temperature": 1.0, "seed": 5},
}

BAD_CONSTRAINTS = (
    (Constraint(kind="json", text="{"), "constraint: "),
    (Constraint(kind="json", text='{"a":' * 200 + "1" + "}" * 200), "nested too deeply"),
    (Constraint(kind="regex", text="("), "regex"),
    (Constraint(kind="choice", text='{"a": 1}'), "choice"),
    (Constraint(kind="choice", text="[]"), "choice is empty"),
    (Constraint(kind="grammar", text="root ::= ("), "Invalid grammar"),
    (Constraint(kind="structural_tag", text="[]"), "structural tag"),
)


def sampling_of(case: str) -> Sampling:
    ignore_eos = "constraint" not in CASES[case]
    return Sampling(**{"max_tokens": COUNT, "logprobs": 3, "ignore_eos": ignore_eos, **CASES[case]})


def table(result: Result) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Ids and logprobs of all rows; every token has one."""
    ids = np.concatenate([np.frombuffer(top.ids, "<i4").reshape(-1, top.width) for top in result.logprobs])
    figures = np.concatenate([np.frombuffer(top.logprobs, "<f4").reshape(-1, top.width) for top in result.logprobs])
    return [int(row[0]) for row in ids], figures


def assert_same(found: Result, expected: Result, first: int = 0) -> None:
    """The same tokens from `first` on, with the same logprobs."""
    assert found.reason == ""
    assert found.tokens == expected.tokens[first:]
    assert (found.finish, found.stop_reason) == (expected.finish, expected.stop_reason)
    tokens, figures = table(found)
    expected_tokens, expected_figures = table(expected)
    assert tokens == expected_tokens[-len(tokens) :]
    assert np.allclose(figures, expected_figures[-len(tokens) :], atol=1e-3)


async def run(engine: Engine, prompt: tuple[int, ...], sampling: Sampling) -> Result:
    return await engine.finished(engine.submit(prompt, sampling=sampling))


def after(sampling: Sampling, done: int) -> Sampling:
    """What is asked of an engine when so many tokens have come from another."""
    return msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - done, answered=done)


async def transfer(source: Engine, target: Engine, prompt: tuple[int, ...], sampling: Sampling, part: int) -> Result:
    """KV of the first `part` tokens from another engine; of all of them, that one samples the first token as well."""
    whole = part == len(prompt)
    ready = source.link.ready if source.link is not None else None
    assert ready is not None
    everything = protocol.KvSlice(first_layer=0, last_layer=ready.layers, first_head=0, last_head=ready.kv_heads)
    with listening() as (way, listener):
        way = replace(way, slice=everything)
        request = target.submit(prompt, receive=way, receive_tokens=part, sampling=sampling, awaits_first_token=whole)
        one = first_token_of(sampling) if whole else Sampling(max_tokens=1)
        sent = source.submit(prompt[:part], send=way, sampling=one)
        target.attach(*await accepted(listener))
        if not whole:
            return await target.finished(request)
        first = await source.finished(sent)
        target.send(protocol.SetFirstToken(request=request, token=first.tokens[0]))
        result = await target.finished(request)
        # As at a gateway: of the first token that is known which has sampled it.
        assert sum(top.rows for top in result.logprobs) == len(result.tokens) - 1, "the first token came too late"
        result.logprobs = [*first.logprobs, *result.logprobs]
        return result


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    return TextModel(open_model("bundled").folder).encode("def fibonacci(n):\n    if n < 2:\n" * 6, 4096)


def test_answers_go_on_as_they_began(engine_channels: list[int], prompt: tuple[int, ...]) -> None:
    async def main() -> None:
        async with engines(engine_channels, BUNDLED) as start:
            one, other = await start(), await start()
            for case in CASES:
                sampling = sampling_of(case)
                expected = await run(one, prompt, sampling)
                assert len(expected.tokens) > 2, f"{case}: {expected}"
                try:
                    for part in (len(prompt) // 2, len(prompt)):
                        assert_same(await transfer(one, other, prompt, sampling, part), expected)
                    for done in (1, len(expected.tokens) // 2, len(expected.tokens) - 1):
                        so_far = (*prompt, *expected.tokens[:done])
                        assert_same(await run(other, so_far, after(sampling, done)), expected, done)
                    so_far, rest = (*prompt, *expected.tokens[:2]), after(sampling, 2)
                    for part in (len(prompt) // 2, len(so_far)):
                        assert_same(await transfer(one, other, so_far, rest, part), expected, 2)
                except AssertionError as error:
                    raise AssertionError(f"{case}: {error}") from error
            await refusals(one, prompt)
            await prompt_figures(one, other, prompt)

    trio.run(main)


PIPELINED = ("presence", "least", "bad words", "json", "regex", "choice")


def test_answers_of_a_pipeline_are_those_of_one_engine(engine_channels: list[int], prompt: tuple[int, ...]) -> None:
    async def ask(engine: TrialEngine) -> list[TrialAnswer]:
        """At the same time: batches with and without a grammar follow each other."""
        assert engine.link is not None
        for case in PIPELINED:
            engine.link.send(protocol.Submit(request=case, prompt=prompt, sampling=sampling_of(case), deadline_s=60.0))
        return [await engine.answer(case) for case in PIPELINED]

    async def main() -> None:
        config = protocol.EngineConfig(model=str(BUNDLED), kv_cache_mib=64, max_batched_tokens=BLOCK, **SETTINGS)
        async with (
            open_fork_server(log=None, threads=1, channel=engine_channels.pop()) as server,
            open_trial(server) as trial,
        ):
            await server.wait_ready()
            with trio.fail_after(100):
                expected = await ask(await trial.start(config))
                found = await ask(await trial.start_pipeline(config, (5, 3)))
            for case, one, other in zip(PIPELINED, expected, found, strict=True):
                assert (other.tokens, other.finish) == (one.tokens, one.finish), case
                mine, theirs = (b"".join(top.logprobs for top in each.logprobs) for each in (one, other))
                assert np.allclose(np.frombuffer(mine, "<f4"), np.frombuffer(theirs, "<f4"), atol=1e-3), case

    trio.run(main)


async def refusals(engine: Engine, prompt: tuple[int, ...]) -> None:
    """What a peer could have sent that is not allowed costs its own request, and tells which field."""
    beyond: dict[str, Any] = {"stop_token_ids": (9000,), "logit_bias": {9000: 1.0}, "allowed_token_ids": (9000,)}
    for field, value in beyond.items():
        refused = await run(engine, prompt, Sampling(max_tokens=4, **{field: value}))
        assert (refused.finish, "9000 is beyond" in refused.reason) == ("refused", True)
    for constraint, said in BAD_CONSTRAINTS:
        refused = await run(engine, prompt, Sampling(max_tokens=4, constraint=constraint))
        assert (refused.finish, said in refused.reason) == ("refused", True), refused
    began_otherwise = Sampling(max_tokens=4, answered=2, constraint=Constraint(kind="regex", text="[0-9]+"))
    refused = await run(engine, (*prompt, 300, 301), began_otherwise)
    assert (refused.finish, "answer so far" in refused.reason) == ("refused", True), refused
    assert len((await run(engine, prompt, Sampling(max_tokens=4))).tokens) == 4


async def prompt_figures(one: Engine, other: Engine, prompt: tuple[int, ...]) -> None:
    """Logprobs of a prompt, and which of the stop tokens ended an answer."""
    sampling = Sampling(max_tokens=6, prompt_logprobs=2, logprobs=0)
    here, there = await run(one, prompt, sampling), await run(other, prompt, sampling)
    assert here.prompt_logprobs is not None
    assert here.prompt_logprobs.rows == len(prompt) - 1
    assert here.prompt_logprobs == there.prompt_logprobs
    assert np.frombuffer(here.prompt_logprobs.ids, "<i4").reshape(-1, 3)[:, 0].tolist() == list(prompt[1:])
    stopped = await run(one, prompt, Sampling(max_tokens=6, stop_token_ids=(here.tokens[2],)))
    assert (stopped.finish, stopped.stop_reason) == ("stop", here.tokens[2])
