"""How to cut every box, or two boxes together, into replicas, and in which phases.

For a whole cluster, where a search starts, or for some of its boxes beside what the others do. This
is no part of ThunderServe, whose search moves GPUs from group to group.

Each cut is a *column*: a connected component with a value in requests per second at each of a grid
of prices (`lower/upper_bound`). Values of columns add up, and the least of the sum over the prices
bounds what they do together. So the best cut of a box, or of two boxes, beside all others is one
minimum over an array; going through boxes until no cut improves takes a millisecond.

A column knows how much KV its links can carry in and out when it has them for itself, not who is at
their other ends. So the packing is asked many times, each time with noise on the values and at
another total price, and the search goes on from its solutions with the real objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, combinations_with_replacement, product
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...plan import Phase
from ..lower.upper_bound import PREFILL_SHARES, TOTAL_PRICES
from ..model.problem import Component, Group, Slice, Solution, connected_boxes, split_components
from .search_space import PHASES, SearchSpace, make_solution

HEADROOM: Final = 0.1
"""What a rate of twice the one asked for is worth more than the rate itself."""

LEAST_GAIN: Final = 1e-9

Array = NDArray[np.float64]
Boxes = tuple[int, ...]
Options = Mapping[Boxes, NDArray[np.intp]]


class _PackedReplica(NamedTuple):
    """GPUs of each of a column's boxes."""

    gpus: tuple[int, ...]
    phase: Phase
    service: int


class _Column(NamedTuple):
    """One box, or two, of these classes, cut in this way."""

    classes: tuple[int, ...]
    cut: tuple[_PackedReplica, ...]


class Packing:
    """The columns of one problem and what they carry. `sharing`: about how many replicas will share
    a queue."""

    def __init__(self, space: SearchSpace, sharing: int) -> None:
        self._space = space
        self._classes = _classify_boxes(space)
        singles = [(number,) for number in range(len(self._classes))]
        pairs = [
            (one, two)
            for one, two in combinations_with_replacement(range(len(self._classes)), 2)
            if (len(self._classes[one]) > 1 if one == two else len(self._classes) <= space.settings.mixed_classes)
        ]
        self._columns = [
            _Column(classes, cut)
            for classes in (*singles, *pairs)
            for cut in _enumerate_cuts(space, self._example_boxes(classes))
        ]
        self._phase_counts = [(sharing, sharing)] * len(space.problem.services)
        # and one more, of boxes that stay idle
        component_values = space.evaluator.component_values(
            [*(self._component(column) for column in self._columns), ()], self._phase_counts
        )
        self._worth = np.ascontiguousarray(np.moveaxis(component_values, 2, 0))
        usd = [
            sum(space.boxes[box].usd_per_hour for box in self._example_boxes(column.classes))
            for column in self._columns
        ]
        self._cost = np.array([*usd, 0.0]) * space.problem.price_weight
        self._any = self._options(PHASES)
        self._boxes = sorted({box for boxes in self._any for box in boxes})
        self._asked = np.array([service.workload.rate for service in space.problem.services])

    def start(self, rng: np.random.Generator, phases: Sequence[Phase] = PHASES, noise: Array | None = None) -> Solution:
        """The best solution of replicas in these phases; `noise` weighs columns at some price
        level, without it the highest. Empty where no two boxes hold the model."""
        level = 0 if noise is None else int(rng.integers(len(TOTAL_PRICES)))
        options = self._any if phases is PHASES else self._options(phases)
        return make_solution(self._choose(rng, options, level, noise))

    def recut(self, solution: Solution, rng: np.random.Generator) -> Solution | None:
        """A neighbour: one or two boxes, and those that share replicas with them, cut anew beside
        the others. None where the draw finds too many boxes, or would leave all of them idle."""
        if not self._boxes:
            return None
        many = min(len(self._boxes), 1 + int(rng.integers(2)))
        inside = connected_boxes(solution, rng.choice(self._boxes, many, replace=False).tolist())
        if len(inside) > self._space.settings.recut_boxes:
            return None
        rest = [group for group in solution if group.slices[0].box not in inside]
        options = {boxes: columns for boxes, columns in self._any.items() if inside.issuperset(boxes)}
        level = int(rng.integers(len(TOTAL_PRICES)))
        noise = np.exp(rng.normal(0.0, rng.uniform(0.0, self._space.settings.recut_noise), self.columns))
        others = self._space.evaluator.component_values(split_components(rest), self._phase_counts).sum(axis=0)
        return make_solution((*rest, *self._choose(rng, options, level, noise, others))) or None

    @property
    def columns(self) -> int:
        """How many there are."""
        return len(self._columns)

    def _options(self, phases: Sequence[Phase]) -> Options:
        """The columns for each box and each two boxes, of replicas in these phases where pins leave
        the choice."""
        found: dict[Boxes, list[int]] = {}
        for number, column in enumerate(self._columns):
            if all(self._is_allowed(column, replica, phases) for replica in column.cut):
                for boxes in self._matching_boxes(column):
                    found.setdefault(boxes, []).append(number)
        idle = len(self._columns)
        return {boxes: np.array([*columns, idle] if len(boxes) == 1 else columns) for boxes, columns in found.items()}

    def _example_boxes(self, classes: Sequence[int]) -> list[int]:
        """A box for each: two different ones of the same class."""
        return [self._classes[one][classes[:place].count(one)] for place, one in enumerate(classes)]

    def _matching_boxes(self, column: _Column) -> Iterator[Boxes]:
        """The boxes that may be cut like this."""
        members = [self._classes[one] for one in column.classes]
        if len(members) == 1:
            yield from ((box,) for box in members[0])
        elif column.classes[0] == column.classes[1]:
            yield from combinations(members[0], 2)
        else:
            yield from product(*members)

    def _is_allowed(self, column: _Column, replica: _PackedReplica, phases: Sequence[Phase]) -> bool:
        """Whether it is in one of these phases, or pins leave none of them."""
        allowed = self._space.phases_of(_place_replica(self._example_boxes(column.classes), replica).slices)
        return replica.phase in phases or not set(phases) & set(allowed)

    def _component(self, column: _Column) -> Component:
        """Of the first boxes that it is for."""
        boxes = self._example_boxes(column.classes)
        return tuple(sorted(_place_replica(boxes, replica) for replica in column.cut))

    def _choose(
        self, rng: np.random.Generator, options: Options, level: int, noise: Array | None, others: Array | None = None
    ) -> list[Group]:
        """The groups of the best columns found for these boxes, beside the values of `others`
        [service, level, part]."""
        worth = self._worth[level] if noise is None else self._worth[level] * np.append(noise, 1.0)[:, None, None]
        beside = np.zeros(worth.shape[1:]) if others is None else others[:, level]
        taken = _Choice(worth, self._cost, self._asked, options, beside, 1.0 - float(TOTAL_PRICES[level])).climb(rng)
        return [
            _place_replica(boxes, replica)
            for boxes, number in taken
            if number < len(self._columns)
            for replica in self._columns[number].cut
        ]


class _Choice:
    """A column for every box, or for two together, as good as changes of one or two boxes make it.

    `worth` [column, service, part] and `cost` [column] (in objective) add up, beside what is worth
    `beside` [service, part] and a share `apart` of what is asked for; `asked` is the rate of each
    service. `options`: the columns that may be taken for each box and each two.
    """

    def __init__(self, worth: Array, cost: Array, asked: Array, options: Options, beside: Array, apart: float) -> None:
        self._worth, self._cost, self._options, self._apart = worth, cost, options, apart
        self._asked, self._weight = asked, asked / asked.sum()
        self._taken: dict[Boxes, int] = {}
        self._of: dict[int, Boxes] = {}
        self._total, self._spent = beside, 0.0

    def climb(self, rng: np.random.Generator) -> list[tuple[Boxes, int]]:
        """What is taken in the end. In the beginning every box alone is cut as well as can be at
        some price."""
        price = int(rng.integers(len(PREFILL_SHARES)))
        for boxes, columns in self._options.items():
            if len(boxes) == 1:
                self._take({boxes: int(columns[self._worth[columns, :, price].sum(axis=1).argmax()])})
        places = sorted({box for boxes in self._options for box in boxes})
        levels: list[list[Boxes]] = [[(box,) for box in places], list(combinations(places, 2))]
        while any(self._sweep(level, rng) for level in levels):
            pass  # two at a time only where one alone no longer helps
        return sorted(self._taken.items())

    def _sweep(self, places: Sequence[Boxes], rng: np.random.Generator) -> int:
        """How many of all these were cut anew."""
        return sum(self._improve(places[n]) for n in rng.permutation(len(places)).tolist())

    def _improve(self, boxes: Boxes) -> bool:
        """Cuts these anew if that is better; not where they are cut together with others."""
        inside = {self._of[box] for box in boxes if box in self._of}
        # a box that shares a column with one outside of these cannot be cut anew without that one
        if any(box not in boxes for place in inside for box in place):
            return False
        replaced = [self._taken[place] for place in inside]
        rest, spent = (
            self._total - self._worth[replaced].sum(axis=0),
            self._spent - self._cost[replaced].sum(),
        )
        ways = [self._best_columns(rest, spent, [(box,) for box in boxes])]
        if len(boxes) > 1:
            ways += [self._best_columns(rest, spent, [pair]) for pair in (boxes, boxes[::-1]) if pair in self._options]
        value, chosen = max(ways, key=lambda way: way[0])
        if value <= float(self._value(self._total, self._spent)) + LEAST_GAIN:
            return False
        for place in inside:
            del self._taken[place]
            for box in place:  # one that cannot be cut alone stays idle
                del self._of[box]
        self._total, self._spent = rest, spent
        self._take(chosen)
        return True

    def _best_columns(
        self, worth: Array, cost: Array | float, places: Sequence[Boxes]
    ) -> tuple[float, dict[Boxes, int]]:
        """Of all columns for these, on top of what the others are worth; those that cannot be cut
        stay idle."""
        places = [place for place in places if place in self._options]
        for place in places:
            columns = self._options[place]
            worth = worth[..., None, :, :] + self._worth[columns]
            cost = np.asarray(cost)[..., None] + self._cost[columns]
        values = self._value(worth, cost)
        at = np.unravel_index(int(values.argmax()), values.shape)
        chosen = {place: int(self._options[place][n]) for place, n in zip(places, at, strict=True)}
        return float(values[at]), chosen

    def _take(self, chosen: Mapping[Boxes, int]) -> None:
        for place, column in chosen.items():
            self._taken[place] = column
            self._of.update(dict.fromkeys(place, place))
            self._total = self._total + self._worth[column]
            self._spent += self._cost[column]

    def _value(self, worth: Array, cost: Array | float) -> Array:
        """In objective, of what is worth this together [..., service, price]."""
        rates = self._apart + worth.min(axis=-1) / self._asked
        return np.asarray((np.minimum(rates, 1.0) + HEADROOM * rates) @ self._weight - cost)


def _classify_boxes(space: SearchSpace) -> list[list[int]]:
    """Usable boxes that are alike but for their links."""
    found: dict[object, list[int]] = {}
    for number in space.usable:
        box = space.boxes[number]
        key = (box.gpu, box.gpus, box.gpu_link_gbps, box.usd_per_hour, box.atomic, space.phases[number])
        found.setdefault(key, []).append(number)
    return list(found.values())


def _place_replica(boxes: Sequence[int], replica: _PackedReplica) -> Group:
    slices = tuple(sorted(Slice(box, gpus) for box, gpus in zip(boxes, replica.gpus, strict=True)))
    return Group(slices, replica.phase, replica.service)


def _enumerate_cuts(space: SearchSpace, boxes: Sequence[int]) -> Iterator[tuple[_PackedReplica, ...]]:
    """The ways to cut these: a single box in any sizes, two boxes in equal parts of both."""
    whole = tuple(space.boxes[box].gpus for box in boxes)
    for service in range(len(space.problem.services)):
        for sizes in _part_sizes(space, boxes, whole, service):
            runs = [(size, sizes.count(size)) for size in sorted(set(sizes), reverse=True)]
            slices = tuple(Slice(box, 1) for box in sorted(boxes))
            phases = space.phases_of(slices)
            for chosen in product(*(combinations_with_replacement(phases, count) for _, count in runs)):
                yield tuple(
                    _PackedReplica(size, phase, service)
                    for (size, _), of_run in zip(runs, chosen, strict=True)
                    for phase in of_run
                )


def _part_sizes(
    space: SearchSpace, boxes: Sequence[int], whole: tuple[int, ...], service: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Multisets of parts that each hold the model, and leave no GPU idle if they can."""

    def can_hold(part: tuple[int, ...]) -> bool:
        slices = tuple(sorted(Slice(box, gpus) for box, gpus in zip(boxes, part, strict=True)))
        return space.can_hold(slices, service)

    if len(boxes) > 1:
        for parts in (1, 2):
            part = tuple(gpus // parts for gpus in whole)
            exact = all(gpus % (parts * space.gpu_units[box]) == 0 for gpus, box in zip(whole, boxes, strict=True))
            if exact and can_hold(part):
                yield (part,) * parts
        return
    unit = space.gpu_units[boxes[0]]
    shares = [share for share in range(unit, whole[0] + 1, unit) if can_hold((share,))]
    for sizes in _partitions(whole[0], shares):
        if len(sizes) <= space.settings.box_parts or len(set(sizes)) == 1:
            yield tuple((size,) for size in sizes)


def _partitions(gpus: int, shares: Sequence[int]) -> list[tuple[int, ...]]:
    """All multisets of shares with a sum of `gpus`, or of the most below it that they can make."""

    def parts(rest: int, largest: int) -> Iterator[tuple[int, ...]]:
        if rest == 0:
            yield ()
        for share in shares:
            if share <= min(rest, largest):
                yield from ((share, *others) for others in parts(rest - share, share))

    return next((found for total in range(gpus, 0, -1) if (found := list(parts(total, total)))), [])
