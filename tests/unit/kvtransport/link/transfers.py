"""Transfers over a simulated link: how tests begin one, and look at how it ended."""

from __future__ import annotations

import random

from p2pserve.kvtransport.link.receiving import MIN_WINDOW_BYTES
from p2pserve.kvtransport.link.settings import LinkSettings
from p2pserve.kvtransport.wire.channel import LinkRole
from p2pserve.kvtransport.wire.frames import KVFrame

from .simulated import SimulatedLink

SMALL = LinkSettings(chunk_bytes=4096, silence_s=1.0, grace_s=2.0, ping_s=0.2, hedge_s=0.3)
WINDOW = 2 * MIN_WINDOW_BYTES


def frame(layer: int, payload: bytes) -> KVFrame:
    return KVFrame(layer, 0, 1, 0, 1, 0, 0, 64, payload)


def transfer(link: SimulatedLink, name: int, sizes: list[int], *, deadline: float = 60.0) -> bytes:
    """Open at both ends, push everything, finish."""
    key = bytes([name]) * 16
    link.receiver.expect(key, link.now + deadline, link.now)
    link.receiver.grant(key, WINDOW)
    link.sender.open(key, link.now + deadline, link.now)
    for layer, size in enumerate(sizes):
        link.sender.push(key, frame(layer, random.Random(layer).randbytes(size)), link.now, lambda: None)
    link.sender.finish(key, 1)
    return key


def states(link: SimulatedLink, key: bytes) -> tuple[str, str]:
    return tuple(str(link.ends.get((role, key), ["open"])[0]) for role in LinkRole)  # type: ignore[return-value]


def assert_intact(link: SimulatedLink, key: bytes, sizes: list[int]) -> None:
    found = {frame.layer: payload for frame, payload in link.arrived.get(key, [])}
    assert len(link.arrived.get(key, [])) == len(sizes), "a frame came twice or not at all"
    assert all(found[layer] == random.Random(layer).randbytes(size) for layer, size in enumerate(sizes))
