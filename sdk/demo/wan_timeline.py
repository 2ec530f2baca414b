"""What became of the network of `p2pserve demo --wan`, gathered from what its client tells. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final, final

from ...bootstrap import PeerId
from ...coordinator import Plan
from ...coordinator.names import count_of, name_of
from ...kvtransport.probing.figures import Source
from ...node.links.planner_links import PlannerLinks
from ...node.messages import NodeStatus
from .ocean import KvLink
from .wan_client import AnsweredRequest, LostRequest, WanLook

AT_ONCE: Final = "planned at once: "
CHANCE: Final = 0.01
"""What is as improbable as this is no chance."""
FELL: Final = 0.5
"""A figure below this part of what it was before has fallen: what network and report take for more than noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSeen:
    """A plan when the client first saw it. `shares` of requests by KV link, `boxes` that are in it; `news`: why it was
    made at once."""

    at: float
    number: str
    shares: Mapping[KvLink, float]
    boxes: frozenset[str]
    news: str = ""


@final
class WanTimeline:
    """One run. Boxes are called as the demo calls them: `names` has those of all peers, and grows as they join."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.plans: list[PlanSeen] = []
        self.answers: list[AnsweredRequest] = []
        self.lost: list[LostRequest] = []
        self.closed: frozenset[str] = frozenset()
        """Boxes that nobody can dial."""
        self.coordinator = ""
        self._names = names
        self._links = PlannerLinks()
        self._rates: dict[KvLink, list[tuple[float, float]]] = {}  # as planned with, whenever they have changed
        self._states: dict[str, list[tuple[float, str]]] = {}  # of each box, likewise
        self._ready: frozenset[str] = frozenset()
        self._sites: dict[str, str] = {}
        self._measured: set[frozenset[str]] = set()  # pairs of boxes

    def on_look(self, look: WanLook) -> list[str]:
        """The network as it is now; returns what is new, for people."""
        status = look.status
        nodes = {self._names[node.peer]: node for node in status.nodes if node.peer in self._names}
        self.closed = frozenset(box for box, node in nodes.items() if node.closed)
        self._ready = frozenset(box for box, node in nodes.items() if _engine_state(node) == "ready")
        self.coordinator = self._names.get(status.coordinator or "", "")
        self._note_measured(nodes)
        self._note_rates(look.at, nodes)
        news = self._note_states(look.at, nodes)
        plan = status.plan
        if plan is not None and (not self.plans or self.plans[-1].number != _number(plan)):
            self.plans.append(self._see(plan, look.at))
            news.append(_plan_line(self.plans[-1]))
        return news

    def on_request(self, request: AnsweredRequest | LostRequest) -> None:
        """A request has ended."""
        if isinstance(request, LostRequest):
            self.lost.append(request)
        else:
            self.answers.append(request)

    def covers(self, boxes: frozenset[str]) -> bool:
        """Whether all these boxes run and are in the plan."""
        return bool(self.plans) and boxes <= self._ready and boxes <= self.plans[-1].boxes

    def plan_at(self, at: float) -> PlanSeen | None:
        """The plan that the client knew then."""
        return next((plan for plan in reversed(self.plans) if plan.at <= at), None)

    def rate(self, link: KvLink, at: float) -> float | None:
        """The Gb/s of a link that plans rested on then; None: not known."""
        return next((gbps for seen, gbps in reversed(self._rates.get(link, [])) if seen <= at), None)

    def noticed_slow(self, link: KvLink, since: float) -> float | None:
        """When what is known of a link had fallen, or a plan said so, at the earliest after `since`."""
        was = self.rate(link, since)
        told = [at for at, gbps in self._rates.get(link, []) if at > since and was is not None and gbps < FELL * was]
        news = [plan.at for plan in self.plans if plan.at > since and plan.news.startswith(_news_of(link))]
        return min((*told[:1], *news[:1]), default=None)

    def noticed_gone(self, box: str, since: float) -> float | None:
        """When a box was seen to be other than alive, at the earliest after `since`."""
        return next((at for at, state in self._states.get(box, []) if at > since and state != "alive"), None)

    def planned_around(self, link: KvLink, since: float) -> float | None:
        """When a plan came that sends much less over a link than the one at `since`, because that had been noticed."""
        noticed = self.noticed_slow(link, since)
        plans = [] if noticed is None else [plan for plan in self.plans if plan.at >= noticed]
        return next((plan.at for plan in plans if self._is_left(plan, link, since)), None)

    def has_left(self, link: KvLink, since: float) -> bool:
        """Whether a plan sends much less over a link than the one at `since`, for another reason: it will not be
        noticed what becomes of the link."""
        is_left = any(self._is_left(plan, link, since) for plan in self.plans if plan.at > since)
        return is_left and self.noticed_slow(link, since) is None

    def routed_around(self, link: KvLink, since: float, until: float = inf) -> float | None:
        """When gateways gave up a link, whatever the plan says: the last request whose KV was sent over it was asked
        then, and so many have gone elsewhere since, `until` something else happened, that this is no chance."""
        before = self.plan_at(since)
        share = before.shares.get(link, 0.0) if before is not None else 0.0
        later = [each for each in self.answers if since < each.asked_at < until]
        used = [each.asked_at for each in later if self.link_of(each) == link]
        last = max(used, default=since)
        elsewhere = sum(each.asked_at > last for each in later)
        return last if share > 0.0 and (1.0 - share) ** elsewhere < CHANCE else None

    def is_answered(self, link: KvLink, since: float) -> bool:
        """Whether something was done about a link that degraded then."""
        return self.planned_around(link, since) is not None or self.routed_around(link, since) is not None

    def link_of(self, answer: AnsweredRequest) -> KvLink | None:
        """The link that the KV of an answer was for."""
        if answer.prefill is None:
            return None
        return self._names.get(answer.prefill, answer.prefill), self._names.get(answer.decode, answer.decode)

    def planned_without(self, box: str, since: float) -> float | None:
        """When a plan came that a box has no part in."""
        return next((plan.at for plan in self.plans if plan.at > since and box not in plan.boxes), None)

    def has_measured(self, links: Iterable[KvLink]) -> bool:
        """Whether each of these links has been measured in one of its directions; figures count for both, and for the
        other boxes of their sites."""
        measured = {frozenset(self._sites.get(box, box) for box in pair) for pair in self._measured}
        return all(frozenset(self._sites.get(box, box) for box in link) in measured for link in links)

    def _is_left(self, plan: PlanSeen, link: KvLink, since: float) -> bool:
        before = self.plan_at(since)
        return before is not None and plan.shares.get(link, 0.0) < FELL * before.shares.get(link, 0.0)

    def _note_measured(self, nodes: Mapping[str, NodeStatus]) -> None:
        for box, node in nodes.items():
            if node.links is not None:
                self._sites[box] = node.links.site
                measured = (peer for peer, link in node.links.links.items() if link.source is Source.MEASURED)
                self._measured |= {frozenset((box, self._names[peer])) for peer in measured if peer in self._names}

    def _note_rates(self, at: float, nodes: Mapping[str, NodeStatus]) -> None:
        told = {PeerId(node.peer): node.links for node in nodes.values() if node.links is not None}
        for view in self._links.between(told, told):
            rates = self._rates.setdefault((self._names[view.source], self._names[view.target]), [])
            if not rates or rates[-1][1] != view.gbps:
                rates.append((at, view.gbps))

    def _note_states(self, at: float, nodes: Mapping[str, NodeStatus]) -> list[str]:
        news = []
        for box in {*self._states, *nodes}:
            state = nodes[box].state if box in nodes else "gone"
            states = self._states.setdefault(box, [])
            if states and states[-1][1] != state:
                news.append(f"{box} is {state}")
            if not states or states[-1][1] != state:
                states.append((at, state))
        return news

    def _see(self, plan: Plan, at: float) -> PlanSeen:
        shares = {
            (self._names.get(pair.prefill, pair.prefill), self._names.get(pair.decode, pair.decode)): pair.weight
            for pair in plan.pairings
        }
        news = next((line.removeprefix(AT_ONCE) for line in plan.why if line.startswith(AT_ONCE)), "")
        for peer, box in self._names.items():
            news = news.replace(name_of(peer), box)
        boxes = frozenset(self._names.get(peer, peer) for peer in plan.peers)
        return PlanSeen(at=at, number=_number(plan), shares=shares, boxes=boxes, news=news)


def _news_of(link: KvLink) -> str:
    """How the network begins what it says of a link."""
    return f"the link {link[0]} -> {link[1]} "


def _number(plan: Plan) -> str:
    return f"{plan.epoch}.{plan.version}"


def _plan_line(plan: PlanSeen) -> str:
    links = sum(source != target for source, target in plan.shares)
    news = plan.news.removeprefix("the link ") or f"sends KV over {count_of(links, 'link')}"
    return f"plan {plan.number}: {news}"


def _engine_state(node: NodeStatus) -> str:
    return node.advert.engine.state if node.advert is not None and node.advert.engine is not None else ""
