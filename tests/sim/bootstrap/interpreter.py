"""Runs golden scripts of membership: lines of text over the pure machines, with their own clock and wires.

A script is blocks of commands, each followed by `----` and the output that they must give::

    # Whoever has the lowest peer id claims once all have been there for a second.
    add a
    add b by a
    tick 3
    ----
    1.00 a: coordinator a in epoch 1
    ...

Nodes are called by letters in the order of their peer ids. Commands:

    add X [by Y,Z] [as client] [with expired|foreign]   start a node; it asks Y and Z until one lets it in
    clone X by Y                     start a second node with the identity of X, called X'
    kill X, restart X [by Y], leave X
    lose X-Y                         drop the session of two; both notice
    freeze X-Y                       drop it so that only Y goes on believing in it
    split ab cd, heal                nothing passes between the groups
    tick S                           let S seconds pass
    publish X KIND TEXT, read X KIND
    show [XY]                        the members and sessions that these nodes (or all) see

What happens by itself is told as it happens: who gets in or is refused, states of members, coordinators.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from p2pserve.bootstrap import Address, Bootstrap, Identity, JoinToken, NetworkKey, NetworkSettings, PeerId, Role
from p2pserve.bootstrap.errors import NetworkError
from p2pserve.bootstrap.members.admission import Admission
from p2pserve.bootstrap.members.mesh import Dial, should_replace
from p2pserve.bootstrap.members.peering import Peering
from p2pserve.bootstrap.streams.control import PROTOCOL_VERSION, Hello
from p2pserve.bootstrap.trust.entries import MEMBER_KIND, Entry, MemberRecord

KEY, FOREIGN = NetworkKey(b"n" * 32), NetworkKey(b"x" * 32)
IDENTITIES = sorted((Identity(bytes([seed]) * 32) for seed in range(1, 9)), key=lambda each: each.peer_id)
NAMES = dict(zip("abcdefgh", IDENTITIES, strict=True))
LETTERS = {identity.peer_id: name for name, identity in NAMES.items()}
SETTINGS = NetworkSettings()
LATENCY_S, DIAL_S, EPOCH = 0.01, 5.0, 1_000_000.0


class Held(NamedTuple):
    """One side's view of a session."""

    other: "Node"
    born: int
    dialled_by_me: bool
    since: float


@dataclass(eq=False)
class Node:
    """One running node: the machine, and its ends of sessions."""

    name: str
    identity: Identity
    born: int
    role: Role
    token: JoinToken
    peering: Peering
    sessions: dict[PeerId, Held] = field(default_factory=dict)
    heard: dict[PeerId, float] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    coordinator: tuple[PeerId, int] | None = None
    is_running: bool = True
    is_joined: bool = False
    next_tick: float = float("inf")

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def letter(self) -> str:
        return LETTERS[self.peer]


class Interpreter:
    """A network of machines. :meth:`run` executes one command and returns what there is to tell."""

    def __init__(self) -> None:
        self.now = 0.0
        self._nodes: dict[str, Node] = {}
        self._places: dict[Address, Node] = {}
        self._split: set[frozenset[str]] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._rng = random.Random(7)
        self._admission = Admission(KEY.public)
        self._told: list[str] = []

    def run(self, line: str) -> list[str]:
        """Execute one line."""
        self._told = []
        command, *words = line.split()
        getattr(self, f"do_{command}")(*words)
        return self._told

    # -- commands ---------------------------------------------------------------------------------------------------

    def do_add(self, name: str, *words: str) -> None:
        options = dict(zip(words[::2], words[1::2], strict=True))
        self._start(name, NAMES[name], options)

    def do_clone(self, name: str, *words: str) -> None:
        self._start(f"{name}'", NAMES[name], dict(zip(words[::2], words[1::2], strict=True)))

    def do_restart(self, name: str, *words: str) -> None:
        self.do_add(name, *words)

    def do_kill(self, name: str) -> None:
        node = self._nodes.pop(name)
        self._end(node)
        for peer in list(node.sessions):
            self._close(node, peer, also_there=True)

    def do_leave(self, name: str) -> None:
        node = self._nodes[name]
        node.peering.is_leaving = True
        self._push(node, (self._publish_record(node, left=True),))
        for peer in list(node.sessions):
            self._at(2 * LATENCY_S, self._close_later(node, peer))
        self._at(3 * LATENCY_S, lambda: self._end(self._nodes.pop(name)))

    def do_lose(self, pair: str) -> None:
        one, other = (self._nodes[name] for name in pair.split("-"))
        self._close(one, other.peer, also_there=True)

    def do_freeze(self, pair: str) -> None:
        one, other = (self._nodes[name] for name in pair.split("-"))
        self._close(one, other.peer, also_there=False)

    def do_split(self, *groups: str) -> None:
        pairs = itertools.permutations(groups, 2)
        self._split = {frozenset((one, far)) for group, other in pairs for one in group for far in other}

    def do_heal(self) -> None:
        self._split = set()

    def do_tick(self, seconds: str) -> None:
        end = self.now + float(seconds)
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end

    def do_publish(self, name: str, kind: str, text: str) -> None:
        node = self._nodes[name]
        self._push(node, (node.peering.membership.publish(kind, text.encode()),))

    def do_read(self, name: str, kind: str) -> None:
        found = self._nodes[name].peering.membership.entries(kind)
        texts = [f"{LETTERS[peer]}={payload.decode()}" for peer, payload in sorted(found.items())]
        self._tell(f"{name} reads {kind}: {' '.join(texts) or 'nothing'}")

    def do_show(self, names: str = "") -> None:
        for name, node in sorted(self._nodes.items()):
            if name in (names or name):
                members = " ".join(f"{LETTERS[m.peer_id]}={m.state.value}" for m in node.peering.membership.members())
                sessions = "".join(sorted(LETTERS[peer] for peer in node.sessions))
                self._tell(f"{name} sees {members}; sessions: {sessions or 'none'}; {self._describe_coordinator(node)}")

    # -- life of a node ---------------------------------------------------------------------------------------------

    def _start(self, name: str, identity: Identity, options: dict[str, str]) -> None:
        key = FOREIGN if options.get("with") == "foreign" else KEY
        expires = EPOCH - 1 if options.get("with") == "expired" else EPOCH + 1e6
        role = Role(options.get("as", "worker"))
        token = JoinToken.parse(key.issue((), role, expires))
        asked = [name for name in options.get("by", "").split(",") if name]
        named = [Bootstrap("192.0.2.1", self._place(each).port, NAMES[each].peer_id) for each in asked]
        born = int((EPOCH + self.now) * 1000)
        peering = Peering(
            identity,
            role,
            incarnation=born,
            check=self._admission.check_record,
            settings=SETTINGS,
            rng=random.Random(name),
            named=named,
        )
        node = self._nodes[name] = Node(name, identity, born, role, token, peering)
        self._places[self._place(name)] = node
        self._publish_record(node, left=False)
        self._gossip_later(node)
        node.is_joined = not named
        self._tick_node(node)

    def _end(self, node: Node) -> None:
        node.is_running = False
        self._places = {place: each for place, each in self._places.items() if each is not node}

    def _place(self, name: str) -> Address:
        return Address("192.0.2.1", 4000 + "abcdefgh".index(name[0]) + 100 * (len(name) - 1))

    def _publish_record(self, node: Node, *, left: bool) -> Entry:
        place = self._place(node.name)
        record = MemberRecord(node.role, place.host, place.port, node.token.credential(node.peer), left)
        return node.peering.membership.publish(MEMBER_KIND, msgspec.msgpack.encode(record))

    def _tick_node(self, node: Node) -> None:
        if not node.is_running:
            return
        actions = node.peering.tick(self.now, node.heard)
        for peer in actions.drop:
            self._close(node, peer, also_there=self._passes(node, node.sessions[peer].other))
        for peer in actions.ping:
            self._ping(node, peer)
        if actions.push:
            self._push(node, actions.push)
        for dial in actions.dial:
            self._dial(node, dial)
        self._tell_changes(node)
        self._wake(node, max(actions.wake_at, self.now + 0.01))

    def _wake(self, node: Node, at: float) -> None:
        """Tick a node then, or sooner if something asks for that."""
        if at == float("inf"):
            return
        node.next_tick = at

        def wake() -> None:
            if node.next_tick == at:
                self._tick_node(node)

        self._at(at - self.now, wake)

    # -- wires ------------------------------------------------------------------------------------------------------

    def _passes(self, one: Node, other: Node) -> bool:
        return frozenset((one.letter, other.letter)) not in self._split and one.is_running and other.is_running

    def _send(self, node: Node, peer: PeerId, deliver: Callable[[Node], None]) -> None:
        """Let something arrive at the other end of a session, if it still is one."""
        held = node.sessions.get(peer)
        if held is None:
            return

        def arrive() -> None:
            back = held.other.sessions.get(node.peer)
            if back is not None and back.other is node and self._passes(node, held.other):
                held.other.heard[node.peer] = self.now
                deliver(held.other)
                self._wake(held.other, self.now)

        self._at(LATENCY_S, arrive)

    def _ping(self, node: Node, peer: PeerId) -> None:
        self._send(node, peer, lambda other: self._send(other, node.peer, lambda _: None))

    def _push(self, node: Node, entries: Iterable[Entry]) -> None:
        if node.role is Role.CLIENT:
            entries = [each for each in entries if each.kind == MEMBER_KIND]
        for peer in list(node.sessions):
            self._send(node, peer, lambda other: self._merge(other, node, entries))
        self._wake(node, self.now)

    def _merge(self, node: Node, sender: Node, entries: Iterable[Entry]) -> None:
        private = sender.peer if sender.role is Role.CLIENT else None
        result = node.peering.membership.merge(entries, self.now, from_origin=private)
        if result.forged:
            self._tell(f"{node.name}: {sender.name} sent {result.forged} forged entries")

    def _gossip_later(self, node: Node) -> None:
        def gossip() -> None:
            partners = sorted(peer for peer, held in node.sessions.items() if held.other.role is not Role.CLIENT)
            for peer in self._rng.sample(partners, min(SETTINGS.gossip_partners, len(partners))):
                self._sync(node, peer)
            if node.is_running:
                self._gossip_later(node)

        self._at(SETTINGS.gossip_s, gossip)

    def _sync(self, node: Node, peer: PeerId) -> None:
        """Digests, then what either side lacks."""
        mine = node.peering.membership
        digest, vouchers = mine.digest(), mine.vouchers(self.now)

        def answer(other: Node) -> None:
            theirs = other.peering.membership
            if node.role is not Role.CLIENT:
                theirs.on_vouched(vouchers, self.now)
            delta, back, told = theirs.delta_for(digest), theirs.digest(), theirs.vouchers(self.now)

            def take(_: Node) -> None:
                self._merge(node, other, delta)
                mine.on_vouched(told, self.now)
                if node.role is not Role.CLIENT:
                    self._send(node, peer, lambda far: self._merge(far, node, mine.delta_for(back)))

            self._send(other, node.peer, take)

        self._send(node, peer, answer)

    # -- dials and admission ----------------------------------------------------------------------------------------

    def _dial(self, node: Node, dial: Dial) -> None:
        target = self._places.get(dial.address)
        is_silent = frozenset((node.letter, LETTERS[dial.peer])) in self._split

        def end() -> None:
            succeeded = dial.peer in node.sessions  # it may have dialled us meanwhile
            if not succeeded and target is not None and not is_silent and self._passes(node, target):
                succeeded = self._greet(node, target)
            node.peering.on_dialled(dial.peer, succeeded, self.now)
            self._wake(node, self.now)

        self._at(DIAL_S if is_silent else 4 * LATENCY_S, end)

    def _greet(self, node: Node, target: Node) -> bool:
        """Judge the dialler as a listener does; whether there is a session now."""
        own = node.peering.membership.own_entries()[0]
        hello = Hello(PROTOCOL_VERSION, node.token.network, own, node.born)
        known = target.peering.membership.record(node.peer)
        held = target.sessions.get(node.peer)
        try:
            record = self._admission.check_greeting(hello, node.peer, known, EPOCH + self.now)
        except NetworkError as error:
            return self._refuse(node, target, str(error).split(";")[0])
        if target.peer == node.peer or (held is not None and held.born != node.born and self._answers(held, target)):
            return self._refuse(node, target, "another living node has this identity")
        for one, other, dialled in ((node, target, True), (target, node, False)):
            before = one.sessions.get(other.peer)
            if before is not None:
                assert should_replace(
                    me=one.peer,
                    peer=other.peer,
                    new_dialled_by_me=dialled,
                    held_dialled_by_me=before.dialled_by_me,
                    held_age_s=self.now - before.since,
                    crossing_s=0.0,
                )
                self._close(one, other.peer, also_there=False)
            one.sessions[other.peer] = Held(other, other.born, dialled, self.now)
            one.heard[other.peer] = self.now
            membership = one.peering.membership
            membership.admit(other.peering.membership.own_entries()[0], self.now, private=other.role is Role.CLIENT)
            membership.on_connected(other.peer, self.now)
            one.peering.on_opened(other.peer)
            self._wake(one, self.now)
        assert record.role is node.role
        self._push(node, node.peering.membership.own_entries())
        self._push(target, target.peering.membership.own_entries())
        self._sync(node, target.peer)
        if not node.is_joined:
            node.is_joined = True
            self._tell(f"{node.name} is let in by {target.name}")
        return True

    def _refuse(self, node: Node, target: Node, reason: str) -> bool:
        self._tell(f"{target.name} refuses {node.name}: {reason}")
        if not node.is_joined:
            self._end(node)
            self._nodes.pop(node.name)
        return False

    def _answers(self, held: Held, target: Node) -> bool:
        back = held.other.sessions.get(target.peer)
        return back is not None and back.other is target and self._passes(held.other, target)

    def _close_later(self, node: Node, peer: PeerId) -> Callable[[], None]:
        return lambda: self._close(node, peer, also_there=True)

    def _close(self, node: Node, peer: PeerId, *, also_there: bool) -> None:
        held = node.sessions.pop(peer, None)
        if held is None:
            return
        node.heard.pop(peer, None)
        node.peering.membership.on_disconnected(peer)
        node.peering.on_closed(peer, self.now)
        self._wake(node, self.now)
        back = held.other.sessions.get(node.peer)
        if also_there and back is not None and back.other is node:
            self._close(held.other, node.peer, also_there=False)

    # -- what is told -----------------------------------------------------------------------------------------------

    def _tell_changes(self, node: Node) -> None:
        for member in node.peering.membership.members():
            name, state = LETTERS[member.peer_id], member.state.value
            if node.states.get(name) != state and member.peer_id != node.peer:
                self._tell(f"{node.name}: {name} is {state}")
            node.states[name] = state
        if node.peering.coordinator != node.coordinator:
            node.coordinator = node.peering.coordinator
            self._tell(f"{node.name}: {self._describe_coordinator(node)}")

    def _describe_coordinator(self, node: Node) -> str:
        found = node.peering.coordinator
        return "no coordinator" if found is None else f"coordinator {LETTERS[found[0]]} in epoch {found[1]}"

    def _tell(self, text: str) -> None:
        self._told.append(f"{self.now:.2f} {text}")

    def _at(self, delay: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, event))


class Block(NamedTuple):
    """Commands, with the comments above them, and what they must give."""

    head: tuple[str, ...]
    expected: tuple[str, ...]


def read_script(text: str) -> list[Block]:
    """The blocks of a script."""
    blocks = []
    for paragraph in text.strip().split("\n\n"):
        head, _, output = paragraph.partition("\n----")
        blocks.append(Block(tuple(head.splitlines()), tuple(output.strip().splitlines())))
    return blocks


def run_script(text: str) -> str:
    """The same script, with the outputs that its commands give."""
    interpreter = Interpreter()
    done = []
    for block in read_script(text):
        output: list[str] = []
        for line in block.head:
            if line and not line.startswith("#"):
                output += interpreter.run(line)
        done.append("\n".join([*block.head, "----", *output]))
    return "\n\n".join(done) + "\n"
