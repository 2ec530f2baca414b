"""When a node tells its advert: at once, soon or once an interval."""

import msgspec
import pytest
import trio
from trio.testing import MockClock

from p2pserve.node.adverts import Advertising
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.engine.protocol import EngineStats
from p2pserve.node.messages import Advert
from p2pserve.node.settings import NodeTuning

TUNING = NodeTuning(advert_interval_s=1.0, load_interval_s=0.25)
NOBODY: tuple[str, ...] = ()
TWO = ("peer-a", "peer-b")


def advert_of(beside: tuple[str, ...], running: int, usage: float = 0.0) -> Advert:
    hardware = Hardware(cores=4, memory_gib=8.0, processor="x")
    return Advert(hardware=hardware, draining=False, stats=EngineStats(running, 0, usage, 100), beside=beside)


class Node:
    """Its advert, and when it has been told."""

    def __init__(self, beside: tuple[str, ...]) -> None:
        self.advert = advert_of(beside, 0)
        self.told: list[tuple[float, Advert]] = []
        self.advertising = Advertising(lambda: self.advert, self._publish, TUNING)
        self._began = trio.current_time()

    def _publish(self, advert: Advert) -> None:
        self.told.append((round(trio.current_time() - self._began, 3), advert))

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.told]

    def show(self, running: int, usage: float = 0.0) -> None:
        self.advert = advert_of(self.advert.beside, running, usage)


async def pass_s(seconds: float) -> None:
    """Let so much virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


@pytest.mark.parametrize(("beside", "soon"), [(NOBODY, 1.0), (TWO, 0.25)])
def test_requests_that_come_are_told_sooner_where_services_share_a_box(beside: tuple[str, ...], soon: float) -> None:
    async def main() -> None:
        node = Node(beside)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.advertising.run)
            await pass_s(0.1)
            node.show(1)
            await pass_s(1.3)
            assert node.times == [0.0, soon]
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0.0))


@pytest.mark.parametrize(("beside", "times"), [(NOBODY, [0.0, 1.0]), (TWO, [0.0, 0.6, 0.85])])
def test_a_request_that_comes_to_a_shared_box_after_a_quiet_while_is_told_at_once_and_more_of_them_soon(
    beside: tuple[str, ...], times: list[float]
) -> None:
    async def main() -> None:
        node = Node(beside)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.advertising.run)
            await pass_s(0.6)
            for running in (1, 2, 3):
                node.show(running)
                node.advertising.note_request()
                await pass_s(0.05)
            await pass_s(0.5)
            assert node.times == times
            assert node.told[-1][1] == node.advert
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0.0))


@pytest.mark.parametrize("beside", [NOBODY, TWO])
def test_other_figures_wait_for_the_interval_and_what_has_not_changed_is_not_told(
    beside: tuple[str, ...],
) -> None:
    async def main() -> None:
        node = Node(beside)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.advertising.run)
            await pass_s(0.1)
            node.show(0, 0.5)
            await pass_s(5.0)
            assert node.times == [0.0, 1.0]
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0.0))


def test_news_goes_out_at_once_and_is_told_once() -> None:
    async def main() -> None:
        node = Node(NOBODY)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.advertising.run)
            await pass_s(0.1)
            node.advert = msgspec.structs.replace(node.advert, draining=True)
            node.advertising.hurry()
            node.advertising.hurry()
            await pass_s(0.1)
            node.advertising.hurry()  # nothing is new
            await pass_s(3.0)
            assert node.times == [0.0, 0.1]
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0.0))
