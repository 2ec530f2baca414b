"""A model's cost by its dimensions: bytes of weights and KV, multiply-adds of a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from ..bounds import MAX_LAYERS, Layer, ModelName, Size

KV_8_BIT: Final = 1
KV_16_BIT: Final = 2
"""Values of `ModelShape.kv_value_bytes`."""

KvCacheDtype = Literal["auto", "fp8", "fp8_e5m2"]
"""vLLM's `kv_cache_dtype`: how an engine keeps K and V; auto: as the model's files say, mostly 16 bit."""

KV_CACHE_DTYPES: Final[tuple[KvCacheDtype, ...]] = get_args(KvCacheDtype)

KvChoice = KvCacheDtype | Literal["choose"]
"""What people ask for; choose: 8 bits where what they cost in quality is known for the model."""


class ModelShapeError(ValueError):
    """Dimensions that no model has, or a name that is not known; the text names the field."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer. Sizes are in elements unless a name says bytes.

    `mlp_matrices` is 3 where the feed-forward is gated (Llama), else 2 (OPT, BLOOM). Of `experts`
    feed-forwards a token passes through `active_experts`. `window` > 0: `windowed_layers` of the
    layers look back only so many tokens.

    `projections`: of one layer's attention, where head sizes do not say it; else 0. Latent
    attention (DeepSeek's) has one KV head, whose key and value are the halves of the latent vector.
    Heads of that size are not what it computes with: for a pair of tokens it takes 1.9 times as
    much when it decodes, and 0.6 times when it prefills.

    `kv_value_bytes`: of each number of K and V in an engine's memory, 1 for vLLM's fp8. On the wire
    they are coded from 16 bits whatever that is.
    """

    name: ModelName
    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    hidden: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    intermediate: Size
    vocabulary: Size
    mlp_matrices: Annotated[int, msgspec.Meta(ge=1, le=3)] = 3
    tied_embeddings: bool = False
    experts: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    active_experts: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    window: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    windowed_layers: Layer = 0
    dtype_bytes: Annotated[int, msgspec.Meta(ge=1, le=4)] = 2
    projections: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)] = 0
    kv_value_bytes: Annotated[int, msgspec.Meta(ge=1, le=2)] = KV_16_BIT

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "experts"):
            if getattr(self, field) < 1:
                raise ModelShapeError(f"model.{field} of {self.name} is {getattr(self, field)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ModelShapeError(
                f"model.heads of {self.name} is {self.heads}, no multiple of {self.kv_heads} KV heads"
            )
        if not 1 <= self.active_experts <= self.experts:
            raise ModelShapeError(f"model.active_experts of {self.name} is not between 1 and {self.experts}")
        if self.dtype_bytes not in (1, 2, 4):
            raise ModelShapeError(f"model.dtype_bytes of {self.name} is {self.dtype_bytes}, not 1, 2 or 4")
        if not 0 <= self.windowed_layers <= self.layers or (self.windowed_layers and self.window < 1):
            raise ModelShapeError(f"model.windowed_layers of {self.name} does not fit its layers or its window")

    @property
    def attention_parameters(self) -> int:
        """Of one layer: the projections to queries, keys, values and back."""
        return self.projections or 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Of one feed-forward (one expert)."""
        return self.mlp_matrices * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """All that is stored for one layer."""
        return self.attention_parameters + self.experts * self.mlp_parameters

    @property
    def active_layer_parameters(self) -> int:
        """What one token is multiplied with in one layer."""
        return self.attention_parameters + self.active_experts * self.mlp_parameters

    @property
    def embedding_parameters(self) -> int:
        """The table that tokens come in by."""
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """The matrix that logits come out by; also multiplied with when it is the embedding's."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All that is stored."""
        ends = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return self.layers * self.layer_parameters + ends

    @property
    def weight_bytes(self) -> int:
        """Of the whole model."""
        return self.parameters * self.dtype_bytes

    @property
    def layer_weight_bytes(self) -> int:
        """Of one layer."""
        return self.layer_parameters * self.dtype_bytes

    @property
    def kv_values_per_token_layer(self) -> int:
        """Numbers in K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """K and V of one token in one layer, as an engine keeps them."""
        return self.kv_values_per_token_layer * self.kv_value_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers, as an engine keeps them."""
        return self.layers * self.kv_bytes_per_token_layer

    @property
    def raw_kv_bytes_per_token_layer(self) -> int:
        """K and V of one token in one layer as codecs take them, in 16 bit."""
        return self.kv_values_per_token_layer * KV_16_BIT

    @property
    def activation_bytes_per_token(self) -> int:
        """What one token sends to the next stage: hidden state and residual merged, in 16 bit."""
        return 2 * self.hidden

    def with_kv_value_bytes(self, size: int) -> ModelShape:
        """The same model with so many bytes for each number of K and V."""
        return msgspec.structs.replace(self, kv_value_bytes=size)

    def with_kv_cache_dtype(self, dtype: KvCacheDtype) -> ModelShape:
        """The same model in engines that keep K and V so."""
        return self if dtype == "auto" else self.with_kv_value_bytes(KV_8_BIT)

    def stage_weight_bytes(self, layers: int, *, first: bool, last: bool) -> int:
        """Of a stage with so many layers; the ends hold the embedding and the logits' matrix."""
        ends = int(first) * self.embedding_parameters + int(last) * self.head_parameters
        if first and last and self.tied_embeddings:
            ends = self.embedding_parameters
        return layers * self.layer_weight_bytes + ends * self.dtype_bytes


def _llama(name: str, layers: int, hidden: int, heads: int, kv: int, mlp: int, vocabulary: int) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv, head_dim=hidden // heads, intermediate=mlp,
        vocabulary=vocabulary,
    )  # fmt: skip


def _plain(name: str, layers: int, hidden: int, heads: int, vocabulary: int) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads,
        intermediate=4 * hidden, vocabulary=vocabulary, mlp_matrices=2, tied_embeddings=True,
    )  # fmt: skip


MODELS: Final[Mapping[str, ModelShape]] = {
    shape.name: shape
    for shape in (
        _llama("llama-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama-13b", 40, 5120, 40, 40, 13824, 32000),
        _llama("llama-30b", 60, 6656, 52, 52, 17920, 32000),
        _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
        _llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32768),
        _llama("qwen2-7b", 28, 3584, 28, 4, 18944, 152064),
        _llama("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064),
        _llama("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064),
        _plain("opt-6.7b", 32, 4096, 32, 50272),
        _plain("opt-13b", 40, 5120, 40, 50272),
        _plain("opt-66b", 64, 9216, 72, 50272),
        _plain("bloom-176b", 70, 14336, 112, 250880),
    )
}
"""The models of the papers and some that people rent boxes for, by name."""


def model_shape(name: str) -> ModelShape:
    """A known model by its name, in any case. Raises ModelShapeError with the known names."""
    found = MODELS.get(name.lower())
    if found is None:
        raise ModelShapeError(f"model {name!r} is not known: give a config.json, or one of {', '.join(sorted(MODELS))}")
    return found


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """From a Hugging Face `config.json`. Raises ModelShapeError for what is missing or wrong."""

    def number(*fields: str, default: int | None = None) -> int:
        for field in fields:
            value = config.get(field)
            if value is None:
                continue
            if isinstance(value, int) and not isinstance(value, bool):
                return value
            raise ModelShapeError(f"config of {name}: {field} is {value!r}, not a whole number")
        if default is None:
            raise ModelShapeError(f"config of {name} has no {' or '.join(fields)}")
        return default

    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head", "n_heads", "num_heads")
    layers = number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    # Falcon says multi-query by a flag of its own, which its later architecture ignores.
    one_for_all = config.get("multi_query") is True and config.get("new_decoder_architecture") is not True
    plain = config.get("model_type") in {"opt", "bloom", "gpt2", "gpt_neox"}
    experts = number("num_local_experts", "num_experts", "n_routed_experts", default=1)
    shared = number("n_shared_experts", default=0) if experts > 1 else 0
    rank = number("kv_lora_rank", default=0)
    # MLA (DeepSeek) caches one latent vector per token; as keys and values of half its width each,
    # it has the right size.
    latent = rank + number("qk_rope_head_dim") if rank else 0
    head_dim = latent // 2 or number("head_dim", default=hidden // heads if heads > 0 else 0)
    kv_heads = 1 if one_for_all or latent else number("num_key_value_heads", "num_kv_heads", default=heads)
    # Qwen2 names a window and says apart that it does not use it.
    window = number("sliding_window", default=0) if config.get("use_sliding_window", True) else 0
    kinds = config.get("layer_types")
    windowed = list(kinds).count("sliding_attention") if isinstance(kinds, list) else layers
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=number("moe_intermediate_size", "intermediate_size", "ffn_dim", default=4 * hidden),
        vocabulary=number("vocab_size"),
        mlp_matrices=2 if plain else 3,
        tied_embeddings=bool(config.get("tie_word_embeddings", plain)),
        experts=experts + shared,
        active_experts=number("num_experts_per_tok", "experts_per_token", default=1) + shared if experts > 1 else 1,
        window=window,
        windowed_layers=windowed if window else 0,
        projections=_latent_projections(number, hidden, heads) if latent else 0,
    )


def _latent_projections(number: Callable[..., int], hidden: int, heads: int) -> int:
    """Elements of a layer's latent attention: queries, latent vector, rotary key, keys and values
    from the latent, and back. `number` reads the configuration."""
    rank, rotary = number("kv_lora_rank"), number("qk_rope_head_dim")
    plain, value = number("qk_nope_head_dim"), number("v_head_dim")
    query_rank = number("q_lora_rank", default=0)
    query = heads * (plain + rotary)
    to_queries = query_rank * (hidden + query) if query_rank else hidden * query
    return to_queries + hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
