"""Does this vLLM work with p2pserve? Asked of every version but the pinned one, before an engine serves anybody.

Our connector and our pipeline use parts of vLLM that change without notice. The failure to fear is not a crash but
other tokens. So a tiny model with random weights, made on the spot, answers the same prompt in one engine, with KV
handed from one engine to another at an odd place, and in a pipeline of two stages; the tokens must be the same.
"""

from __future__ import annotations

import fcntl
import os
import platform
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import trio

from ....kvtransport.errors import TransferError
from ...box.hardware import probe
from .. import protocol
from ..agent_side.engine_link import EngineError, EngineStarter, EngineStartError
from ..gpus import installed_version
from .random_model import TINY, make_model
from .trial import SEND_MODES, PromptCut, TrialAnswer, open_trial

PINNED: Final = "0.32."  # the versions that the project's own tests have run with
CPU_LIMIT_S: Final = 120.0  # it takes about 10 s; on a busy machine more, but not for ever
GPU_LIMIT_S: Final = 600.0  # four starts, each of which compiles and captures graphs, as engines that serve do
POLL_S: Final = 0.2

CHUNK = 64
PROMPT_TOKENS, TRANSFERRED_TOKENS, NEW_TOKENS = 150, 101, 16  # several chunks; no multiple of any block size
PARTITION = (1, 2)


OpenServer = Callable[..., AbstractAsyncContextManager[EngineStarter]]


class TestedVersions(msgspec.Struct, frozen=True, kw_only=True):
    """What a verdict holds for."""

    p2pserve: str
    vllm: str
    torch: str
    python: str


class SelfTestResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the self-test ended. `reason` is one line, empty when it passed."""

    versions: TestedVersions
    passed: bool
    reason: str
    seconds: float


async def require_known_to_work(server: EngineStarter, memory: Path | None = None) -> None:
    """Return if vLLM is the pinned version, or passes the self-test, now or before.

    `memory` remembers it, by default in the user's cache, for all nodes of a box. Raises
    EngineStartError."""
    await server.wait_ready()
    if server.version.startswith(PINNED):
        return
    async with _remembered(memory or _cache() / "selftest.json") as passed:
        if installed(server.version) in passed:
            return
        verdict = await run_selftest(server)
        if not verdict.passed:
            raise EngineStartError(
                f"vLLM {server.version} is installed; p2pserve is made for {PINNED}x, and its self-test fails with "
                f"this one: {verdict.reason}"
            )
        passed.append(verdict.versions)


async def run_selftest(server: EngineStarter) -> SelfTestResult:
    """Test this installation. Raises EngineStartError when vLLM cannot even be imported."""
    await server.wait_ready()
    began = trio.current_time()
    limit_s = GPU_LIMIT_S if probe().gpus else CPU_LIMIT_S
    reason = f"it was not done after {limit_s:g} s"
    with trio.move_on_after(limit_s):
        reason = await find_fault(server)
    return SelfTestResult(
        versions=installed(server.version), passed=not reason, reason=reason, seconds=trio.current_time() - began
    )


async def check_installation(open_server: OpenServer) -> SelfTestResult:
    """Test this installation, in a fork server of its own. Raises EngineStartError."""
    log = selftest_log()
    _make_folder(log.parent)
    async with open_server(log=log, threads=1) as server:
        return await run_selftest(server)


def installed(vllm: str) -> TestedVersions:
    """The versions at hand; `vllm` as the fork server has found it."""
    return TestedVersions(
        p2pserve=installed_version("p2pserve"),
        vllm=vllm,
        torch=installed_version("torch"),
        python=platform.python_version(),
    )


def selftest_log() -> Path:
    """What the engines of `check_installation` have to say."""
    return _cache() / "selftest.log"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "p2pserve"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineStartError(f"{folder}: {error.strerror}; name another folder with XDG_CACHE_HOME") from error


async def find_fault(server: EngineStarter) -> str:
    """What is wrong, in one line; "" if nothing."""
    prompts = [random.Random(seed).choices(range(1, TINY.vocabulary), k=PROMPT_TOKENS) for seed in (7, 8)]
    doing = "an engine"
    with tempfile.TemporaryDirectory(prefix="p2pserve-selftest-", ignore_cleanup_errors=True) as folder:
        make_model(Path(folder))
        config = protocol.EngineConfig(
            model=folder, dtype="float32", kv_cache_mib=32, max_batched_tokens=CHUNK, max_requests=8
        )
        try:
            async with open_trial(server) as trial:
                first, second = await trial.start(config), await trial.start(config)
                expected = [await first.generate(prompt, NEW_TOKENS) for prompt in prompts]
                for prompt, send_mode, answer in zip(prompts, SEND_MODES, expected, strict=True):
                    doing = f"transferring KV ({send_mode})"
                    cut = PromptCut(prompt, TRANSFERRED_TOKENS, NEW_TOKENS)
                    handed = await trial.transfer_prompt(first, second, cut, pacing=send_mode)
                    if handed.cached < TRANSFERRED_TOKENS:
                        return f"{doing}: only {handed.cached} of {TRANSFERRED_TOKENS} positions were used"
                    if handed.tokens != answer.tokens:
                        return f"{doing}: {_difference(handed, answer)}"
                doing = "a pipeline of two stages"
                head = await trial.start_pipeline(config, PARTITION)
                piped = await head.generate(prompts[0], NEW_TOKENS)
                if piped.tokens != expected[0].tokens:
                    return f"{doing}: {_difference(piped, expected[0])}"
        except (EngineError, TransferError) as error:
            return f"{doing}: {' '.join(str(error).split())}"
    return ""


def _difference(found: TrialAnswer, expected: TrialAnswer) -> str:
    same = next(
        (at for at, (one, two) in enumerate(zip(found.tokens, expected.tokens, strict=False)) if one != two),
        min(len(found.tokens), len(expected.tokens)),
    )
    return f"token {same + 1} of the answer is not the one that a single engine gives"


@asynccontextmanager
async def _remembered(memory: Path) -> AsyncIterator[list[TestedVersions]]:
    """The list in `memory`, for this process alone; what the body adds is kept. Raises EngineStartError."""
    _make_folder(memory.parent)
    try:
        descriptor = os.open(memory, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise EngineStartError(f"{memory}: {error.strerror}; name another folder with XDG_CACHE_HOME") from error
    with os.fdopen(descriptor, "r+b") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await trio.sleep(POLL_S)
        try:
            passed = msgspec.json.decode(file.read(), type=list[TestedVersions])
        except msgspec.DecodeError:  # empty as it was made, or of another time: then nothing is known
            passed = []
        known = len(passed)
        yield passed
        if len(passed) > known:
            file.seek(0)
            file.truncate()
            file.write(msgspec.json.encode(passed))
