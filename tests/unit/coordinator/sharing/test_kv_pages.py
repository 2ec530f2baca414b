"""Pages of KV memory that blocks of one model at a time share."""

import random

import pytest

from p2pserve.coordinator.sharing.kv_pages import ALIGNMENT, WASTE, KvPages, PageSplit, split_pages
from p2pserve.coordinator.sharing.kv_shares import KvShares
from p2pserve.coordinator.sharing.values import SharingError

PAGE = 1024
MIB = 1 << 20


def pages_of(count: int, **needs: float) -> KvPages:
    shares = KvShares((count - 1) * PAGE, lambda service: needs[service])
    pages = KvPages(shares, count, PAGE)
    for service in needs:
        pages.open_service(service)
    return pages


def take(pages: KvPages, service: str) -> int:
    """A page with one block in use."""
    page = pages.take_free(service)
    assert page is not None
    pages.begin_use(page)
    return page


@pytest.mark.parametrize(
    ("block", "found"),
    [
        (PAGE, PageSplit(1, 1)),
        (PAGE // 2, PageSplit(1, 2)),
        (PAGE // 2 - 40, PageSplit(1, 2)),
        (PAGE * 3 // 4, PageSplit(3, 4)),
        (5 * PAGE, PageSplit(5, 1)),
        (5 * PAGE - 1, PageSplit(5, 1)),
    ],
)
def test_pages_are_the_smallest_of_which_little_is_left_over(block: int, found: PageSplit) -> None:
    assert split_pages(PAGE, block, 100 * PAGE) == found


def test_blocks_of_models_of_this_day_share_pages() -> None:
    """Blocks of 16 tokens: 32 layers with 8 heads of 128, and 36 layers."""
    split = split_pages(2 * MIB, 36 * 2 * 8 * 128 * 2 * 16, 64 * MIB)
    page = split.merged * 2 * MIB
    assert page % (split.per_page * ALIGNMENT) == 0
    assert 0.0 <= 1.0 - split.per_page * 2.25 * MIB / page <= WASTE


def test_a_block_larger_than_the_largest_page_is_refused() -> None:
    with pytest.raises(SharingError, match="has no room in pages of at most 4096"):
        split_pages(PAGE, 4097, 4096)
    assert split_pages(PAGE, 2500, 4096) == PageSplit(3, 1)  # the best of those that there may be


def test_a_page_is_one_models_until_nothing_of_it_is_cached() -> None:
    pages = pages_of(6, one=0, two=0)
    page = take(pages, "one")
    pages.begin_use(page)
    assert not pages.end_use(page)
    assert pages.end_use(page)
    assert pages.count_available("one") == 4
    assert pages.count_available("two") == 5
    assert pages.pick_idle("one", over_quota=False) is None
    assert pages.pick_idle("two", over_quota=False) == page
    assert pages.pick_idle("two", over_quota=True) is None  # it has not more than its quota
    pages.release(page)
    pages.check()
    assert len(pages.free) == 5


def test_what_is_idle_goes_first_from_who_has_most_beyond_its_quota() -> None:
    pages = pages_of(9, one=0, two=0)
    held = [take(pages, "one") for _ in range(5)]
    for page in reversed(held):
        pages.end_use(page)
    assert pages.pick_idle("two", over_quota=True) == held[-1]  # the longest idle
    for page in held[:2]:
        pages.release(page)
    assert pages.pick_idle("two", over_quota=True) is None
    pages.check()


def test_a_page_of_nobody_cannot_be_used() -> None:
    pages = pages_of(4, one=0)
    with pytest.raises(SharingError, match="page 2 is nobody's"):
        pages.begin_use(2)
    with pytest.raises(SharingError, match="no block of page 2 is in use"):
        pages.end_use(2)


def test_merged_pages_stay_with_the_models_whose_blocks_are_in_use() -> None:
    """Of pages 1 to 10, page 7 and 8 are of both models, 3 and 4 of one, and 10 is behind the last."""
    pages = pages_of(11, one=0, two=0)
    owners = {10: "two", 9: "", 8: "two", 7: "one", 6: "", 5: "", 4: "two", 3: "two", 2: "", 1: ""}
    for page, service in owners.items():
        assert take(pages, service or "one") == page
    assert "where the first would be" in pages.find_obstacle(3)
    for page, service in owners.items():
        if not service:
            pages.end_use(page)
            pages.release(page)
    assert "while so many hold KV" in pages.find_obstacle(3), "one page is left, which is not enough for a third model"
    pages.merge(3)
    assert (pages.count, pages.page_bytes) == (3, 3 * PAGE)
    assert pages.owners[:3] == [None, "two", None]
    assert pages.shares.budget == pages.shares.used["two"] == 3 * PAGE
    pages.check()
    assert not pages.end_use(2)  # of both: nobody's until both have ended
    assert not pages.free
    pages.end_use(2)
    assert pages.take_free("one") == 2
    assert not pages.end_use(3)  # behind the last: of no use to anybody
    assert not pages.free
    pages.check()
    assert pages.shares.budget == 6 * PAGE


def test_a_model_that_leaves_gives_its_pages_back() -> None:
    pages = pages_of(6, one=0, two=0)
    for service in ("one", "two", "one"):
        take(pages, service)
    idle = take(pages, "one")
    pages.end_use(idle)
    pages.close_service("one")
    pages.check()
    assert pages.count_available("two") == 4
    pages.open_service("one")
    assert pages.count_available("one") == 4


@pytest.mark.parametrize("seed", range(20))
def test_the_books_are_right_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    pages = pages_of(40, one=5e4, two=2e4, three=0)
    in_use: list[tuple[str, int]] = []
    for _ in range(400):
        service = rng.choice(("one", "two", "three"))
        if rng.random() < 0.55:
            page = pages.take_free(service)
            if page is None and (idle := pages.pick_idle(service, over_quota=rng.random() < 0.5)) is not None:
                pages.release(idle)
                page = pages.take_free(service)
            if page is not None:
                for _ in range(rng.randrange(4)):
                    pages.begin_use(page)
                    in_use.append((service, page))
        elif in_use:
            service, page = in_use.pop(rng.randrange(len(in_use)))
            assert pages.owners[page] == service
            if pages.end_use(page) and rng.random() < 0.5:
                pages.release(page)
        pages.check()
    for page, owner in enumerate(pages.owners):
        if owner is not None and not any(page == used for _, used in in_use):
            pages.release(page)
    for entry in [each for each in in_use if each[1] < 4]:
        in_use.remove(entry)
        if pages.end_use(entry[1]):
            pages.release(entry[1])
    pages.merge(4)
    pages.check()
    for _, page in in_use:
        if pages.end_use(page // 4):
            pages.release(page // 4)
        pages.check()
    assert len(pages.free) == pages.count - 1 == 9


def test_pages_become_larger_only_where_a_model_that_comes_is_sure_of_one() -> None:
    """Of seven pages of four, all but the first hold a block of each of two models, until one has ended."""
    pages = pages_of(32, one=0, two=0)
    held = {page: take(pages, "one" if page % 2 else "two") for page in range(31, 3, -1)}
    before = repr(pages), pages.count
    assert "while so many hold KV" in pages.find_obstacle(4)
    assert (repr(pages), pages.count) == before
    for page in held.values():
        if page % 2:
            pages.end_use(page)
            pages.release(page)
    assert pages.find_obstacle(4) == ""
    pages.merge(4)
    pages.open_service("large")
    pages.check()


def test_pages_are_freed_by_their_own_model_and_in_whole() -> None:
    pages = pages_of(6, one=0, two=0)
    for service in ("one", "two"):
        page = take(pages, service)
        pages.begin_use(page)
    assert (pages.count_freed("one", {5: 2, 4: 2}), pages.count_freed("two", {5: 2, 4: 1})) == (1, 0)
