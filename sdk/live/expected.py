"""What the planner expects of a live run: of the plan that the network follows, and what the best one would carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Final, NamedTuple

from ...coordinator import Plan
from ...coordinator.capacity import KvCodec, LinkView
from ...coordinator.demand_meter import demand_of
from ...coordinator.network_plan import search_phases
from ...coordinator.network_problem import NetworkProblem, build_network_problem
from ...coordinator.planning.model.problem import Proposal
from ...coordinator.planning.model.workload import Slo, Workload
from ...kernels.codecs import codec_named
from ...node.messages import Status
from ...node.view import NetworkView
from ..errors import DemoFailed
from .plan import REQUESTS, expect_by_requests, expect_running

LOWER_SHARES: Final = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Of requests in time, in turn, where no rate keeps the share in time that is wanted."""


class Expectation(NamedTuple):
    """Of one plan: what formulas say, which plans are searched by, and what simulated requests get, which people are
    told."""

    estimated: Proposal
    expected: Proposal


class Capacity(NamedTuple):
    """Requests per second that the best plan found for this traffic is expected to carry with `share` of them in time.
    None: that the running plan carries, in time or not, up to where a replica or a link is full."""

    rate: float
    share: float | None

    def __str__(self) -> str:
        return "what fills the running plan" if self.share is None else f"what is carried with {self.share:.0%} in time"


def expect_plan(
    status: Status, plan: Plan, workload: Workload, slo: Slo, gbps: float, rtt_s: float, requests: int = REQUESTS
) -> Expectation | None:
    """What `plan --live` says of a plan at the workload's rate, over links as it is simulated over: all of them so fast
    and so long. `requests`: by so many. None where its replicas cannot serve. Raises DemoFailed."""
    peers = [box.peer for box in NetworkView.of_status(status).boxes(plan.service)]
    links = [LinkView(source=one, target=two, rtt_s=rtt_s, gbps=gbps) for one, two in permutations(peers, 2)]
    network = _problem(status, plan, workload, slo, workload.rate, links)
    estimated = expect_running(network, plan)
    return None if estimated is None else Expectation(estimated, expect_by_requests(network, estimated, plan, requests))


def find_capacity(status: Status, workload: Workload, slo: Slo) -> Capacity:
    """With the share in time that `slo` wants, or the highest of LOWER_SHARES below it that any rate keeps, or else
    without deadlines. The rate is 0 where nothing can be served at all. Raises DemoFailed."""
    if status.plan is None:
        raise DemoFailed("the network has lost its plan")
    for share in (slo.target, *(share for share in LOWER_SHARES if share < slo.target)):
        network = _problem(status, status.plan, workload, replace(slo, target=share), None)
        best = network.evaluator.propose(search_phases(network), epoch=0, version=1)[0]
        if best.max_rate > 0.0:
            return Capacity(best.max_rate, share)
    # A plan for throughput would carry more, but the network makes plans for its deadlines, and would be flooded.
    running = expect_running(_problem(status, status.plan, workload, Slo(), None), status.plan)
    return Capacity(0.0 if running is None else running.max_rate, None)


def _problem(
    status: Status,
    plan: Plan,
    workload: Workload,
    slo: Slo,
    rate: float | None,
    links: Sequence[LinkView] | None = None,
) -> NetworkProblem:
    """`links`: None: as the nodes tell of them."""
    view, codec = NetworkView.of_status(status), codec_named(plan.codec)
    demand = demand_of(workload if rate is None else replace(workload, rate=rate))
    found = build_network_problem(
        view.boxes(plan.service), view.links() if links is None else links, [demand],
        service=plan.service, codec=KvCodec(codec.name, codec.bits), previous=plan, slo=slo, rate=rate,
    )  # fmt: skip
    if found is None:
        raise DemoFailed(f"no box of the network is ready to serve {plan.service}")
    return found
