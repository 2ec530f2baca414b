"""Plans of the running network tried by simulated requests, in the process that plans.

The requests are drawn from what gateways say they are asked for, which any of them may lie about; so all trials of a
task together get so many seconds of a core, and then the plan is made with what they have found.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Final, final

from ...bootstrap.settings import NetworkSettings
from ...coordinator.placement.planned import Judge, Placement
from ...coordinator.placement.replay import Judged
from ...coordinator.placement.values import PlacementProblem
from ...coordinator.planning.model.problem import Problem, Proposal
from ...coordinator.planning.upper.trials import PlanTrial, TrialOutcome, TrialsOver
from ...sims.placement.judging import SimulatedPlacements
from ...sims.records import TraceError
from ...sims.results.trials import AS_NETWORK, SimulatedTrial
from ...sims.scenario import SimSettings, WorldError
from ..engine.transfers.wait_limits import WaitLimitSettings
from ..settings import WAN

KILLED_S: Final = 0.1
"""Until a box whose processes end is known to be dead: its connections close, nobody answers when
it is dialled again (docs/network.md has it measured)."""

REQUESTS: Final = 300
"""Of one run, however large the network is: the share of them in time is off by two percent."""

SEED: Final = 0

LOADS: Final = (1.0, 1.3, 1.7)
"""Multiples of what is asked for."""


@final
class CoreTime:
    """So many seconds of a core, after which what uses them ends with TrialsOver. For the main thread of a process that
    has no other use for SIGVTALRM."""

    def __init__(self, limit_s: float) -> None:
        self._left_s = limit_s

    @contextmanager
    def use(self) -> Iterator[None]:
        """For what is done meanwhile."""
        if self._left_s <= 0.0:
            raise TrialsOver
        began = time.process_time()
        before = signal.signal(signal.SIGVTALRM, _end_trials)
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._left_s)
            yield
        except (WorldError, TraceError, MemoryError) as error:  # by what somebody tells; formulas can do with it
            raise TrialsOver from error
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, before)
            self._left_s -= time.process_time() - began


@final
class LimitedTrial:
    """A trial that ends with TrialsOver once it has used up `limit_s` seconds of a core (see `CoreTime`)."""

    def __init__(self, trial: PlanTrial, limit_s: float) -> None:
        self._trial = trial
        self._time = CoreTime(limit_s)

    def __call__(self, proposals: Sequence[Proposal]) -> TrialOutcome:
        """See `PlanTrial`."""
        with self._time.use():
            return self._trial(proposals)

    def carries(self, proposals: Sequence[Proposal], factor: float) -> bool:
        """See `PlanTrial`."""
        with self._time.use():
            return self._trial.carries(proposals, factor)


def _end_trials(number: int, frame: FrameType | None) -> None:
    raise TrialsOver


@final
@dataclass(frozen=True, slots=True)
class LoadTrial:
    """Tries plans at LOADS times what is asked for: `attainment` is the mean of the shares in time, so that of plans
    that serve today's requests equally well the one with more room is better; `capacity` the highest of LOADS at which
    the target is kept."""

    runs: SimulatedTrial

    def __call__(self, proposals: Sequence[Proposal]) -> TrialOutcome:
        """See `PlanTrial`."""
        shares = [self.runs.share(proposals, load) for load in LOADS]
        target = self.runs.problem.services[0].slo.target
        kept = [load for load, share in zip(LOADS, shares, strict=True) if share >= target]
        return TrialOutcome(sum(shares) / len(shares), max(kept, default=0.0))

    def carries(self, proposals: Sequence[Proposal], factor: float) -> bool:
        """See `PlanTrial`."""
        return self.runs.carries(proposals, factor)


def trials_within(limit_s: float) -> Callable[[Problem], LimitedTrial]:
    """Makes the trial of a problem: requests under the default policy, in a network that hears of things as late as the
    running one. All together take so many seconds of a core at most."""

    def make(problem: Problem) -> LimitedTrial:
        runs = SimulatedTrial(
            problem=problem, seeds=(SEED,), seconds=0.0, requests=REQUESTS, is_even=True,
            settings=settings_of_network([box.id for box in problem.cluster.boxes]),
        )  # fmt: skip
        return LimitedTrial(LoadTrial(runs), limit_s)

    return make


def judges_within(limit_s: float) -> Callable[[PlacementProblem], Judge]:
    """Makes who judges placements of a problem. All together take so many seconds of a core at most, and end with
    TrialsOver."""

    def make(problem: PlacementProblem) -> Judge:
        settings = replace(AS_NETWORK, kv_wait_limit=WaitLimitSettings().gain)
        simulated, core = SimulatedPlacements(problem, settings), CoreTime(limit_s)

        def judge(placement: Placement) -> Judged:
            with core.use():
                return simulated(placement)

        return judge

    return make


def settings_of_network(boxes: Sequence[str]) -> SimSettings:
    """Requests are asked for at all boxes in turn, under the default policy, in a network that hears of things as late
    as the running one."""
    settings = replace(AS_NETWORK, gateways=tuple(boxes), kv_wait_limit=WaitLimitSettings().gain)
    return settings_with_network_times(settings, len(boxes), killed=False)


def settings_with_network_times(settings: SimSettings, boxes: int, *, killed: bool) -> SimSettings:
    """With the times that the running network notices things in, for boxes in different places; `killed`: processes of
    lost boxes end, else they fall silent."""
    network = NetworkSettings.wan()
    # What hangs is pinged once it has been silent, and given up when it does not answer that.
    silent_s = network.watch_ping_s + network.hung_s
    return replace(
        settings,
        detect_s=KILLED_S if killed else silent_s,
        dead_s=KILLED_S if killed else network.dead_s,
        told_s=WAN.links_interval_s * max(1.0, boxes / WAN.links_nodes),
        quiet_s=WAN.quiet_s,
    )
