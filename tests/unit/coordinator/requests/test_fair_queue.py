"""Whose turn it is: quotas, shares, fairness by tokens, and pauses, over every sequence of requests that is tried."""

from contextlib import suppress
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator.requests.fair_queue import MAX_IDLE, FairQueue, OverQuota, Quota, ServiceRoom
from p2pserve.coordinator.requests.retry_times import RetrySettings

RETRY = RetrySettings(gap_s=0.1, memory_s=10.0, least_s=0.2, most_s=30.0)
AMPLE = Quota(requests=10_000, size=1 << 40, all_requests=100_000, all_size=1 << 40)
ONE_AT_A_TIME = ServiceRoom(requests=1, size=inf, unstarted=inf, share=inf)


class Key(NamedTuple):
    client: str
    number: int


def queue_of(quota: Quota = AMPLE) -> FairQueue[Key]:
    return FairQueue("requests", "tokens", quota, RETRY)


def room_of(
    requests: int = 64, size: float = inf, unstarted: float = inf, share: float = inf, **more: float
) -> ServiceRoom:
    return ServiceRoom(requests, size, unstarted, share, **more)  # type: ignore[arg-type]


def fill(queue: FairQueue[Key], client: str, count: int, size: int = 10, now: float = 0.0) -> None:
    for number in range(count):
        queue.add(client, Key(client, number), size, now)


def take_all(queue: FairQueue[Key], room: ServiceRoom, now: float = 0.0) -> list[Key]:
    taken = []
    while (key := queue.take(room, now)) is not None:
        taken.append(key)
    return taken


# ---- quotas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "taken", "complaint"),
    [
        (
            Quota(requests=3, size=100, all_requests=9, all_size=900),
            3,
            "this client has 3 requests here, the most of one",
        ),
        (
            Quota(requests=9, size=25, all_requests=9, all_size=900),
            2,
            "this client's requests have 20 tokens here, and one client's may have 25",
        ),
        (Quota(requests=9, size=900, all_requests=2, all_size=900), 2, "2 requests of all clients are here"),
        (
            Quota(requests=9, size=900, all_requests=9, all_size=25),
            2,
            "the requests of all clients have 20 tokens here, and may have 25",
        ),
    ],
)
def test_what_is_over_a_quota_is_refused_with_the_reason_and_a_time(quota: Quota, taken: int, complaint: str) -> None:
    queue = queue_of(quota)
    fill(queue, "a", taken)
    with pytest.raises(OverQuota) as caught:
        queue.add("a", Key("a", 99), 10, 0.0)
    assert str(caught.value).startswith(f"busy: {complaint}")
    assert str(caught.value).endswith("; try again in 0.2 s")
    assert caught.value.retry_after_s == 0.2
    assert len(queue) == taken
    queue.check_integrity()
    queue.remove(Key("a", 0), 1.0)
    queue.add("a", Key("a", 99), 10, 1.0)  # in its place


def test_one_clients_quota_is_not_anothers() -> None:
    queue = queue_of(Quota(requests=1, size=10, all_requests=9, all_size=900))
    fill(queue, "a", 1)
    fill(queue, "b", 1)
    with pytest.raises(OverQuota):
        queue.check("a", 1, 0.0)


def test_a_limit_itself_is_allowed_and_a_client_that_has_nothing_may_bring_more_than_its_size() -> None:
    queue = queue_of(Quota(requests=2, size=10, all_requests=9, all_size=30))
    queue.add("a", Key("a", 1), 4, 0.0)
    queue.add("a", Key("a", 2), 6, 0.0)
    queue.add("b", Key("b", 1), 20, 0.0)
    with pytest.raises(OverQuota, match="of all clients"):
        queue.add("c", Key("c", 1), 1, 0.0)
    alone = queue_of(Quota(requests=2, size=10, all_requests=9, all_size=30))
    alone.add("a", Key("a", 1), 1000, 0.0)


def test_the_size_of_an_answer_counts() -> None:
    queue = queue_of(Quota(requests=9, size=100, all_requests=9, all_size=900))
    fill(queue, "a", 1)
    assert queue.take(room_of(), 0.0) == Key("a", 0)
    queue.grow(Key("a", 0), 80, 160.0)
    queue.check("a", 10, 0.0)
    with pytest.raises(OverQuota, match="have 90 tokens here, and one client's may have 100"):
        queue.check("a", 11, 0.0)


def test_what_is_told_follows_how_fast_places_become_free() -> None:
    """Each that is refused is told of another place: at ten a second, the hundredth is free in ten seconds."""
    queue = queue_of(Quota(requests=200, size=1 << 40, all_requests=900, all_size=1 << 40))
    fill(queue, "a", 200)
    for number in range(100):
        queue.remove(Key("a", number), 0.1 * number)
    for number in range(100):
        queue.add("a", Key("a", number), 1, 10.0)
    told = []
    for _ in range(100):
        with pytest.raises(OverQuota) as caught:
            queue.check("a", 1, 10.0)
        told.append(caught.value.retry_after_s)
    assert told == sorted(told)
    assert told[0] == 0.2
    assert 10.0 < told[-1] < 20.0  # of ten seconds' memory, a third has been forgotten


# ---- turns ------------------------------------------------------------------------------------------------


def test_a_client_is_served_in_the_order_of_its_requests() -> None:
    queue = queue_of()
    fill(queue, "a", 5)
    assert [key.number for key in take_all(queue, room_of())] == [0, 1, 2, 3, 4]


def test_who_comes_next_is_served_next_however_long_the_queue_of_another_is() -> None:
    queue = queue_of()
    fill(queue, "hog", 5000)
    for _ in range(50):
        queue.remove(_taken(queue), 0.0)
    fill(queue, "honest", 1)
    assert "honest" in {_taken_and_gone(queue).client for _ in range(2)}


def _taken(queue: FairQueue[Key], room: ServiceRoom = ONE_AT_A_TIME) -> Key:
    key = queue.take(room, 0.0)
    assert key is not None
    return key


def _taken_and_gone(queue: FairQueue[Key]) -> Key:
    key = _taken(queue)
    queue.remove(key, 0.0)
    return key


def test_idling_saves_nothing_up() -> None:
    """Who pauses while others are served has the same part as they afterwards, and not what it left to them before."""
    queue = queue_of()
    fill(queue, "a", 200)
    fill(queue, "b", 1)
    for _ in range(100):
        _taken_and_gone(queue)
    for number in range(1, 100):
        queue.add("b", Key("b", number), 10, 0.0)
    turns = [_taken_and_gone(queue).client for _ in range(20)]
    assert turns.count("b") in (10, 11)


def test_what_a_client_had_beyond_its_share_is_remembered_while_others_wait() -> None:
    """It cannot begin anew by letting its requests end: the answer that it had counts."""
    queue = queue_of()
    fill(queue, "b", 100)
    fill(queue, "a", 1)
    two = room_of(requests=2)
    assert {_taken(queue, two).client, _taken(queue, two).client} == {"a", "b"}
    queue.grow(Key("a", 0), 50, 100.0)
    queue.remove(Key("a", 0), 0.0)
    queue.add("a", Key("a", 1), 10, 0.0)
    turns = [queue.take(room_of(requests=50), 0.0) for _ in range(12)]
    assert [key.client for key in turns if key is not None] == ["b"] * 11 + ["a"]


@given(st.integers(1, 40), st.integers(1, 40))
def test_turns_are_in_inverse_proportion_to_what_they_cost(small: int, large: int) -> None:
    queue = queue_of()
    fill(queue, "small", 400, small)
    fill(queue, "large", 400, large)
    cost = {"small": 0, "large": 0}
    for _ in range(200):
        cost[_taken_and_gone(queue).client] += 1
    assert abs(cost["small"] * small - cost["large"] * large) <= small + large


def test_tokens_of_answers_count_for_what_they_cost() -> None:
    queue = queue_of()
    fill(queue, "talks", 400)
    fill(queue, "listens", 400)
    turns = {"talks": 0, "listens": 0}
    for _ in range(120):
        key = _taken(queue)
        turns[key.client] += 1
        if key.client == "talks":
            queue.grow(key, 10, 20.0)  # with its prompt of 10, a turn costs three times as much
        queue.remove(key, 0.0)
    assert turns["listens"] == pytest.approx(3 * turns["talks"], abs=3)


Arrivals = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50), st.integers(0, 30)), max_size=120)


@given(Arrivals, st.integers(1, 6))
def test_of_two_that_wait_neither_is_given_more_than_the_other_by_more_than_is_in_service(
    arrivals: list[tuple[str, int, int]], places: int
) -> None:
    """Whatever else comes and goes: the bound of the virtual token counter, for two clients that always wait."""
    queue = queue_of()
    fill(queue, "x", 200, 20)
    fill(queue, "y", 200, 33)
    given_ = {"x": 0.0, "y": 0.0}
    served: list[Key] = []
    for number, (client, size, answer) in enumerate(arrivals):
        queue.add(client, Key(client, number), size, 0.0)
        while (key := queue.take(room_of(requests=places), 0.0)) is not None:
            served.append(key)
            if key.client in given_:
                given_[key.client] += 20 if key.client == "x" else 33
        ended = served.pop(0)
        queue.grow(ended, answer, 2.0 * answer)
        if ended.client in given_:
            given_[ended.client] += 2.0 * answer
        queue.remove(ended, 0.0)
        queue.check_integrity()
        most = 50 + 2.0 * 30
        assert abs(given_["x"] - given_["y"]) <= 2 * places * most


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 50))
def test_nobody_starves(hogs: list[int], size: int) -> None:
    """Before it, each of the others is given what it asks for itself at most, and the rest of a turn."""
    queue = queue_of()
    for number, each in enumerate(hogs):
        fill(queue, f"hog{number}", 500, each)
    for _ in range(37):
        _taken_and_gone(queue)
    fill(queue, "honest", 1, size)
    before = {f"hog{number}": 0 for number in range(len(hogs))}
    while (key := _taken_and_gone(queue)).client != "honest":
        before[key.client] += 1
    assert all(before[f"hog{number}"] * each <= 2 * max(hogs) for number, each in enumerate(hogs))


def test_small_requests_do_not_take_the_room_that_a_large_one_waits_for() -> None:
    queue = queue_of()
    room = room_of(size=100)
    fill(queue, "small", 100, 10)
    assert len(take_all(queue, room)) == 10
    fill(queue, "large", 1, 95)
    for number in range(9):
        queue.remove(Key("small", number), 0.0)
        assert take_all(queue, room) == []
    queue.remove(Key("small", 9), 0.0)
    assert take_all(queue, room) == [Key("large", 0)]


def test_an_empty_room_takes_a_request_of_any_size() -> None:
    queue = queue_of()
    fill(queue, "a", 2, 1000)
    assert take_all(queue, room_of(size=10, unstarted=1, share=1.0)) == [Key("a", 0)]
    queue.remove(Key("a", 0), 0.0)
    assert take_all(queue, room_of(size=10, unstarted=1, share=1.0)) == [Key("a", 1)]


# ---- shares of the room -----------------------------------------------------------------------------------


def test_a_client_that_is_alone_leaves_a_part_of_the_room_to_who_comes_next() -> None:
    queue = queue_of()
    fill(queue, "hog", 100)
    assert len(take_all(queue, room_of(requests=64, share=7.0))) == 56
    fill(queue, "b", 10)
    fill(queue, "c", 10)
    assert {key.client for key in take_all(queue, room_of(requests=64, share=7.0))} == {"b", "c"}


def test_the_same_goes_for_its_size() -> None:
    queue = queue_of()
    fill(queue, "hog", 100, 10)
    assert len(take_all(queue, room_of(size=640, share=7.0))) == 56
    fill(queue, "b", 1, 80)
    assert take_all(queue, room_of(size=640, share=7.0)) == [Key("b", 0)]


@given(st.integers(1, 10), st.integers(2, 50), st.integers(1, 5))
def test_whoever_comes_finds_a_place_while_one_is_free(clients: int, places: int, share: int) -> None:
    queue = queue_of()
    room = room_of(requests=places, share=float(share))
    free = places
    for number in range(clients):
        fill(queue, f"c{number}", 60)
        taken = take_all(queue, room)
        assert not free or f"c{number}" in {key.client for key in taken}
        free -= len(taken)
        assert free >= 0
    queue.check_integrity()


# ---- beginnings -------------------------------------------------------------------------------------------


def test_no_more_begins_at_once_than_there_is_time_for() -> None:
    queue = queue_of()
    room = room_of(unstarted=35)
    fill(queue, "a", 10)
    assert take_all(queue, room) == [Key("a", 0), Key("a", 1), Key("a", 2)]
    queue.start(Key("a", 1), 0.0)
    assert take_all(queue, room) == [Key("a", 3)]
    queue.start(Key("a", 1), 0.0)  # told again
    assert take_all(queue, room) == []
    queue.remove(Key("a", 0), 0.0)
    assert take_all(queue, room) == [Key("a", 4)]
    queue.check_integrity()


def test_who_has_nothing_there_does_not_wait_until_others_have_begun() -> None:
    queue = queue_of()
    room = room_of(unstarted=35)
    fill(queue, "hog", 10)
    take_all(queue, room)
    fill(queue, "b", 2, 100)
    assert take_all(queue, room) == [Key("b", 0)]


def test_each_replica_has_one_request_of_any_size_and_the_next_when_little_should_be_left_of_it() -> None:
    queue = queue_of()
    room = room_of(unstarted=35, replicas=3, rate=10.0)
    fill(queue, "a", 20, 100)
    assert len(take_all(queue, room)) == 3
    assert take_all(queue, room, 26.4) == []  # of 300, 36 should be left
    assert take_all(queue, room, 26.5) == [Key("a", 3)]
    assert take_all(queue, room, 30.0) == []
    assert take_all(queue, room, 36.5) == [Key("a", 4)]
    assert take_all(queue, room, 46.5) == [Key("a", 5)]
    assert take_all(queue, room, 1000.0) == []  # two for each
    queue.start(Key("a", 3), 1000.0)
    assert take_all(queue, room, 1000.0) == [Key("a", 6)]
    queue.remove(Key("a", 0), 1000.0)
    assert take_all(queue, room, 1000.0) == []


def test_what_has_started_is_not_left() -> None:
    queue = queue_of()
    room = room_of(unstarted=35, replicas=2, rate=1.0)
    fill(queue, "a", 20, 30)
    queue.add("b", Key("b", 0), 100, 0.0)
    assert take_all(queue, room) == [Key("a", 0), Key("b", 0)]
    queue.start(Key("b", 0), 1.0)
    assert take_all(queue, room, 1.0) == [Key("a", 1)]
    assert take_all(queue, room, 24.9) == []
    assert take_all(queue, room, 25.0) == [Key("a", 2)]


def served_beside(others: int, room: ServiceRoom) -> FairQueue[Key]:
    """A client with two prompts there, of which the first took from 0 to 4 s, perhaps beside another's requests."""
    queue = queue_of()
    fill(queue, "other", others, 1)
    for key in take_all(queue, room):
        queue.start(key, 0.0)
    fill(queue, "hog", 5)
    assert take_all(queue, room) == [Key("hog", 0), Key("hog", 1)]
    queue.start(Key("hog", 0), 4.0)
    return queue


@pytest.mark.parametrize(
    ("mixed", "replicas", "others", "pause"),
    [(1, 1, 1, 4.0), (1, 1, 2, 4.0), (0, 1, 1, 0.0), (4, 4, 1, 1.0), (4, 4, 3, 3.0), (2, 4, 3, 2.0)],
)
def test_while_others_are_served_a_prompt_is_followed_by_a_pause(
    mixed: int, replicas: int, others: int, pause: float
) -> None:
    """As long as the prompt took, where all replicas decode for others; else by the part of them that may."""
    queue = queue_of()
    room = room_of(unstarted=9, mixed=mixed, replicas=replicas)
    fill(queue, "other", others, 1)
    for key in take_all(queue, room):
        queue.start(key, 0.0)
    fill(queue, "hog", 5 * replicas)
    first = take_all(queue, room)
    assert len(first) == replicas
    queue.start(first[0], 4.0)
    if pause:
        assert take_all(queue, room, 3.99 + pause) == []
    assert len(take_all(queue, room, 4.0 + pause)) == 1


def test_a_client_that_is_alone_makes_no_pauses() -> None:
    room = room_of(unstarted=10, mixed=1)
    assert take_all(served_beside(0, room), room, 4.0) == [Key("hog", 2)]


def test_a_pause_ends_with_what_it_was_made_for() -> None:
    room = room_of(unstarted=10, mixed=1)
    queue = served_beside(1, room)
    assert take_all(queue, room, 4.5) == []
    queue.remove(Key("other", 0), 4.5)
    assert take_all(queue, room, 4.5) == [Key("hog", 2)]


# ---- everything -------------------------------------------------------------------------------------------


Steps = st.lists(
    st.tuples(st.sampled_from(["add", "take", "start", "grow", "remove"]), st.integers(0, 7), st.integers(1, 30)),
    max_size=200,
)


@given(Steps)
def test_sums_and_quotas_hold_after_any_steps(steps: list[tuple[str, int, int]]) -> None:
    quota = Quota(requests=4, size=60, all_requests=9, all_size=120)
    queue = queue_of(quota)
    room = room_of(requests=3, size=70, unstarted=40, share=2.0, mixed=1)
    here: list[Key] = []
    for now, (what, which, size) in enumerate(steps):
        key = here[which % len(here)] if here else None
        if what == "add":
            new = Key("abc"[which % 3], now)
            own = [each for each in here if each.client == new.client]
            if len(own) == quota.requests or len(here) == quota.all_requests:
                with pytest.raises(OverQuota):
                    queue.add(new.client, new, size, now)
            else:
                with suppress(OverQuota):  # by its size
                    queue.add(new.client, new, size, now)
                    here.append(new)
        elif what == "take":
            taken = queue.take(room, now)
            served = [each for each in here if queue.is_served(each)]
            assert taken is None or taken in served
            assert len(served) <= room.requests
            # Requests that may be served are: the room is empty only where nobody waits.
            assert served or not here
        elif key is None:
            continue
        elif what == "remove":
            queue.remove(key, now)
            here.remove(key)
        elif queue.is_served(key):
            queue.start(key, now) if what == "start" else queue.grow(key, size, 2.0 * size)
        queue.check_integrity()
        assert len(queue) == len(here)


def test_a_queue_remembers_few_clients_that_are_gone() -> None:
    queue = queue_of()
    fill(queue, "z", 1)
    room = room_of(requests=10_000)
    for number in range(2 * MAX_IDLE):
        client = f"c{number}"
        fill(queue, client, 1)
        take_all(queue, room)
        queue.grow(Key(client, 0), 1, 1000.0 + number)
        queue.remove(Key(client, 0), 0.0)
        queue.check_integrity()
    assert "1 clients" in repr(queue)
