"""Every policy in every setting of the papers whose policies this project has: who is best, and how far from that the
default is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from ....coordinator.routing.interface import RoutingSettings
from ...admission import HELD_BACK
from ...policies import HETERO, LEAST_TOKENS, PLAN, ROUND_ROBIN, WEIGHTED_ROUND_ROBIN
from ...records import Outcomes
from ...scenario import SimAdmission
from ..page import Page, PageTable, ResultRow
from ..setting import Scope
from ..splitwise import equal_options
from ..splitwise.equal_options import EqualSystem
from .cronus_systems import (
    EQUAL,
    HIGH,
    PAIRS,
    PAPERS,
    PairOfCards,
    ServedTrace,
    StepSizes,
    run_data_parallel,
    run_split,
    run_whole,
    take_rows,
)
from .hetero import RATES
from .hetero_systems import EQUAL as CHUNKED
from .hetero_systems import LINKS, ServingSystem, draw_lengths, make_five, make_pair, tokens_s
from .hetero_systems import run_system as run_instances

DEFAULT: Final = RoutingSettings().policy
CRONUS: Final = "cronus"
SPLITWISE: Final = "splitwise"
FRONTEND: Final = "3:1 from a frontend"
"""Cronus' DP: requests wait at a frontend while both cards have enough."""

UNEQUAL: Final = (ROUND_ROBIN, WEIGHTED_ROUND_ROBIN, LEAST_TOKENS, HETERO, PLAN, DEFAULT)
CARD_RATES: Final = (6.0, inf)
WHOLE: Final = (ROUND_ROBIN, HETERO, PLAN, DEFAULT)
POOL_RATES: Final = (130.0, 200.0)
POOL_SECONDS: Final = 30.0
POOLS: Final = ((15, 25, 0), (15, 25, 4))
"""Prompt machines, token machines, and gateways."""

DRAWS: Final = 3
"""Of requests for each setting; the median of them counts."""

NEAR: Final = 1.02

BY_SETTING: Final = "By setting"
BY_POLICY: Final = "By policy"


class PolicyFigures(NamedTuple):
    """Of a run: seconds to the first token and from token to token, and what is served per second (tokens, or requests)
    until the last request has ended."""

    ttft_p99_s: float
    ttft_mean_s: float
    tbt_p99_s: float
    throughput: float


class OverBest(NamedTuple):
    """A policy's first tokens over the earliest, and its throughput over the highest, of the same requests."""

    ttft: float
    throughput: float


class PolicySetting(NamedTuple):
    """A setting of a paper, and what each policy makes of it: of each draw of requests."""

    paper: str
    deployment: str
    load: str
    draws: tuple[Mapping[str, PolicyFigures], ...]

    @property
    def figures(self) -> dict[str, PolicyFigures]:
        """By policy, the median of its draws, of each figure."""
        return {
            name: PolicyFigures(*map(median, zip(*(draw[name] for draw in self.draws), strict=True)))
            for name in self.draws[0]
        }

    def over_best(self) -> dict[str, OverBest]:
        """By policy, the median of its draws."""
        of_draws = [_over_best(draw) for draw in self.draws]
        return {
            name: OverBest(*map(median, zip(*(draw[name] for draw in of_draws), strict=True))) for name in self.draws[0]
        }


class SettingRow(ResultRow, frozen=True):
    """The policy nearest to the best of each draw, and how near the default and `plan` are: medians of draws."""

    paper: str
    deployment: str
    load: str
    TTFT_P99_s: float
    TTFT_by: str
    default_over_it: float
    plan_over_it: float
    most_per_s: float
    rate_by: str
    default_of_it: float
    plan_of_it: float
    policies: list[str]
    ttft_p99_s: list[float]
    ttft_mean_s: list[float]
    tbt_p99_s: list[float]
    throughput: list[float]


class PolicyRow(ResultRow, frozen=True):
    """In how many of its settings a policy is within 2 % of the best, and the worst of them."""

    paper: str
    policy: str
    settings: int
    TTFT_P99_near_best: int
    TTFT_P99_worst: float
    throughput_near_best: int
    throughput_worst: float


def policies(scope: Scope) -> Page:
    """The page; of few requests with `--quick`."""
    is_whole = scope.seconds >= Scope().seconds
    draws = [
        [
            *run_unequal(4000 if is_whole else 100, draw),
            *run_cards(1000 if is_whole else 50, draw),
            *run_pools(POOL_SECONDS if is_whole else 2.0, draw),
        ]
        for draw in range(DRAWS if is_whole else 1)
    ]
    settings = [put_together(of_draws) for of_draws in zip(*draws, strict=True)]
    return Page(
        name="policies",
        title="Every policy in every setting of the papers",
        assumes=(
            "The settings of [Xiong et al.](hetero.md) (5.2 and 5.3, equal options), of [Cronus](cronus.md) (each pair "
            "of cards, steps of the paper's size and of 2,048 tokens; a replica that prefills before one that decodes, "
            "either way round, and both with whole requests) and of [Splitwise](pools.md) (equal options, arrivals for "
            f"{POOL_SECONDS:g} s). Plans, engines and requests are the same for all policies of a "
            f"setting. There are {len(draws)} draws of requests (for Cronus, parts of Azure's trace behind each "
            "other): each policy is compared with the best of the same draw, and the median of the draws counts.\n\n"
            f"The default is `{DEFAULT}` behind the gateways' queue, with the same constants everywhere; by all other "
            "policies requests are placed as they come. Throughput is until the last request has "
            "ended: where all come at once, the last few long answers decide some per cent of it. The policies of the "
            "papers and the plain ones know nothing of prefixes, which are not in these settings."
        ),
        tables=(
            PageTable(BY_POLICY, policy_rows(settings), "Settings in which a policy was run, all that fit its plan."),
            PageTable(BY_SETTING, [setting_row(each) for each in settings], "`over it`, `of it`: 1 is the best."),
        ),
        remarks=REMARKS,
    )


def put_together(settings: Sequence[PolicySetting]) -> PolicySetting:
    """One setting's draws, that were run one by one."""
    return settings[0]._replace(draws=tuple(draw for setting in settings for draw in setting.draws))


def run_unequal(count: int, draw: int = 0) -> list[PolicySetting]:
    """Xiong et al., sections 5.2 and 5.3."""
    found = []
    for section, make in (("5.2", make_pair), ("5.3", make_five)):
        for link in LINKS:
            system = make(link)
            for rate in RATES:
                figures = {each: _run_instances(system, count, each, rate, draw) for each in UNEQUAL}
                found.append(PolicySetting("Xiong", f"{section} {link}", _load(rate), (figures,)))
    return found


def run_cards(count: int, draw: int = 0) -> list[PolicySetting]:
    """Cronus' pairs of cards."""
    found = []
    for sizes, name in ((PAPERS, "512"), (EQUAL, "2048")):
        for pair in PAIRS:
            for rate in CARD_RATES:
                for shape, figures in _run_shapes(pair, sizes, count, rate, draw).items():
                    found.append(PolicySetting("Cronus", f"{pair.name}, {shape}, {name}", _load(rate), (figures,)))
    return found


def run_pools(seconds: float, draw: int = 0) -> list[PolicySetting]:
    """Splitwise's machines."""
    found = []
    for rate in POOL_RATES:
        trace = equal_options.draw_requests(rate, seconds, draw)
        for prompt, token, gateways in POOLS:
            figures = {}
            for name in (ROUND_ROBIN, PLAN, SPLITWISE, DEFAULT):
                system = EqualSystem(prompt, token, name, gateways)
                served = equal_options.run_system(system, trace, _admission_of(name))
                figures[name] = _read_outcomes(served.outcomes)
            machines = EqualSystem(prompt, token, DEFAULT, gateways).machines
            deployment = f"{machines}, {gateways} gateways" if gateways else machines
            found.append(PolicySetting("Splitwise", deployment, _load(rate), (figures,)))
    return found


def setting_row(setting: PolicySetting) -> SettingRow:
    """Who is best in it."""
    figures, over = setting.figures, setting.over_best()
    first = min(over, key=lambda name: over[name].ttft)
    most = max(over, key=lambda name: over[name].throughput)
    return SettingRow(
        paper=setting.paper, deployment=setting.deployment, load=setting.load,
        TTFT_P99_s=figures[first].ttft_p99_s, TTFT_by=first, default_over_it=over[DEFAULT].ttft,
        plan_over_it=over[PLAN].ttft,
        most_per_s=figures[most].throughput, rate_by=most, default_of_it=over[DEFAULT].throughput,
        plan_of_it=over[PLAN].throughput,
        policies=list(figures), ttft_p99_s=[each.ttft_p99_s for each in figures.values()],
        ttft_mean_s=[each.ttft_mean_s for each in figures.values()],
        tbt_p99_s=[each.tbt_p99_s for each in figures.values()],
        throughput=[each.throughput for each in figures.values()],
    )  # fmt: skip


def policy_rows(settings: Sequence[PolicySetting]) -> list[PolicyRow]:
    """By paper and policy, all settings together."""
    rows = []
    for paper in dict.fromkeys(each.paper for each in settings):
        own = [each.over_best() for each in settings if each.paper == paper]
        for name in dict.fromkeys(name for over in own for name in over):
            ratios = [over[name] for over in own if name in over]
            rows.append(
                PolicyRow(
                    paper=paper, policy=name, settings=len(ratios),
                    TTFT_P99_near_best=sum(each.ttft <= NEAR for each in ratios),
                    TTFT_P99_worst=max(each.ttft for each in ratios),
                    throughput_near_best=sum(each.throughput >= 1.0 / NEAR for each in ratios),
                    throughput_worst=min(each.throughput for each in ratios),
                )
            )  # fmt: skip
    return rows


def _over_best(figures: Mapping[str, PolicyFigures]) -> dict[str, OverBest]:
    least = min(each.ttft_p99_s for each in figures.values())
    most = max(each.throughput for each in figures.values())
    return {name: OverBest(each.ttft_p99_s / least, each.throughput / most) for name, each in figures.items()}


def _admission_of(policy: str) -> SimAdmission | None:
    """The default is what the network does, whose gateways hold back what engines would let wait."""
    return HELD_BACK if policy == DEFAULT else None


def _run_instances(system: ServingSystem, count: int, policy: str, rate: float, draw: int) -> PolicyFigures:
    result = run_instances(
        system, draw_lengths(count, draw), policy=policy, rate=rate, seed=draw, options=CHUNKED,
        admission=_admission_of(policy),
    )  # fmt: skip
    return _read_outcomes(result.services[0].outcomes, tokens_s(result))


def _run_shapes(
    pair: PairOfCards, sizes: StepSizes, count: int, rate: float, draw: int
) -> dict[str, dict[str, PolicyFigures]]:
    trace = take_rows(count, draw * count, interval_s=1.0 / rate if rate < inf else 0.0)
    split = {
        "lesser first": (pair.low, HIGH),
        "A100 first": (HIGH, pair.low),
    }
    found = {
        shape: {
            name: _read_trace(
                run_split(pair, trace, sizes, first=first, second=second, policy=name, admission=_admission_of(name))
            )
            for name in (PLAN, CRONUS, DEFAULT)
        }
        for shape, (first, second) in split.items()
    }
    whole = {name: _read_trace(run_whole(pair, trace, sizes, name, _admission_of(name))) for name in WHOLE}
    whole[FRONTEND] = _read_trace(run_data_parallel(pair, trace, sizes))
    return {**found, "whole requests": whole}


def _read_outcomes(outcomes: Outcomes, throughput: float | None = None) -> PolicyFigures:
    """`throughput`: requests per second where it is not told."""
    if throughput is None:
        throughput = len(outcomes.trace) / float(np.nanmax(outcomes.trace.arrival_s + outcomes.e2e_s))
    return PolicyFigures(
        ttft_p99_s=float(np.nanquantile(outcomes.ttft_s, 0.99)), ttft_mean_s=float(np.nanmean(outcomes.ttft_s)),
        tbt_p99_s=float(np.nanquantile(outcomes.tpot_s, 0.99)), throughput=throughput,
    )  # fmt: skip


def _read_trace(served: ServedTrace) -> PolicyFigures:
    return PolicyFigures(served.ttft_p99_s, float(served.ttft_s.mean()), served.tbt_p99_s, served.rate)


def _load(rate: float) -> str:
    return f"{rate:g}/s" if rate < inf else "at once"


REMARKS: Final = """\
- The default's first tokens are within 2 % of the earliest in 65 of 68 settings, and its throughput is within 2 % of
  the highest in 61; those of `plan`, the default before, in 9 and 32. At worst they are 1.12 times the earliest,
  and 0.91 of the highest: the goal of 2 % everywhere is missed.
- Gateways hold back what engines would let wait, as the network's do, and route a request when its turn comes; here
  they refuse nobody. Where all requests are given to engines as they come, it was 54 and 60 in one draw, in which it
  was 62 and 59 with the queue, before gateways asked replicas: nobody knows how long answers will be, and Cronus'
  frontend, which holds requests back until a card has room, has first tokens up to 7 % earlier.

  It takes a queue that lets no engine idle: prompts count as computed by what a replica's steps say of its speed,
  short ones come beside long ones, and all replicas count, as they prefill and decode by this policy. With a queue that
  counted decode replicas' KV alone, an A100 that prefills for an A10 (llama3-8b, 6/s) had first tokens after 123 s at
  the 99th percentile instead of 4.4, and 3.3 requests/s instead of 5.6.

  Where a plan has deadlines, phases count as it has them: at its capacity 88 % of the requests are in time by
  [admission at the deadline](overload.md), and 67 % were where all replicas counted.
- Of the three later first tokens one is where engines are just full (24/s over PCIe, 1.05), and two are the tenth
  latest of 1,000 requests (1.03 and 1.12), in which draws differ by as much.
- Four gateways with Splitwise's machines hear of each other's requests a second late. By the default and by `splitwise`
  they ask replicas before they send: the default the one that is to compute the prompt, whether it has no more ahead
  than expected, and `splitwise` both, whether they are within the limits of their pools. So the default's first tokens
  are there after 0.41 and 0.49 s, those of `splitwise` after 0.52 and 0.56. While the default asked nobody it was 0.58
  and 0.67 s.
- Lower throughput is that of whole requests on two cards, where the last long answers decide it: 0.97 and 0.98 in two
  settings at 6/s, 0.91 and 0.96 in two at once. At 6/s the lesser card's last answer ends 4 of 178 s later. `hetero`
  gives that card fewer, and has its first tokens later elsewhere. The other three are Xiong's two instances with as
  much as they carry or more (0.97).
- Most is gained by replicas that take requests whole, whatever their phase: where an A100 prefills for a lesser card
  and all come at once, 7.6 to 10.6 requests/s instead of 2.4 to 8.5 by the other policies. Plans whose phases fit gain
  less.
- What a request adds to the waits of others counts as its own wait does. Without that all go to the strong instance of
  Xiong's two until it is slow.
- None of these plans has deadlines, by which the default goes where a plan has them ([options](options.md)).
- Not run: 40 machines that do both, 25 and 15 of them, 70 requests/s, and Xiong's engines as in the paper. The 99th
  percentile of 1,000 requests is that of ten, and of three draws one counts.
"""
