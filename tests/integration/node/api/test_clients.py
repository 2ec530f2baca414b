"""Clients as people have them: OpenAI's, Anthropic's and vLLM's bench, and what every answer tells."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any, Final

import anthropic
import httpx
import openai
import pytest

from .servers import Server, events_of

pytestmark = pytest.mark.beside

PROMPT = {"model": "bundled", "prompt": "def f(", "max_tokens": 4, "temperature": 0}
CHAT: Final[dict[str, Any]] = {
    "model": "bundled",
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 4,
    "temperature": 0,
}


def test_openai_streams(ours: Server) -> None:
    with openai.OpenAI(base_url=f"{ours.url}/v1", api_key="any") as client:
        chunks = list(client.chat.completions.create(**CHAT, stream=True))
        whole = client.chat.completions.create(**CHAT)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 4


def test_anthropic_streams(ours: Server) -> None:
    with anthropic.Anthropic(base_url=ours.url, api_key="any") as client:
        with client.messages.stream(model="bundled", max_tokens=4, messages=CHAT["messages"]) as stream:
            text = "".join(stream.text_stream)
            assert stream.get_final_message().usage.output_tokens == 4
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="another", max_tokens=4, messages=CHAT["messages"])
    assert text


def test_an_answer_tells_what_it_was(ours: Server) -> None:
    answer = ours.post("/v1/completions", PROMPT, X_Request_Id="my-request.1")
    assert answer.headers["x-request-id"] == "my-request.1"
    assert answer.headers["x-p2p-decode-node"] == answer.headers["x-p2p-prefill-node"]  # there is one box
    assert answer.headers["x-p2p-kv-bytes"] == "0"
    assert float(answer.headers["x-p2p-cost-usd"]) >= 0


def test_a_stream_tells_it_before_its_end(ours: Server) -> None:
    answer = ours.post("/v1/completions", {**PROMPT, "stream": True})
    comments = [line for line in answer.text.splitlines() if line.startswith(": X-P2P-")]
    assert [line.split(":")[1].strip() for line in comments] == [
        "X-P2P-Prefill-Node",
        "X-P2P-Decode-Node",
        "X-P2P-KV-Bytes",
        "X-P2P-Cost-USD",
    ]
    assert events_of(answer)[-1] == "[DONE]"


@pytest.mark.parametrize("given", ["a b", "x" * 200, "\u00e9".encode().decode("latin-1"), ""])
def test_an_id_that_cannot_be_printed_anywhere_is_replaced(ours: Server, given: str) -> None:
    answer = httpx.get(f"{ours.url}/live", headers=[(b"x-request-id", given.encode("latin-1"))])
    assert answer.status_code == 200
    assert len(answer.headers["x-request-id"]) == 32


def test_health_can_generate_a_token(ours: Server) -> None:
    assert ours.ask("GET", "/health").status_code == 200
    assert ours.ask("GET", "/health?generate=1").status_code == 200


def test_metrics_are_those_of_vllm(pair: tuple[Server, Server]) -> None:
    for server in pair:
        server.post("/v1/completions", PROMPT)
    ours, theirs = (
        {line.split()[2] for line in server.ask("GET", "/metrics").text.splitlines() if line.startswith("# TYPE vllm:")}
        for server in pair
    )
    asked_of_engines = {name for name in theirs - ours if "cache_config" not in name}
    assert not asked_of_engines


def test_metrics_come_to_rest_after_a_disconnect(ours: Server) -> None:
    body = {**PROMPT, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{ours.url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    give_up, running = time.monotonic() + 30, [""]
    while time.monotonic() < give_up:
        lines = ours.ask("GET", "/metrics").text.splitlines()
        running = [line for line in lines if line.startswith("vllm:num_requests_running")]
        if running and all(line.endswith(" 0.0") for line in running):
            return
        time.sleep(0.1)
    raise AssertionError(running)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[" * 50_000, 400),
        (b'{"model": "bundled", "prompt": "a", "max_tokens": -1}', 400),
        (b'{"model": "bundled", "prompt": "a", "n": 100000}', 400),
        (b'{"model": "bundled", "prompt": "a", "logprobs": 1000}', 400),
        (b'{"model": "bundled", "prompt": [-1]}', 400),
        (b'{"model": "bundled", "prompt": [99999999]}', 400),
        (b'{"model": "bundled", "prompt": "\\ud800"}', 400),
        (b'{"model": "bundled", "prompt": "a", "priority": 9223372036854775808}', 400),
        (b'{"model": "bundled", "prompt": "a", "structured_outputs": {"regex": "("}}', 400),
        (b"x" * (17 << 20), 413),
    ],
    ids=["none", "broken", "deep", "tokens", "n", "logprobs", "id", "large", "surrogate", "priority", "regex", "long"],
)
def test_a_hostile_body_is_one_refused_request(ours: Server, body: bytes, status: int) -> None:
    answer = ours.ask("POST", "/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text[:300]
    assert answer.json()["error"]["message"]
    assert ours.ask("GET", "/health").status_code == 200


def test_a_body_without_a_length_is_bounded_too(ours: Server) -> None:
    answer = ours.ask("POST", "/v1/completions", content=(b"x" * (1 << 20) for _ in range(20)))
    assert answer.status_code == 413


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/completions", 405)])
def test_what_is_not_served_is_said_in_the_form_of_openai(ours: Server, path: str, status: int) -> None:
    answer = ours.ask("GET", path)
    assert answer.status_code == status
    assert path in answer.json()["error"]["message"]


def test_a_name_that_points_here_is_not_answered(ours: Server) -> None:
    assert ours.ask("GET", "/v1/models", headers={"host": "evil.example:8000"}).status_code == 403


def test_a_deadline_is_kept(ours: Server) -> None:
    slow = {**PROMPT, "max_tokens": 1900, "ignore_eos": True}
    answer = ours.post("/v1/completions", slow, X_P2P_Deadline_S="0.2")
    assert answer.status_code == 504, answer.text
    assert "deadline" in answer.json()["error"]["message"]
    begun = ours.post("/v1/completions", {**slow, "stream": True}, X_P2P_Deadline_S="0.5")
    assert events_of(begun)[-2]["error"]["code"] == 504
    assert events_of(begun)[-1] == "[DONE]"
    assert ours.post("/v1/completions", PROMPT, X_P2P_Deadline_S="nan").status_code == 400


def test_the_bench_of_vllm_runs(ours: Server) -> None:
    script = (
        "import argparse, asyncio\n"
        "from vllm.benchmarks.serve import add_cli_args, main_async\n"
        "parser = argparse.ArgumentParser()\nadd_cli_args(parser)\nasyncio.run(main_async(parser.parse_args()))\n"
    )
    wanted = ["--backend", "openai", "--base-url", ours.url, "--model", "bundled", "--num-prompts", "8"]
    wanted += ["--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8", "--ignore-eos"]
    wanted += ["--tokenizer", ours.ask("GET", "/v1/models").json()["data"][0]["root"]]
    done = subprocess.run(
        [sys.executable, "-c", script, *wanted], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Successful requests:                     8" in done.stdout, done.stdout[-2000:]


def test_metrics_of_the_node_are_behind_those_of_vllm(ours: Server) -> None:
    text = ours.ask("GET", "/metrics").text
    assert "vllm:num_requests_running" in text
    for family in ("kv_bytes_wire_total", "plan_generation", "cost_usd_total", "key_cost_usd_total", "replays_total"):
        assert f"# TYPE p2pserve:{family.removesuffix('_total')}" in text, family
