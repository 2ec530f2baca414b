"""What a stage takes from the stage before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from p2pserve.node.engine.pipeline.group import HIDDEN, RESIDUAL, SocketGroup
from p2pserve.node.engine.pipeline.pipes import StageRank, WhileWaiting
from p2pserve.node.engine.pipeline.vocabulary import CODEC, Activations
from p2pserve.node.engine.vllm.device import CpuDevice


class Before:
    """Gives one message after another, and lets who waits do what they want meanwhile."""

    def __init__(self, *messages: Activations) -> None:
        self.buffers = [bytearray(b"".join(CODEC.encode(message))) for message in messages]
        self.heads = [[len(buffer) for buffer in CODEC.encode(message)] for message in messages]
        self.waits = 0

    def get(self, meanwhile: WhileWaiting) -> Any:
        """As from a pipe: all buffers lie in one, behind each other."""
        meanwhile()
        rest, sizes = memoryview(self.buffers[self.waits]), self.heads[self.waits]
        self.waits += 1
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        return CODEC.decode([rest[start : start + size] for start, size in zip(starts, sizes, strict=True)])


def group_behind(before: Before) -> SocketGroup:
    workers = SimpleNamespace(rank_in_group=0, broadcast_tensor_dict=lambda found, src: found)
    alone = SimpleNamespace(device_group=None, cpu_group=None)
    return SocketGroup(StageRank(1, (1, 1), cast("Any", before)), alone, workers, CpuDevice())  # type: ignore[arg-type]


def received(group: SocketGroup) -> dict[str, torch.Tensor]:
    tensors, (arriving,), after = group.irecv_tensor_dict()
    assert not tensors
    assert not after
    arriving.wait()
    return tensors


def test_it_waits_when_asked_to_and_warm_ups_meanwhile() -> None:
    before = Before(Activations(False, {HIDDEN: torch.ones(2, 3), RESIDUAL: torch.zeros(2, 3)}))
    group = group_behind(before)
    warm_ups: list[None] = []
    group.warm_up = lambda: warm_ups.append(None)
    tensors, (arriving,), _ = group.irecv_tensor_dict()
    assert before.waits == len(warm_ups) == 0
    arriving.wait()
    assert before.waits == len(warm_ups) == 1
    assert torch.equal(tensors[HIDDEN], torch.ones(2, 3))


def test_what_was_added_up_comes_with_no_residual() -> None:
    tensors = received(group_behind(Before(Activations(True, {HIDDEN: torch.ones(2, 3)}))))
    assert torch.equal(tensors[HIDDEN], torch.ones(2, 3))
    assert torch.equal(tensors[RESIDUAL], torch.zeros(2, 3))


def test_what_the_model_may_write_to_is_aligned_and_no_part_of_the_message() -> None:
    sent = {HIDDEN: torch.ones(2, 3, dtype=torch.bfloat16), RESIDUAL: torch.ones(2, 3, dtype=torch.bfloat16)}
    before = Before(Activations(False, sent))
    message = bytes(before.buffers[0])
    for tensor in received(group_behind(before)).values():
        assert tensor.data_ptr() % 64 == 0
        tensor.zero_()
    assert before.buffers[0] == message
