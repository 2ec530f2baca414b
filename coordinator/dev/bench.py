"""How long planning takes, and how good the plans are.

    python -m p2pserve.coordinator.bench [--parts plan,light,repair,route,turn,place] [--sizes 16,24,32,128,1024]
        [--format json] [--plot PNG] [--long JSON]

Seconds are those of the processor, on one core. Up to 32 GPUs, where chance decides much, objective
and seconds are the medians of five seeds, and `worst` is the least objective of them. `best_known`
is the objective of the best solution that long searches have found (`data/best_plans.json`,
evaluated anew), or of this run's if that is better. `--long` goes on from the best solutions of a
file for `--budget-s` seconds each, and writes what it finds. LLaMA-30B at lengths of the Azure
traces, Poisson arrivals, GPUs as measured; the cluster of 32 GPUs and its subsets are
ThunderServe's, larger ones are drawn (`bench_clusters`).

`repair`: a running network of 32 boxes, and what happens to it (`repair_cases`): whether that is planned with at once,
and the seconds, by the wall and of the processor, from the figures to the new plan.

`route`: microseconds of the processor for a decision of each policy, with 100 replicas that do both phases, and with 50
that prefill and 50 that decode, all of them paired; medians of rounds.

`turn`: microseconds of the processor for deciding who steps next in an engine process that four services share, with
1,000 requests waiting, by each turn order, and for charging the turn; `turn_us_1000` is the slowest order's decision.

`place`: seconds of the processor for placing 16 services of four models on 32 GPUs, by SeaLLM's policy and by the
default one, each with the replays of a minute of 30 requests/s that it takes, and what they come to.

This is the one module of the coordinator that reads a clock and prints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..capacity import KvCodec
from ..network_plan import plan_network
from ..plan import Phase, Plan
from ..planning.lower.evaluator import LowerLevel
from ..planning.model.problem import Group, Problem, Slice, Solution
from ..planning.upper.light_rescheduling import (
    Adjustment,
    find_surviving_groups,
    keep_loaded_stages,
    reschedule_lightly,
)
from ..planning.upper.scorer import never
from ..planning.upper.search import SearchResult, search
from ..planning.upper.settings import SearchSettings
from ..repair.urgency import REPAIR_S, PlanFigures, find_urgent_news
from ..routing.policies import NETWORK_POLICIES
from .bench_clusters import bench_problem
from .placement_cases import placement_rows
from .repair_cases import RepairCase, repair_cases, running_network
from .route_cases import REPLICAS, make_plan, make_router
from .turn_cases import turn_rows

PARTS: Final = ("plan", "light", "repair", "route", "turn", "place")
SIZES: Final = (16, 24, 32, 128, 1024)
WORKLOADS: Final = ("conversation", "coding")
LOST_BOX: Final = "a6000-0"
LIGHT_LOAD: Final = 0.6
"""Of the benchmark's traffic: what the cluster still carries when a box is lost."""

LIGHT_RUNS: Final = 5
REPAIR_RUNS: Final = 3
ROUTE_ROUNDS: Final = 7
TURN_WAITING: Final = 1000
DECISIONS: Final = 200
"""Of a round."""

SEEDS: Final = 5
MANY_GPUS: Final = 32
"""Up to here, plans are made with several seeds."""

LONG_ROUND: Final = 8
"""A long search starts again, from the best so far and with other chances, after so many times the
usual steps."""

PAPER_S: Final = {16: 21.0, 24: 36.0, 32: 54.0}
"""ThunderServe, figure 10."""

TARGETS: Final = {
    "plan 32 GPUs, s": 2.0,
    "plan 128 GPUs, s": 20.0,
    "plan 1024 GPUs, s": 180.0,
    "objective / best known": 0.99,
    "light, s": 0.2,
    "light, attainment / full": 0.97,
    "repair, s": 1.0,
    "route, us": 200.0,
    "turn, us": 50.0,
    "place, s": 10.0,
}
"""Seconds at most, the others at least."""

Row = dict[str, Any]


def run(sizes: Sequence[int], tell: Callable[[str], None], parts: Sequence[str] = PARTS) -> Row:
    """All measurements of these parts."""
    best = _best_plans()
    report: Row = {"plan": [], "targets": TARGETS}
    for gpus in sizes if "plan" in parts else ():
        for workload in WORKLOADS:
            tell(f"planning {gpus} GPUs for {workload}")
            report["plan"].append(_plan_row(gpus, workload, best.get(f"{gpus} {workload}", [])))
    if "light" in parts:
        tell("rescheduling after a lost box")
        report["light"] = _light_row()
    if "repair" in parts:
        tell("repairing a running network")
        report["repair"] = _repair_rows()
    if "route" in parts:
        tell("routing requests")
        report["route"] = _route_rows()
    if "turn" in parts:
        tell("deciding whose turn it is")
        report["turn"] = turn_rows(TURN_WAITING, time.process_time)
        report[f"turn_us_{TURN_WAITING}"] = max(row["choose_us"] for row in report["turn"])
    if "place" in parts:
        tell("placing services")
        report["place"] = placement_rows(time.process_time)
    return report


def _plan_row(gpus: int, workload: str, best: list[Any]) -> Row:
    problem = bench_problem(gpus, workload)
    runs = [_searched(problem, seed) for seed in range(SEEDS if gpus <= MANY_GPUS else 1)]
    objectives = [found.score.objective for found, _ in runs]
    known = LowerLevel(problem).score(_solution(problem, best)).objective if best else float("-inf")
    found = sorted((found for found, _ in runs), key=lambda one: one.score.objective)[len(runs) // 2]
    return {
        "gpus": gpus,
        "workload": workload,
        "seconds": round(statistics.median(seconds for _, seconds in runs), 3),
        "paper_seconds": PAPER_S.get(gpus),
        "objective": round(float(found.score.objective), 5),
        "worst": round(float(min(objectives)), 5),
        "best_known": round(float(max(known, *objectives)), 5),
        "attainment": round(float(found.score.attainment), 5),
        "colocated": round(float(found.colocated_score.objective), 5),
        "steps": found.steps,
        "seeds": len(runs),
    }


def _searched(problem: Problem, seed: int) -> tuple[SearchResult, float]:
    """With the CPU seconds it took."""
    began = time.process_time()
    found = search(problem, LowerLevel(problem), rng=np.random.default_rng(seed))
    return found, time.process_time() - began


def _light_row() -> Row:
    """ThunderServe's appendix G: four A6000 of 32 GPUs are lost. Seconds (the median of runs that
    each begin anew) of the slower workload, ratio of the worse one."""
    rows: list[Row] = []
    for workload in WORKLOADS:
        problem = bench_problem(32, workload, load=LIGHT_LOAD)
        evaluator = LowerLevel(problem)
        running = search(problem, evaluator, rng=np.random.default_rng(0)).solution
        after = replace(problem, cluster=problem.cluster.without(frozenset({LOST_BOX})))
        left = find_surviving_groups(running, problem.cluster, after.cluster)
        runs = [_rescheduled(after, running, evaluator, left) for _ in range(LIGHT_RUNS)]
        adjusted = runs[0][0]
        full = search(after, LowerLevel(after), rng=np.random.default_rng(0))
        rows.append(
            {
                "workload": workload,
                "seconds": round(statistics.median(seconds for _, seconds in runs), 3),
                "none": round(float(adjusted.before.attainment), 5),
                "attainment": round(float(adjusted.score.attainment), 5),
                "full": round(float(full.score.attainment), 5),
                "flips": [flip.why for flip in adjusted.flips],
            }
        )
    return {
        "seconds": max(row["seconds"] for row in rows),
        "attainment_ratio": round(min(row["attainment"] / row["full"] for row in rows), 5),
        "rows": rows,
    }


def _rescheduled(after: Problem, running: Solution, evaluator: LowerLevel, left: Solution) -> tuple[Adjustment, float]:
    """With the CPU seconds it took."""
    began = time.process_time()
    adjusted = reschedule_lightly(after, keep_loaded_stages(after, running, evaluator), left)
    return adjusted, time.process_time() - began


def _repair_rows() -> list[Row]:
    """Each case several times, on the plan that runs; medians."""
    before = running_network()
    running = _plan_for(before, None)
    rows = []
    for case in repair_cases(before, running):
        runs = [_repaired(case, before, running) for _ in range(REPAIR_RUNS)]
        plan, news = runs[0][:2]
        rows.append({
            "case": case.name,
            "boxes": len(case.figures.boxes),
            "planned_at_once": bool(news),
            "seconds": round(statistics.median(run[2] for run in runs), 3),
            "cpu_seconds": round(statistics.median(run[3] for run in runs), 3),
            "is_new_plan": plan is not running,
        })  # fmt: skip
    return rows


def _repaired(case: RepairCase, before: PlanFigures, running: Plan) -> tuple[Plan, str, float, float]:
    """The plan after it, why that was made at once, and the seconds and CPU seconds that both took."""
    began, began_cpu = time.perf_counter(), time.process_time()
    news = find_urgent_news(running, before, case.figures) if case.is_news else case.name
    plan = _plan_for(case.figures, running, lambda: time.perf_counter() > began + REPAIR_S)
    return plan, news, time.perf_counter() - began, time.process_time() - began_cpu


def _plan_for(figures: PlanFigures, previous: Plan | None, spent: Callable[[], bool] = never) -> Plan:
    version = previous.version + 1 if previous is not None else 1
    plan = plan_network(
        figures.boxes, figures.links, figures.demands,
        service=figures.boxes[0].service, epoch=1, version=version, previous=previous, codec=KvCodec("kv4", 4.5),
        spent=spent,
    )  # fmt: skip
    assert plan is not None
    return plan


def _route_rows() -> list[Row]:
    """By policy and kind of plan, the CPU time of a decision."""
    rows = []
    for policy, is_split in product(NETWORK_POLICIES, (False, True)):
        plan = make_plan(is_split=is_split)
        router = make_router(policy, plan)
        rounds = []
        for _ in range(ROUTE_ROUNDS):
            began = time.process_time()
            for number in range(DECISIONS):
                router.route(256 + number, request=number)
                router.end_request(number, 128)
            rounds.append((time.process_time() - began) / DECISIONS)
        rows.append({
            "policy": policy,
            "replicas": REPLICAS,
            "pairs": len(plan.pairings),
            "microseconds": round(1e6 * statistics.median(rounds), 1),
        })  # fmt: skip
    return rows


# --- the best there is


def _best_plans() -> dict[str, list[Any]]:
    """By size and workload: groups as [phase, {box: GPUs}]."""
    found: dict[str, list[Any]] = json.loads(
        (files(__package__.rpartition(".")[0]) / "data" / "best_plans.json").read_text("utf-8")
    )
    return found


def _solution(problem: Problem, groups: list[Any]) -> Solution:
    place = {box.id: number for number, box in enumerate(problem.cluster.boxes)}
    return tuple(
        sorted(
            Group(tuple(sorted(Slice(place[box], gpus) for box, gpus in slices.items())), Phase(phase))
            for phase, slices in groups
        )
    )


def _long(gpus: int, workload: str, known: list[Any], budget_s: float) -> tuple[list[Any], float]:
    """The best of searches one after the other, every other one from the best so far (at first:
    from what is known), with its objective."""
    problem = bench_problem(gpus, workload)
    evaluator = LowerLevel(problem)
    stop = time.process_time() + budget_s
    best, level = _solution(problem, known), float("-inf")
    seed = 0
    while time.process_time() < stop:
        seed += 1
        found = search(
            problem,
            evaluator,
            rng=np.random.default_rng(seed),
            spent=lambda: time.process_time() > stop,
            start=best if seed % 2 else None,
            settings=SearchSettings(steps=LONG_ROUND * SearchSettings().steps_per_gpu * problem.cluster.gpus),
        )
        if found.score.objective > level:
            best, level = found.solution, found.score.objective
    boxes = problem.cluster.boxes
    groups = [[group.phase.value, {boxes[part.box].id: part.gpus for part in group.slices}] for group in best]
    return groups, level


def _write_long(path: Path, sizes: Sequence[int], budget_s: float, tell: Callable[[str], None]) -> None:
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for gpus in sizes:
        for workload in WORKLOADS:
            key = f"{gpus} {workload}"
            known[key], objective = _long(gpus, workload, known.get(key, []), budget_s)
            tell(f"{gpus} GPUs, {workload}: {objective:.5f} after {budget_s:g} s")
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in known.items())
            path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


# --- for people


def _text(report: Row) -> str:
    heading = "GPUs  workload      seconds  paper s  objective  worst   best known  colocated"
    lines = [heading] if report["plan"] else []
    lines += [
        f"{row['gpus']:4}  {row['workload']:12} {row['seconds']:8.2f} {row['paper_seconds'] or '-':>8}"
        f" {row['objective']:10.4f} {row['worst']:7.4f} {row['best_known']:11.4f} {row['colocated']:10.4f}"
        for row in report["plan"]
    ]
    if "light" in report:
        light = report["light"]
        lines.append(
            f"light rescheduling: {light['seconds']:.3f} s (ThunderServe: 13 s), {light['attainment_ratio']:.3f} of "
            "the full replan's attainment"
        )
    lines += [
        f"{row['case']:<16} of {row['boxes']} boxes: {row['seconds']:.3f} s ({row['cpu_seconds']:.3f} s of CPU), "
        f"{'at once' if row['planned_at_once'] else 'in its turn'}, "
        f"{'a new plan' if row['is_new_plan'] else 'the plan stays'}"
        for row in report.get("repair", ())
    ]
    lines += [
        f"a route by {row['policy']:<10} {row['replicas']} replicas, {row['pairs']} pairs: {row['microseconds']:.0f} us"
        for row in report.get("route", ())
    ]
    lines += [
        f"a turn by {row['order']:<18} {row['waiting']} requests wait: {row['choose_us']:.1f} us, charged in "
        f"{row['charge_us']:.1f} us"
        for row in report.get("turn", ())
    ]
    lines += [
        f"placing {row['services']} services on {row['gpus']} GPUs by {row['policy']:<8} {row['seconds']:.2f} s: "
        f"attainment {row['attainment']:.3f}, normalized latency {row['normalized']:.3f}"
        for row in report.get("place", ())
    ]
    return "\n".join(lines) + "\n"


def _plot(report: Row, path: Path) -> None:
    import matplotlib as mpl  # heavy, and only needed here

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    for workload in WORKLOADS:
        rows = [row for row in report["plan"] if row["workload"] == workload]
        axes.plot([row["gpus"] for row in rows], [row["seconds"] for row in rows], "o-", label=f"p2pserve, {workload}")
    axes.plot(list(PAPER_S), list(PAPER_S.values()), "s--", color="grey", label="ThunderServe, figure 10")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="seconds of one core", title="Planning from scratch")
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.coordinator.bench", description=__doc__)
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="GPUs, with commas")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the growth with the cluster's size")
    parser.add_argument("--long", type=Path, metavar="FILE.json", help="search on from the best plans there")
    parser.add_argument("--budget-s", type=float, default=600.0, help="of each long search")
    chosen = parser.parse_args(arguments)
    sizes = [int(size) for size in chosen.sizes.split(",")]

    def tell(text: str) -> None:
        sys.stderr.write(text + "\n")

    if chosen.long is not None:
        _write_long(chosen.long, sizes, chosen.budget_s, tell)
        return 0
    report = run(sizes, tell, chosen.parts)
    sys.stdout.write(json.dumps(report) + "\n" if chosen.format == "json" else _text(report))
    if chosen.plot is not None:
        _plot(report, chosen.plot)
    return 0


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if not set(parts) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} is not of {','.join(PARTS)}")
    return parts


if __name__ == "__main__":
    sys.exit(main())
