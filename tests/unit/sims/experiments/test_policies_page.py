"""Who is called the best in a setting, short runs of each paper's settings, and what the page says of whole ones."""

from pathlib import Path

import pytest

from p2pserve.coordinator.routing.interface import RoutingSettings
from p2pserve.sims.experiments.page import read_rows
from p2pserve.sims.experiments.papers import policies as page
from p2pserve.sims.experiments.papers.policies import (
    BY_POLICY,
    BY_SETTING,
    CRONUS,
    DEFAULT,
    SPLITWISE,
    PolicyFigures,
    PolicyRow,
    PolicySetting,
    SettingRow,
    policy_rows,
    put_together,
    run_cards,
    run_pools,
    run_unequal,
    setting_row,
)
from p2pserve.sims.policies import HETERO, PLAN, ROUND_ROBIN

RESULTS = Path(__file__).parents[4] / "docs" / "results"


def figures(ttft_s: float, rate: float) -> PolicyFigures:
    return PolicyFigures(ttft_p99_s=ttft_s, ttft_mean_s=ttft_s / 2, tbt_p99_s=0.1, throughput=rate)


ONE = PolicySetting(
    "P", "two", "8/s", ({ROUND_ROBIN: figures(4.0, 10.0), PLAN: figures(2.0, 8.0), DEFAULT: figures(1.0, 9.9)},)
)
TWO = PolicySetting("P", "two", "at once", ({PLAN: figures(1.0, 10.0), DEFAULT: figures(1.01, 9.0)},))


def test_the_best_of_a_setting_is_named_and_others_are_over_it() -> None:
    row = setting_row(ONE)
    assert (row.TTFT_by, row.TTFT_P99_s, row.default_over_it, row.plan_over_it) == (DEFAULT, 1.0, 1.0, 2.0)
    assert (row.rate_by, row.most_per_s) == (ROUND_ROBIN, 10.0)
    assert (row.default_of_it, row.plan_of_it) == pytest.approx((0.99, 0.8))
    assert dict(zip(row.policies, row.ttft_p99_s, strict=True)) == {ROUND_ROBIN: 4.0, PLAN: 2.0, DEFAULT: 1.0}


def test_each_draw_is_compared_with_its_own_best_and_the_median_counts() -> None:
    draws = [(1.0, 3.0), (20.0, 10.0), (4.0, 5.0)]  # seconds of two policies, which hang on the draw more than on them
    settings = [
        PolicySetting("P", "two", "8/s", ({PLAN: figures(plan_s, 5.0), DEFAULT: figures(default_s, 5.0)},))
        for plan_s, default_s in draws
    ]
    row = setting_row(put_together(settings))
    assert (row.default_over_it, row.plan_over_it) == (1.25, 1.0)
    assert (row.TTFT_by, row.TTFT_P99_s) == (PLAN, 4.0)
    assert row.ttft_p99_s == [4.0, 5.0]


def test_near_the_best_is_within_two_per_cent() -> None:
    rows = {row.policy: row for row in policy_rows([ONE, TWO])}
    default, plan = rows[DEFAULT], rows[PLAN]
    assert (default.settings, default.TTFT_P99_near_best, default.throughput_near_best) == (2, 2, 1)
    assert (default.TTFT_P99_worst, default.throughput_worst) == pytest.approx((1.01, 0.9))
    assert (plan.TTFT_P99_near_best, plan.throughput_near_best) == (1, 1)
    assert rows[ROUND_ROBIN].settings == 1


def test_each_papers_own_policy_runs_in_its_settings() -> None:
    unequal, cards = run_unequal(20), run_cards(4)
    assert len(unequal) == 16
    assert len(cards) == 2 * 4 * 2 * 3
    assert all({HETERO, PLAN, DEFAULT} <= setting.figures.keys() for setting in unequal)
    assert sum(CRONUS in setting.figures for setting in cards) == 2 * len(cards) // 3
    assert all(each.throughput > 0.0 for setting in [*unequal, *cards] for each in setting.figures.values())


def test_pools_are_run_by_one_gateway_and_by_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "POOL_RATES", (20.0,))
    settings = run_pools(1.0)
    assert [setting.deployment for setting in settings] == ["15P, 25T", "15P, 25T, 4 gateways"]
    others = run_pools(1.0, 1)
    assert others[0].figures[DEFAULT] != settings[0].figures[DEFAULT]
    assert all({SPLITWISE, PLAN, DEFAULT} <= setting.figures.keys() for setting in settings)


def test_the_default_is_the_networks() -> None:
    assert RoutingSettings().policy == DEFAULT


def test_the_page_counts_where_the_default_is_best_and_where_it_is_not() -> None:
    rows = [row for row in read_rows(RESULTS, "policies", BY_POLICY, PolicyRow) if row.policy == DEFAULT]
    settings = read_rows(RESULTS, "policies", BY_SETTING, SettingRow)
    near = sum(row.TTFT_P99_near_best for row in rows), sum(row.throughput_near_best for row in rows)
    assert f"in {near[0]} of {len(settings)} settings" in " ".join(page.REMARKS.split())
    assert f"highest in {near[1]};" in " ".join(page.REMARKS.split())
    assert sum(row.default_over_it <= page.NEAR for row in settings) == near[0]
    assert max(row.TTFT_P99_worst for row in rows) < 1.2
    assert min(row.throughput_worst for row in rows) > 0.9
