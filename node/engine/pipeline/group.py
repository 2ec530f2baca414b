"""vLLM's pipeline-parallel group, as its workers see it, over two pipes instead of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast, final

import torch

from ..stage_pipes import PipelineError
from .pipes import StageRank, WhileWaiting, do_nothing
from .vocabulary import Activations

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm.distributed.parallel_state import GraphCaptureContext, GroupCoordinator

    from ..vllm.device import Device

HIDDEN, RESIDUAL = "hidden_states", "residual"
_MERGED = "merged"


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
    """The members of `GroupCoordinator` that vLLM's first model runner and its worker use.

    `place` is that of this process in its pipeline. `alone`: the group that vLLM makes for a world of one stage; it
    does what concerns this process only. `workers`: the group of this stage's workers, of which the first has the
    pipes.
    `merges`: the next stage wants hidden states and residual added up, which is half the bytes. `warm_up` is called
    again and again while this stage waits for activations.
    """

    def __init__(self, place: StageRank, alone: GroupCoordinator, workers: GroupCoordinator, device: Device) -> None:
        self._alone = alone
        self._workers = workers
        self._before = place.before
        self._behind = place.behind
        self._device = device
        self._at_once_bytes = place.settings.at_once_bytes
        self.merges = False
        self.warm_up: WhileWaiting = do_nothing
        self.unique_name = "pipeline"
        self.rank = self.rank_in_group = place.stage
        self.local_rank = 0
        self.world_size = place.stages
        self.ranks = list(range(place.stages))
        self.first_rank, self.last_rank = 0, place.stages - 1
        self.is_first_rank, self.is_last_rank = place.stage == 0, place.stage == place.stages - 1
        self.next_rank, self.prev_rank = (
            (place.stage + 1) % place.stages,
            (place.stage - 1) % place.stages,
        )
        self.device_group, self.cpu_group = alone.device_group, alone.cpu_group

    def __repr__(self) -> str:
        return f"<SocketGroup stage {self.rank} of {self.world_size} {self._before} {self._behind}>"

    def isend_tensor_dict(
        self, tensor_dict: dict[str, torch.Tensor], dst: int | None = None, **unused: object
    ) -> list[object]:
        """Transfer what the next stage needs, by the stage's first worker. Copies: never waits."""
        if not self._is_first_worker:
            return []
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
            at_once=on_host.is_complete and on_host.nbytes <= self._at_once_bytes,
        )
        return []

    def irecv_tensor_dict(
        self, src: int | None = None, **unused: object
    ) -> tuple[dict[str, torch.Tensor], list[_Arriving], list[Callable[[], None]]]:
        """Tensors that are there once the handle has been waited for."""
        if self.is_first_rank:
            raise PipelineError("the first stage has nobody to receive activations from")
        tensors: dict[str, torch.Tensor] = {}
        return tensors, [_Arriving(lambda: tensors.update(self._arrived()))], []

    @property
    def _is_first_worker(self) -> bool:
        return self._workers.rank_in_group == 0

    def _arrived(self) -> dict[str, torch.Tensor]:
        """Wait for what the stage before has sent, with all workers of this stage."""
        found = self._received() if self._is_first_worker else None
        shared = cast("dict[str, Any]", self._workers.broadcast_tensor_dict(found, src=0))
        if shared.pop(_MERGED):
            shared[RESIDUAL] = torch.zeros_like(shared[HIDDEN])
        return shared

    def _received(self) -> dict[str, Any]:
        assert self._before is not None
        arrived = self._before.get(self.warm_up)
        if not isinstance(arrived, Activations):
            raise PipelineError(f"a {type(arrived).__name__} where activations belong")
        found: dict[str, Any] = {_MERGED: arrived.merged}
        values = self._device.to_device(*arrived.tensors.values())
        for (name, tensor), value in zip(arrived.tensors.items(), values, strict=True):
            # The model writes to it, with kernels that may want it aligned: a message is not.
            found[name] = value.clone() if value is tensor else value
        return found

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
