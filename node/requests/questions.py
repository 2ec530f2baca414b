"""What replicas are asked before a request takes a route: a prefill replica when it takes it and how much of the prompt
it computes (Cronus), the machines of a pool whether they take it at all (Splitwise)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, Protocol, final

import trio
from msgspec.structs import replace

from ...bootstrap import NetworkError, PeerId, RemoteError
from ...bootstrap.methods import Messenger
from ...coordinator import NoRoute, Route
from ...coordinator.routing.pools import PoolClaim
from .. import messages
from ..methods import POOL_CLAIM, PREFILL_SLOT, REQUEST_STOP
from .opened import Telling
from .routes import RouteFinder
from .slot_messages import PoolAsk, SlotOpen

ASK_AGAIN_S: Final = 0.05
"""A prefill replica that says "not yet" is not asked again at once."""

CLAIM_TIMEOUT_S: Final = 2.0
"""A replica answers claims at once. Longer: more of its answers count where it is busy; shorter: a request loses less
time on one that hangs."""


class RouteQuestion(Protocol):
    """A request of so many `tokens` waits for what its replicas say."""

    tokens: int

    def list_work(self) -> Iterator[tuple[str, int]]:
        """Replicas that have, or may have, a place for it, with the tokens of its prompt that each computes."""

    async def wait(self) -> Route | None:
        """The route; None: look for another one, or the question is not asked any more."""

    def cancel(self) -> None:
        """Ask no more."""

    def give_up(self, kept: Collection[str | None]) -> Iterator[Telling[messages.StopRequest]]:
        """What replicas are told with a place for it, but for those that are `kept`: it does not come."""


@final
class SlotQuestion:
    """A request waits until a prefill replica takes it, and says how much it computes of its prompt of so many
    `tokens`. `attempt`: the id of the attempt that begins then."""

    def __init__(
        self, attempt: str, route: Route, tokens: int, messenger: Messenger, routes: RouteFinder, timeout_s: float
    ) -> None:
        assert route.prefill is not None
        self.tokens = tokens
        self._prefill = PeerId(route.prefill)
        self._attempt = attempt
        self._route = route
        self._messenger = messenger
        self._routes = routes
        self._timeout_s = timeout_s
        self._scope = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<SlotQuestion {self._attempt} at {self._prefill}>"

    def list_work(self) -> Iterator[tuple[str, int]]:
        """See `RouteQuestion`."""
        yield self._prefill, self.tokens

    async def wait(self) -> Route | None:
        """The route with the split; without the prefill replica where that refuses, or cannot be asked. None: it
        does not get on with its work, or the question is not asked any more."""
        with self._scope:
            try:
                return await self._ask()
            except RemoteError as error:
                if error.code == "unknown_method":  # of a release that cannot choose: all of the prompt is its part
                    return replace(self._route, splits_there=False)
            except NetworkError:
                pass
            return Route(prefill=None, decode=self._route.decode)
        return None

    async def _ask(self) -> Route | None:
        service = self._routes.service
        body = SlotOpen(request=self._attempt, service=service, prompt_tokens=self.tokens, decode=self._route.decode)
        while self._prefill not in self._routes.hung:
            answer = await self._messenger.request(self._prefill, PREFILL_SLOT, body, self._timeout_s)
            if answer.split is not None:
                split = min(answer.split, self.tokens)
                return replace(self._route, split=split, splits_there=False)
            await trio.sleep(ASK_AGAIN_S)
        return None

    def cancel(self) -> None:
        """See `RouteQuestion`."""
        self._scope.cancel()

    def give_up(self, kept: Collection[str | None]) -> Iterator[Telling[messages.StopRequest]]:
        """See `RouteQuestion`."""
        if self._prefill not in kept:
            yield Telling(self._prefill, REQUEST_STOP, messages.StopRequest(request=self._attempt))


@final
class PoolQuestion:
    """A request asks the replicas of its route for places, and where one refuses, those of the next route that `find`
    chooses, which is told what has been answered. `attempt`: the id of the attempt that begins then."""

    def __init__(
        self,
        attempt: str,
        route: Route,
        tokens: int,
        messenger: Messenger,
        routes: RouteFinder,
        find: Callable[[Mapping[PoolClaim, bool]], Route],
    ) -> None:
        self.tokens = tokens
        self._attempt = attempt
        self._route = route
        self._messenger = messenger
        self._routes = routes
        self._find = find
        self._answers: dict[PoolClaim, bool] = {}
        self._scope = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<PoolQuestion {self._attempt}: {len(self._answers)} answers>"

    def list_work(self) -> Iterator[tuple[str, int]]:
        """See `RouteQuestion`."""
        for claim in self._route.claims:
            if self._answers.get(claim, True):
                yield claim.replica, claim.prefill_tokens

    async def wait(self) -> Route | None:
        """The route whose replicas have all accepted, or that nobody is asked about. Each try takes a round trip."""
        with self._scope:
            while unasked := [claim for claim in self._route.claims if claim not in self._answers]:
                async with trio.open_nursery() as nursery:
                    for claim in unasked:
                        nursery.start_soon(self._ask, claim)
                if not all(map(self._answers.get, self._route.claims)):
                    try:
                        self._route = self._find(self._answers)
                    except NoRoute:
                        return None
            return replace(self._route, claims=())
        return None

    async def _ask(self, claim: PoolClaim) -> None:
        body = PoolAsk(request=self._attempt, service=self._routes.service, claim=claim)
        asked = self._routes.own_work(claim)
        try:
            answer = await self._messenger.request(PeerId(claim.replica), POOL_CLAIM, body, CLAIM_TIMEOUT_S)
        except RemoteError as error:
            # A release that keeps no limits takes everything.
            self._answers[claim] = error.code == "unknown_method"
        except NetworkError:
            self._answers[claim] = False
        else:
            self._answers[claim] = answer.accepted
            self._routes.note_answer(claim, answer.accepted, answer.state, asked)

    def cancel(self) -> None:
        """See `RouteQuestion`."""
        self._scope.cancel()

    def give_up(self, kept: Collection[str | None]) -> Iterator[Telling[messages.StopRequest]]:
        """See `RouteQuestion`."""
        accepted = (claim.replica for claim, accepted in self._answers.items() if accepted)
        asked = (claim.replica for claim in self._route.claims if claim not in self._answers)
        for replica in sorted({*accepted, *asked} - {*kept}):
            yield Telling(PeerId(replica), REQUEST_STOP, messages.StopRequest(request=self._attempt))
