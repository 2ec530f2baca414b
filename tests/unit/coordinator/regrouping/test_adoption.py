"""When a coordinator begins with other groups by itself: seldom, for much, and never back and forth."""

from typing import Any

import pytest

from p2pserve.coordinator.plan import Regrouping
from p2pserve.coordinator.regrouping.adoption import Adoption, AdoptionSettings
from p2pserve.coordinator.regrouping.steps import RegroupProposal

from .test_steps import AB, A, B, step

SETTINGS = AdoptionSettings(look_s=10.0, looks=3, gain=0.1, dip=0.05, rest_s=100.0, most_rest_s=350.0)


def proposal(before: float = 5.0, after: float = 7.0, **changes: Any) -> RegroupProposal:
    """Of ten requests per second, so many are in time before and after."""
    way = Regrouping(steps=(step(AB, undo=(A, B)),), before=before, after=after)
    figures: dict[str, Any] = {"light": before, "meanwhile": (before,), "reload_s": (30.0,), "pays": True}
    return RegroupProposal(regrouping=way, groups=(AB,), rate=10.0, **(figures | changes))


def look(adoption: Adoption, *found: RegroupProposal | None) -> list[bool]:
    return [adoption.consider(each, 0.0) for each in found]


def test_only_a_gain_that_lasts_is_followed() -> None:
    gain = proposal()
    assert look(Adoption(SETTINGS), gain, gain, gain) == [False, False, True]
    assert look(Adoption(SETTINGS), gain, gain, None, gain, gain, gain) == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("found", "begins"),
    [
        (proposal(after=6.0), True),
        (proposal(after=5.9), False),  # less than a tenth of all requests
        (proposal(light=6.5), False),  # other phases alone give nearly as much
        (proposal(pays=False), False),
        (proposal(meanwhile=(4.75,)), True),
        (proposal(meanwhile=(5.0, 4.7)), False),  # more than a twentieth less while the second step loads
    ],
)
def test_what_is_gained_must_be_much_and_paid_for_and_cost_little_on_the_way(
    found: RegroupProposal, begins: bool
) -> None:
    assert look(Adoption(SETTINGS), found, found, found)[-1] is begins


def test_looks_are_apart_and_the_first_is_not_at_once() -> None:
    adoption = Adoption(SETTINGS)
    assert [adoption.is_due(now) for now in (5.0, 14.9, 15.0)] == [False, False, True]
    adoption.consider(None, 15.0)
    assert [adoption.is_due(now) for now in (24.9, 25.0)] == [False, True]


def test_after_one_there_is_a_rest_that_grows_with_failures() -> None:
    adoption = Adoption(SETTINGS)
    for failed, rest_s in ((False, 100.0), (True, 200.0), (True, 350.0), (False, 100.0)):
        adoption.on_ended(1000.0, failed=failed)
        assert [adoption.is_due(1000.0 + after) for after in (rest_s - 1.0, rest_s)] == [False, True]


def test_what_was_gained_before_a_rest_does_not_count_after_it() -> None:
    adoption = Adoption(SETTINGS)
    assert look(adoption, proposal(), proposal()) == [False, False]
    adoption.on_ended(0.0, failed=False)
    assert look(adoption, proposal()) == [False]
