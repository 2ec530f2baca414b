"""One request on its way: waits for moments, feeds its machine with events, and carries out what it asks for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, Protocol, assert_never, final

import trio
from msgspec.structs import replace

from ...bootstrap import NetworkError, PeerId, PeerLost, RemoteError
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
from .. import messages
from ..methods import DECODE_OPEN, PREFILL_OPEN, PREFILL_SLOT, REQUEST_STOP
from ..view import NetworkView
from .opened import OpenedRequest, Telling
from .request_log import RequestLog
from .routes import RouteFinder
from .slot_messages import SlotOpen

_log = logging.getLogger(__name__)

ASK_AGAIN_S: Final = 0.05
"""A prefill replica that says "not yet" is not asked again at once."""


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
class SlotQuestion:
    """A request waits until a prefill replica takes it, and says how much it computes of its prompt of so many
    `tokens`. `attempt`: the id of the attempt that begins then."""

    def __init__(
        self, attempt: str, route: Route, tokens: int, messenger: Messenger, routes: RouteFinder, timeout_s: float
    ) -> None:
        assert route.prefill is not None
        self.prefill = PeerId(route.prefill)
        self.tokens = tokens
        self._attempt = attempt
        self._route = route
        self._messenger = messenger
        self._routes = routes
        self._timeout_s = timeout_s
        self._scope = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<SlotQuestion {self._attempt} at {self.prefill}>"

    async def wait(self) -> Route | None:
        """The route with the split; without the prefill replica where that refuses, or cannot be asked. None: it
        does not get on with its work, or the question is not asked any more: look for another route."""
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
        while self.prefill not in self._routes.hung:
            answer = await self._messenger.request(self.prefill, PREFILL_SLOT, body, self._timeout_s)
            if answer.split is not None:
                split = min(answer.split, self.tokens)
                return replace(self._route, split=split, splits_there=False)
            await trio.sleep(ASK_AGAIN_S)
        return None

    def cancel(self) -> None:
        """Ask no more."""
        self._scope.cancel()

    def giving_up(self) -> Telling[messages.StopRequest]:
        """What the prefill replica is told: the request does not come."""
        return Telling(self.prefill, REQUEST_STOP, messages.StopRequest(request=self._attempt))


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
        self._slot: SlotQuestion | None = None  # that is waited for
        self._taken: SlotQuestion | None = None  # answered, and the prefill replica has not been sent the request

    def __repr__(self) -> str:
        return f"<RequestDriver {self.request!r}>"

    def list_work(self) -> Iterator[tuple[str, int]]:
        """As its machine lists it, with the replica where it waits for a slot."""
        yield from self.request.machine.list_work()
        if self._slot is not None:
            yield self._slot.prefill, self._slot.tokens

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
                self._taken = None  # from here on its slot is free when its prefill is over, or is stopped
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
        """The route is taken at once, unless its prefill replica is to say when, and how the prompt is split. That is
        not waited for while a replica is in doubt: then it computes all of the prompt."""
        request = self.request
        if self._slot is not None and not wanted.leaving:
            return request.machine.held(now)
        self._give_up_slot()
        try:
            route = self._routes.find(wanted, now, request.live.left, request.token, request.live.prefix_names)
        except NoRoute as error:
            return request.machine.not_routed(str(error), now, is_hopeful=self._routes.is_hopeful)
        if route.splits_there and route.prefill is not None and request.live.may_split and not wanted.leaving:
            self._slot = SlotQuestion(
                request.next_attempt, route, wanted.tokens, self._messenger, self._routes, self._open_timeout_s
            )
            self._nursery.start_soon(self._wait_for_slot, self._slot)
            return request.machine.held(now)
        return request.machine.routed(route, now, self._routes.expect(route, wanted.tokens))

    async def _wait_for_slot(self, slot: SlotQuestion) -> None:
        """Until the prefill replica takes the request, unless that is over before."""
        route = await slot.wait()
        if self._slot is slot:
            self.step(partial(self._use_slot, slot, route))

    def _use_slot(self, slot: SlotQuestion, route: Route | None, now: float) -> Ready:
        """Begin an attempt on the route as the prefill replica has split it; None: look for another one."""
        request, plan, self._slot = self.request, self._plan, None
        ready: Ready = ()
        if (
            route is not None
            and plan is not None
            and all(map(plan.replica, filter(None, (route.prefill, route.decode))))
        ):
            ready = request.machine.routed(route, now, self._routes.expect(route, slot.tokens))
        else:
            ready = request.machine.network_changed(now)
        self._taken = slot
        if not any(isinstance(each, OpenDecode) and each.prefill == slot.prefill for each in ready):
            self._give_up_slot()
        return ready

    def _give_up_slot(self) -> None:
        """The prefill replica does not get the request for which it was asked for a slot."""
        slot, self._slot, self._taken = self._slot or self._taken, None, None
        if slot is not None:
            slot.cancel()
            self._tell(slot.giving_up())

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
                    if self._taken is not None:  # the prefill replica is not sent the request all the same
                        self._give_up_slot()
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
        self._give_up_slot()
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
