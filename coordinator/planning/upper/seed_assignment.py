"""Which GPUs a search begins with for which service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..model.errors import NoPlan
from ..model.problem import Slice
from ..model.workload import Service
from .clustering import GpuSet, all_gpus, dendrogram, fits_somewhere
from .search_space import SearchSpace

_WEIGHT_FACTOR: Final = 1.5  # a service whose part does not hold its model is given so many times its weight
_TRIES: Final = 30


def assign_gpus(space: SearchSpace, *, boxes_whole: bool = False) -> list[GpuSet]:
    """Each service's part of the usable GPUs: along the order of the dendrogram, so that the boxes
    of a service are near each other, and in sizes that go by the work that each service asks for. A
    box is cut between two services where the models do not fit otherwise, unless all are to stay
    whole.

    Raises NoPlan for a service that no part of the cluster holds.
    """
    services = space.problem.services
    order = _dendrogram_order(space)
    for number, service in enumerate(services):
        if not fits_somewhere(space, all_gpus(space, order), number):
            raise NoPlan(_explain_too_small(space, service))
    uncut = [Slice(box, space.boxes[box].gpus) for box in order]
    gpu_units = [Slice(box, space.gpu_units[box]) for box, gpus in uncut for _ in range(gpus // space.gpu_units[box])]
    for shares in (uncut,) if boxes_whole else (uncut, gpu_units):
        found = _try_parts(space, shares)
        if found is not None:
            return found
    names = ", ".join(service.name for service in services)
    raise NoPlan(f"the cluster does not hold all services together ({names}): it has {space.gpus} usable GPUs")


def _try_parts(space: SearchSpace, shares: Sequence[Slice]) -> list[GpuSet] | None:
    """Parts made of these that hold their models; None where such are not found."""
    weights = [_compute_demand(service) for service in space.problem.services]
    for _ in range(_TRIES):
        parts = _cut_in_parts(space, shares, weights)
        short = [number for number, part in enumerate(parts) if not fits_somewhere(space, part, number)]
        if not short:
            return parts
        for number in short:
            weights[number] *= _WEIGHT_FACTOR
    return None


def _dendrogram_order(space: SearchSpace) -> list[int]:
    """Boxes from left to right under the dendrogram."""
    clusters: dict[int, list[int]] = {number: [box] for number, box in enumerate(space.usable)}
    for merge, (one, two) in enumerate(dendrogram(space, space.usable)):
        clusters[len(space.usable) + merge] = clusters.pop(one) + clusters.pop(two)
    return next(iter(clusters.values()))


def _compute_demand(service: Service) -> float:
    """Multiply-adds per second that the service's traffic asks for, about."""
    tokens = service.workload.mean_prompt + service.workload.mean_output
    return service.workload.rate * tokens * service.model.layers * service.model.active_layer_parameters


def _cut_in_parts(space: SearchSpace, shares: Sequence[Slice], weights: Sequence[float]) -> list[GpuSet]:
    """The pieces cut in as many runs as there are weights, with about those shares of all
    compute."""
    powers = [gpus * space.boxes[box].gpu.tflops for box, gpus in shares]
    scale = sum(powers) / sum(weights)
    runs: list[dict[int, int]] = [{} for _ in weights]
    number, filled, goal = 0, 0.0, weights[0] * scale
    for (box, gpus), power in zip(shares, powers, strict=True):
        if number + 1 < len(weights) and filled + power / 2 > goal:
            number += 1
            goal += weights[number] * scale
        runs[number][box] = runs[number].get(box, 0) + gpus
        filled += power
    return [tuple(Slice(box, gpus) for box, gpus in run.items()) for run in runs]


def _explain_too_small(space: SearchSpace, service: Service) -> str:
    memory = sum(space.boxes[box].gpus * space.boxes[box].gpu.memory_gib for box in space.usable)
    return (
        f"the cluster does not hold {service.model.name}: it has {service.model.weight_bytes / 2**30:.1f} GiB of "
        f"weights, and the {space.gpus} usable GPUs have {memory:.0f} GiB in all"
    )
