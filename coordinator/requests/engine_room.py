"""How much work of a service a gateway gives to its engines at once, by what it knows of them. Pure.

What is more than they can run waits at the gateway, where clients take turns; in an engine it would be first come,
first served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .fair_queue import ServiceRoom


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
    engines: Sequence[EngineRoom], *, queued_s: float, share: float, mixes_phases: bool = False
) -> ServiceRoom:
    """What they run at once: requests, tokens of KV, and tokens of prompts that they compute within `queued_s`. Where
    none is for a phase, all are; so they are where the policy `mixes_phases` (`RoutingPolicy`). `share`: see
    `ServiceRoom`."""
    decoding = [each for each in engines if each.decodes or mixes_phases] or engines
    prefilling = [each for each in engines if each.prefills or mixes_phases] or engines
    rate = sum(each.prefill_tokens_s for each in prefilling)
    backlogs = [each.waiting_tokens / each.prefill_tokens_s for each in prefilling if each.prefill_tokens_s]
    return ServiceRoom(
        # At least one: it would be wrong to wait for ever for gateways that tell more than is true.
        requests=max(1, sum(max(0, each.places) for each in decoding)),
        size=max(1, sum(each.kv_tokens for each in decoding)),
        unstarted=queued_s * rate,
        share=share,
        mixed=sum(each.prefills and each.decodes for each in engines),
        replicas=max(1, sum(each.stages for each in prefilling)),  # each stage computes another prompt
        rate=rate,
        backlog_s=min(backlogs, default=0.0),
    )
