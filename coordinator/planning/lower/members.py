"""Groups at their best: configuration, behaviour alone, and behaviour among others.

All that is computed here depends on what a group is made of, not on which boxes they are: equal groups share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...plan import Phase
from ..model.length_classes import classes_of
from ..model.problem import Crowd, Group, Problem, Slice
from ..model.workload import Service
from .behaviour import LOADS, Behaviour, Row
from .flow import LossCurve, loss_curve
from .handover import Holder, Links
from .parallel import Configuration, Demand, Options, Part, Parts, Stages
from .promise import gains
from .queueing import Partner

__all__ = ["REFERENCE_LOAD", "Curve", "Loaded", "Member", "Members", "Memory", "crowd_of", "demand_of"]

Array = NDArray[np.float64]

REFERENCE_LOAD: Final = 4
"""Index into LOADS (0.6) of the load at which replicas and pairs are compared before loads are known."""

EVENNESS: Final = 1e-2
"""Requests that a full replica is taken to lose besides, with the square of its load: equal replicas share alike."""

TPOT: Final = Row._fields.index("tpot_s")

LONG: Final = 0.99
"""The share of requests whose KV must fit a replica, one at a time."""


_CurveKey = tuple[int, Phase, int, int, int]
"""Kind, phase, service, and how many share what it takes of prompts and outputs."""

Loaded = Mapping[tuple[Slice, ...], tuple[Stages, ...]]
"""The stages that groups of these slices have their weights in, as parts of the slices."""


class Curve(NamedTuple):
    """A replica among others: the share in time at LOADS, and what follows from it. `usable`: the highest load that
    keeps the target (`_usable`). `gains`: see `promise`."""

    met: Array
    lost: LossCurve
    usable: float
    gains: Array


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A group with its configuration. `kind`: equal for groups that are made of the same parts."""

    group: Group
    kind: int
    configuration: Configuration
    holder: Holder

    @property
    def behaviour(self) -> Behaviour:
        """Of the configuration."""
        return self.configuration.behaviour


class Memory:
    """What is known of groups by what they are made of, whatever cluster they are in and however much they have to do:
    the ways to run a service, and the best of them for each phase. Services by name."""

    def __init__(self) -> None:
        self.numbers: dict[Parts, int] = {}
        self.configurations: dict[tuple[int, Phase, str], Configuration | None] = {}
        self.options: dict[tuple[int, str], Options] = {}

    def copy(self) -> Memory:
        """What is known so far."""
        made = Memory()
        made.numbers, made.configurations = dict(self.numbers), dict(self.configurations)
        made.options = dict(self.options)
        return made


class Members:
    """Holds only what was computed before; the same questions have the same answers."""

    def __init__(
        self, problem: Problem, demands: Sequence[Demand], links: Links, loaded: Loaded, memory: Memory
    ) -> None:
        self.demands = tuple(demands)
        self._problem, self._links, self._loaded = problem, links, loaded
        self._memory = memory
        self._names = tuple(service.name for service in problem.services)
        self._kinds: dict[tuple[Slice, ...], tuple[int, Parts]] = {}
        self._members: dict[Group, Member | None] = {}
        self._curves: dict[_CurveKey, Curve] = {}
        self._references: dict[int, Partner] = {}

    def holds(self, slices: tuple[Slice, ...], service: int) -> bool:
        """Whether a group of these can be a member."""
        return self._options(slices, service).possible and not self._cut(slices)

    def member(self, group: Group) -> Member | None:
        """The group at its best, None where it does not hold the model."""
        if group not in self._members:
            self._members[group] = self._member(group)
        return self._members[group]

    def curves(self, members: Sequence[Member], crowd: Crowd) -> list[Curve]:
        """Of replicas of one service, where so many share its prompts, and its outputs."""
        keys = []
        missing: dict[Phase, dict[_CurveKey, Member]] = {}
        for member in members:
            _, phase, service = member.group
            readers, writers = crowd[0] * (phase is not Phase.DECODE), crowd[1] * (phase is not Phase.PREFILL)
            key = member.kind, phase, service, readers, writers
            keys.append(key)
            if key not in self._curves:
                missing.setdefault(phase, {})[key] = member
        for found in missing.values():
            self._curves.update(zip(found, self._made(list(found.values()), crowd), strict=True))
        return [self._curves[key] for key in keys]

    def _member(self, group: Group) -> Member | None:
        if self._cut(group.slices):
            return None
        kind, _ = self._kind(group.slices)
        known, key = self._memory.configurations, (kind, group.phase, self._names[group.service])
        if key not in known:
            known[key] = self._options(group.slices, group.service).best(group.phase)
        configuration = known[key]
        if configuration is None:
            return None
        spans = tuple((group.slices[part].box, first, last) for part, first, last in configuration.spans)
        return Member(group, kind, configuration, Holder(group.phase, spans))

    def _options(self, slices: tuple[Slice, ...], service: int) -> Options:
        kind, parts = self._kind(slices)
        known, key = self._memory.options, (kind, self._names[service])
        if key not in known:
            known[key] = Options(parts, self.demands[service])
        return known[key]

    def _cut(self, slices: tuple[Slice, ...]) -> bool:
        """Whether only a part of an atomic box is among these."""
        boxes = self._problem.cluster.boxes
        return any(boxes[box].atomic and gpus != boxes[box].gpus for box, gpus in slices)

    def _kind(self, slices: tuple[Slice, ...]) -> tuple[int, Parts]:
        if slices not in self._kinds:
            boxes = self._problem.cluster.boxes
            parts = Parts(
                tuple(Part(boxes[box].gpu, gpus, boxes[box].gpu_link_gbps, boxes[box].atomic) for box, gpus in slices),
                self._links.hops([box for box, _ in slices]),
                self._loaded.get(slices, ()),
            )
            self._kinds[slices] = (self._memory.numbers.setdefault(parts, len(self._memory.numbers)), parts)
        return self._kinds[slices]

    def _made(self, members: Sequence[Member], crowd: Crowd) -> Iterator[Curve]:
        """Those of replicas of one phase, all at once."""
        _, phase, service = members[0].group
        demand = self.demands[service]
        slo = demand.service.slo
        partner = None if phase is Phase.MIXED or slo.e2e_s == inf else self._reference(service)
        shares = demand.in_time([member.behaviour for member in members], slo, crowd, partner)
        for member, share in zip(members, shares, strict=True):
            behaves = member.behaviour
            late = LOADS * behaves.rate * (1.0 - share)
            lost = loss_curve(LOADS, late + EVENNESS * LOADS**2 * behaves.rate)
            yield Curve(share, lost, _usable(share, slo.target), gains(behaves, phase, late))

    def _reference(self, service: int) -> Partner:
        """The middle one of the kinds of boxes that hold the model alone, at the reference load; else all together."""
        if service not in self._references:
            self._references[service] = self._find_reference(service)
        return self._references[service]

    def _find_reference(self, service: int) -> Partner:
        boxes = self._problem.cluster.boxes
        kinds = {(box.gpu.name, box.gpus): index for index, box in reversed(list(enumerate(boxes)))}
        alone = [(Slice(index, boxes[index].gpus),) for index in sorted(kinds.values())]
        together = tuple(Slice(index, box.gpus) for index, box in enumerate(boxes))
        for candidates in (alone, [together]):
            readers = [self.member(Group(slices, Phase.PREFILL, service)) for slices in candidates]
            writers = [self.member(Group(slices, Phase.DECODE, service)) for slices in candidates]
            times = [reader.behaviour.lone_s for reader in readers if reader is not None]
            paces = [writer.behaviour.table[REFERENCE_LOAD, TPOT] for writer in writers if writer is not None]
            if times and paces:
                return Partner(np.median(times, axis=0), float(np.median(paces)))
        return Partner()


def crowd_of(phases: Iterable[Phase]) -> Crowd:
    """How many replicas share the prompts, and the outputs; 1 where there are none, who do not wait either."""
    readers = writers = 0
    for phase in phases:
        readers += phase is not Phase.DECODE
        writers += phase is not Phase.PREFILL
    return max(1, readers), max(1, writers)


def demand_of(service: Service) -> Demand:
    """By the service's sample of requests."""
    workload = service.workload
    longest = int(np.quantile(workload.prompts + workload.outputs, LONG))
    return Demand(service, classes_of(workload), longest)


def _usable(share: Array, target: float) -> float:
    """The highest load that keeps the target, between the loads that are tabulated.

    The target is that of the requests which an idle replica has in time; what it misses even then makes it less of a
    replica, and lowers the load in proportion.
    """
    late = np.flatnonzero(share < target * share[0])
    if not len(late):
        return float(share[0])
    before, after = late[0] - 1, late[0]
    part = (share[before] - target * share[0]) / (share[before] - share[after])
    return float(share[0] * (LOADS[before] + part * (LOADS[after] - LOADS[before])))
