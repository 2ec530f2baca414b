"""What a replica tells of its prefix cache."""

from __future__ import annotations

import secrets
from typing import Final, final

from ...bootstrap import PeerId, RemoteError, Role
from ...coordinator.prefixes.held import HeldPrefixes, choose_stride, unpack_names
from ..engine.protocol import EngineReady, HeldBlocks
from .messages import PrefixAnswer, PrefixQuery

LIFE_BITS: Final = 48


@final
class PrefixDesk:
    """One per node: its engine says what it holds, and gateways ask."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._held: HeldPrefixes | None = None  # of the engine that runs

    def __repr__(self) -> str:
        return f"<PrefixDesk {self._held!r}>"

    def use(self, ready: EngineReady | None) -> None:
        """Another engine runs from now on, with an empty cache; None, or a stage: none that could be asked."""
        self._held = None
        if ready is not None and ready.kv_tokens:
            # by chance another number than any before, also than those of earlier runs of this node
            life, stride = secrets.randbits(LIFE_BITS), choose_stride(ready.kv_tokens // ready.block_tokens)
            self._held = HeldPrefixes(life=life, block_tokens=ready.block_tokens, stride=stride)

    def note(self, blocks: HeldBlocks) -> None:
        """The engine says what it holds and what it has overwritten."""
        if self._held is not None:
            self._held.change(unpack_names(blocks.held), unpack_names(blocks.lost))

    async def answer(self, gateway: PeerId, role: Role, body: PrefixQuery) -> PrefixAnswer:
        """What this gateway has not heard. Raises RemoteError where there is no cache to tell of."""
        if body.service != self._service or self._held is None:
            raise RemoteError("no-engine", f"no engine of this node caches prompts for {body.service} now")
        return PrefixAnswer(news=self._held.news_since(body.heard))
