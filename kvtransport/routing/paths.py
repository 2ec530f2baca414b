"""Which path KV takes from one box to another: direct with n streams, through one relay, or striped
over two paths.

`choose` predicts for each candidate when the last byte has arrived (`prediction`) and what it is
billed (`costs`) and takes the best, by these rules:

- A path through a relay must be more than 25 % faster than the direct one, or the direct one must
  be impossible. Gains
  are discounted by what is known: with confidence c in both, a gain of factor g counts as g**c.
- Two paths at once must be 10 % better than the best single one.
- With `usd_per_s`, every second saved may cost that much more than the direct path does, and no
  more. With
  `max_usd_per_gb`, dearer paths are out, whatever they would save.
- What is in use stays until something is 15 % better; a relay in use stays while it is not slower
  than direct.

The answer lists every candidate with its figures and why it was not taken. Plain code over values:
no clock, no randomness, the same answer whatever the order of the candidates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations, pairwise
from math import ceil, inf

from ..errors import FiguresError, TransferError
from ..probing.figures import GB, BoxFigures, LinkFigures, bytes_per_s, rate_gbps, streams_for
from .costs import path_usd_per_gb
from .prediction import ArrivalCurve, arrival_curve, striped_seconds
from .settings import PathSettings

LEAST_STREAM_BYTES = 1 << 17
"""A job has a stream for so many of its bytes at most: of less there are no frames, or hardly any, for another."""

_UNKNOWN = BoxFigures()


class NoPath(TransferError):
    """No path is possible or allowed. `candidates` says why of each."""

    def __init__(self, text: str, candidates: tuple[Candidate, ...]) -> None:
        super().__init__(text)
        self.candidates = candidates


class CandidateVerdict(StrEnum):
    """What became of a candidate."""

    TAKEN = "taken"
    UNREACHABLE = "unreachable"
    UNMEASURED = "unmeasured"
    NO_BUDGET = "no relay budget"
    TOO_DEAR = "over max_usd_per_gb"
    SMALL_GAIN = "gains too little"
    NOT_WORTH_IT = "costs more than the time it saves"
    SLOWER = "slower"
    KEPT_CURRENT = "not enough better than the current path"


@dataclass(frozen=True, slots=True)
class RunningTransfer:
    """Another transfer that is running, and the Gb/s it was last seen to move."""

    source: str
    target: str
    gbps: float
    via: str | None = None


@dataclass(frozen=True, slots=True)
class PathNetwork:
    """What is known when a path is chosen. `flows`: other transfers, without this one."""

    links: Mapping[tuple[str, str], LinkFigures]
    boxes: Mapping[str, BoxFigures] = field(default_factory=dict)
    flows: tuple[RunningTransfer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PathQuery:
    """What is to be moved. `relays` are the boxes that may forward; None for every box with figures
    for both legs.

    `usd_per_s`: dollars that a second saved is worth; None when money does not matter.
    `max_usd_per_gb`: paths that cost more are never taken."""

    source: str
    target: str
    bytes: int
    relays: frozenset[str] | None = None
    usd_per_s: float | None = None
    max_usd_per_gb: float | None = None

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise FiguresError(f"job from {self.source} to itself needs no path")
        if self.bytes < 1:
            raise FiguresError(f"job.bytes is {self.bytes}; it must be at least 1")
        for name, value in (("usd_per_s", self.usd_per_s), ("max_usd_per_gb", self.max_usd_per_gb)):
            if value is not None and not 0.0 <= value < inf:
                raise FiguresError(f"job.{name} is {value}; it must not be negative")


@dataclass(frozen=True, slots=True)
class KVPath:
    """One path: direct (`via` None) or through a relay, with its number of streams and the rate
    expected of it. `rtt_s` is the sum over its hops."""

    source: str
    target: str
    via: str | None
    streams: int
    gbps: float
    rtt_s: float = 0.0

    @property
    def label(self) -> str:
        return "direct" if self.via is None else f"via {self.via}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One or two paths, predicted: seconds = alpha_s + bytes / rate. `limit`: what holds the rate."""

    paths: tuple[KVPath, ...]
    seconds: float
    alpha_s: float
    gbps: float
    usd: float
    limit: str
    confidence: float
    verdict: CandidateVerdict
    detail: str = ""

    @property
    def label(self) -> str:
        return " + ".join(path.label for path in self.paths)

    @property
    def vias(self) -> frozenset[str | None]:
        return frozenset(path.via for path in self.paths)

    def explain(self) -> str:
        """One line for people."""
        told = f"{self.verdict}" + (f": {self.detail}" if self.detail else "")
        if self.seconds == inf:
            return f"{self.label:<28} {'-':>9}  {told}"
        streams = "+".join(str(path.streams) for path in self.paths)
        return (
            f"{self.label:<28} {self.seconds:8.3f}s  {self.gbps:7.3f} Gb/s  {streams:>5} streams  ${self.usd:.6f}  "
            f"confidence {self.confidence:.2f}  limit: {self.limit:<14}  {told}"
        )


@dataclass(frozen=True, slots=True)
class PathChoice:
    """The paths to use, what to expect, and `why`: every candidate, the one taken first."""

    paths: tuple[KVPath, ...]
    seconds: float
    usd: float
    why: tuple[Candidate, ...]

    @property
    def taken(self) -> Candidate:
        return self.why[0]

    @property
    def vias(self) -> frozenset[str | None]:
        return self.taken.vias

    def explain(self) -> str:
        """A line for each candidate."""
        return "\n".join(candidate.explain() for candidate in self.why)


def choose(
    job: PathQuery,
    network: PathNetwork,
    *,
    current: frozenset[str | None] | None = None,
    observed: Mapping[str | None, float] | None = None,
    warm: frozenset[str | None] = frozenset(),
    unsteady: frozenset[str | None] = frozenset(),
    settings: PathSettings | None = None,
) -> PathChoice:
    """The best paths for this query. Paths are named by their relay, None for the direct one.

    `current`: the paths in use now. `observed`: Gb/s that paths were just seen to move, which goes
    before what the figures of their links say; 0 for one that stalls. `warm`: paths whose
    connections have carried bytes lately. `unsteady`: paths that were just in trouble, which may
    not be one of two: chunks stuck on one of them come last. Raises NoPath when nothing is
    possible, FiguresError when nothing is known of the direct link."""
    settings = settings or PathSettings()
    residual = _ResidualNetwork(job, network, observed or {}, warm)
    direct = residual.predict_single(None)
    give_up_s = inf if _is_too_dear(direct.candidate, job) else settings.give_up_factor * direct.candidate.seconds
    singles = [direct, *(residual.predict_single(via, give_up_s=give_up_s) for via in residual.list_relays())]
    steady = [option for option in singles if not option.candidate.vias & unsteady]
    options = [*singles, *_list_stripes(residual, steady, current, settings)]
    return _pick(job, [option.candidate for option in options], current, settings)


@dataclass(frozen=True, slots=True)
class _Option:
    """A candidate and the curves of its paths."""

    candidate: Candidate
    curves: tuple[ArrivalCurve, ...] = ()

    @property
    def possible(self) -> bool:
        return self.candidate.seconds < inf


class _ResidualNetwork:
    """The network as one job sees it: what the other flows leave of each box and link."""

    def __init__(
        self, job: PathQuery, network: PathNetwork, observed: Mapping[str | None, float], warm: frozenset[str | None]
    ) -> None:
        self.job, self.network, self.observed, self.warm = job, network, observed, warm
        # (what, box or pair) -> number of flows and their Gb/s
        self._loads: dict[tuple[str, str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for flow in network.flows:
            hops = [(flow.source, flow.target)]
            if flow.via is not None:
                hops = [(flow.source, flow.via), (flow.via, flow.target)]
                self._add("relay", flow.via, "", flow.gbps)
            for a, b in hops:
                self._add("up", a, "", flow.gbps)
                self._add("down", b, "", flow.gbps)
                self._add("link", a, b, flow.gbps)

    def list_relays(self) -> list[str]:
        """Boxes that may forward, sorted: the order of the caller's tables must not matter."""
        ends = (self.job.source, self.job.target)
        if self.job.relays is not None:
            return sorted(self.job.relays.difference(ends))
        links = self.network.links
        near = {b for a, b in links if a == ends[0]}
        return sorted(box for box in near.difference(ends) if (box, ends[1]) in links)

    def share_of(self, what: str, a: str, b: str, cap: float | None) -> float:
        """What is left of a cap: the unused part, or a fair share of it where that is more."""
        if cap is None:
            return inf
        flows, used = self._loads[what, a, b]
        # TCP flows make room for a newcomer: on a full link it gets its fair share, not nothing.
        return max(cap - used, cap / (flows + 1))

    def ends_gbps(self) -> tuple[float, str]:
        """What sender and receiver may still carry, and which of the two is the limit."""
        source, target = self.job.source, self.job.target
        up = self.share_of("up", source, "", self._box(source).up_gbps)
        down = self.share_of("down", target, "", self._box(target).down_gbps)
        return (up, "sender up") if up <= down else (down, "receiver down")

    def predict_single(self, via: str | None, *, give_up_s: float = inf) -> _Option:
        """The path direct or through `via`; given up once it needs `give_up_s`."""
        job, links = self.job, self.network.links
        stops = (job.source, job.target) if via is None else (job.source, via, job.target)
        pairs = list(pairwise(stops))
        legs = [links[pair] for pair in pairs if pair in links]
        if len(legs) < len(pairs):
            missing = next(f"{a} > {b}" for a, b in pairs if (a, b) not in links)
            if via is None:
                raise FiguresError(f"nothing is known of the link {missing}: give measured, inferred or prior figures")
            return _impossible_option(job, via, CandidateVerdict.UNMEASURED, f"no figures for {missing}")
        dead = next((f"{a} > {b}" for (a, b), leg in zip(pairs, legs, strict=True) if not leg.reachable), None)
        if dead is not None:
            return _impossible_option(job, via, CandidateVerdict.UNREACHABLE, dead)
        if via is not None and not self._may_relay(via):
            return _impossible_option(job, via, CandidateVerdict.NO_BUDGET, f"{via} may not forward {job.bytes} bytes")
        alpha = sum(leg.rtt_s for leg in legs)
        # The cheapest bound first: with 32 relays most cannot win even if nothing else were flowing.
        at_best = alpha + job.bytes / bytes_per_s(max(min(leg.capacity_gbps for leg in legs), 1e-9))
        if at_best >= give_up_s and via not in self.observed:
            return _impossible_option(job, via, CandidateVerdict.SLOWER, f"{at_best:.3f} s at best")
        limits = self._limits(via, pairs, legs)
        gbps, limit = min(limits, key=lambda item: item[0])
        # Enough streams for the slowest limit; where their windows together still carry less than
        # that, the window is the limit.
        streams = min(max(_streams(leg, gbps) for leg in legs), ceil(job.bytes / LEAST_STREAM_BYTES))
        through = min(rate_gbps(leg, streams) for leg in legs)
        if through < gbps * (1.0 - 1e-9):
            gbps, limit = through, "window"
        # What a running transfer shows beats every estimate.
        if via in self.observed:
            gbps, limit = self.observed[via], "observed"
        if gbps <= 0.0:
            return _impossible_option(job, via, CandidateVerdict.UNREACHABLE, f"{limit} leaves nothing")
        shape = arrival_curve(bytes_per_s(gbps), alpha, warm=via in self.warm)
        seconds = shape.seconds_for(job.bytes)
        confidence = 1.0 if via in self.observed else min(leg.rate_confidence for leg in legs)
        path = KVPath(job.source, job.target, via, streams, gbps, alpha)
        usd = path_usd_per_gb(self.network.boxes, links, stops) * job.bytes / GB
        alpha_s = max(seconds - job.bytes / shape.rate, 0.0)
        taken = Candidate((path,), seconds, alpha_s, gbps, usd, limit, confidence, CandidateVerdict.TAKEN)
        return _Option(taken, (shape,))

    def predict_stripe(self, one: _Option, two: _Option) -> _Option:
        """Two paths at once: rates add up as far as the shares of the two ends go."""
        size = self.job.bytes
        ends, limit = self.ends_gbps()
        a, b = one.candidate.paths[0], two.candidate.paths[0]
        seconds = striped_seconds(one.curves[0], two.curves[0], size, bytes_per_s(ends))
        total = a.gbps + b.gbps
        gbps = min(total, ends)
        # What each of them will really get: past the shared limit both yield in proportion.
        paths = tuple(replace(path, gbps=path.gbps * gbps / total) for path in (a, b))
        usd = (one.candidate.usd * a.gbps + two.candidate.usd * b.gbps) / total
        limit = limit if total > ends else f"{one.candidate.limit}, {two.candidate.limit}"
        confidence = min(one.candidate.confidence, two.candidate.confidence)
        alpha_s = max(seconds - size / bytes_per_s(gbps), 0.0)
        made = Candidate(paths, seconds, alpha_s, gbps, usd, limit, confidence, CandidateVerdict.TAKEN)
        return _Option(made, one.curves + two.curves)

    def _limits(
        self, via: str | None, pairs: list[tuple[str, str]], legs: list[LinkFigures]
    ) -> list[tuple[float, str]]:
        limits = [self.ends_gbps()]
        names = ["link"] if via is None else ["first leg", "second leg"]
        for (a, b), leg, name in zip(pairs, legs, names, strict=True):
            limits.append((self.share_of("link", a, b, leg.capacity_gbps), name))
        if via is not None:
            box = self._box(via)
            limits.append((self.share_of("down", via, "", box.down_gbps), "relay down"))
            limits.append((self.share_of("up", via, "", box.up_gbps), "relay up"))
            limits.append((self.share_of("relay", via, "", box.relay_gbps), "relay limit"))
        return limits

    def _may_relay(self, via: str) -> bool:
        box = self._box(via)
        return box.relay_gbps != 0.0 and (box.relay_budget_bytes is None or box.relay_budget_bytes >= self.job.bytes)

    def _box(self, name: str) -> BoxFigures:
        return self.network.boxes.get(name, _UNKNOWN)

    def _add(self, what: str, a: str, b: str, gbps: float) -> None:
        flows, used = self._loads[what, a, b]
        self._loads[what, a, b] = (flows + 1, used + gbps)


def _streams(leg: LinkFigures, gbps: float) -> int:
    # A link that nothing has ever filled may carry more than was seen: enough streams to find out.
    target = 2.0 * gbps if leg.capacity_is_floor else gbps
    return streams_for(target, leg.window_rtt_s, leg.one_stream_gbps)


def _impossible_option(job: PathQuery, via: str | None, verdict: CandidateVerdict, detail: str) -> _Option:
    path = KVPath(job.source, job.target, via, 0, 0.0)
    return _Option(Candidate((path,), inf, inf, 0.0, 0.0, "", 0.0, verdict, detail))


def _list_stripes(
    residual: _ResidualNetwork,
    singles: list[_Option],
    current: frozenset[str | None] | None,
    settings: PathSettings,
) -> Iterable[_Option]:
    """Pairs worth a closer look: of the direct path and the best relays, and the pair in use."""
    possible = [option for option in singles if option.possible]
    relays = sorted(
        (option for option in possible if None not in option.candidate.vias),
        key=lambda option: (option.candidate.seconds, option.candidate.label),
    )
    kept = [option for option in possible if None in option.candidate.vias] + relays[: settings.striped_relays]
    in_use = [option for option in relays[settings.striped_relays :] if current and option.candidate.vias < current]
    best = min((option.candidate.seconds for option in possible), default=inf)
    ends = bytes_per_s(residual.ends_gbps()[0])
    for one, two in combinations([*kept, *in_use], 2):
        rate = min(ends, one.curves[0].rate + two.curves[0].rate)
        start = min(one.curves[0].start_s, two.curves[0].start_s)
        # Even finishing together from the earlier start on, would it be better by what two paths must be?
        if (start + residual.job.bytes / rate) * settings.stripe_gain < best or (
            current == one.candidate.vias | two.candidate.vias
        ):
            yield residual.predict_stripe(one, two)


def _pick(
    job: PathQuery, candidates: list[Candidate], current: frozenset[str | None] | None, settings: PathSettings
) -> PathChoice:
    price = job.usd_per_s
    # A price limit excludes a path whatever it would gain.
    judged = [
        replace(one, verdict=CandidateVerdict.TOO_DEAR, detail=f"${one.usd / job.bytes * GB:.4f} per GB")
        if _is_too_dear(one, job)
        else one
        for one in candidates
    ]
    direct = next((one for one in judged if one.vias == {None} and one.verdict is CandidateVerdict.TAKEN), None)
    if direct is not None:
        judged = [
            _judge_against_direct(direct, one, job, current, settings.relay_gain)
            if one.verdict is CandidateVerdict.TAKEN
            else one
            for one in judged
        ]

    def worth(one: Candidate) -> tuple[float, float, int, str]:
        seconds = _discounted_seconds(direct, one) if direct is not None else one.seconds
        return seconds + (one.usd / price if price else 0.0), one.usd, len(one.paths), one.label

    able = [one for one in judged if one.verdict is CandidateVerdict.TAKEN]
    if not able:
        text = "; ".join(f"{one.label}: {one.verdict} {one.detail}".rstrip() for one in judged)
        raise NoPath(f"no path from {job.source} to {job.target}: {text}", tuple(judged))
    # Two paths cost two sets of connections, so a pair has to be clearly faster than the best one alone.
    best = min((one for one in able if len(one.paths) == 1), key=worth, default=None)
    pair = min((one for one in able if len(one.paths) > 1), key=worth, default=None)
    if best is None or (pair is not None and worth(pair)[0] * settings.stripe_gain < worth(best)[0]):
        best = pair
    # Hysteresis: a change of paths throws warm connections away, and two choices that are about
    # as good would take turns.
    kept = next((one for one in able if one.vias == current), None)
    if (
        best is not None
        and kept is not None
        and kept is not best
        and worth(best)[0] * settings.switch_gain >= worth(kept)[0]
    ):
        best, reason = kept, CandidateVerdict.KEPT_CURRENT
    else:
        reason = CandidateVerdict.SLOWER
    assert best is not None
    others = [
        one if one.verdict is not CandidateVerdict.TAKEN else _explain_rejection(one, best, reason)
        for one in judged
        if one is not best
    ]
    others.sort(key=lambda one: (one.seconds, one.usd, one.label))
    return PathChoice(best.paths, best.seconds, best.usd, (best, *others))


def _is_too_dear(one: Candidate, job: PathQuery) -> bool:
    limit = job.max_usd_per_gb
    return limit is not None and one.usd > limit * job.bytes / GB * (1.0 + 1e-9)  # the margin is for rounding alone


def _explain_rejection(one: Candidate, best: Candidate, reason: CandidateVerdict) -> Candidate:
    if one.seconds >= best.seconds:
        return _mark_slower(one, best)
    gain = f"{best.seconds / one.seconds:.2f}x as fast as {best.label}"
    if reason is CandidateVerdict.KEPT_CURRENT:
        return replace(one, verdict=reason, detail=gain)
    if len(one.paths) > len(best.paths):
        return replace(one, verdict=CandidateVerdict.SMALL_GAIN, detail=f"{gain}: too little for two paths")
    return replace(one, verdict=CandidateVerdict.NOT_WORTH_IT, detail=f"{gain}, ${one.usd - best.usd:+.6f}")


def _mark_slower(one: Candidate, than: Candidate) -> Candidate:
    ratio = f"{one.seconds / than.seconds:.2f}x the time of {than.label}"
    return replace(one, verdict=CandidateVerdict.SLOWER, detail=ratio)


def _discounted_seconds(direct: Candidate, one: Candidate) -> float:
    """Its seconds; a gain over direct counts as far as both are known: factor g as g**c."""
    if one.seconds >= direct.seconds:
        return one.seconds
    confidence = min(direct.confidence, one.confidence)
    return float(direct.seconds * (one.seconds / direct.seconds) ** confidence)


def _judge_against_direct(
    direct: Candidate, one: Candidate, job: PathQuery, current: frozenset[str | None] | None, relay_gain: float
) -> Candidate:
    """A candidate that uses a relay, judged against the direct path."""
    if one is direct:
        return one
    if one.seconds > direct.seconds:
        return _mark_slower(one, direct)
    seconds = _discounted_seconds(direct, one)
    if one.vias != current and seconds * relay_gain >= direct.seconds:
        gain = f"{direct.seconds / one.seconds:.2f}x as fast"
        if one.confidence < 1.0 or direct.confidence < 1.0:
            gain += f", counted as {direct.seconds / seconds:.2f}x"
        return replace(one, verdict=CandidateVerdict.SMALL_GAIN, detail=f"{gain}; more than {relay_gain}x is needed")
    saved, extra = direct.seconds - seconds, one.usd - direct.usd
    if job.usd_per_s is not None and extra > job.usd_per_s * saved:
        return replace(one, verdict=CandidateVerdict.NOT_WORTH_IT, detail=f"{saved:.3f} s for ${extra:.6f} more")
    return one
