"""The page of Splitwise's pools under load, cut short: its tables, curves and pictures."""

from __future__ import annotations

import pytest

from p2pserve.sims.experiments.setting import Scope
from p2pserve.sims.experiments.splitwise import equal_options
from p2pserve.sims.experiments.splitwise import pools as experiment
from p2pserve.sims.experiments.splitwise.equal_options import SystemLatencyRow, name_missed
from p2pserve.sims.experiments.splitwise.pools import BatchedRow, LoadedClusterRow, MovedRow, batched_row
from p2pserve.sims.splitwise.cluster_trials import MachineUsage

DESIGNS = ["baseA", "baseH", "AA", "HH", "HHcap", "HA"]


def test_missed_slos_are_named_by_metric() -> None:
    assert name_missed(["ttft_p90", "ttft_p99", "e2e_p50"]) == "TTFT 90/99, E2E 50"
    assert name_missed([]) == "none"


def test_time_counts_by_the_tokens_of_its_batches() -> None:
    """Two machines over ten seconds, by hand: 12 s computed, of which 3 s with one token and 6 s with up to 15."""
    usage = MachineUsage(0.6, 1.0, {1: 3.0, 15: 3.0, 16: 1.5, 100: 2.5, 2000: 2.0})
    row = batched_row("m", "released", 70.0, "pool", 2, usage)
    assert (row.busy, row.up_to_15, row.up_to_64, row.up_to_512) == ("60%", "50%", "62%", "83%")
    assert row.idle_or_up_to_15 == "70%", "8 s of 20 idle, and 6 s with up to 15"
    assert row.half_up_to == 15
    assert batched_row("m", "released", 70.0, "pool", 2, usage._replace(tokens_s={1: 1.0, 9: 3.0})).half_up_to == 9
    assert (row.tokens[0], row.shares[0]) == (1, 0.25)
    assert (row.tokens[-1], row.shares[-1]) == (2000, 1.0)


def test_the_page_has_every_design_at_every_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "RATES", (70.0, 130.0))
    monkeypatch.setattr(experiment, "LLAMA_RATES", (70.0,))
    monkeypatch.setattr(experiment, "BATCH_RATE", 150.0)
    monkeypatch.setattr(equal_options, "RATES", (70.0,))
    page = experiment.pools(Scope(seconds=2.0))
    tables = {table.title: table for table in page.tables}
    assert list(tables) == ["Figure 15", "Figure 16", "Figure 19", "Batch jobs (V-F)", "Equal options"]

    loads = [row for row in tables["Figure 15"].rows if isinstance(row, LoadedClusterRow)]
    assert [row.design for row in loads] == 4 * DESIGNS
    assert all(len(row.slowdowns) == 2 and len(row.slowdowns[0]) == 9 for row in loads)

    batched = [row for row in tables["Figure 16"].rows if isinstance(row, BatchedRow)]
    split = [f"{design} {phase}" for design in DESIGNS[2:] for phase in ("prompt", "token")]
    paper = ["baseH", "HH prompt", "HH token"]
    assert [row.pool for row in batched] == 2 * (2 * [*DESIGNS[:2], *split] + 2 * paper)
    assert {row.pool for row in batched if row.model == "llama2-70b"} == set(paper)
    for row in batched:
        assert row.tokens == sorted(row.tokens)
        assert row.shares == sorted(row.shares)
        assert row.shares[-1] == pytest.approx(1.0)

    moved = [row for row in tables["Figure 19"].rows if isinstance(row, MovedRow)]
    assert [row.design for row in moved if row.made_for == "coding"] == 2 * DESIGNS
    assert {row.of_the_cluster_made_for_it for row in moved if row.made_for == "conversation"} <= {"+0%", ""}

    equal = [row for row in tables["Equal options"].rows if isinstance(row, SystemLatencyRow)]
    assert len(equal) == len(equal_options.SYSTEMS)
    assert {row.alone for row in equal if "T" not in row.machines} == {"100%"}

    files = [picture.file for picture in page.pictures]
    assert len(files) == len(set(files)) == 9
    for picture in page.pictures:
        names = [set(curves.lines) for panels in picture.panels for curves in panels]
        assert all(each == names[0] for each in names), "one legend is for all"
    assert len(page.markdown().splitlines()) > 80
