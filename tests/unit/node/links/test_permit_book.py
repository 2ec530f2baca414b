"""Permits of a relay: who has how many, and which go."""

import random

from p2pserve.bootstrap import PeerId
from p2pserve.node.links.permit_book import PermitBook

A, B, C = (PeerId(name) for name in "abc")


def target(number: int) -> PeerId:
    return PeerId(f"target {number}")


def test_of_one_pair_the_two_latest_are_kept() -> None:
    book = PermitBook(total=100, each=50)
    assert book.add(A, B, b"1", 10.0, 0.0) == ()
    assert book.add(A, B, b"2", 10.0, 0.0) == ()
    assert book.add(A, B, b"3", 10.0, 0.0) == (b"1",)
    assert book.add(C, B, b"4", 10.0, 0.0) == ()
    assert len(book) == 3


def test_of_one_asker_the_oldest_goes() -> None:
    book = PermitBook(total=100, each=3)
    for number in range(3):
        assert book.add(A, target(number), bytes([number]), 10.0, 0.0) == ()
    assert book.add(A, target(3), b"x", 10.0, 0.0) == (bytes([0]),)


def test_of_all_one_of_the_asker_that_has_the_most_goes() -> None:
    book = PermitBook(total=4, each=3)
    book.add(B, target(0), b"b", 10.0, 0.0)
    for number in range(3):
        book.add(A, target(number), bytes([number]), 10.0, 0.0)
    assert book.add(C, target(0), b"c", 10.0, 0.0) == (bytes([0]),)
    assert len(book) == 4


def test_what_has_expired_makes_room() -> None:
    book = PermitBook(total=1, each=1)
    book.add(A, B, b"1", 10.0, 0.0)
    assert book.add(C, B, b"2", 20.0, 10.0) == (b"1",), "its connections are to end"
    assert len(book) == 1


def test_those_of_and_to_others_than_members_go() -> None:
    book = PermitBook(total=9, each=9)
    book.add(A, B, b"1", 10.0, 0.0)
    book.add(A, C, b"2", 10.0, 0.0)
    book.add(C, B, b"3", 10.0, 0.0)
    assert set(book.keep({A, B})) == {b"2", b"3"}
    assert len(book) == 1


def test_whoever_asks_how_often_it_is_bounded_and_what_is_out_is_known() -> None:
    rng = random.Random(7)
    book, out = PermitBook(total=20, each=6), set[bytes]()
    for number in range(3000):
        permit = number.to_bytes(4, "big")
        revoked = book.add(
            PeerId(rng.choice("abcdefgh")), target(rng.randrange(9)), permit, number + 50.0, float(number)
        )
        assert set(revoked) <= out
        assert {each for each in out if int.from_bytes(each, "big") + 50 <= number} <= set(revoked)
        out = out - set(revoked) | {permit}
        assert len(book) == len(out) <= 20
