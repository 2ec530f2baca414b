"""The worker of one stage on a machine without a GPU. To be imported only there: vLLM's module for CPU workers replaces
streams, events and pinned memory of torch by dummies, in the whole process."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from .warm_up import LayerWarmUp, small_products
from .worker import StageWorker, own_stage_rank, stage_group

if TYPE_CHECKING:
    from vllm.sequence import IntermediateTensors


class CPUStageWorker(StageWorker, CPUWorker):
    """A stage that is computed on a CPU."""

    module: ClassVar[ModuleType] = cpu_worker

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load this stage's layers. What comes from the stage before goes straight into them: vLLM would wait for it
        earlier, to copy it into buffers that graphs need, which a CPU has none of."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        cast("Any", self.model_runner).sync_and_gather_intermediate_tensors = _as_they_come
        settings = own_stage_rank().settings
        self._warm_up = LayerWarmUp(small_products(self._model, settings.max_weight_bytes), settings)
        stage_group().warm_up = self.warm_up

    def warm_up(self) -> None:
        """Computes with a matrix of its own now and then."""
        self._warm_up.run_if_due()


def _as_they_come(tokens: int, activations: IntermediateTensors | None, copy: bool) -> IntermediateTensors:
    """In place of vLLM's copy: the model waits for them with the first that it asks for."""
    if activations is None:
        raise RuntimeError("a stage on a CPU has no buffers to try its model with")  # as before it is compiled
    return activations
