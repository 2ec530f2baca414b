"""New plans for replicas that run: what stays where it is, what loads, and by whose rules."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator import BoxView, LinkView, Plan
from p2pserve.coordinator.capacity import KvCodec
from p2pserve.coordinator.costs.gpus import GpuSpec, Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.demand import Demand
from p2pserve.coordinator.network_plan import plan_network
from p2pserve.coordinator.plan import Pairing, Phase, Replica, Stage
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.cluster_file import packaged_cluster
from p2pserve.coordinator.planning.model.errors import NoPlan
from p2pserve.coordinator.planning.model.problem import Group, Problem, Slice
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload
from p2pserve.coordinator.planning.rescheduling import (
    Rescheduling,
    pays_reload,
    place_replicas,
    reschedule_groups,
    reschedule_phases,
    without_boxes,
)
from p2pserve.coordinator.planning.upper.search_space import make_solution
from p2pserve.coordinator.planning.upper.settings import SearchSettings

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
LENGTHS = np.array([200, 400, 900, 1800]), np.array([300, 200, 150, 100])
FEW = SearchSettings(steps=40)
Slices = tuple[tuple[str, int], ...]


def problem_of(cluster: Cluster, rate: float = 1.0) -> Problem:
    workload = Workload(name="w", prompts=LENGTHS[0], outputs=LENGTHS[1], rate=rate)
    slo = Slo(ttft_s=4.0, tpot_s=0.15, e2e_s=60.0)
    return Problem(
        cluster=cluster,
        services=(Service(name="s", model=model_shape("llama-30b"), workload=workload, slo=slo),),
        pinned={},
    )


def cloud(rate: float = 1.0) -> Problem:
    return problem_of(packaged_cluster("thunderserve-cloud-16", Specs.MEASURED), rate)


def run_plan(problem: Problem, phases: Mapping[Slices, tuple[Phase, ...]]) -> Plan:
    """A plan for groups of so many GPUs of boxes, one for each phase named."""
    solution = make_solution(
        Group(tuple(sorted(Slice(problem.cluster.index(box), gpus) for box, gpus in slices)), phase)
        for slices, several in phases.items()
        for phase in several
    )
    return LowerLevel(problem).propose(solution, epoch=1, version=4)[0].plan


HALVES: Mapping[Slices, tuple[Phase, ...]] = {
    (("a6000", 2),): (D, D),
    (("a40", 2),): (P, P),
    (("a5000", 4),): (D,),
    (("3090ti", 4),): (D,),
}


def test_a_replica_takes_the_phase_that_its_box_is_pinned_to() -> None:
    problem = cloud()
    plan = run_plan(problem, HALVES)
    kept = reschedule_phases(problem, [plan]).plans[0]
    pinned = reschedule_phases(replace(problem, pinned={"a5000": P}), [plan]).plans[0]
    (moved,) = (replica for replica in plan.replicas if "a5000" in replica.peers)
    assert kept.phase_of("a5000") is D
    assert pinned.phase_of("a5000") is P
    assert {each.id for each in pinned.replicas} == {each.id for each in plan.replicas}, "nothing is loaded"
    assert moved.id in {pair.prefill for pair in pinned.pairings}


def placed(plan: Plan) -> dict[str, tuple[Stage, ...]]:
    return {replica.id: replica.stages for replica in plan.replicas}


def test_new_phases_leave_every_replica_on_its_gpus_under_its_id() -> None:
    problem = cloud()
    running = run_plan(problem, HALVES)
    less = without_boxes(problem, {"a6000"})
    found = reschedule_phases(less, [running])
    (plan,) = found.plans
    left = {name: stages for name, stages in placed(running).items() if not name.startswith("a6000")}
    assert placed(plan) == left
    assert plan.number == (1, 5)
    assert found.loading == (frozenset(),)
    assert found.after == found.meanwhile >= found.before
    assert sum(pair.weight for pair in plan.pairings) == pytest.approx(1.0)


def test_phases_flip_where_one_is_left_without_replicas() -> None:
    problem = cloud()
    running = run_plan(problem, {(("a6000", 4),): (D,), (("a40", 2),): (P, P), (("a5000", 4),): (P,)})
    found = reschedule_phases(without_boxes(problem, {"a6000"}), [running])
    assert found.before == 0.0 < found.after
    assert found.flips
    assert any(replica.decodes for replica in found.plans[0].replicas)
    with pytest.raises(NoPlan, match="none of the running replicas has all of its boxes left"):
        reschedule_phases(without_boxes(problem, {"a6000", "a40", "a5000"}), [running])
    with pytest.raises(NoPlan, match="no box is left"):
        without_boxes(problem, {box.id for box in problem.cluster.boxes})


@pytest.mark.parametrize("phases", [(P, D), (D, P)])
def test_replicas_that_are_alike_are_not_exchanged(phases: tuple[Phase, Phase]) -> None:
    """The planner knows groups of GPUs, not which of them runs where."""
    problem = cloud()
    running = run_plan(problem, {(("a6000", 2),): (P, D), (("a40", 4),): (D,)})
    by_id = dict(zip(("a6000/0", "a6000/2"), phases, strict=True)) | {"a40": D}
    reader, writer = (next(name for name, phase in by_id.items() if phase is wanted) for wanted in (P, D))
    running = msgspec.structs.replace(
        running,
        replicas=tuple(msgspec.structs.replace(one, phase=by_id[one.id]) for one in running.replicas),
        pairings=(Pairing(prefill=reader, decode=writer, weight=1.0),),
    )
    found = reschedule_phases(problem, [running])
    assert found.flips == ()
    assert {one.id: one.phase for one in found.plans[0].replicas} == by_id


def test_a_box_that_has_joined_is_a_replica() -> None:
    problem = cloud()
    running = run_plan(problem, {(("a6000", 4),): (D,), (("a40", 4),): (P,)})
    found = reschedule_phases(problem, [running], joined={"3090ti"})
    (plan,) = found.plans
    (new,) = (replica for replica in plan.replicas if replica.head == "3090ti")
    assert {gpu for _, gpu in new.gpus} == {0, 1, 2, 3}
    assert set(placed(running).items()) < set(placed(plan).items())
    again = reschedule_phases(problem, [plan], joined={"3090ti"})
    assert placed(again.plans[0]) == placed(plan), "it is in use already"


def test_new_groups_keep_what_they_agree_with_and_share_no_gpu() -> None:
    problem = cloud(rate=3.0)
    running = run_plan(problem, HALVES)

    def searched(plan: Plan, *, keep_loaded: bool = True) -> Rescheduling:
        rng = np.random.default_rng(0)
        return reschedule_groups(problem, [plan], rng=rng, settings=FEW, keep_loaded=keep_loaded)

    first = searched(running)
    (plan,), (loading,) = first.plans, first.loading
    kept = [replica for replica in plan.replicas if replica.id not in loading]
    assert kept
    assert loading
    assert all(placed(running)[replica.id] == replica.stages for replica in kept)
    gpus = [gpu for replica in plan.replicas for gpu in replica.gpus]
    assert len(gpus) == len(set(gpus))
    assert first.meanwhile < first.before < first.after
    again = searched(plan)
    assert (again.plans[0].replicas, again.loading) == (plan.replicas, (frozenset(),)), "it runs by now"
    assert again.meanwhile == pytest.approx(again.after)
    anew = searched(plan, keep_loaded=False)
    assert anew.loading == (frozenset(replica.id for replica in anew.plans[0].replicas),)
    assert anew.meanwhile == 0.0


def test_the_running_network_decides_the_same() -> None:
    """Boxes that are one replica each, as in the running network: same phases by `plan_network` and by this."""
    names, model = ["a", "b", "c", "d"], model_shape("llama-13b")
    cards = {"a": "A40", "b": "A40", "c": "RTX A6000", "d": "RTX A6000"}
    demand = Demand(requests_s=3.0, arrival_cv=1.0, lengths=((900, 200), (1800, 100), (300, 400), (600, 300)))
    links = [LinkView(source=x, target=y, rtt_s=1e-3, gbps=20.0) for x in names for y in names if x != y]
    boxes = [
        BoxView(
            peer=name, service="s", model=model, fits=model.layers, ready=True, draining=False, compute_tflops=1.0,
            memory_gbps=1.0, memory_gib=96.0, kv_tokens=50_000, tp=2, card=cards[name], specs=Specs.MEASURED,
        )
        for name in names
    ]  # fmt: skip
    codec = KvCodec("kv4", 4.5)

    def live(previous: Plan | None, peers: str) -> Plan:
        made = plan_network(
            [box for box in boxes if box.peer in peers],
            [link for link in links if {link.source, link.target} <= set(peers)],
            [demand],
            service="s", epoch=1, version=0 if previous is None else previous.version + 1, previous=previous,
            codec=codec,
        )  # fmt: skip
        assert made is not None
        return made

    running = live(None, "abcd")
    after = live(running, "abc")
    gpus = {name: _card(name, cards) for name in names}
    cluster = Cluster(
        boxes=tuple(Box(id=name, gpu=gpus[name], gpus=2, atomic=True) for name in names),
        gbps=np.full((4, 4), 20.0), rtt_s=np.full((4, 4), 1e-3), usd_per_gb=np.zeros((4, 4)),
    )  # fmt: skip
    prompts, outputs = (np.array(column) for column in zip(*demand.lengths, strict=True))
    workload = Workload(name="w", prompts=prompts, outputs=outputs, rate=demand.requests_s)
    slo = Slo(ttft_s=after.deadlines.ttft_s, tpot_s=after.deadlines.tpot_s, e2e_s=after.deadlines.e2e_s)
    service = Service(name="s", model=model, workload=workload, slo=slo)
    problem = without_boxes(Problem(cluster=cluster, services=(service,), pinned={}), {"d"})
    found = reschedule_phases(problem, [running])
    assert {one.id: one.phase for one in found.plans[0].replicas} == {one.id: one.phase for one in after.replicas}
    assert placed(found.plans[0]) == placed(after)


def _card(name: str, cards: dict[str, str]) -> GpuSpec:
    return gpu_table().find(cards[name], Specs.MEASURED)


@pytest.mark.parametrize(
    ("full", "meanwhile", "reload_s", "pays"),
    [
        (0.9, 0.0, 0.0, True),
        (0.9, 0.4, 100.0, True),  # gains 0.2 for 500 s, loses 0.3 for 100 s
        (0.9, 0.0, 200.0, False),  # gains 0.2 for 400 s, loses 0.7 for 200 s
        (0.71, 0.7, 1.0, False),  # less than estimates are off by
        (0.9, 0.7, 600.0, False),  # never ready in time
    ],
)
def test_new_groups_have_to_pay_for_what_is_away_meanwhile(
    full: float, meanwhile: float, reload_s: float, pays: bool
) -> None:
    def found(after: float, meanwhile: float) -> Rescheduling:
        return Rescheduling(plans=(), loading=(), before=0.0, meanwhile=meanwhile, after=after)

    assert pays_reload(found(0.7, 0.7), found(full, meanwhile), reload_s=reload_s, payback_s=600.0) is pays


def on_gpus(name: str, first: int, count: int) -> Replica:
    return Replica(
        id=name, phase=M, stages=(Stage(peer="a100", tp=count, first_layer=0, last_layer=60, first_gpu=first),)
    )  # fmt: skip


def plan_with(*replicas: Replica) -> Plan:
    pairings = tuple(Pairing(prefill=one.id, decode=one.id, weight=1.0 / len(replicas)) for one in replicas)
    return Plan(epoch=1, version=1, service="s", replicas=replicas, pairings=pairings, codec="kv4", why=())


@pytest.mark.parametrize(
    ("runs_on", "loading", "rows"),
    [
        (6, {"a100/0"}, {"old": 6, "a100/0": 0}),
        (0, {"a100/2"}, {"old": 0, "a100/2": 2}),
        # GPUs 0 to 2 and 5 to 7 are no four in a row
        (3, {"a100/0", "a100/4"}, {"a100/0": 0, "a100/4": 4}),
    ],
)
def test_replicas_that_run_stay_where_what_they_leave_is_in_a_row(
    runs_on: int, loading: set[str], rows: dict[str, int]
) -> None:
    cluster = packaged_cluster("thunderserve-8xa100", Specs.MEASURED)
    wanted = plan_with(on_gpus("x", 0, 2), on_gpus("y", 2, 4))
    (plan,), (found,) = place_replicas(cluster, [wanted], [plan_with(on_gpus("old", runs_on, 2))])
    assert found == loading
    assert {one.id: one.stages[0].first_gpu for one in plan.replicas} == rows
    assert {pair.prefill for pair in plan.pairings} == set(rows)


def test_pins_of_boxes_that_are_gone_are_gone() -> None:
    problem = replace(cloud(), pinned={"a40": P, "a6000": D}, excluded=frozenset({"3090ti"}))
    less = without_boxes(problem, {"a40", "3090ti"})
    assert (less.pinned, less.excluded) == ({"a6000": D}, frozenset())
    assert [box.id for box in less.cluster.boxes] == ["a6000", "a5000"]
