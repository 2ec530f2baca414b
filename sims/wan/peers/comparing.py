"""The whole comparison: what is measured, in which order, within which time."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ....kvtransport.routing.paths import PathQuery, choose
from ..emulated import EmulatedWan, unavailable
from ..kv.kvnetwork import KVNetwork
from ..scenario import Scenario, WanBox, WanPair
from .changes import ChangeTimes, measure_changes
from .environment import PeerEnvironment, default_folder
from .figures import (
    LOOPBACK,
    LOSSLESS,
    LOSSY,
    MOONCAKE,
    NIXL,
    OURS_OVER_MANY,
    ChangeRow,
    CpuRow,
    PeerFigures,
    PeerRow,
    PipelineRow,
    change_row,
    cpu_rows,
    peer_rows,
    pipeline_row,
)
from .movers import library_contender, our_contender, raw_contender, rsync_contender
from .pipelines import RTTS_MS, PipelineTurns, measure_pipelines
from .programs import LoopbackSite, PeerSite, WanSite
from .turns import Contender, TurnsTaken, take_turns

SENDER, RECEIVER = "paris", "nyc"
GBPS: Final = 1.0
PLAIN_STREAMS: Final = 16
LINKS: Final = {LOSSY: WanPair(rtt_ms=80, loss=1e-3), LOSSLESS: WanPair(rtt_ms=40)}
PARTS: Final = ("links", "loopback", "pipelines", "changes")
SHARES: Final = {LOSSY: 0.3, LOSSLESS: 0.15, LOOPBACK: 0.1}
"""Of the seconds; pipelines have the rest, in equal parts."""

LOOPBACK_TIMES: Final = 2
"""Loopback is so much faster than the links that so many times the bytes are timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """What is compared. `seconds`: for all of it, without installing; `tokens`: of each answer."""

    parts: tuple[str, ...] = PARTS
    mib: int = 256
    rounds: int = 5
    seconds: float = 900.0
    stages: tuple[int, ...] = (2, 3, 4)
    tokens: int = 17
    folder: Path = field(default_factory=default_folder)
    install: bool = True


class PeerComparison:
    """Measures what the options ask for; `say` is told how far it is."""

    def __init__(self, options: PeerOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._peers = PeerEnvironment(options.folder, install=options.install)
        self._failures: dict[str, str] = {}
        self._cannot_show: dict[str, None] = {}

    def run(self) -> PeerFigures:
        """All parts. Raises WanError, OSError; a peer that does not work is a row."""
        options, load = self._options, os.getloadavg()[0]
        if {"links", "loopback"} & set(options.parts):
            for name in ("nixl", "mooncake"):
                self._failures[name] = self._peers.prepare(name)
                self._say(f"{name}: {self._failures[name] or 'ready'}")
        rows: list[PeerRow] = []
        cpu: list[CpuRow] = []
        pipelines: list[PipelineRow] = []
        if "links" in options.parts:
            for link, pair in LINKS.items():
                rows += peer_rows(link, self._over_link(link, pair))
        if "loopback" in options.parts:
            taken = self._loopback()
            rows += peer_rows(LOOPBACK, taken)
            cpu += cpu_rows(taken)
        if "pipelines" in options.parts:
            for stages in options.stages:
                pipelines += map(pipeline_row, self._pipelines(stages))
        changes = [self._changes()] if "changes" in options.parts else []
        return PeerFigures(
            links=rows, cpu=cpu, pipelines=pipelines, changes=changes, circumstances=self._circumstances(load)
        )

    def _circumstances(self, load: float) -> list[str]:
        cores = os.cpu_count() or 1
        after = os.getloadavg()[0]
        where = "Every link but loopback is emulated, by namespaces and TUN devices of one machine."
        cost = f"It has {cores} cores for all ends, stages and the emulator; load {load:.1f} before, {after:.1f} after."
        lines = [f"{where} {cost}"]
        if self._cannot_show:
            lines += (
                f"What the emulation cannot show: {'; '.join(half)}." for half in _halves(list(self._cannot_show))
            )
        return lines

    def _seconds(self, link: str) -> float:
        return self._options.seconds * SHARES[link]

    def _over_link(self, link: str, pair: WanPair) -> list[TurnsTaken]:
        options = self._options
        reason = unavailable("tun")
        if reason is not None:
            self._say(f"{link}: {reason}")
            failure = f"no emulated link: {reason}"
            return [TurnsTaken(each.name, failure=failure) for each in self._link_contenders(LoopbackSite(), 1)]
        box = WanBox(up_gbps=GBPS, down_gbps=GBPS)
        scenario = Scenario(boxes={SENDER: box, RECEIVER: box}, pairs={(SENDER, RECEIVER): pair})
        with KVNetwork(EmulatedWan(scenario, kind="tun")) as network:
            self._cannot_show |= dict.fromkeys(network.wan.cannot_show)
            network.measure(SENDER, RECEIVER)
            query = PathQuery(source=SENDER, target=RECEIVER, bytes=options.mib << 20, relays=frozenset())
            streams = sum(path.streams for path in choose(query, network.known()).paths)
            self._say(f"{link}: ours has {streams} streams")
            site = WanSite(network.wan, SENDER, RECEIVER)
            contenders = self._link_contenders(site, streams)
            return take_turns(
                contenders, mib=options.mib, rounds=options.rounds, seconds=self._seconds(link), say=self._say
            )

    def _link_contenders(self, site: PeerSite, streams: int) -> list[Contender]:
        """Of a long link: there, other numbers of streams and rsync are worth a look."""
        many = our_contender(site, PLAIN_STREAMS, OURS_OVER_MANY)
        return [*self._contenders(site, streams, PLAIN_STREAMS), many, rsync_contender(site)]

    def _loopback(self) -> list[TurnsTaken]:
        options = self._options
        return take_turns(
            self._contenders(LoopbackSite(), 1, 1),
            mib=LOOPBACK_TIMES * options.mib,
            rounds=options.rounds,
            seconds=self._seconds(LOOPBACK),
            say=self._say,
        )

    def _contenders(self, site: PeerSite, streams: int, plain: int) -> list[Contender]:
        return [
            our_contender(site, streams),
            raw_contender(site, plain),
            library_contender(site, "nixl", NIXL, self._peers, self._failures["nixl"]),
            library_contender(site, "mooncake", MOONCAKE, self._peers, self._failures["mooncake"]),
        ]

    def _changes(self) -> ChangeRow:
        reason = unavailable("tun")
        if reason is not None:
            return change_row(ChangeTimes(etcd_failure=f"no emulated link: {reason}"))
        return change_row(measure_changes(self._options.rounds, self._say))

    def _pipelines(self, stages: int) -> list[PipelineTurns]:
        options = self._options
        reason = unavailable("tun")
        if reason is not None:
            return [PipelineTurns(stages, rtt_ms, failure=f"no emulated link: {reason}") for rtt_ms in RTTS_MS]
        seconds = options.seconds * (1 - sum(SHARES.values())) / len(options.stages)
        measured = measure_pipelines(
            stages, pairs=options.rounds, tokens=options.tokens, seconds=seconds, say=self._say
        )
        return list(measured)


def _halves(items: list[str]) -> list[list[str]]:
    """A paragraph of the page each."""
    middle = -(-len(items) // 2)
    return [half for half in (items[:middle], items[middle:]) if half]
