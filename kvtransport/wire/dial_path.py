"""How to dial one path from box to box: a value that the planner hands to whoever dials."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..errors import TicketError
from .permits import Permit
from .signals import MAX_LABEL_BYTES

_MAX_STREAMS = 64
_LEAST_SEGMENT = 536


class DialPath(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to dial one path from box to box: `(host, port)` for `streams` connections.

    With a `relay` permit, host and port are the relay's. `label` names the path in statistics at
    both ends. `congestion`: a TCP congestion control to try, such as "bbr"; where the kernel lacks
    it, its default stays. `pace_bytes_s`: bytes per second that all its connections together may
    send, held by the kernel; 0: no limit. `segment_bytes`: of its TCP segments at most, in both
    directions; 0: as the devices at its ends allow."""

    host: str
    port: int
    label: str = "direct"
    streams: int = 1
    relay: Permit | None = None
    congestion: Annotated[str, msgspec.Meta(max_length=16)] = ""  # as the kernel's names
    pace_bytes_s: int = 0
    segment_bytes: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.host) <= 255 or not self.host.isprintable():
            raise TicketError(f"host {self.host[:64]!r} is not a host name or address")
        if not 0 < self.port < 65536:
            raise TicketError(f"port {self.port} is not a TCP port (1..65535)")
        if not 0 < len(self.label.encode()) <= MAX_LABEL_BYTES:
            raise TicketError(f"label {self.label[:64]!r} must have 1 to {MAX_LABEL_BYTES} bytes")
        if not 1 <= self.streams <= _MAX_STREAMS:
            raise TicketError(f"{self.streams} streams; a path has 1 to {_MAX_STREAMS}")
        if not 0 <= self.pace_bytes_s < 1 << 40:
            raise TicketError(f"pace_bytes_s is {self.pace_bytes_s}; it must be 0 (no limit) or a rate")
        if self.segment_bytes and not _LEAST_SEGMENT <= self.segment_bytes < 1 << 15:  # as the kernel takes it
            raise TicketError(f"segment_bytes is {self.segment_bytes}; it must be 0 or {_LEAST_SEGMENT} to 32767")

    def per_stream(self) -> DialPath:
        """The same path with the pace of one of its connections."""
        return msgspec.structs.replace(self, pace_bytes_s=-(-self.pace_bytes_s // self.streams))

    def is_same_but_streams(self, other: DialPath) -> bool:
        """Whether a connection made for one serves for the other."""
        return msgspec.structs.replace(self, streams=1) == msgspec.structs.replace(other, streams=1)
