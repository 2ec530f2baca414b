"""What happens in a run, all from one seed: which fault hits whom and when, and what clients ask. Pure.

A schedule names the role of a victim, not a box: who has that role is known only when the time has come.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from ..errors import UsageError

CALM_S: Final = 3.0  # before the first fault, for requests to begin
FLAPS: Final = 3  # times that a box that flaps is killed
MAX_BOXES: Final = 16
EMULATED: Final = "emulated"
VLLM: Final = "vllm"
LOOPBACK: Final = "loopback"
WAN: Final = "wan"
STARTS_AGAIN_S: Final = (0.5, 3.0)  # from the end of a box until its owner starts it again
FLAPS_S: Final = (0.3, 2.5)  # from a start of a box that flaps to its next end: before it has joined, or after
STOPPED_S: Final = (0.5, 2.0, 5.0, 10.0)  # not noticed, found hung, suspected, found dead; links are cut as long
SLOW_S: Final = (5.0, 12.0)
SPLIT_S: Final = (
    3.0,
    15.0,
)  # each half waits for the other, or has a coordinator of its own
MOST_AWAY: Final = 2  # boxes at once that something was done to and that do not serve again; a further fault waits


DrawPrompt = Callable[[random.Random], tuple[int, ...]]


class FaultKind(Enum):
    """What happens to a box."""

    KILL = "kill"  # SIGKILL to all its processes; started again with its home
    STOP = "stop"  # SIGSTOP to all its processes, and SIGCONT
    FLAP = "flap"  # killed again and again, soon after it was started
    LEAVE = "leave"  # SIGTERM to its agent, and started again
    KILL_ENGINE = "kill engine"  # SIGKILL to its engine alone, which its agent starts again
    STOP_ENGINE = "stop engine"  # SIGSTOP to its engine alone, and SIGCONT
    CUT = "cut"  # nothing passes between it and all others; those that are hit together still hear each other
    SLOW = "slow"  # all its links are thin and long
    REGROUP = "regroup"  # two boxes are ordered to hold the model together, or to part again: their engines load anew
    SPLIT = "split"  # nothing passes between one half of the boxes and the other; clients reach both
    FILL_DISK = "fill disk"  # no room for its state, its logs and its plans


class VictimRole(Enum):
    """To whom it happens."""

    ANY = "any box"
    BOOTSTRAP = "bootstrap"
    COORDINATOR = "coordinator"
    GATEWAY = "gateway"  # of a request under way
    PREFILL = "prefill"
    DECODE = "decode"
    KV_ENDS = "both ends"  # a box that prefills and one that decodes, at once
    RELAY = "relay"  # to boxes that nobody can dial
    HALF = "half of the boxes"
    PLAN = "the plan"


Combination = tuple[FaultKind, VictimRole]
_ENGINES: Final = (VictimRole.PREFILL, VictimRole.DECODE)
_ROLES: Final = tuple(role for role in VictimRole if role not in (VictimRole.RELAY, VictimRole.HALF, VictimRole.PLAN))

ENDING: Final = frozenset({FaultKind.KILL, FaultKind.FLAP, FaultKind.LEAVE})
"""Those that end the agent of a box."""

OF_ENGINES: Final = frozenset({FaultKind.KILL_ENGINE, FaultKind.STOP_ENGINE})
OF_LINKS: Final = frozenset({FaultKind.CUT, FaultKind.SLOW, FaultKind.SPLIT})

COMBINATIONS: Final[tuple[Combination, ...]] = (
    *((FaultKind.KILL, role) for role in _ROLES),
    *((FaultKind.STOP, role) for role in _ROLES),
    *((FaultKind.FLAP, role) for role in (VictimRole.ANY, VictimRole.BOOTSTRAP, VictimRole.GATEWAY)),
    *((FaultKind.LEAVE, role) for role in (VictimRole.ANY, VictimRole.GATEWAY)),
    *((FaultKind.KILL_ENGINE, role) for role in _ENGINES),
    *((FaultKind.STOP_ENGINE, role) for role in _ENGINES),
)
"""Which faults hit whom. Each comes as often as any other."""

REGROUP_COMBINATIONS: Final[tuple[Combination, ...]] = ((FaultKind.REGROUP, VictimRole.PLAN),)
"""Those of engines that are stages and prefill for others as well: emulated stages transfer no KV."""

ROOT_COMBINATIONS: Final[tuple[Combination, ...]] = (
    *((FaultKind.CUT, role) for role in _ROLES),
    (FaultKind.SPLIT, VictimRole.HALF),
    *((FaultKind.SLOW, role) for role in (VictimRole.COORDINATOR, VictimRole.GATEWAY, *_ENGINES, VictimRole.KV_ENDS)),
    *((FaultKind.FILL_DISK, role) for role in (VictimRole.ANY, VictimRole.COORDINATOR, VictimRole.GATEWAY)),
)
"""Those that need root, since links are emulated and disks small."""

RELAY_COMBINATIONS: Final[tuple[Combination, ...]] = (
    (FaultKind.KILL, VictimRole.RELAY),
    (FaultKind.STOP, VictimRole.RELAY),
    (FaultKind.LEAVE, VictimRole.RELAY),
)
"""Those of networks with boxes that nobody can dial."""


class ChaosSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`faults` and `requests` within `seconds`, of `boxes` that serve; one more is the bootstrap. `engine`: emulated,
    with these `cards` and this `model`, or vllm, with the bundled model. `links`: loopback, or wan, where they are cut
    and slowed too, and disks filled. Tokens of prompts and answers at most; `deadline_s` of each request; `clients`
    that ask in turn. `closed`: so many of the boxes cannot be dialled, so that KV between them goes over a relay.
    `liar`: there is one more box, which lies."""

    seed: int = 0
    faults: int = 200
    requests: int = 2000
    seconds: float = 1080.0
    boxes: int = 6
    clients: int = 3
    engine: str = EMULATED
    cards: str = "1xA40"
    model: str = "qwen2.5-14b"
    links: str = LOOPBACK
    closed: int = 0
    liar: bool = False
    prompt: int = 128
    output: int = 64
    deadline_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """`lasts_s`: until a killed box starts again, or a stopped one goes on. `pauses_s`: of a box that flaps, from each
    start to the next kill. `pick` in [0, 1) chooses among those that have the role."""

    number: int
    at_s: float
    kind: FaultKind
    victim: VictimRole
    lasts_s: float
    pauses_s: tuple[float, ...] = ()
    pick: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_s:6.1f} s  {self.kind.value} {self.victim.value}, {self.lasts_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """A prompt as tokens, and how many are wanted of its answer."""

    number: int
    at_s: float
    client: int
    prompt: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRoles:
    """A box to which something may be done now. `is_kept`: its agent is not to end, in the whole run."""

    number: int
    roles: frozenset[VictimRole]
    is_kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSchedule:
    """All that happens, by time."""

    faults: tuple[PlannedFault, ...]
    requests: tuple[PlannedRequest, ...]


def check_settings(settings: ChaosSettings) -> None:
    """Raise UsageError for what cannot be run."""
    least = {"faults": 0, "requests": 1, "boxes": 4, "clients": 1, "prompt": 8, "output": 2}
    for name, low in least.items():
        if getattr(settings, name) < low:
            raise UsageError(f"{name}: {getattr(settings, name)} is less than {low}")
    if settings.boxes > MAX_BOXES:
        raise UsageError(f"boxes: {settings.boxes} are more than {MAX_BOXES}, which one machine does not carry")
    for name, known in (("links", (LOOPBACK, WAN)), ("engine", (EMULATED, VLLM))):
        if getattr(settings, name) not in known:
            raise UsageError(f"{name}: {getattr(settings, name)!r} is neither {known[0]} nor {known[1]}")
    if not 0 <= settings.closed <= settings.boxes - 2:
        raise UsageError(f"closed: {settings.closed} is not between 0 and {settings.boxes - 2}: two must be dialled")
    if not CALM_S < settings.seconds <= 86_400:
        raise UsageError(f"seconds: {settings.seconds:g} is not between {CALM_S:g} and 86400")
    if not 1 <= settings.deadline_s <= 3600:
        raise UsageError(f"deadline_s: {settings.deadline_s:g} is not between 1 and 3600")


def draw_schedule(settings: ChaosSettings, draw_prompt: DrawPrompt) -> ChaosSchedule:
    """The schedule of a seed."""
    rng = random.Random(f"faults {settings.seed}")
    times = _spread(rng, settings.faults, CALM_S, settings.seconds)
    combinations = COMBINATIONS if settings.links == LOOPBACK else (*COMBINATIONS, *ROOT_COMBINATIONS)
    combinations = (*combinations, *REGROUP_COMBINATIONS) if settings.engine == VLLM else combinations
    combinations = (*combinations, *RELAY_COMBINATIONS) if settings.closed else combinations
    kinds = _deal(rng, combinations, settings.faults)
    faults = [_draw_fault(rng, number, at, *kinds[number]) for number, at in enumerate(times)]
    rng = random.Random(f"requests {settings.seed}")
    times = _spread(rng, settings.requests, 0.0, settings.seconds)
    requests = [
        PlannedRequest(
            number=number,
            at_s=at,
            client=number % settings.clients,
            prompt=draw_prompt(rng),
            output=rng.randint(settings.output // 2, settings.output),
        )
        for number, at in enumerate(times)
    ]
    return ChaosSchedule(faults=tuple(faults), requests=tuple(requests))


def choose_victims(fault: PlannedFault, boxes: Sequence[BoxRoles], room: int) -> list[int]:
    """Whom a fault hits; nobody while there is no room for it, or the bootstrap it is meant for is not among `boxes`.
    Where nobody else has the role that it is meant for, another box is hit. The network is split when nothing else is
    wrong with it; nothing else is done to it meanwhile."""
    if fault.victim is VictimRole.HALF:
        numbers = sorted(box.number for box in boxes)
        return random.Random(fault.pick).sample(numbers, len(numbers) // 2) if room >= MOST_AWAY else []
    if fault.kind in ENDING:
        boxes = [box for box in boxes if not box.is_kept]
    if fault.victim is VictimRole.KV_ENDS:
        ends = [_having(boxes, role) for role in _ENGINES]
        return [_pick(those, fault.pick) for those in ends] if all(ends) and room >= len(ends) else []
    has_engine = [box for box in boxes if not box.roles.isdisjoint(_ENGINES)]
    others = has_engine if fault.kind in OF_ENGINES else boxes
    those = _having(boxes, fault.victim) or (others if fault.victim is not VictimRole.BOOTSTRAP else ())
    return [_pick(those, fault.pick)] if those and room >= 1 else []


def _having(boxes: Sequence[BoxRoles], role: VictimRole) -> Sequence[BoxRoles]:
    return boxes if role is VictimRole.ANY else [box for box in boxes if role in box.roles]


def _pick(boxes: Sequence[BoxRoles], pick: float) -> int:
    return boxes[int(pick * len(boxes))].number


def _draw_fault(rng: random.Random, number: int, at: float, kind: FaultKind, victim: VictimRole) -> PlannedFault:
    pauses: tuple[float, ...] = ()
    lasts = rng.uniform(*STARTS_AGAIN_S)
    if kind in (FaultKind.STOP, FaultKind.STOP_ENGINE, FaultKind.CUT):
        lasts = rng.choice(STOPPED_S)
    elif kind in (FaultKind.SLOW, FaultKind.FILL_DISK):
        lasts = rng.uniform(*SLOW_S)
    elif kind is FaultKind.SPLIT:
        lasts = rng.uniform(*SPLIT_S)
    elif kind is FaultKind.FLAP:
        pauses = tuple(rng.uniform(*FLAPS_S) for _ in range(FLAPS - 1))
    return PlannedFault(
        number=number, at_s=at, kind=kind, victim=victim, lasts_s=lasts, pauses_s=pauses, pick=rng.random()
    )


def _spread(rng: random.Random, count: int, begin: float, end: float) -> list[float]:
    """Moments by time: one at random in each of so many equal parts."""
    each = (end - begin) / max(1, count)
    return [begin + (number + rng.random()) * each for number in range(count)]


def _deal(rng: random.Random, combinations: Sequence[Combination], count: int) -> list[Combination]:
    """So many combinations, each as often as any other, give or take one, in random order."""
    dealt: list[Combination] = []
    while len(dealt) < count:
        dealt += rng.sample(combinations, len(combinations))
    return dealt[:count]
