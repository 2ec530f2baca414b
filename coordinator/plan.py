"""The plan: everything the coordinator decides about one service, as one frozen value.

A plan is numbered `(epoch, version)`: the epoch is the term its author was elected for, the version
counts the plans of that term. It is validated when it is made, so a plan that exists is one that
can be followed; bytes from a peer that break a rule never become a `Plan`. Fields that this release
does not know are ignored: a network is upgraded box by box, and its coordinator may be the first.
"""

from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise
from math import isclose, isfinite
from typing import Annotated, Self

import msgspec

from .bounds import (
    MAX_GPUS,
    MAX_PAIRINGS,
    MAX_REFUSED,
    MAX_REPLICAS,
    MAX_SERVICES,
    MAX_STAGES,
    Counter,
    Degree,
    Figure,
    Layer,
    ModelName,
    Name,
    Seconds,
    Text,
)

WEIGHT_TOLERANCE = 1e-6
"""How far the weights of a plan may sum from 1, which leaves room for rounding."""


class PlanError(ValueError):
    """A plan, or a part of one, that cannot be followed; the text names the field."""


class Phase(StrEnum):
    """What a replica does: prefill, decode, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One box's share of a replica: `tp` GPUs over the half-open layer range `[first_layer,
    last_layer)`.

    They are GPUs `first_gpu` to `first_gpu + tp - 1` of the box, so that several replicas can share
    one.
    """

    peer: Name
    tp: Degree
    first_layer: Layer
    last_layer: Layer
    first_gpu: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GPUS)] = 0

    def __post_init__(self) -> None:
        _require(bool(self.peer), "stage.peer is empty")
        _require(self.tp >= 1, f"stage.tp of {self.peer} is {self.tp}; it must be at least 1")
        _require(self.first_gpu >= 0, f"stage.first_gpu of {self.peer} is {self.first_gpu}; it must not be negative")
        _require(
            0 <= self.first_layer < self.last_layer,
            f"stage layers of {self.peer} are [{self.first_layer}, {self.last_layer}); "
            "they must start at 0 or later and hold at least one layer",
        )

    @property
    def layers(self) -> int:
        """How many layers the stage holds."""
        return self.last_layer - self.first_layer

    @property
    def gpus(self) -> range:
        """The numbers of its GPUs in the box."""
        return range(self.first_gpu, self.first_gpu + self.tp)


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """The stages, in layer order, that together hold one copy of the model.

    `step_tokens`: what a step computes at most (vLLM's max_num_batched_tokens), so that a prompt
    that
    is prefilled holds up the answers beside it by no more than their deadline allows; 0: whatever
    its engine was started with.
    """

    id: Name
    phase: Phase
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(max_length=MAX_STAGES)]
    step_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0

    def __post_init__(self) -> None:
        _require(bool(self.id), "replica.id is empty")
        _require(
            self.step_tokens >= 0, f"replica {self.id}: step_tokens is {self.step_tokens}; it must not be negative"
        )
        _require(bool(self.stages), f"replica {self.id} has no stages")
        expected = 0
        for stage in self.stages:
            _require(
                stage.first_layer == expected,
                f"replica {self.id}: the stage on {stage.peer} starts at layer {stage.first_layer}, "
                f"expected {expected}",
            )
            expected = stage.last_layer
        _require(_find_shared_gpu([self]) is None, f"replica {self.id} names a GPU of a box twice")

    @property
    def gpus(self) -> tuple[tuple[str, int], ...]:
        """Its GPUs as (box, number), in layer order."""
        return tuple((stage.peer, gpu) for stage in self.stages for gpu in stage.gpus)

    @property
    def peers(self) -> tuple[str, ...]:
        """Its boxes, in layer order."""
        return tuple(stage.peer for stage in self.stages)

    @property
    def head(self) -> str:
        """The box with the first layer: it takes the replica's requests."""
        return self.stages[0].peer

    @property
    def layers(self) -> int:
        """How many layers the replica holds, which is the whole model."""
        return self.stages[-1].last_layer

    @property
    def prefills(self) -> bool:
        """Whether prompts are meant to be prefilled here."""
        return self.phase is not Phase.DECODE

    @property
    def decodes(self) -> bool:
        """Whether answers are meant to be decoded here."""
        return self.phase is not Phase.PREFILL


class Pairing(msgspec.Struct, frozen=True, kw_only=True):
    """The share of all requests that prefill on one replica and decode on another.

    `weight` is the product `X_i * Y_ij` of ThunderServe section 3.3: X_i of the requests go to
    prefill replica i, Y_ij of those on to decode replica j. A mixed replica that keeps its requests
    is paired with itself. `prefill_share` is the part of each prompt that the prefill replica
    computes, from its beginning; the decode replica prefills the rest beside its decodes, as in Cronus.
    """

    prefill: Name
    decode: Name
    weight: Annotated[float, msgspec.Meta(ge=0.0, le=1.0 + WEIGHT_TOLERANCE)]
    prefill_share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0

    def __post_init__(self) -> None:
        _require(
            0.0 < self.prefill_share <= 1.0,
            f"pairing {self.prefill} -> {self.decode}: prefill_share {self.prefill_share} is not above 0 and at most 1",
        )
        _require(
            isfinite(self.weight) and 0.0 <= self.weight <= 1.0 + WEIGHT_TOLERANCE,
            f"pairing {self.prefill} -> {self.decode}: weight {self.weight} is not between 0 and 1",
        )


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is to keep, in seconds; 0: that is not asked for."""

    ttft_s: Figure = 0.0
    tpot_s: Figure = 0.0
    e2e_s: Figure = 0.0


GroupStages = Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]
"""The stages of a replica, whatever it is called and does."""

Groups = Annotated[tuple[GroupStages, ...], msgspec.Meta(max_length=MAX_REPLICAS)]


class BoxRecut(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of one machine, divided anew: among `replicas` nodes, before among `was`. `head`: its
    first node, which every cut has."""

    head: Name
    replicas: Degree
    was: Degree

    def __post_init__(self) -> None:
        _require(self.replicas != self.was, f"recut: the box of {self.head} has {self.was} nodes already")


class RegroupingStep(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that load at the same time, since they share boxes with each other, or took the place
    of the same ones. `undo`: what the same boxes were before, for when they cannot `form` these.

    With `recut` one machine restarts its nodes, which `form` names as they are before, each alone. It
    undoes that by itself where it fails.
    """

    form: Groups
    undo: Groups = ()
    recut: BoxRecut | None = None

    def __post_init__(self) -> None:
        _require(bool(self.form), "regrouping.steps: a step forms no group")
        for groups in (self.form, self.undo):
            for group in groups:
                Replica(id="group", phase=Phase.MIXED, stages=group)  # raises PlanError for what is none
            boxes = [stage.peer for group in groups for stage in group]
            _require(len(boxes) == len(set(boxes)), "regrouping.steps: a step names a box twice")
        if self.recut is not None:
            is_alone = all(len(group) == 1 for group in self.form)
            _require(is_alone and self.recut.head in self.boxes, "regrouping.steps: a box is divided that has no part")

    @property
    def boxes(self) -> tuple[str, ...]:
        """Whose part changes, in the order of the groups."""
        return tuple(stage.peer for group in self.form for stage in group)


class Regrouping(msgspec.Struct, frozen=True, kw_only=True):
    """New groups of boxes that a network is on its way to. The first of `steps` is under way, `done` of
    them are over.

    `before`, `after`: requests per second that are expected to be in time, of as many as it was
    compared at. `reload_s`: for how long the boxes of a step are expected to be away. `undoes`: why the
    step under way goes back to what was before, where it does. `beside`: whether its boxes load what it forms
    beside what they serve; they stay what they are until all of it is there.
    """

    steps: Annotated[tuple[RegroupingStep, ...], msgspec.Meta(min_length=1, max_length=MAX_REPLICAS)]
    done: Annotated[int, msgspec.Meta(ge=0, le=MAX_REPLICAS)] = 0
    before: Figure = 0.0
    after: Figure = 0.0
    reload_s: Seconds = 0.0
    undoes: Text = ""
    beside: bool = False

    @property
    def loading(self) -> Groups:
        """The groups that load now: they get no requests."""
        return () if self.beside else self.steps[0].form

    @property
    def boxes(self) -> tuple[str, ...]:
        """Their boxes."""
        return () if self.beside else self.steps[0].boxes

    def next_group_of(self, peer: str) -> GroupStages | None:
        """The group for which a box is to load its part beside what it serves, if for any."""
        groups = self.steps[0].form if self.beside else ()
        return next((group for group in groups if any(stage.peer == peer for stage in group)), None)


class RefusedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A box that could not take its part of a regrouping, for this reason: it keeps what it has for `for_s` seconds
    from the plan on."""

    peer: Name
    reason: Text = ""
    for_s: Seconds = 0.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Who does what for one service. `pairings` weigh 1 in all; `why`: a line per decision; `deadlines`: what it was
    made for; `regrouping`: on the way to which other groups it is, if to any; `refused`: boxes that other groups are
    looked for around."""

    epoch: Counter
    version: Counter
    service: ModelName
    replicas: Annotated[tuple[Replica, ...], msgspec.Meta(max_length=MAX_REPLICAS)]
    pairings: Annotated[tuple[Pairing, ...], msgspec.Meta(max_length=MAX_PAIRINGS)]
    codec: Name
    why: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_REPLICAS)]
    deadlines: Deadlines = Deadlines()
    regrouping: Regrouping | None = None
    refused: Annotated[tuple[RefusedPart, ...], msgspec.Meta(max_length=MAX_REFUSED)] = ()

    def __post_init__(self) -> None:
        _require(self.epoch >= 0, f"plan.epoch is {self.epoch}; it must not be negative")
        _require(self.version >= 0, f"plan.version is {self.version}; it must not be negative")
        _require(bool(self.service), "plan.service is empty")
        _require(bool(self.codec), "plan.codec is empty")
        _require(bool(self.replicas), "plan.replicas is empty")
        _check_replicas(self.replicas)
        _check_pairings(self.pairings, {replica.id: replica for replica in self.replicas})

    @property
    def number(self) -> tuple[int, int]:
        """`(epoch, version)`, which orders the plans of a service."""
        return (self.epoch, self.version)

    def newer_than(self, other: Self | None) -> bool:
        """Whether this plan replaces `other` of the same service; any plan replaces none."""
        if other is None:
            return True
        _require(
            self.service == other.service,
            f"plans of {self.service!r} and {other.service!r} have no order between them",
        )
        return self.number > other.number

    @property
    def peers(self) -> tuple[str, ...]:
        """Every box in the plan, in the order of the replicas and their stages."""
        return tuple(peer for replica in self.replicas for peer in replica.peers)

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return self.replicas[0].layers

    def in_phase(self, phase: Phase) -> tuple[Replica, ...]:
        """The replicas of one phase, in the plan's order."""
        return tuple(replica for replica in self.replicas if replica.phase is phase)

    def replica(self, replica_id: str) -> Replica | None:
        """The replica of that id, if the plan has it."""
        return next((replica for replica in self.replicas if replica.id == replica_id), None)

    def replica_of(self, peer: str) -> Replica | None:
        """The replica that a box belongs to, if any."""
        return next((replica for replica in self.replicas if peer in replica.peers), None)

    def phase_of(self, peer: str) -> Phase | None:
        """What a box does, if the plan uses it."""
        replica = self.replica_of(peer)
        return replica.phase if replica is not None else None

    def weight(self, prefill: str, decode: str) -> float:
        """The share of requests over this pair; 0 for one the plan does not name."""
        pairs = (pair.weight for pair in self.pairings if (pair.prefill, pair.decode) == (prefill, decode))
        return next(pairs, 0.0)


MorePlans = Annotated[tuple[Plan, ...], msgspec.Meta(max_length=MAX_SERVICES)]
"""Of the services of a network, one each."""


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise PlanError(text)


def _check_replicas(replicas: tuple[Replica, ...]) -> None:
    """Ids unique, a GPU in one stage, one model, and every request can be served."""
    ids: set[str] = set()
    for replica in replicas:
        _require(replica.id not in ids, f"plan.replicas has {replica.id} twice")
        ids.add(replica.id)
        _require(
            replica.layers == replicas[0].layers,
            f"replica {replica.id} has {replica.layers} layers, {replicas[0].id} has {replicas[0].layers}",
        )
    shared = _find_shared_gpu(replicas)
    _require(shared is None, f"{shared}")
    _require(any(replica.prefills for replica in replicas), "no replica of the plan prefills")
    _require(any(replica.decodes for replica in replicas), "no replica of the plan decodes")


def _find_shared_gpu(replicas: Iterable[Replica]) -> str | None:
    """A GPU that is in two stages, as a text, if there is one. The work is that of sorting the
    stages, whatever numbers of GPUs they name: plans come from peers."""
    held = [(stage, replica.id) for replica in replicas for stage in replica.stages]
    held.sort(key=lambda each: (each[0].peer, each[0].first_gpu))
    # In this order a GPU of two stages is in two that follow each other.
    for (stage, one), (following, other) in pairwise(held):
        if following.peer == stage.peer and following.first_gpu < stage.first_gpu + stage.tp:
            return f"GPU {following.first_gpu} of box {stage.peer} is in replicas {one} and {other}"
    return None


def _check_pairings(pairings: tuple[Pairing, ...], replicas: dict[str, Replica]) -> None:
    """Pairs name replicas that can do their half, none twice, and share out all requests."""
    seen: set[tuple[str, str]] = set()
    for pair in pairings:
        name = f"pairing {pair.prefill} -> {pair.decode}"
        _require((pair.prefill, pair.decode) not in seen, f"{name} is there twice")
        seen.add((pair.prefill, pair.decode))
        prefill, decode = replicas.get(pair.prefill), replicas.get(pair.decode)
        _require(prefill is not None and decode is not None, f"{name} names a replica the plan does not have")
        _require(prefill is not None and prefill.prefills, f"{name}: {pair.prefill} does not prefill")
        _require(decode is not None and decode.decodes, f"{name}: {pair.decode} does not decode")
    total = sum(pair.weight for pair in pairings)
    _require(
        isclose(total, 1.0, abs_tol=WEIGHT_TOLERANCE),
        f"the weights of plan.pairings sum to {total:.6f}, not to 1",
    )
