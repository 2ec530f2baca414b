"""`p2pserve sim`: requests against a plan or a Splitwise setup, on virtual time."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console

from ...sims.splitwise.machine import AS_RELEASED, MachineLimits
from ...sims.splitwise.metrics import missed_slos, slowdowns, summary
from ...sims.splitwise.run import SplitwiseResult, run_setup, write_requests_csv
from ...sims.splitwise.step_lookup import Mode
from ...sims.splitwise.traces import read_trace
from ..actions.status_view import open_console
from ..errors import UsageError
from ..options.values import check_writable


def run_sim(arguments: SimpleNamespace) -> int:
    """Returns the exit code."""
    for name in ("batch_tokens", "max_preemptions"):
        if getattr(arguments, name) is not None and (arguments.compat or not arguments.measured):
            option = name.replace("_", "-")
            raise UsageError(f"{option}: give --{option} with --measured; --compat keeps to the public simulator's")
    if arguments.compat or arguments.measured:
        return _run_splitwise(arguments)
    from .planned import run_planned  # scipy, for the planner

    return run_planned(arguments)


def _run_splitwise(arguments: SimpleNamespace) -> int:
    """A setup of sims/splitwise, by the public simulator's rules or with its faults corrected."""
    missing = [name for name in ("setup", "model", "workload", "trace") if getattr(arguments, name) is None]
    if missing:
        raise UsageError(f"{missing[0]}: give --{' and --'.join(missing)} with --compat splitwise or --measured")
    if arguments.compat and arguments.measured:
        raise UsageError("measured: give either --compat splitwise or --measured, and not both")
    mode: Mode = "measured" if arguments.measured else "released"
    trace = read_trace(arguments.trace)
    started = time.process_time()
    limits = MachineLimits(
        tokens=arguments.batch_tokens or AS_RELEASED.tokens,
        preemptions=arguments.max_preemptions or AS_RELEASED.preemptions,
    )
    result = run_setup(
        arguments.setup,
        arguments.model,
        arguments.workload,
        trace,
        mode=mode,
        machines=arguments.machines,
        limits=limits,
    )
    seconds = time.process_time() - started
    check_writable("requests", arguments.requests)
    if arguments.requests is not None:
        write_requests_csv(result.outcomes, arguments.requests)
    figures = _figures(result, arguments, mode, seconds)
    if arguments.format == "json":
        print(json.dumps(figures))
    else:
        _print_figures(figures, open_console())
    return 0


def _figures(result: SplitwiseResult, arguments: SimpleNamespace, mode: Mode, seconds: float) -> dict[str, Any]:
    slow = slowdowns(result.outcomes, arguments.model)
    trace = result.outcomes.trace
    return {
        "setup": arguments.setup,
        "model": arguments.model,
        "workload": arguments.workload,
        "mode": mode,
        "times": result.times,
        "lengths": trace.lengths,
        "arrivals": trace.arrivals,
        "requests": len(trace),
        "completed": int(result.outcomes.completed.sum()),
        "output_tokens": int(np.sum(trace.output)),
        **summary(result.outcomes),
        "slo_missed": missed_slos(slow),
        "events": result.events,
        "sim_end_s": result.sim_end_s,
        "cpu_s": seconds,
    }


def _print_figures(figures: dict[str, Any], console: Console) -> None:
    rules = "the public simulator's rules" if figures["mode"] == "released" else "measured decode times, real KV sizes"
    console.print(
        f"{figures['setup']}, {figures['model']}, {figures['workload']}: simulated by {rules}; "
        f"times from {', '.join(figures['times'])}"
    )
    console.print(f"lengths {figures['lengths']}, arrivals {figures['arrivals']}")
    console.print(
        f"{figures['completed']} of {figures['requests']} requests, {figures['rps']:.2f} requests/s, "
        f"{figures['out_tok_s']:.0f} output tokens/s"
    )
    for name, unit, scale in (("ttft", "ms", 1e3), ("tbt", "ms", 1e3), ("e2e", "s", 1.0)):
        values = "/".join(f"{figures[f'{name}_p{percent}'] * scale:.3g}" for percent in (50, 90, 99))
        console.print(f"{name.upper():5} {values} {unit} (p50/p90/p99)")
    missed = ", ".join(figures["slo_missed"]) or "none"
    console.print(f"deadlines missed (slowdown against a lone DGX-A100): {missed}")
    console.print(f"{figures['events']} events, {figures['cpu_s']:.2f} CPU seconds")
