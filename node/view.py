"""The network as one node sees it: adverts, the plans it follows, and what follows from them. No I/O, no clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Self, final

import msgspec

from ..bootstrap import DECODE_ERRORS, PeerId
from ..coordinator import BoxView, Demand, LinkView, Load, Plan, Replica
from ..coordinator.bounds import MAX_SERVICES
from ..coordinator.costs.box_worth import BoxWorth
from ..coordinator.costs.gpus import GpuError, gpu_table
from ..coordinator.demand_meter import expected_workload
from ..coordinator.planning.model.cluster_file import PCIE_GBPS, card_link_gbps
from ..coordinator.planning.model.kv_cost import kv_gigabits
from ..coordinator.prefixes.fetching import KvLinks
from ..coordinator.repair.damping import BoxSign
from ..coordinator.repair.ending import can_finish, is_planned_without
from ..coordinator.routing.interface import ReplicaLoads, WorkBeside
from ..coordinator.routing.pools import PoolState
from ..coordinator.worth import BoxLine, weigh_boxes
from ..kernels.codecs import CODEC_NAMES, codec_named
from ..kvtransport.probing.figures import Source
from .adverts import AdvertBook, find_beside, find_box_fault, find_fault, find_part, join_faults, plans_of
from .box.hardware import Hardware
from .catalogue.messages import HostingPlan
from .engine.protocol import EngineStats
from .links.planner_links import PlannerLinks
from .messages import Advert, EngineAdvert, LinkTable, Status
from .models import ModelInfo
from .observing.ages import describe_gone

MIN_FIGURE = 1e-6  # no box computes or copies less than this many TFLOP/s or GB/s
UNKNOWN_CARD_PCIE = 4  # the bus between two GPUs of which nothing is known
UNMEASURED_GPU = (100.0, 1000.0)
UNMEASURED_CPU = (0.5, 10.0)
"""TFLOP/s and GB/s that a box counts for until an engine has measured it there: each of its GPUs, or its processor."""

UNKNOWN_LONGEST = 32_768  # tokens of a request, where no engine has told what it has room for

_tables = msgspec.msgpack.Decoder(LinkTable)

_NO_LINKS = LinkTable()


class Queue(NamedTuple):
    """Requests that a node has not finished, and the tokens of their prompts that it has not read."""

    requests: int = 0
    pending_prefill_tokens: int = 0


NO_QUEUE = Queue()


class OwnWork(NamedTuple):
    """What this gateway has at a node when it asks there for a place, after its report `stats`."""

    stats: EngineStats | None
    queue: Queue


def count_queues(work: Iterable[tuple[str, int]]) -> dict[PeerId, Queue]:
    """What lies at each node, from the node and the unread tokens of each request."""
    queues: defaultdict[PeerId, Queue] = defaultdict(Queue)
    for peer, unread in work:
        requests, tokens = queues[PeerId(peer)]
        queues[PeerId(peer)] = Queue(requests + 1, tokens + unread)
    return queues


def count_others(requests: int, prefill_tokens: int, mine: Queue) -> Queue:
    """What of a node's work is not this gateway's."""
    return Queue(max(0, requests - mine.requests), max(0, prefill_tokens - mine.pending_prefill_tokens))


@final
@dataclass(slots=True)
class NetworkView(AdvertBook):
    """Kept up to date by the agent; read by gateway, coordinator and status."""

    plans: dict[str, Plan] = field(default_factory=dict)  # by service: at most MAX_SERVICES
    plan_authors: dict[str, PeerId | None] = field(default_factory=dict)  # None: not known, as after a restart
    hosting: HostingPlan | None = None  # of whoever coordinates, or did last
    links_told: dict[PeerId, LinkTable] = field(default_factory=dict)
    dead_at: dict[PeerId, float] = field(default_factory=dict)  # boxes that died, by the clock of the agent
    _table_payloads: dict[PeerId, bytes] = field(default_factory=dict)
    _weighed: dict[PeerId, EngineStats] = field(default_factory=dict)
    _others: dict[PeerId, Queue] = field(default_factory=dict)
    # The report after which this gateway has sent prompts to a node, and their tokens.
    _sent: dict[PeerId, tuple[EngineStats | None, int]] = field(default_factory=dict)
    # What nodes have answered to claims, and what this gateway had there when it asked; until they report again.
    _answers: dict[PeerId, tuple[PoolState, OwnWork]] = field(default_factory=dict)
    _planner_links: PlannerLinks = field(default_factory=PlannerLinks, repr=False, compare=False)

    @classmethod
    def of_status(cls, status: Status) -> Self:
        """As the node that gave this answer sees it."""
        return cls(
            adverts={PeerId(node.peer): node.advert for node in status.nodes if node.advert is not None},
            plans={plan.service: plan for plan in plans_of(status)},
            links_told={PeerId(node.peer): node.links for node in status.nodes if node.links is not None},
        )

    def update_links(self, entries: Mapping[PeerId, bytes]) -> None:
        """Take in what members say of their links. One that says nonsense says nothing."""
        kept = {
            peer: table
            for peer, table in self.links_told.items()
            if self._table_payloads.get(peer) == entries.get(peer)
        }
        for peer, payload in entries.items():
            if peer not in kept:
                try:
                    kept[peer] = _tables.decode(payload)
                except (*DECODE_ERRORS, ValueError):
                    continue
        self.links_told, self._table_payloads = kept, dict(entries)

    def consider_plan(self, plan: Plan, author: PeerId | None = None) -> bool:
        """Follow the coordinator's plan if it is newer than the one that is followed for its service; whether it is.

        Two parts of a network that cannot see each other may both elect for one epoch. When they meet, one of the two
        leads on in it, and its plan counts whatever number the other's had."""
        service = plan.service
        held, held_author = self.plans.get(service), self.plan_authors.get(service)
        if held is not None and not plan.newer_than(held):
            is_rival = None not in (author, held_author) and author != held_author
            if plan.epoch != held.epoch or not is_rival:
                return False
        if held is None and not self._make_room():
            return False
        self.plans[service], self.plan_authors[service] = plan, author
        return True

    def plan_of(self, service: str) -> Plan | None:
        """The plan that is followed for a service, if there is one."""
        return self.plans.get(service)

    def drop_plan(self, service: str) -> None:
        """Follow none for this service any more."""
        self.plans.pop(service, None)
        self.plan_authors.pop(service, None)

    @property
    def plan(self) -> Plan | None:
        """For whoever names no service: that of the one which most boxes offer, as far as any is followed."""
        offered = Counter(a.model.service for a in self.adverts.values() if a.model is not None)
        return max(self.plans.values(), key=lambda plan: (offered[plan.service], plan.service), default=None)

    def _make_room(self) -> bool:
        """Whether another service's plan may be followed: one that no box offers any more gives way."""
        if len(self.plans) < MAX_SERVICES:
            return True
        offered = set(self.services())
        gone = sorted((plan.number, service) for service, plan in self.plans.items() if service not in offered)
        for _, service in gone[:1]:
            self.drop_plan(service)
        return bool(gone)

    def serving(self, replica: Replica, service: str) -> bool:
        """Whether new requests of the service may go to the head of this replica: it is ready, with these stages."""
        return not self.find_fault(replica, service)

    def find_fault(self, replica: Replica, service: str) -> str:
        """Why no new requests of the service may go to the head of this replica, for people; "" where they may."""
        return find_fault(replica, service, self.adverts, self.dead_at)

    def ends_within(self, replica: Replica, needed_s: float) -> bool:
        """Whether a box of this replica says that it ends sooner than that."""
        adverts = (self.adverts.get(PeerId(peer)) for peer in replica.peers)
        return not all(advert is None or can_finish(advert.ends_in_s, needed_s) for advert in adverts)

    def hopeful(self, service: str) -> bool:
        """Whether an engine of the service is being started, or is about to be in another group, so that waiting for it
        makes sense."""
        plan = self.plan_of(service)
        if plan is not None and plan.regrouping is not None:
            return True
        return any(
            not advert.draining and engine.state in ("starting", "loading", "restarting")
            for advert, engine in self._engines(service)
        )

    def max_model_len(self, model: ModelInfo) -> int:
        """How long a request may be that every engine of the model takes."""
        lengths = (engine.max_model_len for _, engine in self._engines(model.service))
        return min([model.max_model_len, *(length for length in lengths if length)])

    def describe_unserved(self, service: str, now: float) -> str:
        """Which boxes would serve, if they did not drain, had an engine that is ready, or had not died; for people."""
        offers = ((peer, self._offer(peer, service)) for peer in self.adverts)
        faults = [find_box_fault(peer, advert) for peer, advert in offers if advert is not None]
        return join_faults([*faults, self.describe_dead(now)])

    def describe_dead(self, now: float, peers: Collection[str] | None = None) -> str:
        """Which boxes (of these) are dead, and since when; for people, "" where none is."""
        return describe_gone({peer: now - at for peer, at in self.dead_at.items() if peers is None or peer in peers})

    def starts(self, peer: PeerId) -> int:
        """How often this peer's engine has been started: tells a restarted engine from the one that failed."""
        engine = self._engine_of(peer)
        return engine.starts if engine is not None else 0

    def usd_per_hour(self, peer: str) -> float:
        """What a box costs, as its owner has told."""
        advert = self.adverts.get(PeerId(peer))
        return advert.usd_per_hour if advert is not None else 0.0

    def boxes(self, service: str) -> list[BoxView]:
        """What the planner may use. A box that serves alone counts from its engine's first start on; one that has
        room for some layers only, from the moment it waits for them."""
        found = []
        others, asked = self._parts_of_others(), self._asked()
        for peer in self.adverts:
            advert, engine = self._offer(peer, service), self._engine_of(peer)
            if advert is None or advert.model is None or engine is None:
                continue
            part = find_part(peer, self.adverts, asked)
            hardware, fits = advert.hardware, min(advert.fits, advert.model.layers)
            # An engine measures its device when it starts. One that waits for others has not started:
            # it is planned with guesses until then.
            measured = min(engine.tflops, engine.memory_gbps) >= MIN_FIGURE
            is_alone = fits == advert.model.layers and peer not in others
            if is_alone and not measured:
                continue
            per_gpu = tuple(figure * advert.tp for figure in UNMEASURED_GPU)
            guessed = per_gpu if hardware.gpus else UNMEASURED_CPU
            tflops, memory_gbps = (engine.tflops, engine.memory_gbps) if measured else guessed
            found.append(
                BoxView(
                    peer=peer,
                    service=service,
                    model=advert.model.shape,
                    fits=fits,
                    ready=engine.state == "ready" and not advert.hung if is_alone else engine.state != "failed",
                    draining=advert.draining or is_planned_without(advert.ends_in_s),
                    compute_tflops=tflops,
                    memory_gbps=memory_gbps,
                    memory_gib=sum(gpu.memory_gib for gpu in hardware.gpus) or hardware.memory_gib,
                    kv_tokens=int(engine.kv_tokens * part),
                    tp=advert.tp,
                    emulated=hardware.emulated,
                    card=hardware.gpus[0].name if hardware.gpus else "",
                    specs=hardware.emulated_as,
                    card_link_gbps=_card_link_gbps(hardware),
                    usd_per_hour=advert.usd_per_hour,
                    phase=advert.phase,
                    site=self._table(peer).site,
                    profile=advert.profile,
                    stages=engine.stages,
                    beside=engine.beside.room,
                    part=part,
                )
            )
        return found

    def _asked(self) -> frozenset[str]:
        """Services of which gateways tell that they are asked now."""
        told = (each for each in self.adverts.values() if each.demand is not None and each.demand.requests_s > 0.0)
        return frozenset(each.model.service for each in told if each.model is not None)

    def _parts_of_others(self) -> frozenset[str]:
        """Boxes whose engines say nothing of themselves alone: stages of the running plans, and those on their way to
        another group."""
        replicas = (replica for plan in self.plans.values() for replica in plan.replicas)
        stages = {peer for replica in replicas if len(replica.stages) > 1 for peer in replica.peers}
        return frozenset(stages) | self._regrouping_now()

    def _regrouping_now(self) -> frozenset[str]:
        """The boxes that take another part now."""
        under_way = [plan.regrouping for plan in self.plans.values() if plan.regrouping is not None]
        return frozenset(box for regrouping in under_way for box in regrouping.boxes)

    def signs(self) -> dict[str, BoxSign]:
        """What boxes show of how they are. The engine of a box with a part of the model also ends when another box of
        its replica is lost, so that says nothing of this one; and one that takes another part does as it is told."""
        found = {}
        others, regrouping = self._parts_of_others(), self._regrouping_now()
        for peer, advert in self.adverts.items():
            if advert.model is not None and advert.engine is not None:
                is_alone, engine = advert.fits >= advert.model.layers and peer not in others, advert.engine
                leaves = advert.draining or is_planned_without(advert.ends_in_s)
                found[str(peer)] = BoxSign(
                    serves=engine.state == "ready" and not advert.hung if is_alone else True,
                    started=engine.starts if is_alone else 0,
                    leaving=leaves or peer in regrouping,
                )
        return found

    def links(self) -> list[LinkView]:
        """Links as the boxes at their beginnings tell of them, by source and target: round trips, rates and prices."""
        return self._planner_links.between(self.adverts, self.links_told)

    def kv_links(self, sources: Iterable[str], target: PeerId, codec: str) -> KvLinks | None:
        """What is known of KV on its way from some boxes to one other, in this codec; None: it cannot be said."""
        advert = self.adverts.get(target)
        if advert is None or advert.model is None or codec not in CODEC_NAMES:
            return None
        links = self._planner_links.to(target, map(PeerId, sources), self.adverts, self.links_told)
        gigabits = kv_gigabits(advert.model.shape, 1.0, codec_named(codec).bits)
        return KvLinks(gigabits, lambda source, _: links.get(source))

    def lines(self) -> dict[str, BoxLine]:
        """By box, the best that was measured over its links, beside what was offered: both ends' owners say."""
        up: dict[str, float] = {}
        down: dict[str, float] = {}
        offered_down = {str(peer): table.box.down_gbps or inf for peer, table in self.links_told.items()}
        for source, table in self.links_told.items():
            offered_up = table.box.up_gbps or inf
            for target, figures in table.links.items():  # thousands of them, on the event loop
                offered = min(offered_up, offered_down.get(target, inf))
                if offered == inf or figures.source is not Source.MEASURED or not figures.rate_confidence:
                    continue
                share = figures.capacity_gbps / offered
                if share > up.get(source, -1.0):
                    up[source] = share
                if share > down.get(target, -1.0):
                    down[target] = share
        return {
            peer: BoxLine(up.get(peer) if table.box.up_gbps else None, down.get(peer) if table.box.down_gbps else None)
            for peer, table in self.links_told.items()
        }

    def worth(self, service: str) -> dict[str, BoxWorth]:
        """What the boxes of a service are worth, those of them that have a price."""
        boxes = self.boxes(service)
        priced = any(box.usd_per_hour for box in boxes)
        if not priced:
            return {}
        longest = max(box.kv_tokens for box in boxes) or UNKNOWN_LONGEST
        return weigh_boxes(boxes, self.lines(), expected_workload(self.demands(service).values(), longest))

    def demands(self, service: str) -> dict[PeerId, Demand]:
        """What the gateways of a service have been asked lately; where none has been asked anything since it was
        started, what the catalogue remembers."""
        offers = [(peer, offer) for peer in self.adverts if (offer := self._offer(peer, service)) is not None]
        found = {peer: offer.demand for peer, offer in offers if offer.demand is not None}
        for peer, offer in offers if not found else ():
            entry = self.catalogue.entry_of(service, offer.model.name) if offer.model is not None else None
            if entry is not None and entry.lengths is not None:
                return {peer: Demand(requests_s=0.0, arrival_cv=1.0, lengths=(entry.lengths,))}
        return found

    def boxes_of_others(self, service: str) -> frozenset[str]:
        """Boxes that offer another service."""
        offers = ((peer, advert.model) for peer, advert in self.adverts.items())
        return frozenset(str(peer) for peer, model in offers if model is not None and model.service != service)

    def services(self) -> tuple[str, ...]:
        """Services that any member offers, in order of name."""
        return tuple(sorted({a.model.service for a in self.adverts.values() if a.model is not None}))

    def weigh_reports(self, own: Mapping[PeerId, Queue]) -> None:
        """Note how much of each new report is others' work: what it says beyond the requests that this gateway has
        there itself. To be called when reports come: a gateway knows of its own requests at once, of others' a second
        late, and its own that have ended since are not to be counted until the next report."""
        for peer, advert in self.adverts.items():
            stats = advert.stats
            if stats is not None and stats is not self._weighed.get(peer):
                mine = own.get(peer, NO_QUEUE)
                self._others[peer] = count_others(stats.running + stats.waiting, stats.pending_prefill_tokens, mine)
        told = {peer: advert.stats for peer, advert in self.adverts.items()}
        self._answers = {peer: each for peer, each in self._answers.items() if each[1].stats is told.get(peer)}
        self._weighed = {peer: advert.stats for peer, advert in self.adverts.items() if advert.stats is not None}

    def loads(self, own: Mapping[PeerId, Queue]) -> list[Load]:
        """Of every node with an engine: what this gateway has there, and others' work."""
        loads = []
        for peer, advert in self.adverts.items():
            stats, engine = advert.stats, advert.engine
            if engine is None:
                continue
            mine, others = self._queues_at(peer, own)
            answer, told = self._answers.get(peer), None
            if answer is not None and answer[1].stats is stats:
                state, asked = answer
                since = count_others(state.requests, state.prefill_tokens, asked.queue)
                told = msgspec.structs.replace(
                    state,
                    requests=mine.requests + since.requests,
                    prefill_tokens=mine.pending_prefill_tokens + since.pending_prefill_tokens,
                )
            sent_after, sent = self._sent.get(peer, (None, 0))
            loads.append(
                Load(
                    replica=peer,
                    outstanding=mine.requests + others.requests,
                    prefill_tokens=mine.pending_prefill_tokens + others.pending_prefill_tokens,
                    kv_free_tokens=stats.kv_free_tokens if stats else engine.kv_tokens,
                    decodes=stats.decodes if stats else 0,
                    sent_tokens=sent if sent_after is stats else 0,
                    told=told,
                    beside=self._work_beside(peer, own),
                )
            )
        return loads

    def _queues_at(self, peer: PeerId, own: Mapping[PeerId, Queue]) -> tuple[Queue, Queue]:
        """This gateway's and others' work, as far as the node has reported any."""
        advert = self.adverts.get(peer)
        is_told = advert is not None and advert.stats is not None
        return own.get(peer, NO_QUEUE), self._others.get(peer, NO_QUEUE) if is_told else NO_QUEUE

    def _work_beside(self, peer: PeerId, own: Mapping[PeerId, Queue]) -> WorkBeside:
        """At the other nodes of its box whose engines share its GPUs."""
        beside = [PeerId(each) for each in find_beside(peer, self.adverts) if each != peer]
        queues = [queue for each in beside for queue in self._queues_at(each, own)]
        return WorkBeside(sum(each.requests for each in queues), sum(each.pending_prefill_tokens for each in queues))

    def own_work(self, peer: PeerId, own: Mapping[PeerId, Queue]) -> OwnWork:
        """To be told with what the node answers."""
        advert = self.adverts.get(peer)
        stats = advert.stats if advert is not None else None
        return OwnWork(stats, own.get(peer, NO_QUEUE))

    def note_answer(self, peer: PeerId, answer: PoolState, asked: OwnWork) -> None:
        """How it stands at a node, which counts more than its report until the next one."""
        self._answers[peer] = answer, asked

    def note_sent(self, peer: PeerId, prompt_tokens: int) -> None:
        """This gateway sends a prompt there. It counts until the node's next report."""
        advert = self.adverts.get(peer)
        stats = advert.stats if advert is not None else None
        after, tokens = self._sent.get(peer, (stats, 0))
        self._sent[peer] = (stats, prompt_tokens + (tokens if after is stats else 0))

    def take_back_sent(self, peer: PeerId, prompt_tokens: int) -> None:
        """One has been refused there."""
        after, tokens = self._sent.get(peer, (None, 0))
        self._sent[peer] = (after, max(0, tokens - prompt_tokens))

    def round_trips(self, peer: PeerId) -> dict[str, float]:
        """Between this box and others, in seconds, as far as they are known."""
        return self._planner_links.round_trips(peer, self.adverts, self.links_told) | {peer: 0.0}

    def reported_loads(self, plan: Plan) -> ReplicaLoads:
        """What the replicas of a plan report; those that do not are silent."""
        loads = ReplicaLoads(replica.id for replica in plan.replicas)
        for replica in plan.replicas:
            advert = self.adverts.get(PeerId(replica.head))
            stats = advert.stats if advert is not None else None
            if stats is not None:
                requests = stats.running + stats.waiting
                loads.note(
                    replica.id, requests, stats.pending_prefill_tokens, stats.kv_free_tokens, decodes=stats.decodes
                )
        return loads

    def gateways_like(self, own: Demand | None, service: str) -> float:
        """How many times the requests of the gateway that has seen `own` all gateways of a service have: at most as
        many as there are gateways with requests."""
        rates = [demand.requests_s for demand in self.demands(service).values() if demand.requests_s > 0.0]
        if own is None or not own.requests_s > 0.0:
            return max(1.0, float(len(rates)))
        return max(1.0, min(float(len(rates)), sum(rates) / own.requests_s))

    def _table(self, peer: PeerId) -> LinkTable:
        """What a member says of its links."""
        return self.links_told.get(peer, _NO_LINKS)

    def _offer(self, peer: str, service: str) -> Advert | None:
        """The advert of a box, if it offers the service."""
        advert = self.adverts.get(PeerId(peer))
        return advert if advert is not None and advert.model is not None and advert.model.service == service else None

    def _engines(self, service: str) -> Iterator[tuple[Advert, EngineAdvert]]:
        """The boxes that offer the service and have an engine for it."""
        for peer in self.adverts:
            advert = self._offer(peer, service)
            if advert is not None and advert.engine is not None:
                yield advert, advert.engine

    def _engine_of(self, peer: str) -> EngineAdvert | None:
        advert = self.adverts.get(PeerId(peer))
        return advert.engine if advert is not None else None


def _card_link_gbps(hardware: Hardware) -> float:
    """Gb/s between two GPUs of a box, by what is known of the card; one that is not in the table counts as on PCIe."""
    if not hardware.gpus:
        return PCIE_GBPS[UNKNOWN_CARD_PCIE]
    try:
        return card_link_gbps(gpu_table().find(hardware.gpus[0].name))
    except GpuError:
        return PCIE_GBPS[UNKNOWN_CARD_PCIE]
