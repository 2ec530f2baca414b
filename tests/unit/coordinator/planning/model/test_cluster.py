"""Boxes and the links between them: figures that can be, and what is left when boxes are gone."""

from math import inf, nan
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.cluster import Box, Cluster, ClusterError
from p2pserve.coordinator.planning.model.cluster_file import card_link_gbps, parse_cluster
from p2pserve.coordinator.planning.model.problem import Group, Slice, connected_boxes, split_components

A40 = gpu_table().find("A40")


def box(name: str, **more: Any) -> Box:
    return Box(**{"id": name, "gpu": A40, "gpus": 2, "usd_per_hour": 1.5, **more})


def cluster(*boxes: Box, **more: Any) -> Cluster:
    size = len(boxes)
    return Cluster(boxes=boxes, **{field: np.ones((size, size)) for field in ("gbps", "rtt_s", "usd_per_gb")} | more)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"id": ""}, "box.id is empty"),
        ({"gpus": 0}, "box b: gpus is 0; it must be at least 1"),
        ({"usd_per_hour": -0.1}, "box b: usd_per_hour is -0.1"),
        ({"usd_per_hour": inf}, "box b: usd_per_hour is inf"),
        ({"gpu_link_gbps": 0.0}, "box b: gpu_link_gbps is 0.0; it must be above 0"),
        ({"gpu_link_gbps": nan}, "box b: gpu_link_gbps is nan"),
    ],
)
def test_a_box_that_cannot_be_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        box("b", **fields)


def test_a_box_may_cost_nothing_and_have_one_card() -> None:
    assert box("b", gpus=1, usd_per_hour=0.0).gpus == 1


def test_cards_and_prices_add_up() -> None:
    both = cluster(box("a"), box("b", gpus=5, usd_per_hour=0.25))
    assert (both.gpus, both.usd_per_hour) == (7, 1.75)
    assert (both.index("a"), both.index("b")) == (0, 1)
    with pytest.raises(ClusterError, match="box c is not in the cluster"):
        both.index("c")


def test_there_are_boxes_and_each_has_a_name_of_its_own() -> None:
    with pytest.raises(ClusterError, match="no boxes"):
        cluster()
    with pytest.raises(ClusterError, match="box a is there twice"):
        cluster(box("a"), box("b"), box("a"))


@pytest.mark.parametrize("field", ["gbps", "rtt_s", "usd_per_gb"])
@pytest.mark.parametrize("value", [-1.0, inf, nan])
def test_a_figure_that_cannot_be_names_its_link(field: str, value: float) -> None:
    matrix = np.ones((3, 3))
    matrix[2, 0] = value
    boxes = box("a"), box("b"), box("c")
    with pytest.raises(ClusterError, match=rf"cluster\.{field} has a figure of {value}: c -> a"):
        cluster(*boxes, **{field: matrix})
    np.fill_diagonal(matrix, value)
    matrix[2, 0] = 0.0
    assert cluster(*boxes, **{field: matrix}).gpus == 6  # a box's figure to itself is not looked at


def test_boxes_that_are_gone_leave_the_links_of_the_others() -> None:
    matrix = np.arange(9.0).reshape(3, 3)
    left = cluster(box("a"), box("b"), box("c"), gbps=matrix).without(frozenset({"b"}))
    assert [one.id for one in left.boxes] == ["a", "c"]
    assert left.gbps.tolist() == [[0.0, 2.0], [6.0, 8.0]]


def test_cards_reach_each_other_over_nvlink_where_their_form_has_it() -> None:
    wired, plain = gpu_table().find("A100-SXM4-80GB"), gpu_table().find("L4")
    assert card_link_gbps(wired) == pytest.approx(wired.nvlink_gbps * 8 * 0.4)
    assert card_link_gbps(wired, nvlink=False) == 150.0  # PCIe 4
    assert card_link_gbps(plain) == 150.0
    assert card_link_gbps(A40) == 150.0  # there are bridges for it, which have to be asked for
    assert card_link_gbps(A40, nvlink=True) == pytest.approx(A40.nvlink_gbps * 8 * 0.4)
    with pytest.raises(ClusterError, match="nvlink is true, and L4-24GB has none"):
        card_link_gbps(plain, nvlink=True)


def test_a_link_between_boxes_goes_before_one_between_sites_wherever_it_stands() -> None:
    found = parse_cluster(
        b'{"name": "t", "boxes": [{"id": "a", "gpu": "A40", "site": "s"}, {"id": "b", "gpu": "A40", "site": "t"},'
        b'{"id": "c", "gpu": "A40", "site": "t"}], "links": [{"a": "a", "b": "b", "gbps": 5, "usd_per_gb": 0.5},'
        b'{"a": "s", "b": "t", "gbps": 1, "rtt_ms": 20}, {"a": "t", "b": "t", "gbps": 7}]}'
    )
    assert [found.gbps[pair] for pair in ((0, 1), (1, 0), (0, 2), (1, 2))] == [5.0, 5.0, 1.0, 7.0]
    assert [found.rtt_s[pair] for pair in ((0, 1), (0, 2))] == pytest.approx([0.5e-3, 20e-3])
    assert (found.usd_per_gb[1, 0], found.usd_per_gb[0, 2], found.gbps[0, 0]) == (0.5, 0.0, 0.0)


def test_boxes_may_reach_each_other_over_others() -> None:
    text = (
        '{"name": "t", "boxes": [{"id": "x", "gpu": "A40", "count": 3}], "links": [{"a": "x-0", "b": "x-1", '
        '"gbps": 1}, {"a": "x-1", "b": "x-2", "gbps": 1%s}]}'
    )
    assert parse_cluster(text % "").gbps[0, 2] == 0.0
    with pytest.raises(ClusterError, match="box x-2 has no links both ways to the boxes around x-0"):
        parse_cluster(text % ', "one_way": true')


def groups(*boxes: tuple[int, ...]) -> list[Group]:
    return [Group(tuple(Slice(number, 1) for number in one), Phase.MIXED) for one in boxes]


def test_boxes_are_connected_by_replicas_however_many_lie_between() -> None:
    solution = groups((0, 1), (2, 3), (1, 2), (4,))
    assert connected_boxes(solution, [0]) == {0, 1, 2, 3}
    assert connected_boxes(solution, [4]) == {4}
    assert connected_boxes(solution, [7]) == {7}


def test_components_share_no_box() -> None:
    one, two, bridge, alone, again = groups((0, 1), (2, 3), (1, 2), (4,), (4,))
    assert split_components([one, two, alone]) == [(one,), (two,), (alone,)]
    assert split_components([alone, two, one, again, bridge]) == [(one, bridge, two), (alone, again)]
    assert split_components([]) == []
