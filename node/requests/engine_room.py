"""How much work a gateway gives to engines at once, by what their nodes have told. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...bootstrap import PeerId
from ...coordinator import Replica
from ...coordinator.costs.model_shape import ModelShape
from ...coordinator.requests.engine_room import EngineRoom, sum_rooms
from ...coordinator.requests.fair_queue import ServiceRoom
from ...coordinator.routing.interface import Load
from ..messages import EngineAdvert
from ..settings import ClientLimits
from ..view import NetworkView

UNTOLD_REQUESTS: Final = 64  # that an engine runs at once which does not tell, as those of earlier releases
EFFICIENCY: Final = 0.5  # of a prefill, of the products that an engine has measured


def measure_room(
    view: NetworkView,
    service: str,
    limits: ClientLimits,
    rates: Mapping[str, float],
    *,
    mixes_phases: bool,
    gateways: float = 1.0,
) -> ServiceRoom | None:
    """What the usable replicas of the plan run at once, less what other gateways have there; None where there is none
    of them. `rates`: tokens of prompts that replicas compute in a second, by their ids, where their own steps or their
    hardware's say it; of others what their engines have measured has to do.
    `mixes_phases`: see `RoutingPolicy`; `gateways`: how many times this one's requests all gateways have."""
    plan = view.plan_of(service)
    if plan is None:
        return None
    loads = {load.replica: load for load in view.loads({})}
    rooms = [
        _read_room(
            replica, engine, loads[replica.head], rates.get(replica.id) or prefill_tokens_s(view, replica, engine)
        )
        for replica in plan.replicas
        if view.serving(replica, service) and (engine := view.adverts[PeerId(replica.head)].engine) is not None
    ]
    if not rooms:
        return None
    return sum_rooms(
        rooms, queued_s=limits.queued_s, share=limits.share, ttft_s=plan.deadlines.ttft_s, mixes_phases=mixes_phases,
        gateways=gateways,
    )  # fmt: skip


def _read_room(replica: Replica, engine: EngineAdvert, load: Load, rate: float) -> EngineRoom:
    return EngineRoom(
        prefills=replica.prefills,
        decodes=replica.decodes,
        stages=len(replica.stages),
        places=(engine.max_requests or UNTOLD_REQUESTS) - load.outstanding,
        kv_tokens=engine.kv_tokens,
        prefill_tokens_s=rate,
        # Prompts of services that share its GPUs are computed between its own, about as fast.
        waiting_tokens=load.prefill_tokens + load.beside.prefill_tokens,
    )


def prefill_tokens_s(view: NetworkView, replica: Replica, engine: EngineAdvert) -> float:
    """Tokens per second that a replica prefills, by what a token is multiplied with: each stage computes its layers."""
    model = view.adverts[PeerId(replica.head)].model
    if model is None:
        return 0.0
    return EFFICIENCY * engine.tflops * 1e12 * len(replica.stages) / (2.0 * _multiplied(model.shape))


def _multiplied(shape: ModelShape) -> int:
    return max(1, shape.layers * shape.active_layer_parameters)
