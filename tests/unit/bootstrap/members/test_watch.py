"""When a peer that is awaited counts as hung, and when no more."""

from p2pserve.bootstrap import NetworkSettings, PeerId
from p2pserve.bootstrap.members.watch import AnswerWatch

A, B = PeerId("a"), PeerId("b")
SETTINGS = NetworkSettings(watch_ping_s=0.5, hung_s=1.5)


def awaiting(*peers: PeerId) -> AnswerWatch:
    watch = AnswerWatch(SETTINGS)
    assert watch.expect("test", peers)
    return watch


def tick(
    watch: AnswerWatch,
    now: float,
    heard: dict[PeerId, float],
    slowest: dict[PeerId, float] | None = None,
    unanswered: dict[PeerId, float] | None = None,
) -> tuple[PeerId, ...]:
    return watch.tick(now, heard, slowest or {}, unanswered or {})


def test_one_that_goes_on_talking_is_not_even_pinged() -> None:
    watch = awaiting(A)
    for tenth in range(100):
        assert tick(watch, tenth / 10, {A: tenth / 10 - 0.2}) == ()
    assert watch.hung == frozenset()


def test_silence_is_asked_about_once_and_then_it_is_hung() -> None:
    watch = awaiting(A)
    assert tick(watch, 0.4, {A: 0.0}) == ()
    assert watch.wake_at == 0.5
    assert tick(watch, 0.5, {A: 0.0}) == (A,)
    assert watch.wake_at == 2.0
    assert tick(watch, 1.99, {A: 0.0}) == ()
    assert watch.hung == frozenset()
    assert tick(watch, 2.0, {A: 0.0}) == ()
    assert watch.hung == {A}


def test_an_answer_clears_it_before_and_after() -> None:
    watch = awaiting(A)
    tick(watch, 0.5, {A: 0.0})
    tick(watch, 1.9, {A: 1.8})
    assert watch.wake_at == 2.3
    assert tick(watch, 2.3, {A: 1.8}) == (A,)
    tick(watch, 3.8, {A: 1.8})
    assert watch.hung == {A}
    tick(watch, 4.0, {A: 3.9})
    assert watch.hung == frozenset()


def test_one_that_was_silent_before_it_is_awaited_is_asked_first() -> None:
    watch = awaiting(A)
    assert tick(watch, 100.0, {A: 0.0}) == (A,)
    tick(watch, 101.4, {A: 0.0})
    assert watch.hung == frozenset()


def test_one_that_has_been_slow_lately_is_given_more_time() -> None:
    watch = awaiting(A, B)
    heard = {A: 0.0, B: 0.0}
    tick(watch, 0.5, heard, {A: 0.4})
    tick(watch, 2.0, heard, {A: 0.4})
    assert watch.hung == {B}
    tick(watch, 2.8, heard, {A: 0.4})
    assert watch.hung == {A, B}


def test_without_a_session_it_is_waited_for_as_long() -> None:
    watch = awaiting(A)
    assert tick(watch, 10.0, {}) == ()
    tick(watch, 11.4, {})
    assert watch.hung == frozenset()
    tick(watch, 11.5, {})
    assert watch.hung == {A}
    tick(watch, 12.0, {A: 11.9})
    assert watch.hung == frozenset()


def test_a_closed_session_is_no_answer() -> None:
    watch = awaiting(A)
    tick(watch, 0.5, {A: 0.0})
    tick(watch, 2.0, {A: 0.0})
    tick(watch, 8.0, {})
    assert watch.hung == {A}


def test_a_node_that_got_no_time_itself_blames_nobody() -> None:
    watch = awaiting(A)
    tick(watch, 0.5, {A: 0.0})
    tick(watch, 9.0, {A: 0.0})  # it wanted to be woken at 2.0
    assert watch.hung == frozenset()
    assert watch.wake_at == 9.5
    tick(watch, 9.5, {A: 0.0})
    assert watch.hung == {A}


def test_nobody_is_watched_who_is_not_awaited() -> None:
    watch = awaiting(A)
    tick(watch, 0.5, {A: 0.0})
    assert not watch.expect("test", ())
    assert tick(watch, 3.0, {A: 0.0}) == ()
    assert (watch.hung, watch.wake_at) == (frozenset(), float("inf"))


def test_one_that_hangs_is_known_to_until_it_answers_though_nobody_waits_for_it_any_more() -> None:
    watch = awaiting(A)
    tick(watch, 0.5, {A: 0.0})
    tick(watch, 2.0, {A: 0.0})
    watch.expect("test", ())
    tick(watch, 50.0, {A: 0.0})
    assert watch.hung == {A}
    tick(watch, 70.0, {})  # and is gone
    assert watch.hung == frozenset()


def test_each_waiter_has_its_own() -> None:
    watch = awaiting(A)
    assert watch.expect("other", (B,))
    assert not watch.expect("other", (B,))
    watch.expect("test", ())
    tick(watch, 0.5, {A: 0.0, B: 0.0})
    tick(watch, 2.0, {A: 0.0, B: 0.0})
    assert watch.hung == {B}


def test_one_that_has_not_answered_an_earlier_ping_is_hung_soon() -> None:
    watch = awaiting(A)
    tick(watch, 10.0, {A: 8.0}, {}, {A: 9.3})
    assert watch.wake_at == 10.8
    tick(watch, 10.8, {A: 8.0}, {}, {A: 9.3})
    assert watch.hung == {A}


def test_but_never_at_once() -> None:
    watch = awaiting(A)
    tick(watch, 100.0, {A: 8.0}, {}, {A: 9.3})
    assert watch.hung == frozenset()
    assert watch.wake_at == 100.5


def is_idle(watch: AnswerWatch) -> bool:
    """As it is now: the type checker takes a property for a constant."""
    return watch.is_idle


def test_there_is_nothing_to_look_at_while_nobody_is_awaited_or_hung() -> None:
    watch = AnswerWatch(SETTINGS)
    assert is_idle(watch)
    watch.expect("test", (A,))
    assert not is_idle(watch)
    tick(watch, 0.4, {A: 0.0})
    watch.expect("test", ())
    assert not is_idle(watch), "what it waited for is to be forgotten first"
    tick(watch, 0.5, {A: 0.0})
    assert is_idle(watch)
    watch.expect("test", (A,))
    tick(watch, 0.6, {A: 0.0})
    tick(watch, 2.1, {A: 0.0})
    watch.expect("test", ())
    tick(watch, 2.2, {A: 0.0})
    assert watch.hung == {A}
    assert not is_idle(watch)
    tick(watch, 2.3, {A: 2.25})
    assert is_idle(watch)
