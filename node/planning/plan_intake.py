"""What a node makes of the plans that its coordinator publishes: which one it follows, whose bytes it lacks, and
what it has against one. No I/O, no clock.

A box follows what is well-formed, from the leader, and of the leader's epoch. What it knows of
itself it knows best: where a plan gives it what it cannot do, and goes on to, it objects. The
election passes over a leader that more than half of the boxes object to
(`bootstrap/members/leading.py`), so one box that lies passes over nobody.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final

from ...bootstrap import PeerId
from ...coordinator import Plan, PlanError
from ...coordinator.names import count_of
from ..messages import Advert
from ..settings import NodeTuning
from .manifest import read_manifest, read_plan
from .messages import PlanManifest

Leader = tuple[PeerId, int]


def find_conflict(plan: Plan, own: PeerId, advert: Advert) -> str:
    """What a plan wants of this box that it cannot do, in words; empty where there is nothing."""
    replica = plan.replica_of(own)
    if replica is None:
        return ""
    step = plan.regrouping.steps[0] if plan.regrouping is not None else None
    if step is not None and step.recut is not None and own in step.boxes:
        return ""  # its GPUs are divided anew meanwhile: the plan names it as it was before
    stage = next(stage for stage in replica.stages if stage.peer == own)
    layers = stage.last_layer - stage.first_layer
    gpus = max(len(advert.hardware.gpus), advert.tp, 1)
    if advert.model is None or advert.model.service != plan.service:
        return f"it is to serve {plan.service}, which it does not have"
    if replica.layers != advert.model.layers:
        return f"its model has {advert.model.layers} layers, and not {replica.layers}"
    if layers > advert.fits:
        return f"it is to hold {layers} layers, and has room for {advert.fits}"
    if stage.first_gpu + stage.tp > gpus:
        return f"it is to use {count_of(stage.first_gpu + stage.tp, 'GPU')}, and has {gpus}"
    if advert.phase is not None and replica.phase is not advert.phase:
        return f"it is to do {replica.phase.value}, and its owner has said {advert.phase.value}"
    return ""


@final
class PlanIntake:
    """One per node. Times are seconds of one clock."""

    def __init__(self, own: PeerId, tuning: NodeTuning) -> None:
        self._own = own
        self._tuning = tuning
        self._seen: tuple[Leader, bytes] | None = None
        self._seen_at = 0.0
        self._manifest: PlanManifest | None = None
        self._fault = ""
        self._told: object = None  # what this box was when it last changed
        self._told_at = 0.0
        self.plan: Plan | None = None
        """The coordinator's latest, where its bytes are here and mean what they should."""
        self.author: PeerId | None = None
        """Who coordinated when it came."""

    def __repr__(self) -> str:
        return f"<PlanIntake {self._manifest and self._manifest.number} {self._fault or 'no fault'}>"

    @property
    def wanted(self) -> PlanManifest | None:
        """The plan whose bytes are to be fetched, if any."""
        is_open = self._manifest is not None and not self._fault
        held = self.plan
        if not is_open or (held is not None and self._manifest is not None and held.number == self._manifest.number):
            is_anothers = self._seen is not None and self.author != self._seen[0][0]
            return self._manifest if is_open and is_anothers else None
        return self._manifest

    def see(self, leader: Leader, entry: bytes, now: float) -> None:
        """This is what the coordinator publishes."""
        if self._seen == (leader, entry):
            return
        self._seen, self._seen_at = (leader, entry), now
        self._fault, self._manifest = "", read_manifest(entry)
        if self._manifest is None:
            self._fault = "it is malformed"
        elif self._manifest.epoch != leader[1]:
            self._manifest = None  # of an earlier term: the next comes
        elif self._manifest.plan:
            self.on_bytes(self._manifest, self._manifest.plan)

    def on_bytes(self, manifest: PlanManifest, payload: bytes) -> None:
        """The bytes of a plan have come."""
        if manifest != self._manifest:
            return
        try:
            self.plan = read_plan(manifest, payload)
            self.author = self._seen[0][0] if self._seen is not None else None
        except PlanError as error:
            self._fault = str(error)

    def on_leader_lost(self) -> None:
        """Nobody coordinates: the plan that is followed goes on."""
        self._seen = self._manifest = None
        self._fault = ""

    def find_objection(self, advert: Advert, known: Collection[str], now: float) -> str:
        """Why this node refuses what its coordinator plans, if it does. `known`: the boxes whose adverts are here.

        A plan that does not fit this box may be honest, and older than the advert: so much time is given."""
        told = (advert.model, advert.fits, advert.tp, advert.phase, len(advert.hardware.gpus))
        if told != self._told:
            self._told, self._told_at = told, now
        if self._seen is None or self._seen[0][0] == self._own:
            return ""
        if self._fault:
            return self._fault
        plan, waited_s = self.plan, now - self._seen_at
        if self.wanted is not None:
            return "nobody has its bytes" if waited_s >= self._tuning.plan_missing_s else ""
        if plan is None or self._manifest is None:
            return ""
        if waited_s >= self._tuning.plan_strange_s and not set(plan.peers) & set(known):
            return "none of its boxes is known here"
        if min(waited_s, now - self._told_at) >= self._tuning.plan_stale_s:
            return find_conflict(plan, self._own, advert)
        return ""
