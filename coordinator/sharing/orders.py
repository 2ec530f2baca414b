"""The turn orders by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from .baselines import QUOTA_S, FirstComeFirstServed, QuotaRoundRobin, SkipJoinMlfq
from .doubling_budget import DoublingBudget
from .service_profile import ServiceProfile
from .turn_queue import TurnOrder

FCFS: Final = "fcfs"
ROUND_ROBIN: Final = "rr"
MLFQ: Final = "mlfq"
DOUBLING_BUDGET: Final = "db"
DOUBLING_BUDGET_PRINTED: Final = "db-printed"


def _round_robin(profiles: Mapping[str, ServiceProfile]) -> TurnOrder:
    """Equal quotas."""
    return QuotaRoundRobin(dict.fromkeys(profiles, QUOTA_S / len(profiles)))


TURN_ORDERS: Final[Mapping[str, Callable[[Mapping[str, ServiceProfile]], TurnOrder]]] = {
    FCFS: lambda profiles: FirstComeFirstServed(),
    ROUND_ROBIN: _round_robin,
    MLFQ: SkipJoinMlfq,
    DOUBLING_BUDGET: DoublingBudget,
    DOUBLING_BUDGET_PRINTED: lambda profiles: DoublingBudget(profiles, prompts_first=False),
}
