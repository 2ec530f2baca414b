"""The section of the results page `live` about services that share boxes."""

from __future__ import annotations

from textwrap import fill
from typing import Final

from ....sims.experiments.page import PageTable, ResultRow
from .comparison import ALL, SharedComparison

TOLERANCE: Final = 0.05

COLUMNS: Final = (
    "*Simulated* is the simulator of [sharing](sharing.md), where each request is sent by gateways' own code, which "
    "hears of other services' requests four times a second, and at once of one after a quiet while, on average over 9 "
    "runs that hear of them at other moments (*spread*: standard deviation over mean of these runs); *fewest* sends it "
    "to the box that has the fewest at that moment, as SeaLLM does; *as routed* has each request on the box where it "
    "ran live."
)


class SharedRow(ResultRow, frozen=True):
    """One figure of one service, or of all requests."""

    service: str
    figure: str
    simulated: float
    live: float
    live_over_simulated: float
    simulated_spread: float
    simulated_fewest: float
    simulated_as_routed: float
    live_over_as_routed: float


def build_section(found: SharedComparison) -> PageTable:
    """The table, and what is to be known of it."""
    rows = [
        SharedRow(
            service=each.service,
            figure=each.figure,
            simulated=each.simulated,
            live=each.live,
            live_over_simulated=each.live / each.simulated,
            simulated_spread=each.spread,
            simulated_fewest=each.fewest,
            simulated_as_routed=each.as_routed,
            live_over_as_routed=each.live / each.as_routed,
        )
        for each in found.figures
    ]
    steps = f", and steps compute {found.step_tokens:,} tokens at most, by the plans" if found.step_tokens else ""
    run = (
        f"{found.boxes} boxes of {found.cards}, each with the engines of two of three services in one process, which "
        f"step one at a time; {found.requests} requests, {found.rate:g} a second in all, Poisson; messages take "
        f"{found.message_s * 1e3:.1f} ms of a request{steps}. {found.cores:.1f} cores were busy, "
        f"{found.own_cores:.1f} of them with the run. Means; TTFT and TPOT in seconds, normalized latency in times of "
        "the service's requests alone."
    )
    text = "\n\n".join(fill(each, 100, break_on_hyphens=False) for each in (run, COLUMNS))
    return PageTable("Three services that share boxes", rows, text)


def describe_section(found: SharedComparison) -> str:
    """A remark: what of it agrees."""
    whole = [each for each in found.figures if each.service == ALL]
    own = {each.figure: each.live / each.simulated for each in whole}
    routed = {each.figure: each.live / each.as_routed for each in whole}
    near = [name for name, ratio in own.items() if abs(ratio - 1.0) <= TOLERANCE]
    ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in own.items())
    same = ", ".join(f"{name} {ratio:.3f}" for name, ratio in routed.items())
    return (
        f"- Services that share boxes, live over simulated: {ratios}; as routed: {same}. Within {TOLERANCE:.0%} are "
        f"{len(near)} of {len(own)}. {found.late} emulated engines fell behind their model, {found.retried} requests "
        "needed more than one attempt."
    )


def is_near(found: SharedComparison) -> bool:
    """Whether the figures of all requests are within the tolerance."""
    return all(abs(each.live / each.simulated - 1.0) <= TOLERANCE for each in found.figures if each.service == ALL)
