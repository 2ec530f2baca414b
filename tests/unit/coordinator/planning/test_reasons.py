"""Why a plan is as it is, on a cluster whose answers are known."""

from functools import cache

import numpy as np
import pytest

from p2pserve.coordinator import Phase
from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.model_shape import MODELS
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.cluster_file import packaged_cluster
from p2pserve.coordinator.planning.model.problem import Group, Problem, Slice
from p2pserve.coordinator.planning.model.slo import parse_slo
from p2pserve.coordinator.planning.model.workload import Service, Workload
from p2pserve.coordinator.planning.reasons import ReplicaReasons, Resource, explain_replicas

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED


def problem(pinned: dict[str, Phase] | None = None) -> Problem:
    """Four A40 and four 3090 Ti in two boxes; prompts of 1,024 tokens, answers of 64."""
    model = MODELS["llama-30b"]
    lengths = np.array([1024]), np.array([64])
    workload = Workload(name="test", prompts=lengths[0], outputs=lengths[1], rate=1.0)
    slo = parse_slo("10x", model, workload)
    cluster = packaged_cluster("thunderserve-h-40gbps", Specs.MEASURED)
    service = Service(name="llama", model=model, workload=workload, slo=slo, codec="kv4", kv_bits=4.5)
    return Problem(cluster=cluster, services=(service,), pinned=pinned or {})


@cache
def reasons(is_pinned: bool = False) -> dict[Phase, ReplicaReasons]:
    """Of a replica that prefills on the first box and one that decodes on the second, by phase."""
    boxes = [box.id for box in problem().cluster.boxes]
    found = problem({boxes[0]: P} if is_pinned else None)
    level = LowerLevel(found)
    solution = tuple(sorted((Group((Slice(1, 4),), D), Group((Slice(0, 4),), P))))
    proposals = level.propose(solution, epoch=0, version=1)
    (those,) = explain_replicas(found, level, solution, proposals, {solution: level.score(solution)})
    phases = {replica.id: replica.phase for replica in proposals[0].plan.replicas}
    return {phases[each.id]: each for each in those}


def test_prefill_is_limited_by_compute_and_decode_by_memory() -> None:
    prefill, decode = reasons()[P], reasons()[D]
    assert prefill.limit == Resource.COMPUTE.value
    assert 0.45 < prefill.halved[Resource.COMPUTE] < 0.8
    assert decode.limit in {Resource.BANDWIDTH.value, "memory"}
    assert min(decode.halved, key=lambda each: decode.halved[each]) is Resource.BANDWIDTH
    assert all(0.45 < part <= 1.0 + 1e-9 for each in (prefill, decode) for part in each.halved.values())


def test_the_other_phases_are_worth_what_the_evaluator_says() -> None:
    level = LowerLevel(problem())
    for phase, replica in reasons().items():
        box, other = (0, 1) if phase is P else (1, 0)
        assert {each.choice for each in replica.alternatives} == {each.value for each in Phase} - {phase.value}
        for each in replica.alternatives:
            rest = Group((Slice(other, 4),), D if phase is P else P)
            score = level.score(tuple(sorted((Group((Slice(box, 4),), Phase(each.choice)), rest))))
            assert (each.attainment, each.capacity) == (score.attainment, score.capacity)
        assert list(replica.alternatives) == sorted(replica.alternatives, key=lambda each: -each.gain)


def test_kv_takes_the_link_between_the_two() -> None:
    """1,024 tokens of 60 layers, keys and values of 6,656 elements in 4.5 bits: 3.68 Gb for each request."""
    link = reasons()[P].kv_link
    assert link is not None
    assert link == reasons()[D].kv_link
    assert link.used_gbps == pytest.approx(1024 * 60 * 2 * 6656 * 4.5e-9, rel=0.02)
    assert link.used_gbps < link.planned_gbps < 40.0


def test_the_least_gpus_hold_weights_and_the_longest_request() -> None:
    replica = reasons()[D]
    assert replica.weights_gib == pytest.approx(60.6, abs=0.1)
    assert replica.least_cards * 24 * 0.9 > replica.weights_gib > (replica.least_cards - 1) * 24 * 0.9 - 3.0
    assert replica.room_gib == pytest.approx(4 * 24 * 0.9)
    assert replica.full_batch is not None


def test_a_pinned_box_has_no_other_phase() -> None:
    assert reasons(is_pinned=True)[P].is_pinned
    assert reasons(is_pinned=True)[P].alternatives == ()
    assert not reasons(is_pinned=True)[D].is_pinned
    assert reasons(is_pinned=True)[D].alternatives


def test_other_groups_are_those_that_a_search_has_looked_at() -> None:
    assert all(each.other_groups is None for each in reasons().values())
    found = problem()
    level = LowerLevel(found)
    solution = tuple(sorted((Group((Slice(0, 4),), P), Group((Slice(1, 4),), D))))
    whole = (Group((Slice(0, 4), Slice(1, 4)), M),)
    same_groups = tuple(sorted((Group((Slice(0, 4),), M), Group((Slice(1, 4),), M))))
    evaluated = {one: level.score(one) for one in (solution, same_groups, whole)}
    (those,) = explain_replicas(found, level, solution, level.propose(solution, epoch=0, version=1), evaluated)
    for each in those:
        assert each.other_groups is not None
        assert each.other_groups.choice == "mixed on 4 of a40 + 4 of 3090ti"
        assert each.other_groups.attainment == evaluated[whole].attainment
