"""What all stages of a replica have alike: the size of its batches, and how it keeps KV."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...coordinator.costs.model_shape import KvCacheDtype


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What all stages of a replica agree on: the head's batches, each stage's tables.
    `max_model_len` None: the model's own. `kv_cache_dtype`: one for all, since vLLM plans the blocks
    of all stages together; told only where it is not auto, so that older stages understand the rest."""

    max_model_len: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] | None
    max_batched_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    kv_cache_dtype: KvCacheDtype = "auto"
