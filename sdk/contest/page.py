"""The results page `contest`: default, round robin, fewest tokens and the plan's shares on real engines, and prefixes
whose KV comes from another box."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...sims.experiments.page import Page, PageTable, write_index, write_page
from .report import TPOT_S, TTFT_S, ContestPrefixRow, ContestReport
from .workloads import ASKED, TURN_S

NAME: Final = "contest"
COMMAND: Final = "python -m p2pserve.sdk.contest"


def write_contest_page(report: ContestReport, folder: Path) -> Path:
    """The page, its rows for programs, and the index. Raises OSError."""
    write_page(build_page(report), folder)
    write_index(folder)
    return folder / f"{NAME}.md"


def build_page(report: ContestReport) -> Page:
    """The page of this contest."""
    default = report.rows[0].policy
    return Page(
        name=NAME,
        title="Policies on real engines, and prefixes from other boxes",
        assumes=f"""{report.boxes} boxes with a vLLM engine each and the bundled model (float32, one thread an engine)
        are processes of one machine with two cores; links are its loopback, and KV goes in `raw`. Each policy has a
        network of its own, {report.rounds} time(s), in turn with the others, and is asked the same {report.requests}
        requests of each workload. *alone*: prompts share nothing; *files*: questions about six files, of 1,150 to
        1,650 tokens, some more often than others; both Poisson, {report.rate:g} a second. *turns*: {ASKED} questions
        about a file, then {ASKED} about the next, {TURN_S:g} s apart, so that nothing waits.

        Boxes prefill and decode (`join --phase mixed`), since prefixes are fetched to boxes that serve a request whole;
        the plan of so few boxes may pair those that prefill with those that decode, and nothing is fetched then.
        Whether a prefix is fetched every policy leaves to the same prediction ([prefixes](../prefixes.md)).

        *in time*: first token within {TTFT_S:g} s, {TPOT_S:g} s from token to token. *over default*: mean TTFT beside
        that of `{default}`. *cached*: of all prompt tokens, those that were found or fetched. Figures are medians over
        rounds, counts of all rounds.""",
        tables=(
            PageTable("Policies", report.rows),
            PageTable(
                "Beginnings of prompts",
                report.prefixes,
                "Requests whose prompt was computed, whose beginning was found in the cache of the box that they "
                "went\nto, or fetched from another, or came too late from there. *Behind others*: that came while "
                "another\none awaited its first token. Median TTFT of each kind, of those that did not.",
            ),
        ),
        remarks=_describe(report),
        command=f"{COMMAND} --rounds {report.rounds} --requests {report.requests} --page docs/results",
    )


def _describe(report: ContestReport) -> str:
    others = sum(row.other_tokens for row in report.rows)
    answers = sum(report.rounds * report.requests for _ in report.rows)
    fetched = sum(row.fetched for row in report.prefixes)
    late = sum(row.late for row in report.prefixes)
    default = report.rows[0].policy
    lines = [
        f"Of {answers} answers, {others} differ from that of the first round of `{default}` to the same prompt.",
        f"{fetched} answers are to prompts whose beginning came from another box.",
        *filter(None, map(_describe_turns, report.prefixes)),
        *filter(None, map(_describe_stall, report.prefixes)),
        f"{late} prefixes came too late and were computed where they were awaited.",
        f"{report.cores_busy:.2g} of the machine's cores were busy, {report.cores_ours:.2g} of them with this.",
    ]
    if not any(row.fetched for row in report.prefixes if row.policy == default):
        lines.append(
            f"`{default}` fetches nothing here: a token that a box holds counts as the time for sixteen, and no queue "
            "before a box gets as long as that of sixteen of these prefixes, as requests wait at the gateway before. "
            "So it sends each to where its prefix is, which is sooner still than fetching."
        )
    return "".join(f"- {line}\n" for line in lines)


def _describe_stall(row: ContestPrefixRow) -> str:
    """Of turns, in which nothing should wait."""
    if row.workload != "turns" or not row.behind_others:
        return ""
    every = row.computed + row.found + row.fetched + row.late
    return (
        f"{row.behind_others} of {every} turns of `{row.policy}` came while another request awaited its first token, "
        "and do not count in these times."
    )


def _describe_turns(row: ContestPrefixRow) -> str:
    computed, found, fetched = row.computed_ttft_s, row.found_ttft_s, row.fetched_ttft_s
    if row.workload != "turns" or computed is None or found is None or fetched is None:
        return ""
    told = (
        f"One at a time, `{row.policy}`: a first token takes {1e3 * computed:.0f} ms with a prompt that is computed, "
        f"{1e3 * fetched:.0f} ms with its beginning fetched ({row.fetched_mb / row.fetched:.1f} MB each), "
        f"{1e3 * found:.0f} ms with it in the cache."
    )
    if fetched < computed:
        return f"{told} Fetching saves {computed - fetched:.2f} s of {computed - found:.2f}."
    return f"{told} So fetching lost {fetched - computed:.2f} s, where it had been predicted to be sooner."
