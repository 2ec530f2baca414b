"""Replicas that stay borrowed are moved to the other pool: one by one, in quiet moments, and not back and forth."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest

from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.repair.repurposing import RepurposeSettings, Repurposing
from p2pserve.coordinator.routing.interface import ReplicaLoads

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
SETTINGS = RepurposeSettings()
LOOK_S = 10.0


def a_plan(phases: Mapping[str, Phase], box_of: Mapping[str, str] | None = None) -> Plan:
    boxes = box_of or {}
    first = {name: 4 * number for number, name in enumerate(phases)} if boxes else {}
    replicas = tuple(
        Replica(
            id=name,
            phase=phase,
            stages=(
                Stage(
                    peer=boxes.get(name, f"box-{name}"), tp=1, first_layer=0, last_layer=4, first_gpu=first.get(name, 0)
                ),
            ),
        )
        for name, phase in phases.items()
    )
    ends = [(a.id, b.id) for a in replicas for b in replicas if a.phase is P and b.phase is D]
    ends += [(a.id, a.id) for a in replicas if a.phase is M]
    pairings = tuple(Pairing(prefill=a, decode=b, weight=1 / len(ends)) for a, b in ends)
    return Plan(epoch=1, version=1, service="s", codec="kv4", why=(), replicas=replicas, pairings=pairings)


class Network:
    """Replicas by phase, watched every ten seconds; who is borrowed and how many requests there are is told."""

    def __init__(self, **phases: Phase) -> None:
        self.phases = dict(phases)
        self.pools = Repurposing(SETTINGS)
        self.now = 0.0
        self.moves: list[tuple[float, str, Phase]] = []

    def pass_time(self, seconds: float, borrowed: str = "", requests: int = 40) -> str:
        """Until a replica is moved, or the time is over: why one is."""
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_S
            plan = a_plan(self.phases)
            self.pools.observe(plan, self.loads(plan, borrowed, requests), self.now)
            before = dict(self.pools.phases(self.now))
            why = self.pools.move_one(plan, self.now)
            if why:
                (name,) = [each for each, phase in self.pools.phases(self.now).items() if before.get(each) is not phase]
                self.phases[name] = self.pools.phases(self.now)[name]
                self.moves.append((self.now, name, self.phases[name]))
                return why
        return ""

    def loads(self, plan: Plan, borrowed: str, requests: int) -> ReplicaLoads:
        loads = ReplicaLoads(replica.id for replica in plan.replicas)
        each = requests // len(plan.replicas)
        for replica in plan.replicas:
            decodes = replica.phase is D or replica.id in borrowed
            prompts = replica.phase is P or replica.id in borrowed
            loads.note(replica.id, each, 500 * each if prompts else each, 10_000, decodes=each if decodes else 0)
        return loads


def ten(prompt: int = 5) -> dict[str, Phase]:
    return {name: P if place < prompt else D for place, name in enumerate("abcdefghij")}


def test_a_machine_that_stays_borrowed_is_moved_in_the_first_quiet_moment() -> None:
    network = Network(a=P, b=P, d=D, e=D)
    assert network.pass_time(2 * SETTINGS.long_s, "d") == "", "there is no quiet moment"
    why = network.pass_time(60.0, requests=8)
    assert why == "d is moved to prefill: 1 of 4 replicas stayed borrowed by the other pool"
    assert network.moves == [(2 * SETTINGS.long_s + LOOK_S, "d", P)]
    assert network.pools.pins(a_plan(network.phases), network.now) == {"box-d": P}


def test_prompt_machines_that_decode_move_to_the_token_pool() -> None:
    network = Network(a=P, b=P, c=P, d=D)
    network.pass_time(2 * SETTINGS.long_s, "b")
    network.pass_time(LOOK_S, requests=4)
    assert network.phases == {"a": P, "b": D, "c": P, "d": D}


def test_bursts_move_nobody() -> None:
    network = Network(a=P, b=P, d=D, e=D)
    for _ in range(30):
        assert network.pass_time(200.0, "d") == ""
        assert network.pass_time(300.0, requests=4) == ""


def test_a_tenth_of_the_machines_may_stay_borrowed() -> None:
    network = Network(**ten())
    network.pass_time(2 * SETTINGS.long_s, "j")
    assert network.pass_time(60.0, requests=10) == ""
    network = Network(**ten())
    network.pass_time(2 * SETTINGS.long_s, "ij")
    assert network.pass_time(60.0, requests=10)


def test_machines_are_moved_one_by_one_and_only_while_the_others_stay_borrowed() -> None:
    network = Network(**ten())
    for _ in range(12):
        network.pass_time(350.0, "hij" if len(network.moves) < 2 else "")
        network.pass_time(30.0, requests=10)
    assert [name for _, name, _ in network.moves] == ["h", "i"], "the third is needed no more"
    assert network.moves[1][0] - network.moves[0][0] >= SETTINGS.long_s


def test_the_pool_that_lends_more_is_the_one_that_shrinks() -> None:
    network = Network(**ten())
    network.pass_time(2 * SETTINGS.long_s, "aij")
    network.pass_time(LOOK_S, requests=10)
    assert network.moves[0][1:] == ("i", P)
    network = Network(**ten())
    network.pass_time(2 * SETTINGS.long_s, "abij")
    assert network.pass_time(60.0, requests=10) == "", "one as the other: nobody knows better"


def test_a_pool_keeps_its_last_machine_and_boxes_of_several_replicas_stay_as_they_are() -> None:
    network = Network(a=P, d=D)
    network.pass_time(2 * SETTINGS.long_s, "d")
    assert network.pass_time(60.0, requests=2) == ""
    shared = a_plan({"a": P, "d": D, "e": D}, {"d": "one", "e": "one"})
    pools = Repurposing()
    loads = ReplicaLoads("ade")
    for second in range(0, 700, 10):
        for name in "ade":
            loads.note(name, 4, 900 if name != "e" else 0, 1000, decodes=4)
        pools.observe(shared, loads, float(second))
    for name in "ade":
        loads.note(name, 0, 0, 1000)
    pools.observe(shared, loads, 700.0)
    assert pools.move_one(shared, 700.0) == ""


def test_nobody_moves_back_while_a_move_is_held_and_the_next_hold_of_that_machine_is_longer() -> None:
    network = Network(a=P, b=P, d=D, e=D)
    network.pass_time(600.0, "d")
    network.pass_time(LOOK_S, requests=4)
    moved_at = network.now
    # Traffic turns at once: what is a prompt machine now has answers to generate.
    while len(network.moves) < 2:
        network.pass_time(400.0, "d")
        network.pass_time(20.0, requests=4)
    at, name, phase = network.moves[1]
    assert (name, phase) == ("d", D)
    assert at - moved_at >= SETTINGS.hold_s
    while len(network.moves) < 3:
        network.pass_time(400.0, "d")
        network.pass_time(20.0, requests=4)
    assert network.moves[2][0] - at >= 2 * SETTINGS.hold_s


def test_traffic_that_turns_every_ten_minutes_turns_the_pools_a_few_times_a_day() -> None:
    network = Network(a=P, b=P, d=D, e=D)
    for turn in range(6 * 24):
        network.pass_time(580.0, "d" if turn % 2 else "a")
        network.pass_time(20.0, requests=4)
    turns = [after[0] for before, after in pairwise(network.moves) if before[2] != after[2]]
    spans = [later - earlier for earlier, later in pairwise(turns)]
    assert spans == sorted(spans), "each time it takes longer until a pool grows again that has shrunk"
    assert spans[0] >= SETTINGS.hold_s
    assert len(turns) < 10, "of 144 turns of the traffic"


def test_a_hold_ends() -> None:
    network = Network(a=P, b=P, d=D, e=D)
    network.pass_time(600.0, "d")
    network.pass_time(LOOK_S, requests=4)
    assert network.pools.phases(network.now + SETTINGS.hold_s - 1.0) == {"d": P}
    assert network.pools.phases(network.now + SETTINGS.hold_s) == {}


@pytest.mark.parametrize("gone", ["a", "d"])
def test_replicas_that_come_and_go_begin_anew(gone: str) -> None:
    network = Network(a=P, b=P, d=D, e=D)
    network.pass_time(310.0, "d")
    phase = network.phases.pop(gone)
    network.pass_time(LOOK_S, "d")
    network.phases[gone] = phase
    assert (network.pass_time(30.0, requests=4) != "") is (gone == "a")


def test_mixed_machines_are_at_home_with_both() -> None:
    network = Network(a=M, b=M, c=M)
    network.pass_time(900.0, "abc")
    assert network.pass_time(60.0, requests=3) == ""
