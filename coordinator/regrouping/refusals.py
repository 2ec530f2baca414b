"""Which boxes keep their part for a while, because they could not take another.

A box that has refused its part of a change has a reason that does not pass soon: memory, a driver, a disk. Other
groups are looked for around it until its time is over, which doubles with each refusal; or until it leaves, since who
comes back may have been mended::

    refuses ── keeps its part for 6 h ── asked again ── refuses ── 12 h ── asked again ── takes it
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple, final

from ..bounds import MAX_REFUSED
from ..names import name_of
from ..plan import RefusedPart

MAX_REASON: Final = 200
"""Characters of a reason: it is another box's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalSettings:
    """How long a refusal is remembered: `first_s`, twice as long after each further one up to `longest_s`. Longer: a
    box that was mended waits longer; shorter: boxes load in vain more often. After a failure the coordinator rests for
    an hour or more anyway (`adoption`), so `first_s` is longer than that."""

    first_s: float = 21_600.0
    longest_s: float = 172_800.0


class _Refusal(NamedTuple):
    until: float
    hold_s: float
    reason: str


@final
class Refusals:
    """What the coordinator remembers of boxes that refused. Times are seconds of one clock, handed in."""

    def __init__(self, settings: RefusalSettings | None = None) -> None:
        self._settings = settings or RefusalSettings()
        self._known: dict[str, _Refusal] = {}

    def __repr__(self) -> str:
        return f"<Refusals boxes={len(self._known)}>"

    def note(self, refused: Mapping[str, str], now: float) -> None:
        """These boxes have refused, each for its reason. One that is remembered still is told of again: no news."""
        for box, reason in refused.items():
            before = self._known.get(box)
            if before is not None and now < before.until:
                continue
            hold_s = min(2.0 * before.hold_s, self._settings.longest_s) if before else self._settings.first_s
            self._remember(box, _Refusal(now + hold_s, hold_s, reason[:MAX_REASON]))

    def learn(self, told: Iterable[RefusedPart], now: float) -> None:
        """What the plan of an earlier coordinator says, as far as it is news."""
        for each in told:
            if each.peer not in self._known:
                hold_s = min(each.for_s, self._settings.longest_s)
                self._remember(each.peer, _Refusal(now + hold_s, hold_s, each.reason))

    def forget(self, boxes: Collection[str], now: float) -> None:
        """Keep nothing of boxes other than these, which have left, nor of refusals that were over for as long again:
        until then the next one counts as a further one."""
        self._known = {
            box: known for box, known in self._known.items() if box in boxes and now < known.until + known.hold_s
        }

    def keeping(self, now: float) -> frozenset[str]:
        """The boxes that keep their part at `now`."""
        return frozenset(box for box, known in self._known.items() if now < known.until)

    def wake_at(self, now: float) -> float:
        """When the next box may be asked again; infinite: none waits for that."""
        return min((known.until for known in self._known.values() if now < known.until), default=inf)

    def tell(self, now: float) -> tuple[RefusedPart, ...]:
        """The same for the plan, with the reasons and for how long still."""
        return tuple(
            RefusedPart(peer=box, reason=known.reason, for_s=known.until - now)
            for box, known in sorted(self._known.items())
            if now < known.until
        )

    def _remember(self, box: str, refusal: _Refusal) -> None:
        self._known.pop(box, None)
        while len(self._known) >= MAX_REFUSED:
            self._known.pop(min(self._known, key=lambda each: self._known[each].until))
        self._known[box] = refusal


def describe_refusal(refused: RefusedPart) -> str:
    """A line for people."""
    return (
        f"{name_of(refused.peer)} keeps its part for {refused.for_s / 3600.0:.1f} h from this plan on: it could not "
        f"take another ({refused.reason})"
    )
