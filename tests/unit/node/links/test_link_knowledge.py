"""What a node knows of links: its own as it measures them, those that others tell of, and what it tells them."""

import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.kvtransport.probing.estimates import BurstSample, LinkEstimator
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures, Source
from p2pserve.node.links import link_knowledge
from p2pserve.node.links.link_knowledge import LinkKnowledge
from p2pserve.node.messages import LinkTable
from p2pserve.node.settings import BoxLinkSettings

OWN, A, B, C = PeerId("own"), PeerId("a"), PeerId("b"), PeerId("c")


def figures(gbps: float, source: Source = Source.MEASURED) -> LinkFigures:
    return LinkFigures(rtt_s=0.02, one_stream_gbps=min(1.0, gbps), capacity_gbps=gbps, source=source)


def knowledge(site: str = "", **measured: float) -> LinkKnowledge:
    estimators = {PeerId(peer): LinkEstimator(figures(gbps)) for peer, gbps in measured.items()}
    return LinkKnowledge(OWN, BoxLinkSettings(site=site, box=BoxFigures(up_usd_per_gb=0.5)), estimators=estimators)


def table(site: str = "", relay_gbps: float | None = None, **links: float) -> LinkTable:
    found: dict[str, LinkFigures] = {peer: figures(gbps) for peer, gbps in links.items()}
    return LinkTable(site=site, box=BoxFigures(relay_gbps=relay_gbps), links=found)


def test_who_is_neither_a_member_nor_has_a_table_is_forgotten() -> None:
    known = knowledge(a=1.0, b=2.0, c=3.0)
    known.learn({A: table()}, [B])
    assert set(known.table(None, 0.0).links) == {A, B}


def test_a_link_that_nobody_has_measured_is_a_belief_and_is_not_told() -> None:
    known = knowledge()
    assert known.estimator(A) is known.estimator(A)
    assert known.estimator(A).figures(0.0).source is Source.PRIOR
    assert known.table(None, 0.0).links == {}


@pytest.mark.parametrize(("told_gbps", "stays"), [(1.05, True), (2.0, False)])
def test_figures_that_have_hardly_moved_stay_as_they_were_told(told_gbps: float, stays: bool) -> None:
    known = knowledge(a=1.0)
    told = LinkTable(links={A: figures(told_gbps)})
    assert (known.table(told, 0.0).links[A] is told.links[A]) == stays
    assert known.table(None, 0.0).box == BoxFigures(up_usd_per_gb=0.5)


def test_a_relay_forwards_is_measured_from_here_and_knows_the_target() -> None:
    known = knowledge(a=1.0, b=1.0, own=1.0)
    tables = {
        A: table(relay_gbps=1.0, c=1.0),
        B: table(relay_gbps=0.0, c=1.0),  # says that it does not forward
        C: table(relay_gbps=1.0, c=1.0),  # is the target, and has not been measured
        OWN: table(c=1.0),
    }
    known.learn(tables, [])
    assert known.relays_to(C) == {A}
    known.learn({A: table(relay_gbps=1.0, b=1.0)}, [B])
    assert known.relays_to(C) == frozenset()


def test_peers_noted_as_measured_are_told_of_once() -> None:
    known = knowledge()
    known.note_measured(A)
    known.note_measured(B)
    assert known.take_measured() == {A, B}
    assert known.take_measured() == set()


def test_all_links_are_known_with_ones_own_figures_for_ones_own() -> None:
    known = knowledge(a=1.0)
    known.learn({A: table(b=2.0), OWN: table(a=9.0)}, [])
    found = known.network((), 0.0)
    assert {pair: link.capacity_gbps for pair, link in found.links.items()} == {(OWN, A): 1.0, (A, B): 2.0}
    assert set(found.boxes) == {OWN, A}
    assert found.boxes[OWN].up_usd_per_gb == 0.5


def test_what_is_known_is_put_together_anew_only_for_news() -> None:
    known = knowledge(a=1.0)
    tables = {A: table(b=2.0)}
    known.learn(tables, [])
    first = known.network((), 0.0)
    known.learn(dict(tables), [])
    assert known.network((), 0.0).links is first.links
    known.learn({A: table(b=3.0)}, [])
    assert known.network((), 0.0).links[A, B].capacity_gbps == 3.0
    second = known.network((), 0.0)
    known.estimator(B)
    assert (OWN, B) in known.network((), 0.0).links
    assert known.network((), 0.0).links is not second.links


def test_a_node_that_names_no_site_is_a_site_of_its_own() -> None:
    known = knowledge()
    known.learn({A: table(site="paris"), B: table()}, [])
    assert (known.site_of(A), known.site_of(B), known.site_of(C)) == ("paris", B, C)


def test_what_a_node_of_the_same_site_has_measured_is_believed() -> None:
    known = knowledge(site="oslo")
    known.learn({A: table(site="oslo", b=0.3), B: table(site="rome")}, [])
    known.fill_in([B], 0.0)
    assert known.estimator(B).figures(0.0).capacity_gbps == pytest.approx(0.3, rel=0.5)
    elsewhere = knowledge(site="nice")
    elsewhere.learn({A: table(site="oslo", b=0.3), B: table(site="rome")}, [])
    elsewhere.fill_in([B], 0.0)
    assert elsewhere.estimator(B).figures(0.0).capacity_gbps == pytest.approx(1.0)


@pytest.mark.parametrize("news", ["none", "a table", "a measurement", "a member", "age"])
def test_what_others_have_measured_is_looked_at_anew_only_for_news(news: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []

    def look(measured: object, *_: object) -> dict[object, object]:
        looked.append(measured)
        return {}

    monkeypatch.setattr(link_knowledge, "infer", look)
    known = knowledge(site="oslo", b=1.0)
    known.learn({A: table(site="oslo", b=0.3)}, [B, C])
    known.fill_in([B], 0.0)
    known.fill_in([B], 1.0)
    assert len(looked) == 1
    if news == "a table":
        known.learn({A: table(site="oslo", b=0.5)}, [B, C])
    if news == "a measurement":
        known.estimator(B).on_burst(BurstSample(bytes=10**6, seconds=0.1, streams=1, gbps=0.1), now=1.0)
    known.fill_in([B, C] if news == "a member" else [B], known_at := 100.0 if news == "age" else 1.5)
    assert len(looked) == (1 if news == "none" else 2)
    known.fill_in([B, C] if news == "a member" else [B], known_at + 0.5)
    assert len(looked) == (1 if news == "none" else 2)


def test_what_a_node_has_told_of_itself_is_no_news_to_it() -> None:
    known = knowledge(site="oslo")
    told = table(site="nice", b=9.0)
    known.learn({OWN: told, A: table(site="oslo", b=0.3), B: table(site="rome")}, [])
    known.fill_in([B], 0.0)
    assert known.estimator(B).figures(0.0).capacity_gbps == pytest.approx(0.3, rel=0.5)


def test_of_several_alike_at_one_site_one_is_told_and_relays_know_the_others() -> None:
    known = knowledge(a=1.0, b=1.05, c=3.0)
    known.learn({A: table(site="x", own=1.0), B: table(site="x"), C: table(site="x")}, [])
    told = known.table(None, 0.0).links
    assert {peer: link.capacity_gbps for peer, link in told.items()} == {A: 1.0, C: 3.0}
    known.learn({A: table(site="y", b=1.0), B: table(site="x"), C: table(site="x")}, [])
    assert known.relays_to(C) == {A}
    links = known.network((), 0.0).links
    assert links[A, C].capacity_gbps == 1.0
    assert (A, A) not in links
