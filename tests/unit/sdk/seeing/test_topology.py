"""The topology: what it is made of, what is chosen and folded, and that people can read it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from p2pserve.coordinator.names import name_of
from p2pserve.node.observing.values import LinkSummary
from p2pserve.sdk.actions.links_view import network_of
from p2pserve.sdk.errors import UsageError
from p2pserve.sdk.seeing.colours import DARK, LIGHT, UNKNOWN, UNREACHABLE, ink_on, link_colour, rate_colour
from p2pserve.sdk.seeing.topology import build_topology, find_box, fold, label, select
from p2pserve.sdk.seeing.topology_view import METRICS, age_text, link_lines, node_lines, print_topology

from .networks import NOW, network, peer


def printed(boxes: int, *, folded: bool = False, metric: str = "rate", width: int = 80) -> str:
    status = network(boxes)
    topology = build_topology(status, NOW)
    out = io.StringIO()
    console = Console(file=out, width=width)
    print_topology(fold(topology) if folded else topology, None if folded else network_of(status), console, metric)
    return out.getvalue()


def test_boxes_and_links_are_what_the_network_tells() -> None:
    topology = build_topology(network(8), NOW)
    assert list(topology.sites) == ["fra", "lon", "nyc"]
    assert len(topology.present) == 7
    assert topology.usd_per_hour == pytest.approx(3.5)
    link = topology.links[peer(0), peer(1)]
    assert (link.known, link.usd_per_gb) == ("measured", 0.01)
    assert link.age_s == pytest.approx(90.0)
    assert topology.links[peer(0), peer(2)].known == "inferred"
    assert not topology.links[peer(1), peer(2)].reachable
    assert (peer(0), peer(7)) not in topology.links  # it is dead


def test_flows_are_what_the_plan_wants_and_what_has_gone() -> None:
    (flow,) = build_topology(network(8), NOW).flows
    assert (flow.source, flow.target, flow.share, flow.transfers) == (peer(0), peer(1), 0.75, 10)
    assert flow.gbps is None
    (again,) = build_topology(network(8, sent_bytes=4_250_000_000), NOW, before=(network(8), NOW - 10.0)).flows
    assert again.gbps == pytest.approx(1.0)
    (fresh,) = build_topology(network(8, sent_bytes=5), NOW, before=(network(8), NOW - 10.0)).flows
    assert fresh.gbps == 0.0  # the box was started anew


def test_only_some_sites_and_boxes() -> None:
    topology = build_topology(network(8), NOW)
    chosen = select(topology, ["lon"], ["..000000"])
    assert {node.id for node in chosen.nodes} == {peer(0), peer(1), peer(4), peer(7)}
    assert chosen.left_out == 4
    assert all(source in {node.id for node in chosen.nodes} for source, _ in chosen.links)
    assert select(topology, [], []) is topology


@pytest.mark.parametrize(
    ("sites", "boxes", "why"),
    [
        (["mars"], [], "site: no box is at mars; there are fra, lon, nyc"),
        ([], ["zz"], "box: no box is called zz; there are"),
        ([], ["0"], "box: no box|box: [0-9]+ boxes"),
        ([], [".."], "box: no box"),
    ],
)
def test_what_is_not_there_is_named(sites: list[str], boxes: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        select(build_topology(network(60), NOW), sites, boxes)


def test_a_short_name_is_as_good_as_an_id() -> None:
    topology = build_topology(network(3), NOW, {peer(1): "amber-otter"})
    assert find_box(topology.nodes, "amber-otter").id == peer(1)
    assert label(topology.nodes[1]) == "amber-otter"


def test_sites_stand_for_their_boxes() -> None:
    folded = fold(build_topology(network(60), NOW))
    assert [node.id for node in folded.nodes] == ["fra", "lon", "nyc"]
    assert folded.nodes[2].state == "19 of 20 boxes"
    assert len(folded.links) == 9
    assert 10.0 <= folded.links["fra", "fra"].gbps <= 30.0
    assert folded.links["fra", "lon"].reason == "middle of 400 links"
    assert folded.flows[0].wire_bytes == 3_000_000_000


@pytest.mark.parametrize("boxes", [1, 2, 8, 30])
@pytest.mark.parametrize("metric", METRICS)
def test_tables_fit_eighty_columns(boxes: int, metric: str) -> None:
    assert max(len(line.rstrip()) for line in printed(boxes, metric=metric).splitlines()) <= 80


def test_no_box_name_and_no_site_is_cut() -> None:
    found = build_topology(network(30), NOW)
    text = printed(30)
    for each in found.nodes:
        assert label(each) in text.split("links:")[0].replace("*", "").split()
    assert {"fra", "lon", "nyc"} <= set(text.split())


def test_hundreds_of_boxes_fit_as_sites() -> None:
    lines = printed(200, folded=True).splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) <= 80


def test_one_box_has_no_links() -> None:
    assert "links: there is one box" in printed(1)
    assert "1 box at 1 site, 1 GPU, $0.50/h" in printed(1)
    assert "plan: none yet" in printed(1)


def test_cells_say_what_is_known_and_what_is_not() -> None:
    text = printed(4)
    assert "down" in text
    assert "~>" in text
    assert "75%" in text


def test_all_that_is_known_of_a_link_and_a_box() -> None:
    topology = build_topology(network(8), NOW)
    link = "\n".join(link_lines(topology.links[peer(0), peer(1)], "a", "b"))
    assert "link a -> b: up" in link
    assert "measured, 80% sure, measured 2 min ago" in link
    assert "3.000 GB in 10 transfers" in link
    node = "\n".join(node_lines(topology.nodes[0], topology))
    assert peer(0) in node
    assert "coordinator" in node
    assert f"why       {name_of(peer(0))} is fast" in node


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (5.0, "5s"), (90.0, "2m"), (7200.0, "2h"), (3e5, "3d"), (1e12, "999d")]
)
def test_ages(seconds: float | None, text: str) -> None:
    assert age_text(seconds) == text


def test_colours_go_with_the_rate_and_can_be_written_on() -> None:
    assert rate_colour(0.0) == rate_colour(0.01) == "#440154"
    assert rate_colour(1e6) == "#fde725"
    assert ink_on(rate_colour(0.1)) == LIGHT
    assert ink_on(rate_colour(40.0)) == DARK
    down = LinkSummary(source="a", target="b", gbps=1, one_stream_gbps=1, streams=1, rtt_s=0.1, reachable=False)
    prior = LinkSummary(source="a", target="b", gbps=1, one_stream_gbps=1, streams=1, rtt_s=0.1, known="prior")
    assert [link_colour(each) for each in (None, prior, down)] == [UNKNOWN, UNKNOWN, UNREACHABLE]
