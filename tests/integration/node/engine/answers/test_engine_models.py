"""Models other than Llama, tiny and random: KV that one engine hands to another gives the tokens of a single engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio
from safetensors.torch import load_file, save_file

from p2pserve.kvtransport.routing.reslice import ShardLayout, reslice
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineStartError
from p2pserve.node.engine.agent_side.fork_server import open_fork_server
from p2pserve.node.engine.trials.trial import TrialEngine, open_trial

from ..transfers.pieces import transfer_between

pytestmark = pytest.mark.beside

VOCABULARY, LAYERS, WINDOW = 512, 4, 64
COUNT = 12
PROMPTS = ((5, 5), (130, 130), (300, 300), (300, 170))  # (length, how many positions of KV are sent)
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
YARN = {
    "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 1.0,
    "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
# Name -> configuration class of transformers and what is particular to it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-kv-fp8": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "gpt-oss": (
        "GptOssConfig",
        {"sliding_window": WINDOW, "layer_types": ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    # Latent attention of the size that vLLM's CPU kernel takes, with the scaled RoPE of DeepSeek's own models: without
    # it that backend rotates the queries of a prompt otherwise than those of single tokens.
    "deepseek": (
        "DeepseekV2Config",
        {
            "num_key_value_heads": 2,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "rope_scaling": YARN,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


# What cannot be transferred: a state instead of K and V.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {"mamba": ("MambaConfig", {"state_size": 16})}


def make_model(folder: Path, name: str, **changes: object) -> Path:
    """A random model of this architecture, as its own authors' code would save it."""
    import transformers

    kind, particular = (MODELS | REFUSED)[name]
    config = getattr(transformers, kind)(**{**COMMON, **particular, **changes})
    torch.manual_seed(3)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    if name.endswith("-kv-fp8"):
        quantise_cache(folder)
    return folder


def quantise_cache(folder: Path) -> None:
    """Make a model one whose checkpoint says that K and V are kept in fp8, and with which scales."""
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": ["lm_head"],
        "kv_cache_scheme": scheme,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([0.011 * (layer + 1)])
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([0.023])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def prompt_of(length: int, seed: str) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(1, VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("name", MODELS)
def test_transferred_kv_gives_the_same_tokens(engine_channels: list[int], tmp_path: Path, name: str) -> None:
    """Over several chunks and beyond the sliding windows; in part, and all of it again beside what is cached. KV that
    does not come is computed, although its place has been made without what the windows have left behind."""
    in_fp8 = name.endswith("-kv-fp8")
    if in_fp8 and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM keeps KV in fp8 only on CPUs with AVX-512")

    async def main() -> None:
        config = protocol.EngineConfig(
            model=str(make_model(tmp_path, name)),
            dtype="float32",
            kv_cache_mib=16,
            max_batched_tokens=128,
            block_size=32,
        )
        async with (
            open_fork_server(log=None, threads=1, channel=engine_channels.pop()) as server,
            open_trial(server) as trial,
        ):
            prefill, decode = await trial.start(config), await trial.start(config)
            if in_fp8:  # a byte for each number of one head's K and V
                assert prefill.ready.kv_tokens * 2 * 32 * LAYERS > 15 << 20
            link = trial.join(decode)
            for length, handed in PROMPTS:
                prompt = prompt_of(length, f"{name} {handed}")
                for _ in range(2 if handed == length else 1):
                    send, receive = trial.transfer_ends(link, "raw", prefill.ready)
                    request = decode.submit(prompt, COUNT, receive=receive, receive_tokens=handed)
                    prefill.submit(prompt[:handed], 1, send=send)
                    answer = await decode.answer(request)
                    assert (await prefill.report(send[0].ticket.transfer)).delivered
                    assert answer.cached >= min(handed, length - 1)
                    assert answer.tokens == (await prefill.generate(prompt, COUNT)).tokens, (length, handed)
            prompt = prompt_of(300, f"{name} given up")
            _, receive = trial.transfer_ends(link, "raw", prefill.ready)
            request = decode.submit(prompt, COUNT, receive=receive, receive_tokens=300)
            assert decode.link is not None
            decode.link.send(protocol.AbortTransfer(transfer=receive[0].ticket.transfer, reason="its prefill is lost"))
            assert (await decode.answer(request)).tokens == (await prefill.generate(prompt, COUNT)).tokens

    trio.run(main)


@pytest.mark.parametrize("source_tp", [1, 2])
def test_a_latent_cache_is_the_same_on_all_workers(engine_channels: list[int], tmp_path: Path, source_tp: int) -> None:
    """From one worker to the two of a later stage, and from either of two to those."""

    async def main() -> None:
        config = protocol.EngineConfig(model=str(make_model(tmp_path, "deepseek")), dtype="float32", kv_cache_mib=32)
        source, target = ShardLayout((source_tp,), (LAYERS,), 1), ShardLayout((1, 2), (1, LAYERS - 1), 1)
        async with (
            open_fork_server(log=None, threads=1, channel=engine_channels.pop()) as server,
            open_trial(server) as trial,
        ):
            prefill = await trial.start(msgspec.structs.replace(config, tp=source_tp))
            decode = await trial.start_stages(config, target.stages, tp=target.tp)
            pieces = reslice(source, target)
            assert len(pieces) == 3
            prompt = prompt_of(150, "workers")
            send, receive = transfer_between(
                trial, pieces, [trial.join(decode[piece.target.stage]) for piece in pieces]
            )
            request = decode[0].submit(prompt, COUNT, receive=receive, receive_tokens=150)
            prefill.submit(prompt, 1, send=send)
            answer = await decode[0].answer(request)
            assert answer.cached >= 149
            assert answer.tokens == (await prefill.generate(prompt, COUNT)).tokens

    trio.run(main)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_k_and_v_is_refused(engine_channels: list[int], tmp_path: Path, name: str) -> None:
    async def main() -> None:
        config = protocol.EngineConfig(model=str(make_model(tmp_path, name)), kv_cache_mib=16, max_batched_tokens=128)
        async with open_fork_server(log=None, threads=1, channel=engine_channels.pop()) as server:
            engine = TrialEngine()
            with pytest.raises(EngineStartError, match="can be transferred") as caught:
                await server.start_engine(config, engine.on_message)
            assert "\n" not in str(caught.value)

    trio.run(main)
