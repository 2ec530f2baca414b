"""The plan on a node's disk."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from p2pserve.coordinator import Phase, Plan
from p2pserve.coordinator.plan import Pairing, Replica, Stage
from p2pserve.node.planning.plan_file import PlanFile
from p2pserve.node.view import NetworkView

NETWORK = b"n" * 32
REPLICA = Replica(id="a", phase=Phase.MIXED, stages=(Stage(peer="a", tp=1, first_layer=0, last_layer=4),))


def plan(version: int) -> Plan:
    pairing = Pairing(prefill="a", decode="a", weight=1.0)
    return Plan(epoch=3, version=version, service="s", replicas=(REPLICA,), pairings=(pairing,), codec="raw", why=())


def keep(home: Path, *plans: Plan, said: list[str] | None = None) -> None:
    """Follow one plan after the other, each until its file was written, or something was said of that."""
    told: list[str] = [] if said is None else said

    async def main() -> None:
        view, file = NetworkView(), PlanFile(home, NETWORK, told.append)
        ignored: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(file.keep, view)
            for each in plans:
                view.plans = {each.service: each}
                with trio.fail_after(20_000):  # by a clock that is a thousand times as fast as the disk's
                    while not told and PlanFile(home, NETWORK, ignored.append).load() != (each,):
                        with trio.move_on_after(10):
                            await trio.sleep_forever()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(rate=1000.0))


def test_the_plan_that_was_followed_last_is_there_after_a_restart(tmp_path: Path) -> None:
    said: list[str] = []
    keep(tmp_path, plan(1), plan(2))
    assert PlanFile(tmp_path, NETWORK, said.append).load() == (plan(2),)
    assert PlanFile(tmp_path, b"m" * 32, said.append).load() == ()
    assert said == []


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"x" + raw, lambda raw: b"", lambda raw: raw * 2])
def test_a_damaged_file_is_set_aside_with_a_line(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    keep(tmp_path, plan(1))
    said: list[str] = []
    file = PlanFile(tmp_path, NETWORK, said.append)
    file.path.write_bytes(damage(file.path.read_bytes()))
    assert file.load() == ()
    assert "was set aside" in said[0]
    assert file.path.with_suffix(".damaged").exists()
    assert file.load() == ()
    assert len(said) == 1


def test_a_disk_that_takes_nothing_costs_a_line(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file", plan(1), said=said)
    assert "was not written" in said[0]
    assert PlanFile(tmp_path / "file", NETWORK, said.append).load() == ()
    assert "was not read" in said[1]
