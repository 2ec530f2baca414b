"""The command line of `python -m p2pserve.sdk.live_comparison`: options, and what is printed."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import msgspec
from rich.table import Table

from ...coordinator import Phase
from ...coordinator.costs.gpus import Specs
from ...kernels.codecs import CODEC_NAMES
from ...sims.workloads import AZURE, azure
from ..actions.status_view import open_console
from ..errors import UsageError
from ..failures import explain
from ..options.planning import SPECS
from ..options.values import settings_of
from .comparison import (
    ESTIMATE_TOLERANCE,
    TOLERANCE,
    Figure,
    LiveComparison,
    LiveTraffic,
    describe_verdicts,
    run_comparison,
)
from .live_page import PARTS, SHARED, write_live_page
from .network import Say
from .nodes import MAX_REQUESTS, LiveSettings
from .regroup_bench import CHANGES, PIPELINE, check_settings, print_bench, run_regroup_bench
from .schedule import LiveFaultKind, Schedule, check_schedule, parse_fault, read_schedule
from .simulated import service_of

MAX_NODES: Final = 16
UNITS: Final = {"throughput": "{:.1f}/s", "goodput": "{:.3f}/s", "attainment": "{:.1%}"}
"""Of figures that are no seconds."""


def build_parser() -> argparse.ArgumentParser:
    """Of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m p2pserve.sdk.live_comparison",
        description="Run a network of emulated nodes on this machine, simulate the same, and compare both with each "
        "other and with what the planner expects.",
        epilog="exit codes: 0 they agree; 1 they do not, or the run failed; 2 wrong input",
    )
    add = found.add_argument
    add("--nodes", type=int, default=8, metavar="N", help="emulated nodes (default: 8)")
    add(
        "--cards",
        nargs="+",
        default=["1xRTX A6000"],
        metavar="GPUS",
        help="of the nodes in turn, like 2xA40 or, at half the rates, 2xA40/2 (default: 1xRTX A6000)",
    )
    add(
        "--specs",
        choices=SPECS,
        metavar="COLUMN",
        default=Specs.TABLE1.value,
        help="the figures of those GPUs (default: thunderserve-table1, whose A6000 prefills slowly: what a loaded "
        "machine adds to a first token weighs less then)",
    )
    add("--model", default="qwen2.5-14b", help="one whose dimensions are known (default: qwen2.5-14b)")
    add("--codec", choices=CODEC_NAMES, default="kv4", help="default: kv4")
    add(
        "--slo",
        default="5x",
        help="deadlines: multiples of a lone request on the fastest node, like 5x (default), or seconds: "
        "ttft=2,tpot=0.1",
    )
    add("--workload", choices=tuple(AZURE), default="conversation", help="Azure's lengths (default: conversation)")
    add("--requests", type=int, default=80, metavar="N", help="default: 80")
    add("--rate", type=float, metavar="R", help="requests per second, Poisson (default: 1)")
    add("--load", type=float, metavar="SHARE", help="instead: of what the best plan carries in time, like 0.7")
    add("--lead", type=int, default=0, metavar="N", help="the first N requests fill the network and do not count")
    add("--seed", type=int, default=0, metavar="N", help="of lengths and arrivals (default: 0)")
    add(
        "--max-num-batched-tokens",
        dest="max_batched_tokens",
        type=int,
        default=2048,
        metavar="N",
        help="of a step (default: 2048)",
    )
    add(
        "--phases",
        nargs="+",
        choices=tuple(Phase),
        type=Phase,
        default=[],
        metavar="PHASE",
        help="pin the nodes to these in turn (default: prefill, decode or mixed as the planner finds best)",
    )
    _add_faults(found)
    _add_modes(found)
    return found


def _add_faults(parser: argparse.ArgumentParser) -> None:
    faults = parser.add_argument_group("what goes wrong, S seconds after the first request may come")
    for kind, what, form in (
        (LiveFaultKind.LOSE, "the Nth node is lost", "N@S"),
        (LiveFaultKind.JOIN, "it is started again", "N@S"),
        (
            LiveFaultKind.DEGRADE,
            "so many Gb/s between two nodes (links are emulated then, which takes root)",
            "N:M=GBPS@S",
        ),
    ):
        faults.add_argument(f"--{kind}", action="append", default=[], metavar=form, help=f"{what}; may be repeated")
    faults.add_argument(
        "--schedule", type=Path, metavar="FILE", help="a file with all that, like `lose 3@20` in a line"
    )
    faults.add_argument(
        "--loss",
        choices=("killed", "silent"),
        default="killed",
        help="how nodes are lost: killed (default), or stopped",
    )


def _add_modes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--regroup",
        nargs="?",
        const=PIPELINE,
        choices=CHANGES,
        help="instead: what requests lose while two nodes become one pipeline, or part again, beside the plan kept; "
        "cut: while the GPUs of one box are divided anew among other numbers of nodes",
    )
    add("--page", type=Path, metavar="FOLDER", help="instead: run all of docs/results/live.md, and write it there")
    add(
        "--only",
        nargs="+",
        default=[],
        choices=(*PARTS, SHARED),
        metavar="PART",
        help=f"with --page: run these alone, others as found last ({', '.join((*PARTS, SHARED))})",
    )
    add("--pairs", type=int, default=2, metavar="N", help="with --regroup: so often, in turn (default: 2)")
    add(
        "--load-gb-s",
        type=float,
        metavar="N",
        help="GB/s that engines read weights at (default: in no time; with --regroup 1)",
    )
    add(
        "--kv-cache-mib",
        type=int,
        default=0,
        metavar="N",
        help="with --regroup: KV cache of each engine; where it leaves room for another, that is loaded beside it "
        "(default: all that the weights leave)",
    )
    add(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="SHARE",
        help=f"between live and simulated (default: {TOLERANCE:g}); between the planner's estimate and the simulator "
        f"it is always {ESTIMATE_TOLERANCE:g}",
    )
    add("--format", choices=("table", "json"), default="table", help="default: table")
    add("--debug", action="store_true", help="show tracebacks and the log")


def main(argv: Sequence[str] | None = None) -> int:
    """0: they agree; 1: they do not, or the run failed; 2: wrong input."""
    arguments = build_parser().parse_args(argv)
    logging.disable(logging.NOTSET if arguments.debug else logging.CRITICAL)
    try:
        return _run(arguments)
    except (Exception, KeyboardInterrupt) as error:
        explained = explain(error)
        if arguments.debug or explained is None:
            raise
        print(f"error: {explained[1]}", file=sys.stderr)
        return explained[0]


def _run(arguments: argparse.Namespace) -> int:
    if arguments.load_gb_s is None:
        arguments.load_gb_s = 1.0 if arguments.regroup else 0.0
    values = SimpleNamespace(**{**vars(arguments), "schedule": _schedule_of(arguments)})
    settings = settings_of(LiveSettings, values)
    traffic = settings_of(LiveTraffic, SimpleNamespace(**vars(arguments), lengths=azure(arguments.workload).lengths))
    check_run(settings, traffic)
    if arguments.page is not None:
        page, is_ok = write_live_page(arguments.page, open_say(), arguments.only)
        print(json.dumps(page.records()) if arguments.format == "json" else arguments.page / f"{page.name}.md")
        return 0 if is_ok else 1
    if arguments.only:
        raise UsageError("only: it is for --page alone; leave it out")
    if arguments.regroup:
        return _regroup(settings, traffic, arguments)
    if settings.kv_cache_mib:
        raise UsageError("kv-cache-mib: it is for --regroup alone; leave it out")
    found = run_comparison(settings, traffic, arguments.tolerance, open_say())
    if arguments.format == "json":
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        show(found)
    return 0 if found.ok and found.estimate_ok else 1


def _regroup(settings: LiveSettings, traffic: LiveTraffic, arguments: argparse.Namespace) -> int:
    if traffic.load is not None or traffic.lead:
        raise UsageError("load, lead: with --regroup all requests count, and come at --rate")
    check_settings(settings, arguments.pairs, arguments.regroup)
    pairs = (replace(traffic, seed=traffic.seed + pair) for pair in range(arguments.pairs))
    traces = [each.trace(each.rate or 1.0) for each in pairs]
    bench = run_regroup_bench(settings, traces, open_say(), arguments.regroup)
    print_bench(bench, arguments.format, open_console())
    return 0 if bench.ok else 1


def open_say() -> Say:
    """Tells on stderr how far a run is, with the seconds since this call."""
    console, began = open_console(stderr=True), time.monotonic()
    return lambda line: console.print(f"{time.monotonic() - began:5.1f} s  {line}")


def check_run(settings: LiveSettings, traffic: LiveTraffic) -> None:
    """What is mistyped is said before anything starts. Raises UsageError, and what models, GPUs, traces and deadlines
    that cannot be are refused with."""
    if not 1 <= settings.nodes <= MAX_NODES:
        raise UsageError(f"nodes: {settings.nodes} is not between 1 and {MAX_NODES}")
    check_schedule(settings.schedule, settings.nodes)
    if not 0.0 <= settings.load_gb_s < inf:
        raise UsageError(f"load-gb-s: {settings.load_gb_s} is not a rate")
    if settings.kv_cache_mib < 0:
        raise UsageError(f"kv-cache-mib: {settings.kv_cache_mib} is not above 0")
    if settings.max_batched_tokens <= MAX_REQUESTS:
        raise UsageError(f"max-num-batched-tokens: {settings.max_batched_tokens} is not above {MAX_REQUESTS}")
    if traffic.load is not None and traffic.rate is not None:
        raise UsageError("load: give it or --rate, not both")
    if traffic.load is not None and not 0.0 < traffic.load <= 2.0:
        raise UsageError(f"load: {traffic.load} is not a share above 0, 2 at most")
    trace = traffic.trace(1.0 if traffic.rate is None else traffic.rate)
    if not 0 <= traffic.lead < len(trace) - 1:
        raise UsageError(f"lead: {traffic.lead} of {len(trace)} requests leave less than two that count")
    service_of(settings, traffic.workload(1.0), settings.model)


def _schedule_of(arguments: argparse.Namespace) -> Schedule:
    """Raises UsageError."""
    given = [parse_fault(kind, text) for kind in LiveFaultKind for text in vars(arguments)[kind.value]]
    read = read_schedule(arguments.schedule) if arguments.schedule is not None else ()
    return tuple(sorted([*given, *read]))


def table_of(found: LiveComparison) -> Table:
    """For people: a line for each figure."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    has_estimate = any(figure.steady is not None for figure in found.figures)
    columns = ("", "expected", "steady", "ratio") if has_estimate else ("",)
    for name in (*columns, "simulated", "live (emulated)", "ratio"):
        table.add_column(name, justify="right" if name else "left")
    for figure in found.figures:
        cells = [figure.name.removesuffix("_tokens_s").removesuffix("_requests_s").removesuffix("_s").replace("_", " ")]
        if has_estimate:
            cells += [_value(figure, figure.expected), _value(figure, figure.steady)]
            cells.append(_ratio(figure.estimate_error, figure.is_estimated, found.estimate_tolerance))
        cells += [_value(figure, figure.simulated), _value(figure, figure.live)]
        cells.append(_ratio(figure.difference, figure.counts, found.tolerance))
        table.add_row(*cells)
    return table


def show(found: LiveComparison) -> None:
    """Print a comparison for people."""
    console = open_console()
    limits = found.deadlines
    console.print(
        f"{found.requests} requests to {found.emulated} with {found.model}: "
        f"{', '.join(f'{count} {phase}' for phase, count in found.phases.items())}"
    )
    console.print(
        f"lengths: {found.lengths}; arrivals: {found.arrivals}, {found.rate_rule}; links: {found.link_gbps:.2f} Gb/s, "
        f"{found.link_rtt_s * 1e3:.2f} ms, and {found.message_s * 1e3:.1f} ms for each message in the processes at "
        "its ends"
    )
    console.print(
        f"deadlines: {limits.ttft_s:.3g} s to the first token, {limits.tpot_s * 1e3:.3g} ms from token to token, "
        f"{limits.e2e_s:.3g} s in all; the first {found.lead} requests do not count"
    )
    console.print(table_of(found))
    console.print(
        f"the same request in both: TTFT differs by {found.median_request_ttft_difference:.1%}, E2E by "
        f"{found.median_request_e2e_difference:.1%} (medians)"
    )
    for note in found.notes:
        console.print(f"note: {note}")
    if found.own_plans_goodput_s is not None:
        goodput = f"{found.own_plans_goodput_s:.3f}/s"
        console.print(f"note: goodput where the simulated coordinator makes the plans, too: {goodput}")
    for line in describe_verdicts(found):
        console.print(line)


def _value(figure: Figure, value: float | None) -> str:
    if value is None:
        return ""
    return next((unit for name, unit in UNITS.items() if figure.name.startswith(name)), "{:.4f} s").format(value)


def _ratio(difference: float | None, counts: bool, tolerance: float) -> str:
    if difference is None:
        return ""
    return f"{1.0 + difference:.3f}{' !' if counts and abs(difference) > tolerance else '  '}"
