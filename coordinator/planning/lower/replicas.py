"""Groups at their best: configuration, behaviour alone, and behaviour among others.

All that is computed here depends on what a group is made of, not on which boxes they are: equal
groups share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...plan import Phase
from ..model.length_classes import classify_lengths
from ..model.problem import Group, PhaseCounts, Problem, Slice
from ..model.workload import Service
from .behaviour import LOADS, Behaviour, LoadRow
from .flow import LossCurve, build_loss_curve
from .parallel import BoxGpus, Configuration, GroupHardware, ParallelOptions, ServiceNeeds, Stages
from .queueing import OtherPhase
from .replica_pairs import ClusterLinks, KVHolder
from .upper_bound import replica_values

Array = NDArray[np.float64]

REFERENCE_LOAD: Final = 4
"""Index into LOADS (0.6) of the load at which replicas and pairs are compared before loads are
known."""

EVENNESS: Final = 1e-2
"""Requests that a full replica is taken to lose besides, with the square of its load: equal
replicas share alike."""

TPOT: Final = LoadRow._fields.index("tpot_s")

LONG_QUANTILE: Final = 0.99
"""The share of requests whose KV must fit a replica, one at a time."""


_CurveKey = tuple[int, Phase, int, int, int]
"""Kind, phase, service, and how many share what it takes of prompts and outputs."""

LoadedStages = Mapping[tuple[Slice, ...], tuple[Stages, ...]]
"""The stages that groups of these slices have their weights in, as parts of the slices."""


class LoadCurve(NamedTuple):
    """The share in time at LOADS, and what follows: `usable_load`, the highest that keeps the
    target; `replica_values`: see `upper_bound`."""

    in_time_share: Array
    lost: LossCurve
    usable_load: float
    replica_values: Array


@dataclass(frozen=True, slots=True, eq=False)
class ConfiguredReplica:
    """A group with its configuration. `hardware_id`: equal for groups that are made of the same
    parts."""

    group: Group
    hardware_id: int
    configuration: Configuration
    holder: KVHolder

    @property
    def behaviour(self) -> Behaviour:
        """Of the configuration."""
        return self.configuration.behaviour


class ConfigurationCache:
    """What is known of groups by what they are made of, in any cluster: ways to run a service, and
    the best for each phase. Services by name."""

    def __init__(self) -> None:
        self.numbers: dict[GroupHardware, int] = {}
        self.configurations: dict[tuple[int, Phase, str], Configuration | None] = {}
        self.options: dict[tuple[int, str], ParallelOptions] = {}

    def copy(self) -> ConfigurationCache:
        """What is known so far."""
        made = ConfigurationCache()
        made.numbers, made.configurations = dict(self.numbers), dict(self.configurations)
        made.options = dict(self.options)
        return made


class ReplicaCatalogue:
    """Holds only what was computed before; the same questions have the same answers."""

    def __init__(
        self,
        problem: Problem,
        service_needs: Sequence[ServiceNeeds],
        links: ClusterLinks,
        loaded: LoadedStages,
        memory: ConfigurationCache,
    ) -> None:
        self.service_needs = tuple(service_needs)
        self._problem, self._links, self._loaded = problem, links, loaded
        self._memory = memory
        self._names = tuple(service.name for service in problem.services)
        self._hardware: dict[tuple[Slice, ...], tuple[int, GroupHardware]] = {}
        self._catalogue: dict[Group, ConfiguredReplica | None] = {}
        self._curves: dict[_CurveKey, LoadCurve] = {}
        self._other_phases: dict[int, OtherPhase] = {}

    def can_hold(self, slices: tuple[Slice, ...], service: int) -> bool:
        """Whether a group of these can be a member."""
        return self._options(slices, service).is_possible and not self._splits_atomic_box(slices)

    def replica(self, group: Group) -> ConfiguredReplica | None:
        """The group at its best, None where it does not hold the model."""
        if group not in self._catalogue:
            self._catalogue[group] = self._configure(group)
        return self._catalogue[group]

    def curves(self, replicas: Sequence[ConfiguredReplica], counts: PhaseCounts) -> list[LoadCurve]:
        """Of replicas of one service, where so many share its prompts, and its outputs."""
        keys = []
        missing: dict[Phase, dict[_CurveKey, ConfiguredReplica]] = {}
        for replica in replicas:
            _, phase, service = replica.group
            prefills, decodes = counts[0] * (phase is not Phase.DECODE), counts[1] * (phase is not Phase.PREFILL)
            key = replica.hardware_id, phase, service, prefills, decodes
            keys.append(key)
            if key not in self._curves:
                missing.setdefault(phase, {})[key] = replica
        for found in missing.values():
            self._curves.update(zip(found, self._build_curves(list(found.values()), counts), strict=True))
        return [self._curves[key] for key in keys]

    def _configure(self, group: Group) -> ConfiguredReplica | None:
        if self._splits_atomic_box(group.slices):
            return None
        hardware_id, _ = self._describe_hardware(group.slices)
        known, key = self._memory.configurations, (hardware_id, group.phase, self._names[group.service])
        if key not in known:
            known[key] = self._options(group.slices, group.service).best(group.phase)
        configuration = known[key]
        if configuration is None:
            return None
        spans = tuple((group.slices[part].box, first, last) for part, first, last in configuration.spans)
        return ConfiguredReplica(group, hardware_id, configuration, KVHolder(group.phase, spans))

    def _options(self, slices: tuple[Slice, ...], service: int) -> ParallelOptions:
        hardware_id, parts = self._describe_hardware(slices)
        known, key = self._memory.options, (hardware_id, self._names[service])
        if key not in known:
            known[key] = ParallelOptions(parts, self.service_needs[service])
        return known[key]

    def _splits_atomic_box(self, slices: tuple[Slice, ...]) -> bool:
        """Whether only a part of an atomic box is among these."""
        boxes = self._problem.cluster.boxes
        return any(boxes[box].atomic and gpus != boxes[box].gpus for box, gpus in slices)

    def _describe_hardware(self, slices: tuple[Slice, ...]) -> tuple[int, GroupHardware]:
        if slices not in self._hardware:
            boxes = self._problem.cluster.boxes
            parts = GroupHardware(
                tuple(
                    BoxGpus(boxes[box].gpu, gpus, boxes[box].gpu_link_gbps, boxes[box].atomic, boxes[box].measured)
                    for box, gpus in slices
                ),
                self._links.hops([box for box, _ in slices]),
                self._loaded.get(slices, ()),
            )
            self._hardware[slices] = (self._memory.numbers.setdefault(parts, len(self._memory.numbers)), parts)
        return self._hardware[slices]

    def _build_curves(self, replicas: Sequence[ConfiguredReplica], counts: PhaseCounts) -> Iterator[LoadCurve]:
        """Those of replicas of one phase, all at once."""
        _, phase, service = replicas[0].group
        needs = self.service_needs[service]
        slo = needs.service.slo
        other_phase = None if phase is Phase.MIXED or slo.e2e_s == inf else self._other_phase(service)
        shares = needs.in_time([replica.behaviour for replica in replicas], slo, counts, other_phase)
        for replica, share in zip(replicas, shares, strict=True):
            behaves = replica.behaviour
            late = LOADS * behaves.rate * (1.0 - share)
            lost = build_loss_curve(LOADS, late + EVENNESS * LOADS**2 * behaves.rate)
            yield LoadCurve(share, lost, _find_usable_load(share, slo.target), replica_values(behaves, phase, late))

    def _other_phase(self, service: int) -> OtherPhase:
        """The middle one of the kinds of boxes that hold the model alone, at the reference load;
        else all together."""
        if service not in self._other_phases:
            self._other_phases[service] = self._estimate_other_phase(service)
        return self._other_phases[service]

    def _estimate_other_phase(self, service: int) -> OtherPhase:
        boxes = self._problem.cluster.boxes
        kinds = {(box.gpu.name, box.gpus): index for index, box in reversed(list(enumerate(boxes)))}
        alone = [(Slice(index, boxes[index].gpus),) for index in sorted(kinds.values())]
        together = tuple(Slice(index, box.gpus) for index, box in enumerate(boxes))
        for candidates in (alone, [together]):
            prefills = [self.replica(Group(slices, Phase.PREFILL, service)) for slices in candidates]
            decodes = [self.replica(Group(slices, Phase.DECODE, service)) for slices in candidates]
            times = [prefill.behaviour.prefill_s for prefill in prefills if prefill is not None]
            paces = [decode.behaviour.table[REFERENCE_LOAD, TPOT] for decode in decodes if decode is not None]
            if times and paces:
                return OtherPhase(np.median(times, axis=0), float(np.median(paces)))
        return OtherPhase()


def count_phases(phases: Iterable[Phase]) -> PhaseCounts:
    """How many replicas share the prompts, and the outputs; 1 where there are none, who do not wait
    either."""
    prefills = decodes = 0
    for phase in phases:
        prefills += phase is not Phase.DECODE
        decodes += phase is not Phase.PREFILL
    return max(1, prefills), max(1, decodes)


def needs_of_service(service: Service) -> ServiceNeeds:
    """By the service's sample of requests."""
    workload = service.workload
    longest = int(np.quantile(workload.prompts + workload.outputs, LONG_QUANTILE))
    return ServiceNeeds(service, classify_lengths(workload), longest)


def _find_usable_load(share: Array, target: float) -> float:
    """The highest load that keeps the target, between the loads that are tabulated.

    The target is that of the requests which an idle replica has in time; what it misses even then
    makes it less of a replica, and lowers the load in proportion.
    """
    late = np.flatnonzero(share < target * share[0])
    if not len(late):
        return float(share[0])
    before, after = late[0] - 1, late[0]
    part = (share[before] - target * share[0]) / (share[before] - share[after])
    return float(share[0] * (LOADS[before] + part * (LOADS[after] - LOADS[before])))
