"""Splitwise's policies: who is chosen, who is borrowed, and when it goes home."""

import numpy as np
import pytest

from p2pserve.coordinator import PolicyError
from p2pserve.coordinator.routing.interface import ReplicaLoads, RequestFacts, RoutingPolicy
from p2pserve.sims.policies.pools import SharedPool, SplitPools


class Book:
    """A policy with the live state that a simulator keeps for it."""

    def __init__(self, policy: RoutingPolicy, machines: int, kv_tokens: float = 1000.0) -> None:
        self.policy = policy
        self.kv_tokens = kv_tokens
        self.prompt_tokens = [0] * machines
        self.decodes = [0] * machines
        self.reserved = [0] * machines

    def place(self, prompt: int, output: int, *, waits: bool = False) -> tuple[int, int]:
        """The machines that a request goes to; all of them have a queue if it `waits`."""
        loads = ReplicaLoads(str(number) for number in range(len(self.decodes)))
        for number, decodes in enumerate(self.decodes):
            free = self.kv_tokens - self.reserved[number]
            loads.note(str(number), decodes, self.prompt_tokens[number], free, waiting=int(waits))
        facts = RequestFacts(prompt, output_tokens=output)
        route = self.policy.choose(facts, loads, now=0.0, rng=np.random.default_rng(0))
        decode = int(route.decode)
        prefill = decode if route.prefill is None else int(route.prefill)
        assert route.split == (prompt if prefill != decode else 0)
        self.prompt_tokens[prefill] += prompt
        self.decodes[decode] += 1
        self.reserved[decode] += prompt + output
        self.reserved[prefill] += (prompt + 1) * (prefill != decode)
        return prefill, decode


def test_one_pool_gives_to_the_fewest_tokens_pending() -> None:
    book = Book(SharedPool(), 3)
    assert [book.place(prompt, 5)[0] for prompt in (100, 30, 50)] == [0, 1, 2]
    assert book.place(30, 5) == (1, 1)
    assert book.place(1, 1)[0] == 2
    book.prompt_tokens[0] -= 100
    assert book.place(10, 5)[0] == 0
    book.prompt_tokens[0] -= 10
    # Machine 0 has two requests that decode, which count a token each; done, it ties with nobody.
    book.decodes[0] -= 2
    assert book.place(10, 5)[0] == 0


def split(kv_tokens: float = 1000.0, max_pending: int = 300) -> Book:
    """Machines 0 and 1 for prompts, 2 and 3 for decoding."""
    return Book(SplitPools([0, 1], [2, 3], max_pending=max_pending), 4, kv_tokens)


def test_prompts_go_by_queue_and_decoding_by_memory() -> None:
    book = split()
    assert book.place(200, 10) == (0, 2)
    assert book.place(100, 200) == (1, 3)
    assert book.place(50, 10) == (1, 2)
    book.prompt_tokens[0] -= 200
    book.reserved[3] -= 300
    assert book.place(50, 10) == (0, 3)


def test_a_long_queue_borrows_a_decode_machine_until_it_has_drained() -> None:
    book = split()
    book.place(250, 10, waits=True)
    book.place(260, 20, waits=True)
    # Both queues would pass 300; machine 2 and 3 each have one request to decode, and 2 was there first.
    assert book.place(100, 10, waits=True) == (2, 2)
    # Its own queue counts now, as the mixed pool's: 102 and 150 more are within the limit.
    assert book.place(150, 10, waits=True) == (2, 3)
    book.policy.on_drained(0)  # it is at home: nothing changes
    book.policy.on_drained(2)
    # Home again, behind the other: 3 now decodes what ties.
    book.reserved[2] = book.reserved[3] = 0
    book.prompt_tokens[0] -= 250
    assert book.place(10, 10, waits=True) == (0, 3)


def test_a_queue_of_just_the_limit_is_not_too_long() -> None:
    book = split()
    assert book.place(300, 10, waits=True)[0] == 0
    assert book.place(300, 10, waits=True)[0] == 1
    assert book.place(1, 10, waits=True)[0] == 2


def test_a_queue_counts_only_where_somebody_waits() -> None:
    book = split()
    assert book.place(5000, 10)[0] == 0
    book.prompt_tokens[0] -= 5000
    assert book.place(5000, 10, waits=True)[0] == 2


def test_full_memory_borrows_a_prompt_machine() -> None:
    book = split()
    assert book.place(100, 850)[1] == 2
    assert book.place(100, 850)[1] == 3
    # 950 + 50 would fill both; the prompt machines hold 101 each, and 0 was there first.
    assert book.place(10, 40) == (0, 0)
    assert book.place(10, 30)[1] == 2
    # A prompt prefers its own pool to the mixed one, however little that has to do.
    assert book.place(10, 10)[0] == 1


def test_with_nothing_left_to_borrow_all_goes_to_the_shortest_queue() -> None:
    book = Book(SplitPools([0], [1], max_pending=50), 2, kv_tokens=100.0)
    assert book.place(60, 50) == (0, 0)  # does not fit at 1; 0 is borrowed for both
    assert book.place(60, 50, waits=True) == (1, 1)  # 0's queue is too long and no prompt machine is left
    assert book.place(60, 50, waits=True) == (0, 0)  # nobody is left
    assert book.place(60, 50, waits=True) == (1, 1)


@pytest.mark.parametrize(
    ("prompt", "decode", "text"),
    [([], [1], "0 machines for prompts and 1 for"), ([0], [], "each needs at least 1"), ([0, 1], [1], "in two pools")],
)
def test_pools_that_cannot_serve(prompt: list[int], decode: list[int], text: str) -> None:
    with pytest.raises(PolicyError, match=text):
        SplitPools(prompt, decode, max_pending=1)


def test_memory_is_reserved_for_answers_whose_length_is_known() -> None:
    policy, loads = SplitPools([0], [1], max_pending=1), ReplicaLoads("ab")
    with pytest.raises(PolicyError, match="output_tokens"):
        policy.choose(RequestFacts(5), loads, now=0.0, rng=np.random.default_rng(0))
