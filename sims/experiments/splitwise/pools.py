"""Splitwise's clusters under load: figures 15, 16 and 19 and section V-F, and then the same machines
with equal options for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Final

import numpy as np

from ...splitwise.cluster_trials import ClusterTrial, MachineUsage
from ...splitwise.metrics import PERCENTILES, SLO
from ...splitwise.provisioning import PAPER_DESIGNS, parse_design
from ...splitwise.setups import SETUPS
from ...splitwise.step_lookup import Mode
from ..page import Curves, Page, PageTable, Picture, ResultRow
from ..setting import Scope
from .equal_options import about_equal_options, equal_rows, name_missed
from .provision import BLOOM, LLAMA, MODES, SECONDS, splitwise_trials

WORKLOADS: Final[Mapping[str, str]] = {"code": "coding", "conv": "conversation"}
RATES: Final = (30.0, 50.0, 70.0, 90.0, 110.0, 130.0)
LLAMA_RATES: Final = (50.0, 100.0, 150.0, 200.0, 250.0)
LOW, HIGH = 70.0, 130.0
"""Requests/s of figure 16."""

BATCH_RATE: Final = 300.0
"""Requests/s that no cluster carries: section V-F."""

RATE_STEP: Final = 10.0
MOST_RATE: Final = 400.0
CARD_USD: Final = {"A": 2.21, "H": 4.76}
"""An hour, of the notebook that draws the paper's figures: only with these are its requests per
dollar near one."""

CURVE_POINTS: Final = 80
"""Of a curve of figure 16, evenly on its logarithmic axis."""

DECADE: Final = 10.0
METRICS: Final = ("ttft", "tbt", "e2e")
UNITS: Final = {"ttft": ("ms", 1e3), "tbt": ("ms", 1e3), "e2e": ("s", 1.0)}


class LoadedClusterRow(ResultRow, frozen=True):
    """Latencies of a cluster at p50/p90/p99, at the low and at the high rate of figure 16, and what
    is missed there of the nine SLOs. `slowdowns`: by rate, then as the metrics and percentiles go."""

    workload: str
    times: str
    design: str
    machines: str
    TTFT_ms_at_70: str
    TBT_ms_at_70: str
    E2E_s_at_70: str
    missed_at_70: str
    TTFT_ms_at_130: str
    TBT_ms_at_130: str
    E2E_s_at_130: str
    missed_at_130: str
    slowdowns: list[list[float]]


class BatchedRow(ResultRow, frozen=True):
    """Of the time that machines compute: the share with so many tokens in a batch at most, and the tokens that half of
    it has at most. `idle_or_up_to_15`: of all time, as a machine that is idle has none in its batch. `tokens`,
    `shares`: all of the curve."""

    model: str
    times: str
    requests_s: float
    pool: str
    machines: int
    busy: str
    up_to_15: str
    up_to_64: str
    up_to_512: str
    half_up_to: int
    idle_or_up_to_15: str
    tokens: list[int]
    shares: list[float]


class MovedRow(ResultRow, frozen=True):
    """The highest rate of a cluster with what it was made for, and with something else."""

    times: str
    design: str
    made_for: str
    machines: str
    serves: str
    requests_s: float
    of_the_cluster_made_for_it: str
    paper: str


class BatchJobRow(ResultRow, frozen=True):
    """Requests/s without deadlines, at far more than a cluster carries."""

    times: str
    design: str
    machines: str
    requests_s: float
    per_usd: float
    paper: str


def pools(scope: Scope) -> Page:
    """The page; of traces as long as the paper's at most."""
    seconds = min(SECONDS, scope.seconds)
    loads = [row for workload in WORKLOADS for mode in MODES for row in _load_rows(workload, mode, seconds)]
    batched = [row for mode in MODES for row in batched_rows(mode, seconds)]
    return Page(
        name="pools",
        title="Splitwise's pools under load",
        assumes=(
            f"First the paper's own settings (ISCA 2024, sections V-C, V-E, V-F): its clusters, each with the power of "
            f"40 DGX-H100, Azure's traces, Poisson arrivals for {seconds:g} s, seed 0, lengths drawn independently, "
            "machines and policies as in the public simulator, whose results ours reproduces to the printed digits. "
            "BLOOM-176B where no other model is named. No KV is reused between requests. `released`: the public "
            "simulator's step times; `measured`: decode steps by the measured batch axis, KV of its real size. "
            "Slowdowns are over a lone request on a DGX-A100.\n\nThen equal options for all: " + about_equal_options()
        ),
        tables=(
            PageTable("Figure 15", loads, "Latencies at p50/p90/p99, at 70 and at 130 requests/s."),
            PageTable(
                "Figure 16", batched,
                "Conversation: tokens in a batch, a prompt by its length and a decode as one, over the time computed.\n"
                "Of each design the machines for prompts and for tokens, or all of a baseline.",
            ),
            PageTable(
                "Figure 19", [*_moved_rows(seconds), *_model_rows(seconds)],
                "Conversations on clusters made for coding; Llama2-70B on clusters made for BLOOM-176B.",
            ),
            PageTable(
                "Batch jobs (V-F)", [row for mode in MODES for row in _batch_job_rows(mode, seconds)],
                f"Conversation, {BATCH_RATE:g} requests/s arriving, no deadlines; dollars of the paper's notebook.",
            ),
            PageTable(
                "Equal options", equal_rows(scope),
                "Llama2-70B, conversation, 40 DGX-H100 in the project's own simulator.",
            ),
        ),
        pictures=(
            *(_load_picture(workload, mode, loads) for workload in WORKLOADS for mode in MODES),
            *_batched_pictures(batched),
            *_moved_pictures(seconds),
        ),
        remarks=REMARKS,
    )  # fmt: skip


# ---- figure 15 ----------------------------------------------------------------------------------------------------


def _load_rows(workload: str, mode: Mode, seconds: float) -> list[LoadedClusterRow]:
    rows = []
    for name in PAPER_DESIGNS:
        counts = SETUPS[name].machines(workload)
        trials = [_trial(BLOOM, workload, mode, name, counts, rate, seconds) for rate in RATES]
        low, high = (trials[RATES.index(rate)] for rate in (LOW, HIGH))
        rows.append(
            LoadedClusterRow(
                workload=WORKLOADS[workload],
                times=mode,
                design=name,
                machines=_machines(counts),
                TTFT_ms_at_70=_latencies(low, "ttft"),
                TBT_ms_at_70=_latencies(low, "tbt"),
                E2E_s_at_70=_latencies(low, "e2e"),
                missed_at_70=name_missed(low.missed),
                TTFT_ms_at_130=_latencies(high, "ttft"),
                TBT_ms_at_130=_latencies(high, "tbt"),
                E2E_s_at_130=_latencies(high, "e2e"),
                missed_at_130=name_missed(high.missed),
                slowdowns=[_slowdowns(trial) for trial in trials],
            )
        )
    return rows


@cache
def _trial(
    model: str, workload: str, mode: Mode, design: str, counts: tuple[int, int], rate: float, seconds: float
) -> ClusterTrial:
    catalogue, trials = splitwise_trials(model, workload, mode, seconds)
    return trials.try_cluster(parse_design(design, catalogue), *counts, rate, to_the_end=True)


def _latencies(trial: ClusterTrial, metric: str) -> str:
    _, scale = UNITS[metric]
    return "/".join(f"{scale * trial.figures[f'{metric}_p{percentile}']:.3g}" for percentile in PERCENTILES)


def _slowdowns(trial: ClusterTrial) -> list[float]:
    return [trial.slowdowns[f"{metric}_p{percentile}"] for metric in METRICS for percentile in PERCENTILES]


def _load_picture(workload: str, mode: Mode, rows: Sequence[LoadedClusterRow]) -> Picture:
    chosen = [row for row in rows if (row.workload, row.times) == (WORKLOADS[workload], mode)]
    about = f"Figure 15, {WORKLOADS[workload]}, {mode} times: slowdowns over requests/s, with the SLO"
    return Picture(
        f"pools-{WORKLOADS[workload]}-{mode}", about, _panels({row.design: row.slowdowns for row in chosen}, RATES)
    )


def _panels(curves: Mapping[str, Sequence[Sequence[float]]], rates: Sequence[float]) -> tuple[tuple[Curves, ...], ...]:
    """A row for each metric, a column for each percentile; by design and rate, all slowdowns."""
    panels = []
    for row, metric in enumerate(METRICS):
        columns = []
        for column, percentile in enumerate(PERCENTILES):
            limit = SLO[metric][column]
            lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {
                name: (rates, [each[3 * row + column] for each in slowdowns]) for name, slowdowns in curves.items()
            }
            lines["SLO"] = rates, [limit] * len(rates)
            values = [value for _, ys in lines.values() for value in ys]
            columns.append(
                Curves(
                    x="requests/s", y=f"{metric.upper()} p{percentile}, slowdown", lines=lines,
                    log_y=max(values) >= DECADE * min(values),
                )
            )  # fmt: skip
        panels.append(tuple(columns))
    return tuple(panels)


# ---- figure 16 ----------------------------------------------------------------------------------------------------


PAPER_POOLS: Final = ("baseH", "HH prompt", "HH token")
"""Whose curves the paper draws."""


def batched_rows(mode: Mode, seconds: float) -> list[BatchedRow]:
    """All designs with BLOOM-176B, and those that the paper draws with Llama2-70B."""
    rows = [
        row for rate in (LOW, HIGH) for name in PAPER_DESIGNS for row in _pool_rows(BLOOM, mode, rate, name, seconds)
    ]
    rows += [
        row for rate in (LOW, HIGH) for name in ("baseH", "HH") for row in _pool_rows(LLAMA, mode, rate, name, seconds)
    ]
    return rows


def _pool_rows(model: str, mode: Mode, rate: float, name: str, seconds: float) -> Iterator[BatchedRow]:
    counts = SETUPS[name].machines("conv")
    trial = _trial(model, "conv", mode, name, counts, rate, seconds)
    pools_of = {f"{name} prompt": trial.prompt_pool, f"{name} token": trial.token_pool}
    if not counts[1]:
        pools_of = {name: trial.prompt_pool}
    for (pool, usage), machines in zip(pools_of.items(), counts, strict=False):
        yield batched_row(model, mode, rate, pool, machines, usage)


def batched_row(model: str, mode: Mode, rate: float, pool: str, machines: int, usage: MachineUsage) -> BatchedRow:
    counts = list(usage.tokens_s)
    shares = np.concatenate(([0.0], np.cumsum(list(usage.tokens_s.values())) / sum(usage.tokens_s.values())))

    def share_up_to(most: int) -> float:
        return float(shares[int(np.searchsorted(counts, most, side="right"))])

    tokens = np.unique(np.geomspace(1.0, counts[-1], CURVE_POINTS).round().astype(int)).tolist()
    return BatchedRow(
        model=model, times=mode, requests_s=rate, pool=pool, machines=machines, busy=f"{usage.busy:.0%}",
        up_to_15=f"{share_up_to(15):.0%}", up_to_64=f"{share_up_to(64):.0%}", up_to_512=f"{share_up_to(512):.0%}",
        half_up_to=counts[int(np.searchsorted(shares[1:], 0.5))],
        idle_or_up_to_15=f"{1.0 - usage.busy * (1.0 - share_up_to(15)):.0%}",
        tokens=tokens, shares=[round(share_up_to(most), 4) for most in tokens],
    )  # fmt: skip


def _batched_pictures(rows: Sequence[BatchedRow]) -> list[Picture]:
    """The paper's three curves by load and times, and then those of all designs, for prompts and for tokens."""
    own = tuple(
        tuple(
            _batched_curves(
                f"tokens in a batch, {rate:g}/s, {mode}", rows, mode, rate, {name: name for name in PAPER_POOLS}
            )
            for rate in (LOW, HIGH)
        )
        for mode in MODES
    )
    found = [Picture("pools-batches", "Figure 16: time with so many tokens in a batch at most", own)]
    for mode in MODES:
        panels = tuple(
            tuple(
                _batched_curves(
                    f"tokens in a batch, {rate:g}/s, {phase} machines", rows, mode, rate,
                    {name: f"{name} {phase}" if PAPER_DESIGNS[name][1] else name for name in PAPER_DESIGNS},
                )
                for phase in ("prompt", "token")
            )
            for rate in (LOW, HIGH)
        )  # fmt: skip
        about = f"Figure 16 for all designs, {mode} times: time with so many tokens in a batch at most"
        found.append(Picture(f"pools-batches-{mode}", about, panels))
    return found


def _batched_curves(x: str, rows: Sequence[BatchedRow], mode: Mode, rate: float, pool_of: Mapping[str, str]) -> Curves:
    """Lines by name, of BLOOM-176B's pools."""
    chosen = {row.pool: row for row in rows if (row.model, row.times, row.requests_s) == (BLOOM, mode, rate)}
    lines = {name: (chosen[pool].tokens, chosen[pool].shares) for name, pool in pool_of.items()}
    return Curves(x=x, y="share of the time", lines=lines, log_x=True)


# ---- figure 19 ----------------------------------------------------------------------------------------------------

PAPER_MOVED: Final = {"baseA": "0 %", "baseH": "0 %", "AA": "0 %", "HH": "0 %", "HHcap": "-7 %", "HA": "-7 %"}


def _moved_rows(seconds: float) -> list[MovedRow]:
    """Conversations, on clusters for conversations and on clusters for coding."""
    rows = []
    for mode in MODES:
        for name in PAPER_DESIGNS:
            own, other = (SETUPS[name].machines(workload) for workload in ("conv", "code"))
            rates = [_highest_rate(BLOOM, mode, name, counts, seconds) for counts in (own, other)]
            for made_for, counts, rate in zip(("conversation", "coding"), (own, other), rates, strict=True):
                rows.append(
                    MovedRow(
                        times=mode, design=name, made_for=made_for, machines=_machines(counts), serves="conversation",
                        requests_s=rate, of_the_cluster_made_for_it=_change(rate, rates[0]),
                        paper=PAPER_MOVED[name] if made_for == "coding" else "",
                    )
                )  # fmt: skip
    return rows


def _model_rows(seconds: float) -> list[MovedRow]:
    """Llama2-70B, on clusters for BLOOM-176B."""
    return [
        MovedRow(
            times=mode, design=name, made_for=BLOOM, machines=_machines(SETUPS[name].machines("conv")), serves=LLAMA,
            requests_s=_highest_rate(LLAMA, mode, name, SETUPS[name].machines("conv"), seconds),
            of_the_cluster_made_for_it="", paper="",
        )
        for mode in MODES
        for name in PAPER_DESIGNS
    ]  # fmt: skip


def _change(rate: float, own: float) -> str:
    return f"{rate / own - 1.0:+.0%}" if own else ""


def _highest_rate(model: str, mode: Mode, design: str, counts: tuple[int, int], seconds: float) -> float:
    """In steps of ten requests/s, by halving: more requests are taken to be no easier."""
    catalogue, trials = splitwise_trials(model, "conv", mode, seconds)
    low, high = 0.0, MOST_RATE
    while high - low > RATE_STEP:
        rate = RATE_STEP * round((low + high) / 2.0 / RATE_STEP)
        if trials.meets(parse_design(design, catalogue), *counts, rate):
            low = rate
        else:
            high = rate
    return low


def _moved_pictures(seconds: float) -> list[Picture]:
    cases = (("coding", BLOOM, "code", RATES), ("bloom", LLAMA, "conv", LLAMA_RATES))
    return [
        Picture(
            f"pools-made-for-{made_for}",
            f"Figure 19: conversations, {model}, on clusters made for {made_for}, released times",
            _panels(
                {
                    name: [
                        _slowdowns(
                            _trial(model, "conv", "released", name, SETUPS[name].machines(counts), rate, seconds)
                        )
                        for rate in rates
                    ]
                    for name in PAPER_DESIGNS
                },
                rates,
            ),
        )
        for made_for, model, counts, rates in cases
    ]


# ---- batch jobs ---------------------------------------------------------------------------------------------------

PAPER_BATCH: Final = {"baseA": "0.89", "AA": "0.89", "baseH": "0.75", "HH": "0.75"}


def _batch_job_rows(mode: Mode, seconds: float) -> list[BatchJobRow]:
    rows = []
    for name, paper in PAPER_BATCH.items():
        counts = SETUPS[name].machines("conv")
        rate = _trial(BLOOM, "conv", mode, name, counts, BATCH_RATE, seconds).figures["rps"]
        usd = sum(counts) * CARD_USD["A" if name in ("baseA", "AA") else "H"]
        rows.append(
            BatchJobRow(
                times=mode, design=name, machines=_machines(counts), requests_s=rate, per_usd=rate / usd, paper=paper
            )
        )
    return rows


def _machines(counts: tuple[int, int]) -> str:
    return f"{counts[0]}P, {counts[1]}T" if counts[1] else f"{counts[0]}"


REMARKS: Final = """\
- Figure 15 agrees in shape with steps as released: at 70 coding requests/s all four split designs
  meet the nine SLOs and neither baseline does, Baseline-H100 for its TBT at p90, 110 ms where HH has
  42: prompts of others in the batch. AA has the highest TTFT of the split designs. For conversations
  at 130/s HHcap and HA alone meet them.
- Not as in the paper: no design meets them at 110 coding requests/s (the paper draws up to 130).
  Prompts alone keep some 30 of HH's 35 prompt machines busy there.
- As measured, conversations cost more: at 130/s no design meets the SLOs, and at 70/s AA and HA miss
  TBT and E2E. HHcap is the best design in both readings.
- Figure 16 agrees in shape: at 70/s prompt machines of all designs are mostly idle (28 to 35 % busy),
  and half of what they compute is batches of more than 1,200 tokens. Token machines batch more than
  those that do both: half of HH's time has up to 32 tokens (45 as measured), of Baseline-H100's up to 18
  (20). At 130/s, as measured, the mixed pool makes HH's two pools alike: up to 66 and 65 tokens.

  With steps as released HH's prompt machines decode for a fifth of what they compute at 130/s, AA's
  for a twelfth, and those of HHcap and HA not at all.
- The paper's Baseline-H100 has 15 tokens or fewer for 70 % of the time at 70/s. Ours has with
  BLOOM-176B for 35 % (43 % where idle time counts, 75 % at 20 tokens), with Llama2-70B for 83 %, and 72 %
  as measured. The paper does not name the figure's model. But with Llama2-70B pools do not mix at
  130/s, as the paper's do: there HH's prompt machines are 35 to 39 % busy.

  Its text has 35 prompt machines of HH there; its figure 15 has 25 for conversations, as here.
- Figure 19a agrees to the step of the grid with steps as released: HHcap and HA lose 7 % on clusters
  made for coding, HH nothing, AA gains a step.

  As measured that is not so: five to eight token machines cannot decode conversations, and what the
  mixed pool adds does not suffice: HH carries 20 instead of 80. The paper's robustness rests on
  decode steps that take as long for any batch.
- Figure 19b agrees with steps as released: Llama2-70B carries about twice BLOOM-176B's rate on every
  cluster, and all split designs carry as much as Baseline-H100 or more, HH and HHcap with the least
  TBT and E2E. As measured only HHcap does.
- Batch jobs (V-F): agrees that AA is as good as Baseline-A100 and HH as Baseline-H100, and that A100
  give more for a dollar: 1.11 and 1.16 times (paper 1.19). The figures are lower than the paper's,
  since ours count until the last request has ended.
- Equal options: with chunked prefills beside decodes, pools gain less than the paper's. At 130/s all
  systems of one gateway meet the SLOs; 15 and 25 machines have TBT at p99 of 32 ms, 40 that do both
  48 ms, and E2E at p50 of 4.1 and 5.0 s.

  Borrowing pays where a pool is too small: at 200/s on 15 prompt machines TTFT at p50 is 0.27 s by
  `splitwise` and 2.2 s by `plan`, which leaves prompts to them.
- Four gateways that hear of each other a second late: at 130/s TTFT at p50 and p99 is 0.18 and 0.52
  s by `splitwise`, 0.19 and 0.68 s by `plan`; with one gateway 0.08 and 0.35 s by either. While
  gateways counted nothing of what others send meanwhile, `plan` had 0.38 and 0.99 s.
- Beyond 64 requests in a batch nothing was measured: the last segment is extended. Rates are of one
  seed, in steps of 10.
"""
