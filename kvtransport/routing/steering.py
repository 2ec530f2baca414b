"""Watches the paths of a running transfer and says when to change them. Pure: fed with what was
acknowledged and when.

A path is *stalled* when nothing has been acknowledged for a while although there was something to
send, *degraded* when over a whole window it moved less than half of what was expected of it. Then,
and now and again without cause, the paths are chosen anew for the bytes that remain, with what was
observed in place of what was believed.

What keeps it from flapping: a path is judged only after it has had time to ramp up; `choose` keeps
what is in use unless something is better by `switch_gain`; a path that was in trouble is believed
to still have the rate it had then for `hold_s`, twice as long each further time, and is not made
one of two meanwhile; after each change the next one without cause must wait twice as long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import final

from ..probing.figures import gbps_of
from .paths import KVPath, NoPath, PathChoice, PathNetwork, PathQuery, choose
from .settings import SteeringSettings


class TriggerKind(StrEnum):
    """Why paths are changed."""

    STALLED = "stalled"
    DEGRADED = "degraded"
    BETTER = "something better"


@dataclass(frozen=True, slots=True)
class Trigger:
    """The path through `via` (None: direct) over the last `over_s` seconds."""

    kind: TriggerKind
    via: str | None
    observed_gbps: float
    expected_gbps: float
    over_s: float


@dataclass(frozen=True, slots=True)
class PathChange:
    """Move the rest of the transfer, `remaining_bytes`, to `choice.paths`."""

    choice: PathChoice
    remaining_bytes: int
    trigger: Trigger
    at: float

    def explain(self) -> str:
        """What was seen, and every candidate."""
        seen = self.trigger
        path = "direct" if seen.via is None else f"via {seen.via}"
        return (
            f"{path} {seen.kind}: {seen.observed_gbps:.3f} Gb/s over {seen.over_s:.1f} s, "
            f"{seen.expected_gbps:.3f} expected; {self.remaining_bytes / 1e6:.1f} MB remain\n{self.choice.explain()}"
        )


@dataclass(slots=True)
class _WatchedPath:
    """One path in use. `points` are (time, bytes acknowledged) while there was something to send."""

    path: KVPath
    expected_gbps: float
    judged_from: float
    moved_at: float
    acked: int = 0
    backlog: int = 0
    points: deque[tuple[float, int]] = field(default_factory=deque)

    def window_s(self, settings: SteeringSettings) -> float:
        return max(settings.window_s, settings.window_rtts * self.path.rtt_s)

    def stall_s(self, settings: SteeringSettings) -> float:
        return max(settings.stall_s, settings.stall_rtts * self.path.rtt_s)

    def rate(self, now: float) -> tuple[float, float]:
        """Gb/s since the oldest point, and how long that is."""
        if not self.points or now <= self.points[0][0]:
            return 0.0, 0.0
        begun, had = self.points[0]
        return gbps_of(self.acked - had, now - begun), now - begun

    def recent_rate(self, now: float, settings: SteeringSettings) -> float:
        """Gb/s over the window's last quarter: what a path came to that got worse within it."""
        since = now - max(self.window_s(settings) / 4.0, 2.0 * self.path.rtt_s)
        begun, had = next((point for point in self.points if point[0] >= since), self.points[-1])
        return gbps_of(self.acked - had, now - begun) if now > begun else self.rate(now)[0]


@dataclass(slots=True)
class _Penalty:
    gbps: float
    until: float
    hold_s: float


@final
class PathController:
    """Of one transfer. `choice` is what it starts with, at `now`."""

    def __init__(
        self, job: PathQuery, choice: PathChoice, *, now: float, settings: SteeringSettings | None = None
    ) -> None:
        self.settings = settings or SteeringSettings()
        self.choice = choice
        self.changes: tuple[PathChange, ...] = ()
        self._job = job
        self._acked: dict[str | None, int] = {}
        self._penalties: dict[str | None, _Penalty] = {}
        self._watched: dict[str | None, _WatchedPath] = {}
        self._look_at = now + self.settings.look_s
        self._watch(choice, now)

    def __repr__(self) -> str:
        return f"<PathController {self.choice.taken.label}, {self.remaining} bytes remain, {len(self.changes)} changes>"

    @property
    def remaining(self) -> int:
        """Bytes that have not been acknowledged."""
        return max(self._job.bytes - sum(self._acked.values()), 0)

    def on_progress(self, via: str | None, acked_bytes: int, backlog_bytes: int, *, now: float) -> None:
        """So many bytes have been acknowledged over this path since the transfer began, and so many
        are waiting for it or in flight on it. A path is judged only while something is."""
        known = self._acked.get(via, 0)
        self._acked[via] = max(acked_bytes, known)
        if (one := self._watched.get(via)) is None:
            return
        if acked_bytes > one.acked:
            one.acked, one.moved_at = acked_bytes, now
        if backlog_bytes <= 0 or one.backlog <= 0:
            # Nothing to send: silence until now says nothing about the path.
            one.points.clear()
            one.moved_at = now
        one.backlog = backlog_bytes
        if now >= one.judged_from:
            one.points.append((now, one.acked))
        horizon = now - one.window_s(self.settings)
        while len(one.points) > 1 and one.points[1][0] <= horizon:
            one.points.popleft()

    def step(self, network: PathNetwork, *, now: float) -> PathChange | None:
        """What to change, if anything. `network` as known now, without this transfer's flow."""
        if self.remaining == 0:
            return None
        trigger = self._find_trouble(now)
        if trigger is None:
            if now < self._look_at:
                return None
            if not all(self._is_judged(one, now) for one in self._watched.values()):
                # What its paths can do is not known while they have little to send.
                self._look_at = now + self.settings.look_s
                return None
            trigger = Trigger(TriggerKind.BETTER, self.choice.paths[0].via, *self._measure_first(now))
        return self._change(network, trigger, now)

    def wake_at(self) -> float:
        """When `step` may have something to say, if no progress is reported before."""
        times = [self._look_at]
        for one in self._watched.values():
            if one.backlog > 0:
                times.append(max(one.moved_at, one.judged_from) + one.stall_s(self.settings))
                if one.points:
                    times.append(one.points[0][0] + one.window_s(self.settings))
        return min(times)

    def _watch(self, choice: PathChoice, now: float) -> None:
        watched: dict[str | None, _WatchedPath] = {}
        for path in choice.paths:
            before = self._watched.get(path.via)
            # A path that stays in use has ramped up already; a new one must be given the time to.
            judged_from = now + self.settings.ramp_rtts * path.rtt_s if before is None else max(before.judged_from, now)
            backlog = before.backlog if before is not None else 0
            acked = self._acked.get(path.via, 0)
            watched[path.via] = _WatchedPath(path, path.gbps, judged_from, now, acked, backlog)
        self._watched = watched

    def _find_trouble(self, now: float) -> Trigger | None:
        """The first path that stalls, else the first that is degraded."""
        slow: Trigger | None = None
        for via, one in sorted(self._watched.items(), key=lambda item: item[0] or ""):
            silent = now - max(one.moved_at, one.judged_from)
            if one.backlog > 0 and silent >= one.stall_s(self.settings):
                return Trigger(TriggerKind.STALLED, via, 0.0, one.expected_gbps, silent)
            if not self._is_judged(one, now):
                continue
            gbps, over = one.rate(now)
            # After an alarm that nothing could be done about, it may have come back.
            one.expected_gbps = min(max(one.expected_gbps, gbps), one.path.gbps)
            if slow is None and gbps < self.settings.slow_share * one.expected_gbps:
                slow = Trigger(
                    TriggerKind.DEGRADED, via, min(gbps, one.recent_rate(now, self.settings)), one.expected_gbps, over
                )
        return slow

    def _is_judged(self, one: _WatchedPath, now: float) -> bool:
        return one.rate(now)[1] >= one.window_s(self.settings)

    def _measure_first(self, now: float) -> tuple[float, float, float]:
        one = self._watched[self.choice.paths[0].via]
        gbps, over = one.rate(now)
        return gbps, one.expected_gbps, over

    def _observed_rates(self, trigger: Trigger, now: float) -> dict[str | None, float]:
        """What the paths in use really move, and what those that were left moved when they were."""
        seen = {via: one.gbps for via, one in self._penalties.items() if one.until > now}
        for via, one in self._watched.items():
            if self._is_judged(one, now):
                seen[via] = one.rate(now)[0]
        if trigger.kind is not TriggerKind.BETTER:
            seen[trigger.via] = trigger.observed_gbps
        return seen

    def _change(self, network: PathNetwork, trigger: Trigger, now: float) -> PathChange | None:
        job = replace(self._job, bytes=self.remaining)
        self._look_at = now + self._look_gap()
        observed = self._observed_rates(trigger, now)
        if trigger.kind is not TriggerKind.BETTER:
            self._penalise(trigger, now)
        current = frozenset(self._watched)
        unsteady = frozenset(via for via, one in self._penalties.items() if one.until > now)
        try:
            choice = choose(
                job,
                network,
                current=current,
                observed=observed,
                warm=current,
                unsteady=unsteady,
                settings=self.settings.paths,
            )
        except NoPath:
            choice = self.choice  # nothing else is possible: wait for this one to move again
        if choice.vias == current:
            for via, one in self._watched.items():
                if via == trigger.via and trigger.kind is not TriggerKind.BETTER:
                    # Known now, and nothing is better: the next alarm is for something worse.
                    one.expected_gbps = trigger.observed_gbps
                    one.points.clear()
                    one.moved_at = one.judged_from = now
            return None
        self.choice = choice
        self._watch(choice, now)
        made = PathChange(choice, job.bytes, trigger, now)
        self.changes = (*self.changes, made)
        self._look_at = now + self._look_gap()
        return made

    def _penalise(self, trigger: Trigger, now: float) -> None:
        before = self._penalties.get(trigger.via)
        hold = self.settings.hold_s if before is None else min(2.0 * before.hold_s, self.settings.hold_limit_s)
        self._penalties[trigger.via] = _Penalty(trigger.observed_gbps, now + hold, hold)

    def _look_gap(self) -> float:
        return float(self.settings.look_s * 2.0 ** min(len(self.changes), 10))
