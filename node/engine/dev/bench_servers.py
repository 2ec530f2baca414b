"""What the engine's bench measures of servers: `p2pserve serve` on one box beside vLLM's own API server.

Both are started as a user would, with the same settings of the engine, and stay for the whole measurement. They are
asked in turn, by the client of vLLM's own bench, in one process beside them. Between two turns both rest: on a CPU the
processes of vLLM's server look for more work without a pause for a second after the last, on the cores of whoever is
asked next.

The memory of our box is what all its processes have together (proportional set sizes: a page that n of them share
counts 1/n for each), without its weights, as the engine holds them, and without its KV cache. That is looked at in the
end: by then requests have written every block of the cache, so all of it is in what is subtracted from.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, final

import aiohttp
import msgspec
import psutil

from ...models import OpenedModel
from .. import protocol
from ..agent_side.engine_link import EngineStartError
from .pairs import EnginePair, median_added, median_ratio

T = TypeVar("T")

STREAMS, STREAM_PROMPT, STREAM_TOKENS = 32, 64, 128
ALONE, ALONE_PROMPT, ALONE_TOKENS = 5, 256, 2  # requests one after the other
KV_CACHE_MIB: Final = 64  # all of it is written in the first two rounds of streams, with the bundled model
NAME: Final = "bench"
START_S: Final = 300.0
LOOK_S: Final = 0.05
REST_S: Final = 2.0
END_S: Final = 20.0
_FREE_RUNNING: Final = ("skip_tokenizer_init", "disable_log_stats", "model")  # what a server chooses otherwise
_MEASURED_FILES: Final = {"engine.log": "engine", "api.log": "API process"}


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of both servers, what they were computed from, and the memory of our box in MiB."""

    model: str
    api_throughput_ratio_32: float
    api_ttft_added_ms_32: float
    api_ttft_added_ms: float
    api_throughput_tokens_s: list[EnginePair]
    api_ttft_ms_32: list[EnginePair]
    api_ttft_ms: list[EnginePair]
    api_start_s: EnginePair
    box_memory_mib: float
    box_processes_mib: dict[str, float]
    box_weights_mib: float
    box_kv_cache_mib: float


@final
class Server:
    """One that runs. `log`: what it says."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self._log = log

    def fail(self, what: str) -> EngineStartError:
        """An error of one line, with the last that it has said."""
        said = self._log.read_text(errors="replace").strip().splitlines()
        return EngineStartError(f"{self.name} {what}: {said[-1][:300] if said else 'it has said nothing'}")


@final
class ServerBench:
    """Asks both in turn. `prompt(tokens)` makes one that no prefix cache has seen."""

    def __init__(
        self, ours: Server, vllm: Server, session: aiohttp.ClientSession, prompt: Callable[[int], list[int]]
    ) -> None:
        self._ours = ours
        self._vllm = vllm
        self._session = session
        self._prompt = prompt

    async def measure_streams(self, repeats: int) -> tuple[list[EnginePair], list[EnginePair]]:
        """Tokens per second of many streams that come at once, and the median milliseconds to their first tokens."""
        rounds = await self._pairs(self._stream_many, repeats)
        throughput = [EnginePair(ours=ours[0], vllm=vllm[0]) for ours, vllm in rounds]
        return throughput, [EnginePair(ours=ours[1], vllm=vllm[1]) for ours, vllm in rounds]

    async def measure_alone(self, repeats: int) -> list[EnginePair]:
        """Milliseconds to the first token of a request that has the server for itself; medians of a few."""
        return [EnginePair(ours=ours, vllm=vllm) for ours, vllm in await self._pairs(self._ask_alone, repeats)]

    async def _pairs(self, measure: Callable[[Server], Awaitable[T]], repeats: int) -> list[tuple[T, T]]:
        async def measure_rested(server: Server) -> T:
            await asyncio.sleep(REST_S)
            return await measure(server)

        pairs = [(await measure_rested(self._ours), await measure_rested(self._vllm)) for _ in range(1 + repeats)]
        return pairs[1:]  # after the first, both are warm

    async def _stream_many(self, server: Server) -> tuple[float, float]:
        prompts = [self._prompt(STREAM_PROMPT) for _ in range(STREAMS)]
        began = time.perf_counter()
        answers = await asyncio.gather(*(self._ask(server, prompt, STREAM_TOKENS) for prompt in prompts))
        ended = max(answer.start_time + answer.latency for answer in answers)
        ttft_ms = statistics.median(answer.ttft for answer in answers) * 1e3
        return STREAMS * STREAM_TOKENS / (ended - began), ttft_ms

    async def _ask_alone(self, server: Server) -> float:
        answers = [await self._ask(server, self._prompt(ALONE_PROMPT), ALONE_TOKENS) for _ in range(ALONE)]
        return float(statistics.median(answer.ttft for answer in answers) * 1e3)

    async def _ask(self, server: Server, prompt: Sequence[int], tokens: int) -> Any:
        from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions

        wanted = RequestFuncInput(
            prompt=list(prompt),
            api_url=f"{server.url}/v1/completions",
            prompt_len=len(prompt),
            output_len=tokens,
            model=NAME,
            ignore_eos=True,
            extra_body={"temperature": 0.0},
        )
        answer = await async_request_openai_completions(wanted, self._session)
        if not answer.success or answer.output_tokens != tokens:
            raise server.fail(f"gave {answer.output_tokens} of {tokens} tokens ({answer.error[-200:]!r})")
        return answer


def measure_servers(model: OpenedModel, repeats: int, config: protocol.EngineConfig, folder: Path) -> ServerReport:
    """Start both and measure; `folder` is for their files. Raises ModelError, EngineError, OSError."""
    config = msgspec.structs.replace(config, model=str(model.fetch()), kv_cache_mib=KV_CACHE_MIB)
    return asyncio.run(_measure(model, repeats, config, folder))


async def _measure(model: OpenedModel, repeats: int, config: protocol.EngineConfig, folder: Path) -> ServerReport:
    rng = random.Random(1)
    vocabulary = model.info.shape.vocabulary
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=START_S)) as session:
        # One after the other: each has the machine for itself while it starts.
        with _run_ours(config, folder) as ours:
            ours_s = await _wait_ready(ours, session)
            with _run_vllm(config, folder) as vllm:
                vllm_s = await _wait_ready(vllm, session)
                bench = ServerBench(
                    ours, vllm, session, lambda tokens: [rng.randrange(1, vocabulary) for _ in range(tokens)]
                )
                throughput, ttft_32 = await bench.measure_streams(repeats)
                ttft = await bench.measure_alone(repeats)
            processes = measure_processes(ours.process.pid)
    weights, kv_cache = _held_mib(model, config)
    return ServerReport(
        model=model.info.name,
        api_throughput_ratio_32=median_ratio(throughput),
        api_ttft_added_ms_32=median_added(ttft_32),
        api_ttft_added_ms=median_added(ttft),
        api_throughput_tokens_s=throughput,
        api_ttft_ms_32=ttft_32,
        api_ttft_ms=ttft,
        api_start_s=EnginePair(ours=ours_s, vllm=vllm_s),
        box_memory_mib=sum(processes.values()) - weights - kv_cache,
        box_processes_mib=processes,
        box_weights_mib=weights,
        box_kv_cache_mib=kv_cache,
    )


def measure_processes(pid: int) -> dict[str, float]:
    """Proportional set sizes of a node's processes in MiB, of which `pid` is the agent."""
    found: dict[str, float] = {}
    agent = psutil.Process(pid)
    for process in (agent, *agent.children(recursive=True)):
        try:
            name, size = _name_process(process, agent), process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue  # it has ended in between
        found[name] = found.get(name, 0.0) + size / 2**20
    return found


def _name_process(process: psutil.Process, agent: psutil.Process) -> str:
    """What it is to its node: forks have the command line of the fork server, and files of their own for what they
    say."""
    if process == agent:
        return "agent"
    command = " ".join(process.cmdline())
    if "planning.worker" in command:
        return "planner"
    if process.ppid() == agent.pid and "forkserver" in command:
        return "fork server"
    said = Path(f"/proc/{process.pid}/fd/1").readlink().name
    return _MEASURED_FILES.get(said, "others")


def _held_mib(model: OpenedModel, config: protocol.EngineConfig) -> tuple[float, float]:
    """Weights and KV cache in the box's memory: none of them where a GPU has its own."""
    from ..vllm_program.arguments import device_kind

    if device_kind() != "cpu":
        return 0.0, 0.0
    weights = model.info.weights.of_stage(0, model.info.layers, float_bytes=4)  # CPU engines compute in float32
    return weights / 2**20, float(config.kv_cache_mib or 0)


# ---- their processes ----------------------------------------------------------------------------------------------


@contextmanager
def _run_ours(config: protocol.EngineConfig, folder: Path) -> Iterator[Server]:
    """`p2pserve serve`, a network of one box."""
    port, home = _free_port(), folder / "home"
    home.mkdir()
    command = ["p2pserve.sdk.cli", "serve", config.model, "--home", str(home), "--listen", "127.0.0.1:0"]
    command += ["--port", str(port), "--served-model-name", NAME, "--threads", str(config.threads)]
    command += ["--max-num-batched-tokens", str(config.max_batched_tokens), "--max-requests", str(config.max_requests)]
    command += ["--kv-cache-mib", str(config.kv_cache_mib)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PSERVE_")}
    with _running("p2pserve serve", command, port, environment, folder / "ours.txt") as server:
        yield server


@contextmanager
def _run_vllm(config: protocol.EngineConfig, folder: Path) -> Iterator[Server]:
    """vLLM's own server; its command `vllm` needs a package that not every build of it has."""
    from ..vllm_program.arguments import engine_arguments

    port = _free_port()
    command = ["vllm.entrypoints.launchers.api_server.entry", "--model", config.model, "--served-model-name", NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), *vllm_flags(engine_arguments(config))]
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment["OMP_NUM_THREADS"] = str(config.threads)
    with _running("vLLM's server", command, port, environment, folder / "vllm.txt") as server:
        yield server


def vllm_flags(arguments: Mapping[str, Any]) -> list[str]:
    """What `EngineArgs` are told, as the flags of a server that has its own mind about tokenizers and statistics."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None or name in _FREE_RUNNING:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value)]
    return flags


@contextmanager
def _running(
    name: str, command: Sequence[str], port: int, environment: Mapping[str, str], log: Path
) -> Iterator[Server]:
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=out, stderr=out, env=environment)
    try:
        yield Server(name, port, process, log)
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _wait_ready(server: Server, session: aiohttp.ClientSession) -> float:
    """Seconds until it answers that it is healthy. Raises EngineStartError."""
    began = time.monotonic()
    while time.monotonic() - began < START_S:
        if server.process.poll() is not None:
            raise server.fail("ended while it was starting")
        try:
            async with session.get(f"{server.url}/health") as response:
                if response.status == 200:
                    return time.monotonic() - began
        except aiohttp.ClientError:
            pass  # it does not listen yet
        await asyncio.sleep(LOOK_S)
    raise server.fail(f"was not ready after {START_S:g} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
