"""Hostile values and bytes for the fuzzers: made up by type, or made of honest ones by mutation.

Values are what MessagePack has: numbers, texts, bytes, lists and dictionaries. :func:`made_up`
keeps to the bounds of a type and goes to their edges, so that what it makes is decoded and acted
upon; :func:`mutated` breaks the rules.
"""

import math
import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec import inspect as types

from ..errors import DECODE_ERRORS
from ..streams.frames import MAX_FRAME

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

_SMALL: Final = (0, 1, -1, 2, 3, 63, 64, 65, 127, 128, 255, 256, 4096, 4097, 65535, 65536)
INTEGERS: Final = (
    *_SMALL, 2**31 - 1, 2**31, 2**32, 2**40, 2**48, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31),
    -(2**63),
)  # fmt: skip
FLOATS: Final = (
    0.0, -0.0, 5e-324, 2.3e-308, 1e-300, 1e-12, 1e-6, 0.5, 1.0 - 1e-16, 1.0, 1e6, 1e12, 1e308, 1.7976931348623157e308,
    -1.0, -5e-324, -1e308, math.inf, -math.inf, math.nan,
)  # fmt: skip
TEXTS: Final = (
    "", " ", "\0", "\x1b[2J\x1b]0;x\x07", "a\nb\r", "\u202eabc", "\ud7ff\U0010ffff", "x" * 64, "x" * 65, "x" * 128,
    "x" * 129, "x" * 513, "x" * 2001, "\u00e9" * 128, "../../etc", "%s%n{}", "p", "nan", "-1", "12D3KooW" + "z" * 44,
)  # fmt: skip
RAW: Final = tuple(
    map(
        Raw,
        (
            b"\xa2\xff\xfe",  # text that is no UTF-8
            b"\xd9\x04\xed\xa0\x80x",  # half of a surrogate pair
            b"\x91" * 5000 + b"\xc0",  # nesting without end
            b"\x81\xa1x" * 3000 + b"\xc0",
            b"\xdd\xff\xff\xff\xff",  # four billion items, none of which follow
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\xdb\x7f\xff\xff\xff",
            b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
            b"\xd4\x05\x00",  # an extension
            b"\xc1",  # never used
            b"\x82\xa1a\x01\xa1a\x02",  # a key twice
            b"\x81\x01\x02",  # a key that is no text
            b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\xca\x7f\xc0\x00\x00",  # NaN of four bytes
        ),
    )
)
_LONG: Final = 5000
_DESCEND: Final = 0.8
_TRIES: Final = 30


def mutated(rng: random.Random, value: Any) -> Any:
    """A copy of ``value`` that differs in one place, somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < _DESCEND:
        key = rng.choice(tuple(value))
        return {**value, key: mutated(rng, value[key])}
    if isinstance(value, list | tuple) and value and rng.random() < _DESCEND:
        at = rng.randrange(len(value))
        return [*value[:at], mutated(rng, value[at]), *value[at + 1 :]]
    if rng.random() < 0.1:
        return rng.choice(_OTHERS)(rng)
    match value:
        case bool():
            return not value
        case int():
            return rng.choice(INTEGERS) if rng.random() < 0.8 else max(min(value + rng.choice((-1, 1)), 2**64 - 1), 0)
        case float():
            return rng.choice(FLOATS) if rng.random() < 0.8 else value * rng.choice((-1.0, 0.5, 1e-9, 1e9))
        case str():
            return rng.choice(TEXTS) if rng.random() < 0.8 else value + rng.choice(TEXTS)
        case bytes():
            return mutated_bytes(rng, value)
        case dict():
            return _mutated_dict(rng, value)
        case list() | tuple():
            return _mutated_list(rng, list(value))
        case _:
            return rng.choice(_OTHERS)(rng)


def _mutated_dict(rng: random.Random, value: dict[Any, Any]) -> Any:
    kind = rng.randrange(5)
    keys = tuple(value)
    if kind == 0 and keys:
        dropped = rng.choice(keys)
        return {key: each for key, each in value.items() if key != dropped}
    if kind == 1 and keys:
        renamed = rng.choice(keys)
        return {(rng.choice(TEXTS) if key == renamed else key): each for key, each in value.items()}
    if kind == 2 and keys:
        like = value[rng.choice(keys)]
        return {**value, **{f"p{number}": like for number in range(_fitting(like, rng.choice((1, 5, 300))))}}
    if kind == 3:
        return {**value, rng.choice(TEXTS): rng.choice(_OTHERS)(rng)}
    return {}


def _mutated_list(rng: random.Random, value: list[Any]) -> Any:
    kind = rng.randrange(6)
    if kind == 0 and value:
        del value[rng.randrange(len(value))]
    elif kind == 1 and value:
        value.append(rng.choice(value))
    elif kind == 2 and value:
        count = rng.choice((2, 65, 300, _LONG)) if rng.random() < 0.1 else 2
        value = (value * (_fitting(value, count // len(value)) + 1))[:count]
    elif kind == 3:
        value.append(rng.choice(_OTHERS)(rng))
    elif kind == 4:
        rng.shuffle(value)
    else:
        value = []
    return value


def _fitting(value: Any, times: int) -> int:
    """So often, or as often as a frame may hold this: what does not arrive need not be made."""
    return times if times < 50 else min(times, MAX_FRAME // len(_encode(value)))


_OTHERS: Final[tuple[Callable[[random.Random], Any], ...]] = (
    lambda rng: None,
    lambda rng: rng.random() < 0.5,
    lambda rng: rng.choice(INTEGERS),
    lambda rng: rng.choice(FLOATS),
    lambda rng: rng.choice(TEXTS),
    lambda rng: rng.randbytes(rng.choice((0, 1, 16, 32, 64, 65))),
    lambda rng: [],
    lambda rng: {},
    lambda rng: [rng.choice(INTEGERS)] * rng.choice((1, 2, 64)),
    lambda rng: {rng.choice(TEXTS): rng.choice(INTEGERS)},
    lambda rng: rng.choice(RAW),
)


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """A copy of ``data`` with bits flipped, cut, joined, or something inserted."""
    kind = rng.randrange(5)
    at = rng.randrange(len(data) + 1)
    if kind == 0 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data + data[:at]
    if kind == 3:
        return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
    return rng.randbytes(rng.randrange(80))


def mutated_encoding(rng: random.Random, data: bytes, most: int = MAX_FRAME) -> bytes:
    """The MessagePack value in ``data``, mutated once or a few times, most often in its structure, and cut off at
    ``most`` bytes: nothing larger arrives."""
    if rng.random() < 0.15:
        return mutated_bytes(rng, data)[:most]
    try:
        value = _decode(data)
    except (ValueError, *DECODE_ERRORS):
        return mutated_bytes(rng, data)[:most]  # broken already
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = mutated(rng, value)
    return _encode(value)[:most]


# -- by type ----------------------------------------------------------------------------------------------------------

Samples = Mapping[type, Any]
_NO_SAMPLES: Final[Samples] = {}


class TypeMaker:
    """Encoded values of one type, most of which it takes: within its bounds, and often at their edges.

    Args:
        samples: by class, a value in MessagePack's types for each of those that check more than their types say.
    """

    def __init__(self, kind: Any, samples: Samples = _NO_SAMPLES) -> None:
        self._kind = kind
        self._samples = samples
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)

    def make(self, rng: random.Random) -> bytes:
        """One that the type takes and a frame holds, unless that was not found in some tries."""
        data = b""
        for _ in range(_TRIES):
            data = _encode(made_up(rng, self._kind, self._samples))[:MAX_FRAME]
            try:
                self._decoder.decode(data)
            except DECODE_ERRORS:
                continue
            return data
        return data


@cache
def _type_info(kind: Any) -> types.Type:
    return types.type_info(kind)


def made_up(rng: random.Random, kind: Any, samples: Samples = _NO_SAMPLES) -> Any:
    """A value within the bounds of a type, as far as they stand in the type."""
    return _made_up(rng, _type_info(kind), 0, samples)


def _made_up(rng: random.Random, kind: types.Type, depth: int, samples: Samples = _NO_SAMPLES) -> Any:
    match kind:
        case types.Metadata():
            return _made_up(rng, kind.type, depth, samples)
        case types.BoolType():
            return rng.random() < 0.5
        case types.IntType():
            low = kind.ge if kind.ge is not None else kind.gt + 1 if kind.gt is not None else -(2**63)
            high = kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else 2**63 - 1
            return rng.choice((low, high, *(min(max(n, low), high) for n in (0, 1, 2, 4, rng.choice(INTEGERS)))))
        case types.FloatType():
            least = kind.ge if kind.ge is not None else kind.gt if kind.gt is not None else -math.inf
            most = kind.le if kind.le is not None else kind.lt if kind.lt is not None else math.inf
            return rng.choice((least, most, *(min(max(x, least), most) for x in (0.0, 1.0, 0.5, rng.choice(FLOATS)))))
        case types.StrType() | types.BytesType():
            return _made_up_text(rng, kind)
        case types.EnumType():
            return rng.choice(tuple(kind.cls)).value
        case types.LiteralType():
            return rng.choice(kind.values)
        case types.UnionType():
            return _made_up(rng, rng.choice(kind.types), depth, samples)
        case types.VarTupleType() | types.ListType() | types.SetType() | types.FrozenSetType():
            return [_made_up(rng, kind.item_type, depth + 1, samples) for _ in range(_length(rng, kind, depth))]
        case types.TupleType():
            return [_made_up(rng, item, depth + 1, samples) for item in kind.item_types]
        case types.DictType():
            count = _length(rng, kind, depth)
            pairs = (
                (_made_up(rng, kind.key_type, depth + 1, samples), _made_up(rng, kind.value_type, depth + 1, samples))
                for _ in range(count)
            )
            return dict(pairs)
        case types.StructType():
            return _made_up_struct(rng, kind, depth, samples)
        case types.NoneType():
            return None
        case _:
            return rng.choice(_OTHERS)(rng)


def varied(rng: random.Random, kind: Any, value: Any, share: float, *, numbers_only: bool = False) -> Any:
    """A copy of ``value``, which is of this type, with that share of its numbers (and texts, choices and fields that
    may be left out) made up within their bounds."""
    return _varied(rng, _type_info(kind), value, share, numbers_only)


def _varied(rng: random.Random, kind: types.Type, value: Any, share: float, numbers: bool) -> Any:
    is_struck = rng.random() < share and (not numbers or isinstance(kind, types.IntType | types.FloatType))
    match kind:
        case types.Metadata():
            return _varied(rng, kind.type, value, share, numbers)
        case types.UnionType():
            # Which of them the value is can be seen where there is one that is not None.
            fitting = [each for each in kind.types if isinstance(each, types.NoneType) is (value is None)]
            return _varied(rng, rng.choice(kind.types) if is_struck else fitting[0], value, share, numbers)
        case types.StructType(array_like=False) if isinstance(value, dict):
            fields = {field.encode_name: field.type for field in kind.fields}
            said = {name: _varied(rng, fields[name], each, share, numbers) for name, each in value.items()}
            absent = [] if numbers else sorted(fields.keys() - value.keys())
            return said | {name: _made_up(rng, fields[name], 1) for name in absent if rng.random() < share}
        case types.DictType() if isinstance(value, dict) and not is_struck:
            return {key: _varied(rng, kind.value_type, each, share, numbers) for key, each in value.items()}
        case types.VarTupleType() | types.ListType() if isinstance(value, list | tuple) and not is_struck:
            return [_varied(rng, kind.item_type, each, share, numbers) for each in value]
        case types.TupleType() if isinstance(value, list | tuple):
            items = zip(kind.item_types, value, strict=False)
            return [_varied(rng, item, each, share, numbers) for item, each in items]
        case _:
            return _made_up(rng, kind, 1) if is_struck else value


def _made_up_struct(rng: random.Random, kind: types.StructType, depth: int, samples: Samples) -> Any:
    if kind.cls in samples and rng.random() < 0.9:
        return _varied(rng, kind, samples[kind.cls], rng.choice((0.0, 0.05, 0.2)), True)
    if kind.array_like:
        tag = [kind.tag] if kind.tag is not None else []
        return tag + [_made_up(rng, field.type, depth + 1, samples) for field in kind.fields]
    said = {kind.tag_field: kind.tag} if kind.tag_field is not None else {}
    for field in kind.fields:
        if field.required or rng.random() < 0.7:
            said[field.encode_name] = _made_up(rng, field.type, depth + 1, samples)
    return said


def _made_up_text(rng: random.Random, kind: types.StrType | types.BytesType) -> Any:
    low, high = kind.min_length or 0, kind.max_length if kind.max_length is not None else 1 << 16
    if isinstance(kind, types.BytesType):
        return rng.randbytes(min(max(rng.choice((low, low + 1, 64, 600)), low), high))
    text = rng.choice(TEXTS)
    if rng.random() < 0.05:
        text = "x" * min(high, 70_000)
    return text[:high] if len(text) >= low else text + "p" * (low - len(text))


def _length(rng: random.Random, kind: Any, depth: int) -> int:
    low = kind.min_length or 0
    high = kind.max_length if kind.max_length is not None else 64
    wanted = rng.choice((0, 1, 1, 2, 3)) if depth < 6 else 0
    if rng.random() < 0.002 and depth < 4:
        wanted = rng.choice((64, 65, 300))
    return int(min(max(wanted, low), high))
