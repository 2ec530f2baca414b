"""From an exception to the line and the exit code that a command ends with."""

from __future__ import annotations

from ..bootstrap.errors import AddressError, NetworkError, Refused, TokenError
from ..coordinator import CapacityError, PlanError
from ..coordinator.costs.gpus import GpuError
from ..coordinator.costs.model_shape import ModelShapeError
from ..coordinator.planning.model.cluster import ClusterError
from ..coordinator.planning.model.errors import NoPlan, UnservedError
from ..coordinator.planning.model.workload import WorkloadError
from ..coordinator.renting.offers import OfferError
from ..kernels.errors import CodecError
from ..kvtransport.errors import FiguresError
from ..node.box.home import NodeError, NodeUsageError
from ..node.engine.agent_side.engine_link import EngineError, EngineRefused
from ..node.models import ModelError
from ..node.models.text import PromptError
from ..sims.records import TraceError
from ..sims.results.report import ReportError
from ..sims.scenario import WorldError
from ..sims.splitwise.setups import SetupError
from .errors import (
    AccessRefused,
    ClientError,
    DemoFailed,
    InvalidAddress,
    InvalidRequest,
    NotReady,
    UsageError,
    first_of,
)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_READY = 3
EXIT_REFUSED = 4

_USAGE = (
    AddressError,
    TokenError,
    ModelError,
    PromptError,
    FiguresError,
    InvalidAddress,
    InvalidRequest,
    UsageError,
    ClusterError,
    EngineRefused,
    GpuError,
    ModelShapeError,
    NoPlan,
    NodeUsageError,
    OfferError,
    SetupError,
    TraceError,
    WorkloadError,
    WorldError,
)
_CODES = (
    ((AccessRefused, Refused), EXIT_REFUSED),
    ((NotReady,), EXIT_NOT_READY),
    (_USAGE, EXIT_USAGE),
)
_FAILED = (
    CodecError,
    CapacityError,
    PlanError,
    ReportError,
    UnservedError,
    NetworkError,
    NodeError,
    EngineError,
    ClientError,
    DemoFailed,
)


def explain(error: BaseException) -> tuple[int, str] | None:
    """Exit code and one line for an error meant for users, at any depth; None for a bug."""
    found: BaseException | None = first_of(error, (*_USAGE, *_FAILED))
    if found is None:
        return None
    line = " ".join(str(found).split()) or type(found).__name__
    return next((code for kinds, code in _CODES if isinstance(found, kinds)), EXIT_FAILED), line
