"""All of sampling over a network with real engines: an answer is the same on one box, over a KV transfer, and after the
engine that decoded it is killed."""

import json
import signal
from typing import Any

import pytest
import trio

from p2pserve.sdk import AsyncClient, Generation, RequestFailed
from p2pserve.sdk.demo.box import DemoBox, open_box

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]

PROMPT = "def fibonacci(n):\n    if n < 2:\n" * 4
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 20, "maxLength": 30}, "size": {"enum": [1, 2]}},
        "required": ["name", "size"],
    }
)
CASES: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.8, "seed": 3},
    "limits": {"min_tokens": 60, "logit_bias": {0: 100.0}, "bad_words_token_ids": [[300, 301]]},
    "schema": {"constraint": {"kind": "json", "text": SCHEMA}, "temperature": 1.0, "seed": 11},
    "regex": {"constraint": {"kind": "regex", "text": "[a-z]{40,50}"}, "temperature": 1.0, "seed": 5},
}
LOST_AT = 8  # tokens


def assert_same(found: Generation, expected: Generation, case: str) -> None:
    assert (found.tokens, found.text, found.finish) == (expected.tokens, expected.text, expected.finish), case
    assert [each.token for each in found.logprobs] == list(found.tokens), case
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3), case


async def ready(client: AsyncClient, count: int) -> list[Any]:
    """The nodes with a ready engine, once all are in the plan."""
    while True:
        status = await client.status()
        found = [(node, node.advert.engine) for node in status.nodes if node.advert and node.advert.engine]
        ready = [node for node, engine in found if engine.pid and engine.state == "ready"]
        if len(ready) == count and status.plan is not None and len(status.plan.replicas) == count:
            return ready
        await trio.sleep(0.2)


async def ask(client: AsyncClient, **options: Any) -> Generation:
    generation: Generation = await client.generate(PROMPT, max_tokens=64, logprobs=2, **options)
    return generation


async def ask_and_lose(client: AsyncClient, box: DemoBox, pids: dict[str, int], **options: Any) -> Generation:
    """Kills the engine that decodes when some tokens have come."""
    count, lost = 0, False
    async with client.generate(PROMPT, max_tokens=64, logprobs=2, stream=True, **options) as stream:
        async for new in stream:
            count += len(new.tokens)
            if count >= LOST_AT and not lost:
                lost = True
                for pid in pids.values():
                    box.signal(pid, signal.SIGKILL)
    return stream.result


def test_an_answer_is_the_same_wherever_it_is_computed() -> None:
    async def main() -> None:
        async with open_box(watch_memory=False) as box:
            await box.start_fork_server(24)
            bootstrap = await box.start_bootstrap("raw")
            for number, phase in enumerate(("prefill", "decode"), 1):
                joins = ["--model", "bundled", "--codec", "raw", "--phase", phase]
                await box.join(number, bootstrap.tokens["leader"], joins)
            async with AsyncClient(bootstrap.tokens["client"]) as client:
                nodes = await ready(client, 2)
                decode = next(node for node in nodes if node.advert.phase.value == "decode")
                expected = {case: await ask(client, prompt_logprobs=1, **options) for case, options in CASES.items()}
                for case, options in CASES.items():
                    one = expected[case]
                    assert one.figures is not None
                    assert one.figures.prefill_node is None, "whoever tells of the prompt computes all of it"
                    assert len(one.prompt_logprobs) == one.figures.prompt_tokens - 1
                    two = await ask(client, **options)
                    assert two.figures is not None
                    assert two.figures.prefill_node not in (None, two.figures.decode_node)
                    assert_same(two, one, case)
                assert expected["schema"].text.startswith("{")  # the model fills it with blanks, and does not get far
                assert expected["regex"].text.islower()
                for case in ("penalties", "schema"):
                    (node,) = [each for each in await ready(client, 2) if each.peer == decode.peer]
                    pids = {node.peer: node.advert.engine.pid}
                    three = await ask_and_lose(client, box, pids, **CASES[case])
                    assert three.figures is not None
                    assert three.figures.attempts > 1, case
                    assert_same(three, expected[case], case)
                    await trio.sleep(1.0)
                with pytest.raises(RequestFailed, match="constraint: "):
                    await ask(client, constraint={"kind": "json", "text": "{"})

    trio.run(main)
