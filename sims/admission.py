"""Admission at the gateways of a simulation: the network's own queue and rules, with one client for all requests.

What waits for its turn is not at an engine yet. Not as on the network: a request counts with half of its answer from
its first token on, since no tokens are told before its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Final, final

import numpy as np

from ..coordinator.profile import ReplicaProfile
from ..coordinator.requests.admission import (
    DEFAULT_RULES,
    AdmissionSettings,
    ClassParts,
    ClassRules,
    Expected,
    PriorityClass,
    find_refusal,
)
from ..coordinator.requests.engine_room import EngineRoom, sum_rooms
from ..coordinator.requests.fair_queue import FairQueue, OverQuota, QueueClass, Quota, ServiceRoom
from ..coordinator.requests.retry_times import RetrySettings
from .deployment import Deployment
from .scenario import SimAdmission, SimSettings
from .serving import ReplicaHost, SimRequest

CLIENT: Final = "all"
LEAST_WAIT_S: Final = 1e-3
"""Between two looks at who is next; on the network every token of an answer is an occasion."""

AT_DEADLINE: Final = AdmissionSettings(
    rules={
        kind: ClassRules(
            lateness=10.0 if kind is PriorityClass.BATCH else 1.0, least_s=0.0, queue_share=rules.queue_share,
            weight=rules.weight, cost=rules.cost,
        )
        for kind, rules in DEFAULT_RULES.items()
    }
)  # fmt: skip
"""Who would miss the plan's deadline for the first token is refused; batch requests may take ten times as long."""

HELD_BACK: Final = SimAdmission(
    rules=AdmissionSettings(rules={kind: replace(rules, least_s=1e9) for kind, rules in DEFAULT_RULES.items()}),
    queue_requests=1 << 20, deadline_s=1e9,
)  # fmt: skip
"""Requests wait at gateways for engines as on the network, for as long as it takes: none is refused."""


@final
class AdmissionQueues:
    """Of each service and gateway, one."""

    def __init__(self, deployments: Sequence[Deployment], settings: SimSettings) -> None:
        assert settings.admission is not None, "queues are for admission"
        admission = settings.admission
        self._deployments, self._settings = deployments, settings
        self._admission = admission
        # Else there are none, or all gateways route as one.
        self._hears_others = bool(settings.report_s) and len(settings.gateways) > 1
        self._classes = {
            kind: QueueClass(kind, rules.weight, rules.cost, rules.queue_share)
            for kind, rules in admission.rules.rules.items()
        }
        most = admission.queue_requests
        self._quota = Quota(requests=most, size=1 << 60, all_requests=most, all_size=1 << 60)
        self._queues: dict[tuple[int, int | None], FairQueue[SimRequest]] = {}
        self._parts: dict[tuple[int, int | None], ClassParts] = {}
        self._looks_at: dict[tuple[int, int | None], float] = {}
        self._kinds = [draw_classes(len(deployment.trace), admission, settings.seed) for deployment in deployments]

    def admit(self, request: SimRequest, now: float) -> bool:
        """Whether it may wait for its turn; what is refused is logged."""
        is_admitted = self._admit(request, now)
        self._deployments[request.service].log.not_admitted[request.row] = not is_admitted
        return is_admitted

    def _admit(self, request: SimRequest, now: float) -> bool:
        deployment, queue = self._deployments[request.service], self._queue_of(request)
        kind = self._kinds[request.service][request.row]
        room, ttft_s = self._room(request.service, request.gateway, now), deployment.plan.deadlines.ttft_s
        start_s = room.backlog_s + queue.start_in_s(CLIENT, request.prompt, now, room.rate, self._classes[kind])
        prefill_s, left_s = max(room.start_s(request.prompt), queue.mean_start_s(now)), self._admission.deadline_s
        parts = self._parts.setdefault((request.service, request.gateway), ClassParts(self._admission.rules))
        parts.ask(kind)
        expected = Expected(
            start_s=start_s, prefill_s=prefill_s, ttft_s=ttft_s, left_s=left_s, backlog_s=room.backlog_s,
            has_its_part=parts.has_its_part(kind),
        )  # fmt: skip
        if find_refusal(kind, expected, self._admission.rules) is not None:
            return False
        parts.give(kind)
        try:
            queue.add(CLIENT, request, request.prompt, now, self._classes[kind])
        except OverQuota:
            return False
        return True

    def is_served(self, request: SimRequest) -> bool:
        """Whether its turn has come."""
        return self._queue_of(request).is_served(request)

    def start(self, request: SimRequest, now: float) -> None:
        """It has its first token."""
        queue = self._queue_of(request)
        if queue.is_starting(request):
            queue.grow(request, request.left // 2, float(request.left))
            queue.start(request, now)

    def end(self, request: SimRequest, now: float) -> None:
        """It is over."""
        self._queue_of(request).remove(request, now)

    def take(self, request: SimRequest, now: float) -> SimRequest | None:
        """Whose turn it is at the gateway of this request."""
        return self._queue_of(request).take(self._room(request.service, request.gateway, now), now)

    def is_waiting(self, request: SimRequest) -> bool:
        """Whether somebody waits at the gateway of this request."""
        return self._queue_of(request).waiting > 0

    def next_look_at(self, request: SimRequest, now: float) -> float | None:
        """When somebody at the gateway of this request may have a turn though nothing else happens; None: not so, or
        that has been said before."""
        key = request.service, request.gateway
        in_s = self._queue_of(request).take_in_s(self._room(*key, now), now)
        at = now + max(LEAST_WAIT_S, in_s)
        if in_s == inf or now < self._looks_at.get(key, now) <= at + LEAST_WAIT_S:
            return None
        self._looks_at[key] = at
        return at

    def _queue_of(self, request: SimRequest) -> FairQueue[SimRequest]:
        key = request.service, request.gateway
        if key not in self._queues:
            self._queues[key] = FairQueue("requests", "tokens", self._quota, RetrySettings())
        return self._queues[key]

    def _room(self, service: int, gateway: int | None, now: float) -> ServiceRoom:
        """What the service's replicas run at once, less what other gateways have there as far as it has been told."""
        deployment, admission = self._deployments[service], self._admission
        others = deployment.work_of_others(gateway, now) if self._hears_others else {}
        rooms = [
            _room_of(host, deployment.profile(host), *others.get(host.replica.id, (0, 0)))
            for host in deployment.usable_hosts()
        ]
        return sum_rooms(
            rooms, queued_s=admission.queued_s, share=admission.share, ttft_s=deployment.plan.deadlines.ttft_s,
            mixes_phases=deployment.mixes_phases, gateways=len(self._settings.gateways) if self._hears_others else 1.0,
        )  # fmt: skip


def _room_of(host: ReplicaHost, profile: ReplicaProfile, others_requests: int, others_tokens: int) -> EngineRoom:
    engine, replica = host.engine, host.replica
    return EngineRoom(
        prefills=replica.prefills,
        decodes=replica.decodes,
        stages=len(replica.stages),
        places=engine.settings.max_sequences - others_requests,
        kv_tokens=engine.blocks * engine.settings.block_tokens,
        prefill_tokens_s=profile.prefill_tokens_s(len(replica.stages)),
        waiting_tokens=others_tokens,
    )


def draw_classes(count: int, admission: SimAdmission, seed: int) -> list[PriorityClass]:
    """The class of each of so many requests, by the shares of the settings."""
    lots = np.random.default_rng((seed, 2)).random(count)
    urgent, batch = admission.urgent, admission.batch
    found = np.where(lots < urgent, PriorityClass.URGENT, PriorityClass.NORMAL)
    return [PriorityClass(kind) for kind in np.where(lots >= 1.0 - batch, PriorityClass.BATCH, found).tolist()]
