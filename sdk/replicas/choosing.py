"""`--replicas auto`: among how many nodes a box is divided, by the planner's own cost model, before anything has run.

What is known then are the cards, by the table of GPUs, the model, and how long requests usually are. A cut is left out
where a node would not hold the model, or only shorter requests than the box could take in another cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import msgspec

from ...coordinator.bounds import MAX_GPUS
from ...coordinator.costs.gpus import GpuError, GpuSpec, Specs, gpu_table
from ...coordinator.costs.model_shape import ModelShape
from ...coordinator.regrouping.divisions import CutOffer
from ...node.box.errors import NodeError
from ...node.box.hardware import Gpu, Hardware, probe
from ...node.engine.backend import EngineBackend, ServedModel
from ...node.engine.backends import find_backend
from ...node.settings import BoxEngineSettings
from ..options.values import settings_of
from .dividing import list_cuts, share_options

SLO_SCALE: Final = 5.0
"""Deadlines: so many times what a mean request takes alone on A100s. Those of a running network follow its own boxes,
and would be others for each cut."""


class ReplicaChoice(NamedTuple):
    """So many nodes, and a line for people; and the cuts that the network may choose among while they run: those that
    take the longest requests."""

    replicas: int
    why: str
    offers: tuple[CutOffer, ...] = ()


class FittingCut(NamedTuple):
    """A cut whose nodes hold the model: GPUs that share each layer, and how long a request may be."""

    replicas: int
    tp: int
    longest: int


def choose_replicas(options: Mapping[str, Any]) -> ReplicaChoice:
    """For a box with these options of `join`. Raises ModelError, GpuError, NodeError or UsageError."""
    knobs = settings_of(BoxEngineSettings, SimpleNamespace(**options))
    backend = find_backend(knobs.backend)
    hardware = backend.hardware(probe(), knobs)
    if len(hardware.gpus) < 2:
        return ReplicaChoice(1, f"replicas: 1, as this box has {'one GPU' if hardware.gpus else 'no GPUs'}")
    try:
        card = find_card(hardware.gpus, hardware.emulated_as or Specs.MEASURED)
    except GpuError as error:
        return ReplicaChoice(1, f"replicas: 1, as nothing is known of other cuts: {error}")
    model, fitting, failed = _find_fitting(backend, options, hardware)
    if model is None:
        assert failed is not None, "without a model something has failed"
        raise failed
    return choose_among(card, len(hardware.gpus), model, fitting)


def find_card(gpus: Sequence[Gpu], specs: Specs) -> GpuSpec:
    """The one kind of card that a box has, with the memory that it has there. Raises GpuError."""
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        raise GpuError(f"its GPUs are of several kinds ({', '.join(names)})")
    card = gpu_table().find(names[0], specs)
    return msgspec.structs.replace(card, memory_gib=min(card.memory_gib, *(gpu.memory_gib for gpu in gpus)))


def choose_among(card: GpuSpec, gpus: int, model: ModelShape, fitting: Sequence[FittingCut]) -> ReplicaChoice:
    """The fewest nodes that are expected to serve nearly as much as any cut would: see `planning/cuts.py`."""
    from ...coordinator.demand_meter import expected_workload  # the planner, with a solver, which only `auto` pays
    from ...coordinator.planning.cuts import BoxCut, choose_cut, rate_cuts
    from ...coordinator.planning.model.cluster import Box
    from ...coordinator.planning.model.cluster_file import card_link_gbps
    from ...coordinator.planning.model.slo import TARGET, scaled_slo
    from ...coordinator.planning.model.workload import Service, WorkloadError

    longest = max((each.longest for each in fitting), default=0)
    cuts = [BoxCut(each.replicas, each.tp) for each in fitting if each.longest == longest]
    if not cuts:
        return ReplicaChoice(1, "replicas: 1, as the whole box does not hold the model by itself")
    offers = tuple(
        CutOffer(replicas=each.replicas, tp=each.tp, longest=each.longest)
        for each in fitting
        if each.longest == longest and gpus <= MAX_GPUS
    )
    workload = expected_workload((), longest)
    try:
        slo = scaled_slo(model, workload, SLO_SCALE, TARGET)
    except WorkloadError as error:
        why = f"replicas: {cuts[0].replicas}, the fewest that hold the model: {error}"
        return ReplicaChoice(cuts[0].replicas, why, offers)
    service = Service(name=model.name, model=model, workload=workload, slo=slo)
    box = Box(id="box", gpu=card, gpus=gpus, gpu_link_gbps=card_link_gbps(card))
    rated = rate_cuts(box, service, cuts)
    best = choose_cut(rated)
    others = [f"{each.cut.replicas}: {each.rate:.3g}" for each in rated if each is not best]
    short = [str(each.replicas) for each in fitting if each.longest < longest]
    left_out = [f"{', '.join(short)}: no room for requests of {longest:,} tokens"] if short else []
    beside = f" ({'; '.join([*others, *left_out])})" if others or left_out else ""
    return ReplicaChoice(
        best.cut.replicas,
        f"replicas: {best.cut.replicas} of {gpus // best.cut.replicas} x {card.name}, expected to answer "
        f"{best.rate:.3g} requests/s in time{beside}, {workload.mean_prompt:.0f} tokens in and "
        f"{workload.mean_output:.0f} out on average",
        offers,
    )


def _find_fitting(
    backend: EngineBackend, options: Mapping[str, Any], hardware: Hardware
) -> tuple[ModelShape | None, list[FittingCut], NodeError | None]:
    """The cuts whose nodes hold the model, and what keeps the box as a whole from serving it. Raises ModelError."""
    shape: ModelShape | None = None
    fitting: list[FittingCut] = []
    failed: NodeError | None = None
    for replicas in list_cuts(len(hardware.gpus)):
        gpus = hardware.gpus[: len(hardware.gpus) // replicas]
        part = msgspec.structs.replace(hardware, gpus=gpus)
        knobs = settings_of(BoxEngineSettings, SimpleNamespace(**{**options, **share_options(options, replicas)}))
        try:
            served: ServedModel = backend.inspect(options["model"], part, knobs)
        except NodeError as error:
            failed = failed or error
            continue
        info, share = served.model.info, served.share
        shape = info.shape
        if share.layers == info.layers:
            fitting.append(FittingCut(replicas, share.tp, share.limits.max_model_len or info.max_model_len))
    return shape, fitting, failed
