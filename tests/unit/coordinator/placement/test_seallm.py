"""Algorithm 1: groups, merged ones, copies until nothing fits, every service placed."""

import pytest

from p2pserve.coordinator.placement.replay import PeriodReplay
from p2pserve.coordinator.placement.seallm import partition_gpus, place_new, place_seallm
from p2pserve.coordinator.placement.values import GpuGroup, PlacementError, find_fault

from .placed_services import A6000, box, problem


def test_all_groups_have_one_degree_where_every_service_fits() -> None:
    both = problem(boxes=[box(0, 4), box(1, 3)])
    assert partition_gpus(both, 2, 1) == (GpuGroup(0, 2), GpuGroup(0, 2), GpuGroup(1, 2))
    assert partition_gpus(both, 4, 2) == (GpuGroup(0, 4),)
    assert partition_gpus(both, 4, 1) is None  # one group for two services


def test_small_groups_are_merged_until_all_services_can_be_placed() -> None:
    mixed = problem(["llama2-70b", "llama2-7b"], [1.0, 1.0])
    assert partition_gpus(mixed, 1, 1) == (GpuGroup(0, 1), GpuGroup(0, 1), GpuGroup(0, 2))
    large = problem(["llama2-70b", "llama2-70b"], [1.0, 1.0])
    assert partition_gpus(large, 1, 2) == (GpuGroup(0, 2), GpuGroup(0, 2))


def test_every_service_is_placed_though_another_is_far_needier() -> None:
    uneven = problem(["llama2-13b", "llama2-7b", "opt-6.7b"], [60.0, 0.3, 0.3])
    groups = place_seallm(PeriodReplay(uneven))
    assert {each for group in groups for each in group.services} == {0, 1, 2}
    assert find_fault(uneven, groups) == ""
    assert sum(0 in group.services for group in groups) > 1


def test_at_most_two_services_share_an_engine() -> None:
    many = problem(["llama2-7b"] * 6, [1.0] * 6)
    groups = place_seallm(PeriodReplay(many))
    assert max(len(group.services) for group in groups) == 2
    assert {each for group in groups for each in group.services} == set(range(6))


def test_services_without_room_together_are_refused() -> None:
    with pytest.raises(PlacementError, match="s0, s1, s2, s3, s4 have no room together on 2 GPUs"):
        place_seallm(PeriodReplay(problem(["llama2-7b"] * 5, [1.0] * 5, boxes=[box(gpus=2)])))


def test_unequal_boxes_take_what_they_have_room_for() -> None:
    unequal = problem(["llama2-70b", "opt-6.7b"], [1.0, 5.0], boxes=[box(0, 2), box(1, 2, A6000)])
    groups = place_seallm(PeriodReplay(unequal))
    assert find_fault(unequal, groups) == ""
    assert any(group.box == 0 and 0 in group.services for group in groups)


def test_disks_bound_what_a_box_hosts() -> None:
    narrow = problem(["llama2-7b"] * 2, [1.0, 1.0], boxes=[box(0, 2, disk_bytes=20e9), box(1, 2, disk_bytes=20e9)])
    groups = place_seallm(PeriodReplay(narrow))
    assert find_fault(narrow, groups) == ""
    assert {group.services for group in groups} == {(0,), (1,)}


def test_a_new_service_gets_the_fewest_gpus_for_itself() -> None:
    some = problem(["llama2-7b", "llama2-7b", "llama2-70b"], [5.0, 1.0, 0.0], boxes=[box(0, 4), box(1, 4)])
    placed = (GpuGroup(0, 4, (0, 1)), GpuGroup(1, 1, (1,)))
    assert place_new(some, placed, 2) == (*placed, GpuGroup(1, 2, (2,)))
    full = (GpuGroup(0, 2, (0,)), GpuGroup(0, 2, (1,)), GpuGroup(1, 2, (0,)), GpuGroup(1, 2, (1,)))
    # One of those of the quieter service, which has another one.
    assert place_new(some, full, 2) == (GpuGroup(0, 2, (0,)), GpuGroup(0, 2, (2,)), GpuGroup(1, 2, (0,)), full[3])
    with pytest.raises(PlacementError, match="s2 has no room beside the others on 8 GPUs"):
        place_new(some, (GpuGroup(0, 4, (0,)), GpuGroup(1, 4, (1,))), 2)
