"""Classes of requests in a fair queue: who goes first, how long the last may wait, and when a turn is expected."""

from collections import Counter
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator.requests.admission import DEFAULT_RULES, PriorityClass
from p2pserve.coordinator.requests.fair_queue import FairQueue, OverQuota, QueueClass, Quota, ServiceRoom
from p2pserve.coordinator.requests.retry_times import RetrySettings

AMPLE = Quota(requests=100_000, size=1 << 50, all_requests=100_000, all_size=1 << 50)
ONE = ServiceRoom(requests=1, size=inf, unstarted=inf, share=inf)
URGENT, NORMAL, BATCH = (
    QueueClass(kind, rules.weight, rules.cost, rules.queue_share) for kind, rules in DEFAULT_RULES.items()
)
WEIGHTS = sum(each.weight for each in (URGENT, NORMAL, BATCH))
Key = tuple[str, str, int]


class Turns:
    """A queue of which one request is served at a time, each in a second."""

    def __init__(self, quota: Quota = AMPLE) -> None:
        self.queue: FairQueue[Key] = FairQueue("requests", "tokens", quota, RetrySettings())
        self.now = 0.0
        self.count = 0

    def add(self, client: str, kind: QueueClass, size: int = 10) -> Key:
        self.count += 1
        key = client, PriorityClass(kind.rank).label, self.count
        self.queue.add(client, key, size, self.now, kind)
        return key

    def serve(self) -> Key:
        key = self.queue.take(ONE, self.now)
        assert key is not None
        self.now += 1.0
        self.queue.remove(key, self.now)
        self.queue.check_integrity()
        return key

    def wait_for(self, client: str, kind: QueueClass, size: int = 10) -> float:
        return self.queue.start_in_s(client, size, self.now, 10.0, kind)


def test_who_is_urgent_goes_before_what_its_client_asked_earlier() -> None:
    turns = Turns()
    for kind in (BATCH, BATCH, NORMAL, NORMAL, URGENT):
        turns.add("a", kind)
    assert turns.serve()[1] == "urgent"


def test_batch_requests_have_their_part_however_many_urgent_ones_come() -> None:
    turns = Turns()
    waiting = [turns.add("a", BATCH) for _ in range(20)]
    served: Counter[str] = Counter()
    last = 0.0
    while waiting:
        while sum(key[1] == "urgent" for key in turns.queue._entries) < 5:  # more than can be served, for ever
            turns.add("a", URGENT)
            turns.add("a", NORMAL)
        key = turns.serve()
        served[key[1]] += 1
        if key in waiting:
            assert key == waiting.pop(0)  # in their order
            assert turns.now - last <= 2 * WEIGHTS  # the bound: its weight of all turns, whoever asks
            last = turns.now
    assert served["urgent"] > 10 * served["batch"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([URGENT, NORMAL, BATCH])), max_size=60),
    st.integers(0, 3),
)
def test_a_client_that_asks_for_one_thing_at_a_time_is_served_whatever_others_ask(
    others: list[tuple[str, QueueClass]], which: int
) -> None:
    """Ten of each class of another client wait all the time; the bound does not grow with how many they are."""
    kind = [URGENT, NORMAL, BATCH, BATCH][which]
    turns = Turns()
    for client, each in others:
        turns.add(client, each)
    for each in (URGENT, NORMAL, BATCH) * 10:
        turns.add("flood", each)
    turns.serve()
    mine, begun = turns.add("mine", kind), turns.now
    while turns.serve() != mine:
        turns.add("flood", URGENT)
        assert turns.now - begun <= 8  # each of four others may go first, once as a turn is drawn and once more


def test_a_batch_client_leaves_more_to_others() -> None:
    turns = Turns()
    served: Counter[str] = Counter()
    for _ in range(200):
        turns.add("batch", BATCH)
        turns.add("normal", NORMAL)
    for _ in range(200):
        served[turns.serve()[0]] += 1
    assert served["normal"] / served["batch"] == pytest.approx(BATCH.cost, rel=0.1)


def test_the_last_part_of_a_bounded_queue_is_not_for_batch_requests() -> None:
    turns = Turns(Quota(requests=100, size=1 << 40, all_requests=10, all_size=1 << 40))
    for _ in range(5):
        turns.add("a", BATCH)
    with pytest.raises(OverQuota, match="5 requests of all clients are here"):
        turns.add("b", BATCH)
    for _ in range(5):
        turns.add("b", NORMAL)
    with pytest.raises(OverQuota, match="10 requests of all clients are here"):
        turns.add("b", URGENT)


# ---- when a turn is expected ------------------------------------------------------------------------------


def test_a_turn_is_expected_when_it_comes() -> None:
    """By the rate that was seen, and not by the one that was expected at first."""
    turns = Turns()
    for _ in range(100):
        turns.add("a", NORMAL)
    assert turns.wait_for("a", NORMAL) == pytest.approx(100.0)
    for _ in range(60):
        turns.serve()
    turns.now += 40.0  # it stands still for a while
    assert turns.wait_for("a", NORMAL) > 80.0
    assert turns.wait_for("a", URGENT) < turns.wait_for("a", BATCH) < turns.wait_for("a", NORMAL)  # of 40 before it


def test_who_comes_first_to_an_idle_gateway_does_not_wait_and_a_newcomer_not_for_all_of_a_flood() -> None:
    turns = Turns()
    assert turns.wait_for("a", BATCH) == 0.0
    for _ in range(100):
        turns.add("flood", URGENT)
    for _ in range(5):
        turns.serve()
    assert turns.wait_for("flood", URGENT) > 50.0
    assert turns.wait_for("honest", NORMAL) <= 2.0


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from([URGENT, NORMAL, BATCH]), st.integers(1, 50)), max_size=30
    ),
    st.sampled_from([URGENT, NORMAL, BATCH]),
)
def test_nothing_is_expected_to_wait_for_more_than_all_that_waits(
    waiting: list[tuple[str, QueueClass, int]], kind: QueueClass
) -> None:
    turns = Turns()
    for client, each, size in waiting:
        turns.add(client, each, size)
    assert 0.0 <= turns.wait_for("a", kind) <= sum(size for _, _, size in waiting) / 10.0 + 1e-9


def test_how_long_beginnings_take_is_seen_and_fades_while_there_are_none() -> None:
    turns = Turns()
    assert turns.queue.mean_start_s(0.0) == 0.0
    for _ in range(200):
        turns.add("a", NORMAL)
        key = turns.queue.take(ONE, turns.now)
        assert key is not None
        turns.now += 3.0
        turns.queue.start(key, turns.now)
        turns.queue.remove(key, turns.now)
    assert turns.queue.mean_start_s(turns.now) == pytest.approx(3.0, rel=0.01)
    assert turns.queue.mean_start_s(turns.now + 60.0) < 0.01
