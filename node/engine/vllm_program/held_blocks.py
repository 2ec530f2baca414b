"""Which prefixes are in vLLM's prefix cache, from the KV events of its scheduler: in place of the publisher that would
send them over ZeroMQ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from ....coordinator.prefixes.held import ChainNames
from ....coordinator.prefixes.naming import cut_name

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.v1.request import Request

FIRST_GROUP: Final = (None, 0)
"""Of a model with layers of several kinds: all keep a prompt's beginning or none does, as far as routes care."""


@final
class HeldBlockEvents:
    """An event publisher of vLLM's scheduler, as far as that calls it. `block_tokens`: of a block of its."""

    def __init__(self, scheduler: Any, stride: int) -> None:
        self.names = ChainNames(stride)
        self._block_tokens = int(scheduler.block_size)
        scheduler.kv_event_publisher = self

    def publish(self, events: KVEventBatch) -> None:
        """What a step has stored and overwritten, in order."""
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

        for event in events.events:
            match event:
                case BlockStored(block_hashes=blocks, parent_block_hash=parent, group_idx=group) if (
                    group in FIRST_GROUP
                ):
                    self.names.store(map(_to_name, blocks), _to_name(parent) if parent is not None else None)
                case BlockRemoved(block_hashes=blocks, group_idx=group) if group in FIRST_GROUP:
                    self.names.evict(map(_to_name, blocks))
                case AllBlocksCleared():
                    self.names.clear()
                case _:
                    pass  # of another group

    def count_cached(self, request: Request) -> int:
        """Tokens of its prompt that are cached now; the last one is always computed."""
        held = self.names.longest_held(map(cut_name, request.block_hashes)) * self._block_tokens
        return min(held, request.num_tokens - 1)

    def shutdown(self) -> None:
        """There is no socket to close."""

    def get_publisher_config(self) -> None:
        """Nobody is to connect."""


def _to_name(block: bytes | int) -> int:
    return block if isinstance(block, int) else cut_name(block)
