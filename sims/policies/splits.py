"""Where prompts are split in a simulation of Cronus: requests wait until a prefill replica takes them, which then asks
the decode replica how it stands there (`coordinator.routing.prefill_slots`, `balancer`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import msgspec

from ...coordinator.routing.balancer import choose_split
from ...coordinator.routing.interface import Route
from ..deployment import Deployment
from ..serving import GatewayPlaces, ReplicaHost, SimRequest, SlotWaiter

Act = Callable[[float], None]


@final
class SlotQueues:
    """The waiting requests of all gateways. `do_at` has something done at a moment, `on_load` hears of replicas whose
    load has changed, `begin` of the route that a request has; None: it is to look for another one."""

    def __init__(
        self,
        deployments: Sequence[Deployment],
        places: GatewayPlaces,
        *,
        do_at: Callable[[float, Act, float], None],
        on_load: Callable[[ReplicaHost], None],
        begin: Callable[[SimRequest, Route | None, float], None],
    ) -> None:
        self._deployments = deployments
        self._places = places
        self._do_at = do_at
        self._on_load = on_load
        self._begin = begin

    def ask(self, request: SimRequest, route: Route, prefill: ReplicaHost, now: float) -> None:
        """A gateway asks the prefill replica of this route to take a request."""
        at = now + self._places.message_s(request.gateway, prefill)
        self._do_at(at, partial(self._wait, SlotWaiter(request, route), prefill), now)

    def give(self, prefill: ReplicaHost, now: float) -> None:
        """Take requests while there are slots: how each is split is chosen now, by how it stands at the decode
        replica, which is asked."""
        while prefill.waiting and prefill.slots.take(prefill.waiting[0].request, now):
            waiter = self._take(prefill)
            waiter.request.slot_at = prefill
            decode = self._deployments[waiter.request.service].hosts.get(waiter.route.decode)
            if decode is None:  # the plan has changed
                self._use(waiter, prefill, waiter.route, now)
                continue
            half_s = self._places.rtt_s(prefill, decode) / 2
            self._do_at(now + half_s, partial(self._split, waiter, prefill, decode, half_s), now)

    def free(self, request: SimRequest, now: float) -> None:
        """It does not use the slot that it has, if it has one."""
        prefill, request.slot_at = request.slot_at, None
        if prefill is not None:
            prefill.slots.leave(request)
            self.give(prefill, now)

    def send_on(self, prefill: ReplicaHost, now: float) -> None:
        """The replica is lost: who waits for it looks for another route."""
        while prefill.waiting:
            request = self._take(prefill).request
            prefill.slots.leave(request)
            self._begin(request, None, now)

    def _wait(self, waiter: SlotWaiter, prefill: ReplicaHost, now: float) -> None:
        """A request is in line, and counts in the load there until it has a slot."""
        prefill.slots.ask(waiter.request, now)
        prefill.waiting.append(waiter)
        prefill.outstanding += 1
        prefill.prefill_tokens += waiter.route.split
        self._on_load(prefill)
        if prefill.is_noticed:
            self.send_on(prefill, now)
        elif not prefill.is_lost:
            self.give(prefill, now)

    def _split(self, waiter: SlotWaiter, prefill: ReplicaHost, decode: ReplicaHost, half_s: float, now: float) -> None:
        """The decode replica says how it stands there now, and the prefill replica hears of it half a round trip
        later."""
        split = choose_split(waiter.route.split, prefill.prefill_line, decode.chunk_line, decode.chunked_prefill_state)
        route = msgspec.structs.replace(waiter.route, split=split, splits_there=False)
        self._do_at(now + half_s, partial(self._use, waiter, prefill, route), now)

    def _use(self, waiter: SlotWaiter, prefill: ReplicaHost, route: Route, now: float) -> None:
        """The gateway hears that the request has a slot, and how it is split."""
        request = waiter.request

        def begin(then: float) -> None:
            is_here = self._deployments[request.service].hosts.get(route.prefill or "") is prefill
            self._begin(request, route if is_here else None, then)

        self._do_at(now + self._places.message_s(request.gateway, prefill), begin, now)

    def _take(self, prefill: ReplicaHost) -> SlotWaiter:
        waiter = prefill.waiting.popleft()
        prefill.outstanding -= 1
        prefill.prefill_tokens -= waiter.route.split
        self._on_load(prefill)
        return waiter
