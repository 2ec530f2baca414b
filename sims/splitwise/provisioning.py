"""How many machines of which kind: Splitwise's provisioning (section IV-D).

    search = ProvisionSearch(trials, ProvisionWish(goal=ProvisionGoal.COST, rate=70.0))
    answer = search.run(parse_design("HA", catalogue))
    answer.found.prompt, answer.found.token

Its six inputs: the design (types of prompt and of token machines), their step times, requests
(lengths that traces are drawn from), the SLOs, what the cluster must do or may cost, and the goal.
Every candidate is simulated on the whole trace, and fits if all nine SLOs are met.

The space is not enumerated. More machines are taken to be no worse, and fewer requests no harder,
so that a line of it is bisected; a candidate that costs no less than the best known is not tried;
neighbours of the best line are tried until `MAX_MISSES` in a row bring nothing; and a run ends once a
percentile is certain to be missed (`slo_watch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, floor, inf, isfinite
from typing import Final, NamedTuple, final

from .cluster_trials import ClusterDesign, ClusterTrial, ClusterTrials
from .machine_types import MachineCatalogue, MachineType
from .setups import SetupError
from .slo_watch import SearchTimeUp

MAX_MISSES: Final = 4
GROWTH: Final = 1.3
"""By how much a cluster that is too small is made larger, until one meets the SLOs."""

MAX_MACHINES: Final = 2000
"""A request looks at all of them: beyond this a single simulation takes minutes."""

_STEP: Final = 2048  # prompt tokens of a step, for the estimate that a search begins with
_DECODES: Final = 32  # requests that a token machine has then
_LESS: Final = 1.0 - 1e-9  # what counts as less, beyond rounding

PAPER_DESIGNS: Final = {
    "baseA": ("A", None),
    "baseH": ("H", None),
    "AA": ("A", "A"),
    "HH": ("H", "H"),
    "HHcap": ("H", "Hcap"),
    "HA": ("H", "A"),
}
"""Types of the machines for prompts and for tokens; None: all do both."""


class ProvisionError(SetupError):
    """What cannot be provisioned, with one line that names the option."""


class ProvisionGoal(StrEnum):
    """What the best cluster has most or least of."""

    THROUGHPUT = "throughput"
    COST = "cost"
    POWER = "power"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionWish:
    """The goal and the constraints.

    `rate`: requests/s that must be served, for the goals cost and power. `max_usd_per_h`, `max_kw`,
    `max_machines`: of the whole cluster. The goal throughput needs one of the first two, and
    searches rates in steps of `rate_step`: finer ones take more simulations.
    """

    goal: ProvisionGoal
    rate: float | None = None
    max_usd_per_h: float = inf
    max_kw: float = inf
    max_machines: int = 200
    rate_step: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_machines <= MAX_MACHINES:
            raise ProvisionError(f"max-machines: {self.max_machines} is not from 1 to {MAX_MACHINES}")
        limited = isfinite(self.max_usd_per_h) or isfinite(self.max_kw)
        if self.goal is ProvisionGoal.THROUGHPUT:
            if self.rate is not None:
                raise ProvisionError("rate: the goal throughput searches for it; give --max-kw or --max-usd-per-h")
            if not limited:
                raise ProvisionError("goal: throughput needs --max-kw or --max-usd-per-h, or it would have no end")
        elif self.rate is None:
            raise ProvisionError(f"rate: the goal {self.goal} needs --rate, the requests/s to be served")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionedCluster:
    """A cluster that meets every SLO at `rate`, and how it fares."""

    prompt: int
    token: int
    rate: float
    usd_per_h: float
    kw: float
    trial: ClusterTrial


class ProvisionAnswer(NamedTuple):
    """What was found for a design. `why_none`: what is missed where nothing was found.
    `is_complete`: the search ended by itself, and not because its time was over."""

    design: ClusterDesign
    found: ProvisionedCluster | None
    simulated: int
    is_complete: bool
    why_none: str = ""


class _Best(NamedTuple):
    prompt: int
    token: int
    rate: float


def parse_design(name: str, catalogue: MachineCatalogue) -> ClusterDesign:
    """One of the paper's, or types of machines like `H/8xA40` (prompt, token) or `8xA40` (both).
    Raises SetupError."""
    prompt, slash, token = name.partition("/")
    if name in PAPER_DESIGNS:
        prompt_name, token_name = PAPER_DESIGNS[name]
    elif slash or "x" in name:
        prompt_name, token_name = prompt, token if slash else None
    else:
        raise SetupError(
            f"design: {name[:64]!r} is none of {', '.join(PAPER_DESIGNS)}, and not like H/8xA40 (for prompts and for "
            "tokens) or 8xA40 (for both)"
        )
    return ClusterDesign(name, catalogue.find(prompt_name), None if token_name is None else catalogue.find(token_name))


@final
class ProvisionSearch:
    """Searches one design after the other. `progress` is told what is being tried."""

    def __init__(
        self, trials: ClusterTrials, wish: ProvisionWish, *, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        self._trials = trials
        self._wish = wish
        self._progress = progress
        self._best: _Best | None = None

    def run(self, design: ClusterDesign) -> ProvisionAnswer:
        """The best cluster of a design; the best so far where the time is up."""
        before, self._best = self._trials.simulated, None
        is_complete, why_none = True, ""
        try:
            why_none = self._fastest(design) if self._wish.rate is None else self._least(design, self._wish.rate)
        except SearchTimeUp:
            is_complete, why_none = False, "the time was up before any cluster had met the SLOs"
        found = self._describe_best(design)
        return ProvisionAnswer(
            design, found, self._trials.simulated - before, is_complete, "" if found is not None else why_none
        )

    def _describe_best(self, design: ClusterDesign) -> ProvisionedCluster | None:
        if self._best is None:
            return None
        prompt, token, rate = self._best
        return ProvisionedCluster(
            prompt=prompt,
            token=token,
            rate=rate,
            usd_per_h=design.usd_per_h(prompt, token),
            kw=design.kw(prompt, token),
            trial=self._trials.try_cluster(design, prompt, token, rate, to_the_end=True),
        )

    def _meets(self, design: ClusterDesign, prompt: int, token: int, rate: float) -> bool:
        machines = f"{prompt} machines" if design.token is None else f"{prompt}P, {token}T"
        self._progress(f"{design.name}: {machines} at {rate:g} requests/s")
        return self._trials.meets(design, prompt, token, rate)

    # ---- least cost or power at a rate ---------------------------------------------------------------------------

    def _least(self, design: ClusterDesign, rate: float) -> str:
        """Set `_best`; what keeps it from there being one."""
        start = self._first_that_meets(design, rate)
        if start is None:
            return self._explain_failure(rate)
        prompt, token = start
        if design.token is None:
            self._best = _Best(_smallest(prompt, lambda count: self._meets(design, count, 0, rate)), 0, rate)
            return ""
        self._take_column(design, prompt, token, rate)
        for direction in (1, -1):
            self._walk(design, rate, prompt, direction)
        return ""

    def _first_that_meets(self, design: ClusterDesign, rate: float) -> tuple[int, int] | None:
        """The estimate, larger and larger until it meets the SLOs or is beyond the limits."""
        prompt_load, token_load = self._loads(design)
        scale = rate
        while True:
            prompt, token = max(1, ceil(prompt_load * scale)), max(1, ceil(token_load * scale))
            if design.token is None:
                prompt, token = max(1, ceil((prompt_load + token_load) * scale)), 0
            if not self._is_within(design, prompt, token):
                return self._last_resort(design, rate)
            if self._meets(design, prompt, token, rate):
                return prompt, token
            scale *= GROWTH

    def _last_resort(self, design: ClusterDesign, rate: float) -> tuple[int, int] | None:
        """The largest cluster within the limits, if that meets the SLOs."""
        columns = list(self._columns(design))
        if not columns:
            return None
        prompt, token = columns[self._balanced(design, columns)]
        return (prompt, token) if self._meets(design, prompt, token, rate) else None

    def _take_column(self, design: ClusterDesign, prompt: int, token: int, rate: float) -> None:
        """So many prompt machines with the fewest token machines, of which `token` are enough."""
        fewest = _smallest(token, lambda count: self._meets(design, prompt, count, rate))
        self._best = _Best(prompt, fewest, rate)

    def _walk(self, design: ClusterDesign, rate: float, start: int, direction: int) -> None:
        """Look for less on the columns beside `start`."""
        misses, prompt = 0, start + direction
        while misses < MAX_MISSES and 1 <= prompt <= self._most_prompt(design):
            token = self._most_token_below_best(design, prompt)
            if token < 1:
                misses += 1
            elif self._meets(design, prompt, token, rate):
                self._take_column(design, prompt, token, rate)
                misses = 0
            else:
                misses += 1
            prompt += direction

    def _most_token_below_best(self, design: ClusterDesign, prompt: int) -> int:
        """The most token machines with which the cluster costs less than the best one."""
        assert self._best is not None, "a column has been taken"
        limit = self._price(design, self._best.prompt, self._best.token) * _LESS
        each = self._price(design, 0, 1)
        spare = limit - self._price(design, prompt, 0)
        return min(self._most_token(design, prompt), floor(spare / each) if spare > 0.0 else 0)

    def _explain_failure(self, rate: float) -> str:
        missed = f"; the largest misses {self._trials.missed_last}" if self._trials.missed_last else ""
        return f"no cluster within the limits meets every SLO at {rate:g} requests/s{missed}"

    def _price(self, design: ClusterDesign, prompt: int, token: int) -> float:
        by_power = self._wish.goal is ProvisionGoal.POWER
        return design.kw(prompt, token) if by_power else design.usd_per_h(prompt, token)

    # ---- the highest rate within a budget ------------------------------------------------------------------------

    def _fastest(self, design: ClusterDesign) -> str:
        """Set `_best`; what keeps it from there being one."""
        columns = list(self._columns(design))
        if not columns:
            return "not even one machine of each pool is within the limits"
        for direction in (0, 1, -1):
            misses = 0
            for prompt, token in _beside(columns, self._balanced(design, columns), direction):
                if misses >= MAX_MISSES:
                    break
                misses = 0 if self._raise_rate(design, prompt, token) else misses + 1
        if self._best is None:
            return self._explain_failure(self._wish.rate_step)
        return ""

    def _columns(self, design: ClusterDesign) -> Iterator[tuple[int, int]]:
        """Clusters that use the budget up, by prompt machines; a baseline has one."""
        most = self._most_prompt(design)
        if design.token is None:
            if most:
                yield most, 0
            return
        for prompt in range(1, most + 1):
            token = self._most_token(design, prompt)
            if token >= 1:
                yield prompt, token

    def _balanced(self, design: ClusterDesign, columns: list[tuple[int, int]]) -> int:
        """The place of the column that the estimate says carries most."""
        prompt_load, token_load = self._loads(design)
        if design.token is None:
            return 0
        return max(range(len(columns)), key=lambda at: min(columns[at][0] / prompt_load, columns[at][1] / token_load))

    def _raise_rate(self, design: ClusterDesign, prompt: int, token: int) -> bool:
        """Whether these machines carry more than the best did; then they are the best."""
        step = self._wish.rate_step
        most = floor(self._trials.traces.most_rate / step)
        known = 0 if self._best is None else round(self._best.rate / step)
        if known == 0:
            prompt_load, token_load = self._loads(design)
            spread = (prompt + token) / (prompt_load + token_load)
            rate = spread if design.token is None else min(prompt / prompt_load, token / token_load)
            guess = min(max(1, floor(rate / step)), most)
        else:
            guess = known + 1

        def is_met(steps: int) -> bool:
            return self._meets(design, prompt, token, steps * step)

        steps = _largest(known, guess, most, is_met)
        if steps > known:
            self._best = _Best(prompt, token, steps * step)
        return steps > known

    # ---- limits and estimates ------------------------------------------------------------------------------------

    def _is_within(self, design: ClusterDesign, prompt: int, token: int) -> bool:
        wish = self._wish
        return (
            prompt + token <= wish.max_machines
            and design.usd_per_h(prompt, token) * _LESS <= wish.max_usd_per_h
            and design.kw(prompt, token) * _LESS <= wish.max_kw
        )

    def _most_prompt(self, design: ClusterDesign) -> int:
        token = 0 if design.token is None else 1
        return _smallest(self._wish.max_machines + 1, lambda count: not self._is_within(design, count, token)) - 1

    def _most_token(self, design: ClusterDesign, prompt: int) -> int:
        return _smallest(self._wish.max_machines + 1, lambda count: not self._is_within(design, prompt, count)) - 1

    def _loads(self, design: ClusterDesign) -> tuple[float, float]:
        """Machines that a request/s keeps busy, at prompts and at tokens: where to begin."""
        prompt_tokens, output_tokens = self._trials.traces.mean_lengths
        token = design.token or design.prompt
        prompt_s = prompt_tokens * design.prompt.iterations.iteration_s(_STEP, 0) / _STEP
        return prompt_s, max(1e-6, output_tokens - 1.0) * _decode_token_s(token)


def _decode_token_s(machine: MachineType) -> float:
    return machine.iterations.iteration_s(0, _DECODES) / _DECODES


def _smallest(enough: int, is_met: Callable[[int], bool], *, too_few: int = 0) -> int:
    """The smallest count above `too_few` that meets; `enough` does, and from the smallest on all do."""
    low, high = too_few, enough
    while high - low > 1:
        middle = (low + high) // 2
        if is_met(middle):
            high = middle
        else:
            low = middle
    return high


def _largest(known: int, guess: int, most: int, is_met: Callable[[int], bool]) -> int:
    """The largest count up to `most` that meets; `known` does, and up to the largest all do. Begins
    with `guess`, and doubles its steps from there."""
    low, high = known, most + 1
    probe, stride = guess, 1
    while known < probe <= most:
        if is_met(probe):
            low, probe = probe, probe + stride
            stride *= 2
        else:
            high = probe
            break
    return _smallest(high, lambda count: not is_met(count), too_few=low) - 1


def _beside(columns: list[tuple[int, int]], start: int, direction: int) -> list[tuple[int, int]]:
    """The column at `start` (direction 0), those after it (1), or those before it, backwards."""
    if direction == 0:
        return columns[start : start + 1]
    return columns[start + 1 :] if direction > 0 else columns[:start][::-1]
