"""Links as the planner wants them: what has not changed is not made anew, and what is kept is never out of date."""

from __future__ import annotations

import random

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import LinkView
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures
from p2pserve.node.links.planner_links import PlannerLinks
from p2pserve.node.messages import LinkTable

A, B, C, D = PEERS = tuple(PeerId(name) for name in "abcd")


def table(*targets: PeerId, rtt_s: float = 0.1, site: str = "", box: BoxFigures | None = None) -> LinkTable:
    figures = LinkFigures(rtt_s=rtt_s, one_stream_gbps=1.0, capacity_gbps=8.0)
    return LinkTable(site=site, box=box or BoxFigures(), links=dict.fromkeys(targets, figures))


def by_ends(links: list[LinkView]) -> dict[tuple[str, str], LinkView]:
    return {(link.source, link.target): link for link in links}


def test_links_of_boxes_that_tell_nothing_new_are_the_same_values() -> None:
    links = PlannerLinks()
    told = {A: table(B, C), B: table(A, C), C: table(A)}
    before = by_ends(links.between((A, B, C), told))
    told[B] = table(A, C, rtt_s=0.2)
    after = by_ends(links.between((A, B, C), dict(told)))
    assert after.keys() == before.keys() == {(A, B), (A, C), (B, A), (B, C), (C, A)}
    assert [ends for ends in after if after[ends] is not before[ends]] == [(B, A), (B, C)]
    assert after[B, A].rtt_s == 0.2


def test_links_are_in_order_of_their_ends() -> None:
    told = {C: table(B, A), A: table(C, B)}
    links = PlannerLinks().between((C, B, A), told)
    assert [(link.source, link.target) for link in links] == [(A, B), (A, C), (C, A), (C, B)]


def test_what_a_box_says_of_itself_counts_for_links_to_it() -> None:
    links = PlannerLinks()
    told = {A: table(B), B: table()}
    assert links.between((A, B), told)[0].gbps == 8.0
    told[B] = table(box=BoxFigures(down_gbps=2.0, down_usd_per_gb=0.5))
    (link,) = links.between((A, B), told)
    assert (link.gbps, link.usd_per_gb) == (2.0, 0.5)


def test_who_has_gone_is_in_no_link_and_who_comes_back_is() -> None:
    links = PlannerLinks()
    told = {A: table(B, C), B: table(A)}
    whole = links.between((A, B, C), told)
    assert [(link.source, link.target) for link in links.between((A, C), told)] == [(A, C)]
    assert links.between((A, B, C), told) == whole


def test_round_trips_are_as_long_as_either_end_says() -> None:
    links = PlannerLinks()
    told = {A: table(B, rtt_s=0.1), B: table(A, C, rtt_s=0.2), C: table(A, rtt_s=0.3)}
    assert links.round_trips(A, (A, B, C, D), told) == {B: 0.2, C: 0.3}
    assert links.round_trips(B, (A, B, C, D), told) == {A: 0.2, C: 0.2}
    assert links.round_trips(D, (A, B, C, D), told) == {}


def test_links_that_are_kept_are_those_that_would_be_made() -> None:
    rng = random.Random(7)
    links = PlannerLinks()
    told: dict[PeerId, LinkTable] = {}
    seen = set()
    for _ in range(300):
        peer = rng.choice(PEERS)
        box = BoxFigures(down_gbps=rng.choice((None, 1.0, 3.0)))
        told[peer] = table(
            *rng.sample(PEERS, rng.randrange(4)), rtt_s=rng.choice((0.1, 0.2)), site=rng.choice(("", "x", "y")), box=box
        )
        peers = rng.sample(PEERS, rng.randrange(2, 5))
        found = links.between(peers, told)
        assert found == PlannerLinks().between(peers, told)
        seen.add(len(found))
    assert len(seen) > 5
