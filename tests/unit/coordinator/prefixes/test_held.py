"""What is told of held prefixes: differences that lead to the same, whatever was missed; bounds; hostile news."""

import random

import msgspec
import pytest

from p2pserve.coordinator.prefixes.held import (
    MAX_NAMES,
    ChainNames,
    HeldPrefixes,
    PrefixError,
    PrefixNews,
    PrefixVersion,
    choose_stride,
    pack_names,
    unpack_names,
)


def test_names_survive_packing() -> None:
    assert unpack_names(pack_names([0, 1, 2**64 - 1])) == [0, 1, 2**64 - 1]


def test_whoever_hears_differences_knows_what_is_held() -> None:
    rng = random.Random(1)
    held, truth, known = HeldPrefixes(life=3, block_tokens=16), set[int](), set[int]()
    heard: PrefixVersion | None = None
    for _ in range(200):
        new, gone = {rng.randrange(50) for _ in range(3)}, {rng.randrange(50) for _ in range(3)}
        held.change(new, gone)
        truth = (truth - gone) | new
        if rng.random() < 0.3:
            news = held.news_since(heard)
            assert news is not None
            known = (known if news.since is not None else set()) - set(unpack_names(news.lost))
            known |= set(unpack_names(news.held))
            heard = news.version
            assert known == truth
            assert held.news_since(heard) is None


def test_who_has_heard_of_an_earlier_life_is_told_all() -> None:
    held = HeldPrefixes(life=2, block_tokens=16)
    held.change([1, 2], [])
    news = held.news_since(PrefixVersion(1, 1))
    assert news is not None
    assert (news.since, unpack_names(news.held)) == (None, [1, 2])


@pytest.mark.parametrize("claimed", [PrefixVersion(2, 77), PrefixVersion(2, 10**9)])
def test_a_version_that_never_was_is_answered_with_all(claimed: PrefixVersion) -> None:
    held = HeldPrefixes(life=2, block_tokens=16)
    held.change([1], [])
    news = held.news_since(claimed)
    assert news is not None
    assert news.since is None


def test_what_was_missed_long_ago_is_answered_with_all() -> None:
    held = HeldPrefixes(life=1, block_tokens=16)
    held.change([0], [])
    heard = PrefixVersion(1, 1)
    for name in range(1, 3 * MAX_NAMES):
        held.change([name], [name - 1])
    news = held.news_since(heard)
    assert news is not None
    assert (news.since, unpack_names(news.held)) == (None, [3 * MAX_NAMES - 1])


def test_the_oldest_beyond_the_bound_are_not_told() -> None:
    held = HeldPrefixes(life=1, block_tokens=16)
    held.change(range(MAX_NAMES + 10), [])
    news = held.news_since(None)
    assert news is not None
    assert unpack_names(news.held) == list(range(10, MAX_NAMES + 10))
    assert len(msgspec.msgpack.encode(news)) < 33_000


@pytest.mark.parametrize("blocks", [1, MAX_NAMES, MAX_NAMES + 1, 10 * MAX_NAMES, 10 * MAX_NAMES + 1])
def test_with_its_stride_a_replica_tells_all_that_it_holds(blocks: int) -> None:
    assert blocks // choose_stride(blocks) <= MAX_NAMES


@pytest.mark.parametrize(
    "fields",
    [
        {"held": b"1234567"},
        {"lost": b"123", "since": [1, 1]},
        {"lost": bytes(8)},
        {"held": bytes(8 * (MAX_NAMES + 1))},
        {"block_tokens": 0},
        {"block_tokens": 3},
        {"block_tokens": 1 << 17},
        {"stride": 0},
        {"stride": 1 << 40},
        {"version": [-1, 0]},
        {"version": "x"},
    ],
)
def test_news_that_cannot_be_are_refused(fields: dict[str, object]) -> None:
    encoded = msgspec.msgpack.encode({"version": [1, 1], "block_tokens": 16, **fields})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=PrefixNews)


def test_news_are_checked_where_they_are_made_too() -> None:
    with pytest.raises(PrefixError, match="whole names"):
        PrefixNews(version=PrefixVersion(), block_tokens=16, held=b"1")


def test_every_strideth_block_of_a_prompt_is_named() -> None:
    names = ChainNames(stride=2)
    names.store([1, 2, 3], None)
    names.store([4, 5], 3)
    names.store([6], 99)
    assert names.take() == ([2, 4], [])
    assert names.longest_held([1, 2, 7, 4]) == 2
    names.evict([5, 4, 8])
    names.store([4], 3)
    names.evict([2])
    assert names.take() == ([], [2])
    names.clear()
    assert (names.take(), len(names)) == (([], [4]), 0)
