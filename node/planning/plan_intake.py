"""What a node makes of the plans that its coordinator publishes, one for each service: which it follows, whose bytes it
lacks, and what it has against one. No I/O, no clock.

A box follows what is well-formed, from the leader, and of the leader's epoch. What it knows of
itself it knows best: where a plan gives it what it cannot do, and goes on to, it objects. The
election passes over a leader that more than half of the boxes object to
(`bootstrap/members/leading.py`), so one box that lies passes over nobody.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import final

from ...bootstrap import PeerId
from ...coordinator import Plan, PlanError
from ...coordinator.names import count_of
from ...coordinator.plan import GroupStages
from ..messages import Advert
from ..settings import NodeTuning
from .manifest import read_bundle, read_manifest, read_plan
from .messages import PlanBundle, PlanManifest

Leader = tuple[PeerId, int]


def find_conflict(plan: Plan, own: PeerId, advert: Advert) -> str:
    """What a plan wants of this box that it cannot do, in words; empty where there is nothing."""
    replica = plan.replica_of(own)
    if replica is None or (advert.hosting is not None and not _is_of(plan, advert)):
        return ""  # what hosts what it is given may have left that service, at the coordinator's own word
    step = plan.regrouping.steps[0] if plan.regrouping is not None else None
    if step is not None and step.recut is not None and own in step.boxes:
        return ""  # its GPUs are divided anew meanwhile: the plan names it as it was before
    if advert.model is None or advert.model.service != plan.service:
        return f"it is to serve {plan.service}, which it does not have"
    coming = plan.regrouping.next_group_of(own) if plan.regrouping is not None else None
    for group in filter(None, (replica.stages, coming)):
        if found := _find_conflict_in(group, own, advert, advert.model.layers):
            return found
    if advert.phase is not None and replica.phase is not advert.phase:
        return f"it is to do {replica.phase.value}, and its owner has said {advert.phase.value}"
    return ""


def _find_conflict_in(group: GroupStages, own: PeerId, advert: Advert, model_layers: int) -> str:
    """What this box cannot do as a stage of a group, in words."""
    stage = next(stage for stage in group if stage.peer == own)
    gpus = max(len(advert.hardware.gpus), advert.tp, 1)
    if group[-1].last_layer != model_layers:
        return f"its model has {model_layers} layers, and not {group[-1].last_layer}"
    if stage.layers > advert.fits:
        return f"it is to hold {stage.layers} layers, and has room for {advert.fits}"
    if stage.first_gpu + stage.tp > gpus:
        return f"it is to use {count_of(stage.first_gpu + stage.tp, 'GPU')}, and has {gpus}"
    return ""


@final
@dataclass(slots=True)
class _Told:
    """What is published of one service's plan. `plan`: the latest whose bytes are here and mean what they should;
    `author`: who coordinated when it came."""

    manifest: PlanManifest
    since: float
    plan: Plan | None = None
    author: PeerId | None = None


@final
class PlanIntake:
    """One per node. Times are seconds of one clock."""

    def __init__(self, own: PeerId, tuning: NodeTuning) -> None:
        self._own = own
        self._tuning = tuning
        self.first = ""
        """The service whose plan's bytes are fetched before those of others: the node's own."""
        self._leader: Leader | None = None
        self._seen: tuple[Leader, tuple[bytes, bytes]] | None = None
        self._told: dict[str, _Told] = {}  # by service
        self._fault = ""
        self._own_part: object = None  # what this box was when it last changed
        self._own_part_at = 0.0

    def __repr__(self) -> str:
        numbers = [told.manifest.number for told in self._told.values()]
        return f"<PlanIntake {numbers} {self._fault or 'no fault'}>"

    @property
    def plans(self) -> tuple[tuple[Plan, PeerId | None], ...]:
        """The coordinator's latest of each service, where their bytes are here, with who coordinated when they came."""
        return tuple((told.plan, told.author) for told in self._told.values() if told.plan is not None)

    @property
    def wanted(self) -> PlanManifest | None:
        """A plan whose bytes are to be fetched, if any."""
        if self._fault:
            return None
        lacking = [told.manifest for told in self._told.values() if self._lacks(told)]
        return min(lacking, key=lambda each: (each.service != self.first, each.size), default=None)

    def see(self, leader: Leader, entry: bytes, now: float, bundle: bytes = b"") -> None:
        """This is what the coordinator publishes: one service's plan, and a `bundle` of the others'."""
        if self._seen == (leader, (entry, bundle)):
            return
        before, is_anothers = self._told, leader != self._leader
        self._seen, self._leader = (leader, (entry, bundle)), leader
        found = [] if not entry else [read_manifest(entry)]
        others = read_bundle(bundle) if bundle else PlanBundle(epoch=leader[1], serial=0)
        found += others.manifests if others is not None else [None]
        self._fault, self._told = "it is malformed" if None in found else "", {}
        for manifest in found:
            # Of an earlier term: the next comes. Of two for one service the later counts: one of the entries is older.
            if manifest is None or manifest.epoch != leader[1]:
                continue
            held = self._told.get(manifest.service)
            if held is None or held.manifest.number < manifest.number:
                earlier = before.get(manifest.service)
                is_known = earlier is not None and not is_anothers and _key(earlier.manifest) == _key(manifest)
                self._told[manifest.service] = told = _Told(
                    manifest, earlier.since if earlier is not None and is_known else now
                )
                if earlier is not None:
                    told.plan, told.author = earlier.plan, earlier.author
                if manifest.plan and not is_known:
                    self.on_bytes(manifest, manifest.plan)

    def on_bytes(self, manifest: PlanManifest, payload: bytes) -> None:
        """The bytes of a plan have come."""
        told = self._told.get(manifest.service)
        if told is None or _key(told.manifest) != _key(manifest):
            return
        try:
            told.plan = read_plan(manifest, payload)
            told.author = self._leader[0] if self._leader is not None else None
        except PlanError as error:
            self._fault = str(error)

    def on_leader_lost(self) -> None:
        """Nobody coordinates: the plans that are followed go on."""
        self._seen = self._leader = None
        self._told, self._fault = {}, ""

    def find_objection(self, advert: Advert, known: Collection[str], now: float) -> str:
        """Why this node refuses what its coordinator plans, if it does. `known`: the boxes whose adverts are here.

        A plan that does not fit this box may be honest, and older than the advert: so much time is given."""
        part = (advert.model, advert.fits, advert.tp, advert.phase, len(advert.hardware.gpus))
        if part != self._own_part:
            self._own_part, self._own_part_at = part, now
        if self._leader is None or self._leader[0] == self._own:
            return ""
        if self._fault:
            return self._fault
        return next(filter(None, (self._object_to(told, advert, known, now) for told in self._told.values())), "")

    def _object_to(self, told: _Told, advert: Advert, known: Collection[str], now: float) -> str:
        """What this node has against the plan of one service."""
        plan, waited_s = told.plan, now - told.since
        if self._lacks(told):
            return "nobody has its bytes" if waited_s >= self._tuning.plan_missing_s else ""
        if plan is None:
            return ""
        # Of another service all boxes may be lost: those that have its model say whether its plan is strange.
        is_strange = not set(plan.peers) & set(known)
        if is_strange and _is_of(plan, advert) and waited_s >= self._tuning.plan_strange_s:
            return "none of its boxes is known here"
        if min(waited_s, now - self._own_part_at) >= self._tuning.plan_stale_s:
            return find_conflict(plan, self._own, advert)
        return ""

    def _lacks(self, told: _Told) -> bool:
        """Whether its bytes are not here; what another coordinator said under the number is another plan."""
        is_here = told.plan is not None and told.plan.number == told.manifest.number
        return not is_here or (self._leader is not None and told.author != self._leader[0])


def _key(manifest: PlanManifest) -> tuple[tuple[int, int], bytes]:
    """Which plan it is, whether or not its bytes are in it."""
    return manifest.number, manifest.digest


def _is_of(plan: Plan, advert: Advert) -> bool:
    """Whether a plan is for the service that a box has."""
    return advert.model is not None and advert.model.service == plan.service
