"""Cuts of boxes by their columns, for replicas whose rates are so much for each GPU, against all solutions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.upper_bound import PREFILL_SHARES, TOTAL_PRICES
from p2pserve.coordinator.planning.model.problem import Component, Group, PhaseCounts, Slice, Solution
from p2pserve.coordinator.planning.upper.packing import Packing
from p2pserve.coordinator.planning.upper.search_space import SearchSpace, make_solution
from p2pserve.coordinator.planning.upper.settings import SearchSettings

from .conftest import GivenScores, four_boxes
from .exhaustive import all_solutions

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
RATES = {0: (3.0, 1.0), 1: (3.0, 1.0), 2: (1.0, 3.0), 3: (1.0, 3.0)}
"""Requests per second that a GPU of each box prefills and decodes."""


def rates_of(groups: Sequence[Group]) -> tuple[float, float]:
    """A group works on prompts, on outputs, or half of its time on either."""
    prefill = decode = 0.0
    for group in groups:
        for box, gpus in group.slices:
            prefill += gpus * RATES[box][0] * {P: 1.0, D: 0.0, M: 0.5}[group.phase]
            decode += gpus * RATES[box][1] * {P: 0.0, D: 1.0, M: 0.5}[group.phase]
    return prefill, decode


class PerGpu(GivenScores):
    """Components are worth what their GPUs do, at every price."""

    def component_values(
        self, components: Sequence[Component], phase_counts: Sequence[PhaseCounts]
    ) -> NDArray[np.float64]:
        values = np.zeros((len(components), len(phase_counts), len(TOTAL_PRICES), len(PREFILL_SHARES)))
        shares = np.asarray(PREFILL_SHARES)
        for number, component in enumerate(components):
            prefill, decode = rates_of(component)
            for level, total in enumerate(TOTAL_PRICES):
                values[number, 0, level] = total * (shares * prefill + (1.0 - shares) * decode)
        return values


def space_of(
    *, pinned: Mapping[str, Phase] | None = None, price_weight: float = 0.0, settings: SearchSettings | None = None
) -> SearchSpace:
    problem = four_boxes(pinned=dict(pinned or {}), price_weight=price_weight)
    (service,) = problem.services
    service = replace(service, workload=replace(service.workload, rate=100.0))  # more than can be carried
    boxes = tuple(replace(box, usd_per_hour=1.0) for box in problem.cluster.boxes)
    problem = replace(problem, services=(service,), cluster=replace(problem.cluster, boxes=boxes))
    return SearchSpace.of(problem, PerGpu(lambda solution: 0.0), settings or SearchSettings())


def carried(solution: Solution) -> float:
    return min(rates_of(solution))


def test_every_cut_of_one_box_and_of_two_is_a_column() -> None:
    """A box of four: one group in 3 phases, two in 6. Two of them: as one group 3, as two 6. An atomic box: 3; two of
    them together 3; one of either kind together 3."""
    assert Packing(space_of(), 2).columns == 9 + 9 + 3 + 3 + 3
    alone = Packing(space_of(settings=SearchSettings(mixed_classes=1)), 2)
    assert alone.columns == 9 + 9 + 3 + 3


def test_the_number_of_replicas_in_a_box_has_a_bound_unless_they_are_alike() -> None:
    assert Packing(space_of(settings=SearchSettings(box_parts=1)), 2).columns == 27
    # pinned boxes have one column for each of their sizes, and are of classes of their own
    pinned = Packing(space_of(pinned={"a0": P, "a1": P}), 2)
    assert pinned.columns == 2 + 2 + 3 + 3 + 1


def test_a_start_carries_nearly_as_much_as_any_solution() -> None:
    space = space_of()
    best = max(carried(solution) for solution in all_solutions(space) if solution)
    start = Packing(space, 2).start(np.random.default_rng(0))
    assert carried(start) >= 0.95 * best
    assert start == make_solution(start)
    assert all(count >= 0 for count in space.idle_gpus(start).values())


def test_a_start_keeps_to_the_phases_asked_for_and_to_pins_before_them() -> None:
    mixed = Packing(space_of(), 2).start(np.random.default_rng(0), (M,))
    assert {group.phase for group in mixed} == {M}
    pinned = Packing(space_of(pinned={"t0": D}), 2).start(np.random.default_rng(0), (M,))
    assert {group.phase for group in pinned if group.slices[0].box == 2} == {D}
    assert {group.phase for group in pinned if group.slices[0].box != 2} == {M}


def test_noise_finds_other_starts_and_the_same_seed_the_same_one() -> None:
    packing = Packing(space_of(), 2)

    def start(seed: int) -> Solution:
        rng = np.random.default_rng(seed)
        return packing.start(rng, noise=np.exp(rng.normal(0.0, 0.5, packing.columns)))

    assert start(3) == start(3)
    assert len({start(seed) for seed in range(8)}) > 2


def test_boxes_that_cost_more_than_they_carry_stay_idle() -> None:
    assert Packing(space_of(price_weight=10.0), 2).start(np.random.default_rng(0)) == ()
    assert Packing(space_of(price_weight=1e-6), 2).start(np.random.default_rng(0)) != ()


def test_a_recut_leaves_the_boxes_alone_that_it_does_not_touch() -> None:
    space = space_of()
    packing, rng = Packing(space, 2), np.random.default_rng(1)
    here = make_solution([
        Group((Slice(0, 4),), D), Group((Slice(1, 4),), D), Group((Slice(2, 2),), P), Group((Slice(3, 2),), P),
    ])  # fmt: skip
    better = 0
    for _ in range(20):
        there = packing.recut(here, rng)
        assert there is not None
        assert all(count >= 0 for count in space.idle_gpus(there).values())
        assert sum(group not in there for group in here) <= 2
        better += carried(there) > carried(here)
    assert better >= 5


def test_a_recut_takes_all_boxes_that_share_replicas_or_none() -> None:
    across = make_solution([Group((Slice(0, 2), Slice(1, 2)), M), Group((Slice(0, 2), Slice(2, 2)), M)])
    few = Packing(space_of(settings=SearchSettings(recut_boxes=2)), 2)
    found = [few.recut(across, np.random.default_rng(seed)) for seed in range(20)]
    assert None in found
    assert all(there is None or set(across) <= set(there) for there in found)  # only box 3 is cut anew
    many = Packing(space_of(settings=SearchSettings(recut_boxes=4)), 2)
    assert None not in [many.recut(across, np.random.default_rng(seed)) for seed in range(20)]


def test_where_no_box_holds_the_model_there_is_no_start() -> None:
    space = space_of()
    none = SearchSpace.of(space.problem, PerGpu(lambda solution: 0.0, least=99))
    packing = Packing(none, 2)
    assert packing.columns == 0
    assert packing.start(np.random.default_rng(0)) == ()
    assert packing.recut((Group((Slice(0, 4),), M),), np.random.default_rng(0)) is None


def test_unlike_boxes_are_joined_where_neither_holds_the_model_alone() -> None:
    space = space_of()
    six = SearchSpace.of(space.problem, PerGpu(lambda solution: 0.0, least=6))
    packing = Packing(six, 2)
    assert packing.columns == 3 + 3  # two large boxes together, or one of either kind
    for seed in range(4):
        start = packing.start(np.random.default_rng(seed))
        assert six.idle_gpus(start) == {}
        assert [sum(gpus for _, gpus in group.slices) for group in start] == [6, 6]


def test_a_box_that_does_not_pay_is_left_alone_beside_one_that_does() -> None:
    space = space_of(price_weight=0.05)
    boxes = tuple(
        replace(box, usd_per_hour=100.0 if number else 0.0) for number, box in enumerate(space.problem.cluster.boxes)
    )
    dear = replace(space.problem, cluster=replace(space.problem.cluster, boxes=boxes))
    start = Packing(SearchSpace.of(dear, PerGpu(lambda solution: 0.0)), 2).start(np.random.default_rng(0))
    assert {box for group in start for box, _ in group.slices} == {0}
    alone = replace(dear, excluded=frozenset({"a0", "a1", "t0"}))
    assert Packing(SearchSpace.of(alone, PerGpu(lambda solution: 0.0)), 2).start(np.random.default_rng(0)) == ()


def only(space: SearchSpace, *names: str, **changes: Any) -> SearchSpace:
    """The same with these boxes only, and other figures of the problem."""
    every = {box.id for box in space.problem.cluster.boxes}
    problem = replace(space.problem, excluded=frozenset(every) - set(names), **changes)
    return SearchSpace.of(problem, space.evaluator, space.settings)


def groups(*found: tuple[Phase, dict[int, int]]) -> Solution:
    return make_solution(Group(tuple(Slice(box, gpus) for box, gpus in of.items()), phase) for phase, of in found)


@pytest.mark.parametrize(
    ("names", "best"),
    [
        # half decodes 2, half mixes and prefills 3 and decodes 1: all mixed or split otherwise it carries 2 or 1
        (("a0",), groups((D, {0: 2}), (M, {0: 2}))),
        # prefills 9 and decodes 1 beside 6; all of a0 mixed, 6 and 2; all prefilling, 12 and 0
        (("a0", "t0"), groups((P, {0: 2}), (M, {0: 2}), (D, {2: 2}))),
        # one that prefills has 2 for one that decodes 6: as one replica they mix, 2 and 6 halved
        (("t0",), groups((M, {2: 2}))),
    ],
)
def test_a_start_over_one_box_or_two_is_the_best_there_is(names: tuple[str, ...], best: Solution) -> None:
    for seed in range(5):  # whatever the price at which it begins
        assert Packing(only(space_of(), *names), 2).start(np.random.default_rng(seed)) == best


@pytest.mark.parametrize(
    ("rate", "worth"),
    [  # of 3 requests/s: all that is carried, and a tenth as headroom; beyond what is asked, headroom alone
        (100.0, 0.03 * 1.1),
        (6.0, 0.5 * 1.1),
        (1.0, 1.0 + 0.1 * 3.0),
    ],
)
def test_a_box_is_used_where_it_is_worth_its_price(rate: float, worth: float) -> None:
    space = space_of()
    (service,) = space.problem.services
    services = (replace(service, workload=replace(service.workload, rate=rate)),)
    for price, used in ((0.999 * worth, True), (1.001 * worth, False)):  # its price is 1 dollar an hour
        dear = only(space, "a0", services=services, price_weight=price)
        assert bool(Packing(dear, 2).start(np.random.default_rng(0))) is used


def test_a_recut_of_all_boxes_is_a_start_and_of_one_makes_the_best_of_what_the_others_lack() -> None:
    """Beside a decoding t0 a0 prefills with one half and mixes with the other; beside a prefilling one it decodes with
    a half and mixes with the other: 3 and 3 with 2 and 0 more, where all decoding would carry 2."""
    space = only(space_of(settings=SearchSettings(recut_noise=0.0)), "a0", "t0")
    packing = Packing(space, 2)
    best = groups((P, {0: 2}), (M, {0: 2}), (D, {2: 2}))
    found = {packing.recut(groups((M, {0: 4}), (D, {2: 2})), np.random.default_rng(seed)) for seed in range(20)}
    assert best in found
    assert found <= {best, groups((M, {0: 4}), (D, {2: 2}))}  # t0 was cut anew alone, and decodes as before
    alone = {packing.recut(groups((P, {2: 2})), np.random.default_rng(seed)) for seed in range(40)}
    assert alone == {best, groups((D, {0: 2}), (M, {0: 2}), (P, {2: 2})), groups((M, {2: 2}))}


def test_pairs_of_boxes_share_replicas_where_there_are_few_classes_of_boxes() -> None:
    """A replica over both boxes; over boxes of one class always."""
    six = SearchSpace.of(space_of().problem, PerGpu(lambda solution: 0.0, least=6))
    columns = {}
    for most in (1, 2):
        settings = SearchSettings(mixed_classes=most)
        for names in (("a0", "a1"), ("a0", "t0"), ("a0",)):
            space = replace(only(six, *names), settings=settings)
            columns[most, names] = Packing(space, 2).columns
    assert columns == {
        (1, ("a0", "a1")): 3,  # eight GPUs in three phases: four do not hold the model
        (2, ("a0", "a1")): 3,
        (1, ("a0", "t0")): 0,
        (2, ("a0", "t0")): 3,
        (1, ("a0",)): 0,
        (2, ("a0",)): 0,
    }


@pytest.mark.parametrize(
    ("least", "parts", "columns"),
    [  # a box of 4: which sizes, in three phases each
        (4, 4, 3),  # 4
        (3, 4, 3),  # 4; 3 and 1 would leave one idle
        (2, 4, 3 + 6),  # 4, 2+2
        (1, 4, 3 + 9 + 6 + 18 + 15),  # 4, 3+1, 2+2, 2+1+1, 1+1+1+1
        (1, 3, 3 + 9 + 6 + 18 + 15),  # four alike are allowed besides
        (1, 2, 3 + 9 + 6 + 15),
        (1, 1, 3 + 6 + 15),
        (5, 4, 0),
    ],
)
def test_a_box_is_cut_into_all_sizes_that_leave_nothing_idle(least: int, parts: int, columns: int) -> None:
    space = only(space_of(settings=SearchSettings(box_parts=parts)), "a0")
    given = SearchSpace.of(space.problem, PerGpu(lambda solution: 0.0, least=least), space.settings)
    assert Packing(given, 2).columns == columns


def test_where_sizes_do_not_add_up_the_fewest_gpus_stay_idle() -> None:
    """Of a box of five where only three at once hold the model, two are idle; an odd pair is not halved."""
    space = space_of()
    boxes = tuple(replace(box, gpus=5) if box.id.startswith("a") else box for box in space.problem.cluster.boxes)

    class ThreeAtOnce(PerGpu):
        def can_hold(self, slices: tuple[Slice, ...], service: int) -> bool:
            return sum(gpus for _, gpus in slices) in (3, 10)

    problem = replace(space.problem, cluster=replace(space.problem.cluster, boxes=boxes))
    evaluator = ThreeAtOnce(lambda solution: 0.0)
    one = only(SearchSpace.of(problem, evaluator), "a0")
    assert Packing(one, 2).columns == 3
    (group,) = Packing(one, 2).start(np.random.default_rng(0))
    assert group.slices == (Slice(0, 3),)
    assert Packing(only(SearchSpace.of(problem, evaluator), "a0", "a1"), 2).columns == 3 + 3
