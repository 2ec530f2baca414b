"""Stages of an emulated replica: what the head counts for all of them, and how long they load."""

import socket

import msgspec
import pytest

from p2pserve.coordinator.costs.replica import Hop, StageHardware, kv_capacity_tokens, replica_times
from p2pserve.node.engine import protocol
from p2pserve.node.engine.emulated.engine import EmulationError, model_capacity
from p2pserve.node.engine.emulated.stages import WEIGHT_FILES, sleep_while_loading
from p2pserve.node.engine.mailbox import Outbox

from .test_engine import EMULATION, GPU, SHAPE

HOP = Hop(rtt_s=0.05, gbps=1.0)
FAST = msgspec.structs.replace(EMULATION, load_gb_s=1e6)


def test_the_head_counts_with_all_stages_and_the_way_between_them() -> None:
    capacity, times = model_capacity(EMULATION, tp=1, kv_cache_mib=None, partition=(6, 2), hop=HOP)
    stages = tuple(StageHardware(GPU, 1, layers, EMULATION.gpu_link_gbps) for layers in (6, 2))
    assert capacity == kv_capacity_tokens(SHAPE, stages)
    assert times.prefill_s(100, 5000.0) == replica_times(SHAPE, stages, (HOP, HOP)).prefill_s(100, 5000.0)
    alone = model_capacity(EMULATION, tp=1, kv_cache_mib=None)
    assert capacity > alone[0]
    assert times.decode_line(1).step_s(100) > alone[1].decode_line(1).step_s(100) + HOP.rtt_s / 2


def test_room_that_is_told_is_that_of_the_box_with_the_most_layers() -> None:
    alone, _ = model_capacity(EMULATION, tp=1, kv_cache_mib=64)
    halves, _ = model_capacity(EMULATION, tp=1, kv_cache_mib=64, partition=(4, 4), hop=HOP)
    uneven, _ = model_capacity(EMULATION, tp=1, kv_cache_mib=64, partition=(2, 6), hop=HOP)
    assert (halves, uneven) == (2 * alone, alone * 8 // 6)


def test_kv_in_8_bits_is_twice_as_much_in_the_same_room() -> None:
    kept = msgspec.structs.replace(EMULATION, model=SHAPE.with_kv_cache_dtype("fp8"))
    for mib in (None, 64):
        alone, _ = model_capacity(EMULATION, tp=1, kv_cache_mib=mib)
        assert model_capacity(kept, tp=1, kv_cache_mib=mib)[0] in (2 * alone, 2 * alone + 1)


def test_a_partition_of_another_model_is_refused() -> None:
    with pytest.raises(EmulationError, match="stages hold"):
        model_capacity(EMULATION, tp=1, kv_cache_mib=None, partition=(4, 3), hop=HOP)


@pytest.mark.parametrize(("emulation", "files"), [(EMULATION, []), (FAST, [*range(1, WEIGHT_FILES + 1), 0])])
def test_a_load_tells_how_far_it_is(emulation: protocol.Emulation, files: list[int]) -> None:
    agent, engine = socket.socketpair()
    with agent, engine:
        outbox = Outbox(engine)
        sleep_while_loading(emulation, (4, 4), outbox)
        outbox.flush()
        engine.shutdown(socket.SHUT_WR)
        reader, told = agent.makefile("rb"), []
        while head := reader.read(4):
            body = reader.read(int.from_bytes(head, "little"))
            told.append(msgspec.msgpack.decode(body)["file"] if b"file" in body else 0)
    assert told == files
