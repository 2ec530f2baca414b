"""Who is alive: by what this node hears, and by what members say that they hear."""

import random

import pytest

from p2pserve.bootstrap import NetworkSettings, PeerId
from p2pserve.bootstrap.members.liveness import MAX_HEARD, Liveness, decode_heard, encode_heard, find_living
from p2pserve.bootstrap.members.overlay import place_on_ring

ME, A, B, C, D, E = (PeerId(name) for name in ("me", "a", "b", "c", "d", "e"))
BEAT_S = 10.0


def at(*peers: PeerId) -> frozenset[int]:
    return frozenset(map(place_on_ring, peers))


def says(**lists: tuple[PeerId, ...]) -> dict[int, frozenset[int]]:
    return {place_on_ring(PeerId(name)): at(*heard) for name, heard in lists.items()}


def test_who_is_heard_by_anybody_alive_is_alive() -> None:
    assert find_living(at(A), says(a=(B,), b=(C,), c=(D,), e=(A,)), ()) == at(A, B, C, D)


def test_of_a_partition_only_the_own_side_is_alive() -> None:
    # D still says that it hears A: but nobody here hears D.
    assert find_living(at(B), says(a=(B,), b=(A,), c=(D,), d=(C, A)), ()) == at(A, B)


def test_who_has_been_silent_for_too_long_is_not_kept_alive_by_others() -> None:
    table = says(a=(B,), b=(C,))
    assert find_living(at(A), table, at(B)) == at(A)
    assert find_living(at(A, B), table, at(B)) == at(A, B, C)


def test_rings_end() -> None:
    assert find_living(at(A), says(a=(B,), b=(C,), c=(A, B)), ()) == at(A, B, C)
    assert find_living((), says(a=(B,)), ()) == set()


def test_what_is_heard_arrives_as_it_was_told_and_in_one_order() -> None:
    assert decode_heard(encode_heard([B, A])) == at(A, B)
    assert encode_heard([B, A]) == encode_heard({A, B})


@pytest.mark.parametrize("payload", [b"", b"\xc1", bytes(7), bytes(8 * (MAX_HEARD + 1))])
def test_what_cannot_be_heard_is_nobody(payload: bytes) -> None:
    assert decode_heard(payload) == frozenset()


def test_a_node_with_more_neighbours_than_can_be_told_tells_of_some() -> None:
    peers = [PeerId(f"peer-{random.Random(number).getrandbits(64)}") for number in range(2 * MAX_HEARD)]
    assert len(decode_heard(encode_heard(peers))) == MAX_HEARD


class World:
    """One node's view, and what it is told. Every call takes the time."""

    def __init__(self) -> None:
        self.liveness = Liveness(ME, NetworkSettings())

    def open(self, *peers: PeerId, now: float = 0.0) -> "World":
        for peer in peers:
            self.liveness.on_opened(peer, now, counts=True)
        return self

    def told(self, peer: PeerId, *heard: PeerId, now: float = 0.0) -> "World":
        self.liveness.on_word(peer, now)
        self.liveness.on_hears(peer, encode_heard(heard))
        return self

    def living(self, now: float) -> set[PeerId]:
        self.liveness.update(now, BEAT_S)
        return set(self.liveness.living)


def test_a_peer_lives_for_eight_seconds_of_silence() -> None:
    world = World().open(A)
    assert world.living(7.9) == {A}
    assert world.liveness.find_silent(7.9) == ()
    assert world.liveness.find_silent(8.0) == (A,)
    world.liveness.on_heard(A, 5.0)
    assert world.living(12.9) == {A}
    assert world.living(14.0) == set()


def test_a_peer_is_suspect_after_three_seconds_of_silence() -> None:
    liveness = World().open(A).liveness
    assert [liveness.is_suspect(A, now) for now in (2.9, 3.0)] == [False, True]
    liveness.on_heard(A, 3.1)
    assert not liveness.is_suspect(A, 3.2)


def test_a_broken_session_is_given_three_seconds_to_be_dialled_anew() -> None:
    world = World().open(A)
    world.liveness.on_closed(A, 5.0, redialled=True)
    assert world.living(5.0) == {A}
    assert world.liveness.is_suspect(A, 5.0)
    assert world.liveness.redialled == {A}
    assert world.living(8.1) == set()


def test_nobody_at_the_address_ends_that_chance_at_once() -> None:
    world = World().open(A)
    world.liveness.on_closed(A, 5.0, redialled=True)
    world.liveness.on_unreachable(A)
    assert world.living(5.1) == set()


def test_an_address_where_nobody_answers_says_nothing_of_one_that_others_hear() -> None:
    world = World().open(A).told(A, B).told(B)
    world.liveness.on_unreachable(B)
    assert world.living(1.0) == {A, B}


def test_who_was_lost_here_lives_only_by_what_it_says_afterwards() -> None:
    """A liar says that it hears the dead."""
    world = World().open(A, B).told(A, B).told(B, A)
    for peer in (A, B):
        world.liveness.on_heard(peer, 5.0)
    world.liveness.on_closed(B, 5.0, redialled=False)
    assert world.living(5.0) == {A}
    world.told(B, A, now=5.5)
    assert world.living(5.6) == {A, B}, "only its link to this node is broken"


def test_a_word_from_before_the_connection_closed_does_not_count() -> None:
    world = World().open(A, B).told(A, B)
    world.told(B, A, now=4.9)
    world.liveness.on_heard(A, 5.0)
    world.liveness.on_heard(B, 5.0)
    world.liveness.on_closed(B, 5.0, redialled=False)
    assert world.living(5.0) == {A}


def test_a_silent_peer_is_in_doubt_for_a_second_and_then_dead() -> None:
    world = World().open(A, B).told(A).told(B)
    world.liveness.on_heard(A, 9.0)
    world.liveness.on_closed(B, 9.0, redialled=False)
    assert world.living(9.5) == {A, B}
    assert world.liveness.is_suspect(B, 9.5)
    assert world.liveness.find_heard(9.5) == {A}, "others are not told that it is heard"
    assert world.living(10.1) == {A}


def test_three_beats_without_a_word_and_only_hearsay_is_death() -> None:
    world = World().open(A).told(A, B).told(B)
    for second in range(0, 60, 2):
        world.liveness.on_heard(A, float(second))
    assert world.living(29.0) == {A, B}
    assert world.living(31.0) == {A}


def test_a_client_counts_for_nobody_else() -> None:
    liveness = Liveness(ME, NetworkSettings())
    liveness.on_opened(C, 0.0, counts=False)
    liveness.update(0.1, BEAT_S)
    assert liveness.living == {C}
    assert liveness.find_heard(0.1) == frozenset()
    liveness.on_closed(C, 1.0, redialled=False)
    liveness.update(1.0, BEAT_S)
    assert liveness.living == frozenset()


def test_a_session_that_neither_end_needs_ends_without_a_death() -> None:
    world = World().open(A, B).told(A, B).told(B, A)
    world.liveness.on_parted(B)
    assert world.living(1.0) == {A, B}
    assert world.liveness.find_heard(1.0) == {A}


def test_a_pause_of_this_node_blames_nobody() -> None:
    world = World().open(A)
    world.liveness.on_paused(20.0)
    assert world.liveness.find_silent(21.0) == ()
    assert world.living(21.0) == {A}


def test_pings_keep_to_their_times() -> None:
    liveness = Liveness(ME, NetworkSettings(ping_s=1.0, rtt_s=2.5))
    liveness.on_opened(A, 0.0, counts=True)  # "a" < "me": the other end pings first
    assert liveness.take_pings(0.0) == (A,)
    assert liveness.take_pings(1.2) == ()
    assert liveness.take_pings(1.5) == (A,)
    liveness.on_heard(A, 2.9)
    assert liveness.take_pings(3.6) == ()
    assert liveness.take_pings(4.0) == (A,), "for the round trip, although it was heard"


def test_what_is_forgotten_leaves_no_trace() -> None:
    world = World().open(A).told(A, B).told(B)
    assert world.living(0.0) == {A, B}
    world.liveness.forget(B)
    assert world.living(1.1) == {A}
    assert world.liveness.heard_at(B) == float("-inf")


# -- when it looks, and when the node wakes for it --------------------------------------------------------------------


def test_it_looks_at_once_when_sessions_come_and_go_and_says_whether_others_live() -> None:
    liveness = Liveness(ME, NetworkSettings())
    assert not liveness.update(0.0, BEAT_S)
    liveness.on_opened(A, 0.1, counts=True)
    assert liveness.update(0.1, BEAT_S)
    assert liveness.living == {A}
    assert not liveness.update(0.2, BEAT_S)
    liveness.on_closed(A, 0.3, redialled=False)
    assert liveness.update(0.3, BEAT_S)
    assert liveness.living == frozenset()


def test_without_news_it_looks_once_a_second() -> None:
    liveness = Liveness(ME, NetworkSettings())
    liveness.update(10.0, BEAT_S)
    assert (liveness.is_news, liveness.look_at) == (False, 11.0)
    liveness.update(10.9, BEAT_S)
    assert liveness.look_at == 11.0
    liveness.update(11.0, BEAT_S)
    assert liveness.look_at == 12.0


def test_a_word_of_somebody_that_does_not_live_is_news() -> None:
    world = World().open(A)
    world.living(0.0)
    news = []
    for who in (A, C, A):
        world.liveness.on_word(who, 0.1)
        news.append(world.liveness.is_news)
    assert news == [False, True, True]


def test_whom_others_hear_is_looked_at_the_later_the_more_there_are() -> None:
    world = World()
    for peer in (A, B, C):
        world.liveness.on_word(peer, 9.0)
    world.living(10.0)
    world.liveness.on_hears(A, encode_heard((B,)))
    assert world.liveness.look_at == pytest.approx(10.003)
    for peer in (D, E):
        world.liveness.on_word(peer, 9.0)
    world.liveness.on_hears(B, encode_heard((A,)))
    assert world.liveness.look_at == pytest.approx(10.003), "no later than it was to be"


def test_silence_begins_with_its_last_moment() -> None:
    hasty, silent = World().open(A), World().open(A)
    hasty.liveness.on_closed(A, 2.99, redialled=False)
    assert hasty.living(2.99) == set()
    silent.liveness.on_closed(A, 3.0, redialled=False)
    assert silent.living(3.99) == {A}
    assert silent.living(4.0) == set()


def test_a_chance_ends_with_its_last_moment_and_a_pause_makes_it_longer() -> None:
    for paused_s in (0.0, 10.0):
        world = World().open(A)
        world.liveness.on_closed(A, 5.0, redialled=True)
        world.liveness.on_paused(paused_s)
        assert world.living(7.99 + paused_s) == {A}
        assert world.living(8.0 + paused_s) == set()


def test_a_pause_makes_the_time_longer_within_which_others_have_to_say_something() -> None:
    for paused_s in (0.0, 10.0):
        world = World().open(A).told(A, B).told(B)
        world.liveness.on_paused(paused_s)
        world.liveness.on_heard(A, 29.9 + paused_s)
        assert world.living(29.9 + paused_s) == {A, B}
        world.liveness.is_news = True
        assert world.living(30.0 + paused_s) == {A}


def test_it_is_heard_of_by_its_session_or_by_its_word() -> None:
    liveness = World().open(A, now=3.0).liveness
    assert liveness.heard_at(A) == 3.0
    liveness.on_word(A, 2.0)
    assert liveness.heard_at(A) == 3.0
    liveness.on_word(A, 5.0)
    assert liveness.heard_at(A) == 5.0
    liveness.on_heard(A, 4.0)
    assert liveness.heard_at(A) == 5.0
    liveness.on_heard(B, 6.0)  # without a session: it closed a moment ago
    assert liveness.heard_at(B) == float("-inf")


@pytest.mark.parametrize(("peer", "wait_s"), [(A, 1.5), (PeerId("z"), 1.0)])
def test_the_lower_peer_id_pings_first_and_with_others_whose_turn_is_soon(peer: PeerId, wait_s: float) -> None:
    liveness = Liveness(ME, NetworkSettings(ping_s=1.0, rtt_s=100.0))
    liveness.on_opened(peer, 0.0, counts=True)
    assert liveness.take_pings(0.0) == (peer,)
    assert liveness.take_pings(wait_s - 0.26) == ()
    assert liveness.take_pings(wait_s - 0.25) == (peer,)


def test_the_node_wakes_for_what_is_due_first() -> None:
    liveness = Liveness(ME, NetworkSettings(ping_s=100.0, rtt_s=100.0, dead_s=8.0, suspect_s=3.0, redial_s=3.0))
    liveness.on_opened(A, 0.0, counts=True)
    liveness.take_pings(0.0)
    liveness.update(5.0, BEAT_S)
    assert liveness.wake_at() == 6.0, "to look"
    liveness.update(7.5, BEAT_S)
    assert liveness.wake_at() == 8.0, "to hang up on the silent"
    liveness.on_heard(A, 7.5)
    liveness.on_closed(A, 7.6, redialled=True)
    liveness.update(10.2, BEAT_S)
    assert liveness.wake_at() == pytest.approx(10.6), "to give up on who was lost"
    liveness.on_opened(B, 10.3, counts=True)
    liveness.take_pings(10.3)
    liveness.on_closed(B, 13.4, redialled=False)
    liveness.update(14.0, BEAT_S)
    assert liveness.wake_at() == pytest.approx(14.4), "to give up on who was silent"


def test_the_node_wakes_to_ping() -> None:
    liveness = Liveness(ME, NetworkSettings(ping_s=1.0, rtt_s=100.0))
    liveness.on_opened(PeerId("z"), 0.0, counts=True)
    liveness.take_pings(0.0)
    liveness.update(0.9, BEAT_S)
    assert liveness.wake_at() == 1.0
