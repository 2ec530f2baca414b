"""Weights of a box's next place are fetched while it serves, on a virtual clock; the fetching is scripted."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from p2pserve.coordinator import Stage
from p2pserve.node.models import ModelError
from p2pserve.node.replica.place import Place
from p2pserve.node.replica.prefetch import Prefetch

FETCH_S = 10.0
ONE, TWO = (
    Place(
        (Stage(peer="a", tp=1, first_layer=0, last_layer=cut), Stage(peer="b", tp=1, first_layer=cut, last_layer=4)), 0
    )
    for cut in (1, 2)
)


@dataclass
class Source:
    """Where weights come from: a place takes FETCH_S, less what is here already."""

    fault: str = ""
    here_s: dict[Place, float] = field(default_factory=dict)
    at_once: int = 0
    most_at_once: int = 0

    async def fetch(self, place: Place, tell: Callable[[str], None]) -> Path:
        if self.fault:
            raise ModelError(self.fault)
        began = trio.current_time()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        before = self.here_s.get(place, 0.0)
        try:
            tell(f"downloads {before:g} of {FETCH_S:g}")
            await elapse(FETCH_S - before)
        finally:
            self.at_once -= 1
            self.here_s[place] = before + trio.current_time() - began
        return Path("/model")


class Box:
    def __init__(self, nursery: trio.Nursery, source: Source) -> None:
        self.told: list[str] = []
        self.prefetch = Prefetch(source.fetch, self.told.append)
        nursery.start_soon(self.prefetch.run)

    async def take(self, place: Place) -> float:
        """Seconds until its weights are there."""
        began = trio.current_time()
        assert await self.prefetch.fetch(place, ignore) == Path("/model")
        return trio.current_time() - began


def ignore(told: str) -> None:
    pass


async def elapse(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def play(source: Source, main: Callable[[Box], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with trio.open_nursery() as nursery:
            await main(Box(nursery, source))
            nursery.cancel_scope.cancel()

    trio.run(run, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize(("early_s", "late_s"), [(0.0, FETCH_S), (4.0, FETCH_S - 4.0), (60.0, 0.0)])
def test_what_has_come_before_the_place_is_taken_does_not_come_again(early_s: float, late_s: float) -> None:
    source = Source()

    async def main(box: Box) -> None:
        box.prefetch.want(ONE)
        await elapse(early_s)
        assert await box.take(ONE) == pytest.approx(late_s)

    play(source, main)
    assert source.most_at_once == 1


def test_it_says_how_far_it_is_and_nothing_when_it_is_through() -> None:
    async def main(box: Box) -> None:
        box.prefetch.want(ONE)
        await elapse(1.0)
        assert box.told == ["downloads 0 of 10"]
        await elapse(FETCH_S)
        assert box.told == ["downloads 0 of 10", ""]

    play(Source(), main)


@pytest.mark.parametrize("wanted", [TWO, None])
def test_what_is_wanted_no_more_is_called_off(wanted: Place | None) -> None:
    source = Source()

    async def main(box: Box) -> None:
        box.prefetch.want(ONE)
        await elapse(3.0)
        box.prefetch.want(wanted)
        await elapse(60.0)
        assert box.told[-1] == ""

    play(source, main)
    assert source.here_s[ONE] == pytest.approx(3.0)
    assert (TWO in source.here_s) is (wanted is TWO)


def test_a_source_that_fails_beforehand_fails_again_when_it_matters() -> None:
    source = Source(fault="model tiny: the hub is away")

    async def main(box: Box) -> None:
        box.prefetch.want(ONE)
        await elapse(1.0)
        with pytest.raises(ModelError, match="the hub is away"):
            await box.take(ONE)
        source.fault = ""
        assert await box.take(ONE) == pytest.approx(FETCH_S)

    play(source, main)
