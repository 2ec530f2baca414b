"""`topology --watch`, run without a terminal: it shows what is there, follows keys, and outlives a silent network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from textual.pilot import Pilot

from p2pserve.node.messages import Status
from p2pserve.sdk.errors import ConnectionFailed
from p2pserve.sdk.seeing.watch import TopologyApp, WatchOptions

from .networks import NOW, network

Script = Callable[[TopologyApp, Pilot[None]], Awaitable[None]]


def watch(look: Callable[[], Status], script: Script, options: WatchOptions | None = None) -> None:
    async def main() -> None:
        app = TopologyApp(look, lambda: NOW, options or WatchOptions(interval_s=3600.0))
        async with app.run_test(size=(80, 50)) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            await script(app, pilot)

    asyncio.run(main())


def shown(app: TopologyApp) -> str:
    return app.export_screenshot().replace("&#160;", " ")


def test_boxes_matrix_and_the_chosen_link_are_there() -> None:
    async def script(app: TopologyApp, pilot: Pilot[None]) -> None:
        text = shown(app)
        assert "7 boxes at 3 sites" in text
        assert "RTX A6000" in text
        assert "capacity" in text

    watch(lambda: network(8), script)


def test_keys_change_the_figure_fold_and_choose() -> None:
    async def script(app: TopologyApp, pilot: Pilot[None]) -> None:
        before = shown(app)
        await pilot.press("down", "right")
        assert shown(app) != before
        await pilot.press("m")
        assert "links: round trip" in shown(app)
        await pilot.press("f")
        assert "3 sites, " in shown(app)
        await pilot.press("space")
        assert "paused" in shown(app)
        await pilot.press("q")

    watch(lambda: network(8), script)


def test_a_network_that_does_not_answer_is_told_and_the_last_view_stays() -> None:
    answers = [network(8)]

    def look() -> Status:
        if answers:
            return answers.pop()
        raise ConnectionFailed("no node of the network answers")

    async def script(app: TopologyApp, pilot: Pilot[None]) -> None:
        await pilot.press("r")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "no node of the network answers" in shown(app)
        assert "7 boxes at 3 sites" in shown(app)

    watch(look, script)


def test_one_box_and_none_chosen_are_no_trouble() -> None:
    async def script(app: TopologyApp, pilot: Pilot[None]) -> None:
        await pilot.press("up", "left", "m", "f")
        assert "1 site, 1 GPU" in shown(app)

    watch(lambda: network(1), script)
