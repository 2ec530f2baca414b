"""From an exception to the line and the exit code that a command ends with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from .errors import first_of

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_READY = 3
EXIT_REFUSED = 4

_REFUSED: Final = {
    "bootstrap.errors": ("Refused",),
    "node.owner.questions": ("OwnerRefused",),
    "sdk.errors": ("AccessRefused",),
}
_NOT_READY: Final = {"sdk.errors": ("NotReady",)}
_USAGE: Final = {
    "bootstrap.errors": ("AddressError", "TokenError"),
    "coordinator.costs.gpus": ("GpuError",),
    "coordinator.costs.model_shape": ("ModelShapeError",),
    "coordinator.planning.model.cluster": ("ClusterError",),
    "coordinator.planning.model.errors": ("NoPlan",),
    "coordinator.planning.model.workload": ("WorkloadError",),
    "coordinator.renting.offers": ("OfferError",),
    "kvtransport.errors": ("FiguresError",),
    "node.box.errors": ("NodeUsageError",),
    "node.engine.agent_side.engine_link": ("EngineRefused",),
    "node.models.errors": ("ModelError", "PromptError"),
    "sdk.errors": ("InvalidAddress", "InvalidRequest", "UsageError"),
    "sims.records": ("TraceError",),
    "sims.scenario": ("WorldError",),
    "sims.splitwise.setups": ("SetupError",),
}
_FAILED: Final = {
    "bootstrap.errors": ("NetworkError",),
    "coordinator.capacity": ("CapacityError",),
    "coordinator.plan": ("PlanError",),
    "coordinator.planning.model.errors": ("UnservedError",),
    "kernels.errors": ("CodecError",),
    "node.box.errors": ("NodeError",),
    "node.engine.agent_side.engine_link": ("EngineError",),
    "sdk.errors": ("ClientError", "DemoFailed"),
    "sims.results.report": ("ReportError",),
}

EXIT_CODES: Final[tuple[tuple[int, Mapping[str, tuple[str, ...]]], ...]] = (
    (EXIT_REFUSED, _REFUSED),
    (EXIT_NOT_READY, _NOT_READY),
    (EXIT_USAGE, _USAGE),
    (EXIT_FAILED, _FAILED),
)
"""Exit codes with the modules and names of the errors, and of all that are made of them, that end with each; the first
that fits counts."""


_LINUX_ONLY: Final = frozenset({"fcntl", "resource"})
_OF_NODES: Final = frozenset(
    {"huggingface_hub", "jinja2", "libp2p", "multiaddr", "nicegui", "numpy", "psutil", "pynvml"}
    | {"safetensors", "scipy", "tokenizers", "torch", "vllm"}
)
"""Modules of the package's extras."""


def explain(error: BaseException) -> tuple[int, str] | None:
    """Exit code and one line for an error meant for users, at any depth; None for a bug."""
    missing = first_of(error, (ModuleNotFoundError,))
    if missing is not None and (said := _explain_missing((missing.name or "").partition(".")[0])) is not None:
        return EXIT_USAGE, said
    codes = [(_loaded(names), code) for code, names in EXIT_CODES]
    found: BaseException | None = first_of(error, tuple(kind for kinds, _ in codes for kind in kinds))
    if found is None:
        return None
    line = " ".join(str(found).split()) or type(found).__name__
    return next(code for kinds, code in codes if isinstance(found, kinds)), line


def _explain_missing(module: str) -> str | None:
    """What is not installed with a client; None for what should be."""
    if module in _LINUX_ONLY:
        return "this system cannot run it: nodes and what they bring run on Linux; clients run here as well"
    if module in _OF_NODES:
        return (
            f"only the client is installed here, and this needs more ({module}): in a checkout, make setup for all of "
            "it, or pip install '.[node]' to plan and simulate"
        )
    return None


def _loaded(names: Mapping[str, tuple[str, ...]]) -> tuple[type[BaseException], ...]:
    """The classes of these names. Those of a module that was not loaded, in a client perhaps not installed, were not
    raised either."""
    package = __package__.rpartition(".")[0]
    modules = {module: sys.modules.get(f"{package}.{module}") for module in names}
    return tuple(
        getattr(modules[module], each) for module, all_of in names.items() for each in all_of if modules[module]
    )
