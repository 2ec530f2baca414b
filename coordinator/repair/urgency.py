"""Which news of figures is planned with at once: a link that broke down, an engine that slowed down, other traffic,
another price.

Boxes that come, go, fail or drain are always planned with at once. Figures move all the time, by some percent, and a
new plan for each would be noise; so they are planned with now and then, unless one that the running plan rests on has
moved by more than noise does. What is compared is what was planned with last, so news is urgent once: afterwards it
is what is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from ..capacity import BoxView, Links, LinkView
from ..demand import Demand
from ..names import name_of
from ..plan import Plan
from ..profile import LatencyProfile, PhaseFit

REPAIR_S: Final = 0.3
"""For so long a plan is searched for that is made at once. What is not found by then is found by the search that
follows. Longer: better phases in the first plan after a loss, which comes as much later."""

_PROMPT: Final = 1024
"""Tokens of the prompt that prefills are compared at."""

_BATCH: Final = 8
"""Requests that decode together where decode steps are compared,"""

_CONTEXT: Final = 1024
"""and the tokens that each of them holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UrgencySettings:
    """By what factor a figure must have moved. Lower: the network answers sooner, also to noise, and plans more often.

    - `link`: the rate of a link that the plan sends KV over has fallen. Bursts on shared lines differ by some tens of
      percent.
    - `engine`: steps of an engine take longer. A throttled card is slower by a third or more.
    - `demand`: requests per second, or mean lengths of prompts or outputs, either way.
    - `price`: of a box or a link, either way; nobody measures prices, so any change is one.
    """

    link: float = 2.0
    engine: float = 1.3
    demand: float = 1.5
    price: float = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """What a plan is made of."""

    boxes: tuple[BoxView, ...]
    links: tuple[LinkView, ...]
    demands: tuple[Demand, ...]


DEFAULTS: Final = UrgencySettings()


def find_urgent_news(plan: Plan, before: PlanFigures, now: PlanFigures, settings: UrgencySettings = DEFAULTS) -> str:
    """What has moved so far since `before`, with which `plan` was made, that it is planned with at once: a line for
    people. "" where nothing has."""
    old = {box.peer: box for box in before.boxes}
    used = [(old[box.peer], box) for box in now.boxes if box.peer in old and plan.replica_of(box.peer) is not None]
    news = (
        *_find_slow_engines(used, settings.engine),
        *_find_link_news(plan, before.links, now.links, settings),
        *_find_other_traffic(before.demands, now.demands, settings.demand),
        *_find_box_prices(used, settings.price),
    )
    return next(iter(news), "")


def find_traffic_news(before: PlanFigures, now: PlanFigures, settings: UrgencySettings = DEFAULTS) -> str:
    """What clients ask for that has moved as far: nothing is broken, so there is time to plan well."""
    return next(_find_other_traffic(before.demands, now.demands, settings.demand), "")


def _find_slow_engines(used: Iterable[tuple[BoxView, BoxView]], factor: float) -> Iterator[str]:
    for old, new in used:
        slower = max(_ratio(old.compute_tflops, new.compute_tflops), _ratio(old.memory_gbps, new.memory_gbps))
        slower = max(slower, _slowdown(old.profile, new.profile))
        if slower >= factor:
            yield f"the engine of {name_of(new.peer)} takes {slower:.1f} times as long as before"


def _slowdown(old: LatencyProfile | None, new: LatencyProfile | None) -> float:
    """By what factor steps of the phases that both know take longer."""
    if old is None or new is None:
        return 1.0
    prefill = _step_ratio(old.prefill, new.prefill, 1.0, _PROMPT)
    return max(prefill, _step_ratio(old.decode, new.decode, _BATCH, _CONTEXT))


def _step_ratio(old: PhaseFit | None, new: PhaseFit | None, requests: float, length: float) -> float:
    """1 where one of the two is not known."""
    if old is None or new is None or not (was_s := old.cost.seconds(requests, length)) > 0.0:
        return 1.0
    return new.cost.seconds(requests, length) / was_s


def _find_link_news(
    plan: Plan, before: Iterable[LinkView], now: Iterable[LinkView], settings: UrgencySettings
) -> Iterator[str]:
    pairs = _pairs_with_kv(plan)
    # Links measured one way only count for both: the other way is kept, too.
    ends = pairs | {(target, source) for source, target in pairs}
    old, new = (Links(link for link in links if (link.source, link.target) in ends) for links in (before, now))
    for source, target in sorted(pairs):
        was, rate = old.gbps(source, target), new.gbps(source, target)
        link = f"the link {name_of(source)} -> {name_of(target)}"
        if _ratio(was, rate) >= settings.link:
            yield f"{link} went from {was:.3g} to {rate:.3g} Gb/s"
        usd, was_usd = new.usd_per_gb(source, target), old.usd_per_gb(source, target)
        if max(_ratio(usd, was_usd), _ratio(was_usd, usd)) >= settings.price:
            yield f"{link} costs ${usd:.3g} per GB, before ${was_usd:.3g}"


def _pairs_with_kv(plan: Plan) -> set[tuple[str, str]]:
    """The pairs of boxes between which the plan sends KV, or what stages say to each other."""
    replicas = {replica.id: replica for replica in plan.replicas}
    pairs = {
        (source, target)
        for pair in plan.pairings
        if pair.prefill != pair.decode and pair.weight > 0.0
        for source in replicas[pair.prefill].peers
        for target in replicas[pair.decode].peers
    }
    for replica in plan.replicas:
        pairs.update(zip(replica.peers, replica.peers[1:], strict=False))
    return {(source, target) for source, target in pairs if source != target}


def _find_other_traffic(before: Iterable[Demand], now: Iterable[Demand], factor: float) -> Iterator[str]:
    old, new = _sum_traffic(before), _sum_traffic(now)
    for what, was in old.items():
        if max(_ratio(new[what], was), _ratio(was, new[what])) >= factor:
            yield f"{what}: {new[what]:.3g}, before {was:.3g}"


def _sum_traffic(demands: Iterable[Demand]) -> Mapping[str, float]:
    """What all gateways together are asked for; lengths are means over requests, 0 where none come."""
    rate = prompts = outputs = 0.0
    for demand in demands:
        rate += demand.requests_s
        prompts += demand.requests_s * sum(prompt for prompt, _ in demand.lengths) / len(demand.lengths)
        outputs += demand.requests_s * sum(output for _, output in demand.lengths) / len(demand.lengths)
    return {
        "requests/s": rate,
        "tokens of a prompt": prompts / rate if rate else 0.0,
        "tokens of an answer": outputs / rate if rate else 0.0,
    }


def _find_box_prices(used: Iterable[tuple[BoxView, BoxView]], factor: float) -> Iterator[str]:
    for old, new in used:
        was, usd = old.usd_per_hour, new.usd_per_hour
        if max(_ratio(usd, was), _ratio(was, usd)) >= factor:
            yield f"{name_of(new.peer)} costs ${usd:.3g}/h, before ${was:.3g}/h"


def _ratio(over: float, under: float) -> float:
    """1 where both are 0, infinite where only the second is."""
    if under > 0.0:
        return over / under
    return inf if over > 0.0 else 1.0
