"""Does the simulator say what the network does? A live run of emulated nodes, and the same run
simulated.

    python -m p2pserve.sdk.live_comparison --format json

Starts emulated nodes on this machine, replays a seeded trace through gateway and SDK, and
simulates the same trace on the plans that the network has made for itself, with the same step
times and the links as the nodes have measured them. What differs is all that the simulator leaves
out: gossip that lags and processes that wait for a core. Exits with 1 where a figure differs by more
than the tolerance.

With `--lose 3@20` the third node is lost in both after 20 seconds, and goodput alone counts: what
single requests are late by depends on the very moment.

With `--regroup` nothing is simulated: two nodes become one pipeline and part again under load, and the requests in time
are counted beside the same with the plan kept (`regroup_bench`); with `--regroup cut` one box divides its GPUs anew.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from math import inf
from types import SimpleNamespace
from typing import Final

import msgspec
import numpy as np
import psutil
import trio
from numpy.typing import NDArray
from rich.table import Table

from ...coordinator import Phase, Plan
from ...coordinator.costs.gpus import Specs
from ...coordinator.costs.model_shape import ModelShape
from ...coordinator.names import name_of
from ...coordinator.plan import Deadlines
from ...coordinator.planning.model.cluster import Box, Cluster
from ...coordinator.planning.model.cluster_file import card_link_gbps
from ...coordinator.planning.model.workload import Service
from ...kernels.codecs import CODEC_NAMES, codec_named
from ...kernels.format import WireDtype, payload_bytes
from ...kvtransport.probing.figures import Source
from ...node.engine.emulated.model import Cards, emulated_model, parse_cards
from ...node.messages import Status
from ...sims.engine.values import SimEngineSettings
from ...sims.records import Outcomes, Trace
from ...sims.scenario import BoxLost, Change, PlanChange, ServiceRun, SimSettings
from ...sims.workloads import AZURE, azure, draw, workload_of
from ...sims.world import simulate
from ..actions.status_view import open_console
from ..errors import UsageError
from ..failures import explain
from ..options.planning import SPECS
from ..options.values import settings_of
from ..simulating.changes import settings_with_network_times
from .network import DEADLINE_S, MAX_REQUESTS, LiveLoss, LiveRun, LiveSettings, Say, find_in_time, run_live
from .regroup_bench import CHANGES, PIPELINE, check_settings, print_bench, run_regroup_bench

Floats = NDArray[np.float64]

TOLERANCE: Final = 0.1
LOSS_TOLERANCE: Final = 0.05
"""Of goodput, where nodes are lost."""
MAX_NODES: Final = 16
BLOCK_TOKENS: Final = 16  # of an emulated engine
LOOPBACK_GBPS, LOOPBACK_RTT_S = 8.0, 0.0005
"""What links are taken for when no node has measured one."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both runs; `difference` is the live one's over the simulated one's, less 1."""

    name: str
    live: float
    simulated: float
    difference: float
    counts: bool


class LiveComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a comparison has found. Seconds, tokens per second."""

    ok: bool
    tolerance: float
    emulated: str
    model: str
    lengths: str
    arrivals: str
    requests: int
    phases: dict[str, int]
    figures: tuple[Figure, ...]
    median_request_ttft_difference: float
    median_request_e2e_difference: float
    link_gbps: float
    link_rtt_s: float
    notes: tuple[str, ...]
    elapsed_s: float


def figures_of(outcomes: Outcomes, deadlines: Deadlines) -> dict[str, float]:
    """Percentiles over requests; from first arrival to last token, output tokens and requests in time per second."""
    trace = outcomes.trace
    several = trace.output > 1
    found: dict[str, float] = {}
    for name, values in (("ttft", outcomes.ttft_s), ("tpot", outcomes.tpot_s[several]), ("e2e", outcomes.e2e_s)):
        found[f"{name}_mean_s"] = float(values.mean())
        for share in (50, 90):
            found[f"{name}_p{share}_s"] = float(np.percentile(values, share))
    span = float((trace.arrival_s + outcomes.e2e_s).max() - trace.arrival_s[0])
    found["throughput_tokens_s"] = float(trace.output.sum()) / span
    found["goodput_requests_s"] = float(count_in_time(outcomes, deadlines)) / span
    return found


def count_in_time(outcomes: Outcomes, deadlines: Deadlines) -> int:
    """Requests that meet all deadlines; of 0 there is none."""
    return int(find_in_time(outcomes, deadlines).sum())


def compare(
    live: Mapping[str, float], simulated: Mapping[str, float], *, has_losses: bool = False
) -> tuple[Figure, ...]:
    """Both side by side. TTFT, TPOT, throughput and goodput count; E2E follows from them and is shown."""
    return tuple(
        Figure(
            name=name,
            live=value,
            simulated=simulated[name],
            difference=value / simulated[name] - 1.0,
            counts=name.startswith("goodput") if has_losses else not name.startswith("e2e"),
        )
        for name, value in live.items()
    )


def simulated(
    trace: Trace,
    plans: Sequence[tuple[float, Plan]],
    cluster: Cluster,
    service: Service,
    max_batched_tokens: int,
    lost: Sequence[tuple[float, str]] = (),
    *,
    silent: bool = False,
) -> Outcomes:
    """The same requests simulated with the plans as they changed, and the nodes that were lost. Each
    node has the whole model, so it keeps its engine whatever its phase."""
    engine = SimEngineSettings(
        max_batched_tokens=max_batched_tokens, max_sequences=MAX_REQUESTS, block_tokens=BLOCK_TOKENS
    )
    settings = SimSettings(engine=engine, gateways=tuple(box.id for box in cluster.boxes))
    settings = settings_with_network_times(settings, len(cluster.boxes), killed=not silent)
    (_, first), *later = plans
    run = ServiceRun(service=service, plan=first, trace=trace)
    changes: list[Change] = [PlanChange(at, 0, plan) for at, plan in later]
    changes += [BoxLost(at, peer) for at, peer in lost]
    result = simulate(cluster, [run], settings=settings, changes=changes)
    return result.services[0].outcomes


def cluster_of(status: Status, peers: Sequence[str], cards: Cards) -> Cluster:
    """The plan's boxes. All links share one loopback: each gets the median measured bandwidth."""
    boxes = tuple(
        Box(id=peer, gpu=cards.gpu, gpus=cards.count, site=peer, gpu_link_gbps=card_link_gbps(cards.gpu), atomic=True)
        for peer in peers
    )
    tables = [node.links.links for node in status.nodes if node.links is not None]
    figures = [link for table in tables for link in table.values() if link.source is Source.MEASURED]
    whole = [link.capacity_gbps for link in figures if not link.capacity_is_floor]
    gbps = float(np.median(whole)) if whole else LOOPBACK_GBPS
    rtt_s = float(np.median([link.rtt_s for link in figures])) if figures else LOOPBACK_RTT_S
    shape = (len(peers), len(peers))
    return Cluster(boxes=boxes, gbps=np.full(shape, gbps), rtt_s=np.full(shape, rtt_s), usd_per_gb=np.zeros(shape))


def service_of(settings: LiveSettings, trace: Trace, name: str) -> Service:
    """What the simulator is to serve. Raises ModelError, GpuError or TraceError."""
    model = emulated_model(settings.model, parse_cards(settings.cards, settings.specs)).emulation.model
    bits = kv_bits(settings.codec, model)
    return Service(name=name, model=model, workload=workload_of(trace), codec=settings.codec, kv_bits=bits)


def kv_bits(codec: str, model: ModelShape) -> float:
    """Bits on the wire for one element of a long prompt's KV."""
    tokens, heads, dim = 1024, model.kv_heads, model.head_dim
    size = payload_bytes(codec_named(codec), WireDtype.BF16, start=0, tokens=tokens, heads=heads, head_dim=dim)
    return size * 8 / (2 * tokens * heads * dim)


def run(settings: LiveSettings, trace: Trace, tolerance: float, say: Say) -> LiveComparison:
    """Live, then simulated."""
    began = time.monotonic()
    live = trio.run(run_live, settings, trace, say)
    plan = live.plans[0][1]
    service = service_of(settings, trace, plan.service)
    peers = sorted({peer for _, each in live.plans for peer in each.peers})
    cluster = cluster_of(live.status, peers, parse_cards(settings.cards, settings.specs))
    silent = any(loss.silent for loss in settings.losses)
    expected = simulated(trace, live.plans, cluster, service, settings.max_batched_tokens, live.lost, silent=silent)
    figures = compare(
        figures_of(live.outcomes, plan.deadlines), figures_of(expected, plan.deadlines), has_losses=bool(live.lost)
    )
    phases: dict[str, int] = {}
    for replica in plan.replicas:
        phases[replica.phase.value] = phases.get(replica.phase.value, 0) + 1
    return LiveComparison(
        ok=all(abs(figure.difference) <= tolerance for figure in figures if figure.counts),
        tolerance=tolerance,
        emulated=f"{settings.nodes} emulated nodes of {settings.cards} ({settings.specs})",
        model=service.model.name,
        lengths=trace.lengths,
        arrivals=trace.arrivals,
        requests=len(trace),
        phases=phases,
        figures=figures,
        median_request_ttft_difference=_median_difference(live.outcomes.ttft_s, expected.ttft_s),
        median_request_e2e_difference=_median_difference(live.outcomes.e2e_s, expected.e2e_s),
        link_gbps=float(cluster.gbps[0, 0]),
        link_rtt_s=float(cluster.rtt_s[0, 0]),
        notes=_notes(live),
        elapsed_s=time.monotonic() - began,
    )


def _median_difference(live: Floats, simulated: Floats) -> float:
    """Of the same request in both runs, as a share of the simulated figure."""
    return float(np.median(np.abs(live / simulated - 1.0)))


def _notes(live: LiveRun) -> tuple[str, ...]:
    """What to know of the live run before its figures are believed."""
    cores = psutil.cpu_count() or 1
    notes = [f"{live.cores:.1f} of {cores} cores were busy on average, {live.own_cores:.1f} of them with this run"]
    if live.late:
        notes.append(f"emulated engines fell behind their model {live.late} times: this machine was too slow")
    if len(live.plans) > 1:
        moments = ", ".join(f"{at:.0f}" for at, _ in live.plans[1:])
        notes.append(f"the network made another plan {moments} s after the beginning, and so does the simulator")
    if live.lost:
        names = ", ".join(f"{name_of(peer)} after {at:.1f} s" for at, peer in live.lost)
        notes.append(f"lost: {names}")
    if live.recovered:
        notes.append(f"{live.recovered} requests needed more than one attempt")
    return tuple(notes)


RATES: Final = {"throughput": "{:.1f} tokens/s", "goodput": "{:.3f} requests/s"}


def table_of(found: LiveComparison) -> Table:
    """For people: a line for each figure."""
    table = Table("", "live (emulated)", "simulated", "difference", box=None, pad_edge=False, header_style="bold")
    for figure in found.figures:
        unit = next((unit for name, unit in RATES.items() if figure.name.startswith(name)), "{:.4f} s")
        bad = figure.counts and abs(figure.difference) > found.tolerance
        name = figure.name.removesuffix("_tokens_s").removesuffix("_requests_s").removesuffix("_s").replace("_", " ")
        mark = "  too much" if bad else ""
        difference = f"{figure.difference:+.1%}{mark}"
        table.add_row(name, unit.format(figure.live), unit.format(figure.simulated), difference)
    return table


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m p2pserve.sdk.live_comparison",
        description="Run a network of emulated nodes on this machine, simulate the same, and compare.",
    )
    add = found.add_argument
    add("--nodes", type=int, default=8, metavar="N", help="emulated nodes (default: 8)")
    add("--cards", default="1xRTX A6000", metavar="GPUS", help="of each node (default: 1xRTX A6000)")
    add(
        "--specs",
        choices=SPECS,
        default=Specs.TABLE1.value,
        help="the figures of those GPUs (default: thunderserve-table1, whose A6000 prefills slowly: what a loaded "
        "machine adds to a first token weighs less then)",
    )
    add("--model", default="qwen2.5-14b", help="one whose dimensions are known (default: qwen2.5-14b)")
    add("--codec", choices=CODEC_NAMES, default="kv4", help="default: kv4")
    add("--workload", choices=tuple(AZURE), default="conversation", help="Azure's lengths (default: conversation)")
    add("--requests", type=int, default=80, metavar="N", help="default: 80")
    add("--rate", type=float, default=1.0, metavar="R", help="requests per second, Poisson (default: 1)")
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
    add(
        "--lose",
        action="append",
        default=[],
        metavar="N@S",
        help="the Nth node is lost S seconds after the first request may come; may be repeated",
    )
    add(
        "--regroup",
        nargs="?",
        const=PIPELINE,
        choices=CHANGES,
        help="instead: what requests lose while two nodes become one pipeline, or part again, beside the plan kept; "
        "cut: while the GPUs of one box are divided anew among other numbers of nodes",
    )
    add("--pairs", type=int, default=2, metavar="N", help="with --regroup: so often, in turn (default: 2)")
    add(
        "--load-gb-s",
        type=float,
        metavar="N",
        help="GB/s that engines read weights at (default: in no time; with --regroup 1)",
    )
    add("--loss", choices=("killed", "silent"), default="killed", help="how: killed (default), or stopped")
    add(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help=f"default: {TOLERANCE:g}; where nodes are lost {LOSS_TOLERANCE:g}",
    )
    add("--format", choices=("table", "json"), default="table", help="default: table")
    add("--debug", action="store_true", help="show tracebacks and the log")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0: they agree; 1: they do not, or the run failed; 2: wrong input."""
    arguments = parser().parse_args(argv)
    logging.disable(logging.NOTSET if arguments.debug else logging.CRITICAL)
    console = open_console(stderr=True)
    began = time.monotonic()
    try:
        losses = tuple(_loss(text, silent=arguments.loss == "silent") for text in arguments.lose)
        if arguments.load_gb_s is None:
            arguments.load_gb_s = 1.0 if arguments.regroup else 0.0
        settings = settings_of(LiveSettings, SimpleNamespace(**vars(arguments), losses=losses))
        _check(settings)
        trace = _draw_trace(arguments, 0)
        service_of(settings, trace, settings.model)  # what is mistyped is said before anything starts
        say = lambda line: console.print(f"{time.monotonic() - began:5.1f} s  {line}")  # noqa: E731
        if arguments.regroup:
            check_settings(settings, arguments.pairs, arguments.regroup)
            traces = [_draw_trace(arguments, pair) for pair in range(arguments.pairs)]
            bench = run_regroup_bench(settings, traces, say, arguments.regroup)
            print_bench(bench, arguments.format, open_console())
            return 0 if bench.ok else 1
        found = run(
            settings,
            trace,
            _tolerance(arguments.tolerance, losses),
            say,
        )
    except (Exception, KeyboardInterrupt) as error:
        explained = explain(error)
        if arguments.debug or explained is None:
            raise
        print(f"error: {explained[1]}", file=sys.stderr)
        return explained[0]
    if arguments.format == "json":
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        show(found)
    return 0 if found.ok else 1


def _draw_trace(arguments: argparse.Namespace, number: int) -> Trace:
    """Raises TraceError."""
    return draw(
        azure(arguments.workload).lengths,
        rate=arguments.rate,
        rng=np.random.default_rng(arguments.seed + number),
        requests=arguments.requests,
    )


def _check(settings: LiveSettings) -> None:
    """Raises UsageError for what the parser lets pass."""
    if not 1 <= settings.nodes <= MAX_NODES:
        raise UsageError(f"nodes: {settings.nodes} is not between 1 and {MAX_NODES}")
    numbers = [loss.number for loss in settings.losses]
    for number in numbers:
        if not 1 <= number <= settings.nodes:
            raise UsageError(f"lose: there is no node {number}; they have the numbers 1 to {settings.nodes}")
    if len(set(numbers)) != len(numbers):
        raise UsageError("lose: a node can be lost once")
    if len(numbers) == settings.nodes:
        raise UsageError("lose: one node has to be left")
    if not 0.0 <= settings.load_gb_s < inf:
        raise UsageError(f"load-gb-s: {settings.load_gb_s} is not a rate")
    if settings.max_batched_tokens <= MAX_REQUESTS:
        raise UsageError(f"max-num-batched-tokens: {settings.max_batched_tokens} is not above {MAX_REQUESTS}")


def _tolerance(given: float | None, losses: Sequence[LiveLoss]) -> float:
    if given is not None:
        return given
    return LOSS_TOLERANCE if losses else TOLERANCE


def _loss(text: str, *, silent: bool) -> LiveLoss:
    """Raises UsageError."""
    number, _, at = text.partition("@")
    try:
        found = LiveLoss(number=int(number), at=float(at), silent=silent)
    except ValueError:
        found = LiveLoss(number=0, at=-1.0)
    if not 0.0 <= found.at < DEADLINE_S:
        raise UsageError(f"lose: {text!r} is not like 3@20: the third node, after 20 seconds")
    return found


def show(found: LiveComparison) -> None:
    """Print a comparison for people."""
    console = open_console()
    console.print(
        f"{found.requests} requests to {found.emulated} with {found.model}: "
        f"{', '.join(f'{count} {phase}' for phase, count in found.phases.items())}"
    )
    console.print(
        f"lengths: {found.lengths}; arrivals: {found.arrivals}; links: {found.link_gbps:.2f} Gb/s, "
        f"{found.link_rtt_s * 1e3:.2f} ms, as measured"
    )
    console.print(table_of(found))
    console.print(
        f"the same request in both: TTFT differs by {found.median_request_ttft_difference:.1%}, E2E by "
        f"{found.median_request_e2e_difference:.1%} (medians)"
    )
    for note in found.notes:
        console.print(f"note: {note}")
    verdict = "agree" if found.ok else "do not agree"
    counted = dict.fromkeys(figure.name.partition("_")[0] for figure in found.figures if figure.counts)
    what = ", ".join(name.upper() if name in ("ttft", "tpot") else name for name in counted)
    console.print(f"they {verdict} within {found.tolerance:.0%} on {what}")
