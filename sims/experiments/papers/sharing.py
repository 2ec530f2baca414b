"""SeaLLM's comparison of who steps in an engine that services share: figures 6, 7, 10 and 13, in this simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from ....coordinator.placement.replay import PeriodReplay
from ....coordinator.placement.values import describe_groups
from ....coordinator.sharing.orders import DOUBLING_BUDGET, FCFS, MLFQ, ROUND_ROBIN
from ...placement.fleet import period_of
from ..page import Curves, Page, PageTable, Picture, ResultRow
from ..setting import Scope
from .sharing_runs import (
    DEDICATED,
    MAIN_SYSTEMS,
    OTHER_SEEDS,
    SHIFT_RATE,
    SHIFT_S,
    SHIFTS,
    SYSTEMS,
    ServedServices,
    SharingCase,
    serve_all,
    serve_shifts,
)
from .sharing_systems import (
    DEFAULT,
    FEW,
    GPUS,
    GROUPS,
    HISTORY_S,
    SEALLM,
    SERVICES,
    SKEW,
    draw_traces,
    lone_latencies,
    place_by,
    placement_problem,
    traffic_shares,
)

RATES: Final = (5.0, 10.0, 20.0, 35.0, 50.0, 80.0)
KNEE: Final = 50.0
SLO_SCALE: Final = 5.0
SCALES: Final = (2.0, 3.0, 5.0, 10.0)
NOISES: Final = (0.0, 1.0, 4.0)
MIDDLE: Final = 20.0
SKEWS: Final = (1.0, 3.0, 9.0)
DENSITIES: Final[Mapping[float, int]] = {0.5: 64, 0.75: 48, 1.0: 32, 2.0: 16}
"""GPUs by density: figure 11."""

IN_A_ROW: Final = (1, 8, 64)
"""Requests of a service: figure 12."""

MANY: Final = 16
"""Services."""


PAPER: Final[Mapping[str, tuple[float, float | None, float]]] = {
    DEDICATED: (10.38, 12.13, 1.82),
    FCFS: (9.52, 5.80, 3.64),
    ROUND_ROBIN: (13.60, 18.69, 2.11),
    MLFQ: (4.17, None, 1.37),
}
"""Up to how many times SeaLLM's normalized latency and 99th percentile are lower, and its attainment higher. Of the
MLFQ, with placement and replacement as in SeaLLM (its figure 8, where FCFS is in the same figures)."""


class ServiceRow(ResultRow, frozen=True):
    """A service; `alone`: seconds of its requests without others, on the fewest GPUs with room for them."""

    service: str
    model: str
    shares_gpus_with: str
    prompt_tokens: float
    output_tokens: float
    alone_s: float
    of_all_requests_pct: float


class SharingRateRow(ResultRow, frozen=True):
    """Figures 6 and 7. `of services`: the mean of the services' own means. `least`: of the services."""

    rate: float
    system: str
    normalized_latency: float
    of_services: float
    p99_s: float
    attainment: float
    least_attainment: float
    ttft_s: float
    tpot_ms: float


class FactorRow(ResultRow, frozen=True):
    """By how much a system is better at most, beside SeaLLM's in the paper."""

    system: str
    than: str
    paper_latency_up_to: float
    latency_up_to: float
    of_services_up_to: float
    paper_p99_up_to: float | None
    p99_up_to: float
    paper_attainment_up_to: float
    attainment_up_to: float
    ttft_up_to: float


class ByServiceRow(ResultRow, frozen=True):
    """A service at one rate: normalized latency and attainment under each system."""

    service: str
    dedicated: str
    fcfs: str
    round_robin: str
    mlfq: str
    doubling_budget: str
    as_printed: str
    seallm: str
    default: str


class SystemsRow(ResultRow, frozen=True):
    """One figure under each system, by something else."""

    of: str
    dedicated: float
    fcfs: float
    round_robin: float
    mlfq: float | None
    doubling_budget: float
    as_printed: float | None
    seallm: float
    default: float


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


def sharing(scope: Scope) -> Page:
    """All tables, with the scope's seeds and seconds."""
    middle, knee = (SharingCase(rate, scope.seconds, scope.seeds) for rate in (MIDDLE, KNEE))
    served = {rate: serve_all(middle._replace(rate=rate)) for rate in RATES}
    rows = [_rate_row(rate, system, one) for rate, systems in served.items() for system, one in systems.items()]
    by_noise = {noise: serve_all(middle._replace(noise=noise)) if noise else served[MIDDLE] for noise in NOISES}
    by_skew = {skew: serve_all(middle._replace(skew=skew)) if skew != SKEW else served[MIDDLE] for skew in SKEWS}
    main = {rate: {system: served[rate][system] for system in MAIN_SYSTEMS} for rate in (MIDDLE, KNEE)}
    by_run = {run: serve_all(knee._replace(run=run), MAIN_SYSTEMS) if run > 1 else main[KNEE] for run in IN_A_ROW}
    dense = {
        density: serve_all(middle._replace(gpus=gpus), MAIN_SYSTEMS) if gpus != GPUS else main[MIDDLE]
        for density, gpus in DENSITIES.items()
    }
    many = serve_all(middle._replace(services=MANY), MAIN_SYSTEMS)
    return Page(
        name="sharing",
        title="Several models on the same GPUs (SeaLLM)",
        assumes=ASSUMES.format(seeds=len(scope.seeds), seconds=scope.seconds, history=HISTORY_S),
        tables=(
            PageTable("The services", _service_rows()),
            PageTable(
                "Figures 6 and 7: over the rate",
                rows,
                "`of services`: the mean of the services' own normalized latencies. `least`: that of a service.",
            ),
            PageTable(
                "By how much it is better",
                [row for system in (DOUBLING_BUDGET, SEALLM, DEFAULT) for row in _factor_rows(system, served)],
                "At most, over these rates: times lower (attainment: higher). `of services` as above. The paper's are "
                "of its placement and its doubling budget together.",
            ),
            PageTable(
                f"Each service at {KNEE:g} requests/s",
                [_by_service_row(number, served[KNEE]) for number in range(FEW)],
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
                f"Figure 10: attainment by SLO scale, at {KNEE:g} requests/s",
                [_systems_row(f"{scale:g} x", served[KNEE], _attainment_at(scale)) for scale in SCALES],
            ),
            PageTable(
                f"Figure 11: normalized latency by density, at {MIDDLE:g} requests/s",
                [_systems_row(f"{density:g}: {DENSITIES[density]} GPUs", one) for density, one in dense.items()],
                "The same requests on more GPUs or fewer.",
            ),
            PageTable(
                f"Figure 11: attainment by density, at {MIDDLE:g} requests/s",
                [
                    _systems_row(f"{density:g}: {DENSITIES[density]} GPUs", one, _attainment_at(SLO_SCALE))
                    for density, one in dense.items()
                ],
            ),
            PageTable(
                f"Figure 12: normalized latency by requests of a service in a row, at {KNEE:g} requests/s",
                [_systems_row(str(run), one) for run, one in by_run.items()],
                "The same requests at the same moments; only which of them comes when is changed.",
            ),
            PageTable(
                f"Popularity: normalized latency at {MIDDLE:g} requests/s",
                [_systems_row(f"{skew:g}:1", one) for skew, one in by_skew.items()],
                "GPU time that the popular service of each group asks for, over that of the other.",
            ),
            PageTable(
                f"Figure 13: wrong profiles, normalized latency at {MIDDLE:g} requests/s",
                [_systems_row(f"{noise:g} x", one) for noise, one in by_noise.items()],
                "Answers' lengths are off by a normal deviation of so many times their length, at least 1 token.",
            ),
            PageTable(
                f"{MANY} services at {MIDDLE:g} requests/s",
                [_rate_row(MIDDLE, system, one) for system, one in many.items()],
                "Eight more with the same models and lengths, 2 GPUs for each where they are dedicated.",
            ),
            PageTable(
                f"Figure 8: replacement, at {SHIFT_RATE:g} requests/s",
                _replacement_rows(scope),
                f"After {SHIFT_S:g} of {SHIFTS * SHIFT_S:g} s the other service of each pair becomes the popular one. "
                "Rates vary half as much as above.",
            ),
        ),
        remarks=REMARKS,
        pictures=(_draw_rates(rows),),
    )


def _service_rows() -> list[ServiceRow]:
    partner = {
        one: two for group in GROUPS[: FEW // 2] for one, two in ((group.one, group.two), (group.two, group.one))
    }
    rows = []
    for number, service in enumerate(SERVICES[:FEW]):
        prompts, outputs, alone = lone_latencies(service)
        rows.append(
            ServiceRow(
                service=service.name,
                model=service.model,
                shares_gpus_with=SERVICES[partner[number]].name,
                prompt_tokens=float(prompts.mean()),
                output_tokens=float(outputs.mean()),
                alone_s=float(alone.mean()),
                of_all_requests_pct=100.0 * traffic_shares()[number],
            )
        )
    return rows


def _of_services(one: ServedServices) -> float:
    return float(np.mean([one.normalized(number) for number in one.numbers]))


def _least_attainment(one: ServedServices) -> float:
    return min(one.attainment(SLO_SCALE, number) for number in one.numbers)


def _p99_s(one: ServedServices) -> float:
    return float(np.quantile(one.latencies(), 0.99))


def _rate_row(rate: float, system: str, one: ServedServices) -> SharingRateRow:
    return SharingRateRow(
        rate=rate,
        system=SYSTEMS[system],
        normalized_latency=one.normalized(),
        of_services=_of_services(one),
        p99_s=_p99_s(one),
        attainment=one.attainment(SLO_SCALE),
        least_attainment=_least_attainment(one),
        ttft_s=one.ttft_s,
        tpot_ms=one.tpot_ms,
    )


def _placement_rows(rate: float, policy: str) -> list[PlacementRow]:
    problem = placement_problem(period_of(draw_traces(rate, HISTORY_S, OTHER_SEEDS)))
    groups = place_by(policy, PeriodReplay(problem))
    return [PlacementRow(rate=rate, policy=SYSTEMS[policy], engines=line) for line in describe_groups(problem, groups)]


def _replacement_rows(scope: Scope) -> list[ReplacementRow]:
    rows = []
    for policy, is_replaced in ((DEDICATED, False), (SEALLM, False), (SEALLM, True), (DEFAULT, False), (DEFAULT, True)):
        run = serve_shifts(policy, SHIFT_RATE, scope.seeds, is_replaced=is_replaced)
        one, runs = run.served, len(run.counts)
        intervals = sorted(each for counts in run.counts for each in counts.interval_s)
        thousands = len(one.latencies()) / 1000.0
        rows.append(
            ReplacementRow(
                system=SYSTEMS[policy] + (", replaced" if is_replaced else ""),
                normalized_latency=one.normalized(),
                of_services=_of_services(one),
                p99_s=_p99_s(one),
                attainment=one.attainment(SLO_SCALE),
                least_attainment=_least_attainment(one),
                moves=sum(counts.moves for counts in run.counts) / runs,
                engines=sum(counts.engines for counts in run.counts) / runs,
                beside=sum(counts.beside for counts in run.counts) / runs,
                interval_s=f"{intervals[0]:.0f} to {intervals[-1]:.0f}" if intervals else "",
                replayed=run.replayed / thousands,
                waited=run.waited / thousands,
            )
        )
    return rows


def _factor_rows(ours: str, served: Mapping[float, Mapping[str, ServedServices]]) -> list[FactorRow]:
    def most(figure: Callable[[ServedServices], float], system: str, *, lower: bool = True) -> float:
        pairs = [(figure(systems[system]), figure(systems[ours])) for systems in served.values()]
        return max(other / mine if lower else mine / other for other, mine in pairs)

    return [
        FactorRow(
            system=SYSTEMS[ours],
            than=SYSTEMS[system],
            paper_latency_up_to=latency,
            latency_up_to=most(ServedServices.normalized, system),
            of_services_up_to=most(_of_services, system),
            paper_p99_up_to=p99,
            p99_up_to=most(_p99_s, system),
            paper_attainment_up_to=attainment,
            attainment_up_to=most(lambda one: one.attainment(SLO_SCALE), system, lower=False),
            ttft_up_to=most(lambda one: one.ttft_s, system),
        )
        for system, (latency, p99, attainment) in PAPER.items()
    ]


def _by_service_row(number: int, systems: Mapping[str, ServedServices]) -> ByServiceRow:
    cells = [
        f"{systems[system].normalized(number):.2f} ({systems[system].attainment(SLO_SCALE, number):.2f})"
        for system in SYSTEMS
    ]
    return ByServiceRow(**dict(zip(ByServiceRow.__struct_fields__, [SERVICES[number].name, *cells], strict=True)))


def _attainment_at(scale: float) -> Callable[[ServedServices], float]:
    return lambda one: one.attainment(scale)


def _systems_row(
    of: str,
    systems: Mapping[str, ServedServices],
    figure: Callable[[ServedServices], float] = ServedServices.normalized,
) -> SystemsRow:
    found = [figure(systems[system]) if system in systems else None for system in SYSTEMS]
    return SystemsRow(of=of, **dict(zip(SystemsRow.__struct_fields__[1:], found, strict=True)))  # type: ignore[arg-type]


def _draw_rates(rows: Sequence[SharingRateRow]) -> Picture:
    def curves(y: str, field: str, *, log_y: bool) -> Curves:
        lines = {
            name: (RATES, [float(getattr(row, field)) for row in rows if row.system == name])
            for name in SYSTEMS.values()
        }
        return Curves("requests per second", y, lines, log_y=log_y)

    return Picture(
        "sharing",
        "Normalized latency, 99th percentile, attainment and time to the first token over the rate, by system",
        (
            (curves("normalized latency", "normalized_latency", log_y=False), curves("P99, s", "p99_s", log_y=True)),
            (curves("attainment", "attainment", log_y=False), curves("TTFT, s", "ttft_s", log_y=True)),
        ),
    )


ASSUMES: Final = """SeaLLM (Zhao et al.) places services on GPU groups, of which two may share one; these step one at a
    time. Here its scheduler, the doubling budget of its section 4.2, its placement (4.1) and its replacement (4.3),
    beside what it is compared with, on the same 32 A100 (80 GB; the paper's A800 computes as much), 8 in a box. What
    decides is the network's own code (`coordinator/sharing`, `coordinator/placement`), engines and times are the
    simulator's; nothing here was run on a GPU.

    - `dedicated`: every service has as many GPUs of its own (vLLM in the paper).
    - `FCFS`, `round robin`, `skip-join MLFQ`, `doubling budget`, `as printed`: without placement. Two services of like
      size share 8 GPUs, each pair fixed; they differ in who steps.
    - `SeaLLM's placement`: its algorithm 1. `default placement`: our search. Both place by {history:g} s of requests
      that came before those that are served, with other bursts; shared engines use the doubling budget.

    The paper's arrivals (Azure functions) and its requests are not at hand. Arrivals are Poisson with a rate
    that changes every 30 s (gamma-distributed, its deviation as large as its mean), for {seconds:g} s, {seeds}
    seeds. Lengths are three with the means of its table 1 (log-normal, deviation 0.7 times the mean: an
    assumption) and five k-means clusters of Azure's 2023 traces; models are dealt out by hand. Of two services
    on the same GPUs the popular one asks for 9 times the GPU time of the other, and all four pairs for as much.

    Dedicated services run vLLM's rules of today: prompts in chunks beside decodes. Shared engines prefill or
    decode one service in a step, of at most 2,048 tokens of prompts and 256 requests; changing models costs
    nothing, KV memory is one budget of bytes, and KV that has to go is computed again. Every system without
    placement has the degree of tensor parallelism that serves it best at each rate and seed, chosen with
    hindsight. MuxServe's fixed parts of a GPU are
    quotas of time here (100 ms for both services), which a service that is idle leaves to the other.

    Normalized latency is latency over the mean execution time of the service's requests alone, on the fewest GPUs that
    hold them; a request is in time within 5 times its own."""

REMARKS: Final = """\
- Of those that share, the doubling budget has the lowest normalized latency at every rate, as in the paper: 0.87 to
  1.60, where round robin has 0.92 to 1.61, the MLFQ 0.89 to 1.62 and FCFS 1.03 to 2.72. It stays below 3 and
  attainment above 90 %, as there. It is up to 1.75 times lower than FCFS's, 1.14 than round robin's, 1.12 than the
  MLFQ's; in the mean of the services' own means 2.04, 1.21 and 1.62. Little of that is left at 50 requests/s.
- It is not lower than with dedicated GPUs: 0.7 % higher at 5 requests/s, 23 % at 50; the paper's is up to 10.4 times
  lower. Decode steps here are bound by reading weights and take nearly as long for one request as for sixteen: two
  models that alternate have half of the steps each. Dedicated services compute prompts beside decodes, which vLLM did
  not do by default then, and have the degree of tensor parallelism that suits each rate.
- What sharing is for shows where a service's own GPUs are overloaded: talk-long at 50 requests/s has 4.13 dedicated
  and 2.57 shared. The paper's factors are of rates at which that is so for many services; its placement, which is not
  in here, chooses who shares by it.
- More uneven traffic makes sharing better, as in the paper's reasoning: 20 % above dedicated GPUs with equally popular
  services, 10 % with 9:1.
- The 99th percentile is higher than FCFS's from 10 requests/s on, by up to 1.7 times (the paper's is up to 5.8 times
  lower). It is that of long requests, which the budget puts behind; FCFS puts nobody behind, and here lets the
  prompts of the service that has the turn join its batch.
- Attainment at 50 requests/s is 0.96, less than round robin's 0.99: chat pays for code, whose requests take a seventh
  of the time. With FCFS code pays (0.44).
- TTFT is up to 6.2 times lower than FCFS's; the paper's 52 is not reached. Round robin's is the lowest here from 10
  requests/s on, and the worst in the paper, which names MuxServe's fixed parts of a GPU as a cause: they are not
  modelled.
- As printed the algorithm serves a service batch after batch: a new prompt has a full budget, and all that decode have
  less. Normalized latency is 1.06 to 4.08, the highest from 20 requests/s on, and TTFT 0.7 to 12 s. That cannot be
  what the paper measured. `doubling budget` puts prompts before the decodes of their own service.
- Wrong profiles: it stays the lowest of those that share, with answers off by four times their length, too (figure
  13).
"""
