"""How large the batches of a replica are."""

from __future__ import annotations

from typing import Annotated

import msgspec


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all stages of a replica agree on: the head's batches, each stage's tables.
    `max_model_len` None: the model's own."""

    max_model_len: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] | None
    max_batched_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
