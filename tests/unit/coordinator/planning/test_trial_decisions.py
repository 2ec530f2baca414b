"""Each decision between trials by itself: what is expected of plans and what they carry are given, not computed."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.evaluator import HEADROOM
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.errors import UnservedError
from p2pserve.coordinator.planning.model.problem import Group, Problem, Proposal, Score, Slice, Solution
from p2pserve.coordinator.planning.upper import trials
from p2pserve.coordinator.planning.upper.search import SearchResult
from p2pserve.coordinator.planning.upper.trials import (
    AHEAD,
    SURER,
    PlanTrials,
    TrialOutcome,
    TrialsOver,
    TriedPlan,
)

PHASES = {"P": Phase.PREFILL, "D": Phase.DECODE, "M": Phase.MIXED}
CARDS = ("A40-48GB", "RTX-3090TI-24GB", "RTX-A5000-24GB")


@pytest.fixture(autouse=True)
def no_drawn_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flips of one group alone are known beforehand."""
    monkeypatch.setattr(trials, "NEIGHBOURS", 0)


def plan(phases: str, services: str = "000") -> Solution:
    """A group on each box, with these phases, like "PDM"."""
    return tuple(
        sorted(
            Group((Slice(box, 4),), PHASES[phase], int(service))
            for box, (phase, service) in enumerate(zip(phases, services, strict=False))
        )
    )


def name(solution: Solution) -> str:
    """The other way round; GPUs where a group has not all of its box."""
    return "".join(
        f"{group.phase.value[0].upper()}{'' if part.gpus == 4 else part.gpus}"
        for group in sorted(solution)
        for part in group.slices
    )


class GivenPlans:
    """An evaluator and a trial that know plans by name. `expected`: capacities, of plans that are not named there
    `others`; None: a plan that cannot be served. `carried`: as seen in trials, else as expected. `objectives`: of a
    search's scores, else the capacities."""

    def __init__(
        self,
        expected: Mapping[str, float | None],
        others: float = 0.5,
        carried: Mapping[str, float] | None = None,
        objectives: Mapping[str, float] | None = None,
    ) -> None:
        self._expected, self._others, self._carried = expected, others, carried or {}
        self._objectives = objectives or {}
        self.proposed, self.challenged, self.tried = list[str](), list[str](), list[str]()

    def can_hold(self, slices: tuple[Slice, ...], service: int) -> bool:
        return len(slices) == 1

    def score(self, solution: Solution) -> Score:
        capacity = self._expected.get(name(solution), self._others) or 0.0
        return Score(self._objectives.get(name(solution), capacity), 0.9, capacity)

    def propose(self, solution: Solution, *, epoch: int, version: int) -> tuple[Any, ...]:
        self.proposed.append(name(solution))
        if self._expected.get(name(solution), self._others) is None:
            raise UnservedError("nobody decodes")
        return (SimpleNamespace(score=self.score(solution), plan=name(solution)),)

    def __call__(self, proposals: Sequence[Proposal]) -> TrialOutcome:
        self.tried.append(str(proposals[0].plan))
        return TrialOutcome(0.9, self._carries(proposals))

    def carries(self, proposals: Sequence[Proposal], factor: float) -> bool:
        self.challenged.append(str(proposals[0].plan))
        return self._carries(proposals) >= factor

    def _carries(self, proposals: Sequence[Proposal]) -> float:
        return self._carried.get(str(proposals[0].plan), proposals[0].score.capacity)


def contest(given: Any, *, by_capacity: bool = True, **told: Any) -> PlanTrials:
    size = (len(CARDS), len(CARDS))
    boxes = tuple(Box(id=f"b{n}", gpu=gpu_table().find(card, Specs.DENSE), gpus=4) for n, card in enumerate(CARDS))
    cluster = Cluster(boxes=boxes, gbps=np.full(size, 10.0), rtt_s=np.full(size, 0.001), usd_per_gb=np.zeros(size))
    service: Any = SimpleNamespace(name="s")
    problem = Problem(cluster=cluster, services=(service,), pinned={})
    if by_capacity:
        told = {"rank": attrgetter("outcome.capacity"), **told}
    return PlanTrials(problem=problem, evaluator=given, trial=given, **told)


def searched(given: GivenPlans, best: str, *evaluated: str, colocated: str = "MMM") -> SearchResult:
    """What a search has found, and what it looked at on the way."""
    return SearchResult(
        solution=plan(best), score=given.score(plan(best)), colocated=plan(colocated),
        colocated_score=given.score(plan(colocated)), steps=1, history=(),
        evaluated={plan(each): given.score(plan(each)) for each in evaluated},
    )  # fmt: skip


def outcome(solution: Solution, attainment: float, capacity: float, expected: Score | None = None) -> TriedPlan:
    proposal: Any = SimpleNamespace(score=expected or Score(0.0, 0.0, 0.0))
    return TriedPlan(solution=solution, proposals=(proposal,), outcome=TrialOutcome(attainment, capacity))


# ---- which are tried ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "picked"),
    [
        (0, ["PDM", "MMM"]),
        (2, ["PDM", "MMM"]),
        (3, ["PDM", "MMM", "PPD"]),
        (4, ["PDM", "MMM", "PPD", "DDP"]),
        (5, ["PDM", "MMM", "PPD", "DDP"]),
    ],
)
def test_after_the_best_and_the_colocated_one_come_those_of_which_most_is_expected(
    count: int, picked: list[str]
) -> None:
    """One for each number of replicas by phase: PDP is of the kind of PPD, and MPD of the kind of the best."""
    given = GivenPlans({"PDM": 1.0, "MMM": 1.1, "DDP": 2.0, "PDP": 3.0, "PPD": 4.0, "MPD": 5.0})
    found = searched(given, "PDM", "DDP", "PDP", "PPD", "MPD", "PDM", "MMM")
    assert contest(given).pick_candidates(found, count) == [plan(each) for each in picked]


def test_where_two_are_tried_no_others_are_looked_at() -> None:
    """Whole plans take time."""
    given = GivenPlans({})
    contest(given).pick_candidates(searched(given, "PDM", "PPD"), 2)
    assert given.proposed == []


def test_a_colocated_plan_that_was_found_best_leaves_room_for_another() -> None:
    given = GivenPlans({})
    found = searched(given, "MMM", "MMM", "PPD")
    assert contest(given).pick_candidates(found, 2) == [plan("MMM"), plan("PPD")]


def test_plans_that_give_services_other_phases_are_of_different_kinds() -> None:
    given = GivenPlans({})
    other = plan("PDM", "100")
    found = searched(given, "PDM")
    found = SearchResult(
        solution=found.solution, score=found.score, colocated=found.colocated, colocated_score=found.colocated_score,
        steps=1, history=(), evaluated={other: given.score(other)},
    )  # fmt: skip
    assert contest(given).pick_candidates(found, 3)[2:] == [other]


def test_what_cannot_be_served_or_carries_nothing_is_left_out() -> None:
    given = GivenPlans({"PPP": None, "PPD": 0.0, "PDM": 1.0, "DPM": 2.0})
    ranked = contest(given).rank_expected([plan(each) for each in ("PPP", "PDM", "PPD", "DPM", "PDM")])
    assert ranked == [plan("DPM"), plan("PDM")]
    assert given.proposed == ["PPP", "PDM", "PPD", "DPM"], "each once"


def test_of_what_was_evaluated_the_best_scores_count_and_of_equals_the_first_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "LIKELY", 3)
    given = GivenPlans({"MPP": 3.0, "MDD": 9.0}, objectives={"MDD": 0.1})
    evaluated = ("MDD", "PPD", "DPP", "MPP", "PDD")
    found = searched(given, "MMM", *evaluated)
    contest(given).pick_candidates(found, 9)
    first = sorted(plan(each) for each in ("PPD", "DPP", "PDD"))[:2]
    assert given.proposed == ["MPP", *map(name, first)]


# ---- what they are worth ------------------------------------------------------------------------------------------


def test_the_objective_is_that_of_the_estimate_by_what_was_seen() -> None:
    """What the estimate takes off for dollars stays taken off."""
    expected = Score(0.9 + HEADROOM * 2.0 / 3.0 - 0.25, 0.9, 2.0)
    tried = outcome(plan("PDM"), 0.8, 1.0, expected)
    assert tried.objective == pytest.approx(0.8 + HEADROOM / 2.0 - 0.25)
    assert tried.capacity == 1.0


def test_a_colocated_plan_counts_for_two_percent_more_of_both_and_never_for_more_than_all() -> None:
    for attainment, counted in ((0.5, 0.5 * SURER), (0.99, 1.0), (1.0, 1.0)):
        tried = outcome(plan("MMM"), attainment, 3.0)
        assert tried.capacity == pytest.approx(3.0 * SURER)
        assert tried.objective == pytest.approx(counted + HEADROOM * 3.0 * SURER / (1.0 + 3.0 * SURER))


@pytest.mark.parametrize(("phases", "is_colocated"), [("MMM", True), ("M", True), ("MMD", False), ("PDP", False)])
def test_a_plan_is_colocated_if_no_replica_needs_another(phases: str, is_colocated: bool) -> None:
    assert outcome(plan(phases), 1.0, 1.0).is_colocated is is_colocated


@pytest.mark.parametrize(("split", "stays"), [(0.9, True), (0.917, True), (0.919, False)])
def test_by_attainment_too_a_colocated_plan_stays_unless_another_has_two_percent_more(
    split: float, stays: bool
) -> None:
    """Neither carries its target, so that only this tells them apart."""

    class Seen(GivenPlans):
        def __call__(self, proposals: Sequence[Proposal]) -> TrialOutcome:
            return TrialOutcome(0.9 if str(proposals[0].plan) == "MMM" else split, 0.0)

    tried = contest(Seen({}), by_capacity=False).try_all([plan("PDM"), plan("MMM")])
    assert tried[0].is_colocated is stays


@pytest.mark.parametrize("order", [("PDM", "PPD", "DDP"), ("DDP", "PPD", "PDM")])
def test_of_equals_the_earlier_comes_first(order: tuple[str, ...]) -> None:
    given = GivenPlans({}, carried={"PPD": 2.0})
    tried = contest(given).try_all([plan(each) for each in order])
    assert [name(each.solution) for each in tried] == ["PPD", order[0], order[2]]
    assert given.tried == list(order)


@pytest.mark.parametrize(("left", "expected"), [(0, 1), (1, 1), (2, 2), (9, 3)])
def test_trials_end_when_time_is_up_but_not_before_the_first(left: int, expected: int) -> None:
    given = GivenPlans({})
    solutions = [plan("PDM"), plan("PPD"), plan("DDP")]
    assert len(contest(given).try_all(solutions, lambda: len(given.tried) >= left)) == expected


# ---- who challenges -----------------------------------------------------------------------------------------------

FLIPS = ("DDM", "MDM", "PPM", "PMM", "PDP", "PDD")
"""Of PDM: one group in another phase."""


def challenge(
    given: GivenPlans, *evaluated: str, count: int = 99, first: Sequence[str] = ("PDM",), seed: int = 0, **told: Any
) -> list[str]:
    """What was tried in the end, the best first."""
    trial = contest(given, **told)
    tried = trial.try_all([plan(each) for each in first])
    found = searched(given, first[0], *evaluated)
    return [name(each.solution) for each in trial.challenge(tried, found, count, np.random.default_rng(seed))]


@pytest.mark.parametrize("count", [0, 1, 3, 6, 99])
def test_neighbours_challenge_in_the_order_of_what_is_expected_so_many_at_most(count: int) -> None:
    expected = {"PDM": 1.0, "DDM": 0.2, "MDM": 0.3, "PPM": 0.4, "PMM": 0.5, "PDP": 0.6, "PDD": 0.7}
    given = GivenPlans(expected)
    assert challenge(given, count=count) == ["PDM"]
    assert given.challenged == sorted(FLIPS, key=lambda each: -expected[each])[:count]
    assert given.tried == ["PDM"], "only who carries more is tried at full length"


def test_half_of_those_that_may_challenge_are_neighbours_and_half_were_evaluated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "LIKELY", 4)
    given = GivenPlans({"PDM": 1.0, "PDD": 0.9, "PDP": 0.8, "PPM": 0.7, "DPD": 0.85, "DPP": 0.65, "MPD": 0.6})
    challenge(given, "MPD", "DPP", "DPD")
    assert given.challenged == ["PDD", "DPD", "PDP", "DPP"], "those of which most is expected first"


def test_challengers_are_looked_for_once_while_they_lose() -> None:
    """Whole plans are made of the one that was tried, of the likely ones, and of those that challenge."""
    given = GivenPlans({})
    challenge(given, count=3)
    assert len(given.proposed) == 1 + len(FLIPS) + 3


def test_a_plan_that_carried_nothing_is_not_challenged() -> None:
    """Any that keeps its target at no rate at all would win."""
    given = GivenPlans({}, carried={"PDM": 0.0})
    assert challenge(given) == ["PDM"]
    assert given.challenged == []


def test_of_equal_neighbours_the_first_in_order_may_challenge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "LIKELY", 6)
    given = GivenPlans({})
    challenge(given, count=3)
    assert given.challenged == [name(one) for one in sorted(plan(each) for each in FLIPS)[:3]]


def test_nobody_challenges_twice_nor_who_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after another best, whose neighbours are those of the one before in part."""
    given = GivenPlans({}, carried={"PPM": 0.6, "PPD": 0.7, "PDP": 0.2})
    tried = challenge(given, "PDM", "PDP", first=("PDM", "PDP"))
    assert tried[:2] == ["PPD", "PPM"]
    assert len(set(given.challenged)) == len(given.challenged)
    assert not {"PDM", "PDP"} & set(given.challenged)
    assert sorted(tried) == sorted(given.tried)


def test_after_another_best_its_neighbours_challenge_and_have_to_carry_more_than_it() -> None:
    """PPP, of which most is expected, is no neighbour of PDM, but one of PPM. MPM carries less than the best by then,
    and more than the one before."""
    given = GivenPlans({"PPM": 0.8, "PPP": 0.9}, carried={"PDM": 0.5, "PPM": 0.6, "PPP": 0.1, "PPD": 0.62, "MPM": 0.6})
    assert challenge(given) == ["PPD", "PPM", "PDM"]
    assert given.challenged[:2] == ["PPM", "PPP"]
    assert given.tried == ["PDM", "PPM", "PPD"]
    assert "MPM" in given.challenged


@pytest.mark.parametrize(("carried", "wins"), [(AHEAD - 0.001, False), (AHEAD, True), (AHEAD + 0.001, True)])
def test_a_challenger_has_to_be_ahead_by_three_percent(carried: float, wins: bool) -> None:
    given = GivenPlans({"PPM": 0.9}, carried={"PDM": 1.0, "PPM": carried})
    assert challenge(given, count=1) == (["PPM", "PDM"] if wins else ["PDM"])


def test_a_challenger_of_equal_rank_does_not_become_the_best() -> None:
    """Two that were ahead in one run and no better at full length: those that challenge are still neighbours of the
    first."""

    class Lucky(GivenPlans):
        def carries(self, proposals: Sequence[Proposal], factor: float) -> bool:
            self.challenged.append(str(proposals[0].plan))
            return True

    given = Lucky({"PPM": 0.9, "PDM": 1.0}, carried=dict.fromkeys(("PDM", *FLIPS), 1.0))
    assert challenge(given) == ["PDM", *given.challenged], "of equals the earlier"
    assert set(given.challenged) == set(FLIPS)


def test_a_colocated_best_has_to_be_beaten_in_what_it_really_carried() -> None:
    """Its two percent count where plans are ranked, not twice."""
    given = GivenPlans({"MMD": 0.9}, carried={"MMM": 1.0, "MMD": AHEAD + 0.001})
    assert challenge(given, count=1, first=("MMM",), rank=attrgetter("capacity")) == ["MMD", "MMM"]


def test_challenges_end_when_time_is_up() -> None:
    given = GivenPlans({})
    trial = contest(given)
    tried = trial.try_all([plan("PDM")])
    found = searched(given, "PDM")
    trial.challenge(tried, found, 99, np.random.default_rng(0), lambda: len(given.challenged) >= 2)
    assert len(given.challenged) == 2


@pytest.mark.parametrize(("most_losses", "challenged"), [(1, 1), (2, 4), (3, 5)])
def test_challenges_end_when_so_many_in_a_row_have_lost(most_losses: int, challenged: int) -> None:
    """PMM, the second, wins; of its own neighbours as many may lose again."""
    expected = {"PDM": 1.0, "PDD": 0.7, "PMM": 0.6, "PDP": 0.5, "PPM": 0.4}
    given = GivenPlans(expected, carried={"PDM": 1.0, "PMM": 1.2})
    trial = contest(given)
    found = searched(given, "PDM")
    tried = trial.challenge(trial.try_all([plan("PDM")]), found, 99, np.random.default_rng(0), most_losses=most_losses)
    assert len(given.challenged) == challenged
    assert [name(each.solution) for each in tried] == (["PMM", "PDM"] if most_losses > 1 else ["PDM"])


def test_neighbours_are_drawn_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same challengers for the same seed, others for others: of splits, of which most is expected, one is drawn."""
    monkeypatch.setattr(trials, "NEIGHBOURS", 1)

    class MoreGroups(GivenPlans):
        def score(self, solution: Solution) -> Score:
            return Score(float(len(solution)), 0.9, float(len(solution)))

    def first_challengers(seed: int) -> list[str]:
        given = MoreGroups({}, carried={"PDM": 9.0})
        challenge(given, count=3, seed=seed)
        return given.challenged

    drawn = [first_challengers(seed) for seed in range(12)]
    assert drawn == [first_challengers(seed) for seed in range(12)]
    assert len({tuple(each) for each in drawn}) > 3


def test_plans_are_told_their_number() -> None:
    class Numbered(GivenPlans):
        def propose(self, solution: Solution, *, epoch: int, version: int) -> tuple[Any, ...]:
            self.proposed.append(f"{epoch}.{version}")
            return super().propose(solution, epoch=epoch, version=version)

    given = Numbered({})
    contest(given, epoch=3, version=7).try_all([plan("PDM")])
    assert given.proposed[0] == "3.7"


# ---- other phases for replicas that run ------------------------------------------------------------------------------


class Shares(GivenPlans):
    """Plans by the share of requests that they have in time; those that are not named have `others`."""

    def __init__(self, shares: Mapping[str, float], others: float = 0.1, most: int = 99, **more: Any) -> None:
        super().__init__({}, **more)
        self._shares, self._rest, self._most = shares, others, most

    def __call__(self, proposals: Sequence[Proposal]) -> TrialOutcome:
        if len(self.tried) >= self._most:
            raise TrialsOver
        self.tried.append(str(proposals[0].plan))
        return TrialOutcome(self._shares.get(self.tried[-1], self._rest), 0.0)


def chosen(given: Shares, running: str, *others: str, spent: Callable[[], bool] = lambda: False) -> list[str]:
    found = contest(given).choose_phases(plan(running), [plan(each) for each in others], spent)
    return [name(each.solution) for each in found]


def test_phases_change_to_what_has_most_in_time() -> None:
    given = Shares({"PDM": 0.8, "MMM": 0.82, "PPD": 0.95})
    assert chosen(given, "PDM", "MMM", "PPD")[:3] == ["PPD", "MMM", "PDM"]


def test_phases_stay_for_what_may_be_the_draw_of_requests() -> None:
    given = Shares({"PDM": 0.8, "MMM": 0.8 * AHEAD - 1e-9})
    assert chosen(given, "PDM", "MMM")[:2] == ["PDM", "MMM"]
    assert chosen(Shares({"PDM": 0.8, "MMM": 0.8 * AHEAD + 1e-9}), "PDM", "MMM")[0] == "MMM"


def test_neighbours_of_the_best_are_tried_as_long_as_they_are_better() -> None:
    """From PDM over MDM and MMM; nothing beside that is better."""
    given = Shares({"PDM": 0.5, "MDM": 0.6, "MMM": 0.7, "MMD": 0.69})
    assert chosen(given, "PDM")[0] == "MMM"
    assert len(given.tried) == len(set(given.tried))


def test_what_cannot_be_served_is_passed_over() -> None:
    given = Shares({"PDM": 0.5, "MMM": 0.9})
    given._expected = {"DDD": None}
    assert chosen(given, "PDM", "DDD", "MMM")[0] == "MMM"
    assert "DDD" not in given.tried


@pytest.mark.parametrize(("most", "found"), [(0, []), (1, ["PDM"]), (2, ["MMM", "PDM"])])
def test_when_time_is_over_those_count_that_were_tried(most: int, found: list[str]) -> None:
    given = Shares({"PDM": 0.5, "MMM": 0.9, "PPD": 1.0}, most=most)
    assert chosen(given, "PDM", "MMM", "PPD") == found


def test_a_hurried_choice_tries_what_runs_and_no_more() -> None:
    given = Shares({"PDM": 0.5, "MMM": 0.9})
    assert chosen(given, "PDM", "MMM", spent=lambda: True) == ["PDM"]
