"""What a checkpoint holds and where: the parts of a model, the shards they lie in, and how large they are.

Parts are told apart by the names of tensors, which is all that there is before anything has been loaded:

    model.embed_tokens.weight            embeddings    first stage; the last one too where the head is tied to them
    model.layers.7.self_attn.q_proj...   layer 7       the stage that holds layer 7
    model.norm.weight, lm_head.weight    head          last stage
    any other                            shared        every stage (tables of positions and the like; they are small)

Only headers are read (a safetensors file begins with them), here or by a range request.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

import msgspec

from .errors import ModelError
from .info import WeightSizes

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

MAX_HEADER = 100_000_000  # bytes, as the format's own library has it
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|h)\.(\d+)\.")
_EMBEDDINGS = re.compile(
    r"(?:^|\.)(?:embed_tokens|tok_embeddings|word_embeddings|word_embeddings_layernorm|embed_in|embed_positions"
    r"|wte|wpe)\."
)
_OUTPUT = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.")
_FINAL_NORM = re.compile(r"(?:^|\.)(?:norm|norm_f|ln_f|final_layernorm|final_layer_norm|final_norm)\.")

Part = int | Literal["embeddings", "head", "shared"]


class Tensor(NamedTuple):
    """A tensor as a header has it: safetensors' name of its dtype, and its size."""

    dtype: str
    bytes: int


def part_of(tensor: str) -> Part:
    """Which part of a model a tensor of this name belongs to; a number is a layer's."""
    layer = _LAYER.search(tensor)
    if layer is not None:
        return int(layer[1])
    if _EMBEDDINGS.search(tensor):
        return "embeddings"
    return "head" if _OUTPUT.search(tensor) or _FINAL_NORM.search(tensor) else "shared"


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The layers `[first, last)` that a stage holds, of a model with `total`."""

    first: int
    last: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last <= self.total:
            raise ValueError(f"layers [{self.first}, {self.last}) are not a part of [0, {self.total})")

    def needs(self, part: Part, *, tied: bool) -> bool:
        """Whether the stage holds this part. `tied`: the head's matrix is that of the embeddings."""
        if isinstance(part, int):
            return self.first <= part < self.last
        at_end = self.last == self.total
        match part:
            case "embeddings":
                return self.first == 0 or (tied and at_end)
            case "head":
                return at_end
            case "shared":
                return True


class WeightFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint: its size and the bytes of each part that lies in it."""

    file: str
    file_bytes: int
    layers: dict[int, int] = {}
    embeddings: int = 0
    head: int = 0
    shared: int = 0

    def parts(self) -> Iterable[Part]:
        """The parts of which something lies here."""
        yield from self.layers
        if self.embeddings:
            yield "embeddings"
        if self.head:
            yield "head"
        if self.shared:
            yield "shared"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """All shards of a model. `float_bytes` and `tied` as in `WeightSizes`."""

    shards: tuple[WeightFile, ...]
    float_bytes: int
    tied: bool

    @classmethod
    def of(cls, headers: Mapping[str, Mapping[str, Tensor]], sizes: Mapping[str, int], *, tied: bool) -> Self:
        """Sum up the headers of all files. `sizes`: bytes of each file; `tied`: what the configuration says."""
        by_dtype: Counter[str] = Counter()
        shards = []
        has_output = False
        for file, header in headers.items():
            parts: Counter[Part] = Counter()
            for name, tensor in header.items():
                parts[part_of(name)] += tensor.bytes
                by_dtype[tensor.dtype] += tensor.bytes
                has_output = has_output or _OUTPUT.search(name) is not None
            shards.append(
                WeightFile(
                    file=file,
                    file_bytes=sizes[file],
                    layers={part: size for part, size in parts.items() if isinstance(part, int)},
                    embeddings=parts["embeddings"],
                    head=parts["head"],
                    shared=parts["shared"],
                )
            )
        most = max(by_dtype, key=lambda dtype: by_dtype[dtype], default="")
        return cls(
            shards=tuple(shards),
            float_bytes=_FLOAT_BYTES.get(most, 0),
            tied=tied or not has_output,  # a checkpoint without the matrix of the head can only mean that
        )

    def needed(self, layers: StageLayers) -> tuple[WeightFile, ...]:
        """The shards that hold something of these layers, or of what comes with them."""
        return tuple(s for s in self.shards if any(layers.needs(part, tied=self.tied) for part in s.parts()))

    def weights(self, layers: int) -> WeightSizes:
        """What the parts of a model with so many layers take. Raises ValueError when one of them is nowhere."""
        found: Counter[int] = Counter()
        for shard in self.shards:
            found.update(shard.layers)
        missing = [layer for layer in range(layers) if not found[layer]]
        if missing:
            raise ValueError(f"there are no weights of layer {missing[0]}")
        embeddings = sum(shard.embeddings for shard in self.shards)
        if not embeddings:
            raise ValueError("there are no weights of the embeddings")
        return WeightSizes(
            layers=tuple(found[layer] for layer in range(layers)),
            embeddings=embeddings,
            head=sum(shard.head for shard in self.shards),
            shared=sum(shard.shared for shard in self.shards),
            float_bytes=self.float_bytes,
            tied=self.tied,
        )


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises ValueError for a file that is none or is cut short, OSError."""
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > MAX_HEADER:
            raise ValueError(f"{path.name} is no safetensors file")
        raw = file.read(length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, dict[str, object]])
        header.pop("__metadata__", None)
        spans = msgspec.convert(header, dict[str, _Span])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"the header of {path.name} cannot be read: {error}") from error
    end = 8 + length + max((span.data_offsets[1] for span in spans.values()), default=0)
    size = path.stat().st_size
    if size != end:
        raise ValueError(f"{path.name} has {size} bytes, and its header speaks of {end}")
    return {name: Tensor(span.dtype, span.data_offsets[1] - span.data_offsets[0]) for name, span in spans.items()}


class _Span(msgspec.Struct):
    dtype: str
    data_offsets: tuple[int, int]


def read_index(path: Path) -> dict[str, str]:
    """Which file each tensor lies in, as an index has it. Raises ValueError, OSError."""
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    strange = next((file for file in index.weight_map.values() if not _FILE.fullmatch(file)), None)
    if strange is not None or not index.weight_map:
        raise ValueError(f"{path.name} names {strange!r}, which is no safetensors file beside it")
    return index.weight_map


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_FILE = re.compile(r"[^/\\\0]+\.safetensors")


def local_checkpoint(folder: Path, name: str, *, tied: bool) -> Checkpoint:
    """The checkpoint of a folder that holds all of a model. Raises ModelError."""
    try:
        files = checkpoint_files(folder)
        if not files:
            raise ModelError(f"model {name}: no *.safetensors weights in {folder}")
        headers = {file: read_header(folder / file) for file in files}
        return Checkpoint.of(headers, {file: (folder / file).stat().st_size for file in files}, tied=tied)
    except FileNotFoundError as error:
        raise ModelError(f"model {name}: {error.filename} is missing; copy it there, or give a whole folder") from error
    except OSError as error:
        raise ModelError(f"model {name}: {error.filename} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"model {name}: {error}; copy {folder} again") from error


def checkpoint_files(folder: Path) -> tuple[str, ...]:
    """The names of a folder's weight files: those of its index if it has one. Raises ValueError, OSError."""
    if (folder / INDEX_FILE).is_file():
        return tuple(sorted(set(read_index(folder / INDEX_FILE).values())))
    return tuple(sorted(path.name for path in folder.glob("*.safetensors")))


def stage_files(folder: Path, layers: StageLayers, *, tied: bool) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The files that a stage needs, with its tensors' names in each. Raises ValueError, OSError,
    FileNotFoundError."""
    if (folder / INDEX_FILE).is_file():
        by_file: dict[str, list[str]] = {}
        for name, file in sorted(read_index(folder / INDEX_FILE).items()):
            by_file.setdefault(file, []).append(name)
    else:
        by_file = {file: list(read_header(folder / file)) for file in checkpoint_files(folder)}
    for file, names in sorted(by_file.items()):
        own = tuple(name for name in names if layers.needs(part_of(name), tied=tied))
        if own:
            yield folder / file, own
