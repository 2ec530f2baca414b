"""What a run of chaos does, as drawn from its seed, and whom a fault hits."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from p2pserve.sdk.chaos.schedule import (
    CALM_S,
    COMBINATIONS,
    FLAPS,
    MOST_AWAY,
    RELAY_COMBINATIONS,
    ROOT_COMBINATIONS,
    STOPPED_S,
    WAN,
    BoxRoles,
    ChaosSchedule,
    ChaosSettings,
    FaultKind,
    PlannedFault,
    VictimRole,
    check_settings,
    choose_victims,
    draw_schedule,
)
from p2pserve.sdk.errors import UsageError

SETTINGS = ChaosSettings(seed=7, faults=3 * len(COMBINATIONS), requests=100, seconds=300.0, clients=3)
BOXES = [
    BoxRoles(number=0, roles=frozenset({VictimRole.BOOTSTRAP})),
    BoxRoles(number=1, roles=frozenset({VictimRole.DECODE, VictimRole.GATEWAY})),
    BoxRoles(number=2, roles=frozenset({VictimRole.PREFILL, VictimRole.COORDINATOR})),
    BoxRoles(number=3, roles=frozenset({VictimRole.DECODE}), is_kept=True),
]


def draw(**changed: Any) -> ChaosSchedule:
    return draw_schedule(msgspec.structs.replace(SETTINGS, **changed), lambda rng: (rng.randrange(9), 1))


def fault(kind: FaultKind, victim: VictimRole, pick: float = 0.0) -> PlannedFault:
    return PlannedFault(number=0, at_s=0.0, kind=kind, victim=victim, lasts_s=1.0, pick=pick)


def test_a_seed_is_a_schedule() -> None:
    assert draw() == draw()
    other = draw(seed=8)
    assert other.faults != draw().faults
    assert other.requests != draw().requests


def test_every_combination_comes_as_often_as_any_other() -> None:
    found = Counter((each.kind, each.victim) for each in draw().faults)
    assert found == dict.fromkeys(COMBINATIONS, 3)
    everything = (*COMBINATIONS, *ROOT_COMBINATIONS)
    found = Counter((each.kind, each.victim) for each in draw(links=WAN, faults=2 * len(everything)).faults)
    assert found == dict.fromkeys(everything, 2)
    some = (*COMBINATIONS, *RELAY_COMBINATIONS)
    found = Counter((each.kind, each.victim) for each in draw(closed=1, faults=len(some)).faults)
    assert found == dict.fromkeys(some, 1)


def test_faults_and_requests_come_in_their_order_and_within_the_run() -> None:
    drawn = draw()
    faults, requests = [each.at_s for each in drawn.faults], [each.at_s for each in drawn.requests]
    assert faults == sorted(faults)
    assert requests == sorted(requests)
    assert faults[0] >= CALM_S
    assert max(faults[-1], requests[-1]) < SETTINGS.seconds


def test_requests_are_within_their_bounds_and_of_all_clients() -> None:
    requests = draw().requests
    assert len({each.prompt for each in requests}) > 1
    assert all(SETTINGS.output // 2 <= each.output <= SETTINGS.output for each in requests)
    assert {each.client for each in requests} == {0, 1, 2}


def test_a_box_that_flaps_is_killed_several_times_and_one_that_is_stopped_is_noticed_or_not() -> None:
    faults = draw().faults
    flaps = [each for each in faults if each.kind is FaultKind.FLAP]
    assert {len(each.pauses_s) for each in flaps} == {FLAPS - 1}
    assert {each.lasts_s for each in faults if each.kind is FaultKind.STOP} == set(STOPPED_S)


@pytest.mark.parametrize(
    ("victim", "expected"),
    [
        (VictimRole.BOOTSTRAP, [0]),
        (VictimRole.GATEWAY, [1]),
        (VictimRole.COORDINATOR, [2]),
        (VictimRole.PREFILL, [2]),
        (VictimRole.DECODE, [1]),
        (VictimRole.KV_ENDS, [2, 1]),
    ],
)
def test_a_fault_hits_whoever_has_the_role(victim: VictimRole, expected: list[int]) -> None:
    assert choose_victims(fault(FaultKind.KILL, victim), BOXES, room=2) == expected


def test_where_nobody_has_the_role_another_box_is_hit() -> None:
    assert choose_victims(fault(FaultKind.STOP, VictimRole.GATEWAY), BOXES[2:], room=1) == [2]
    assert choose_victims(fault(FaultKind.KILL_ENGINE, VictimRole.PREFILL), BOXES[:2], room=1) == [1], "it has one"


def test_a_fault_of_the_bootstrap_waits_for_it() -> None:
    assert choose_victims(fault(FaultKind.KILL, VictimRole.BOOTSTRAP), BOXES[1:], room=2) == []


def test_the_network_is_split_into_halves_by_the_seed_and_only_while_nothing_else_is_wrong() -> None:
    halves = [choose_victims(fault(FaultKind.SPLIT, VictimRole.HALF, pick / 8), BOXES, MOST_AWAY) for pick in range(8)]
    assert all(len(set(half)) == 2 for half in halves)
    assert len({frozenset(half) for half in halves}) > 1
    assert halves[3] == choose_victims(fault(FaultKind.SPLIT, VictimRole.HALF, 3 / 8), BOXES, MOST_AWAY)
    assert choose_victims(fault(FaultKind.SPLIT, VictimRole.HALF), BOXES, MOST_AWAY - 1) == []


def test_a_fault_waits_while_too_many_boxes_are_away() -> None:
    assert choose_victims(fault(FaultKind.KILL, VictimRole.ANY), BOXES, room=0) == []
    assert choose_victims(fault(FaultKind.KILL, VictimRole.KV_ENDS), BOXES, room=1) == []


def test_the_box_that_is_kept_is_stopped_but_does_not_end() -> None:
    numbers = {
        kind: {
            number for pick in range(8) for number in choose_victims(fault(kind, VictimRole.ANY, pick / 8), BOXES, 1)
        }
        for kind in (FaultKind.KILL, FaultKind.LEAVE, FaultKind.FLAP, FaultKind.STOP)
    }
    assert numbers.pop(FaultKind.STOP) == {0, 1, 2, 3}
    assert all(each == {0, 1, 2} for each in numbers.values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"faults": -1}, "faults: -1 is less than 0"),
        ({"boxes": 3}, "boxes: 3 is less than 4"),
        ({"boxes": 99}, "boxes: 99 are more than 16, which one machine does not carry"),
        ({"links": "adsl"}, "links: 'adsl' is neither loopback nor wan"),
        ({"engine": "tgi"}, "engine: 'tgi' is neither emulated nor vllm"),
        ({"closed": 5}, "closed: 5 is not between 0 and 4: two must be dialled"),
        ({"seconds": 2.0}, "seconds: 2 is not between 3 and 86400"),
        ({"seconds": float("nan")}, "seconds: nan is not between 3 and 86400"),
        ({"deadline_s": 0.0}, "deadline_s: 0 is not between 1 and 3600"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_settings(ChaosSettings(**changed))
