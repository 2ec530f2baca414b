"""What 8 bits for KV in the engines' memory add to what a cluster serves, of ours and of colocated plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import nan
from typing import Final

from ....coordinator.costs.gpus import Specs
from ....coordinator.costs.model_shape import KvCacheDtype
from ...policies import PLAN
from ...replanning import describe_phases
from ..deployments import RATES
from ..page import Page, PageTable, ResultRow
from ..setting import (
    CLOUD,
    TARGET,
    Deployed,
    PlannedCase,
    Scope,
    highest_rate,
    most,
    planned,
    spread,
)
from ..systems import TRIALS

GAIN: Final = "8 bits over 16"
OVER: Final = "Over colocated serving, with equal KV"
SIXTEEN: Final[KvCacheDtype] = "auto"
EIGHT: Final[KvCacheDtype] = "fp8"
SYSTEMS: Final = ("colocated", "ours")
CASES: Final = (("conversation", 10.0),)
"""Workloads, and deadlines as multiples of a lone request's times. A case takes a CPU minute."""
FACTOR: Final = 1.5
"""Over what is expected of colocated serving: a rate that another plan may carry where deadlines are strict."""


class KvMemoryRow(ResultRow, frozen=True):
    """A system's requests/s with 90 % in time, of plans made for KV in 16 and in 8 bits: mean (least-most over seeds);
    their ratio by seed."""

    workload: str
    deadline: str
    system: str
    replicas_16: str
    rate_16: str
    replicas_8: str
    rate_8: str
    rate_8_over_16: str


class KvMemoryOverRow(ResultRow, frozen=True):
    """Ours over the best colocated plan, both with KV in so many bits; and ours with 8 over colocated with 16."""

    workload: str
    deadline: str
    both_16: str
    both_8: str
    ours_8_over_colocated_16: str


def kv_memory(scope: Scope) -> Page:
    """The page."""
    cases = [_case(workload, scale) for workload, scale in CASES]
    return kv_memory_page(scope, [compare_kv(case, scope) for case in cases], [compare_over(c, scope) for c in cases])


def kv_memory_page(scope: Scope, gains: Sequence[Sequence[KvMemoryRow]], over: Sequence[KvMemoryOverRow]) -> Page:
    """Of rows by case."""
    return Page(
        name="kv_memory",
        title="KV in 8 bits in the engines' memory",
        assumes=(
            f"LLaMA-30B on {CLOUD}, GPUs by measured figures, 10 Gb/s between boxes. Azure's lengths, Poisson arrivals "
            f"for {scope.seconds:g} s, {len(scope.seeds)} seeds; all plans meet the same requests. Deadlines as "
            f"multiples of what a lone request takes on an A100 with KV in 16 bits; a rate counts with {TARGET:.0%} of "
            "the requests in time.\n\nEach plan is searched for with its own KV and the deadlines of its row: of "
            "colocated plans the one that most is expected of; of ours the best in a trial of three, the colocated one "
            "among them. That is less than [the page beside](strictness.md) searches and tries, so that "
            "the rates there are higher.\n\nIn 8 bits (vLLM's `kv_cache_dtype`) twice as many tokens fit beside the "
            "weights, and decode reads half as much KV; converting it is modelled to cost nothing, and what a transfer "
            "takes is the same (kv4). What 8 bits cost in quality is not known for this model, so no plan takes them "
            "unless it is told to; of the bundled model it was [measured](../codecs.md#kv-kept-in-8-bits)."
        ),
        tables=(
            PageTable(GAIN, [row for rows in gains for row in rows]),
            PageTable(OVER, over),
        ),
        remarks=REMARKS,
    )


def _case(workload: str, scale: float) -> PlannedCase:
    return PlannedCase(specs=Specs.MEASURED, workload=workload, rate=RATES[workload], scale=scale, gbps=10.0)


@cache
def find_plans(case: PlannedCase, scope: Scope) -> tuple[Deployed, Deployed]:
    """Colocated and ours: of the plan that most is expected of, of one for more than colocated serving carries, and of
    that itself the one that carries most in a trial."""
    colocated = most(replace(case, mixed_only=True), scope.steps)
    more = replace(case, rate=float(f"{FACTOR * colocated.at().max_rate:.2g}"))
    likely = (colocated, most(case, scope.steps), planned(more, scope.steps))
    return colocated, max(likely, key=lambda plan: highest_rate(plan, scope, TRIALS, PLAN))


@cache
def _rates(case: PlannedCase, scope: Scope) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """By seed, likewise."""
    colocated, ours = (
        tuple(highest_rate(plan, scope, seed, PLAN) for seed in scope.seeds) for plan in find_plans(case, scope)
    )
    return colocated, ours


def compare_kv(case: PlannedCase, scope: Scope) -> list[KvMemoryRow]:
    """Both systems with KV in 16 bits and in 8."""
    sixteen, eight = (replace(case, kv_cache_dtype=dtype) for dtype in (SIXTEEN, EIGHT))
    found = zip(
        SYSTEMS,
        find_plans(sixteen, scope),
        _rates(sixteen, scope),
        find_plans(eight, scope),
        _rates(eight, scope),
        strict=True,
    )
    return [
        KvMemoryRow(
            workload=case.workload, deadline=f"{case.scale:g} x", system=system,
            replicas_16=describe_phases(plan_16.at().plan), rate_16=spread(rates_16),
            replicas_8=describe_phases(plan_8.at().plan), rate_8=spread(rates_8),
            rate_8_over_16=_ratio(rates_8, rates_16),
        )
        for system, plan_16, rates_16, plan_8, rates_8 in found
    ]  # fmt: skip


def compare_over(case: PlannedCase, scope: Scope) -> KvMemoryOverRow:
    """Ours beside colocated serving."""
    (colocated_16, ours_16), (colocated_8, ours_8) = (
        _rates(replace(case, kv_cache_dtype=dtype), scope) for dtype in (SIXTEEN, EIGHT)
    )
    return KvMemoryOverRow(
        workload=case.workload, deadline=f"{case.scale:g} x", both_16=_ratio(ours_16, colocated_16),
        both_8=_ratio(ours_8, colocated_8), ours_8_over_colocated_16=_ratio(ours_8, colocated_16),
    )  # fmt: skip


def _ratio(rates: Sequence[float], others: Sequence[float]) -> str:
    """By seed."""
    return spread([a / b if b else nan for a, b in zip(rates, others, strict=True)])


REMARKS: Final = """\
- For conversations at 10 times a lone request's times KV in 8 bits carries 1.5 times what 16 bits do,
  of colocated plans as of those that split: the aim was 1.3. LLaMA-30B has a KV head for each query
  head, 1.6 MB a token in 16 bits, so that decode is short of room and of bandwidth here. Models
  with fewer KV heads have less to gain.
- Between the two systems it changes nothing: the option is worth as much to either, and ours is
  within a percent of colocated serving with both. With more of a search [ours is 1.1
  times](strictness.md) at these deadlines in 16 bits.
- Not shown: other deadlines and coding, which were not run; what converting costs on a GPU, where
  decode may gain less than half of its reads; and any answer's quality.
"""
