"""One request on its way: waits for moments, feeds its machine with events, and carries out what it asks for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, assert_never, final

import trio

from ...bootstrap import NetworkError, PeerId, PeerLost
from ...bootstrap.methods import Messenger
from ...coordinator import NoRoute, Plan, Route
from ...coordinator.requests.values import (
    Action,
    CancelTransfer,
    CancelWork,
    EndRequest,
    FindRoute,
    NoteStall,
    OpenDecode,
    OpenPrefill,
    PassFirstToken,
    Ready,
    RequestSettings,
    ShowTokens,
)
from ...coordinator.routing.pools import NO_ANSWERS, PoolClaim
from .. import messages
from ..methods import DECODE_OPEN, PREFILL_OPEN
from ..view import NetworkView
from .opened import OpenedRequest, Telling
from .questions import PoolQuestion, RouteQuestion, SlotQuestion
from .request_log import RequestLog
from .routes import RouteFinder

_log = logging.getLogger(__name__)


class Turns(Protocol):
    """When a request may be given to engines, and what it is told of requests meanwhile."""

    def may_route(self, request: OpenedRequest) -> bool:
        """Whether its turn has come. If not, its machine is to hear `network_changed` when it has."""

    def on_tokens_shown(self, request: OpenedRequest, count: int) -> None:
        """Its client has been sent so many tokens of the answer."""

    def on_stalled(self, replica: PeerId) -> None:
        """A replica does not get on with a request, though it answers."""

    def on_end(self, request: OpenedRequest, end: EndRequest) -> None:
        """It is over."""


@final
class RequestDriver:
    """Drives a request from its arrival to its end, as its `turns` allow. Questions are asked in `nursery`; the client
    hears something every `news_s` of the settings."""

    def __init__(
        self,
        request: OpenedRequest,
        *,
        view: NetworkView,
        routes: RouteFinder,
        messenger: Messenger,
        nursery: trio.Nursery,
        settings: RequestSettings,
        turns: Turns,
        log: RequestLog,
    ) -> None:
        self.request = request
        self._chronicle = log
        self._view = view
        self._routes = routes
        self._messenger = messenger
        self._nursery = nursery
        self._open_timeout_s = settings.open_timeout_s
        self._news_s = settings.news_s
        self._told_at = trio.current_time()  # the client, of this request
        self._turns = turns
        self._is_over = False
        self._changed = trio.Event()  # the machine wants to be woken at another moment, or it is over
        self._asks_for = 0  # the attempt whose replicas may be asked to begin; 0: none
        self._asking = trio.CancelScope()  # around the latest question
        self._question: RouteQuestion | None = None  # that is waited for
        self._places: RouteQuestion | None = None  # answered, and not all replicas have been sent the request

    def __repr__(self) -> str:
        return f"<RequestDriver {self.request!r}>"

    def list_work(self) -> Iterator[tuple[str, int]]:
        """As its machine lists it, with the replicas that it asks before it takes a route."""
        yield from self.request.machine.list_work()
        if self._question is not None:
            yield from self._question.list_work()

    async def run(self) -> None:
        """Wake the machine whenever it wants to be, and tell the client that it waits for something, until it is
        over."""
        request = self.request
        while not self._is_over:
            self._changed = trio.Event()
            with trio.move_on_at(min(request.machine.wake_at, self._told_at + self._news_s)) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                self.step(request.machine.wake)
            if trio.current_time() >= self._told_at + self._news_s:
                self._tell_news()

    def _tell_news(self) -> None:
        """Let the client know that its request is under way still."""
        self._told_at = trio.current_time()
        if not self._is_over and not self._tell(self.request.news()):
            self.step(self.request.machine.stop)

    def step(self, event: Callable[[float], Ready]) -> None:
        """Feed one event to the machine, and do all that follows from it."""
        if self._is_over:
            return
        machine = self.request.machine
        wake_at = machine.wake_at
        try:
            pending = deque(event(trio.current_time()))
            while pending:
                pending.extend(self._carry_out(pending.popleft()))
        except Exception as bug:
            # One request's trouble must not end the node. The client hears of it, and the log has the traceback.
            _log.exception("request %s", self.request.id)
            for replica, _ in machine.list_work():
                self._tell(self.request.telling(CancelWork(self._asks_for, replica)))
            ended = EndRequest("error", f"internal error: {type(bug).__name__}", None)
            self._chronicle.note_action(ended)
            self._end(ended)
        if machine.wake_at != wake_at:
            self._changed.set()

    @property
    def _plan(self) -> Plan | None:
        return self._view.plan_of(self._routes.service)

    def _carry_out(self, action: Action) -> Ready:
        """Returns what follows at once."""
        request, now = self.request, trio.current_time()
        self._chronicle.note_action(action)
        match action:
            case FindRoute() if not self._turns.may_route(request):
                return request.machine.held(now)
            case FindRoute():
                return self._find_route(action, now)
            case OpenDecode():
                plan = self._plan
                assert plan is not None  # the route is from it
                self._asks_for = action.attempt
                self._nursery.start_soon(self._open, action, request.begin_attempt(action, plan, now))
            case OpenPrefill():
                self._places = None  # from here on a slot is free when its prefill is over, or is stopped
                self._nursery.start_soon(self._open, action, request.prefill_open(action))
            case CancelWork():
                self._stop_asking()
                self._tell(request.telling(action))
            case PassFirstToken() | CancelTransfer():
                self._tell(request.telling(action))
            case ShowTokens():
                # A client that is gone, or does not read, must not get an answer with a gap.
                if not self._tell(request.telling(action)):
                    return request.machine.stop(now)
                self._told_at = now
                self._turns.on_tokens_shown(request, len(action.tokens))
            case NoteStall():
                self._turns.on_stalled(PeerId(action.replica))
            case EndRequest():
                self._end(action)
            case _:
                assert_never(action)
        return ()

    def _find_route(self, wanted: FindRoute, now: float) -> Ready:
        """The route is taken at once, unless its replicas are to be asked. That is not waited for while one that has
        the request is in doubt: then the others are not asked, and a prefill replica computes all of the prompt."""
        request = self.request
        if self._question is not None and not wanted.leaving:
            return request.machine.held(now)
        self._give_up_places()
        try:
            route = self._choose_route(wanted, NO_ANSWERS)
        except NoRoute as error:
            return request.machine.not_routed(str(error), now, is_hopeful=self._routes.is_hopeful)
        question = self._question_about(route, wanted) if not wanted.leaving else None
        if question is not None:
            self._begin_question(question)
            return request.machine.held(now)
        return request.machine.routed(route, now, self._routes.expect(route, wanted.tokens))

    def _begin_question(self, question: RouteQuestion) -> None:
        self._question = question
        self._nursery.start_soon(self._wait_for_answer, question)

    def _choose_route(self, wanted: FindRoute, answers: Mapping[PoolClaim, bool]) -> Route:
        """By what replicas have answered to claims of earlier ones. Raises NoRoute."""
        live, token = self.request.live, self.request.token
        return self._routes.find(wanted, trio.current_time(), live.left, token, live.prefix_names, answers)

    def _question_about(self, route: Route, wanted: FindRoute) -> RouteQuestion | None:
        """What its replicas are to be asked; None: nothing."""
        attempt, messenger, routes = self.request.next_attempt, self._messenger, self._routes
        if route.prefill is not None and not self.request.live.may_split:
            return None
        if route.splits_there and route.prefill is not None:
            return self._ask_for_slot(route, wanted.tokens)
        if route.claims:
            find = partial(self._choose_route, wanted)
            return PoolQuestion(attempt, route, wanted.tokens, messenger, routes, find)
        return None

    def _ask_for_slot(self, route: Route, tokens: int) -> SlotQuestion:
        return SlotQuestion(
            self.request.next_attempt, route, tokens, self._messenger, self._routes, self._open_timeout_s
        )

    async def _wait_for_answer(self, question: RouteQuestion) -> None:
        """Until replicas take the request, unless that is over before."""
        route = await question.wait()
        if self._question is question:
            self.step(partial(self._use_answer, question, route))

    def _use_answer(self, question: RouteQuestion, route: Route | None, now: float) -> Ready:
        """Begin an attempt on the route that replicas have settled; None: look for another one."""
        request, plan, self._question = self.request, self._plan, None
        ready: Ready = ()
        if (
            route is not None
            and plan is not None
            and all(map(plan.replica, filter(None, (route.prefill, route.decode))))
        ):
            if route.splits_there and route.prefill is not None and request.live.may_split:  # others have refused it
                self._begin_question(self._ask_for_slot(route, question.tokens))
                return ready
            self._routes.note_accepted(request.token)
            ready = request.machine.routed(route, now, self._routes.expect(route, question.tokens))
        else:
            ready = request.machine.network_changed(now)
        opening = next((each for each in ready if isinstance(each, OpenDecode)), None)
        self._places = question if opening is not None and opening.prefill is not None else None
        self._tell_others(question, (opening.decode, opening.prefill) if opening is not None else ())
        return ready

    def _tell_others(self, question: RouteQuestion, kept: Collection[str | None]) -> None:
        """Replicas that have a place for it, and are not `kept`, hear that it does not come."""
        for telling in question.give_up(kept):
            self._tell(telling)

    def _give_up_places(self, kept: Collection[str | None] = ()) -> None:
        """The replicas that were asked do not get the request, but for those that have it."""
        question, self._question, self._places = self._question or self._places, None, None
        if question is not None:
            question.cancel()
            self._tell_others(question, kept)

    async def _open(self, opening: OpenDecode | OpenPrefill, asked: messages.DecodeOpen | messages.PrefillOpen) -> None:
        """Ask a replica to begin, unless the attempt has been given up before there was time for that."""
        attempt, request = opening.attempt, self.request
        replica = PeerId(opening.decode if isinstance(opening, OpenDecode) else opening.prefill)
        if attempt != self._asks_for:
            return
        with trio.CancelScope() as self._asking:
            part = "decode" if isinstance(opening, OpenDecode) else "prefill"
            try:
                if isinstance(asked, messages.PrefillOpen):
                    await self._messenger.request(replica, PREFILL_OPEN, asked, self._open_timeout_s)
                    self._chronicle.note_opened(attempt, replica, part)
                else:
                    opened = await self._messenger.request(replica, DECODE_OPEN, asked, self._open_timeout_s)
                    self._chronicle.note_opened(attempt, replica, part)
                    self.step(partial(request.on_decode_opened, attempt, opened))
                    if self._places is not None:  # a prefill replica is not sent the request all the same
                        self._give_up_places((replica,))
            except NetworkError as error:
                self._chronicle.note_opened(attempt, replica, part, str(error))
                starts = self._view.starts(replica)
                self.step(partial(request.machine.open_failed, attempt, replica, str(error), starts))

    def _stop_asking(self) -> None:
        """A replica is told to forget the attempt: it must not be asked for it afterwards."""
        self._asks_for = 0
        self._asking.cancel()

    def _end(self, end: EndRequest) -> None:
        self._is_over = True
        self._changed.set()
        self._stop_asking()
        self._give_up_places()
        self.request.usd = self._chronicle.cost().usd
        self._turns.on_end(self.request, end)
        if end.finish is not None:  # else the client has gone, or wants no more
            self._tell(self.request.telling(end))

    def _tell(self, telling: Telling[Any]) -> bool:
        """Whether somebody is there to be told."""
        try:
            self._messenger.notify(telling.peer, telling.notice, telling.body)
        except PeerLost:
            return False
        return True
