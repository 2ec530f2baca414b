"""The codec between stages: values of listed classes go through whole, and nothing else goes through at all."""

import dataclasses
import enum
import random
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, LogprobsLists, ModelRunnerOutput

from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket
from p2pserve.node.engine.kv.step_work import LoadWork, OpenTransfer, SendWork, StepWork, transfer_params
from p2pserve.node.engine.pipeline.codec import MAX_DEPTH, MessageCodec, MessageCodecError
from p2pserve.node.engine.pipeline.vocabulary import (
    CALLABLE,
    CODEC,
    Activations,
    Call,
    CallFailed,
    CallResult,
    LoadStage,
)
from p2pserve.node.engine.protocol import AbortTransfer, KvSlice, Outlet


class Colour(enum.Enum):
    RED = "red"


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any

    def __post_init__(self) -> None:
        assert self.value != "forbidden"


class Checked(msgspec.Struct, frozen=True):
    count: int


class Loose(msgspec.Struct, frozen=True):
    value: Any = None


@dataclasses.dataclass
class Unlisted:
    value: int


SMALL = MessageCodec(records=(Colour, Point, Frozen, Loose), structs=(Checked,))


def through(codec: MessageCodec, value: object) -> Any:
    return codec.decode([bytearray(buffer) for buffer in codec.encode(value)])


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(1 << 63), (1 << 64) - 1, 1.5, "text", b"bytes", [], (), {}, set(), frozenset()),
        [1, 2, 3],
        [[0, 1], [5, "x", None]],
        (1, (2, [3, {4: {5, 6}}])),
        {"a": {1: (2, 3)}, (1, 2): frozenset({b"x"})},
        *(Colour.RED, Point(1, [2]), Frozen({"x": Point(0, Colour.RED)}), Checked(5), Loose([Checked(1)])),
        *(torch.bfloat16, Fraction(3, 7)),
    ],
)
def test_values_come_out_as_they_went_in(value: object) -> None:
    again = through(SMALL, value)
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (4, 1, 6)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    again = through(SMALL, [tensor, tensor.T if tensor.dim() == 2 else tensor])[0]
    assert again.dtype == dtype
    assert again.shape == tensor.shape
    assert torch.equal(again.to(torch.float32), tensor.to(torch.float32))


def test_strided_tensors_and_arrays() -> None:
    tensor, array = torch.arange(24).reshape(4, 6), np.arange(24, dtype=np.int32).reshape(4, 6)
    again, other = through(SMALL, (tensor[:, ::2].T, array[::2].T))
    assert torch.equal(again, tensor[:, ::2].T)
    assert np.array_equal(other, array[::2].T)
    assert other.dtype == np.int32


def test_tensors_are_not_copied() -> None:
    tensor = torch.zeros(1000)
    buffers = SMALL.encode({"t": tensor})
    tensor[0] = 7
    assert SMALL.decode(buffers)["t"][0] == 7


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Unlisted(1), "Unlisted"),
        ({"deep": [(Unlisted(1),)]}, "Unlisted"),
        (object(), "builtins.object"),
        (len, "builtin_function_or_method"),
        (Unlisted, "builtins.type"),
        (1j, "complex"),
        (np.array([object()]), "object"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (np.float32(1), "numpy.float32"),
        (type("Point", (), {})(), "Point"),  # the name alone does not help
    ],
)
def test_what_is_not_listed_cannot_be_sent(value: object, name: str) -> None:
    with pytest.raises(MessageCodecError, match=name):
        SMALL.encode(value)


def test_what_is_not_listed_cannot_be_received() -> None:
    wide = MessageCodec(records=(Unlisted, Point))
    with pytest.raises(MessageCodecError, match="'Unlisted' is not among"):
        SMALL.decode(wide.encode(Unlisted(1)))
    with pytest.raises(MessageCodecError, match=r"'os\.system' is not among"):
        SMALL.decode([msgspec.msgpack.encode([5, "os.system", "true"])])


def test_another_release_of_a_class_is_noticed() -> None:
    other: Any = dataclasses.make_dataclass("Point", ["x", "y", "z"])
    with pytest.raises(MessageCodecError, match="Point has 2 fields here, 3 at the other end"):
        SMALL.decode(MessageCodec(records=(other,)).encode(other(1, 2, 3)))
    assert "Point(x,y)" in SMALL.schema
    assert SMALL.schema != MessageCodec(records=(Colour, other, Frozen, Loose), structs=(Checked,)).schema


def test_structs_with_types_are_checked() -> None:
    for data in (msgspec.msgpack.encode({"count": "many"}), b"", b"\xc1"):
        with pytest.raises(MessageCodecError):
            SMALL.decode([msgspec.msgpack.encode([6, "Checked", data])])


def test_no_code_of_a_class_runs() -> None:
    body = SMALL.encode(Frozen("allowed !"))[0]
    assert SMALL.decode([bytes(body).replace(b"allowed !", b"forbidden")]).value == "forbidden"


def test_depth_is_bounded_both_ways() -> None:
    value: list[Any] = []
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    with pytest.raises(MessageCodecError, match="deeper"):
        SMALL.encode(value)
    for levels in (MAX_DEPTH + 2, 100_000):
        with pytest.raises(MessageCodecError):
            SMALL.decode([b"\x92\x00" * levels + b"\xc0"])


@pytest.mark.parametrize(
    "tree",
    [
        [],
        [99],
        [-1],
        [True],
        ["LIST"],
        {"a": 1},
        [2, [0, 1]],
        [4, 1],
        [5],
        [5, 5, 5],
        [7, "Colour", "GREEN"],
        [7, "Point", "x"],
        [8, "complex64"],
        [9, 0, "int8", 1],
        [9, 2, "int8", 1],
        [9, 1, "int8", -1, -64],
        [9, 1, "int8", 65],
        [9, 1, "object", 8],
        [9, 1, "int8", *([1] * 9)],
        [9, 1, "int64", 1 << 61],
        [10, 1, "O", 8],
        [10, 1, "int64", 9],
        [11, 1, 0],
    ],
)
def test_trees_that_are_no_values(tree: object) -> None:
    with pytest.raises(MessageCodecError):
        SMALL.decode([msgspec.msgpack.encode(tree), bytearray(64)])


def test_a_name_may_stand_for_one_class_only() -> None:
    other: Any = dataclasses.make_dataclass("Point", ["x"])
    with pytest.raises(ValueError, match="one name"):
        MessageCodec(records=(Point, other))
    with pytest.raises(ValueError, match="neither"):
        MessageCodec(records=(dict,))


def scheduled(requests: int) -> Call:
    """What the head says for a step: one new request, the others decode, KV leaves and comes."""
    ticket = TransferTicket(transfer=b"t" * 16, link=b"l" * 16, codec="raw", deadline_s=5)
    outlet = Outlet(
        slice=KvSlice(first_layer=0, last_layer=2, first_head=0, last_head=2),
        ticket=ticket,
        link=LinkTicket(link=b"l" * 16, secret=b"s" * 32, lease_s=60),
        paths=(DialPath("127.0.0.1", 5000),),
        gbps=1,
        rtt_s=0.01,
    )
    opening = OpenTransfer(transfer=b"t" * 16, tokens=9, send=(outlet,))
    sampling = SamplingParams(
        max_tokens=5, stop_token_ids=[1, 2], output_kind=RequestOutputKind.DELTA, extra_args=transfer_params(opening)
    )
    new = NewRequestData("new", [*range(300)], [], sampling, None, ([1, 2, 3],), 0, None)
    names = [f"request-{n}" for n in range(requests)]
    cached = CachedRequestData(
        req_ids=names,
        resumed_req_ids=set(),
        new_token_ids=[[n] for n in range(requests)],
        all_token_ids={},
        new_block_ids=[([n],) if n % 4 == 0 else None for n in range(requests)],
        num_computed_tokens=[*range(requests)],
        num_output_tokens=[1] * requests,
    )
    work = StepWork(
        orders=[opening, AbortTransfer(transfer=b"a" * 16, reason="late")],
        sends=[SendWork("request-0", b"t" * 16, [1, 2, 3], 300, 300, final=True)],
        loads=[LoadWork("request-1", b"u" * 16, [7], 0, 5, all_or_nothing=False)],
        cancelled=[b"v" * 16],
    )
    step = SchedulerOutput([new], cached, dict.fromkeys(names, 1), requests, {}, {}, {"gone"}, [])
    step.kv_connector_metadata = work
    step.new_block_ids_to_zero = [3, 4]
    return Call(7, "run_batch", (step,))


def test_what_stages_say_to_each_other() -> None:
    spec = kv.FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    config = kv.KVCacheConfig(
        num_blocks=9,
        kv_cache_tensors=[kv.KVCacheTensor(1 << 20, ["layers.0", "layers.1"], 1 << 19, 1 << 10)],
        kv_cache_groups=[kv.KVCacheGroupSpec(["layers.0", "layers.1"], spec)],
    )
    latent = kv.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    output = ModelRunnerOutput(["a"], {"a": 0}, [[5]])
    output.kv_connector_output = KVConnectorOutput(finished_recving={"a"}, invalid_block_ids={3})
    for value in (
        *(
            LoadStage("0.32.0", "...", (2, 4)),
            scheduled(64),
            CallResult(3, {"layers.0": spec, "layers.1": latent}),
            CallResult(4, output),
        ),
        *(Call(1, "initialize_from_config", ([config],)), CallFailed("no memory")),
    ):
        assert through(CODEC, value) == value
    logprobs = through(CODEC, LogprobsLists(np.ones((2, 3), np.int32), np.ones((2, 3), np.float32), np.ones(2), None))
    assert logprobs.logprobs.dtype == np.float32
    tensors = {"hidden_states": torch.randn(3, 8).to(torch.bfloat16)}
    assert torch.equal(through(CODEC, Activations(True, tensors)).tensors["hidden_states"], tensors["hidden_states"])


def test_methods_that_the_head_may_call_are_few_and_harmless() -> None:
    assert not {name for name in CALLABLE if name.startswith("_")}
    assert not CALLABLE & {
        "apply_model",
        "update_config",
        "init_worker",
        "update_environment_variables",
        "reload_weights",
    }


def test_mutated_bytes_give_only_codec_errors() -> None:
    rng = random.Random(3)
    originals = [CODEC.encode(scheduled(3)), CODEC.encode(Activations(True, {"h": torch.zeros(2, 8)}))]
    survived = 0
    for turn in range(4000):
        buffers = [bytearray(buffer) for buffer in originals[turn % 2]]
        for _ in range(rng.choice((1, 1, 3))):
            buffer = rng.choice(buffers)
            at = rng.randrange(len(buffer))
            match rng.randrange(4):
                case 0:
                    buffer[at] = rng.randrange(256)
                case 1:
                    del buffer[at : at + rng.randrange(1, 20)]
                case 2:
                    buffer[at:at] = rng.randbytes(rng.randrange(1, 8))
                case _:
                    other = rng.randrange(len(buffer))
                    buffer[at : at + 8] = buffer[other : other + 8]
            if not buffer:
                buffer += b"\x00"
        try:
            CODEC.decode(buffers)
            survived += 1
        except MessageCodecError:
            pass
    assert 100 < survived < 3900
