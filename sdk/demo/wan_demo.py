"""`p2pserve demo --wan`: six boxes at three sites on one machine, a link that degrades and a box that is lost.

    the demo --- the emulator: carries packets between the namespaces, with their round trips and rates
        |--- bootstrap, join, join, ... each in a namespace, with an emulated engine
        `--- client, in one of its own

Nothing outlives a run, as with the other demo: processes end first, then the emulator removes the namespaces.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Final, final

import msgspec
import trio
from rich.console import Console

from ...node.box.errors import NodeError
from ...sims.wan import EmulatedWan, Scenario, unavailable
from ..actions.status_view import open_console
from ..errors import DemoFailed
from .box import DemoBox, open_box
from .demo import describe_timeout, refuse_options
from .ocean import (
    BOXES,
    CLIENT,
    DEGRADED_GBPS,
    MODEL,
    KvLink,
    OceanBox,
    build_scenario,
    busiest_decode,
    heaviest_link,
    kv_links,
)
from .running import run_in_time
from .wan_client import ASK, STOP, ClientLine, ClientOrders, ClientStopped, WanLook
from .wan_report import WanEvents, WanReport, picture_lines, report_run
from .wan_timeline import WanTimeline

PORT: Final = 4001
POLL_S: Final = 0.1
CLIENT_MODULE: Final = "p2pserve.sdk.demo.wan_client"
FOREVER_S: Final = 1e6
ORDERS: Final = ClientOrders(prompt=1200, output=50, every_s=0.7)


@dataclass(frozen=True, slots=True, kw_only=True)
class WanDemoSettings:
    """How long each part takes, in seconds, and what is asked. Longer parts: more requests behind each figure."""

    measure_s: float = 18.0  # at most, without requests, in which nodes measure their links
    learn_s: float = 12.0  # at most, with requests, until plans rest on what the links carry
    least_learn_s: float = 6.0
    steady_s: float = 4.0  # a plan has to stand for so long before the figures begin
    calm_s: float = 7.0  # before the first event, and after each plan that answers one
    answer_s: float = 16.0  # at most, for a plan to answer an event
    orders: ClientOrders = ORDERS


def run_wan_demo(arguments: SimpleNamespace) -> int:
    """Run the command: 0 when everything worked, 1 when not, 130 when interrupted."""
    logging.disable(logging.CRITICAL if not arguments.debug else logging.NOTSET)
    refuse_options(arguments, ("nodes", "prompt", "codec", "max_tokens", "model"), "--wan")
    reason = unavailable("tun")
    if reason is not None:
        raise NodeError(f"wan: the emulated network cannot run here: {reason}")
    as_json = arguments.format == "json"
    console = open_console(stderr=as_json)
    report = trio.run(WanDemo(WanDemoSettings(), arguments.timeout_s, console).run)
    if report is None:
        return 130
    if as_json:
        print(json.dumps(msgspec.to_builtins(report)))
    else:
        show_wan_report(report, console)
    return 0 if report.ok else 1


@final
class WanDemo:
    """One run. `stage` says what it is doing, for the error when time runs out."""

    def __init__(self, settings: WanDemoSettings, timeout_s: float, console: Console) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._console = console
        self._stage = "starting"
        self._started = time.monotonic()
        self._names: dict[str, str] = {}  # peer -> box
        self._timeline = WanTimeline(self._names)
        self._stopped = trio.Event()

    async def run(self) -> WanReport | None:
        """Run to the end; None when interrupted. Raises DemoFailed and what the network raises."""
        return await run_in_time(
            self._run,
            self._timeout_s,
            say=self._say,
            explain=lambda: describe_timeout(self._timeout_s, self._stage, "--wan "),
        )

    async def _run(self) -> WanReport:
        scenario = build_scenario()
        self._stage = "the emulated network starts"
        async with open_wan(scenario) as wan, open_box() as box:
            self._say("three sites are up: round trips and rates are emulated, TCP is real")
            token = await self._start_boxes(box, wan)
            self._stage = "the client joins"
            settings = self._settings
            orders = msgspec.json.encode(settings.orders).decode()
            inside = partial(wan.command, CLIENT)
            client = await box.start_client(CLIENT_MODULE, orders, token=token, inside=inside)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, client)
                events = await self._stage_events(box, wan, client)
                nursery.cancel_scope.cancel()
            rates = {ends: (scenario.pair(*ends).rtt_ms, scenario.carried_gbps(*ends)) for ends in kv_links()}
            report = report_run(self._timeline, events, settings.orders, rates)
            return msgspec.structs.replace(
                report,
                cannot_show=wan.cannot_show,
                late_ms_mean=wan.statistics().late_ms_mean,
                elapsed_s=self._elapsed(),
                peak_memory_mib=box.peak_memory_mib,
            )

    async def _start_boxes(self, box: DemoBox, wan: EmulatedWan) -> str:
        """Start all nodes; returns the client's token."""
        self._stage = "the boxes join"
        first, *others = BOXES
        greeting = await box.start_elsewhere(
            first.name,
            ["bootstrap", *_options(first)],
            listen=f"0.0.0.0:{PORT}",
            inside=partial(wan.command, first.name),
        )
        self._names[greeting.peer] = first.name
        self._say(f"{first.name} makes the network")

        async def join(one: OceanBox) -> None:
            joined = await box.start_elsewhere(
                one.name,
                ["join", *_options(one)],
                listen=f"0.0.0.0:{PORT}",
                token=greeting.tokens["worker"],
                inside=partial(wan.command, one.name),
            )
            self._names[joined.peer] = one.name
            self._say(f"{one.name} joins{', from behind NAT' if one.is_at_home else ''}")

        async with trio.open_nursery() as nursery:
            for one in others:
                nursery.start_soon(join, one)
        return greeting.tokens["client"]

    async def _stage_events(self, box: DemoBox, wan: EmulatedWan, client: trio.Process) -> WanEvents:
        """Let requests run, degrade a link, lose a box; returns when what happened."""
        settings, timeline = self._settings, self._timeline
        self._stage = "the coordinator makes its plan"
        await _until(lambda: timeline.covers(frozenset(one.name for one in BOXES)))
        self._stage = "the links are measured"
        self._say(f"all {len(BOXES)} are in the plan; they measure their links")
        with trio.move_on_after(settings.measure_s):
            await _until(lambda: timeline.has_measured(kv_links()))
        await self._order(client, ASK)
        self._say("a client asks; transfers show what the links carry")
        await self._settle()
        self._stage = "requests are served"
        began_at = time.monotonic()
        self._say("the plan stands: from now on times are taken")
        await trio.sleep(settings.calm_s)

        began_at, link, degraded_at = await self._degrade_link(wan, began_at)
        await trio.sleep(settings.calm_s)

        lost = busiest_decode(timeline.plans[-1].shares, {BOXES[0].name})
        if lost is None:
            raise DemoFailed("the plan decodes at the coordinator alone: there is no other box to lose")
        self._stage = "a box is lost"
        lost_at = time.monotonic()
        self._cut_off(box, wan, lost)
        self._say(f"BOX IS LOST: {lost} loses its power")
        with trio.move_on_after(settings.answer_s):
            await _until(lambda: timeline.planned_without(lost, lost_at) is not None)
        await trio.sleep(settings.calm_s)
        ended_at = time.monotonic()
        self._stage = "the last answers come"
        await self._order(client, STOP)
        await self._stopped.wait()
        return WanEvents(
            began_at=began_at, degraded=link, degraded_at=degraded_at, died=lost, died_at=lost_at, ended_at=ended_at
        )

    async def _settle(self) -> None:
        """Wait until a plan stands."""
        settings, timeline = self._settings, self._timeline
        with trio.move_on_after(settings.learn_s):
            began = time.monotonic()
            await trio.sleep(settings.least_learn_s)
            await _until(lambda: time.monotonic() - max(began, timeline.plans[-1].at) > settings.steady_s)

    async def _degrade_link(self, wan: EmulatedWan, began_at: float) -> tuple[float, KvLink, float]:
        """Degrade the KV link that the plan uses most, and wait until a plan has answered. Returns since when figures
        count, which link, and when.

        Plans also change for other reasons, and what is sent over no link is noticed by nobody: then it is another
        link's turn."""
        settings = self._settings
        self._stage = "a link degrades"
        link, degraded_at = await self._degrade_heaviest(wan)
        if not self._is_left(link, degraded_at):
            return began_at, link, degraded_at
        self._say("plans have left that link for another reason: it is as before, another one is taken")
        wan.set_pair(*link, gbps=wan.scenario.pair(*link).gbps)
        began_at = time.monotonic()
        await trio.sleep(settings.steady_s)
        return began_at, *await self._degrade_heaviest(wan)

    async def _degrade_heaviest(self, wan: EmulatedWan) -> tuple[KvLink, float]:
        """Degrade a link and wait until something has been done about it, or it is not used any more."""
        timeline = self._timeline
        link = heaviest_link(timeline.plans[-1].shares, wan.scenario)
        if link is None:
            raise DemoFailed("the plan sends no KV from box to box: there is no link to degrade")
        degraded_at = time.monotonic()
        wan.set_pair(*link, gbps=DEGRADED_GBPS)
        self._say(f"LINK DEGRADES: {link[0]} -> {link[1]} falls to {DEGRADED_GBPS:g} Gb/s")
        with trio.move_on_after(self._settings.answer_s):
            await _until(lambda: timeline.is_answered(link, degraded_at) or timeline.has_left(link, degraded_at))
        return link, degraded_at

    def _is_left(self, link: KvLink, since: float) -> bool:
        return self._timeline.has_left(link, since) and not self._timeline.is_answered(link, since)

    def _cut_off(self, box: DemoBox, wan: EmulatedWan, name: str) -> None:
        """A box without power says no farewell: first its packets vanish, then its processes."""
        for other in wan.scenario.boxes:
            if other != name:
                wan.outage(name, other, FOREVER_S)
        box.kill_node(next(peer for peer, each in self._names.items() if each == name))

    async def _listen(self, client: trio.Process) -> None:
        """Take what the client tells."""
        assert client.stdout is not None
        rest = b""
        async for data in client.stdout:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(msgspec.json.decode(line, type=ClientLine))

    def _take(self, line: ClientLine) -> None:
        if isinstance(line, WanLook):
            for news in self._timeline.on_look(line):
                self._say(news)
        elif isinstance(line, ClientStopped):
            self._stopped.set()
        else:
            self._timeline.on_request(line)

    async def _order(self, client: trio.Process, order: bytes) -> None:
        assert client.stdin is not None
        await client.stdin.send_all(order + b"\n")

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _say(self, line: str) -> None:
        self._console.print(f"{self._elapsed():5.1f} s  {line}")


@asynccontextmanager
async def open_wan(scenario: Scenario) -> AsyncIterator[EmulatedWan]:
    """The emulated network for the body; its namespaces are gone afterwards, whatever happens."""
    wan = EmulatedWan(scenario, kind="tun")
    try:
        with trio.CancelScope(shield=True):  # half a network could not be removed
            await trio.to_thread.run_sync(wan.__enter__)
        yield wan
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(wan.close)


def _options(box: OceanBox) -> list[str]:
    """Of `bootstrap` and `join`."""
    rates = [f"{box.port_gbps:g}"] * 2
    what = ["--model", MODEL, "--emulate", box.cards, "--phase", box.phase.value]
    return [*what, "--site", box.probed_as, "--up-gbps", rates[0], "--down-gbps", rates[1]]


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what other processes do, over seconds)
        await trio.sleep(POLL_S)


def show_wan_report(report: WanReport, console: Console) -> None:
    """The figures for people."""
    console.print()
    for line in picture_lines(report):
        console.print(line)
    for problem in report.problems:
        console.print(f"PROBLEM: {problem}")
    console.print("everything worked" if report.ok else "not everything worked")
