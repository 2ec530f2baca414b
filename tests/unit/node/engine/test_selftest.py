"""When the self-test is run, and what is remembered of it. That it tests anything: `tests/integration`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing
from safetensors.numpy import load_file

from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.engine.agent_side.engine_link import EngineStarter, EngineStartError
from p2pserve.node.engine.trials import selftest
from p2pserve.node.engine.trials.random_model import make_model
from p2pserve.node.engine.trials.selftest import SelfTestResult, installed, require_known_to_work


class FakeServer:
    """A fork server with this version of vLLM."""

    def __init__(self, version: str) -> None:
        self.version = version

    async def wait_ready(self) -> None:
        await trio.lowlevel.checkpoint()


class FakeTest:
    """In the place of the self-test: counts how often it is run."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.runs = 0

    async def __call__(self, server: EngineStarter) -> SelfTestResult:
        self.runs += 1
        await trio.testing.wait_all_tasks_blocked()  # whoever else wants to know is waiting now
        return SelfTestResult(
            versions=installed(server.version), passed=not self.reason, reason=self.reason, seconds=10.0
        )


def ask(version: str, memory: Path, times: int = 1) -> None:
    """Ask so many times at once."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(times):
                nursery.start_soon(require_known_to_work, cast("EngineStarter", FakeServer(version)), memory)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> FakeTest:
    test = FakeTest()
    monkeypatch.setattr(selftest, "run_selftest", test)
    return test


def test_the_pinned_version_is_not_tested(passing: FakeTest, tmp_path: Path) -> None:
    ask("0.32.7", tmp_path / "memory.json")
    assert passing.runs == 0
    assert list(tmp_path.iterdir()) == []


def test_another_version_is_tested_once(passing: FakeTest, tmp_path: Path) -> None:
    """Also when all nodes of a box ask at once."""
    memory = tmp_path / "cache" / "memory.json"
    ask("0.33.0", memory, times=3)
    ask("0.33.0", memory)
    assert passing.runs == 1
    ask("0.34.0", memory)
    ask("0.33.0", memory)
    assert passing.runs == 2
    assert [each["vllm"] for each in json.loads(memory.read_text())] == ["0.33.0", "0.34.0"]


def test_what_another_time_has_left_is_no_verdict(passing: FakeTest, tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    memory.write_text("{nonsense")
    ask("0.33.0", memory)
    ask("0.33.0", memory)
    assert passing.runs == 1


def test_a_failure_is_one_line_and_tested_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    test = FakeTest("transferring KV: token 3 of the answer is another one")
    monkeypatch.setattr(selftest, "run_selftest", test)
    for _ in range(2):
        with pytest.raises(ExceptionGroup) as caught:
            ask("0.33.0", tmp_path / "memory.json")
        (error,) = caught.value.exceptions
        assert isinstance(error, EngineStartError)
        assert str(error) == (
            "vLLM 0.33.0 is installed; p2pserve is made for 0.32.x, and its self-test fails with this one: "
            "transferring KV: token 3 of the answer is another one"
        )
    assert test.runs == 2


def test_a_cache_that_cannot_be_used_is_one_line(passing: FakeTest, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExceptionGroup) as caught:
        ask("0.33.0", tmp_path / "file" / "memory.json")
    (error,) = caught.value.exceptions
    assert isinstance(error, EngineStartError)
    assert str(error).endswith("name another folder with XDG_CACHE_HOME")


def test_the_model_is_always_the_same(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        make_model(folder)
    one, two = (cast("dict[str, Any]", load_file(folder / "model.safetensors")) for folder in folders)
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(("gpus", "limit"), [((), "120 s"), ((Gpu(name="g", memory_gib=24.0, uuid="u"),), "600 s")])
def test_gpus_compile_and_capture_and_are_given_the_time(
    gpus: tuple[Gpu, ...], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(server: EngineStarter) -> str:
        await trio.sleep_forever()
        raise AssertionError

    box = Hardware(cores=4, memory_gib=8.0, processor="x", gpus=gpus)
    monkeypatch.setattr(selftest, "probe", lambda: box)
    monkeypatch.setattr(selftest, "find_fault", never)
    server = cast("EngineStarter", FakeServer("0.33.0"))
    verdict = trio.run(selftest.run_selftest, server, clock=trio.testing.MockClock(autojump_threshold=0))
    assert not verdict.passed
    assert verdict.reason == f"it was not done after {limit}"
