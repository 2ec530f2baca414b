"""Random schedules of faults over simulated networks: what must hold does, and what does not is found."""

from typing import Any

import pytest

from p2pserve.bootstrap.dev import schedules
from p2pserve.bootstrap.dev.bench import simulate_churn
from p2pserve.bootstrap.dev.schedules import InvariantBroken, Schedule, main, run_schedules
from p2pserve.bootstrap.members.election import Election, ElectionResult, ElectionView
from p2pserve.bootstrap.members.liveness import Liveness

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


def test_a_network_that_is_no_full_mesh_sees_who_comes_and_goes() -> None:
    """With a sparse overlay, as a thousand nodes have one (`python -m p2pserve.bootstrap.bench --parts churn`)."""
    found = simulate_churn(40)
    assert found["simulated_converged_s"] is not None
    assert found["simulated_converged_s"] <= 10.0
    assert found["simulated_bytes_s"] is not None
    assert 0.0 < found["simulated_bytes_s"] <= 20_000.0
