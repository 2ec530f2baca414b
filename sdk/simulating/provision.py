"""`p2pserve provision`: how many machines of which kind, by simulating them."""

from __future__ import annotations

import json
import sys
import time
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ...coordinator.costs.gpus import Specs
from ...coordinator.names import count_of
from ...sims.splitwise.cluster_trials import ClusterTrials, DrawnTraces
from ...sims.splitwise.machine_types import CostRatio, MachineCatalogue
from ...sims.splitwise.metrics import PERCENTILES, SLO, Slo
from ...sims.splitwise.provisioning import (
    PAPER_DESIGNS,
    ProvisionAnswer,
    ProvisionGoal,
    ProvisionSearch,
    ProvisionWish,
    parse_design,
)
from ...sims.splitwise.setups import KV_TRANSFER_BYTES_S
from ...sims.workloads import AZURE, azure, workload_from
from ..actions.status_view import open_console
from ..errors import UsageError
from ..live_line import LiveLine

MAX_DESIGNS: Final = 24
MAX_SECONDS: Final = 3600.0
SAMPLE_RATE: Final = 5.0
"""Of the trace whose mean lengths stand for a batch's on cards of the GPU table."""


def run_provision(arguments: SimpleNamespace) -> int:
    """Search each design, and print what was found. Returns the exit code: 1 where nothing was."""
    wish = _wish(arguments)
    slo: Slo = {**SLO, **(arguments.slo or {})}
    traces = _traces(arguments)
    catalogue = MachineCatalogue(
        arguments.model,
        traces.at(min(SAMPLE_RATE, traces.most_rate)),
        mode=arguments.times,
        cost_ratio=CostRatio(arguments.cost_ratio),
        specs=Specs(arguments.specs),
    )
    names = list(dict.fromkeys(arguments.design or PAPER_DESIGNS))
    if len(names) > MAX_DESIGNS:
        raise UsageError(f"design: {len(names)} of them; give at most {MAX_DESIGNS}")
    designs = [parse_design(name, catalogue) for name in names]
    ends_at = time.monotonic() + arguments.budget_s
    trials = ClusterTrials(
        traces,
        catalogue,
        slo,
        kv_bytes_s=KV_TRANSFER_BYTES_S if arguments.kv_gbps is None else arguments.kv_gbps * 1e9 / 8,
        is_time_up=lambda: time.monotonic() > ends_at,
    )
    if wish.rate is not None:
        traces.at(wish.rate)  # before the search: too many requests are refused
    with LiveLine(sys.stderr, time.monotonic) as line:
        search = ProvisionSearch(trials, wish, progress=(lambda _: None) if arguments.format == "json" else line.show)
        answers = [search.run(design) for design in designs]
    if arguments.format == "json":
        print(json.dumps(_json(arguments, wish, slo, answers)))
    else:
        _print(arguments, wish, slo, answers, open_console())
    return 0 if any(answer.found for answer in answers) else 1


def _wish(arguments: SimpleNamespace) -> ProvisionWish:
    missing = [f"--{name}" for name in ("model", "workload") if getattr(arguments, name) is None]
    if missing:
        raise UsageError(f"{missing[0].removeprefix('--')}: give {' and '.join(missing)}")
    if arguments.seconds > MAX_SECONDS:
        raise UsageError(f"seconds: {arguments.seconds:g} is more than {MAX_SECONDS:g}")
    return ProvisionWish(
        goal=ProvisionGoal(arguments.goal),
        rate=arguments.rate,
        max_usd_per_h=arguments.max_usd_per_h or inf,
        max_kw=arguments.max_kw or inf,
        max_machines=arguments.max_machines,
        rate_step=arguments.rate_step,
    )


def _traces(arguments: SimpleNamespace) -> DrawnTraces:
    what = arguments.workload
    if what in AZURE:
        lengths = azure(what).lengths
        prompts, outputs, source = lengths.prompt, lengths.output, lengths.source
    else:
        path = Path(what)
        if not path.is_file():
            raise UsageError(f"workload: {what!r} is neither a file nor one of {', '.join(AZURE)}")
        workload = workload_from(path, 1.0)
        prompts, outputs, source = workload.prompts, workload.outputs, workload.name
    pairs = list(zip(prompts.tolist(), outputs.tolist(), strict=True))
    return DrawnTraces(pairs, source=source, seconds=arguments.seconds, seed=arguments.seed)


def _json(arguments: SimpleNamespace, wish: ProvisionWish, slo: Slo, answers: list[ProvisionAnswer]) -> dict[str, Any]:
    return {
        "simulated": True,
        "model": arguments.model,
        "workload": arguments.workload,
        "times": arguments.times,
        "cost_ratio": arguments.cost_ratio,
        "specs": arguments.specs,
        "seconds": arguments.seconds,
        "seed": arguments.seed,
        "goal": wish.goal,
        "limits": {
            "rate": wish.rate,
            "max_usd_per_h": arguments.max_usd_per_h,
            "max_kw": arguments.max_kw,
            "max_machines": wish.max_machines,
        },
        "slo": slo,
        "designs": [_answer_json(answer) for answer in answers],
    }


def _answer_json(answer: ProvisionAnswer) -> dict[str, Any]:
    design, found = answer.design, answer.found
    head: dict[str, Any] = {
        "design": design.name,
        "times": sorted({each.source for each in (design.prompt, design.token) if each is not None}),
        "simulations": answer.simulated,
        "complete": answer.is_complete,
    }
    if found is None:
        return {**head, "found": None, "why": answer.why_none}
    return {
        **head,
        "found": {
            "prompt_machines": found.prompt,
            "token_machines": found.token,
            "requests_s": found.rate,
            "usd_per_h": found.usd_per_h,
            "kw": found.kw,
            "slowdowns": dict(found.trial.slowdowns),
            **found.trial.figures,
            "prompt_busy": found.trial.prompt_pool.busy,
            "token_busy": found.trial.token_pool.busy,
        },
    }


def _print(
    arguments: SimpleNamespace, wish: ProvisionWish, slo: Slo, answers: list[ProvisionAnswer], console: Console
) -> None:
    goal = {
        ProvisionGoal.COST: f"the least cost at {wish.rate or 0.0:g} requests/s",
        ProvisionGoal.POWER: f"the least power at {wish.rate or 0.0:g} requests/s",
        ProvisionGoal.THROUGHPUT: f"the highest rate, in steps of {wish.rate_step:g} requests/s",
    }[wish.goal]
    console.print(
        f"{arguments.model}, {arguments.workload}: {goal}{_limits(wish)}; simulated, {arguments.seconds:g} s of "
        f"arrivals, seed {arguments.seed}"
    )
    console.print(f"times {arguments.times}, prices by {arguments.cost_ratio}, slowdowns below {_slo_text(slo)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("design", "machines", "requests/s", "$/h", "kW", "busy", "nearest its limit", "simulations"):
        table.add_column(name, justify="left" if name in ("design", "machines", "nearest its limit") else "right")
    for answer in answers:
        table.add_row(*_cells(answer, slo))
    console.print(table)
    for answer in answers:
        if answer.found is None:
            console.print(f"{answer.design.name}: {answer.why_none}")
        elif not answer.is_complete:
            console.print(f"{answer.design.name}: the time was up ({arguments.budget_s:g} s); the best so far")


def _cells(answer: ProvisionAnswer, slo: Slo) -> tuple[str, ...]:
    found, simulated = answer.found, str(answer.simulated)
    if found is None:
        return (answer.design.name, "none", "", "", "", "", "", simulated)
    pools = count_of(found.prompt, "machine") if answer.design.token is None else f"{found.prompt}P, {found.token}T"
    rate, usd, kw = f"{found.rate:g}", f"{found.usd_per_h:.2f}", f"{found.kw:.1f}"
    busy = f"{found.trial.prompt_pool.busy:.0%}"
    if answer.design.token is not None:
        busy += f", {found.trial.token_pool.busy:.0%}"
    name, limit = max(
        (
            (f"{name}_p{percent}", limit)
            for name, limits in slo.items()
            for percent, limit in zip(PERCENTILES, limits, strict=True)
        ),
        key=lambda each: found.trial.slowdowns[each[0]] / each[1],
    )
    near = f"{name} {found.trial.slowdowns[name]:.2f} of {limit:g}"
    return answer.design.name, pools, rate, usd, kw, busy, near, simulated


def _limits(wish: ProvisionWish) -> str:
    found = [f"at most ${wish.max_usd_per_h:g}/h"] if wish.max_usd_per_h < inf else []
    found += [f"at most {wish.max_kw:g} kW"] if wish.max_kw < inf else []
    return "".join(f", {each}" for each in found)


def _slo_text(slo: Slo) -> str:
    return ", ".join(f"{name} {'/'.join(f'{limit:g}' for limit in limits)}" for name, limits in slo.items())
