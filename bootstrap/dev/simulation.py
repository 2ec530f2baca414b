"""The machines of many nodes on a simulated network: the same :class:`..members.peering.Peering` that
nodes run, with clocks, wires and faults that are made here.

What is simulated: dials and greetings, sessions, messages with latency; on request loss, duplication
and reordering of single messages (harsher than the real control streams, which keep order),
partitions, killed, hung, paused and restarted nodes, and boxes that nobody can dial: they dial, and a
third one brings two of them together, as long as it lives. Not simulated: processor time, and bandwidth.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Final

import msgspec

from ..addresses import Address
from ..errors import NetworkError
from ..members.admission import Admission
from ..members.mesh import Dial
from ..members.neighbours import Contacts
from ..members.overlay import choose_neighbours
from ..members.peering import Peering
from ..members.states import EntryRules, GossipMessage, NetworkState
from ..settings import NetworkSettings
from ..streams.control import PROTOCOL_VERSION, Hello
from ..trust.entries import MEMBER_KIND, MemberRecord, is_sound
from ..trust.identity import Identity, NetworkKey
from ..trust.keys import PeerId
from ..trust.tokens import Bootstrap, JoinToken, Role

EPOCH_S: Final = 1_000_000.0  # unix seconds at which the simulation starts
FRAME_BYTES: Final = 48  # of a message beside its body: method, tag, Noise, yamux
PING_BYTES: Final = 40
_NEVER: Final = float("inf")


@cache
def identity_of(seed: int) -> Identity:
    """The identity of the node with this number."""
    return Identity(seed.to_bytes(32, "big"))


is_sound_cached = lru_cache(maxsize=1 << 16)(is_sound)  # the same nodes' entries reach all the others


@dataclass(slots=True)
class Weather:
    """What becomes of single messages."""

    latency_s: float = 0.01
    jitter_s: float = 0.0  # more than between two messages: they arrive out of order
    loss: float = 0.0
    duplication: float = 0.0


@dataclass(slots=True, eq=False)
class SimulatedSession:
    """One side's view of a session."""

    other: "SimulatedNode"
    since: float
    dialled_by_me: bool
    relay: "SimulatedNode | None" = None  # the third one that it goes over, between two that nobody can dial


@dataclass(eq=False)
class SimulatedNode:
    """One running node: the machine, and its ends of sessions."""

    name: str
    identity: Identity
    place: Address
    role: Role
    token: JoinToken
    born: int
    admission: Admission
    peering: Peering
    sessions: dict[PeerId, SimulatedSession] = field(default_factory=dict)
    heard: dict[PeerId, float] = field(default_factory=dict)
    is_walled: bool = False  # nobody can dial it
    is_closed: bool = False  # and it has found that out, and says so
    is_running: bool = True
    is_joined: bool = False
    paused_until: float = 0.0
    behind_s: float = 0.0  # how long its clock has stood still
    wall_s: float = 0.0  # how far its wall clock is ahead of the others'
    waiting: list[Callable[[], None]] = field(default_factory=list)  # what came while it was paused
    next_tick: float = _NEVER
    bytes_heard: int = 0

    @property
    def peer(self) -> PeerId:
        """Its peer id."""
        return self.identity.peer_id


class Simulation:
    """A network of machines. Time passes in :meth:`run`.

    Args:
        rules: see :class:`..members.states.EntryRules`.
        count_bytes: whether messages are encoded, to count their bytes; that costs time.
    """

    def __init__(
        self,
        *,
        settings: NetworkSettings | None = None,
        weather: Weather | None = None,
        seed: int = 7,
        rules: EntryRules | None = None,
        count_bytes: bool = False,
    ) -> None:
        self.now = 0.0
        self.settings = settings or NetworkSettings()
        self.weather = weather or Weather()
        self.nodes: dict[str, SimulatedNode] = {}
        self.key = NetworkKey(b"n" * 32)
        self.rng = random.Random(seed)
        self.messages = 0
        self.on_event: Callable[[str], None] = _ignore
        self.on_tick: Callable[[SimulatedNode], None] = _ignore
        self._rules = replace(rules or EntryRules(), is_sound=is_sound_cached)
        self._counts_bytes = count_bytes
        self._encoded: dict[int, tuple[GossipMessage, int]] = {}
        self._tokens: dict[tuple[Role, bool], JoinToken] = {}
        self._places: dict[Address, SimulatedNode] = {}
        self._groups: dict[str, int] = {}  # name -> side of the partition; who is on none reaches everybody
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    # -- what happens to nodes ----------------------------------------------------------------------------------------

    def token(self, role: Role = Role.WORKER, *, lead: bool = True) -> JoinToken:
        """The token that nodes of this kind join with."""
        if (role, lead) not in self._tokens:
            text = self.key.issue((), role, EPOCH_S + 1e6, lead=lead and role is not Role.CLIENT, uses=4096)
            self._tokens[role, lead] = JoinToken.parse(text)
        return self._tokens[role, lead]

    def add(
        self,
        name: str,
        identity: Identity,
        place: Address,
        *,
        named: Iterable[Bootstrap] = (),
        standby: Iterable[Bootstrap] = (),
        token: JoinToken | None = None,
        ticked: bool = True,
        wall_s: float = 0.0,
    ) -> SimulatedNode:
        """Start a node now; its box's wall clock is ahead by `wall_s`."""
        token = token or self.token()
        born = int((EPOCH_S + self.now + wall_s) * 1000)
        admission, named = Admission(token.network), tuple(named)
        peering = Peering(
            identity,
            token.role,
            incarnation=born,
            admission=admission,
            settings=self.settings,
            rng=random.Random(f"{name} {self.now} {self.rng.random()}"),
            contacts=Contacts(named=named, standby=tuple(standby)),
            rules=self._rules,
        )
        node = SimulatedNode(name, identity, place, token.role, token, born, admission, peering, wall_s=wall_s)
        node.is_joined = not named
        self.nodes[name] = self._places[place] = node
        self.publish_record(node)
        if ticked:
            self._tick(node)
        return node

    def found(self, count: int) -> list[SimulatedNode]:
        """Start nodes that have known each other for a while: with each other's records, and sessions with their
        neighbours. (That a thousand join one after the other takes long to simulate, and is another question.)"""
        nodes = [
            self.add(str(number), identity_of(number), Address("192.0.2.1", 4000 + number), ticked=False)
            for number in range(1, count + 1)
        ]
        by_peer = {node.peer: node for node in nodes}
        known = NetworkState(entries=tuple(node.peering.table.own_entries()[0] for node in nodes))
        for node in nodes:
            node.peering.restore(known, self.now)
        for node in nodes:
            for peer in choose_neighbours(node.peer, by_peer.keys(), full_mesh=self.settings.full_mesh):
                if peer not in node.sessions:
                    self._open(node, by_peer[peer])
        return nodes

    def publish_record(self, node: SimulatedNode, *, left: bool = False) -> None:
        """Let a node say who it is."""
        # A token of another network is shown as it is: refusing it is for those who are shown it.
        credential, place = node.token.credential(node.peer), node.place
        record = MemberRecord(node.role, place.host, place.port, credential, left, node.is_closed)
        node.peering.publish(MEMBER_KIND, msgspec.msgpack.encode(record))
        self.wake(node)

    def note_closed(self, name: str) -> None:
        """A node has found out that nobody can dial it, and says so."""
        node = self.nodes[name]
        node.is_closed = True
        self.publish_record(node)

    def kill(self, name: str) -> None:
        """End a process: its connections close, also those that went over it, and nobody answers at its address."""
        node = self.nodes[name]
        self.stop(node)
        for peer in list(node.sessions):
            self.close(node, peer, also_there=True)
        for one in self.running():
            for peer in [peer for peer, held in one.sessions.items() if held.relay is node]:
                self.close(one, peer, also_there=True)

    def vanish(self, name: str) -> None:
        """Cut a box off for ever: nobody hears that it is gone."""
        self.stop(self.nodes[name])

    def leave(self, name: str) -> None:
        """Let a node say that it goes, and go."""
        node = self.nodes[name]
        node.peering.is_leaving = True
        self.publish_record(node, left=True)
        self._tick(node)
        self.after(3 * self.weather.latency_s + self.weather.jitter_s, lambda: self.kill(name))

    def pause(self, name: str, seconds: float) -> None:
        """Give a node no processor time for so long: what comes waits, and its timers are late."""
        node = self.nodes[name]
        node.paused_until = max(node.paused_until, self.now + seconds)
        self.after(seconds, lambda: self._resume(node))

    def suspend(self, name: str, seconds: float) -> None:
        """Close the lid: as :meth:`pause`, and the node's own clock stands still."""
        node = self.nodes[name]
        node.paused_until = max(node.paused_until, self.now + seconds)

        def wake_up() -> None:
            node.behind_s += seconds
            self._resume(node)

        self.after(seconds, wake_up)

    def split(self, *groups: Iterable[str]) -> None:
        """Let nothing pass between these groups of names."""
        self._groups = {name: side for side, group in enumerate(groups) for name in group}

    def heal(self) -> None:
        """Let everything pass again."""
        self._groups = {}

    def lose(self, one: str, other: str, *, also_there: bool = True) -> None:
        """Close the session of two; or only one end of it."""
        self.close(self.nodes[one], self.nodes[other].peer, also_there=also_there)

    # -- time ----------------------------------------------------------------------------------------------------------

    def after(self, delay: float, event: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now + delay, next(self._count), event))

    def run(self, seconds: float) -> None:
        """Let so many seconds pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end

    def wake(self, node: SimulatedNode) -> None:
        """Tick a node at once: something happened there."""
        self._wake_at(node, self.now)

    def time_of(self, node: SimulatedNode) -> float:
        """What the node's own clock says."""
        return self.now - node.behind_s

    def running(self) -> list[SimulatedNode]:
        """The nodes that run, hung ones included."""
        return [node for node in self.nodes.values() if node.is_running]

    def passes(self, one: SimulatedNode, other: SimulatedNode) -> bool:
        """Whether anything gets from one node to another now."""
        sides = self._groups.get(one.name), self._groups.get(other.name)
        return (None in sides or sides[0] == sides[1]) and one.is_running and other.is_running

    def reaches(self, one: SimulatedNode, other: SimulatedNode) -> bool:
        """Whether two can have a session now."""
        if not (one.is_walled and other.is_walled):
            return self.passes(one, other)
        return any(self._passes_over(one, each, other) for each in self.running() if not each.is_walled)

    def _passes_over(self, one: SimulatedNode, relay: SimulatedNode | None, other: SimulatedNode) -> bool:
        if relay is None:
            return self.passes(one, other)
        return self.passes(one, relay) and self.passes(relay, other) and self.now >= relay.paused_until

    def _find_way(self, one: SimulatedNode, other: SimulatedNode) -> tuple[bool, SimulatedNode | None]:
        """Whether a dial gets to another node now, and over which third one that has sessions with both."""
        if not other.is_walled:
            return self.passes(one, other), None
        for each in self.running():
            knows_both = not each.is_walled and {one.peer, other.peer} <= each.sessions.keys()
            if other.is_closed and knows_both and self._passes_over(one, each, other):
                return True, each
        return False, None

    def stop(self, node: SimulatedNode) -> None:
        """A node does nothing any more."""
        node.is_running = False
        if self._places.get(node.place) is node:
            del self._places[node.place]

    def close(self, node: SimulatedNode, peer: PeerId, *, also_there: bool) -> None:
        """Close one end of a session, and perhaps the other."""
        held = node.sessions.pop(peer, None)
        if held is None:
            return
        node.heard.pop(peer, None)
        self._handle(node, lambda: node.peering.on_closed(peer, self.time_of(node)))
        back = held.other.sessions.get(node.peer)
        if also_there and back is not None and back.other is node:
            self.close(held.other, node.peer, also_there=False)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _handle(self, node: SimulatedNode, event: Callable[[], None]) -> None:
        """Let a node handle something now, or when it gets time again."""
        if not node.is_running:
            return
        if self.now < node.paused_until:
            node.waiting.append(event)
            return
        event()
        self.wake(node)

    def _resume(self, node: SimulatedNode) -> None:
        if node.is_running and self.now >= node.paused_until:
            self._tick(node)  # timers fire before anything that has come is read, as in the worst case
            waiting, node.waiting = node.waiting, []
            for event in waiting:
                event()
            self.wake(node)

    def _wake_at(self, node: SimulatedNode, at: float) -> None:
        if at == _NEVER or self.now <= node.next_tick <= at:
            return
        node.next_tick = at

        def wake() -> None:
            if node.next_tick == at and self.now >= node.paused_until:
                self._tick(node)

        self.after(max(at - self.now, 0.0), wake)

    def _tick(self, node: SimulatedNode) -> None:
        if not node.is_running:
            return
        node.next_tick = _NEVER
        used = {peer: held.since for peer, held in node.sessions.items()}
        actions = node.peering.tick(self.time_of(node), node.heard, used)
        for peer in actions.drop:
            held = node.sessions.get(peer)
            if held is not None:
                self.close(node, peer, also_there=self._passes_over(node, held.relay, held.other))
        for peer in actions.ping:
            self._ping(node, peer)
        for peer, message in actions.send:
            self._send(node, peer, message)
        for peer in actions.part:
            self.after(2 * self.weather.latency_s + self.weather.jitter_s, partial(self._part, node, peer))
        for dial in actions.dial:
            self._dial(node, dial)
        self.on_tick(node)
        self._wake_at(node, max(actions.wake_at + node.behind_s, self.now + 0.005))

    def _part(self, node: SimulatedNode, peer: PeerId) -> None:
        self.close(node, peer, also_there=True)

    def _travel(self, node: SimulatedNode, peer: PeerId, size: int, deliver: Callable[[SimulatedNode], None]) -> None:
        """Let something arrive at the other end of a session, if it still is one."""
        held = node.sessions.get(peer)
        if held is None:
            return
        other, relay, weather = held.other, held.relay, self.weather

        def arrive() -> None:
            back = other.sessions.get(node.peer)
            if relay is not None and relay.is_running and self.now < relay.paused_until:
                self.after(relay.paused_until - self.now, arrive)  # the relay has it, and passes it on when it goes on
                return
            if back is None or back.other is not node or not self._passes_over(node, relay, other):
                return
            self.messages += 1
            other.bytes_heard += size

            def take() -> None:
                if node.peer in other.sessions:
                    other.heard[node.peer] = self.time_of(other)
                    deliver(other)

            if other.is_running and self.now >= other.paused_until:
                take()
                self._wake_at(other, max(other.peering.next_at() + other.behind_s, self.now))
            elif other.is_running:
                other.waiting.append(take)

        copies = 1 + (self.rng.random() < weather.duplication) if weather.duplication else 1
        for _ in range(copies):
            if not weather.loss or self.rng.random() >= weather.loss:
                jitter = self.rng.uniform(0.0, weather.jitter_s) if weather.jitter_s else 0.0
                self.after(weather.latency_s + jitter, arrive)

    def _ping(self, node: SimulatedNode, peer: PeerId) -> None:
        def answer(other: SimulatedNode) -> None:
            self._travel(other, node.peer, PING_BYTES, _ignore)

        self._travel(node, peer, PING_BYTES, answer)

    def _send(self, node: SimulatedNode, peer: PeerId, message: GossipMessage) -> None:
        def deliver(other: SimulatedNode) -> None:
            other.peering.on_received(node.peer, message, self.time_of(other))

        size = FRAME_BYTES + len(msgspec.msgpack.encode(message)) if self._counts_bytes else 0
        self._travel(node, peer, size, deliver)

    # -- dials and admission -------------------------------------------------------------------------------------------

    def _dial(self, node: SimulatedNode, dial: Dial) -> None:
        target = self._places.get(dial.address)
        # Who is cut off, hung or paused says nothing; where no process is, the box says so at once.
        is_silent = target is not None and (not self._find_way(node, target)[0] or self.now < target.paused_until)

        def end() -> None:
            there = self._places.get(dial.address)
            succeeded = dial.peer in node.sessions  # it may have dialled us meanwhile
            is_led, relay = (False, None) if there is None else self._find_way(node, there)
            if not succeeded and there is not None and is_led and self.now >= there.paused_until and node.is_running:
                succeeded = self._greet(node, there, relay)
            node.peering.on_dialled(dial.peer, succeeded, self.time_of(node))

        self.after(5.0 if is_silent else 4 * self.weather.latency_s, lambda: self._handle(node, end))

    def _greet(self, node: SimulatedNode, target: SimulatedNode, relay: SimulatedNode | None) -> bool:
        """Let each of two judge the other; whether there is a session now."""
        try:
            self._check_greeting(node, target)
            self.check_life(node, target)
            self._check_greeting(target, node)
        except NetworkError as error:
            self._refuse(node, target, str(error).split(";")[0])
            return False
        self._open(node, target, relay)
        target.is_joined = True  # where the one that it asks has dialled it first
        if not node.is_joined:
            node.is_joined = True
            self.on_event(f"{node.name} is let in by {target.name}")
        return True

    def _check_greeting(self, guest: SimulatedNode, judge: SimulatedNode) -> None:
        hello = Hello(PROTOCOL_VERSION, guest.token.network, guest.peering.table.own_entries()[0], guest.born)
        judge.admission.check_greeting(hello, guest.peer, EPOCH_S + self.now + judge.wall_s)

    def _open(self, node: SimulatedNode, target: SimulatedNode, relay: SimulatedNode | None = None) -> None:
        """A session of two that have let each other in."""
        own, theirs = node.peering.table.own_entries()[0], target.peering.table.own_entries()[0]
        for one, other, record, dialled in ((node, target, theirs, True), (target, node, own, False)):
            if other.peer in one.sessions:
                self.close(one, other.peer, also_there=False)
            now = self.time_of(one)
            one.sessions[other.peer] = SimulatedSession(other, now, dialled, relay)
            one.heard[other.peer] = now
            one.peering.on_opened(other.peer, record, now)
            self.wake(one)

    def check_life(self, node: SimulatedNode, target: SimulatedNode) -> None:
        """Raise NetworkError where another living node has the identity of the one that greets."""
        held = target.sessions.get(node.peer)
        is_other = held is not None and held.other is not node and held.other.is_running
        is_alive = held is not None and is_other and self._passes_over(held.other, held.relay, target)
        if target.peer == node.peer or is_alive:
            raise NetworkError("another living node has this identity")

    def _refuse(self, node: SimulatedNode, target: SimulatedNode, reason: str) -> None:
        self.on_event(f"{target.name} refuses {node.name}: {reason}")
        if not node.is_joined:
            self.stop(node)


def _ignore(*_: object) -> None:
    """What is done with what nobody listens to."""
