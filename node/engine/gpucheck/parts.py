"""Programs of the check, each printing one JSON object: `...gpucheck.parts NAME`."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from ...box.prerequisites import inspect_box, list_complaints
from .. import protocol
from ..agent_side.fork_server import open_fork_server
from ..gpus import gpu_names, installed_version
from ..trials.random_model import TINY, make_model
from ..trials.trial import SEND_MODES, PromptCut, open_trial
from ..vllm.synchronisations import SWITCH, read_log

PACKAGE: Final = str(Path(__file__).parents[3])
PINNED: Final = {"vllm": "0.32.", "torch": "2.13.", "triton": "3.7."}
PROMPT_TOKENS, TRANSFERRED_TOKENS, NEW_TOKENS, CHUNK = 700, 450, 24, 256
CODECS: Final = ("raw", "kv4")
REPLACED_ON_CPUS: Final = (
    "Event",
    "cuda.Event",
    "cuda.Stream",
    "cuda.current_stream",
    "cuda.set_stream",
    "cuda.stream",
    "accelerator.empty_cache",
    "accelerator.get_memory_info",
    "accelerator.synchronize",
    "Tensor.pin_memory",
    "Tensor.record_stream",
)
# vLLM remembers the stream that is set, on any device, and then calls torch's own.
WRAPPED_BY_VLLM: Final = {"torch.cuda.set_stream": "vllm.utils.torch_utils"}


# ---- the box --------------------------------------------------------------------------------------------------------


def engine_versions() -> dict[str, str]:
    """Of what an engine is made of; "" for what is not installed."""
    names = ("p2pserve", "vllm", "torch", "triton")
    return {"python": platform.python_version(), **{name: installed_version(name) for name in names}}


def look_at_box() -> dict[str, Any]:
    """What an engine needs of this box. Each complaint is one line with its fix."""
    versions, box = engine_versions(), inspect_box()
    return {
        "cards": gpu_names(),
        "driver": box.driver or "",
        "versions": versions,
        "complaints": [*list_complaints(box, "cuda"), *list_wrong_versions(versions)],
    }


def list_wrong_versions(versions: Mapping[str, str]) -> Iterator[str]:
    """One line with its fix for each that is not the pinned one."""
    for name, pinned in PINNED.items():
        if not versions[name].startswith(pinned):
            yield f"{name} is {versions[name] or 'not installed'}, not {pinned}x: make setup DEVICE=cuda"


# ---- torch as it is -------------------------------------------------------------------------------------------------


def watched_names() -> dict[str, object]:
    """What vLLM's worker for CPUs replaces in torch when it is imported, as it is now."""
    import torch

    return {f"torch.{name}": attrgetter(name)(torch) for name in REPLACED_ON_CPUS}


def patched(names: Mapping[str, object]) -> dict[str, str]:
    """Those that are not torch's own, with the module that they are from. What is written in C names none."""
    owners = {name: str(getattr(value, "__module__", None) or "torch") for name, value in names.items()}
    own = ("torch", "builtins")
    return {
        name: owner
        for name, owner in owners.items()
        if owner.partition(".")[0] not in own and WRAPPED_BY_VLLM.get(name) != owner
    }


def look_at_fork_server() -> dict[str, Any]:
    """What is left of torch once this process has imported what a fork server imports."""
    import torch

    from ..vllm_program.preload import preload

    version = preload()
    return {
        "vllm": version,
        "patched": patched(watched_names()),
        "cuda_initialised": bool(torch.cuda.is_initialized()),
    }


# ---- what a step waits for ------------------------------------------------------------------------------------------


async def exercise_engines(folder: Path, log: Path) -> None:
    """Two engines hand KV over in every mode, beside requests of their own. Raises EngineError, TransferError."""
    make_model(folder, msgspec.structs.replace(TINY, dtype="bfloat16", positions=1024))
    config = protocol.EngineConfig(
        model=str(folder), kv_cache_mib=64, max_batched_tokens=CHUNK, max_requests=8, log_file=str(log)
    )
    async with open_fork_server(log=log, threads=1) as server, open_trial(server) as trial:
        await server.wait_ready()
        prefill, decode = await trial.start(config), await trial.start(config)
        for number, (codec, send_mode) in enumerate(itertools.product(CODECS, SEND_MODES)):
            rng = random.Random(number)
            prompt, other = ([rng.randrange(1, TINY.vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(2))
            beside = [(engine, engine.submit(other, 4 * NEW_TOKENS)) for engine in (prefill, decode)]
            cut = PromptCut(prompt, TRANSFERRED_TOKENS, NEW_TOKENS)
            await trial.transfer_prompt(prefill, decode, cut, codec=codec, pacing=send_mode)
            for engine, request in beside:
                await engine.answer(request)


def look_for_synchronisations() -> dict[str, Any]:
    """What vLLM's check finds in two engines that hand KV over."""
    os.environ[SWITCH] = "warn"
    with tempfile.TemporaryDirectory(prefix="p2pserve-check-", ignore_cleanup_errors=True) as name:
        folder, log = Path(name), Path(name) / "engine.log"
        trio.run(exercise_engines, folder, log)
        with log.open(encoding="utf-8", errors="replace") as lines:
            armed, found = read_log(lines, PACKAGE)
    return {
        "armed": armed,
        "ours": [each._asdict() for each in found if each.own],
        "vllm": sorted({each.where for each in found if not each.own}),
    }


PROGRAMS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "box": look_at_box,
    "untouched": look_at_fork_server,
    "synchronisations": look_for_synchronisations,
}


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.node.engine.gpucheck.parts", description=__doc__)
    parser.add_argument("part", choices=sorted(PROGRAMS))
    found = PROGRAMS[parser.parse_args(arguments).part]()
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
