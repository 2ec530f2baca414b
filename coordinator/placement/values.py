"""What a placement is made of: boxes, services, what was asked of them lately, and groups of GPUs that host services.

    problem = PlacementProblem(boxes=boxes, services=services, period=period)
    groups = (GpuGroup(box=0, tp=4, services=(0, 1)), GpuGroup(box=0, tp=4, services=(2,)))

A group is a SeaLLM "sharing group" (section 4): `tp` GPUs of one box with one engine process, that serves one service
by vLLM's own rules, or several that step one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import inf, isfinite
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ..costs.gpus import GpuSpec
from ..costs.loading import LoadRates
from ..costs.model_shape import ModelShape
from ..costs.replica import StageHardware, kv_capacity_tokens, replica_times
from ..costs.step_times import StepTimes
from ..sharing.service_profile import lone_execution_s

MAX_TP: Final = 8
BEYOND_A_BOX: Final = (2, 4, 8, 16, 32, 64, 128)
"""A service that no box holds is timed alone on the fewest of these GPUs that would hold it."""

SHARED_BY: Final = 2
"""Services of an engine at most: SeaLLM's section 6.1."""

SLO_SCALE: Final = 5.0
"""Times its own execution alone that a request may take: SeaLLM's section 6.1."""


PROFILED: Final = 100
"""Requests of a service that its profile on an engine is made of."""

SLICE_S: Final = 10.0
"""Of a sample of a period: longer than most requests take, shorter than bursts last."""


class PlacementError(ValueError):
    """Boxes, services or requests that nothing can be placed by; one line."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementBox:
    """A box. `link_gbps`: between its cards. `disk_bytes`: room for weights. `on_disk`: services, by number, whose
    weights it has already. `able`: those that it can host (None: any), at most so many in an engine. `held`: those that
    its one engine has, and keeps."""

    id: str
    gpu: GpuSpec
    gpus: int
    link_gbps: float
    usd_per_hour: float = 0.0
    disk_bytes: float = inf
    on_disk: frozenset[int] = frozenset()
    able: frozenset[int] | None = None
    most: int = SHARED_BY
    held: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.gpus < 1 or not self.link_gbps > 0.0:
            raise PlacementError(f"box {self.id}: it has {self.gpus} GPUs, joined at {self.link_gbps:g} Gb/s")

    @property
    def kind(self) -> GroupKind:
        """What engines of it depend on, but for the number of GPUs."""
        return GroupKind(self.gpu, self.link_gbps)

    def of_services(self, number: Mapping[int, int]) -> PlacementBox:
        """Where services have other numbers, and those without one are none."""

        def renumber(services: Iterable[int]) -> frozenset[int]:
            return frozenset(number[each] for each in services if each in number)

        return replace(
            self,
            on_disk=renumber(self.on_disk),
            able=None if self.able is None else renumber(self.able),
            held=tuple(sorted(renumber(self.held))),
        )

    def takes(self, services: Collection[int]) -> bool:
        """Whether an engine of it may have these, memory aside."""
        return len(services) <= self.most and (self.able is None or self.able.issuperset(services))


class GroupKind(NamedTuple):
    """Cards, and how they are joined: engines on as many of a kind are alike."""

    gpu: GpuSpec
    link_gbps: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementService:
    """A service, and the model that its requests go to."""

    name: str
    model: ModelShape


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Period:
    """Requests in order of arrival: of which service (its number), at what second, tokens of prompt and answer."""

    service: NDArray[np.int64]
    arrival_s: NDArray[np.float64]
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]

    def __post_init__(self) -> None:
        if not len(self.service) == len(self.arrival_s) == len(self.prompt) == len(self.output):
            raise PlacementError("the columns of a period have different lengths")
        if not len(self.service):
            raise PlacementError("a period without requests says nothing")
        if (np.diff(self.arrival_s) < 0.0).any():
            raise PlacementError("the requests of a period are not in order of arrival")
        if (self.prompt < 1).any() or (self.output < 1).any():
            raise PlacementError("a request of a period has a prompt or an answer of no tokens")

    def __len__(self) -> int:
        return len(self.service)

    def between(self, first_s: float, last_s: float) -> Period | None:
        """The part that came in `[first_s, last_s)`; None where nobody did."""
        rows = slice(*np.searchsorted(self.arrival_s, (first_s, last_s)).tolist())
        return self.rows(rows) if rows.start < rows.stop else None

    def sampled(self, requests: int) -> Period:
        """About so many of its requests, where there are more: every n-th SLICE_S, one after the other, so that bursts
        stay as they are and the rate does."""
        every = -(-len(self) // requests)
        if every < 2:
            return self
        slices = ((self.arrival_s - self.arrival_s[0]) / SLICE_S).astype(np.int64)
        kept = self.rows(slices % every == every - 1)
        gone = slices[slices % every == every - 1] // every * (every - 1) * SLICE_S
        return replace(kept, arrival_s=kept.arrival_s - gone)

    def rows(self, rows: slice | NDArray[np.bool_]) -> Period:
        """Some of its requests."""
        return Period(
            service=self.service[rows], arrival_s=self.arrival_s[rows], prompt=self.prompt[rows],
            output=self.output[rows],
        )  # fmt: skip


class GpuGroup(NamedTuple):
    """See the module. `box` and `services` by number, the services in rising order."""

    box: int
    tp: int
    services: tuple[int, ...] = ()

    def with_service(self, service: int) -> GpuGroup:
        """And another one."""
        return self._replace(services=tuple(sorted((*self.services, service))))

    def without(self, service: int) -> GpuGroup:
        """But for one."""
        return self._replace(services=tuple(each for each in self.services if each != service))


Groups = tuple[GpuGroup, ...]


@final
@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """See the module. `rates`: how fast weights are loaded. `longest`: tokens of the longest request of a service that
    is known from before the period."""

    boxes: Sequence[PlacementBox]
    services: Sequence[PlacementService]
    period: Period
    rates: LoadRates = field(default_factory=LoadRates)
    slo_scale: float = SLO_SCALE
    longest: Mapping[int, int] = field(default_factory=dict)
    _times: dict[tuple[GroupKind, int, int], StepTimes] = field(default_factory=dict, repr=False, compare=False)
    _executions: dict[tuple[GroupKind, int, int], tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _rooms: dict[tuple[GroupKind, int, tuple[int, ...]], float] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.boxes or not self.services:
            raise PlacementError("a placement needs a box and a service")
        if not 0 <= int(self.period.service.min()) <= int(self.period.service.max()) < len(self.services):
            raise PlacementError(f"a request is of a service that is none of {len(self.services)}")
        if not (isfinite(self.slo_scale) and self.slo_scale > 0.0):
            raise PlacementError(f"slo_scale is {self.slo_scale:g}; it must be above 0")

    @property
    def gpus(self) -> int:
        """Of all boxes."""
        return sum(box.gpus for box in self.boxes)

    def times(self, kind: GroupKind, tp: int, service: int) -> StepTimes:
        """Of a service on so many cards."""
        key = (kind, tp, service)
        found = self._times.get(key)
        if found is None:
            model = self.services[service].model
            found = self._times[key] = replica_times(model, [self._stage(kind, tp, service)])
        return found

    def kv_room(self, kind: GroupKind, tp: int, services: tuple[int, ...]) -> float:
        """Bytes of KV beside the weights of several services; 0 or less: those do not fit."""
        key = (kind, tp, services)
        found = self._rooms.get(key)
        if found is None:
            first = self.services[services[0]].model
            found = float(kv_capacity_tokens(first, [self._stage(kind, tp, services[0])]) * first.kv_bytes_per_token)
            found -= sum(self.services[each].model.weight_bytes for each in services[1:])
            self._rooms[key] = found
        return found

    def execution_s(self, kind: GroupKind, tp: int, service: int) -> tuple[float, float]:
        """`L_s` and `sd_s` of a service on so many cards, as an engine's own profile has them: of requests of the
        period, each alone there."""
        key = (kind, tp, service)
        found = self._executions.get(key)
        if found is None:
            times, rows = self.times(kind, tp, service), np.flatnonzero(self.period.service == service)
            rows = rows[:: -(-len(rows) // PROFILED)] if len(rows) else rows
            pairs = zip(self.period.prompt[rows].tolist(), self.period.output[rows].tolist(), strict=True)
            alone = [lone_execution_s(times, prompt, output) for prompt, output in pairs] or [1.0]
            found = self._executions[key] = float(np.mean(alone)), float(np.std(alone))
        return found

    def can_host(self, box: int, tp: int, services: tuple[int, ...]) -> bool:
        """Whether a box takes them, their weights fit, and beside these the longest request of each."""
        if not self.boxes[box].takes(services):
            return False
        wanted = max(
            (self.longest_tokens[each] * self.services[each].model.kv_bytes_per_token for each in services), default=0
        )
        return not services or self.kv_room(self.boxes[box].kind, tp, services) > max(0.0, wanted)

    def part(self, boxes: Sequence[int], services: Sequence[int]) -> PlacementProblem:
        """Of these boxes and services alone, in this order. Raises PlacementError where nobody asked for them."""
        number = {service: place for place, service in enumerate(services)}
        rows = np.isin(self.period.service, list(services))
        period = self.period.rows(rows)
        return PlacementProblem(
            boxes=[self.boxes[each].of_services(number) for each in boxes],
            services=[self.services[each] for each in services],
            period=replace(
                period, service=np.array([number[each] for each in period.service.tolist()], dtype=np.int64)
            ),
            rates=self.rates,
            slo_scale=self.slo_scale,
            longest={number[each]: tokens for each, tokens in self.longest.items() if each in number},
        )

    def fits_disk(self, box: int, services: Sequence[int]) -> bool:
        """Whether a box has room for the weights of all of these."""
        return sum(self.services[each].model.weight_bytes for each in set(services)) <= self.boxes[box].disk_bytes

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Powers of two, as many GPUs as the largest box has at most."""
        most = min(MAX_TP, max(box.gpus for box in self.boxes))
        return tuple(tp for tp in (1, 2, 4, 8) if tp <= most)

    @cached_property
    def alone_s(self) -> NDArray[np.float64]:
        """What each request of the period takes alone. GPUs are unequal: on the fewest of the first box that hold the
        service, or of the next one that can; so it is one yardstick for all placements. Where no box can: on as many of
        the first one's as would."""
        found = np.empty(len(self.period))
        for service in range(len(self.services)):
            rows = np.flatnonzero(self.period.service == service)
            if len(rows):
                times = self.alone_times(service)
                pairs = zip(self.period.prompt[rows].tolist(), self.period.output[rows].tolist(), strict=True)
                found[rows] = [lone_execution_s(times, prompt, output) for prompt, output in pairs]
        return found

    @cached_property
    def usual_s(self) -> tuple[float, ...]:
        """`L_s` of each service: the mean of `alone_s`; of one that nobody asked, 1."""
        return tuple(float(self._alone_of(service).mean()) for service in range(len(self.services)))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Requests of each service."""
        return tuple(np.bincount(self.period.service, minlength=len(self.services)).tolist())

    @cached_property
    def longest_tokens(self) -> tuple[int, ...]:
        """Of the longest request of each service."""
        tokens = self.period.prompt + self.period.output
        return tuple(
            max(self.longest.get(number, 0), int(tokens[self.period.service == number].max(initial=0)))
            for number in range(len(self.services))
        )

    def _alone_of(self, service: int) -> NDArray[np.float64]:
        """Of those of a service; a second where nobody asked."""
        found = self.alone_s[self.period.service == service]
        return found if len(found) else np.ones(1)

    def alone_times(self, service: int) -> StepTimes:
        """By which `alone_s` is."""
        return self.times(*self._yardstick(service), service)

    def fits_nowhere(self, service: int) -> bool:
        """Whether no box holds a service alone."""
        return self._find_least(service) is None

    def _yardstick(self, service: int) -> tuple[GroupKind, int]:
        found = self._find_least(service)
        if found is not None:
            return found
        kind = self.boxes[0].kind
        for tp in BEYOND_A_BOX:
            if self.kv_room(kind, tp, (service,)) > 0.0:
                return kind, tp
        raise PlacementError(f"{self.services[service].name} is too large for {BEYOND_A_BOX[-1]} GPUs")

    def _find_least(self, service: int) -> tuple[GroupKind, int] | None:
        """The fewest GPUs of the first box that can host a service."""
        for number, box in enumerate(self.boxes):
            for tp in self.degrees:
                if tp <= box.gpus and self.can_host(number, tp, (service,)):
                    return box.kind, tp
        return None

    def _stage(self, kind: GroupKind, tp: int, service: int) -> StageHardware:
        return StageHardware(kind.gpu, tp, self.services[service].model.layers, kind.link_gbps)


def find_fault(problem: PlacementProblem, groups: Groups) -> str:
    """Why boxes cannot be used like this, for people; "" where they can."""
    used: Counter[int] = Counter()
    for group in groups:
        used[group.box] += group.tp
        if not problem.can_host(group.box, group.tp, group.services):
            names = " and ".join(problem.services[each].name for each in group.services)
            return f"{names} have no room on {group.tp} GPUs of {problem.boxes[group.box].id}"
    for number, keeper in enumerate(problem.boxes):
        if keeper.held and GpuGroup(number, keeper.gpus, keeper.held) not in groups:
            names = " and ".join(problem.services[each].name for each in keeper.held)
            return f"{keeper.id} keeps {names}"
    for box, gpus in used.items():
        if gpus > problem.boxes[box].gpus:
            return f"{problem.boxes[box].id} has {problem.boxes[box].gpus} GPUs, not {gpus}"
        if not problem.fits_disk(box, [each for group in groups if group.box == box for each in group.services]):
            return f"the disk of {problem.boxes[box].id} has no room for what it is to host"
    return ""


def name_all(problem: PlacementProblem) -> str:
    """Its services, for people."""
    return ", ".join(service.name for service in problem.services)


def describe_groups(problem: PlacementProblem, groups: Groups) -> list[str]:
    """A line for each box: `a100-0: 4 x chat+code, 4 x talk`."""
    return [
        f"{problem.boxes[box].id}: {', '.join(describe_group(problem, group) for group in members)}"
        for box, members in groupby(sorted(groups), key=lambda group: group.box)
    ]


def describe_group(problem: PlacementProblem, group: GpuGroup) -> str:
    """`4 x chat+code`."""
    return f"{group.tp} x {'+'.join(problem.services[each].name for each in group.services) or 'idle'}"
