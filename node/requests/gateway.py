"""The gateway of a node: takes clients' requests and owns each one until its last token. The
`RequestMachine` decides; here messages become its events, its actions messages."""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import assert_never, final

import trio

from ...bootstrap import NetworkError, PeerId, PeerLost, RemoteError, Role
from ...bootstrap.methods import Answer, Body, Messenger, Method, Notice
from ...coordinator import Demand, DemandMeter, NoRoute, Route, Router, RoutingSettings
from ...coordinator.requests import (
    Action,
    CancelTransfer,
    CancelWork,
    EndRequest,
    FindRoute,
    OpenDecode,
    OpenPrefill,
    PassFirstToken,
    Ready,
    RequestMachine,
    RequestSettings,
    ShowTokens,
)
from .. import messages
from ..methods import ANSWER, DECODE_FIRST, DECODE_OPEN, PREFILL_OPEN, REQUEST_STOP, TRANSFER_STOP
from ..models import ModelInfo
from ..models.text import PromptError, TextModel
from ..view import NetworkView, Queue
from .opened import OpenedRequest
from .request import LiveRequest, check, tokenize

_log = logging.getLogger(__name__)

SHORT_BYTES = 512  # of a prompt that is tokenised sooner (0.25 ms) than a thread takes it up and answers


@final
class Gateway:
    """Requests of the clients that are connected to this node.

    Args:
        view: the network, kept up to date by the agent.
        messenger: reaches peers, this node too.
        nursery: runs one task per request; cancelling it ends them all.
        routing: the policy that requests are routed by.
    """

    def __init__(
        self,
        *,
        view: NetworkView,
        messenger: Messenger,
        model: ModelInfo,
        text: TextModel,
        nursery: trio.Nursery,
        routing: RoutingSettings | None = None,
        settings: RequestSettings | None = None,
    ) -> None:
        self._view = view
        self._messenger = messenger
        self._model = model
        self._text = text
        self._nursery = nursery
        self._routing = routing or RoutingSettings()
        self._settings = settings or RequestSettings()
        self._tokenizing: dict[tuple[PeerId, str], bool] = {}  # requests; whether their clients still want them
        self._requests: dict[tuple[PeerId, str], OpenedRequest] = {}
        self._attempts: dict[str, OpenedRequest] = {}  # by the id that the replicas know
        self._meter = DemandMeter()
        self._router: Router | None = None  # of the latest plan
        self._threads = trio.CapacityLimiter(2)
        self._draining = False

    def __repr__(self) -> str:
        return f"<Gateway {self._model.service} requests={len(self._requests)}>"

    @property
    def idle(self) -> bool:
        """Whether no client waits for an answer."""
        return not self._requests and not self._tokenizing

    @property
    def demand(self) -> Demand | None:
        """What clients have asked for lately; it changes only when that is news."""
        return self._meter.demand(trio.current_time())

    @property
    def queues(self) -> dict[PeerId, Queue]:
        """What this gateway has at each node."""
        queues: defaultdict[PeerId, Queue] = defaultdict(Queue)
        for request in self._requests.values():
            for replica, unread in request.machine.list_work():
                requests, tokens = queues[PeerId(replica)]
                queues[PeerId(replica)] = Queue(requests + 1, tokens + unread)
        return queues

    def drain(self) -> None:
        """Finish what is running, refuse what is new."""
        self._draining = True

    # ---- clients --------------------------------------------------------------------------------------------

    async def generate(self, client: PeerId, role: Role, body: messages.Generate) -> messages.Generating:
        """Accept a request; its chunks follow as notices. Raises RemoteError with the reason for
        the user."""
        return await self._accept(client, body, ())

    async def continue_answer(self, client: PeerId, role: Role, body: messages.ContinueGenerate) -> messages.Generating:
        """Accept a request whose gateway was lost in mid-answer: the first chunk repeats the text
        so far, the tokens are new. Raises RemoteError."""
        return await self._accept(client, body.generate, body.tokens)

    async def _accept(
        self, client: PeerId, body: messages.Generate, so_far: tuple[messages.Token, ...]
    ) -> messages.Generating:
        if self._draining:
            raise RemoteError("draining", "this node is leaving; send the request to another one")
        if body.service is not None and body.service not in (self._model.service, self._model.name):
            raise RemoteError("invalid", f"service: {body.service} is not served here; {self._model.service} is")
        key = client, body.request
        if key in self._requests or key in self._tokenizing:
            raise RemoteError("invalid", f"request: the id {body.request} is in use")
        now = trio.current_time()
        # The client may stop the request from here on, while its prompt is being tokenised.
        self._tokenizing[key] = True
        try:
            live = await self._tokenized(body, so_far)
        except PromptError as error:
            raise RemoteError("invalid", str(error)) from error
        finally:
            is_wanted = self._tokenizing.pop(key)
        self._meter.record_start(trio.current_time(), len(live.prompt))
        if is_wanted:
            self._begin(client, body, live, now)
        return messages.Generating(service=self._model.service, prompt_tokens=len(live.prompt))

    def _begin(self, client: PeerId, body: messages.Generate, live: LiveRequest, arrived: float) -> None:
        deadline = arrived + body.deadline_s
        machine = RequestMachine(
            live,
            service=self._model.service,
            prompt_tokens=len(live.prompt),
            now=arrived,
            deadline=deadline,
            settings=self._settings,
        )
        request = OpenedRequest(client, body.request, live, machine, deadline)
        self._requests[client, body.request] = request
        self._step(request, machine.start)
        self._nursery.start_soon(self._see_through, request, name=f"request {body.request}")

    async def _tokenized(self, body: messages.Generate, so_far: tuple[messages.Token, ...]) -> LiveRequest:
        """Raises PromptError."""
        vocabulary = self._model.shape.vocabulary
        if (worst := max(so_far, default=0)) >= vocabulary:  # the engine would refuse it
            raise PromptError(f"tokens: {worst} is no token of this model, which has {vocabulary}")
        size, longest = check(body), self._max_model_len()
        if size <= SHORT_BYTES:
            prompt, max_tokens = tokenize(body, self._text, longest)
        else:
            # Seconds for megabytes of text: not on the event loop, and only a few at a time.
            prompt, max_tokens = await trio.to_thread.run_sync(
                tokenize, body, self._text, longest, limiter=self._threads
            )
        return LiveRequest(body, prompt, max_tokens, self._text, so_far)

    def _max_model_len(self) -> int:
        lengths = [
            advert.engine.max_model_len
            for advert in self._view.adverts.values()
            if advert.engine is not None
            and advert.engine.max_model_len
            and advert.model is not None
            and advert.model.service == self._model.service
        ]
        return min([self._model.max_model_len, *lengths])

    def stop(self, client: PeerId, role: Role, body: messages.StopRequest) -> None:
        """The client wants no more of this request."""
        key = client, body.request
        if key in self._tokenizing:
            self._tokenizing[key] = False
        if (request := self._requests.get(key)) is not None:
            self._step(request, request.machine.stop)

    # ---- the network ----------------------------------------------------------------------------------------

    def network_changed(self) -> None:
        """The view has other adverts, or another plan."""
        self._view.weigh_reports(self.queues)
        for request in list(self._requests.values()):
            self._step(request, request.machine.network_changed)

    def peer_lost(self, peer: PeerId) -> None:
        """A client, or a node that worked for us, is gone."""
        for key in self._tokenizing:
            if key[0] == peer:
                self._tokenizing[key] = False
        engine = self._view.starts(peer)
        for request in list(self._requests.values()):
            if request.client == peer:
                self._step(request, request.machine.stop)
            else:
                self._step(request, partial(request.machine.peer_lost, peer, engine))

    def on_tokens(self, peer: PeerId, role: Role, body: messages.Tokens) -> None:
        """News from a decode node, or the first token from a prefill node."""
        request = self._attempts.get(body.request)
        if request is None or request.opening is None:
            return
        machine, attempt = request.machine, request.opening.attempt
        if peer == request.opening.prefill:
            self._step(request, lambda now: machine.first_token(attempt, body.tokens, body.finish, now))
        elif peer != request.opening.decode:
            return
        elif body.refused:
            self._step(request, lambda now: machine.refused(attempt, body.refused, now))
        elif body.failed:
            engine = self._view.starts(peer)
            self._step(request, lambda now: machine.decode_failed(attempt, body.failed, engine, now))
        else:
            cached = body.cached_tokens
            self._step(request, lambda now: machine.decoded(attempt, body.tokens, body.finish, now, cached=cached))

    def on_prefill_ended(self, peer: PeerId, role: Role, body: messages.PrefillEnded) -> None:
        """News from a prefill node."""
        request = self._attempts.get(body.request)
        if request is None or request.opening is None or request.opening.prefill != peer:
            return
        machine, attempt, engine = request.machine, request.opening.attempt, self._view.starts(peer)
        if machine.is_prefilling and not body.failed and body.figures is not None:
            request.transfer = body.figures
        self._step(request, lambda now: machine.prefill_ended(attempt, body.failed, engine, now))

    # ---- one request ----------------------------------------------------------------------------------------

    async def _see_through(self, request: OpenedRequest) -> None:
        """Wake the machine of a request whenever it wants to be, until it is over."""
        while not request.is_over:
            request.changed = trio.Event()
            with trio.move_on_at(request.wake_at) as scope:
                await request.changed.wait()
            if scope.cancelled_caught:
                self._step(request, request.machine.wake)

    def _step(self, request: OpenedRequest, event: Callable[[float], Ready]) -> None:
        """One event of a request, and all that it asks for."""
        if request.is_over:
            return
        try:
            pending = deque(event(trio.current_time()))
            while pending:
                pending.extend(self._carry_out(request, pending.popleft()))
            request.note_wake_at()
        except Exception as bug:
            # One request's trouble must not end the node. The client hears of it, and the log has the traceback.
            _log.exception("request %s", request.id)
            for replica, _ in request.machine.list_work():
                self._tell(PeerId(replica), REQUEST_STOP, messages.StopRequest(request=request.attempt))
            self._end(request, EndRequest("error", f"internal error: {type(bug).__name__}", None))

    def _carry_out(self, request: OpenedRequest, action: Action) -> Ready:
        """Returns what follows at once."""
        machine, attempt, now = request.machine, request.attempt, trio.current_time()
        match action:
            case FindRoute():
                try:
                    return machine.routed(self._route(action, now), now)
                except NoRoute as error:
                    return machine.not_routed(str(error), now, is_hopeful=self._view.hopeful(self._model.service))
            case OpenDecode():
                plan = self._view.plan
                assert plan is not None  # the route is from it
                self._attempts.pop(attempt, None)
                asked = request.begin_attempt(action, secrets.token_hex(12), plan, now)
                self._attempts[request.attempt] = request
                self._nursery.start_soon(self._open_decode, request, action, asked)
            case OpenPrefill():
                self._nursery.start_soon(self._open_prefill, request, action, request.prefill_open(action))
            case ShowTokens(text, tokens):
                chunk = messages.AnswerUpdate(request=request.id, text=text, tokens=tuple(tokens))
                if not self._tell(request.client, ANSWER, chunk):
                    # A client that is gone, or does not read, must not get an answer with a gap.
                    return machine.stop(now)
            case PassFirstToken(_, decode, token):
                self._tell(PeerId(decode), DECODE_FIRST, messages.FirstToken(request=attempt, token=token))
            case CancelTransfer(_, decode, reason):
                self._tell(PeerId(decode), TRANSFER_STOP, messages.StopTransfer(request=attempt, reason=reason))
            case CancelWork(_, replica):
                request.stop_asking()
                self._tell(PeerId(replica), REQUEST_STOP, messages.StopRequest(request=attempt))
            case EndRequest():
                self._end(request, action)
            case _:
                assert_never(action)
        return ()

    def _route(self, wanted: FindRoute, now: float) -> Route:
        """Raises NoRoute."""
        view, plan, service = self._view, self._view.plan, self._model.service
        if plan is None or plan.service != service:
            raise NoRoute("the coordinator has made no plan for it yet")
        unusable = {
            replica.head
            for replica in plan.replicas
            if not view.serving(replica, service)
            or wanted.blamed.get(replica.head) == view.starts(PeerId(replica.head))
        }
        if self._router is None or self._router.plan is not plan:
            self._router = Router(plan, self._routing)
        self._router.report(view.loads(self.queues))
        return self._router.route(wanted.tokens, frozenset(unusable), now=now)

    async def _open_decode(self, request: OpenedRequest, opening: OpenDecode, asked: messages.DecodeOpen) -> None:
        """Decode side first: it must have blocks and tickets before the first layer leaves."""
        opened = await self._ask(request, opening.attempt, opening.decode, DECODE_OPEN, asked)
        if opened is not None:
            request.slices = opened.slices
            decode_opened = partial(request.machine.decode_opened, receives=bool(opened.slices))
            self._step(request, partial(decode_opened, opening.attempt))

    async def _open_prefill(self, request: OpenedRequest, opening: OpenPrefill, asked: messages.PrefillOpen) -> None:
        await self._ask(request, opening.attempt, opening.prefill, PREFILL_OPEN, asked)

    async def _ask(
        self, request: OpenedRequest, attempt: int, replica: str, method: Method[Body, Answer], body: Body
    ) -> Answer | None:
        """None where it fails, which the machine is told, and where the attempt is over before there is an answer."""
        if attempt != request.asks_for:
            return None
        peer = PeerId(replica)
        with trio.CancelScope() as request.asking:
            try:
                return await self._messenger.request(peer, method, body, self._settings.open_timeout_s)
            except NetworkError as error:
                failed = partial(request.machine.open_failed, attempt, replica, str(error), self._view.starts(peer))
                self._step(request, failed)
        return None

    def _end(self, request: OpenedRequest, end: EndRequest) -> None:
        request.is_over = True
        request.changed.set()
        request.stop_asking()
        self._attempts.pop(request.attempt, None)
        del self._requests[request.client, request.id]
        live = request.live
        if live.finish is not None:
            self._meter.record_end(len(live.prompt), live.count)
        if end.finish is None:
            return  # the client has gone, or wants no more
        chunk = messages.AnswerUpdate(
            request=request.id,
            text=live.take_rest(),
            finish=end.finish,
            error=end.error,
            figures=request.figures(end.record),
        )
        self._tell(request.client, ANSWER, chunk)

    def _tell(self, peer: PeerId, notice: Notice[Body], body: Body) -> bool:
        try:
            self._messenger.notify(peer, notice, body)
        except PeerLost:
            return False
        return True
