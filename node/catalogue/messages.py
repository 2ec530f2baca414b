"""What a coordinator tells of who hosts what: read by the boxes that host what they are given."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ...bootstrap import DECODE_ERRORS
from ...coordinator.bounds import MAX_SERVICES, Counter, Name
from ...coordinator.services.catalogue import EntryName
from ..messages import MAX_PEERS, Message

HOSTING: Final = "hosting"


class HostedService(Message, frozen=True, kw_only=True):
    """The boxes that are to host an entry of the catalogue."""

    name: EntryName
    boxes: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_PEERS)] = ()


class HostingPlan(Message, frozen=True, kw_only=True):
    """What a coordinator publishes of the boxes that host what they are given. `serial` counts within an epoch; `idle`:
    those that are to let go of what they host. Earlier releases do not read it, and have no such boxes."""

    epoch: Counter
    serial: Counter
    services: Annotated[tuple[HostedService, ...], msgspec.Meta(max_length=MAX_SERVICES)] = ()
    idle: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_PEERS)] = ()

    @property
    def number(self) -> tuple[int, int]:
        """`(epoch, serial)`: who says two things under one number lies to somebody."""
        return (self.epoch, self.serial)

    def entry_of(self, box: str) -> str:
        """What a box is to host; "": this does not say. Of two the first counts."""
        return next((each.name for each in self.services if box in each.boxes), "")


_plans: Final = msgspec.msgpack.Decoder(HostingPlan)


def read_hosting(entry: bytes) -> HostingPlan | None:
    """A hosting plan from a published entry; None for bytes that are none."""
    try:
        return _plans.decode(entry)
    except (*DECODE_ERRORS, ValueError):
        return None


def read_hosting_number(entry: bytes) -> tuple[int, int] | None:
    """Its number."""
    plan = read_hosting(entry)
    return None if plan is None else plan.number
