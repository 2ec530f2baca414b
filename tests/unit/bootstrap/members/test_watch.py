"""When a peer that is awaited counts as hung, and when no more."""

from p2pserve.bootstrap import NetworkSettings, PeerId
from p2pserve.bootstrap.members.watch import Watch

A, B = PeerId("a"), PeerId("b")
SETTINGS = NetworkSettings(watch_ping_s=0.5, hung_s=1.5)


def awaiting(*peers: PeerId) -> Watch:
    watch = Watch(SETTINGS)
    assert watch.expect("test", peers)
    return watch


def test_one_that_goes_on_talking_is_not_even_pinged() -> None:
    watch = awaiting(A)
    for tenth in range(100):
        assert watch.tick(tenth / 10, {A: tenth / 10 - 0.2}, {}) == ()
    assert watch.hung == frozenset()


def test_silence_is_asked_about_once_and_then_it_is_hung() -> None:
    watch = awaiting(A)
    assert watch.tick(0.4, {A: 0.0}, {}) == ()
    assert watch.wake_at == 0.5
    assert watch.tick(0.5, {A: 0.0}, {}) == (A,)
    assert watch.wake_at == 2.0
    assert watch.tick(1.99, {A: 0.0}, {}) == ()
    assert watch.hung == frozenset()
    assert watch.tick(2.0, {A: 0.0}, {}) == ()
    assert watch.hung == {A}


def test_an_answer_clears_it_before_and_after() -> None:
    watch = awaiting(A)
    watch.tick(0.5, {A: 0.0}, {})
    watch.tick(1.9, {A: 1.8}, {})
    assert watch.wake_at == 2.3
    assert watch.tick(2.3, {A: 1.8}, {}) == (A,)
    watch.tick(3.8, {A: 1.8}, {})
    assert watch.hung == {A}
    watch.tick(4.0, {A: 3.9}, {})
    assert watch.hung == frozenset()


def test_one_that_was_silent_before_it_is_awaited_is_asked_first() -> None:
    watch = awaiting(A)
    assert watch.tick(100.0, {A: 0.0}, {}) == (A,)
    watch.tick(101.4, {A: 0.0}, {})
    assert watch.hung == frozenset()


def test_one_that_has_been_slow_lately_is_given_more_time() -> None:
    watch = awaiting(A, B)
    heard = {A: 0.0, B: 0.0}
    watch.tick(0.5, heard, {A: 0.4})
    watch.tick(2.0, heard, {A: 0.4})
    assert watch.hung == {B}
    watch.tick(2.8, heard, {A: 0.4})
    assert watch.hung == {A, B}


def test_without_a_session_it_is_waited_for_as_long() -> None:
    watch = awaiting(A)
    assert watch.tick(10.0, {}, {}) == ()
    watch.tick(11.4, {}, {})
    assert watch.hung == frozenset()
    watch.tick(11.5, {}, {})
    assert watch.hung == {A}
    watch.tick(12.0, {A: 11.9}, {})
    assert watch.hung == frozenset()


def test_a_closed_session_is_no_answer() -> None:
    watch = awaiting(A)
    watch.tick(0.5, {A: 0.0}, {})
    watch.tick(2.0, {A: 0.0}, {})
    watch.tick(8.0, {}, {})
    assert watch.hung == {A}


def test_a_node_that_got_no_time_itself_blames_nobody() -> None:
    watch = awaiting(A)
    watch.tick(0.5, {A: 0.0}, {})
    watch.tick(9.0, {A: 0.0}, {})  # it wanted to be woken at 2.0
    assert watch.hung == frozenset()
    assert watch.wake_at == 9.5
    watch.tick(9.5, {A: 0.0}, {})
    assert watch.hung == {A}


def test_nobody_is_watched_who_is_not_awaited() -> None:
    watch = awaiting(A)
    watch.tick(0.5, {A: 0.0}, {})
    assert not watch.expect("test", ())
    assert watch.tick(3.0, {A: 0.0}, {}) == ()
    assert (watch.hung, watch.wake_at) == (frozenset(), float("inf"))


def test_one_that_hangs_is_known_to_until_it_answers_though_nobody_waits_for_it_any_more() -> None:
    watch = awaiting(A)
    watch.tick(0.5, {A: 0.0}, {})
    watch.tick(2.0, {A: 0.0}, {})
    watch.expect("test", ())
    watch.tick(50.0, {A: 0.0}, {})
    assert watch.hung == {A}
    watch.tick(70.0, {}, {})  # and is gone
    assert watch.hung == frozenset()


def test_each_waiter_has_its_own() -> None:
    watch = awaiting(A)
    assert watch.expect("other", (B,))
    assert not watch.expect("other", (B,))
    watch.expect("test", ())
    watch.tick(0.5, {A: 0.0, B: 0.0}, {})
    watch.tick(2.0, {A: 0.0, B: 0.0}, {})
    assert watch.hung == {B}
