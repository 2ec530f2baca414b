"""The page of Splitwise's clusters, cut short: its tables, and what moving KV does to the second token."""

from __future__ import annotations

import pytest

from p2pserve.sims.experiments.setting import Scope
from p2pserve.sims.experiments.splitwise import provision as experiment
from p2pserve.sims.experiments.splitwise.kv_second_token import second_token_rows


def test_layer_by_layer_hides_what_serialised_kv_costs_the_second_token() -> None:
    alone, layers, serial = second_token_rows(6)
    assert alone.TTFT_ms == pytest.approx(layers.TTFT_ms) == pytest.approx(serial.TTFT_ms)
    assert alone.visible_kv_ms == 0.0
    assert layers.second_token_ms - alone.second_token_ms == pytest.approx(layers.visible_kv_ms, abs=0.1)
    assert serial.second_token_ms - alone.second_token_ms == pytest.approx(serial.visible_kv_ms, abs=0.1)
    assert 0.0 < 20 * layers.visible_kv_ms < serial.visible_kv_ms


def test_the_page_has_each_design_beside_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "KV_PROMPTS", 3)
    page = experiment.provision(Scope(seconds=2.0))
    tables = {table.title: table for table in page.tables}
    assert list(tables) == ["Figure 12", "Figures 15 and 17a", "Figure 18b", "Figures 13 and 14"]
    rows = [row for row in tables["Figures 15 and 17a"].rows if isinstance(row, experiment.ProvisionRow)]
    assert [row.design for row in rows] == 2 * ["baseA", "baseH", "AA", "HH", "HHcap", "HA"]
    assert all(row.kw <= 224.001 for row in rows), "none has more power than 40 DGX-H100"
    assert "2 s" in page.assumes
    text = page.markdown()
    assert "27P, 3T" in text
    assert "## What agrees, what does not, and why" in text
