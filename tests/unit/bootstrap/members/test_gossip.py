"""What is told to whom, and when."""

import random

import pytest

from p2pserve.bootstrap import NetworkSettings, PeerId
from p2pserve.bootstrap.members.election import CLAIM_KIND
from p2pserve.bootstrap.members.gossip import MAX_TELL_BYTES, Spread
from p2pserve.bootstrap.members.overlay import place_on_ring
from p2pserve.bootstrap.members.states import Tell
from p2pserve.bootstrap.members.table import BEAT_KIND
from p2pserve.bootstrap.streams.control import encode_body, encode_notice
from p2pserve.bootstrap.streams.frames import MAX_FRAME
from p2pserve.bootstrap.trust.entries import MAX_PAYLOAD, MEMBER_KIND, Entry, Lie
from p2pserve.bootstrap.trust.orders import MAX_ORDERS_BYTES, SignedOrders

SETTINGS = NetworkSettings()
ANN, BOB, CAT, DAN = (PeerId(name) for name in ("ann", "bob", "cat", "dan"))
CROWD = [PeerId(f"peer{number}") for number in range(30)]


def entry(origin: PeerId, kind: str = "load", version: int = 1, payload: bytes = b"") -> Entry:
    return Entry(origin, kind, 1, version, payload, bytes(64))


def spread(**hears: tuple[PeerId, ...]) -> Spread:
    heard = {PeerId(name): frozenset(map(place_on_ring, peers)) for name, peers in hears.items()}
    return Spread(random.Random(0), SETTINGS, lambda peer: heard.get(peer, frozenset()), ("plan",))


def told(messages: list[tuple[PeerId, Tell]]) -> dict[PeerId, list[Entry]]:
    found: dict[PeerId, list[Entry]] = {}
    for peer, message in messages:
        found.setdefault(peer, []).extend(message.entries)
    return found


def test_what_this_node_says_goes_out_with_the_next_messages_and_once() -> None:
    made = spread()
    made.tell((ANN, BOB), (entry(CAT),))
    assert made.wake_at() == float("-inf")
    assert told(made.take((ANN, BOB), 0.0)) == {ANN: [entry(CAT)], BOB: [entry(CAT)]}
    assert made.take((ANN, BOB), 10.0) == []
    assert made.wake_at() == float("inf")


def test_of_one_kind_only_the_latest_goes_out() -> None:
    made = spread()
    made.tell((ANN,), (entry(CAT, version=1),))
    made.tell((ANN,), (entry(CAT, version=2), entry(CAT, "links")))
    assert told(made.take((ANN,), 0.0)) == {ANN: [entry(CAT, version=2), entry(CAT, "links")]}


def test_who_hears_the_origin_itself_is_not_told_again() -> None:
    made = spread(ann=(BOB, CAT))
    made.pass_on((entry(ANN),), BOB, (BOB, CAT, DAN), (), 0.0)
    assert told(made.take((BOB, CAT, DAN), 1.0)) == {DAN: [entry(ANN)]}


def test_neither_the_sender_nor_the_origin_hears_it_back() -> None:
    made = spread()
    made.pass_on((entry(ANN),), BOB, (ANN, BOB), (), 0.0)
    assert made.take((ANN, BOB), 1.0) == []


def test_a_rumour_goes_to_a_few_after_a_moment() -> None:
    made = spread()
    made.pass_on((entry(ANN),), BOB, CROWD, (), 5.0)
    assert made.wake_at() == 5.0 + SETTINGS.rumour_s
    assert made.take(CROWD, 5.0) == []
    assert len(told(made.take(CROWD, 5.0 + SETTINGS.rumour_s))) == SETTINGS.rumour_peers


def test_signs_of_life_wait_longer_but_go_with_what_else_there_is() -> None:
    made = spread()
    made.pass_on((entry(ANN, BEAT_KIND),), BOB, CROWD, (), 5.0)
    assert made.wake_at() == 5.0 + SETTINGS.rumour_beat_s > 5.0 + SETTINGS.rumour_s
    made.pass_on((entry(CAT),), BOB, CROWD, (), 5.1)
    assert made.wake_at() == 5.1 + SETTINGS.rumour_s
    assert len(told(made.take(CROWD, made.wake_at()))) == SETTINGS.rumour_peers


def test_rumours_that_go_out_together_go_to_the_same_few() -> None:
    made = spread()
    made.pass_on([entry(ANN, f"kind{number}") for number in range(9)], BOB, CROWD, (), 5.0)
    gone = told(made.take(CROWD, 6.0))
    assert [len(entries) for entries in gone.values()] == [9] * SETTINGS.rumour_peers


@pytest.mark.parametrize("kind", [CLAIM_KIND, "plan"])
def test_who_leads_and_what_is_named_urgent_goes_to_all_at_once(kind: str) -> None:
    made = spread()
    made.pass_on((entry(ANN, kind),), BOB, CROWD, (), 5.0)
    assert set(told(made.take(CROWD, 5.0))) == set(CROWD)


def test_clients_here_hear_everything_at_once() -> None:
    made = spread(ann=(CAT,))
    made.pass_on((entry(ANN),), BOB, (), (CAT, DAN), 0.0)
    assert set(told(made.take((), 0.0))) == {CAT, DAN}


def test_much_is_told_in_pieces_and_the_last_one_completes_it() -> None:
    made = spread()
    many = [entry(CAT, f"kind{number}", payload=bytes(60_000)) for number in range(10)]
    made.tell((ANN,), many, complete=True)
    messages = [message for _, message in made.take((ANN,), 0.0)]
    assert len(messages) > 1
    assert [message.complete for message in messages] == [False] * (len(messages) - 1) + [True]
    assert [each for message in messages for each in message.entries] == many
    assert all(sum(len(each.payload) for each in message.entries) <= MAX_TELL_BYTES for message in messages)


def test_proofs_go_with_what_else_is_told() -> None:
    made = spread()
    lie = Lie(entry(ANN, payload=b"1"), entry(ANN, payload=b"2"))
    made.tell_lies((BOB,), (lie,))
    assert made.take((BOB,), 0.0) == [(BOB, Tell((), (lie,)))]


def test_many_large_proofs_go_in_messages_that_fit_a_frame() -> None:
    made = spread()
    large = bytes(MAX_PAYLOAD)
    lies = [Lie(entry(PeerId(f"liar{number}"), payload=large), entry(ANN, payload=large)) for number in range(40)]
    orders = SignedOrders(bytes(MAX_ORDERS_BYTES), bytes(64))
    made.tell((BOB,), [entry(CAT, f"kind{number}", payload=large) for number in range(9)], complete=True)
    made.tell_lies((BOB,), lies)
    made.tell_orders((BOB,), orders)
    messages = [message for _, message in made.take((BOB,), 0.0)]
    assert [lie for message in messages for lie in message.lies] == lies
    assert max(len(encode_notice("p2p.tell", encode_body(message))) for message in messages) < MAX_FRAME
    assert [message.complete for message in messages] == [False] * (len(messages) - 1) + [True]


def test_it_is_complete_only_where_that_was_said() -> None:
    made = spread()
    made.tell((ANN,), (entry(CAT),))
    made.tell((BOB,), (entry(CAT),), complete=True)
    assert {peer: message.complete for peer, message in made.take((), 0.0)} == {ANN: False, BOB: True}


def test_records_are_told_first() -> None:
    made = spread()
    made.tell((ANN,), (entry(CAT, "load"), entry(CAT, MEMBER_KIND), entry(DAN, "a"), entry(DAN, MEMBER_KIND)))
    kinds = [each.kind for _, message in made.take((), 0.0) for each in message.entries]
    assert kinds == [MEMBER_KIND, MEMBER_KIND, "load", "a"]


@pytest.mark.parametrize(("more", "pieces"), [(0, [2, 2]), (1, [1, 2, 1])])
def test_pieces_are_filled_to_the_last_byte(more: int, pieces: list[int]) -> None:
    made, half = spread(), MAX_TELL_BYTES // 2 - 200  # beside its payload an entry is reckoned as 200 bytes
    sizes = [half + more, half, half, half]
    made.tell((ANN,), [entry(CAT, f"kind{number}", payload=bytes(size)) for number, size in enumerate(sizes)])
    assert [len(message.entries) for _, message in made.take((), 0.0)] == pieces


def test_what_is_small_is_told_all_at_once() -> None:
    made = spread()
    made.tell((ANN,), [entry(CAT, f"kind{number}") for number in range(10)])
    assert [len(message.entries) for _, message in made.take((), 0.0)] == [10]
