"""Deadlines as multiples of what one request takes alone, on A100s (ThunderServe section 5.1: SLO
scale) or here."""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

import msgspec

from ...bounds import MAX_FIGURE
from ...costs.gpus import Specs, gpu_table
from ...costs.model_shape import KV_16_BIT, ModelShape
from ...costs.replica import StageHardware, kv_capacity_tokens, replica_times
from ...costs.step_times import StepTimes
from ...plan import Deadlines
from .workload import Slo, Workload, WorkloadError

A100: Final = "A100-SXM4-80GB"
NVLINK_GBPS: Final = 1920.0
TARGET: Final = 0.9
SMALLEST_S: Final = 1e-4  # no deadline below this: a model so small is not what scales are for


class SloScale(NamedTuple):
    """Deadlines as multiples of what a request takes alone."""

    scale: float
    target: float = TARGET


def lone_a100s(model: ModelShape, context: int) -> tuple[int, StepTimes]:
    """The fewest A100-80GB (1, 2, 4, 8) that hold the model and one request's context, and their
    step times; with KV in 16 bit, so that deadlines do not depend on how engines keep it. Raises
    WorkloadError where eight are too few."""
    model = model.with_kv_value_bytes(KV_16_BIT)
    gpu = gpu_table().find(A100, Specs.MEASURED)
    for tp in (1, 2, 4, 8):
        stages = (StageHardware(gpu=gpu, tp=tp, layers=model.layers, link_gbps=NVLINK_GBPS),)
        if model.heads % tp == 0 and kv_capacity_tokens(model, stages) >= context:
            return tp, replica_times(model, stages)
    raise WorkloadError(f"slo: {model.name} does not fit eight A100-80GB: give deadlines in seconds")


def scaled_slo(model: ModelShape, workload: Workload, scale: float, target: float) -> Slo:
    """`scale` times what the workload's mean request takes alone on A100s."""
    _, times = lone_a100s(model, round(workload.mean_prompt) + max(2, round(workload.mean_output)))
    return slo_by(times, workload, SloScale(scale, target))


def slo_by(times: StepTimes, workload: Workload, multiple: SloScale) -> Slo:
    """So many times what the workload's mean request takes alone on a replica with these step
    times."""
    prompt, output = round(workload.mean_prompt), max(2, round(workload.mean_output))
    ttft = times.prefill_s(prompt, workload.mean_pairs)
    decode = times.decode_line(1).run_s(1, prompt, output - 1)
    figures = (ttft, decode / (output - 1), ttft + decode)
    ttft_s, tpot_s, e2e_s = (max(SMALLEST_S, multiple.scale * figure) for figure in figures)
    return Slo(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s, target=multiple.target)


def deadlines_of(slo: Slo) -> Deadlines:
    """As a plan has them."""
    # Of boxes that say absurd figures deadlines may be longer than a plan can say, which is as good as none.
    ttft_s, tpot_s, e2e_s = (limit if limit <= MAX_FIGURE else 0.0 for limit in (slo.ttft_s, slo.tpot_s, slo.e2e_s))
    return Deadlines(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)


def slo_of_deadlines(deadlines: Deadlines) -> Slo | None:
    """Those of a plan; None where it has none."""
    figures = {name: limit for name, limit in msgspec.structs.asdict(deadlines).items() if limit}
    return Slo(**figures) if figures else None


def parse_slo(text: str, model: ModelShape, workload: Workload) -> Slo:
    """`read_slo` with multiples of A100s. Raises WorkloadError with one line."""
    read = read_slo(text)
    return read if isinstance(read, Slo) else scaled_slo(model, workload, read.scale, read.target)


def read_slo(text: str) -> Slo | SloScale:
    """`5x`, or `ttft=2,tpot=0.1,e2e=60` in seconds or like `2s`, `100ms` (any of the three), both
    with `target=0.9` if wanted. Raises WorkloadError with one line."""
    figures: dict[str, float] = {}
    scale: float | None = None
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals and part.lower().endswith("x"):
            name, value = "scale", part[:-1]
        number = _read_seconds(value) if name in ("ttft", "tpot", "e2e") else _read_number(value)
        if name not in ("scale", "ttft", "tpot", "e2e", "target") or not 0.0 < number < inf:
            raise WorkloadError(f"slo: {part!r} is neither like 5x nor like ttft=2, tpot=100ms, e2e=60 or target=0.9")
        if name in figures or (name == "scale" and scale is not None):
            raise WorkloadError(f"slo: {name} is there twice")
        if name == "scale":
            scale = number
        else:
            figures[name] = number
    target = figures.pop("target", TARGET)
    if scale is not None and figures:
        raise WorkloadError("slo: give either a scale like 5x or deadlines in seconds, and not both")
    if scale is not None:
        return SloScale(scale, target)
    if not figures:
        raise WorkloadError("slo: give a scale like 5x, or one of ttft, tpot and e2e in seconds")
    return Slo(**{f"{name}_s": value for name, value in figures.items()}, target=target)


def _read_seconds(text: str) -> float:
    """Of `0.1`, `0.1s` or `100ms`; below 0 for what is none of them."""
    if text.endswith("ms"):
        return _read_number(text.removesuffix("ms")) / 1e3
    return _read_number(text.removesuffix("s"))


def _read_number(text: str) -> float:
    """Below 0 for what is none."""
    try:
        return float(text)
    except ValueError:
        return -inf
