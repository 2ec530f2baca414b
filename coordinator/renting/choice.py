"""Which offers to rent: a search over sets of them, whose value is what the planner makes of a set.

There is no second planner here. A set of offers is a cluster like any other; `search` plans it and
`LowerLevel` says what the plan carries. What is here is which sets are looked at: drawn by what
their cards are worth for their price, near each other or not, for all of the budget or a part of
it; then the best ones with a box more, less or exchanged. Sets that cannot be better than what was
found, by `OfferValues`, are not planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Final

import numpy as np

from ..plan import Phase
from ..planning.lower.evaluator import LowerLevel
from ..planning.lower.replicas import ConfigurationCache
from ..planning.model.errors import NoPlan, UnservedError
from ..planning.model.problem import Problem, Proposal, Solution
from ..planning.model.workload import Service
from ..planning.upper.search import search
from ..planning.upper.settings import SearchSettings
from .links import Outlook, cluster_of
from .needs import Needs
from .offers import Offer
from .places import Distance, distance
from .values import OfferValues, at_rate

Indices = tuple[int, ...]
Progress = Callable[[int, float], None]
"""Told after each plan: how many there were, and the most requests/s found."""

OVERLOAD: Final = 1.25
"""What is asked of sets while they are compared, over the most that any is bounded by: more than
all can carry."""

SLACK: Final = 1.1
"""Bounds are of cards among their kind and may be below what they do among others."""

NEARNESS: Final = (Distance.SITE, Distance.COUNTRY, Distance.CONTINENT, Distance.WORLD)

BUDGET_SHARES: Final = (1.0, 1.0, 1.0, 0.75, 0.5, 0.35, 0.25)
"""Of the budget, what drawn sets may cost: cheaper ones make the front of prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RentSettings:
    """How long and how wide to look.

    `plans`: sets that are planned, `draws`: sets drawn for that. `steps`: of the planner's search
    for each, `last_steps`: for the answers. More take longer and find little: with 40 steps the
    plans of up to six boxes were as good as with 400. `noise`: by how much values are off while
    sets are drawn. `climbed`: of the best sets, those whose neighbours are looked at.
    """

    plans: int = 120
    draws: int = 600
    steps: int = 40
    last_steps: int = 400
    noise: float = 0.2
    climbed: int = 3

    @property
    def batch(self) -> int:
        """Neighbours that are planned before it is looked again which sets are best."""
        return max(1, self.plans // 8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RentWish:
    """What is wanted: `service` at any rate; `budget`, $/h with traffic; `rate`, requests/s to be
    met, None for as many as the budget buys."""

    service: Service
    needs: Needs
    budget: float
    rate: float | None = None
    max_boxes: int = 8
    max_gpus: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RentalSet:
    """Offers and what they carry: `max_rate` requests/s with the target share in time, `expected`
    of it when boxes are away as often as their offers say; `usd_per_hour` with traffic, `boxes_usd`
    without. `offers`: id -> its cards, for people."""

    chosen: Indices
    max_rate: float
    expected: float
    boxes_usd: float
    usd_per_hour: float
    offers: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rental:
    """An answer: `plans` by how the links turn out, each at `rate` requests/s; `expected` as in
    `RentalSet`. `input_share`: of the cost, what goes into prefill."""

    offers: tuple[Offer, ...]
    rate: float
    expected: float
    input_share: float
    plans: dict[Outlook, Proposal]

    @property
    def usd_per_hour(self) -> float:
        """With disks and the traffic that is to be expected."""
        return self.plans[Outlook.EXPECTED].usd_per_hour


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RentAnswers:
    """`cheapest` that meets the rate, `best` within the budget, `single`: the best box alone; None
    where there is none. `front`: of what was planned, sets that no cheaper one is as good as.
    `planned`: how many were."""

    cheapest: Rental | None
    best: Rental
    single: Rental | None
    front: tuple[RentalSet, ...]
    planned: int


class RentSearch:
    """One search; `run` once. The same offers, wish and seed give the same answers."""

    def __init__(
        self, offers: Sequence[Offer], wish: RentWish, rng: np.random.Generator, settings: RentSettings | None = None
    ) -> None:
        self._wish, self._rng, self._settings = wish, rng, settings or RentSettings()
        self.offers = [offer for offer in offers if self._usd(offer) <= wish.budget and offer.gpus <= wish.max_gpus]
        if not self.offers:
            cheapest = min((self._usd(offer) for offer in offers), default=inf)
            raise NoPlan(f"budget: no offer costs at most ${wish.budget:g}/h; the cheapest is ${cheapest:.3f}/h")
        self._memory = ConfigurationCache()
        self._values = OfferValues(self.offers, wish.service, self._memory)
        self._prices = np.array([self._usd(offer) for offer in self.offers])
        bound = max((self._values.most(self._draw(1.0)) for _ in range(self._settings.draws // 4)), default=0.0)
        if bound <= 0.0:
            raise NoPlan(
                f"offers: no cards of one kind hold {wish.service.model.name} and meet the deadlines, even idle; "
                "look for larger or faster ones, or give later deadlines"
            )
        self._rate = OVERLOAD * bound
        self._usd_weight = bound / self._rate / wish.budget
        self._known: dict[object, RentalSet | None] = {}
        self._progress: Progress = lambda planned, most: None
        figures = [repr(replace(offer, id="", name="", record=0, host="")) for offer in self.offers]
        self._alike = [figures.index(text) for text in figures]

    def run(self, progress: Progress | None = None) -> RentAnswers:
        """Search, and plan the answers as well as the planner can. Raises NoPlan."""
        self._progress = progress or self._progress
        single = self._best_single()
        limit = self._settings.plans
        self._look_at(sorted({self._draw(self._share()) for _ in range(self._settings.draws)}), limit // 2)
        self._climb(limit)
        if self._wish.rate is not None:
            self._look_for_cheaper(self._wish.rate, limit + limit // 2)
        found = [one for one in self._known.values() if one is not None]
        if not found:
            raise NoPlan(f"budget: nothing that ${self._wish.budget:g}/h rents serves the model within the deadlines")
        best = max(found, key=_rank)
        cheapest = self._cheapest(found)
        return RentAnswers(
            cheapest=None if cheapest is None else self._answer(cheapest),
            best=self._answer(best),
            single=None if single is None else self._answer(single),
            front=_front(found),
            planned=len(self._known),
        )

    def bound(self, chosen: Indices) -> float:
        """About the most requests/s that these could serve in time."""
        return self._values.most(chosen)

    def _usd(self, offer: Offer) -> float:
        return offer.hourly_usd(self._wish.needs.disk_gb(offer))

    def _share(self) -> float:
        return float(self._rng.choice(BUDGET_SHARES))

    def _draw(self, budget_share: float) -> Indices:
        """A set by value for its price, at two prices of a prompt so that both phases have cards
        that suit them, within some distance of an offer."""
        rng, budget = self._rng, budget_share * self._wish.budget
        anchor = self.offers[int(rng.integers(len(self.offers)))].place
        within = int(rng.integers(len(NEARNESS)))
        near = [i for i, offer in enumerate(self.offers) if _rank_distance(distance(anchor, offer.place)) <= within]
        noise = np.exp(rng.normal(0.0, self._settings.noise, len(self.offers)))
        chosen: list[int] = []
        for share in rng.integers(self._values.per_box.shape[2], size=2).tolist():
            worth = self._values.per_box[:, 0, share] / self._prices * noise
            part = budget / (1.0 if chosen else float(rng.choice((1.0, 1.5, 2.0))))
            for index in sorted(near, key=lambda i: (-worth[i], i)):
                if index not in chosen and worth[index] > 0.0 and self._fits([*chosen, index], part):
                    chosen.append(index)
        return tuple(sorted(chosen))

    def _fits(self, chosen: Sequence[int], budget: float) -> bool:
        wish = self._wish
        return (
            len(chosen) <= wish.max_boxes
            and float(self._prices[list(chosen)].sum()) <= budget
            and sum(self.offers[i].gpus for i in chosen) <= wish.max_gpus
        )

    def _best_single(self) -> RentalSet | None:
        """The best box alone, by its bound first."""
        best: RentalSet | None = None
        order = sorted(range(len(self.offers)), key=lambda i: (-self._values.most([i]), self._prices[i], i))
        for index in order:
            if best is not None and SLACK * self._values.most([index]) <= best.expected:
                break
            found = self.plan((index,))
            if found is not None and (best is None or _rank(found) > _rank(best)):
                best = found
        return best

    def _look_at(self, sets: Iterable[Indices], limit: int) -> None:
        """Plan them, those of the highest bounds first, until `limit` are known; not those that
        cannot be better than what is as cheap."""
        for chosen in sorted(sets, key=lambda one: (-self._values.most(one), one)):
            if len(self._known) >= limit:
                return
            usd = float(self._prices[list(chosen)].sum())
            if chosen and SLACK * self._values.most(chosen) > self._most_within(usd):
                self.plan(chosen)

    def _most_within(self, usd: float) -> float:
        """The most that is expected of a set that costs no more."""
        return max((one.expected for one in self._known.values() if one and one.usd_per_hour <= usd), default=0.0)

    def _climb(self, limit: int) -> None:
        """Neighbours of the best sets, as long as that finds better ones."""
        before = -1.0
        while len(self._known) < limit:
            ranked = sorted((one for one in self._known.values() if one), key=_rank, reverse=True)
            if not ranked or ranked[0].expected <= before:
                return
            before = ranked[0].expected
            for one in ranked[: self._settings.climbed]:
                near = [other for other in self._neighbours(one.chosen) if self._fits(other, self._wish.budget)]
                near = [other for other in near if SLACK * self._values.most(other) > before]
                self._look_at(near, min(limit, len(self._known) + self._settings.batch))

    def _neighbours(self, chosen: Indices) -> Iterator[Indices]:
        """One box less, one more, or another in the place of one."""
        others = [index for index in range(len(self.offers)) if index not in chosen]
        for index in chosen:
            less = tuple(one for one in chosen if one != index)
            yield less
            yield from (tuple(sorted((*less, other))) for other in others)
        yield from (tuple(sorted((*chosen, other))) for other in others)

    def _look_for_cheaper(self, rate: float, limit: int) -> None:
        """Sets that may meet the rate for less than what does so far, cheapest first."""
        drawn = {self._draw(share) for share in np.linspace(0.05, 1.0, self._settings.draws // 2).tolist()}
        while len(self._known) < limit:
            met = self._cheapest([one for one in self._known.values() if one])
            most = self._wish.budget if met is None else met.usd_per_hour
            sets = drawn | set(self._neighbours(met.chosen) if met else ())
            hopeful = sorted(
                (float(self._prices[list(one)].sum()), one)
                for one in sets
                if one and self._fits(one, most) and SLACK * self._values.most(one) >= rate
                if self._key(one) not in self._known
            )
            # The cheapest are the least likely to do what their bounds say: look a little above them.
            for _, one in hopeful[len(hopeful) // 4 :][: self._settings.batch]:
                self.plan(one)
            if not hopeful:
                return

    def _cheapest(self, found: Iterable[RentalSet]) -> RentalSet | None:
        rate = self._wish.rate
        met = [one for one in found if rate is not None and one.expected >= rate]
        return min(met, key=lambda one: (one.usd_per_hour, -one.expected, one.chosen), default=None)

    def plan(self, chosen: Indices) -> RentalSet | None:
        """What the planner makes of a set; None where it serves nothing within the budget."""
        key = self._key(chosen)
        if key not in self._known:
            self._known[key] = self._planned(chosen)
            most = max((one.expected for one in self._known.values() if one), default=0.0)
            self._progress(len(self._known), most)
        return self._known[key]

    def _planned(self, chosen: Indices) -> RentalSet | None:
        offers = [self.offers[index] for index in chosen]
        problem = self._problem(offers, Outlook.EXPECTED)
        try:
            solutions = self._search(problem, self._settings.steps)
        except (NoPlan, UnservedError):
            return None
        # Where traffic is too dear, boxes that keep their requests are another try.
        for solution in solutions:
            used = sorted({part.box for group in solution for part in group.slices})
            proposal = self._propose(problem, solution)
            if proposal is None:
                continue
            boxes_usd = float(self._prices[[chosen[box] for box in used]].sum())
            usd = boxes_usd + proposal.usd_per_hour
            if usd <= self._wish.budget and proposal.max_rate > 0.0:
                there = proposal.max_rate * (1.0 - share_away(solution, offers))
                return RentalSet(
                    chosen=tuple(chosen[box] for box in used), max_rate=proposal.max_rate, expected=there,
                    boxes_usd=boxes_usd, usd_per_hour=usd,
                    offers={offers[box].id: f"{offers[box].gpus} x {offers[box].gpu.name}" for box in used},
                )  # fmt: skip
        return None

    def _search(self, problem: Problem, steps: int) -> tuple[Solution, Solution]:
        """The best solution, and the best of mixed replicas. Each set has the same randomness, so
        that what is found of it does not depend on the others."""
        away = float(np.mean([offer.away for offer in self.offers]))
        found = search(
            problem, LowerLevel(problem, memory=self._memory), rng=np.random.default_rng(0),
            settings=SearchSettings(steps=steps, box_away=away),
        )  # fmt: skip
        return found.solution, found.colocated

    def _problem(self, offers: Sequence[Offer], outlook: Outlook) -> Problem:
        """Boxes are paid for whether they work or not; traffic costs what it could buy instead."""
        cluster = cluster_of(offers, outlook, self._wish.needs)
        free = tuple(replace(box, usd_per_hour=0.0) for box in cluster.boxes)
        return Problem(
            cluster=replace(cluster, boxes=free), services=(at_rate(self._wish.service, self._rate),), pinned={},
            price_weight=self._usd_weight,
        )  # fmt: skip

    def _propose(self, problem: Problem, solution: Solution) -> Proposal | None:
        try:
            return LowerLevel(problem, memory=self._memory).propose(solution, epoch=0, version=1)[0]
        except UnservedError:
            return None

    def _answer(self, best: RentalSet) -> Rental:
        """Planned for each outlook with all the steps that the planner takes, at the rate asked
        for, or at the highest that is expected."""
        offers = tuple(self.offers[index] for index in best.chosen)
        solutions = {outlook: self._last_solution(offers, outlook, best) for outlook in Outlook}
        expected = self._priced(offers, Outlook.EXPECTED, self._rate)
        most = self._last_proposal(expected, solutions[Outlook.EXPECTED]).max_rate
        rate = self._wish.rate or most
        priced = {outlook: self._priced(offers, outlook, rate) for outlook in Outlook}
        plans = {outlook: self._last_proposal(priced[outlook], solutions[outlook]) for outlook in Outlook}
        solution = solutions[Outlook.EXPECTED]
        return Rental(
            offers=offers, rate=rate, expected=most * (1.0 - share_away(solution, offers)),
            input_share=input_share(LowerLevel(priced[Outlook.EXPECTED], memory=self._memory), solution), plans=plans,
        )  # fmt: skip

    def _last_solution(self, offers: tuple[Offer, ...], outlook: Outlook, best: RentalSet) -> Solution:
        """The better one of a long search and the short one that chose this set, within the budget."""
        problem, settings = self._problem(offers, outlook), self._settings
        found = [one for steps in (settings.last_steps, settings.steps) for one in self._search(problem, steps)]
        tried = [
            (proposal.max_rate, -place, solution)
            for place, solution in enumerate(found)
            if (proposal := self._propose(problem, solution)) is not None
            and best.boxes_usd + proposal.usd_per_hour <= self._wish.budget
        ]
        return max(tried)[2] if tried else found[-1]

    def _priced(self, offers: tuple[Offer, ...], outlook: Outlook, rate: float) -> Problem:
        cluster = cluster_of(offers, outlook, self._wish.needs)
        return Problem(cluster=cluster, services=(at_rate(self._wish.service, rate),), pinned={})

    def _last_proposal(self, problem: Problem, solution: Solution) -> Proposal:
        return LowerLevel(problem, memory=self._memory).propose(solution, epoch=0, version=1)[0]

    def _key(self, chosen: Indices) -> object:
        """What sets that are alike in every figure have in common."""
        return tuple(sorted(self._alike[index] for index in chosen))


def share_away(solution: Solution, offers: Sequence[Offer]) -> float:
    """Of what a solution carries, what is lost on average: a replica is away when one of its boxes
    is."""
    total = sum(part.gpus for group in solution for part in group.slices)
    return sum(
        (1.0 - prod(1.0 - offers[part.box].away for part in group.slices)) * sum(part.gpus for part in group.slices)
        for group in solution
    ) / max(total, 1)  # fmt: skip


def input_share(evaluator: LowerLevel, solution: Solution) -> float:
    """Of the cost of the boxes, what goes into prefill: by phase, and in mixed replicas by the time
    that each half takes."""
    boxes = evaluator.problem.cluster.boxes
    spent = prefill = 0.0
    for group in solution:
        usd = sum(boxes[part.box].usd_per_hour * part.gpus / boxes[part.box].gpus for part in group.slices)
        prefills, decodes = evaluator.max_rates(group, 1)
        share = decodes / (prefills + decodes) if group.phase is Phase.MIXED and prefills + decodes else 0.5
        spent += usd
        prefill += usd * {Phase.PREFILL: 1.0, Phase.DECODE: 0.0}.get(group.phase, share)
    return prefill / spent if spent else 0.5


def _rank(one: RentalSet) -> tuple[float, float, Indices]:
    """More is better, then cheaper."""
    return one.expected, -one.usd_per_hour, one.chosen


def _rank_distance(kind: Distance) -> int:
    return NEARNESS.index(kind) if kind in NEARNESS else len(NEARNESS) - 1


def _front(found: Iterable[RentalSet]) -> tuple[RentalSet, ...]:
    """Those that carry more than every cheaper one, by price."""
    front: list[RentalSet] = []
    for one in sorted(found, key=lambda one: (one.usd_per_hour, -one.expected, one.chosen)):
        if not front or one.expected > front[-1].expected:
            front.append(one)
    return tuple(front)
