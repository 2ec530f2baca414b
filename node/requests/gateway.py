"""The gateway of a node: takes clients' requests and owns each one until its last token.

A rim: it takes messages in and passes each on as an event of the request that it is about. What is accepted is decided
in `acceptance`, whose turn it is in a `FairQueue`, what becomes of a request in its machine, and a `RequestDriver`
carries that out.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import final

import trio

from ...bootstrap import PeerId, RemoteError, Role
from ...bootstrap.methods import Messenger
from ...coordinator import Demand, DemandMeter, Plan, RoutingSettings
from ...coordinator.requests.admission import ClassParts, Expected, PriorityClass, find_refusal
from ...coordinator.requests.fair_queue import FairQueue, OverQuota, QueueClass, Quota, ServiceRoom
from ...coordinator.requests.machine import RequestMachine
from ...coordinator.requests.values import EndRequest, RequestSettings
from .. import messages
from ..models import ModelInfo
from ..models.errors import PromptError
from ..models.text import TextModel
from ..observing.event_log import Record, ignore
from ..observing.values import EventKind
from ..prefixes.asking import PrefixWatch
from ..prefixes.salts import CacheSalts
from ..settings import ClientLimits
from ..view import NetworkView, Queue, count_queues
from .acceptance import check, check_arrival, check_length, check_listed, prepare
from .driver import RequestDriver
from .engine_room import measure_room
from .live_request import LiveRequest
from .local_clients import PREFIX
from .opened import OpenedRequest
from .refusals import RefusalCounts
from .request_log import RequestLog
from .routes import RouteFinder
from .tokenizing import TOKEN_BYTES, Tokenizing

LEAST_LOOK_S, MOST_LOOK_S = 0.01, 1.0
"""Between two looks at who is next, beside those that tokens and reports are the occasion of."""


@final
class Gateway:
    """Requests of the clients that are connected to this node.

    Args:
        view: the network, kept up to date by the agent.
        messenger: reaches peers, this node too.
        nursery: runs one task per request; cancelling it ends them all.
        routing: the policy that requests are routed by.
        settings: how patient the gateway is.
        limits: what one client may have here, and all.
    """

    def __init__(
        self,
        *,
        view: NetworkView,
        messenger: Messenger,
        model: ModelInfo,
        text: TextModel,
        nursery: trio.Nursery,
        routing: RoutingSettings,
        settings: RequestSettings,
        limits: ClientLimits,
    ) -> None:
        self._view = view
        self._messenger = messenger
        self._model = model
        self._text = text
        self._nursery = nursery
        self._settings = settings
        self._limits = limits
        self._prefixes = PrefixWatch(messenger, model.service, self._list_heads)
        self._routes = RouteFinder(
            view,
            model.service,
            routing,
            lambda: self._queues_and_waiting,
            lambda: self.demand,
            self._prefixes.known,
            messenger.peer_id,
        )
        self._tokenizing: dict[tuple[PeerId, str], bool] = {}  # requests; whether their clients still want them
        self._requests: dict[tuple[PeerId, str], RequestDriver] = {}  # by client, and the id that it gave
        self._by_token: dict[str, RequestDriver] = {}  # by what the ids of their attempts begin with
        self._meter = DemandMeter()
        self._prompts = Tokenizing(limits)
        quota = Quota(
            requests=limits.requests, size=limits.tokens, all_requests=limits.all_requests, all_size=limits.all_tokens
        )
        self._parts = ClassParts(limits.admission)
        self._classes = {
            kind: QueueClass(kind, rules.weight, rules.cost, rules.queue_share)
            for kind, rules in limits.admission.rules.items()
        }
        self._queue: FairQueue[tuple[PeerId, str]] = FairQueue("requests", "tokens", quota, limits.retry)
        self._measured: ServiceRoom | None = None
        self._is_measured = False  # since the network has changed
        self._looks_at = -inf  # who waits: the next time, or the last
        self._silent: set[PeerId] = set()  # they do not answer
        self._stuck: set[PeerId] = set()  # they say that their replicas do not get on
        self._draining = False
        self.refused = RefusalCounts()
        """Requests that had no place here."""
        self.salts = CacheSalts()
        """Says whose requests share cached prompts."""
        nursery.start_soon(self._prefixes.run)
        self.record: Record = ignore
        """Tells the node's log."""
        self.on_request: Callable[[], None] = lambda: None
        """Hears that there is one more."""
        self.on_member_stalled: Callable[[PeerId], None] = lambda replica: None
        """Hears whose replica did not get on."""
        self.on_stopped: Callable[[PeerId, messages.AnswerUpdate], None] = _tell_nobody
        """Hears what a request was that its client wanted no more; the client itself is not told."""

    def __repr__(self) -> str:
        return f"<Gateway {self._model.service} requests={len(self._requests)}>"

    @property
    def idle(self) -> bool:
        """Whether no client waits for an answer."""
        return not self._requests and not self._tokenizing

    @property
    def open_requests(self) -> int:
        """How many have not ended."""
        return len(self._requests) + len(self._tokenizing)

    @property
    def is_served(self) -> bool:
        """Whether an engine is ready for what comes now."""
        return self._room is not None and not self._draining

    @property
    def why_not_served(self) -> str:
        """For people, while it is not."""
        if self._draining:
            return "this node is draining; send the request to another one"
        reasons = self._view.describe_unserved(self._model.service, trio.current_time())
        known = f" ({reasons})" if reasons else ""
        return f"no engine of this network serves {self._model.name} now{known}; `p2pserve status` says what each does"

    @property
    def _plan(self) -> Plan | None:
        return self._view.plan_of(self._model.service)

    @property
    def demand(self) -> Demand | None:
        """What clients have asked for lately; it changes only when that is news."""
        return self._meter.demand(trio.current_time())

    @property
    def queues(self) -> dict[PeerId, Queue]:
        """What this gateway has at the engine of each node."""
        return count_queues(work for driver in self._requests.values() for work in driver.request.machine.list_work())

    @property
    def _queues_and_waiting(self) -> dict[PeerId, Queue]:
        """The same, with what waits for a slot there."""
        return count_queues(work for driver in self._requests.values() for work in driver.list_work())

    def drain(self) -> None:
        """Finish what is running, refuse what is new."""
        self._draining = True

    def resume(self) -> None:
        """Take what is new again."""
        self._draining = False

    # ---- clients --------------------------------------------------------------------------------------------

    async def generate(self, client: PeerId, role: Role, body: messages.Generate) -> messages.Generating:
        """Accept a request; its chunks follow as notices. Raises RemoteError with the reason for the user, and with the
        time to try again where its client, or all, have too much here."""
        return await self._accept(client, body, ())

    async def continue_answer(self, client: PeerId, role: Role, body: messages.ContinueGenerate) -> messages.Generating:
        """Accept a request whose gateway was lost in mid-answer: the first chunk repeats the text so far, the tokens
        are new. Raises RemoteError."""
        return await self._accept(client, body.generate, body.tokens)

    async def _accept(
        self, client: PeerId, body: messages.Generate, so_far: tuple[messages.Token, ...]
    ) -> messages.Generating:
        key, now = (client, body.request), trio.current_time()
        is_known = key in self._requests or key in self._tokenizing
        kind = PriorityClass.of(body.priority)
        catalogue = self._view.catalogue
        check_arrival(body, self._model, catalogue, is_draining=self._draining, is_id_in_use=is_known)
        if not so_far:  # what runs may come to its end
            check_listed(self._model, catalogue)
        self._tokenizing[key] = True  # from here on the client may stop it
        self.on_request()
        try:
            # Before anything is done for it that costs time.
            self._queue.check(client, len(so_far) + len(body.prompt_token_ids or ()), now, self._classes[kind])
            size, longest = check(body), self._view.max_model_len(self._model)
            check_length(body, size, len(so_far), self._text, longest)
            self._prefixes.note_use(now)
            tokenized = partial(self._prepare, key, body, so_far, longest, self._prefixes.known.index.block_sizes)
            live = await self._prompts.run(key, size + TOKEN_BYTES * len(so_far), tokenized)
            if live is None or not self._tokenizing[key]:
                raise RemoteError("stopped", "the client wants no more of this request")
            if not so_far:  # what was accepted before is not refused because its gateway was lost
                self._admit(client, live, kind, now + body.deadline_s)
            self._begin(client, live, kind, now, now + body.deadline_s)
        except PromptError as error:
            raise RemoteError("invalid", str(error)) from error
        except OverQuota as error:
            self.refused.note(kind, trio.current_time())
            raise RemoteError("busy", str(error), retry_after_s=error.retry_after_s) from error
        finally:
            del self._tokenizing[key]
        news_s = self._settings.news_s
        return messages.Generating(service=self._model.service, prompt_tokens=len(live.prompt), news_s=news_s)

    def _prepare(
        self,
        key: tuple[PeerId, str],
        body: messages.Generate,
        so_far: tuple[int, ...],
        longest: int,
        block_sizes: tuple[int, ...],
    ) -> LiveRequest | None:
        """None for a request that its client has stopped while it waited. Its prefixes are named here as well: of a
        long prompt that takes milliseconds too."""
        if not self._tokenizing[key]:
            return None
        live = prepare(body, so_far, self._model, self._text, longest)
        live.cache_salt = self.salts.salt_for(key[0], body.cache_salt)
        for size in block_sizes:
            live.prefix_names(size)
        return live

    def _admit(self, client: PeerId, live: LiveRequest, kind: PriorityClass, deadline: float) -> None:
        """Raise OverQuota for a request whose turn would come too late."""
        now, room, plan = trio.current_time(), self._room, self._plan
        if room is None or plan is None:  # it waits for an engine, and not for others
            return
        start_s = room.backlog_s + self._queue.start_in_s(client, live.size, now, room.rate, self._classes[kind])
        # What was seen lately has in it what engines do for others, and for answers.
        prefill_s = max(room.start_s(len(live.prompt)), self._queue.mean_start_s(now))
        ttft_s = plan.deadlines.ttft_s
        self._parts.ask(kind)
        expected = Expected(
            start_s=start_s, prefill_s=prefill_s, ttft_s=ttft_s, left_s=deadline - now, backlog_s=room.backlog_s,
            has_its_part=self._parts.has_its_part(kind),
        )  # fmt: skip
        refusal = find_refusal(kind, expected, self._limits.admission)
        if refusal is not None:
            self._queue.refuse(refusal.text, now, refusal.retry_after_s)
        self._parts.give(kind)

    def _begin(self, client: PeerId, live: LiveRequest, kind: PriorityClass, arrived: float, deadline: float) -> None:
        """Let an accepted request wait for its turn. Raises OverQuota."""
        self._queue.add(client, (client, live.id), live.size, trio.current_time(), self._classes[kind])
        self._meter.record_start(trio.current_time(), len(live.prompt))
        # A client in this process has no other gateway to ask.
        news_s = inf if client.startswith(PREFIX) else self._settings.news_s
        service, settings = self._model.service, replace(self._settings, may_split=live.may_split, news_s=news_s)
        machine = RequestMachine(
            live, service=service, prompt_tokens=len(live.prompt), now=arrived, deadline=deadline, settings=settings
        )
        request = OpenedRequest(client, live, machine, deadline, token=secrets.token_hex(12))
        log = RequestLog(request, self.record, self._view.usd_per_hour, lambda: self._plan)
        log.begin(service, deadline - arrived)
        driver = RequestDriver(
            request,
            view=self._view,
            routes=self._routes,
            messenger=self._messenger,
            nursery=self._nursery,
            settings=settings,
            turns=self,
            log=log,
        )
        self._requests[client, live.id] = self._by_token[request.token] = driver
        driver.step(machine.start)
        self._nursery.start_soon(driver.run, name=f"request {live.id}")
        self._give_turns()

    def stop(self, client: PeerId, role: Role, body: messages.StopRequest) -> None:
        """The client wants no more of this request."""
        key = client, body.request
        if key in self._tokenizing:
            self._tokenizing[key] = False
        if (driver := self._requests.get(key)) is not None:
            driver.step(driver.request.machine.stop)

    # ---- turns ----------------------------------------------------------------------------------------------

    def may_route(self, request: OpenedRequest) -> bool:
        """Whether its turn has come. Without engines nobody waits for others, but each for an engine, and not long."""
        return self._room is None or self._queue.is_served((request.client, request.id))

    def on_tokens_shown(self, request: OpenedRequest, count: int) -> None:
        """A request's client has been sent so many tokens."""
        key = request.client, request.id
        if not count or not self._queue.is_served(key):
            return
        self._queue.grow(key, count, self._limits.output_cost * count)
        self._queue.start(key, trio.current_time())
        self._routes.note_first_token(request.token, trio.current_time())
        self._give_turns()  # also after later tokens: pauses end while others' answers go on

    def on_stalled(self, replica: PeerId) -> None:
        """A replica does not get on with a request, though it answers: it is the last to be taken for a while."""
        if self._routes.note_stall(replica, trio.current_time()):
            self.record(EventKind.MEMBER_STALLED, peer=replica)
            self.on_member_stalled(replica)

    def on_end(self, request: OpenedRequest, end: EndRequest) -> None:
        """A request is over."""
        key = request.client, request.id
        del self._requests[key], self._by_token[request.token]
        is_answered = request.live.finish is not None
        record = end.record
        first_at = record.first_at if record is not None and record.attempts == 1 and record.tokens else None
        self._routes.end_request(request.token, request.live.count if is_answered else None, first_at)
        if is_answered:
            running = ((len(each.request.live.prompt), each.request.live.count) for each in self._requests.values())
            self._meter.record_end(len(request.live.prompt), request.live.count, running)
        self._queue.remove(key, trio.current_time())
        if end.finish is None:
            self.on_stopped(request.client, request.describe_end(end))
        self._give_turns()

    def _list_heads(self) -> list[PeerId]:
        """Of the replicas that serve."""
        plan, view = self._plan, self._view
        replicas = plan.replicas if plan is not None else ()
        return [PeerId(replica.head) for replica in replicas if view.serving(replica, self._model.service)]

    def _give_turns(self) -> None:
        """Give requests to engines for as long as there is room."""
        now = trio.current_time()
        while self._queue.waiting and (room := self._room) is not None:
            if (key := self._queue.take(room, now)) is None:
                self._look_again(now, self._queue.take_in_s(room, now))
                return
            driver = self._requests[key]
            driver.step(driver.request.machine.network_changed)

    def _look_again(self, now: float, in_s: float) -> None:
        """When engines should be nearly done, though nobody has said so yet: their message takes as long as the next
        prompt's way to them, and they would be idle meanwhile."""
        at = now + min(max(LEAST_LOOK_S, in_s), MOST_LOOK_S)
        if in_s < inf and not now < self._looks_at <= at + LEAST_LOOK_S:
            self._looks_at = at
            self._nursery.start_soon(self._give_turns_at, at)

    async def _give_turns_at(self, at: float) -> None:
        await trio.sleep_until(at)
        self._give_turns()

    @property
    def _room(self) -> ServiceRoom | None:
        """None: no engine is ready, so there is nothing to queue for. Measured when it is asked for, as the network
        changes many times a second, with requests or without."""
        if not self._is_measured:
            view, service, routes = self._view, self._model.service, self._routes
            self._measured = measure_room(
                view, service, self._limits, routes.find_prefill_rates(), mixes_phases=routes.mixes_phases,
                gateways=view.gateways_like(self.demand, service),
            )  # fmt: skip
            self._is_measured = True
        return self._measured

    # ---- the network ----------------------------------------------------------------------------------------

    def network_changed(self) -> None:
        """The view has other adverts, or another plan."""
        self._view.weigh_reports(self.queues)
        self._is_measured = False
        self._give_turns()
        for driver in list(self._requests.values()):
            driver.step(driver.request.machine.network_changed)

    def peer_lost(self, peer: PeerId) -> None:
        """A client, or a node that worked for us, is gone."""
        self._note_hung(self._stuck, peer, False)  # it cannot say otherwise any more
        self._tokenizing |= {key: False for key in self._tokenizing if key[0] == peer}
        for driver in list(self._requests.values()):
            driver.step(partial(driver.request.on_peer_lost, peer, self._view.starts(peer)))

    def peer_hung(self, peer: PeerId, hung: bool) -> None:
        """A node that works for us does not answer, or does again."""
        self._note_hung(self._silent, peer, hung)

    def on_replica_hung(self, peer: PeerId, role: Role, body: messages.ReplicaHung) -> None:
        """The head of a replica says that it does not get on, or does again."""
        self._note_hung(self._stuck, peer, body.hung)

    def _note_hung(self, table: set[PeerId], peer: PeerId, hung: bool) -> None:
        before = self._routes.hung
        (table.add if hung else table.discard)(peer)
        self._routes.hung = frozenset(self._silent | self._stuck)
        if (peer in before) == (peer in self._routes.hung):
            return
        for driver in list(self._requests.values()):
            machine = driver.request.machine
            driver.step(partial(machine.peer_hung if hung else machine.peer_answers, peer))

    def on_tokens(self, peer: PeerId, role: Role, body: messages.Tokens) -> None:
        """News from a decode node, or the first token from a prefill node."""
        if (driver := self._driver_of(body.request)) is not None:
            driver.step(partial(driver.request.on_tokens, peer, body, self._view.starts(peer)))

    def on_prefill_ended(self, peer: PeerId, role: Role, body: messages.PrefillEnded) -> None:
        """News from a prefill node."""
        if (driver := self._driver_of(body.request)) is not None:
            driver.step(partial(driver.request.on_prefill_ended, peer, body, self._view.starts(peer)))

    def _driver_of(self, attempt: str) -> RequestDriver | None:
        return self._by_token.get(attempt.partition(".")[0])


def _tell_nobody(client: PeerId, update: messages.AnswerUpdate) -> None:
    """Clients that are connected know what they have stopped."""
