"""Boxes and services to place, small enough to say what is right for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.placement.values import Period, PlacementBox, PlacementProblem, PlacementService

A100 = "A100-SXM4-80GB"
A6000 = "RTX A6000"


def box(number: int = 0, gpus: int = 4, card: str = A100, **more: object) -> PlacementBox:
    """Of one kind of card."""
    gpu = gpu_table().find(card, Specs.MEASURED)
    return PlacementBox(id=f"box-{number}", gpu=gpu, gpus=gpus, link_gbps=2400.0, **more)  # type: ignore[arg-type]


def period(
    rates: Sequence[float], *, seconds: float = 30.0, prompt: int = 200, output: int = 50, seed: int = 0
) -> Period:
    """Poisson arrivals of each service, all requests alike."""
    rng = np.random.default_rng(seed)
    counts = [int(rng.poisson(rate * seconds)) for rate in rates]
    service = np.repeat(np.arange(len(rates)), counts)
    arrival = rng.uniform(0.0, seconds, len(service))
    order = np.argsort(arrival)
    return Period(
        service=service[order],
        arrival_s=arrival[order],
        prompt=np.full(len(service), prompt),
        output=np.full(len(service), output),
    )


def problem(
    models: Sequence[str] = ("llama2-7b", "llama2-7b"),
    rates: Sequence[float] = (2.0, 2.0),
    boxes: Sequence[PlacementBox] | None = None,
    **lengths: int,
) -> PlacementProblem:
    """Services of these models."""
    return PlacementProblem(
        boxes=[box()] if boxes is None else boxes,
        services=[PlacementService(name=f"s{number}", model=model_shape(model)) for number, model in enumerate(models)],
        period=period(rates, **lengths),
    )
