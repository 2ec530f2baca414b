"""The network as one node sees it: adverts, the plan it follows, and what follows from them. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import msgspec

from ..bootstrap import DECODE_ERRORS, PeerId
from ..coordinator import BoxView, LinkView, Load, Plan
from .messages import Advert, LinkTable

MIN_FIGURE = 1e-6  # no box computes or copies less than this many TFLOP/s or GB/s


_adverts = msgspec.msgpack.Decoder(Advert)
_tables = msgspec.msgpack.Decoder(LinkTable)
_plans = msgspec.msgpack.Decoder(Plan)


def decode_adverts(entries: Mapping[PeerId, bytes]) -> tuple[dict[PeerId, Advert], tuple[PeerId, ...]]:
    """Adverts by peer, and the peers whose entry is none (of another version, or garbage)."""
    adverts: dict[PeerId, Advert] = {}
    refused = []
    for peer, payload in entries.items():
        try:
            adverts[peer] = _adverts.decode(payload)
        except DECODE_ERRORS:
            refused.append(peer)
    return adverts, tuple(refused)


def decode_plan(payload: bytes) -> Plan | None:
    """A plan, or None for bytes that are none."""
    try:
        return _plans.decode(payload)
    except (*DECODE_ERRORS, ValueError):
        return None


@final
@dataclass(slots=True)
class NetworkView:
    """Kept up to date by the agent; read by gateway, coordinator and status."""

    adverts: dict[PeerId, Advert] = field(default_factory=dict)
    plan: Plan | None = None
    links_told: dict[PeerId, LinkTable] = field(default_factory=dict)
    _payloads: dict[PeerId, bytes] = field(default_factory=dict)
    _table_payloads: dict[PeerId, bytes] = field(default_factory=dict)

    def update(self, entries: Mapping[PeerId, bytes]) -> None:
        """Take in the adverts of the live members; only what has changed is decoded."""
        news = {peer: payload for peer, payload in entries.items() if self._payloads.get(peer) != payload}
        decoded, _ = decode_adverts(news)
        kept = {peer: advert for peer, advert in self.adverts.items() if peer in entries and peer not in news}
        self.adverts = kept | decoded
        self._payloads = dict(entries)

    def update_links(self, entries: Mapping[PeerId, bytes]) -> None:
        """Take in what members say of their links. One that says nonsense says nothing."""
        kept = {
            peer: table
            for peer, table in self.links_told.items()
            if self._table_payloads.get(peer) == entries.get(peer)
        }
        for peer, payload in entries.items():
            if peer not in kept:
                try:
                    kept[peer] = _tables.decode(payload)
                except (*DECODE_ERRORS, ValueError):
                    continue
        self.links_told, self._table_payloads = kept, dict(entries)

    def consider_plan(self, author: PeerId, epoch: int, payload: bytes) -> bool:
        """Follow a plan if its author won the epoch it names and it is newer. Returns whether it was taken.

        `author` and `epoch` are the coordinator's as membership knows them: a plan of anyone else, or of an
        epoch its signer did not win, does not count.
        """
        plan = decode_plan(payload)
        if plan is None or plan.epoch != epoch:
            return False
        if self.plan is not None and plan.service == self.plan.service and not plan.newer_than(self.plan):
            return False
        self.plan = plan
        return True

    def serving(self, peer: PeerId, service: str) -> bool:
        """Whether new requests of the service may go to this peer."""
        advert = self.adverts.get(peer)
        return (
            advert is not None
            and not advert.draining
            and advert.engine is not None
            and advert.engine.state == "ready"
            and advert.model is not None
            and advert.model.service == service
        )

    def hopeful(self, service: str) -> bool:
        """Whether an engine of the service is starting, so that waiting for it makes sense."""
        return any(
            advert.model is not None
            and advert.model.service == service
            and advert.engine is not None
            and advert.engine.state in ("starting", "restarting")
            and not advert.draining
            for advert in self.adverts.values()
        )

    def starts(self, peer: PeerId) -> int:
        """How often this peer's engine has been started: tells a restarted engine from the one that failed."""
        advert = self.adverts.get(peer)
        return advert.engine.starts if advert is not None and advert.engine is not None else 0

    def boxes(self, service: str) -> list[BoxView]:
        """What the planner may use. A box whose engine has never run has no measured figures and is left out."""
        found = []
        for peer, advert in self.adverts.items():
            engine, model = advert.engine, advert.model
            if engine is None or model is None or model.service != service:
                continue
            if min(engine.tflops, engine.memory_gbps) < MIN_FIGURE:
                continue
            found.append(
                BoxView(
                    peer=peer,
                    service=service,
                    layers=model.layers,
                    ready=engine.state == "ready",
                    draining=advert.draining,
                    compute_tflops=engine.tflops,
                    memory_gbps=engine.memory_gbps,
                    memory_gib=sum(gpu.memory_gib for gpu in advert.hardware.gpus) or advert.hardware.memory_gib,
                    kv_tokens=engine.kv_tokens,
                )
            )
        return found

    def links(self) -> list[LinkView]:
        """Round trips as each box measured them."""
        return [
            LinkView(source=source, target=target, rtt_s=rtt)
            for source, advert in self.adverts.items()
            for target, rtt in advert.rtt_s.items()
        ]

    def services(self) -> tuple[str, ...]:
        """Services that any member offers, in order of name."""
        return tuple(sorted({a.model.service for a in self.adverts.values() if a.model is not None}))

    def loads(self, in_flight: Mapping[PeerId, int]) -> list[Load]:
        """Reported load, or what this gateway itself has in flight where that is more: reports lag behind."""
        loads = []
        for peer, advert in self.adverts.items():
            stats, engine = advert.stats, advert.engine
            if engine is None:
                continue
            loads.append(
                Load(
                    peer=peer,
                    running=max(stats.running if stats else 0, in_flight.get(peer, 0)),
                    waiting=stats.waiting if stats else 0,
                    kv_free_tokens=stats.kv_free_tokens if stats else engine.kv_tokens,
                )
            )
        return loads
