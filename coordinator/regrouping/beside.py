"""Parts of the model that boxes load beside what they serve: until all of a step are there, the plan stays as it is.

A box with room for it is then away from its requests only while it goes over. `plan.Regrouping.beside` says that the
first step is at that; where a box has no room, or its load fails, the step goes on without.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..plan import RegroupingStep, Stage
from .parts import BoxPart


def can_load_beside(step: RegroupingStep, parts: Mapping[str, BoxPart]) -> bool:
    """Whether all boxes of a step serve, and say that they have room for their new part besides."""
    if step.recut is not None:  # other nodes begin on the same GPUs
        return False
    found = [(parts.get(stage.peer), stage) for group in step.form for stage in group]
    return all(part is not None and part.is_ready and stage.layers <= part.beside.room for part, stage in found)


def is_over(step: RegroupingStep, parts: Mapping[str, BoxPart]) -> bool:
    """Whether nothing more is loaded beside what the boxes of a step serve: all is there, or one of them has failed,
    or serves no more."""
    return _are_loaded(step, parts) or bool(_find_failed(step, parts))


def _find_failed(step: RegroupingStep, parts: Mapping[str, BoxPart]) -> dict[str, str]:
    """The boxes that cannot load beside what they serve after all, and why."""
    found = {}
    for group in step.form:
        for stage in group:
            part = parts.get(stage.peer)
            if part is None or not part.is_ready:
                found[stage.peer] = "it serves no more"
            elif part.beside.stages == group and part.beside.failed:
                found[stage.peer] = part.beside.failed
    return found


def describe_loading(part: BoxPart, stages: tuple[Stage, ...]) -> str:
    """How far a box is, for people."""
    if part.beside.stages != stages:
        return "begins to load beside what it serves"
    if part.beside.failed:
        return f"cannot load beside what it serves: {part.beside.failed}"
    return "loaded beside what it serves" if part.beside.is_loaded else part.detail


def _are_loaded(step: RegroupingStep, parts: Mapping[str, BoxPart]) -> bool:
    found = [(parts.get(stage.peer), group) for group in step.form for stage in group]
    return all(part is not None and part.beside.is_loaded and part.beside.stages == group for part, group in found)
