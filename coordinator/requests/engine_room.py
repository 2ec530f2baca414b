"""How much work of a service a gateway gives to its engines at once, by what it knows of them. Pure.

What is more than they can run waits at the gateway, where clients take turns; in an engine it would be first come,
first served.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from .fair_queue import ServiceRoom

MOST_QUEUED: Final = 8.0
"""So many times what should be left to prefill may really be, where engines are slower than they say. More: short
prompts fill their steps beside long ones; less: who comes next waits for less."""

DEADLINE_PART: Final = 0.25
"""And of the deadline for the first token no more than this. More: what is too late is seen later, and refused then."""


class EngineRoom(NamedTuple):
    """A usable replica of the service.

    `places`: requests that it may run beside those that other gateways have there. `kv_tokens`: that it holds in all.
    `prefill_tokens_s`: tokens of prompts that its `stages` compute in a second, all together; 0: not known.
    `waiting_tokens`: of prompts that others wait for there.
    """

    prefills: bool
    decodes: bool
    stages: int
    places: int
    kv_tokens: int
    prefill_tokens_s: float
    waiting_tokens: int


def sum_rooms(
    engines: Sequence[EngineRoom],
    *,
    queued_s: float,
    share: float,
    ttft_s: float = 0.0,
    mixes_phases: bool = False,
    gateways: float = 1.0,
) -> ServiceRoom:
    """What they run at once: requests, tokens of KV, and tokens of prompts that they compute within `queued_s`.

    `ttft_s`: the plan's deadline for the first token; 0: none. Without one, all are for both phases where the policy
    `mixes_phases` (`RoutingPolicy`); with one, what goes to replicas that decode makes answers late that were in time.
    Where none is for a phase, all are. `gateways`: how many times the requests of this one all have. `share`: see
    `ServiceRoom`."""
    is_mixed = mixes_phases and not ttft_s > 0.0
    decoding = [each for each in engines if each.decodes or is_mixed] or engines
    prefilling = [each for each in engines if each.prefills or is_mixed] or engines
    most_s = min(MOST_QUEUED * queued_s, DEADLINE_PART * ttft_s if ttft_s > 0.0 else inf)
    most_s = max(queued_s, most_s / max(1.0, gateways))  # each lets so much wait there
    rate = sum(each.prefill_tokens_s for each in prefilling)
    backlogs = [each.waiting_tokens / each.prefill_tokens_s for each in prefilling if each.prefill_tokens_s]
    return ServiceRoom(
        # At least one: it would be wrong to wait for ever for gateways that tell more than is true.
        requests=max(1, sum(max(0, each.places) for each in decoding)),
        size=max(1, sum(each.kv_tokens for each in decoding)),
        unstarted=queued_s * rate,
        most_unstarted=most_s * rate,
        share=share,
        mixed=sum(is_mixed or (each.prefills and each.decodes) for each in engines),
        replicas=max(1, sum(each.stages for each in prefilling)),  # each stage computes another prompt
        rate=rate,
        backlog_s=min(backlogs, default=0.0),
    )
