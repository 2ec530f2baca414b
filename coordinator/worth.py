"""Whether boxes are worth their price: what they cost for each million tokens, beside the others, and what
of them is not as it was offered.

A box counts for what it would do alone and busy, prefill and decode, with the requests that clients
send lately: what a plan gives it changes with every plan, and an idle box is not a bad one. One
that holds a part of the model counts by its pace, for it does that part of every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple, final

from .calibration import calibrate_boxes, step_times_of
from .capacity import BoxView
from .costs.box_worth import BoxWorth
from .costs.efficiency import efficiency_of
from .costs.gpus import GpuError, Specs, gpu_table
from .costs.replica import ReplicaError
from .planning.model.workload import Workload

HOUR_S: Final = 3600.0
MTOK: Final = 1e6

MOST_AT_ONCE: Final = 256
"""Requests in a decode step, where there is memory for more."""

UNKNOWN_AT_ONCE: Final = 16
"""Where it is not known what there is memory for."""

LEAST_CARD: Final = 0.7
"""Of what such a card reaches, below which it is told: cards differ by a tenth among themselves."""

LEAST_LINE: Final = 0.5
"""Likewise, of the line that was offered: one peer alone seldom gets all of it."""

DEAREST: Final = 1.5
"""Times what a million tokens cost on the median box."""


class BoxLine(NamedTuple):
    """The line of a box: the best that was measured over its links, as a share of what both ends of
    that link say of their lines. None where nothing was measured or said."""

    up_share: float | None = None
    down_share: float | None = None


def weigh_boxes(boxes: Sequence[BoxView], lines: Mapping[str, BoxLine], workload: Workload) -> dict[str, BoxWorth]:
    """By peer, all boxes of one service that have a price and an engine that was measured."""
    started = {box.peer: box for box in boxes}
    now = {box.peer: measured for box in boxes if (measured := _measure(box, workload)) is not None}
    pace = {peer: mtok_per_hour for peer, (_, mtok_per_hour) in now.items()}
    usd = {peer: box.usd_per_hour / pace[peer] for peer, (box, _) in now.items() if box.usd_per_hour > 0.0}
    middle = median(usd.values()) if len(usd) > 1 else None
    slowed = {peer: _slowed(started[peer], box) for peer, (box, _) in now.items()}
    return {
        peer: BoxWorth(
            peer=peer, usd_per_hour=started[peer].usd_per_hour, mtok_per_hour=pace[peer], usd_per_mtok=each,
            median_usd_per_mtok=middle,
            faults={
                **_card_faults(started[peer]), **_step_faults(peer, slowed),
                **_line_faults(lines.get(peer, BoxLine())), **_price_faults(each, middle),
            },
        )
        for peer, each in usd.items()
    }  # fmt: skip


def _measure(box: BoxView, workload: Workload) -> tuple[BoxView, float] | None:
    """As its own steps alone have it, and its pace; None for one that says of itself what cannot
    be: its word costs no other box its figures."""
    try:
        found = calibrate_boxes({box.peer: box}, workload)[box.peer]
        return found, _mtok_per_hour(found, workload)
    except (ReplicaError, ArithmeticError):
        return None


def _mtok_per_hour(box: BoxView, workload: Workload) -> float:
    """Prefill of a mean request, and its part of decode steps that are as full as memory lets them
    be."""
    prompt, output = workload.mean_prompt, workload.mean_output
    held = prompt + output / 2.0
    at_once = round(min(MOST_AT_ONCE, max(1.0, box.kv_tokens / held))) if box.kv_tokens else UNKNOWN_AT_ONCE
    times = step_times_of(box)
    step_s = times.decode_line(at_once).step_s(at_once * held)
    request_s = times.prefill_s(round(prompt), workload.mean_pairs) + output * step_s / at_once
    return box.part * (prompt + output) / request_s * HOUR_S / MTOK


def _card_faults(box: BoxView) -> dict[str, str]:
    """What its engine measured when it started, beside what such a card reaches. Of emulated boxes,
    of cards that are not in the table and before anything is measured, nothing."""
    if box.specs is not None or not box.card:
        return {}
    try:
        card = gpu_table().find(box.card, Specs.MEASURED)
    except GpuError:
        return {}
    reached = efficiency_of(card)
    told = {}
    for kind, what, unit, measured, usual in (
        ("compute", "compute", "TFLOP/s", box.compute_tflops / box.tp, card.tflops * reached.compute_share),
        ("memory", "memory", "GB/s", box.memory_gbps / box.tp, card.memory_gbps * reached.bandwidth_share),
    ):
        if measured < LEAST_CARD * usual:
            told[kind] = f"its {what} is {measured / usual:.2g} of what a {card.name} reaches ({usual:.3g} {unit})"
    return told


def _slowed(started: BoxView, now: BoxView) -> float:
    """By its own steps, the worse of its rates now, of what its engine measured when it started."""
    return min(now.compute_tflops / started.compute_tflops, now.memory_gbps / started.memory_gbps)


def _step_faults(peer: str, slowed: Mapping[str, float]) -> dict[str, str]:
    """Steps are compared with other boxes': what the model of a step is off by is so for all."""
    others = [share for other, share in slowed.items() if other != peer]
    share = slowed[peer] / (median(others) if others else 1.0)
    return {"steps": f"its steps are as of {share:.2g} of its card: throttled or shared"} if share < LEAST_CARD else {}


def _line_faults(line: BoxLine) -> dict[str, str]:
    shares = (("up", line.up_share), ("down", line.down_share))
    return {
        way: f"its link {way} is {share:.2g} of what was offered"
        for way, share in shares
        if share is not None and share < LEAST_LINE
    }


def _price_faults(usd: float, middle: float | None) -> dict[str, str]:
    if middle is None or usd <= DEAREST * middle:
        return {}
    return {"price": f"a million tokens cost {usd / middle:.2g} times as much here"}


LINKS_S: Final = 30.0
"""How long the first line waits for links to be measured."""

SETTLED_S: Final = 60.0
"""How long a change of what is wrong must last before it is told: links and steps come and go."""


@final
class WorthWatch:
    """When the owner of a box is told what it is worth: once when it is known, and then when what
    is wrong with it is something else for a while."""

    def __init__(self) -> None:
        self._known_at: float | None = None
        self._told: frozenset[str] | None = None
        self._other: tuple[frozenset[str], float] | None = None

    def consider(self, worth: BoxWorth | None, line: BoxLine, now: float) -> str | None:
        """What to say now, if anything."""
        if worth is None:
            return None
        if self._known_at is None:
            self._known_at = now
        faults = frozenset(worth.faults)
        if self._told is None:
            if line == BoxLine() and now < self._known_at + LINKS_S:
                return None
            self._told = faults
            return f"this box: {worth}"
        if faults == self._told:
            self._other = None
            return None
        if self._other is None or self._other[0] != faults:
            self._other = (faults, now)
        if now < self._other[1] + SETTLED_S:
            return None
        before, self._told, self._other = self._told, faults, None
        return f"this box {'is worth less than it was' if faults - before else 'is better again'}: {worth}"
