"""Changes answered over time: detection, plans in force, reloads, and answers that news overtakes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.loading import LoadRates
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.cluster_file import packaged_cluster
from p2pserve.coordinator.planning.model.problem import Group, Problem, Slice
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload
from p2pserve.coordinator.planning.upper.search_space import make_solution
from p2pserve.coordinator.planning.upper.settings import SearchSettings
from p2pserve.sims.replanning import Replanner, ReplanPolicy, ReplanSettings
from p2pserve.sims.results.outcomes import SimResult, attainment
from p2pserve.sims.scenario import (
    BoxJoined,
    BoxLost,
    Change,
    LinksChanged,
    PlanChange,
    Replan,
    ReplicaModel,
    ServiceRun,
    SimSettings,
    Situation,
    WorldError,
)
from p2pserve.sims.workloads import Lengths, azure, chain_traces, draw
from p2pserve.sims.world import simulate

from .test_world import SERIAL, TIMES, TOKEN_BITS, TWO_MIXED, cluster_of, go, plan_of, run_of, trace_of

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
SPLIT = plan_of({"p": P, "d": D}, {("p", "d"): 1.0})


def run_toy(
    plan: Plan, trace: Any, replan: Replan | None, changes: Sequence[Change], settings: SimSettings | None = None
) -> SimResult:
    """One token a second; see test_world."""
    names = sorted({*plan.peers, *(change.box for change in changes if isinstance(change, BoxJoined))})
    return simulate(
        cluster_of(names),
        [run_of(plan, trace)],
        settings=settings,
        changes=changes,
        replan=replan,
        model_of=lambda *_: ReplicaModel(TIMES, 1600),
    )


def test_a_link_that_degrades_slows_what_is_on_its_way() -> None:
    trace = trace_of((0.0, 20, 4))
    calm = go(SPLIT, trace, settings=SERIAL)
    # half of the KV is there at 11 s; the other half takes four times as long from then on
    slow = go(SPLIT, trace, settings=SERIAL, changes=[LinksChanged(11.0, (("p", "d"),), TOKEN_BITS * 0.25e-9)])
    assert calm.services[0].outcomes.e2e_s.tolist() == [pytest.approx(1 + 20 + 3)]
    assert slow.services[0].outcomes.e2e_s.tolist() == [pytest.approx(1 + 10 + 40 + 3)]
    again = [
        LinksChanged(11.0, (("p", "d"),), TOKEN_BITS * 0.25e-9),
        LinksChanged(31.0, (("p", "d"),), TOKEN_BITS * 1e-9),
    ]
    assert go(SPLIT, trace, settings=SERIAL, changes=again).services[0].outcomes.e2e_s.tolist() == [
        pytest.approx(1 + 10 + 20 + 5 + 3)
    ]


def test_a_pipeline_over_a_link_that_degrades_takes_longer_steps() -> None:
    """By the roofline: what stages send each other goes over the link."""
    cluster = packaged_cluster("thunderserve-h-40gbps", Specs.MEASURED)
    stages = tuple(
        Stage(peer=box.id, tp=4, first_layer=30 * n, last_layer=30 * n + 30) for n, box in enumerate(cluster.boxes)
    )
    plan = Plan(
        epoch=1, version=1, service="s", codec="raw", why=(), replicas=(Replica(id="ab", phase=M, stages=stages),),
        pairings=(Pairing(prefill="ab", decode="ab", weight=1.0),),
    )  # fmt: skip
    trace = trace_of((0.0, 500, 40), (100.0, 500, 40))
    workload = Workload(name="w", prompts=trace.prompt, outputs=trace.output, rate=1.0)
    run = ServiceRun(
        service=Service(name="s", model=model_shape("llama-30b"), workload=workload), plan=plan, trace=trace
    )
    ends = (cluster.boxes[0].id, cluster.boxes[1].id)
    slow = [LinksChanged(50.0, (ends, ends[::-1]), 0.01)]
    first, second = simulate(cluster, [run], changes=slow).services[0].outcomes.e2e_s.tolist()
    assert second > 1.5 * first
    calm = simulate(cluster, [run]).services[0].outcomes.e2e_s.tolist()
    assert calm == pytest.approx([first, first])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (LinksChanged(1.0, (("p", "d"),), 0.0), "links that carry 0.0 Gb/s"),
        (LinksChanged(1.0, (("p", "p"),), 1.0), "there is no link from box p to box p"),
    ],
)
def test_links_that_cannot_be_are_refused(change: LinksChanged, says: str) -> None:
    with pytest.raises(WorldError, match=says):
        go(SPLIT, trace_of((0.0, 20, 4)), changes=[change])


def test_the_coordinator_hears_of_a_loss_later_than_gateways() -> None:
    asked: list[float] = []

    def replan(situation: Situation) -> list[PlanChange]:
        asked.append(situation.now)
        return []

    settings = SimSettings(detect_s=2.0, dead_s=8.0)
    result = run_toy(TWO_MIXED, trace_of((0.0, 20, 10), (0.0, 20, 10)), replan, [BoxLost(4.5, "a")], settings)
    assert asked == [12.5]
    assert result.services[0].outcomes.e2e_s.tolist() == [13.0, 10.0], "as without a coordinator"
    asked.clear()
    changes: list[Change] = [BoxLost(4.5, "a"), BoxJoined(6.0, "a")]
    run_toy(TWO_MIXED, trace_of((0.0, 20, 10), (0.0, 20, 10)), replan, changes, settings)
    assert asked == [6.0], "it is back before anybody counts it as dead"


def test_replicas_that_load_are_away_each_for_its_own_time() -> None:
    def on_gpu(name: str, box: str, gpu: int) -> Replica:
        return Replica(id=name, phase=M, stages=(Stage(peer=box, tp=1, first_layer=0, last_layer=10, first_gpu=gpu),))

    plan = plan_of({"a": M}, {("a", "a"): 1.0})
    pairings = tuple(Pairing(prefill=name, decode=name, weight=0.5) for name in ("x", "y"))
    moved = msgspec.structs.replace(
        plan, version=2, replicas=(on_gpu("x", "a", 1), on_gpu("y", "a", 2)), pairings=pairings
    )
    cluster = cluster_of("a", gpus=3)
    trace = trace_of((4.0, 20, 2), (4.0, 20, 2), (30.0, 20, 2))
    change = PlanChange(3.0, 0, moved, {"x": 10.0, "y": 20.0})
    result = go(plan, trace, cluster, changes=[change])
    assert result.services[0].outcomes.e2e_s.tolist() == [11.0, 11.0, 2.0]
    assert set(result.services[0].decode.tolist()) <= {1, 2}
    at_once = go(plan, trace, cluster, changes=[PlanChange(3.0, 0, moved)])
    assert at_once.services[0].outcomes.e2e_s.tolist() == [2.0, 2.0, 2.0]


def test_an_answer_that_news_overtakes_is_not_followed() -> None:
    """The second loss comes before the first answer is in force: what was planned with its box is void."""
    three = plan_of({"a": M, "b": M, "c": M}, {("a", "a"): 0.4, ("b", "b"): 0.3, ("c", "c"): 0.3})
    answers = {1: plan_of({"b": M}, {("b", "b"): 1.0}, version=2), 2: plan_of({"c": M}, {("c", "c"): 1.0}, version=3)}
    asked = count(1)

    def replan(situation: Situation) -> list[PlanChange]:
        return [PlanChange(situation.now + 5.0, 0, answers[next(asked)])]

    changes = [BoxLost(1.0, "a"), BoxLost(3.0, "b")]
    result = run_toy(three, trace_of((20.0, 20, 2)), replan, changes)
    assert result.services[0].outcomes.e2e_s.tolist() == [2.0]
    names = [replica.id for replica in result.replicas]
    assert names[result.services[0].decode.tolist()[0]] == "c"


# ---- with plans by the coordinator's own code ---------------------------------------------------------------------


def problem_of(rate: float = 1.0, workload: str = "conversation") -> Problem:
    drawn = azure(workload).lengths
    traffic = Workload(name=drawn.source, prompts=drawn.prompt, outputs=drawn.output, rate=rate)
    slo = Slo(ttft_s=4.0, tpot_s=0.2, e2e_s=60.0)
    service = Service(name="s", model=model_shape("llama-30b"), workload=traffic, slo=slo)
    cluster = packaged_cluster("thunderserve-cloud-16", Specs.MEASURED)
    return Problem(cluster=cluster, services=(service,), pinned={})


def run_of_groups(problem: Problem, phases: dict[str, Phase], seconds: float = 240.0) -> ServiceRun:
    """Each box a replica."""
    (service,) = problem.services
    solution = make_solution(
        Group((Slice(problem.cluster.index(box), 4),), phase) for box, phase in phases.items()
    )  # fmt: skip
    plan = LowerLevel(problem).propose(solution, epoch=1, version=1)[0].plan
    lengths = Lengths(service.workload.prompts, service.workload.outputs, service.workload.name)
    trace = draw(lengths, rate=service.workload.rate, rng=np.random.default_rng(5), seconds=seconds)
    return ServiceRun(service=service, plan=plan, trace=trace)


ALL_BUT_ONE_PREFILL = {"a6000": D, "a40": P, "a5000": P, "3090ti": P}


def answered(
    problem: Problem, run: ServiceRun, changes: Sequence[Change], **settings: Any
) -> tuple[SimResult, Replanner]:
    settings = {"search": SearchSettings(steps=40), "seed": 3, **settings}
    ticks = count()
    replanner = Replanner(problem, ReplanSettings(**settings), clock=lambda: float(next(ticks)))
    result = simulate(
        problem.cluster, [run], changes=changes, replan=replanner, settings=SimSettings(detect_s=2.0, dead_s=8.0)
    )
    return result, replanner


def test_new_phases_serve_more_than_what_is_left() -> None:
    problem = problem_of(rate=2.0)
    run = run_of_groups(problem, ALL_BUT_ONE_PREFILL)
    lost = [BoxLost(60.0, "a6000")]
    nothing, silent = answered(problem, run, lost, policy=ReplanPolicy.NONE)
    assert silent.records == []
    result, replanner = answered(problem, run, lost, policy=ReplanPolicy.LIGHT)
    assert result.services[0].outcomes.completed.all()
    (record,) = (record for record in replanner.records if "a6000 is lost" in record.why)
    assert (record.kind, record.asked_s, record.in_force_s, record.reload_s) == ("light", 68.0, 69.0, 0.0)
    assert record.flips
    assert record.before < record.after
    assert record.planning_s == 1.0, "by the clock that it was given"
    slo = problem.services[0].slo
    assert attainment(result.services[0].outcomes, slo) > attainment(nothing.services[0].outcomes, slo)
    again, _ = answered(problem, run, lost, policy=ReplanPolicy.LIGHT)
    assert np.array_equal(result.services[0].outcomes.e2e_s, again.services[0].outcomes.e2e_s)


def test_new_groups_are_away_while_they_load() -> None:
    problem = problem_of(rate=2.0)
    run = run_of_groups(problem, ALL_BUT_ONE_PREFILL)
    lost = [BoxLost(60.0, "a6000")]
    rates = LoadRates(disk_gb_s=2.0, download_gbps=16.0, start_s=10.0)
    result, replanner = answered(problem, run, lost, policy=ReplanPolicy.FULL, rates=rates)
    (full,) = (record for record in replanner.records if record.kind == "full" and record.asked_s == 68.0)
    assert 10.0 < full.reload_s <= 10.0 + model_shape("llama-30b").weight_bytes / 2e9
    assert full.in_force_s == 73.0
    assert full.ready_s == 73.0 + full.reload_s
    outcome = result.services[0]
    assert outcome.outcomes.completed.all()
    loading = {number for number, replica in enumerate(result.replicas) if replica.id in full.loading and number > 3}
    arrival = outcome.outcomes.trace.arrival_s
    first = arrival + outcome.outcomes.ttft_s
    served = np.isin(outcome.decode, list(loading)) & np.isin(outcome.prefill, list(loading)) & (outcome.replays == 0)
    assert served.any()
    assert first[served].min() > full.ready_s
    _, fixed = answered(problem, run, lost, policy=ReplanPolicy.FULL, reload_s=33.0)
    assert {record.reload_s for record in fixed.records if record.loading} == {33.0}
    _, restarted = answered(problem, run, lost, policy=ReplanPolicy.FULL, keep_loaded=False)
    (all_of_them,) = (record for record in restarted.records if record.kind == "full")
    assert all_of_them.loading >= full.loading


def test_the_best_answer_is_light_at_once_and_full_where_it_pays() -> None:
    problem = problem_of(rate=2.0)
    run = run_of_groups(problem, ALL_BUT_ONE_PREFILL)
    lost = [BoxLost(60.0, "a6000")]
    _, patient = answered(problem, run, lost, policy=ReplanPolicy.BEST, payback_s=1e6)
    light, full = (record for record in patient.records if record.asked_s == 68.0)
    assert (light.kind, full.kind) == ("light", "full")
    assert light.in_force_s < full.in_force_s
    assert light.after < full.after
    _, hasty = answered(problem, run, lost, policy=ReplanPolicy.BEST, payback_s=0.0)
    assert {record.kind for record in hasty.records} == {"light"}


def test_a_box_that_joins_takes_part() -> None:
    problem = problem_of(rate=2.0)
    run = run_of_groups(problem, {"a6000": D, "a40": P})
    result, replanner = answered(problem, run, [BoxJoined(60.0, "3090ti")], policy=ReplanPolicy.LIGHT)
    joined = next(record for record in replanner.records if "3090ti has joined" in record.why)
    assert joined.asked_s == 60.0
    assert "3090ti" in {replica.id for replica in result.replicas}
    assert result.services[0].outcomes.completed.all()


def test_traffic_that_shifts_is_noticed_and_planned_with() -> None:
    problem = problem_of(rate=1.0, workload="coding")
    run = run_of_groups(problem, {"a6000": P, "a40": P, "a5000": P, "3090ti": D}, seconds=150.0)
    later = azure("conversation").lengths
    shifted = draw(later, rate=3.0, rng=np.random.default_rng(6), seconds=250.0)
    run = replace(run, trace=chain_traces([(0.0, run.trace), (150.0, shifted)]))
    calm, _ = answered(problem, run, [], policy=ReplanPolicy.NONE)
    result, replanner = answered(problem, run, [], policy=ReplanPolicy.LIGHT)
    flipped = [record for record in replanner.records if record.flips and record.asked_s > 150.0]
    assert flipped
    assert "traffic of s" in flipped[0].why[0]
    slo = problem.services[0].slo
    assert attainment(result.services[0].outcomes, slo) > attainment(calm.services[0].outcomes, slo)


def test_a_link_that_degrades_is_planned_with() -> None:
    problem = problem_of(rate=1.0)
    run = run_of_groups(problem, {"a6000": D, "a40": P, "a5000": P, "3090ti": D})
    names = [box.id for box in problem.cluster.boxes]
    ends = tuple((one, two) for one in names for two in names if "a6000" in (one, two) and one != two)
    result, replanner = answered(problem, run, [LinksChanged(60.0, ends, 0.01)], policy=ReplanPolicy.LIGHT)
    told = [record for record in replanner.records if any(line.startswith("0.01 Gb/s") for line in record.why)]
    assert told[0].asked_s >= 62.0
    assert result.services[0].outcomes.completed.all()


def test_nothing_is_planned_where_no_box_is_left() -> None:
    problem = problem_of()
    run = run_of_groups(problem, {"a6000": D, "a40": P}, seconds=30.0)
    changes = [BoxLost(10.0, box.id) for box in problem.cluster.boxes]
    result, replanner = answered(problem, run, changes, policy=ReplanPolicy.BEST)
    assert [record.kept for record in replanner.records] == ["no box is left"]
    assert not result.services[0].outcomes.completed.all()


@pytest.mark.parametrize("name", ["light_s", "full_s", "reload_s", "payback_s"])
def test_times_that_cannot_be_are_refused(name: str) -> None:
    wrong: dict[str, Any] = {name: -1.0}
    with pytest.raises(WorldError, match=f"{name} is -1.0; it must not be negative"):
        ReplanSettings(**wrong)
