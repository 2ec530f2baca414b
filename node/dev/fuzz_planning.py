"""Hostile adverts, link tables and plans: into the view of a node, and on to its coordinator, planner and router."""

from __future__ import annotations

import random
import time
from functools import cache
from hashlib import sha256
from typing import Any, Final

import msgspec

from ...bootstrap import DECODE_ERRORS, PeerId
from ...bootstrap.dev.fuzz_report import ControlFuzzReport
from ...bootstrap.dev.mutations import TypeMaker, mutated_encoding, varied
from ...bootstrap.members.peering import Peering
from ...bootstrap.trust.entries import MAX_PAYLOAD
from ...coordinator import Demand, LatencyProfile, Phase, Plan, Router
from ...coordinator.costs.model_shape import ModelShape
from ...coordinator.plan import Pairing, Replica, Stage
from ...coordinator.profile import PhaseCost, PhaseFit
from ...coordinator.regrouping.divisions import BoxDivision, CutOffer
from ...coordinator.routing.interface import NoRoute
from ...kvtransport.probing.figures import BoxFigures, LinkFigures
from ..adverts import divided_boxes
from ..box.hardware import Gpu, Hardware
from ..engine.protocol import EngineStats
from ..messages import ADVERT, LINKS, PLAN, Advert, EngineAdvert, LinkTable
from ..models import ModelInfo, WeightSizes
from ..planning.coordination import PlanningTask
from ..planning.manifest import describe_plan, read_bundle, read_manifest
from ..planning.messages import INLINE_PLAN_BYTES, PLAN_BUNDLE, PlanManifest
from ..planning.plan_intake import PlanIntake
from ..planning.services import Coordinator, choose_services
from ..planning.worker import PlannerAnswer, PlannerTask, answer
from ..settings import WAN
from ..view import NetworkView, Queue

_SEARCH_S: Final = 0.02
_ATTEMPTS: Final = 12
_LAYERS: Final = 4
_SERVICE: Final = "tiny"
_OWN: Final = PeerId("p0")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode
_adverts: Final = msgspec.msgpack.Decoder(Advert)
_tasks: Final = msgspec.msgpack.Decoder(PlannerTask)
_answers: Final = msgspec.msgpack.Decoder(PlannerAnswer)
_SHAPE: Final = ModelShape(
    name="tiny", layers=_LAYERS, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
)
_MODEL: Final = ModelInfo(
    service=_SERVICE,
    shape=_SHAPE,
    max_model_len=512,
    weights=WeightSizes(layers=(1 << 20,) * _LAYERS, embeddings=1, head=1),
)
_STATS: Final = EngineStats(1, 0, 0.5, 100, 10)
_FIT: Final = PhaseFit(cost=PhaseCost(token_s=1e-5, request_s=1e-4, length_s=0.0, step_s=0.01), samples=100, error=0.1)
_PROFILE: Final = LatencyProfile(prefill=_FIT, decode=_FIT)
_WILD: Final = TypeMaker(Advert)
_WILD_LINKS: Final = TypeMaker(LinkTable)


def make_advert(rng: random.Random) -> bytes:
    """What a box says of itself: plausible, or anything within the bounds."""
    if rng.random() < 0.1:
        return _WILD.make(rng)
    honest = plausible_advert(rng.randrange(6), rng.randrange(4))
    return _encode(varied(rng, Advert, _decode(honest), rng.choice((0.0, 0.05, 0.2))))


_CUTS: Final = tuple(CutOffer(replicas=number, tp=2 // number, longest=512) for number in (1, 2))


@cache
def plausible_advert(box: int, kind: int) -> bytes:
    """Of a CPU or GPU box that serves alone (0, 1), one that holds some layers (2), one with demand and a phase (3)."""
    gpus = (Gpu(name="NVIDIA A40", memory_gib=45.0, uuid="u"),) * 2 if kind == 1 else ()
    demand = Demand(requests_s=3.0, arrival_cv=1.0, lengths=((100, 20), (30, 60)))
    state = "waiting" if kind == 2 else "ready"
    advert = Advert(
        hardware=Hardware(cores=4, memory_gib=8.0, processor="x", gpus=gpus),
        draining=False,
        model=_MODEL,
        engine=EngineAdvert(state=state, tflops=1.0, memory_gbps=10.0, kv_tokens=1000, starts=1, max_model_len=512),
        stats=_STATS,
        fits=3 if kind == 2 else _LAYERS,
        tp=2 if kind == 1 else 1,
        profile=_PROFILE if box % 2 else None,
        demand=demand if kind == 3 or box == 1 else None,
        phase=Phase.PREFILL if kind == 3 else None,
        usd_per_hour=0.4,
        division=BoxDivision(head=f"p{box}", nodes=(f"p{box}",), offers=_CUTS) if kind == 1 else None,
    )
    return _encode(advert)


def make_links(rng: random.Random) -> bytes:
    """What a box says of its links."""
    if rng.random() < 0.2:
        return _WILD_LINKS.make(rng)
    figures = LinkFigures(rtt_s=0.02, one_stream_gbps=0.5, capacity_gbps=rng.choice((0.0, 0.1, 1.0, 1e5)))
    box = BoxFigures(up_gbps=rng.choice((None, 0.0, 1.0)), up_usd_per_gb=0.01)
    return _encode(
        LinkTable(
            site=rng.choice(("", "fra", "lon")), box=box, links={f"p{n}": figures for n in range(rng.randrange(4))}
        )
    )


def make_plan(rng: random.Random) -> bytes:
    """A plan that could be followed."""
    peers = [f"p{n}" for n in range(rng.randrange(1, 5))]
    replicas = [
        Replica(id=peer, phase=Phase.MIXED, stages=(Stage(peer=peer, tp=1, first_layer=0, last_layer=_LAYERS),))
        for peer in peers
    ]
    weight = 1.0 / len(peers)
    plan = Plan(
        epoch=rng.choice((1, 2, 5)),
        version=rng.randrange(1, 9),
        service=_SERVICE,
        replicas=tuple(replicas),
        pairings=tuple(Pairing(prefill=peer, decode=peer, weight=weight) for peer in peers),
        codec="raw",
        why=("because",),
    )
    return _encode(plan)


def make_manifest(rng: random.Random) -> bytes:
    """What a coordinator publishes of a plan; the plan may be anything."""
    payload = make_plan(rng)
    plan = msgspec.msgpack.decode(payload, type=Plan)
    if rng.random() < 0.3:
        payload = mutated_encoding(rng, payload, INLINE_PLAN_BYTES) or b"?"
    manifest = PlanManifest(
        epoch=plan.epoch,
        version=plan.version,
        service=plan.service,
        size=len(payload),
        digest=sha256(payload).digest(),
        plan=payload if rng.random() < 0.8 else b"",
    )
    return _encode(manifest)


def make_bundle(rng: random.Random) -> bytes:
    """Manifests of more services, as a coordinator publishes them."""
    manifests = [msgspec.Raw(make_manifest(rng)) for _ in range(rng.randrange(4))]
    return _encode({"epoch": rng.choice((1, 2, 5)), "serial": rng.randrange(1, 9), "manifests": manifests})


def follow_entry(view: NetworkView, leader: tuple[PeerId, int], entry: bytes, bundle: bytes = b"") -> None:
    """What a node makes of what its coordinator publishes."""
    intake = PlanIntake(_OWN, WAN)
    intake.see(leader, entry, 0.0, bundle)
    wanted = intake.wanted
    if wanted is not None:
        intake.on_bytes(wanted, entry)
    for plan, author in intake.plans:
        view.consider_plan(plan, author)
    for advert in view.adverts.values():
        intake.find_objection(advert, view.adverts.keys(), 1000.0)


def read_entries(peering: Peering) -> None:
    """What a node reads of what its membership holds."""
    view = NetworkView()
    entries = {kind: peering.table.entries(kind) for kind in (ADVERT, LINKS, PLAN, PLAN_BUNDLE)}
    view.update({peer: entry.payload for peer, entry in entries[ADVERT].items()})
    view.update_links({peer: entry.payload for peer, entry in entries[LINKS].items()})
    leader = peering.coordinator
    if leader is not None:
        told = (entries[kind].get(leader[0]) for kind in (PLAN, PLAN_BUNDLE))
        follow_entry(view, leader, *(entry.payload if entry is not None else b"" for entry in told))
    _use(view, None)


def _use(view: NetworkView, report: ControlFuzzReport | None) -> None:
    """All that a node asks of its view; none of it may fail, whatever the adverts say."""
    view.weigh_reports({})
    loads = view.loads({_OWN: Queue(1, 5)})
    view.links()
    for service in (*view.services(), "no such service"):
        view.boxes(service)
        view.demands(service)
        view.hopeful(service)
    for peer, advert in view.adverts.items():
        view.starts(peer)
        advert.hardware.summary()
        if advert.model is not None:
            view.max_model_len(advert.model)
    for plan in view.plans.values():
        for replica in plan.replicas:
            view.serving(replica, plan.service)
        plan.phase_of(_OWN)
        router = Router(plan)
        router.report(loads)
        try:
            router.route(7, frozenset({"p1"}))
        except NoRoute:
            if report is not None:
                report.outcomes["no route"] += 1


class PlanningAttack:
    """A network of a few boxes, some of which say anything of themselves."""

    def __init__(self, rng: random.Random, report: ControlFuzzReport) -> None:
        self._rng = rng
        self._report = report
        self._view = NetworkView()

    def view(self) -> None:
        """One more advert, link table or plan, taken in by a view."""
        rng, view = self._rng, self._view
        if rng.random() < 0.02:
            view = self._view = NetworkView()
        peer = PeerId(f"p{rng.randrange(6)}")
        kind = rng.randrange(4)
        data = mutated_encoding(rng, (make_advert, make_links, make_manifest, make_bundle)[kind](rng), MAX_PAYLOAD)
        began = self._report.begin()
        if kind == 0:
            view.update({**{p: _encode(a) for p, a in view.adverts.items()}, peer: data})
        elif kind == 1:
            view.update_links({**{p: _encode(t) for p, t in view.links_told.items()}, peer: data})
        else:
            said = read_manifest(data) if kind == 2 else read_bundle(data)
            leader = peer, rng.choice((1, 2, 5)) if said is None else said.epoch
            follow_entry(view, leader, *((data, b"") if kind == 2 else (b"", data)))
        _use(view, self._report)
        self._report.note("views of adverts, links and plans", time.thread_time() - began)

    def plan(self) -> None:
        """Plan for a few boxes, one or two of which lie within the bounds."""
        self.plan_with(self._hostile_view())

    def plan_with(self, view: NetworkView) -> None:
        """Plan with what these adverts and link tables say; who makes it fail is set aside by name."""
        report = self._report
        coordinator = Coordinator(_OWN, "kv4", quiet_s=0.0)
        leader, now = (_OWN, 5), 0.0
        for _ in range(_ATTEMPTS * max(1, len(choose_services(view)))):
            task = coordinator.next(view, leader, now)
            if task is None:
                break
            said = self._answer(task)
            now += 1.0
            if said.failed:
                report.outcomes[f"planning failed: {said.failed[:80]}"] += 1
                if not coordinator.on_failed(task, said.failed, now):
                    break
                continue
            if said.refused:
                report.outcomes[f"planning refused: {said.refused[:40]}"] += 1
                break
            report.outcomes["planned"] += 1
            plan = coordinator.settle(task, said.plan, view, leader, now)
            if plan is not None:
                follow_entry(view, leader, _encode(describe_plan(plan)[0]))
                _use(view, report)
                self._seek(view, msgspec.structs.replace(task, previous=plan))
            if not coordinator.next(view, leader, now):
                break
        else:
            raise AssertionError(f"planning still fails after {_ATTEMPTS} attempts: {view.adverts}")

    def _seek(self, view: NetworkView, task: PlanningTask) -> None:
        """Look for other cuts of machines that let themselves be divided; what fails is said, and nothing is done."""
        divided = divided_boxes(view.adverts, task.service)
        if divided:
            said = self._answer(msgspec.structs.replace(task, divided=divided), seeks_groups=True)
            if said.failed:
                self._report.outcomes[f"looking failed: {said.failed[:80]}"] += 1

    def _answer(self, task: PlanningTask, *, seeks_groups: bool = False) -> PlannerAnswer:
        """As the planner's process does it, on its own pipe."""
        asked = _tasks.decode(_encode(PlannerTask(task=task, search_s=_SEARCH_S, seeks_groups=seeks_groups)))
        with self._report.one("plannings"):
            said = answer(asked, lambda: False)
        return _answers.decode(_encode(said))

    def _hostile_view(self) -> NetworkView:
        rng, view = self._rng, NetworkView()
        count = rng.randrange(1, 5)
        kind = rng.randrange(4)
        said = {
            PeerId(f"p{box}"): _decode(plausible_advert(box, kind if rng.random() < 0.7 else rng.randrange(4)))
            for box in range(count)
        }
        for peer in rng.sample(sorted(said), min(rng.choice((1, 1, 2)), count)):
            said[peer] = self._vary(said[peer], rng.choice(_PARTS))
        if rng.random() < 0.4:  # or boxes of another model would be left out
            model = self._vary(next(iter(said.values())), "model")
            said = {peer: advert | {key: model.get(key) for key in ("model", "fits")} for peer, advert in said.items()}
        view.update({peer: _encode(advert) for peer, advert in said.items()})
        links = {peer: _decode(make_links(rng)) for peer in said if rng.random() < 0.7}
        view.update_links(
            {
                peer: _encode(varied(rng, LinkTable, table, rng.choice((0.0, 0.1, 0.4)), numbers_only=True))
                for peer, table in links.items()
            }
        )
        return view

    def _vary(self, honest: dict[str, Any], part: str) -> dict[str, Any]:
        """An advert that is taken, for otherwise there is nothing to plan with: strange in one part, or in all."""
        rng = self._rng
        for _ in range(40):
            share = rng.choice((0.05, 0.15, 0.3, 0.6))
            said: dict[str, Any] = varied(rng, Advert, honest, share, numbers_only=rng.random() < 0.7)
            if part in said:
                said = honest | {part: said[part]}
            elif rng.random() < 0.9:
                said = said | {"model": honest["model"], "fits": honest["fits"]}
            try:
                if part == "model":
                    layers = said["model"]["shape"]["layers"] = rng.choice((1, 4, 80, 4096))
                    said["model"]["weights"]["layers"] = [rng.choice((0, 1, 1 << 30, 1 << 48))] * layers
                    said["model"]["service"], said["fits"] = _SERVICE, layers
                _adverts.decode(_encode(said))
            except (TypeError, KeyError, *DECODE_ERRORS):
                continue
            return said
        return honest


_PARTS: Final = (
    "division",
    "engine",
    "hardware",
    "profile",
    "demand",
    "model",
    "tp",
    "usd_per_hour",
    "all",
    "all",
    "all",
    "all",
)
