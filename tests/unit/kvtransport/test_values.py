"""Tickets, assemblies and reports: the pure values of a transfer."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kvtransport.errors import KVProtocolError, TicketError
from p2pserve.kvtransport.routing.report import TransferTimes
from p2pserve.kvtransport.wire.assembly import Assembly
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


class TestAssembly:
    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_against_a_plain_array(self, data: st.DataObject) -> None:
        layers = range(data.draw(st.integers(0, 3)), data.draw(st.integers(4, 6)))
        heads, tokens, first = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(0, 5)))
        assembly = Assembly(layers, heads, tokens, first=first)
        naive = np.zeros((len(layers), heads, tokens), dtype=bool)
        for _ in range(data.draw(st.integers(0, 40))):
            layer = data.draw(st.integers(0, 6))
            head = data.draw(st.integers(0, heads))
            start = data.draw(st.integers(0, first + tokens))
            last_head = head + data.draw(st.integers(1, heads))
            piece = frame(layer, (head, last_head), (start, start + data.draw(st.integers(1, tokens))))
            inside = layer in layers and last_head <= heads and first <= start and piece.end <= first + tokens
            at = (layer - layers.start, slice(head, last_head), slice(start - first, piece.end - first))
            if inside and not naive[at].any():
                assembly.add(piece)
                naive[at] = True
            else:
                with pytest.raises(KVProtocolError):
                    assembly.add(piece)
            assembly.check_integrity()
            whole = naive.all(axis=(0, 1))
            assert assembly.complete_tokens() == (tokens if whole.all() else int(whole.argmin()))
            assert assembly.is_done == bool(naive.all())

    @pytest.mark.parametrize("seed", range(5))
    def test_shards_of_heads_in_any_order(self, seed: int) -> None:
        pieces = [
            frame(layer, heads, tokens)
            for layer in range(2, 6)
            for heads in ((0, 2), (2, 3), (3, 8))
            for tokens in ((0, 512), (512, 600), (600, 601))
        ]
        random.Random(seed).shuffle(pieces)
        assembly = Assembly(range(2, 6), 8, 601)
        for piece in pieces:
            assert not assembly.is_done
            assembly.add(piece)
        assert assembly.is_done
        assert assembly.complete_tokens() == 601

    def test_the_valid_prefix_of_a_broken_transfer(self) -> None:
        assembly = Assembly(range(2), 1, 100)
        assembly.add(frame(0, tokens=(0, 64)))
        assembly.add(frame(0, tokens=(64, 100)))
        assembly.add(frame(1, tokens=(0, 64)))
        assert assembly.complete_tokens() == 64
        assert repr(assembly) == "<Assembly 164/200, complete prefix 64 tokens>"

    def test_a_refused_frame_changes_nothing(self) -> None:
        assembly = Assembly(range(1), 2, 10)
        assembly.add(frame(heads=(1, 2), tokens=(5, 6)))
        with pytest.raises(KVProtocolError, match=r"repeats positions 5\.\.5 of head 1"):
            assembly.add(frame(heads=(0, 2), tokens=(0, 10)))
        assembly.check_integrity()
        assembly.add(frame(heads=(0, 1), tokens=(0, 10)))

    @pytest.mark.parametrize("arguments", [(range(0), 1, 1), (range(1), 0, 1), (range(1), 1, 0)])
    def test_nothing_to_assemble(self, arguments: tuple[range, int, int]) -> None:
        with pytest.raises(ValueError, match="nothing to assemble"):
            Assembly(*arguments)


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
