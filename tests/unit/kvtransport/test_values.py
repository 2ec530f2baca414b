"""Tickets, assemblies and reports: the pure values of a transfer."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.kvtransport.errors import TicketError
from p2pserve.kvtransport.routing.report import TransferTimes
from p2pserve.kvtransport.wire.frames import KVFrame
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket, issue_link, issue_transfer

LINK: dict[str, Any] = {"link": b"L" * 16, "secret": b"k" * 32, "lease_s": 600.0}
TRANSFER: dict[str, Any] = {"transfer": b"t" * 16, "link": b"L" * 16, "codec": "kv4", "deadline_s": 20.0}


def frame(layer: int = 0, heads: tuple[int, int] = (0, 1), tokens: tuple[int, int] = (0, 1)) -> KVFrame:
    return KVFrame(layer, *heads, tokens[0], tokens[1] - tokens[0], 0, 0, 64, b"x")


class TestTickets:
    def test_issue_draws_ids_and_secret(self) -> None:
        link, rng = issue_link(600, random.Random(1).randbytes), random.Random(1)
        assert (link.link, link.secret) == (rng.randbytes(16), rng.randbytes(32))
        transfer = issue_transfer(link.link, "raw", 5, random.Random(2).randbytes)
        assert (transfer.transfer, transfer.link) == (random.Random(2).randbytes(16), link.link)

    @pytest.mark.parametrize(("kind", "good"), [(LinkTicket, LINK), (TransferTicket, TRANSFER)])
    def test_travels_as_messagepack(self, kind: type[LinkTicket | TransferTicket], good: dict[str, Any]) -> None:
        ticket = kind(**good)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=kind) == ticket
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**good, "path": "/etc"}, type=kind)
        with pytest.raises(AttributeError):
            ticket.link = b""  # type: ignore[misc]

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("link", bytes(15), "link id has 15 bytes"),
            ("secret", bytes(31), "secret has 31 bytes"),
            ("lease_s", 0, "lease"),
            ("lease_s", float("nan"), "lease"),
            ("lease_s", 1e6, "lease"),
        ],
    )
    def test_bad_links(self, field: str, value: object, message: str) -> None:
        with pytest.raises(TicketError, match=message):
            LinkTicket(**{**LINK, field: value})
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**LINK, field: value}, type=LinkTicket)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("transfer", bytes(15), "transfer id"),
            ("transfer", bytes(16), "not all 0"),
            ("link", bytes(17), "link id has 17 bytes"),
            ("codec", "zip", "codec 'zip' is unknown; known are raw, "),
            ("deadline_s", 0, "deadline"),
            ("deadline_s", float("nan"), "deadline"),
            ("deadline_s", float("inf"), "deadline"),
            ("deadline_s", 4000, "deadline"),
        ],
    )
    def test_bad_transfers(self, field: str, value: object, message: str) -> None:
        with pytest.raises(TicketError, match=message):
            TransferTicket(**{**TRANSFER, field: value})
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**TRANSFER, field: value}, type=TransferTicket)

    def test_the_secret_is_never_shown(self) -> None:
        ticket = LinkTicket(**LINK)
        for text in (repr(ticket), str(ticket), f"{ticket}", repr([ticket]), repr(ticket.__rich_repr__())):
            assert "kkkk" not in text
            assert b"k".hex() * 4 not in text
        assert (b"L" * 16).hex() in repr(ticket)


class TestTransferTimes:
    @pytest.mark.parametrize(
        ("first", "prefill", "acknowledged", "hidden"),
        [
            (0.0, 8.0, 10.0, 0.8),
            (0.0, 10.0, 10.0, 1.0),
            (0.0, 12.0, 10.0, 1.0),  # acknowledged before prefill was through
            (5.0, 5.0, 9.0, 0.0),
            (5.0, 1.0, 9.0, 0.0),  # sent all at once after prefill
            (5.0, 5.0, 5.0, 1.0),
        ],
    )
    def test_hidden_fraction(self, first: float, prefill: float, acknowledged: float, hidden: float) -> None:
        assert TransferTimes(first, prefill, acknowledged).hidden_fraction == pytest.approx(hidden)

    @given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
    def test_is_a_fraction(self, first: float, prefill: float, span: float) -> None:
        assert 0 <= TransferTimes(first, prefill, first + span).hidden_fraction <= 1

    def test_impossible_times(self) -> None:
        with pytest.raises(ValueError, match="before the first frame"):
            TransferTimes(5, 6, 4)
        with pytest.raises(ValueError, match="not moments"):
            TransferTimes(0, float("nan"), 1)
