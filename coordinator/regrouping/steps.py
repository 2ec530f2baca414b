"""How a network gets from the groups of boxes that run to others: in which steps, and what follows from how those go.

Groups change together where they share boxes: a pipeline that is made of two replicas takes both of
their boxes at once, and what shares no box with it goes on undisturbed. One step loads at a time.
A step that cannot be done is undone, and ends the regrouping there::

    order ──> step 1 loads ──> all its boxes are ready ──> step 2 loads ──> ... ──> over
                  │
                  └── a box fails, refuses or takes too long ──> its old groups load ──> over

Where all boxes of a step have room for it, they load beside what they serve first (`beside`), and then only go over.

A machine that divides its GPUs anew (`divisions`) is a step of its own: its nodes end, and others begin. It goes back
by itself to what it was, and says why.

What is to come is in the plan (`plan.Regrouping`), so a coordinator that is elected meanwhile goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import msgspec

from ..capacity import BoxView
from ..names import count_of, name_of
from ..plan import BoxRecut, Groups, GroupStages, Plan, PlanError, Regrouping, RegroupingStep, Stage
from .beside import can_load_beside, describe_loading, is_over
from .divisions import BoxDivision
from .parts import BoxPart
from .refusals import Refusals

FAILURES: Final = 2
"""Starts that failed in a row until a box is taken to be unable: one may be somebody else's fault."""

MAX_REASON: Final = 400
"""Characters of a reason: most of it is another box's."""


PAYBACK_S: Final = 3600.0
"""Within so long a proposal has to win back what is lost while boxes load."""


class RegroupProposal(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that would serve more, or machines that would when divided anew. `regrouping`: the way
    there, with what is gained; `groups`: all of them; `recuts`: those machines. Requests per second in
    time, when `rate` are asked for: `meanwhile`, while each step loads; `light`, with new phases alone.
    `reload_s`: what each step's load takes; `pays`: whether all that is won back within PAYBACK_S."""

    regrouping: Regrouping
    groups: Groups = ()
    recuts: tuple[BoxRecut, ...] = ()
    rate: float
    light: float
    meanwhile: tuple[float, ...]
    reload_s: tuple[float, ...]
    pays: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How long a step may take: `loads` times what it is expected to, and `least_s` at least, since a
    box may have to finish its requests and to download layers first. Longer: slow disks are waited
    for; shorter: boxes that hang are away for less."""

    loads: float = 5.0
    least_s: float = 900.0

    def step_s(self, reload_s: float) -> float:
        """For a step that is expected to take so long."""
        return max(self.least_s, self.loads * reload_s)


def make_regrouping(
    plan: Plan, wanted: Groups, boxes: Iterable[BoxView], *, before: float, after: float, reload_s: float
) -> Regrouping:
    """From the plan that runs to these groups; a box that is in none of them and holds the model
    becomes a replica by itself. Raises PlanError where it cannot be done, or is done already."""
    usable = {box.peer: box for box in boxes if box.usable}
    named = [stage.peer for group in wanted for stage in group]
    for group in wanted:
        for stage in group:
            _check_stage(stage, usable.get(stage.peer))
        if group[-1].last_layer != plan.layers:
            raise PlanError(f"a group holds {group[-1].last_layer} layers, the model has {plan.layers}")
    if len(named) != len(set(named)):
        raise PlanError("a box is in two groups")
    alone = tuple(_whole(box) for box in usable.values() if box.whole and box.peer not in named)
    steps = find_steps([replica.stages for replica in plan.replicas], (*wanted, *alone))
    if not steps:
        raise PlanError("the boxes are grouped like that already")
    return Regrouping(steps=steps, before=before, after=after, reload_s=reload_s)


def make_recutting(
    plan: Plan,
    wanted: Iterable[BoxRecut],
    divided: Mapping[str, BoxDivision],
    boxes: Iterable[BoxView],
    *,
    before: float,
    after: float,
    reload_s: float,
) -> Regrouping:
    """From the plan that runs to these cuts, one machine after the other. `divided`: the machines that may be divided
    anew, by head. Raises PlanError where one cannot, or is so already."""
    usable = {box.peer: box for box in boxes if box.usable}
    steps = []
    for recut in wanted:
        division, name = divided.get(recut.head), name_of(recut.head)
        if division is None:
            raise PlanError(
                f"{name} is not the first node of a box that lets the network divide it, with all its nodes"
            )
        if len(division.nodes) != recut.was:
            raise PlanError(f"the box of {name} has {len(division.nodes)} nodes now, and not {recut.was}")
        if division.offer(recut.replicas) is None:
            cuts = ", ".join(str(each.replicas) for each in division.offers)
            raise PlanError(f"the box of {name} can be divided among {cuts} nodes, and not among {recut.replicas}")
        for node in division.nodes:
            replica = plan.replica_of(node)
            if node not in usable or (replica is not None and len(replica.stages) > 1):
                raise PlanError(f"{name_of(node)}, a node of the box of {name}, is not ready, or is part of a pipeline")
        alone = [usable[node] for node in division.nodes]
        steps.append(RegroupingStep(form=tuple(_whole(box) for box in alone), recut=recut))
    if len({step.recut.head for step in steps if step.recut}) != len(steps):
        raise PlanError("a box is named twice")
    if not steps:
        raise PlanError("no box is to be divided")
    return Regrouping(steps=tuple(steps), before=before, after=after, reload_s=reload_s)


def _whole(box: BoxView) -> GroupStages:
    """A box that serves alone, as a group."""
    return (Stage(peer=box.peer, tp=box.tp, first_layer=0, last_layer=box.layers),)


def find_steps(running: Sequence[GroupStages], wanted: Sequence[GroupStages]) -> tuple[RegroupingStep, ...]:
    """What changes from the running groups to these, those that share boxes together, the fewest
    boxes first."""
    new = [group for group in wanted if group not in running]
    old = [group for group in running if group not in wanted]
    steps = []
    while new:
        form, boxes = [new.pop(0)], set[str]()
        while boxes != (boxes := boxes | {stage.peer for group in form for stage in group}):
            touched = [group for group in old if not boxes.isdisjoint(stage.peer for stage in group)]
            boxes |= {stage.peer for group in touched for stage in group}
            joining = [group for group in new if not boxes.isdisjoint(stage.peer for stage in group)]
            form += joining
            new = [group for group in new if group not in joining]
        undo = tuple(group for group in old if not boxes.isdisjoint(stage.peer for stage in group))
        # A box that is new in the plan is not in any group to go back to; it waits then, or is alone.
        steps.append(RegroupingStep(form=tuple(form), undo=undo))
    return tuple(sorted(steps, key=lambda step: (len(step.boxes), step.boxes)))


def find_failure(step: RegroupingStep, parts: Mapping[str, BoxPart]) -> str:
    """Why a step cannot be done, for people; "" where it may be."""
    if step.recut is not None:
        refused = _find_refusal(step.recut, parts)
        name = name_of(step.recut.head)
        return f"the box of {name} cannot be {step.recut.replicas} nodes: {refused}"[:MAX_REASON] if refused else ""
    for group in step.form:
        for stage in group:
            part, name = parts.get(stage.peer), name_of(stage.peer)
            if part is None:
                return f"{name} is not here any more"
            if part.leaves:
                return f"{name} is draining"
            if part.follows(group) and part.failures >= FAILURES:
                return f"{name} cannot take its part: {part.detail}"[:MAX_REASON]
    return ""


def find_refusals(step: RegroupingStep, parts: Mapping[str, BoxPart]) -> dict[str, str]:
    """Which boxes cannot take their part of a step, and why: the head only where none of its other stages has failed,
    since it cannot start without them."""
    if step.recut is not None:
        refused = _find_refusal(step.recut, parts)
        return {step.recut.head: refused} if refused else {}
    found: dict[str, str] = {}
    for group in step.form:
        taken = {stage.peer: part for stage in group if (part := parts.get(stage.peer)) and part.follows(group)}
        if all(part.failures < FAILURES for part in taken.values()):
            continue
        others = {peer: part.detail for peer, part in taken.items() if part.failures and peer != group[0].peer}
        found |= others or {group[0].peer: taken[group[0].peer].detail}
    return found


def find_unready(step: RegroupingStep, parts: Mapping[str, BoxPart]) -> tuple[str, ...]:
    """The boxes of a step that do not serve in their new groups."""
    if step.recut is not None:
        return () if _count_ready(step.recut, parts) == step.recut.replicas else (step.recut.head,)
    return tuple(stage.peer for group in step.form for stage in group if not _is_in(parts.get(stage.peer), group))


def is_done(step: RegroupingStep, parts: Mapping[str, BoxPart]) -> bool:
    """Whether all boxes of a step serve in their new groups."""
    return not find_unready(step, parts)


def describe_boxes(regrouping: Regrouping, parts: Mapping[str, BoxPart]) -> list[tuple[str, str]]:
    """Each box whose part is still to change, and how far that is, for people."""
    found = []
    for number, step in enumerate(regrouping.steps):
        if step.recut is not None:
            found.append((step.recut.head, _describe_recut(step.recut, parts, is_now=number == 0)))
            continue
        is_beside = number == 0 and regrouping.beside
        found += [
            (stage.peer, _describe_part(parts.get(stage.peer), group, is_now=number == 0, is_beside=is_beside))
            for group in step.form
            for stage in group
        ]
    return found


def _find_refusal(recut: BoxRecut, parts: Mapping[str, BoxPart]) -> str:
    """Why a machine has not taken a cut, in its own words; "" where it may still do so."""
    part = parts.get(recut.head)
    division = part.division if part is not None else None
    return (division.why or "it does not say why") if division and division.refused == recut.replicas else ""


def _count_ready(recut: BoxRecut, parts: Mapping[str, BoxPart]) -> int:
    """How many nodes of the new cut serve; none before the head is one of them."""
    head = parts.get(recut.head)
    division = head.division if head is not None else None
    if division is None or len(division.nodes) != recut.replicas:
        return 0
    nodes = [parts.get(node) for node in division.nodes]
    return sum(each is not None and each.is_ready and not each.leaves for each in nodes)


def _describe_recut(recut: BoxRecut, parts: Mapping[str, BoxPart], *, is_now: bool) -> str:
    change = f"its box is divided anew, {recut.was} -> {count_of(recut.replicas, 'node')}"
    head = parts.get(recut.head)
    if not is_now:
        return f"{change}: waits for its turn"
    if head is None:
        return f"{change}: its nodes start"
    if head.division is None or len(head.division.nodes) != recut.replicas:
        return f"{change}: {'finishes its requests' if head.leaves else 'begins'}"
    return f"{change}: {_count_ready(recut, parts)} ready"


def _describe_part(part: BoxPart | None, group: GroupStages, *, is_now: bool, is_beside: bool) -> str:
    if not is_now:
        return "waits for its turn"
    if part is None:
        return "is not here"
    if is_beside:
        return describe_loading(part, group)
    if not part.follows(group):
        return "finishes its requests"
    return "ready" if part.is_ready else part.detail or "begins to load"


def _is_in(part: BoxPart | None, group: GroupStages) -> bool:
    return part is not None and part.is_ready and part.follows(group)


@final
class RegroupingProgress:
    """What the coordinator knows of the way to other groups, beside the plan. Times are seconds of one
    clock, handed in; asked twice about the same, it says the same."""

    def __init__(self, limits: StepLimits | None = None) -> None:
        self._limits = limits or StepLimits()
        self._ordered: Regrouping | None = None
        self._step: tuple[RegroupingStep, str, bool] | None = None  # the one that was under way at the last look
        self._since = 0.0
        self._ended = ""  # why the last regrouping did not come to its end
        self.refusals = Refusals()

    def __repr__(self) -> str:
        return f"<RegroupingProgress ordered={self._ordered is not None} step={self._step is not None}>"

    @property
    def is_ordered(self) -> bool:
        """Whether one is to begin with the next plan."""
        return self._ordered is not None

    def order(self, regrouping: Regrouping) -> None:
        """Begin this one with the next plan."""
        self._ordered, self._ended = regrouping, ""

    def on_planned(self, regrouping: Regrouping | None) -> None:
        """A plan has been published that is on its way to this."""
        if regrouping is not None:
            self._ordered = None

    def advance(self, current: Regrouping | None, parts: Mapping[str, BoxPart], now: float) -> Regrouping | None:
        """What the next plan is to be on its way to, from what the running one is, and what boxes say."""
        if current is None:
            self._step = None
            return _begin_step(self._ordered, parts) if self._ordered is not None else None
        step = current.steps[0]
        if self._step != (step, current.undoes, current.beside):
            self._step, self._since = (step, current.undoes, current.beside), now
        if is_done(step, parts):
            rest = current.steps[1:]
            done = current.done + 1
            return _begin_step(msgspec.structs.replace(current, steps=rest, done=done), parts) if rest else None
        failure, refused = find_failure(step, parts), find_refusals(step, parts)
        is_late = now - self._since > self._limits.step_s(current.reload_s)
        if current.beside:
            return self._go_over(current, parts, failure, is_late=is_late)
        if not failure and is_late:
            late = f"not ready after {now - self._since:.0f} s"
            failure, refused = f"its boxes were {late}", dict.fromkeys(find_unready(step, parts), late)
        if not failure:
            return current
        if not current.undoes:  # a box that cannot go back to what it was has refused nothing
            self.refusals.note(refused, now)
        self._ended = current.undoes or failure
        if current.undoes or not step.undo:
            return None
        return msgspec.structs.replace(current, steps=(RegroupingStep(form=step.undo),), undoes=failure)

    def _go_over(
        self, current: Regrouping, parts: Mapping[str, BoxPart], failure: str, *, is_late: bool
    ) -> Regrouping | None:
        """What follows while boxes load beside what they serve: where they cannot, they load as others do."""
        if failure:  # nothing has changed yet, so there is nothing to go back to
            self._ended = failure
            return None
        if is_over(current.steps[0], parts) or is_late:
            return msgspec.structs.replace(current, beside=False)
        return current

    def explain(self, regrouping: Regrouping | None) -> tuple[str, ...]:
        """A line for `status` where the last regrouping ended before its time."""
        return (f"the last regrouping was given up: {self._ended}",) if self._ended and regrouping is None else ()


def _begin_step(regrouping: Regrouping, parts: Mapping[str, BoxPart]) -> Regrouping:
    """Its first step begins beside what the boxes serve, where all have room for it."""
    beside = not regrouping.undoes and can_load_beside(regrouping.steps[0], parts)
    return msgspec.structs.replace(regrouping, beside=beside)


def _check_stage(stage: Stage, box: BoxView | None) -> None:
    if box is None:
        raise PlanError(f"{name_of(stage.peer)} is not ready to take a part")
    if stage.layers > box.fits:
        raise PlanError(f"{name_of(stage.peer)} has room for {box.fits} layers, not for {stage.layers}")
    if stage.tp != box.tp or stage.first_gpu:
        raise PlanError(f"{name_of(stage.peer)} works with all of its {box.tp} GPUs or with none")
