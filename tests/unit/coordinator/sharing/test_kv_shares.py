"""Quotas of KV memory that follow need and starve nobody."""

import pytest

from p2pserve.coordinator.sharing.kv_shares import KvShares
from p2pserve.coordinator.sharing.values import SharingError


def test_all_of_it_may_be_one_services_while_nobody_else_asks() -> None:
    shares = KvShares(100, {"one": 10, "two": 5})
    shares.take("one", 10)
    assert not shares.fits("two", 1)
    assert shares.may_lose("one", "two")  # it holds more than its half
    shares.release("one", 5)
    shares.take("two", 10)
    assert not shares.may_lose("one", "two")  # both hold their half
    assert shares.may_lose("one", "one")
    assert shares.may_lose("one", "two", is_starved=True)
    shares.check()


def test_shares_are_by_weight() -> None:
    shares = KvShares(90, {"one": 1, "two": 1}, {"one": 2.0, "two": 1.0})
    shares.take("one", 60)
    assert not shares.may_lose("one", "two")
    shares.take("one", 1)
    assert shares.may_lose("one", "two")
    assert shares.most_blocks("two") == 90


def test_more_than_there_is_cannot_be_taken_or_freed() -> None:
    shares = KvShares(100, {"one": 10, "two": 10})
    shares.take("one", 3)
    with pytest.raises(SharingError, match="one holds 30 bytes of KV, not 40"):
        shares.release("one", 4)
    with pytest.raises(SharingError, match="80 bytes of KV are not free"):
        shares.take("two", 8)
    shares.check()
    shares.free += 1
    with pytest.raises(SharingError, match="71 bytes are free"):
        shares.check()


@pytest.mark.parametrize(
    ("blocks", "weights", "text"),
    [
        ({"one": 60, "two": 10}, None, "a block of one is 60 bytes"),
        ({"one": 0, "two": 10}, None, "a block of one is 0 bytes"),
        ({"one": 10, "two": 10}, {"one": 1.0}, "weights are of"),
        ({"one": 10, "two": 10}, {"one": 1.0, "two": 0.0}, "must be above 0"),
    ],
)
def test_shares_that_cannot_be_are_refused(blocks: dict[str, int], weights: dict[str, float] | None, text: str) -> None:
    with pytest.raises(SharingError, match=text):
        KvShares(100, blocks, weights)
