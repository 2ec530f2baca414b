"""The demo: everything in it is real, and nothing of it stays."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from p2pserve.node.models import BUNDLED

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "p2pserve.sdk.cli", "demo", "--nodes", "2", "--codec", "raw", "--format", "json"]

pytestmark = pytest.mark.timeout(400)

WAIT_LIMIT_S = 150.0

REQUEST_KEYS = {
    "prompt_tokens",
    "completion_tokens",
    "text",
    "ttft_s",
    "tpot_s",
    "prefill_node",
    "decode_node",
    "kv_bytes_raw",
    "kv_bytes_wire",
    "kv_send_mode",
    "kv_hidden_fraction",
    "kv_visible_s",
    "identical_to_single_engine",
    "tokens_agreeing",
    "codec",
}


@pytest.fixture(scope="session")
def model(random_model: Path) -> str:
    """The bundled model where it is there, else one of noise."""
    return "bundled" if (BUNDLED / "model.safetensors").is_file() else str(random_model)


def environment(temporary: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("P2PSERVE_")}
    return {**kept, "TMPDIR": str(temporary)}


def test_two_nodes_answer_as_a_single_engine_does(model: str, tmp_path: Path) -> None:
    arguments = ["--max-tokens", "24", "--model", model, "--timeout-s", str(WAIT_LIMIT_S)]
    begun = time.monotonic()
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        cwd=ROOT,
        env=environment(tmp_path),
        timeout=2 * WAIT_LIMIT_S,
        check=False,
    )
    took = time.monotonic() - begun
    events = done.stderr.decode()
    assert done.returncode == 0, events
    report = json.loads(done.stdout)
    assert done.stdout.count(b"\n") == 1
    assert report["problems"] == []
    assert report["ok"] is True
    assert sorted(node["role"] for node in report["nodes"]) == ["decode", "prefill"]
    assert all(node["peer_id"] and node["engine"].startswith("vllm") for node in report["nodes"])
    assert report["coordinator"] == report["bootstrap"]
    assert report["plan"]["codec"] == "raw"
    assert len(report["requests"]) == 3
    for request in report["requests"]:
        assert request.keys() >= REQUEST_KEYS
        assert request["identical_to_single_engine"]
        assert request["tokens_agreeing"] == request["completion_tokens"] > 0
        assert request["kv_bytes_wire"] >= request["kv_bytes_raw"] > 0
        assert {request["prefill_node"], request["decode_node"]} == {node["peer_id"] for node in report["nodes"]}
    assert max(request["prompt_tokens"] for request in report["requests"]) > 100
    if model == "bundled":
        assert 0.5 < report["model_bits_per_byte"] < 4
        assert report["model_bits_per_byte_source"]
    else:
        assert report["model_bits_per_byte"] is None
    assert 0 < report["elapsed_s"] < took
    assert 100 < report["peak_memory_mib"] < 6 * 1024
    for event in ("joined:", "coordinator:", "plan 1.", "engine ready:", "asking for code"):
        assert event in events
    assert left_behind(tmp_path) == []


def test_a_prompt_that_cannot_be_served(model: str, tmp_path: Path) -> None:
    for arguments, says in (
        (["--prompt", ""], "prompt: it is empty"),
        (["--prompt", "word " * 20_000], "too long"),
        (["--nodes", "0"], "nodes: 0"),
        (["--max-tokens", "100000"], "max_tokens"),
    ):
        done = subprocess.run(
            [*COMMAND, "--model", model, *arguments],
            capture_output=True,
            cwd=ROOT,
            env=environment(tmp_path),
            timeout=WAIT_LIMIT_S,
            check=False,
        )
        errors = done.stderr.decode()
        assert done.returncode == 2, errors
        assert errors.startswith("p2pserve: error: ")
        assert says in errors
        assert errors.count("\n") == 1


@pytest.mark.parametrize("moment", ["bootstrap:", "joined: .*worker", "asking for code"])
def test_an_interrupt_leaves_nothing(moment: str, model: str, tmp_path: Path) -> None:
    """At the first process, while vLLM is imported, and with engines at work."""
    first, _, second = moment.partition(".*")
    process = subprocess.Popen(
        [*COMMAND, "--model", model, "--timeout-s", str(2 * WAIT_LIMIT_S)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(tmp_path),
    )
    timer = threading.Timer(WAIT_LIMIT_S, process.kill)
    timer.start()
    try:
        assert process.stderr is not None
        for raw in process.stderr:
            if first in raw.decode() and second in raw.decode():
                break
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_LIMIT_S)
    finally:
        timer.cancel()
        process.kill()
        process.communicate()
    assert process.returncode == 130, err.decode()
    assert out == b""
    assert b"Traceback" not in err
    assert len(family) >= 2
    assert [member for member in family if member.is_running()] == []
    assert left_behind(tmp_path) == []


def left_behind(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())
