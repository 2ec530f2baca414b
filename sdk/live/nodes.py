"""The nodes of a live run: started with emulated GPUs, lost, started again, and the links between them.

On loopback, or, where links are to change, each in a network namespace of the emulated network of `sims/wan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

import trio

from ...coordinator import Phase
from ..chaos.links import ChaosLinks, open_links
from ..demo.box import ON_LOOPBACK, DemoBox, NodeGreeting
from ..errors import DemoFailed
from .schedule import LiveFaultKind, Schedule, ScheduledFault, needs_links

JOIN_S: Final = 60.0
MAX_REQUESTS: Final = 64  # of an engine at once
GATEWAY: Final = 1
"""On the emulated network the node that is nearest to the clients, whose gateway they ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """`nodes` that have `cards` (`1xL4`, a GPU table column) and are pinned to `phases` in turn serve `model`.

    `slo`: deadlines that they plan for, as `read_slo` takes them. `schedule`: what becomes of them meanwhile;
    `loss`: how nodes are lost, killed or silent, which is stopped. `load_gb_s`: GB/s that their engines read weights
    at; 0: in no time. `kv_cache_mib`: of each engine; 0: all that its weights leave."""

    nodes: int
    cards: Sequence[str]
    specs: str
    model: str
    codec: str
    max_batched_tokens: int
    slo: str = "5x"
    phases: Sequence[Phase] = ()
    schedule: Schedule = ()
    loss: str = "killed"
    load_gb_s: float = 0.0
    kv_cache_mib: int = 0

    def cards_of(self, number: int) -> str:
        """Of the node with this number, from 1 on."""
        return self.cards[(number - 1) % len(self.cards)]

    def describe(self) -> str:
        """The nodes in words."""
        return f"{self.nodes} emulated nodes of {', '.join(self.cards)} ({self.specs})"


def node_options(settings: LiveSettings, number: int) -> list[str]:
    """What the node with this number joins with, whatever its phase."""
    options = ["--emulate", settings.cards_of(number), "--emulate-specs", settings.specs]
    options += ["--model", settings.model, "--codec", settings.codec, "--slo", settings.slo]
    options += ["--emulate-load-gb-s", str(settings.load_gb_s), "--max-requests", str(MAX_REQUESTS)]
    options += ["--kv-cache-mib", str(settings.kv_cache_mib)] if settings.kv_cache_mib else []
    return [*options, "--max-num-batched-tokens", str(settings.max_batched_tokens)]


@contextmanager
def open_places(settings: LiveSettings) -> Iterator[ChaosLinks | None]:
    """Where nodes are, for the body, which runs where their client is; None: all on loopback. Raises DemoFailed."""
    if not needs_links(settings.schedule):
        yield None
        return
    with open_links(settings.nodes + 1, GATEWAY) as links:  # the bootstrap is the first box there
        yield links


@final
class LiveNodes:
    """Those of one run, by their numbers from 1 on. `bootstrap` has no engine. `links`: between them, where they can
    be changed."""

    def __init__(self, box: DemoBox, settings: LiveSettings, links: ChaosLinks | None) -> None:
        self.peers: dict[int, str] = {}
        self.bootstrap: NodeGreeting
        self._box = box
        self._settings = settings
        self._links = links

    def __repr__(self) -> str:
        return f"<LiveNodes {len(self.peers)} of {self._settings.nodes}>"

    @property
    def schedule(self) -> Schedule:
        """What is planned for them."""
        return self._settings.schedule

    async def start(self) -> None:
        """Start the network, and all nodes at once. Raises DemoFailed."""
        network = ["--codec", self._settings.codec, "--slo", self._settings.slo]
        self.bootstrap = await self._start(0, "bootstrap", ["bootstrap", *network])
        async with trio.open_nursery() as nursery:
            for number in range(1, self._settings.nodes + 1):
                nursery.start_soon(self.join, number)

    async def join(self, number: int) -> None:
        """Start a node; one that was lost is the same again, with an empty engine. Raises DemoFailed."""
        if number in self.peers:
            self._box.kill_node(self.peers[number])
        options, phases = node_options(self._settings, number), self._settings.phases
        if phases:
            options += ["--phase", phases[number % len(phases)].value]
        greeting = await self._start(number, str(number), ["join", *options], self.bootstrap.tokens["leader"])
        self.peers[number] = greeting.peer

    async def carry_out(self, fault: ScheduledFault) -> None:
        """Do to them what is planned. Raises DemoFailed."""
        match fault.kind:
            case LiveFaultKind.JOIN:
                await self.join(fault.nodes[0])
            case LiveFaultKind.DEGRADE:
                assert self._links is not None
                one, other = fault.nodes
                await self._links.carry(one, other, fault.gbps)
            case LiveFaultKind.LOSE:
                end = self._box.stop_node if self._settings.loss == "silent" else self._box.kill_node
                end(self.peers[fault.nodes[0]])

    async def _start(self, number: int, name: str, arguments: list[str], token: str = "") -> NodeGreeting:
        listen, prefix = ON_LOOPBACK, tuple[str, ...]()
        if self._links is not None:
            place = self._links.places()[number]
            listen, prefix = place.listen, place.prefix
        with trio.move_on_after(JOIN_S):
            return await self._box.start_elsewhere(
                name, arguments, listen=listen, token=token, inside=lambda command: [*prefix, *command]
            )
        raise DemoFailed(f"node {name} has not joined after {JOIN_S:g} s")
