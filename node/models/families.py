"""Which families of models can be served: known from `config.json` alone, before anything else is fetched.

KV is transferred between boxes, so what decides is what a layer keeps of a token. Keys and values of the same size in
every layer can be transferred, and so can one latent vector; a state, a second cache or layers that differ cannot. The
table for people is in `docs/engines.md`; what this misses, the engine refuses when it starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from .errors import ModelError

_ATTENTION: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_STATE_KEYS: Final = re.compile(
    r"mamba_|ssm_|rwkv|(?:state_size|linear_conv_kernel_dim|linear_attn_config|attn_type_list|conv_L_cache|lru_width"
    r"|layers_block_type|hybrid_override_pattern|block_types)$"
)
_STATE_NAMES: Final = re.compile(
    r"Mamba|Jamba|Bamba|FalconH1|Hybrid|NemotronH|Plamo2|Lfm2|Qwen3Next|RecurrentGemma|Rwkv|xLSTM"
)
_SENSES: Final = ("vision_config", "audio_config", "img_processor", "audio_processor", "visual", "thinker_config")
_INDEXED: Final = ("index_topk", "index_n_heads", "compress_ratios")
_UNEVEN: Final = ("block_configs", "global_head_dim", "num_global_key_value_heads", "swa_num_key_value_heads")
# Those whose layers each keep one latent vector in vLLM, and nothing else.
_LATENT: Final = frozenset({"axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "pangu_ultra_moe"})


def check_architecture(config: dict[str, Any], name: str) -> None:
    """Refuse what can be known not to work. Raises ModelError, one line: the family, what gives it away, and what to
    take instead."""
    named = config.get("architectures")
    architectures = [str(a) for a in named] if isinstance(named, list) else []
    for judge in (_by_purpose, _by_state, _by_latent, _by_layers, _by_format):
        reason = judge(config, architectures)
        if reason is not None:
            raise ModelError(f"model {name}: {reason}")


def _by_purpose(config: dict[str, Any], architectures: list[str]) -> str | None:
    if config.get("is_encoder_decoder") is True:
        return "an encoder-decoder model; only decoders can be served"
    sense = next((key for key in _SENSES if config.get(key) is not None), None)
    sense = sense or next((a for a in architectures if a.endswith("ForConditionalGeneration")), None)
    if sense is not None:
        return f"a multimodal model ({sense}), and only text is served; take a text-only model of its family"
    if not any(a.endswith(("ForCausalLM", "LMHeadModel")) for a in architectures):
        return f"not a causal language model (architectures: {', '.join(architectures) or 'none named'})"
    return None


def _by_state(config: dict[str, Any], architectures: list[str]) -> str | None:
    sign = _sign_of_state(config, architectures)
    if sign is None:
        return None
    return (
        f"a state-space or hybrid model ({sign}), whose state cannot be moved between boxes; take a model whose layers "
        "are all attention"
    )


def _sign_of_state(config: dict[str, Any], architectures: list[str]) -> str | None:
    """What gives away a layer that keeps something other than keys and values, if anything does."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        for kind in kinds:
            if str(kind) not in _ATTENTION:
                return f"layer_types: {kind}"
    for key, value in config.items():
        if value is not None and _STATE_KEYS.match(key):
            return key
    return next((a for a in architectures if _STATE_NAMES.search(a)), None)


def _by_latent(config: dict[str, Any], architectures: list[str]) -> str | None:
    index = next((key for key in _INDEXED if config.get(key) is not None), None)
    if index is not None:
        return (
            f"sparse attention ({index}), which keeps an index in a cache of its own; take a model that attends to all "
            "of its context, as DeepSeek-V3 and Kimi-K2 do"
        )
    kind = config.get("model_type")
    if config.get("kv_lora_rank") is not None and kind not in _LATENT:
        return (
            f"latent attention (kv_lora_rank) of another kind than DeepSeek's (model_type: {kind}); take one of "
            f"{', '.join(sorted(_LATENT))}, or a model with plain attention"
        )
    return None


def _by_layers(config: dict[str, Any], architectures: list[str]) -> str | None:
    uneven = next((key for key in _UNEVEN if config.get(key) is not None), None)
    key_size, value_size = config.get("head_dim"), config.get("v_head_dim")
    if config.get("kv_lora_rank") is None and key_size and value_size and key_size != value_size:
        uneven = uneven or "v_head_dim"
    if uneven is not None:
        return f"its layers keep keys and values of different shapes ({uneven}); take another"
    if config.get("num_kv_shared_layers"):
        return "some of its layers use the keys and values of others (num_kv_shared_layers); take another"
    return None


def _by_format(config: dict[str, Any], architectures: list[str]) -> str | None:
    """Keys and values may be kept in 16 bits or in fp8."""
    for bits, kind, algorithm in _kv_formats(config):
        if bits is not None and (bits, kind) != (8, "float"):
            algorithm = f"{kind}{bits}"
        elif not algorithm.startswith("nvfp4"):
            continue
        return f"it keeps keys and values as {algorithm}; take one that keeps them in 16 bits or fp8"
    return None


def keeps_kv_in_8_bits(config: dict[str, Any]) -> bool:
    """Whether its files say that K and V are kept in fp8, as vLLM then does unless it is told otherwise."""
    return any((bits, kind) == (8, "float") or algorithm == "fp8" for bits, kind, algorithm in _kv_formats(config))


def _kv_formats(config: dict[str, Any]) -> Iterator[tuple[object, object, str]]:
    """Of K and V, wherever a configuration says it: bits and kind of number, or an algorithm by name, in lower case."""
    quantised = config.get("quantization_config")
    if not isinstance(quantised, dict):
        return
    inner = quantised.get("quantization")
    for place in (inner, quantised) if isinstance(inner, dict) else (quantised,):
        scheme, algorithm = place.get("kv_cache_scheme"), place.get("kv_cache_quant_algo")
        bits, kind = (scheme.get("num_bits"), scheme.get("type")) if isinstance(scheme, dict) else (None, None)
        yield bits, kind, algorithm.lower() if isinstance(algorithm, str) else ""
