"""Which boxes a search begins with for which service."""

from __future__ import annotations

from typing import Final

from .clustering import dendrogram, held
from .space import NoPlan, Space
from .workload import Service

__all__ = ["owners_of"]

_MORE: Final = 1.5  # a service whose part does not hold its model is given so many times its weight
_TRIES: Final = 30


def owners_of(space: Space) -> dict[int, int]:
    """A service (its number) for each usable box: along the order of the dendrogram, so that the boxes of a service are
    near each other, in parts that go by the work that each service asks for.

    Raises NoPlan for a service that no part of the cluster holds.
    """
    services = space.problem.services
    order = _leaves(space)
    for number, service in enumerate(services):
        if not held(space, order, number):
            raise NoPlan(_too_small(space, service))
    weights = [_work(service) for service in services]
    for _ in range(_TRIES):
        parts = _parts(space, order, weights)
        short = [number for number, part in enumerate(parts) if not held(space, part, number)]
        if not short:
            return {box: number for number, part in enumerate(parts) for box in part}
        for number in short:
            weights[number] *= _MORE
    names = ", ".join(service.name for service in services)
    raise NoPlan(f"the cluster does not hold all services together ({names}): it has {space.gpus} usable GPUs")


def _leaves(space: Space) -> list[int]:
    """Boxes from left to right under the dendrogram."""
    clusters: dict[int, list[int]] = {number: [box] for number, box in enumerate(space.usable)}
    for merge, (one, two) in enumerate(dendrogram(space, space.usable)):
        clusters[len(space.usable) + merge] = clusters.pop(one) + clusters.pop(two)
    return next(iter(clusters.values()))


def _work(service: Service) -> float:
    """Multiply-adds per second that the service's traffic asks for, about."""
    tokens = service.workload.mean_prompt + service.workload.mean_output
    return service.workload.rate * tokens * service.model.layers * service.model.active_layer_parameters


def _parts(space: Space, order: list[int], weights: list[float]) -> list[list[int]]:
    """The order cut in as many runs as there are weights, with about those shares of all compute."""
    powers = {box: space.boxes[box].gpus * space.boxes[box].gpu.tflops for box in order}
    scale = sum(powers.values()) / sum(weights)
    parts: list[list[int]] = [[] for _ in weights]
    number, filled, goal = 0, 0.0, weights[0] * scale
    for box in order:
        if number + 1 < len(weights) and filled + powers[box] / 2 > goal:
            number += 1
            goal += weights[number] * scale
        parts[number].append(box)
        filled += powers[box]
    return parts


def _too_small(space: Space, service: Service) -> str:
    memory = sum(space.boxes[box].gpus * space.boxes[box].gpu.memory_gib for box in space.usable)
    return (
        f"the cluster does not hold {service.model.name}: it has {service.model.weight_bytes / 2**30:.1f} GiB of "
        f"weights, and the {space.gpus} usable GPUs have {memory:.0f} GiB in all"
    )
