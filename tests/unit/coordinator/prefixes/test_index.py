"""Who holds how much of a prompt: against a plain model, with expectations, gaps, and replicas that lie."""

import random
from collections.abc import Sequence

import pytest

from p2pserve.coordinator.prefixes.held import MAX_NAMES, HeldPrefixes, PrefixNews, PrefixVersion, pack_names
from p2pserve.coordinator.prefixes.index import EXPECTED_S, MAX_SIZES, NamesOf, PrefixIndex


def prompt(*names: int) -> NamesOf:
    """The same names whatever the size of blocks."""
    return lambda block_tokens: names


def whole(*names: int, life: int = 1, block_tokens: int = 16, stride: int = 1) -> PrefixNews:
    version = PrefixVersion(life, 1)
    return PrefixNews(version=version, block_tokens=block_tokens, stride=stride, held=pack_names(names))


def test_the_longest_prefix_that_each_holds_is_found() -> None:
    index = PrefixIndex()
    index.take("a", whole(1, 2, 3))
    index.take("b", whole(1, 2, 9))
    index.take("c", whole(2, 3))
    index.take("d", whole())
    assert index.held_tokens(prompt(1, 2, 3, 4), 0.0) == {"a": 48, "b": 32}
    assert index.held_tokens(prompt(7), 0.0) == {}
    assert index.held_tokens(prompt(), 0.0) == {}


def test_replicas_with_other_blocks_are_asked_in_their_own() -> None:
    index = PrefixIndex()
    index.take("fine", whole(1, 2, 3, 4))
    index.take("coarse", whole(70, block_tokens=128))
    index.take("thinned", whole(2, 4, stride=2))
    names: dict[int, Sequence[int]] = {16: (1, 2, 3, 4, 5), 128: (70, 71)}
    assert index.held_tokens(names.__getitem__, 0.0) == {"fine": 64, "coarse": 128, "thinned": 64}


@pytest.mark.parametrize("seed", range(5))
def test_against_a_plain_model(seed: int) -> None:
    rng = random.Random(seed)
    index, replicas = PrefixIndex(), {name: HeldPrefixes(life=1, block_tokens=4) for name in "abcd"}
    truth: dict[str, set[int]] = {name: set() for name in replicas}
    for _ in range(300):
        name = rng.choice("abcd")
        if rng.random() < 0.05:
            index.forget(name)
        new, gone = {rng.randrange(8)}, {rng.randrange(8), rng.randrange(8)}
        replicas[name].change(new, gone)
        truth[name] = (truth[name] - gone) | new
        for each, held in replicas.items():
            news = held.news_since(index.heard(each))
            assert news is None or index.take(each, news)
        asked = [rng.randrange(8) for _ in range(4)]
        expected = {
            each: next((n for n, one in enumerate(asked) if one not in held), 4) for each, held in truth.items()
        }
        assert index.held_tokens(prompt(*asked), 0.0) == {each: 4 * n for each, n in expected.items() if n}


def test_a_replica_that_was_sent_a_prompt_is_expected_to_hold_it_for_a_while() -> None:
    index = PrefixIndex()
    index.take("a", whole(1))
    index.expect("a", prompt(1, 2), 10.0)
    index.expect("a", prompt(1, 2, 3), 20.0)
    index.expect("nobody", prompt(1), 20.0)
    assert index.held_tokens(prompt(1, 2, 3), 20.0) == {"a": 48}
    news = PrefixNews(version=PrefixVersion(1, 2), since=PrefixVersion(1, 1), block_tokens=16, held=pack_names([2]))
    assert index.take("a", news)
    assert index.held_tokens(prompt(1, 2, 3), 10.0 + EXPECTED_S) == {"a": 48}
    assert index.held_tokens(prompt(1, 2, 3), 20.0 + EXPECTED_S) == {"a": 32}  # what it tells, it holds


def test_a_restarted_engine_holds_nothing_of_before() -> None:
    index = PrefixIndex()
    index.take("a", whole(1, 2))
    index.expect("a", prompt(1, 2, 3), 0.0)
    index.take("a", whole(5, life=2))
    assert index.held_tokens(prompt(1, 2, 3), 1.0) == {}
    assert index.held_tokens(prompt(5), EXPECTED_S + 1.0) == {"a": 16}


def test_after_a_gap_all_is_asked_for() -> None:
    index = PrefixIndex()
    index.take("a", whole(1, 2))
    later = PrefixNews(version=PrefixVersion(1, 9), since=PrefixVersion(1, 8), block_tokens=16, held=pack_names([3]))
    assert not index.take("a", later)
    assert index.heard("a") is None
    assert index.held_tokens(prompt(1, 2), 0.0) == {}
    assert index.take("a", whole(1, 2, 3))


def test_nobody_has_more_told_than_is_allowed() -> None:
    index = PrefixIndex()
    index.take("liar", whole(*range(MAX_NAMES)))
    for number in range(1, 4):
        told = PrefixNews(
            version=PrefixVersion(1, number + 1),
            since=PrefixVersion(1, number),
            block_tokens=16,
            held=pack_names(range(number * MAX_NAMES, (number + 1) * MAX_NAMES)),
        )
        assert not index.take("liar", told)
    assert index.held_tokens(prompt(0), 0.0) == {}
    assert "0 names" in repr(index)


def test_replicas_cannot_have_a_gateway_name_prompts_in_ever_more_ways() -> None:
    index = PrefixIndex()
    told = {f"r{size}": index.take(f"r{size}", whole(1, block_tokens=size)) for size in range(16, 16 + 3 * MAX_SIZES)}
    assert sum(told.values()) == len(index.block_sizes) == MAX_SIZES
    index.keep([])
    assert index.take("late", whole(1, block_tokens=999))


def test_nor_more_expected() -> None:
    index = PrefixIndex()
    index.take("a", whole())
    for first in range(0, 10 * MAX_NAMES, 100):
        index.expect("a", prompt(*range(first, first + 100)), 0.0)
    assert int(repr(index).split()[3]) <= MAX_NAMES
    index.held_tokens(prompt(), EXPECTED_S)
    assert "0 names" in repr(index)


def test_who_is_forgotten_leaves_nothing_to_who_comes_next() -> None:
    index = PrefixIndex()
    for name in "ab":
        index.take(name, whole(1, 2))
        index.expect(name, prompt(1, 2, 3), 0.0)
    index.keep(["b"])
    index.take("c", whole(9))
    assert index.held_tokens(prompt(1, 2, 3), 1.0) == {"b": 48}
    assert index.held_tokens(prompt(1, 2, 3), EXPECTED_S) == {"b": 32}
