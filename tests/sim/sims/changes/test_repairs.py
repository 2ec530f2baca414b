"""Simulated boxes that flap, and boxes that join while requests run."""

from p2pserve.coordinator.plan import Phase
from p2pserve.sims.scenario import BoxJoined, BoxLost, Change, PlanChange, SimSettings, Situation

from .test_replays import go, plan_of

M = Phase.MIXED


def flaps(box: str, times: int, every_s: float = 20.0) -> list[Change]:
    """The box is lost and back so many times."""
    return [
        change
        for turn in range(times)
        for change in (BoxLost(every_s * turn + 5.0, box), BoxJoined(every_s * turn + 10.0, box))
    ]


def test_a_box_that_flaps_gets_no_requests_for_a_while_and_then_as_before() -> None:
    plan = plan_of({"a": M, "b": M})
    held_s = SimSettings().damping.held_for_s(2.0)  # two faults, the first of them hardly forgotten
    soon, late = 40.0, 40.0 + 2.0 * held_s
    requests = [(soon + 0.1 * row, 20, 4) for row in range(8)] + [(late + 0.1 * row, 20, 4) for row in range(8)]
    once = go(plan, requests, boxes="ab", changes=flaps("b", 1)).services[0].decode.tolist()
    often = go(plan, requests, boxes="ab", changes=flaps("b", 2)).services[0].decode.tolist()
    assert len(set(once[:8])) == 2
    assert len(set(often[:8])) == 1
    assert len(set(often[8:])) == 2


def test_a_box_that_flaps_serves_where_no_other_does() -> None:
    plan = plan_of({"a": M})
    requests = [(60.0, 20, 4)]
    result = go(plan, requests, boxes="a", changes=flaps("a", 3))
    assert result.services[0].outcomes.completed.all()


def test_the_coordinator_is_told_who_is_held_and_when_no_longer() -> None:
    asked: list[Situation] = []

    def replan(situation: Situation) -> list[PlanChange]:
        asked.append(situation)
        return []

    plan = plan_of({"a": M, "b": M})
    go(plan, [(0.0, 20, 4)], boxes="ab", changes=flaps("b", 2), replan=replan)
    assert [(each.missing, each.held) for each in asked] == [
        ({"b"}, frozenset()),
        (frozenset(), frozenset()),
        ({"b"}, frozenset()),
        (frozenset(), {"b"}),
        (frozenset(), frozenset()),
    ]


def test_a_box_that_joins_is_used_and_disturbs_no_request_that_runs() -> None:
    before, after = plan_of({"a": M}), plan_of({"a": M, "b": M})

    def replan(situation: Situation) -> list[PlanChange]:
        return [PlanChange(situation.now, 0, after)]

    requests = [(0.5 * row, 20, 30) for row in range(4)] + [(12.0 + 0.5 * row, 20, 4) for row in range(8)]
    alone = go(before, requests[:4], boxes="ab", changes=[BoxJoined(1e6, "b")]).services[0]
    joined = go(before, requests, boxes="ab", changes=[BoxJoined(10.0, "b")], replan=replan).services[0]
    assert joined.replays.sum() == 0
    assert joined.decode[:4].tolist() == alone.decode.tolist()
    assert joined.outcomes.ttft_s[:4].tolist() == alone.outcomes.ttft_s.tolist()
    assert len(set(joined.decode[4:].tolist())) == 2
