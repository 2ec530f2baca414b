"""What the engines of a service run at once, all together."""

import pytest

from p2pserve.coordinator.requests.engine_room import EngineRoom, sum_rooms


def engine(*, prefills: bool = True, decodes: bool = True, **told: float) -> EngineRoom:
    figures = {"stages": 1, "places": 10, "kv_tokens": 1000, "prefill_tokens_s": 100.0, "waiting_tokens": 0, **told}
    return EngineRoom(prefills=prefills, decodes=decodes, **figures)  # type: ignore[arg-type]


def test_each_phase_counts_for_what_it_does() -> None:
    engines = [
        engine(decodes=False, prefill_tokens_s=400.0),
        engine(prefills=False, places=5),
        engine(stages=2, places=3, prefill_tokens_s=50.0),
    ]
    room = sum_rooms(engines, queued_s=0.5, share=7.0)
    assert (room.requests, room.size, room.share) == (8, 2000, 7.0)
    assert (room.replicas, room.mixed) == (3, 1)
    assert (room.rate, room.unstarted) == (450.0, 225.0)


@pytest.mark.parametrize("phase", ["prefills", "decodes"])
def test_where_a_phase_is_missing_the_others_do_it(phase: str) -> None:
    room = sum_rooms([engine(**{phase: False}), engine(**{phase: False})], queued_s=1.0, share=1.0)
    assert (room.requests, room.size, room.replicas, room.rate) == (20, 2000, 2, 200.0)


def test_requests_that_may_run_on_any_replica_have_room_on_all() -> None:
    """Prompts hold up answers on all of them."""
    engines = [engine(decodes=False), engine(prefills=False, stages=2, prefill_tokens_s=300.0, waiting_tokens=30)]
    by_plan = sum_rooms(engines, queued_s=1.0, share=1.0)
    room = sum_rooms(engines, queued_s=1.0, share=1.0, mixes_phases=True)
    assert (by_plan.rate, by_plan.replicas) == (100.0, 1)
    assert (by_plan.requests, by_plan.size, by_plan.mixed) == (10, 1000, 0)
    assert room == by_plan._replace(
        requests=20, size=2000, mixed=2, rate=400.0, unstarted=400.0, most_unstarted=3200.0, replicas=3
    )


@pytest.mark.parametrize(("ttft_s", "most"), [(0.0, 800.0), (100.0, 800.0), (12.0, 300.0), (1.0, 100.0)])
def test_with_a_deadline_phases_are_the_plans_and_no_more_of_it_waits_at_engines_than_a_part(
    ttft_s: float, most: float
) -> None:
    engines = [engine(decodes=False), engine(prefills=False)]
    room = sum_rooms(engines, queued_s=1.0, share=1.0, ttft_s=ttft_s, mixes_phases=True)
    count = 1 if ttft_s else 2
    assert (room.replicas, room.requests, room.unstarted) == (count, 10 * count, 100.0 * count)
    assert room.most_unstarted == most * count


def test_places_that_one_replica_lacks_are_not_taken_from_another_and_one_is_always_left() -> None:
    assert sum_rooms([engine(places=-50), engine(places=4)], queued_s=1.0, share=1.0).requests == 4
    assert sum_rooms([engine(places=-50)], queued_s=1.0, share=1.0).requests == 1


def test_the_backlog_is_that_of_the_replica_that_is_free_first_of_those_whose_speed_is_known() -> None:
    engines = [engine(waiting_tokens=300), engine(waiting_tokens=800, prefill_tokens_s=400.0)]
    assert sum_rooms(engines, queued_s=1.0, share=1.0).backlog_s == 2.0
    unknown = engine(waiting_tokens=1, prefill_tokens_s=0.0)
    assert sum_rooms([*engines, unknown], queued_s=1.0, share=1.0).backlog_s == 2.0
    assert sum_rooms([unknown], queued_s=1.0, share=1.0).backlog_s == 0.0


def test_several_gateways_let_no_more_wait_at_engines_together_than_one() -> None:
    def most_of(gateways: float) -> float:
        return sum_rooms([engine()], queued_s=1.0, share=1.0, gateways=gateways).most_unstarted

    assert (most_of(0.0), most_of(1.0), most_of(4.0)) == (800.0, 800.0, 200.0)
    assert most_of(100.0) == 100.0, "what each may have there in any case"
