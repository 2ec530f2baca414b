"""Policies beside each other, on real engines.

    python -m p2pserve.sdk.contest --format json

Starts a network of boxes with a vLLM engine each on this machine for every policy in turn, some rounds, and asks all of
them the same: prompts that share nothing, prompts about a few files, which share all but their end, and prompts about
one file after the other, a second apart. Exits with 1 where the answers to a prompt differ.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
import trio

from ...node.box.hardware import probe
from ...node.box.start_checks import require_engine
from ..errors import UsageError
from ..failures import explain
from ..options.shared import NETWORK_POLICIES
from .page import write_contest_page
from .report import ContestReport, ContestRow, compare_policies, count_prefixes, describe_report
from .running import ContestAnswer, Say, run_policy
from .workloads import WORKLOADS, draw_requests, read_sources

POLICIES: Final = ("predicted", "plan", "least-tokens", "round-robin")
MAX_BOXES: Final = 16


class ContestSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is run. The first policy is the one that others are held against."""

    policies: tuple[str, ...] = POLICIES
    boxes: int = 3
    rounds: int = 2
    requests: int = 40
    rate: float = 3.0
    seed: int = 0

    def check(self) -> None:
        """Raises UsageError."""
        unknown = [policy for policy in self.policies if policy not in NETWORK_POLICIES]
        if unknown or not self.policies:
            raise UsageError(f"policies: {', '.join(unknown) or 'none'}; there are {', '.join(NETWORK_POLICIES)}")
        if not 1 <= self.boxes <= MAX_BOXES:
            raise UsageError(f"boxes: {self.boxes} is not between 1 and {MAX_BOXES}")
        if self.rounds < 1:
            raise UsageError("rounds: give at least 1")


def run_contest(settings: ContestSettings, say: Say) -> ContestReport:
    """Raises UsageError, DemoFailed or ClientError."""
    settings.check()
    text = read_sources()
    workloads = [
        draw_requests(name, text, requests=settings.requests, rate=settings.rate, seed=settings.seed)
        for name in WORKLOADS
    ]
    busy: list[tuple[float, float]] = []
    found: dict[str, dict[str, list[list[ContestAnswer]]]] = {
        name: {policy: [] for policy in settings.policies} for name in WORKLOADS
    }
    for number in range(settings.rounds):
        # Policies take turns in being first: what else the machine does changes with time.
        turn = number % len(settings.policies)
        for policy in (*settings.policies[turn:], *settings.policies[:turn]):
            answers, cores = trio.run(run_policy, policy, settings.boxes, workloads, say)
            busy.append(cores)
            for name, each in zip(WORKLOADS, answers, strict=True):
                found[name][policy].append(each)
    rows: list[ContestRow] = [row for name, each in found.items() for row in compare_policies(name, each)]
    prefixes = [row for name, each in found.items() for row in count_prefixes(name, each)]
    return ContestReport(
        boxes=settings.boxes,
        rounds=settings.rounds,
        requests=settings.requests,
        rate=settings.rate,
        seed=settings.seed,
        rows=tuple(rows),
        prefixes=tuple(prefixes),
        cores_busy=fmean(every for every, _ in busy),
        cores_ours=fmean(ours for _, ours in busy),
        alike=not any(row.other_tokens for row in rows),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """0: all gave the same answers; 1: not, or the run failed; 2: wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m p2pserve.sdk.contest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ContestSettings()
    parser.add_argument(
        "--policies", default=",".join(default.policies), metavar="NAMES", help=f"default: {','.join(default.policies)}"
    )
    for name in ("boxes", "rounds", "requests", "rate", "seed"):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write docs/results/contest.md there, too")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    given = vars(parser.parse_args(argv))
    form, folder = given.pop("format"), given.pop("page")
    policies = tuple(filter(None, given.pop("policies").split(",")))
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    try:
        require_engine(probe(), os.environ)
        found = run_contest(
            ContestSettings(policies=policies, **given),
            lambda line: print(f"{time.monotonic() - began:6.1f} s  {line}", file=sys.stderr),
        )
        if folder is not None:
            write_contest_page(found, folder)
    except (Exception, KeyboardInterrupt) as error:
        explained = explain(error)
        if explained is None:
            raise
        print(f"error: {explained[1]}", file=sys.stderr)
        return explained[0]
    print(json.dumps(msgspec.to_builtins(found)) if form == "json" else "\n".join(describe_report(found)))
    return 0 if found.alike else 1
