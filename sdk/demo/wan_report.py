"""What `p2pserve demo --wan` reports: values, and a table of 80 columns. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

from ...coordinator.plan import Deadlines
from .ocean import BOXES, DEGRADED_GBPS, MODEL, PLACES, PORT_GBPS, SLO, KvLink, kv_links
from .wan_client import AnsweredRequest, ClientOrders, LostRequest
from .wan_timeline import WanTimeline

EMULATED: Final = "round trips and rates (of real links), GPUs (modelled step times)"
LABEL_WIDTH: Final = 43
CELL_WIDTH: Final = 7
NOTHING: Final = "-"
THIN: Final = 0.5  # a link that carries less than this part of a port
LEAST_SHARE: Final = 0.005  # of the requests, that is shown


class KvLinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """A link that KV can take. `gbps` is what it is set to, `found_gbps` what the network believed of it before the
    first event; `shares` of the requests in the plans before, after the link, and after the box."""

    prefill: str
    decode: str
    rtt_ms: float
    gbps: float
    found_gbps: float | None
    shares: tuple[float, ...]


class WanEventReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to the network, after how many seconds it was noticed and planned with, and the plan's number and
    news. `routed_s`: after which gateways sent nothing over the link any more, with or without a plan."""

    what: str
    noticed_s: float | None
    planned_s: float | None
    routed_s: float | None = None
    plan: str = ""
    news: str = ""


class StretchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one stretch of time. `moved`: answers that went on at another box, `recomputed`: prompts whose KV
    was late, and that were computed where they are decoded; `relayed`: whose KV went through a third box."""

    name: str
    seconds: float
    asked: int
    lost: int
    moved: int
    recomputed: int
    relayed: int
    ttft_median_s: float | None
    ttft_worst_s: float | None
    tpot_median_s: float | None
    tpot_worst_s: float | None
    in_time: int
    goodput_s: float


class WanReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run found out. `emulated` says of what the figures are; `cannot_show`: of the emulated network."""

    ok: bool
    problems: tuple[str, ...]
    emulated: str
    cannot_show: tuple[str, ...]
    model: str
    prompt_tokens: int
    output_tokens: int
    coordinator: str
    closed: tuple[str, ...]
    links: tuple[KvLinkReport, ...]
    degraded: tuple[str, str]
    died: str
    events: tuple[WanEventReport, ...]
    stretches: tuple[StretchReport, ...]
    slo: Deadlines
    answers: int
    alike: bool
    late_ms_mean: float = 0.0
    elapsed_s: float = 0.0
    peak_memory_mib: float = 0.0


class WanEvents(msgspec.Struct, frozen=True, kw_only=True):
    """When the figures begin, what was done to the network and when, and when the last request was asked."""

    began_at: float
    degraded: KvLink
    degraded_at: float
    died: str
    died_at: float
    ended_at: float


class _Stretch(msgspec.Struct, frozen=True):
    """From `begin` to `end`; `disturbed`: between an event and the plan that answers it."""

    name: str
    begin: float
    end: float
    disturbed: bool


def report_run(
    timeline: WanTimeline, events: WanEvents, orders: ClientOrders, rates: Mapping[KvLink, tuple[float, float]]
) -> WanReport:
    """The report of a run on links of these `rates` (ms, Gb/s), without what only the machine knows."""
    around = timeline.planned_around(events.degraded, events.degraded_at)
    routed = timeline.routed_around(events.degraded, events.degraded_at, events.died_at)
    without = timeline.planned_without(events.died, events.died_at)
    stretches = _stretches(events, around or routed, without)
    before = timeline.plan_at(events.degraded_at)
    plans = [before, *(timeline.plan_at(at) for at in (events.died_at, events.ended_at))]
    slow = timeline.noticed_slow(events.degraded, events.degraded_at)
    gone = timeline.noticed_gone(events.died, events.died_at)
    falls = f"{' > '.join(events.degraded)} falls to {DEGRADED_GBPS:g} Gb/s"
    link = _report_event(timeline, falls, events.degraded_at, slow, around)
    reactions = (
        msgspec.structs.replace(link, routed_s=routed - events.degraded_at if routed is not None else None),
        _report_event(timeline, f"{events.died} loses its power", events.died_at, gone, without),
    )
    requests: list[AnsweredRequest | LostRequest] = [*timeline.answers, *timeline.lost]
    problems = find_problems(timeline, reactions)
    return WanReport(
        ok=not problems,
        problems=problems,
        emulated=EMULATED,
        cannot_show=(),
        model=MODEL,
        prompt_tokens=orders.prompt,
        output_tokens=orders.output,
        coordinator=timeline.coordinator,
        closed=tuple(sorted(timeline.closed)),
        links=tuple(
            KvLinkReport(
                prefill=ends[0],
                decode=ends[1],
                rtt_ms=rates[ends][0],
                gbps=rates[ends][1],
                found_gbps=timeline.rate(ends, events.degraded_at),
                shares=tuple(plan.shares.get(ends, 0.0) if plan is not None else 0.0 for plan in plans),
            )
            for ends in kv_links()
        ),
        degraded=events.degraded,
        died=events.died,
        events=reactions,
        stretches=tuple(
            _report_stretch(stretch, [each for each in requests if _stretch_of(each, stretches) is stretch], orders)
            for stretch in stretches
        ),
        slo=SLO,
        answers=len(timeline.answers),
        alike=are_alike(timeline.answers),
    )


def find_problems(timeline: WanTimeline, reactions: Sequence[WanEventReport]) -> tuple[str, ...]:
    """What did not go as it should have."""
    found = [f"a request was lost: {each.error}" for each in timeline.lost]
    if not are_alike(timeline.answers):
        found.append("the same prompt was answered differently")
    unanswered = (each for each in reactions if each.planned_s is None and each.routed_s is None)
    found += [f"{each.what}: nothing was done about it" for each in unanswered]
    if not timeline.closed:
        found.append("the network did not find that a box is behind NAT")
    return tuple(found)


def _stretches(events: WanEvents, around: float | None, without: float | None) -> tuple[_Stretch, ...]:
    # Where no plan answers, all that follows is disturbed.
    link_until = min(around or events.died_at, events.died_at)
    box_until = min(without or events.ended_at, events.ended_at)
    return (
        _Stretch("before", events.began_at, events.degraded_at, False),
        _Stretch("link: until the new plan", events.degraded_at, link_until, True),
        _Stretch("link: after it", link_until, events.died_at, False),
        _Stretch("box: until the new plan", events.died_at, box_until, True),
        _Stretch("box: after it", box_until, events.ended_at, False),
    )


def _report_event(
    timeline: WanTimeline, what: str, since: float, noticed: float | None, planned: float | None
) -> WanEventReport:
    plan = timeline.plan_at(planned) if planned is not None else None
    return WanEventReport(
        what=what,
        noticed_s=noticed - since if noticed is not None else None,
        planned_s=planned - since if planned is not None else None,
        plan=plan.number if plan is not None else "",
        news=plan.news if plan is not None else "",
    )


def _stretch_of(request: AnsweredRequest | LostRequest, stretches: Sequence[_Stretch]) -> _Stretch | None:
    """The first disturbed stretch in which any of it fell, else the calm one in which it was asked."""
    ended_at = request.last_at if isinstance(request, AnsweredRequest) else request.asked_at
    if request.asked_at < stretches[0].begin:
        return None
    hit = [one for one in stretches if one.disturbed and request.asked_at < one.end and ended_at >= one.begin]
    calm = [one for one in stretches if not one.disturbed and one.begin <= request.asked_at < one.end]
    return next(iter((*hit, *calm)), None)


def _report_stretch(
    stretch: _Stretch, requests: Sequence[AnsweredRequest | LostRequest], orders: ClientOrders
) -> StretchReport:
    answers = [each for each in requests if isinstance(each, AnsweredRequest)]
    ttft = [each.first_at - each.asked_at for each in answers]
    tpot = [_tpot_s(each) for each in answers]
    in_time = sum(is_in_time(each, SLO) for each in answers)
    return StretchReport(
        name=stretch.name,
        seconds=stretch.end - stretch.begin,
        asked=len(requests),
        lost=len(requests) - len(answers),
        moved=sum(each.attempts > 1 for each in answers),
        recomputed=sum(each.attempts == 1 and bool(each.recovered) for each in answers),
        relayed=sum(each.relayed for each in answers),
        ttft_median_s=median(ttft) if ttft else None,
        ttft_worst_s=max(ttft, default=None),
        tpot_median_s=median(tpot) if tpot else None,
        tpot_worst_s=max(tpot, default=None),
        in_time=in_time,
        # They come at a constant rate: those of a stretch took so long to come.
        goodput_s=in_time / (len(requests) * orders.every_s) if requests else 0.0,
    )


def are_alike(answers: Sequence[AnsweredRequest]) -> bool:
    """Whether all answers are the same: all prompts are, and an answer that changed boxes goes on as it would have."""
    return len({each.digest for each in answers}) <= 1


def is_in_time(answer: AnsweredRequest, slo: Deadlines) -> bool:
    """Whether an answer came as fast as that; a figure of 0 asks for nothing."""
    kept = (
        (answer.first_at - answer.asked_at, slo.ttft_s),
        (_tpot_s(answer), slo.tpot_s),
        (answer.last_at - answer.asked_at, slo.e2e_s),
    )
    return all(not limit or took <= limit for took, limit in kept)


def _tpot_s(answer: AnsweredRequest) -> float:
    return (answer.last_at - answer.first_at) / max(1, answer.tokens - 1)


# --- for people


def picture_lines(report: WanReport) -> list[str]:
    """All of it: the boxes, what was done to them, the one table, and what to know of its figures."""
    lengths = f"prompts of {report.prompt_tokens} tokens, answers of {report.output_tokens}"
    return [
        f"{len(BOXES)} boxes at {len(PLACES)} sites serve {report.model}: {lengths}",
        *_box_lines(report),
        "",
        *_table_lines(report),
        "",
        *_event_lines(report),
        *_closing_lines(report),
    ]


def _box_lines(report: WanReport) -> list[str]:
    lines = []
    for box in BOXES:
        said = "coordinator" if box.name == report.coordinator else ""
        if box.name in report.closed:
            said = "behind NAT: nobody can dial it"
        lines.append(f"  {box.name:<13}{box.cards.removesuffix('-24GB'):<12}{box.phase.value:<9}{said}".rstrip())
    return lines


def _table_lines(report: WanReport) -> list[str]:
    """The plan's shares, and what the requests saw: before, during and after both events."""
    first, second = report.events
    stretches = report.stretches
    return [
        " " * (LABEL_WIDTH + CELL_WIDTH) + "link degrades".rjust(2 * CELL_WIDTH) + "box is lost".rjust(2 * CELL_WIDTH),
        _row("", ["before", "during", "after", "during", "after"]),
        _row("noticed after, s", ["", _seconds(first.noticed_s), "", _seconds(second.noticed_s)]),
        _row("gateways avoid it after, s", ["", _seconds(first.routed_s)]),
        _row("planned anew after, s", ["", _seconds(first.planned_s), "", _seconds(second.planned_s)]),
        "",
        _row(_link_label("KV link", "ms", "Gb/s", "found"), ["share", "", "share", "", "share"]),
        *(_link_row(link, report) for link in report.links),
        "",
        _row("requests", [str(each.asked) for each in stretches]),
        _row("  lost", [str(each.lost) for each in stretches]),
        _row("  KV late: computed where it is decoded", [_count(each.recomputed) for each in stretches]),
        _row("  went on at another box", [_count(each.moved) for each in stretches]),
        _row("TTFT, s: median", [_seconds(each.ttft_median_s, 2) for each in stretches]),
        _row("         worst", [_seconds(each.ttft_worst_s, 2) for each in stretches]),
        _row("TPOT, ms: median", [_milliseconds(each.tpot_median_s) for each in stretches]),
        _row("          worst", [_milliseconds(each.tpot_worst_s) for each in stretches]),
        _row("goodput, requests in time per s", [_goodput(each) for each in stretches]),
    ]


def _event_lines(report: WanReport) -> list[str]:
    names = ("link degrades", "box is lost")
    thin = [link for link in report.links if link.gbps < THIN * PORT_GBPS]
    share = sum(link.shares[0] for link in thin)
    return [
        f"{len(thin)} of {len(report.links)} KV links are thin: the plan before sent {share:.0%} of requests over them",
        *(
            f"{name}: {event.what}" + (f"; plan {event.plan} answers it" if event.plan else "")
            for name, event in zip(names, report.events, strict=True)
        ),
    ]


def _closing_lines(report: WanReport) -> list[str]:
    slo = report.slo
    late = f"packets were {report.late_ms_mean:.1f} ms late on average"
    alike = "all alike, token for token, as one prompt's must be" if report.alike else "not all alike"
    return [
        "ms, Gb/s: as emulated; found: as measured by nodes; share: of requests, by plan",
        f"in time: first token within {slo.ttft_s:g} s, then one each {1000 * slo.tpot_s:.0f} ms on average",
        f"{report.answers} answers: {alike}",
        f"emulated: {report.emulated}",
        "real: six nodes in six network namespaces, their plans, TCP, every byte of KV",
        f"took {report.elapsed_s:.0f} s and {report.peak_memory_mib / 1024:.2f} GiB; {late}",
    ]


def _link_row(link: KvLinkReport, report: WanReport) -> str:
    found = NOTHING if link.found_gbps is None else f"{link.found_gbps:.2f}"
    label = _link_label(f"{link.prefill} > {link.decode}", f"{link.rtt_ms:.0f}", f"{link.gbps:.2f}", found)
    before, after, last = (f"{share:.0%}" if share >= LEAST_SHARE else NOTHING for share in link.shares)
    thin = f"{DEGRADED_GBPS:g}" if (link.prefill, link.decode) == report.degraded else ""
    gone = report.died in (link.prefill, link.decode)
    return _row(label, [before, thin, after, "lost" if gone else "", "" if gone else last])


def _link_label(name: str, rtt_ms: str, gbps: str, found_gbps: str) -> str:
    return f"{name:<26}{rtt_ms:>4}{gbps:>6}{found_gbps:>7}"


def _row(label: str, cells: Sequence[str]) -> str:
    return (label.ljust(LABEL_WIDTH) + "".join(cell.rjust(CELL_WIDTH) for cell in cells)).rstrip()


def _goodput(stretch: StretchReport) -> str:
    return f"{stretch.goodput_s:.2f}" if stretch.asked else NOTHING


def _seconds(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _milliseconds(value: float | None) -> str:
    return NOTHING if value is None else f"{1000 * value:.0f}"


def _count(value: int) -> str:
    return str(value) if value else NOTHING
