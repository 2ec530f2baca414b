"""What the latest requests say of a network: rates, percentiles, how many were in time, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ...coordinator.plan import Deadlines
from ..observing.counts import NO_DEADLINES
from ..observing.values import RequestSummary

RATE_S: Final = 60.0
WINDOW_S: Final = 600.0
BUCKETS: Final = 20
ENDED: Final = ("stop", "length")
MILLION: Final = 1e6


@dataclass(frozen=True, slots=True)
class LatencyPercentiles:
    """Of some figure, in its unit; None where there is none of it yet."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Of the last RATE_S: requests and new tokens per second. Of the last WINDOW_S: everything else. `in_time` is the
    share of requests that met their deadlines (None without requests or without deadlines); one that failed did not.
    `usd_per_million`: by what the requests' own time and traffic cost, for tokens in and out."""

    requests_s: float
    tokens_s: float
    ended: int
    failed: int
    ttft: LatencyPercentiles
    tpot: LatencyPercentiles
    ttft_course: tuple[float | None, ...]
    tpot_course: tuple[float | None, ...]
    in_time: float | None
    usd_per_million: float | None
    raw_bytes: int
    wire_bytes: int


def measure_traffic(requests: Sequence[RequestSummary], deadlines: Deadlines, now: float) -> Traffic:
    """Of the requests that a snapshot has; `now` in unix seconds."""
    over = [request for request in requests if request.e2e_s is not None or request.state == "error"]
    recent = [request for request in over if now - ended_at(request) <= WINDOW_S]
    answered = [request for request in recent if request.state in ENDED]
    failed = sum(request.state == "error" for request in recent)
    last = [request for request in answered if now - ended_at(request) <= RATE_S]
    tokens = sum(request.prompt_tokens + (request.completion_tokens or 0) for request in answered)
    usd = sum(request.cost.usd for request in answered)
    judged = len(answered) + failed
    kept = sum(is_in_time(request, deadlines) for request in answered)
    return Traffic(
        requests_s=len(last) / RATE_S,
        tokens_s=sum(request.completion_tokens or 0 for request in last) / RATE_S,
        ended=len(answered),
        failed=failed,
        ttft=percentiles(request.ttft_s for request in answered),
        tpot=percentiles(request.tpot_s for request in answered),
        ttft_course=_course(answered, "ttft_s", now),
        tpot_course=_course(answered, "tpot_s", now),
        in_time=kept / judged if judged and deadlines != NO_DEADLINES else None,
        usd_per_million=usd / tokens * MILLION if tokens and usd else None,
        raw_bytes=sum(request.raw_bytes for request in recent),
        wire_bytes=sum(request.wire_bytes for request in recent),
    )


def ended_at(request: RequestSummary) -> float:
    """When it was over, in unix seconds; of one that runs, when it came."""
    return request.arrived + (request.e2e_s or 0.0)


def is_in_time(request: RequestSummary, deadlines: Deadlines) -> bool:
    """Whether a request that was answered met all deadlines that there are."""
    limits = ((request.ttft_s, deadlines.ttft_s), (request.tpot_s, deadlines.tpot_s), (request.e2e_s, deadlines.e2e_s))
    return all(not limit or value is None or value <= limit for value, limit in limits)


def percentiles(values: Iterable[float | None]) -> LatencyPercentiles:
    """By the nearest rank: each is a value that occurred."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return LatencyPercentiles(None, None, None)
    p50, p95, p99 = (known[min(len(known) - 1, int(len(known) * part))] for part in (0.5, 0.95, 0.99))
    return LatencyPercentiles(p50, p95, p99)


def _course(requests: Iterable[RequestSummary], field: str, now: float) -> tuple[float | None, ...]:
    """The median of a figure in each of BUCKETS parts of the window, the oldest first."""
    parts: list[list[float | None]] = [[] for _ in range(BUCKETS)]
    for request in requests:
        age = now - ended_at(request)
        parts[min(BUCKETS - 1, max(0, BUCKETS - 1 - int(age / WINDOW_S * BUCKETS)))].append(getattr(request, field))
    return tuple(percentiles(part).p50 for part in parts)
