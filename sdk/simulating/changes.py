"""What changes in a simulation, as options say it: boxes that are lost or join, links that degrade,
traffic that shifts; and how the network answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from types import SimpleNamespace
from typing import Final, NamedTuple

from ...coordinator.costs.loading import LoadRates
from ...coordinator.costs.model_shape import ModelShape
from ...coordinator.planning.model.cluster import Cluster
from ...coordinator.planning.model.problem import Problem
from ...coordinator.planning.model.slo import SloScale, parse_slo, read_slo
from ...coordinator.planning.model.workload import Slo, Workload
from ...node.settings import WAN
from ...sims.replanning import ReplanPolicy, ReplanSettings
from ...sims.results.spans import TimedEvent
from ...sims.scenario import BoxJoined, BoxLost, Change, LinksChanged
from ..actions.plan_options import read_workload
from ..errors import UsageError

ALL: Final = "all"
"""What stands for every policy, one after the other."""


class TrafficShift(NamedTuple):
    """From `at` seconds on requests come with this workload's lengths, at its rate, and have these
    deadlines."""

    at: float
    workload: Workload
    slo: Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class SimScenario:
    """What happens. `changes`: to boxes and links; `shifts`: of the traffic, in order of time;
    `events`: both in words; `absent`: boxes that are not there at the beginning."""

    changes: tuple[Change, ...] = ()
    shifts: tuple[TrafficShift, ...] = ()
    events: tuple[TimedEvent, ...] = ()
    absent: frozenset[str] = frozenset()


def read_scenario(arguments: SimpleNamespace, problem: Problem) -> SimScenario:
    """What the options say. Raises UsageError or WorkloadError with one line."""
    cluster = problem.cluster
    lost = [BoxLost(at, box) for box, at in (_box_and_moment("lose", text, cluster) for text in arguments.lose)]
    joined = [BoxJoined(at, box) for box, at in (_box_and_moment("join", text, cluster) for text in arguments.join)]
    absent = _check_order([*lost, *joined])
    loads_s = _load_seconds(arguments, problem)
    arriving = [BoxJoined(change.at + loads_s, change.box) for change in joined]
    degraded = [(text, _links(text, cluster)) for text in arguments.degrade]
    shifts = _shifts(arguments, problem)
    events = [
        *(TimedEvent(change.at, f"{change.box} is lost", f"{change.box} is lost") for change in lost),
        *(TimedEvent(at, f"{box} joins, and has loaded the model {loads_s:.0f} s later", f"{box} has joined")
          for at, box in joined),
        *(TimedEvent(change.at, _describe_links(change, text), f"{change.gbps:g} Gb/s from {change.ends[0][0]} to ")
          for text, change in degraded),
        *(TimedEvent(shift.at, _describe_shift(shift.workload), "traffic of ") for shift in shifts),
    ]  # fmt: skip
    if arguments.replan is not None and not events:
        raise UsageError("replan: give --lose, --join, --degrade or --shift with it")
    return SimScenario(
        changes=(*lost, *arriving, *(change for _, change in degraded)),
        shifts=tuple(shifts),
        events=tuple(sorted(events)),
        absent=absent,
    )


def check_moments(scenario: SimScenario, last_s: float) -> None:
    """Raises UsageError for a change that no request comes after."""
    for event in scenario.events:
        if event.at >= last_s:
            raise UsageError(f"seconds: the last request comes at {last_s:.0f} s, before {event.what} ({event.at:g} s)")


def replan_policies(arguments: SimpleNamespace) -> tuple[ReplanPolicy, ...]:
    """What is simulated, one after the other."""
    if arguments.replan == ALL:
        return tuple(ReplanPolicy)
    return (ReplanPolicy(arguments.replan or ReplanPolicy.LIGHT),)


def replan_settings(arguments: SimpleNamespace, policy: ReplanPolicy, scenario: SimScenario) -> ReplanSettings:
    """How the coordinator answers by this policy. Deadlines that are multiples follow traffic that
    shifts, as in the running network."""
    slo = read_slo(arguments.slo)
    return ReplanSettings(
        policy=policy,
        deadlines=slo if scenario.shifts and isinstance(slo, SloScale) else None,
        full_s=WAN.planning_s,
        rates=_load_rates(arguments),
        reload_s=arguments.reload,
        payback_s=arguments.payback,
        seed=arguments.seed,
    )


# --- boxes


def _box_and_moment(field: str, text: str, cluster: Cluster) -> tuple[str, float]:
    box, _, at = text.rpartition("@")
    if box not in {item.id for item in cluster.boxes}:
        raise UsageError(f"{field}: {text!r} is not like BOX@60 with a box of the cluster")
    return box, _moment(field, at, text)


def _moment(field: str, at: str, text: str) -> float:
    try:
        seconds = float(at)
    except ValueError:
        seconds = -1.0
    if not (isfinite(seconds) and seconds >= 0.0):
        raise UsageError(f"{field}: {at!r} in {text!r} is not a number of seconds")
    return seconds


def _check_order(changes: Sequence[BoxLost | BoxJoined]) -> frozenset[str]:
    """The boxes that join before they were lost: they are not there at first. Raises UsageError for
    a box that is lost or joins twice in a row."""
    last: dict[str, BoxLost | BoxJoined] = {}
    absent: set[str] = set()
    for change in sorted(changes, key=lambda change: change.at):
        field, does = ("join", "joins") if isinstance(change, BoxJoined) else ("lose", "is lost")
        before = last.get(change.box)
        if before is not None and type(before) is type(change):
            raise UsageError(f"{field}: {change.box} {does} at {before.at:g} s and again at {change.at:g} s")
        if before is None and isinstance(change, BoxJoined):
            absent.add(change.box)
        last[change.box] = change
    return frozenset(absent)


def _load_rates(arguments: SimpleNamespace) -> LoadRates:
    defaults = LoadRates()
    return LoadRates(
        disk_gb_s=arguments.disk or defaults.disk_gb_s,
        download_gbps=arguments.download or defaults.download_gbps,
    )


def _load_seconds(arguments: SimpleNamespace, problem: Problem) -> float:
    """What a box that joins takes to load the largest of the models from its disk."""
    if arguments.reload is not None:
        return float(arguments.reload)
    rates = _load_rates(arguments)
    largest: ModelShape = max((service.model for service in problem.services), key=lambda model: model.weight_bytes)
    return rates.start_s + largest.weight_bytes / (rates.disk_gb_s * 1e9)


# --- links


def _links(text: str, cluster: Cluster) -> LinksChanged:
    what, _, at = text.rpartition("@")
    ends, equals, figure = what.rpartition("=")
    names = ends.split(":")
    ids = [box.id for box in cluster.boxes]
    if not equals or not 1 <= len(names) <= 2 or not set(names) <= set(ids) or len(set(names)) < len(names):
        raise UsageError(f"degrade: {text!r} is not like BOX=0.5@60 or BOX:BOX=0.5@60 with boxes of the cluster")
    try:
        gbps = float(figure)
    except ValueError:
        gbps = 0.0
    if not (isfinite(gbps) and gbps > 0.0):
        raise UsageError(f"degrade: {figure!r} in {text!r} is not a number of Gb/s above 0")
    others = names[1:] or [name for name in ids if name != names[0]]
    linked = [
        pair
        for other in others
        for pair in ((names[0], other), (other, names[0]))
        if cluster.gbps[cluster.index(pair[0]), cluster.index(pair[1])] > 0.0
    ]
    if not linked:
        raise UsageError(f"degrade: there is no link between the boxes of {text!r}")
    return LinksChanged(_moment("degrade", at, text), tuple(linked), gbps)


def _describe_links(change: LinksChanged, text: str) -> str:
    one, _, other = text.rpartition("@")[0].rpartition("=")[0].partition(":")
    return f"links between {one} and {other or 'all others'} carry {change.gbps:g} Gb/s"


# --- traffic


def _shifts(arguments: SimpleNamespace, problem: Problem) -> list[TrafficShift]:
    if not arguments.shift:
        return []
    if len(problem.services) > 1:
        raise UsageError("shift: it takes one service: --model, --workload and --rate instead of --services")
    if arguments.arrivals in ("replay", "recorded"):
        raise UsageError(f"shift: --arrivals {arguments.arrivals} says already when requests come")
    if arguments.count is not None:
        raise UsageError("shift: give --seconds instead of --count")
    texts = [text.rpartition("@") for text in arguments.shift]
    moments = [_moment("shift", at, f"{what}@{at}") for what, _, at in texts]
    shifts: list[TrafficShift] = []
    workload = problem.services[0].workload
    for at, (what, _, _) in sorted(zip(moments, texts, strict=True), key=lambda each: each[0]):
        if shifts and shifts[-1].at == at:
            raise UsageError(f"shift: there are two at {at:g} s")
        workload = _shifted(what, workload)
        shifts.append(TrafficShift(at, workload, parse_slo(arguments.slo, problem.services[0].model, workload)))
    return shifts


def _shifted(what: str, workload: Workload) -> Workload:
    """Like `coding`, `rate=5` or `coding,rate=5`; what is not said stays."""
    kind, rate = "", workload.rate
    for part in filter(None, (part.strip() for part in what.split(","))):
        name, equals, figure = part.partition("=")
        if not equals and not kind:
            kind = part
            continue
        try:
            rate = float(figure) if name == "rate" else 0.0
        except ValueError:
            rate = 0.0
        if not (isfinite(rate) and rate > 0.0):
            raise UsageError(f"shift: {part!r} in {what!r} is not like coding or rate=5 (requests per second)")
    if not what.strip(", "):
        raise UsageError("shift: say what traffic shifts to, like coding@60, rate=5@60 or coding,rate=5@60")
    try:
        return read_workload(kind, rate) if kind else replace(workload, rate=rate)
    except UsageError as error:
        raise UsageError(f"shift: {error}") from None


def _describe_shift(workload: Workload) -> str:
    return (
        f"{workload.rate:g} requests/s of {workload.name} come, "
        f"{workload.mean_prompt:.0f} tokens in and {workload.mean_output:.0f} out on average"
    )
