"""What came of a contest: each policy's figures, and whether all gave the same answers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Final

import msgspec
import numpy as np

from ...sims.experiments.page import ResultRow
from .running import ContestAnswer

Rounds = Sequence[Sequence[ContestAnswer]]
"""The answers of one policy to one workload, in each round."""

TTFT_S: Final = 1.0
TPOT_S: Final = 0.1
"""Deadlines of `in_time`: what people who read along do not notice."""


class ContestRow(ResultRow, frozen=True):
    """One policy and workload: seconds, of each figure the median over rounds; shares of requests and of prompt
    tokens, found where they were wanted or fetched."""

    workload: str
    policy: str
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    in_time: float
    over_default: float
    cached: float
    moved_mb: float
    other_tokens: int


class ContestPrefixRow(ResultRow, frozen=True):
    """Of the requests of one policy and workload, in all rounds: how many prompts were computed, how many had their
    beginning in the cache, and for how many its KV came from another box or came too late. `behind_others`: how many of
    all these came while another one awaited its first token. The median TTFT of each kind in seconds, of those that did
    not; None where there was none: prefixes are fetched when their holder has a queue, so that fetches would be
    compared at the worst moments with all others at the best."""

    workload: str
    policy: str
    computed: int
    found: int
    fetched: int
    late: int
    behind_others: int
    computed_ttft_s: float | None
    found_ttft_s: float | None
    fetched_ttft_s: float | None
    fetched_mb: float


class ContestReport(msgspec.Struct, frozen=True, kw_only=True):
    """`alike`: whether every prompt had the same answer each time, whatever the policy. `cores_busy`, `cores_ours`: of
    the machine, on average, in all and with the contest."""

    boxes: int
    rounds: int
    requests: int
    rate: float
    seed: int
    rows: tuple[ContestRow, ...]
    prefixes: tuple[ContestPrefixRow, ...]
    cores_busy: float
    cores_ours: float
    alike: bool


def compare_policies(workload: str, answers: Mapping[str, Rounds]) -> list[ContestRow]:
    """The rows of a workload. The first policy is the default: `over_default` is mean TTFT beside its, `other_tokens`
    how many answers differ from those of its first round."""
    default = next(iter(answers))
    reference = [answer.tokens for answer in answers[default][0]]
    default_ttft_s = _over_rounds(answers[default], _mean_ttft)
    return [
        ContestRow(
            workload=workload,
            policy=policy,
            ttft_mean_s=_over_rounds(rounds, _mean_ttft),
            ttft_p99_s=_over_rounds(rounds, lambda each: float(np.percentile([one.ttft_s for one in each], 99))),
            tpot_mean_s=_over_rounds(rounds, lambda each: fmean(one.tpot_s for one in each)),
            in_time=_over_rounds(rounds, lambda each: fmean(_is_in_time(one) for one in each)),
            over_default=_over_rounds(rounds, _mean_ttft) / default_ttft_s,
            cached=_over_rounds(rounds, _cached_share),
            moved_mb=_over_rounds(rounds, lambda each: sum(one.moved_bytes for one in each) / 1e6),
            other_tokens=sum(
                one.tokens != expected for each in rounds for one, expected in zip(each, reference, strict=True)
            ),
        )
        for policy, rounds in answers.items()
    ]


def count_prefixes(workload: str, answers: Mapping[str, Rounds]) -> list[ContestPrefixRow]:
    """The rows of a workload, for policies with which any prefix was found or fetched."""
    rows = []
    for policy, rounds in answers.items():
        every = [(one, _is_behind(one, each)) for each in rounds for one in each]
        fetched = [(one, behind) for one, behind in every if one.fetched]
        late = [one for one, _ in every if one.late]
        found = [(one, behind) for one, behind in every if one.cached_tokens and not (one.fetched or one.late)]
        computed = [(one, behind) for one, behind in every if not (one.cached_tokens or one.fetched or one.late)]
        if found or fetched or late:
            rows.append(
                ContestPrefixRow(
                    workload=workload,
                    policy=policy,
                    computed=len(computed),
                    found=len(found),
                    fetched=len(fetched),
                    late=len(late),
                    behind_others=sum(behind for _, behind in every),
                    computed_ttft_s=_median_ttft(computed),
                    found_ttft_s=_median_ttft(found),
                    fetched_ttft_s=_median_ttft(fetched),
                    fetched_mb=sum(one.moved_bytes for one, _ in fetched) / 1e6,
                )
            )
    return rows


def describe_report(report: ContestReport) -> list[str]:
    """For people."""
    rounds = "1 round" if report.rounds == 1 else f"{report.rounds} rounds"
    lines = [
        f"{report.boxes} boxes, each with a vLLM engine and the bundled model, on one machine",
        f"{report.requests} requests of a workload at {report.rate:g} a second; {rounds}; KV as it is",
        "",
        " " * 21 + "   TTFT   TTFT   TPOT    in  beside    in     KV",
        f"{'workload, policy':<21}   mean    P99     ms  time  {'first':>6} cache     MB",
    ]
    lines += [
        f"{row.workload + ' ' + row.policy:<21} {1e3 * row.ttft_mean_s:6.0f} {1e3 * row.ttft_p99_s:6.0f} "
        f"{1e3 * row.tpot_mean_s:6.1f} {row.in_time:5.0%} {row.over_default:7.2f} {row.cached:5.0%} "
        f"{row.moved_mb:6.1f}"
        for row in report.rows
    ]
    if report.prefixes:
        kinds = ("computed", "found", "fetched")
        lines += ["", f"{'beginnings of prompts':<21} requests, and their median TTFT in ms, alone", f"{'':<21}"]
        lines[-1] += "".join(f" {kind:>12}" for kind in kinds) + "  late     MB"
    for row in report.prefixes:
        counts = (row.computed, row.found, row.fetched)
        ttfts = (row.computed_ttft_s, row.found_ttft_s, row.fetched_ttft_s)
        cells = "".join(f" {n:5} {_in_ms(ttft):>6}" for n, ttft in zip(counts, ttfts, strict=True))
        lines.append(f"{row.workload + ' ' + row.policy:<21}{cells} {row.late:5} {row.fetched_mb:6.1f}")
    others = sum(row.other_tokens for row in report.rows)
    alike = "every prompt had the same answer, token for token, each time"
    return [*lines, "", alike if report.alike else f"{others} answers differ from the first to the same prompt"]


def _in_ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.0f}"


def _is_behind(answer: ContestAnswer, others: Sequence[ContestAnswer]) -> bool:
    """Whether it was asked for while another request awaited its first token."""
    return any(
        other.asked_at <= answer.asked_at < other.asked_at + other.ttft_s for other in others if other is not answer
    )


def _median_ttft(answers: Sequence[tuple[ContestAnswer, bool]]) -> float | None:
    """Of those that were not behind others."""
    return median(alone) if (alone := [one.ttft_s for one, is_behind in answers if not is_behind]) else None


def _over_rounds(rounds: Rounds, figure: Callable[[Sequence[ContestAnswer]], float]) -> float:
    return median(figure(each) for each in rounds)


def _mean_ttft(answers: Sequence[ContestAnswer]) -> float:
    return fmean(one.ttft_s for one in answers)


def _cached_share(answers: Sequence[ContestAnswer]) -> float:
    return sum(one.cached_tokens for one in answers) / sum(one.prompt_tokens for one in answers)


def _is_in_time(answer: ContestAnswer) -> bool:
    return answer.ttft_s <= TTFT_S and answer.tpot_s <= TPOT_S
