"""The nodes of a box in one cut after the other, with nodes that are not there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from p2pserve.coordinator.regrouping.divisions import CutOffer
from p2pserve.node.owner.dividing import DividedBox
from p2pserve.node.settings import WAN
from p2pserve.sdk.replicas import running_box
from p2pserve.sdk.replicas.cuts import TRIAL_S, CutKeeper
from p2pserve.sdk.replicas.dividing import NodePart
from p2pserve.sdk.replicas.node_process import DIVIDED
from p2pserve.sdk.replicas.processes import Parent
from p2pserve.sdk.replicas.running_box import HANGS_S, RunningBox

from ..commands.parsing import parse

OFFERS = tuple(CutOffer(replicas=number, tp=4 // number, longest=8192) for number in (1, 2, 4))


class Nodes:
    """Stands in for `BoxNodes`: leaves when it is told to, unless it hangs."""

    def __init__(
        self, parts: Sequence[NodePart], options: Any, *, parent: Parent, were_members: bool, **_: object
    ) -> None:
        self.parts = tuple(parts)
        self.parent = parent
        self.were_members = were_members
        self.hangs = False
        self.signals = 0
        self.gone = trio.Event()

    @property
    def told(self) -> DividedBox:
        found: DividedBox = self.parts[0].options[DIVIDED]
        return found

    def leave(self) -> None:
        self.signals += 1
        if not self.hangs:
            self.gone.set()

    def end(self) -> None:
        self.gone.set()

    async def run(self) -> int:
        await self.gone.wait()
        return 0

    def say_ready(self) -> None:
        for part in self.parts:
            self.parent.on_told(part, {"ready": True})

    def want(self, replicas: object) -> None:
        self.parent.on_told(self.parts[0], {"recut": replicas})


class World:
    """A box that begins with two nodes; the nodes of each cut, as they come; and what was said."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, offers: tuple[CutOffer, ...] = OFFERS) -> None:
        self.home = home
        self.said: list[str] = []
        self.cuts: list[Nodes] = []
        self._made = trio.Event()
        monkeypatch.setattr(running_box, "BoxNodes", self._make)
        options = vars(parse(["join", "--bootstrap", "p2p_worker_x", "--emulate", "4xA40", "--home", str(home)]))
        self.drain_s: float = options["drain_s"]
        self.box = RunningBox(
            options, (), CutKeeper(2, offers, 600.0), tell=self._tell, greet=lambda part, said: None, tuning=WAN
        )

    def _make(self, *given: Any, **named: Any) -> Nodes:
        self.cuts.append(Nodes(*given, **named))
        self._made.set()
        return self.cuts[-1]

    def _tell(self, folder: str, line: str) -> None:
        self.said.append(line)

    async def next_cut(self, number: int) -> Nodes:
        """The nodes of the cut with this number, from 1 on, when they run."""
        while len(self.cuts) < number:
            self._made = trio.Event()
            await self._made.wait()
        await wait_all_tasks_blocked()
        return self.cuts[number - 1]

    def run(self, act: Callable[[], Awaitable[None]]) -> None:
        """Run the box beside this, which leaves it in the end."""

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.box.run)
                await act()
                self.box.leave()

        trio.run(main, clock=MockClock(autojump_threshold=0.01))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_the_nodes_of_the_cut_that_is_wanted_come_after_those_that_run(world: World) -> None:
    async def act() -> None:
        first = await world.next_cut(1)
        assert [part.folder for part in first.parts] == ["node", "node-2"]
        assert not first.were_members
        assert len(first.told.division.nodes) == 2
        (other,) = (part.options[DIVIDED] for part in first.parts[1:])
        assert (other.division.head, other.division.nodes) == (first.told.division.head, ())
        first.want(4)
        second = await world.next_cut(2)
        assert (first.signals, len(second.parts), second.were_members) == (1, 4, True)
        assert second.told.division.nodes[:2] == first.told.division.nodes
        second.say_ready()
        assert "all nodes are ready" in world.said

    world.run(act)
    assert len(world.cuts) == 2


def test_what_is_not_offered_and_what_is_no_number_moves_nobody(world: World) -> None:
    async def act() -> None:
        first = await world.next_cut(1)
        for wrong in (3, 64, -1, "4", None, 2):
            first.want(wrong)
        assert first.signals == 0

    world.run(act)
    assert len(world.cuts) == 1


def test_a_cut_that_is_not_ready_in_time_goes_back(world: World) -> None:
    async def act() -> None:
        (await world.next_cut(1)).want(4)
        await world.next_cut(2)
        began = trio.current_time()
        third = await world.next_cut(3)
        assert TRIAL_S <= trio.current_time() - began < TRIAL_S + 1.0
        assert len(third.parts) == 2
        assert (third.told.division.refused, third.told.division.why) == (4, "its engines were not ready after 800 s")

    world.run(act)


def test_a_node_that_hangs_is_not_waited_for_without_end(world: World) -> None:
    async def act() -> None:
        first = await world.next_cut(1)
        first.hangs = True
        began = trio.current_time()
        first.want(1)
        second = await world.next_cut(2)
        waited_s = trio.current_time() - began
        assert world.drain_s + HANGS_S <= waited_s < world.drain_s + HANGS_S + 1.0
        assert len(second.parts) == 1

    world.run(act)


def test_a_failure_on_trial_brings_back_the_cut_before_and_later_ones_do_not(world: World) -> None:
    async def act() -> None:
        first = await world.next_cut(1)
        assert not first.parent.on_failed(first.parts[0], "no memory")  # started again, as ever
        first.want(4)
        second = await world.next_cut(2)
        assert second.parent.on_failed(second.parts[2], "no memory")
        second.leave()  # as `BoxNodes` does then
        third = await world.next_cut(3)
        assert third.told.division.why == "node-3: no memory"
        assert not third.parent.on_failed(third.parts[0], "no memory")

    world.run(act)
    assert any("cannot be 4 nodes, goes back to 2: no memory" in line for line in world.said)


def test_a_cut_that_cannot_even_begin_goes_back_at_once(world: World) -> None:
    async def act() -> None:
        first = await world.next_cut(1)
        (world.home / "node-3").write_text("in the way of a folder")
        first.want(4)
        second = await world.next_cut(2)
        assert len(second.parts) == 2
        assert "node-3" in second.told.division.why

    world.run(act)


def test_who_leaves_while_its_nodes_change_leaves_for_good_and_is_signalled_once(world: World) -> None:
    async def act() -> None:
        first = await world.next_cut(1)
        first.hangs = True
        first.want(4)
        world.box.leave()
        assert first.signals == 1
        world.box.leave()  # a second time: at once
        assert first.signals == 2
        first.gone.set()

    world.run(act)
    assert len(world.cuts) == 1


def test_a_box_whose_owner_has_fixed_its_cut_tells_its_nodes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = World(tmp_path, monkeypatch, ())

    async def act() -> None:
        first = await fixed.next_cut(1)
        assert all(DIVIDED not in part.options for part in first.parts)
        first.want(4)
        assert first.signals == 0

    fixed.run(act)
