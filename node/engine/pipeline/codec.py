"""Values to buffers and back, for values of listed classes only: what the stages of a pipeline say to each other.

The first buffer is MessagePack, in which what it cannot tell apart is an array with a tag in front; tensors and numpy
arrays follow as buffers of their own, neither copied here nor there. What a peer sends can make an instance of a listed
class, with any values in its fields, and nothing else: no import, no call of a constructor, no attribute by a name of
the peer's choice. A listed class is known by its name and the number of its fields, so that two releases of vLLM which
differ in one do not misread each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, IntEnum
from fractions import Fraction
from typing import Any, final

import msgspec
import numpy as np
import torch

Buffer = bytes | bytearray | memoryview

MAX_DEPTH = 32
MAX_DIMENSIONS = 8
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_TORCH_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
_NUMPY_DTYPES = {
    name: np.dtype(name)
    for name in (
        *("float64", "float32", "float16", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
}
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


class MessageCodecError(Exception):
    """A value of a class that is not listed, or bytes that are no value of those that are."""


class _Tag(IntEnum):
    LIST = 0
    TUPLE = 1
    SET = 2
    FROZENSET = 3
    DICT = 4
    RECORD = 5  # name, fields
    STRUCT = 6  # name, its MessagePack
    ENUM = 7  # name, member
    DTYPE = 8  # name
    TENSOR = 9  # buffer, dtype, shape
    ARRAY = 10  # buffer, dtype, shape
    FRACTION = 11


_CONTAINERS: dict[int, Callable[[list[Any]], Any]] = {_Tag.TUPLE: tuple, _Tag.SET: set, _Tag.FROZENSET: frozenset}


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    """A class that travels field by field."""

    name: str
    fields: tuple[str, ...]
    make: Callable[[list[Any]], Any]


@final
class MessageCodec:
    """Carries plain values, containers of them, tensors, arrays, dtypes, and instances of these
    classes.

    `records`: dataclasses, named tuples, msgspec structs with defaults, enums. `structs`: msgspec
    structs with checked field types."""

    def __init__(self, records: Iterable[type], structs: Iterable[type[msgspec.Struct]] = ()) -> None:
        self._records: dict[type, _Record] = {}
        self._enums: dict[str, type[Enum]] = {}
        self._structs = {kind.__name__: (kind, msgspec.msgpack.Decoder(kind)) for kind in structs}
        for kind in records:
            if issubclass(kind, Enum):
                self._enums[kind.__name__] = kind
            else:
                self._records[kind] = _record(kind)
        self._by_name = {record.name: record for record in self._records.values()}
        names = [*self._by_name, *self._enums, *self._structs]
        if len(names) != len({*names}) or len(self._by_name) != len(self._records):
            raise ValueError("two listed classes have one name")

    @property
    def schema(self) -> str:
        """Names and fields of all listed classes: two ends that differ here do not understand each other."""
        records = [f"{record.name}({','.join(record.fields)})" for record in self._by_name.values()]
        structs = [f"{name}({','.join(kind.__struct_fields__)})" for name, (kind, _) in self._structs.items()]
        enums = [f"{name}({','.join(kind.__members__)})" for name, kind in self._enums.items()]
        return ";".join(sorted([*records, *structs, *enums]))

    def encode(self, value: object) -> list[Buffer]:
        """Raises MessageCodecError, which names the class that is not listed."""
        buffers: list[Buffer] = [b""]
        try:
            buffers[0] = _pack(self._tree(value, buffers, 0))
        except (OverflowError, UnicodeEncodeError) as error:
            raise MessageCodecError(f"a value that cannot be sent: {error}") from error
        return buffers

    def decode(self, buffers: Sequence[Buffer]) -> Any:
        """What `encode` was given. Arrays and tensors lie in the memory of `buffers`. Raises MessageCodecError."""
        if not buffers:
            raise MessageCodecError("a message without a body")
        try:
            return self._value(_unpack(buffers[0]), buffers, 0)
        except MessageCodecError:
            raise
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
            # RecursionError is among them, and msgspec's errors are ValueErrors.
            raise MessageCodecError(f"bytes that are no value: {error}") from error

    # ---- values to trees -------------------------------------------------------------------------------------

    def _tree(self, value: Any, buffers: list[Buffer], depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if depth > MAX_DEPTH:
            raise MessageCodecError(f"a value nested deeper than {MAX_DEPTH}")
        depth += 1
        if kind is list:
            if {*map(type, value)} <= _PLAIN:  # token ids, most of the time
                return [_Tag.LIST, *value]
            return [_Tag.LIST, *[self._tree(each, buffers, depth) for each in value]]
        if kind is dict:
            tree = [_Tag.DICT]
            for key, each in value.items():
                tree += (self._tree(key, buffers, depth), self._tree(each, buffers, depth))
            return tree
        record = self._records.get(kind)
        if record is not None:
            fields = [self._tree(getattr(value, name), buffers, depth) for name in record.fields]
            return [_Tag.RECORD, record.name, *fields]
        if kind in (tuple, set, frozenset, torch.Size):
            tag = _Tag.SET if kind is set else _Tag.FROZENSET if kind is frozenset else _Tag.TUPLE
            return [tag, *[self._tree(each, buffers, depth) for each in value]]
        return self._leaf(value, kind, buffers)

    def _leaf(self, value: Any, kind: type, buffers: list[Buffer]) -> Any:
        name = kind.__name__
        if self._enums.get(name) is kind:
            return [_Tag.ENUM, name, value.name]
        if name in self._structs and self._structs[name][0] is kind:
            return [_Tag.STRUCT, name, _pack(value)]
        if kind is torch.dtype and value in _TORCH_NAMES:
            return [_Tag.DTYPE, _TORCH_NAMES[value]]
        if kind is torch.Tensor and value.dtype in _TORCH_NAMES:
            flat = value.detach().cpu().reshape(-1)  # contiguous: a view, or else a copy
            buffers.append(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
            return [_Tag.TENSOR, len(buffers) - 1, _TORCH_NAMES[value.dtype], *value.shape]
        if kind is np.ndarray and _NUMPY_DTYPES.get(value.dtype.name) == value.dtype:
            buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.size else b"")
            return [_Tag.ARRAY, len(buffers) - 1, value.dtype.name, *value.shape]
        if kind is Fraction:
            return [_Tag.FRACTION, value.numerator, value.denominator]
        of = f" of {value.dtype}" if kind in (torch.Tensor, np.ndarray) else ""
        raise MessageCodecError(
            f"{kind.__module__}.{kind.__qualname__}{of} is not among the classes that stages exchange"
        )

    # ---- and back --------------------------------------------------------------------------------------------

    def _value(self, tree: Any, buffers: Sequence[Buffer], depth: int) -> Any:
        if type(tree) is not list:
            if type(tree) in _PLAIN:
                return tree
            raise MessageCodecError(f"a {type(tree).__name__} where a tag belongs")
        if depth > MAX_DEPTH:
            raise MessageCodecError(f"a value nested deeper than {MAX_DEPTH}")
        tag = tree[0] if tree else None
        if type(tag) is not int or tag < 0 or tag > _Tag.FRACTION:
            raise MessageCodecError(f"{tag!r} is no tag")
        if tag > _Tag.RECORD:
            return self._leaf_of(_Tag(tag), tree[1:], buffers)
        first = 2 if tag == _Tag.RECORD else 1
        values = [part if type(part) in _PLAIN else self._value(part, buffers, depth + 1) for part in tree[first:]]
        if tag == _Tag.RECORD:
            return self._instance(tree[1], values)
        if tag == _Tag.DICT:
            return dict(zip(values[::2], values[1::2], strict=True))
        return values if tag == _Tag.LIST else _CONTAINERS[tag](values)

    def _instance(self, name: Any, values: list[Any]) -> Any:
        record = self._by_name.get(name) if type(name) is str else None
        if record is None:
            raise MessageCodecError(f"{str(name)[:64]!r} is not among the classes that stages exchange")
        if len(values) != len(record.fields):
            raise MessageCodecError(f"{name} has {len(record.fields)} fields here, {len(values)} at the other end")
        return record.make(values)

    def _leaf_of(self, tag: _Tag, parts: list[Any], buffers: Sequence[Buffer]) -> Any:
        match tag:
            case _Tag.ENUM:
                name, member = parts
                return self._enums[name][member]
            case _Tag.STRUCT:
                name, data = parts
                return self._structs[name][1].decode(data)
            case _Tag.DTYPE:
                (name,) = parts
                return _TORCH_DTYPES[name]
            case _Tag.FRACTION:
                numerator, denominator = parts
                return Fraction(numerator, denominator)
            case _Tag.TENSOR:
                data, name, shape = _extent(parts, buffers)
                dtype = _TORCH_DTYPES[name]
                _require_size(data, shape, dtype.itemsize)
                return (torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)).view(shape)
            case _:
                data, name, shape = _extent(parts, buffers)
                _require_size(data, shape, _NUMPY_DTYPES[name].itemsize)
                return np.frombuffer(data, dtype=_NUMPY_DTYPES[name]).reshape(shape)


def _record(kind: type) -> _Record:
    """How to take instances of this class apart and put them together, without a call of its `__init__`."""
    if dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))

        def make(values: list[Any]) -> Any:
            made = object.__new__(kind)
            for name, value in zip(names, values, strict=True):
                object.__setattr__(made, name, value)
            return made

        def make_at_once(values: list[Any]) -> Any:
            made = object.__new__(kind)
            made.__dict__.update(zip(names, values, strict=True))
            return made

        has_slots = any("__slots__" in vars(each) for each in kind.__mro__)
        return _Record(kind.__name__, names, make if has_slots else make_at_once)
    if issubclass(kind, msgspec.Struct):
        struct = kind

        def fill(values: list[Any]) -> Any:
            made = struct()
            for name, value in zip(struct.__struct_fields__, values, strict=True):
                msgspec.structs.force_setattr(made, name, value)
            return made

        return _Record(kind.__name__, kind.__struct_fields__, fill)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        named: Any = kind
        return _Record(kind.__name__, named._fields, named._make)
    raise ValueError(f"{kind.__qualname__} is neither a dataclass nor a struct nor a named tuple nor an enum")


def _extent(parts: list[Any], buffers: Sequence[Buffer]) -> tuple[Buffer, str, tuple[int, ...]]:
    """Bytes, dtype and shape of a tensor."""
    number, name, *shape = parts
    if type(number) is not int or not 0 < number < len(buffers):
        raise MessageCodecError(f"buffer {number!r} of {len(buffers)}")
    if len(shape) > MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise MessageCodecError(f"a tensor of shape {shape[: MAX_DIMENSIONS + 1]}")
    return buffers[number], name, tuple(shape)


def _require_size(data: Buffer, shape: tuple[int, ...], itemsize: int) -> None:
    if math.prod(shape) * itemsize != len(data):
        raise MessageCodecError(f"a tensor of shape {shape} and {itemsize} bytes per element in {len(data)} bytes")
