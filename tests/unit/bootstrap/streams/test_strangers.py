"""Which undecided connection is closed when there are too many."""

import random
from collections import Counter

import pytest

from p2pserve.bootstrap.streams.strangers import Origin, StrangerLimits, Strangers, source_of

A, B, C, MEMBER, OTHER_MEMBER = Origin("a"), Origin("b"), Origin("c"), Origin("m", True), Origin("n", True)


def strangers_of(total: int = 6, each: int = 6, for_members: int = 0, spared_s: float = 0.0) -> Strangers[str]:
    return Strangers(StrangerLimits(total=total, each=each, for_members=for_members, spared_s=spared_s))


def come(strangers: Strangers[str], *names: str, origin: Origin = A, now: float = 0.0) -> list[str | None]:
    """Each in turn; who had to go for them."""
    return [strangers.add(name, origin, now) for name in names]


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),  # a listener for both versions says it this way
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("64:ff9b::c000:207", "192.0.2.7"),
        ("2002:c000:207::1", "192.0.2.7"),
        ("", ""),
        ("a name", "a name"),
    ],
)
def test_what_counts_as_one_address(host: str, source: str) -> None:
    assert source_of(host) == source


def test_nobody_goes_while_there_is_room() -> None:
    strangers = strangers_of()
    assert come(strangers, "1", "2", "3", "4", "5", "6") == [None] * 6
    strangers.remove("3")
    strangers.remove("3")
    strangers.remove("unknown")
    assert come(strangers, "7") == [None]
    assert len(strangers) == 6
    assert repr(strangers) == "Strangers(6 of 6, addresses=1)"


def test_of_one_address_the_oldest_goes() -> None:
    strangers = strangers_of(total=6, each=2)
    assert come(strangers, "1", "2", "3", "4") == [None, None, "1", "2"]
    assert come(strangers, "b1", "b2", origin=B) == [None, None]
    assert len(strangers) == 4


def test_the_oldest_of_the_address_that_has_the_most_goes() -> None:
    strangers = strangers_of(total=6)
    come(strangers, "b1", origin=B)
    come(strangers, "a1", "a2", "a3", "a4", now=1.0)
    assert come(strangers, "c1", origin=C, now=2.0) == [None]
    assert come(strangers, "c2", "c3", origin=C, now=3.0) == ["a1", "a2"]
    # Three of C and two of A now: the next to go is C's own.
    assert come(strangers, "b2", origin=B, now=4.0) == ["c1"]
    # Two of each: whose third comes has the most.
    assert come(strangers, "b3", origin=B, now=5.0) == ["b1"]
    # Two of each once more, and one of somebody new: whoever has waited longest.
    assert come(strangers, "d1", origin=MEMBER, now=6.0) == ["a3"]


def test_a_crowd_of_one_address_does_not_disturb_others() -> None:
    """The honest one needs a moment to be decided, and somebody opens as fast as can be."""
    strangers = strangers_of(total=64, each=32)
    come(strangers, "honest", origin=B)
    for number in range(10_000):
        assert strangers.add(f"silent {number}", A, 0.001 * number) != "honest"
    strangers.remove("honest")
    assert len(strangers) == 32


def test_one_from_the_crowds_own_address_has_as_long_as_the_limit_lasts() -> None:
    strangers = strangers_of(total=64, each=32)
    come(strangers, *(f"old {number}" for number in range(32)))
    assert come(strangers, "honest") == ["old 0"]
    assert "honest" not in come(strangers, *(f"new {number}" for number in range(31)))
    assert come(strangers, "one more") == ["honest"]


def test_places_that_only_members_get() -> None:
    strangers = strangers_of(total=6, for_members=2)
    assert come(strangers, "1", "2", "3", "4") == [None] * 4
    assert come(strangers, "b1", origin=B) == ["1"], "strangers have four of the six"
    assert come(strangers, "m1", "m2", origin=MEMBER) == [None, None]
    # More members than places of their own: they share the rest with everybody.
    assert come(strangers, "n1", origin=OTHER_MEMBER) == ["2"]
    assert come(strangers, "n2", origin=OTHER_MEMBER) == ["3"], "two of A, of M and of N: the oldest of them"
    assert len(strangers) == 6
    strangers.remove("n1")
    assert come(strangers, "b2", origin=B) == [None]


def test_members_alone_are_bounded_too() -> None:
    strangers = strangers_of(total=4, each=3, for_members=2)
    assert come(strangers, "m1", "m2", "m3", "m4", origin=MEMBER) == [None, None, None, "m1"]
    assert come(strangers, "n1", "n2", origin=OTHER_MEMBER) == [None, "m2"]
    assert come(strangers, "1", origin=A) == ["m3"]


def test_who_came_a_moment_ago_is_spared_for_others_of_its_address() -> None:
    strangers = strangers_of(total=4, each=2, spared_s=1.0)
    come(strangers, "1", now=0.0)
    come(strangers, "2", now=0.5)
    assert come(strangers, "3", now=0.9) == ["3"], "it is the new one that goes"
    assert come(strangers, "4", now=1.0) == ["1"]
    assert come(strangers, "5", now=1.4) == ["5"]
    # For those of another address nobody is spared.
    come(strangers, "b1", origin=B, now=1.4)
    come(strangers, "c1", origin=C, now=1.4)
    assert come(strangers, "c2", origin=C, now=1.4) == ["2"]


def test_giving_one_up() -> None:
    strangers = strangers_of()
    assert strangers.evict() is None
    come(strangers, "a1", "a2")
    come(strangers, "m1", "m2", "m3", origin=MEMBER)
    assert [strangers.evict() for _ in range(3)] == ["m1", "a1", "m2"]
    assert len(strangers) == 2


@pytest.mark.parametrize("bad", [{"each": 0}, {"each": 7}, {"for_members": 6}, {"for_members": -1}, {"total": 0}])
def test_limits_that_cannot_be_meant(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        strangers_of(**bad)


@pytest.mark.parametrize("seed", range(20))
def test_limits_hold_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    limits = StrangerLimits(total=12, each=5, for_members=3, spared_s=rng.choice((0.0, 5.0)))
    strangers = Strangers[int](limits)
    there: dict[int, Origin] = {}
    for number in range(2000):
        origin = Origin(f"{rng.randrange(6)}", rng.random() < 0.3)
        there[number] = origin
        gone = strangers.add(number, origin, float(number))
        if gone is not None:
            del there[gone]
        if there and rng.random() < 0.3:
            decided = rng.choice(list(there))
            strangers.remove(decided)
            del there[decided]
        assert len(strangers) == len(there) <= limits.total
        assert max(Counter(there.values()).values(), default=0) <= limits.each
        assert sum(not each.is_member for each in there.values()) <= limits.total - limits.for_members
