"""Maps, matrices and lines of time: where things are, that they do not lie upon each other, and what they say."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from math import hypot
from typing import Any

import pytest
from msgspec.structs import replace

from p2pserve.node.dashboard.bands import EDGES, NAMES, band_of, describe
from p2pserve.node.dashboard.matrix import MAX_ENDS, draw_matrix
from p2pserve.node.dashboard.sections import DESKTOP, PHONE
from p2pserve.node.dashboard.timeline import MAX_BARS, WIDTH, draw_spark, draw_timeline
from p2pserve.node.dashboard.topology import MAX_BOXES, NetworkMap, Spot, draw_topology
from p2pserve.node.dashboard.view import View
from p2pserve.node.observing.values import RequestTrace, TraceSpan

from .networks import NOW, empty_view, network, view_of, with_nodes, without_links

LETTER = 8.0  # units that a letter of a label is wide, at most
LINE = 14.0


def label_box(spot: Spot) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a level label of two lines."""
    width = LETTER * max(len(spot.label), 0.86 * len(spot.detail))
    left = {"start": spot.label_x, "middle": spot.label_x - width / 2, "end": spot.label_x - width}[spot.anchor]
    return left, spot.label_y - LINE, left + width, spot.label_y + 18.0


def overlaps(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("boxes", [2, 3, 5, 8, 13, 24, 60])
def test_nothing_lies_upon_anything(boxes: int, size: tuple[int, int]) -> None:
    drawing = draw_topology(view_of(network(boxes)), *size)
    for one, other in combinations(drawing.spots, 2):
        assert hypot(one.x - other.x, one.y - other.y) > 2 * 9.0, f"{one.label} and {other.label}"
        if one.turn is None:
            assert not overlaps(label_box(one), label_box(other)), f"{one.label} and {other.label}"
    for spot in drawing.spots:
        assert 0 <= spot.x <= drawing.width
        assert 0 <= spot.y <= drawing.height
        if spot.turn is None:
            left, top, right, bottom = label_box(spot)
            assert left >= -2, spot
            assert right <= drawing.width + 2, spot
            assert top >= -2, spot
            assert bottom <= drawing.height + 2, spot


def test_boxes_of_a_site_stand_side_by_side() -> None:
    sites = [spot.detail for spot in draw_topology(view_of(network(8)), *DESKTOP).spots]
    assert len([None for one, other in pairwise(sites) if one != other]) == len(set(sites)) - 1


def test_every_link_is_one_curve() -> None:
    drawing = draw_topology(view_of(network(8)), *DESKTOP)
    assert len(drawing.curves) == 28
    assert all(re.fullmatch(r"M\d+ \d+Q\d+ \d+ \d+ \d+", curve.d) for curve in drawing.curves)
    planned = [curve for curve in drawing.curves if curve.planned]
    assert 1 <= len(planned) <= 5
    assert drawing.curves[-len(planned) :] == tuple(planned)  # over the others
    assert all(len(curve.tip.splitlines()) == 2 for curve in drawing.curves)


def test_kv_flows_where_it_does_and_which_way() -> None:
    showcase = network(2)
    one, other = showcase.peers
    for pair, flow in (((min(one, other), max(one, other)), 1), ((max(one, other), min(one, other)), -1)):
        (curve,) = draw_topology(view_of(showcase, flows={pair: 0.7}), *DESKTOP).curves
        assert curve.flow == flow
        assert "carries 0.7" in curve.tip
    assert draw_topology(view_of(showcase), *DESKTOP).curves[0].flow == 0


def test_one_box_is_a_small_drawing() -> None:
    drawing = draw_topology(view_of(network(1)), *DESKTOP)
    assert drawing.height < 200
    assert drawing.spots[0].anchor == "middle"
    assert drawing.curves == ()


def test_nothing_is_nothing() -> None:
    drawing = draw_topology(empty_view(), *DESKTOP)
    assert (drawing.spots, drawing.curves) == ((), ())


def test_many_boxes_are_sites_unless_asked_for() -> None:
    showcase = network(60)
    folded: NetworkMap = draw_topology(view_of(showcase), *DESKTOP)
    assert folded.is_folded
    assert sum(spot.boxes for spot in folded.spots) == 59  # one is dead
    assert all(sum(arc.length for arc in spot.arcs) == pytest.approx(100, abs=0.5) for spot in folded.spots)
    assert "in the middle of" in folded.curves[0].tip
    opened = draw_topology(view_of(showcase, {"sites": "open"}), *DESKTOP)
    assert len(opened.spots) == 59 > MAX_BOXES
    assert opened.is_crowded
    assert all(curve.planned for curve in opened.curves)
    one = draw_topology(view_of(showcase, {"sites": "open", "site": "us-east"}), *DESKTOP)
    assert {spot.detail for spot in one.spots} == {"us-east"}
    assert draw_topology(view_of(network(8), {"sites": "folded"}), *DESKTOP).is_folded


def test_a_box_without_a_place_or_a_part() -> None:
    drawing = draw_topology(with_nodes(view_of(network(3)), site="", phase="", running=None), *DESKTOP)
    assert {spot.detail for spot in drawing.spots} == {"no site"}
    assert "no engine runs" in drawing.spots[0].tip
    assert "no part in the plan" in drawing.spots[0].tip


def test_a_matrix_has_all_links() -> None:
    view = view_of(network(8))
    matrix = draw_matrix(view)
    assert len(matrix.ends) == len(matrix.rows) == 8
    assert matrix.has_numbers
    assert sum(count for _, count in matrix.sites) == 8
    cells = [cell for row in matrix.rows for cell in row]
    assert sum(cell.band is None for cell in cells) == 8  # a box has no link to itself
    row, column = (matrix.ends.index(view.label(peer)) for peer in (view.links[0].source, view.links[0].target))
    assert matrix.rows[row][column].band == band_of(view.links[0].gbps)


def test_what_is_not_known_or_cut_is_not_a_number() -> None:
    view = view_of(network(2))
    cut = View(snapshot=view.snapshot, links=(replace(view.links[0], reachable=False, reason="refused"),))
    cells = {cell.text: cell for row in draw_matrix(cut).rows for cell in row if cell.text}
    assert cells.keys() == {"×", "?"}
    assert cells["×"].band == -1
    assert "unreachable. refused" in cells["×"].tip
    assert "not known" in cells["?"].tip
    assert {cell.text for row in draw_matrix(without_links(view)).rows for cell in row} == {"", "?"}


def test_a_matrix_of_many_is_bounded() -> None:
    found = draw_matrix(view_of(network(60), {"sites": "open"}))
    assert not found.has_numbers
    assert not any(cell.tip for row in found.rows for cell in row)
    folded = draw_matrix(view_of(network(60)))
    assert len(folded.ends) == 6
    assert folded.rows[0][0].band is not None  # inside a site there are links, too
    huge = draw_matrix(with_nodes(view_of(network(150)), site="one"))
    assert len(huge.ends) == MAX_ENDS
    assert huge.left_out == 149 - MAX_ENDS


def test_every_bandwidth_is_in_one_band() -> None:
    assert [band_of(gbps) for gbps in (0.0, *EDGES, 1e6)] == [0, 1, 2, 3, 4, 4]
    assert len(NAMES) == len(EDGES) + 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_floor": True}, "at least"),
        ({"streams": 1}, "1 stream,"),
        ({"loss": 0.0004}, "loss 0.04"),
        ({"usd_per_gb": 0.0}, "no loss"),
        ({"known": "inferred", "age_s": 180.0}, "inferred 3\N{NARROW NO-BREAK SPACE}min ago"),
        ({"age_s": None}, "measured"),
    ],
)
def test_a_link_in_a_line(changes: dict[str, Any], words: str) -> None:
    link = replace(view_of(network(2)).links[0], **({"loss": 0.0, "known": "measured"} | changes))
    assert words in describe(link, "a", "b")


def span(name: str, begin: float, end: float | None, **more: Any) -> TraceSpan:
    return TraceSpan(name=name, node="box-a", begin=NOW + begin, end=None if end is None else NOW + end, **more)


def test_a_request_is_bars_in_their_order() -> None:
    spans = (
        span("decode", 1.0, 4.0),
        span("queue", 0.0, 0.5),
        span("kv.layers", 0.5, 1.0, attempt=2),
        span("x", 3.0, None),
    )
    timeline = draw_timeline(empty_view(), RequestTrace(id="r", spans=spans))
    assert [bar.label for bar in timeline.bars] == ["queue", "kv.layers, attempt 2", "decode", "x"]
    assert [bar.kind for bar in timeline.bars] == ["queue", "kv", "decode", "x"]
    assert [(bar.x, bar.width) for bar in timeline.bars] == [
        (0.0, 125.0),
        (125.0, 125.0),
        (250.0, 750.0),
        (750.0, 250.0),
    ]
    assert timeline.bars[3].is_open
    assert timeline.total.startswith("4")


def test_layers_of_kv_are_named() -> None:
    spans = (
        span("kv.layers", 0, 1, facts={"first": 3, "last": 4}),
        span("kv.layers", 1, 2, facts={"first": 4, "last": 9}),
    )
    bars = draw_timeline(empty_view(), RequestTrace(id="r", spans=spans)).bars
    assert [bar.label for bar in bars] == ["kv layer 3", "kv layers 4–8"]


def test_a_request_of_which_little_is_known() -> None:
    assert draw_timeline(empty_view(), RequestTrace(id="r")).bars == ()
    (bar,) = draw_timeline(empty_view(), RequestTrace(id="r", spans=(span("queue", 0.0, None),))).bars
    assert 0 < bar.width <= WIDTH
    many = RequestTrace(id="r", spans=tuple(span("kv", number, number + 1.0) for number in range(MAX_BARS + 7)))
    assert draw_timeline(empty_view(), many).left_out == 7


def test_a_span_that_ends_before_it_begins_is_still_a_bar() -> None:
    bars = draw_timeline(empty_view(), RequestTrace(id="r", spans=(span("a", 1.0, 0.5), span("b", 0.0, 2.0)))).bars
    assert all(bar.width > 0 for bar in bars)


def test_a_course_is_a_line_within_its_frame() -> None:
    assert draw_spark([None, 1.0, None]) == ""
    line = draw_spark([1.0, None, 3.0, 2.0])
    numbers = [float(each) for each in re.findall(r"[\d.]+", line)]
    assert line.startswith("M0.0 22.0L")
    assert max(numbers[::2]) <= 96
    assert max(numbers[1::2]) <= 24
    assert draw_spark([2.0, 2.0])
