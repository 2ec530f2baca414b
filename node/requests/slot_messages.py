"""What is said before a request takes a route, so that limits hold where the queue is.

So that a prefill replica computes a part of a prompt, and chooses itself how much of it (Cronus):

A gateway asks the prefill replica for a slot with `prefill.slot`. When one is free, that replica asks the decode
replica with `decode.state` how it stands there, chooses the split, and answers. From there on all is as for any split:
the gateway asks the decode replica with `decode.open`, and sends the request, under the same id, with `prefill.open`.

So that a replica keeps the limits of its pool (Splitwise): a gateway asks with `pool.claim`, and is accepted or
refused, with how it stands there. The request follows under the same id with `decode.open` or `prefill.open`; one that
does not come after all is called off with `request.stop`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...coordinator.bounds import ModelName, Name
from ...coordinator.routing.balancer import ChunkedPrefillState, ChunkLine
from ...coordinator.routing.pools import PoolClaim, PoolState
from ..messages import MAX_PROMPT_TOKENS, Message, RequestId

Split = Annotated[int, msgspec.Meta(ge=1, le=MAX_PROMPT_TOKENS)]


class SlotOpen(Message, frozen=True, kw_only=True):
    """Take a request whose prompt has so many tokens, and which the replica of the head `decode` will decode. It is
    waited for as long as the replica likes; who asks again keeps its turn."""

    request: RequestId
    service: ModelName
    prompt_tokens: Split
    decode: Name


class SlotOpened(Message, frozen=True, kw_only=True):
    """The request has a slot, and the replica computes the first `split` tokens. None: its turn has not come, ask
    again."""

    split: Split | None = None


class DecodeStateQuery(Message, frozen=True, kw_only=True):
    """Ask the head of a replica how it stands there."""

    service: ModelName


class DecodeStateAnswer(Message, frozen=True, kw_only=True):
    """As of the engine's last step. `chunk`: how long a step takes there that is filled up with a part of a prompt."""

    state: ChunkedPrefillState
    chunk: ChunkLine


class PoolAsk(Message, frozen=True, kw_only=True):
    """Keep a place for a request of this service."""

    request: RequestId
    service: ModelName
    claim: PoolClaim


class PoolAnswer(Message, frozen=True, kw_only=True):
    """Whether there is one. Either way, how it stands there now, with all that is about to come."""

    accepted: bool
    state: PoolState
