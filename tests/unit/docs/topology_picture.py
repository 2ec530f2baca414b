"""The picture of a topology in the README: `p2pserve topology --svg` of a modelled network.

python tests/unit/docs/topology_picture.py
"""

from __future__ import annotations

from pathlib import Path

from p2pserve.node.dev.showcase import Showcase
from p2pserve.sdk.seeing.drawing import Words, to_svg
from p2pserve.sdk.seeing.topology import build_topology
from p2pserve.sdk.seeing.topology_map import draw_topology

PICTURE = Path(__file__).resolve().parents[3] / "docs" / "pictures" / "topology.svg"
NOW = 1_800_000_000.0  # any moment: the network is made of a seed
NOTE = "A modelled network, drawn by `p2pserve topology --svg`: its figures are not measurements."


def draw_picture() -> str:
    """The picture as a document."""
    network = Showcase(6, lambda: NOW, per_site=2)
    drawing = draw_topology(build_topology(network.status(NOW), NOW, network.names))
    drawing.add(Words(x=24, y=drawing.height + 4, text=NOTE, fill="#5b616b"))
    drawing.height += 24
    return to_svg(drawing)


if __name__ == "__main__":
    PICTURE.write_text(draw_picture(), encoding="utf-8")
