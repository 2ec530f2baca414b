"""What a node with a model adds to a network: an engine that works for others, and a gateway for clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import final

import msgspec
import trio

from ..bootstrap import PeerId
from ..bootstrap.network import Network
from ..coordinator.bounds import MAX_SERVICES
from ..coordinator.costs.model_shape import KV_8_BIT
from ..kvtransport.probing.probe import Activity
from . import messages, methods
from .api.accounts import KeyAccounts
from .api.server import ApiServer, api_config
from .box.hardware import Hardware
from .engine.api.protocol import OtherService, ServiceState
from .engine.backend import ServedModel
from .http.admission import FrontRules
from .http.answering import HttpAnswering
from .http.asking import HttpAsking
from .http.front import HttpFront
from .joined import Joined
from .links.kv_outlets import KvOutlets
from .links.path_selection import PathSelector
from .links.reach import PathTo
from .models import ModelInfo
from .observing.values import EventKind
from .prefixes.salts import CacheSalts
from .replica.hosting import EngineConfigs, Host, describe_kv_quality, describe_length, describe_sharing, engine_configs
from .replica.jobs import count_untold
from .requests.gateway import Gateway
from .requests.local_clients import LocalClients
from .settings import NodeTuning

LEAST_LOOK_S = 0.02


@final
class Serving:
    """Constructed once the node has joined; starts its tasks in `nursery`. `on_news`: the advert must not wait."""

    def __init__(
        self,
        joined: Joined,
        served: ServedModel,
        hardware: Hardware,
        *,
        path_to: PathTo,
        nursery: trio.Nursery,
        on_news: Callable[[], None],
    ) -> None:
        settings, network = joined.settings, joined.network
        self.served = served
        self._others: dict[str, ModelInfo] = {}  # by service, what boxes offer, and have offered
        self.engine: messages.EngineAdvert | None = None  # nothing to tell before its first state
        self._say, self._show, self._record = joined.say, joined.show, joined.record
        self._on_news = on_news
        self._selector = PathSelector(joined.knowledge, joined.can_dial, settings.tuning)
        outlets = KvOutlets(
            served.model.info,
            self._selector,
            messenger=network,
            path_to=path_to,
            starts=joined.view.starts,
            nursery=nursery,
            tuning=settings.tuning,
        )
        for line in (describe_length(served, settings.engine), describe_kv_quality(served, settings.engine)):
            if line is not None:
                joined.say(line)
        self.host = Host(
            served,
            _configure_engines(joined, served, hardware),
            network=network,
            outlets=outlets,
            path_to=path_to,
            on_change=self._on_engine,
            record=joined.record,
            settings=settings,
        )
        self._view, self._beside = joined.view, settings.beside if settings.hosting is None else ()
        clients = LocalClients(network)
        self.gateway = Gateway(
            view=joined.view,
            messenger=clients,
            model=served.model.info,
            text=served.text,
            nursery=nursery,
            routing=settings.routing,
            settings=settings.requests,
            limits=settings.tuning.clients,
        )
        self.gateway.record = outlets.record = joined.record
        self.gateway.salts = _salts_of(joined)
        accounts = KeyAccounts({key.name: key.limits for key in settings.api.keys})
        joined.key_usd = accounts.cost_by_key
        self.api = ApiServer(
            api_config(served.model, settings.api, settings.home / "api.log"),
            wait_server=self.host.wait_server,
            state=self._describe_service,
            gateway=self.gateway,
            clients=clients,
            accounts=accounts,
            say=joined.say,
            settings=settings.api,
        )
        self.http = HttpAnswering(network, self.api.connect, nursery)
        self.api.carry = _front_of_others(network, nursery).serve_stream
        self._hear_requests(network)
        network.on_hung(self._peer_hung)
        nursery.start_soon(self.host.run)
        nursery.start_soon(self.api.run)
        self.host.worker.learner.on_change = self._on_speed
        self._is_used = trio.Event()
        self.on_work: Callable[[], None] = lambda: None
        """Hears that its engine has one more request."""
        self.gateway.on_request, self.host.worker.on_request = self._note_request, self._note_work
        nursery.start_soon(self._expect_answers, network, settings.tuning)

    def _hear_requests(self, network: Network) -> None:
        """What clients ask, and what engines say of it, is the gateway's."""
        network.handle(methods.GENERATE, self.gateway.generate)
        network.handle(methods.GENERATE_CONTINUE, self.gateway.continue_answer)
        network.on_notice(methods.GENERATE_STOP, self.gateway.stop)
        network.on_notice(methods.TOKENS, self.gateway.on_tokens)
        network.on_notice(methods.PREFILL_ENDED, self.gateway.on_prefill_ended)
        network.on_notice(methods.REPLICA_HUNG, self.gateway.on_replica_hung)

    def __repr__(self) -> str:
        return f"<Serving {self.host.worker} {self.gateway}>"

    @property
    def activity(self) -> Activity:
        """What a burst to measure a link would disturb."""
        return Activity(transfers=self._selector.moving(trio.current_time()), engine_busy=not self.host.worker.idle)

    @property
    def service(self) -> str:
        """What it serves."""
        return self.served.model.info.service

    def _describe_service(self) -> ServiceState:
        """For the API process."""
        info, stats = self.served.model.info, self.host.worker.stats
        reason = "" if self.gateway.is_served else self.gateway.why_not_served
        entry = self._view.catalogue.entry_of(info.service, info.name)
        return ServiceState(
            serving=self.gateway.is_served,
            reason=reason,
            max_model_len=self._view.max_model_len(info),
            kv_usage=stats.kv_usage if stats is not None else 0.0,
            service=info.service,
            entry=entry.name if entry is not None else "",
            removed=self._view.catalogue.is_removed(info.service, info.name),
            others=self._list_others(),
        )

    def _list_others(self) -> tuple[OtherService, ...]:
        """The network's other services, by what requests may call them. A name that several have names none."""
        own, view, catalogue = self.served.model.info, self._view, self._view.catalogue
        models = {a.model.service: a.model for a in view.adverts.values() if a.model is not None}
        # One whose last box is lost is known by its name for as long as there is a plan for it.
        lost = {service: model for service, model in self._others.items() if service in view.plans}
        self._others = lost | models
        called = {service: model.name for service, model in self._others.items()}
        names = Counter(called.values())
        found, placed = [], {own.name, own.service}
        for service in sorted({*models, *view.plans} - {own.service})[: 2 * MAX_SERVICES]:
            model, name = self._others.get(service), called.get(service, service)
            if catalogue.is_removed(service, name):
                continue
            placed |= {service, name}
            entry = catalogue.entry_of(service, name)
            has_name = names[name] == 1 and name != own.name
            known = (entry.name if entry is not None else "", name if has_name else "", service)
            found.append(
                OtherService(
                    names=tuple(dict.fromkeys(filter(None, known))),
                    max_model_len=view.max_model_len(model) if model is not None else 0,
                )
            )
        unplaced = (entry for entry in catalogue.entries if entry.model_name not in placed)
        return (*found, *(OtherService(names=(entry.name,), is_placed=False) for entry in unplaced))

    def add_to(self, advert: messages.Advert) -> messages.Advert:
        """A node's advert, with its engine and what clients ask of it."""
        return msgspec.structs.replace(
            advert,
            model=self.served.model.info,
            engine=self.engine,
            stats=count_untold(self.host.worker.stats, *self.host.worker.jobs),
            fits=self.host.share.layers,
            tp=self.host.share.tp,
            profile=self.host.worker.learner.profile,
            demand=self.gateway.demand,
            served=msgspec.structs.replace(
                self.host.worker.served, refused_s=self.gateway.refused.per_s(trio.current_time())
            ),
            hung=self.host.worker.is_hung,
            beside=self._beside,
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way here."""
        return self.host.worker.idle and self.gateway.idle and self.http.is_idle

    @property
    def open_requests(self) -> int:
        """How many are under way here: those of this gateway, and others' in this engine."""
        found = self.gateway.open_requests + self.host.worker.count_requests_of_others()
        return found or int(not self.is_idle)  # an exchange over HTTP need not be a request for tokens

    def drain(self) -> None:
        """Finish what is running, refuse what is new."""
        self.host.worker.drain()
        self.gateway.drain()
        self.http.drain()

    def resume(self) -> None:
        """Take what is new again."""
        self.host.worker.resume()
        self.gateway.resume()
        self.http.resume()

    def peer_lost(self, peer: PeerId) -> None:
        """The connection to a node or a client has ended."""
        self.host.worker.peer_lost(peer)
        self.gateway.peer_lost(peer)
        self.http.peer_lost(peer)

    def _peer_hung(self, peer: PeerId, hung: bool) -> None:
        self._selector.peer_hung(peer, hung)  # first: what the others do about it may choose paths
        self.host.worker.peer_hung(peer, hung)
        self.gateway.peer_hung(peer, hung)

    def _note_request(self) -> None:
        self._is_used.set()

    def _note_work(self) -> None:
        self._is_used.set()
        self.on_work()

    async def _expect_answers(self, network: Network, tuning: NodeTuning) -> None:
        """Keep the network told of whom requests wait for, and see whether the own engine gets on."""
        while True:
            self._is_used = trio.Event()
            network.expect("gateway", self.gateway.queues)
            network.expect("head", self.host.worker.awaited)
            now = trio.current_time()
            was_hung = self.host.worker.is_hung
            look_at = self.host.worker.look_at_engine(now)
            if self.host.worker.is_hung is not was_hung:
                self._on_news()  # plans go around it
            if self.gateway.idle and self.host.worker.idle and look_at == inf:
                # A stage is not told of its head's requests: it sees in a while that it is one.
                with trio.move_on_after(tuning.expect_idle_s):
                    await self._is_used.wait()
            else:
                await trio.sleep_until(min(now + tuning.expect_interval_s, max(look_at, now + LEAST_LOOK_S)))

    def _record_engine(self, engine: messages.EngineAdvert) -> None:
        self._record(
            EventKind.ENGINE_STATE,
            state=engine.state,
            detail=engine.detail or None,
            engine=engine.engine or None,
            device=engine.device or None,
            kv_tokens=engine.kv_tokens or None,
            starts=engine.starts or None,
        )

    def _on_speed(self, factor: float) -> None:
        """Steps of the engine take so many times as long as before, whatever they compute."""
        self._record(EventKind.ENGINE_SPEED, slower=round(factor, 3))
        self._say(f"the engine's steps take {factor:.2f} times as long as before: routes and plans follow")

    def _on_engine(self, engine: messages.EngineAdvert) -> None:
        before, self.engine = self.engine, engine
        if before is None or (before.state, before.detail) != (engine.state, engine.detail):
            self._record_engine(engine)
        self._on_news()
        if before is not None and before.state == engine.state == "ready" and before.starts == engine.starts:
            self._show(engine.detail)  # it serves on
            return
        is_long = engine.state in ("waiting", "loading", "starting") or (
            engine.state == "restarting" and before is not None and before.state == engine.state
        )
        self._show(f"engine {engine.state}: {engine.detail}" if is_long and engine.detail else "")
        if engine.state == "ready" and not engine.kv_tokens:  # a stage: its head has the scheduler
            self._say("stage ready: the head of its replica serves requests")
        elif engine.state == "ready":
            bits = " in 8 bits" if self.served.model.info.shape.kv_value_bytes == KV_8_BIT else ""
            self._say(f"engine ready: {engine.engine} on {engine.device}, {engine.kv_tokens} tokens of KV cache{bits}")
        elif engine.detail and not is_long:
            self._say(f"engine {engine.state}: {engine.detail}")


def _front_of_others(network: Network, nursery: trio.Nursery) -> HttpFront:
    """Carries requests that name another model to a box that has it. Whose they are was looked at by the API
    process."""
    return HttpFront(HttpAsking(network, nursery), FrontRules(needs_no_key=True))


def _configure_engines(joined: Joined, served: ServedModel, hardware: Hardware) -> EngineConfigs:
    settings = joined.settings
    is_shared = settings.engine_socket is not None
    return engine_configs(
        served,
        hardware,
        settings.engine,
        settings.home / "engine.log",
        codec=settings.codec,
        sharing=describe_sharing(served.model.info, joined.view.catalogue) if is_shared else None,
    )


def _salts_of(joined: Joined) -> CacheSalts:
    """Whose requests at this gateway share cached prompts."""
    network = joined.network
    caches = {key.name: key.cache for key in joined.settings.api.keys if key.cache}
    return CacheSalts(network=network.network_key_public, gateway=network.peer_id, caches=caches)
