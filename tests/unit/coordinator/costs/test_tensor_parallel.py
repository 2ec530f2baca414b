"""Section 3 of Xiong et al. by hand, and each correction of its print."""

from __future__ import annotations

import pytest

from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.costs.tensor_parallel import (
    GIB,
    EngineMemory,
    RequestLengths,
    ThroughputError,
    estimate_degrees,
    estimate_instance_tokens_s,
    group_into_batches,
)
from p2pserve.coordinator.profile import PhaseCost, ReplicaProfile

LLAMA = model_shape("llama3-8b")
REQUESTS = [RequestLengths(100, 20), RequestLengths(60, 40), RequestLengths(50, 10)]


def profile(kv_tokens: int, factor: float = 1.0) -> ReplicaProfile:
    """2 s for each request that is prefilled, 1 s for each decode step, whatever is in it."""
    return ReplicaProfile(
        prefill=PhaseCost(request_s=2.0 * factor), decode=PhaseCost(step_s=factor), kv_tokens=kv_tokens
    )


def test_what_the_engine_takes_is_taken_on_each_gpu() -> None:
    memory = EngineMemory(share=0.5, engine_gib=1.0)
    for degree in (2, 4):
        room = degree * (32.0 * 0.5 - 1.0) * GIB - LLAMA.weight_bytes
        assert memory.kv_tokens(LLAMA, 32.0, degree) == int(room // LLAMA.kv_bytes_per_token)
    # not 2 * 16 - 1 GiB
    printed = (2 * 16.0 - 1.0) * GIB - LLAMA.weight_bytes
    assert memory.kv_tokens(LLAMA, 32.0, 2) < int(printed // LLAMA.kv_bytes_per_token)


def test_a_tokens_kv_is_that_of_the_kv_heads() -> None:
    assert LLAMA.kv_bytes_per_token == 2 * 32 * (8 * 128) * 2  # 2 l h bytes with h = 1,024, not 4,096
    with_all_heads = 2 * LLAMA.layers * LLAMA.hidden * 2
    assert with_all_heads == 4 * LLAMA.kv_bytes_per_token
    room = 32.0 * 0.9 - 2.0
    expected = int((room * GIB - LLAMA.weight_bytes) // LLAMA.kv_bytes_per_token)
    assert EngineMemory().kv_tokens(LLAMA, 32.0, 1) == expected


def test_weights_that_do_not_fit_leave_no_room() -> None:
    assert EngineMemory().kv_tokens(LLAMA, 16.0, 1) == 0


def test_batches_are_as_big_as_the_kv_cache_holds_with_the_longest_answer_of_each() -> None:
    # 100 + 20; with the second 160 + 2 * 40 = 240; with the third 210 + 3 * 40 = 330
    for kv_tokens, sizes in ((330, [3]), (329, [2, 1]), (240, [2, 1]), (239, [1, 2]), (189, [1, 1, 1])):
        assert [len(batch) for batch in group_into_batches(REQUESTS, kv_tokens)] == sizes
    # each request is in one batch, in order: as printed, the loop would take the second for its own again and again
    assert [each for batch in group_into_batches(REQUESTS, 240) for each in batch] == REQUESTS


def test_a_batch_takes_its_longest_prompt_and_answer() -> None:
    tokens = 100 + 20 + 60 + 40 + 50 + 10
    # a batch of 3: 3 * 2 s and 40 steps; batches of 2 and 1: 2 * 2 s and 40 steps, 2 s and 10 steps
    assert estimate_instance_tokens_s(profile(330), REQUESTS) == pytest.approx(tokens / (6 + 40))
    assert estimate_instance_tokens_s(profile(240), REQUESTS) == pytest.approx(tokens / (4 + 40 + 2 + 10))


def test_the_system_has_as_many_instances_as_the_degree_lets_it() -> None:
    """`TP_s u / t`: twice the degree is half the instances; as printed, t times TP_s, it would be twice as good."""
    profiles = {1: profile(330), 2: profile(660), 4: profile(1320, 0.1)}
    found = estimate_degrees(4, (1, 2, 3, 4, 8), REQUESTS, profiles.__getitem__)
    alone = estimate_instance_tokens_s(profile(330), REQUESTS)
    assert [each[:3] for each in found] == [(4, 1, 1320), (1, 4, 330), (2, 2, 660)]
    assert [each.tokens_s for each in found] == pytest.approx([10 * alone, 4 * alone, 2 * alone])


def test_a_degree_needs_room_for_the_longest_prompt_with_the_longest_answer() -> None:
    profiles = {1: profile(139), 2: profile(140)}
    assert [each.degree for each in estimate_degrees(2, (1, 2), REQUESTS, profiles.__getitem__)] == [2]
    with pytest.raises(ThroughputError, match="on 2 GPUs no degree leaves room for 140 tokens of KV"):
        estimate_degrees(2, (1,), REQUESTS, profiles.__getitem__)


def test_what_has_no_throughput_is_said() -> None:
    with pytest.raises(ThroughputError, match="a request of 100 and 20 tokens does not fit 119 tokens of KV"):
        estimate_instance_tokens_s(profile(119), REQUESTS)
    for requests, factor in (([], 1.0), (REQUESTS, 0.0)):
        with pytest.raises(ThroughputError, match="there is no throughput"):
            estimate_instance_tokens_s(profile(330, factor), requests)
