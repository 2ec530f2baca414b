"""Servers in processes of their own, as a user starts them."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from p2pserve.node.engine.vllm_program.backend import VLLM

ROOT = Path(__file__).resolve().parents[4]
MODEL = ROOT / "node" / "bundled"
START_S = 110.0  # both import vLLM, perhaps on a busy machine
END_S = 20.0
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
LIMITS = ("--max-num-batched-tokens", "512")
REASONING = ("--reasoning-parser", "deepseek_v3")  # as R1's where the template is told `thinking`, else none
THINK, END_OF_THINKING = "<think>", "</think>"


@dataclass
class Server:
    """One that runs. `log`: what it has said."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    home: Path | None = None

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return httpx.request(method, f"{self.url}{path}", timeout=60.0, **options)

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return self.ask("POST", path, json=body, headers={key.replace("_", "-"): text for key, text in headers.items()})

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def pids(self, what: str) -> list[int]:
        """Processes below this one whose command line or file of output names `what`."""
        below = {self.process.pid}
        for _ in range(3):
            below |= {pid for pid, parent in _parents().items() if parent in below}
        return [pid for pid in below if _output_of(pid).endswith(what)]

    @property
    def engine_pid(self) -> int:
        """Its one engine process. What it was forked from writes to the same file."""
        (engine,) = set(self.pids("engine.log")) - {self.fork_server_pid}
        return engine

    @property
    def fork_server_pid(self) -> int:
        """What its engine and API processes are forked from."""
        (server,) = [pid for pid in self.pids("engine.log") if _parents()[pid] == self.process.pid]
        return server

    def lose(self) -> None:
        """Kill the box's node and all that it has started, at once: as when its machine is gone."""
        if self.process.poll() is None:
            started = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            for child in started:
                with suppress(psutil.NoSuchProcess):  # it has ended with its node
                    child.kill()
            self.process.wait(END_S)


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    return found


def _output_of(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    except OSError:
        return ""


def free_port() -> int:
    """One below those that the kernel gives to connections: a server that takes half a minute until it binds it would
    often find it taken."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def make_thinking_model(folder: Path) -> Path:
    """The bundled model with the two tokens of those that reason, in place of the last two that its tokenizer has."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"):
        (folder / name).symlink_to(MODEL / name)
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for token, learnt in zip((END_OF_THINKING, THINK), (merges.pop(), merges.pop()), strict=True):
        number = vocabulary.pop("".join(learnt))
        vocabulary[token] = number
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        tokenizer["added_tokens"].append({"id": number, "content": token, **plain})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def start_p2pserve(home: Path, *options: str, model: str = "bundled", port: int | None = None) -> Iterator[Server]:
    """`p2pserve serve`."""
    home.mkdir(exist_ok=True)
    port = port or free_port()
    where = ["--home", str(home), "--listen", "127.0.0.1:0", "--port", str(port)]
    command = [sys.executable, "-m", "p2pserve.sdk.cli", "serve", model, *where, *LIMITS, *PARSERS, *options]
    environment = {"PYTHONPATH": str(ROOT), "P2PSERVE_SERVE_KV_CACHE_MIB": "64", "P2PSERVE_SERVE_THREADS": "1"}
    with _running(command, environment, home / "said.txt") as process:
        yield Server(f"http://127.0.0.1:{port}", process, home / "said.txt", home)


@contextmanager
def start_join(home: Path, token: str, *options: str, model: str = "bundled") -> Iterator[Server]:
    """`p2pserve join` with an API of its own."""
    home.mkdir(exist_ok=True)
    port = free_port()
    where = ["--home", str(home), "--listen", "127.0.0.1:0", "--http", f"127.0.0.1:{port}", "--model", model]
    command = [sys.executable, "-m", "p2pserve.sdk.cli", "join", *where, *LIMITS, *options]
    environment = {"PYTHONPATH": str(ROOT), "P2PSERVE_JOIN_KV_CACHE_MIB": "64", "P2PSERVE_JOIN_THREADS": "1"}
    with _running(command, {**environment, "P2PSERVE_BOOTSTRAP": token}, home / "said.txt") as process:
        yield Server(f"http://127.0.0.1:{port}", process, home / "said.txt", home)


@contextmanager
def start_gateway(home: Path, token: str) -> Iterator[Server]:
    """`p2pserve gateway`, which answers nothing itself."""
    home.mkdir(exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "p2pserve.sdk.cli", "gateway", "--http", f"127.0.0.1:{port}"]
    environment = {"PYTHONPATH": str(ROOT), "P2PSERVE_BOOTSTRAP": token, "P2PSERVE_HOME": str(home)}
    with _running(command, environment, home / "said.txt") as process:
        yield Server(f"http://127.0.0.1:{port}", process, home / "said.txt", home)


@contextmanager
def start_vllm(folder: Path, model: Path, *options: str) -> Iterator[Server]:
    """vLLM's own server; its command `vllm` needs a package that not every build of it has."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(model)]
    command += ["--served-model-name", "bundled", "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-num-seqs", "64", *LIMITS, *PARSERS, *options]
    environment = {name: text for name, text in VLLM.environment.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"VLLM_WORKER_MULTIPROCESSING_METHOD": "fork", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    with _running(command, environment, folder / "vllm.txt") as process:
        yield Server(f"http://127.0.0.1:{port}", process, folder / "vllm.txt")


def wait_ready(server: Server, status: int = 200) -> None:
    """Wait until `/health` answers so."""
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        assert server.process.poll() is None, server.said
        try:
            if httpx.get(f"{server.url}/health", timeout=5.0).status_code == status:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not ready after {START_S:g} s:\n{server.said}")


def events_of(response: httpx.Response) -> list[Any]:
    """The events of a stream, without comments."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) if line != "[DONE]" else line for line in lines]
