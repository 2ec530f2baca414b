"""What a node shows: to those who ask over the network, and to doors on this box (the API, the dashboard)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import final

import trio

from ..bootstrap import PeerId, Role
from ..coordinator.plan import Deadlines
from . import methods
from .adverts import plans_of
from .joined import Joined
from .observing.counts import NodeCounts
from .observing.desk import EventDesk
from .observing.queries import EventPage, EventQuery, MetricsPage, MetricsQuery
from .observing.summaries import summarise_links, summarise_nodes, summarise_requests
from .observing.values import LinkSummary, NodeSummary, RequestSummary
from .serving import Serving


@final
class Showing:
    """One per node; `serving` where it has a model. `clock` has unix seconds."""

    def __init__(self, joined: Joined, serving: Serving | None, clock: Callable[[], float] = time.time) -> None:
        self._joined = joined
        self._serving = serving
        self._clock = clock
        self._began = trio.current_time()
        self.desk = EventDesk(joined.log, joined.network, lambda: joined.present, clock)
        self.counts = NodeCounts()
        joined.log.followers.append(self.counts.on_event)
        joined.network.handle(methods.METRICS, self._on_metrics)

    def __repr__(self) -> str:
        return f"<Showing {self._joined.log}>"

    def nodes(self) -> tuple[NodeSummary, ...]:
        """The boxes, as this node sees them."""
        return summarise_nodes(self._joined.status())

    def links(self) -> tuple[LinkSummary, ...]:
        """The links between them."""
        return summarise_links(self._joined.status(), self._clock())

    def requests(self) -> tuple[RequestSummary, ...]:
        """The requests of this gateway, oldest first, as far as its log goes back."""
        return summarise_requests(self._joined.log.events)

    def events(self, query: EventQuery) -> EventPage:
        """What happened here."""
        return self._joined.log.select(query)

    def metrics(self, keys: Collection[str] | None) -> str:
        """In Prometheus's text format; to be put behind those of vLLM. `keys`: the API keys whose costs are told; None:
        all of them."""
        from .observing.metrics import Snapshot, render_metrics  # 12 MB that few nodes are asked for

        joined, now = self._joined, trio.current_time()
        status = joined.status()
        self.follow_plan()
        snapshot = Snapshot(
            node=joined.own,
            nodes=summarise_nodes(status),
            links=summarise_links(status, self._clock()),
            plans={plan.service: plan.number for plan in plans_of(status)},
            is_coordinator=status.coordinator == joined.own,
            waiting=self._serving.gateway.open_requests if self._serving is not None else 0,
            **({"refused": self._serving.gateway.refused.total} if self._serving is not None else {}),
            key_usd={key: usd for key, usd in joined.key_usd().items() if keys is None or key in keys},
            up_s=now - self._began,
        )
        return render_metrics(self.counts, snapshot)

    def follow_plan(self) -> None:
        """Requests are judged by the deadlines of the plan that is followed for what this gateway serves."""
        plan = self._joined.view.plan_of(self._serving.service) if self._serving is not None else None
        self.counts.deadlines = plan.deadlines if plan is not None else Deadlines()

    async def _on_metrics(self, peer: PeerId, role: Role, query: MetricsQuery) -> MetricsPage:
        is_owners = role is Role.ADMIN or peer == self._joined.own
        return MetricsPage(text=self.metrics(None if is_owners else ()))
