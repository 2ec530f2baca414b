"""Two ends of a transfer and the link between them, without a network: for the tests of this room and of
its users.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass, field

from .messages import Message
from .stream import ReceiveStream, SendStream
from .tickets import Ticket, issue
from .wire import Direction, Opener, Sealer

__all__ = ["EndpointPair", "FaultyLink", "stream_pair", "ticket_for_tests"]


@dataclass(slots=True, kw_only=True)
class FaultyLink:
    """A byte pipe that may misbehave: cuts everything after `truncate_at` bytes, loses or flips bytes with
    a given probability.

    `max_piece` is the largest piece delivered at once; cuts are random, as TCP's are. The same seed gives
    the same misdeeds.
    """

    seed: int = 0
    max_piece: int = 1 << 20
    truncate_at: int | None = None
    loss: float = 0.0
    corruption: float = 0.0
    carried: int = 0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def carry(self, data: bytes) -> list[bytes]:
        """The pieces that come out of the far end."""
        pieces: list[bytes] = []
        at = 0
        while at < len(data):
            piece = data[at : at + self._random.randint(1, self.max_piece)]
            at += len(piece)
            if self.truncate_at is not None:
                piece = piece[: max(0, self.truncate_at - self.carried)]
            self.carried += len(piece)
            if not piece or self._random.random() < self.loss:
                continue
            pieces.append(self._flip(piece) if self._random.random() < self.corruption else piece)
        return pieces

    def _flip(self, piece: bytes) -> bytes:
        changed = bytearray(piece)
        changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)


@dataclass(slots=True)
class EndpointPair:
    """A sender and a receiver with one link per direction. Each call moves one message across and returns
    what came out.
    """

    ticket: Ticket
    there: FaultyLink = field(default_factory=FaultyLink)
    back: FaultyLink = field(default_factory=FaultyLink)
    _sealers: dict[Direction, Sealer] = field(init=False, repr=False)
    _openers: dict[Direction, Opener] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._sealers = {direction: Sealer(self.ticket.key, direction) for direction in Direction}
        self._openers = {direction: Opener(self.ticket.key, direction) for direction in Direction}

    def to_receiver(self, message: Message) -> list[Message]:
        return self._move(message, Direction.FROM_SENDER, self.there)

    def to_sender(self, message: Message) -> list[Message]:
        return self._move(message, Direction.FROM_RECEIVER, self.back)

    def hang_up(self) -> None:
        """Both ends learn that the connection is over; a ProtocolError if that was inside a record."""
        for opener in self._openers.values():
            opener.finish()

    def _move(self, message: Message, direction: Direction, link: FaultyLink) -> list[Message]:
        data = b"".join(self._sealers[direction].seal(message))
        opener = self._openers[direction]
        return [out for piece in link.carry(data) for out in opener.feed(piece)]


def ticket_for_tests(seed: int = 0, *, codec: str = "raw", deadline_s: float = 30.0, port: int = 1) -> Ticket:
    """A ticket whose key follows from the seed. Worthless as a secret."""
    return issue("127.0.0.1", port, codec, deadline_s, random.Random(seed).randbytes)


def stream_pair(ticket: Ticket, *, timeout: float = 5.0) -> tuple[SendStream, ReceiveStream]:
    """Both ends over a local socket pair, the hello already behind them."""
    left, right = socket.socketpair()
    return SendStream(left, ticket, timeout=timeout), ReceiveStream(right, ticket, timeout=timeout)
