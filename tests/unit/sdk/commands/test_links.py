"""What `status --links` and `path` show, from a status as a node answers it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from p2pserve.coordinator.names import name_of
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures, Source
from p2pserve.kvtransport.routing.paths import CandidateVerdict
from p2pserve.node.messages import LinkTable, NodeStatus, Status
from p2pserve.sdk.actions.links_view import choice_text, explain_path, network_of, print_links
from p2pserve.sdk.errors import UsageError

PARIS, NYC, LONDON = "12D3KooWParisAAAA", "12D3KooWNewYoBBBB", "12D3KooWLondoCCCC"


def figures(gbps: float, rtt_s: float, *, reachable: bool = True, floor: bool = False) -> LinkFigures:
    return LinkFigures(
        rtt_s=rtt_s,
        one_stream_gbps=gbps,
        capacity_gbps=gbps,
        reachable=reachable,
        capacity_is_floor=floor,
        source=Source.MEASURED,
    )


def node(peer: str, links: dict[str, LinkFigures] | None, *, state: str = "alive", price: float = 0.0) -> NodeStatus:
    table = None if links is None else LinkTable(site="x", box=BoxFigures(up_usd_per_gb=price), links=links)
    return NodeStatus(
        peer=peer, role="worker", state=state, address="192.0.2.1:1", rtt_s=0.001, advert=None, links=table
    )


def status(*nodes: NodeStatus) -> Status:
    return Status(answered_by=PARIS, coordinator=None, epoch=0, nodes=nodes, plan=None)


SLOW_DIRECT = status(
    node(PARIS, {NYC: figures(0.1, 0.09), LONDON: figures(2.0, 0.01, floor=True)}, price=0.002),
    node(LONDON, {NYC: figures(2.0, 0.08)}),
    node(NYC, {}),
)


def test_the_relay_is_explained_with_short_names() -> None:
    choice = explain_path(SLOW_DIRECT, "AAAA", f"..{NYC[-6:]}", 80, (None, None))
    assert choice.vias == {LONDON}
    text = choice_text(choice)
    assert LONDON not in text
    assert text.splitlines()[0].startswith(f"via {name_of(LONDON)}")
    assert "taken" in text.splitlines()[0]
    assert any(line.startswith("direct ") and "0.100 Gb/s" in line for line in text.splitlines())


def test_a_price_limit_is_kept() -> None:
    dear = status(
        node(PARIS, {NYC: figures(0.1, 0.09), LONDON: figures(2.0, 0.01)}, price=0.002),
        node(LONDON, {NYC: figures(2.0, 0.08)}, price=0.05),
        node(NYC, {}),
    )
    choice = explain_path(dear, PARIS, NYC, 80, (None, 0.01))
    assert choice.vias == {None}
    assert any(each.verdict is CandidateVerdict.TOO_DEAR for each in choice.why)


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ("AAAA", "AAAA", "target: AAAA is the source itself"),
        ("nobody", "BBBB", "source: no node called nobody"),
        ("AAAA", "", "target: no node"),
        ("AAAA", "..", "target: no node"),
        ("BBBB", "CCCC", "has not measured its link"),
    ],
)
def test_wrong_names_are_explained(source: str, target: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        explain_path(SLOW_DIRECT, source, target, 1, (None, None))


def test_an_ambiguous_ending_names_the_nodes() -> None:
    twins = status(node("12D3KooWone7", {}), node("12D3KooWtwo7", {}))
    with pytest.raises(UsageError, match=r"source: 2 nodes called 7; there are [a-z]+-[a-z]+, [a-z]+-[a-z]+"):
        explain_path(twins, "7", "x", 1, (None, None))


def test_a_link_that_is_down_and_has_no_way_around_it() -> None:
    down = status(node(PARIS, {NYC: figures(1.0, 0.09, reachable=False)}), node(NYC, {}))
    with pytest.raises(UsageError, match="target: "):
        explain_path(down, PARIS, NYC, 1, (None, None))


def test_dead_nodes_have_no_links() -> None:
    assert not network_of(status(node(PARIS, {NYC: figures(1, 0.1)}, state="dead"), node(NYC, {}))).links


def shown(of: Status) -> str:
    out = io.StringIO()
    print_links(of, Console(file=out, width=200))
    return out.getvalue()


def test_the_table_of_links() -> None:
    text = shown(SLOW_DIRECT)
    assert text.startswith("links:\n")
    assert ">=2.000 Gb/s" in text
    assert "90.0 ms" in text
    assert "none has been measured yet" in shown(status(node(PARIS, None)))
    assert "unreachable" in shown(status(node(PARIS, {NYC: figures(1.0, 0.1, reachable=False)})))
