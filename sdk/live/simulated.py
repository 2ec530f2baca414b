"""A live run simulated: the same requests, with the plans that the network made for itself, and what happened to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np

from ...coordinator import Phase, Plan, Replica, Stage
from ...coordinator.costs.model_shape import ModelShape
from ...coordinator.planning.model.cluster import Box, Cluster
from ...coordinator.planning.model.cluster_file import card_link_gbps
from ...coordinator.planning.model.problem import Problem
from ...coordinator.planning.model.slo import SloScale, read_slo, slo_by
from ...coordinator.planning.model.workload import Service, Slo, Workload
from ...coordinator.routing.interface import RoutingSettings
from ...kernels.codecs import codec_named
from ...kernels.format import WireDtype, payload_bytes
from ...kvtransport.probing.figures import Source
from ...node.engine.emulated.engine import model_capacity
from ...node.engine.emulated.model import emulated_model, parse_cards
from ...node.engine.transfers.wait_limits import WaitLimitSettings
from ...node.messages import Status
from ...node.planning.trying import settings_with_network_times
from ...sims.engine.values import SimEngineSettings
from ...sims.records import Outcomes, Trace
from ...sims.replanning import Replanner, ReplanSettings
from ...sims.scenario import (
    BoxJoined,
    BoxLost,
    Change,
    LinksChanged,
    PlanChange,
    Replan,
    ServiceRun,
    SimAdmission,
    SimSettings,
    roofline_model,
)
from ...sims.world import simulate
from ..chaos.links import CALM, NEAR
from .network import Happened, LiveRun, LoneRequest
from .nodes import GATEWAY, MAX_REQUESTS, LiveSettings
from .schedule import LiveFaultKind, needs_links

REPORT_S: Final = 1.0
"""A gateway knows its own requests at once, and hears so often how replicas stand."""
CLIENT_MESSAGES: Final = 2  # the request, and its first token
BLOCK_TOKENS: Final = 16  # of an emulated engine
LOOPBACK_GBPS, LOOPBACK_RTT_S = 8.0, 0.0005
"""What links are taken for when no node has measured one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedNetwork:
    """The nodes of a live run for the simulator: `cluster` has them with the links between them, `service` what they
    serve."""

    cluster: Cluster
    service: Service
    max_batched_tokens: int
    is_silent: bool = False  # how nodes are lost
    gateways: tuple[str, ...] = ()  # that take the requests, in turn; none: those of all nodes, which hear all at once
    message_s: float = 0.0  # that the processes at both ends of a message take
    client_s: float = 0.0  # the round trip from the clients to their gateways
    told_limits: bool = True  # clients ask for so many tokens, and emulated engines end no answer sooner
    holds_back: bool = True  # what engines would let wait, waits at gateways

    def with_messages(self, more_s: float) -> SimulatedNetwork:
        """With messages that take so much longer; shorter where it is negative, and no less than no time."""
        return replace(self, message_s=max(0.0, self.message_s + more_s))

    def predict(self, trace: Trace, plan: Plan, happened: Sequence[Happened]) -> Outcomes:
        """Serve the trace by this plan, and by those that the simulated coordinator makes when something happens."""
        problem = Problem(cluster=self.cluster, services=(self.service,), pinned={})
        return self.run(trace, [(0.0, plan)], happened, Replanner(problem, ReplanSettings()))

    def run(
        self,
        trace: Trace,
        plans: Sequence[tuple[float, Plan]],
        happened: Sequence[Happened] = (),
        replan: Replan | None = None,
        as_routed: Mapping[int, tuple[str, str]] | None = None,
    ) -> Outcomes:
        """Serve the trace by the plans as they changed. Each node has the whole model, so it keeps its engine whatever
        its phase. `as_routed`: see `ServiceRun`."""
        engine = SimEngineSettings(
            max_batched_tokens=self.max_batched_tokens, max_sequences=MAX_REQUESTS, block_tokens=BLOCK_TOKENS
        )
        boxes = self.cluster.boxes
        gateways = self.gateways or tuple(box.id for box in boxes)
        settings = SimSettings(
            engine=engine, gateways=gateways, message_s=self.message_s, kv_wait_limit=WaitLimitSettings().gain,
            routing=RoutingSettings(), report_s=REPORT_S if self.gateways else 0.0, told_limits=self.told_limits,
            admission=SimAdmission() if self.holds_back else None,
        )  # fmt: skip
        settings = settings_with_network_times(settings, len(boxes), killed=not self.is_silent)
        (_, first), *later = plans
        run = ServiceRun(service=self.service, plan=first, trace=trace, as_routed=as_routed or {})
        changes = [*(PlanChange(at, 0, plan) for at, plan in later), *map(_change_of, happened)]
        found = simulate(self.cluster, [run], settings=settings, changes=changes, replan=replan).services[0].outcomes
        seen_s = self.client_s + CLIENT_MESSAGES * self.message_s  # later by what lies between client and gateway
        return Outcomes(trace=trace, ttft_s=found.ttft_s + seen_s, e2e_s=found.e2e_s + seen_s)

    def calibrated(self, lone: Sequence[LoneRequest]) -> SimulatedNetwork:
        """With messages that take as long as those of lone requests: longer than the links in the processes at their
        ends; or with shorter links, where nodes measured those while their processes waited for a core."""
        parts = [self._beside_step(request) for request in lone]
        message_s = median((seconds - links_s) / messages for seconds, links_s, messages in parts) if parts else 0.0
        if message_s >= 0.0:
            return replace(self, message_s=message_s)
        shares = [max(0.0, seconds) / links_s for seconds, links_s, _ in parts if links_s]
        share = min(1.0, median(shares)) if shares else 1.0
        cluster = replace(self.cluster, rtt_s=self.cluster.rtt_s * share)
        return replace(self, cluster=cluster, client_s=self.client_s * share)

    def _beside_step(self, request: LoneRequest) -> tuple[float, float, int]:
        """What the first token of a lone request took beside its step, seconds; what of that the links are to take; and
        the messages on the way to it."""
        prefill, gateway = request.prefill or request.decode, self.gateways
        gpus, layers = self.cluster.boxes[self.cluster.index(prefill)].gpus, self.service.model.layers
        stage = Stage(peer=prefill, tp=gpus, first_layer=0, last_layer=layers)
        replica = Replica(id=prefill, phase=Phase.MIXED, stages=(stage,))
        times = roofline_model(self.cluster, self.service, replica).times
        step_s = times.prefill_s(request.prompt, request.prompt * (request.prompt + 1) / 2)
        ends = [prefill] if request.prefill in (None, request.decode) else [request.decode, prefill]
        links_s = sum(self._rtt_s(gateway[0] if gateway else None, end) for end in ends) + self.client_s
        return request.ttft_s - step_s, links_s, CLIENT_MESSAGES + 2 * len(ends)

    def _rtt_s(self, one: str | None, other: str) -> float:
        """Between two nodes; from None, the client's gateway, which may be any."""
        where = self.cluster.index(other)
        here = self.cluster.index(one) if one is not None else (where + 1) % len(self.cluster.boxes)
        return 0.0 if here == where else float(self.cluster.rtt_s[here, where])


def simulated_network(settings: LiveSettings, live: LiveRun, service: Service) -> SimulatedNetwork:
    """The network of this run."""
    cluster = cluster_of(live.before, live.numbers, settings)
    is_emulated = needs_links(settings.schedule)
    found = SimulatedNetwork(
        cluster=cluster,
        service=service,
        max_batched_tokens=settings.max_batched_tokens,
        is_silent=settings.loss == "silent",
        gateways=(live.numbers[GATEWAY],) if is_emulated else live.gateways[:1],
        client_s=NEAR.rtt_ms / 1e3 if is_emulated else float(cluster.rtt_s[0, -1]),
    )
    return found.calibrated(live.lone)


def cluster_of(status: Status, numbers: Mapping[int, str], settings: LiveSettings) -> Cluster:
    """The nodes. All links of loopback share one machine: each gets the median measured bandwidth; those of the
    emulated network are as it was told."""
    boxes = []
    for number, peer in sorted(numbers.items()):
        cards = parse_cards(settings.cards_of(number), settings.specs)
        gbps = card_link_gbps(cards.gpu)
        boxes.append(Box(id=peer, gpu=cards.gpu, gpus=cards.count, site=peer, gpu_link_gbps=gbps, atomic=True))
    link_gbps, rtt_s = _measured_link(status)
    if needs_links(settings.schedule):
        link_gbps, rtt_s = CALM.gbps or link_gbps, CALM.rtt_ms / 1e3
    shape = (len(boxes), len(boxes))
    return Cluster(
        boxes=tuple(boxes), gbps=np.full(shape, link_gbps), rtt_s=np.full(shape, rtt_s), usd_per_gb=np.zeros(shape)
    )


def service_of(settings: LiveSettings, workload: Workload, name: str) -> Service:
    """What is to be served, with the run's deadlines. Raises ModelError, GpuError, EmulationError or WorkloadError."""
    model = emulated_model(settings.model, parse_cards(settings.cards[0], settings.specs)).emulation.model
    return Service(
        name=name,
        model=model,
        workload=workload,
        slo=deadlines_in_seconds(settings, workload),
        codec=settings.codec,
        kv_bits=kv_bits(settings.codec, model),
    )


def deadlines_in_seconds(settings: LiveSettings, workload: Workload) -> Slo:
    """Multiples are of what the mean request takes alone on the fastest node, as in the running network. Raises
    WorkloadError, ModelError, GpuError or EmulationError."""
    slo = read_slo(settings.slo)
    return _fastest(settings, workload, slo) if isinstance(slo, SloScale) else slo


def with_deadlines_in_seconds(settings: LiveSettings, workload: Workload) -> LiveSettings:
    """With deadlines that do not move as the network learns what it is asked. Raises as above."""
    slo = deadlines_in_seconds(settings, workload)
    limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
    said = [f"{name}={limit:.6g}" for name, limit in limits.items() if limit < float("inf")]
    return replace(settings, slo=",".join([*said, f"target={slo.target:g}"]))


def kv_bits(codec: str, model: ModelShape) -> float:
    """Bits on the wire for one element of a long prompt's KV."""
    tokens, heads, dim = 1024, model.kv_heads, model.head_dim
    size = payload_bytes(codec_named(codec), WireDtype.BF16, start=0, tokens=tokens, heads=heads, head_dim=dim)
    return size * 8 / (2 * tokens * heads * dim)


def _fastest(settings: LiveSettings, workload: Workload, scale: SloScale) -> Slo:
    found = []
    for text in dict.fromkeys(settings.cards_of(number) for number in range(1, settings.nodes + 1)):
        cards = parse_cards(text, settings.specs)
        emulation = emulated_model(settings.model, cards).emulation
        found.append(slo_by(model_capacity(emulation, tp=cards.count, kv_cache_mib=None)[1], workload, scale))
    return min(found, key=lambda slo: slo.e2e_s)


def _measured_link(status: Status) -> tuple[float, float]:
    """Gb/s and round trip in seconds, medians of what the nodes say."""
    tables = [node.links.links for node in status.nodes if node.links is not None]
    figures = [link for table in tables for link in table.values() if link.source is Source.MEASURED]
    whole = [link.capacity_gbps for link in figures if not link.capacity_is_floor]
    gbps = float(np.median(whole)) if whole else LOOPBACK_GBPS
    return gbps, float(np.median([link.rtt_s for link in figures])) if figures else LOOPBACK_RTT_S


def _change_of(happened: Happened) -> Change:
    """What the simulator does for it. A node is there again when it has joined."""
    match happened.fault.kind:
        case LiveFaultKind.LOSE:
            return BoxLost(happened.began, *happened.peers)
        case LiveFaultKind.JOIN:
            return BoxJoined(happened.ended, *happened.peers)
        case LiveFaultKind.DEGRADE:
            one, other = happened.peers
            return LinksChanged(happened.ended, ((one, other), (other, one)), happened.fault.gbps)
