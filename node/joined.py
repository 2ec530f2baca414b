"""What every member of a network does, with an engine or without: follows what others tell."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, final

import msgspec
import trio

from ..bootstrap import Address, PeerId, Role
from ..bootstrap.addresses import names_one_place
from ..bootstrap.members.states import Member, MemberState
from ..bootstrap.network import Network
from ..coordinator import Plan
from ..coordinator.names import count_of, name_of
from ..coordinator.services.catalogue import ServiceCatalogue
from . import messages, methods
from .adverts import fit_status
from .catalogue.messages import HOSTING, read_hosting
from .links.link_knowledge import LinkKnowledge
from .links.prober import Neighbour
from .links.reach import choose_relays
from .observing.event_log import EventLog
from .observing.rates import CounterRates
from .observing.values import EventKind
from .owner.dividing import Tell, tell_nobody
from .planning.messages import PLAN_BUNDLE
from .planning.plan_intake import PlanIntake
from .settings import NodeSettings
from .view import NetworkView

MAX_GONE_S: Final = 1e6  # what `NodeStatus` takes
MAX_TOKENS_S: Final = 1e9  # a box may say that it has written anything: nobody writes so much
RATES_S: Final = 1.0  # between two readings of what boxes have written

Say = Callable[[str], None]
Leader = tuple[PeerId, int]


@final
class Joined:
    """A node that has been admitted. `say` tells its owner; `followed`: the plans that an earlier run followed last."""

    def __init__(
        self,
        network: Network,
        settings: NodeSettings,
        say: Say,
        followed: tuple[Plan, ...] = (),
        log: EventLog | None = None,
    ) -> None:
        self.network = network
        self.log = log if log is not None else EventLog(network.peer_id, time.time)
        self.record = self.log.record
        self.own = network.peer_id
        self.settings = settings
        self.say = say
        self.show: Say = say  # how far long work is, for its owner: of interest until it is done
        self.tell: Tell = tell_nobody  # the command that runs several nodes of this machine
        self.view = NetworkView()
        # Boxes behind one address are one site unless their owners say otherwise: thirty boxes have 870 links.
        host = network.address.host
        site = settings.links.site or (host if names_one_place(host) else "")
        self.knowledge = LinkKnowledge(self.own, replace(settings.links, site=site), settings.tuning)
        self.leader: Leader | None = None
        self.is_leaving = False  # about to hang up on everybody: nobody else is gone
        self.key_usd: Callable[[], dict[str, float]] = dict  # what API keys have cost here; none without a gateway
        self._addresses: dict[PeerId, Address] = {}
        self._closed: frozenset[PeerId] = frozenset()
        self._present: set[PeerId] = set()
        self.intake = PlanIntake(self.own, settings.tuning)
        self._followed = followed
        self._states: dict[PeerId, MemberState] = {}
        self._phase = ""
        self._hosting: tuple[Leader, bytes] | None = None  # what was looked at last
        self._tokens: CounterRates[PeerId] = CounterRates()
        self._rates_at = -RATES_S
        network.handle(methods.STATUS, self._on_status)
        network.on_hung(self._record_hung)

    def __repr__(self) -> str:
        return f"<Joined {self.own} leader={self.leader} {self.knowledge}>"

    def address_of(self, peer: PeerId) -> Address | None:
        """Where a member can be dialled."""
        return self._addresses.get(peer)

    def is_closed(self, peer: PeerId) -> bool:
        """Whether a member, or this node, says that nobody can dial it."""
        return self.network.is_closed if peer == self.own else peer in self._closed

    def can_dial(self, peer: PeerId) -> bool:
        """Whether a member has an address at which it can be dialled."""
        return peer in self._addresses and peer not in self._closed

    def relays_to(self, peer: PeerId) -> list[PeerId]:
        """Members to ask for a connection to one that nobody can dial, best first."""
        boxes = {*self._addresses, self.own}
        return choose_relays(
            peer, boxes, self._closed | {self.own}, self.network.connected(), self.network.settings.full_mesh
        )

    @property
    def present(self) -> frozenset[PeerId]:
        """The other nodes that may be alive and can be dialled."""
        return frozenset(self._addresses)

    def neighbours(self) -> list[Neighbour]:
        """The other nodes that are alive."""
        members = self._others(self.network.members(), MemberState.ALIVE)
        return [Neighbour(member.peer_id, member.rtt_s) for member in members if member.address.port]

    def publish(self, kind: str, message: msgspec.Struct) -> bytes:
        """Tell all members; returns what they read."""
        payload = msgspec.msgpack.encode(message)
        try:
            self.network.publish(kind, payload)
        except ValueError as error:  # too large to be gossiped: worth a line, not a node
            self.say(f"the {kind} was not published: {error}")
        return payload

    def follow(self) -> None:
        """Take in members, links, the coordinator and its plans as of now. Adverts have been taken in before."""
        self.view.update_links(self.network.entries(messages.LINKS))
        before = self.view.catalogue
        if self.view.update_catalogue(self.network.orders.documents):
            self._say_catalogue(before)
        # One that is merely suspected still takes KV: the plan says who is used, and a transfer shows whether it works.
        members = self.network.members()
        present = self._others(members, MemberState.ALIVE, MemberState.SUSPECT)
        self._addresses = {member.peer_id: member.address for member in present if member.address.port}
        self._closed = frozenset(member.peer_id for member in present if member.is_closed)
        self.knowledge.learn(self.view.links_told, self._addresses)
        self._record_members(members)
        now = trio.current_time()
        dead = self._others(members, MemberState.DEAD)
        self.view.dead_at = {member.peer_id: now - (member.gone_s or 0.0) for member in dead}
        self._learn_rates(now)
        self._say_members({member.peer_id for member in self._others(members, MemberState.ALIVE)})
        leader = self.network.coordinator
        if leader != self.leader:
            self.leader = leader
            if leader is None:
                self.record(EventKind.COORDINATOR_LOST)
            else:
                self.record(EventKind.COORDINATOR_ELECTED, peer=leader[0], epoch=leader[1])
                who = "this node" if leader[0] == self.own else name_of(leader[0])
                self.say(f"coordinator: {who} (epoch {leader[1]})")
        if leader is not None:
            self._recall_plan(leader[1])
            self._consider_plan(leader)
        else:
            self.intake.on_leader_lost()

    def take_plan(self) -> None:
        """Follow the coordinator's latest plans, if their bytes are here; the owner hears what they mean for this
        node."""
        for plan, author in self.intake.plans:
            if self.view.consider_plan(plan, author):
                phase = plan.phase_of(self.own)
                role = f"this node: {phase.value}" if phase is not None else "this node has no part in it"
                self._record_plan(plan)
                replicas = count_of(len(plan.replicas), "replica")
                self.say(f"plan {plan.epoch}.{plan.version} for {plan.service}: {replicas}; {role}")

    async def tell_links(self) -> None:
        """Publish what this node knows of its links, when it has changed and not often: it is for choosing paths."""
        tuning = self.settings.tuning
        published: messages.LinkTable | None = None
        while True:
            await trio.sleep(tuning.links_interval_s * max(1.0, len(self._present) / tuning.links_nodes))
            table = self.knowledge.table(published, trio.current_time(), time.time())
            if table != published:
                published = table
                self.publish(messages.LINKS, table)

    def _say_catalogue(self, before: ServiceCatalogue) -> None:
        """What is in it, where that is news: not what it has learned of requests."""
        catalogue = self.view.catalogue
        known = [[(entry.name, entry.model) for entry in each.entries] for each in (before, catalogue)]
        if before.version and known[0] == known[1] and before.removed == catalogue.removed:
            return
        names = ", ".join(entry.name for entry in catalogue.entries) or "nothing but what boxes bring"
        self.say(f"catalogue, version {catalogue.version}: {names}")

    def _consider_plan(self, leader: Leader) -> None:
        entry, bundle = (self.network.entries(kind).get(leader[0], b"") for kind in (messages.PLAN, PLAN_BUNDLE))
        if entry or bundle:
            self.intake.see(leader, entry, trio.current_time(), bundle)
        self.take_plan()
        hosting = self.network.entries(HOSTING).get(leader[0], b"")
        if (leader, hosting) != self._hosting:
            self._hosting, found = (leader, hosting), read_hosting(hosting)
            if found is not None and found.epoch == leader[1]:
                self.view.hosting = found

    def _recall_plan(self, epoch: int) -> None:
        """Go on by what an earlier run followed, once there is a coordinator: not by a plan of a later epoch than its.
        A network whose members have all lost their state counts anew, and would come to no newer plan."""
        for plan in self._followed:
            if plan.epoch <= epoch:
                self.view.consider_plan(plan)
        self._followed = tuple(plan for plan in self._followed if plan.epoch > epoch)

    def _record_plan(self, plan: Plan) -> None:
        number, replicas = f"{plan.epoch}.{plan.version}", len(plan.replicas)
        why = "; ".join(plan.why)
        self.record(EventKind.PLAN_FOLLOWED, plan=number, service=plan.service, replicas=replicas, why=why)
        phases = (each.phase_of(self.own) for each in self.view.plans.values())
        phase = next((found.value for found in phases if found is not None), "")
        if phase != self._phase:
            self.record(EventKind.PHASE_CHANGED, phase=phase or "none", before=self._phase or "none", plan=number)
            self._phase = phase

    def _record_members(self, members: tuple[Member, ...]) -> None:
        """What has become of the other boxes. One that is suspected may be alive, and nothing has become of it."""
        kinds = {MemberState.ALIVE: EventKind.MEMBER_JOINED, MemberState.DEAD: EventKind.MEMBER_DEAD}
        kinds[MemberState.LEFT] = EventKind.MEMBER_LEFT
        seen: dict[PeerId, MemberState] = {}
        for member in self._others(members, *MemberState):
            before = self._states.get(member.peer_id)
            seen[member.peer_id] = before if member.state is MemberState.SUSPECT and before else member.state
            is_news = member.state is not before and (before is not None or member.state is MemberState.ALIVE)
            if is_news and member.state in kinds:
                self.record(kinds[member.state], peer=member.peer_id, address=str(member.address))
        self._states = seen

    def _record_hung(self, peer: PeerId, hung: bool) -> None:
        self.record(EventKind.MEMBER_HUNG if hung else EventKind.MEMBER_ANSWERS, peer=peer)

    def _say_members(self, alive: set[PeerId]) -> None:
        for peer in sorted(alive - self._present):
            self.say(f"joined: {name_of(peer)}")
        for peer in sorted(self._present - alive):
            if not self.is_leaving:
                self.say(f"gone: {name_of(peer)}")
        self._present = alive

    def _others(self, members: tuple[Member, ...], *states: MemberState) -> list[Member]:
        return [
            member
            for member in members
            if member.peer_id != self.own and member.role is not Role.CLIENT and member.state in states
        ]

    def _learn_rates(self, now: float) -> None:
        """From what boxes say that they have written since they were started."""
        if now - self._rates_at >= RATES_S:
            self._rates_at = now
            told = ((peer, advert.served) for peer, advert in self.view.adverts.items())
            self._tokens.learn({peer: served.decoded_tokens for peer, served in told if served is not None}, now)

    async def _on_status(self, peer: PeerId, role: Role, body: messages.StatusQuery) -> messages.Status:
        status = fit_status(self.status())
        # What the owner's customers have spent is for the owner: the network is full of rented boxes and of clients.
        is_owners = role is Role.ADMIN or peer == self.own
        return msgspec.structs.replace(status, key_usd=self.key_usd()) if is_owners else status

    def status(self) -> messages.Status:
        """The network as this node sees it."""
        leader, tokens_s = self.network.coordinator, self._tokens.rates()
        return messages.Status(
            answered_by=self.own,
            coordinator=leader[0] if leader else None,
            epoch=leader[1] if leader else 0,
            nodes=tuple(
                messages.NodeStatus(
                    peer=member.peer_id,
                    role=member.role.value,
                    state=member.state.value,
                    address=str(member.address),
                    rtt_s=member.rtt_s,
                    advert=self.view.adverts.get(member.peer_id),
                    links=self.view.links_told.get(member.peer_id),
                    gone_s=_at_most(member.gone_s, MAX_GONE_S),
                    closed=member.is_closed,
                    tokens_s=_at_most(tokens_s.get(member.peer_id), MAX_TOKENS_S),
                )
                for member in self.network.members()
            ),
            plan=(plan := self.view.plan),
            catalogue=self.view.catalogue if self.view.catalogue.version else None,
            other_plans=tuple(each for _, each in sorted(self.view.plans.items()) if each is not plan),
            worth={peer: worth for each in self.view.services() for peer, worth in self.view.worth(each).items()},
        )


def _at_most(figure: float | None, bound: float) -> float | None:
    return None if figure is None else min(figure, bound)
