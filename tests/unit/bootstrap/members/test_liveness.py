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
