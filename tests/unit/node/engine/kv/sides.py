"""What the tests of the connector's two sides share."""

from __future__ import annotations

import random

from p2pserve.kvtransport.wire.tickets import TransferTicket, issue_link
from p2pserve.node.engine.kv.step_work import OpenTransfer
from p2pserve.node.engine.protocol import Inlet, KvSlice, Outlet
from p2pserve.node.engine.settings import TransferSettings

SETTINGS = TransferSettings()
LAYERS, HEADS, HEAD_DIM, BLOCK, BLOCKS = 4, 2, 8, 16, 12
LINK = issue_link(600.0, random.Random(1).randbytes)
WHOLE = KvSlice(first_layer=0, last_layer=LAYERS, first_head=0, last_head=HEADS)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ticket(transfer: bytes) -> TransferTicket:
    return TransferTicket(transfer=transfer, link=LINK.link, codec="raw", deadline_s=60.0)


def sending(transfer: bytes, tokens: int) -> OpenTransfer:
    outlet = Outlet(slice=WHOLE, ticket=ticket(transfer), link=LINK, paths=(), gbps=1.0, rtt_s=0.0)
    return OpenTransfer(transfer=transfer, tokens=tokens, send=(outlet,))


def receiving(transfer: bytes, tokens: int) -> OpenTransfer:
    return OpenTransfer(
        transfer=transfer, tokens=tokens, receive=(Inlet(slice=WHOLE, ticket=ticket(transfer), link=LINK),)
    )
