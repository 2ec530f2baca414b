"""vLLM's pipeline-parallel group, as its workers see it, over two pipes instead of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast, final

import torch

from .pipes import Inflow, Outflow, PipelineError
from .vocabulary import Activations

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm.distributed.parallel_state import GraphCaptureContext, GroupCoordinator

    from ..device import Device

HIDDEN, RESIDUAL = "hidden_states", "residual"
AT_ONCE_BYTES = 16 << 10  # any connection's send buffer has room for as many batches of that as there are stages


@final
class _Arriving:
    """Handle of a receive: vLLM waits for it when it needs the tensors, after it has prepared the batch."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    def is_completed(self) -> bool:
        """vLLM asks handles of sends only."""
        return False


@final
class SocketGroup:
    """The members of `GroupCoordinator` that vLLM's first model runner and its worker use. `alone` is the group that
    vLLM makes for a world of this process; whatever concerns only this process is its business.

    `merges` says whether the next stage wants hidden states and residual added up: half the bytes.
    """

    def __init__(
        self,
        alone: GroupCoordinator,
        stage: int,
        stages: int,
        before: Inflow | None,
        behind: Outflow | None,
        device: Device,
    ) -> None:
        self._alone = alone
        self._before = before
        self._behind = behind
        self._device = device
        self.merges = False
        self.unique_name = "pipeline"
        self.rank = self.rank_in_group = stage
        self.local_rank = 0
        self.world_size = stages
        self.ranks = list(range(stages))
        self.first_rank, self.last_rank = 0, stages - 1
        self.is_first_rank, self.is_last_rank = stage == 0, stage == stages - 1
        self.next_rank, self.prev_rank = (stage + 1) % stages, (stage - 1) % stages
        self.device_group, self.cpu_group = alone.device_group, alone.cpu_group

    def __repr__(self) -> str:
        return f"<SocketGroup stage {self.rank} of {self.world_size} {self._before} {self._behind}>"

    def isend_tensor_dict(
        self, tensor_dict: dict[str, torch.Tensor], dst: int | None = None, **unused: object
    ) -> list[object]:
        """Hand over what the next stage needs. There is nothing to wait for: what is sent is a copy."""
        if self._behind is None:
            raise PipelineError("the last stage has nobody to send activations to")
        if self.merges and tensor_dict.keys() == {HIDDEN, RESIDUAL}:
            merged, tensors = True, {HIDDEN: tensor_dict[HIDDEN] + tensor_dict[RESIDUAL]}
        else:
            # Copies: the next batch is computed in the same memory.
            merged, tensors = False, {name: tensor.clone() for name, tensor in tensor_dict.items()}
        on_host = self._device.to_host(*tensors.values())
        self._behind.put(
            lambda: Activations(merged, dict(zip(tensors, on_host.wait(), strict=True))),
            at_once=on_host.ready and on_host.nbytes <= AT_ONCE_BYTES,
        )
        return []

    def irecv_tensor_dict(
        self, src: int | None = None, **unused: object
    ) -> tuple[dict[str, torch.Tensor], list[_Arriving], list[Callable[[], None]]]:
        """Tensors that are there once the handle has been waited for."""
        before = self._before
        if before is None:
            raise PipelineError("the first stage has nobody to receive activations from")
        tensors: dict[str, torch.Tensor] = {}

        def wait() -> None:
            arrived = before.get()
            if not isinstance(arrived, Activations):
                raise PipelineError(f"a {type(arrived).__name__} where activations belong")
            values = self._device.to_device(*arrived.tensors.values())
            tensors.update(zip(arrived.tensors, values, strict=True))
            if arrived.merged:
                tensors[RESIDUAL] = torch.zeros_like(tensors[HIDDEN])

        return tensors, [_Arriving(wait)], []

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Each stage keeps its own: what vLLM spreads this way, the id of the engine, is of no use across boxes."""
        return obj

    def barrier(self) -> None:
        """Stages wait for one another by their calls alone."""

    def graph_capture(self, context: GraphCaptureContext | None = None) -> AbstractContextManager[GraphCaptureContext]:
        """Graphs hold what this process computes."""
        return self._alone.graph_capture(context)

    def destroy(self) -> None:
        """Leave the local group."""
        cast("Any", self._alone).destroy()
