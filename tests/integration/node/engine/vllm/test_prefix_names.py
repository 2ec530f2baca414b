"""Names of prefixes are the installed vLLM's block hashes, cut."""

from __future__ import annotations

import random

import pytest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils

from p2pserve.coordinator.prefixes.naming import cut_name, prefix_names


@pytest.mark.parametrize("salt", ["", "net/alice", "Größe", "long/" + "x" * 300])
@pytest.mark.parametrize("block", [1, 16, 128, 300])
def test_a_prompts_names_are_vllms_block_hashes(block: int, salt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    kv_cache_utils.init_none_hash(sha256_cbor)
    rng = random.Random(block)
    prompt = [rng.choice((0, 23, 24, 255, 256, 65535, 65536, 151_643)) for _ in range(3 * block + block // 2)]
    parent, expected = None, []
    for end in range(block, len(prompt) + 1, block):
        extra = (("cache_salt", salt),) if end == block and salt else None
        parent = kv_cache_utils.hash_block_tokens(sha256_cbor, parent, prompt[end - block : end], extra)
        expected.append(cut_name(parent))
    assert prefix_names(prompt, block, salt) == expected
