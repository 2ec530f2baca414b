"""Whether a request is accepted, or refused at once with the time to come back. No I/O, no clock.

    refusal = find_refusal(PriorityClass.of(body.priority), Expected(start_s=12.0, ttft_s=1.5, left_s=300.0), settings)

A request has vLLM's `priority`: lower is handled earlier, 0 is usual. Its sign is the class: below 0 urgent, above 0
batch. A class has a limit for the time to the first token: some times the deadline that the service's plan has for it,
and at least some seconds; nobody waits beyond the deadline of its own request. A request whose first token would come
later, by what waits before it, the rate at which turns have been given lately (`drain_rate`) and its own prompt, is
refused while that is so: it would hold a place and miss its deadline all the same. The time that is told is when the
queue will have become short enough. Where nothing waits nobody is refused, however long its prompt is.

Lower classes may have a smaller share of a gateway's bounded queue, so they are refused first where that is what is
scarce. They also have fewer turns, but never none (`fair_queue`). What engines have is overtaken by nobody: where that
makes urgent requests late, a class that has had its weight's part lately is refused (`ClassParts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import inf, isfinite
from types import MappingProxyType
from typing import Final, NamedTuple, final

MOST_RETRY_S: Final = 300.0
"""Nobody is told to come back later than this: by then it is another situation."""


LATELY: Final = 128
"""Requests that a class's part is counted over. More: parts are kept more closely; fewer: sooner."""

HEAVY: Final = 0.75
"""Of the time that urgent requests may take: where engines alone take so long, others are kept to their parts."""


class PriorityClass(IntEnum):
    """How urgent a request is, by the sign of its priority."""

    URGENT = 0
    NORMAL = 1
    BATCH = 2

    @classmethod
    def of(cls, priority: int) -> PriorityClass:
        """The class of a request with this `priority`."""
        if priority == 0:
            return cls.NORMAL
        return cls.URGENT if priority < 0 else cls.BATCH

    @property
    def label(self) -> str:
        """For metrics and messages."""
        return self.name.lower()


CLASS_LABELS: Final = tuple(each.label for each in PriorityClass)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRules:
    """What a class is given.

    `lateness`: its first token may come after so many times the plan's deadline for it. `least_s`: and so late
    anyway, in seconds. Higher of both: fewer are refused, and more that were accepted are late. `queue_share`: of a
    bounded queue, how much there may be in all when one of this class is added. `weight`: of a client's turns, beside
    those of its other classes. `cost`: what a token costs its client in its turns beside others' clients; above 1, it
    leaves more to them.
    """

    lateness: float
    least_s: float
    queue_share: float = 1.0
    weight: float = 1.0
    cost: float = 1.0

    def __post_init__(self) -> None:
        if not (self.lateness >= 0.0 and self.least_s >= 0.0):
            raise ValueError("lateness and least_s must not be negative")
        if not 0.0 < self.queue_share <= 1.0:
            raise ValueError(f"queue_share is {self.queue_share}; it must be above 0 and at most 1")
        if not (isfinite(self.weight) and self.weight > 0.0 and isfinite(self.cost) and self.cost > 0.0):
            raise ValueError("weight and cost must be above 0")

    def limit_s(self, ttft_s: float) -> float:
        """How late a first token may be, by the plan's deadline for the first token (0: it has none)."""
        return max(self.least_s, self.lateness * ttft_s if ttft_s > 0.0 else 0.0)


DEFAULT_RULES: Final[Mapping[PriorityClass, ClassRules]] = MappingProxyType(
    {
        PriorityClass.URGENT: ClassRules(lateness=2.0, least_s=5.0, weight=16.0),
        PriorityClass.NORMAL: ClassRules(lateness=10.0, least_s=30.0, weight=4.0),
        PriorityClass.BATCH: ClassRules(lateness=0.0, least_s=inf, queue_share=0.5, weight=1.0, cost=4.0),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """The rules of each class. Of batch requests only their own deadlines count, by default."""

    rules: Mapping[PriorityClass, ClassRules] = field(default_factory=lambda: DEFAULT_RULES)

    @classmethod
    def with_limit(cls, lateness: float, least_s: float) -> AdmissionSettings:
        """Normal requests wait for so long at most (see `ClassRules`), urgent ones no longer than that."""
        urgent, normal = DEFAULT_RULES[PriorityClass.URGENT], DEFAULT_RULES[PriorityClass.NORMAL]
        limited = {
            PriorityClass.NORMAL: replace(normal, lateness=lateness, least_s=least_s),
            PriorityClass.URGENT: replace(
                urgent, lateness=min(urgent.lateness, lateness), least_s=min(urgent.least_s, least_s)
            ),
        }
        return cls(rules=MappingProxyType({**DEFAULT_RULES, **limited}))


class Expected(NamedTuple):
    """Of a request that arrives, in seconds: when its turn will come, how long its prompt takes from then on, the
    plan's deadline for first tokens (0: none), and how long its client waits for all of the answer. `backlog_s`: of the
    time to its turn, what lies at engines; `has_its_part`: its class, of what was admitted lately."""

    start_s: float
    prefill_s: float
    ttft_s: float
    left_s: float
    backlog_s: float = 0.0
    has_its_part: bool = False


@final
class ClassParts:
    """Which classes have asked lately, and what of it each was given: counts of about the latest LATELY requests."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._weights = {kind: rules.weight for kind, rules in settings.rules.items()}
        self._asked = dict.fromkeys(settings.rules, 0.0)
        self._given = dict.fromkeys(settings.rules, 0.0)

    def __repr__(self) -> str:
        return f"<ClassParts { ({kind.label: round(part, 1) for kind, part in self._given.items()}) }>"

    def ask(self, kind: PriorityClass) -> None:
        """A request of this class has come."""
        _count(self._asked, kind)

    def give(self, kind: PriorityClass) -> None:
        """One has been admitted."""
        _count(self._given, kind)

    def has_its_part(self, kind: PriorityClass) -> bool:
        """Whether it was given its weight's part, beside the classes that have asked as well; alone it never has."""
        asking = sum(weight for each, weight in self._weights.items() if each is kind or self._asked[each] > 0.5)
        given = sum(self._given.values())
        share = self._weights[kind] / asking
        return share < 1.0 and given > 0.0 and self._given[kind] / given >= share


def _count(counts: dict[PriorityClass, float], kind: PriorityClass) -> None:
    for each in counts:
        counts[each] *= 1.0 - 1.0 / LATELY
    counts[kind] += 1.0


class AdmissionRefusal(NamedTuple):
    """`text`: a line for the client. `retry_after_s`: when the queue will be short enough."""

    text: str
    retry_after_s: float


def find_refusal(kind: PriorityClass, expected: Expected, settings: AdmissionSettings) -> AdmissionRefusal | None:
    """Why a request of this class must not wait here; None: it may."""
    limit_s = min(settings.rules[kind].limit_s(expected.ttft_s), expected.left_s)
    urgent_s = settings.rules[PriorityClass.URGENT].limit_s(expected.ttft_s)
    engine_s = expected.backlog_s + expected.prefill_s
    is_heavy = expected.start_s > 0.0 and engine_s > HEAVY * urgent_s
    if is_heavy and kind is not PriorityClass.URGENT and expected.has_its_part:
        text = f"engines take {_seconds(engine_s)} for it, and {kind.label} requests have had their part"
        return AdmissionRefusal(text, min(MOST_RETRY_S, engine_s))
    first_s = expected.start_s + expected.prefill_s
    if not (first_s > limit_s and expected.start_s > 0.0):
        return None
    retry_after_s = min(MOST_RETRY_S, expected.start_s, first_s - limit_s)
    whose = "its deadline is" if limit_s == expected.left_s else f"{kind.label} requests may wait"
    return AdmissionRefusal(
        f"its first token would take {_seconds(first_s)}, and {whose} {limit_s:.3g} s", retry_after_s
    )


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < MOST_RETRY_S * 10 else "very long"
