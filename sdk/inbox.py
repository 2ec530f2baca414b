"""What a gateway says of one request, until it is wanted, and for how long more is waited for."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, final

import trio

from ..bootstrap import PeerId
from ..node.messages import AnswerUpdate
from .requests import GatewayWaitLimits

LOOK_S: Final = 1.0  # between two looks for another gateway than one that is silent


class GatewaySilent(Exception):
    """It has said nothing for too long, and another one could be asked. The text says why."""


class _Other(Enum):
    """What is no update."""

    LOST = "the gateway is gone"
    LOOK = "the limits have changed"


@final
class Inbox:
    """Of one attempt at a request. `opening` is the wait for its acceptance, and cancelled when the gateway hangs;
    `others` are those that could be asked instead."""

    def __init__(self, gateway: PeerId, others: Callable[[], list[PeerId]]) -> None:
        self.gateway = gateway
        self.opening = trio.CancelScope()
        self._others = others
        self._limits: GatewayWaitLimits | None = None
        self._send, self._receive = trio.open_memory_channel[AnswerUpdate | _Other](float("inf"))

    def __repr__(self) -> str:
        return f"<Inbox {self.gateway} {self._limits}>"

    def accept(self, limits: GatewayWaitLimits) -> None:
        """The gateway has taken the request, and is waited for by these from now on."""
        self._limits = limits

    def put(self, update: AnswerUpdate) -> None:
        """It has said this."""
        self._send.send_nowait(update)

    def lose(self) -> None:
        """The connection to it is gone."""
        self._send.send_nowait(_Other.LOST)

    def on_hung(self, hung: bool, now: float) -> None:
        """It does not answer, or does again."""
        if self._limits is not None:
            self._limits.note_hung(hung, now)
            self._send.send_nowait(_Other.LOOK)
        elif hung and self._others():
            self.opening.cancel()

    async def next(self) -> AnswerUpdate | None:
        """What it says next; None: the connection to it is gone. Raises GatewaySilent."""
        assert self._limits is not None, "it was accepted"
        look_at = self._limits.give_up_at
        while True:
            said: AnswerUpdate | _Other = _Other.LOOK
            with trio.move_on_at(look_at):
                said = await self._receive.receive()
            if said is _Other.LOOK and self._receive.statistics().current_buffer_used:
                said = self._receive.receive_nowait()  # it has come while this process had no time
            now = trio.current_time()
            match said:
                case AnswerUpdate():
                    self._limits.note(said, now)
                    return said
                case _Other.LOST:
                    return None
            look_at = self._limits.give_up_at
            if now >= look_at:
                if self._others():
                    raise GatewaySilent(self._limits.explain(now))
                look_at = now + LOOK_S
