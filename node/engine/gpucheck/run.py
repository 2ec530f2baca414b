"""Runs the check: each part in a process of its own, so that none finds CUDA as another has left it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from ...box.hardware import probe
from ..gpus import gpu_names
from .parts import engine_versions
from .verdicts import PARTS, CheckPart, CheckReport, Outcome, PartResult, judge, not_run, report_of, time_limit

CHECKOUT: Final = Path(__file__).resolve().parents[3]
NO_GPU: Final = "no GPU here: nothing to check"
FOR_CPUS: Final = "the engine that is installed computes on CPUs: make setup DEVICE=cuda"
NO_TESTS: Final = "the tests are not in the installed package: run `make gpu-check` in a checkout"
LOG_END_BYTES: Final = 4096
MOST_TESTERS: Final = 4
CORES_OF_A_TESTER: Final = 4  # the test, and two or three engines
END_S: Final = 10.0  # for a part that is asked to end


def run_check(print_line: Callable[[str], None]) -> CheckReport:
    """All parts in their order, also after one has failed; on a box without a GPU, none. Raises OSError."""
    cards = gpu_names()
    began, started = datetime.now(UTC), time.monotonic()
    results: list[PartResult] = []
    if not cards:
        print_line(FOR_CPUS if probe().gpus else NO_GPU)
        results += [not_run(part) for part in PARTS]
    with tempfile.TemporaryDirectory(prefix="p2pserve-gpu-check-", ignore_cleanup_errors=True) as folder:
        for position, part in enumerate(PARTS[len(results) :]):
            limit_s = time_limit(position, time.monotonic() - started)
            print_line(f"{part.name}: {part.what} (at most {limit_s:.0f} s)")
            result = run_part(part, limit_s, Path(folder))
            print_line(f"{part.name}: {result.status}" + (f" after {result.seconds:.1f} s" if result.seconds else ""))
            results.append(result)
    return report_of(
        results,
        began=began.isoformat(timespec="seconds"),
        seconds=time.monotonic() - started if cards else 0.0,
        cards=cards,
        versions=engine_versions(),
    )


def write_report(report: CheckReport, path: Path) -> None:
    """As JSON. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def command_of(part: CheckPart, output: Path) -> list[str] | None:
    """What to start for a part; None if it is not here. Only pytest writes to `output` itself."""
    python = [sys.executable, "-m"]
    match part.name:
        case "tests":
            options = ["-q", "-p", "no:cacheprovider", f"--junitxml={output}", "-n", str(count_testers())]
            return [*python, "pytest", "tests/gpu", *options] if (CHECKOUT / "tests" / "gpu").is_dir() else None
        case "kernels":
            return [*python, "p2pserve.kernels.bench", "--format", "json", "--threads", "1"]
        case "engines":
            return [*python, "p2pserve.node.engine.bench", "--format", "json"]
        case name:
            return [*python, "p2pserve.node.engine.gpucheck.parts", name]


def count_testers() -> int:
    """Processes that test at once. Engines spend half a minute on starting, most of it on one core, and take little of
    a card; but what waits for too long for a core fails."""
    return max(1, min(MOST_TESTERS, (os.cpu_count() or 1) // CORES_OF_A_TESTER))


def run_part(part: CheckPart, limit_s: float, folder: Path) -> PartResult:
    """In a process of its own, with its output in this folder."""
    output, log = folder / f"{part.name}.out", folder / f"{part.name}.log"
    command = command_of(part, output)
    if command is None:
        return not_run(part, NO_TESTS)
    own_file = part.name == "tests"
    with log.open("ab") as log_file, (log if own_file else output).open("ab") as standard_output:
        began = time.monotonic()
        status = run_process(command, limit_s, standard_output.fileno(), log_file.fileno())
        seconds = time.monotonic() - began
    return judge(
        part,
        Outcome(
            status=status,
            output=output.read_text(encoding="utf-8", errors="replace") if output.exists() else "",
            log=_end_of(log),
            seconds=seconds,
            limit_s=limit_s,
        ),
    )


def run_process(command: Sequence[str], limit_s: float, output: int, log: int) -> int | None:
    """Run it with these descriptors; its status, or None if its process group was ended."""
    where = CHECKOUT if (CHECKOUT / "tests").is_dir() else None
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=log, cwd=where, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also when the user interrupts
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and its group. Engines are not in the group: they end when those that they serve do."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOG_END_BYTES))
        return file.read().decode(errors="replace")
