"""Plans that are too large to be told to all: nodes fetch them in pieces, from the coordinator or from each other.

A node gives pieces to a few at a time and names those that it has served to the others, so that a plan
spreads as a tree and no coordinator sends it a thousand times. What comes is checked by its hash as a
whole: who gives other bytes is not asked again.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, final

import trio

from ...bootstrap import NetworkError, PeerId, Role
from ...bootstrap.methods import Messenger
from ...coordinator.bounds import MAX_SERVICES
from ..methods import PLAN_PIECE
from ..settings import NodeTuning
from .manifest import is_that_of
from .messages import MAX_HOLDERS, MAX_PLAN_BYTES, PLAN_PIECE_BYTES, PlanManifest, PlanPiece, PlanPieceQuery

_KEPT: Final = 2 * MAX_SERVICES  # plans: for each service the one that is followed, and the one that is to be
_KEPT_BYTES: Final = 4 * MAX_PLAN_BYTES  # of all but the latest
_SOURCES: Final = 32

OnBytes = Callable[[PlanManifest, bytes], None]


@final
class PlanExchange:
    """One per node; fetching runs in `nursery`. `on_bytes` is told of each plan that was fetched."""

    def __init__(
        self, messenger: Messenger, *, nursery: trio.Nursery, rng: random.Random, tuning: NodeTuning, on_bytes: OnBytes
    ) -> None:
        self._messenger = messenger
        self._nursery = nursery
        self._rng = rng
        self._tuning = tuning
        self._on_bytes = on_bytes
        self._held: OrderedDict[bytes, bytes] = OrderedDict()
        self._turns: dict[PeerId, float] = {}  # who gets pieces now, and since when it has asked for none
        self._served: deque[PeerId] = deque(maxlen=MAX_HOLDERS)
        self._wanted: PlanManifest | None = None
        self._fetching = trio.CancelScope()
        messenger.handle(PLAN_PIECE, self.on_query)

    def __repr__(self) -> str:
        return f"<PlanExchange holds {len(self._held)}, wants {self._wanted and self._wanted.number}>"

    def hold(self, digest: bytes, payload: bytes) -> None:
        """Have this plan for others."""
        self._held[digest] = payload
        self._held.move_to_end(digest)
        self._served.clear()
        while len(self._held) > _KEPT or (len(self._held) > 2 and sum(map(len, self._held.values())) > _KEPT_BYTES):
            self._held.popitem(last=False)

    def want(self, manifest: PlanManifest | None, leader: PeerId) -> None:
        """Fetch this plan, and no other; None: none."""
        if manifest == self._wanted:
            return
        self._fetching.cancel()
        self._wanted = manifest
        if manifest is not None:
            self._fetching = trio.CancelScope()
            self._nursery.start_soon(self._fetch, manifest, leader, self._fetching)

    async def on_query(self, peer: PeerId, role: Role, body: PlanPieceQuery) -> PlanPiece:
        """A node wants a piece."""
        payload = self._held.get(body.digest)
        holders = tuple(each for each in self._served if each != peer)
        now = trio.current_time()
        self._turns = {each: at for each, at in self._turns.items() if now - at < self._tuning.plan_turn_s}
        if payload is None or (peer not in self._turns and len(self._turns) >= self._tuning.plan_turns):
            return PlanPiece(holders=holders)
        end = body.offset + PLAN_PIECE_BYTES
        if end < len(payload):
            self._turns[peer] = now
        else:
            self._turns.pop(peer, None)
            if peer not in self._served:
                self._served.append(peer)
        return PlanPiece(data=payload[body.offset : end], holders=holders)

    async def _fetch(self, manifest: PlanManifest, leader: PeerId, scope: trio.CancelScope) -> None:
        with scope:
            sources, liars = [leader], set[PeerId]()
            wait_s = self._tuning.plan_retry_s
            while True:
                for source in self._rng.sample(sources, len(sources)):
                    payload = await self._fetch_from(source, manifest, sources)
                    if payload is None:
                        continue
                    if is_that_of(manifest, payload):
                        self.hold(manifest.digest, payload)
                        self._on_bytes(manifest, payload)
                        return
                    liars.add(source)
                sources = [each for each in sources if each not in liars] or [leader]
                await trio.sleep(wait_s * self._rng.uniform(0.5, 1.5))
                wait_s = min(2.0 * wait_s, self._tuning.plan_last_retry_s)

    async def _fetch_from(self, source: PeerId, manifest: PlanManifest, sources: list[PeerId]) -> bytes | None:
        """What this node has of the plan; None where that is nothing. Others that have it become sources."""
        data = bytearray()
        while len(data) < manifest.size:
            query = PlanPieceQuery(digest=manifest.digest, offset=len(data))
            try:
                piece = await self._messenger.request(source, PLAN_PIECE, query, self._tuning.plan_piece_s)
            except NetworkError:
                return None
            new = [PeerId(each) for each in piece.holders if each not in sources and each != self._messenger.peer_id]
            sources.extend(new[: max(0, _SOURCES - len(sources))])
            if not piece.data:
                return None
            is_whole = len(piece.data) == min(PLAN_PIECE_BYTES, manifest.size - len(data))
            data += piece.data
            if not is_whole:
                break  # who gives a byte at a time would be asked for days; what it gave is not the plan
        return bytes(data)
