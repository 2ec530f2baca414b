"""Who is refused, by class, expected start and deadline; and how fast a queue is taken to get shorter."""

from math import inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator.requests.admission import (
    MOST_RETRY_S,
    AdmissionSettings,
    ClassParts,
    ClassRules,
    Expected,
    PriorityClass,
    find_refusal,
)
from p2pserve.coordinator.requests.drain_rate import MEMORY_S, DrainRate

SETTINGS = AdmissionSettings()
TIMES = st.floats(min_value=0.0, allow_nan=False)


@pytest.mark.parametrize(
    ("priority", "kind"),
    [
        (0, PriorityClass.NORMAL),
        (-1, PriorityClass.URGENT),
        (-(2**63), PriorityClass.URGENT),
        (1, PriorityClass.BATCH),
        (2**63 - 1, PriorityClass.BATCH),
    ],
)
def test_the_sign_of_a_priority_is_its_class(priority: int, kind: PriorityClass) -> None:
    assert PriorityClass.of(priority) is kind


def expected(start_s: float, ttft_s: float = 1.0, left_s: float = 300.0) -> Expected:
    return Expected(start_s=start_s, prefill_s=0.0, ttft_s=ttft_s, left_s=left_s)


@pytest.mark.parametrize(
    ("kind", "ttft_s", "limit_s"),
    [
        (PriorityClass.URGENT, 1.0, 5.0),  # the least
        (PriorityClass.URGENT, 10.0, 20.0),
        (PriorityClass.NORMAL, 1.0, 30.0),
        (PriorityClass.NORMAL, 10.0, 100.0),
        (PriorityClass.NORMAL, 0.0, 30.0),  # a plan without deadlines
        (PriorityClass.BATCH, 1.0, 300.0),  # its own deadline
    ],
)
def test_a_request_waits_as_long_as_its_class_may_and_no_longer(
    kind: PriorityClass, ttft_s: float, limit_s: float
) -> None:
    assert find_refusal(kind, expected(limit_s, ttft_s), SETTINGS) is None
    refusal = find_refusal(kind, expected(limit_s + 7.0, ttft_s), SETTINGS)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(7.0)  # by then the queue is as short as the limit


def test_nobody_waits_beyond_its_own_deadline() -> None:
    for kind in PriorityClass:
        refusal = find_refusal(kind, expected(4.0, left_s=3.0), SETTINGS)
        assert refusal is not None
        assert refusal.text == "its first token would take 4 s, and its deadline is 3 s"


def test_a_limit_of_the_owner_is_that_of_normal_requests_and_urgent_ones_wait_no_longer() -> None:
    def limits(lateness: float, least_s: float) -> list[float]:
        rules = AdmissionSettings.with_limit(lateness, least_s).rules
        return [rules[kind].limit_s(4.0) for kind in PriorityClass]

    assert limits(3.0, 0.0) == [8.0, 12.0, inf]
    assert limits(1.0, 0.0) == [4.0, 4.0, inf]
    assert limits(0.0, 7.0) == [5.0, 7.0, inf]
    assert limits(0.0, 2.0) == [2.0, 2.0, inf]


def test_a_queue_that_does_not_get_on_is_told_as_such() -> None:
    refusal = find_refusal(PriorityClass.NORMAL, expected(inf), SETTINGS)
    assert refusal is not None
    assert refusal.text == "its first token would take very long, and normal requests may wait 30 s"
    assert refusal.retry_after_s == MOST_RETRY_S


def test_a_prompt_counts_and_is_not_refused_for_its_length_alone() -> None:
    long = Expected(start_s=0.0, prefill_s=1000.0, ttft_s=1.0, left_s=10.0)
    assert find_refusal(PriorityClass.URGENT, long, SETTINGS) is None
    refusal = find_refusal(PriorityClass.URGENT, long._replace(start_s=2.0), SETTINGS)
    assert refusal is not None
    assert refusal.retry_after_s == 2.0  # then nothing waits any more
    assert find_refusal(PriorityClass.URGENT, Expected(2.0, 2.5, 1.0, 300.0), SETTINGS) is None
    assert find_refusal(PriorityClass.URGENT, Expected(2.0, 3.5, 1.0, 300.0), SETTINGS) is not None


@given(TIMES, TIMES, TIMES, TIMES)
def test_who_is_more_urgent_is_not_let_wait_longer_and_times_to_retry_are_finite(
    start_s: float, prefill_s: float, ttft_s: float, left_s: float
) -> None:
    limits = [SETTINGS.rules[kind].limit_s(ttft_s) for kind in PriorityClass]
    assert limits == sorted(limits)
    for kind in PriorityClass:
        refusal = find_refusal(kind, Expected(start_s, prefill_s, ttft_s, left_s), SETTINGS)
        assert refusal is None or (isfinite(refusal.retry_after_s) and 0.0 < refusal.retry_after_s <= MOST_RETRY_S)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lateness": -1.0}, {"least_s": -1.0}, {"lateness": float("nan")}, {"queue_share": 0.0}, {"queue_share": 1.1},
        {"weight": 0.0}, {"weight": inf}, {"cost": -1.0}, {"cost": float("nan")},
    ],
)  # fmt: skip
def test_rules_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ClassRules(**{"lateness": 1.0, "least_s": 1.0, **wrong})


# ---- how fast a queue gets shorter ------------------------------------------------------------------------


def test_what_was_expected_counts_until_enough_was_seen() -> None:
    drain = DrainRate()
    assert drain.rate(0.0, 100.0) == 100.0
    drain.note(0.0, 0.0, True)
    for second in range(1, 200):
        drain.note(float(second), 10.0, True)
    assert drain.rate(200.0, 100.0) == pytest.approx(10.0, rel=0.1)


def test_a_queue_that_stands_still_drains_at_no_rate() -> None:
    drain = DrainRate()
    drain.note(0.0, 0.0, True)
    assert drain.rate(MEMORY_S, 100.0) == 0.0


def test_what_need_not_wait_says_nothing() -> None:
    drain = DrainRate()
    for second in range(1000):  # each is taken in the moment in which it comes
        drain.note(float(second), 0.0, True)
        drain.note(float(second), 500.0, False)
    assert drain.rate(1000.0, 100.0) == 100.0


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 1e6), st.booleans()), max_size=40))
def test_a_rate_is_never_negative_nor_beyond_what_was_seen_and_expected(
    events: list[tuple[float, float, bool]],
) -> None:
    drain, now, most = DrainRate(), 0.0, 0.0
    for gap_s, taken, is_waiting in events:
        now += gap_s
        most += taken
        drain.note(now, taken, is_waiting)
    assert 0.0 <= drain.rate(now, 7.0) <= 7.0 + most


# ---- parts of classes, where engines have more than enough ------------------------------------------------


def test_a_class_that_had_its_part_is_refused_while_engines_have_much_to_do_and_urgent_requests_are_not() -> None:
    busy = Expected(start_s=4.0, prefill_s=0.0, ttft_s=1.0, left_s=300.0, backlog_s=4.0, has_its_part=True)
    assert find_refusal(PriorityClass.URGENT, busy, SETTINGS) is None
    for kind in (PriorityClass.NORMAL, PriorityClass.BATCH):
        refusal = find_refusal(kind, busy, SETTINGS)
        assert refusal is not None
        assert refusal.text == f"engines take 4 s for it, and {kind.label} requests have had their part"
        assert find_refusal(kind, busy._replace(has_its_part=False), SETTINGS) is None
        assert find_refusal(kind, busy._replace(backlog_s=1.0), SETTINGS) is None


def test_parts_are_by_weight_among_those_that_ask_and_nobody_is_left_without() -> None:
    parts, given = ClassParts(SETTINGS), dict.fromkeys(PriorityClass, 0)
    for _ in range(5000):
        for kind in PriorityClass:
            parts.ask(kind)
            if not parts.has_its_part(kind):
                parts.give(kind)
                given[kind] += 1
    total = sum(given.values())
    for kind, rules in SETTINGS.rules.items():
        assert given[kind] / total == pytest.approx(rules.weight / 21.0, abs=0.03)
    alone = ClassParts(SETTINGS)
    for _ in range(1000):
        alone.ask(PriorityClass.BATCH)
        assert not alone.has_its_part(PriorityClass.BATCH)
        alone.give(PriorityClass.BATCH)
