"""Whatever a peer says is bounded when it is decoded: each number, text and collection of each message, of adverts,
link tables and plans.

A bound stands in the type, or, in the classes of `SAMPLES`, in what the class checks when it is made; those are fed
what is too much, field by field.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as types
import pytest

from p2pserve.bootstrap import DECODE_ERRORS
from p2pserve.bootstrap.methods import Method, Notice
from p2pserve.coordinator import Demand, Plan
from p2pserve.kvtransport.probing.burst_ticket import BurstTicket
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures
from p2pserve.kvtransport.probing.probe import BurstRequest
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.permits import Permit
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket
from p2pserve.node import messages, methods

SAMPLES = (
    LinkTicket(b"l" * 16, b"s" * 32, 600.0),
    TransferTicket(b"t" * 16, b"l" * 16, "kv4", 30.0),
    Permit(b"p" * 16, b"r" * 32, "192.0.2.9", 9, 1 << 40, 1e9, 2e9),
    DialPath("192.0.2.9", 9, congestion="bbr"),
    BurstRequest("p", 4, 1.0, 1 << 20, False),
    BurstTicket(b"b" * 16, b"k" * 32, 4, 1.0, 1 << 20, 0.01),
    LinkFigures(rtt_s=0.1, one_stream_gbps=0.2, capacity_gbps=1.0, usd_per_gb=0.1, reason="measured"),
    BoxFigures(up_gbps=1.0, down_gbps=1.0, relay_gbps=1.0, relay_budget_bytes=5),
)
CHECKED = {type(sample) for sample in SAMPLES}
TOO_MUCH: dict[type, tuple[Any, ...]] = {
    int: (-1, 2**62, 2**63 - 1, -(2**63)),
    float: (-1.0, 1e300, float("inf"), float("nan")),
    str: ("x" * 100_000,),
    bytes: (b"", b"x" * 100_000),
}


def said_by_peers() -> Iterator[type]:
    """Every type that is decoded from what a peer has sent, above membership."""
    for each in vars(methods).values():
        if isinstance(each, Method):
            yield from (each.body, each.answer)
        elif isinstance(each, Notice):
            yield each.body
    yield from (messages.Advert, messages.LinkTable, Plan)


def unbounded(kind: types.Type, where: str, seen: set[type]) -> Iterator[str]:
    """The places below `kind` where anything at all may stand."""
    match kind:
        case types.Metadata(extra={"checked_by": _}):
            return
        case types.IntType() | types.FloatType():
            if (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None):
                yield where
        case types.StrType() | types.BytesType():
            if kind.max_length is None:
                yield where
        case types.VarTupleType() | types.ListType() | types.SetType() | types.FrozenSetType():
            if kind.max_length is None:
                yield where
            yield from unbounded(kind.item_type, f"{where}[]", seen)
        case types.DictType():
            if kind.max_length is None:
                yield where
            yield from unbounded(kind.key_type, f"{where} key", seen)
            yield from unbounded(kind.value_type, f"{where} value", seen)
        case types.TupleType():
            for item in kind.item_types:
                yield from unbounded(item, f"{where}[]", seen)
        case types.UnionType():
            for each in kind.types:
                yield from unbounded(each, where, seen)
        case types.StructType() if kind.cls not in CHECKED | seen:
            seen.add(kind.cls)
            for field in kind.fields:
                yield from unbounded(field.type, f"{kind.cls.__name__}.{field.name}", seen)
        case types.AnyType() | types.RawType() | types.CustomType():
            yield where


def test_everything_that_a_peer_may_say_has_a_bound() -> None:
    seen: set[type] = set()
    found = [place for kind in said_by_peers() for place in unbounded(types.type_info(kind), kind.__name__, seen)]
    assert found == []
    assert len(seen) > 50  # of which it was asked


def test_the_search_finds_what_has_none() -> None:
    class Loose(msgspec.Struct):
        number: int
        half: float
        texts: tuple[str, ...]
        by_name: dict[str, bytes]

    found = set(unbounded(types.type_info(Loose), "Loose", set()))
    assert found == {
        "Loose." + rest for rest in ("number", "half", "texts", "texts[]", "by_name", "by_name key", "by_name value")
    }


def is_decoded(decoder: msgspec.msgpack.Decoder[Any], said: dict[str, Any]) -> bool:
    try:
        decoder.decode(msgspec.msgpack.encode(said))
    except DECODE_ERRORS:
        return False
    return True


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_field_that_is_too_much_is_refused(sample: msgspec.Struct) -> None:
    decoder = msgspec.msgpack.Decoder(type(sample))
    said = msgspec.to_builtins(sample, builtin_types=(bytes,))
    assert decoder.decode(msgspec.msgpack.encode(said)) == sample
    changed = [(field, bad) for field, value in said.items() for bad in TOO_MUCH.get(type(value), ())]
    assert [each for each in changed if is_decoded(decoder, said | {each[0]: each[1]})] == []


def test_a_plan_that_is_small_to_say_and_endless_to_read() -> None:
    stage = {"peer": "p", "tp": 2**40, "first_layer": 0, "last_layer": 1}
    replica = {"id": "p", "phase": "mixed", "stages": [stage]}
    plan = {
        "epoch": 1,
        "version": 1,
        "service": "tiny",
        "replicas": [replica],
        "pairings": [{"prefill": "p", "decode": "p", "weight": 1.0}],
        "codec": "kv4",
        "why": [],
    }
    with pytest.raises(msgspec.ValidationError, match=r"<= 64 - at `\$.replicas"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan)
    stage["tp"] = 2
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan).replicas[0].gpus == (("p", 0), ("p", 1))


@pytest.mark.parametrize("requests_s", [5e-324, 1e-7, -1.0, 1e7, float("nan"), float("inf")])
def test_a_demand_that_no_gateway_has(requests_s: float) -> None:
    said = {"requests_s": requests_s, "arrival_cv": 1.0, "lengths": [(10, 10)]}
    with pytest.raises(msgspec.ValidationError, match="requests_s"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Demand)
