"""What each API key may have."""

import pytest

from p2pserve.node.api.accounts import KeyAccounts, KeyUsage, OverLimit
from p2pserve.node.web.keys import KeyFault, KeyLimits, parse_keys


def test_requests_of_one_exchange_count_once() -> None:
    accounts = KeyAccounts({"a": KeyLimits(concurrent=1, requests_s=1)})
    accounts.begin("a", "x", 10, 0.0)
    accounts.begin("a", "x", 10, 0.0)  # n=2
    with pytest.raises(OverLimit, match="the most that it may have"):
        accounts.begin("a", "y", 10, 5.0)
    accounts.end("a", "x", 10, KeyUsage(prompt_tokens=3, completion_tokens=2, usd=0.5), 5.0)
    accounts.end("a", "x", 10, KeyUsage(prompt_tokens=3, completion_tokens=2, usd=0.5), 5.0)
    accounts.begin("a", "y", 10, 5.0)
    usage = accounts.usage["a"]
    assert (usage.requests, usage.refused, usage.prompt_tokens, usage.usd) == (2, 1, 6, 1.0)


def test_what_each_key_cost_is_told_from_the_start_and_peers_are_no_keys() -> None:
    accounts = KeyAccounts({"a": KeyLimits(), "b": KeyLimits()})
    assert accounts.cost_by_key() == {"a": 0.0, "b": 0.0}
    for key, usd in (("a", 0.25), ("a", 0.5), ("", 0.125), ("12D3KooWpeer", 1.0)):
        accounts.begin(key, "x", 10, 0.0)
        accounts.end(key, "x", 10, KeyUsage(usd=usd), 0.0)
    assert accounts.cost_by_key() == {"a": 0.75, "b": 0.0, "": 0.125}


def test_a_rate_says_when_there_is_more() -> None:
    accounts = KeyAccounts({"a": KeyLimits(requests_s=2)})
    accounts.begin("a", "1", 1, 0.0)
    accounts.begin("a", "2", 1, 0.0)
    with pytest.raises(OverLimit) as caught:
        accounts.begin("a", "3", 1, 0.0)
    assert caught.value.retry_after_s == pytest.approx(0.5)
    accounts.begin("a", "3", 1, 0.5)


def test_tokens_that_were_not_had_are_given_back() -> None:
    accounts = KeyAccounts({"a": KeyLimits(tokens_min=600)})
    accounts.begin("a", "1", 600, 0.0)
    with pytest.raises(OverLimit) as caught:
        accounts.begin("a", "2", 100, 0.0)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    accounts.end("a", "1", 600, KeyUsage(prompt_tokens=50), 0.0)
    accounts.begin("a", "2", 550, 0.0)


def test_peers_that_others_carry_are_forgotten_at_rest() -> None:
    accounts = KeyAccounts({})
    for number in range(3000):
        accounts.begin(f"peer-{number}", "x", 1, 0.0)
        accounts.end(f"peer-{number}", "x", 1, KeyUsage(), 0.0)
    assert len(accounts.usage) <= 1025


def test_a_file_of_keys_is_read() -> None:
    first, second = parse_keys(["# ours", "", "sk-12345678 name=alice concurrent=2 requests_s=0.5", "sk-abcdefgh # b"])
    assert (first.name, first.limits) == ("alice", KeyLimits(concurrent=2, requests_s=0.5))
    assert second.limits == KeyLimits()
    assert "sk-" not in repr(first) + second.name


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("short", "line 1: a key has at least 8"),
        ("sk-12345678 nme=x", "line 1: `nme=x` is none of"),
        ("sk-12345678 concurrent=0", "line 1: concurrent=0 is not a count above 0"),
        ("sk-12345678 concurrent=1.5", "is not a count above 0"),
        ("sk-12345678 requests_s=nan", "is not a number above 0"),
    ],
)
def test_what_is_mistyped_is_said_without_the_key(line: str, said: str) -> None:
    with pytest.raises(KeyFault) as caught:
        parse_keys([line])
    assert said in str(caught.value)
    assert "sk-1234" not in str(caught.value)


def test_two_keys_of_one_name_are_refused() -> None:
    with pytest.raises(KeyFault, match="line 2: the name a is taken already"):
        parse_keys(["sk-12345678 name=a", "sk-abcdefgh name=a"])
