"""SeaLLM's comparison of who steps in an engine that services share: figures 6, 7, 10 and 13, in this simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ....coordinator.sharing.orders import DOUBLING_BUDGET, FCFS, MLFQ, ROUND_ROBIN
from ..page import Curves, Page, PageTable, Picture, ResultRow
from ..setting import Scope
from .sharing_runs import DEDICATED, UNPLACED, ServedServices, SharingCase, SharingRateRow, serve_all
from .sharing_systems import FEW, GROUPS, SERVICES, SKEW, lone_latencies, traffic_shares

SYSTEMS: Final = UNPLACED
RATES: Final = (5.0, 10.0, 20.0, 35.0, 50.0)
KNEE: Final = 50.0
SLO_SCALE: Final = 5.0
SCALES: Final = (2.0, 3.0, 5.0, 10.0)
NOISES: Final = (0.0, 1.0, 4.0)
MIDDLE: Final = 20.0
SKEWS: Final = (1.0, 3.0, 9.0)

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


class FactorRow(ResultRow, frozen=True):
    """By how much the doubling budget is better at most, beside the paper's."""

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


class SystemsRow(ResultRow, frozen=True):
    """One figure under each system, by something else."""

    of: str
    dedicated: float
    fcfs: float
    round_robin: float
    mlfq: float
    doubling_budget: float
    as_printed: float


def sharing(scope: Scope) -> Page:
    """All tables, with the scope's seeds and seconds."""
    served = {rate: _serve_all(scope, rate) for rate in RATES}
    rows = [
        SharingRateRow.of(rate, SYSTEMS[system], one, SLO_SCALE)
        for rate, systems in served.items()
        for system, one in systems.items()
    ]
    return Page(
        name="sharing",
        title="Two models on the same GPUs, one step at a time (SeaLLM)",
        assumes=ASSUMES.format(seeds=len(scope.seeds), seconds=scope.seconds),
        tables=(
            PageTable("The services", _service_rows()),
            PageTable(
                "Figures 6 and 7: over the rate",
                rows,
                "`of services`: the mean of the services' own normalized latencies. `least`: that of a service.",
            ),
            PageTable(
                "By how much the doubling budget is better",
                _factor_rows(served),
                "At most, over these rates: times lower (attainment: higher). `of services` as above.",
            ),
            PageTable(
                f"Each service at {KNEE:g} requests/s",
                [_by_service_row(number, served[KNEE]) for number in range(FEW)],
                "Normalized latency, and in brackets the attainment.",
            ),
            PageTable(
                f"Figure 10: attainment by SLO scale, at {KNEE:g} requests/s",
                [_systems_row(f"{scale:g} x", served[KNEE], _attainment_at(scale)) for scale in SCALES],
            ),
            PageTable(
                f"Popularity: normalized latency at {MIDDLE:g} requests/s",
                [
                    _systems_row(
                        f"{skew:g}:1", served[MIDDLE] if skew == SKEW else _serve_all(scope, MIDDLE, skew=skew)
                    )
                    for skew in SKEWS
                ],
                "GPU time that the popular service of each group asks for, over that of the other.",
            ),
            PageTable(
                f"Figure 13: wrong profiles, normalized latency at {MIDDLE:g} requests/s",
                [
                    _systems_row(f"{noise:g} x", _serve_all(scope, MIDDLE, noise=noise) if noise else served[MIDDLE])
                    for noise in NOISES
                ],
                "Answers' lengths are off by a normal deviation of so many times their length, at least 1 token.",
            ),
        ),
        remarks=REMARKS,
        pictures=(_draw_rates(rows),),
    )


def _serve_all(scope: Scope, rate: float, *, noise: float = 0.0, skew: float = SKEW) -> dict[str, ServedServices]:
    """Every system, with the same requests."""
    return serve_all(SharingCase(rate, scope.seconds, scope.seeds, noise=noise, skew=skew), SYSTEMS)


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


def _factor_rows(served: Mapping[float, Mapping[str, ServedServices]]) -> list[FactorRow]:
    def most(figure: Callable[[ServedServices], float], system: str, *, lower: bool = True) -> float:
        pairs = [(figure(systems[system]), figure(systems[DOUBLING_BUDGET])) for systems in served.values()]
        return max(other / ours if lower else ours / other for other, ours in pairs)

    return [
        FactorRow(
            than=SYSTEMS[system],
            paper_latency_up_to=latency,
            latency_up_to=most(ServedServices.normalized, system),
            of_services_up_to=most(lambda one: one.mean_of_services, system),
            paper_p99_up_to=p99,
            p99_up_to=most(lambda one: one.p99_s, system),
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
    found = [figure(systems[system]) for system in SYSTEMS]
    return SystemsRow(of=of, **dict(zip(SystemsRow.__struct_fields__[1:], found, strict=True)))


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


ASSUMES: Final = """SeaLLM (Zhao et al.) shares each GPU group between two models that step one at a time. Here its
    scheduler, the doubling budget of its section 4.2, beside those that it is compared with, on the same 32 A100 (80
    GB; the paper's A800 computes as much). The scheduling code is the network's own (`coordinator/sharing`),
    engines and times are the simulator's; nothing here was run on a GPU. Placement and replacement, the paper's
    other two parts, are left out: two services of like size share 8 GPUs, each pair fixed; dedicated services
    have 4 GPUs each.

    The paper's arrivals (Azure functions) and its requests are not at hand. Arrivals are Poisson with a rate
    that changes every 30 s (gamma-distributed, its deviation as large as its mean), for {seconds:g} s, {seeds}
    seeds. Lengths are three with the means of its table 1 (log-normal, deviation 0.7 times the mean: an
    assumption) and five k-means clusters of Azure's 2023 traces; models are dealt out by hand. Of two services
    on the same GPUs the popular one asks for 9 times the GPU time of the other, and all four pairs for as much.

    Dedicated services run vLLM's rules of today: prompts in chunks beside decodes. Shared engines prefill or
    decode one service in a step, of at most 2,048 tokens of prompts and 256 requests; changing models costs
    nothing, KV memory is one budget of bytes, and KV that has to go is computed again. Every system has the
    degree of tensor parallelism that serves it best at each rate and seed. MuxServe's fixed parts of a GPU are
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
