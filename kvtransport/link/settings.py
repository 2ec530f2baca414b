"""What an operator may tune about a link. The two ends need not agree."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Seconds and bytes. The defaults are those of `wan`, which also serve inside one site.

    chunk_bytes       what a connection takes at a time: a power of two, 4 KiB to 1 MiB. Smaller
                      balances unequal connections better and loses less when one dies; each chunk
                      costs 50 to 100 us of interpreter at each end.
    limit_bytes       KV that all sending links of a process may hold. More rides out longer stalls
                      of the network and takes memory.
    window_bytes      KV that a receiver lets a transfer have under way and not yet used, unless it
                      grants another window. It must exceed rate * round trip to keep a link full.
    pooled_bytes      receive buffers kept for the next frame. Less saves memory and costs a page
                      fault for every 4 KiB that arrives.
    silence_s         a connection that owes an answer and is silent for so long is dead. Shorter
                      finds a dead path sooner and takes a stall for one.
    grace_s           transfers fail after so long without any connection. Longer survives longer
                      outages and lets the decode side wait longer before it recomputes.
    ping_s            how often each connection is asked for its round trip.
    hedge_s           what is unconfirmed for so long is sent again by an idle connection. Shorter
                      cuts the tail of a slow path and sends more bytes twice.
    authenticate_s    time limit of a dial and of a handshake.
    goodbye_s         how long the end of a link waits for its last words to leave.
    redial_first_s    wait before a connection is dialled again; doubled each time it fails,
    redial_limit_s    up to this.
    early_s           how long a connection is kept whose link is not known here yet.
    ack_chunks        a receiver confirms at the latest after so many chunks,
    ack_bytes         or so many bytes of one, or when nothing more comes
    ack_within_ms     within so many milliseconds. Each confirmation wakes a thread at both ends.
    near_s            round trip below which a connection wakes its reader for whole chunks only,
    fast_s            while the last one is at most so long ago, else for every
    wake_bytes        so many bytes. Larger saves both ends wakings and tells the sender later.
    max_connections   accepted per link.
    """

    chunk_bytes: int = 1024 * 1024
    limit_bytes: int = 256 * 1024 * 1024
    window_bytes: int = 64 * 1024 * 1024
    pooled_bytes: int = 64 * 1024 * 1024
    silence_s: float = 5.0
    grace_s: float = 10.0
    ping_s: float = 1.0
    hedge_s: float = 1.0
    authenticate_s: float = 5.0
    goodbye_s: float = 0.5
    redial_first_s: float = 0.1
    redial_limit_s: float = 5.0
    early_s: float = 30.0
    ack_chunks: int = 4
    ack_bytes: int = 128 * 1024
    ack_within_ms: int = 2
    near_s: float = 0.002
    fast_s: float = 0.01
    wake_bytes: int = 128 * 1024
    max_connections: int = 64

    def __post_init__(self) -> None:
        if self.chunk_bytes.bit_count() != 1 or not 1 << 12 <= self.chunk_bytes <= 1 << 20:
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}; it must be a power of two from 4096 to 1048576")
        for field in fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; it must be positive and finite")

    @classmethod
    def wan(cls) -> LinkSettings:
        """Boxes in different places: a stall of a second or two is nothing unusual."""
        return cls()

    @classmethod
    def lan(cls) -> LinkSettings:
        """Boxes in one place: silence means trouble soon, so that a lost box costs little time."""
        return cls(silence_s=2.0, grace_s=4.0, ping_s=0.5, hedge_s=0.25, redial_limit_s=1.0)
