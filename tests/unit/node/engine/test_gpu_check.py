"""What the check on a GPU concludes from what its parts have written, and what it leaves to each of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from p2pserve.node.engine.gpucheck import parts, run
from p2pserve.node.engine.gpucheck.verdicts import (
    CODEC_SHARE,
    ENGINE_TARGETS,
    NOT_RUN,
    PARTS,
    CheckPart,
    CheckReport,
    Outcome,
    PartResult,
    judge,
    not_run,
    report_of,
    table,
    time_limit,
)
from p2pserve.node.engine.vllm.synchronisations import SWITCH, Frame, own_frames, read_log, record_stacks

BY_NAME = {part.name: part for part in PARTS}
BENCH = {
    "throughput_ratio_32": 0.98,
    "ttft_added_ms": 4.0,
    "handoff_link_ratio_4000": 0.9,
    "step_beside_transfer_ratio": 1.02,
    "steps": [[0.002, 0, 0, 1, 40]],
}
ROW = {"op": "quantise", "codec": "kv4", "device": "cuda", "tokens": 4096, "gbps_16bit": 1600.0, "memcpy_gbps": 2000.0}
CASE = '<testcase classname="tests.gpu.test_engines" name="{}">{}</testcase>{}'
JUNIT = f"<testsuites><testsuite>{CASE}</testsuite></testsuites>"
FINE: dict[str, str] = {
    "box": json.dumps({"cards": ["NVIDIA A40"], "complaints": []}),
    "untouched": json.dumps({"patched": {}, "cuda_initialised": False}),
    "tests": JUNIT.format("test_a", "", '<testcase classname="x" name="y"><skipped message="one GPU"/></testcase>'),
    "kernels": json.dumps({"rows": [ROW, {**ROW, "codec": "raw", "gbps_16bit": 1.0}, {**ROW, "device": "cpu"}]}),
    "engines": json.dumps(BENCH),
    "synchronisations": json.dumps({"armed": True, "ours": [], "vllm": ["vllm/x.py:3 f"]}),
}


def ended(output: str, status: int | None = 0, log: str = "") -> Outcome:
    return Outcome(status=status, output=output, log=log, seconds=12.34, limit_s=60.0)


def judged(name: str, output: str, status: int | None = 0, log: str = "") -> PartResult:
    return judge(BY_NAME[name], ended(output, status, log))


def test_the_parts_come_in_order_and_take_half_an_hour() -> None:
    assert [part.name for part in PARTS] == ["box", "untouched", "tests", "kernels", "engines", "synchronisations"]
    assert sum(part.share_s for part in PARTS) == 30 * 60


def test_a_part_gets_its_share_and_what_others_have_left() -> None:
    box, untouched, *_ = PARTS
    assert time_limit(0, 0.0) == box.share_s
    assert time_limit(1, 1.0) == box.share_s + untouched.share_s - 1.0
    assert time_limit(1, box.share_s) == untouched.share_s
    assert time_limit(len(PARTS) - 1, 1e6) == 0.0


@pytest.mark.parametrize("name", FINE)
def test_what_is_fine_passes(name: str) -> None:
    result = judged(name, FINE[name])
    assert (result.status, result.reason, result.seconds) == ("passed", "", 12.3)
    assert result.found
    assert result.what == BY_NAME[name].what


@pytest.mark.parametrize(
    ("name", "output", "reason"),
    [
        ("box", json.dumps({"complaints": ["no C compiler 'cc'", "no Python.h"]}), "no C compiler 'cc'; no Python.h"),
        (
            "untouched",
            json.dumps({"patched": {"torch.cuda.Stream": "vllm.v1.worker.cpu.shm"}, "cuda_initialised": False}),
            "torch.cuda.Stream is vllm.v1.worker.cpu.shm's",
        ),
        ("untouched", json.dumps({"patched": {}, "cuda_initialised": True}), "CUDA is initialised"),
        ("tests", JUNIT.format("test_a", "<failure/>", ""), "1 of 1 failed: test_engines::test_a"),
        ("tests", JUNIT.format("test_a", "<error/>", ""), "1 of 1 failed: test_engines::test_a"),
        ("tests", JUNIT.format("test_a", "<skipped message='no GPU'/>", ""), "no test was run"),
        ("tests", "<testsuites/>", "no test was run"),
        ("kernels", json.dumps({"rows": [{**ROW, "gbps_16bit": 1300.0}]}), "kv4 quantise 4096 is 0.65, not >= 0.7"),
        ("kernels", json.dumps({"rows": [{**ROW, "device": "cpu"}]}), "no codec was measured on a GPU"),
        ("engines", json.dumps({**BENCH, "throughput_ratio_32": 0.9}), "throughput_ratio_32 is 0.9, not >= 0.97"),
        ("engines", json.dumps({**BENCH, "ttft_added_ms": 11.0}), "ttft_added_ms is 11, not <= 10"),
        ("engines", json.dumps({**BENCH, "handoff_link_ratio_4000": 0.5}), "handoff_link_ratio_4000 is 0.5"),
        ("engines", json.dumps({**BENCH, "step_beside_transfer_ratio": float("nan")}), "is nan, not <= 1.05"),
        ("synchronisations", json.dumps({"armed": False, "ours": []}), "was not active"),
        (
            "synchronisations",
            json.dumps({"armed": True, "ours": [{"own": ["a.py:1 f", "b.py:2 g"], "message": "waits"}]}),
            "1 of ours: b.py:2 g (waits)",
        ),
    ],
)
def test_what_is_wrong_fails_with_the_reason(name: str, output: str, reason: str) -> None:
    result = judged(name, output)
    assert result.status == "failed"
    assert reason in result.reason


@pytest.mark.parametrize("name", FINE)
@pytest.mark.parametrize("output", ["", "{", "{}", "[]", "null"])
def test_a_program_that_ends_without_a_result_fails_with_what_it_said_last(name: str, output: str) -> None:
    result = judged(name, output, status=1, log="Traceback\n  CUDA error: out of memory\n\n")
    assert result.status == "failed"
    assert result.reason == "ended with status 1 and without a result: CUDA error: out of memory"


def test_a_status_other_than_0_is_never_a_pass() -> None:
    assert judged("kernels", FINE["kernels"], status=3, log="").reason == "ended with status 3: it said nothing"


def test_a_part_that_was_ended_says_so_whatever_it_has_written() -> None:
    result = judged("engines", FINE["engines"], status=None)
    assert (result.status, result.reason) == ("failed", "ended because it was not done after 60 s")


def told(results: list[PartResult]) -> tuple[bool, str]:
    report = report_of(
        results, began="2026-01-01T00:00:00+00:00", seconds=700.0, cards=["NVIDIA A40"], versions={"vllm": "0.32.0"}
    )
    return report.passed, table(report)


def test_only_all_parts_together_pass() -> None:
    fine = [judged(part.name, FINE[part.name]) for part in PARTS]
    passed, text = told(fine)
    assert passed
    assert text.splitlines()[0] == "NVIDIA A40; vllm 0.32.0"
    assert text.splitlines()[-1] == "6 of 6 parts passed, in 700 s"
    assert not told(fine[:-1])[0]
    assert not told([*fine[:-1], not_run(PARTS[-1], "no tests")])[0]
    assert not told([*fine[:-1], judged(PARTS[-1].name, "")])[0]


def test_the_table_has_80_columns_and_says_what_was_missed() -> None:
    slow = {**BENCH, "throughput_ratio_32": 0.5, "ttft_added_ms": 123.456}
    results = [not_run(part) if part.name != "engines" else judged("engines", json.dumps(slow)) for part in PARTS]
    _, text = told(results)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count(NOT_RUN) == len(PARTS) - 1
    line, reason = (line for line in text.splitlines() if line.startswith("  throughput_ratio_32"))
    assert reason.startswith("  throughput_ratio_32 is 0.5, not >= 0.97; ttft_added_ms is 123, not <= 10")
    assert line.split() == ["throughput_ratio_32", "0.500", ">=", "0.97", "not", "reached"]
    assert "not reached" not in next(line for line in text.splitlines() if "handoff_link" in line)


def page(report: CheckReport) -> str:
    """The table of `docs/gpu.md`: every figure and, of parts without figures, their verdict."""
    wanted = {
        "kernels": [("each codec, over a copy on the device", f">= {CODEC_SHARE:g}")],
        "engines": [(f"`{name}`", f"{sign} {bound:g}") for name, sign, bound in ENGINE_TARGETS],
    }
    rows = ["| part | figure | target | found |", "|---|---|---|---|"]
    for part in report.parts:
        if part.figures:
            found = [(f"`{each.name}`", each.target, f"{each.value:.3f}") for each in part.figures]
        else:
            verdict = part.reason or part.status
            found = [(*each, verdict) for each in wanted.get(part.part, [(part.what, "passes")])]
        rows += [f"| {' | '.join((part.part, *each))} |" for each in found]
    return "\n".join(rows)


def test_the_page_quotes_the_report_that_lies_beside_it() -> None:
    docs = Path(__file__).parents[4] / "docs"
    report = msgspec.json.decode((docs / "gpu-check.json").read_bytes(), type=CheckReport)
    assert page(report) in (docs / "gpu.md").read_text()
    assert len(report.parts) == len(PARTS)
    measured = page(report_of([judged("engines", FINE["engines"])], began="", seconds=1.0, cards=["x"], versions={}))
    assert "| engines | `throughput_ratio_32` | >= 0.97 | 0.980 |" in measured.splitlines()


# ---- running the parts --------------------------------------------------------------------------------------------


def test_without_a_gpu_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> int:
        raise AssertionError("a part was started")

    monkeypatch.setattr(run, "gpu_names", lambda: ())
    monkeypatch.setattr(run, "run_process", start)
    said: list[str] = []
    report = run.run_check(said.append)
    assert said == [run.NO_GPU]
    assert not report.passed
    assert [(part.status, part.reason) for part in report.parts] == [("skipped", NOT_RUN)] * len(PARTS)


def test_with_one_every_part_is_run_also_after_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def start(part: CheckPart, limit_s: float, folder: object) -> PartResult:
        begun.append(part.name)
        assert 0.0 < limit_s <= sum(each.share_s for each in PARTS)
        return judged(part.name, FINE[part.name] if part.name != "untouched" else "")

    monkeypatch.setattr(run, "gpu_names", lambda: ("NVIDIA A40",))
    monkeypatch.setattr(run, "run_part", start)
    said: list[str] = []
    report = run.run_check(said.append)
    assert begun == [part.name for part in PARTS]
    assert [part.part for part in report.parts if part.status == "failed"] == ["untouched"]
    assert not report.passed
    assert "untouched: failed after 12.3 s" in said
    assert msgspec.json.decode(msgspec.json.encode(report))["cards"] == ["NVIDIA A40"]


@pytest.mark.parametrize(("cores", "testers"), [(2, 1), (7, 1), (8, 2), (16, 4), (128, 4), (None, 1)])
def test_as_many_test_at_once_as_have_cores(monkeypatch: pytest.MonkeyPatch, cores: int | None, testers: int) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    command = run.command_of(BY_NAME["tests"], Path("report.xml"))
    assert command is not None
    assert command[-2:] == ["-n", str(testers)]


def test_an_installed_package_has_no_tests_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert run.command_of(BY_NAME["tests"], tmp_path) is not None
    monkeypatch.setattr(run, "CHECKOUT", tmp_path)
    assert run.command_of(BY_NAME["tests"], tmp_path) is None
    result = run.run_part(BY_NAME["tests"], 1.0, tmp_path)
    assert (result.status, result.reason) == ("skipped", run.NO_TESTS)


# ---- the programs -------------------------------------------------------------------------------------------------


def test_what_is_not_torchs_own_is_named() -> None:
    def noop() -> None: ...

    names = {"torch.cuda.Stream": torch.cuda.Stream, "torch.Tensor.pin_memory": torch.Tensor.pin_memory}
    assert parts.patched(names) == {}
    assert parts.patched({**names, "torch.cuda.Event": noop}) == {"torch.cuda.Event": __name__}
    assert parts.patched({"torch.cuda.set_stream": noop}) == {"torch.cuda.set_stream": __name__}
    noop.__module__ = "vllm.utils.torch_utils"  # vLLM wraps this one on every device
    assert parts.patched({"torch.cuda.set_stream": noop}) == {}


def test_a_box_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"vllm": "0.32.0", "torch": "2.13.0", "triton": "3.7.1"}
    assert list(parts.list_wrong_versions(good)) == []
    (vllm,) = parts.list_wrong_versions({**good, "vllm": ""})
    assert vllm == "vllm is not installed, not 0.32.x: make setup DEVICE=cuda"
    monkeypatch.setenv("CC", "/no/such/cc")
    told = parts.look_at_box()["complaints"]
    assert any("no C compiler '/no/such/cc'" in line for line in told)


# ---- synchronisations ---------------------------------------------------------------------------------------------

PACKAGE = "/box/p2pserve"
OUTSIDE = (Frame("/box/p2pserve/node/engine/process.py", 200, "loop"), Frame("/v/vllm/engine.py", 9, "step"))
WATCHED = Frame("/v/vllm/utils/gpu_sync_debug.py", 406, "wrapper")
RUNNER = Frame("/v/vllm/v1/worker/gpu_model_runner.py", 7, "execute_model")
HOOK = Frame("/box/p2pserve/node/engine/kv/worker_side.py", 40, "save_layer")
COPY = Frame("/v/torch/_tensor.py", 5, "cpu")


@pytest.mark.parametrize(
    ("stack", "own"),
    [
        ((*OUTSIDE, WATCHED, RUNNER, COPY), []),
        ((*OUTSIDE, WATCHED, RUNNER, HOOK), [HOOK]),
        ((*OUTSIDE, WATCHED, RUNNER, HOOK, COPY), [HOOK]),
        ((*OUTSIDE, WATCHED, RUNNER, HOOK, WATCHED, COPY), [HOOK]),  # sampling inside of a watched call
        ((OUTSIDE[0], COPY), [OUTSIDE[0]]),  # nobody watched: ours, rather than nobody's
        ((WATCHED, Frame("/box/p2pserve-other/x.py", 1, "f")), []),
    ],
)
def test_what_is_ours_is_below_what_vllm_watches(stack: tuple[Frame, ...], own: list[Frame]) -> None:
    assert own_frames(stack, PACKAGE) == own


def test_every_stack_is_written_once_and_other_warnings_as_before() -> None:
    lines: list[str] = []
    others: list[str] = []
    record = record_stacks(lines.append, lambda message, *_, **__: others.append(str(message)))

    def copy() -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        for _ in range(3):
            copy()
        copy()
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert others == ["something else"]
    assert len(lines) == 2
    armed, found = read_log(["INFO loading\n", *lines], __file__.rpartition("/")[0])
    assert not armed  # no engine has said that vLLM watches
    assert [each.where.split(" ")[1] for each in found] == ["copy", "copy"]
    assert all(each.own for each in found)


@pytest.mark.parametrize(("told", "armed"), [([], False), ([True], True), ([True, False], False), ([True, True], True)])
def test_nothing_is_concluded_unless_vllm_watched_in_every_engine(told: list[bool], armed: bool) -> None:
    lines = [f"p2pserve-synchronisation {json.dumps({'armed': each})}\n" for each in told]
    assert read_log(lines, PACKAGE) == (armed, [])


def test_without_the_switch_an_engine_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from p2pserve.node.engine.vllm.synchronisations import record_if_asked

    monkeypatch.delenv(SWITCH, raising=False)
    before = warnings.showwarning
    record_if_asked(pytest.fail)
    assert warnings.showwarning is before
