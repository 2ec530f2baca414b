"""Where boxes are, and what lies between them: loopback, or an emulated network whose links can be cut and slowed."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, final

import trio

from ...sims.wan import namespaces
from ...sims.wan.emulated import EmulatedWan
from ...sims.wan.scenario import Scenario, WanBox, WanPair
from ..errors import DemoFailed

CLIENTS: Final = "clients"
PORT: Final = 4001
NOWHERE: Final = 1
CALM: Final = WanPair(rtt_ms=4.0, gbps=1.0)
NEAR: Final = WanPair(rtt_ms=1.0, gbps=1.0)
SLOW: Final = WanPair(rtt_ms=300.0, gbps=0.02)
_NEW_NETWORK: Final = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True, slots=True)
class BoxPlace:
    """Where a box listens, and what its command line begins with so that it runs there."""

    listen: str
    prefix: tuple[str, ...] = ()

    def closed_options(self) -> tuple[str, ...]:
        """Options of a box that nobody can dial: it announces a port at which nobody listens."""
        return ("--announce", f"{self.listen.rpartition(':')[0]}:{NOWHERE}")


@final
class ChaosLinks:
    """The links of boxes 0, 1, ... and of the clients, in an emulated network."""

    def __init__(self, wan: EmulatedWan, boxes: int) -> None:
        self._wan = wan
        self._names = [f"box-{number}" for number in range(boxes)]

    def __repr__(self) -> str:
        return f"<ChaosLinks {len(self._names)} boxes>"

    def places(self) -> list[BoxPlace]:
        """Of the boxes."""
        return [
            BoxPlace(f"{self._wan.address(name)}:{PORT}", tuple(self._wan.command(name, ()))) for name in self._names
        ]

    async def cut(self, numbers: Sequence[int], seconds: float) -> None:
        """Let nothing pass between these boxes and all others, for so long."""
        for ours, other in self._pairs(numbers):
            await trio.to_thread.run_sync(self._wan.outage, ours, other, seconds)
        await trio.sleep(seconds)

    async def split(self, numbers: Sequence[int], seconds: float) -> None:
        """Let nothing pass between these boxes and all other boxes, for so long; clients reach both."""
        for ours, other in self._pairs(numbers):
            if other != CLIENTS:
                await trio.to_thread.run_sync(self._wan.outage, ours, other, seconds)
        await trio.sleep(seconds)

    async def slow(self, numbers: Sequence[int], seconds: float) -> None:
        """Make all links of these boxes thin and long, for so long."""
        await self._set(numbers, SLOW)
        try:
            await trio.sleep(seconds)
        finally:
            with trio.CancelScope(shield=True):
                await self._set(numbers, CALM)

    async def carry(self, one: int, other: int, gbps: float) -> None:
        """Let the links between two boxes carry so much from now on, both ways."""
        change = partial(self._wan.set_pair, self._names[one], self._names[other], gbps=gbps)
        await trio.to_thread.run_sync(change)

    async def _set(self, numbers: Sequence[int], pair: WanPair) -> None:
        for ours, other in self._pairs(numbers):
            change = partial(self._wan.set_pair, ours, other, rtt_ms=pair.rtt_ms, gbps=pair.gbps)
            await trio.to_thread.run_sync(change)

    def _pairs(self, numbers: Sequence[int]) -> list[tuple[str, str]]:
        these = [self._names[number] for number in numbers]
        return [(one, other) for one in these for other in (CLIENTS, *self._names) if other not in these]


@contextmanager
def open_links(boxes: int, nearest: int | None = None) -> Iterator[ChaosLinks]:
    """An emulated network for the body, which runs where its clients are, and `nearest` to them is this box. Raises
    DemoFailed where there can be none."""
    if reason := why_no_links():
        raise DemoFailed(f"links: they cannot be emulated here, since it {reason}; or take --links loopback")
    names = [CLIENTS, *(f"box-{number}" for number in range(boxes))]
    scenario = Scenario(
        boxes={name: WanBox(up_gbps=10.0, down_gbps=10.0) for name in names},
        pairs={} if nearest is None else {(CLIENTS, names[nearest + 1]): NEAR},
        default=CALM,
    )
    with EmulatedWan(scenario, kind="tun") as wan, _entered(wan.namespace(CLIENTS)):
        yield ChaosLinks(wan, boxes)


def why_no_links() -> str | None:
    """Why links cannot be emulated here; None where they can."""
    return namespaces.unavailable()


def find_loopback_places(boxes: int) -> list[BoxPlace]:
    """Ports of the loopback address that nobody listens on now: boxes that start again have the same ones."""
    sockets = [socket.socket() for _ in range(boxes)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [BoxPlace(f"127.0.0.1:{each.getsockname()[1]}") for each in sockets]
    finally:
        for each in sockets:
            each.close()


@contextmanager
def _entered(namespace: str) -> Iterator[None]:
    """Be in a network namespace with this thread and those that it starts. Raises DemoFailed."""
    with Path("/proc/self/task", str(threading.get_native_id()), "ns/net").open("rb") as before:
        with (Path("/run/netns") / namespace).open("rb") as inside:
            _enter(inside.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK) != 0:
        raise DemoFailed(f"a network namespace cannot be entered: {os.strerror(ctypes.get_errno())}")
