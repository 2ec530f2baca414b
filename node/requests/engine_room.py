"""How much work a gateway gives to engines at once, by what they have told. No I/O, no clock.

What is more than they can run waits at the gateway, where clients take turns; in an engine it would be first come,
first served.
"""

from __future__ import annotations

from typing import Final

from ...bootstrap import PeerId
from ...coordinator import Replica
from ...coordinator.costs.model_shape import ModelShape
from ...coordinator.requests.fair_queue import ServiceRoom
from ..messages import EngineAdvert
from ..settings import ClientLimits
from ..view import NetworkView

UNTOLD_REQUESTS: Final = 64  # that an engine runs at once which does not tell, as those of earlier releases
EFFICIENCY: Final = 0.5  # of a prefill, of the products that an engine has measured


def measure_room(view: NetworkView, service: str, limits: ClientLimits) -> ServiceRoom | None:
    """What the usable replicas of the plan run at once, less what other gateways have there: requests, tokens of KV,
    and tokens of prompts that they compute within `limits.queued_s`. None where there is no usable replica."""
    plan = view.plan_of(service)
    if plan is None:
        return None
    usable = [
        (replica, engine)
        for replica in plan.replicas
        if view.serving(replica, service) and (engine := view.adverts[PeerId(replica.head)].engine) is not None
    ]
    if not usable:
        return None
    loads = {load.replica: load for load in view.loads({})}
    decoding = [(replica, engine) for replica, engine in usable if replica.decodes] or usable
    prefilling = [(replica, engine) for replica, engine in usable if replica.prefills] or usable
    places = (max(0, (e.max_requests or UNTOLD_REQUESTS) - loads[replica.head].outstanding) for replica, e in decoding)
    rates = [prefill_tokens_s(view, replica, engine) for replica, engine in prefilling]
    # Prompts of services that share its GPUs are computed between its own, about as fast.
    waiting = [loads[r.head].prefill_tokens + loads[r.head].beside.prefill_tokens for r, _ in prefilling]
    backlogs = [tokens / each for tokens, each in zip(waiting, rates, strict=True) if each]
    rate = sum(rates)
    return ServiceRoom(
        # At least one: it would be wrong to wait for ever for gateways that tell more than is true.
        requests=max(1, sum(places)),
        size=max(1, sum(engine.kv_tokens for _, engine in decoding)),
        unstarted=limits.queued_s * rate,
        share=limits.share,
        mixed=sum(replica.prefills and replica.decodes for replica, _ in usable),
        replicas=sum(len(replica.stages) for replica, _ in prefilling),  # each stage computes another prompt
        rate=rate,
        backlog_s=min(backlogs, default=0.0),
    )


def prefill_tokens_s(view: NetworkView, replica: Replica, engine: EngineAdvert) -> float:
    """Tokens per second that a replica prefills, by what a token is multiplied with: each stage computes its layers."""
    model = view.adverts[PeerId(replica.head)].model
    if model is None:
        return 0.0
    return EFFICIENCY * engine.tflops * 1e12 * len(replica.stages) / (2.0 * _multiplied(model.shape))


def _multiplied(shape: ModelShape) -> int:
    return max(1, shape.layers * shape.active_layer_parameters)
