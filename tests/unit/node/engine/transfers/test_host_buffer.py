"""Host memory for KV on its way out: pieces never overlap, come back whole, and one transfer does not take it all."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.node.engine.transfers import host_buffer
from p2pserve.node.engine.transfers.host_buffer import ALIGNMENT, SHARE, Extent, HostBuffer

WAIT_LIMIT_S = 30.0


def nothing() -> int:
    """What who asks holds."""
    return 0


def buffer_of(pages: int) -> HostBuffer:
    return HostBuffer(torch.zeros(pages * ALIGNMENT, dtype=torch.uint8))


def take(buffer: HostBuffer, size: int, mine: int = 0) -> Extent | None:
    """If there is room now."""
    return buffer.take(size, lambda: mine, 0.0, lambda: True)


def taken(buffer: HostBuffer, pages: int) -> Extent:
    extent = take(buffer, pages * ALIGNMENT)
    assert extent is not None
    return extent


def in_thread(call: Callable[[], Extent | None]) -> Callable[[], Extent | None]:
    """Begin the call elsewhere. Returns what waits for its result."""
    found: list[Extent | None] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()

    def result() -> Extent | None:
        thread.join(WAIT_LIMIT_S)
        return found[0]

    return result


def test_a_piece_is_as_long_as_asked_for_and_begins_on_a_page() -> None:
    buffer = buffer_of(8)
    extents = [take(buffer, size) for size in (1, ALIGNMENT, ALIGNMENT + 1)]
    assert [(each.offset, each.reserved, each.memory.numel()) for each in extents if each is not None] == [
        (0, ALIGNMENT, 1),
        (ALIGNMENT, ALIGNMENT, ALIGNMENT),
        (2 * ALIGNMENT, 2 * ALIGNMENT, ALIGNMENT + 1),
    ]
    assert buffer.held == 4 * ALIGNMENT


def test_the_first_run_that_is_long_enough_is_taken() -> None:
    buffer = buffer_of(8)
    one, _, three, _ = (taken(buffer, pages) for pages in (1, 1, 2, 1))
    buffer.give(one)
    buffer.give(three)
    assert taken(buffer, 2).offset == three.offset  # the run before it is too short
    assert taken(buffer, 1).offset == one.offset
    assert taken(buffer, 3).offset == 5 * ALIGNMENT
    assert take(buffer, 1) is None


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)])
def test_neighbours_that_come_back_are_one_run_again(order: tuple[int, ...]) -> None:
    buffer = buffer_of(3)
    pieces = [taken(buffer, 1) for _ in range(3)]
    for number in order:
        buffer.give(pieces[number])
    assert buffer.held == 0
    assert taken(buffer, 3).memory.numel() == 3 * ALIGNMENT


def test_what_can_never_fit_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"8193 bytes do not fit a transfer buffer of 8192; make it larger"):
        take(buffer_of(2), 2 * ALIGNMENT + 1)
    with pytest.raises(ValueError, match="make it larger"):
        take(HostBuffer(torch.zeros(0, dtype=torch.uint8)), 1)


def test_one_transfer_leaves_the_last_quarter_to_others() -> None:
    buffer = buffer_of(16)
    mine = 0
    while (extent := take(buffer, ALIGNMENT, mine)) is not None:
        mine += extent.reserved
    assert mine == buffer.size - buffer.size // SHARE
    other = 0
    while (extent := take(buffer, ALIGNMENT, other)) is not None:
        other += extent.reserved
    assert other == buffer.size // SHARE  # up to a quarter is anybody's
    assert take(buffer, ALIGNMENT) is None


def test_who_holds_nothing_gets_any_piece_that_fits() -> None:
    buffer = buffer_of(16)
    assert take(buffer, buffer.size) is not None


def test_who_waits_is_woken_by_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffer, "LOOK_AGAIN_S", WAIT_LIMIT_S)  # it does not look by itself
    buffer = buffer_of(4)
    first, _ = taken(buffer, 1), taken(buffer, 3)
    asked = threading.Event()

    def wanted() -> bool:
        asked.set()
        return True

    result = in_thread(lambda: buffer.take(ALIGNMENT, nothing, WAIT_LIMIT_S, wanted))
    assert asked.wait(WAIT_LIMIT_S)  # it has looked, and found nothing
    buffer.give(first)
    again = result()
    assert again is not None
    assert again.offset == first.offset


def test_who_gives_back_while_it_waits_counts_as_holding_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one whose pieces have all been confirmed meanwhile would wait for others to give something back."""
    monkeypatch.setattr(host_buffer, "LOOK_AGAIN_S", WAIT_LIMIT_S)
    buffer = buffer_of(4)
    _, mine = taken(buffer, 3), taken(buffer, 1)
    held, asked = [mine.reserved], threading.Event()

    def wanted() -> bool:
        asked.set()
        return True

    result = in_thread(lambda: buffer.take(ALIGNMENT, lambda: sum(held), WAIT_LIMIT_S, wanted))
    assert asked.wait(WAIT_LIMIT_S)
    held.clear()
    buffer.give(mine)
    assert result() is not None


@pytest.mark.parametrize("why", ["timeout", "not wanted"])
def test_waiting_ends_without_a_piece(why: str) -> None:
    buffer = buffer_of(1)
    taken(buffer, 1)
    looks: list[None] = []

    def wanted() -> bool:
        looks.append(None)
        return why == "timeout"

    assert buffer.take(1, nothing, 0.001 if why == "timeout" else WAIT_LIMIT_S, wanted) is None
    assert looks
    assert buffer.held == ALIGNMENT


Step = tuple[bool, int, int]


@settings(max_examples=60, deadline=None)
@given(
    pages=st.integers(1, 24),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 6 * ALIGNMENT), st.integers(0, 30)), max_size=60),
)
def test_pieces_never_overlap_and_all_come_back(pages: int, steps: list[Step]) -> None:
    buffer = buffer_of(pages)
    owned: dict[int, Extent] = {}
    for number, (giving, size, which) in enumerate(steps):
        if giving and owned:
            buffer.give(owned.pop(sorted(owned)[which % len(owned)]))
        elif -(-size // ALIGNMENT) * ALIGNMENT <= buffer.size:
            extent = take(buffer, size)
            if extent is not None:
                extent.memory.fill_(number % 251)
                owned[number] = extent
        assert buffer.held == sum(each.reserved for each in owned.values())
        assert all(each.offset % ALIGNMENT == 0 for each in owned.values())
    for number, extent in owned.items():
        assert (extent.memory == number % 251).all()  # nobody else wrote there
        buffer.give(extent)
    assert buffer.held == 0
    assert take(buffer, buffer.size) is not None  # all runs have become one again
