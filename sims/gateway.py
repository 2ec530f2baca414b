"""What gateways do, in a simulation: each request's machine, whose actions simulated engines carry
out.

The machine is the network's own, so a request has the same life here: who prefills how much of it,
who generates its first token, what is computed again when a box is lost, and where. What a gateway
and a replica say to each other takes half a round trip, where `SimSettings.gateways` are named;
else they hear each other at once. No client has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import final

from ..coordinator.planning.model.cluster import Cluster
from ..coordinator.requests.machine import RequestMachine
from ..coordinator.requests.values import (
    CancelTransfer,
    EndRequest,
    FindRoute,
    OpenDecode,
    OpenPrefill,
    Ready,
    RequestSettings,
)
from ..coordinator.routing.interface import NoRoute, Route
from .admission import AdmissionQueues
from .deployment import Deployment
from .engine.sequence import Sequence as EngineSequence
from .engine.values import EngineSignal, SignalKind
from .kv_transfers import HOLD_S, KVTransfer, KVTransfers
from .policies.claims import SimPoolQuestion
from .policies.splits import SlotQueues
from .results.outcomes import TransferRecord
from .scenario import SimSettings
from .serving import Assignment, GatewayPlaces, ReplicaHost, SimRequest, Split

Act = Callable[[float], None]
"""What happens at a moment, which it is given."""


@final
class SimGateway:
    """The gateways of all services, as one.

    `on_load` is called for each replica whose load has changed, `on_end` for each request that has
    ended, `later` for what happens at a later moment; `transfer_log` takes a record of every KV
    transfer.
    """

    def __init__(
        self,
        deployments: Sequence[Deployment],
        kv_transfers: KVTransfers,
        cluster: Cluster,
        settings: SimSettings,
        *,
        on_load: Callable[[ReplicaHost], None],
        on_end: Callable[[SimRequest, float], None],
        later: Callable[[float, Act], None],
        transfer_log: list[TransferRecord] | None,
    ) -> None:
        self._deployments = deployments
        self._places = GatewayPlaces(cluster, settings)
        self._later = later
        self._kv_transfers = kv_transfers
        self._settings = RequestSettings(first_token_at_prefill=not settings.first_token_at_decode)
        self._layerwise_from = settings.layerwise_from
        self._pool_limits = settings.routing.pool_limits
        self._on_load = on_load
        self._on_end = on_end
        self._transfer_log = transfer_log
        self._assigned: dict[int, Assignment] = {}  # by the key of both sides' sequences
        self._keys = count()
        self._admission = None if settings.admission is None else AdmissionQueues(deployments, settings)
        self._slots = SlotQueues(deployments, self._places, do_at=self._do_at, on_load=on_load, begin=self._begin_on)
        self._waiting: list[list[SimRequest]] = [[] for _ in deployments]  # nobody can take them now

    def accept(self, request: SimRequest, now: float) -> None:
        """A request arrives."""
        request.gateway = self._places.gateway_of(request.row)
        name = self._deployments[request.service].service.name
        request.machine = machine = RequestMachine(
            request, service=name, prompt_tokens=request.prompt, now=now, settings=self._settings
        )
        if self._admission is not None and not self._admission.admit(request, now):
            request.end()
            self._on_end(request, now)
            return
        self._carry_out(request, machine.start(now), now)
        self._give_turns(request, now)

    def _give_turns(self, request: SimRequest, now: float) -> None:
        """At the gateway of this request, to those that wait there."""
        admission = self._admission
        if admission is None or not admission.is_waiting(request):
            return
        while (following := admission.take(request, now)) is not None:
            self._carry_out(following, following.machine.network_changed(now), now)
        if (at := admission.next_look_at(request, now)) is not None:
            self._later(at, partial(self._give_turns, request))

    def _note_start(self, request: SimRequest, replica: ReplicaHost, at: float, now: float) -> None:
        """Its answer begins on this replica at this moment."""
        self._deployments[request.service].note_first_token(request, at)
        if self._admission is not None and not request.count:
            self._do_at(now + self._places.message_s(request.gateway, replica), partial(self._start, request), now)

    def _start(self, request: SimRequest, now: float) -> None:
        """Its gateway hears that its answer has begun."""
        if self._admission is not None and not request.is_over:
            self._admission.start(request, now)
            self._give_turns(request, now)

    def set_missing(self, missing: frozenset[str]) -> None:
        """No requests come to the gateways of these boxes."""
        self._places.missing = missing

    def on_signals(self, replica: ReplicaHost, signals: Iterable[EngineSignal], now: float) -> None:
        """The signals of a replica's engine."""
        kv_transfers = self._kv_transfers
        for signal in signals:
            assignment = self._assigned.get(signal.sequence.key)
            if signal.kind is SignalKind.PREFILLED:
                self._end_prefill(replica, assignment, signal.sequence, now)
            elif assignment is None:  # the request has another route now
                continue
            elif signal.kind is SignalKind.DONE:
                self._end_decode(assignment, now)
            elif signal.kind is SignalKind.FIRST_TOKEN:
                assignment.first_at = signal.at
                assignment.end_prefill()
                self._note_start(assignment.request, replica, signal.at, now)
            elif assignment.split is None:
                continue
            elif signal.kind is SignalKind.HAS_ROOM:
                kv_transfers.grant_room(assignment.split.transfer, now, assignment.decode_seq.cached)
            else:
                kv_transfers.start_prefill_step(assignment.split.transfer, signal.tokens, signal.at, now)

    def complete_transfer(self, transfer: KVTransfer, now: float) -> None:
        """The KV has arrived: the request decodes, and the prefill replica frees blocks."""
        assignment = self._assigned.get(transfer.request)
        if assignment is None or assignment.split is None:
            return  # one side was lost during the last round trip
        (prefill, sequence, _), decode, request = assignment.split, assignment.decode, assignment.request
        assignment.split = None
        self._deployments[request.service].log.kv_s[request.row] = now - transfer.prefilled_at
        if self._transfer_log is not None:
            self._transfer_log.append(
                TransferRecord(request.row, prefill.number, decode.number, transfer.begun_at, now, sequence.known)
            )
        prefill.engine.release_kv(sequence, now)
        decode.engine.receive_kv(assignment.decode_seq, now)
        self._on_load(prefill)
        self._on_load(decode)
        ended = partial(request.machine.prefill_ended, assignment.opening.attempt, "", prefill.number)
        self._hear(request, decode, ended, now)

    def take_off(self, replica: ReplicaHost, now: float) -> None:
        """Empty a stopped replica. Its peers see links break; the gateway does not know yet."""
        for sequence in replica.engine.stop(now):
            assignment = self._assigned.get(sequence.key)
            if assignment is None:
                continue
            replica.stranded.append(assignment)
            split, assignment.split = assignment.split, None
            if split is not None:
                self._kv_transfers.abandon(split.transfer, now)
            if assignment.decode is not replica:
                continue
            del self._assigned[sequence.key]
            request = assignment.request
            if len(assignment.tokens) > request.count - assignment.start:
                attempt, first_at = assignment.opening.attempt, assignment.first_at
                ready = request.machine.decoded(attempt, assignment.tokens, None, now, first_at=first_at)
                self._carry_out(request, ready, now)
            if split is not None and not split.prefill.is_lost and split.transfer.is_prefilled:
                split.prefill.engine.release_kv(split.prefill_seq, now)
                self._on_load(split.prefill)

    def notice_loss(self, replica: ReplicaHost, now: float) -> None:
        """The gateway hears that a replica has stopped: what it had goes on elsewhere."""
        stranded, replica.stranded = replica.stranded, []
        replica.is_noticed = True
        for assignment in stranded:
            self._tell_of_loss(assignment, replica, now)
        unanswered, replica.unanswered = replica.unanswered, []
        for question in unanswered:
            question(now)
        self._slots.send_on(replica, now)

    def retry(self, service: int, now: float) -> None:
        """There may be a route for the requests of a service that have none."""
        waiting, self._waiting[service] = self._waiting[service], []
        for request in waiting:
            self._carry_out(request, request.machine.network_changed(now), now)

    def _tell_of_loss(self, assignment: Assignment, replica: ReplicaHost, now: float) -> None:
        request, opening = assignment.request, assignment.opening
        name = opening.decode if assignment.decode is replica else opening.prefill
        if name is not None and not request.is_over:
            self._carry_out(request, request.machine.peer_lost(name, replica.number, now), now)

    # ---- messages -------------------------------------------------------------------------------------------

    def _send(self, request: SimRequest, replica: ReplicaHost, act: Act, now: float) -> None:
        """Do this when one end hears of it from the other."""
        self._do_at(now + self._places.message_s(request.gateway, replica), act, now)

    def _do_at(self, at: float, act: Act, now: float) -> None:
        if at > now:
            self._later(at, act)
        else:
            act(now)

    def _hear(
        self,
        request: SimRequest,
        replica: ReplicaHost,
        says: Callable[[float], Ready],
        now: float,
        not_before: float = 0.0,
    ) -> None:
        """A request's machine hears what a replica says."""

        def hear(then: float) -> None:
            if not request.is_over:
                self._carry_out(request, says(then), then)

        self._do_at(max(now + self._places.message_s(request.gateway, replica), not_before), hear, now)

    def _strand(self, assignment: Assignment, replica: ReplicaHost, now: float) -> None:
        """It comes to a replica that is lost: nobody answers."""
        if replica.is_noticed:
            self._tell_of_loss(assignment, replica, now)
        else:
            replica.stranded.append(assignment)

    # ---- actions --------------------------------------------------------------------------------------------

    def _carry_out(self, request: SimRequest, ready: Ready, now: float) -> None:
        for action in ready:
            match action:
                case FindRoute():
                    self._find_route(request, action, now)
                case OpenDecode():
                    self._open_decode(request, action, now)
                case OpenPrefill():
                    self._open_prefill(request, action, now)
                case CancelTransfer():
                    self._prefill_at_decode(request, now)
                case EndRequest():
                    self._end(request, action, now)
                case _:
                    # Nobody looks at tokens, the decode side knows beforehand that the first one comes from elsewhere,
                    # and whose work is cancelled has been lost, or has seen its link break.
                    pass

    def _find_route(self, request: SimRequest, wanted: FindRoute, now: float) -> None:
        self._slots.free(request, now)
        if self._admission is not None and not self._admission.is_served(request):
            self._carry_out(request, request.machine.held(now), now)
            return
        try:
            route = self._deployments[request.service].route(wanted.tokens, now, wanted.blamed, request)
        except NoRoute as error:
            self._waiting[request.service].append(request)
            ready = request.machine.not_routed(str(error), now, is_hopeful=True)
        else:
            if route.splits_there and route.prefill is not None:
                prefill = self._deployments[request.service].hosts[route.prefill]
                self._slots.ask(request, route, prefill, now)
                return
            if route.claims:
                self._ask_pools(request, wanted, route, now)
                return
            ready = request.machine.routed(route, now)
        self._carry_out(request, ready, now)

    def _ask_pools(self, request: SimRequest, wanted: FindRoute, route: Route, now: float) -> None:
        """The replicas say whether they take it, or others that are chosen then."""
        deployment = self._deployments[request.service]
        question = SimPoolQuestion(
            request, wanted, deployment, places=self._places, limits=self._pool_limits, do_at=self._do_at,
            then=partial(self._begin_on, request),
        )  # fmt: skip
        question.ask(route, now)

    def _begin_on(self, request: SimRequest, route: Route | None, now: float) -> None:
        """Its replicas take it, by the plan of the moment when the route was chosen; None: look for another one."""
        if request.is_over:
            return
        deployment, machine = self._deployments[request.service], request.machine
        hosts = deployment.hosts
        if route is None or not all(name in hosts for name in (route.prefill, route.decode) if name):
            self._carry_out(request, machine.network_changed(now), now)
        elif route.splits_there and route.prefill is not None:  # after others have refused it
            self._slots.ask(request, route, hosts[route.prefill], now)
        else:
            deployment.note_accepted(request)
            self._carry_out(request, machine.routed(route, now), now)

    # ---- both halves of a request ---------------------------------------------------------------------------

    def _open_decode(self, request: SimRequest, opening: OpenDecode, now: float) -> None:
        hosts = self._deployments[request.service].hosts
        decode, prefill = hosts[opening.decode], hosts.get(opening.prefill or "")
        assignment = request.assignment = Assignment(request, opening, decode, prefill, next(self._keys))
        self._send(request, decode, partial(self._take_decode, assignment), now)

    def _take_decode(self, assignment: Assignment, now: float) -> None:
        request, opening, decode = assignment.request, assignment.opening, assignment.decode
        machine = request.machine
        decode.claims.leave(request)
        if decode.is_lost:
            self._strand(assignment, decode, now)
        elif not decode.engine.can_fit(assignment.decode_seq):
            self._deployments[request.service].log.refused += 1
            refused = partial(machine.refused, opening.attempt, "it is longer than the KV memory")
            self._hear(request, decode, refused, now)
        else:
            self._assigned[assignment.decode_seq.key] = assignment
            if not assignment.decode_seq.external:
                assignment.submit(now)
                self._on_load(decode)
            if opening.prefill is not None:
                receives = assignment.decode_seq.external > 0
                if not receives:
                    self._slots.free(request, now)
                opened = partial(machine.decode_opened, opening.attempt, receives=receives)
                self._hear(request, decode, opened, now)

    def _open_prefill(self, request: SimRequest, opening: OpenPrefill, now: float) -> None:
        assignment = request.assignment
        assert assignment is not None
        prefill = assignment.prefill
        assert prefill is not None, "a request with a prefill replica was routed to it"
        self._send(request, prefill, partial(self._take_prefill, assignment, opening, prefill), now)

    def _take_prefill(self, assignment: Assignment, opening: OpenPrefill, prefill: ReplicaHost, now: float) -> None:
        """Both sides begin at once: the decode side, asked before, takes it up here too."""
        request, decode, key = assignment.request, assignment.decode, assignment.decode_seq.key
        prefill.claims.leave(request)
        if request.assignment is not assignment or assignment.is_submitted:
            return  # another attempt has begun meanwhile, or the decode side does without
        deployment = self._deployments[request.service]
        sequence = EngineSequence(key, opening.split, 0, sends_kv=True, prefix=request.prefix)
        if decode.is_lost:  # it was when this was under way
            self._assigned.pop(key, None)
            self._strand(assignment, decode, now)
            return
        if prefill.is_lost:
            assignment.submit(now)
            self._on_load(decode)
            self._strand(assignment, prefill, now)
            return
        if not prefill.engine.can_fit(sequence):
            why = "it is longer than the KV memory"
            failed = partial(request.machine.open_failed, opening.attempt, opening.prefill, why, prefill.number)
            self._hear(request, prefill, failed, now)
            return
        links = deployment.transfer_links(prefill.replica, decode.replica)
        transfer = KVTransfer(key, links, deployment.token_bytes, deployment.service.model.layers)
        transfer.is_short = sequence.known < self._layerwise_from
        assignment.split, assignment.prefill_number = Split(prefill, sequence, transfer), prefill.number
        request.slot_at = None
        prefill.slots.leave(request)
        prefill.slots.enter(key)
        prefill.outstanding += 1
        sequence.uncached -= prefill.engine.prefixes.count_cached(sequence)
        prefill.prefill_tokens += sequence.uncached
        prefill.engine.submit(sequence, now)
        self._on_load(prefill)
        assignment.submit(now)
        self._on_load(decode)
        if decode.engine.has_blocks_for(assignment.decode_seq):
            self._kv_transfers.grant_room(transfer, now, assignment.decode_seq.cached)

    def _prefill_at_decode(self, request: SimRequest, now: float) -> None:
        assignment = request.assignment
        assert assignment is not None
        self._slots.free(request, now)
        self._send(request, assignment.decode, partial(self._do_without_kv, assignment), now)

    def _do_without_kv(self, assignment: Assignment, now: float) -> None:
        if assignment.request.assignment is assignment and not assignment.decode.is_lost:
            assignment.prefill_number = assignment.decode.number
            assignment.prefill_at_decode(now)
            self._on_load(assignment.decode)

    # ---- what engines say -----------------------------------------------------------------------------------

    def _end_prefill(
        self, replica: ReplicaHost, assignment: Assignment | None, sequence: EngineSequence, now: float
    ) -> None:
        replica.outstanding -= 1
        replica.prefill_tokens -= sequence.uncached
        replica.slots.leave(sequence.key)
        self._slots.give(replica, now)
        if assignment is None or assignment.split is None:
            replica.engine.release_kv(sequence, now)
            return
        request, opening = assignment.request, assignment.opening
        if opening.first_token:
            first = range(assignment.start, assignment.start + 1)
            said = partial(request.machine.first_token, opening.attempt, first, None)
            assignment.first_heard_at = now + self._places.message_s(request.gateway, replica)
            self._note_start(request, replica, now, now)
            self._hear(request, replica, said, now)
        self._kv_transfers.end_prefill(assignment.split.transfer, now)
        if self._kv_transfers.may_be_late:
            self._watch_kv(assignment, now)

    # ---- KV that comes too slowly ---------------------------------------------------------------------------

    def _watch_kv(self, assignment: Assignment, now: float, was_late: bool = False) -> None:
        """Look again at KV whose prompt is computed, soon."""
        self._later(now + HOLD_S, partial(self._check_kv, assignment, was_late))

    def _check_kv(self, assignment: Assignment, was_late: bool, now: float) -> None:
        """Where it looks too slow twice in a row, the decode replica computes the prompt."""
        split, decode, request = assignment.split, assignment.decode, assignment.request
        if split is None or decode.is_lost or split.prefill.is_lost or request.assignment is not assignment:
            return
        tokens = split.prefill_seq.known
        compute_s = decode.engine.times.prefill_s(tokens, tokens * (tokens + 1) / 2)
        is_late = self._kv_transfers.is_late(split.transfer, compute_s, now)
        if not (is_late and was_late):
            self._watch_kv(assignment, now, is_late)
            return
        assignment.split = None
        self._kv_transfers.abandon(split.transfer, now)
        split.prefill.engine.release_kv(split.prefill_seq, now)
        self._on_load(split.prefill)
        assignment.prefill_number = decode.number
        assignment.prefill_at_decode(now)
        self._on_load(decode)
        ended = partial(request.machine.prefill_ended, assignment.opening.attempt, "", split.prefill.number)
        self._hear(request, decode, ended, now)

    def _end_decode(self, assignment: Assignment, now: float) -> None:
        request = assignment.request
        assignment.remove_load()
        del self._assigned[assignment.decode_seq.key]
        log = self._deployments[request.service].log
        log.decode[request.row] = assignment.decode.number
        log.prefill[request.row] = assignment.prefill_number
        attempt, first_at, machine = assignment.opening.attempt, assignment.first_at, request.machine

        def hear_all(then: float) -> Ready:
            first_heard = None if first_at is None else first_at + (then - now)
            return machine.decoded(attempt, assignment.tokens, "length", then, first_at=first_heard)

        self._hear(request, assignment.decode, hear_all, now, assignment.first_heard_at)

    def _end(self, request: SimRequest, end: EndRequest, now: float) -> None:
        deployment = self._deployments[request.service]
        log, row, record = deployment.log, request.row, end.record
        first_at = record.first_at if record is not None and record.attempts == 1 else None
        deployment.end_request(request, None if end.finish in (None, "error") else request.count, first_at)
        self._slots.free(request, now)
        request.end()
        if self._admission is not None:
            self._admission.end(request, now)
            self._give_turns(request, now)
        if record is not None:
            log.replays[row] = len(record.recovered)
            if end.finish != "error":
                log.ttft_s[row], log.e2e_s[row] = record.ttft_s, record.e2e_s
        self._on_end(request, now)
