"""`p2pserve bench`: puts load on a network, and says what came of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
import trio

from ..actions.status_view import open_console
from ..batches import show_progress
from ..client import AsyncClient
from ..environment import require_network
from .load import BenchLoad, check_options, plan_load, read_deadlines, read_trace
from .report import print_report, summarise_run
from .running import BenchRun, run_load

INTERRUPTED = 130


def run_bench(arguments: SimpleNamespace) -> int:
    """Run it, and print the report. Returns the exit code: 1 where no request was answered."""
    check_options(arguments)
    slo, trace = read_deadlines(arguments.slo), read_trace(arguments)
    where, _ = require_network(arguments.bootstrap, arguments.token)

    async def run() -> tuple[BenchLoad, BenchRun]:
        async with AsyncClient(where, token=arguments.token, timeout_s=arguments.timeout_s) as client:
            load = plan_load(arguments, trace, slo, await client.status())
            with show_progress(True, len(trace)) as advance:
                return load, await run_load(client, load, arguments.deadline_s, advance)

    load, done = trio.run(run)
    report = summarise_run(load, done.ended, sent=done.sent, span_s=done.span_s, interrupted=done.interrupted)
    if arguments.format == "json":
        print(json.dumps(msgspec.to_builtins(report)))
    else:
        print_report(report, open_console())
    if done.interrupted:
        return INTERRUPTED
    return 0 if report.answered else 1
