"""What vLLM says when it does not start becomes one line with what to do. The texts are those of vLLM 0.32."""

from pathlib import Path

import pytest

from p2pserve.node.engine.process import MAX_REASON
from p2pserve.node.engine.vllm_program.start_failures import explain_start_failure

CASES = """
1 validation error for ModelConfig: Value error, User-specified max_model_len (1048576) is greater than the derived max_model_len (max_position_embeddings=2048 or model_max_length=None in model's config.json). To allow overriding
it was made for 2048 tokens, and 1048576 are asked for; take --max-model-len 2048 or less

To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which is larger than the available KV cache memory (5.62 GiB). Based on the available memory, the estimated maximum model length is 46080. Try
a request of 131072 tokens needs 16.0 GiB of KV cache, and there are 5.62 GiB; take --max-model-len 46080, or more memory

To serve at least one request with the model's max seq len (4096), (2.0 GiB KV cache is needed, which is larger than the available KV cache memory (0.01 GiB). Try increasing
a request of 4096 tokens needs 2.0 GiB of KV cache, and there are 0.01 GiB; take a smaller model, or more memory

No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine
no memory is left for KV beside the weights; take a larger --kv-cache-mib, a smaller model, or more cards

Free memory on device cuda:0 (1.2/79.1 GiB) on startup is less than desired GPU memory utilization (0.92, 72.8 GiB)
other programs use the GPU: 1.2 of 79.1 GiB are free; end them, or give --kv-cache-mib

Value error, bitsandbytes quantization is currently not supported in cpu. [type=value_error]
its weights are quantised with bitsandbytes, which vLLM does not run on a cpu; take it in 16 bits

The quantization method marlin is not supported for the current GPU. Minimum capability: 80. Current capability: 75.
its weights are quantised with marlin, which needs a GPU of compute capability 8.0, and this one has 7.5; take it in 16 bits

torch.float32 is not supported for quantization method awq. Supported dtypes: [torch.float16, torch.bfloat16]
its weights are quantised with awq, which does not compute in float32; take --dtype float16, or the model in 16 bits

Unknown quantization method: fancy. Must be one of ['awq', 'fp8'].
its weights are quantised with fancy, which this vLLM does not know; take it in 16 bits

FP8 KV cache on CPU requires x86 with AVX-512 or AMX.
vLLM keeps KV in 8 bits only on processors with AVX-512 or AMX; leave --kv-cache-dtype out

FP8 KV cache requires head_size divisible by 32 on CPU.
on a processor vLLM keeps KV in 8 bits only for heads of a multiple of 32; leave --kv-cache-dtype out

FP8 KV cache is not supported by the Triton attention backend on NVIDIA A40 (compute capability 8.6); native FP8 (fp8e4nv) requires SM89+. Re-run with --kv-cache-dtype bfloat16.
vLLM has no attention for KV in 8 bits on NVIDIA A40 without FlashInfer; leave --kv-cache-dtype out

fp8_e5m2 kv-cache is not supported with fp8 checkpoints.
its files are in fp8, with which vLLM keeps no KV as fp8_e5m2; take --kv-cache-dtype fp8

The model type 'gemma2' does not support float16. Reason: Numerical instability. Please use bfloat16 instead.
models of type gemma2 overflow in float16; take --dtype bfloat16

Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has compute capability 7.5
this GPU does not compute in bfloat16; take --dtype float16

Value error, The checkpoint you are trying to load has model type `nosuch` but Transformers does not recognize this architecture. This could be
models of type nosuch are not known to this vLLM; take another model, or a newer release of p2pserve

Value error, Model architectures ['NoSuchForCausalLM'] are not supported for now. Supported architectures: dict_keys(['AfmoeForCausalLM',
vLLM has no architecture NoSuchForCausalLM, as its config.json calls it; take another model

The size of tensor a (100) must match the size of tensor b (256) at non-singleton dimension 1
its weights have not the shapes that its config.json says (256 where that says 100); copy the model again

Unknown RoPE scaling type nosuch
its config.json asks for RoPE scaling nosuch, which this vLLM does not know; take another model
"""  # noqa: E501 (vLLM's sentence, and ours)


@pytest.mark.parametrize("case", CASES.strip().split("\n\n"))
def test_what_is_known_comes_with_its_fix(case: str) -> None:
    text, expected = case.split("\n")
    assert explain_start_failure(ValueError(text)) == expected
    assert explain_start_failure(ValueError(f"In a configuration:\n\n  {text}\n    more")) == expected


def test_what_is_not_known_is_said_as_vllm_says_it_in_one_line() -> None:
    assert explain_start_failure(ValueError("\n  a\n\n b \nc\nd")) == "a b c"
    assert explain_start_failure(KeyError()) == "KeyError"
    longest = "x" * MAX_REASON
    assert explain_start_failure(ValueError(longest)) == longest
    assert explain_start_failure(ValueError(f"{longest}y")) == f"{longest}..."


def test_an_assertion_without_a_text_says_where_it_was() -> None:
    def load() -> None:
        raise AssertionError

    with pytest.raises(AssertionError) as caught:
        load()
    said = explain_start_failure(caught.value)
    assert (
        said
        == f"AssertionError in {Path(__file__).name}, load; its config.json and its weights may not belong together"
    )
