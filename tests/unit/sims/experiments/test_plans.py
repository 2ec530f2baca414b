"""What the pages of deployments and rescheduling say of plans, from made-up searches and runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.planning.model.cluster_file import packaged_cluster
from p2pserve.coordinator.planning.upper.trials import PlanTrials, TrialOutcome, TriedPlan
from p2pserve.sims.experiments import baselines, deployments, setting, systems
from p2pserve.sims.experiments.setting import (
    CLOUD,
    WORKLOADS,
    Deployed,
    PlannedCase,
    Scope,
    at_rate,
    group,
    planned,
    shapes,
)
from p2pserve.sims.policies import PLAN, SHARES
from p2pserve.sims.replanning import describe_phases
from p2pserve.sims.results.trials import SimulatedTrial


def stage(peer: str, tp: int, first: int, last: int, first_gpu: int = 0) -> Stage:
    return Stage(peer=peer, tp=tp, first_layer=first, last_layer=last, first_gpu=first_gpu)


def plan_of(*replicas: Replica) -> Plan:
    pair = Pairing(prefill=replicas[0].id, decode=replicas[-1].id, weight=1.0)
    return Plan(epoch=0, version=0, service="s", replicas=replicas, pairings=(pair,), codec="kv4", why=())


def test_replicas_are_counted_by_phase() -> None:
    one = Replica(id="a", phase=Phase.PREFILL, stages=(stage("a40", 2, 0, 60),))
    two = Replica(id="b", phase=Phase.DECODE, stages=(stage("a6000-0", 2, 0, 60),))
    three = Replica(id="c", phase=Phase.DECODE, stages=(stage("a6000-1", 2, 0, 60),))
    assert describe_phases(plan_of(one, two, three)) == "1P 2D 0M"


def test_shapes_name_cards_degrees_and_how_many() -> None:
    cluster = packaged_cluster(CLOUD, Specs.TABLE1)
    both = (stage("a5000-1", 2, 0, 30), stage("3090ti-0", 1, 30, 60))
    kinds = shapes(
        plan_of(
            Replica(id="a", phase=Phase.PREFILL, stages=both),
            Replica(id="b", phase=Phase.DECODE, stages=(stage("a6000-0", 2, 0, 60),)),
            Replica(id="c", phase=Phase.DECODE, stages=(stage("a6000-1", 2, 0, 60),)),
        ),
        cluster,
    )
    assert kinds[Phase.PREFILL] == "1 3090TI+2 A5000 (2/1,2)"
    assert kinds[Phase.DECODE] == "2 A6000 (2,1) x2"
    assert kinds[Phase.MIXED] == "-"


def test_another_rate_leaves_everything_else() -> None:
    problem = PlannedCase(workload="coding", rate=3.0).problem()
    faster = at_rate(problem, 7.0)
    assert faster.services[0].workload.rate == 7.0
    assert problem.services[0].workload.rate == 3.0
    assert faster.services[0].slo == problem.services[0].slo
    assert faster.cluster is problem.cluster


@pytest.mark.parametrize("mixed_only", [True, False])
def test_a_case_sets_links_between_boxes_and_what_replicas_may_do(mixed_only: bool) -> None:
    problem = PlannedCase(workload="coding", rate=3.0, gbps=7.0, mixed_only=mixed_only).problem()
    off = ~np.eye(len(problem.cluster.boxes), dtype=bool)
    assert set(problem.cluster.gbps[off].tolist()) == {7.0}
    assert set(problem.pinned.values()) == ({Phase.MIXED} if mixed_only else set())
    assert len(problem.pinned) == (len(problem.cluster.boxes) if mixed_only else 0)


@pytest.mark.parametrize(
    ("carried", "expected", "plans"),
    [
        # Planned for 5, it is expected to carry so much; planned for that, so much, and on.
        ({5.0: 6.0, 6.0: 7.0, 7.0: 7.0}, 7.0, 3),
        ({5.0: 6.0, 6.0: 5.5}, 6.0, 2),
        ({5.0: 6.0, 6.0: 7.0, 7.0: 8.0, 8.0: 9.0, 9.0: 10.0}, 9.0, 4),
        ({5.0: 6.04, 6.0: 6.05, 6.1: 6.1}, 6.05, 2),
    ],
)
def test_it_is_planned_again_for_what_is_expected_while_that_helps(
    carried: dict[float, float], expected: float, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def planned(case: PlannedCase, steps: int | None) -> Any:
        asked.append(case.rate)
        return SimpleNamespace(at=lambda: SimpleNamespace(max_rate=carried[case.rate]))

    monkeypatch.setattr(setting, "planned", planned)
    # The scale is only there so that each of these is a case of its own.
    case = PlannedCase(workload="coding", rate=5.0, scale=11.0 + expected + plans)
    assert setting.most(case, 1).at().max_rate == expected
    assert len(set(asked)) >= plans


def test_ours_and_colocated_serving_are_chosen_by_trials_of_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches are for rates around what is expected of colocated serving, whose plan is tried beside what they
    find."""
    case = PlannedCase(
        cluster="thunderserve-16xa5000", boxes=2, model="llama-13b", specs=Specs.MEASURED, workload="conversation",
        rate=1.0, scale=20.0,
    )  # fmt: skip
    cluster = case.problem().cluster
    first, second = (box.id for box in cluster.boxes)
    mixed = tuple(sorted(group(cluster, Phase.MIXED, {box: 4}) for box in (first, second)))
    split = tuple(sorted([group(cluster, Phase.PREFILL, {first: 4}), group(cluster, Phase.DECODE, {second: 4})]))
    searched: set[tuple[float, int]] = set()
    tried: set[tuple[tuple[int, ...], int, bool]] = set()
    carried = {mixed: 2.0, split: 2.1}

    def search(case: PlannedCase, steps: int | None, seed: int = 0) -> Any:
        if not case.mixed_only:
            searched.add((case.rate, seed))
        return SimpleNamespace(solution=mixed if case.mixed_only else split, colocated=mixed, evaluated={})

    class Trial(SimulatedTrial):
        def __call__(self, proposals: Any) -> TrialOutcome:
            tried.add((self.seeds, self.requests, self.is_even))
            phases = {replica.phase for replica in proposals[0].plan.replicas}
            return TrialOutcome(1.0, carried[mixed if phases == {Phase.MIXED} else split])

    monkeypatch.setattr(setting, "searched", search)
    monkeypatch.setattr(systems, "searched", search)
    monkeypatch.setattr(systems, "SimulatedTrial", Trial)
    scope = Scope(seeds=(0, 1), challengers=0, requests=700)
    colocated = systems.best_colocated(case, scope)
    assert (colocated.solution, systems.chosen(case, scope).solution) == (mixed, split)
    rates = {float(f"{factor * colocated.at().max_rate:.2g}") for factor in systems.FACTORS}
    assert searched == {(rate, seed) for rate in rates for seed in range(systems.SEARCHES)}
    other_seeds = (systems.TRIALS, systems.TRIALS + 1)
    assert tried == {(other_seeds, 700, True)}, "nothing is reported of these requests"
    carried[split] = 2.03
    assert systems.chosen(case, Scope(seeds=(0,), challengers=0)).solution == mixed, "it is hardly better"


@pytest.mark.parametrize("starts", [1, 2])
def test_each_of_the_best_plans_is_challenged_for_itself(monkeypatch: pytest.MonkeyPatch, starts: int) -> None:
    """The second best may have the better neighbours: the best of all that came of both is taken."""
    case = PlannedCase(
        cluster="thunderserve-16xa5000", boxes=2, model="llama-13b", specs=Specs.MEASURED, workload="conversation",
        rate=1.5, scale=20.0,
    )  # fmt: skip
    cluster = case.problem().cluster
    boxes = [box.id for box in cluster.boxes]
    mixed = tuple(sorted(group(cluster, Phase.MIXED, {box: 4}) for box in boxes))
    split, turned = (
        tuple(sorted([group(cluster, Phase.PREFILL, {first: 4}), group(cluster, Phase.DECODE, {second: 4})]))
        for first, second in (boxes, boxes[::-1])
    )
    carried = {mixed: 2.0, split: 2.1, turned: 3.0}
    challenged: list[tuple[Any, int, int | None]] = []

    def try_all(self: PlanTrials, solutions: Sequence[Any]) -> list[TriedPlan]:
        tried = [
            TriedPlan(solution=one, proposals=self._propose(one), outcome=TrialOutcome(1.0, carried[one]))
            for one in dict.fromkeys(solutions)
        ]
        return sorted(tried, key=self.rank, reverse=True)

    def challenge(self: PlanTrials, tried: Any, found: Any, count: int, rng: Any, *, most_losses: int | None) -> Any:
        challenged.append((tried[0].solution, count, most_losses))
        return [*self.try_all([turned]), *tried] if tried[0].solution == mixed else tried

    def search(case: PlannedCase, steps: int | None, seed: int = 0) -> Any:
        return SimpleNamespace(solution=split, colocated=mixed, evaluated={})

    monkeypatch.setattr(systems, "searched", search)
    monkeypatch.setattr(PlanTrials, "try_all", try_all)
    monkeypatch.setattr(PlanTrials, "challenge", challenge)
    scope = Scope(seeds=(0,), challengers=5, starts=starts, most_losses=3)
    best = systems._search_and_try(case, 1.0, scope, mixed, searches=1)
    assert best.solution == (turned if starts == 2 else split)
    assert challenged == [(one, 5, 3) for one in (split, mixed)[:starts]]


def test_plans_that_were_chosen_before_are_not_searched_for_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that was ended goes on from a file, which has each plan with the rate that it is for."""
    case = PlannedCase(cluster="thunderserve-16xa5000", boxes=2, model="llama-13b", workload="conversation", rate=1.0)
    cluster = case.problem().cluster
    mixed = tuple(group(cluster, Phase.MIXED, {box.id: 4}) for box in cluster.boxes)
    searched: list[tuple[PlannedCase, tuple[Any, ...]]] = []

    def search_and_try(case: PlannedCase, rate: float, scope: Scope, *others: Any, searches: int) -> Deployed:
        searched.append((case, others))
        return Deployed(replace(case, rate=2.5 if case.mixed_only else 3.5).problem(), mixed)

    monkeypatch.setattr(systems, "most", lambda case, steps: Deployed(case.problem(), mixed))
    monkeypatch.setattr(systems, "_search_and_try", search_and_try)
    scope = Scope(seeds=(0,), kept=tmp_path / "kept")
    for _ in range(2):
        systems.best_colocated.cache_clear()
        systems.chosen.cache_clear()
        ours, colocated = systems.chosen(case, scope), systems.best_colocated(case, scope)
        assert (ours.solution, colocated.solution) == (mixed, mixed)
        assert [plan.problem.services[0].workload.rate for plan in (ours, colocated)] == [3.5, 2.5]
        assert set(colocated.problem.pinned.values()) == {Phase.MIXED}
        assert not ours.problem.pinned
        assert searched == [(replace(case, mixed_only=True), ()), (case, (mixed,))]
    systems.best_colocated(case, replace(scope, seconds=20.0))
    assert len(searched) == 3, "in other trials another may be the best"


def test_a_plan_is_simulated_with_the_dispatcher_that_carries_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = packaged_cluster(CLOUD, Specs.TABLE1)

    def deploy(problem: Any, solution: Any) -> Any:
        proposal = SimpleNamespace(plan=solution, max_rate=float(len(solution)))
        return SimpleNamespace(problem=problem, solution=solution, at=lambda: proposal)

    ours = (group(cluster, Phase.MIXED, {"a40": 8}),)
    problem = SimpleNamespace(cluster=cluster)
    monkeypatch.setattr(deployments, "Deployed", deploy)
    monkeypatch.setattr(deployments, "chosen", lambda case, scope: deploy(problem, ours))
    monkeypatch.setattr(deployments, "describe_phases", lambda plan: f"{len(plan)} replicas")
    monkeypatch.setattr(deployments, "shapes", lambda plan, cluster: dict.fromkeys(Phase, "-"))
    monkeypatch.setattr(
        deployments,
        "highest_rate",
        lambda deployed, scope, seed, dispatch: {SHARES: 3.0, PLAN: 2.0 + len(deployed.solution)}[dispatch],
    )
    rows = deployments.deployment_rows(Scope(seconds=7.25))
    assert len(rows) == 2 * 2 * 2 * 2, "columns, workloads, links, plans"
    first, second = rows[:2]
    assert (first.plan, first.replicas, first.simulated_rate, first.link_gbps) == ("ours", "1 replicas", 3.0, 10.0)
    assert (second.replicas, second.simulated_rate, second.expected_rate) == ("12 replicas", 14.0, 12.0)
    assert [row.link_gbps for row in rows[:4]] == [10.0, 10.0, 40.0, 40.0]
    assert len(deployments.deployments(Scope(seconds=7.25)).tables[0].rows) == len(rows)


def test_a_case_with_steps_of_its_own_is_planned_with_those() -> None:
    """Each replica takes as many tokens in a step, in the estimate and in the plan."""
    small, large = (
        planned(PlannedCase(workload="coding", rate=2.0, mixed_only=True, step_tokens=tokens), 20)
        for tokens in (0, 2048)
    )
    assert {replica.step_tokens for replica in large.at().plan.replicas} == {2048}
    assert min(replica.step_tokens for replica in small.at().plan.replicas) < 2048
    assert small.at().max_rate != pytest.approx(large.at().max_rate, rel=0.01)


def test_ours_is_compared_with_colocated_serving_request_by_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ratio is of the same requests, and what carried nothing makes none. Rows are kept as they are found."""
    rates = {("colocated", 0): 2.0, ("colocated", 1): 4.0, ("ours", 0): 5.0, ("ours", 1): 6.0}

    def deploy(name: str, expected: float) -> Any:
        proposal = SimpleNamespace(plan=name, max_rate=expected)
        return SimpleNamespace(name=name, at=lambda: proposal)

    def highest_rate(deployed: Any, scope: Scope, seed: int, dispatch: str) -> float:
        assert dispatch == PLAN, "by shares and queues"
        return rates[deployed.name, seed]

    tried: set[tuple[float | None, tuple[int, ...], float]] = set()

    def choose(case: PlannedCase, scope: Scope) -> Any:
        tried.add((case.gbps, scope.seeds, scope.seconds))
        return deploy("ours", 5.5)

    monkeypatch.setattr(baselines, "best_colocated", lambda case, scope: deploy("colocated", 2.5))
    monkeypatch.setattr(baselines, "chosen", choose)
    monkeypatch.setattr(baselines, "describe_phases", lambda plan: f"shape of {plan}")
    monkeypatch.setattr(baselines, "highest_rate", highest_rate)
    scope = Scope(seeds=(0, 1), seconds=77.5, kept=tmp_path / "kept")
    page = baselines.strictness(scope)
    assert tried == {(10.0, (0, 1), 77.5), (40.0, (0,), 60.0)}, "trials over the faster links are shorter"
    rows: Any = page.tables[0].rows
    assert {(row.workload, row.link_gbps, row.deadline) for row in rows} == {
        (workload, gbps, f"{scale:g} x")
        for workload in WORKLOADS
        for gbps in (10.0, 40.0)
        for scale in baselines.STRICTER
    }
    assert "10 and 40 Gb/s between boxes" in page.assumes
    first = rows[0]
    assert (first.colocated, first.ours) == ("shape of colocated", "shape of ours")
    assert (first.colocated_expected, first.ours_expected) == (2.5, 5.5)
    assert (first.colocated_simulated, first.ours_simulated) == ("3 (2-4)", "5.5 (5-6)")
    assert first.ours_over_colocated == "2 (1.5-2.5)"
    rates["colocated", 0] = 0.0
    baselines.strictness_rows.cache_clear()
    assert list(baselines.strictness_rows(scope)) == list(rows)
    assert baselines.strictness(Scope(seeds=(0,), seconds=77.5)).tables[0].rows[0].ours_over_colocated == "nan"  # type: ignore[attr-defined]
