"""What the network needs to know of a model, read from its configuration; models that cannot be served are refused."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ...coordinator.bounds import MAX_LAYERS, Count, ModelName, Tokens
from ...coordinator.costs.model_shape import KV_8_BIT, KV_16_BIT, ModelShape, ModelShapeError, shape_of_config
from .errors import ModelError
from .families import keeps_kv_in_8_bits


class WeightSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a model's weights as they are stored, by part.

    `shared` comes with every stage. `tied`: the last stage multiplies with the embeddings and holds them too.
    `float_bytes`: of one weight, when most are plain floating-point numbers, which an engine converts to the dtype that
    it computes in; 0 for a quantised model, whose weights stay as they are.
    """

    layers: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
    embeddings: Count
    head: Count
    shared: Count = 0
    float_bytes: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0
    tied: bool = False

    def of_stage(self, first: int, last: int, float_bytes: int = 0) -> int:
        """Bytes that layers `[first, last)` take with what belongs to them, at `float_bytes` a
        number (0: as stored)."""
        if not 0 <= first < last <= len(self.layers):
            raise ValueError(f"layers [{first}, {last}) are not a part of [0, {len(self.layers)})")
        total = self.shared + sum(self.layers[first:last])
        at_end = last == len(self.layers)
        if first == 0 or (at_end and self.tied):
            total += self.embeddings
        if at_end:
            total += self.head
        return total * float_bytes // self.float_bytes if float_bytes and self.float_bytes else total


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the network needs to know of a model; `service` names it everywhere. `dtype_bytes` of
    `shape` are those stored; `windows`: tokens each layer looks back, 0 for all, empty for none
    limited."""

    service: ModelName
    shape: ModelShape
    max_model_len: Tokens
    weights: WeightSizes
    windows: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_LAYERS)] = ()

    def __post_init__(self) -> None:
        if len(self.weights.layers) != self.layers:
            raise ValueError(f"model.weights has {len(self.weights.layers)} layers, and the model {self.layers}")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"model.windows has {len(self.windows)} layers, and the model {self.layers}")

    @property
    def name(self) -> str:
        """As the user knows it."""
        return self.shape.name

    @property
    def layers(self) -> int:
        """How many there are."""
        return self.shape.layers

    @property
    def kv_heads(self) -> int:
        """Of one layer."""
        return self.shape.kv_heads

    @property
    def head_dim(self) -> int:
        """Numbers in a key of one head."""
        return self.shape.head_dim

    def kv_bytes(self, tokens: int, first: int, last: int, float_bytes: int) -> int:
        """What the KV of one sequence of `tokens` takes in layers `[first, last)`: for each number `float_bytes`, or
        one where the engine keeps it in 8 bit."""
        # Blocks behind a window are given back only where all layers have the same: vLLM keeps layers that differ in
        # one group, since our connector does not claim caches of several.
        window = self.windows[0] if len(set(self.windows)) == 1 else 0
        positions = min(tokens, window) if window else tokens
        size = KV_8_BIT if self.shape.kv_value_bytes == KV_8_BIT else float_bytes
        return self.shape.kv_values_per_token_layer * size * positions * (last - first)


_UNIFORM_WINDOWS = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})


def kv_windows(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """`ModelInfo.windows`. What is not known for sure counts as unlimited: so memory is never overestimated."""
    window = config.get("sliding_window")
    chunk = config.get("attention_chunk_size")
    by_kind = {"sliding_attention": window, "chunked_attention": chunk}
    kinds = config.get("layer_types")
    if config.get("use_sliding_window") is False:
        by_kind["sliding_attention"] = None
    if not isinstance(kinds, list):
        kinds = ["sliding_attention" if config.get("model_type") in _UNIFORM_WINDOWS else "full_attention"] * layers
    windows = tuple(int(by_kind.get(str(kind)) or 0) for kind in kinds)
    return windows if any(windows) else ()


def describe(name: str, service: str, config: dict[str, Any], weights: WeightSizes, layers: int) -> ModelInfo:
    """Read the sizes of a model. Raises ModelError for a configuration that lacks or garbles one."""
    try:
        windows = kv_windows(config, layers)
        longest = config.get("max_position_embeddings") or config.get("n_positions") or config.get("max_seq_len")
        return ModelInfo(
            service=service,
            shape=msgspec.structs.replace(
                shape_of_config(config, name),
                layers=layers,
                window=max(windows, default=0),
                windowed_layers=sum(window > 0 for window in windows),
                dtype_bytes=min(4, weights.float_bytes or 1),  # a byte: quantised, about
                kv_value_bytes=KV_8_BIT if keeps_kv_in_8_bits(config) else KV_16_BIT,
            ),
            max_model_len=int(longest or 2048),
            weights=weights,
            windows=windows,
        )
    except ModelShapeError as error:
        raise ModelError(f"model {name}: {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise _garbled(name, error) from error


def layer_count(config: dict[str, Any], name: str) -> int:
    """How many layers the model has. Raises ModelError."""
    try:
        layers = int(_first(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers"))
        if not 1 <= layers <= MAX_LAYERS:
            raise ValueError(f"{layers} layers")
        return layers
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise _garbled(name, error) from error


def _garbled(name: str, error: Exception) -> ModelError:
    return ModelError(f"model {name}: config.json lacks or garbles {error}")


def _first(config: dict[str, Any], *keys: str) -> Any:
    """The value of the first key that is there; the key to name in an error is the first one."""
    for key in keys:
        if key in config:
            return config[key]
    raise KeyError(keys[0])
