"""Which offers are chosen: held against all subsets of a small market, and what budget, rate and absence do."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest

from p2pserve.coordinator.planning.model.errors import NoPlan
from p2pserve.coordinator.renting.choice import RentAnswers, RentSearch, RentSettings, RentWish
from p2pserve.coordinator.renting.links import Outlook
from p2pserve.coordinator.renting.offers import Offer

from .markets import NEEDS, box, service

MARKET = (
    box("a40", "A40", 1, 0.8), box("a40-far", "A40", 2, 1.5, place="Japan, JP"), box("3090", "RTX 3090", 2, 0.9),
    box("4090", "RTX 4090", 2, 1.7), box("a6000", "RTX A6000", 1, 0.9),
)  # fmt: skip
QUICK = RentSettings(plans=16, draws=60, steps=25, last_steps=25)


def wish(budget: float, rate: float | None = None, **deadlines: float) -> RentWish:
    return RentWish(service=service(**deadlines), needs=NEEDS, budget=budget, rate=rate)


def rent(offers: Sequence[Offer], wanted: RentWish, seed: int = 0) -> RentAnswers:
    return RentSearch(offers, wanted, np.random.default_rng(seed), QUICK).run()


@cache
def rented() -> RentAnswers:
    """What several tests look at: all that $4.5/h buys of MARKET."""
    return rent(MARKET, wish(4.5))


def test_no_subset_within_the_budget_is_much_better() -> None:
    wanted = wish(4.5)
    search = RentSearch(MARKET, wanted, np.random.default_rng(0), QUICK)
    found = search.run()
    best = 0.0
    for many in range(1, len(search.offers) + 1):
        for chosen in combinations(range(len(search.offers)), many):
            planned = search.plan(chosen)
            if planned is not None:
                assert planned.usd_per_hour <= 4.5
                best = max(best, planned.expected)
    assert best > 0.0
    assert found.best.expected >= 0.98 * best


def test_the_same_seed_gives_the_same_answers() -> None:
    one, other = rented(), rent(MARKET, wish(4.5))
    assert (one.best.offers, one.best.expected, one.front) == (other.best.offers, other.best.expected, other.front)


def test_the_cheapest_that_meets_a_rate_costs_less_than_the_best() -> None:
    most = rented().best.expected
    found = rent(MARKET, wish(4.5, rate=most / 3.0))
    assert found.cheapest is not None
    assert found.cheapest.usd_per_hour < found.best.usd_per_hour
    assert found.cheapest.expected >= most / 3.0 * 0.99
    assert found.cheapest.plans[Outlook.EXPECTED].attainment >= 0.9


def test_a_rate_that_nothing_meets_has_no_cheapest() -> None:
    assert rent(MARKET[:2], wish(2.4, rate=1000.0)).cheapest is None


def test_more_money_buys_more() -> None:
    front = rented().front
    assert len(front) > 1
    assert all(a.usd_per_hour < b.usd_per_hour and a.expected < b.expected for a, b in pairwise(front))


def test_a_single_box_is_the_baseline() -> None:
    found = rented()
    assert found.single is not None
    assert len(found.single.offers) == 1
    assert found.single.expected <= found.best.expected


def test_a_box_that_is_seldom_there_is_passed_over() -> None:
    shaky = box("shaky", gpus=2, away=0.4)
    steady = box("steady", gpus=2, usd=1.62, away=0.01)
    assert [offer.id for offer in rent([shaky, steady], wish(1.7)).best.offers] == ["steady"]


def test_traffic_counts_against_the_budget() -> None:
    dear = [replace(offer, up_usd_per_gb=5.0, down_usd_per_gb=5.0) for offer in MARKET[2:]]
    found = rent(dear, wish(3.6)).best
    assert found.usd_per_hour <= 3.6
    assert found.usd_per_hour == pytest.approx(sum(offer.hourly_usd(NEEDS.disk_gb(offer)) for offer in found.offers))


def test_links_are_an_interval() -> None:
    plans = rented().best.plans
    assert set(plans) == set(Outlook)
    assert all(plan.max_rate > 0.0 for plan in plans.values())


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (wish(0.1), r"budget: no offer costs at most \$0.1/h; the cheapest is "),
        (wish(1.8, ttft_s=1e-3), "serves the model within the deadlines"),
    ],
)
def test_nothing_to_rent_is_said_in_a_line(wanted: RentWish, why: str) -> None:
    with pytest.raises(NoPlan, match=why):
        rent(MARKET, wanted)


def test_bounds_are_above_plans() -> None:
    search = RentSearch(MARKET, wish(4.5), np.random.default_rng(0), QUICK)
    for chosen in ((0,), (3,), (0, 2), (2, 3, 4)):
        planned = search.plan(chosen)
        assert planned is None or planned.max_rate <= 1.15 * search.bound(chosen)
