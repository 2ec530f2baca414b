"""Random schedules of what can happen to a network, and what must hold all the same.

A schedule adds, kills, cuts off, pauses and restarts nodes, splits the network and heals it, breaks
sessions, and lets messages be lost, doubled and reordered, all from one seed. In every third some
boxes cannot be dialled; they find that out after a while. It must hold

at any time:
    * no node goes back to an earlier epoch than one it has followed;
    * nobody that lives, can be reached and has had processor time is dead in anybody's view;
    * no table contradicts itself, and nobody is expelled, for nobody lies;
once it has been quiet for a while, in each part of the network:
    * all see exactly those who are there;
    * all follow one leader, one that may lead, if there is such a one;
    * all hold the same entries, after some more comparisons at most.

    python -m p2pserve.bootstrap.dev.schedules --count 10000
"""

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..addresses import Address
from ..members.table import BUCKETS
from ..settings import NetworkSettings
from ..trust.tokens import Bootstrap, Role
from .simulation import SimulatedNode, Simulation, Weather, identity_of

SETTLE_S: Final = 15.0  # quiet, after which views are compared
MAX_COMPARISONS: Final = 10  # that repair what was lost: with whom each node compares is drawn
GRACE_S: Final = 12.0  # after a fault that touches a node, before others may not think it dead


class InvariantBroken(AssertionError):
    """Something that must hold did not, in the schedule with this seed."""


@dataclass(slots=True)
class _Scenario:
    nodes: int
    steps: int
    pauses_s: tuple[float, ...]  # between two steps
    weather: Weather


def choose_scenario(rng: random.Random) -> _Scenario:
    """How many nodes and steps, how fast, and in what weather."""
    weather = Weather(
        latency_s=rng.choice((0.001, 0.02, 0.1)),
        jitter_s=rng.choice((0.0, 0.0, 0.05)),
        loss=rng.choice((0.0, 0.0, 0.05, 0.2)),
        duplication=rng.choice((0.0, 0.0, 0.1)),
    )
    # Most are short: what breaks mostly does so when one fault comes right after another.
    pauses_s = (0.1, 0.5, 2.0, 15.0) if rng.random() < 0.1 else (0.1, 0.5, 1.0, 3.0)
    return _Scenario(rng.randint(2, 6), rng.randint(3, 9), pauses_s, weather)


class Schedule:
    """One schedule. :meth:`run` raises InvariantBroken, or returns how long it was, in simulated seconds."""

    def __init__(self, seed: int, settings: NetworkSettings | None = None) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        scenario = choose_scenario(self._rng)
        self._steps = scenario.steps
        self._pauses = scenario.pauses_s
        self._network = Simulation(settings=settings, weather=scenario.weather, seed=seed)
        self._network.on_tick = self._check_node
        self._epochs: dict[tuple[str, int], int] = {}
        self._joined: dict[tuple[str, int], float] = {}  # node and birth -> when it was first seen to be in
        self._touched: dict[str, float] = {}  # when something last happened to a node
        self._started = 0
        # From numbers of their own: what else happens is the same with and without them.
        self._walls = random.Random(f"{seed} walls")
        share = self._walls.choice((0.0, 0.0, 0.4))
        self.walled = {str(number) for number in range(2, 40) if self._walls.random() < share}
        self._leading = {str(number): number == 1 or self._rng.random() < 0.7 for number in range(1, 40)}
        for _ in range(scenario.nodes):
            self._start()

    def run(self) -> float:
        """Run it to its end."""
        for _ in range(self._steps):
            self._network.run(self._rng.choice(self._pauses))
            self._disturb()
        self._network.heal()
        self._network.weather.loss = 0.0
        self._touch_all()
        self._network.run(SETTLE_S + self._longest_pause())
        self._check_views()
        self._check_entries()
        return self._network.now

    # -- what happens -------------------------------------------------------------------------------------------------

    def _start(self, number: int | None = None) -> None:
        network, rng = self._network, self._rng
        if number is None:
            self._started += 1
            number = self._started
        running = [node for node in network.running() if node.is_joined and not node.is_walled]
        if not running and network.running():
            return  # nobody could be asked
        asked = rng.sample(running, min(len(running), 2))
        named = [Bootstrap(node.place.host, node.place.port, node.peer) for node in asked]
        token = network.token(Role.WORKER, lead=self._leading[str(number)])
        self._touch(str(number))
        name, place, is_walled = str(number), Address("192.0.2.1", 4000 + number), str(number) in self.walled
        node = network.add(name, identity_of(number), place, named=named, token=token)
        node.is_walled = is_walled
        if is_walled:
            network.after(self._walls.uniform(0.5, 5.0), lambda: self._find_out(node))

    def _find_out(self, node: SimulatedNode) -> None:
        """A node has asked members to dial it, and none has met it."""
        if node.is_running and self._network.now >= node.paused_until:
            self._network.note_closed(node.name)
        elif node.is_running:
            self._network.after(node.paused_until - self._network.now, lambda: self._find_out(node))

    def _disturb(self) -> None:
        rng, network = self._rng, self._network
        names = [node.name for node in network.running()]
        stopped = [node.name for node in network.nodes.values() if not node.is_running]
        match rng.choice(("start", "kill", "vanish", "leave", "restart", "pause", "split", "heal", "lose", "nothing")):
            case "start" if self._started < 12:
                self._start()
            case "kill" if len(names) > 1:
                network.kill(rng.choice(names))
            case "vanish" if len(names) > 1:
                network.vanish(rng.choice(names))
            case "leave" if len(names) > 1:
                network.leave(rng.choice(names))
            case "restart" if stopped:
                self._start(int(rng.choice(stopped)))
            case "pause" if names:
                name, seconds = rng.choice(names), rng.choice((0.3, 1.5, 4.0, 12.0))
                network.pause(name, seconds)
                self._touch(name, seconds)
            case "split" if len(names) > 1:
                rng.shuffle(names)
                cut = rng.randint(1, len(names) - 1)
                network.split(names[:cut], names[cut:])
                self._touch_all()
            case "heal":
                network.heal()
                self._touch_all()
            case "lose" if len(names) > 1:
                network.lose(*rng.sample(names, 2), also_there=rng.random() < 0.7)
                self._touch_all()
            case _:
                pass

    def _touch(self, name: str, seconds: float = 0.0) -> None:
        self._touched[name] = max(self._touched.get(name, 0.0), self._network.now + seconds)

    def _touch_all(self) -> None:
        for node in self._network.running():
            self._touch(node.name)

    def _longest_pause(self) -> float:
        return max(0.0, max(self._touched.values()) - self._network.now)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _is_calm(self, node: SimulatedNode) -> bool:
        """Whether it has been in for a while, and untouched. Joining may take as long as the network is bad."""
        since = max(self._touched[node.name], self._joined.get((node.name, node.born), math.inf))
        return self._network.now >= since + GRACE_S

    def _can_meet(self, one: SimulatedNode, other: SimulatedNode) -> bool:
        """Whether two can have a session. One that nobody can dial has to know somebody who can be."""
        network = self._network
        for each in (one, other):
            known = (o for o in network.running() if o is not each and each.peering.table.record(o.peer) is not None)
            if each.is_walled and not any(not o.is_walled and network.passes(each, o) for o in known):
                return False
        return network.reaches(one, other)

    def _check_node(self, node: SimulatedNode) -> None:
        now = self._network.now
        key = (node.name, node.born)
        epoch = node.peering.epoch
        self._require(epoch >= self._epochs.get(key, 0), f"{node.name} went back to epoch {epoch}")
        self._epochs[key] = epoch
        self._require(not node.peering.table.lies, f"{node.name} expelled somebody")
        if node.is_joined:
            self._joined.setdefault(key, now)
        if self._network.weather.loss or not self._is_calm(node):
            return
        for other in self._network.running():
            calm = self._is_calm(other)
            if other is not node and calm and self._can_meet(node, other) and not other.peering.is_leaving:
                seen = node.peering.liveness.is_living(other.peer) or node.peering.is_leaving
                # Of one that nobody here was ever told of, or not that it is back, nobody can know.
                record = node.peering.table.record(other.peer)
                self._require(seen or record is None or record.left, f"{other.name} is dead in the view of {node.name}")

    def _check_views(self) -> None:
        for part in self._parts():
            everybody = {node.peer for node in part}
            for node in part:
                seen = set(node.peering.liveness.living) | {node.peer}
                self._require(seen == everybody, f"{node.name} sees {len(seen)} of {len(everybody)}")
            leaders = {node.peering.coordinator for node in part}
            may_lead = {node.peer for node in part if node.token.grant.lead}
            self._require(len(leaders) == 1, f"leaders {leaders}")
            leader = leaders.pop()
            fits = leader is None if not may_lead else leader is not None and leader[0] in may_lead
            self._require(fits, f"leader {leader} of {len(may_lead)} that may lead")

    def _check_entries(self) -> None:
        for _ in range(MAX_COMPARISONS):
            if not self._find_differing():
                break
            self._network.run(self._network.settings.compare_s)
        for node in self._network.running():
            node.peering.table.check_integrity()
        self._require(not (found := self._find_differing()), f"{', '.join(found)} holds other entries")

    def _find_differing(self) -> list[str]:
        """Who holds something else than another one of its part."""
        return [
            node.name
            for part in self._parts()
            for node in part
            if node.peering.table.summary() != part[0].peering.table.summary()
            and not self._differ_by_the_dead(node, part[0])
        ]

    def _parts(self) -> list[list[SimulatedNode]]:
        return _find_parts([node for node in self._network.running() if node.is_joined])

    def _differ_by_the_dead(self, one: SimulatedNode, other: SimulatedNode) -> bool:
        """Who has never seen a member alive does not keep what it said, and the leader's latest word may be on its way;
        what the rest of the living says must be the same."""
        mine, theirs = (each.peering.table.digest(range(BUCKETS)) for each in (one, other))
        leader = one.peering.coordinator
        return all(
            mine.get(peer) == theirs.get(peer)
            for peer in one.peering.liveness.living
            if other.peering.liveness.is_living(peer) and (leader is None or peer != leader[0])
        )

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvariantBroken(f"schedule {self._seed} at {self._network.now:.2f} s: {what}")


def _find_parts(nodes: Sequence[SimulatedNode]) -> list[list[SimulatedNode]]:
    """The connected parts, by open sessions."""
    left, parts = {node.peer: node for node in nodes}, []
    while left:
        part, edge = [], [left.popitem()[1]]
        while edge:
            node = edge.pop()
            part.append(node)
            edge += [left.pop(peer) for peer in node.sessions if peer in left]
        parts.append(part)
    return parts


def run_schedules(seeds: Iterable[int]) -> float:
    """Run them all; the simulated seconds. Raises InvariantBroken."""
    return sum(Schedule(seed).run() for seed in seeds)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.bootstrap.dev.schedules", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="schedules (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default: 0)")
    options = parser.parse_args(arguments)
    began, simulated, broken = time.perf_counter(), 0.0, 0
    for seed in range(options.first, options.first + options.count):
        try:
            simulated += Schedule(seed).run()
        except InvariantBroken as error:
            broken += 1
            sys.stdout.write(f"{error}\n")
    took = time.perf_counter() - began
    hours = simulated / 3600
    sys.stdout.write(f"{options.count} schedules, {hours:.1f} simulated hours in {took:.0f} s: {broken} broken\n")
    return 1 if broken else 0


if __name__ == "__main__":
    if "PYTHONHASHSEED" not in os.environ:  # the order of sets of names is a part of what a seed repeats
        again = [sys.executable, "-m", "p2pserve.bootstrap.dev.schedules", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
