"""The roofline against the measured tables: how far it may be off, and what the command prints."""

from __future__ import annotations

import json

import pytest

from p2pserve.coordinator.costs.efficiency import efficiency_of
from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.costs.replica import StageHardware, replica_times
from p2pserve.coordinator.costs.step_times import StepTimes
from p2pserve.sims.roofline_errors import ErrorRow, errors, fit, main, points

TARGET = 0.15


@pytest.fixture(scope="module")
def rows() -> tuple[ErrorRow, ...]:
    return errors(points())


def test_every_file_is_met_in_both_phases(rows: tuple[ErrorRow, ...]) -> None:
    files = [row for row in rows if row.engine == "all"]
    assert len(files) == 8  # three files and all of them together, in two phases
    missed = [(row.file, row.phase, row.median) for row in files if row.median > TARGET]
    assert missed == []


def test_every_card_is_met_where_engines_agree(rows: tuple[ErrorRow, ...]) -> None:
    # DistServe's two engines differ too much for one set of factors; four cards over PCIe are off as well.
    apart = {"vllm", "t4x4"}
    missed = [row for row in rows if row.engine not in apart and row.median > TARGET]
    assert missed == []
    assert {row.gpu for row in rows} - {"all"} == {
        "A100-SXM4-40GB", "A100-SXM4-80GB", "H100-SXM5-80GB", "V100-SXM2-16GB", "L4-24GB", "T4-16GB",
    }  # fmt: skip


@pytest.mark.parametrize("card", ["V100-SXM2-16GB", "A100-SXM4-40GB"])
def test_the_factors_are_those_of_the_fit(card: str) -> None:
    found, kept = fit(points(), card), efficiency_of(gpu_table().find(card, Specs.MEASURED))
    assert found.compute_share == pytest.approx(kept.compute_share, abs=0.01)
    assert found.bandwidth_share == pytest.approx(kept.bandwidth_share, abs=0.01)
    assert found.layer_us == pytest.approx(kept.layer_s * 1e6, abs=5)


def single(name: str, model: str) -> StepTimes:
    shape = model_shape(model)
    return replica_times(shape, [StageHardware(gpu_table().find(name, Specs.MEASURED), 1, shape.layers, 160.0)])


@pytest.mark.parametrize(("requests", "measured_ms"), [(1, 21.9), (64, 27.5), (128, 36.0), (256, 53.1)])
def test_a_measurement_that_no_factor_comes_from(requests: int, measured_ms: float) -> None:
    """A6000, vLLM 0.23, Qwen2.5-7B, short prompts and 51 tokens out (ld-singh.github.io)."""
    line = single("RTX-A6000-48GB", "qwen2-7b").decode_line(requests)
    assert line.step_s(requests * 100) * 1e3 == pytest.approx(measured_ms, rel=0.12)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"file", "engine", "gpu", "phase", "points", "median", "p90", "ratio"} == set(printed[0])
    capped = [row for row in printed if row["engine"] == "h100-80gb-pcap"]
    assert [row["points"] for row in capped] == [52, 76]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["file", "engine", "card", "phase"]
    assert any(line.startswith("perf_model.csv") and "h100-80gb-pcap" in line for line in lines)
