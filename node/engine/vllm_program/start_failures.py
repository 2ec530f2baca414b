"""Why vLLM does not start, in one line with what to do about it. Pure. Patterns are sentences of
vLLM 0.32; anything else is shown as vLLM says it."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Final

from ..process import MAX_REASON

_QUANTISED: Final = "its weights are quantised with"
# A pattern, and the line for the user with the pattern's groups in it. The first one that is found counts.
_KNOWN: Final = (
    (
        r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len \(\w+=(\d+)",
        r"it was made for \2 tokens, and \1 are asked for; take --max-model-len \2 or less",
    ),
    (
        r"max seq len \((\d+)\), \(?(\S+ GiB) KV cache is needed.*? memory \((.*?)\).*maximum model length is (\d+)",
        r"a request of \1 tokens needs \2 of KV cache, and there are \3; take --max-model-len \4, or more memory",
    ),
    (
        r"max seq len \((\d+)\), \(?(\S+ GiB) KV cache is needed.*? memory \((.*?)\)",
        r"a request of \1 tokens needs \2 of KV cache, and there are \3; take a smaller model, or more memory",
    ),
    (
        r"No available memory for the cache blocks",
        r"no memory is left for KV beside the weights; take a larger --kv-cache-mib, a smaller model, or more cards",
    ),
    (
        r"Free memory on device \S+ \(([\d.]+)/([\d.]+) GiB\)",
        r"other programs use the GPU: \1 of \2 GiB are free; end them, or give --kv-cache-mib",
    ),
    (
        r"(\w+) quantization is currently not supported in (\w+)",
        rf"{_QUANTISED} \1, which vLLM does not run on a \2; take it in 16 bits",
    ),
    (
        r"method (\w+) is not supported for the current GPU.*?capability: (\d+)(\d)\..*?capability: (\d+)(\d)\b",
        rf"{_QUANTISED} \1, which needs a GPU of compute capability \2.\3, and this one has \4.\5; take it in 16 bits",
    ),
    (
        r"torch\.(\w+) is not supported for quantization method (\w+)\. Supported dtypes: \[torch\.(\w+)",
        rf"{_QUANTISED} \2, which does not compute in \1; take --dtype \3, or the model in 16 bits",
    ),
    (
        r"Unknown quantization method: (\w+)",
        rf"{_QUANTISED} \1, which this vLLM does not know; take it in 16 bits",
    ),
    (
        r"model type '(\w+)' does not support float16",
        r"models of type \1 overflow in float16; take --dtype bfloat16",
    ),
    (
        r"has model type `(\S+)` but Transformers does not recognize",
        r"models of type \1 are not known to this vLLM; take another model, or a newer release of p2pserve",
    ),
    (
        r"Model architectures \['(\w+)'.*?\] are not supported",
        r"vLLM has no architecture \1, as its config.json calls it; take another model",
    ),
    (
        r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)",
        r"its weights have not the shapes that its config.json says (\2 where that says \1); copy the model again",
    ),
    (
        r"Unknown RoPE scaling type (\w+)",
        r"its config.json asks for RoPE scaling \1, which this vLLM does not know; take another model",
    ),
    (
        r"Bfloat16 is only supported on GPUs",
        r"this GPU does not compute in bfloat16; take --dtype float16",
    ),
    (
        r"FP8 KV cache on CPU requires",
        r"vLLM keeps KV in 8 bits only on processors with AVX-512 or AMX; leave --kv-cache-dtype out",
    ),
    (
        r"FP8 KV cache requires head_size divisible by 32 on CPU",
        r"on a processor vLLM keeps KV in 8 bits only for heads of a multiple of 32; leave --kv-cache-dtype out",
    ),
    (
        r"FP8 KV cache is not supported by the Triton attention backend on (.+?) \(compute capability",
        r"vLLM has no attention for KV in 8 bits on \1 without FlashInfer; leave --kv-cache-dtype out",
    ),
    (
        r"fp8_e5m2 kv-cache is not supported with fp8 checkpoints",
        r"its files are in fp8, with which vLLM keeps no KV as fp8_e5m2; take --kv-cache-dtype fp8",
    ),
)


def explain_start_failure(error: BaseException) -> str:
    """What is wrong and the fix, in one line."""
    text = str(error)
    for pattern, line in _KNOWN:
        found = re.search(pattern, text, flags=re.DOTALL)
        if found is not None:
            return found.expand(line)
    # Configuration errors come wrapped in pages of context; the first lines say what is wrong.
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = " ".join(lines[:3]) or _describe_silent(error)
    return shown if len(shown) <= MAX_REASON else f"{shown[:MAX_REASON]}..."


def _describe_silent(error: BaseException) -> str:
    """An error without a text, as failed assertions are: where it was, and what is behind most of them."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}, {frames[-1].name}" if frames else ""
    fault = "; its config.json and its weights may not belong together" if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__}{where}{fault}"
