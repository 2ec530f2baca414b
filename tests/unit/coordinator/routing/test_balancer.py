"""Where Cronus' balancer splits a prompt, computed by hand; each correction of the paper's listing would give another
split without it."""

import msgspec
import pytest

from p2pserve.coordinator.routing.balancer import ChunkedPrefillState, ChunkLine, PrefillLine, choose_split

# 512 tokens: the candidates are all numbers from 1 to 512.
PROMPT = 512


def state(
    *, decoding: int = 0, context: int = 0, free: int = 1 << 20, block: int = 16, step: int = 256
) -> ChunkedPrefillState:
    return ChunkedPrefillState(
        decoding=decoding, context_tokens=context, free_tokens=free, block_tokens=block, step_tokens=step
    )


def prefill(token_s: float, base_s: float = 0.0) -> PrefillLine:
    return PrefillLine(token_s=token_s, base_s=base_s)


def chunk(base_s: float, prefill_s: float = 0.0, decode_s: float = 0.0) -> ChunkLine:
    return ChunkLine(prefill_context_s=prefill_s, decode_context_s=decode_s, base_s=base_s)


def test_the_part_is_taken_for_which_both_replicas_take_the_same_time() -> None:
    # 300 tokens take 3 s here; the other 212 are three chunks of at most 100 there, of a second each.
    assert choose_split(PROMPT, prefill(0.01), chunk(1.0), state(step=100)) == 300


def test_decoding_requests_take_their_tokens_from_the_chunk() -> None:
    # n_d: 28 of a step's 128 tokens are theirs. With chunks of 128 it would be 255, 2.55 s against three chunks.
    assert choose_split(PROMPT, prefill(0.01), chunk(1.0), state(step=128, decoding=28)) == 300
    assert choose_split(PROMPT, prefill(0.01), chunk(1.0), state(step=128)) == 255


def test_the_mean_context_of_chunks_begins_where_the_second_part_does() -> None:
    # One chunk, behind 300 tokens: 3 + 0.01 * 300 s, as long as 0.02 * 300. With (L_in + L_last) / 2 it would be 371.
    assert choose_split(PROMPT, prefill(0.02), chunk(3.0, 0.01), state()) == 300


def test_the_last_chunk_begins_a_chunk_before_the_end_when_it_is_full() -> None:
    # Two chunks of 106, behind 300 and 406 tokens: 2 * (2.47 + 0.01 * 353) s = 12 s = 0.04 * 300 s. If the last one
    # began at the end, as in the listing, 301 would be better: its last chunk is not full.
    assert choose_split(PROMPT, prefill(0.04), chunk(2.47, 0.01), state(step=106)) == 300


def test_the_context_that_is_decoded_beside_a_chunk_makes_it_slower() -> None:
    # L_ctxd: 1000 tokens of it cost a second a step, as much as the constant of the first test.
    assert choose_split(PROMPT, prefill(0.01), chunk(0.0, 0.0, 0.001), state(step=100, context=1000)) == 300
    assert choose_split(PROMPT, prefill(0.01), chunk(0.0, 0.0, 0.001), state(step=100, context=2000)) == 400


def test_what_a_prefill_costs_besides_its_tokens_counts() -> None:
    # 2 s and 200 tokens are 4 s; the other 312 are four chunks.
    assert choose_split(PROMPT, prefill(0.01, 2.0), chunk(1.0), state(step=100)) == 200


def test_without_blocks_for_it_all_of_the_prompt_is_computed_first() -> None:
    # 512 tokens are 32 blocks of 16; 511 free tokens are 31 whole ones.
    assert choose_split(PROMPT, prefill(0.01), chunk(1.0), state(step=100, free=511)) == 512
    assert choose_split(PROMPT, prefill(0.01), chunk(1.0), state(step=100, free=512)) == 300
    # 497 tokens are 32 blocks as well
    assert choose_split(497, prefill(0.01), chunk(1.0), state(step=100, free=511)) == 497


@pytest.mark.parametrize("decoding", [256, 300])
def test_where_decoding_requests_leave_no_token_for_a_chunk_all_of_it_is_computed_first(decoding: int) -> None:
    assert choose_split(PROMPT, prefill(10.0), chunk(0.1), state(decoding=decoding)) == 512


def test_there_are_512_candidates_rounded_up() -> None:
    # Of 5120 tokens every tenth: 0.1 s each here, one step there whatever is left: 3 s are 30 tokens, its candidate 3.
    assert choose_split(5120, prefill(0.1), chunk(3.0), state(step=5120)) == 30
    assert choose_split(5121, prefill(0.1), chunk(3.0), state(step=5121)) == 31


def test_a_prompt_shorter_than_the_candidates_has_all_of_its_parts_once() -> None:
    assert choose_split(3, prefill(1.0), chunk(2.0), state()) == 2
    assert choose_split(1, prefill(1.0), chunk(2.0), state()) == 1


def test_a_slow_replica_computes_one_token_and_a_fast_one_all() -> None:
    assert choose_split(PROMPT, prefill(100.0), chunk(0.001), state()) == 1
    assert choose_split(PROMPT, prefill(1e-9), chunk(1.0), state()) == 512


@pytest.mark.parametrize(
    "wrong",
    [{"decoding": -1}, {"block_tokens": 0}, {"block_tokens": 1 << 30}, {"step_tokens": -5}, {"free_tokens": 1 << 60}],
)
def test_figures_of_a_peer_that_cannot_be_are_not_decoded(wrong: dict[str, int]) -> None:
    told = msgspec.to_builtins(state()) | wrong
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(told, ChunkedPrefillState)
