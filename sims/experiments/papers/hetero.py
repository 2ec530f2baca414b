"""Xiong et al., section 5: degrees of tensor parallelism by estimate and simulated, and who schedules
requests among unequal instances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import inf
from typing import Final, NamedTuple

import numpy as np

from ....coordinator.costs.tensor_parallel import estimate_degrees
from ...policies import (
    HETERO,
    LEAST_TOKENS,
    MEMORY,
    PLAN,
    PREDICTED,
    ROUND_ROBIN,
    SINGLE,
    WEIGHTED_ROUND_ROBIN,
)
from ...results.outcomes import SimResult
from ..page import Curves, Page, PageTable, Picture, ResultRow
from ..setting import Scope
from .hetero_systems import (
    EQUAL,
    LINKS,
    LONGEST,
    NVLINK,
    OUTPUT,
    PAPER,
    PROMPT,
    V100,
    EngineOptions,
    Instances,
    ServingSystem,
    draw_lengths,
    last_over_first,
    make_five,
    make_pair,
    profile_instance,
    run_system,
    tokens_s,
)

DEGREES: Final = "5.1, degrees of tensor parallelism"
TWO_INSTANCES: Final = "5.2, t=4 and t=1 on V100"
TWO_MACHINES: Final = "5.3, four of t=2 on V100 and one of t=1 on A800"
LONGER: Final = 4
"""Times the lengths of vLLM's benchmark: with that the paper's order of degrees comes out, with 2 and 3 it does not."""
LONG_DEGREES: Final = "5.1 again, requests four times as long"
LONG_TWO: Final = "5.2 again, requests four times as long"
EQUAL_TWO: Final = "5.2 again, equal options for all"
EQUAL_FIVE: Final = "5.3 again, equal options for all"

REPEATS: Final = 8
RATES: Final = (8.0, 16.0, 24.0, inf)
POLICIES: Final[Mapping[str, str]] = {
    "RR": ROUND_ROBIN,
    "SI": SINGLE,
    "MB": MEMORY,
    "WRR": WEIGHTED_ROUND_ROBIN,
    "OS": HETERO,
    "plan": PLAN,
    "predicted": PREDICTED,
    "tokens": LEAST_TOKENS,
}
AT_ONCE: Final = "at once"
GATEWAYS: Final = 4
SPREAD: Final[Mapping[str, str]] = {f"{name}, {GATEWAYS} gateways": name for name in ("OS", "plan", "predicted")}
"""Policies that several gateways run, too, each for its part of the requests."""


class DegreeRow(ResultRow, frozen=True):
    """Tokens per second of a machine, prompts and answers, by estimate of two samples and simulated
    with two; `preempted`: how often a request lost its place for want of KV."""

    link: str
    t: int
    instances: int
    kv_tokens: int
    estimate_1: float
    estimate_2: float
    simulated_1: float
    simulated_2: float
    last_over_first: float
    preempted: int


class ScheduleRow(ResultRow, frozen=True):
    """Tokens per second, prompts and answers, at so many requests per second. `over_rr`: of round
    robin's, in percent; `last_over_first`: when the last instance had ended all that it was given,
    over when the first had. `to_first`: the share of requests that the first instance got."""

    link: str
    rate: str
    policy: str
    tokens_s: float
    over_rr: float
    last_over_first: float
    to_first: float
    p50_s: float
    p99_s: float


class EqualOptionsRow(ResultRow, frozen=True):
    """Tokens per second, prompts and answers, and what requests saw: seconds to the first token,
    milliseconds from token to token, and seconds in all; medians and the slowest in a hundred."""

    link: str
    rate: str
    policy: str
    tokens_s: float
    over_rr: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    p50_s: float
    p99_s: float


@cache
def degree_rows(link: str, samples: int, estimated: int, longer: int = 1) -> tuple[DegreeRow, ...]:
    """For t of 1, 2, 4 and 8: `samples` requests, each eight times, on eight V100; estimates are
    of `estimated` requests. `longer`: see `draw_lengths`."""
    model = "llama3-8b"
    degrees = (1, 2, 4, 8)
    estimates = [
        {each.degree: each for each in estimate_degrees(
            8, degrees, draw_lengths(estimated, 100 + seed, longer),
            lambda degree: profile_instance(model, V100, degree, link),
        )}
        for seed in range(2)
    ]  # fmt: skip
    rows = []
    for degree in degrees:
        system = ServingSystem(model, link, (Instances(V100, 8, degree, 8 // degree),))
        runs = []
        for seed in range(2):
            lengths = tuple(each for each in draw_lengths(samples, seed, longer) for _ in range(REPEATS))
            runs.append(run_system(system, lengths, policy=ROUND_ROBIN))
        estimate = [found[degree] for found in estimates]
        rows.append(
            DegreeRow(
                link=link, t=degree, instances=8 // degree, kv_tokens=estimate[0].kv_tokens,
                estimate_1=estimate[0].tokens_s, estimate_2=estimate[1].tokens_s,
                simulated_1=tokens_s(runs[0]), simulated_2=tokens_s(runs[1]),
                last_over_first=last_over_first(runs[0]),
                preempted=sum(replica.counts.preemptions for replica in runs[0].replicas),
            )
        )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.simulated_1))


class SchedulerRun(NamedTuple):
    """One policy at one rate; `over_rr`: tokens per second over round robin's, in percent."""

    rate: str
    policy: str
    over_rr: float
    result: SimResult


def run_policies(system: ServingSystem, count: int, options: EngineOptions, longer: int = 1) -> Iterator[SchedulerRun]:
    """Every policy at every rate, round robin first, and then some by several gateways."""
    for rate in RATES:
        base = 0.0
        for name in (*POLICIES, *SPREAD):
            result = run_system(
                system, draw_lengths(count, 0, longer), policy=POLICIES[SPREAD.get(name, name)], rate=rate,
                options=options, gateways=GATEWAYS if name in SPREAD else 0,
            )  # fmt: skip
            base = base or tokens_s(result)
            over_rr = 100.0 * (tokens_s(result) / base - 1.0)
            yield SchedulerRun(f"{rate:g}" if rate < inf else AT_ONCE, name, over_rr, result)


@cache
def schedule_rows(system: ServingSystem, count: int, longer: int = 1) -> tuple[ScheduleRow, ...]:
    """With the paper's options."""
    rows = []
    for run in run_policies(system, count, PAPER, longer):
        service = run.result.services[0]
        rows.append(
            ScheduleRow(
                link=system.link, rate=run.rate, policy=run.policy, tokens_s=tokens_s(run.result), over_rr=run.over_rr,
                last_over_first=last_over_first(run.result), to_first=float((service.decode == 0).mean()),
                p50_s=float(np.median(service.outcomes.e2e_s)), p99_s=float(np.quantile(service.outcomes.e2e_s, 0.99)),
            )
        )  # fmt: skip
    return tuple(rows)


@cache
def latency_rows(system: ServingSystem, count: int) -> tuple[EqualOptionsRow, ...]:
    """With equal options for all."""
    rows = []
    for run in run_policies(system, count, EQUAL):
        outcomes = run.result.services[0].outcomes
        (ttft, ttft_p99), (tpot, tpot_p99), (e2e, e2e_p99) = (
            np.nanquantile(seconds, (0.5, 0.99)) for seconds in (outcomes.ttft_s, outcomes.tpot_s, outcomes.e2e_s)
        )
        rows.append(
            EqualOptionsRow(
                link=system.link, rate=run.rate, policy=run.policy, tokens_s=tokens_s(run.result), over_rr=run.over_rr,
                ttft_p50_s=float(ttft), ttft_p99_s=float(ttft_p99), tpot_p50_ms=1e3 * float(tpot),
                tpot_p99_ms=1e3 * float(tpot_p99), p50_s=float(e2e), p99_s=float(e2e_p99),
            )
        )  # fmt: skip
    return tuple(rows)


def hetero(scope: Scope) -> Page:
    """The page. The paper's counts of requests, or a few with `--quick`."""
    is_whole = scope.seconds >= Scope().seconds
    samples, estimated, count = (1000, 200, 4000) if is_whole else (40, 40, 200)
    pairs, fives = (
        [row for link in LINKS for row in schedule_rows(make(link), count)] for make in (make_pair, make_five)
    )
    equal_pairs, equal_fives = (
        [row for link in LINKS for row in latency_rows(make(link), count)] for make in (make_pair, make_five)
    )
    return Page(
        name="hetero",
        title="Unequal instances, and who schedules among them (Xiong et al.)",
        assumes=(
            "Llama-3-8B on V100 of 32 GB, behind PCIe 3 as the paper says (75 Gb/s between two cards) and again "
            "with the NVLink that cards of that form have (960 Gb/s, in groups of four), Qwen2.5-14B's "
            "dimensions where the paper has R1-Distill-Qwen-14B; a card's datasheet with measured efficiencies; "
            "KV memory by equation 1 with 0.9 and 2 GB a card.\n\nShareGPT is not in this project: its stand-in "
            f"has independent exponential lengths with the means of vLLM's benchmark, {PROMPT} tokens in and "
            f"{OUTPUT} out, at most {LONGEST} each.\n\nEngines batch as vLLM 0.6.0 does "
            f"by default, up to {PAPER.requests} requests and {PAPER.step_tokens:,} tokens a step: prompts first, each "
            "whole, as many as have room, and nothing decodes meanwhile; who came last is preempted and computed "
            "again. Only the simulator has that mode: live engines compute prompts in chunks beside "
            f"decodes.\n\nThroughput counts prompts and answers. {samples} samples eight times and estimates of "
            f"{estimated} (5.1), {count} requests (5.2, 5.3), Poisson arrivals; theta is 2 and answers are "
            "predicted by drawing from a normal distribution, as in the paper.\n\nRR takes turns, SI is one "
            "instance, WRR weighs by GPUs, OS is the paper's scheduler (`hetero`), MB the same without times (T "
            "= 1). Of this network's own, `plan` goes by the plan's shares (by decode throughput) and queues, and "
            "`predicted`, the default, to where the first tokens are expected soonest; `tokens`: the fewest "
            "outstanding tokens. "
            "Four gateways hear each other a second late; all others are one."
        ),
        tables=(
            PageTable(
                DEGREES,
                [row for link in LINKS for row in degree_rows(link, samples, estimated)],
                "Requests go to instances in turn, all at once.",
            ),
            PageTable(
                TWO_INSTANCES,
                pairs,
                "WRR weighs 4 to 1; SI is t=4 alone.",
            ),
            PageTable(TWO_MACHINES, fives, "WRR weighs by GPUs, 2 to 1. SI is one instance of t=2."),
            PageTable(
                LONG_DEGREES,
                [row for link in LINKS for row in degree_rows(link, samples, estimated, LONGER)],
                LONG_NOTE,
            ),
            PageTable(LONG_TWO, schedule_rows(make_pair(NVLINK), count, LONGER), LONG_NOTE),
            PageTable(EQUAL_TWO, equal_pairs, EQUAL_NOTE),
            PageTable(EQUAL_FIVE, equal_fives, EQUAL_NOTE),
        ),
        remarks=REMARKS,
        pictures=(_picture(pairs, fives), _latency_picture(equal_pairs, equal_fives)),
    )


SYSTEM_TITLES: Final = ("t=4, t=1", "t=2 x4, A800")


def _picture(*systems: Sequence[ScheduleRow]) -> Picture:
    """Figures 5 and 6: throughput by rate, a row for each link; what comes at once stands at 32. Over the best policy
    at a rate: below saturation all carry what comes, and the lines would be one."""
    panels = []
    for link in LINKS:
        curves = []
        for rows, title in zip(systems, SYSTEM_TITLES, strict=True):
            of_link = [row for row in rows if row.link == link]
            best = {
                rate: max(row.tokens_s for row in of_link if row.rate == rate) for rate in {r.rate for r in of_link}
            }
            lines = {
                name: (
                    [32.0 if row.rate == AT_ONCE else float(row.rate) for row in of_link if row.policy == name],
                    [100.0 * row.tokens_s / best[row.rate] for row in of_link if row.policy == name],
                )
                if _is_drawn(name, title)
                else ((), ())
                for name in POLICIES
            }
            curves.append(Curves(f"requests/s (32: at once), {title}", f"tokens/s, % of the best, {link}", lines))
        panels.append(tuple(curves))
    about = "tokens/s over those of the best policy by the rate of requests, on two systems; SI on the first alone"
    return Picture("hetero", about, tuple(panels))


def _is_drawn(policy: str, title: str) -> bool:
    """One of five instances alone would make the axes too long to tell the others apart."""
    return policy != "SI" or title == SYSTEM_TITLES[0]


def _latency_picture(*systems: Sequence[EqualOptionsRow]) -> Picture:
    """The slowest in a hundred by rate, with NVLink. What comes at once waits for minutes: it would
    hide the rest."""
    panels = []
    for field, label in LATENCY_AXES.items():
        curves = []
        for rows, title in zip(systems, SYSTEM_TITLES, strict=True):
            shown = [row for row in rows if row.link == NVLINK and row.rate != AT_ONCE]
            lines = {
                name: (
                    [float(row.rate) for row in shown if row.policy == name],
                    [float(getattr(row, field)) for row in shown if row.policy == name],
                )
                if _is_drawn(name, title)
                else ((), ())
                for name in POLICIES
            }
            values = [value for _, ys in lines.values() for value in ys]
            curves.append(Curves(f"requests/s, {title}", label, lines, log_y=max(values) > 10.0 * min(values)))
        panels.append(tuple(curves))
    about = (
        "TTFT, TPOT and end to end of the slowest in a hundred over the rate of requests, equal options, NVLink; SI on "
        "the first system alone"
    )
    return Picture("hetero-latency", about, tuple(panels))


LATENCY_AXES: Final = {"ttft_p99_s": "TTFT P99, s", "tpot_p99_ms": "TPOT P99, ms", "p99_s": "end to end P99, s"}

LONG_NOTE: Final = f"""\
Means of {LONGER * PROMPT} tokens in and {LONGER * OUTPUT} out, at most {LONGER * LONGEST} each."""

EQUAL_NOTE: Final = """\
Every engine computes 512 tokens a step at most, of at most 256 requests, chunks of prompts beside
decodes. Whoever predicts lengths learns them from answers that have ended."""

REMARKS: Final = """\
- Agrees, with NVLink: where one of two instances is far stronger, taking turns carries least of the
  paper's policies, less than leaving the weak one alone, and its scheduler (OS) carries most: at once 68 %
  over round robin, WRR 60, MB 55, the strong one alone 31. The paper has 122.5 % at 24 requests/s, and WRR
  ahead of OS there and at once.
- Up to 24 requests/s OS gains 1 to 17 % only, since our instances keep up (one of t=4 carries 10,677
  tokens/s alone). Latency shows more: at 24 requests/s 22 s at P99 under OS, 83 under round robin.
- With requests four times as long the paper's figures come out: at 24 requests/s OS is 139 % over round
  robin (paper 122.5), MB 141 and WRR 151, which is ahead of OS there and at once, and taking turns is last
  at every rate. Only that OS is best at 8 and 16 does not: WRR is, by 8 and 14 %.
- In part, 5.1: the paper measured t=2 before 4, 1 and 8. With NVLink and requests four times as long that
  order is simulated: answers fill the KV of t=1, where 2,256 requests are preempted. With lengths as in
  vLLM's benchmark it is 1, 2, 4, 8, and t=1 and t=2 are within 7 %; with twice and three times those lengths
  (tried) it is 2, 1, 4, 8, with three times t=1 and t=4 within 1 %. t=8 is last everywhere.
- So the stand-in's requests are probably too short: the paper does not print its lengths, and the benchmark
  leaves long ones out. Others print means of ShareGPT of 73 to 755 tokens in and 200 to 427 out; four
  times the benchmark's are more than any of these.
- The paper's estimate has the order that it measured. Algorithm 1 has 2, 1, 4, 8 with NVLink and 1, 2, 4, 8
  without. With long requests one sample has 1, 2, 4, 8 with NVLink, too, the other 2, 1, 4, 8: two that are
  near each other. It knows of no schedule, so that prompts first and whole change nothing in it. With the
  benchmark's lengths it is a fifth to a seventh of what is simulated: static batches wait for their
  longest answer (the paper, too, estimates far below what it measures).
- What prompts first, each whole, do (tried: chunks of 2,048 tokens beside decodes instead, as engines of
  today have): at once, with NVLink, t=4 alone carries 10,677 instead of 11,736 tokens/s, OS 13,696 instead
  of 14,841, 68 instead of 87 % over round robin. Round robin carries 8,155 instead of 7,930, for a hundredth of
  the blocks is kept from prompts: 71 requests are preempted instead of 422.

  Answers stand still: under SI at 24 requests/s the slowest in a hundred take 29 instead of 19 s, 43 instead
  of 27 ms a token. With 2,048 tokens a step instead of 8,192, throughput differs by 0.5 % at most.
- With the benchmark's lengths, this network's default, `predicted`, carries within 5 % of the best policy at
  every rate, `plan` within 7 %, OS within 32 % and round robin within 45 %. At once, `predicted` is 78
  % over round robin with NVLink,
  before `plan` with 72 and OS with 68. Over PCIe it is 1 % below, where OS loses 31: of those requests it
  sends 40 % to t=4, OS 69 %.

  With long requests it is best up to 24 requests/s, by 1 to 2 % over WRR, but not at once: 100 % over round
  robin, WRR 151. `plan` is 23 % below WRR at 24, and 32 % at once.
- Does not agree, over PCIe as printed: there the roofline's all-reduces make a prefill over four
  cards no faster than on one, so t=4 is hardly better than t=1. Weights of 4 to 1 then lose 35 %
  against taking turns, and OS, at once, 31 %: it sends 69 % of requests to t=4 for its memory, where
  half would be best. That the paper's round robin is below SI, and weights of 4 to 1 are best, says
  that its t=4 was several times its t=1, which takes more than 75 Gb/s between cards.
- In part, 5.3: OS is ahead of round robin by 4 to 11 % at once, `plan` by 5 to 18 and `predicted` by 7 to
  21, where the paper has 33.6 % at 16 requests/s. At 16 ours keep up under every policy but one instance
  alone. (Tried: requests four times as long, with NVLink. OS gains 10 % at 16.)
- With equal options throughput says the same up to 24 requests/s, and latency more. With NVLink at
  24 requests/s the slowest in a hundred of 5.2 wait 0.11 s for their first token under OS and
  `predicted`, 0.14 under `plan` and SI, 0.15 under WRR, 0.22 under MB, 0.23 under `tokens`, and 1.06 s
  under round robin, which fills the weak instance: there a token takes 108 ms at P99, under SI, OS,
  `plan`, `predicted` and WRR 25.8 to 31.1.

  In 5.3 all but SI are within 0.18 to 0.28 s and 34 to 42 ms, `predicted` the first of them in both,
  OS by four gateways the last.
- At once, OS loses with learned lengths: 63 % over round robin, below MB, where drawing from a known
  distribution, as the paper does, would have 74. Nothing has ended when the last request is placed, so
  that nothing has been learned. `predicted` has 83.
- Theta of 2 is not the best here. At once, every request is placed before any ends, so that memory
  decides more than speed. With 0.5 instead, the two instances carry 14,401 instead of 13,696 tokens/s
  with NVLink and 6,577 instead of 5,615 over PCIe; with 0 it is 11,453 and 7,597.
- With the benchmark's lengths four gateways carry as much as one up to 24 requests/s, give or take 2.5
  %, under all three policies.
  At once, before the first report, each knows a quarter of the requests only. Under OS they carry 1 %
  less to 17 % more then, since memory decides less; under `plan` 3 % less at most; under `predicted` 7 to 9 %
  less in 5.2, and as much to 4 % more in 5.3. With long requests they carry 19 % less at once under OS, and
  under `predicted` 8 % less at 24 requests/s and 10 % less at once.

  By `predicted` a gateway of several asks the replica that is to compute a prompt before it sends it there. Without
  that the slowest in a hundred waited 1.03 to 1.32 times as long for their first token, with equal options and up to
  24 requests/s. At once nobody refuses: what each takes others to have sent is what they have.
"""
