"""Real engine processes that do not start: one line for the user."""

import shutil
from pathlib import Path

import psutil
import pytest
import trio

from p2pserve.node.engine.agent_side.engine_link import EngineStartError

from ..kv_engines import engines, prompt_of


def command_of(process: psutil.Process) -> list[str]:
    try:
        found: list[str] = process.cmdline()
    except psutil.NoSuchProcess:  # or a zombie: other tests' processes end meanwhile
        return []
    return found


def fork_servers() -> set[psutil.Process]:
    """All of this run: other tests may share theirs. What one has forked has its command line too."""
    processes = psutil.Process().children(recursive=True)
    found = {process for process in processes if "p2pserve.node.engine.forkserver" in command_of(process)}
    return {process for process in found if process.parent() not in found}


def engine_processes() -> set[psutil.Process]:
    return {child for server in fork_servers() for child in server.children()}


def test_an_engine_killed_while_it_loads_is_named(engine_channels: list[int], random_model: Path) -> None:
    others = engine_processes()

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            await (await start()).generate(prompt_of(5))  # so that vLLM has been imported
            (before,) = engine_processes() - others
            own = before.parent()
            assert own is not None

            async def kill() -> None:
                while not (born := set(own.children()) - {before}):  # noqa: ASYNC110 (nobody tells of a fork)
                    await trio.sleep(0.002)
                for process in born:
                    process.kill()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill)
                with pytest.raises(EngineStartError, match=r"was killed by SIGKILL.* while it was loading") as caught:
                    await start()
                assert "\n" not in str(caught.value)
            assert (await (await start()).generate(prompt_of(5))).finish == "length"

    trio.run(main)


@pytest.mark.parametrize("case", ["no folder", "garbage weights", "unknown architecture", "no room"])
def test_a_model_that_cannot_be_loaded_is_one_line(
    engine_channels: list[int], random_model: Path, tmp_path: Path, case: str
) -> None:
    model = tmp_path / "broken"
    changes: dict[str, object] = {}
    if case != "no folder":
        shutil.copytree(random_model, model)
    if case == "garbage weights":
        (model / "model.safetensors").write_bytes(b"garbage")
    elif case == "unknown architecture":
        config = (model / "config.json").read_text()
        (model / "config.json").write_text(config.replace("LlamaForCausalLM", "NobodysForCausalLM"))
    elif case == "no room":
        changes["max_model_len"] = 1 << 20

    async def main() -> None:
        async with engines(engine_channels, model) as start:
            with pytest.raises(EngineStartError, match=r"^vLLM cannot load .*broken: .+") as caught:
                await start(**changes)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 1000
            if case == "no room":
                assert "take --max-model-len 512 or less" in str(caught.value)

    trio.run(main)
