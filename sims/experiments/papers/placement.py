"""SeaLLM's placement and replacement beside dedicated GPUs, sharing without placement, and the default placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ....coordinator.placement.replay import PeriodReplay
from ....coordinator.placement.values import describe_groups
from ....coordinator.sharing.orders import DOUBLING_BUDGET, FCFS, ROUND_ROBIN
from ...placement.fleet import period_of
from ..page import Page, PageTable, ResultRow
from ..setting import Scope
from .sharing_runs import (
    DEDICATED,
    OTHER_SEEDS,
    SHIFT_RATE,
    SHIFT_S,
    SHIFTS,
    UNPLACED,
    ServedServices,
    SharingCase,
    SharingRateRow,
    serve_all,
    serve_shifts,
)
from .sharing_systems import (
    DEFAULT,
    FEW,
    GPUS,
    HISTORY_S,
    SEALLM,
    SERVICES,
    draw_traces,
    place_by,
    placement_problem,
)

SYSTEMS: Final[Mapping[str, str]] = {
    **{system: UNPLACED[system] for system in (DEDICATED, FCFS, ROUND_ROBIN, DOUBLING_BUDGET)},
    SEALLM: "SeaLLM's placement",
    DEFAULT: "default placement",
}
RATES: Final = (5.0, 20.0, 50.0, 80.0)
KNEE: Final = 50.0
MIDDLE: Final = 20.0
SLO_SCALE: Final = 5.0
NOISES: Final = (0.0, 4.0)
DENSITIES: Final[Mapping[float, int]] = {0.5: 64, 0.75: 48, 1.0: 32, 2.0: 16}
"""GPUs by density: figure 11."""

IN_A_ROW: Final = (1, 64)
"""Requests of a service: figure 12."""

MANY: Final = 16
"""Services."""

PAPER: Final[Mapping[str, tuple[float, float, float]]] = {
    DEDICATED: (10.38, 12.13, 1.82),
    FCFS: (9.52, 5.80, 3.64),
    ROUND_ROBIN: (13.60, 18.69, 2.11),
}
"""Up to how many times SeaLLM's normalized latency and 99th percentile are lower, and its attainment higher."""


class PlacedFactorRow(ResultRow, frozen=True):
    """By how much a placement is better than a system: the paper's best, and at each rate."""

    system: str
    than: str
    paper_up_to: float
    at_5: float
    at_20: float
    at_50: float
    at_80: float
    paper_p99_up_to: float
    p99_up_to: float
    paper_attainment_up_to: float
    attainment_up_to: float
    ttft_up_to: float


class PlacedSystemsRow(ResultRow, frozen=True):
    """One figure under each system, by something else."""

    of: str
    dedicated: float
    fcfs: float
    round_robin: float
    doubling_budget: float
    seallm: float
    default: float


class PlacedServiceRow(ResultRow, frozen=True):
    """A service at one rate: normalized latency and attainment under each system."""

    service: str
    dedicated: str
    fcfs: str
    round_robin: str
    doubling_budget: str
    seallm: str
    default: str


class PlacementRow(ResultRow, frozen=True):
    """What a box hosts: GPUs of each engine, and its services."""

    rate: float
    policy: str
    engines: str


class ReplacementRow(ResultRow, frozen=True):
    """While who is popular changes. `moves`: times that services moved, in each run; `engines`: that came by that, and
    `beside`: those of them loaded while others served on their GPUs. `replayed`, `waited`: of 1,000 requests, those
    that went on in another engine, and those that came when none had their service."""

    system: str
    normalized_latency: float
    of_services: float
    p99_s: float
    attainment: float
    least_attainment: float
    moves: float
    engines: float
    beside: float
    interval_s: str
    replayed: float
    waited: float


def placement(scope: Scope) -> Page:
    """All tables, with the scope's seeds and seconds; replacement with its first seed."""
    middle, knee = (SharingCase(rate, scope.seconds, scope.seeds) for rate in (MIDDLE, KNEE))
    served = {rate: serve_all(middle._replace(rate=rate), SYSTEMS) for rate in RATES}
    by_run = {run: serve_all(knee._replace(run=run), SYSTEMS) if run > 1 else served[KNEE] for run in IN_A_ROW}
    noisy = {noise: serve_all(middle._replace(noise=noise), SYSTEMS) if noise else served[MIDDLE] for noise in NOISES}
    dense = {
        f"{density:g}: {gpus} GPUs": serve_all(middle._replace(gpus=gpus), SYSTEMS) if gpus != GPUS else served[MIDDLE]
        for density, gpus in DENSITIES.items()
    }
    many = serve_all(middle._replace(services=MANY), SYSTEMS)
    return Page(
        name="placement",
        title="Several models on one network: placement and replacement (SeaLLM)",
        assumes=ASSUMES.format(seeds=len(scope.seeds), seconds=scope.seconds, history=HISTORY_S),
        tables=(
            PageTable(
                "Figures 6 and 7: over the rate",
                [
                    SharingRateRow.of(rate, SYSTEMS[system], one, SLO_SCALE)
                    for rate, systems in served.items()
                    for system, one in systems.items()
                ],
                "`of services`: the mean of the services' own normalized latencies. `least`: that of a service.",
            ),
            PageTable(
                "By how much placement is better",
                [row for system in (SEALLM, DEFAULT) for row in _factor_rows(system, served)],
                "Times lower normalized latency at each rate; 99th percentile, attainment and TTFT: at most.",
            ),
            PageTable(
                f"Each service at {KNEE:g} requests/s",
                [_service_row(number, served[KNEE]) for number in range(FEW)],
                "Normalized latency, and in brackets the attainment.",
            ),
            PageTable(
                "Where services are placed",
                [
                    row
                    for rate in (MIDDLE, KNEE)
                    for policy in (SEALLM, DEFAULT)
                    for row in _placement_rows(rate, policy)
                ],
                "By requests of the first seed. GPUs of an engine, and the services that it has.",
            ),
            PageTable(
                f"Figure 11: normalized latency by density, at {MIDDLE:g} requests/s",
                [_systems_row(of, one) for of, one in dense.items()],
                "The same requests on more GPUs or fewer.",
            ),
            PageTable(
                f"Figure 11: attainment by density, at {MIDDLE:g} requests/s",
                [_systems_row(of, one, lambda each: each.attainment(SLO_SCALE)) for of, one in dense.items()],
            ),
            PageTable(
                f"Figure 12: normalized latency by requests of a service in a row, at {KNEE:g} requests/s",
                [_systems_row(str(run), one) for run, one in by_run.items()],
                "The same requests at the same moments; only which of them comes when is changed.",
            ),
            PageTable(
                f"Figure 13: wrong profiles, normalized latency at {MIDDLE:g} requests/s",
                [_systems_row(f"{noise:g} x", one) for noise, one in noisy.items()],
                "Answers' lengths are off by a normal deviation of so many times their length, at least 1 token.",
            ),
            PageTable(
                f"{MANY} services at {MIDDLE:g} requests/s",
                [SharingRateRow.of(MIDDLE, SYSTEMS[system], one, SLO_SCALE) for system, one in many.items()],
                "Eight more with the same models and lengths, 2 GPUs for each where they are dedicated.",
            ),
            PageTable(
                f"Figure 8: replacement, at {SHIFT_RATE:g} requests/s",
                _replacement_rows(scope),
                f"Who is popular changes once, after {SHIFT_S:g} of {SHIFTS * SHIFT_S:g} s. Rates vary half as much.",
            ),
        ),
        remarks=REMARKS,
    )


def _placement_rows(rate: float, policy: str) -> list[PlacementRow]:
    problem = placement_problem(period_of(draw_traces(rate, HISTORY_S, OTHER_SEEDS)))
    groups = place_by(policy, PeriodReplay(problem))
    return [PlacementRow(rate=rate, policy=SYSTEMS[policy], engines=line) for line in describe_groups(problem, groups)]


def _replacement_rows(scope: Scope) -> list[ReplacementRow]:
    rows = []
    for policy, is_replaced in ((DEDICATED, False), (SEALLM, False), (SEALLM, True), (DEFAULT, False), (DEFAULT, True)):
        run = serve_shifts(policy, SHIFT_RATE, scope.seeds[:1], is_replaced=is_replaced)
        one, runs = run.served, len(run.counts)
        intervals = sorted(each for counts in run.counts for each in counts.interval_s)
        thousands = len(one.latencies()) / 1000.0
        rows.append(
            ReplacementRow(
                system=SYSTEMS[policy] + (", replaced" if is_replaced else ""),
                normalized_latency=one.normalized(),
                of_services=one.mean_of_services,
                p99_s=one.p99_s,
                attainment=one.attainment(SLO_SCALE),
                least_attainment=one.least_attainment(SLO_SCALE),
                moves=sum(counts.moves for counts in run.counts) / runs,
                engines=sum(counts.engines for counts in run.counts) / runs,
                beside=sum(counts.beside for counts in run.counts) / runs,
                interval_s=f"{intervals[0]:.0f} to {intervals[-1]:.0f}" if intervals else "",
                replayed=run.replayed / thousands,
                waited=run.waited / thousands,
            )
        )
    return rows


def _factor_rows(ours: str, served: Mapping[float, Mapping[str, ServedServices]]) -> list[PlacedFactorRow]:
    def factors(figure: Callable[[ServedServices], float], system: str) -> list[float]:
        return [figure(systems[system]) / figure(systems[ours]) for systems in served.values()]

    rows = []
    for system, (latency, p99, attainment) in PAPER.items():
        at = factors(ServedServices.normalized, system)
        rows.append(
            PlacedFactorRow(
                system=SYSTEMS[ours], than=SYSTEMS[system], paper_up_to=latency,
                at_5=at[0], at_20=at[1], at_50=at[2], at_80=at[3],
                paper_p99_up_to=p99, p99_up_to=max(factors(lambda one: one.p99_s, system)),
                paper_attainment_up_to=attainment,
                attainment_up_to=1.0 / min(factors(lambda one: one.attainment(SLO_SCALE), system)),
                ttft_up_to=max(factors(lambda one: one.ttft_s, system)),
            )
        )  # fmt: skip
    return rows


def _service_row(number: int, systems: Mapping[str, ServedServices]) -> PlacedServiceRow:
    cells = [
        f"{systems[system].normalized(number):.2f} ({systems[system].attainment(SLO_SCALE, number):.2f})"
        for system in SYSTEMS
    ]
    return PlacedServiceRow(
        **dict(zip(PlacedServiceRow.__struct_fields__, [SERVICES[number].name, *cells], strict=True))
    )


def _systems_row(
    of: str,
    systems: Mapping[str, ServedServices],
    figure: Callable[[ServedServices], float] = ServedServices.normalized,
) -> PlacedSystemsRow:
    found = [figure(systems[system]) for system in SYSTEMS]
    return PlacedSystemsRow(of=of, **dict(zip(PlacedSystemsRow.__struct_fields__[1:], found, strict=True)))


ASSUMES: Final = """SeaLLM (Zhao et al.) places services on GPU groups, of which two may share one; these step one at a
    time. Here its placement (section 4.1) and replacement (4.3), with its scheduler (4.2), beside what it is compared
    with. What decides is the network's own code (`coordinator/placement`, `coordinator/sharing`); engines and times
    are the simulator's, and nothing here was run on a GPU. Services, requests, arrivals, engines and measures are
    those of [two models on the same GPUs](sharing.md), which compares who steps: {seconds:g} s of arrivals,
    seeds: {seeds}.

    `dedicated`: every service has as many GPUs of its own (vLLM in the paper). `FCFS`, `round robin`, `doubling
    budget`: without placement; two services of like size share 8 GPUs, each pair fixed, and they differ in who steps.
    These four have the degree of tensor parallelism that serves each service or pair best at each rate and seed, chosen
    with hindsight.

    `SeaLLM's placement`: its algorithm 1. `default placement`: our search of engines within boxes, without
    [the plans that it is compared with](../placement.md#phases-and-pipelines). Both see {history:g} s of requests from
    before those that are served, with other bursts, and nothing else. Their shared engines use the doubling budget."""

REMARKS: Final = """\
- One seed: differences of a few percent say nothing.
- Placement is better than every way of sharing without it at every rate: than FCFS 1.4 to 3.1 times, than round robin
  1.1 to 1.7. The paper's best factors (9.5 and 13.6) are not reached: round robin leaves no quota unused here, and its
  KV costs nothing more.
- Attainment is 99.9 % at 80 requests/s with SeaLLM's placement and 98.7 % with the default one, every service above 98
  and 66 %; at 50 all are in time with both. The paper has more than 90 % always.
- Than dedicated GPUs it is better only from 50 requests/s on, by 4 to 6 %; below that it is up to 3 % worse. The
  paper's factor is 10.4. Equal parts suffice for these services up to 50 requests/s, and dedicated GPUs choose their
  degree of tensor parallelism with hindsight. What placement is for shows in the service that is overloaded there:
  talk-long at 50 requests/s has 3.3 dedicated and 1.2 placed, at 80 a sixth of it is in time dedicated.
- Both placements share hardly any engine, though they may: SeaLLM's tries with one service in an engine win. Two models
  that alternate have half of the steps each, and prompts beside decodes only an engine of one service computes.
- The default is not always better than SeaLLM's on requests that it has not seen: it fits the period before more
  closely (default at 80 requests/s: one service at 67 %). By that period it is never worse.
- Density: up to 2, 16 GPUs for 8 services, all are in time under both placements. 16 services: as good as dedicated
  GPUs, which are then what SeaLLM's comes to.
- Skewness: 64 requests in a row make placement 1.5 to 1.6 times as slow, and slower than fixed pairs by the doubling
  budget (1.46): who is busy then changes within seconds, and pairs can use each other's GPUs. The paper's curve is
  flat.
- Wrong profiles: placement's lead over sharing stays with answers off by four times their length, 1.5 times.
- Replacement: who is popular changes once. Without it placement is worse than equal parts, by 3 times; with it
  SeaLLM's is 2.0 times better than without (the paper: up to 2.4), the default 1.1 times. Equal parts, which suit the
  first half as well as the second one, stay the best. No request failed, and none came when no engine had its service.
- Equation 8 keeps the interval at its lower bound: rates that change by chance every 30 s are never within 10 % of what
  the last interval led to expect. In a trial with rates that vary
  as in the tables above, at 80 requests/s and with 120 s looked back, replacing was worse than none (normalized latency
  6.5, not 2.2): it followed chance.
"""
