"""One Splitwise machine by hand: when its runs end, what waits, and what memory is for."""

import pytest

from p2pserve.sims.splitwise.machine import AS_RELEASED, Machine, MachineLimits, MachineTask
from p2pserve.sims.splitwise.setups import SetupError

MAX_REQUESTS, MAX_TOKENS = AS_RELEASED.requests, AS_RELEASED.tokens


class Times:
    """A second, a hundredth for each prompt token, a tenth for each request that decodes."""

    def iteration_s(self, prompt_tokens: int, decodes: int) -> float:
        return 1.0 + 0.01 * prompt_tokens + 0.1 * decodes


def machine(kv_capacity: float = 1e9, **limits: int) -> Machine:
    return Machine(Times(), kv_capacity, MachineLimits(**limits))


def prompt(request: int, tokens: int, arrival: float = 0.0) -> MachineTask:
    return MachineTask(request, arrival, prompt=tokens)


def decode(request: int, steps: int, arrival: float = 0.0) -> MachineTask:
    return MachineTask(request, arrival, steps=steps)


def test_memory_is_given_up_to_the_last_token_and_no_further() -> None:
    one = machine(100)
    assert one.reserve(60)
    assert not one.reserve(41)
    assert one.reserve(40)
    one.release(1)
    assert not one.reserve(2)
    assert one.reserve(1)
    assert "100 KV tokens reserved" in repr(one)


def test_a_task_says_what_it_is_and_takes() -> None:
    first, rest = prompt(3, 50), decode(4, 9)
    assert (repr(first), first.tokens, first.kv_tokens) == ("<prefill of request 3>", 50, 51)
    assert (repr(rest), rest.tokens, rest.kv_tokens) == ("<decode of request 4>", 1, 9)


def test_a_prompt_runs_one_iteration_and_its_decode_all_of_its_steps() -> None:
    one = machine()
    assert one.arrive(prompt(0, 50), 2.0) == pytest.approx(3.5)
    assert one.arrive(decode(0, 4), 2.0, follows=True) is None, "a decode waits for its own prefill"
    assert [task.request for task in one.end_run()] == [0]
    assert one.waits
    assert one.start(3.5) == pytest.approx(3.5 + 4 * 1.1)
    (done,) = one.end_run()
    assert not done.is_prompt
    assert one.is_drained
    assert one.start(8.0) is None
    assert one.busy_s == pytest.approx(1.5 + 4.4)
    assert one.decode_request_s == pytest.approx(4.4)


@pytest.mark.parametrize(("at", "boundary"), [(0.0, 1.1), (1.0, 1.1), (1.2, 2.2), (10.5, 11.0)])
def test_an_arrival_ends_a_run_of_decodes_at_its_next_boundary(at: float, boundary: float) -> None:
    one = machine()
    assert one.arrive(decode(0, 10), 0.0) == pytest.approx(11.0)
    assert one.arrive(prompt(1, 50, at), at) == pytest.approx(boundary)
    assert one.arrive(prompt(2, 50, at), at) is None, "it is cut already"
    assert (one.end_run() == []) is (boundary < 11.0)


def test_what_a_cut_run_has_not_done_is_still_to_do() -> None:
    one = machine()
    one.arrive(decode(0, 10), 0.0)
    assert one.arrive(prompt(1, 50, 2.5), 2.5) == pytest.approx(3.3)
    assert one.end_run() == []
    mixed = one.start(3.3)
    assert mixed == pytest.approx(3.3 + 1.0 + 0.5 + 0.1), "the prompt beside the decode"
    assert [task.request for task in one.end_run()] == [1]
    assert one.start(5.0) == pytest.approx(5.0 + 6 * 1.1), "three steps before, one beside the prompt"


def test_the_first_of_several_decodes_to_end_ends_the_run() -> None:
    one = machine()
    one.arrive(decode(0, 7), 0.0)
    one.arrive(decode(1, 3), 0.0)
    assert one.end_run() == []
    assert one.start(1.1) == pytest.approx(1.1 + 3 * 1.2)
    assert [task.request for task in one.end_run()] == [1]
    assert one.start(5.0) == pytest.approx(5.0 + 3 * 1.1), "seven less one alone and three together"


def test_a_run_of_a_prompt_is_never_cut() -> None:
    one = machine()
    one.arrive(prompt(0, 50), 0.0)
    assert one.arrive(prompt(1, 50, 0.2), 0.2) is None
    assert one.waits
    assert one.look_again(0.3) is None


@pytest.mark.parametrize(("second", "together"), [(MAX_TOKENS - 50, True), (MAX_TOKENS - 49, False)])
def test_prompts_share_a_batch_up_to_its_tokens(second: int, together: bool) -> None:
    one = machine()
    one.arrive(prompt(0, 10), 0.0)
    one.arrive(prompt(1, 50, 0.1), 0.1)
    one.arrive(prompt(2, second, 0.2), 0.2)
    one.end_run()
    one.start(1.1)
    assert [task.request for task in one.end_run()] == ([1, 2] if together else [1])
    assert one.waits is not together


def test_a_prompt_longer_than_a_batch_runs_alone() -> None:
    one = machine()
    assert one.arrive(prompt(0, MAX_TOKENS + 500), 0.0) == pytest.approx(1.0 + 0.01 * (MAX_TOKENS + 500))
    one.arrive(prompt(1, 1, 0.1), 0.1)
    assert [task.request for task in one.end_run()] == [0]


@pytest.mark.parametrize(("tokens", "together"), [(100, [1, 2]), (99, [1])])
def test_how_many_tokens_of_prompts_share_a_batch_is_a_setting(tokens: int, together: list[int]) -> None:
    one = machine(tokens=tokens)
    one.arrive(prompt(0, 10), 0.0)
    one.arrive(prompt(1, 50, 0.1), 0.1)
    one.arrive(prompt(2, 50, 0.2), 0.2)
    one.end_run()
    one.start(1.1)
    assert [task.request for task in one.end_run()] == together


@pytest.mark.parametrize("preemptions", [1, 2, 4])
def test_prompts_pass_a_decode_over_so_often_and_no_more(preemptions: int) -> None:
    """Prompts that fill a batch come without end; the decode runs when its turn is due, beside none of them."""
    one = machine(tokens=100, preemptions=preemptions)
    one.arrive(decode(0, 3), 0.0)
    for request in range(1, 9):
        one.arrive(prompt(request, 100, 0.1), 0.1)
    passed_over, done = -1, one.end_run()
    while all(task.is_prompt for task in done):
        passed_over += 1
        one.start(2.0 * passed_over + 2.0)
        done = one.end_run()
    assert passed_over == preemptions


def test_seconds_are_counted_by_the_tokens_of_a_batch() -> None:
    one = machine()
    one.arrive(prompt(0, 50), 0.0)
    one.arrive(decode(0, 4), 0.0, follows=True)
    one.end_run()
    one.start(1.5)
    one.end_run()
    assert one.tokens_s == {50: pytest.approx(1.5), 1: pytest.approx(4.4)}
    assert sum(one.tokens_s.values()) == pytest.approx(one.busy_s)


@pytest.mark.parametrize("name", ["requests", "tokens", "preemptions"])
def test_limits_below_one_are_refused(name: str) -> None:
    with pytest.raises(SetupError, match=f"{name} of a batch: 0; it must be at least 1"):
        MachineLimits(**{name: 0})


def test_a_batch_has_so_many_requests_at_most() -> None:
    one = machine()
    one.arrive(decode(0, 5), 0.0)
    for request in range(1, MAX_REQUESTS + 1):
        one.arrive(decode(request, 5, 0.001 * request), 0.001 * request)
    one.end_run()
    assert one.start(1.1) == pytest.approx(1.1 + 4 * (1.0 + 0.1 * MAX_REQUESTS))
    assert one.waits
    assert one.arrive(decode(999, 5, 1.2), 1.2) is None, "there is no place for another"
    assert one.look_again(1.3) is None


def test_a_prompt_may_still_join_where_decodes_can_be_put_aside() -> None:
    one = machine()
    one.arrive(decode(0, 50), 0.0)
    one.arrive(prompt(1, 100, 0.1), 0.1)
    one.end_run()
    one.start(1.1)
    one.end_run()
    one.start(3.2)
    assert one.arrive(prompt(2, MAX_TOKENS, 3.3), 3.3) is not None, "a whole batch of prompt, the decode aside"
    one.end_run()
    one.start(4.3)
    assert [task.request for task in one.end_run()] == [2]
    assert one.start(30.0) == pytest.approx(30.0 + 47 * 1.1), "it goes on where it was, with its memory"


def test_what_finds_no_memory_waits_until_some_is_released() -> None:
    one = machine(100)
    assert one.reserve(80)
    assert one.arrive(prompt(0, 20), 0.0) is None, "it takes 21"
    assert one.look_again(1.0) is None
    one.release(1)
    assert one.look_again(2.0) == pytest.approx(3.2)
    assert not one.waits
    assert one.look_again(2.5) is None, "nothing else waits"


def test_a_later_prompt_does_not_pass_one_that_finds_no_memory() -> None:
    one = machine(100)
    one.arrive(decode(0, 50), 0.0)
    one.arrive(prompt(1, 80, 0.1), 0.1)
    one.arrive(prompt(2, 10, 0.2), 0.2)
    one.end_run()
    one.start(1.1)
    assert one.waits
    assert "1 tasks run, 2 wait, 50 KV tokens" in repr(one)


def test_the_oldest_request_goes_first() -> None:
    one = machine(65)
    one.arrive(prompt(9, 10, 0.0), 0.0)
    late, early = decode(1, 50, 0.5), decode(2, 50, 0.25)
    one.arrive(late, 0.6)
    one.arrive(early, 0.7)
    assert [task.request for task in one.end_run()] == [9]
    one.release(11)
    one.start(1.1)
    while not (done := one.end_run()):
        one.start(2.0)
    assert [task.request for task in done] == [2]
