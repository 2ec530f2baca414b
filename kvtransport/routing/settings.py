"""What an operator may tune about the choice of paths, and about leaving one in mid-transfer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import inf

from ..errors import FiguresError
from ..probing.figures import require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSettings:
    """How much better a path must be. Factors of time, above 1: larger changes less and wastes
    more.

    relay_gain       by how much a relay must beat a direct path that is possible. Relayed bytes
                     are billed twice as often and take another box's bandwidth.
    stripe_gain      by how much two paths must beat the best one.
    switch_gain      by how much anything must beat what is in use.
    give_up_factor   a relay that at its best needs so many times as long as the direct path is not
                     worked out: it could not make a stripe worth its gain either.
    striped_relays   stripes are tried over the direct path and this many of the best relays. Each
                     costs a prediction for every other one.
    """

    relay_gain: float = 1.25
    stripe_gain: float = 1.10
    switch_gain: float = 1.15
    give_up_factor: float = 4.0
    striped_relays: int = 3

    def __post_init__(self) -> None:
        for name in ("relay_gain", "stripe_gain", "switch_gain", "give_up_factor"):
            if not 1.0 <= getattr(self, name) < inf:
                raise FiguresError(f"paths.{name} is {getattr(self, name)}; it must be at least 1")
        if self.striped_relays < 0:
            raise FiguresError(f"paths.striped_relays is {self.striped_relays}; it must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class SteeringSettings:
    """How soon a path is given up. Longer means fewer changes and more time lost on a bad path.

    window_s       seconds over which a rate is measured, and at least window_rtts round trips.
    stall_s        seconds without progress that make a path stalled, and at least stall_rtts round
                   trips.
    ramp_rtts      a new path is not judged for so many: three to connect and greet, seven doublings
                   to a full window.
    slow_share     below this share of the rate that was expected, a path is degraded. Higher reacts
                   to less and takes noise for trouble.
    look_s         how often a better path is looked for without cause; doubled after each change.
    hold_s         how long a path that was in trouble is not trusted; doubled each further time,
    hold_limit_s   up to this.
    paths          by how much the new path must be better.
    """

    window_s: float = 1.0
    window_rtts: float = 4.0
    stall_s: float = 1.0
    stall_rtts: float = 5.0
    ramp_rtts: float = 10.0
    slow_share: float = 0.5
    look_s: float = 5.0
    hold_s: float = 30.0
    hold_limit_s: float = 600.0
    paths: PathSettings = field(default_factory=PathSettings)

    def __post_init__(self) -> None:
        timed = (each.name for each in fields(self) if each.name not in ("slow_share", "paths"))
        require_positive(self, "steering", timed)
        if not 0.0 < self.slow_share < 1.0:
            raise FiguresError(f"steering.slow_share is {self.slow_share}; it must be in (0, 1)")

    @classmethod
    def wan(cls) -> SteeringSettings:
        """Boxes in different places: the default."""
        return cls()

    @classmethod
    def lan(cls) -> SteeringSettings:
        """Boxes in one place, where KV moves in fractions of a second and a second is long."""
        return cls(window_s=0.25, stall_s=0.25, look_s=2.0, hold_s=10.0, hold_limit_s=120.0)
