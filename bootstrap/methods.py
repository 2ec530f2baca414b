"""What members ask and tell each other, as values: a method's name on the wire, its types, and who may call it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar, final

import msgspec

from .trust.keys import PeerId
from .trust.tokens import Role

Body = TypeVar("Body", bound=msgspec.Struct)
Answer = TypeVar("Answer", bound=msgspec.Struct)

MEMBERS: Final = frozenset({Role.WORKER, Role.ADMIN})
EVERYONE: Final = frozenset(Role)

AsyncHandler = Callable[[PeerId, Role, Body], Awaitable[Answer]]
NoticeHandler = Callable[[PeerId, Role, Body], None]


@final
@dataclass(frozen=True, slots=True)
class Method(Generic[Body, Answer]):
    """A question with an answer. `callers`: the roles that may ask it."""

    name: str
    body: type[Body]
    answer: type[Answer]
    callers: frozenset[Role] = MEMBERS


@final
@dataclass(frozen=True, slots=True)
class Notice(Generic[Body]):
    """Something that is told without an answer. `callers`: the roles that may tell it."""

    name: str
    body: type[Body]
    callers: frozenset[Role] = MEMBERS


class Messenger(Protocol):
    """How a part of a node talks to peers, itself included: a `Network`, or in tests one of `node.testing`."""

    @property
    def peer_id(self) -> PeerId:
        """This node."""

    async def request(self, peer: PeerId, method: Method[Body, Answer], body: Body, timeout: float) -> Answer:
        """Ask a peer; waits `timeout` seconds at most. Raises NetworkError."""

    def notify(self, peer: PeerId, notice: Notice[Body], body: Body) -> None:
        """Tell a peer something. Raises PeerLost for one that is gone or does not read."""

    def handle(self, method: Method[Body, Answer], handler: AsyncHandler[Body, Answer]) -> None:
        """Answer a method with `await handler(peer, role, body)`."""

    def on_notice(self, notice: Notice[Body], handler: NoticeHandler[Body]) -> None:
        """Take a notice with `handler(peer, role, body)`, which must not block."""
