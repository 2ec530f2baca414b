"""Which connections a link should have, and when to dial the ones it lacks. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import msgspec

from ..errors import TicketError
from ..wire.signals import MAX_LABEL_BYTES
from .permits import Permit
from .settings import LinkSettings

__all__ = ["DialAttempt", "DialPath", "Dialler"]

_MAX_STREAMS = 64


class DialPath(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to dial one path from box to box: `(host, port)` for `streams` connections.

    With a `relay` permit, host and port are the relay's. `label` names the path in statistics at
    both ends. `congestion`: a TCP congestion control to try, such as "bbr"; where the kernel lacks
    it, its default stays. `pace_bytes_s`: bytes per second that all its connections together may
    send, held by the kernel; 0: no limit.
    """

    host: str
    port: int
    label: str = "direct"
    streams: int = 1
    relay: Permit | None = None
    congestion: str = ""
    pace_bytes_s: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.host) <= 255 or not self.host.isprintable():
            raise TicketError(f"host {self.host[:64]!r} is not a host name or address")
        if not 0 < self.port < 65536:
            raise TicketError(f"port {self.port} is not a TCP port (1..65535)")
        if not 0 < len(self.label.encode()) <= MAX_LABEL_BYTES:
            raise TicketError(f"label {self.label[:64]!r} must have 1 to {MAX_LABEL_BYTES} bytes")
        if not 1 <= self.streams <= _MAX_STREAMS:
            raise TicketError(f"{self.streams} streams; a path has 1 to {_MAX_STREAMS}")
        if not 0 <= self.pace_bytes_s < 1 << 40:
            raise TicketError(f"pace_bytes_s is {self.pace_bytes_s}; it must be 0 (no limit) or a rate")

    def per_stream(self) -> DialPath:
        """The same path with the pace of one of its connections."""
        return msgspec.structs.replace(self, pace_bytes_s=-(-self.pace_bytes_s // self.streams))

    def is_same_but_streams(self, other: DialPath) -> bool:
        """Whether a connection made for one serves for the other."""
        return msgspec.structs.replace(self, streams=1) == msgspec.structs.replace(other, streams=1)


@dataclass(frozen=True, slots=True)
class DialAttempt:
    """Dial this path, then say `mark_up` or `mark_down` for the slot."""

    slot: int
    path: DialPath


@dataclass(slots=True)
class _DialSlot:
    path: DialPath
    next_at: float
    wait: float
    is_dialling: bool = False
    connection: int | None = None


class Dialler:
    """One slot for each connection that should exist; empty ones are dialled, with growing waits."""

    def __init__(self, settings: LinkSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._slots: dict[int, _DialSlot] = {}
        self._leaving: list[int] = []  # connections of paths that are no longer wanted
        self._next = 0
        self.failures: dict[str, str] = {}  # label -> why its last attempt failed

    def __repr__(self) -> str:
        up = sum(slot.connection is not None for slot in self._slots.values())
        return f"<Dialler {up}/{len(self._slots)} up, {len(self._leaving)} leaving>"

    @property
    def paths(self) -> tuple[DialPath, ...]:
        """What is wanted, each with its number of streams."""
        found: list[DialPath] = []
        for slot in self._slots.values():
            for at, path in enumerate(found):
                if path.per_stream().is_same_but_streams(slot.path):
                    found[at] = msgspec.structs.replace(
                        path, streams=path.streams + 1, pace_bytes_s=path.pace_bytes_s + slot.path.pace_bytes_s
                    )
                    break
            else:
                found.append(msgspec.structs.replace(slot.path, streams=1))
        return tuple(found)

    def set_paths(self, paths: list[DialPath] | tuple[DialPath, ...], now: float) -> None:
        """Use these paths. Serving connections stay; others leave once a wanted one is up."""
        old, self._slots = self._slots, {}
        for path in paths:
            path = path.per_stream()
            serving = [number for number, slot in old.items() if slot.path.is_same_but_streams(path)]
            serving.sort(key=lambda number: (old[number].connection is None, number))
            for number in serving[: path.streams]:
                self._slots[number] = old.pop(number)
            for _ in range(path.streams - len(serving)):
                self._next += 1
                self._slots[self._next] = _DialSlot(path, now, self._settings.redial_first_s)
        self._leaving += [slot.connection for slot in old.values() if slot.connection is not None]
        labels = {path.label for path in paths}
        self.failures = {label: why for label, why in self.failures.items() if label in labels}

    def take_due(self, now: float) -> list[DialAttempt]:
        """What to dial now."""
        found: list[DialAttempt] = []
        for number, slot in self._slots.items():
            if slot.connection is None and not slot.is_dialling and now >= slot.next_at:
                slot.is_dialling = True
                found.append(DialAttempt(number, slot.path))
        return found

    def mark_up(self, number: int, connection: int) -> bool:
        """An attempt has become a connection. False: it is no longer wanted and must be closed."""
        slot = self._slots.get(number)
        if slot is None:
            return False
        slot.is_dialling, slot.connection, slot.wait = False, connection, self._settings.redial_first_s
        self.failures.pop(slot.path.label, None)
        return True

    def mark_down(self, number: int, reason: str, now: float) -> None:
        """An attempt has failed, or a connection is gone."""
        slot = self._slots.get(number)
        if slot is None:
            return
        if slot.is_dialling:
            self.failures[slot.path.label] = reason
        slot.is_dialling, slot.connection = False, None
        slot.next_at = now + slot.wait * self._rng.uniform(0.5, 1.0)
        slot.wait = min(2 * slot.wait, self._settings.redial_limit_s)

    def take_leaving(self) -> list[int]:
        """Connections to retire now: those of former paths, once a wanted one is up."""
        if not self._leaving or (self._slots and all(slot.connection is None for slot in self._slots.values())):
            return []
        numbers, self._leaving = self._leaving, []
        return numbers

    def wake_at(self) -> float:
        """When `take_due` is next worth asking; infinite if nothing is missing."""
        waits = [s.next_at for s in self._slots.values() if s.connection is None and not s.is_dialling]
        return min(waits, default=math.inf)
