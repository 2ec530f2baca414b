"""The life of a transfer: its transition table and the record of transfers."""

from __future__ import annotations

from itertools import product

import pytest

from p2pserve.kvtransport.errors import KVProtocolError
from p2pserve.kvtransport.link.settings import LinkSettings
from p2pserve.kvtransport.link.transfers import (
    TRANSITIONS,
    EndState,
    Transfer,
    TransferEvent,
    TransferStatus,
    TransferTable,
    next_status,
)

W, M, C, D, F = TransferStatus
GRANTED, COMPLETED, ACKNOWLEDGED, ABORTED, REFUSED = TransferEvent


def transfer(name: int = 1, deadline: float = 60.0) -> Transfer:
    return Transfer(bytes([name]) * 16, deadline, 0.0)


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ([GRANTED, COMPLETED, ACKNOWLEDGED], D),
        ([GRANTED, GRANTED, COMPLETED, GRANTED, ACKNOWLEDGED], D),
        ([ABORTED], F),
        ([REFUSED], F),
        ([GRANTED, ABORTED], F),
        ([GRANTED, COMPLETED, REFUSED], F),
    ],
)
def test_a_life(events: list[TransferEvent], end: TransferStatus) -> None:
    status = W
    for event in events:
        assert status in (W, M, C)
        status = next_status(status, event)
    assert status is end


@pytest.mark.parametrize(
    ("status", "event"), [pair for pair in product(TransferStatus, TransferEvent) if pair not in TRANSITIONS]
)
def test_what_the_table_lacks_is_refused(status: TransferStatus, event: TransferEvent) -> None:
    with pytest.raises(KVProtocolError, match=f"a transfer that is {status} cannot be {event}"):
        next_status(status, event)


def test_nothing_follows_an_end_and_every_other_status_can_fail() -> None:
    ends = set(TransferStatus) - {status for status, _ in TRANSITIONS}
    assert ends == {D, F}
    assert {status for (status, event), after in TRANSITIONS.items() if event is ABORTED and after is F} == {W, M, C}
    assert {status for (status, event), after in TRANSITIONS.items() if event is REFUSED and after is F} == {W, M, C}


def test_only_what_is_acknowledged_is_delivered() -> None:
    assert {pair for pair, after in TRANSITIONS.items() if after is D} == {(C, ACKNOWLEDGED)}
    assert {pair for pair, after in TRANSITIONS.items() if after is C} == {(M, COMPLETED), (C, GRANTED)}


class TestTable:
    def test_an_id_serves_once(self) -> None:
        table: TransferTable[Transfer] = TransferTable()
        one = transfer()
        table.add(one)
        with pytest.raises(KVProtocolError, match="used before"):
            table.add(transfer())
        table.apply(one, ABORTED, "enough")
        table.forget(one.id)
        assert table.get(one.id) is None
        assert table.is_over(one.id)
        with pytest.raises(KVProtocolError, match="used before"):
            table.add(transfer())

    def test_an_open_transfer_is_not_forgotten(self) -> None:
        table: TransferTable[Transfer] = TransferTable()
        one = transfer()
        table.add(one)
        table.forget(one.id)
        assert table.get(one.id) is one
        assert table.get_open(one.id) is one
        assert not table.is_over(one.id)
        assert len(table) == 1

    def test_how_it_ended_is_kept_until_it_is_forgotten(self) -> None:
        table: TransferTable[Transfer] = TransferTable()
        failed, done = transfer(1), transfer(2)
        for one in (failed, done):
            table.add(one)
            assert one.end_state == EndState("open")
            table.apply(one, GRANTED)
        table.apply(failed, REFUSED, "no blocks")
        table.apply(done, COMPLETED)
        assert done.end_state == EndState("open"), "complete is not delivered"
        table.apply(done, ACKNOWLEDGED)
        assert str(failed.end_state) == "failed(no blocks)"
        assert str(done.end_state) == "delivered"
        assert table.get(failed.id) is failed
        assert table.get_open(failed.id) is None
        assert table.list_open() == []
        assert table.list_known() == [failed, done]

    def test_a_refused_event_changes_nothing(self) -> None:
        table: TransferTable[Transfer] = TransferTable()
        one = transfer()
        table.add(one)
        with pytest.raises(KVProtocolError, match="cannot be acknowledged"):
            table.apply(one, ACKNOWLEDGED, "reason")
        assert one.status is W
        assert one.reason == ""
        assert not table.is_over(one.id)

    def test_the_next_deadline_is_that_of_an_open_transfer(self) -> None:
        table: TransferTable[Transfer] = TransferTable()
        assert table.next_deadline() == float("inf")
        soon, late = transfer(1, 5.0), transfer(2, 9.0)
        table.add(late)
        table.add(soon)
        assert table.next_deadline() == 5.0
        table.apply(soon, ABORTED)
        assert table.next_deadline() == 9.0

    def test_early_news_meets_its_transfer_once(self) -> None:
        table: TransferTable[Transfer] = TransferTable()
        one = transfer()
        news = table.note_early(one.id)
        assert news is not None
        news.credit, news.refused = 7, "no"
        assert table.note_early(one.id) is news
        assert table.add(one) is news
        table.apply(one, ABORTED)
        assert table.note_early(one.id) is None, "nobody waits for news of what is over"

    def test_what_strangers_say_is_bounded(self) -> None:
        table: TransferTable[Transfer] = TransferTable()
        first = table.note_early(bytes(16))
        assert first is not None
        first.credit = 1
        for number in range(1, 1024):
            table.note_early(number.to_bytes(16, "big"))
        assert table.note_early(bytes(16)) is first
        table.note_early(b"x" * 16)
        assert table.note_early(bytes(16)) is not first, "the oldest has gone"


class TestSettings:
    def test_a_site_notices_trouble_sooner_than_a_continent(self) -> None:
        lan, wan = LinkSettings.lan(), LinkSettings.wan()
        assert wan == LinkSettings()
        for name in ("silence_s", "grace_s", "ping_s", "hedge_s", "redial_limit_s"):
            assert getattr(lan, name) < getattr(wan, name)
        assert lan.chunk_bytes == wan.chunk_bytes, "both ends may have their own, but need not"

    @pytest.mark.parametrize("field", ["limit_bytes", "window_bytes", "grace_s", "redial_first_s", "max_connections"])
    @pytest.mark.parametrize("value", [0, -1, float("inf")])
    def test_bad_values_are_named(self, field: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"{field} is {value}"):
            LinkSettings(**{field: value})  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("size", "good"), [(2048, False), (4096, True), (4097, False), (1 << 20, True), (1 << 21, False)]
    )
    def test_chunks_are_powers_of_two(self, size: int, good: bool) -> None:
        if good:
            assert LinkSettings(chunk_bytes=size).chunk_bytes == size
        else:
            with pytest.raises(ValueError, match=f"chunk_bytes is {size}"):
                LinkSettings(chunk_bytes=size)
