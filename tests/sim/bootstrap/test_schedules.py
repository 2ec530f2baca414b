"""Random schedules of faults over simulated networks: what must hold does, and what does not is found."""

from collections.abc import Collection
from functools import partial
from typing import Any

import pytest

from p2pserve.bootstrap import Address, Bootstrap
from p2pserve.bootstrap.dev import schedules
from p2pserve.bootstrap.dev.bench import simulate_churn
from p2pserve.bootstrap.dev.schedules import InvariantBroken, Schedule, main, run_schedules
from p2pserve.bootstrap.dev.simulation import Simulation, identity_of
from p2pserve.bootstrap.members.election import Election, ElectionResult, ElectionView
from p2pserve.bootstrap.members.liveness import HEARS_KIND, Liveness
from p2pserve.bootstrap.members.states import Digest
from p2pserve.bootstrap.members.table import Table
from p2pserve.bootstrap.trust.entries import Entry

BLOCK = 25
LET_IN_LATE = (4759, 8189)  # by a node that was paused
ALL_ARE_LOST = 2748  # of this schedule's nodes all have left, or were killed, before its end


@pytest.mark.parametrize("first", range(0, 20 * BLOCK, BLOCK))
def test_what_must_hold_does(first: int) -> None:
    assert run_schedules(range(first, first + BLOCK)) > BLOCK * schedules.SETTLE_S


def test_a_schedule_goes_on_when_nobody_is_left() -> None:
    assert Schedule(ALL_ARE_LOST).run() > schedules.SETTLE_S


def test_who_was_kept_out_for_long_is_not_in_every_view_at_once() -> None:
    assert run_schedules(LET_IN_LATE) > 2 * schedules.SETTLE_S


def test_the_same_seed_is_the_same_schedule() -> None:
    assert len({Schedule(3).run() for _ in range(2)}) == 1
    assert len({Schedule(seed).run() for seed in range(5)}) > 1


def test_two_that_nobody_can_dial_meet_over_a_third_and_over_another_when_it_is_lost() -> None:
    network, asked = Simulation(seed=1), [Bootstrap("192.0.2.1", 4001, identity_of(1).peer_id)]
    for number in range(1, 5):
        place, is_walled = Address("192.0.2.1", 4000 + number), number > 2
        named = asked if number > 1 else []
        network.add(str(number), identity_of(number), place, named=named).is_walled = is_walled
        if is_walled:
            network.after(3.0, partial(network.note_closed, str(number)))
    network.run(10.0)
    one, other = network.nodes["3"], network.nodes["4"]
    relay = one.sessions[other.peer].relay
    assert relay is not None
    assert relay.name in ("1", "2")
    assert network.nodes["1"].sessions[one.peer].relay is None
    seen: list[bool] = []
    network.on_tick = lambda node: seen.append(node is not one or node.peering.liveness.is_living(other.peer))
    network.kill(relay.name)
    assert other.peer not in one.sessions
    network.run(10.0)
    assert one.sessions[other.peer].relay is network.nodes["1" if relay.name == "2" else "2"]
    assert all(seen)
    network.pause("1" if relay.name == "2" else "2", 2.0)  # what is on its way comes when the relay goes on
    network.run(5.0)
    assert all(seen)
    assert other.peer in one.sessions


def test_some_schedules_have_boxes_that_nobody_can_dial() -> None:
    assert {bool(Schedule(seed).walled) for seed in range(10)} == {True, False}


def test_two_leaders_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody that may lead follows itself."""
    decide = Election.decide

    def lead(self: Election, view: ElectionView, now: float, *, paused_s: float = 0.0) -> ElectionResult:
        found = decide(self, view, now, paused_s=paused_s)
        return ElectionResult(leader=self.me, epoch=found.epoch) if self.me in view.candidates else found

    monkeypatch.setattr(Election, "decide", lead)
    with pytest.raises(InvariantBroken, match="leaders"):
        run_schedules(range(10))


def test_an_epoch_that_goes_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Election.decide

    def forget(self: Election, view: ElectionView, now: float, *, paused_s: float = 0.0) -> ElectionResult:
        found = decide(self, view, now, paused_s=paused_s)
        return ElectionResult(leader=found.leader, epoch=found.epoch if found.leader else 0, say=found.say)

    monkeypatch.setattr(Election, "decide", forget)
    with pytest.raises(InvariantBroken, match="went back to epoch 0"):
        run_schedules(range(20))


def test_a_view_with_the_living_among_the_dead_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    living: Any = vars(Liveness)["living"]
    monkeypatch.setattr(Liveness, "living", property(lambda self: frozenset(sorted(living.fget(self))[1:])))
    assert main(["--count", "5"]) == 1
    out = capsys.readouterr().out
    assert "sees" in out
    assert "5 schedules" in out


def test_entries_that_are_never_repaired_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What got lost comes with a comparison, and here nobody is told then whom others hear."""
    delta_for = Table.delta_for

    def conceal(self: Table, digest: Digest, buckets: Collection[int]) -> list[Entry]:
        return [entry for entry in delta_for(self, digest, buckets) if entry.kind != HEARS_KIND]

    monkeypatch.setattr(Table, "delta_for", conceal)
    with pytest.raises(InvariantBroken, match="holds other entries"):
        run_schedules(range(14, 40))


def test_a_network_that_is_no_full_mesh_sees_who_comes_and_goes() -> None:
    """With a sparse overlay, as a thousand nodes have one (`python -m p2pserve.bootstrap.bench --parts churn`)."""
    found = simulate_churn(40)
    assert found["simulated_converged_s"] is not None
    assert found["simulated_converged_s"] <= 10.0
    assert found["simulated_bytes_s"] is not None
    assert 0.0 < found["simulated_bytes_s"] <= 20_000.0
