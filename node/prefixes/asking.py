"""A gateway asks replicas which prefixes they hold, while it routes requests to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, final

import trio

from ...bootstrap import NetworkError, PeerId, RemoteError
from ...bootstrap.methods import Messenger
from ...coordinator.prefixes.knowledge import PrefixKnowledge
from .. import methods
from .messages import PrefixQuery

INTERVAL_S: Final = 1.0
"""Between two questions to one replica. Shorter: less is routed by what is not true any more, and more is said."""
USED_S: Final = 10.0
"""So long after a request it goes on asking."""
SILENT_S: Final = 60.0
"""One that does not know the question is not asked again so soon: it is of an earlier release."""
TIMEOUT_S: Final = 5.0


@final
class PrefixWatch:
    """See the module. `heads`: the replicas that may be asked, by their heads."""

    def __init__(self, messenger: Messenger, service: str, heads: Callable[[], Iterable[PeerId]]) -> None:
        self.known = PrefixKnowledge()
        self._messenger = messenger
        self._service = service
        self._heads = heads
        self._used = trio.Event()
        self._used_until = 0.0
        self._silent_until: dict[PeerId, float] = {}

    def __repr__(self) -> str:
        return f"<PrefixWatch {self.known!r}>"

    def note_use(self, now: float) -> None:
        """A request is about to be routed."""
        self._used_until = now + USED_S
        self._used.set()

    async def run(self) -> None:
        """Ask for as long as requests come."""
        while True:
            await self._used.wait()
            self._used = trio.Event()
            while trio.current_time() < self._used_until:
                async with trio.open_nursery() as nursery:
                    for head in self._choose_heads(trio.current_time()):
                        nursery.start_soon(self._ask, head)
                    await trio.sleep(INTERVAL_S)

    def _choose_heads(self, now: float) -> list[PeerId]:
        heads = list(self._heads())
        self.known.keep(heads)
        self._silent_until = {head: until for head, until in self._silent_until.items() if until > now}
        return [head for head in heads if head not in self._silent_until]

    async def _ask(self, head: PeerId) -> None:
        heard = self.known.index.heard(head)
        try:
            query = PrefixQuery(service=self._service, heard=heard)
            answer = await self._messenger.request(head, methods.PREFIXES, query, TIMEOUT_S)
        except NetworkError as error:
            if isinstance(error, RemoteError):
                self.known.index.forget(head)
                if error.code == "unknown_method":
                    self._silent_until[head] = trio.current_time() + SILENT_S
            return
        if answer.news is not None:
            self.known.index.take(head, answer.news)
