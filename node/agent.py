"""The agent of a node: joins the network and runs what a box contributes, until it is asked to leave.

One trio program: membership, election and, when elected, the coordinator; the gateway for clients; the engine
process and its work for other nodes; the one TCP port. Decisions are made elsewhere (`coordinator`, `view`,
`coordination`, `requests`); this module builds what has `Joined` and, with a model, what is `Serving`, and runs both.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import NamedTuple, final

import trio

from .. import __version__
from ..bootstrap import Address, Bootstrap, Identity, NetworkSettings, PeerId, announced_address
from ..bootstrap.address_book import AddressBook
from ..bootstrap.network import Network
from ..bootstrap.state_file import StateFile
from ..coordinator import Plan, PlanError
from ..coordinator.names import name_of
from ..coordinator.repair.ending import is_planned_without, round_remaining
from ..coordinator.worth import BoxLine, WorthWatch
from ..kvtransport.link.relay import Relay
from ..kvtransport.probing.burst_ticket import BURST_HELLO_BYTES, BURST_MAGIC
from ..kvtransport.probing.probe import Activity
from ..kvtransport.wire.channel import LINK_HELLO_BYTES, LINK_MAGIC
from ..kvtransport.wire.permits import RELAY_HELLO_BYTES, RELAY_MAGIC
from . import messages
from .admin.answering import NodeAnswers
from .adverts import Advertising
from .box import hardware
from .box.home import lock_home
from .catalogue.assigning import AssignmentDesk
from .catalogue.desk import CatalogueDesk
from .catalogue.hosting import HostingLife, follow_lives
from .catalogue.shelf import ModelShelf
from .engine.backend import ServedModel
from .engine.backends import find_backend
from .http.admission import FrontRules, check_listen
from .http.asking import HttpAsking
from .http.front import HttpFront
from .joined import Joined, Say
from .joining import Invitation, accept_invitation, new_network
from .links.call_back import CALL_HELLO_BYTES, CALL_MAGIC
from .links.data_port import DataPort
from .links.prober import BurstCarrier, Prober
from .links.ways import Doors, Ways
from .observing.event_file import EventFile
from .observing.event_log import EventLog
from .observing.node_log import keep_log
from .observing.spans import SpanExport, open_spans
from .observing.values import EventKind
from .owner.answering import answer_owner
from .owner.dividing import DivisionDesk, Tell, tell_nobody
from .owner.draining import DrainDesk, DrainOrder, describe_left
from .owner.pricing import PriceTag, describe_price
from .owner.questions import OwnerAnswer, OwnerQuestion
from .planning.desk import PlanningDesk
from .planning.manifest import PLAN_RULES, PlanBook, describe_plan
from .planning.messages import PlanManifest
from .planning.plan_exchange import PlanExchange
from .planning.plan_file import PlanFile
from .planning.services import choose_services
from .serving import Serving
from .settings import NodeSettings
from .showing import Showing

DRAIN_POLL_S = 0.05
LEAVE_S = 2.0  # before the end of the box the others have been told that it is gone; longer: for slower links
CLOCK_S = 5.0  # between two looks at the clock of a box that ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A node that has been admitted. `tokens` are those a new network hands out: leader, worker, client, admin.
    `http`: where it serves the OpenAI API."""

    peer: PeerId
    address: Address
    tokens: dict[str, str]
    http: Address | None = None


class Owner(NamedTuple):
    """Whoever has started the node, and watches it: `say` has lines for good, `show` how far long work is, and `tell`
    what a command wants to know that runs several nodes."""

    say: Say
    show: Say
    tell: Tell


def _show_nobody(text: str) -> None:
    """Nobody watches."""


async def run_node(
    settings: NodeSettings,
    *,
    say: Say,
    stop: trio.Event,
    show: Say | None = None,
    tell: Tell = tell_nobody,
    task_status: trio.TaskStatus[Started] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a node until `stop` is set and its requests have ended (at most `drain_s`). `show` is told how far long work
    is, and "" when it is done; without it, nobody is. `tell`: as `owner.dividing` says. Raises NodeError, ModelError,
    GpuError, EngineError or NetworkError, perhaps in exception groups."""
    # What the user may have mistyped is looked at before anything is made or taken.
    if settings.http is not None:
        check_listen(settings.http, _front_rules(settings))
    invitation = await accept_invitation(settings.bootstrap, settings.token) if settings.bootstrap is not None else None
    backend = find_backend(settings.engine.backend)
    found = backend.hardware(hardware.probe(), settings.engine)
    served: ServedModel | None = None
    if settings.model is not None:
        served = await trio.to_thread.run_sync(backend.inspect, settings.model, found, settings.engine)
    with lock_home(settings.home), keep_log(settings.home, say) as say:
        membership = invitation if invitation is not None else new_network(settings.home, say)
        owner = Owner(say, show or _show_nobody, tell)
        if settings.hosting is None:
            await _join(settings, membership, found, served, owner, stop, task_status)
            return
        for life in follow_lives(ModelShelf(backend, found, settings), stop):
            with life.bear_absence(say):
                await _join(settings, membership, found, life.served, owner, stop, task_status, life)
            task_status = trio.TASK_STATUS_IGNORED


async def _join(
    settings: NodeSettings,
    membership: Invitation,
    found: hardware.Hardware,
    served: ServedModel | None,
    owner: Owner,
    stop: trio.Event,
    task_status: trio.TaskStatus[Started],
    life: HostingLife | None = None,
) -> None:
    """Join, serve, drain, leave; `life`: once it has ended, too."""
    say = owner.say
    from ..bootstrap.streams.libp2p_host import Libp2pTransport  # 0.4 s and 80 MB that only a running node pays

    identity = Identity.load_or_create(settings.home)
    book = AddressBook(settings.home, membership.network)
    remembered = await trio.to_thread.run_sync(book.load)
    announce = announced_address(settings.announce, os.environ, settings.listen)
    relay = Relay()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_close_in_the_end, relay)
        port = DataPort(nursery, settings.tuning)
        transport = Libp2pTransport(identity, settings.listen, announce, port.accept)
        network = Network(
            transport=transport,
            identity=identity,
            token=membership.token,
            network_key_public=membership.network,
            role=membership.role,
            announce=announce,
            bootstraps=membership.bootstraps,
            remembered=remembered,
            book=book,
            state_file=StateFile(settings.home, membership.network, say),
            release=__version__,
            rng=random.Random(),
            rules=PLAN_RULES,
            clock=time.time,
            settings=replace(NetworkSettings(), join_s=settings.join_timeout_s),
            say=say,
        )
        async with network:
            plans = PlanFile(settings.home, membership.network, say)
            events = EventFile(settings.home, say)
            log = EventLog(identity.peer_id, time.time, await trio.to_thread.run_sync(events.load))
            joined = Joined(network, settings, say, await trio.to_thread.run_sync(plans.load), log)
            joined.show, joined.tell = owner.show, owner.tell
            nursery.start_soon(plans.keep, joined.view)
            events.follow(log)
            spans = open_spans(identity.peer_id, os.environ, say)
            if spans is not None:
                log.followers.append(spans.on_event)
                nursery.start_soon(_close_in_the_end, spans)
            nursery.start_soon(events.keep)
            doors = Doors(port, relay, transport.adopt, transport.bound or settings.listen)
            node = Node(joined, found, served, doors, nursery, life)
            nursery.start_soon(answer_owner, settings.home, node.answer_owner, say)
            http = await node.serve_http(settings.http, nursery) if settings.http is not None else None
            address = network.address
            handed_out: dict[str, str] = {}
            keeper = membership.owner
            nursery.start_soon(CatalogueDesk(joined, keeper).run)
            if keeper is not None:
                here = Bootstrap(address.host, address.port, identity.peer_id)
                handed_out = await trio.to_thread.run_sync(keeper.take_greetings, here, settings.also, time.time())
                nursery.start_soon(keeper.follow, network, time.time, network.settings)
            task_status.started(Started(peer=identity.peer_id, address=address, tokens=handed_out, http=http))
            nursery.start_soon(node.leave_before_end, stop)
            await (stop.wait() if life is None else life.wait_end(stop))
            await node.finish()
            joined.is_leaving = True
            await network.leave()
        nursery.cancel_scope.cancel()


@final
class Node:
    """A node that has joined: what it tells, follows and plans. Starts its tasks in `nursery`."""

    def __init__(
        self,
        joined: Joined,
        found: hardware.Hardware,
        served: ServedModel | None,
        doors: Doors,
        nursery: trio.Nursery,
        life: HostingLife | None = None,
    ) -> None:
        settings, network = joined.settings, joined.network
        self._joined = joined
        self._life = life
        self._tuning = settings.tuning
        self._hardware = found
        self._advertising = Advertising(self._advert, partial(joined.publish, messages.ADVERT), settings.tuning)
        self._leaves_at: float | None = None  # by trio's clock, once this node is leaving
        divided = settings.divided if served is not None else None
        self._division = DivisionDesk(joined.own, divided, joined.tell, self._hurry) if divided is not None else None
        self._serving: Serving | None = None
        self._planning = PlanningDesk(joined, self._publish_plan)
        self._book = PlanBook()
        self._plans = PlanExchange(
            network, nursery=nursery, rng=random.Random(), tuning=settings.tuning, on_bytes=self._on_plan_bytes
        )
        self._ways = Ways(joined, doors, nursery)
        path_to = self._ways.reach.path_to
        self._serving = (
            Serving(joined, served, found, path_to=path_to, nursery=nursery, on_news=self._hurry) if served else None
        )
        serving = self._serving
        joined.intake.first = serving.service if serving is not None else ""
        self.showing = Showing(joined, serving)
        self.drains = DrainDesk(
            DrainOrder(settings.home),
            network,
            nodes=self.showing.nodes,
            requests=lambda: serving.open_requests if serving is not None else 0,
            apply=self._on_drain_order,
        )
        if self.drains.is_draining:
            self._on_drain_order(True, None)
        self.price = PriceTag(settings.usd_per_hour, self._on_price)
        if serving is not None:
            serving.on_work = self._advertising.note_request
            serving.gateway.on_member_stalled = self._planning.note_stalled
            serving.api.answers |= NodeAnswers(joined, self.showing).by_name()
        prober = Prober(
            joined.knowledge,
            messenger=network,
            neighbours=joined.neighbours,
            carrier=BurstCarrier(path_to, self._ways.reach.note_stuck),
            activity=lambda: serving.activity if serving is not None else Activity(),
            nursery=nursery,
            rng=random.Random(),
            tuning=settings.tuning,
        )
        prober.record = joined.record
        port = doors.port
        port.open_door(RELAY_MAGIC, RELAY_HELLO_BYTES, doors.relay.attach)
        port.open_door(CALL_MAGIC, CALL_HELLO_BYTES, self._ways.calls.take)
        port.open_door(BURST_MAGIC, BURST_HELLO_BYTES, prober.attach)
        if serving is not None:
            port.open_door(LINK_MAGIC, LINK_HELLO_BYTES, serving.host.worker.attach)
            network.on_peer_lost(serving.peer_lost)
        own = (self._advertising.run, self._watch, self._planning.run, self._judge, self._weigh)
        for task in (prober.run, joined.tell_links, self._ways.reachability.run, AssignmentDesk(joined).run, *own):
            nursery.start_soon(task)
        if life is not None:
            nursery.start_soon(life.run, joined, self._hurry)

    async def serve_http(self, listen: Address, nursery: trio.Nursery) -> Address:
        """Serve the OpenAI API at a port of this box, and return it: from its own API process, or without a model, from
        whichever box of the network has an engine that is ready. Raises AddressError or PortInUse."""
        joined = self._joined
        if self._serving is not None:
            return self._serving.api.listen(listen)
        network = joined.network
        rules = replace(_front_rules(joined.settings), role=network.asks_as, realm=network.peer_id)
        front = HttpFront(HttpAsking(network, nursery), rules)
        at: Address = await nursery.start(front.serve, listen)
        return at

    def _hurry(self) -> None:
        self._advertising.hurry()
        engine = self._serving.engine if self._serving is not None else None
        if self._division is not None and engine is not None and engine.state == "ready":
            self._division.note_ready()

    async def answer_owner(self, question: OwnerQuestion) -> OwnerAnswer:
        """The owner of this box asks, or wants something."""
        return await self.price.answer(question, self._joined.own, self.drains.answer)

    def _on_price(self, before: float, now: float) -> None:
        """The owner of the box says what it costs from now on."""
        self._joined.say(f"costs {describe_price(now)} from now on, before {describe_price(before)}")
        self._hurry()

    @property
    def _draining(self) -> bool:
        return self._leaves_at is not None or self.drains.is_draining

    def _on_drain_order(self, draining: bool, by: PeerId | None) -> None:
        """The owner of the box, or an admin of the network, has given the order to drain, or taken it back."""
        serving, joined = self._serving, self._joined
        if serving is not None and draining:
            serving.drain()
        elif serving is not None and self._leaves_at is None:
            serving.resume()
        joined.record(EventKind.MEMBER_DRAINING if draining else EventKind.MEMBER_RESUMED, peer=by or joined.own)
        who = f" as {by} wants, an admin of the network" if by is not None else ""
        if draining:
            joined.say(f"draining{who}: takes no new requests; `p2pserve drain --undo` ends that")
        else:
            joined.say(f"takes new requests again{who}")
        self._hurry()
        self._apply_view()

    async def finish(self) -> None:
        """Before it leaves: take no new work, tell everyone, and wait for what is running."""
        serving, settings = self._serving, self._joined.settings
        drain_s = drain_seconds(settings, time.time()) if serving is not None else 0.0
        self._leaves_at = leaves_at = trio.current_time() + drain_s
        self._hurry()
        self.drains.leaves_in = lambda: leaves_at - trio.current_time()
        if serving is None:
            return
        serving.drain()
        if not serving.is_idle:
            self._joined.say(f"draining: {describe_left(serving.open_requests)}, {drain_s:g} s at most")
        migrate_at = leaves_at - self._tuning.migrate_before_s(drain_s)
        with trio.move_on_at(leaves_at):
            while not serving.is_idle:
                if trio.current_time() >= migrate_at:
                    migrate_at = inf
                    serving.host.worker.migrate()
                left_s = leaves_at - trio.current_time()
                if left_s < drain_s - 1.0:  # before that it has just been said
                    self._joined.show(f"draining: {describe_left(serving.open_requests)}, {left_s:.0f} s at most")
                await trio.sleep(DRAIN_POLL_S)
        self._joined.show("")

    async def leave_before_end(self, stop: trio.Event) -> None:
        """Set `stop` in time before the box ends, if its owner has said when: what runs may finish."""
        settings = self._joined.settings
        if settings.ends_at is None:
            return
        while True:
            left_s = settings.ends_at - settings.drain_s - LEAVE_S - time.time()
            if left_s <= 0.0:
                break
            await trio.sleep(min(left_s, CLOCK_S))  # the clock of the box may be set right meanwhile
        self._joined.say("leaving: the box is about to end")
        stop.set()

    def _ends_in_s(self) -> float | None:
        """For how long the box will be there, as it is told; None: its owner has not said."""
        ends = [self._leaves_at - trio.current_time()] if self._leaves_at is not None else []
        ends_at = self._joined.settings.ends_at
        ends += [ends_at - time.time()] if ends_at is not None else []
        return round_remaining(min(ends)) if ends else None

    def _advert(self) -> messages.Advert:
        settings, serving = self._joined.settings, self._serving
        advert = messages.Advert(
            hardware=self._hardware,
            draining=self._draining,
            phase=settings.phase,
            usd_per_hour=self.price.usd_per_hour,
            ends_in_s=self._ends_in_s(),
            division=self._division.division if self._division is not None else None,
            hosting=self._life.offer(serving.engine if serving is not None else None) if self._life else None,
        )
        return serving.add_to(advert) if serving is not None else advert

    async def _watch(self) -> None:
        """Follow every change of membership, adverts, plan and coordinator."""
        joined, revision = self._joined, -1
        while True:
            revision = await joined.network.wait_changed(revision)
            joined.view.update(joined.network.entries(messages.ADVERT))
            joined.follow()
            if joined.leader is not None:
                self._plans.want(joined.intake.wanted, joined.leader[0])
            self._ways.keep(joined.present)
            self._planning.look()
            self._apply_view()
            # Load reports come many times a second from many nodes; nothing here is as urgent as all of them.
            await trio.sleep(self._tuning.watch_interval_s)

    def _publish_plan(self, plan: Plan) -> None:
        """Tell all, and follow it as they do: one that could not be told is not followed here either."""
        joined = self._joined
        try:
            manifest, payload = describe_plan(plan)
        except PlanError as error:
            joined.say(f"the plan was not published: {error}")
            return
        number = f"{plan.epoch}.{plan.version}"
        joined.record(EventKind.PLAN_MADE, plan=number, service=plan.service, replicas=len(plan.replicas))
        self._plans.hold(manifest.digest, payload)
        for kind, message in self._book.add(manifest, choose_services(joined.view)).items():
            joined.publish(kind, message)
        joined.follow()
        self._on_plan_bytes(manifest, payload)

    def _on_plan_bytes(self, manifest: PlanManifest, payload: bytes) -> None:
        self._joined.intake.on_bytes(manifest, payload)
        self._joined.take_plan()
        self._planning.look()
        self._apply_view()

    async def _judge(self) -> None:
        """Object to a coordinator whose plans make no sense, or are not for this box."""
        joined, objected = self._joined, None
        while True:
            await trio.sleep(self._tuning.judge_s)
            leader = joined.leader
            if leader is None or leader == objected:
                continue
            reason = joined.intake.find_objection(self._advert(), joined.view.adverts, trio.current_time())
            if reason:
                objected = leader
                joined.network.object_to(*leader)
                joined.record(EventKind.PLAN_OBJECTED, peer=leader[0], epoch=leader[1], why=reason)
                joined.say(f"this node objects to the plan of coordinator {name_of(leader[0])}: {reason}")

    async def _weigh(self) -> None:
        """Tell the owner whether the box is worth its price, once that is known and when it changes."""
        joined, serving, watch = self._joined, self._serving, WorthWatch()
        while serving is not None:
            await trio.sleep(self._tuning.worth_s)
            if self.price.usd_per_hour <= 0.0:
                continue
            worth = joined.view.worth(serving.service).get(joined.own)
            line = joined.view.lines().get(joined.own, BoxLine())
            told = watch.consider(worth, line, trio.current_time())
            if told is not None:
                joined.say(told)

    def _apply_view(self) -> None:
        """The view of the network is another: requests and the engine go by it."""
        self.showing.follow_plan()
        plan = self._joined.view.plan_of(self._serving.service) if self._serving is not None else None
        leader = self._joined.leader
        if self._division is not None and self._leaves_at is None and plan is not None and leader is not None:
            # A plan that an earlier run of this node followed may want what is over.
            self._division.follow(plan if plan.epoch == leader[1] else None, time.time())
        if self._serving is not None:
            self._serving.gateway.network_changed()
            # A box that drains, or soon will, keeps its place in a replica until it has no request: it, and then all,
            # may be moved.
            keeps_place = self.drains.is_draining or is_planned_without(self._ends_in_s())
            if self._leaves_at is None and (not keeps_place or self._serving.is_idle):
                self._serving.host.follow(plan)


def drain_seconds(settings: NodeSettings, now: float) -> float:
    """For how long requests may finish on a box that leaves at `now` (unix seconds): not beyond its end."""
    if settings.ends_at is None:
        return settings.drain_s
    return max(0.0, min(settings.drain_s, settings.ends_at - LEAVE_S - now))


def _front_rules(settings: NodeSettings) -> FrontRules:
    api = settings.api
    return FrontRules(
        keys=tuple(key.secret for key in api.keys), needs_no_key=api.needs_no_key, admin_token=api.admin_token
    )


async def _close_in_the_end(closing: Relay | SpanExport) -> None:
    try:
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(closing.close)
