"""Clients inside this process, beside those that are connected: what a gateway tells them is a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from ...bootstrap import PeerId
from ...bootstrap.methods import Answer, AsyncHandler, Body, Messenger, Method, Notice, NoticeHandler
from ..messages import AnswerUpdate
from ..methods import ANSWER

PREFIX: Final = "local:"
"""How their names begin: no peer's id has a colon."""


@final
class LocalClients:
    """A `Messenger` that also reaches them."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._take: Callable[[PeerId, AnswerUpdate], None] | None = None

    def __repr__(self) -> str:
        return f"<LocalClients of {self._messenger!r}>"

    def open(self, take: Callable[[PeerId, AnswerUpdate], None]) -> None:
        """From now on `take` hears what they are told; it must not block, nor call the gateway."""
        self._take = take

    @property
    def peer_id(self) -> PeerId:
        return self._messenger.peer_id

    async def request(self, peer: PeerId, method: Method[Body, Answer], body: Body, timeout: float) -> Answer:
        return await self._messenger.request(peer, method, body, timeout)

    def notify(self, peer: PeerId, notice: Notice[Body], body: Body) -> None:
        if notice is ANSWER and self._take is not None and peer.startswith(PREFIX):
            assert isinstance(body, AnswerUpdate)
            self._take(peer, body)
        else:
            self._messenger.notify(peer, notice, body)

    def handle(self, method: Method[Body, Answer], handler: AsyncHandler[Body, Answer]) -> None:
        self._messenger.handle(method, handler)

    def on_notice(self, notice: Notice[Body], handler: NoticeHandler[Body]) -> None:
        self._messenger.on_notice(notice, handler)


def local_client(name: str) -> PeerId:
    """The client of this process with that name: clients take turns."""
    return PeerId(PREFIX + name)
