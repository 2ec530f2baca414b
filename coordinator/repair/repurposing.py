"""Repurposing (Splitwise, section IV-A): machines that stay borrowed by the other pool move there for good.

Gateways that route by the policy `splitwise` borrow a machine for as long as it has work of the other kind. Where more
than a tenth of the machines stay borrowed for long, the pools do not fit the traffic. Then the coordinator changes the
phase of one of them, in a quiet moment::

    seconds borrowed, less seconds at home  >= 300 s   of more than 10 % of the machines,
    requests in the network                 <= half of their mean over the last 300 s or so,
    then one machine, of those borrowed the most, gets the other phase; all are watched anew.

The plan owns the pools, so gateways have nothing to agree on: they follow the next plan, as with any change of phases.
A phase that was chosen so is kept for half an hour, whatever the planner expects of another one, and for twice as long
when the same machine is moved again soon after. Meanwhile no machine moves the other way. So the pools do not flap,
neither by themselves nor against the planner, which is free again afterwards.

All nodes watch, since any may be elected; what has been kept so far is the old coordinator's knowledge, and ends with
it. A machine of several replicas is left as it is: plans pin the phase of whole boxes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, inf
from typing import Final, NamedTuple, final

import numpy as np

from ..plan import Phase, Plan, Replica
from ..routing.interface import ReplicaLoads
from ..routing.splitwise import find_borrowed

OTHER_PHASE: Final = {Phase.PREFILL: Phase.DECODE, Phase.DECODE: Phase.PREFILL}

_LONGEST_GAP_S: Final = 30.0
"""Between two looks, more does not count: nobody knows what was in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepurposeSettings:
    """When machines are moved between the pools.

    - `share`: more than this share of the machines has to stay borrowed. Higher: pools that fit worse are borne.
    - `long_s`: for so many seconds more than they are at home. Longer: bursts move nobody, and a shift is answered
      later.
    - `quiet`: requests in the network, as a share of their mean, below which one is moved. Lower: fewer requests see
      the change, and it waits longer for its moment.
    - `hold_s`, up to `most_hold_s`: for how long a machine keeps the phase that it was moved to.
    """

    share: float = 0.1
    long_s: float = 300.0
    quiet: float = 0.5
    hold_s: float = 1800.0
    most_hold_s: float = 14_400.0


class PoolMove(NamedTuple):
    """A replica that was moved: its phase since `at`, for `hold_s` at least."""

    phase: Phase
    at: float
    hold_s: float

    @property
    def until(self) -> float:
        """When it may have another one."""
        return self.at + self.hold_s


@final
class Repurposing:
    """Watches the pools of a service, and says which replicas are to have another phase than they began with."""

    def __init__(self, settings: RepurposeSettings | None = None) -> None:
        self._settings = settings or RepurposeSettings()
        # By replica and its phase, less seconds at home since.
        self._borrowed_s: dict[tuple[str, Phase], float] = {}
        self._mean_requests = 0.0
        self._quiet_now = False
        self._seen_at = inf
        self._moves: dict[str, PoolMove] = {}  # the latest of each replica; some are over

    def __repr__(self) -> str:
        return f"<Repurposing {len(self._moves)} moved>"

    def observe(self, plan: Plan, loads: ReplicaLoads, now: float) -> None:
        """Take in what the replicas of the running plan report."""
        settings = self._settings
        gap_s = min(max(0.0, now - self._seen_at), _LONGEST_GAP_S)
        self._seen_at = now
        borrowed = find_borrowed(plan, loads)
        before, self._borrowed_s = self._borrowed_s, {}
        for replica, is_borrowed in zip(plan.replicas, borrowed.tolist(), strict=True):
            key = replica.id, replica.phase
            seconds = before.get(key, 0.0) + (gap_s if is_borrowed else -gap_s)
            # Remembered for as long again, so that a quiet moment comes in time.
            self._borrowed_s[key] = min(max(0.0, seconds), 2.0 * settings.long_s)
        requests = float(np.sum(loads.outstanding))
        self._quiet_now = requests <= settings.quiet * self._mean_requests
        self._mean_requests += (requests - self._mean_requests) * (1.0 - exp(-gap_s / settings.long_s))
        self._moves = {name: move for name, move in self._moves.items() if now < move.until + 2.0 * move.hold_s}

    def move_one(self, plan: Plan, now: float) -> str:
        """Move a machine to the other pool if it is time: a line for people, "" where none is moved."""
        settings = self._settings
        lasting = {name for (name, _), seconds in self._borrowed_s.items() if seconds >= settings.long_s}
        if not self._quiet_now or len(lasting) <= settings.share * len(plan.replicas):
            return ""
        chosen = self._pick(plan, lasting, now)
        if chosen is None:
            return ""
        phase, last = OTHER_PHASE[chosen.phase], self._moves.get(chosen.id)
        hold_s = settings.hold_s if last is None else min(2.0 * last.hold_s, settings.most_hold_s)
        self._moves[chosen.id] = PoolMove(phase, now, hold_s)
        self._borrowed_s.clear()  # one by one: whether more have to follow shows without this one
        return (
            f"{chosen.id} is moved to {phase}: {len(lasting)} of {len(plan.replicas)} replicas stayed "
            "borrowed by the other pool"
        )

    def phases(self, now: float) -> Mapping[str, Phase]:
        """By replica, the phases that plans are to keep to."""
        return {name: move.phase for name, move in self._moves.items() if now < move.until}

    def pins(self, plan: Plan | None, now: float) -> Mapping[str, Phase]:
        """The same by box, of those of a plan."""
        moved = self.phases(now)
        found = {} if plan is None else {each.id: each.peers for each in plan.replicas if each.id in moved}
        return {peer: moved[name] for name, peers in found.items() for peer in peers}

    def _pick(self, plan: Plan, lasting: set[str], now: float) -> Replica | None:
        """Of the pool that lends more machines than the other, the one that was borrowed the longest."""
        lent = Counter(each.phase for each in plan.replicas if each.id in lasting)
        if lent[Phase.PREFILL] == lent[Phase.DECODE]:
            return None
        home = Phase.PREFILL if lent[Phase.PREFILL] > lent[Phase.DECODE] else Phase.DECODE
        # Nobody moves against a move that is still held, and a pool keeps its last machine.
        if any(now < move.until and move.phase is home for move in self._moves.values()):
            return None
        if len(plan.in_phase(home)) < 2:
            return None
        replicas_of = Counter(peer for each in plan.replicas for peer in each.peers)
        movable = [
            each
            for each in plan.replicas
            if each.phase is home and each.id in lasting and all(replicas_of[peer] == 1 for peer in each.peers)
        ]
        return min(movable, key=lambda each: (-self._borrowed_s[each.id, each.phase], each.id), default=None)
