"""What the comparison of turn orders is made of: services, traffic, engines, figures added up by hand."""

from functools import partial

import numpy as np
import pytest

from p2pserve.coordinator.placement.search import search_placement
from p2pserve.sims.engine.shared_engine import SharedEngine
from p2pserve.sims.experiments.papers import placement as placement_module
from p2pserve.sims.experiments.papers import sharing as page_module
from p2pserve.sims.experiments.papers import sharing_runs, sharing_systems
from p2pserve.sims.experiments.papers.sharing import PAPER, sharing
from p2pserve.sims.experiments.papers.sharing_runs import UNPLACED, ServedServices
from p2pserve.sims.experiments.papers.sharing_systems import (
    DEGREES,
    FEW,
    GPUS_OF_A_GROUP,
    GROUPS,
    LONGBENCH,
    SERVICES,
    cluster_lengths,
    draw_bursts,
    draw_lengths,
    draw_shifts,
    draw_traces,
    execution_s,
    fewest_gpus,
    kv_bytes,
    lone_latency_s,
    serve_dedicated,
    serve_shared,
    shared_engines,
    times_at,
    traffic_shares,
)
from p2pserve.sims.experiments.setting import Scope, lengths
from p2pserve.sims.placement.fleet import period_of
from p2pserve.sims.records import Outcomes, Trace


def test_every_service_is_in_one_group_with_one_of_like_size() -> None:
    assert sorted(number for group in GROUPS for number in (group.one, group.two)) == list(range(len(SERVICES)))
    for group in GROUPS:
        models = [SERVICES[number].model for number in (group.one, group.two)]
        assert kv_bytes(models, group.fewest) > 0
        assert sum(SERVICES[number].is_popular for number in (group.one, group.two)) == 1
        assert group.fewest in DEGREES
    assert {service.model for service in SERVICES} == {"llama2-7b", "llama2-13b", "llama2-70b", "opt-6.7b"}


def test_models_have_room_on_the_fewest_gpus_and_not_on_fewer() -> None:
    assert (fewest_gpus("llama2-7b"), fewest_gpus("llama2-13b"), fewest_gpus("llama2-70b")) == (1, 1, 2)
    assert kv_bytes(["llama2-70b"], 1) < 0
    assert kv_bytes(["llama2-70b", "llama2-70b"], 2) < 0 < kv_bytes(["llama2-70b", "llama2-70b"], 4)


def test_clusters_part_a_trace_from_short_prompts_to_long_ones() -> None:
    parts = cluster_lengths("conversation", 3)
    assert sum(len(part.prompt) for part in parts) == len(lengths("conversation").prompt)
    means = [float(np.log(part.prompt).mean()) for part in parts]
    assert means == sorted(means)


def test_lengths_of_which_the_mean_is_known_have_it() -> None:
    drawn = draw_lengths(LONGBENCH, np.random.default_rng(0))
    assert drawn.prompt.mean() == pytest.approx(13186.8, rel=0.05)
    assert drawn.output.mean() == pytest.approx(21.1, rel=0.05)
    assert drawn.prompt.max() <= 4 * 13186.8


def test_traffic_of_groups_is_alike_and_the_popular_service_asks_for_more() -> None:
    shares, even = traffic_shares(9.0), traffic_shares(1.0)
    assert sum(shares) == pytest.approx(1.0)
    for group in GROUPS[: FEW // 2]:
        popular, other = sorted((group.one, group.two), key=lambda number: -SERVICES[number].is_popular)
        assert shares[popular] / shares[other] == pytest.approx(9.0 * even[popular] / even[other])


def test_traffic_turns_to_the_other_service_of_each_pair() -> None:
    shares, turned = traffic_shares(9.0), traffic_shares(9.0, turned=True)
    for group in GROUPS[: FEW // 2]:
        ratios = [turned[number] / shares[number] for number in (group.one, group.two)]
        assert max(ratios) / min(ratios) == pytest.approx(81.0)
    shifted = draw_shifts(2.0, 600.0, 0, 2)
    for group in GROUPS[2:3]:
        popular = group.one if SERVICES[group.one].is_popular else group.two
        first, second = (
            int(np.diff(np.searchsorted(shifted[popular].arrival_s, span))[0]) for span in ((0, 600), (600, 1200))
        )
        assert first > 2 * second


@pytest.mark.parametrize("run", [4, 50])
def test_requests_of_a_service_come_in_a_row(run: int) -> None:
    plain, skewed = draw_traces(20.0, 30.0, 0), draw_traces(20.0, 30.0, 0, run=run)
    changes = [np.count_nonzero(np.diff(period_of(traces).service)) for traces in (plain, skewed)]
    assert changes[1] < 4 * changes[0] / run
    assert sorted(period_of(plain).arrival_s) == sorted(period_of(skewed).arrival_s)
    for number, trace in plain.items():
        assert trace.output.tolist() == skewed[number].output.tolist()


def test_bursts_keep_the_mean_rate_and_are_burstier_than_poisson() -> None:
    trace = draw_bursts(lengths("coding"), rate=5.0, seconds=6000.0, rng=np.random.default_rng(0))
    assert len(trace) / 6000.0 == pytest.approx(5.0, rel=0.2)
    counts = np.histogram(trace.arrival_s, bins=200, range=(0.0, 6000.0))[0]
    assert counts.var() > 10.0 * counts.mean()


def test_wrong_profiles_change_answers_alone() -> None:
    plain, wrong = draw_traces(2.0, 30.0, 0), draw_traces(2.0, 30.0, 0, noise=4.0)
    for number, trace in plain.items():
        assert trace.prompt.tolist() == wrong[number].prompt.tolist()
        assert wrong[number].output.min() >= 1
    assert any(plain[number].output.tolist() != wrong[number].output.tolist() for number in plain)


@pytest.mark.parametrize("order", [system for system in UNPLACED if system != "dedicated"])
def test_every_request_of_both_services_is_answered(order: str) -> None:
    traces = draw_traces(10.0, 30.0, 1)
    served = serve_shared(GROUPS[2], order, traces)
    assert served.keys() == {GROUPS[2].one, GROUPS[2].two}
    for run in served.values():
        assert run.completed.all()
        assert (run.ttft_s <= run.e2e_s).all()


def test_engines_of_a_group_use_all_of_its_gpus() -> None:
    for tp in (1, 2, 4, 8):
        handles = shared_engines(GROUPS[3], tp, "db")
        assert len(handles) * tp == GPUS_OF_A_GROUP
        assert all(isinstance(handle.engine, SharedEngine) for handle in handles)


def test_a_lone_request_of_a_service_of_its_own_takes_what_it_takes_alone() -> None:
    trace = Trace(
        ids=np.array([0]), arrival_s=np.array([3.0]), prompt=np.array([500]), output=np.array([20]), lengths="",
        arrivals="",
    )  # fmt: skip
    served = serve_dedicated(4, trace)[4]
    alone = min(lone_latency_s(times_at("llama2-7b", tp), trace.prompt, trace.output)[0] for tp in (1, 2, 4))
    assert served.e2e_s[0] == pytest.approx(alone, rel=1e-6)


def test_figures_are_those_of_all_runs_together() -> None:
    trace = Trace(
        ids=np.arange(2), arrival_s=np.array([0.0, 1.0]), prompt=np.array([10, 10]), output=np.array([1, 5]),
        lengths="", arrivals="",
    )  # fmt: skip
    usual = execution_s(4)
    runs = [
        {4: Outcomes(trace=trace, ttft_s=np.array([0.1, 0.2]), e2e_s=np.array(e2e))}
        for e2e in ([usual, 2.0 * usual], [3.0 * usual, 6.0 * usual])
    ]
    served = ServedServices(runs)
    assert served.normalized() == served.normalized(4) == pytest.approx(3.0)
    assert served.ttft_s == pytest.approx(0.15)
    assert served.attainment(1e9) == 1.0
    assert served.attainment(1e-9) == 0.0


def test_the_page_has_a_row_of_every_system_at_every_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RATES": (1.0, 2.0), "MIDDLE": 1.0, "KNEE": 2.0}.items():
        monkeypatch.setattr(page_module, name, value)
    monkeypatch.setattr(page_module, "SKEWS", (9.0,))
    monkeypatch.setattr(page_module, "NOISES", (0.0,))
    page = sharing(Scope(seeds=(0,), seconds=5.0))
    by_title = {table.title: table.rows for table in page.tables}
    assert len(by_title["Figures 6 and 7: over the rate"]) == 2 * len(UNPLACED)
    assert len(by_title["The services"]) == FEW
    assert [row.than for row in by_title["By how much the doubling budget is better"]] == [  # type: ignore[attr-defined]
        UNPLACED[system] for system in PAPER
    ]
    assert "fixed parts of a GPU are quotas of time" in " ".join(page.markdown().split())


def test_the_page_of_placement_has_a_row_of_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        "RATES": (1.0, 2.0, 2.5, 3.0), "MIDDLE": 1.0, "KNEE": 2.0, "NOISES": (0.0,), "IN_A_ROW": (1,),
        "DENSITIES": {1.0: 32}, "SHIFT_RATE": 2.0, "MANY": 16,
    }  # fmt: skip
    for name, value in few.items():
        monkeypatch.setattr(placement_module, name, value)
    for name in ("SHIFT_S", "HISTORY_S"):
        monkeypatch.setattr(sharing_runs, name, 10.0)
    monkeypatch.setattr(sharing_systems, "search_placement", partial(search_placement, rounds=5))
    page = placement_module.placement(Scope(seeds=(0,), seconds=5.0))
    by_title = {table.title: table.rows for table in page.tables}
    systems = len(placement_module.SYSTEMS)
    assert len(by_title["Figures 6 and 7: over the rate"]) == 4 * systems
    assert len(by_title["16 services at 1 requests/s"]) == systems
    assert len(by_title["By how much placement is better"]) == 2 * len(placement_module.PAPER)
    replaced = by_title["Figure 8: replacement, at 2 requests/s"]
    assert [row.moves for row in replaced][:2] == [0.0, 0.0]  # type: ignore[attr-defined]
    assert all(0.0 < row.attainment <= 1.0 for row in replaced)  # type: ignore[attr-defined]
