"""Answers are those of vLLM's own server over the same kind of engine, but for ids and times."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import openai
import pytest

from p2pserve.node.engine.api.options import ONE_SIDED, OURS, PASSED, REFUSED

from .servers import Server

pytestmark = pytest.mark.beside

USER = [{"role": "user", "content": "sum of a and b"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "strict": True, "description": "w", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
END_TOKEN = "4095"  # of `make_thinking_model`
SCHEMA = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": AGE}}

Ask = Callable[[openai.OpenAI], Any]


def complete(prompt: Any = "def f(", **options: Any) -> Ask:
    wanted = {"model": "bundled", "max_tokens": 8, "temperature": 0, **options}
    return lambda client: client.completions.create(prompt=prompt, **wanted)


def chat(**options: Any) -> Ask:
    wanted = {"model": "bundled", "messages": USER, "max_tokens": 8, "temperature": 0, **options}
    return lambda client: client.chat.completions.create(**wanted)


def raw(method: str, path: str, body: object = None) -> Ask:
    def ask(client: openai.OpenAI) -> Any:
        response = client._client.request(method, f"{client.base_url.copy_with(path='/')}{path}", json=body)
        return response.status_code, response.json()

    return ask


def think(**options: Any) -> Ask:
    """A chat whose answer begins with reasoning; the model ends it, since it likes to."""
    wanted = {
        "logit_bias": {END_TOKEN: 12},
        "max_tokens": 24,
        **more(chat_template_kwargs={"thinking": True}),
        **options,
    }
    return chat(**wanted)


def more(**options: Any) -> dict[str, Any]:
    """Options that are vLLM's own."""
    return {"extra_body": options}


CASES: dict[str, Ask] = {
    "completion": complete("def fibonacci(n):", max_tokens=20),
    "stream": complete("def fibonacci(n):", stream=True, stream_options={"include_usage": True}),
    "tokens": complete([100, 200, 300]),
    "list": complete(["def f(", "class A"]),
    "stop": complete("def fibonacci(n):", max_tokens=64, stop=["frame, a"]),
    "stop included": complete(
        "def fibonacci(n):", max_tokens=64, stop=["frame, a"], **more(include_stop_str_in_output=True)
    ),
    "stop token": complete("def fibonacci(n):", max_tokens=64, **more(stop_token_ids=[199, 8])),
    "logprobs": complete(logprobs=2),
    "echo": complete("def f(x):", max_tokens=2, logprobs=2, echo=True),
    "prompt logprobs": complete("def f(x):", max_tokens=1, **more(prompt_logprobs=1, return_token_ids=True)),
    "chat": chat(logprobs=True, top_logprobs=3),
    "chat stream": chat(stream=True, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}),
    "chat n": chat(n=2),
    "named tool": chat(tools=TOOLS, tool_choice=NAMED, max_tokens=90),
    "required tool": chat(tools=TOOLS, tool_choice="required", max_tokens=60),
    "named tool, stream": chat(tools=TOOLS, tool_choice=NAMED, max_tokens=90, stream=True),
    "auto tool": chat(tools=TOOLS),
    "reasoning": think(),
    "reasoning, stream": think(stream=True, stream_options={"include_usage": True}),
    "reasoning without an end": think(logit_bias={}),
    "reasoning, then a schema": think(response_format=SCHEMA, max_tokens=40),
    "reasoning, then a tool": think(tools=TOOLS, tool_choice=NAMED, max_tokens=80),
    "schema": chat(max_tokens=30, response_format=SCHEMA),
    "json object": chat(max_tokens=12, response_format={"type": "json_object"}),
    "choice": complete("x", **more(structured_outputs={"choice": ["alpha", "beta"]})),
    "regex": complete("x", **more(structured_outputs={"regex": r"\d{3}-\d{2}"})),
    "grammar": complete("x", **more(structured_outputs={"grammar": 'root ::= "yes" | "no"'})),
    "bias": complete(logit_bias={"100": 100}),
    "bad words": complete(**more(bad_words=["self"], min_tokens=3, repetition_penalty=1.2, stop_token_ids=[8])),
    "penalties": complete(
        max_tokens=24, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5, **more(min_p=0.02, top_k=50)
    ),
    "allowed": complete(**more(allowed_token_ids=[10, 11, 12])),
    "ignored end": complete(max_tokens=40, **more(ignore_eos=True)),
    "beam": complete(max_tokens=4, n=2, **more(use_beam_search=True)),
    "responses": lambda client: client.responses.create(
        model="bundled", input="sum", max_output_tokens=8, temperature=0
    ),
    "messages": raw("POST", "v1/messages", {"model": "bundled", "max_tokens": 8, "temperature": 0, "messages": USER}),
    "count": raw("POST", "v1/messages/count_tokens", {"model": "bundled", "messages": USER}),
    "tokenize": raw("POST", "tokenize", {"model": "bundled", "prompt": "def f(x):"}),
    "detokenize": raw("POST", "detokenize", {"model": "bundled", "tokens": [100, 200]}),
    "version": raw("GET", "version"),
    # What is refused.
    "another model": complete(model="another"),
    "no messages": chat(messages=[]),
    "too many tokens": complete(max_tokens=1_000_000),
    "long prompt": complete([5] * 3000),
    "temperature": complete(temperature=-1),
    "top_p": complete(top_p=2.0),
    "no schema": chat(response_format={"type": "json_schema"}),
    "negative n": complete(n=0),
}


def normalise(answer: Any) -> Any:
    """Without ids and times; logprobs to a hundredth, since engines add in another order."""
    text = json.dumps(answer, default=lambda value: value.model_dump(exclude_none=True))
    text = re.sub(r'"(id|request_id|created|created_at|completed_at|system_fingerprint)": ("[^"]*"|[0-9.]+)', "0", text)
    text = re.sub(r"-?\d+\.\d{3,}(e-?\d+)?", lambda found: f"{float(found.group()):.2f}".replace("-0.00", "0.00"), text)
    return re.sub(r"(cmpl|chatcmpl|resp|msg|call|fc|rs|chatcmpl-tool)[-_][0-9a-z-]+", "ID", text)


def join_chunks(chunks: list[Any]) -> Any:
    """What a stream says in all: how it is cut depends on time."""
    text, reasoning, calls, finish, usage, logprobs = "", "", "", None, None, 0
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if hasattr(choice, "text"):
                text += choice.text
            else:
                text += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning", None) or ""
                for call in choice.delta.tool_calls or ():
                    calls += f"{call.function.name or ''}{call.function.arguments or ''}"
            finish = choice.finish_reason or finish
            found = getattr(choice, "logprobs", None)
            logprobs += len(found.content or ()) if found is not None and hasattr(found, "content") else 0
    said = {"text": text, "reasoning": reasoning, "calls": calls}
    return {**said, "finish": finish, "usage": usage, "logprobs": logprobs}


def answer_of(server: Server, ask: Ask) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-any", max_retries=0, timeout=100)
    with client:
        try:
            answer = ask(client)
            return normalise(join_chunks(list(answer)) if isinstance(answer, openai.Stream) else answer)
        except openai.APIStatusError as error:
            return error.status_code, normalise(error.body)


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_that_of_vllm(pair: tuple[Server, Server], case: str) -> None:
    ours, theirs = (answer_of(server, CASES[case]) for server in pair)
    assert ours == theirs


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("named tool", ('"name": "get_weather"', '"content": ""')),
        ("named tool, stream", ('"calls": "get_weather{', '"text": ""')),
        ("reasoning", ('"reasoning": "#', '"content": "ed')),
        ("reasoning, stream", ('"reasoning": "#', '"text": "ed')),
        ("reasoning, then a schema", ('"reasoning": "#', '"age')),
        ("reasoning, then a tool", ('"reasoning": "#', '"name": "get_weather"')),
    ],
)
def test_parsers_find_what_they_are_for(ours: Server, case: str, parts: tuple[str, ...]) -> None:
    """Else both servers would be alike in finding nothing."""
    said = str(answer_of(ours, CASES[case])).replace('\\"', '"')
    for part in parts:
        assert part in said, said


def test_a_seed_gives_the_same_answers_wherever_they_are_computed(ours: Server) -> None:
    """Not those of vLLM: a seed counts for each place of an answer here, so that it can go on at another box."""
    seeded = complete(temperature=1, seed=5, n=3, max_tokens=12)
    first, again = answer_of(ours, seeded), answer_of(ours, seeded)
    assert first == again
    assert first != answer_of(ours, complete(temperature=1, seed=6, n=3, max_tokens=12))
    assert len(set(re.findall(r'"text": "([^"]*)"', first))) > 1


def test_every_option_of_vllm_has_its_place() -> None:
    """A release of vLLM with another one fails here, by its name."""
    script = (
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "for action in make_arg_parser(FlexibleArgumentParser())._actions:\n"
        "    print(*action.option_strings, '=', action.nargs == 0)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=True)
    theirs, opposites = {}, set()
    for line in said.stdout.splitlines():
        names, _, is_switch = line.rpartition(" = ")
        first = next((name for name in names.split() if name.startswith("--")), None)
        if first is not None and first != "--help":
            theirs[first] = is_switch == "True"
        opposites |= {f"--{name.removeprefix('--no-')}" for name in names.split() if name.startswith("--no-")}
    assert theirs.keys() == {*PASSED, *OURS, *REFUSED}
    assert {name: not theirs[name] for name in PASSED} == PASSED
    assert {name for name, takes_value in PASSED.items() if not takes_value and name not in opposites} == ONE_SIDED
