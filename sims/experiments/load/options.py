"""What is left of a gain over colocated plans where all have the same options of engines: chunks by deadline, KV in 8
bits, prefix caches. What each of them is worth alone to either, and all per dollar beside the A100 box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from statistics import fmean
from typing import Final, NamedTuple

from ....coordinator.costs.gpus import Specs
from ....coordinator.costs.model_shape import KvCacheDtype
from ....coordinator.planning.model.problem import Solution
from ...policies import PLAN, PREDICTED
from ...replanning import describe_phases
from ..deployments import RATES
from ..page import KeptResults, Page, PageTable, ResultRow
from ..setting import CLOUD, TARGET, WORKLOADS, Deployed, PlannedCase, Scope, highest_rate, spread
from ..systems import IN_HOUSE, IN_HOUSE_SYSTEMS, WHOLE_TOKENS, best_colocated, best_in_house, chosen

LOOSE: Final = 10.0
SCALES: Final = (3.0, 5.0, LOOSE)
GBPS: Final = 10.0
CHALLENGERS: Final = 4
TRIAL_S: Final = 30.0
TRIAL_DEADLINES: Final = 2.0
"""A trial lasts at least so many times as long as a whole answer may take: in a shorter one most answers run beside
fewer others than they will."""
MORE_TRIED: Final = 10
MORE_STARTS: Final = 2
MORE_CHALLENGERS: Final = 96
MOST_LOSSES: Final = 24
MORE_REQUESTS: Final = 2
"""Where all have chunks and 8 bits, more plans are tried, each with so many times the scope's requests: the best ones
are challenged each for itself, for as long as one of MOST_LOSSES challengers in a row wins."""
COLOCATED, OURS = "colocated", "ours"
SYSTEMS: Final = (COLOCATED, OURS)

EQUAL: Final = "Over the best colocated plan, all with the same options"
EACH: Final = "Each option alone"
EIGHT_OVER_16: Final = "KV in 8 bits over 16"
PER_DOLLAR: Final = "Per dollar, all with the same options"

TARGETS: Final[Mapping[tuple[str, float], float]] = {
    ("coding", 3.0): 2.0, ("conversation", 3.0): 2.0,
    ("coding", 5.0): 1.4, ("conversation", 5.0): 1.2,
    ("coding", 10.0): 1.08, ("conversation", 10.0): 1.05,
}  # fmt: skip
"""Of ours over colocated."""


SIXTEEN: Final[KvCacheDtype] = "auto"
EIGHT: Final[KvCacheDtype] = "fp8"


class OptionSet(NamedTuple):
    """What engines are run with; `step_tokens`: of every step, 0: as the deadline allows."""

    step_tokens: int
    kv: KvCacheDtype
    prefix_caches: bool = False


NO_OPTION: Final = "none"
OPTION_SETS: Final[Mapping[str, OptionSet]] = {
    NO_OPTION: OptionSet(WHOLE_TOKENS, SIXTEEN),
    "chunks by deadline": OptionSet(0, SIXTEEN),
    "KV in 8 bits": OptionSet(WHOLE_TOKENS, EIGHT),
    "prefix caches": OptionSet(WHOLE_TOKENS, SIXTEEN, prefix_caches=True),
    "chunks, 8 bits": OptionSet(0, EIGHT),
    "all three": OptionSet(0, EIGHT, prefix_caches=True),
}


class SystemRates(NamedTuple):
    """A system's plan, and requests/s with TARGET in time: by policy, of each seed."""

    replicas: str
    usd_per_h: float
    rates: Mapping[str, Sequence[float]]

    @property
    def best(self) -> Sequence[float]:
        """By the policy that carries more."""
        return max(self.rates.values(), key=fmean)


class OptionsOverRow(ResultRow, frozen=True):
    """Rates are mean (least-most over seeds); ratios by seed. `default`: ours by the default policy."""

    workload: str
    deadline: str
    colocated: str
    colocated_rate: str
    ours: str
    default_rate: str
    default_over_colocated: str
    target: float
    plan_over_colocated: str


class EachOptionRow(ResultRow, frozen=True):
    """What either carries with these options alone, and how many times what it carries with none, by seed."""

    workload: str
    deadline: str
    options: str
    colocated: str
    colocated_rate: str
    over_none: str
    ours: str
    our_rate: str
    ours_over_none: str
    ours_over_colocated: str


class KvMemoryRow(ResultRow, frozen=True):
    """A system's plans made for KV in 16 and in 8 bits; ratios by seed."""

    workload: str
    deadline: str
    system: str
    replicas_16: str
    rate_16: str
    replicas_8: str
    rate_8: str
    rate_8_over_16: str


class DollarRow(ResultRow, frozen=True):
    """Requests in time per dollar of boxes."""

    workload: str
    deadline: str
    ours: float
    colocated: float
    distserve_like: float
    vllm_like: float
    ours_over_better_a100: float


class Measured(NamedTuple):
    """What is found of a system; `prefix_caches`: with those, by the plan without."""

    case: PlannedCase
    system: str
    prefix_caches: bool = False


Found = Mapping[Measured, SystemRates]


def options(scope: Scope) -> Page:
    """The page."""
    every = [
        _with_options(workload, scale, of, system)
        for workload in WORKLOADS
        for scale in SCALES
        for of in OPTION_SETS.values()
        for system in SYSTEMS
    ]
    every += [
        Measured(make_case(workload, scale, EIGHT), system)
        for workload in WORKLOADS
        for scale in SCALES
        for system in IN_HOUSE_SYSTEMS
    ]
    kept = KeptResults(scope.kept)
    return options_page(scope, {each: measure_system(each, scope, kept) for each in every})


def make_case(workload: str, scale: float, dtype: KvCacheDtype, step_tokens: int = 0) -> PlannedCase:
    """KV of engines like this, and so many tokens in their steps; 0: chunks by deadline."""
    return PlannedCase(
        specs=Specs.MEASURED, workload=workload, rate=RATES[workload], scale=scale, gbps=GBPS, kv_cache_dtype=dtype,
        step_tokens=step_tokens,
    )  # fmt: skip


def _with_options(workload: str, scale: float, of: OptionSet, system: str) -> Measured:
    return Measured(make_case(workload, scale, of.kv, of.step_tokens), system, of.prefix_caches)


def measure_system(each: Measured, scope: Scope, kept: KeptResults) -> SystemRates:
    """What its plan carries, by both policies."""
    case, system, prefix_caches = each

    def measure() -> SystemRates:
        deployed = choose_plan(case, system, scope, kept)
        return SystemRates(
            replicas=describe_phases(deployed.at().plan),
            usd_per_h=deployed.problem.cluster.usd_per_hour,
            rates={
                policy: [
                    highest_rate(deployed, scope, seed, policy, prefix_caches=prefix_caches) for seed in scope.seeds
                ]
                for policy in (PLAN, PREDICTED)
            },
        )

    with_caches = " with prefix caches" if prefix_caches else ""
    return kept.get(f"rates of {system}{with_caches}: {case} {scope}", measure, SystemRates)


def choose_plan(case: PlannedCase, system: str, scope: Scope, kept: KeptResults) -> Deployed:
    """In trials with requests of other seeds, shorter than the runs that are reported."""
    long_s = TRIAL_DEADLINES * case.problem().services[0].slo.e2e_s
    trials = replace(
        scope,
        seeds=scope.seeds[:1],
        seconds=min(max(TRIAL_S, long_s), scope.seconds),
        policy=PREDICTED,
        challengers=min(CHALLENGERS, scope.challengers),
    )
    if scope.challengers > CHALLENGERS and case == make_case(case.workload, case.scale, EIGHT):
        requests = MORE_REQUESTS * scope.requests
        trials = replace(
            trials, tried=MORE_TRIED, challengers=MORE_CHALLENGERS, starts=MORE_STARTS, most_losses=MOST_LOSSES,
            requests=requests,
        )  # fmt: skip

    def choose() -> Solution:
        if system in IN_HOUSE_SYSTEMS:
            return best_in_house(case, system, trials).solution
        best = chosen(case, trials)
        # a colocated plan that the search for ours found, and that was ahead in the same trials, is the best of them
        if system == COLOCATED and not best.is_colocated:
            best = best_colocated(case, trials)
        return best.solution

    problem = replace(case, cluster=IN_HOUSE, gbps=None).problem() if system in IN_HOUSE_SYSTEMS else case.problem()
    return Deployed(problem, kept.get(f"{system}: {case} {trials}", choose, Solution))


def options_page(scope: Scope, found: Found) -> Page:
    """Of what was measured."""
    cells = [(workload, scale) for workload in WORKLOADS for scale in SCALES]
    return Page(
        name="options",
        title="Equal options for all: what is the scheduler's, and what is the engines'",
        assumes=(
            f"LLaMA-30B on {CLOUD}, GPUs by measured figures, {GBPS:g} Gb/s between boxes. Azure's lengths, Poisson "
            f"arrivals for {scope.seconds:g} s, {len(scope.seeds)} seeds; all plans meet the same requests. Deadlines "
            "as multiples of what a lone request takes on an A100, KV in 16 bits; a rate counts with "
            f"{TARGET:.0%} in time.\n\nAll have the same options: a step's tokens as the deadline "
            "from token to token allows, and KV in 8 bits in the engines' memory (vLLM's `kv_cache_dtype`): twice as "
            "many tokens fit beside the weights and decode reads half as much, converting is modelled to cost nothing, "
            "and a transfer takes the same (kv4). What 8 bits cost in quality is not known for this model, so no plan "
            "takes them unless it is told to; of the bundled model it was "
            "[measured](../codecs.md#kv-kept-in-8-bits).\n\nPrefix caches are the third option. Azure's traces do not "
            "say which prompts begin alike, so in rows with caches the same requests begin as others did in as many "
            "successive requests of Mooncake's conversations, with as much of each prompt, and all routes go by "
            "prefix. Caches are empty at first, and share the KV memory; plans are made without them.\n\n"
            "Every plan is searched for with its own KV and deadlines, in the planner's own steps for each of several "
            "rates, and chosen in trials by requests of another seed, routed by "
            f"`{PREDICTED}`: for {TRIAL_S:g} s, {scope.requests:,} requests and {TRIAL_DEADLINES:g} times as long as a "
            f"whole answer may take, at least. The {scope.tried} of which most is expected are tried, and "
            f"{CHALLENGERS} others challenge the best.\n\nWhere all have chunks and 8 bits {MORE_TRIED} are tried, by "
            f"{MORE_REQUESTS * scope.requests:,} requests, and the best {MORE_STARTS} are each challenged until "
            f"{MOST_LOSSES} others in a row have lost, or {MORE_CHALLENGERS} in all. Of the A100 box all "
            "configurations are looked at. What is found for ours counts as the best colocated plan as well, if it is "
            "one.\n\n"
            f"Routes are by `{PREDICTED}`, the default, and by `{PLAN}`. Of colocated serving and of the A100 box the "
            f"policy that carries more counts, of ours the default, except where `{PLAN}` is named."
        ),
        tables=(
            PageTable(EQUAL, [_equal_row(found, *cell) for cell in cells]),
            PageTable(
                EACH,
                [_each_row(found, *cell, name) for cell in cells for name in OPTION_SETS],
                f"*None*: steps of {WHOLE_TOKENS:,} tokens, KV in 16 bits, no prefix is kept. *Over none*: of the same "
                "system.\nWith prefix caches: the plan without, and prompts that begin alike.",
            ),
            PageTable(EIGHT_OVER_16, [_kv_row(found, each, system) for each in WORKLOADS for system in SYSTEMS]),
            PageTable(
                PER_DOLLAR,
                [_dollar_row(found, *cell) for cell in cells],
                "Requests in time per dollar of boxes. On eight A100: the best of all splits, and of equal replicas.",
            ),
        ),
        remarks=REMARKS,
    )


def _equal_row(found: Found, workload: str, scale: float) -> OptionsOverRow:
    case = make_case(workload, scale, EIGHT)
    colocated, ours = found[Measured(case, COLOCATED)], found[Measured(case, OURS)]
    default = ours.rates[PREDICTED]
    return OptionsOverRow(
        workload=workload, deadline=f"{scale:g} x", colocated=colocated.replicas,
        colocated_rate=spread(colocated.best), ours=ours.replicas, default_rate=spread(default),
        default_over_colocated=_ratios(default, colocated.best), target=TARGETS[workload, scale],
        plan_over_colocated=_ratios(ours.rates[PLAN], colocated.best),
    )  # fmt: skip


def _each_row(found: Found, workload: str, scale: float, name: str) -> EachOptionRow:
    with_options, without = (
        [found[_with_options(workload, scale, of, system)] for system in SYSTEMS]
        for of in (OPTION_SETS[name], OPTION_SETS[NO_OPTION])
    )
    colocated, ours = with_options[0].best, with_options[1].rates[PREDICTED]
    return EachOptionRow(
        workload=workload, deadline=f"{scale:g} x", options=name, colocated=with_options[0].replicas,
        colocated_rate=spread(colocated), over_none=_ratios(colocated, without[0].best),
        ours=with_options[1].replicas, our_rate=spread(ours),
        ours_over_none=_ratios(ours, without[1].rates[PREDICTED]), ours_over_colocated=_ratios(ours, colocated),
    )  # fmt: skip


def _kv_row(found: Found, workload: str, system: str) -> KvMemoryRow:
    plans = [found[Measured(make_case(workload, LOOSE, dtype), system)] for dtype in (SIXTEEN, EIGHT)]
    sixteen, eight = [plan.rates[PREDICTED] if system == OURS else plan.best for plan in plans]
    return KvMemoryRow(
        workload=workload, deadline=f"{LOOSE:g} x", system=system, replicas_16=plans[0].replicas,
        rate_16=spread(sixteen), replicas_8=plans[1].replicas, rate_8=spread(eight),
        rate_8_over_16=_ratios(eight, sixteen),
    )  # fmt: skip


def _dollar_row(found: Found, workload: str, scale: float) -> DollarRow:
    case = make_case(workload, scale, EIGHT)
    ours, *others = (found[Measured(case, system)] for system in (OURS, COLOCATED, *IN_HOUSE_SYSTEMS))
    default = _per_dollar(ours, ours.rates[PREDICTED])
    colocated, split, whole = (_per_dollar(other, other.best) for other in others)
    return DollarRow(
        workload=workload, deadline=f"{scale:g} x", ours=default, colocated=colocated, distserve_like=split,
        vllm_like=whole, ours_over_better_a100=_ratio(default, max(split, whole)),
    )  # fmt: skip


def _per_dollar(system: SystemRates, rates: Sequence[float]) -> float:
    return TARGET * 3600.0 * fmean(rates) / system.usd_per_h


def _ratios(rates: Sequence[float], others: Sequence[float]) -> str:
    """By seed."""
    return spread([_ratio(a, b) for a, b in zip(rates, others, strict=True)])


def _ratio(rate: float, other: float) -> float:
    return rate / other if other else nan


REMARKS: Final = """\
- Three of six aims are reached with equal options, those of conversations: 2.02 times at 3 times a lone request's
  times (the aim was 2.0), 1.23 at 5 (1.2) and 1.11 at 10 (1.05). Coding gains 1.70 at 3 times (2.0) and 1.13 at 5
  (1.4); at 10 times (1.08) both are one plan.
- This page had runs of 60 s before, by which conversations gained nothing at 5 and 10 times, where answers may take
  53 and 105 s. A run begins without requests, so in a short one most answers run beside fewer others than they do
  later: colocated plans seemed to carry 11.4 and 20.9 requests/s, and were the best of all. In runs of 200 s it is
  10.0 and 13.7, and plans with replicas that only prefill or only decode carry more.
- Coding at 3 times: of 1P 2D 2M, at 5 to 6 requests/s, 8 or 9 of a hundred requests miss the deadline of the whole
  answer, those of more than some 55 tokens, as a token takes 0.08 to 0.09 s there, at 5 requests/s as at 6; of first
  tokens at most 2 are late.

  What is carried there hangs on the plan that is found. Two other searches by hand, one for other rates, found plans
  that carry 7.7 requests/s of the same requests and 7.8 of others: 1.94 and 2.1 times what the colocated plan does.
  They are not in the table. With 24 challengers of one plan, before, it was 6.6. Four plans challenged instead of two
  took twice as long, and ended at the same plan; at 5 times at one that carries 10.2 instead of 10.1.

  At 5 and 10 times more challengers found nothing better for coding; for conversations they found a colocated plan
  that carries 5 % more at 5 times, and one of ours with 2 % more at 10.

  Answers that turn out long and then move to replicas that decode faster, tried by hand, gained nothing: routes keep
  replicas at about the same pace, so that about 1 % of the answers were moved for conversations at 5 times, and next
  to none for coding at 3. Nor did replicas that decode and take prompts as well, where a first token is expected
  after half of its deadline: at 5 times, 88 % in time instead of 90.
- It takes 220 to 1,100 CPU s to choose both plans where all have chunks and 8 bits, and 130 to 300 elsewhere, nearly
  all of it in trials.
- The default is ahead of `plan` wherever ours splits, but for conversations at 5 times (1.23 and 1.26).

  What is below 1.00 for one and the same plan is the policy: of colocated serving the better of two counts, which for
  coding at 10 times is `plan` by 3 %: by the default, prompts wait for 4 s instead of 1.4 at the fast replicas, as
  others are slower by as much. A wait that lasts counting for more there brings 0.5 % more in time, and loses as much
  and more elsewhere. The rate is found to 1.5 %.
- KV in 8 bits carries 1.4 to 1.5 times what 16 do for conversations at 10 times (the aim was 1.3), 1.1 times for
  coding, of colocated plans as of ours; plans for 16 bits are of the smaller search. LLaMA-30B has a KV head for each
  query head, 1.6 MB a token in 16 bits, so that decode is short of room and of bandwidth here. Models with fewer KV
  heads have less to gain.
- With none of the options ours carries 1.1 to 2.4 times what the best colocated plan does: steps of 2,048 tokens hold
  up the answers beside them, for which colocated serving pays with load and ours with replicas that only decode.

  Chunks by deadline are worth most for coding, and most to colocated serving: 2.0 to 2.6 times what it carries
  without, 1.2 to 1.6 to ours. So of ours' gain they leave 1.4 times at 3 times, 1.2 at 5 and none at 10. For
  conversations they are worth 1.1 to 1.3 times to colocated serving and 1.0 to 2.1 to ours, which leaves 2.0, 1.2 and
  1.1.

  8 bits alone are worth 1.1 to 1.4 times to colocated serving and 1.0 to 1.5 to ours.
- Prefix caches alone are worth 1.0 to 1.1 times: the prompts of some minutes have 15 to 20 % in common, and KV in 16
  bits has little room beside what runs. With chunks and 8 bits they add 1.02 to 1.19 times to colocated serving and
  1.00 to 1.09 to ours. So with all three ours is left with 1.67, 1.13 and 0.99 times colocated serving for coding,
  and 1.83, 1.22 and 1.05 for conversations.

  All that is by routes that excuse no late answers for what a cache saves. Before, the default carried half as much
  on the colocated plan for coding at 3 times as soon as prompts were kept.
- Ours is ahead of the A100 box per dollar everywhere: by 1.07 and 1.22 times at 3 times, 1.36 and 1.42 at 5, and 1.6
  and more at 10 (the box costs 1.24 times as much as the cloud).
- Not shown: 40 Gb/s; plans that are chosen with prefix caches; what converting to 8 bits costs on a GPU, where decode
  may gain less than half of its reads; and any answer's quality.
"""
