"""The check's processes: parts that end, that overrun their time, and the two programs that do something on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from p2pserve.node.engine.gpucheck import parts, run
from p2pserve.node.engine.gpucheck.verdicts import NOT_RUN, PARTS
from p2pserve.node.engine.gpus import has_gpu
from p2pserve.node.engine.vllm.synchronisations import SWITCH, read_log, record_if_asked

pytestmark = pytest.mark.beside

on_cpus = pytest.mark.skipif(has_gpu(), reason="engines compute on a GPU here")


def started(program: str, limit_s: float) -> tuple[int | None, str]:
    """Status and output of a Python program that is run as a part is."""
    with tempfile.TemporaryFile() as output:
        status = run.run_process([sys.executable, "-c", program], limit_s, output.fileno(), output.fileno())
        output.seek(0)
        return status, output.read().decode()


def test_a_part_that_ends_in_time_is_told_by_its_status() -> None:
    assert started("print(7); raise SystemExit(3)", 60.0) == (3, "7\n")


def test_a_part_that_overruns_its_time_is_ended_with_what_it_started() -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    status, output = started(program, 3.0)
    assert status is None
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(output))
        _, alive = psutil.wait_procs([child], timeout=30)
        assert not alive or child.status() == psutil.STATUS_ZOMBIE  # nobody of ours is there to bury it


@on_cpus
def test_what_vllm_replaces_on_a_cpu_is_noticed() -> None:
    """A GPU's engines must not find this: here it shows that the program looks."""
    command = [sys.executable, "-m", "p2pserve.node.engine.gpucheck.parts", "untouched"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stdout)
    assert found["patched"]["torch.cuda.Stream"].startswith("vllm.")
    assert set(found["patched"]) <= {f"torch.{name}" for name in parts.REPLACED_ON_CPUS}
    assert found["cuda_initialised"] is False


@on_cpus
def test_engines_that_vllm_does_not_watch_prove_nothing() -> None:
    """On a CPU: the engines hand KV over in every way, and no verdict is drawn from it."""
    command = [sys.executable, "-m", "p2pserve.node.engine.gpucheck.parts", "synchronisations"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(done.stdout) == {"armed": False, "ours": [], "vllm": []}


def test_what_vllm_finds_is_told_with_the_lines_of_ours_that_led_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's own check around a call, as around its worker's; only torch's warnings are made by hand."""
    from vllm.utils import gpu_sync_debug

    monkeypatch.setattr(gpu_sync_debug, "_SYNC_CHECK_MODE", "warn")
    monkeypatch.setattr(gpu_sync_debug, "_sync_check_enabled", True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back afterwards
    monkeypatch.setenv(SWITCH, "warn")
    lines: list[str] = []
    record_if_asked(lines.append)

    watch: Any = gpu_sync_debug.with_gpu_sync_check

    def execute_model() -> None:
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        watch(execute_model)()
    armed, (found,) = read_log(lines, str(Path(__file__).parent))
    assert armed
    assert [line.split()[1] for line in found.own] == ["execute_model"]  # not the test, which is above
    assert found.where == found.own[0]
    assert read_log(lines, "/somewhere/else")[1][0].own == ()


@on_cpus
def test_the_command_says_that_there_is_nothing_to_check(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "p2pserve.sdk.cli", "selftest", "--full", "--report", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, f"{run.NO_GPU}\n", "")
    found = json.loads(report.read_text())
    assert found["passed"] is False
    assert [(each["part"], each["reason"]) for each in found["parts"]] == [(part.name, NOT_RUN) for part in PARTS]
