"""Quotas of KV memory that follow need and starve nobody."""

import pytest

from p2pserve.coordinator.sharing.kv_shares import KvShares
from p2pserve.coordinator.sharing.values import SharingError


def shares_of(budget: int, **needs: float) -> KvShares:
    """Services with blocks of one byte and these needs."""
    shares = KvShares(budget, lambda service: needs[service])
    for service in needs:
        shares.open_service(service, 1)
    return shares


def test_all_of_it_may_be_one_services_while_nobody_else_asks() -> None:
    shares = shares_of(100, one=0, two=0)
    shares.take("one", 100)
    assert not shares.fits(5)
    assert shares.may_lose("one", "two")  # it holds more than its half
    assert not shares.may_lose("one", "two", lost=50)  # nor when it has lost that
    shares.release("one", 50)
    shares.take("two", 50)
    assert not shares.may_lose("one", "two")  # both hold their half
    assert shares.may_lose("one", "one")
    assert shares.may_lose("one", "two", is_starved=True)
    shares.check()


def test_quotas_follow_need_down_to_a_floor() -> None:
    needs = {"many": 400.0, "few": 10.0}
    shares = KvShares(100, lambda service: needs[service])
    shares.open_service("many", 1)
    shares.open_service("few", 1)
    assert (shares.floor, shares.quota("many"), shares.quota("few")) == (25, 75, 25)
    needs["few"] = 150.0  # a third of what is needed above the floors
    assert [shares.quota("many"), shares.quota("few")] == pytest.approx([62.5, 37.5])
    needs["many"] = 0.0
    assert (shares.quota("many"), shares.quota("few")) == (25, 75)
    shares.close_service("few")
    assert shares.quota("many") == 100


@pytest.mark.parametrize("need", [0.0, 20.0, 1e9])
def test_no_need_of_others_takes_a_floor(need: float) -> None:
    shares = shares_of(90, one=need, two=30.0, three=0.0)
    assert min(map(shares.quota, shares.used)) >= shares.floor == 15
    assert sum(map(shares.quota, shares.used)) == pytest.approx(90)


def test_what_cannot_be_taken_back_leaves_the_others_their_floors() -> None:
    shares = shares_of(100, one=0, two=0)
    assert shares.leaves_floors("one", 75)
    assert not shares.leaves_floors("one", 76)
    shares.take("two", 20)
    assert shares.leaves_floors("one", 75)
    shares.take("two", 20)
    assert shares.leaves_floors("one", 60)
    assert not shares.leaves_floors("one", 61)


def test_more_than_there_is_cannot_be_taken_or_freed() -> None:
    shares = shares_of(100, one=0, two=0)
    shares.take("one", 30)
    with pytest.raises(SharingError, match="one holds 30 bytes of KV, not 40"):
        shares.release("one", 40)
    with pytest.raises(SharingError, match="80 bytes of KV are not free"):
        shares.take("two", 80)
    shares.check()
    shares.close_service("one")
    assert shares.free == 100
    shares.check()
    shares.free -= 1
    with pytest.raises(SharingError, match="99 bytes are free"):
        shares.check()


@pytest.mark.parametrize("block", [0, 26])
def test_blocks_that_a_floor_has_no_room_for_are_refused(block: int) -> None:
    shares = shares_of(100, one=0)
    with pytest.raises(SharingError, match=f"a block of two is {block} bytes of KV; of 100 for 2 models"):
        shares.open_service("two", block)
