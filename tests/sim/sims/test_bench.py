"""The benchmark of simulating: what it prints, for programs and for people."""

from __future__ import annotations

import json

import pytest

from p2pserve.sims import bench


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    bench.main()
    return capsys.readouterr().out


def test_rows_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    split, colocated = json.loads(
        run(monkeypatch, capsys, "split", "colocated", "--requests", "200", "--format", "json")
    )
    assert list(split) == [
        "name", "gpus", "requests", "completed", "tokens", "events", "simulated_s", "cpu_s", "tokens_per_cpu_s",
        "requests_per_cpu_s", "peak_rss_mib",
    ]  # fmt: skip
    for row, name in ((split, "split"), (colocated, "colocated")):
        assert (row["name"], row["gpus"], row["requests"], row["completed"]) == (name, 64, 200, 200)
        assert row["tokens_per_cpu_s"] == pytest.approx(row["tokens"] / row["cpu_s"])
        assert row["requests_per_cpu_s"] == pytest.approx(200 / row["cpu_s"])
    assert split["tokens"] == colocated["tokens"]  # the same requests
    assert split["events"] > colocated["events"]  # KV transfers are events too


def test_a_table_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    head, row = run(monkeypatch, capsys, "colocated", "--requests", "50").splitlines()
    assert head.split()[:3] == ["row", "GPUs", "requests"]
    assert row.split()[:3] == ["colocated", "64", "50"]


def test_a_row_that_there_is_none_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "colocate"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert "no row colocate; there are colocated, split" in capsys.readouterr().err


@pytest.mark.parametrize("name", bench.SETUPS)
def test_every_setup_is_loaded_alike_on_both_sides(name: str) -> None:
    """The shares of each side's replicas add up to one, and are equal."""
    setup = bench.SETUPS[name]
    plan = bench.plan_by_hand(setup, layers=80)
    for side, count in (("prefill", setup.prefill or setup.boxes), ("decode", setup.boxes - setup.prefill)):
        shares = dict.fromkeys((getattr(pair, side) for pair in plan.pairings), 0.0)
        for pair in plan.pairings:
            shares[getattr(pair, side)] += pair.weight
        assert len(shares) == count
        assert list(shares.values()) == pytest.approx([1 / count] * count)
