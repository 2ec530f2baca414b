"""Runs golden scripts of membership: lines of text over the pure machines, with their own clock and wires.

A script is blocks of commands, each followed by `----` and the output that they must give::

    # Who is alone leads at once.
    add a
    tick 3
    ----
    0.00 a: coordinator a in epoch 1
    ...

Nodes are called by letters in the order of their peer ids. Commands:

    add X [by Y,Z] [as client] [with expired|foreign|follow]   start a node; it asks Y and Z until one lets it in;
                                     `with follow`: its certificate does not let it lead
    clone X by Y                     start a second node with the identity of X, called X'
    kill X, restart X [by Y], leave X
    pause X S                        give it no processor time for S seconds
    object XY Z                      let these refuse the plans of Z
    lose X-Y                         drop the session of two; both notice
    freeze X-Y                       drop it so that only Y goes on believing in it
    split ab cd, heal                nothing passes between the groups
    tick S                           let S seconds pass
    publish X KIND TEXT, read X KIND
    show [XY]                        the members and sessions that these nodes (or all) see

What happens by itself is told as it happens: who gets in or is refused, states of members, coordinators.
"""

from collections.abc import Iterable
from typing import NamedTuple

from p2pserve.bootstrap import Address, Bootstrap, Identity, JoinToken, NetworkKey, NetworkSettings, PeerId, Role
from p2pserve.bootstrap.dev.simulation import EPOCH_S, SimulatedNode, Simulation

FOREIGN = NetworkKey(b"x" * 32)
IDENTITIES = sorted((Identity(bytes([seed]) * 32) for seed in range(1, 9)), key=lambda each: each.peer_id)
NAMES = dict(zip("abcdefgh", IDENTITIES, strict=True))
LETTERS = {identity.peer_id: name for name, identity in NAMES.items()}


class Interpreter:
    """A network of machines. :meth:`run` executes one command and returns what there is to tell."""

    def __init__(self) -> None:
        self._network = Simulation(settings=NetworkSettings())
        self._network.on_event = self._tell
        self._network.on_tick = self._tell_changes
        self._states: dict[str, dict[str, str]] = {}
        self._coordinators: dict[str, tuple[PeerId, int] | None] = {}
        self._told: list[str] = []

    def run(self, line: str) -> list[str]:
        """Execute one line."""
        self._told = []
        command, *words = line.split()
        getattr(self, f"do_{command}")(*words)
        return self._told

    # -- commands ---------------------------------------------------------------------------------------------------

    def do_add(self, name: str, *words: str) -> None:
        self._start(name, NAMES[name], dict(zip(words[::2], words[1::2], strict=True)))

    def do_clone(self, name: str, *words: str) -> None:
        self._start(f"{name}'", NAMES[name], dict(zip(words[::2], words[1::2], strict=True)))

    def do_restart(self, name: str, *words: str) -> None:
        self.do_add(name, *words)

    def do_kill(self, name: str) -> None:
        self._network.kill(name)

    def do_leave(self, name: str) -> None:
        self._network.leave(name)

    def do_pause(self, name: str, seconds: str) -> None:
        self._network.pause(name, float(seconds))

    def do_lose(self, pair: str) -> None:
        self._network.lose(*pair.split("-"))

    def do_freeze(self, pair: str) -> None:
        one, other = pair.split("-")
        self._network.lose(one, other, also_there=False)

    def do_split(self, *groups: str) -> None:
        self._network.split(*groups)

    def do_heal(self) -> None:
        self._network.heal()

    def do_tick(self, seconds: str) -> None:
        self._network.run(float(seconds))

    def do_publish(self, name: str, kind: str, text: str) -> None:
        node = self._network.nodes[name]
        node.peering.publish(kind, text.encode())
        self._network.wake(node)

    def do_object(self, names: str, leader: str) -> None:
        for name in names:
            node = self._network.nodes[name]
            node.peering.object_to(NAMES[leader].peer_id, node.peering.epoch)
            self._network.wake(node)

    def do_read(self, name: str, kind: str) -> None:
        found = self._network.nodes[name].peering.roster.entries(kind)
        texts = [f"{LETTERS[peer]}={payload.decode()}" for peer, payload in sorted(found.items())]
        self._tell(f"{name} reads {kind}: {' '.join(texts) or 'nothing'}")

    def do_show(self, names: str = "") -> None:
        for node in sorted(self._network.running(), key=lambda node: node.name):
            if node.name in (names or node.name):
                seen = " ".join(f"{letter}={state}" for letter, state in self._find_states(node))
                sessions = "".join(sorted(LETTERS[peer] for peer in node.sessions))
                found = _describe(node.peering.coordinator)
                self._tell(f"{node.name} sees {seen}; sessions: {sessions or 'none'}; {found}")

    # -- inside -----------------------------------------------------------------------------------------------------

    def _start(self, name: str, identity: Identity, options: dict[str, str]) -> None:
        kind = options.get("with", "")
        role = Role(options.get("as", "worker"))
        key = FOREIGN if kind == "foreign" else self._network.key
        expires = EPOCH_S - 1 if kind == "expired" else EPOCH_S + 1e6
        token = JoinToken.parse(key.issue((), role, expires, lead=role is not Role.CLIENT and kind != "follow"))
        asked = [each for each in options.get("by", "").split(",") if each]
        named = [Bootstrap("192.0.2.1", _place(each).port, NAMES[each].peer_id) for each in asked]
        self._states[name], self._coordinators[name] = {}, None
        self._network.add(name, identity, _place(name), named=named, token=token)

    def _find_states(self, node: SimulatedNode) -> Iterable[tuple[str, str]]:
        members = node.peering.roster.members(lambda _: None, self._network.now)
        return [(LETTERS[member.peer_id], member.state.value) for member in members]

    def _tell_changes(self, node: SimulatedNode) -> None:
        seen = self._states[node.name]
        for letter, state in self._find_states(node):
            if seen.get(letter) != state and letter != LETTERS[node.peer]:
                self._tell(f"{node.name}: {letter} is {state}")
            seen[letter] = state
        if node.peering.coordinator != self._coordinators[node.name]:
            self._coordinators[node.name] = node.peering.coordinator
            self._tell(f"{node.name}: {_describe(node.peering.coordinator)}")

    def _tell(self, text: str) -> None:
        self._told.append(f"{self._network.now:.2f} {text}")


def _place(name: str) -> Address:
    return Address("192.0.2.1", 4000 + "abcdefgh".index(name[0]) + 100 * (len(name) - 1))


def _describe(coordinator: tuple[PeerId, int] | None) -> str:
    return (
        "no coordinator" if coordinator is None else f"coordinator {LETTERS[coordinator[0]]} in epoch {coordinator[1]}"
    )


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
