"""Prefix caches on Mooncake's conversation trace: what routes that follow them are worth, and KV that comes from other
boxes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from ....coordinator.costs.gpus import gpu_table
from ....coordinator.costs.model_shape import model_shape
from ....coordinator.plan import Deadlines, Pairing, Phase, Plan, Replica, Stage
from ....coordinator.planning.model.cluster import Box, Cluster
from ....coordinator.planning.model.workload import Service, Slo
from ....coordinator.routing.interface import RoutingSettings
from ...engine.values import SimEngineSettings
from ...policies import PLAN, PREDICTED
from ...results.outcomes import attainment
from ...scenario import ServiceRun, SimSettings
from ...workloads import MOONCAKE_BLOCK, mooncake, workload_of
from ...world import simulate
from ..page import Page, PageTable, ResultRow
from ..setting import TARGET, Scope

MODEL: Final = "qwen2-7b"
GPU: Final = "A100-SXM4-80GB"
SLO: Final = Slo(ttft_s=30.0, tpot_s=0.1, target=TARGET)
"""Mooncake's own deadlines for this trace."""
BOXES: Final = (8, 16)
ENGINE: Final = SimEngineSettings()
BRACKET: Final = (0.5, 1.3)
"""Requests per second and box between which the highest rate is looked for."""
LOADS: Final = (0.5, 0.8, 1.0, 1.2)
"""Shares of what caches without routes by prefix carry."""
QUICK_REQUESTS: Final = 300
GATEWAYS: Final = 4
LINKS_GBPS: Final = (10.0, 5.0, 1.0)
FETCH_LOADS: Final = (0.5, 1.0)
NEAR: Final = (0.94, 1.14)
"""Times the rate of routes by prefix alone: between these, the highest with KV from other boxes is looked for."""
WAIT_LIMIT: Final = 1.5
"""As in the running network: see `SimSettings.kv_wait_limit`."""

COLD: Final = "no prefix cache"
BLIND: Final = "caches, routes that do not know them"
ROUTED: Final = "caches, routes by prefix"
SPREAD: Final = ", 4 gateways"
BY_PLAN: Final = f", `{PLAN}`"


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to serve: whether replicas cache prompts, whether routes follow that, by which policy, over which links KV
    of prefixes comes from other boxes (0: it does not), and what it is compared with."""

    cached: bool
    routed: bool
    policy: str = PREDICTED
    gateways: int = 0
    blind: str = BLIND
    fetch_gbps: float = 0.0


WAYS: Final[Mapping[str, _Way]] = {
    COLD: _Way(cached=False, routed=False),
    BLIND: _Way(cached=True, routed=False),
    ROUTED: _Way(cached=True, routed=True),
    BLIND + SPREAD: _Way(cached=True, routed=False, gateways=GATEWAYS, blind=BLIND + SPREAD),
    ROUTED + SPREAD: _Way(cached=True, routed=True, gateways=GATEWAYS, blind=BLIND + SPREAD),
    BLIND + BY_PLAN: _Way(cached=True, routed=False, policy=PLAN, blind=BLIND + BY_PLAN),
    ROUTED + BY_PLAN: _Way(cached=True, routed=True, policy=PLAN, blind=BLIND + BY_PLAN),
}

FETCHING: Final[Mapping[str, _Way]] = {
    f"KV of prefixes over {gbps:g} Gb/s": _Way(cached=True, routed=True, fetch_gbps=gbps) for gbps in LINKS_GBPS
}
"""Compared with routes by prefix alone."""


class _Figures(NamedTuple):
    """What is shown of one run: `cached` of prompt tokens; `computed`: by the box that computed most, over the mean;
    of prompt tokens, those computed anywhere (`prefilled`), and those whose KV came from another box (`received`)."""

    attained: float
    ttft_mean_s: float
    ttft_p90_s: float
    tpot_p90_s: float
    cached: float
    computed: float
    prefilled: float
    received: float


class GoodputRow(ResultRow, frozen=True):
    """What one way carries; `over_blind`: with as many gateways; `cached`: of prompt tokens, at that rate."""

    boxes: int
    way: str
    requests_per_s: float
    over_blind: float
    cached: str


class FirstTokenRow(ResultRow, frozen=True):
    """First tokens of one way at one rate."""

    boxes: int
    requests_per_s: float
    way: str
    TTFT_mean_s: float
    over_blind: float
    TTFT_P90_s: float
    TPOT_P90_ms: float
    cached: str
    most_computed_over_mean: float


class FetchRow(ResultRow, frozen=True):
    """What one way carries where KV comes from other boxes, beside routes by prefix alone."""

    boxes: int
    way: str
    requests_per_s: float
    over_routes_alone: float


class FetchedFirstTokenRow(ResultRow, frozen=True):
    """Its figures at one rate. `computed`, `from_other_boxes`: of prompt tokens."""

    boxes: int
    requests_per_s: float
    way: str
    TTFT_mean_s: float
    TTFT_P90_s: float
    TPOT_P90_ms: float
    computed: str
    from_other_boxes: str


REMARKS: Final = """\
- Routes that do not know of caches find what many prompts begin with, and a conversation's earlier
  turns in one of n boxes. Routes by prefix find them where they are, as long as they are kept.
- Mean TTFT at the rate that blind caches just carry is 0.52 and 0.57 of theirs with one gateway and
  0.37 and 0.44 with four: the aim of 0.6 is reached. By `plan`, which does not go by deadlines, it is
  0.71 and 0.73, of a blind mean that is shorter: the default spends the 30 s that a first token may
  take. At 1.2 times that rate, which routes by prefix carry or nearly do, it is 0.06 to 0.17.
- Goodput is 1.21 to 1.32 times that of the same caches without such routes; 1.5 was hoped for. What
  is computed bounds it: at 16 boxes 66 instead of 93 % of the prompt tokens, so 1.4 times at most
  if attention cost nothing and answers took no time. Caches that keep everything would find 37 % of
  this trace's prompt tokens: at most 1.5 times what blind ones carry, and those keep less. More
  boxes come closer to it, since they keep more and blind routes find less.
- Four gateways that hear of loads once a second ask a replica before they send it a prompt. So first tokens by prefix
  come about as soon as with one gateway, at the rates that blind caches just carry: after 1.34 and 1.38 s at 8 boxes,
  1.15 and 1.09 at 16. While nobody asked, they sent prompts behind each other's, and it was 1.80 and 1.59 s, with 0.2
  to 0.5 % less found in caches.
- Every box computes about as much as every other (the last column): a prefix that everybody has is
  computed on several boxes, since queues count as well.
- KV from other boxes adds nothing to what routes by prefix carry; 1.1 times was hoped for. Over 10
  and 5 Gb/s as much is carried within 1 %, which is a step of the search, and TTFT P90 at the highest
  rate is between 7 % sooner and 7 % later: what is predicted to be sooner for one prompt is not for
  those behind it.

  By `plan`, whose routes leave more to fetch, it added 2 %. By the default routes already send nearly
  every prompt to where its prefix is: of a hundred prompt tokens at most half a one comes from
  elsewhere. What no box keeps any longer cannot be fetched.

  There is no more to gain on this trace. Run by hand, with routes that valued caches a little more:
  over a link that costs nothing 8 boxes carry 1.02 times as much and 16 as much (steps of the
  search are 1 to 3 %); with first tokens in 5 s instead of 30, 1.02 times over 10 Gb/s, by 8 boxes
  as by 16; and 4 A100 with 8 A40 in steps of 512 tokens 1.02 times, at 30 s as at 5 s. Hardly more
  than 1 % of the prompt tokens was ever had from elsewhere.
- Over 1 Gb/s a token's KV takes 0.13 ms, more than twice as long as computing it: nothing is fetched,
  and all is as without.
- Answers are not in the trace's names, so none is kept; prompts are kept in pieces of 512 tokens,
  because those have names.
"""


def prefixes(scope: Scope) -> Page:
    """The page."""
    requests, halvings = QUICK_REQUESTS if scope.halvings <= 1 else None, scope.halvings
    carried = {(boxes, way): _highest_rate(boxes, way, requests, halvings) for boxes in BOXES for way in WAYS}
    fetching = {
        (boxes, way): _search(boxes, way, requests, halvings - 1, *(near * carried[boxes, ROUTED] for near in NEAR))
        for boxes in BOXES
        for way in (ROUTED, *FETCHING)
    }
    return Page(
        name="prefixes",
        title="Routes by prefix: Mooncake's conversations",
        assumes=(
            f"Mooncake's conversation trace ({requests or 'all 12,031'} requests, its order and its bursts, time "
            f"scaled to the rate) on boxes of one {GPU} each, {MODEL} whole on each of them, every box prefilling and "
            "decoding; step times by the roofline, vLLM's defaults, KV memory shared by running requests and cache "
            f"(the longest unused goes first).\n\nDeadlines as Mooncake's: {SLO.ttft_s:g} s to the first token, "
            f"{1e3 * SLO.tpot_s:g} ms from token to token. All that is shown is modelled. The policy is "
            f"`{PREDICTED}`, the default, which goes by these deadlines, or `{PLAN}` where that is named, which does "
            "not; `RoutingSettings.prefix_weight` is 0 where routes do not know of caches. One gateway that "
            f"hears of all replicas at once, or {GATEWAYS}, which hear of them once a second and know their own "
            "requests at once, as in the running network. KV of prefixes comes from other boxes in the last two tables "
            "alone; in the others `RoutingSettings.prefix_fetch` is 0."
        ),
        tables=(
            PageTable(
                "Goodput",
                [_goodput_row(boxes, way, carried, requests) for boxes in BOXES for way in WAYS],
                f"The highest rate at which {TARGET:.0%} of requests meet both deadlines.",
            ),
            PageTable(
                "First tokens at the same rate",
                [
                    _latency_row(boxes, way, share * carried[boxes, WAYS[way].blind], requests)
                    for boxes in BOXES
                    for share in LOADS
                    for way in WAYS
                    if WAYS[way].cached
                ],
                "At half, four fifths, all, and 1.2 times of what caches without routes by prefix carry.",
            ),
            PageTable(
                "KV of prefixes from other boxes",
                [
                    FetchRow(
                        boxes=boxes,
                        way=way,
                        requests_per_s=fetching[boxes, way],
                        over_routes_alone=fetching[boxes, way] / fetching[boxes, ROUTED],
                    )
                    for boxes, way in fetching
                ],
                "The highest rate again, looked for more finely; KV travels in `kv4`.",
            ),
            PageTable(
                "First tokens with KV from other boxes",
                [
                    _fetch_latency_row(boxes, way, share * fetching[boxes, ROUTED], requests)
                    for boxes in BOXES
                    for share in FETCH_LOADS
                    for way in (ROUTED, *FETCHING)
                ],
                "At half and at all of what routes by prefix alone carry.",
            ),
        ),
        remarks=REMARKS,
    )


def _goodput_row(boxes: int, way: str, carried: Mapping[tuple[int, str], float], requests: int | None) -> GoodputRow:
    rate = carried[boxes, way]
    return GoodputRow(
        boxes=boxes,
        way=way,
        requests_per_s=rate,
        over_blind=rate / carried[boxes, WAYS[way].blind],
        cached=f"{_run(boxes, way, rate, requests).cached:.1%}",
    )


def _latency_row(boxes: int, way: str, rate: float, requests: int | None) -> FirstTokenRow:
    found, blind = _run(boxes, way, rate, requests), _run(boxes, WAYS[way].blind, rate, requests)
    return FirstTokenRow(
        boxes=boxes,
        requests_per_s=rate,
        way=way,
        TTFT_mean_s=found.ttft_mean_s,
        over_blind=found.ttft_mean_s / blind.ttft_mean_s,
        TTFT_P90_s=found.ttft_p90_s,
        TPOT_P90_ms=1e3 * found.tpot_p90_s,
        cached=f"{found.cached:.1%}",
        most_computed_over_mean=found.computed,
    )


def _fetch_latency_row(boxes: int, way: str, rate: float, requests: int | None) -> FetchedFirstTokenRow:
    found = _run(boxes, way, rate, requests)
    return FetchedFirstTokenRow(
        boxes=boxes,
        requests_per_s=rate,
        way=way,
        TTFT_mean_s=found.ttft_mean_s,
        TTFT_P90_s=found.ttft_p90_s,
        TPOT_P90_ms=1e3 * found.tpot_p90_s,
        computed=f"{found.prefilled:.1%}",
        from_other_boxes=f"{found.received:.1%}",
    )


def _highest_rate(boxes: int, way: str, requests: int | None, halvings: int) -> float:
    low, high = (factor * boxes for factor in BRACKET)
    return _search(boxes, way, requests, halvings, low, high)


def _search(boxes: int, way: str, requests: int | None, halvings: int, low: float, high: float) -> float:
    """The highest rate at which enough are in time, between two."""
    for _ in range(halvings):
        rate = (low + high) / 2
        if _run(boxes, way, rate, requests).attained >= TARGET:
            low = rate
        else:
            high = rate
    return low


@cache
def _run(boxes: int, way: str, rate: float, requests: int | None) -> _Figures:
    served, trace = {**WAYS, **FETCHING}[way], mooncake(rate=rate, requests=requests)
    cluster = _cluster(boxes, served.fetch_gbps or LINKS_GBPS[0])
    model = model_shape(MODEL)
    service = Service(name=MODEL, model=model, workload=workload_of(trace), slo=SLO)
    pieces = MOONCAKE_BLOCK // ENGINE.block_tokens if served.cached else 0
    weight = RoutingSettings().prefix_weight if served.routed else 0.0
    settings = SimSettings(
        engine=SimEngineSettings(prefix_blocks=pieces),
        routing=RoutingSettings(
            policy=served.policy,
            prefix_weight=weight,
            prefix_fetch=RoutingSettings().prefix_fetch if served.fetch_gbps else 0.0,
        ),
        kv_wait_limit=WAIT_LIMIT,
        gateways=tuple(box.id for box in cluster.boxes[: served.gateways]),
        report_s=1.0 if served.gateways else 0.0,
    )
    result = simulate(cluster, [ServiceRun(service=service, plan=_plan(boxes), trace=trace)], settings=settings)
    outcomes = result.services[0].outcomes
    computed, asked = [replica.counts.prompt_tokens for replica in result.replicas], float(trace.prompt.sum())
    return _Figures(
        attained=attainment(outcomes, SLO),
        ttft_mean_s=float(outcomes.ttft_s.mean()),
        ttft_p90_s=float(np.percentile(outcomes.ttft_s, 90)),
        tpot_p90_s=float(np.percentile(outcomes.tpot_s, 90)),
        cached=sum(replica.counts.cached_tokens for replica in result.replicas) / asked,
        computed=max(computed) / float(np.mean(computed)),
        prefilled=sum(computed) / asked,
        received=sum(replica.counts.received_tokens for replica in result.replicas) / asked,
    )


def _cluster(boxes: int, gbps: float) -> Cluster:
    apart = ~np.eye(boxes, dtype=bool)
    return Cluster(
        boxes=tuple(Box(id=f"box-{number}", gpu=gpu_table().find(GPU), gpus=1) for number in range(boxes)),
        gbps=np.where(apart, gbps, 0.0),
        rtt_s=np.where(apart, 1e-3, 0.0),
        usd_per_gb=np.zeros((boxes, boxes)),
    )


def _plan(boxes: int) -> Plan:
    layers, names = model_shape(MODEL).layers, [f"box-{number}" for number in range(boxes)]
    replicas = tuple(
        Replica(id=name, phase=Phase.MIXED, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=layers),))
        for name in names
    )
    pairings = tuple(Pairing(prefill=name, decode=name, weight=1.0 / boxes) for name in names)
    return Plan(
        epoch=0, version=1, service=MODEL, replicas=replicas, pairings=pairings, codec="kv4", why=(),
        deadlines=Deadlines(ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s),
    )  # fmt: skip
