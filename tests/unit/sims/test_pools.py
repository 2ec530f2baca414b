"""Splitwise's policies: who is chosen, who is borrowed, and when it goes home."""

import pytest

from p2pserve.sims.policies.pools import PoolError, PoolPlacement, SharedPool, SplitPools


def nobody_waits(machine: int) -> bool:
    return False


def all_wait(machine: int) -> bool:
    return True


def test_one_pool_gives_to_the_fewest_tokens_pending() -> None:
    pool = SharedPool(3)
    assert [pool.place(prompt, 5, nobody_waits).prefill for prompt in (100, 30, 50)] == [0, 1, 2]
    assert pool.place(30, 5, nobody_waits) == PoolPlacement(1, 1)
    assert pool.place(1, 1, nobody_waits).prefill == 2
    pool.prefilled(0, 100)
    assert pool.place(10, 5, nobody_waits).prefill == 0
    pool.prefilled(0, 10)
    # Machine 0 has two requests that decode, which count a token each; done, it ties with nobody.
    pool.finished(0)
    pool.finished(0)
    assert pool.place(10, 5, nobody_waits).prefill == 0


def split(kv_tokens: float = 1000.0, max_pending: int = 300) -> SplitPools:
    """Machines 0 and 1 for prompts, 2 and 3 for decoding."""
    return SplitPools([0, 1], [2, 3], kv_tokens=kv_tokens, max_pending=max_pending)


def test_prompts_go_by_queue_and_decoding_by_memory() -> None:
    pools = split()
    assert pools.place(200, 10, nobody_waits) == PoolPlacement(0, 2)
    assert pools.place(100, 200, nobody_waits) == PoolPlacement(1, 3)
    assert pools.place(50, 10, nobody_waits) == PoolPlacement(1, 2)
    pools.prefilled(0, 200)
    pools.released(3, 300)
    assert pools.place(50, 10, nobody_waits) == PoolPlacement(0, 3)


def test_a_long_queue_borrows_a_decode_machine_until_it_has_drained() -> None:
    pools = split()
    pools.place(250, 10, all_wait)
    pools.place(260, 20, all_wait)
    # Both queues would pass 300; machine 2 and 3 each have one request to decode, and 2 was there first.
    assert pools.place(100, 10, all_wait) == PoolPlacement(2, 2)
    # Its own queue counts now, as the mixed pool's: 102 and 150 more are within the limit.
    assert pools.place(150, 10, all_wait) == PoolPlacement(2, 3)
    pools.drained(0)  # it is at home: nothing changes
    pools.drained(2)
    # Home again, behind the other: 3 now decodes what ties.
    pools.released(2, 260 + 110)
    pools.released(3, 280 + 160)
    pools.prefilled(0, 250)
    assert pools.place(10, 10, all_wait) == PoolPlacement(0, 3)


def test_a_queue_counts_only_where_somebody_waits() -> None:
    pools = split()
    assert pools.place(5000, 10, nobody_waits).prefill == 0
    pools.prefilled(0, 5000)
    assert pools.place(5000, 10, all_wait).prefill == 2


def test_full_memory_borrows_a_prompt_machine() -> None:
    pools = split()
    assert pools.place(100, 850, nobody_waits).decode == 2
    assert pools.place(100, 850, nobody_waits).decode == 3
    # 950 + 50 would fill both; the prompt machines hold 101 each, and 0 was there first.
    assert pools.place(10, 40, nobody_waits) == PoolPlacement(0, 0)
    assert pools.place(10, 30, nobody_waits).decode == 2
    # A prompt prefers its own pool to the mixed one, however little that has to do.
    assert pools.place(10, 10, nobody_waits).prefill == 1


def test_with_nothing_left_to_borrow_all_goes_to_the_shortest_queue() -> None:
    pools = SplitPools([0], [1], kv_tokens=100.0, max_pending=50)
    assert pools.place(60, 50, nobody_waits) == PoolPlacement(0, 0)  # does not fit at 1; 0 is borrowed for both
    assert pools.place(60, 50, all_wait) == PoolPlacement(1, 1)  # 0's queue is too long and no prompt machine is left
    assert pools.place(60, 50, all_wait) == PoolPlacement(0, 0)  # nobody is left
    assert pools.place(60, 50, all_wait) == PoolPlacement(1, 1)


@pytest.mark.parametrize(
    ("prompt", "decode", "text"),
    [([], [1], "0 machines for prompts and 1 for"), ([0], [], "each needs at least 1"), ([0, 1], [1], "in two pools")],
)
def test_pools_that_cannot_serve(prompt: list[int], decode: list[int], text: str) -> None:
    with pytest.raises(PoolError, match=text):
        SplitPools(prompt, decode, kv_tokens=1.0, max_pending=1)
    with pytest.raises(PoolError, match="serves nobody"):
        SharedPool(0)
