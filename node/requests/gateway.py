"""The gateway of a node: it takes clients' requests and owns each one until its last token.

Engines come and go; the gateway keeps prompt and tokens so far. When the engine that decodes a request is
lost, the request goes to another one with its tokens as part of the prompt, and the client's stream continues.
When the engine that prefills is lost, the decode engine is told to compute the prompt itself.

The engine that reads all of a prompt also writes the first token of the answer, which the client is shown at once; the
decode engine is told, and begins with it. What the client has seen is what counts: should the decode engine begin with
another token all the same, the request is tried again from the one that was shown.
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import final

import trio

from ...bootstrap import NetworkError, PeerId, PeerLost, RemoteError, Role
from ...bootstrap.methods import Body, Messenger, Notice
from ...coordinator import Demand, DemandMeter, NoRoute, Router, RoutingSettings
from .. import messages
from ..methods import ANSWER, DECODE_FIRST, DECODE_OPEN, PREFILL_OPEN, REQUEST_STOP, TRANSFER_STOP
from ..models import ModelInfo
from ..view import NetworkView, Queue
from .attempt import Attempt, Chosen, Event, First, Progress
from .request import LiveRequest, check, tokenize
from .text import PromptError, TextModel

_log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
NO_ENGINE_GRACE_S = 5.0  # how long a request waits for an engine when none is even starting
SHORT_BYTES = 512  # of a prompt that is tokenised sooner (0.25 ms) than a thread takes it up and answers
MAX_FAILURES = 3
"""Engines in a row that fail with a request before they add to its answer. It may be what ends them, and there are
other requests: so it is given up."""
FIGURES_GRACE_S = 0.5  # how long an answer waits for the transfer's report, which travels another way


class _Refused(Exception):
    """An engine says that it can never serve this request: another one would say the same."""


@final
class Connections:
    """How a gateway reaches peers, this node too, and hears that the view of the network has changed."""

    def __init__(self, messenger: Messenger, wait_changed: Callable[[], Awaitable[None]]) -> None:
        self.messenger = messenger
        self.wait_changed = wait_changed


@final
class Gateway:
    """Requests of the clients that are connected to this node.

    Args:
        view: the network, kept up to date by the agent.
        nursery: runs one task per request; cancelling it ends them all.
        routing: the policy that requests are routed by.
    """

    def __init__(
        self,
        *,
        view: NetworkView,
        connections: Connections,
        model: ModelInfo,
        text: TextModel,
        nursery: trio.Nursery,
        routing: RoutingSettings | None = None,
    ) -> None:
        self._routing = routing or RoutingSettings()
        self._view = view
        self._connections = connections
        self._model = model
        self._text = text
        self._nursery = nursery
        self._attempts: dict[str, Attempt] = {}
        self._scopes: dict[tuple[PeerId, str], trio.CancelScope] = {}
        self._meter = DemandMeter()
        self._router: Router | None = None  # of the latest plan
        self._tokenizing = trio.CapacityLimiter(2)
        self._draining = False

    def __repr__(self) -> str:
        return f"<Gateway {self._model.service} requests={len(self._scopes)}>"

    @property
    def idle(self) -> bool:
        """Whether no client waits for an answer."""
        return not self._scopes

    @property
    def demand(self) -> Demand | None:
        """What clients have asked for lately; it changes only when that is news."""
        return self._meter.demand(trio.current_time())

    def drain(self) -> None:
        """Finish what is running, refuse what is new."""
        self._draining = True

    async def generate(self, client: PeerId, role: Role, body: messages.Generate) -> messages.Generating:
        """Accept a request; its chunks follow as notices. Raises RemoteError with the reason for the user."""
        if self._draining:
            raise RemoteError("draining", "this node is leaving; send the request to another one")
        if body.service is not None and body.service not in (self._model.service, self._model.name):
            raise RemoteError("invalid", f"service: {body.service} is not served here; {self._model.service} is")
        if (client, body.request) in self._scopes:
            raise RemoteError("invalid", f"request: the id {body.request} is in use")
        now = trio.current_time()
        progress = Progress(client, now, now + body.deadline_s)
        # From here on the client may stop the request, also while its prompt is still being tokenised.
        scope = self._scopes[client, body.request] = trio.CancelScope(deadline=progress.deadline)
        try:
            size, longest = check(body), self._max_model_len()
            if size <= SHORT_BYTES:
                prompt, max_tokens = tokenize(body, self._text, longest)
            else:
                # Seconds for megabytes of text: not on the event loop, and only a few at a time.
                prompt, max_tokens = await trio.to_thread.run_sync(
                    tokenize, body, self._text, longest, limiter=self._tokenizing
                )
        except BaseException as error:
            del self._scopes[client, body.request]
            if isinstance(error, PromptError):
                raise RemoteError("invalid", str(error)) from error
            raise
        live = LiveRequest(body, prompt, max_tokens, self._text.decoder())
        self._meter.began(trio.current_time(), len(prompt))
        self._nursery.start_soon(self._serve, live, progress, scope, name=f"request {body.request}")
        return messages.Generating(service=self._model.service, prompt_tokens=len(prompt))

    def stop(self, client: PeerId, role: Role, body: messages.StopRequest) -> None:
        """The client wants no more of this request."""
        scope = self._scopes.get((client, body.request))
        if scope is not None:
            scope.cancel()

    def on_adverts(self) -> None:
        """The view has new adverts."""
        self._view.weigh_reports(self._queues())

    def peer_lost(self, peer: PeerId) -> None:
        """A client, or a node that worked for us, is gone."""
        for (client, _), scope in self._scopes.items():
            if client == peer:
                scope.cancel()
        for attempt in self._attempts.values():
            if peer in (attempt.decode, attempt.prefill):
                attempt.send.send_nowait(peer)

    def on_tokens(self, peer: PeerId, role: Role, body: messages.Tokens) -> None:
        """News from a decode node, or the first token from a prefill node."""
        attempt = self._attempts.get(body.request)
        if attempt is None:
            return
        if attempt.decode == peer:
            attempt.send.send_nowait(body)
        elif attempt.prefill == peer and attempt.route.prefill_writes and body.tokens:
            attempt.send.send_nowait(First(body))

    def on_prefill_ended(self, peer: PeerId, role: Role, body: messages.PrefillEnded) -> None:
        """News from a prefill node."""
        attempt = self._attempts.get(body.request)
        if attempt is not None and attempt.prefill == peer:
            attempt.send.send_nowait(body)

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

    async def _serve(self, live: LiveRequest, progress: Progress, scope: trio.CancelScope) -> None:
        error = ""
        try:
            with scope:
                while live.finish is None:
                    await self._attempt(live, progress)
        except (NoRoute, _Refused) as ended:
            error = str(ended)
        except Exception as bug:
            # One request's trouble must not end the node. The client hears of it, and the log has the traceback.
            _log.exception("request %s", live.id)
            error = f"internal error: {type(bug).__name__}"
        finally:
            del self._scopes[progress.client, live.id]
        if live.finish is not None:
            self._meter.ended(len(live.prompt), len(live.tokens))
        if live.finish is None and not error:
            if trio.current_time() < progress.deadline:
                return  # the client has gone, or wants no more
            error = f"deadline: the answer was not complete after {progress.deadline - progress.arrived:.1f} s"
            if progress.recovered:
                error += f" ({'; '.join(progress.recovered)})"
        self._notify(
            progress.client,
            messages.AnswerUpdate(
                request=live.id,
                finish="error" if error else live.finish,
                error=error,
                figures=progress.figures(live, trio.current_time()),
            ),
        )

    async def _attempt(self, live: LiveRequest, progress: Progress) -> None:
        """Run the request on one route until it is finished or the route has failed."""
        chosen = await self._choose(live, progress)
        progress.attempts += 1
        send, receive = trio.open_memory_channel[Event](float("inf"))
        plan = self._view.plan
        progress.codec = plan.codec if plan is not None else progress.codec
        tokens = len(live.prompt) + len(live.tokens)
        unread = {chosen.decode: tokens - chosen.split}
        if chosen.prefill is not None:
            unread[chosen.prefill] = chosen.split
        attempt = Attempt(secrets.token_hex(12), chosen, progress.codec, send, receive, unread)
        self._attempts[attempt.id] = attempt
        progress.route = (attempt.prefill, attempt.decode)
        complete = False
        try:
            if await self._open(attempt, live, progress):
                complete = await self._follow(attempt, live, progress)
        finally:
            del self._attempts[attempt.id]
            stop = messages.StopRequest(request=attempt.id)
            if not complete:
                self._tell(attempt.decode, REQUEST_STOP, stop)
            if attempt.prefill is not None and attempt.prefill_open:
                self._tell(attempt.prefill, REQUEST_STOP, stop)

    async def _choose(self, live: LiveRequest, progress: Progress) -> Chosen:
        """Route the request; waits for an engine while one may come. Raises NoRoute."""
        give_up = trio.current_time() + NO_ENGINE_GRACE_S
        while True:
            try:
                return self._route(live, progress)
            except NoRoute as error:
                if self._view.hopeful(self._model.service):
                    give_up = trio.current_time() + NO_ENGINE_GRACE_S
                elif trio.current_time() >= give_up:
                    reasons = f" ({'; '.join(progress.recovered)})" if progress.recovered else ""
                    raise NoRoute(f"no engine is left for {self._model.service}{reasons}: {error}") from error
            with trio.move_on_after(1.0):
                await self._connections.wait_changed()

    def _route(self, live: LiveRequest, progress: Progress) -> Chosen:
        view, plan = self._view, self._view.plan
        if plan is None or plan.service != self._model.service:
            raise NoRoute("the coordinator has made no plan for it yet")
        unusable = {
            replica.head
            for replica in plan.replicas
            if not view.serving(replica, plan.service)
            or progress.failed.get(PeerId(replica.head)) == view.starts(PeerId(replica.head))
        }
        tokens = len(live.prompt) + len(live.tokens)
        if self._router is None or self._router.plan is not plan:
            self._router = Router(plan, self._routing)
        self._router.report(view.loads(self._queues()))
        found = self._router.route(tokens, frozenset(unusable), now=trio.current_time())
        decode = plan.replica(found.decode)
        prefill = plan.replica(found.prefill) if found.prefill is not None else None
        assert decode is not None  # the router names replicas of the plan
        if prefill is None:
            return Chosen(PeerId(decode.head), None, (), 0, False)
        whole = found.split >= tokens
        if whole and live.left == 1:  # written by whoever reads the prompt: nobody else is needed
            return Chosen(PeerId(prefill.head), None, (), 0, False)
        return Chosen(PeerId(decode.head), PeerId(prefill.head), prefill.stages, found.split, whole)

    async def _open(self, attempt: Attempt, live: LiveRequest, progress: Progress) -> bool:
        """Decode side first: it must have blocks and tickets before the first layer leaves."""
        prompt, sampling = live.replay()
        deadline_s = max(0.05, progress.deadline - trio.current_time())
        try:
            opened = await self._connections.messenger.request(
                attempt.decode,
                DECODE_OPEN,
                messages.DecodeOpen(
                    request=attempt.id,
                    service=self._model.service,
                    prompt=prompt,
                    sampling=sampling,
                    deadline_s=deadline_s,
                    receive_tokens=attempt.route.split,
                    codec=attempt.codec,
                    prefill=attempt.route.stages,
                    told_first=attempt.route.prefill_writes,
                ),
                OPEN_TIMEOUT_S,
            )
        except NetworkError as error:
            self._blame(progress, attempt.decode, f"decode node {_short(attempt.decode)}: {error}")
            return False
        if attempt.prefill is None or not opened.slices:
            return True
        attempt.prefill_open = True  # from now on it may be at work, whether or not its answer gets here
        try:
            await self._connections.messenger.request(
                attempt.prefill,
                PREFILL_OPEN,
                messages.PrefillOpen(
                    request=attempt.id,
                    service=self._model.service,
                    prompt=prompt[: attempt.route.split],
                    deadline_s=deadline_s,
                    slices=opened.slices,
                    sampling=sampling if attempt.route.prefill_writes else None,
                ),
                OPEN_TIMEOUT_S,
            )
        except NetworkError as error:
            self._tell(attempt.prefill, REQUEST_STOP, messages.StopRequest(request=attempt.id))
            self._without_kv(attempt, progress, str(error))
        return True

    async def _follow(self, attempt: Attempt, live: LiveRequest, progress: Progress) -> bool:
        """Pass tokens on until the answer is complete (True) or the decode node has failed (False)."""
        async for event in attempt.events:
            match event:
                case messages.PrefillEnded():
                    self._on_prefill(event, attempt, progress)
                case messages.Tokens(refused=refused) if refused:
                    raise _Refused(f"the engine refuses the request: {refused}")
                case messages.Tokens(failed=failed) if failed:
                    self._blame(progress, attempt.decode, f"decode node {_short(attempt.decode)}: {failed}")
                    progress.failures += 1
                    if progress.failures == MAX_FAILURES:
                        reasons = "; ".join(progress.recovered)
                        raise NoRoute(f"given up: {MAX_FAILURES} engines in a row failed with it ({reasons})")
                    return False
                case First(told):
                    self._on_first(told, attempt, live, progress)
                    if live.finish is not None:
                        return False  # the decode node has nothing to do, and does not know
                case messages.Tokens():
                    if not self._on_decoded(event, attempt, live, progress):
                        return False
                    if live.finish is not None:
                        await self._await_figures(attempt, progress)
                        return event.finish is not None
                case str() if event == attempt.decode:
                    self._blame(progress, attempt.decode, f"decode node {_short(attempt.decode)} was lost")
                    return False
                case str():
                    if attempt.prefill_open:  # else its part was over
                        self._without_kv(attempt, progress, "it was lost")
        return False

    def _on_first(self, told: messages.Tokens, attempt: Attempt, live: LiveRequest, progress: Progress) -> None:
        """The client sees the first token, and the decode node hears of it."""
        if attempt.decoding or not attempt.prefill_open:
            return  # the decode node does without this prefill, and has begun or is about to
        attempt.unread[attempt.route.prefill or attempt.decode] = 0
        attempt.shown = told.tokens[:1]
        self._show(attempt.shown, told.finish, live, progress)
        if live.finish is None:
            first = messages.FirstToken(request=attempt.id, token=attempt.shown[0])
            self._tell(attempt.decode, DECODE_FIRST, first)

    def _on_decoded(self, event: messages.Tokens, attempt: Attempt, live: LiveRequest, progress: Progress) -> bool:
        """The client sees what is new. False when that would contradict what it has seen."""
        if event.finish == "deadline":
            return True  # the request's own deadline is the same moment and says it better
        tokens = event.tokens
        if tokens and not attempt.decoding:
            attempt.decoding = True
            attempt.unread[attempt.decode] = 0
            shown = len(attempt.shown)
            if tokens[:shown] != attempt.shown:
                progress.recovered.append(
                    f"decode node {_short(attempt.decode)}: it began with another token than prefill node "
                    f"{_short(attempt.route.prefill or attempt.decode)}"
                )
                return False
            tokens = tokens[shown:]
            if progress.cached_tokens is None:
                progress.cached_tokens = event.cached_tokens
        if tokens:
            progress.failures = 0
        self._show(tokens, event.finish, live, progress)
        return True

    def _show(
        self, tokens: tuple[messages.Token, ...], finish: str | None, live: LiveRequest, progress: Progress
    ) -> None:
        """Add to the answer."""
        if tokens:
            progress.last_token = trio.current_time()
            if progress.first_token is None:
                progress.first_token = progress.last_token
        before = len(live.tokens)
        text = live.on_tokens(tokens, finish)
        tokens = tuple(live.tokens[before:])
        if tokens or text:
            self._notify(progress.client, messages.AnswerUpdate(request=live.id, text=text, tokens=tokens))

    def _on_prefill(self, event: messages.PrefillEnded, attempt: Attempt, progress: Progress) -> None:
        if not attempt.prefill_open:
            return  # it was given up before it said so
        self._prefill_over(attempt)
        if event.failed:
            self._without_kv(attempt, progress, event.failed)
        elif event.figures is not None:
            progress.transfer = event.figures

    def _without_kv(self, attempt: Attempt, progress: Progress, reason: str) -> None:
        """The prefill node has failed: let the decode node compute what it did not get."""
        self._prefill_over(attempt)
        assert attempt.prefill is not None
        attempt.unread[attempt.decode] += attempt.route.split
        self._blame(progress, attempt.prefill, f"prefill node {_short(attempt.prefill)}: {reason}")
        stop = messages.StopTransfer(request=attempt.id, reason=reason)
        self._tell(attempt.decode, TRANSFER_STOP, stop)

    def _prefill_over(self, attempt: Attempt) -> None:
        """The prefill node has no more to do with it: routes that are chosen from now on may count on that."""
        attempt.prefill_open = False
        if attempt.prefill is not None:
            attempt.unread.pop(attempt.prefill, None)

    def _queues(self) -> dict[PeerId, Queue]:
        """What this gateway has at each node."""
        queues: defaultdict[PeerId, Queue] = defaultdict(Queue)
        for attempt in self._attempts.values():
            for peer, unread in attempt.unread.items():
                requests, tokens = queues[peer]
                queues[peer] = Queue(requests + 1, tokens + unread)
        return queues

    async def _await_figures(self, attempt: Attempt, progress: Progress) -> None:
        with trio.move_on_after(FIGURES_GRACE_S):
            while attempt.prefill_open:
                event = await attempt.events.receive()
                if isinstance(event, messages.PrefillEnded):
                    self._on_prefill(event, attempt, progress)

    def _blame(self, progress: Progress, peer: PeerId, what: str) -> None:
        progress.failed[peer] = self._view.starts(peer)
        progress.recovered.append(what)

    def _notify(self, client: PeerId, chunk: messages.AnswerUpdate) -> None:
        scope = self._scopes.get((client, chunk.request))
        if not self._tell(client, ANSWER, chunk) and scope is not None:
            scope.cancel()  # a client that is gone, or does not read, must not get an answer with a gap

    def _tell(self, peer: PeerId, notice: Notice[Body], message: Body) -> bool:
        try:
            self._connections.messenger.notify(peer, notice, message)
        except PeerLost:
            return False
        return True


def _short(peer: PeerId) -> str:
    return f"..{peer[-6:]}"
