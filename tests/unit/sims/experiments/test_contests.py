"""Which system, ratio and dispatcher the pages name as the best, and by how much, from made-up runs."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.problem import Solution
from p2pserve.coordinator.planning.model.workload import Slo
from p2pserve.sims.experiments import ablation, baselines, ratios, setting, systems
from p2pserve.sims.experiments.setting import PlannedCase, Scope, spread
from p2pserve.sims.experiments.systems import SYSTEMS, WHOLE
from p2pserve.sims.policies import PLAN, RANDOM, SHARES
from p2pserve.sims.records import Outcomes, Trace

SLO = Slo(ttft_s=1.0, tpot_s=1.0, target=0.9)
TIGHT = Slo(ttft_s=0.3, tpot_s=9.0, target=0.9)


def outcomes_of(e2e_s: Sequence[float]) -> Outcomes:
    """Requests of 11 tokens that take so long, a tenth of it until the first token; NaN: never."""
    count, e2e = len(e2e_s), np.array(e2e_s, np.float64)
    trace = Trace(
        ids=np.arange(count), arrival_s=np.arange(count, dtype=np.float64), prompt=np.full(count, 10),
        output=np.full(count, 11), lengths="made up", arrivals="made up",
    )  # fmt: skip
    return Outcomes(trace=trace, ttft_s=e2e / 10, e2e_s=e2e)


def run_of(e2e_s: Sequence[float], slo: Slo = SLO, **more: Any) -> Any:
    return SimpleNamespace(outcomes=outcomes_of(e2e_s), service=SimpleNamespace(slo=slo), **more)


@pytest.mark.parametrize(
    ("values", "text"), [([2.0], "2"), ([1.0, 2.0, 3.0], "2 (1-3)"), ([0.12345, 0.12355], "0.123 (0.123-0.124)")]
)
def test_a_spread_is_the_mean_with_the_least_and_the_most(values: list[float], text: str) -> None:
    assert spread(values) == text


class OneDeployed:
    """Replicas that are expected to carry 10 requests/s; `rates`: those that plans were made for."""

    def __init__(self) -> None:
        self.problem = SimpleNamespace(services=[SimpleNamespace(slo=SLO)])
        self.rates: list[float | None] = []

    def at(self, rate: float | None = None) -> Any:
        self.rates.append(rate)
        return SimpleNamespace(plan=f"for {rate}", max_rate=10.0)


@pytest.mark.parametrize(
    ("carries", "halvings", "brackets", "expected"),
    [(9.0, 1, 2, 9.0), (8.9, 1, 1, 2.0), (5.6, 3, 1, 5.5), (0.0, 6, 1, 2.0), (8.0, 12, 1, 8.0), (30.0, 12, 3, 30.0),
     (1000.0, 2, 4, 58.23)],
)  # fmt: skip
def test_the_highest_rate_is_found_by_halving_around_what_is_expected_or_beyond(
    carries: float, halvings: int, brackets: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def run(
        problem: Any,
        plan: Any,
        scope: Scope,
        seed: int,
        *,
        rate: float,
        dispatch: str,
        engine: Any,
        prefix_caches: bool,
    ) -> Any:
        asked.append((plan, seed, dispatch, engine, prefix_caches))
        # Nine of ten in time is just enough.
        return run_of([1.0] * 9 + [np.nan] if rate <= carries else [1.0] * 8 + [np.nan] * 2)

    monkeypatch.setattr(setting, "outcome", run)
    deployed: Any = OneDeployed()
    found = setting.highest_rate(deployed, Scope(halvings=halvings), 7, PLAN)
    assert found == pytest.approx(expected, abs=0.01)
    assert found <= max(carries, 2.0)
    assert len(asked) == brackets * halvings
    assert asked[0] == ("for 9.0", 7, PLAN, None, False), "the shares are made anew for the rate"


# ---- ratios --------------------------------------------------------------------------------------------------------


class RatioRuns:
    """Eight replicas, of which the ratio `best` carries most and is in time most often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, best: int) -> None:
        self.best = best
        self.solutions: list[Solution] = []
        self.rates: set[float] = set()
        monkeypatch.setattr(ratios, "Deployed", self.deploy)
        monkeypatch.setattr(ratios, "highest_rate", lambda deployed, scope, seed: self.carried(deployed))
        monkeypatch.setattr(ratios, "outcome", self.outcome)

    def deploy(self, problem: Any, solution: Solution) -> Any:
        self.solutions.append(solution)
        prefill = sum(part.phase is Phase.PREFILL for part in solution)
        proposal = SimpleNamespace(max_rate=float(prefill), plan=prefill)
        return SimpleNamespace(problem=problem, prefill=prefill, at=lambda rate=None: proposal)

    def carried(self, deployed: Any) -> float:
        return 10.0 - abs(float(deployed.prefill) - self.best)

    def outcome(self, problem: Any, plan: int, scope: Scope, seed: int, *, rate: float) -> Any:
        self.rates.add(rate)
        # The second seed prefers another ratio, and the mean decides.
        share = 10 - abs(plan - self.best) - (plan == self.best) * (seed == 1)
        return run_of([0.1] * share + [np.nan] * (10 - share))


def test_the_best_ratio_is_the_one_with_most_in_time_at_the_highest_rate_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = RatioRuns(monkeypatch, best=3)
    rows = ratios.ratio_rows(Scope(seeds=(0, 1), seconds=3.25))
    assert len(rows) == 2 * 2 * (3 + 5 + 7), "columns, workloads, ratios of 4, 6 and 8 replicas"
    assert [(row.gpus, row.prefill_decode) for row in rows[:8]] == [
        (8, "1:3"), (8, "2:2"), (8, "3:1"), (12, "1:5"), (12, "2:4"), (12, "3:3"), (12, "4:2"), (12, "5:1"),
    ]  # fmt: skip
    whole = rows[8:15]
    assert [row.prefill_decode for row in whole] == ["1:7", "2:6", "3:5", "4:4", "5:3", "6:2", "7:1"]
    assert [row.highest_rate for row in whole] == [8, 9, 10, 9, 8, 7, 6]
    assert [row.expected_rate for row in whole] == [1, 2, 3, 4, 5, 6, 7]
    assert whole[2].attainment == "0.95 (0.9-1)"
    mean_output = setting.lengths("coding").output.mean()
    assert [row.tokens_per_s for row in whole] == pytest.approx([row.highest_rate * mean_output for row in whole])
    assert {(row.gpus, row.prefill_decode) for row in rows if row.best_here} == {(8, "3:1"), (12, "3:3"), (16, "3:5")}
    assert runs.rates == {10.0}, "all ratios meet the rate that the best of them carries"
    papers = {(row.workload, row.gpus, row.prefill_decode) for row in rows if row.best_in_paper}
    assert papers == {("coding", 16, "5:3"), ("conversation", 16, "3:5")}


def test_every_box_has_both_phases_as_soon_as_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = RatioRuns(monkeypatch, best=3)
    ratios.ratio_rows(Scope(seeds=(0,), seconds=3.5))
    for boxes, half in ((2, runs.solutions[1]), (3, runs.solutions[5]), (4, runs.solutions[11])):
        for box in range(boxes):
            phases = [part.phase for part in half if part.slices[0].box == box]
            assert sorted(phases) == sorted([Phase.PREFILL, Phase.DECODE])
    sizes = [sum(part.slices[0].gpus for part in solution) for solution in runs.solutions[:15]]
    assert sizes == [8] * 3 + [12] * 5 + [16] * 7


def test_the_picture_has_a_line_for_each_workload_and_column(monkeypatch: pytest.MonkeyPatch) -> None:
    RatioRuns(monkeypatch, best=5)
    page = ratios.ratios(Scope(seeds=(0,), seconds=3.75))
    (panels,) = page.pictures[0].panels
    assert [len(curves.lines) for curves in panels] == [4, 4, 4]
    for curves, most in zip(panels, (3, 5, 7), strict=True):
        for name, (places, tokens) in curves.lines.items():
            assert list(places) == list(range(1, most + 1))
            mean_output = setting.lengths(name.partition(",")[0]).output.mean()
            assert list(tokens) == pytest.approx([mean_output * rate for rate in (6, 7, 8, 9, 10, 9, 8)[:most]])


# ---- systems and baselines -----------------------------------------------------------------------------------------

RATES = {
    "ours": (6.0, 12.0), "HexGen-like": (4.0, 6.0), WHOLE: (2.0, 2.0), "DistServe-like": (3.0, 3.0),
    "vLLM-like": (1.0, 2.0),
}  # fmt: skip
SECONDS = {"ours": 2.0, "HexGen-like": 4.0, WHOLE: 8.0, "DistServe-like": 1.0, "vLLM-like": 2.0}


@pytest.fixture
def contest(monkeypatch: pytest.MonkeyPatch) -> baselines.SystemContest:
    """Coding by Table 1, of two seeds: each system's requests take its seconds, the last of ten twice as long."""

    def system(name: str) -> Any:
        workload = SimpleNamespace(mean_output=20.0)
        problem = SimpleNamespace(
            cluster=SimpleNamespace(usd_per_hour=13.5), services=[SimpleNamespace(slo=TIGHT, workload=workload)]
        )
        proposal = SimpleNamespace(plan=name, max_rate=5.0)
        deployed = SimpleNamespace(problem=problem, name=name, at=lambda rate=None: proposal)
        return systems.System(name, deployed, SHARES)  # type: ignore[arg-type]

    def outcome(problem: Any, plan: str, scope: Scope, seed: int, *, rate: float, dispatch: str, engine: Any) -> Any:
        slow = SECONDS[plan]
        return run_of([slow] * 9 + [2 * slow], TIGHT)

    monkeypatch.setattr(baselines, "systems", lambda case, scope: iter([system(name) for name in SYSTEMS]))
    monkeypatch.setattr(baselines, "outcome", outcome)
    monkeypatch.setattr(baselines, "describe_phases", lambda plan: f"as {plan}")
    monkeypatch.setattr(
        baselines, "highest_rate", lambda deployed, scope, seed, dispatch, engine: RATES[deployed.name][seed]
    )
    found = baselines.contests(Scope(seeds=(0, 1), seconds=4.25))
    assert [(one.case.workload, one.case.specs) for one in found] == [
        (workload, specs) for specs in (Specs.TABLE1, Specs.MEASURED) for workload in ("coding", "conversation")
    ]
    return found[0]


def test_throughput_is_compared_seed_by_seed(contest: baselines.SystemContest) -> None:
    over = {row.baseline: row for row in contest.ratios}
    assert list(over) == list(SYSTEMS[1:])
    assert over["HexGen-like"].throughput == "1.75 (1.5-2)"
    assert over["DistServe-like"].throughput == "3 (2-4)"
    assert over["HexGen-like"].paper_throughput == "1.5"


def test_deadlines_are_compared_where_ninety_and_ninety_nine_percent_are_in_time(
    contest: baselines.SystemContest,
) -> None:
    over = {row.baseline: row for row in contest.ratios}
    hexgen = over["HexGen-like"]
    assert (hexgen.deadline_mean, hexgen.deadline_best, hexgen.deadline_worst) == (2.0, 2.0, 2.0)
    assert over["DistServe-like"].deadline_mean == 0.5, "a baseline that is faster is told as well"


def test_all_systems_are_shown_at_one_rate(contest: baselines.SystemContest) -> None:
    assert {row.rate for row in contest.rows} == {0.8 * 5.0}, "0.8 of what HexGen-like carries, over both seeds"
    ours = contest.rows[0]
    assert (ours.system, ours.replicas, ours.usd_per_h, ours.dispatch) == ("ours", "as ours", 13.5, SHARES)
    assert ours.highest_rate == "9 (6-12)"
    assert ours.tokens_per_s == 9.0 * 20.0
    assert ours.ttft_p90_s == pytest.approx(0.22)
    assert ours.e2e_p90_s == pytest.approx(2.2)
    assert ours.e2e_p99_s == pytest.approx(2 + 0.91 * 2)
    assert ours.tpot_p90_ms == pytest.approx(1e3 * 2.2 * 0.9 / 10)
    by_name = {row.system: row.attainment for row in contest.rows}
    assert by_name["ours"] == "0.9 (0.9-0.9)", "the slowest request's first token comes too late"
    assert by_name["HexGen-like"] == "0 (0-0)"


KINDS = ("TTFT", "TPOT", "end to end", "all three")


def test_curves_rise_with_the_deadline_at_every_rate(contest: baselines.SystemContest) -> None:
    assert list(contest.curves) == [(load, deadline) for load in baselines.LOADS for deadline in KINDS]
    for lines in contest.curves.values():
        assert list(lines) == list(SYSTEMS)
        for line in lines.values():
            assert len(line) == len(baselines.SCALES)
            assert line == sorted(line)


def test_each_deadline_is_met_by_itself() -> None:
    """Lone requests take 0.2 s, of which 0.02 until the first token; these take 2 s, one of ten twice as long."""
    slo = Slo(ttft_s=0.2, tpot_s=0.18, e2e_s=2.0, target=0.9)
    runs = [run_of([2.0] * 9 + [4.0], slo), run_of([2.0] * 9 + [np.nan], slo)]
    for deadline in KINDS:
        assert baselines.needed_scale(runs, deadline) == pytest.approx(10.0)
        by_scale = dict(zip(baselines.SCALES, baselines.attainment_curve(runs, deadline), strict=True))
        assert {share for scale, share in by_scale.items() if scale < 9.9} == {0.0}
        assert {share for scale, share in by_scale.items() if 10.1 < scale < 19.9} == {0.9}
        assert {share for scale, share in by_scale.items() if scale > 20.1} == {0.95}, "one never ends"
    late = [run_of([1.0] * 8 + [np.nan] * 2, slo)]
    assert baselines.needed_scale(late, "TTFT") == np.inf, "a request that does not end has no first token in time"


def test_all_three_deadlines_are_met_from_the_last_scale_on() -> None:
    tight = Slo(ttft_s=0.02, tpot_s=0.18, e2e_s=2.0, target=0.9)
    needed = {deadline: baselines.needed_scale([run_of([2.0] * 10, tight)], deadline) for deadline in KINDS}
    assert needed == pytest.approx({"TTFT": 100.0, "TPOT": 10.0, "end to end": 10.0, "all three": 100.0})


def test_needed_scales_have_a_row_for_each_rate_and_deadline(contest: baselines.SystemContest) -> None:
    assert [(row.load, row.deadline) for row in contest.scales] == [
        (load, deadline) for load in ("50%", "80%", "100%") for deadline in KINDS
    ]
    first = contest.scales[0]
    # TIGHT is ten times 0.03 s; DistServe's first token takes 0.1 s, and the others' as much more as they are slower.
    assert (first.rate, first.distserve_like) == (2.5, "3.33")
    assert (first.ours, first.hexgen_like, first.hexgen_like_2048, first.vllm_like) == ("6.67", "13.3", "26.7", "6.67")


def test_the_picture_has_a_row_for_each_rate_and_a_column_for_each_deadline(
    contest: baselines.SystemContest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "contests", lambda scope: (contest,))
    page = baselines.deadlines(Scope())
    assert page.tables[0].rows == contest.scales
    (picture,) = page.pictures
    assert picture.file == f"deadlines-coding-{Specs.TABLE1.value}"
    assert [[curves.x for curves in row] for row in picture.panels] == [
        [f"SLO scale of {deadline}, {rate} requests/s" for deadline in KINDS] for rate in ("2.5", "4", "5")
    ]
    assert all(list(curves.lines) == list(SYSTEMS) for row in picture.panels for curves in row)


class MadeUpTrials:
    """More replicas are expected to carry more, and of equally many those with more that prefill; in trials the
    second of three does."""

    def __init__(self, problem: Any, deployed: list[Solution]) -> None:
        self.problem, self._deployed = problem, deployed

    def rank_expected(self, solutions: Sequence[Solution]) -> list[Solution]:
        self._deployed += solutions
        prefill = {one: sum(part.phase is Phase.PREFILL for part in one) for one in solutions}
        return sorted(solutions, key=lambda one: (-len(one), -prefill[one]))

    def try_all(self, solutions: Sequence[Solution]) -> list[Any]:
        assert len(solutions) == 3
        return [SimpleNamespace(solution=solutions[place]) for place in (1, 0, 2)]


@pytest.fixture
def in_house(monkeypatch: pytest.MonkeyPatch) -> list[Solution]:
    """Every solution of the eight A100 that was looked at."""
    deployed: list[Solution] = []

    def deploy(problem: Any, solution: Solution, case: PlannedCase | None = None) -> Any:
        return SimpleNamespace(problem=problem, solution=solution, case=case)

    monkeypatch.setattr(systems, "Deployed", deploy)
    monkeypatch.setattr(systems, "best_colocated", lambda case, scope: deploy(None, (), case))
    monkeypatch.setattr(systems, "_trials", lambda problem, scope: MadeUpTrials(problem, deployed))
    monkeypatch.setattr(systems, "chosen", lambda case, scope: "ours")
    monkeypatch.setattr(systems, "best_dispatch", lambda deployed, scope, engine: f"for {engine}")
    return deployed


def test_the_baselines_in_house_are_the_best_in_trials_of_three_configurations(in_house: list[Solution]) -> None:
    case = PlannedCase(workload="coding", rate=3.0)
    found = {one.name: one for one in systems.systems(case, Scope(seeds=(0,)))}
    assert tuple(found) == SYSTEMS
    budget = found[WHOLE].engine
    assert budget is not None
    assert budget.max_batched_tokens == 2048
    searched: list[Any] = [found[name].deployed for name in (WHOLE, "HexGen-like")]
    assert [one.case.step_tokens for one in searched] == [2048, 0], "each planned for what it is"
    assert found["HexGen-like"].engine is None
    split, colocated = found["DistServe-like"].deployed.solution, found["vLLM-like"].deployed.solution
    assert [part.phase for part in split].count(Phase.PREFILL) == 6, "of the three that are expected to be best"
    assert (len(split), len(colocated)) == (8, 4), "the second of each"
    assert {part.phase for part in colocated} == {Phase.MIXED}


def test_every_split_uses_all_eight_gpus_once(in_house: list[Solution]) -> None:
    list(systems.systems(PlannedCase(workload="coding", rate=3.0), Scope(seeds=(0,))))
    whole = [solution for solution in in_house if solution]
    assert all(sum(part.slices[0].gpus for part in solution) == 8 for solution in whole)
    splits = [solution for solution in whole if solution[0].phase is not Phase.MIXED]
    assert len(splits) == len(set(splits)), "none twice"
    # Prefill GPUs 1 to 7, times the widths 1, 2, 4 that divide either side.
    widths = [sum(gpus % width == 0 for width in (1, 2, 4, 8)) for gpus in range(1, 8)]
    assert len(splits) == sum(a * b for a, b in zip(widths, reversed(widths), strict=True))
    assert len([solution for solution in whole if solution[0].phase is Phase.MIXED]) == 4


# ---- ablation ------------------------------------------------------------------------------------------------------


def test_each_system_is_told_as_multiples_of_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float, str]] = []

    def outcome(problem: Any, plan: Any, scope: Scope, seed: int, *, dispatch: str) -> Any:
        service = problem.services[0]
        asked.append((service.workload.rate, service.kv_bits, dispatch))
        slow = {SHARES: 2.0, RANDOM: 6.0, PLAN: 1.0}[dispatch] * (1.5 if service.kv_bits == 16.0 else 1.0) + seed
        pairs = np.array([0, 1, 1, -1])
        return run_of([slow, slow, slow, np.nan], prefill=pairs, decode=np.array([1, 1, 2, -1]), kv_s=np.arange(4.0))

    problem = PlannedCase(cluster="thunderserve-h-40gbps", workload="coding", rate=3.0).problem()
    deployed = SimpleNamespace(problem=problem, at=lambda rate: SimpleNamespace(plan=rate))
    monkeypatch.setattr(ablation, "planned", lambda case, steps: deployed)
    monkeypatch.setattr(ablation, "outcome", outcome)
    rows = ablation.ablation_rows(Scope(seeds=(0, 2), seconds=5.25))
    assert len(rows) == 2 * 2 * 2 * 5
    first = rows[:5]
    assert [row.mean_e2e_s for row in first] == [3.0, 4.0, 10.0, 7.0, 2.0], "over seeds, without what never ended"
    assert [row.times_all_on for row in first] == pytest.approx([1.0, 4 / 3, 10 / 3, 7 / 3, 2 / 3])
    assert [row.times_all_on for row in rows[5:10]] == [row.times_all_on for row in first], "anew for each rate"
    assert first[0].kv_visible_s == 1.0, "of requests 0 and 2, whose KV went to another replica"
    assert [row.paper for row in first] == ["1", "1.3", "1.3 x 4", "-", "-"]
    assert {rate for rate, _, _ in asked} == {0.5, 3.0}
    assert {(bits, dispatch) for _, bits, dispatch in asked[:10]} == {
        (4.5, SHARES), (16.0, SHARES), (16.0, RANDOM), (4.5, RANDOM), (4.5, PLAN),
    }  # fmt: skip
