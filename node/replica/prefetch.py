"""Weights of the next place of a box, fetched while its engine serves in the present one."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import final

import trio

from ..models import ModelError
from .place import Place

_log = logging.getLogger(__name__)

Fetch = Callable[[Place, Callable[[str], None]], Awaitable[Path]]
"""Makes sure that the weights of a place are on this box and returns their folder; tells how far it is."""


@final
class Prefetch:
    """`fetch`: what brings weights. `tell`: hears how far they are when they are fetched beforehand."""

    def __init__(self, fetch: Fetch, tell: Callable[[str], None]) -> None:
        self._fetch = fetch
        self._tell = tell
        self._wanted: Place | None = None
        self._changed = trio.Event()
        self._one_at_a_time = trio.Lock()

    def __repr__(self) -> str:
        return f"<Prefetch {self._wanted or 'nothing'}>"

    def want(self, place: Place | None) -> None:
        """The box is to take this place next; None: it stays where it is. What is fetched for another is called off."""
        if place != self._wanted:
            self._wanted = place
            self._changed.set()

    async def fetch(self, place: Place, tell: Callable[[str], None]) -> Path:
        """The weights of the place that is taken now; what is fetched beforehand is called off, and goes on here where
        it stopped. Raises ModelError."""
        self.want(None)
        async with self._one_at_a_time:
            return await self._fetch(place, tell)

    async def run(self) -> None:
        """Fetch what is wanted until cancelled."""
        while True:
            self._changed, place = trio.Event(), self._wanted
            if place is None:
                await self._changed.wait()
                continue
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._fetch_beforehand, place)
                await self._changed.wait()
                nursery.cancel_scope.cancel()

    async def _fetch_beforehand(self, place: Place) -> None:
        try:
            async with self._one_at_a_time:
                await self._fetch(place, self._tell)
        except ModelError as error:
            _log.info("weights of %s are not fetched beforehand: %s", place, error)  # it is tried again, and told, then
        finally:
            self._tell("")
