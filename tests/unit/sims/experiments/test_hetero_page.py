"""Xiong et al.'s experiments cut short, and what their page says of the whole ones."""

from __future__ import annotations

from collections import Counter
from math import inf
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.sims.experiments.page import read_rows
from p2pserve.sims.experiments.papers import hetero as page
from p2pserve.sims.experiments.papers.hetero import (
    AT_ONCE,
    DEGREES,
    EQUAL_FIVE,
    EQUAL_TWO,
    LONG_DEGREES,
    LONG_TWO,
    LONGER,
    POLICIES,
    REMARKS,
    SPREAD,
    TWO_INSTANCES,
    TWO_MACHINES,
    DegreeRow,
    EqualOptionsRow,
    ScheduleRow,
    degree_rows,
    latency_rows,
)
from p2pserve.sims.experiments.papers.hetero_systems import (
    EQUAL,
    LINKS,
    LONGEST,
    NVLINK,
    OUTPUT,
    PAPER,
    PCIE,
    PROMPT,
    V100,
    ServingSystem,
    draw_lengths,
    instance_model,
    last_over_first,
    link_gbps,
    make_five,
    make_pair,
    run_system,
    tokens_s,
)
from p2pserve.sims.policies import ROUND_ROBIN, SINGLE

RESULTS = Path(__file__).parents[4] / "docs" / "results"


def schedules(title: str) -> dict[tuple[str, str, str], ScheduleRow]:
    rows = read_rows(RESULTS, "hetero", title, ScheduleRow)
    return {(row.link, row.rate, row.policy): row for row in rows}


def test_lengths_are_as_said_and_the_same_each_time() -> None:
    lengths = draw_lengths(4000, 3)
    prompts, outputs = (np.array(column) for column in zip(*lengths, strict=True))
    assert prompts.mean() == pytest.approx(PROMPT, rel=0.05)
    assert outputs.mean() == pytest.approx(OUTPUT, rel=0.05)
    assert min(prompts.min(), outputs.min()) >= 1
    assert max(prompts.max(), outputs.max()) <= LONGEST
    assert draw_lengths.__wrapped__(4000, 3) == lengths
    assert draw_lengths(4000, 4) != lengths
    longer = np.array(draw_lengths(4000, 3, LONGER))
    assert longer.mean(axis=0) == pytest.approx([LONGER * PROMPT, LONGER * OUTPUT], rel=0.05)
    assert LONGEST < longer.max() <= LONGER * LONGEST


def test_engines_of_the_papers_settings_compute_prompts_alone() -> None:
    system, lengths = make_pair(NVLINK), draw_lengths(60, 1)
    papers, equal = (
        run_system(system, lengths, policy=ROUND_ROBIN, rate=20.0, options=each) for each in (PAPER, EQUAL)
    )
    assert [replica.counts.mixed_s for replica in papers.replicas] == [0.0, 0.0]
    assert all(replica.counts.mixed_s > 0.0 for replica in equal.replicas)


def test_nvlink_joins_groups_of_four() -> None:
    gpu = gpu_table().find(V100)
    assert link_gbps(gpu, 4, NVLINK) > 10 * link_gbps(gpu, 4, PCIE)
    assert link_gbps(gpu, 8, NVLINK) == link_gbps(gpu, 8, PCIE)


def test_an_instance_has_the_kv_of_equation_1() -> None:
    room = (32.0 * 0.9 - 2.0) * (1 << 30)  # on each card
    model = instance_model("llama3-8b", V100, 2, PCIE)
    assert model.kv_tokens == pytest.approx((2 * room - 16.06e9) / 131_072, rel=1e-3)


@pytest.mark.parametrize("system", [make_pair(NVLINK), make_five(PCIE)])
def test_a_system_serves_all_requests(system: ServingSystem) -> None:
    lengths = draw_lengths(60, 1)
    result = run_system(system, lengths, policy=ROUND_ROBIN, rate=50.0)
    outcome = result.services[0]
    assert (outcome.outcomes.e2e_s > 0.0).all()
    counts = Counter(outcome.decode.tolist())
    assert max(counts.values()) - min(counts.values()) <= 1
    tokens = sum(map(sum, lengths))
    assert tokens_s(result) == pytest.approx(tokens / (outcome.outcomes.trace.arrival_s + outcome.outcomes.e2e_s).max())
    assert last_over_first(result) >= 1.0


def test_one_instance_alone_gets_all() -> None:
    result = run_system(make_pair(NVLINK), draw_lengths(30, 1), policy=SINGLE, rate=inf, gateways=2)
    assert set(result.services[0].decode.tolist()) == {0}
    assert last_over_first(result) == 1.0


def test_degrees_are_in_order_of_what_is_simulated() -> None:
    rows = degree_rows(NVLINK, 10, 20)
    assert {row.t: row.instances for row in rows} == {1: 8, 2: 4, 4: 2, 8: 1}
    assert [row.simulated_1 for row in rows] == sorted((row.simulated_1 for row in rows), reverse=True)
    assert min(rows, key=lambda row: row.estimate_1).t == 8


# ---- what the page says ---------------------------------------------------------------------------------------


def test_the_pages_rows_are_whole() -> None:
    for title in (TWO_INSTANCES, TWO_MACHINES):
        found = schedules(title)
        assert len(found) == len(LINKS) * 4 * (len(POLICIES) + len(SPREAD))


def test_what_the_page_says_of_two_instances() -> None:
    found = schedules(TWO_INSTANCES)
    for policy, gain in (("predicted", 78), ("plan", 72), ("OS", 68), ("WRR", 60), ("MB", 55), ("SI", 31)):
        assert round(found[NVLINK, AT_ONCE, policy].over_rr) == gain
        assert str(gain) in REMARKS
    gains = [found[NVLINK, rate, "OS"].over_rr for rate in ("8", "16", "24")]
    assert (round(min(gains)), round(max(gains))) == (1, 17)
    assert round(found[NVLINK, AT_ONCE, "SI"].tokens_s) == 10_677
    assert round(found[NVLINK, "24", "OS"].p99_s) == 22
    assert round(found[NVLINK, "24", "RR"].p99_s) == 83
    for policy, gain in (("WRR", -35), ("OS", -31), ("predicted", -1)):
        assert round(found[PCIE, AT_ONCE, policy].over_rr) == gain
    assert found[PCIE, AT_ONCE, "OS"].to_first == pytest.approx(0.69, abs=0.005)
    assert found[PCIE, AT_ONCE, "predicted"].to_first == pytest.approx(0.40, abs=0.005)


def test_what_the_page_says_of_long_requests() -> None:
    found = schedules(LONG_TWO)
    assert len(found) == 4 * (len(POLICIES) + len(SPREAD))
    papers = ("RR", "SI", "MB", "WRR", "OS")
    gains = {
        rate: {policy: found[NVLINK, rate, policy].over_rr for policy in (*papers, "predicted")}
        for rate in ("8", "16", "24", AT_ONCE)
    }
    assert [round(gains["24"][policy]) for policy in ("OS", "MB", "WRR")] == [139, 141, 151]
    for rate, gain in gains.items():
        order = sorted(papers, key=gain.__getitem__)
        assert (order[:2], order[-1]) == (["RR", "SI"], "WRR")
        if rate != AT_ONCE:
            assert 1.005 < (100 + gain["predicted"]) / (100 + gain["WRR"]) < 1.025
    assert [round(gains[AT_ONCE][policy]) for policy in ("predicted", "WRR")] == [100, 151]

    def percent(rate: str, policy: str, other: str) -> int:
        return round(100 * (found[NVLINK, rate, policy].tokens_s / found[NVLINK, rate, other].tokens_s - 1))

    assert [percent(rate, "WRR", "OS") for rate in ("8", "16")] == [8, 14]
    assert [percent(rate, "plan", "WRR") for rate in ("24", AT_ONCE)] == [-23, -32]
    assert [percent(rate, "predicted, 4 gateways", "predicted") for rate in ("24", AT_ONCE)] == [-8, -10]
    assert percent(AT_ONCE, "OS, 4 gateways", "OS") == -19


def test_what_the_page_says_of_equal_options() -> None:
    pair, five = (
        {(row.link, row.rate, row.policy): row for row in read_rows(RESULTS, "hetero", title, EqualOptionsRow)}
        for title in (EQUAL_TWO, EQUAL_FIVE)
    )
    assert len(pair) == len(five) == len(LINKS) * 4 * (len(POLICIES) + len(SPREAD))
    waits = {
        "OS": 0.11,
        "predicted": 0.11,
        "plan": 0.14,
        "SI": 0.14,
        "WRR": 0.15,
        "MB": 0.22,
        "tokens": 0.23,
        "RR": 1.06,
    }
    for policy, ttft_s in waits.items():
        assert round(pair[NVLINK, "24", policy].ttft_p99_s, 2) == ttft_s
    assert round(pair[NVLINK, "24", "RR"].tpot_p99_ms) == 108
    steady = [pair[NVLINK, "24", policy].tpot_p99_ms for policy in ("SI", "OS", "plan", "predicted", "WRR")]
    assert (round(min(steady), 1), round(max(steady), 1)) == (25.8, 31.1)
    busy = [row for (link, rate, policy), row in five.items() if (link, rate) == (NVLINK, "24") and policy != "SI"]
    for field, least, most in (("ttft_p99_s", 0.175, 0.285), ("tpot_p99_ms", 34.0, 42.0)):
        ranked = sorted(busy, key=attrgetter(field))
        assert (ranked[0].policy, ranked[-1].policy) == ("predicted", "OS, 4 gateways")
        assert least <= getattr(ranked[0], field) <= getattr(ranked[-1], field) <= most
    assert round(pair[NVLINK, AT_ONCE, "OS"].over_rr) == 63
    assert round(pair[NVLINK, AT_ONCE, "predicted"].over_rr) == 83
    assert pair[NVLINK, AT_ONCE, "OS"].tokens_s < pair[NVLINK, AT_ONCE, "MB"].tokens_s


def test_what_all_see_is_measured_with_equal_options() -> None:
    rows = latency_rows(make_pair(NVLINK), 60)
    assert {(row.rate, row.policy) for row in rows} == {
        (rate, policy) for rate in ("8", "16", "24", AT_ONCE) for policy in (*POLICIES, *SPREAD)
    }
    for row in rows:
        assert 0.0 < row.ttft_p50_s <= row.ttft_p99_s <= row.p99_s
        assert 0.0 < row.tpot_p50_ms <= row.tpot_p99_ms
        assert row.p50_s <= row.p99_s
        assert row.policy != "RR" or row.over_rr == 0.0


def test_what_the_page_says_of_two_machines_and_of_this_networks_policies() -> None:
    pair, five = schedules(TWO_INSTANCES), schedules(TWO_MACHINES)
    for policy, over in (("OS", (4, 11)), ("plan", (5, 18)), ("predicted", (7, 21))):
        assert tuple(sorted(round(five[link, AT_ONCE, policy].over_rr) for link in LINKS)) == over
    least = {
        policy: min(
            row.tokens_s / max(each.tokens_s for key, each in found.items() if key[:2] == (link, rate))
            for found in (pair, five)
            for (link, rate, name), row in found.items()
            if name == policy
        )
        for policy in ("predicted", "plan", "OS", "RR")
    }
    for policy, behind in (("predicted", 0.05), ("plan", 0.07), ("OS", 0.32), ("RR", 0.45)):
        assert 1.0 - behind <= least[policy] < 1.0 - 0.8 * behind


def test_what_the_page_says_of_four_gateways() -> None:
    for title in (TWO_INSTANCES, TWO_MACHINES):
        found = schedules(title)
        limits = {"OS": (-1.5, 17.5), "plan": (-3.5, 0.5), "predicted": (0.0, 4.5)}
        if title == TWO_INSTANCES:
            limits["predicted"] = (-9.0, -7.0)
        for (link, rate, policy), row in found.items():
            if policy in SPREAD:
                over = 100.0 * (row.tokens_s / found[link, rate, SPREAD[policy]].tokens_s - 1.0)
                low, high = limits[SPREAD[policy]] if rate == AT_ONCE else (-2.5, 2.6)
                assert low <= over <= high


def test_lines_have_the_same_names_everywhere_and_one_of_five_instances_alone_has_none() -> None:
    """One legend is for all panels, and names have the colours of their places."""
    rows = latency_rows(make_pair(NVLINK), 60)
    picture = page._latency_picture(rows, rows)
    for first, second in picture.panels:
        assert list(first.lines) == list(second.lines) == list(POLICIES)
        assert len(first.lines["SI"][0]) == 3
        assert second.lines["SI"] == ((), ())
        assert len(second.lines["RR"][0]) == 3


def test_what_the_page_says_of_degrees() -> None:
    rows = {title: read_rows(RESULTS, "hetero", title, DegreeRow) for title in (DEGREES, LONG_DEGREES)}

    def order(title: str, link: str, field: str) -> list[int]:
        of_link = [row for row in rows[title] if row.link == link]
        return [row.t for row in sorted(of_link, key=lambda row: -getattr(row, field))]

    for run in "12":
        assert order(DEGREES, NVLINK, f"estimate_{run}") == [2, 1, 4, 8]
        assert order(DEGREES, PCIE, f"estimate_{run}") == [1, 2, 4, 8]
        assert order(DEGREES, NVLINK, f"simulated_{run}") == order(DEGREES, PCIE, f"simulated_{run}") == [1, 2, 4, 8]
        assert order(LONG_DEGREES, NVLINK, f"simulated_{run}") == [2, 4, 1, 8]
        assert order(LONG_DEGREES, PCIE, f"simulated_{run}") == [1, 2, 4, 8]
        assert order(LONG_DEGREES, PCIE, f"estimate_{run}") == [1, 2, 4, 8]
    assert order(LONG_DEGREES, NVLINK, "estimate_1") == [1, 2, 4, 8]
    assert order(LONG_DEGREES, NVLINK, "estimate_2") == [2, 1, 4, 8]
    assert all(4.5 <= row.simulated_1 / row.estimate_1 <= 7.5 for row in rows[DEGREES])
    first, second = (next(row for row in rows[DEGREES] if (row.link, row.t) == (NVLINK, t)) for t in (1, 2))
    assert 1.06 < first.simulated_1 / second.simulated_1 < 1.07
    assert {row.preempted for row in rows[LONG_DEGREES] if row.t == 1} == {2256}
