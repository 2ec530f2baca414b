"""`p2pserve bench` against a network of emulated nodes: real processes, sockets and KV, modelled GPUs."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .test_cli_errors import COMMAND, ROOT, Running, environment, run, start_bootstrap

READY_S = 120.0

pytestmark = [pytest.mark.beside, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One box prefills and the other decodes, so that KV is sent."""
    running = start_bootstrap(tmp_path_factory.mktemp("bootstrap"))
    boxes = [join(running, tmp_path_factory.mktemp(phase), phase) for phase in ("prefill", "decode")]
    try:
        wait_for_plan(running)
        yield running
    finally:
        for box in boxes:
            box.send_signal(signal.SIGTERM)
        for box in boxes:
            box.wait(60)
        running.stop()


def join(network: Running, home: Path, phase: str) -> subprocess.Popen[bytes]:
    options = ["--home", str(home), "--listen", "127.0.0.1:0", "--phase", phase, "--usd-per-hour", "0.4"]
    options += ["--emulate", "1xA40", "--model", "llama-7b", "--bootstrap", network.tokens["leader"]]
    quiet = subprocess.DEVNULL
    return subprocess.Popen([*COMMAND, "join", *options], stdout=quiet, stderr=quiet, cwd=ROOT, env=environment())


def wait_for_plan(network: Running) -> None:
    give_up = time.monotonic() + READY_S
    while time.monotonic() < give_up:
        done = run("status", "--bootstrap", network.tokens["client"], "--format", "json")
        plan = json.loads(done.stdout)["plan"] if done.returncode == 0 else None
        if plan is not None and any(pair["prefill"] != pair["decode"] for pair in plan["pairings"]):
            return
        time.sleep(0.5)
    pytest.fail("no plan with both boxes")


def bench(network: Running, *options: str) -> subprocess.CompletedProcess[bytes]:
    return run("bench", "--bootstrap", network.tokens["client"], *options)


def test_all_figures_of_a_run(network: Running) -> None:
    sizes = ("--requests", "6", "--prompt-tokens", "300", "--max-tokens", "12")
    done = bench(network, "--concurrency", "3", *sizes, "--slo", "e2e=100s", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["answered"], found["failed"], found["unfinished"]) == (6, 0, 0)
    assert found["arrivals"] == "3 at a time"
    assert "A40" in found["emulated"][0]
    assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p99"] < found["e2e_s"]["p99"]
    assert found["output_tokens_s"] == pytest.approx(6 * 12 / found["span_s"])
    assert found["attainment"] == 1.0
    assert found["kv_raw_bytes"] > found["kv_wire_bytes"] > 0
    assert found["usd_per_million_tokens"] > 0


def test_a_trace_at_its_moments(network: Running, tmp_path: Path) -> None:
    trace = tmp_path / "requests.csv"
    trace.write_text("arrival,prompt,output\n9,20,5\n9.5,100,8\n")
    done = bench(network, "--trace", str(trace), "--slo", "ttft=0.01ms")
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert "engines are emulated (emulated 1x A40" in text
    assert "2 of 2 requests answered" in text
    assert "in time (ttft 0.0 ms): 0.0%, goodput 0.00 requests/s" in text


def test_an_interruption_reports_what_there_is(network: Running) -> None:
    options = ["--concurrency", "2", "--requests", "500", "--prompt-tokens", "20", "--max-tokens", "40"]
    command = [*COMMAND, "bench", "--bootstrap", network.tokens["client"], *options, "--format", "json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment() | {"FORCE_COLOR": "1"}
    )
    assert process.stderr is not None
    seen = b""
    while b"tokens/s" not in seen:  # an answer has come
        more = os.read(process.stderr.fileno(), 4096)
        assert more, seen  # it has ended by itself
        seen += more
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    found = json.loads(out)
    assert found["interrupted"]
    assert 0 < found["answered"] < 500
    assert found["unfinished"] == 2


def test_no_secret_stands_in_the_command_line_of_a_process(network: Running) -> None:
    """Of nodes, fork servers, engines, planners and a gateway, all of which were given theirs on the command line."""
    key, token = "sk-of-this-test", network.tokens["client"]
    command = [*COMMAND, "gateway", "--bootstrap", token, "--http", "127.0.0.1:0", "--api-key", key]
    gateway = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment())
    try:
        assert gateway.stdout is not None
        assert gateway.stdout.readline().startswith(b"OpenAI API at http://")
        ours = psutil.Process().children(recursive=True)
        lines = {each.pid: Path(f"/proc/{each.pid}/cmdline").read_text() for each in ours if each.is_running()}
        assert lines[gateway.pid].rstrip("\0").endswith("--bootstrap p2p_client_... --http 127.0.0.1:0 --api-key ...")
        assert sum("join" in line and "--bootstrap p2p_worker_..." in line for line in lines.values()) == 2
        assert sum("forkserver" in line for line in lines.values()) >= 4  # and an engine of each
        secrets = [key, *(text.rpartition("_")[2][:20] for text in network.tokens.values())]
        assert [line for line in lines.values() if any(secret in line for secret in secrets)] == []
    finally:
        gateway.send_signal(signal.SIGTERM)
        gateway.communicate(timeout=60)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--rate", "1", "--concurrency", "1"), "rate: give either"),
        (("--slo", "5x"), "slo: '5x' is a multiple"),
        (("--trace", "/nowhere.csv"), "trace: /nowhere.csv"),
        (("--prompt-tokens", "900000"), "prompt-tokens: request 0 has 900000 + 128 tokens"),
        (("--service", "nobody"), "service: nobody serves nobody; this network serves"),
    ],
)
def test_what_cannot_be_asked(network: Running, options: tuple[str, ...], says: str) -> None:
    done = bench(network, *options)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"p2pserve: error: {says}")


def test_where_no_request_is_answered_it_fails(network: Running) -> None:
    done = bench(network, "--requests", "2", "--deadline-s", "0.05")
    assert done.returncode == 1
    assert "failed, DeadlineExceeded: 2" in done.stdout.decode()
