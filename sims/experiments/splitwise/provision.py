"""Splitwise's provisioned clusters: figures 12, 17 and 18, and figures 13 and 14."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Final

from ...splitwise.cluster_trials import ClusterDesign, ClusterTrials, DrawnTraces
from ...splitwise.machine_types import CostRatio, MachineCatalogue
from ...splitwise.metrics import SLO
from ...splitwise.provisioning import (
    PAPER_DESIGNS,
    ProvisionedCluster,
    ProvisionGoal,
    ProvisionSearch,
    ProvisionWish,
    parse_design,
)
from ...splitwise.step_lookup import Mode
from ...splitwise.traces import azure_lengths
from ..page import Curves, Page, PageTable, Picture, ResultRow
from ..setting import Scope
from .kv_second_token import second_token_rows, visible_picture, visible_rows
from .lone_machines import lone_rows

BLOOM: Final = "bloom-176b"
LLAMA: Final = "llama2-70b"
MODES: Final[tuple[Mode, ...]] = ("released", "measured")
SECONDS: Final = 60.0
FIGURE_12_SECONDS: Final = 120.0
"""The paper's two minutes: there a machine more or less decides. Other searches of clusters take an hour as it is."""
STEP: Final = 10.0
"""Requests/s, the grid of the rates, as fine as the public simulator's figures are."""

BASELINE: Final = 40
"""DGX-H100 machines whose power, cost or throughput the clusters of figures 15 to 18 share."""

CODING_RATE: Final = 70.0
SPACE_PROMPT: Final = range(22, 35)
MOST_TOKEN: Final = 10
"""Machines for prompts and for tokens of the part of figure 12 where clusters begin to meet the SLOs."""

PAPER_STAR: Final = (27, 3)
POINTS: Final = ("least cost", "the paper's")
KV_PROMPTS: Final = 100

PAPER_POWER: Final[Mapping[str, tuple[str, str]]] = {
    "baseA": ("70", ""),
    "baseH": ("40", ""),
    "AA": ("45P, 25T", "2.15 x baseA"),
    "HH": ("25P, 15T", ""),
    "HHcap": ("25P, 21T", ""),
    "HA": ("25P, 26T", "1.18 x baseH, cost -10 %"),
}


class Wanted(StrEnum):
    """What a cluster is sized for."""

    MOST_AT_POWER = "throughput at the same power"
    MOST_AT_COST = "throughput at the same cost"
    LEAST_POWER = "least power"
    LEAST_COST = "least cost"


PAPER_ROWS: Final[Mapping[Wanted, Mapping[str, str]]] = {
    Wanted.MOST_AT_POWER: {name: ", ".join(filter(None, each)) for name, each in PAPER_POWER.items()},
    Wanted.MOST_AT_COST: {"AA": "rate 1.4, power +25 %, 2 x the machines"},
    Wanted.LEAST_POWER: {"HHcap": "power -25 %, same cost and machines"},
    Wanted.LEAST_COST: {"AA": "cost -25 %"},
}


class SizedRow(ResultRow, frozen=True):
    """The cheapest cluster for 70 coding requests/s, by model, times and price."""

    model: str
    times: str
    prices: str
    machines: str
    usd_per_h: float
    paper: str


class DesignSpaceRow(ResultRow, frozen=True):
    """With so many prompt machines, the fewest token machines with which each metric meets its three SLOs, and all do;
    None: more than MOST_TOKEN. `usd_per_h`: of the cluster that meets all."""

    times: str
    prompt_machines: int
    TTFT: int | None
    TBT: int | None
    E2E: int | None
    all_nine: int | None
    usd_per_h: float | None


class ProvisionRow(ResultRow, frozen=True):
    """A design's best cluster. Ratios: each figure over that of Baseline-H100's."""

    times: str
    design: str
    machines: str
    requests_s: float
    usd_per_h: float
    kw: float
    rate_ratio: float
    cost_ratio: float
    power_ratio: float
    machines_ratio: float
    paper: str


def provision(scope: Scope) -> Page:
    """The page."""
    seconds, long_s = (min(most, scope.seconds) for most in (SECONDS, FIGURE_12_SECONDS))
    visible = visible_rows()
    space = [row for mode in MODES for row in design_space(mode, long_s)]
    return Page(
        name="provision",
        title="Splitwise's clusters, provisioned again",
        assumes=(
            f"Splitwise (ISCA 2024) sections IV-D and V. Azure's traces, Poisson arrivals for {seconds:g} s (figure "
            f"12: {long_s:g} s), seed 0, lengths drawn independently, all nine SLOs of Table VI, rates in steps of 10 "
            "requests/s. Machines and "
            "policies as in the public simulator, whose results ours reproduces to the printed digits. `released`: "
            "its step times; `measured`: decode steps by the measured batch axis, KV of its real size. BLOOM-176B "
            "where no other model is named.\n\nCosts by the paper's Table I ($17.6 and $38 an hour), powers by the "
            "cards' (eight of 400 or 700 W, times 0.7 where capped). No KV is reused between requests."
        ),
        tables=(
            PageTable(
                "Table IV",
                list(lone_rows()),
                "Llama2-70B, a request alone on a machine, at the median; ratios: H100 over A100.",
            ),
            PageTable("Figure 12", _sized(long_s), "Splitwise-HH, coding, 70 requests/s, the least cost."),
            PageTable(
                "Figure 12, the space", space,
                "BLOOM-176B: the fewest token machines beside so many prompt machines with which SLOs are met\n(up to "
                f"{MOST_TOKEN}); dollars of the paper's Table I.",
            ),
            PageTable(
                "Figures 15 and 17a",
                _rows(seconds, Wanted.MOST_AT_POWER),
                "Conversation, the power of 40 DGX-H100: the highest rate.",
            ),
            PageTable(
                "Figure 17b",
                _rows(seconds, Wanted.MOST_AT_COST),
                "Conversation, the cost of 40 DGX-H100: the highest rate.",
            ),
            PageTable(
                "Figure 18a",
                _rows(seconds, Wanted.LEAST_POWER),
                "Conversation, the rate of 40 DGX-H100: the least power.",
            ),
            PageTable(
                "Figure 18b",
                _rows(seconds, Wanted.LEAST_COST),
                "Conversation, the rate of 40 DGX-H100: the least cost.",
            ),
            PageTable(
                "Figure 13",
                visible,
                "BLOOM-176B, eight cards of 400 (H100) or 200 Gb/s (A100): KV under way when a prefill ends.",
            ),
            PageTable(
                "Figure 14",
                second_token_rows(KV_PROMPTS),
                "Coding prompts one at a time, one DGX-H100 to another, in ms on average.",
            ),
        ),
        pictures=(_space_picture(space), visible_picture(visible)),
        remarks=REMARKS,
    )  # fmt: skip


@cache
def splitwise_trials(model: str, workload: str, mode: Mode, seconds: float) -> tuple[MachineCatalogue, ClusterTrials]:
    traces = DrawnTraces(azure_lengths(workload), source=f"Azure 2023 {workload}", seconds=seconds, seed=0)
    catalogue = MachineCatalogue(model, traces.at(STEP), mode=mode)
    return catalogue, ClusterTrials(traces, catalogue, SLO)


def _sized(seconds: float) -> list[SizedRow]:
    rows = []
    for model in (BLOOM, LLAMA):
        for mode in MODES:
            for ratio in CostRatio:
                _, trials = splitwise_trials(model, "code", mode, seconds)
                catalogue = MachineCatalogue(model, trials.traces.at(CODING_RATE), mode=mode, cost_ratio=ratio)
                design = parse_design("HH", catalogue)
                answer = ProvisionSearch(trials, ProvisionWish(goal=ProvisionGoal.COST, rate=CODING_RATE)).run(design)
                rows.append(
                    SizedRow(
                        model=model,
                        times=mode,
                        prices=ratio.value,
                        machines=_machines(answer.found),
                        usd_per_h=0.0 if answer.found is None else answer.found.usd_per_h,
                        paper="27P, 3T",
                    )
                )
    return rows


def design_space(mode: Mode, seconds: float) -> list[DesignSpaceRow]:
    """Of Splitwise-HH for 70 coding requests/s. Every cluster is simulated to its end: none is taken to be as good as
    its neighbours."""
    catalogue, trials = splitwise_trials(BLOOM, "code", mode, seconds)
    design, rows = parse_design("HH", catalogue), []
    for prompt in SPACE_PROMPT:
        missed = {
            token: trials.try_cluster(design, prompt, token, CODING_RATE, to_the_end=True).missed
            for token in range(1, MOST_TOKEN + 1)
        }

        def fewest(metric: str, missed: Mapping[int, Sequence[str]] = missed) -> int | None:
            met = (token for token, slos in missed.items() if not any(each.startswith(metric) for each in slos))
            return next(met, None)

        every = fewest("")
        rows.append(
            DesignSpaceRow(
                times=mode, prompt_machines=prompt, TTFT=fewest("ttft"), TBT=fewest("tbt"), E2E=fewest("e2e"),
                all_nine=every, usd_per_h=None if every is None else design.usd_per_h(prompt, every),
            )
        )  # fmt: skip
    return rows


def _space_picture(rows: Sequence[DesignSpaceRow]) -> Picture:
    """Figure 12: what lies above a line meets the SLOs of its metric."""
    panels = []
    for mode in MODES:
        lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for field in ("TTFT", "TBT", "E2E"):
            found = [row for row in rows if row.times == mode and getattr(row, field) is not None]
            lines[field] = [row.prompt_machines for row in found], [getattr(row, field) for row in found]
        met = [row for row in rows if row.times == mode and row.usd_per_h is not None]
        least = [row for row in met if row.usd_per_h == min(each.usd_per_h or 0.0 for each in met)]
        lines[POINTS[0]] = [row.prompt_machines for row in least], [row.all_nine or 0 for row in least]
        lines[POINTS[1]] = [PAPER_STAR[0]], [PAPER_STAR[1]]
        panels.append(Curves(x=f"prompt machines, {mode}", y="token machines", lines=lines, unjoined=POINTS))
    about = "Figure 12: the fewest token machines over prompt machines with which each metric meets its SLOs"
    return Picture("provision-space", about, (tuple(panels),))


def _rows(seconds: float, what: Wanted) -> list[ProvisionRow]:
    return [row for mode in MODES for row in _rows_of(mode, seconds, what)]


def _rows_of(mode: Mode, seconds: float, what: Wanted) -> list[ProvisionRow]:
    found = {name: cluster for name, cluster in _clusters(mode, seconds, what).items() if cluster is not None}
    base = found["baseH"]
    return [
        ProvisionRow(
            times=mode,
            design=name,
            machines=_machines(cluster),
            requests_s=cluster.rate,
            usd_per_h=cluster.usd_per_h,
            kw=cluster.kw,
            rate_ratio=cluster.rate / base.rate,
            cost_ratio=cluster.usd_per_h / base.usd_per_h,
            power_ratio=cluster.kw / base.kw,
            machines_ratio=(cluster.prompt + cluster.token) / (base.prompt + base.token),
            paper=PAPER_ROWS[what].get(name, ""),
        )
        for name, cluster in found.items()
    ]


@cache
def _clusters(mode: Mode, seconds: float, what: Wanted) -> Mapping[str, ProvisionedCluster | None]:
    catalogue, trials = splitwise_trials(BLOOM, "conv", mode, seconds)
    base = parse_design("baseH", catalogue)
    search = ProvisionSearch(trials, _wish(what, base, mode, seconds))
    return {name: search.run(parse_design(name, catalogue)).found for name in PAPER_DESIGNS}


def _wish(what: Wanted, base: ClusterDesign, mode: Mode, seconds: float) -> ProvisionWish:
    if what is Wanted.MOST_AT_POWER:
        return ProvisionWish(goal=ProvisionGoal.THROUGHPUT, max_kw=base.kw(BASELINE, 0), rate_step=STEP)
    if what is Wanted.MOST_AT_COST:
        usd = base.usd_per_h(BASELINE, 0)
        return ProvisionWish(goal=ProvisionGoal.THROUGHPUT, max_usd_per_h=usd, rate_step=STEP)
    carried = _clusters(mode, seconds, Wanted.MOST_AT_POWER)["baseH"]
    assert carried is not None, "40 machines carry something"
    goal = ProvisionGoal.POWER if what is Wanted.LEAST_POWER else ProvisionGoal.COST
    return ProvisionWish(goal=goal, rate=carried.rate)


def _machines(found: ProvisionedCluster | None) -> str:
    if found is None:
        return "none"
    return _counts((found.prompt, found.token))


def _counts(counts: Sequence[int]) -> str:
    return f"{counts[0]}P, {counts[1]}T" if counts[1] else f"{counts[0]}"


REMARKS: Final = """\
- Table IV agrees in what it is there for: a H100 machine halves TTFT and leaves more of TBT, so E2E
  gains less with conversations, and costs more. By `perf_model.csv`, the paper's own measurements, the
  ratios are 0.48 and 0.48 (paper 0.51, 0.54) for TTFT, 0.66 (0.60, 0.70) for TBT, 0.62 and 0.66 (0.58,
  0.68) for E2E. Its TBT does not differ by workload there, so one is below and one above the paper's.

  By our roofline TTFT is within 13 % of the paper's on either machine, and TBT as much faster on A100
  (37 ms; paper 52 and 40) that the ratio is 0.81: it knows no more of an A100 than its bandwidth.
- Of the paper's table two things are misprints: its dollars are cents ($17.6 an hour for 0.856 s are
  0.42 cents), and 0.70 as the ratio of 31 to 52 ms. Its energies are of machines of 5.8 and 10 kW, ours
  of the cards alone (3.2 and 5.6 kW), so theirs are 1.8 times as high at the same ratio.
- Agrees, with steps as released: at equal power the six designs carry 50, 110, 120, 120, 140 and
  140 requests/s, the public simulator's own limits on traces of two minutes, and the search finds
  clusters beside the paper's: 46 and 24 (paper 45, 25), 24 and 28 (25, 26), 24 and 22 (25, 21). HA
  carries 1.27 times Baseline-H100 at 8 % less cost (paper 1.18, 10 %), AA 2.4 times Baseline-A100
  (paper 2.15).
- Does not agree, once decode steps take what was measured for their batch: AA carries 0.88 of
  Baseline-H100 and HA as much as it, at 13 % less cost. Splitting pays most on H100 alone: HH 1.25
  times, HHcap 1.5 times. All designs want more token machines than the paper gives them.
- Figure 12: as measured 30 machines with BLOOM-176B, as in the paper, and as released 29. The paper
  does not name the model; Llama2-70B needs 18 or 19. None of the three price ratios changes more than
  one machine.

  Its space is flat, since the mixed pool makes up for a split that does not fit: as measured all of 23
  and 7, 24 and 6, ... to 29 and 1 meet all nine SLOs, and no 29 do. The paper's star, 27 and 3, is one
  of them; as released it meets them too, and so do 28 and 1. Wherever a split is too small, TBT asks for
  no fewer token machines than TTFT and E2E do. With traces of 60 s 29 machines were enough as measured,
  as 23 and 6, 27 and 2, or 28 and 1: the longer trace has a worse minute in it.
- Figure 18b: AA costs 21 % less than Baseline-H100 as released (paper 25 %), and 9 % less as
  measured. There HHcap is the cheapest, at 14 % less, with 28 % less power.
- Figure 17b agrees with steps as released: for the same money AA carries 1.36 times Baseline-H100's
  rate, with 23 % more power and 2.15 times the machines (paper 1.4, 25 %, 2). As measured it is 1.12
  times, and HH and HHcap carry 1.25.
- Figure 18a: HHcap needs 19 % less power than Baseline-H100 as released, and 28 % as measured (paper
  25 %), with 8 and 14 % fewer machines at as much less cost; the paper has the same cost.
- Figures 13 and 14, whose model the paper does not name, fit BLOOM-176B with a network card for each
  of the eight GPUs: 400 GB/s a machine is in its Table I, and 512 tokens, from where on it sends
  layer by layer, take just the 5 ms that it says are left of a layerwise transfer.

  So serialised KV delays the second token by 62 % (paper 64 %) and the answer by 2 % on average
  (paper: up to 3 % with large prompts), and what is visible stays below 7 % of the prompt, as there.
  Llama2-70B over one card of 400 Gb/s, the other reading, gives 50 %.
- Layer by layer it is 12 % (paper 16.5 %), of which the bytes of the last layer are 1 %. The rest is
  the paper's 5 ms for any prompt, which is put in and not found: it grows neither with the prompt nor
  with a layer's bytes, so we take it for what announcing layers costs, and waking the token machine.

  In this network the same was measured as about 1 ms on idle processors, and 2 to 11 ms beside other
  work ([what it costs](../kv-transfers.md#what-it-costs)). Simulations leave it out unless
  `layer_sync_s` says otherwise. With Llama2-70B's small KV layerwise transfers lose against
  serialised ones by it, over eight cards.
- Beyond 64 requests in a batch nothing was measured: the last segment is extended. Rates are of one
  seed, in steps of 10.
- Figures 15, 16 and 19: [under load](pools.md).
"""
