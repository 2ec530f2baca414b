"""Run one setup on one trace, in one of three modes.

`released` reproduces the public simulator (Mutinifni/splitwise-sim, commit 8f99e7dc) request by
request, with two of its faults: a decode iteration is looked up as if the number of requests were
prompt tokens, so that its time hardly depends on the batch, and every model keeps keys for all of
its heads. `measured` corrects both: decode times by the measured batch axis, KV caches of their
real size. `axis` corrects the first only, which is what figures of the public simulator with that
correction are compared with. Compare in `released`; claim in `measured`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ...coordinator.costs.tables import SplitwiseTimes
from ...coordinator.routing.interface import RoutingPolicy
from ..policies.pools import SharedPool, SplitPools
from ..records import Outcomes, Trace
from .cluster import SplitwiseCluster
from .machine import AS_RELEASED, Machine, MachineLimits
from .setups import (
    KV_TRANSFER_BYTES_S,
    MACHINE_BYTES,
    MAX_PENDING_TOKENS,
    TENSOR_PARALLEL,
    Setup,
    SetupError,
    find_model,
    find_setup,
)
from .step_lookup import CachedIterations, Mode, decode_axis

PoolName = Literal["prompt", "decode", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """One machine: the share of time it was busy, and requests decoded meanwhile."""

    gpu: str
    pool: PoolName
    utilisation: float
    mean_decodes: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SplitwiseResult:
    """Outcomes by request, the number of events, the end, and the use of each machine."""

    outcomes: Outcomes
    events: int
    sim_end_s: float
    machines: tuple[MachineUse, ...]
    times: tuple[str, ...]
    """Where the iteration times are from, for reports."""


def run_setup(
    setup: str,
    model: str,
    workload: str,
    trace: Trace,
    *,
    mode: Mode = "released",
    machines: tuple[int, int] | None = None,
    limits: MachineLimits = AS_RELEASED,
) -> SplitwiseResult:
    """Serve a trace by a setup of `SETUPS` and a model of `MODELS`; SetupError if one is not known.

    `workload` ("conv" or "code") chooses how many machines the setup has for prompts and for
    decoding, unless `machines` says so; a baseline has them all in one pool. `limits`: of what each
    batches. A request that never ends, because no machine has the memory for it, has NaN in the
    outcomes.
    """
    known, known_model = find_setup(setup), find_model(model)
    counts = known.machines(workload) if machines is None else machines
    kv_bytes = known_model.kv_bytes(real=mode == "measured")
    kv_tokens = (MACHINE_BYTES - known_model.weight_bytes) / kv_bytes
    places = _places(known, counts)
    times = {gpu: SplitwiseTimes(model, gpu, TENSOR_PARALLEL, decode_axis(mode)) for gpu, _ in places}
    iterations = {gpu: CachedIterations(times[gpu]) for gpu in times}
    boxes = [Machine(iterations[gpu], kv_tokens, limits) for gpu, _ in places]
    cluster = SplitwiseCluster(trace, boxes, _policy(known, counts), kv_token_s=kv_bytes / KV_TRANSFER_BYTES_S)
    events = cluster.run()
    return SplitwiseResult(
        outcomes=Outcomes(
            trace=trace,
            ttft_s=np.array(cluster.first_token) - trace.arrival_s,
            e2e_s=np.array(cluster.last_token) - trace.arrival_s,
        ),
        events=events,
        sim_end_s=cluster.ended_at,
        machines=tuple(
            MachineUse(
                gpu=gpu,
                pool=pool,
                utilisation=box.busy_s / cluster.ended_at if box.busy_s else 0.0,
                mean_decodes=box.decode_request_s / box.busy_s if box.busy_s else 0.0,
            )
            for (gpu, pool), box in zip(places, boxes, strict=True)
        ),
        times=tuple(of_gpu.source for of_gpu in times.values()),
    )


def write_requests_csv(outcomes: Outcomes, path: Path) -> None:
    """Write `id,arrival,ttft,e2e,prompt,output` of each completed request."""
    trace = outcomes.trace
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write("id,arrival,ttft,e2e,prompt,output\n")
        for row in np.flatnonzero(outcomes.completed).tolist():
            file.write(
                f"{trace.ids[row]},{trace.arrival_s[row]:.9f},{outcomes.ttft_s[row]:.9f},{outcomes.e2e_s[row]:.9f},"
                f"{trace.prompt[row]},{trace.output[row]}\n"
            )


def _places(setup: Setup, counts: tuple[int, int]) -> list[tuple[str, PoolName]]:
    """The GPU and the pool of each machine, those for prompts first."""
    prompt, decode = counts
    shared = setup.decode_gpu is None
    if min(counts) < (0 if shared else 1) or sum(counts) < 1:
        needs = "at least one machine" if shared else "at least one machine for each phase"
        raise SetupError(f"machines {prompt},{decode}: {setup.name} needs {needs}")
    places: list[tuple[str, PoolName]] = []
    if setup.decode_gpu is None:
        places += [(setup.prompt_gpu, "shared")] * (prompt + decode)
    else:
        places += [(setup.prompt_gpu, "prompt")] * prompt
        places += [(setup.decode_gpu, "decode")] * decode
    return places


def _policy(setup: Setup, counts: tuple[int, int]) -> RoutingPolicy:
    """The policy that the setup is scheduled by."""
    prompt, decode = counts
    if setup.decode_gpu is None:
        return SharedPool()
    return SplitPools(range(prompt), range(prompt, prompt + decode), max_pending=MAX_PENDING_TOKENS)
