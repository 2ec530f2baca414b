"""The page of Splitwise's clusters, cut short: its tables, and what moving KV does to the second token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from p2pserve.sims.experiments.setting import Scope
from p2pserve.sims.experiments.splitwise import provision as experiment
from p2pserve.sims.experiments.splitwise.kv_second_token import H100, second_token_rows, visible_rows
from p2pserve.sims.experiments.splitwise.lone_machines import lone_rows
from p2pserve.sims.experiments.splitwise.provision import DesignSpaceRow, ProvisionRow
from p2pserve.sims.splitwise.cluster_trials import ClusterTrials


def test_layer_by_layer_hides_what_serialised_kv_costs_the_second_token() -> None:
    rows = second_token_rows(6)
    assert [(row.model, row.gbps) for row in rows[::4]] == [
        ("bloom-176b", 3200),
        ("llama2-70b", 3200),
        ("llama2-70b", 400),
    ]
    for at in range(0, len(rows), 4):
        alone, bytes_alone, layers, serial = rows[at : at + 4]
        assert alone.visible_kv_ms == 0.0
        for row in (bytes_alone, layers, serial):
            assert row.TTFT_ms == pytest.approx(alone.TTFT_ms)
            assert row.second_token_ms - alone.second_token_ms == pytest.approx(row.visible_kv_ms, abs=0.1)
        assert 0.0 < 20 * bytes_alone.visible_kv_ms < serial.visible_kv_ms
    bloom = rows[:4]
    assert bloom[1].visible_kv_ms < bloom[2].visible_kv_ms <= bloom[1].visible_kv_ms + 1e3 * H100.sync_s
    assert bloom[2].visible_kv_ms < bloom[3].visible_kv_ms


def test_what_is_left_of_serialised_kv_grows_with_the_prompt_and_short_prompts_are_sent_so() -> None:
    """By hand: BLOOM-176B has 2 x 70 x 14,336 x 2 bytes a token, and eight cards of 400 Gb/s move 400 GB/s."""
    rows = {row.prompt: row for row in visible_rows((256, 512, 1024)) if row.machines == "DGX-H100"}
    for prompt, row in rows.items():
        assert row.serialised_ms == pytest.approx(1e3 * prompt * 2 * 70 * 14336 * 2 / 400e9, abs=0.1)
        assert row.layer_by_layer_ms == pytest.approx(5.0, abs=0.3)
    assert rows[256].chosen_ms == rows[256].serialised_ms
    assert rows[512].chosen_ms == rows[512].layer_by_layer_ms
    assert rows[1024].chosen_ms == rows[1024].layer_by_layer_ms


def test_a_lone_request_by_the_papers_measurements_is_near_its_table_and_priced_as_there() -> None:
    """By hand: $17.6 an hour for the paper's 0.856 s are 0.42 cents, and 3.2 kW for as long 0.76 Wh."""
    rows = {(row.workload, row.times, row.figure): row for row in lone_rows()}
    for (_, times, figure), row in rows.items():
        assert row.ratio == pytest.approx(row.H100 / row.A100)
        if times == "perf_model.csv" and figure != "energy, Wh":
            assert row.ratio == pytest.approx(row.paper_ratio, rel=0.15)
            assert pytest.approx(row.paper_a100, rel=0.25) == row.A100
    e2e, cost, energy = (rows["coding", "roofline", each].A100 for each in ("E2E, ms", "cost, cents", "energy, Wh"))
    assert cost == pytest.approx(e2e / 1e3 * 1760.0 / 3600.0)
    assert cost * 856.0 / e2e == pytest.approx(0.42, abs=0.005)
    assert energy == pytest.approx(e2e / 1e3 * 3200.0 / 3600.0)


def test_the_space_of_clusters_says_what_each_metric_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By clusters whose answers are given: TTFT wants 3 token machines, TBT 2, E2E more than are tried."""
    limits = {"ttft_p99": 3, "tbt_p50": 2, "e2e_p90": 9}
    tried: list[tuple[int, int, float]] = []

    def try_cluster(_: object, design: object, prompt: int, token: int, rate: float, **told: bool) -> SimpleNamespace:
        assert told == {"to_the_end": True}
        tried.append((prompt, token, rate))
        missed = tuple(slo for slo, machines in limits.items() if token < (machines if prompt < 30 else 1))
        return SimpleNamespace(missed=missed)

    monkeypatch.setattr(ClusterTrials, "try_cluster", try_cluster)
    monkeypatch.setattr(experiment, "SPACE_PROMPT", (29, 30))
    monkeypatch.setattr(experiment, "MOST_TOKEN", 4)
    scarce, ample = experiment.design_space("released", 2.0)
    assert (scarce.TTFT, scarce.TBT, scarce.E2E, scarce.all_nine, scarce.usd_per_h) == (3, 2, None, None, None)
    assert (ample.TTFT, ample.TBT, ample.E2E, ample.all_nine) == (1, 1, 1, 1)
    assert ample.usd_per_h == pytest.approx(31 * 38.0)
    assert tried == [(prompt, token, 70.0) for prompt in (29, 30) for token in (1, 2, 3, 4)]


def test_the_page_has_each_design_beside_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "KV_PROMPTS", 3)
    monkeypatch.setattr(experiment, "SPACE_PROMPT", (27, 28))
    monkeypatch.setattr(experiment, "MOST_TOKEN", 2)
    monkeypatch.setattr(experiment, "MODES", ("measured",))
    page = experiment.provision(Scope(seconds=2.0))
    tables = {table.title: table for table in page.tables}
    titles = [
        "Table IV", "Figure 12", "Figure 12, the space", "Figures 15 and 17a", "Figure 17b", "Figure 18a", "Figure 18b",
        "Figure 13", "Figure 14",
    ]  # fmt: skip
    assert list(tables) == titles
    found = {title: [row for row in tables[title].rows if isinstance(row, ProvisionRow)] for title in titles}
    for title in titles[3:7]:
        assert [row.design for row in found[title]] == ["baseA", "baseH", "AA", "HH", "HHcap", "HA"]
    assert all(row.kw <= 224.001 for row in found["Figures 15 and 17a"]), "none has more power than 40 DGX-H100"
    assert all(row.usd_per_h <= 1520.001 for row in found["Figure 17b"]), "none costs more"
    for by_power, by_cost in zip(found["Figure 18a"], found["Figure 18b"], strict=True):
        assert by_power.kw <= by_cost.kw * 1.001
        assert by_cost.usd_per_h <= by_power.usd_per_h * 1.001
    space = [row for row in tables["Figure 12, the space"].rows if isinstance(row, DesignSpaceRow)]
    assert [row.prompt_machines for row in space] == [27, 28]
    assert "2 s" in page.assumes
    text = page.markdown()
    assert "27P, 3T" in text
    assert "![" in text
    assert "## What agrees, what does not, and why" in text
