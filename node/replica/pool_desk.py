"""Where gateways ask for places in the pools of Splitwise: the limits of this replica, and which pool it is in."""

from __future__ import annotations

from typing import final

import trio

from ...bootstrap import PeerId, Role
from ...bootstrap.methods import Messenger
from ...coordinator import Phase
from ...coordinator.routing.pools import PoolLimits, PoolState, is_borrowed
from .. import methods
from ..requests.slot_messages import PoolAnswer, PoolAsk
from .worker import Worker


@final
class PoolDesk:
    """Answers for the `worker` of the same node, whose owner sets the `limits`. `home`: what the plan gives it to do,
    mixed without a plan."""

    def __init__(self, worker: Worker, *, limits: PoolLimits, messenger: Messenger) -> None:
        self.home = Phase.MIXED
        self._worker = worker
        self._limits = limits
        messenger.handle(methods.POOL_CLAIM, self.answer)

    def __repr__(self) -> str:
        return f"<PoolDesk {self.home} {self._worker.slots.claims!r}>"

    def state(self, kv_tokens: int) -> PoolState:
        """By the requests that are here. Memory, of `kv_tokens` in all, is as of the engine's last step, all else as of
        now."""
        decodes, prefills = self._worker.jobs
        jobs = (*decodes, *prefills)
        unread = sum(job.unread for job in jobs if not job.tokens)
        stats = self._worker.stats
        return PoolState(
            pool=Phase.MIXED if is_borrowed(self.home, len(jobs), unread, len(decodes)) else self.home,
            requests=len(jobs),
            prefill_tokens=unread,
            kv_free_tokens=min(stats.kv_free_tokens, kv_tokens) if stats is not None else kv_tokens,
            decodes=len(decodes),
        )

    async def answer(self, gateway: PeerId, role: Role, body: PoolAsk) -> PoolAnswer:
        """Whether there is a place, which is kept until the request comes, and how it stands here then."""
        present = self.state(self._worker.describe_engine(body.service).kv_tokens)
        accepted, state = self._worker.slots.claims.answer(
            (gateway, body.request), body.claim, present, self._limits, trio.current_time(), gateway
        )
        return PoolAnswer(accepted=accepted, state=state)
