"""Provisioning by hand: what machines cost, when a run is lost for certain, and which cluster is best."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest

from p2pserve.sims.records import Trace
from p2pserve.sims.splitwise import SetupError
from p2pserve.sims.splitwise.cluster import RunStopped
from p2pserve.sims.splitwise.cluster_trials import UNFINISHED, ClusterDesign, ClusterTrials, DrawnTraces
from p2pserve.sims.splitwise.machine_types import CostRatio, MachineCatalogue, MachineType
from p2pserve.sims.splitwise.metrics import SLO, LoneRequests
from p2pserve.sims.splitwise.provisioning import (
    ProvisionError,
    ProvisionGoal,
    ProvisionSearch,
    ProvisionWish,
    parse_design,
)
from p2pserve.sims.splitwise.slo_watch import SearchTimeUp, SloWatch

LENGTHS = [(1000, 100), (2000, 30), (400, 220)]


def a_trace(requests: int = 10, output: int = 11) -> Trace:
    return Trace(
        ids=np.arange(requests),
        arrival_s=np.arange(requests) / 10.0,
        prompt=np.full(requests, 100),
        output=np.full(requests, output),
        lengths="test",
        arrivals="test",
    )


def lone(requests: int = 10) -> LoneRequests:
    """A second to the first token, a tenth for each further one: 2 s in all with 11 tokens."""
    return LoneRequests(np.full(requests, 1.0), np.full(requests, 0.1))


def catalogue(**changes: object) -> MachineCatalogue:
    return MachineCatalogue("llama2-70b", a_trace(), **changes)  # type: ignore[arg-type]


class TestMachines:
    @pytest.mark.parametrize(
        ("ratio", "prompt", "token"),
        [(CostRatio.TABLE_1, 2.159, 2.159), (CostRatio.TABLE_5, 2.35, 2.5), (CostRatio.NOTEBOOK, 2.154, 2.154)],
    )
    def test_the_three_ratios_of_the_paper(self, ratio: CostRatio, prompt: float, token: float) -> None:
        found = catalogue(cost_ratio=ratio)
        a, h = found.find("A"), found.find("H")
        assert h.prompt_usd_per_h / a.prompt_usd_per_h == pytest.approx(prompt, abs=0.001)
        assert h.token_usd_per_h / a.token_usd_per_h == pytest.approx(token, abs=0.001)

    def test_the_papers_clusters_have_the_same_power(self) -> None:
        found = catalogue()
        counts = {"baseA": (70, 0), "baseH": (40, 0), "AA": (45, 25), "HH": (25, 15), "HHcap": (25, 21), "HA": (25, 26)}
        kw = {name: parse_design(name, found).kw(*machines) for name, machines in counts.items()}
        assert kw["baseA"] == kw["baseH"] == kw["AA"] == kw["HH"] == pytest.approx(224.0)
        assert 0.99 * 224.0 < kw["HHcap"] < kw["HA"] < 224.0

    def test_cards_of_the_table_have_its_rents_and_watts(self) -> None:
        found = catalogue()
        design = parse_design("8xA40/4xRTX-A6000-48GB", found)
        assert design.token is not None
        assert (design.prompt.name, design.token.name) == ("8xA40-48GB", "4xRTX-A6000-48GB")
        assert design.usd_per_h(2, 1) == pytest.approx(2 * 8 * 0.44 + 4 * 0.45)
        assert design.kw(2, 1) == pytest.approx(2 * 8 * 0.3 + 4 * 0.3)
        assert parse_design("8xA40", found).token is None

    def test_a_table_of_times_has_no_context_and_a_roofline_has(self) -> None:
        iterations = catalogue().find("8xA40").iterations
        alone, full = iterations.iteration_s(0, 1), iterations.iteration_s(0, 64)
        assert alone < full < 64 * alone
        assert iterations.iteration_s(512, 8) > iterations.iteration_s(512, 0)

    @pytest.mark.parametrize(
        ("design", "message"),
        [
            ("HX", "design: 'HX' is none of baseA, baseH, AA, HH, HHcap, HA, and not like H/8xA40"),
            ("H/B", "machine 'B' is none of A, H, Hcap, and not like 8xA40"),
            ("0xA40", "machine '0xA40' is none of"),
            ("17xA40", "1 to 16 cards"),
            ("8xA41", "machine 8xA41: GPU 'A41' is not in the table"),
            ("1xT4", "machine 1xT4: llama2-70b does not fit its memory"),
        ],
    )
    def test_designs_that_cannot_be(self, design: str, message: str) -> None:
        with pytest.raises(SetupError, match=message) as caught:
            parse_design(design, catalogue())
        assert "\n" not in str(caught.value)

    def test_models_that_nothing_is_known_of(self) -> None:
        with pytest.raises(SetupError, match="model 'llama-31b' is not known"):
            MachineCatalogue("llama-31b", a_trace())
        small = MachineCatalogue("llama-7b", a_trace())
        with pytest.raises(SetupError, match=r"perf_model.csv has no llama-7b, but llama2-70b, bloom-176b"):
            small.find("H")
        assert small.find("1xA40").kv_tokens > 10_000

    def test_lone_requests_of_a_roofline_grow_with_the_context(self) -> None:
        found = MachineCatalogue("llama-7b", a_trace())
        alone = found.lone_requests(a_trace(2))
        longer = found.lone_requests(a_trace(2, output=4000))
        assert longer.ttft_s[0] == alone.ttft_s[0] < 0.1
        assert longer.tbt_s[0] > alone.tbt_s[0] > 0.001


class TestSloWatch:
    def test_it_stops_when_the_median_is_lost_and_no_sooner(self) -> None:
        """Of ten requests the median is between the fifth and the sixth: six beyond the limit lose it for certain."""
        watch = SloWatch(a_trace(), lone(), {"ttft": (2.0, 9.0, 9.0)})
        for request in range(5):
            watch.note_first_token(request, 2.0)
        watch.note_first_token(5, 1.9)
        assert watch.missed is None
        with pytest.raises(RunStopped):
            watch.note_first_token(6, 2.5)
        assert watch.missed == "ttft_p50"

    @pytest.mark.parametrize("beyond", range(8))
    @pytest.mark.parametrize(("percentile", "place"), [(50, 0), (90, 1), (99, 2)])
    def test_it_never_stops_what_would_have_met_the_slo(self, beyond: int, percentile: int, place: int) -> None:
        limits = [99.0, 99.0, 99.0]
        limits[place] = 2.0
        slowdowns = [3.0] * beyond + [1.0] * (10 - beyond)
        watch = SloWatch(a_trace(), lone(), {"ttft": (limits[0], limits[1], limits[2])})
        stopped = False
        for request, seconds in enumerate(slowdowns):
            try:
                watch.note_first_token(request, seconds)
            except RunStopped:
                stopped = True
        if stopped:
            assert np.percentile(slowdowns, percentile) >= 2.0
            assert watch.missed == f"ttft_p{percentile}"
        else:
            # between the two requests next to it, interpolation decides, which is left to the end of the run
            assert np.percentile(slowdowns, percentile, method="lower") < 2.0

    def test_tokens_and_whole_answers_count_too(self) -> None:
        watch = SloWatch(a_trace(1), lone(1), {"tbt": (1.5, 1.5, 1.5), "e2e": (9.0, 9.0, 9.0)})
        with pytest.raises(RunStopped):
            watch.note_last_token(0, 1.0, 1.0 + 11 * 0.16)
        assert watch.missed == "tbt_p50"
        watch = SloWatch(a_trace(1), lone(1), {"tbt": (9.0, 9.0, 9.0), "e2e": (1.5, 1.5, 1.5)})
        watch.note_last_token(0, 1.0, 2.9)
        with pytest.raises(RunStopped):
            watch.note_last_token(0, 1.0, 3.0)

    def test_the_search_ends_when_its_time_is_up(self) -> None:
        watch = SloWatch(a_trace(1), lone(1), SLO, lambda: True)
        for _ in range(63):
            watch.note_first_token(0, 1.0)
        with pytest.raises(SearchTimeUp):
            watch.note_first_token(0, 1.0)


class Flat:
    """A prompt token takes a ten thousandth of a second, a decode step three hundredths and a little for each."""

    def iteration_s(self, prompt_tokens: int, decodes: int) -> float:
        return prompt_tokens * 1e-4 + (0.03 + 0.0004 * decodes if decodes else 0.0)


def a_machine(name: str, usd: float, watts: float, kv_tokens: float = 1e5) -> MachineType:
    return MachineType(name, Flat(), kv_tokens, usd, usd, watts, "test")


def trials(seconds: float = 20.0, **changes: object) -> ClusterTrials:
    traces = DrawnTraces(LENGTHS, source="test", seconds=seconds, seed=1)
    return ClusterTrials(traces, catalogue(), SLO, **changes)  # type: ignore[arg-type]


SPLIT = ClusterDesign("split", a_machine("p", 3.0, 900.0), a_machine("t", 1.0, 500.0))
BOTH = ClusterDesign("both", a_machine("m", 2.0, 700.0), None)


class TestSearch:
    @pytest.mark.parametrize("goal", [ProvisionGoal.COST, ProvisionGoal.POWER])
    def test_the_cheapest_of_all_clusters_is_found(self, goal: ProvisionGoal) -> None:
        rate = 40.0
        found = ProvisionSearch(trials(), ProvisionWish(goal=goal, rate=rate, max_machines=20)).run(SPLIT).found
        assert found is not None
        assert found.trial.missed == ()
        everything = trials()
        fits = [
            (SPLIT.usd_per_h(*machines) if goal is ProvisionGoal.COST else SPLIT.kw(*machines))
            for machines in product(range(1, 13), range(1, 9))
            if not everything.try_cluster(SPLIT, *machines, rate).missed
        ]
        assert (found.usd_per_h if goal is ProvisionGoal.COST else found.kw) == pytest.approx(min(fits))

    def test_one_machine_fewer_misses_the_slo(self) -> None:
        answer = ProvisionSearch(trials(), ProvisionWish(goal=ProvisionGoal.COST, rate=30.0)).run(BOTH)
        assert answer.found is not None
        assert answer.found.token == 0
        assert trials().try_cluster(BOTH, answer.found.prompt - 1, 0, 30.0).missed
        assert not trials().try_cluster(BOTH, answer.found.prompt, 0, 30.0).missed

    @pytest.mark.parametrize("design", [SPLIT, BOTH])
    def test_the_highest_rate_within_a_budget(self, design: ClusterDesign) -> None:
        wish = ProvisionWish(goal=ProvisionGoal.THROUGHPUT, max_usd_per_h=16.0, rate_step=4.0)
        answer = ProvisionSearch(trials(), wish).run(design)
        assert answer.found is not None
        assert answer.found.usd_per_h <= 16.0
        tried = trials()
        columns = [(8, 0)] if design is BOTH else [(prompt, 16 - 3 * prompt) for prompt in range(1, 6)]
        assert any(not tried.try_cluster(design, *column, answer.found.rate).missed for column in columns)
        assert all(tried.try_cluster(design, *column, answer.found.rate + 4.0).missed for column in columns)

    def test_limits_hold_for_every_goal(self) -> None:
        wish = ProvisionWish(goal=ProvisionGoal.COST, rate=40.0, max_kw=1.0)
        answer = ProvisionSearch(trials(), wish).run(SPLIT)
        assert (answer.found, answer.simulated) == (None, 0)
        wish = ProvisionWish(goal=ProvisionGoal.COST, rate=40.0, max_kw=2.0)
        answer = ProvisionSearch(trials(), wish).run(SPLIT)
        assert answer.found is None
        assert "meets every SLO at 40 requests/s; the largest misses t" in answer.why_none

    def test_what_is_certain_is_not_simulated_again(self) -> None:
        tried = trials()
        assert not tried.meets(SPLIT, 1, 1, 40.0)
        assert tried.meets(SPLIT, 12, 8, 40.0)
        assert tried.simulated == 2
        assert tried.meets(SPLIT, 13, 9, 40.0)
        assert not tried.meets(SPLIT, 1, 1, 40.0)
        assert tried.simulated == 2

    def test_a_search_that_is_out_of_time_has_the_best_so_far(self) -> None:
        asked = iter([False] * 30)
        answer = ProvisionSearch(
            trials(is_time_up=lambda: next(asked, True)), ProvisionWish(goal=ProvisionGoal.COST, rate=40.0)
        ).run(SPLIT)
        assert not answer.is_complete
        answer = ProvisionSearch(
            trials(is_time_up=lambda: True), ProvisionWish(goal=ProvisionGoal.COST, rate=40.0)
        ).run(SPLIT)
        assert answer.found is None
        assert answer.why_none.startswith("the time was up")

    def test_requests_without_room_never_end(self) -> None:
        tiny = ClusterDesign(
            "tiny", a_machine("p", 1.0, 1.0, kv_tokens=2500.0), a_machine("t", 1.0, 1.0, kv_tokens=500.0)
        )
        slack = dict.fromkeys(SLO, (1e9, 1e9, 1e9))
        traces = DrawnTraces(LENGTHS, source="test", seconds=2.0, seed=1)
        assert ClusterTrials(traces, catalogue(), slack).try_cluster(tiny, 1, 1, 5.0).missed == (UNFINISHED,)

    def test_a_trace_is_bounded(self) -> None:
        traces = DrawnTraces(LENGTHS, source="test", seconds=100.0, seed=1)
        with pytest.raises(SetupError, match=r"rate: 1e\+06 requests/s for 100 s are more than 200,000 requests"):
            traces.at(1e6)
        with pytest.raises(SetupError, match="rate: 1e-09 requests/s for 100 s: a trace without requests"):
            traces.at(1e-9)
        assert traces.at(3.0) is traces.at(3.0)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"goal": ProvisionGoal.COST}, "rate: the goal cost needs --rate"),
            ({"goal": ProvisionGoal.THROUGHPUT}, "goal: throughput needs --max-kw or --max-usd-per-h"),
            (
                {"goal": ProvisionGoal.THROUGHPUT, "max_kw": 1.0, "rate": 1.0},
                "rate: the goal throughput searches for it",
            ),
            ({"goal": ProvisionGoal.COST, "rate": 1.0, "max_machines": 0}, "max-machines: 0 is not from 1 to 2000"),
        ],
    )
    def test_wishes_that_cannot_be(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ProvisionError, match=message):
            ProvisionWish(**changes)  # type: ignore[arg-type]

    def test_without_limits_there_are_none(self) -> None:
        wish = ProvisionWish(goal=ProvisionGoal.COST, rate=1.0)
        assert (wish.max_kw, wish.max_usd_per_h) == (inf, inf)
