"""Who is alive, by what members say they hear."""

import random

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.bootstrap.members.living import MAX_HEARD, decode_heard, encode_heard, find_living

A, B, C, D, E = (PeerId(name) for name in "abcde")


def test_who_is_heard_by_anybody_alive_is_alive() -> None:
    says = {A: (B,), B: (C,), C: (D,), E: (A,)}
    assert find_living([A], says, ()) == {A, B, C, D}


def test_of_a_partition_only_the_own_side_is_alive() -> None:
    says = {A: (B,), B: (A,), C: (D,), D: (C, A)}  # D still says that it hears A: but nobody here hears D
    assert find_living([B], says, ()) == {A, B}


def test_who_has_been_silent_for_too_long_is_not_kept_alive_by_others() -> None:
    says = {A: (B,), B: (C,)}
    assert find_living([A], says, {B}) == {A}
    assert find_living([A, B], says, {B}) == {A, B, C}


def test_rings_end() -> None:
    assert find_living([A], {A: (B,), B: (C,), C: (A, B)}, ()) == {A, B, C}
    assert find_living([], {A: (B,)}, ()) == set()


def test_what_is_heard_arrives_as_it_was_told_and_in_one_order() -> None:
    assert decode_heard(encode_heard([B, A])) == (A, B)
    assert encode_heard([B, A]) == encode_heard({A, B})


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgspec.msgpack.encode(["x" * 200]), msgspec.msgpack.encode(["p"] * (MAX_HEARD + 1)), b"\x91\x01"],
)
def test_what_cannot_be_heard_is_nobody(payload: bytes) -> None:
    assert decode_heard(payload) == ()


def test_a_node_with_more_neighbours_than_can_be_told_tells_of_some() -> None:
    peers = [PeerId(f"peer-{random.Random(number).getrandbits(64)}") for number in range(2 * MAX_HEARD)]
    assert len(decode_heard(encode_heard(peers))) == MAX_HEARD
