"""Boxes that share replicas: which those are, what they earn, and how they are cut anew."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.lower.upper_bound import PREFILL_SHARES, TOTAL_PRICES, bound_components
from p2pserve.coordinator.planning.model.cluster_file import packaged_cluster, parse_cluster
from p2pserve.coordinator.planning.model.problem import (
    Group,
    Problem,
    Slice,
    Solution,
    connected_boxes,
    split_components,
)
from p2pserve.coordinator.planning.model.slo import parse_slo
from p2pserve.coordinator.planning.model.workload import Service, Workload
from p2pserve.coordinator.planning.upper.packing import Packing
from p2pserve.coordinator.planning.upper.search_space import SearchSpace

BOXES = st.sets(st.integers(0, 9), min_size=1, max_size=4)
RATES = st.floats(0.0, 10.0)


def service(name: str, rate: float) -> Service:
    rng = np.random.default_rng(0)
    prompts, outputs = (1 + rng.geometric(1.0 / mean, 400) for mean in (1000, 100))
    workload = Workload(name="test", prompts=prompts, outputs=outputs, rate=rate)
    shape = model_shape(name)
    return Service(name=name, model=shape, workload=workload, slo=parse_slo("5x", shape, workload))


def boxes_of(groups: Solution) -> set[int]:
    return {box for group in groups for box, _ in group.slices}


@given(st.lists(BOXES, max_size=8))
def test_components_share_no_box_and_cannot_be_parted(parts: list[set[int]]) -> None:
    groups = [Group(tuple(Slice(box, 1) for box in sorted(boxes)), Phase.MIXED) for boxes in parts]
    found = split_components(groups)
    assert sorted(group for component in found for group in component) == sorted(groups)
    for component in found:
        inside = boxes_of(component)
        assert all(inside.isdisjoint(boxes_of(other)) for other in found if other is not component)
        assert all(connected_boxes(tuple(groups), [box]) == inside for box in inside)


def test_a_box_that_is_in_no_replica_is_closed_by_itself() -> None:
    assert connected_boxes((Group((Slice(0, 1), Slice(1, 1)), Phase.MIXED),), [2]) == {2}


@given(RATES, RATES, RATES, RATES)
def test_links_bound_the_objective(prefill_rate: float, decode_rate: float, out: float, into: float) -> None:
    """For replicas that only prefill or only decode the most can be told in closed form."""
    prices = TOTAL_PRICES[:, None] * PREFILL_SHARES, TOTAL_PRICES[:, None] * (1.0 - PREFILL_SHARES)
    gained = prices[0] * prefill_rate + prices[1] * decode_rate
    found = bound_components(gained[None], np.array([out]), np.array([into]))[0]
    true = prices[0] * min(prefill_rate, decode_rate + out) + prices[1] * min(decode_rate, prefill_rate + into)
    # of all prices of its own one is 0 or 1, which is the best link price there is
    assert found == pytest.approx(true, abs=1e-9)


def test_what_crosses_no_link_has_no_price() -> None:
    """Half a box prefills for the other half, which decodes: one component. Apart they need the link."""
    cluster = parse_cluster(
        b'{"name": "thin", "boxes": [{"id": "a", "gpu": "A40", "gpus": 2}, {"id": "b", "gpu": "A40", "gpus": 2}],'
        b' "default": {"gbps": 0.01}}',
        Specs.MEASURED,
    )
    lower = LowerLevel(Problem(cluster=cluster, services=(service("llama-7b", 3.0),), pinned={}))

    def solution(*parts: tuple[int, Phase]) -> Solution:
        return tuple(sorted(Group((Slice(box, 1),), phase) for box, phase in parts))

    within = solution((0, Phase.PREFILL), (0, Phase.DECODE), (1, Phase.PREFILL), (1, Phase.DECODE))
    across = solution((0, Phase.PREFILL), (0, Phase.PREFILL), (1, Phase.DECODE), (1, Phase.DECODE))
    assert len(split_components(within)) == len(split_components(across)) == 2
    assert lower.upper_bound(within) > 2.0 * lower.upper_bound(across)
    assert lower.upper_bound(across) >= lower.score(across).objective


def test_boxes_are_cut_anew_beside_the_others() -> None:
    cluster = packaged_cluster("thunderserve-cloud-24", Specs.MEASURED)
    services = (service("llama-13b", 2.0), service("llama-30b", 1.0))
    pin = cluster.boxes[0].id
    space = SearchSpace.of(
        problem := Problem(cluster=cluster, services=services, pinned={pin: Phase.DECODE}), LowerLevel(problem)
    )
    packing, rng = Packing(space, 4), np.random.default_rng(0)
    here = packing.start(rng)
    changed = 0
    for _ in range(100):
        there = packing.recut(here, rng)
        if there is None or there == here:
            continue
        changed += 1
        new = boxes_of(tuple(set(there) ^ set(here)))
        assert len(new) <= space.settings.recut_boxes
        assert [group for group in here if not boxes_of((group,)) & new] == [
            group for group in there if not boxes_of((group,)) & new
        ]
        assert all(space.can_hold(group.slices, group.service) for group in there)
        assert all(group.phase in space.phases_of(group.slices) for group in there)
        assert all(count >= 0 for count in space.idle_gpus(there).values())
        here = there
    assert changed > 20
