"""What becomes of a node of several that has ended, and with which exit code the command ends."""

import pytest

from p2pserve.node.settings import NodeTuning
from p2pserve.sdk.replicas.ends import AfterEnd, NodeEnd, combine_codes, decide_after

TUNING = NodeTuning(max_failures=3)


def decide(code: int, *, was_member: bool = True, failures: int = 1, leaves: bool = False) -> AfterEnd:
    return decide_after(NodeEnd(code=code, was_member=was_member, failures=failures, leaves=leaves), TUNING)


@pytest.mark.parametrize("code", [-9, -11, 1])
def test_a_member_that_fails_is_started_again_until_that_helps_no_more(code: int) -> None:
    found = [decide(code, failures=failures) for failures in (1, 2, 3)]
    assert found == [AfterEnd.AGAIN, AfterEnd.AGAIN, AfterEnd.GIVEN_UP]


@pytest.mark.parametrize("code", [0, 130])
def test_one_that_was_told_to_leave_stays_away(code: int) -> None:
    assert decide(code) is AfterEnd.LEFT


@pytest.mark.parametrize("code", [2, 4])
def test_wrong_input_and_a_refusal_end_all(code: int) -> None:
    assert decide(code) is AfterEnd.ALL


@pytest.mark.parametrize("code", [1, 2, 4, -9])
def test_one_that_was_never_admitted_ends_all(code: int) -> None:
    assert decide(code, was_member=False) is AfterEnd.ALL


@pytest.mark.parametrize("code", [1, 2, -9])
def test_nothing_is_started_again_while_all_leave(code: int) -> None:
    assert decide(code, leaves=True) is AfterEnd.LEFT


@pytest.mark.parametrize(
    ("codes", "code"),
    [([], 0), ([0, 0], 0), ([0, 4, 0], 4), ([1, 130], 130), ([0, -9], 1), ([2, 1], 2)],
)
def test_the_command_ends_with_the_first_failure(codes: list[int], code: int) -> None:
    assert combine_codes(codes) == code
