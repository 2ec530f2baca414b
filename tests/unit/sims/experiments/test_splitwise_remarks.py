"""What Splitwise's pages say of figures 12 and 16 follows from their rows."""

from pathlib import Path

import pytest

from p2pserve.sims.experiments.page import read_rows
from p2pserve.sims.experiments.splitwise.pools import BatchedRow
from p2pserve.sims.experiments.splitwise.provision import PAPER_STAR, DesignSpaceRow

RESULTS = Path(__file__).parents[4] / "docs" / "results"
BLOOM, LLAMA = "bloom-176b", "llama2-70b"
SPLIT = ("AA", "HH", "HHcap", "HA")


@pytest.fixture(scope="module")
def pools() -> dict[tuple[str, str, float, str], BatchedRow]:
    rows = read_rows(RESULTS, "pools", "Figure 16", BatchedRow)
    return {(row.model, row.times, row.requests_s, row.pool): row for row in rows}


def percent(share: str) -> int:
    return int(share.removesuffix("%"))


@pytest.mark.parametrize(
    ("times", "least", "splits"), [("released", 29, {28}), ("measured", sum(PAPER_STAR), set(range(23, 30)))]
)
def test_figure_12_as_many_machines_as_in_the_paper_meet_all_slos_as_measured_and_one_less_as_released(
    times: str, least: int, splits: set[int]
) -> None:
    rows = [
        row for row in read_rows(RESULTS, "provision", "Figure 12, the space", DesignSpaceRow) if row.times == times
    ]
    machines = {row.prompt_machines: row.prompt_machines + (row.all_nine or 99) for row in rows}
    assert min(machines.values()) == least
    assert {prompt for prompt, count in machines.items() if count == least} == splits
    assert machines[PAPER_STAR[0]] == sum(PAPER_STAR), "the paper's star meets them, with no machine less"
    for row in rows:
        assert (row.TBT or 0) >= max(row.TTFT or 0, row.E2E or 0) or row.all_nine == 1
        assert row.all_nine == max(row.TTFT or 99, row.TBT or 99, row.E2E or 99)


def test_figure_16_at_low_load(pools: dict[tuple[str, str, float, str], BatchedRow]) -> None:
    prompt = [pools[BLOOM, times, 70.0, f"{name} prompt"] for times in ("released", "measured") for name in SPLIT]
    assert (min(percent(row.busy) for row in prompt), max(percent(row.busy) for row in prompt)) == (28, 35)
    assert min(row.half_up_to for row in prompt) > 1200
    for times, token, both in (("released", 32, 18), ("measured", 45, 20)):
        assert pools[BLOOM, times, 70.0, "HH token"].half_up_to == token
        assert pools[BLOOM, times, 70.0, "baseH"].half_up_to == both
    baseline = pools[BLOOM, "released", 70.0, "baseH"]
    assert (baseline.up_to_15, baseline.idle_or_up_to_15) == ("35%", "43%")
    assert baseline.shares[baseline.tokens.index(21)] == pytest.approx(0.75, abs=0.005)
    llama = [pools[LLAMA, times, 70.0, "baseH"].up_to_15 for times in ("released", "measured")]
    assert llama == ["83%", "72%"]


def test_figure_16_at_high_load(pools: dict[tuple[str, str, float, str], BatchedRow]) -> None:
    assert [pools[BLOOM, "measured", 130.0, f"HH {phase}"].half_up_to for phase in ("prompt", "token")] == [66, 65]
    decoding = [percent(pools[BLOOM, "released", 130.0, f"{name} prompt"].up_to_64) for name in SPLIT]
    assert decoding == [8, 21, 0, 0]
    mixed = [pools[LLAMA, times, 130.0, "HH prompt"] for times in ("released", "measured")]
    assert [(row.busy, row.up_to_15, row.up_to_64) for row in mixed] == [("39%", "0%", "1%"), ("35%", "0%", "1%")]
