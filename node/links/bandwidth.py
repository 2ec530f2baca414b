"""What a connection to a member carries, for a box that has not joined: some megabytes there and back over its control
stream. Boxes that have joined measure their links with bursts (`prober`)."""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

import trio

from ...bootstrap import NetworkError, PeerId, RemoteError, Role
from ...bootstrap.members.allowance import Allowance
from ...bootstrap.methods import Messenger
from ...kvtransport.probing.figures import gbps_of
from ..methods import BANDWIDTH
from .messages import CARRIED_BYTES, CarriedBytes, CarryBytes

PIECES: Final = 48  # in each direction at most: 12 MiB
AT_ONCE: Final = 4
MEASURE_S: Final = 3.0  # in each direction at most
_EACH_S, _EACH_BURST = 1.0, 2 * PIECES + AT_ONCE  # pieces for one asker
_ALL_S, _ALL_BURST = 8.0, 8 * PIECES


class Carried(NamedTuple):
    """In Gb/s: from here to a member, and back."""

    up_gbps: float
    down_gbps: float


def answer_bandwidth(messenger: Messenger) -> None:
    """Take and send bytes for whoever asks, as many as are no burden."""
    each: dict[PeerId, Allowance] = {}
    all_of_them = Allowance(_ALL_S, _ALL_BURST)

    async def answer(peer: PeerId, role: Role, body: CarryBytes) -> CarriedBytes:
        now = trio.current_time()
        for gone in [other for other, known in each.items() if known.at < now - _EACH_BURST / _EACH_S]:
            del each[gone]
        if not each.setdefault(peer, Allowance(_EACH_S, _EACH_BURST)).take(now) or not all_of_them.take(now):
            raise RemoteError("busy", "this node has carried bytes enough for now", retry_after_s=60.0)
        return CarriedBytes(payload=bytes(body.wanted))

    messenger.handle(BANDWIDTH, answer)


async def measure_bandwidth(messenger: Messenger, peer: PeerId) -> Carried:
    """Send and fetch pieces for a few seconds. Raises NetworkError where none came through."""
    payload = secrets.token_bytes(CARRIED_BYTES)  # no box in between can compress it
    up = await _carry(messenger, peer, CarryBytes(payload=payload))
    return Carried(up, await _carry(messenger, peer, CarryBytes(wanted=CARRIED_BYTES)))


async def _carry(messenger: Messenger, peer: PeerId, piece: CarryBytes) -> float:
    began, left, done, ended = trio.current_time(), PIECES, 0, trio.current_time()
    problem: NetworkError | None = None

    async def carry() -> None:
        nonlocal left, done, ended, problem
        while left > 0:
            left -= 1
            try:
                await messenger.request(peer, BANDWIDTH, piece, 2 * MEASURE_S)
            except NetworkError as error:
                problem, left = error, 0
                return
            done, ended = done + 1, trio.current_time()

    with trio.move_on_after(MEASURE_S):
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(carry)
    if not done:
        raise problem or RemoteError("slow", f"not one piece of 256 KiB went through in {MEASURE_S:g} s")
    return gbps_of(done * CARRIED_BYTES, max(ended - began, 1e-6))
