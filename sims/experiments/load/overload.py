"""Goodput beyond capacity, with and without admission, and what each class of requests gets of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

import numpy as np

from ....coordinator.requests.admission import PriorityClass
from ....coordinator.routing.interface import RoutingSettings
from ...admission import AT_DEADLINE, draw_classes
from ...policies import PLAN
from ...results.outcomes import ServiceOutcome
from ...scenario import SimAdmission, SimSettings
from ...workloads import Lengths, draw
from ..page import Page, PageTable, ResultRow
from ..setting import TARGET, Deployed, PlannedCase, Scope, highest_rate, most, run

BY_LOAD: Final = "Goodput by load"
BY_CLASS: Final = "Classes"
CASE: Final = PlannedCase(workload="conversation", rate=4.0, gbps=10.0, scale=5.0)
LOADS: Final = (0.8, 1.0, 1.3, 1.6, 2.0)
CLASS_LOADS: Final = (1.0, 2.0)
PREDICTED: Final = RoutingSettings().policy
POLICIES: Final = (PREDICTED, PLAN)
URGENT, BATCH = 0.2, 0.3
GATEWAYS: Final = 4
REPORT_S: Final = 1.0
TRIAL_SEED: Final = 1000

WAYS: Final[Mapping[str, SimAdmission | None]] = {
    "none": None,
    "default": SimAdmission(),
    "at the deadline": SimAdmission(rules=AT_DEADLINE),
}


class OverloadRow(ResultRow, frozen=True):
    """`policy` routes. `load`: of the capacity; `goodput_s`: requests per second that met all deadlines, `in_time_pct`
    of all and `of_admitted_pct` of those that were not refused; the 99th percentile is of these."""

    policy: str
    load: float
    rate: float
    admission: str
    gateways: int
    goodput_s: float
    in_time_pct: float
    of_admitted_pct: float
    refused_pct: float
    ttft_p99_s: float


class ClassRow(ResultRow, frozen=True):
    """Of the requests of a class."""

    policy: str
    load: float
    gateways: int
    requests: str
    share_pct: float
    refused_pct: float
    in_time_pct: float
    ttft_p50_s: float
    ttft_p99_s: float


@cache
def deployed(steps: int | None) -> Deployed:
    """The plan that all runs have, for its own highest rate."""
    return most(CASE, steps)


@cache
def capacity(scope: Scope) -> float:
    """Requests per second of which TARGET are in time, found with a seed that is not reported."""
    return highest_rate(deployed(scope.steps), scope, TRIAL_SEED, PLAN)


def run_load(
    scope: Scope, policy: str, seed: int, load: float, admission: SimAdmission | None, gateways: int = 1
) -> ServiceOutcome:
    """Requests at so many times the capacity; several gateways hear each other late."""
    found, rate = deployed(scope.steps), load * capacity(scope)
    workload = found.problem.services[0].workload
    drawn = Lengths(workload.prompts, workload.outputs, workload.name)
    trace = draw(drawn, rate=rate, rng=np.random.default_rng([17, seed]), seconds=scope.seconds)
    boxes = tuple(box.id for box in found.problem.cluster.boxes)
    settings = SimSettings(
        routing=RoutingSettings(policy=policy), admission=admission, seed=seed,
        gateways=boxes[:gateways] if gateways > 1 else (), report_s=REPORT_S if gateways > 1 else 0.0,
    )  # fmt: skip
    return run(found.problem, found.at(min(rate, capacity(scope))).plan, trace, settings)


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0


def load_row(scope: Scope, policy: str, load: float, way: str, gateways: int = 1) -> OverloadRow:
    """All seeds together."""
    runs = [run_load(scope, policy, seed, load, WAYS[way], gateways) for seed in scope.seeds]
    count = sum(len(each.outcomes.trace) for each in runs)
    met = sum(int(each.met().sum()) for each in runs)
    refused = sum(int(each.not_admitted.sum()) for each in runs)
    ttft_s = np.concatenate([each.outcomes.ttft_s for each in runs])
    return OverloadRow(
        policy=policy, load=load, rate=load * capacity(scope), admission=way, gateways=gateways,
        goodput_s=met / (scope.seconds * len(runs)), in_time_pct=_percent(met, count),
        of_admitted_pct=_percent(met, count - refused), refused_pct=_percent(refused, count),
        ttft_p99_s=float(np.nanquantile(ttft_s, 0.99)),
    )  # fmt: skip


def class_rows(scope: Scope, policy: str, load: float, gateways: int) -> list[ClassRow]:
    """Of the first seed."""
    seed = scope.seeds[0]
    admission = SimAdmission(rules=AT_DEADLINE, urgent=URGENT, batch=BATCH)
    found = run_load(scope, policy, seed, load, admission, gateways)
    kinds = np.array(draw_classes(len(found.outcomes.trace), admission, seed))
    return [_class_row(found, kinds, kind, (policy, load, gateways)) for kind in PriorityClass]


def _class_row(found: ServiceOutcome, kinds: np.ndarray, kind: PriorityClass, case: tuple[str, float, int]) -> ClassRow:
    own, (policy, load, gateways) = kinds == kind, case
    ttft_s = found.outcomes.ttft_s[own]
    return ClassRow(
        policy=policy, load=load, gateways=gateways, requests=kind.label,
        share_pct=_percent(int(own.sum()), len(found.outcomes.trace)),
        refused_pct=_percent(int(found.not_admitted[own].sum()), int(own.sum())),
        in_time_pct=_percent(int(found.met()[own].sum()), int(own.sum())),
        ttft_p50_s=float(np.nanmedian(ttft_s)), ttft_p99_s=float(np.nanquantile(ttft_s, 0.99)),
    )  # fmt: skip


def overload(scope: Scope) -> Page:
    """The page."""
    rows = [load_row(scope, policy, load, way) for policy in POLICIES for load in LOADS for way in WAYS]
    rows += [load_row(scope, policy, load, "at the deadline", GATEWAYS) for policy in POLICIES for load in LOADS]
    classes = [
        row
        for policy in POLICIES
        for load in CLASS_LOADS
        for gateways in (1, GATEWAYS)
        for row in class_rows(scope, policy, load, gateways)
    ]
    slo = deployed(scope.steps).problem.services[0].slo
    return Page(
        name="overload",
        title="Beyond capacity: what is refused, and what is in time",
        assumes=(
            f"LLaMA-30B on the paper's 32 cloud GPUs, conversations, 10 Gb/s, deadlines 5 x a lone request's "
            f"({slo.ttft_s:.2f} s to the first token), a plan for the capacity: {capacity(scope):.2f} requests/s, "
            f"where {TARGET:.0%} are in time. Poisson arrivals for {scope.seconds:g} s, seeds "
            f"{', '.join(map(str, scope.seeds))}. `{PREDICTED}` routes by default, `{PLAN}` by the plan's shares and "
            "queues.\n\n`none` gives every request to engines at once; "
            "`default` has the network's queue and limits, `at the deadline` refuses whoever would miss the "
            "deadline for the first token (batch requests: ten times that). Nobody who is refused comes "
            f"back. Of {GATEWAYS} gateways each has a queue, and hears others' requests a second late.\n\nAll is one "
            "client's: classes share its turns by weight."
        ),
        tables=(
            PageTable(BY_LOAD, rows),
            PageTable(
                BY_CLASS,
                classes,
                f"At the deadline; {URGENT:.0%} are urgent, {BATCH:.0%} batch. In time: by all deadlines of the plan.",
            ),
        ),
        remarks=REMARKS,
    )


REMARKS: Final = """\
- Without admission goodput falls from 6 to 1 requests/s between 1.0 and 1.3 times the capacity: every
  request waits behind all others, and all are late. At the deadline 4.6 to 8.3 are left up to twice
  the capacity, and what waits is short: the 99th percentile of first tokens is 2 to 4 s by the default
  policy at one gateway, where it is over 150 s without; at four it is up to 20 s.
- The network's defaults let normal requests wait for 30 s at least, since a live network may be asked
  by people who would rather wait: they bound the queue, and save no goodput by these deadlines.
- Of those admitted, 43 to 85 % are in time beyond the capacity, and not all: what is
  expected is a mean, the deadline is for the first token alone, and in full batches those between
  tokens are missed as well.
- At the deadline and with one gateway the default policy has 0.97 to 0.99 of `plan`'s goodput up to the capacity, and
  0.87 to 0.95 beyond; with four gateways 1.00 to 1.01 up to the capacity, and 0.79 to 0.99 beyond.

  By the default a gateway of several asks a replica before it sends a prompt there. While nobody asked it had 0.83 to
  1.03 beyond the capacity: 7 % less goodput at 1.3 times, and 8 and 5 % more at 1.6 and 2 times, where hardly half are
  in time, and where one gateway, which knows of all requests at once, has 5.9 and 5.5 requests/s.
- Four gateways refuse 10 % below capacity where one refuses 1 %, as they hear of each other a second late. Beyond it
  they may keep more than one does: what lies at engines is told to them, and counts as a wait, while one gateway
  holds back only what engines cannot begin with.
- Lower classes are refused first. None starves: batch requests have at least their weight's part of
  turns and of what is admitted. At one gateway they wait, and are refused less than normal ones, since
  they may wait ten times as long.
"""
