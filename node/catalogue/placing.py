"""Which services share which boxes, while this node coordinates: asked of the search that the simulator runs, in a
process of its own, at intervals that adapt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import mode
from typing import Final, final

import msgspec
import trio

from ...bootstrap import PeerId
from ...coordinator import Demand, PlanError
from ...coordinator.capacity import KvNetwork
from ...coordinator.costs.gpus import GpuError, GpuSpec, Specs, gpu_table
from ...coordinator.costs.model_shape import ModelShape
from ...coordinator.names import name_of
from ...coordinator.placement.replacement import ReplacementPace
from ...coordinator.services.assigner import Assigner
from ...coordinator.services.hosting import HostingBox
from ...coordinator.services.replacing import (
    UNKNOWN_LENGTHS,
    BoxToPlace,
    FoundSharing,
    ServiceToPlace,
    SharingTask,
    assign_slots,
)
from ...kernels.codecs import codec_named
from ..adverts import find_beside
from ..joined import Joined
from ..messages import Advert
from ..planning.planner import PlannerFailed, open_planner
from ..view import MIN_FIGURE, UNMEASURED_CPU, UNMEASURED_GPU, NetworkView
from .hosts import find_hosts

TOLD_S: Final = 1800.0
"""For so long a service counts as asked for as before, while none of its gateways can tell yet. Longer: services that
are asked seldom keep their part after a move; shorter: one that nobody asks any more loses it sooner."""


@final
class SharingDesk:
    """One per node; it acts while the node coordinates."""

    def __init__(self, joined: Joined) -> None:
        self._joined = joined
        self._led_since = -1.0
        self._is_moving = False
        self._untried = ""  # why the last decision was by the replay
        self._pace = ReplacementPace(now=0.0)
        self._told: dict[str, tuple[float, tuple[Demand, ...]]] = {}  # by entry, when and what gateways told last
        self._stuck: dict[str, str] = {}  # nodes without which services are placed

    def __repr__(self) -> str:
        return f"<SharingDesk {self._pace}>"

    async def look(self, assigner: Assigner, led_since: float) -> None:
        """Place services anew, where it is time for that, and `assigner` has nothing under way."""
        now, tuning = trio.current_time(), self._joined.settings.tuning
        if led_since != self._led_since:
            self._led_since = led_since
            self._pace = ReplacementPace(now=led_since, interval_s=tuning.replace_s, shortest_s=tuning.replace_s)
            self._is_moving = False
            self._told = {}
        view = self._joined.view
        self._told |= {name: (now, demands) for name, demands in find_demands(view).items()}
        if self._is_moving and assigner.is_in_place:
            self._is_moving = False
            self._joined.say("services are where they were placed")
        if now < self._pace.next_at or not assigner.is_settled(now):
            return
        self._leave_out(assigner.find_stuck(now))
        hosts = self._find_hosts()
        told = {name: demands for name, (at, demands) in self._told.items() if now - at <= TOLD_S}
        codec = self._joined.settings.codec
        task = find_task(view, hosts, assigner.given(), told, self._pace.interval_s, codec)
        if task is None:
            if not any(host.beside for host in hosts):  # the last box that may host several has left
                assigner.place({}, now)
            self._pace.note(None, now)
            return
        found, why = None, ""
        async with open_planner(tuning) as planner:
            try:
                found = await planner.place(task)
            except (PlanError, PlannerFailed) as error:
                why = str(error)
        now = trio.current_time()
        # What was expected by a simulation is not held against a replay.
        is_alike = found is not None and bool(found.untried) == bool(self._untried)
        self._pace.note(found.running if found is not None and is_alike else None, now)
        if found is None:
            self._joined.say(f"services stay where they are: {why}")
            return
        if found.untried != self._untried:
            self._untried = found.untried
            self._joined.say(f"placements are {f'not simulated: {found.untried}' if found.untried else 'simulated'}")
        self._pace.expect(found.expected)
        if found.hosts:
            assigner.place(assign_slots(self._find_hosts(), assigner.given(), found.hosts), now)
            self._is_moving = True
            self._joined.say(describe_sharing(task, found))

    def _find_hosts(self) -> list[HostingBox]:
        """Nodes that may have a part in a placement."""
        return [host for host in find_hosts(self._joined.view) if host.id not in self._stuck]

    def _leave_out(self, stuck: dict[str, str]) -> None:
        for node, name in stuck.items():
            if self._stuck.get(node) != name:
                self._joined.say(f"services are placed without {name_of(node)}: it does not get on with {name}")
        self._stuck = stuck


def describe_sharing(task: SharingTask, found: FoundSharing) -> str:
    """For people: what moves, and what for."""
    before = {box.id: box.hosts for box in task.boxes}
    changed = [
        f"{name_of(box)} {'+'.join(names) or 'nothing'}"
        for box, names in sorted(found.hosts.items())
        if {*names} != {*before.get(box, ())}
    ]
    return (
        f"services are placed anew: {', '.join(changed)}; they cost {found.running_cost:.2g} -> "
        f"{found.found_cost:.2g}, where 1 is every request as fast as alone"
    )


def find_task(
    view: NetworkView,
    hosts: list[HostingBox],
    given: Mapping[str, str],
    told: Mapping[str, tuple[Demand, ...]],
    period_s: float,
    codec: str,
) -> SharingTask | None:
    """What is to be decided, where gateways have `told` this of entries (see `find_demands`), and KV travels in this
    codec; None where there is no choice: nobody asks for anything, no box may host several services, or there is but
    one to host."""
    nodes: defaultdict[str, list[HostingBox]] = defaultdict(list)
    for host in hosts:
        nodes[host.machine].append(host)
    if max(map(len, nodes.values()), default=0) < 2:
        return None
    shapes = _find_shapes(hosts)
    services = {
        entry.name: ServiceToPlace(
            name=entry.name,
            shape=shapes[entry.name],
            demands=told.get(entry.name, ()),
            lengths=entry.lengths or UNKNOWN_LENGTHS,
        )
        for entry in view.catalogue.entries
        if entry.name in shapes
    }
    boxes = [
        box
        for machine, own in sorted(nodes.items())
        if (box := _box_to_place(machine, own, given, view.adverts, services)) is not None
    ]
    here = {box.id for box in boxes}
    boxes += [box for box in _find_pinned(view, services) if box.id not in here]
    able = {name for box in boxes for name in box.able}
    left = tuple(service for name, service in services.items() if name in able)
    if len(left) < 2 or not any(demand.requests_s for service in left for demand in service.demands):
        return None
    ids = {box.id for box in boxes}
    links = tuple(link for link in view.links() if link.source in ids and link.target in ids)
    network = KvNetwork(links=links, codec=codec, kv_bits=codec_named(codec).bits)
    return SharingTask(boxes=tuple(boxes), services=left, period_s=period_s, network=network)


def _box_to_place(
    machine: str,
    own: list[HostingBox],
    given: Mapping[str, str],
    adverts: Mapping[PeerId, Advert],
    services: Mapping[str, ServiceToPlace],
) -> BoxToPlace | None:
    """A box; None for one that holds a part of a model with others, and one that holds none alone."""
    hosted = tuple(sorted({name for box in own if (name := given.get(box.id, "")) in services}))
    able = tuple(sorted(name for name in services if all(box.is_whole(name) for box in own)))
    if not able or not set(hosted) <= set(able):
        return None
    ready = tuple(name for name in able if not own[0].missing(name))
    card = _card_of([adverts[PeerId(box.id)] for box in own])
    room = min(box.offer.room_bytes for box in own) if len(own) > 1 else 0
    return BoxToPlace(id=machine, card=card, most=len(own), able=able, ready=ready, hosts=hosted, room_bytes=room)


def _find_pinned(view: NetworkView, services: Mapping[str, ServiceToPlace]) -> list[BoxToPlace]:
    """Boxes that were started with the models of services, which no other box has a part of: they stay. One with
    several has a node for each."""
    nodes: defaultdict[str, dict[str, Advert]] = defaultdict(dict)  # box -> entry -> its node
    for peer, advert in sorted(view.adverts.items()):
        model, engine = advert.model, advert.engine
        entry = view.catalogue.entry_of(model.service, model.name) if model is not None else None
        if advert.hosting is not None or advert.draining or model is None or entry is None or engine is None:
            continue
        if entry.name in services and advert.fits >= model.layers and engine.state == "ready":
            nodes[next(iter(find_beside(peer, view.adverts)), peer)][entry.name] = advert
    found = []
    for machine, own in nodes.items():
        names, card = tuple(sorted(own)), _card_of([*own.values()])
        most = len(names)
        found.append(BoxToPlace(id=machine, card=card, most=most, able=names, ready=names, hosts=names, stays=True))
    return found


def _find_shapes(hosts: list[HostingBox]) -> dict[str, ModelShape]:
    """By entry, its model as most boxes that can host it alone tell of it."""
    told: defaultdict[str, list[ModelShape]] = defaultdict(list)
    for box in hosts:
        for name, model in box.offer.models.items():
            if model.shape is not None and model.shape.layers == model.layers and box.is_whole(name):
                told[name].append(model.shape)
    return {name: mode(shapes) for name, shapes in told.items()}


def find_demands(view: NetworkView) -> dict[str, tuple[Demand, ...]]:
    """By entry, what its gateways are asked; without those of which none can tell yet. A node that comes back with
    another model counts anew, and so does the gateway of a service that has moved."""
    found: defaultdict[str, list[Demand]] = defaultdict(list)
    for advert in view.adverts.values():
        model = advert.model
        entry = view.catalogue.entry_of(model.service, model.name) if model is not None else None
        if advert.demand is not None and entry is not None:
            found[entry.name].append(advert.demand)
    return {name: tuple(sorted(demands, key=msgspec.structs.astuple)) for name, demands in found.items()}


def _card_of(adverts: list[Advert]) -> GpuSpec:
    """The GPUs of a box as one: as the table has them, or as its engine has measured them; guessed before."""
    hardware = adverts[0].hardware
    count, name = max(1, len(hardware.gpus)), hardware.gpus[0].name if hardware.gpus else "processor"
    measured = [
        each.engine for each in adverts
        if each.engine is not None and min(each.engine.tflops, each.engine.memory_gbps) >= MIN_FIGURE
    ]  # fmt: skip
    each = UNMEASURED_GPU if hardware.gpus else UNMEASURED_CPU
    try:
        known = gpu_table().find(name, hardware.emulated_as or Specs.DENSE)
        each, specs = (known.tflops, known.memory_gbps), known.specs
    except GpuError:
        specs = Specs.ENGINE
    tflops, memory_gbps = (figure * count for figure in each)
    if measured and not hardware.emulated:
        tflops, memory_gbps, specs = measured[0].tflops, measured[0].memory_gbps, Specs.ENGINE
    return GpuSpec(
        name=name,
        memory_gib=sum(gpu.memory_gib for gpu in hardware.gpus) or hardware.memory_gib,
        memory_gbps=float(f"{memory_gbps:.2g}"),  # alike for boxes that are nearly so
        tflops=float(f"{tflops:.2g}"),
        nvlink_gbps=0.0,
        pcie_gen=0,
        usd_per_hour=0.0,
        specs=specs,
    )
