"""Whether an answer is right, and how long a fault silenced it."""

import pytest

from p2pserve.sdk.chaos.records import LIE, AnswerRecord, TimeSpread, find_recovery_s, find_wrong, is_lie, spread_of
from p2pserve.sdk.chaos.schedule import PlannedRequest

ASKED = PlannedRequest(number=5, at_s=0.0, client=0, prompt=(1, 2), output=4)
RIGHT = (10, 11, 12, 13)


def answered(*pieces: tuple[float, tuple[int, ...]], error: str = "", ended: bool = True) -> AnswerRecord:
    record = AnswerRecord(ASKED, 1.0)
    for at, tokens in pieces:
        record.take(tokens, at)
    record.error = error
    record.ended_at = pieces[-1][0] if ended and pieces else None
    return record


def test_the_right_tokens_are_right_however_they_come() -> None:
    assert find_wrong(answered((2.0, RIGHT)), RIGHT) == ""
    assert find_wrong(answered((2.0, RIGHT[:1]), (3.0, ()), (4.0, RIGHT[1:])), RIGHT) == ""


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((10, 99, 12, 13), "request 5: token 1 is 99, should be 11"),
        ((10, 10, 11, 12), "request 5: token 1 is 10, should be 11"),  # doubled
        ((11, 12, 13), "request 5: token 0 is 11, should be 10"),  # the first was lost
        ((*RIGHT, 13), "request 5: 5 tokens, 4 were asked for"),
        (RIGHT[:3], "request 5: complete with 3 of 4 tokens"),
    ],
)
def test_any_other_tokens_are_wrong(tokens: tuple[int, ...], message: str) -> None:
    assert find_wrong(answered((2.0, tokens)), RIGHT) == message


@pytest.mark.parametrize("tokens", [(LIE,), (10, LIE, 77), (*RIGHT, LIE)])
def test_the_liars_tokens_are_told_from_those_of_an_honest_box_that_is_wrong(tokens: tuple[int, ...]) -> None:
    assert is_lie(answered((2.0, tokens)), RIGHT)
    assert not is_lie(answered((2.0, (10, 77, LIE))), RIGHT)
    assert not is_lie(answered((2.0, RIGHT[:2])), RIGHT)


def test_an_answer_that_failed_may_be_short_but_not_wrong() -> None:
    assert find_wrong(answered((2.0, RIGHT[:2]), error="no box is left"), RIGHT) == ""
    assert find_wrong(answered((2.0, (10, 12)), error="no box is left"), RIGHT) != ""


def test_an_answer_is_complete_when_it_ended_without_an_error_in_time() -> None:
    assert answered((2.0, RIGHT)).is_complete
    assert not answered((2.0, RIGHT), ended=False).is_complete
    assert not answered((2.0, RIGHT), error="x").is_complete
    late = answered((2.0, RIGHT))
    late.late = True
    assert not late.is_complete


def test_the_longest_gap_is_between_two_pieces_not_before_the_first() -> None:
    assert answered((9.0, (10,)), (9.5, (11,)), (9.75, (12, 13))).find_longest_gap_s() == 0.5
    assert answered((9.0, RIGHT)).find_longest_gap_s() == 0.0


def moved(*pieces: tuple[float, tuple[int, ...]]) -> AnswerRecord:
    record = answered(*pieces)
    record.attempts = 2
    return record


def test_recovery_is_from_the_fault_to_the_first_token_after_it() -> None:
    record = moved((2.0, (10,)), (6.0, (11,)), (6.5, RIGHT[2:]))
    assert find_recovery_s(record, [0.1, 2.25, 5.9]) == 3.75
    assert find_recovery_s(record, [1.75]) == 4.25, "tokens that were on their way came after it"


def test_recovery_of_a_request_that_waited_for_its_first_token() -> None:
    assert find_recovery_s(moved((4.0, RIGHT)), [1.5]) == 2.5


def test_nothing_recovers_that_no_fault_has_hit() -> None:
    pieces = ((2.0, (10,)), (6.0, RIGHT[1:]))
    assert find_recovery_s(answered(*pieces), [2.25]) is None
    assert find_recovery_s(moved(*pieces), [7.0]) is None
    failed = moved(*pieces)
    failed.error = "x"
    assert find_recovery_s(failed, [2.25]) is None


def test_a_request_that_another_box_went_on_with_was_moved() -> None:
    record = answered((2.0, RIGHT))
    assert not record.was_moved
    record.recovered = ("decode node was lost",)
    assert record.was_moved


def test_percentiles() -> None:
    assert spread_of([]) == TimeSpread(count=0)
    found = spread_of([float(value) for value in range(101)])
    assert found == TimeSpread(count=101, p50_s=50.0, p90_s=90.0, p99_s=99.0, worst_s=100.0)
