"""The results page `live`: what was planned, simulated and really happened, with eight emulated boxes of unequal GPUs.

Two workloads at two deadlines, one run in which things go wrong, and one of three services that share boxes; an
hour and a quarter. What each run has found is kept in `live-runs.json` and `live-shared.json` beside the page, so that
one of them can be run again alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Final, TypeVar

import msgspec

from ...coordinator import RoutingSettings
from ...coordinator.costs.gpus import Specs
from ...sims.experiments.page import Page, PageTable, ResultRow, write_index, write_page
from ...sims.workloads import azure
from ..errors import UsageError
from .comparison import (
    ESTIMATE_TOLERANCE,
    SPREAD,
    STEADY_DRAWS,
    STEADY_REQUESTS,
    TOLERANCE,
    Figure,
    LiveComparison,
    LiveTraffic,
    describe_verdicts,
    run_comparison,
)
from .network import Say
from .nodes import LiveSettings
from .plan import REQUESTS
from .schedule import LiveFaultKind, Schedule, ScheduledFault
from .shared.comparison import SharedComparison, SharedRun, run_shared_comparison
from .shared.page import build_section, describe_section, is_near

Kept = TypeVar("Kept")

NAME: Final = "live"
RUNS: Final = f"{NAME}-runs.json"
"""Of each part, a `LiveComparison`."""
SHARED: Final = "shared"
SHARED_RUN: Final = f"{NAME}-shared.json"
"""A `SharedComparison`."""
COMMAND: Final = "python -m p2pserve.sdk.live_comparison --page docs/results"
MODEL: Final = "qwen2.5-32b"
SMALL_MODEL: Final = "qwen2-7b"
"""Its KV is a fifth of the other's: for long prompts, and where one process carries all of an emulated network."""

CARDS: Final = ("2xA40", "2xRTX A6000", "4xRTX A5000", "4xRTX 3090 Ti")
NODES: Final = 8
SHOWN_MESSAGE_MS: Final = 0.05
"""Less is nothing at the digits of the page."""

SCHEDULE: Final[Schedule] = (
    ScheduledFault(15.0, LiveFaultKind.LOSE, (3,)),
    ScheduledFault(20.0, LiveFaultKind.LOSE, (6,)),
    ScheduledFault(30.0, LiveFaultKind.DEGRADE, (1, 4), 0.05),
    ScheduledFault(45.0, LiveFaultKind.JOIN, (3,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """One run: Azure's `workload`, deadlines, the cards' rates divided by `slowed`, so that two cores carry the tokens,
    requests per second, and what serves them. The rate is given: what is expected to be carried hangs on links and
    steps as they were measured, and for conversations at 3 times it was 0.6, 1.2 and 0.15 requests a second with cards
    slowed by 6, 9 and 12."""

    workload: str
    slo: str
    slowed: int
    requests: int
    rate: float
    schedule: Schedule = ()
    model: str = MODEL
    cards: tuple[str, ...] = CARDS

    @property
    def name(self) -> str:
        """By which it is chosen."""
        return "faults" if self.schedule else f"{self.workload}-{self.slo}"

    def settings(self) -> LiveSettings:
        """Of the nodes."""
        suffix = f"/{self.slowed}" if self.slowed > 1 else ""
        return LiveSettings(
            nodes=NODES, cards=[card + suffix for card in self.cards], specs=Specs.TABLE1.value, model=self.model,
            codec="kv4", max_batched_tokens=2048, slo=self.slo, schedule=self.schedule,
        )  # fmt: skip

    def traffic(self) -> LiveTraffic:
        """What is asked of them."""
        return LiveTraffic(
            lengths=azure(self.workload).lengths, requests=self.requests, seed=0, rate=self.rate, load=None,
            lead=0 if self.schedule else self.requests // 5,
        )  # fmt: skip


CALM_PARTS: Final = (
    PagePart(workload="conversation", slo="3x", slowed=6, requests=240, rate=0.35),
    PagePart(workload="conversation", slo="5x", slowed=16, requests=300, rate=0.35),
    PagePart(workload="coding", slo="3x", slowed=18, requests=240, rate=0.5, model=SMALL_MODEL),
    PagePart(workload="coding", slo="5x", slowed=48, requests=400, rate=0.44, model=SMALL_MODEL),
)
FAULTY_PART: Final = PagePart(
    workload="conversation", slo="2x", slowed=6, requests=240, rate=0.7, schedule=SCHEDULE,
    model=SMALL_MODEL, cards=("A40", "RTX A6000", "RTX A5000", "RTX 3090 Ti"),
)  # fmt: skip
PARTS: Final = {part.name: part for part in (*CALM_PARTS, FAULTY_PART)}


class LiveRunRow(ResultRow, frozen=True):
    """How a run was, and its verdicts."""

    workload: str
    deadlines: str
    model: str
    slowed_by: int
    requests_s: float
    requests: int
    plan: str
    plans: int
    cores_busy: float
    of_them_ours: float
    expected_and_simulated: str
    simulated_and_live: str


class LiveFigureRow(ResultRow, frozen=True):
    """One figure of one run. Seconds, and shares."""

    workload: str
    deadlines: str
    figure: str
    estimated: float | None
    expected: float | None
    simulated_long: float | None
    long_over_expected: float | None
    simulated: float
    simulated_spread: float
    as_routed: float | None
    live: float
    live_over_simulated: float
    live_over_as_routed: float | None


class FaultRow(ResultRow, frozen=True):
    """The run in which things go wrong."""

    figure: str
    simulated: float
    live: float
    live_over_simulated: float


def write_live_page(folder: Path, say: Say, only: Collection[str] = ()) -> tuple[Page, bool]:
    """Run everything, or only these parts and take the others as they were found last; write page and index. Also
    whether all agreed. Raises DemoFailed, ClientError, OSError, or UsageError where parts were never run."""
    kept = _read(folder / RUNS, dict[str, LiveComparison]) if only else {}
    missing = [name for name in PARTS if name not in kept and name not in only]
    has_shared = bool(only) and SHARED not in only and (folder / SHARED_RUN).exists()
    shared = _read(folder / SHARED_RUN, SharedComparison) if has_shared else None
    if only and missing:
        raise UsageError(f"only: {folder / RUNS} has no {missing[0]}; run that part too")
    found = {}
    for name, part in PARTS.items():
        if only and name not in only:
            found[name] = kept[name]
            continue
        say(f"{part.workload}, deadlines {part.slo}{', with faults' if part.schedule else ''}")
        found[name] = run_comparison(part.settings(), part.traffic(), TOLERANCE, say)
        for line in (*found[name].notes, *describe_verdicts(found[name])):
            say(line)
    if not only or SHARED in only:
        say("three services that share boxes")
        shared = run_shared_comparison(SharedRun(), say)
        say(describe_section(shared))
    page = build_page([(part, found[part.name]) for part in CALM_PARTS], (FAULTY_PART, found[FAULTY_PART.name]), shared)
    write_page(page, folder)
    if shared is not None:
        (folder / SHARED_RUN).write_bytes(msgspec.json.format(msgspec.json.encode(shared), indent=1) + b"\n")
    (folder / RUNS).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    write_index(folder)
    return page, all(each.ok and each.estimate_ok for each in found.values()) and (shared is None or is_near(shared))


def _read(path: Path, kind: type[Kept]) -> Kept:
    """What was found last. Raises UsageError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"only: {path} cannot be read: {error}; run the whole page") from error


def build_page(
    calm: Sequence[tuple[PagePart, LiveComparison]],
    faulty: tuple[PagePart, LiveComparison],
    shared: SharedComparison | None = None,
) -> Page:
    """The page of these runs."""
    part, found = faulty
    return Page(
        name=NAME,
        title="Expected, simulated and live: eight emulated boxes",
        assumes=_ASSUMES.format(
            cards=", ".join(CARDS), runs=len(SPREAD),
            requests=STEADY_REQUESTS, draws=STEADY_DRAWS, said=REQUESTS,
            policy=RoutingSettings().policy,
        ),
        command=COMMAND,
        tables=(
            PageTable("Runs", [_run_row(each, result) for each, result in (*calm, faulty)]),
            PageTable(
                "Figures",
                [_figure_row(each, result, figure) for each, result in calm for figure in _shown(result)],
                about="TTFT and TPOT in seconds; goodput: requests in time per second of arrivals.",
            ),
            PageTable(
                "With faults",
                [_fault_row(figure) for figure in _shown(found)],
                about=_describe_faults(part, found),
            ),
            *([build_section(shared)] if shared is not None else []),
        ),
        remarks=_remarks([result for _, result in calm], found)
        + (f"\n{describe_section(shared)}" if shared is not None else ""),
    )  # fmt: skip


_ASSUMES: Final = """\
Eight nodes run as processes of one machine, two of each: {cards}, as ThunderServe's table 1 has them. GPUs are emulated
(`docs/emulated.md`); nodes, gateways, plans, sockets and KV bytes are real. Cards are slowed where it says
so, in the network, in the plan and in the simulation alike, as two cores carry all of it.

For example, 1.05 under *live over simulated* is 5% more live than simulated.

Deadlines are multiples of the mean request alone on the fastest box.

Poisson arrivals, so many a second that queues form and most requests are in time. The first fifth of the requests fills
the network and does not count.

Of the plan that the network made and followed, *estimated* is what the formulas say that plans are searched by, and
*expected* what `plan --live` says, by {requests:,} simulated requests and not by {said:,}, to boxes as their nodes
describe them. *Simulated long* is that plan with as many other requests, of which as many are long as of all in the
trace, and the boxes as they are, on average over {draws} draws. Of more requests than the plan is expected to carry in
time, both count those beyond as missed.

All three take all links for as fast as the median of those that nodes measured, since all of them share this machine.
Round trips count as shorter where lone requests before the run took less: nodes' pings wait for a core. *Live* is what
a client saw.

*Simulated* is the live run's own requests with its plans as they changed, links as nodes measured them, on average over
{runs} runs in which messages take up to 2 ms more or less than was measured, since which box a request goes to hangs on
moments (*simulated spread*: standard deviation over mean of these runs). *As routed* has each request on the boxes
that served it live: what is left are engines, links and queues.

Gateways route by `{policy}`. In the simulated run they hold back what engines would let wait, and know how long each
answer may be, as live: clients ask for as many tokens as they get. Of what is expected and *simulated long* they give
engines all at once, and know nothing but the lengths of earlier answers.

Percentiles are means of the requests around them (Harrell and Davis): of some 200 requests the 90th percentile is one
alone, and with one request on another box it is the next, which may be far."""


def _run_row(part: PagePart, found: LiveComparison) -> LiveRunRow:
    has_estimate = any(figure.is_estimated for figure in found.figures)
    kept = _verdict(found.estimate_ok, ESTIMATE_TOLERANCE) if has_estimate else "not compared"
    return LiveRunRow(
        workload=part.workload + (", with faults" if part.schedule else ""),
        deadlines=part.slo,
        model=part.model,
        slowed_by=part.slowed,
        requests_s=found.rate,
        requests=found.requests,
        plan=", ".join(f"{count} {phase}" for phase, count in found.phases.items()),
        plans=found.plans,
        cores_busy=found.cores,
        of_them_ours=found.own_cores,
        expected_and_simulated=kept,
        simulated_and_live=_verdict(found.ok, found.tolerance),
    )


def _describe_faults(part: PagePart, found: LiveComparison) -> str:
    text = (
        f"{part.model} on {', '.join(part.cards)}; {part.workload}, {part.slo}, {found.rate:g} requests/s; links of "
        f"{found.link_gbps:g} Gb/s and {found.link_rtt_s * 1e3:.0f} ms, emulated. The schedule, of network and "
        f"simulator alike: {', '.join(found.schedule)}. Of these figures goodput is held against the tolerance."
    )
    return fill(text, 100, break_on_hyphens=False)


def _verdict(agree: bool, tolerance: float) -> str:
    return f"{'within' if agree else 'not within'} {tolerance:.0%}"


def _figure_row(part: PagePart, found: LiveComparison, figure: Figure) -> LiveFigureRow:
    return LiveFigureRow(
        workload=part.workload,
        deadlines=part.slo,
        figure=_LABELS[figure.name],
        estimated=figure.estimated,
        expected=figure.expected,
        simulated_long=figure.steady,
        long_over_expected=None if figure.estimate_error is None else 1.0 + figure.estimate_error,
        simulated=figure.simulated,
        simulated_spread=figure.spread,
        as_routed=figure.as_routed,
        live=figure.live,
        live_over_simulated=1.0 + figure.difference,
        live_over_as_routed=figure.live / figure.as_routed if figure.as_routed else None,
    )


def _fault_row(figure: Figure) -> FaultRow:
    return FaultRow(
        figure=_LABELS[figure.name],
        simulated=figure.simulated,
        live=figure.live,
        live_over_simulated=1.0 + figure.difference,
    )


_LABELS: Final[Mapping[str, str]] = {
    **{f"{name}_{at}_s": f"{name.upper()} {at}" for name in ("ttft", "tpot") for at in ("mean", "p50", "p90", "p99")},
    "attainment": "attainment",
    "goodput_requests_s": "goodput",
}


def _shown(found: LiveComparison) -> list[Figure]:
    return [figure for figure in found.figures if figure.name in _LABELS]


def _remarks(calm: Sequence[LiveComparison], faulty: LiveComparison) -> str:
    """What of it agrees, by its own figures."""
    live = [figure for each in calm for figure in each.figures if figure.counts]
    near = [figure for figure in live if abs(figure.difference) <= TOLERANCE]
    estimated = [figure for each in calm for figure in each.figures if figure.is_estimated]
    kept = [figure for figure in estimated if abs(figure.estimate_error or 0.0) <= ESTIMATE_TOLERANCE]
    worst = max(live, key=lambda figure: abs(figure.difference))
    goodput = next(figure for figure in faulty.figures if figure.name.startswith("goodput"))
    planned = faulty.own_plans_goodput_s or 0.0
    return f"""\
- Live and simulated are within {TOLERANCE:.0%} in {len(near)} of {len(live)} figures (the 99th percentile is shown and
not held against it: of so few requests it hangs on two or three); the furthest is {worst.name.replace("_", " ")} at
{1.0 + worst.difference:.3f}.{_describe_as_routed(live)}
- Expected and simulated are within {ESTIMATE_TOLERANCE:.0%} in {len(kept)} of {len(estimated)} figures: TTFT and TPOT
at the 50th and 90th percentile, and attainment.{_describe_estimates(calm)}{_describe_tails(calm)}
- With faults, goodput live is {1.0 + goodput.difference:.3f} of the simulated, which follows the plans that the
network made. Where the simulated coordinator makes the plans, too, it is {planned:.3f} requests/s; live
{goodput.live:.3f}.{_describe_messages(calm, faulty)}"""


def _describe_as_routed(live: Sequence[Figure]) -> str:
    """How near the simulator is where each request is on the boxes that served it live."""
    pairs = [(figure.live / figure.as_routed, figure.name) for figure in live if figure.as_routed]
    if not pairs:
        return ""
    near = sum(abs(ratio - 1.0) <= TOLERANCE for ratio, _ in pairs)
    ratio, name = max(pairs, key=lambda each: abs(each[0] - 1.0))
    return f""" With each request on the boxes that served it live, {near} of {len(pairs)}; the furthest is
{name.replace("_", " ")} at {ratio:.3f}. So the rest is by where requests go: live gateways and simulated ones hear of
loads at other moments, and one request on another box takes others with it."""


def _describe_estimates(calm: Sequence[LiveComparison]) -> str:
    """Attainment by formulas and simulated, where those miss it."""
    pairs = [
        (figure.estimated, figure.steady or 0.0)
        for each in calm
        for figure in each.figures
        if figure.name == "attainment"
        and figure.estimated is not None
        and abs((figure.steady or 0.0) / max(1e-9, figure.estimated) - 1.0) > ESTIMATE_TOLERANCE
    ]
    if not pairs:
        return ""
    estimated, simulated = (", ".join(f"{value:.2f}" for value in column) for column in zip(*pairs, strict=True))
    return f"""
- Formulas estimate attainment at {estimated}; {simulated} is simulated, of the same plans over the same links. They
hold requests to the plan's shares, and those of a running plan were made for other traffic, or for full load, and may
give a box more than it carries. Gateways go by queues. So the plans that `plan` makes are chosen by simulated trials,
and so are the phases of the running network where clients ask for something."""


def _describe_tails(calm: Sequence[LiveComparison]) -> str:
    """Where single requests were slow, live, and most were not."""
    tails = []
    for each in calm:
        over = {figure.name: 1.0 + figure.difference for figure in each.figures}
        half, tail = over.get("tpot_p50_s", 1.0), over.get("tpot_p90_s", 1.0)
        if tail - half > TOLERANCE < tail - 1.0:
            tails.append((half, tail, over.get("attainment", 1.0)))
    if not tails:
        return ""
    halves, nineties, attainments = (
        ", ".join(f"{value:.2f}" for value in column) for column in zip(*tails, strict=True)
    )
    cores, plans = [each.cores for each in calm], [each.plans - 1 for each in calm]
    own = [each.own_cores for each in calm]
    return f"""
- TPOT is {halves} times the simulated at the 50th percentile and {nineties} at the 90th, attainment
{attainments}, in the
runs whose tail is off: some answers stood still for a while and most did not. Emulated engines fell behind their model
{sum(each.late for each in calm)} times; {min(cores):.1f} to {max(cores):.1f} cores of the machine were busy,
{min(own):.1f} to {max(own):.1f} of them with the run.
The network changed its plan {min(plans)} to {max(plans)} times a run, which the simulation follows."""


def _describe_messages(calm: Sequence[LiveComparison], faulty: LiveComparison) -> str:
    """By what live first tokens are later, where that was more than nothing."""
    message_ms = [each.message_s * 1e3 for each in (*calm, faulty)]
    if max(message_ms) < SHOWN_MESSAGE_MS:
        return ""
    return f"""
- Simulated messages take {min(message_ms):.1f} to {max(message_ms):.1f} ms more than the links: what each was measured
to take through the processes of client, gateway, agents and engines before its run."""
