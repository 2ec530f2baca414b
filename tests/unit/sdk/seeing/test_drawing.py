"""Drawings of networks: well-formed SVG of any size, in which no box's text is markup; PNG from the same shapes."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from p2pserve.sdk.errors import UsageError
from p2pserve.sdk.seeing.drawing import Arrow, Drawing, Rectangle, Words, to_svg, write_png, write_svg
from p2pserve.sdk.seeing.topology import build_topology, fold
from p2pserve.sdk.seeing.topology_map import WIDTH, draw_topology, rate_text

from .networks import NOW, network

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("boxes", [1, 2, 8, 60])
@pytest.mark.parametrize("folded", [False, True])
def test_nothing_lies_outside_of_the_page(boxes: int, folded: bool) -> None:
    topology = build_topology(network(boxes), NOW)
    drawing = draw_topology(fold(topology) if folded else topology)
    assert ElementTree.fromstring(to_svg(drawing)).tag == f"{SVG}svg"
    for shape in drawing.shapes:
        if isinstance(shape, Rectangle):
            assert shape.x >= 0.0
            assert shape.x + shape.width <= WIDTH
            assert shape.y + shape.height <= drawing.height


def test_every_link_has_a_cell_that_tells_of_it() -> None:
    drawing = draw_topology(build_topology(network(7), NOW))
    titles = [shape.title for shape in drawing.shapes if isinstance(shape, Rectangle) and "Gb/s" in shape.title]
    assert len(titles) == 7 * 6
    assert all("loss" in title and "/GB" in title and "measured 90 s ago" in title for title in titles)


def test_texts_of_other_boxes_are_no_markup() -> None:
    drawing = Drawing(width=10, height=10, title="<t>")
    drawing.add(
        Words(x=0, y=0, text="</text><script>alert(1)</script>\x1b[2J"),
        Rectangle(x=0, y=0, width=1, height=1, title='"><script>'),
        Arrow(x1=0, y1=0, x2=5, y2=5, title="a&b"),
    )
    root = ElementTree.fromstring(to_svg(drawing))
    assert root.find(f".//{SVG}script") is None
    (text,) = root.iter(f"{SVG}text")
    assert text.text is not None
    assert text.text.startswith("</text><script>")
    assert "\x1b" not in text.text


def test_pixels_come_from_the_same_shapes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawing = draw_topology(build_topology(network(3), NOW))
    write_png(drawing, tmp_path / "t.png")
    data = (tmp_path / "t.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width / height == pytest.approx(drawing.width / drawing.height, rel=0.01)


def test_without_matplotlib_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"png: matplotlib is not installed; pip install 'p2pserve\[plots\]'"):
        write_png(Drawing(width=1, height=1), tmp_path / "t.png")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"svg: .* cannot be written: No such file"):
        write_svg(Drawing(width=1, height=1), tmp_path / "not" / "t.svg")


@pytest.mark.parametrize(("gbps", "text"), [(0.012, "0.01"), (0.2, "0.2"), (9.94, "9.9"), (9.96, "10"), (120.0, "120")])
def test_rates_are_short(gbps: float, text: str) -> None:
    assert rate_text(gbps) == text
