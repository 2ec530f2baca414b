"""Which connections a link should have, and when to dial the ones it lacks. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

import msgspec

from ..wire.dial_path import DialPath
from ..wire.sockets import SMALL_SEGMENT_BYTES
from .settings import LinkSettings

SPARE: Final = 2
"""Connections of a path that stay, as a multiple of those that it is to have."""


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
    is_spare: bool = False  # nobody misses it

    def attempt(self, number: int, narrow: frozenset[tuple[str, int]]) -> DialAttempt:
        """To dial it now."""
        is_narrow = (self.path.host, self.path.port) in narrow and not self.path.segment_bytes
        segment_bytes = SMALL_SEGMENT_BYTES if is_narrow else self.path.segment_bytes
        return DialAttempt(number, msgspec.structs.replace(self.path, segment_bytes=segment_bytes))


class Dialler:
    """One slot for each connection that should exist; empty ones are dialled, with growing waits."""

    def __init__(self, settings: LinkSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._slots: dict[int, _DialSlot] = {}
        self._leaving: list[int] = []  # connections of paths that are no longer wanted
        self._next = 0
        self._narrow: frozenset[tuple[str, int]] = frozenset()  # (host, port) that large packets did not reach
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
        """Use these paths. Serving connections stay, up to SPARE times as many as a path is to have: how
        many it needs is measured anew all the time, and a connection costs round trips and a slow start.
        Others leave once a wanted one is up."""
        old, self._slots = self._slots, {}
        for path in paths:
            path = path.per_stream()
            serving = [number for number, slot in old.items() if slot.path.is_same_but_streams(path)]
            serving.sort(key=lambda number: (old[number].connection is None, number))
            most = path.streams if path.pace_bytes_s else min(SPARE * path.streams, self._settings.max_connections)
            for place, number in enumerate(serving[:most]):
                old[number].is_spare = place >= path.streams
                if not old[number].is_spare or old[number].connection is not None:
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
                found.append(slot.attempt(number, self._narrow))
        return found

    def mark_up(self, slot: int, connection: int) -> bool:
        """An attempt has become a connection. False: it is no longer wanted and must be closed."""
        wanted = self._slots.get(slot)
        if wanted is None:
            return False
        wanted.is_dialling, wanted.connection, wanted.wait = False, connection, self._settings.redial_first_s
        self.failures.pop(wanted.path.label, None)
        return True

    def mark_down(self, slot: int, reason: str, now: float) -> None:
        """An attempt has failed, or a connection is gone."""
        wanted = self._slots.get(slot)
        if wanted is None:
            return
        if wanted.is_dialling:
            self.failures[wanted.path.label] = reason
        if wanted.is_spare:
            del self._slots[slot]
            return
        wanted.is_dialling, wanted.connection = False, None
        wanted.next_at = now + wanted.wait * self._rng.uniform(0.5, 1.0)
        wanted.wait = min(2 * wanted.wait, self._settings.redial_limit_s)

    def note_stuck(self, connection: int) -> None:
        """What this connection carried had not arrived for long when it ended. Large packets may be lost on that path,
        and what routers say of it filtered: it is dialled with small segments from now on, which costs little."""
        for slot in self._slots.values():
            if slot.connection == connection:
                self._narrow |= {(slot.path.host, slot.path.port)}

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
