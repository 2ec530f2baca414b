"""What gateways do, in a simulation: each request's machine, whose actions simulated engines carry
out.

The machine is the network's own, so a request has the same life here: who prefills how much of it,
who generates its first token, what is computed again when a box is lost, and where. Replicas answer
at once here, and no client has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import final

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
from ..coordinator.routing.interface import NoRoute
from .deployment import Deployment
from .engine.sequence import Sequence as EngineSequence
from .engine.values import EngineSignal, SignalKind
from .kv_transfers import KVTransfer, KVTransfers
from .results.outcomes import TransferRecord
from .scenario import SimSettings
from .serving import Assignment, ReplicaHost, SimRequest, Split


@final
class SimGateway:
    """The gateways of all services, as one.

    `on_load` is called for each replica whose load has changed, `on_end` for each request that has
    ended; `transfer_log` takes a record of every KV transfer.
    """

    def __init__(
        self,
        deployments: Sequence[Deployment],
        kv_transfers: KVTransfers,
        settings: SimSettings,
        *,
        on_load: Callable[[ReplicaHost], None],
        on_end: Callable[[SimRequest, float], None],
        transfer_log: list[TransferRecord] | None,
    ) -> None:
        self._deployments = deployments
        self._kv_transfers = kv_transfers
        self._settings = RequestSettings(first_token_at_prefill=not settings.first_token_at_decode)
        self._on_load = on_load
        self._on_end = on_end
        self._transfer_log = transfer_log
        self._assigned: dict[int, Assignment] = {}  # by the key of both sides' sequences
        self._keys = count()
        self._waiting: list[list[SimRequest]] = [[] for _ in deployments]  # nobody can take them now

    def accept(self, request: SimRequest, now: float) -> None:
        """A request arrives."""
        name = self._deployments[request.service].service.name
        request.machine = machine = RequestMachine(
            request, service=name, prompt_tokens=request.prompt, now=now, settings=self._settings
        )
        self._carry_out(request, machine.start(now), now)

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
            elif assignment.split is None:
                continue
            elif signal.kind is SignalKind.HAS_ROOM:
                kv_transfers.grant_room(assignment.split.transfer, now)
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
        ready = request.machine.prefill_ended(assignment.opening.attempt, "", prefill.number, now)
        self._carry_out(request, ready, now)

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
        for assignment in stranded:
            request, opening = assignment.request, assignment.opening
            name = opening.decode if assignment.decode is replica else opening.prefill
            if name is not None and not request.is_over:
                self._carry_out(request, request.machine.peer_lost(name, replica.number, now), now)

    def retry(self, service: int, now: float) -> None:
        """There may be a route for the requests of a service that have none."""
        waiting, self._waiting[service] = self._waiting[service], []
        for request in waiting:
            self._carry_out(request, request.machine.network_changed(now), now)

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
        try:
            route = self._deployments[request.service].route(wanted.tokens, now, wanted.blamed)
        except NoRoute as error:
            self._waiting[request.service].append(request)
            ready = request.machine.not_routed(str(error), now, is_hopeful=True)
        else:
            ready = request.machine.routed(route, now)
        self._carry_out(request, ready, now)

    def _open_decode(self, request: SimRequest, opening: OpenDecode, now: float) -> None:
        decode = self._deployments[request.service].hosts[opening.decode]
        assignment = request.assignment = Assignment(request, opening, decode, next(self._keys))
        if decode.is_lost:  # nobody answers, and nobody knows why yet
            decode.stranded.append(assignment)
        elif not decode.engine.can_fit(assignment.decode_seq):
            self._deployments[request.service].log.refused += 1
            ready = request.machine.refused(opening.attempt, "it is longer than the KV memory", now)
            self._carry_out(request, ready, now)
        else:
            self._assigned[assignment.decode_seq.key] = assignment
            if not assignment.decode_seq.external:
                assignment.submit(now)
                self._on_load(decode)
            if opening.prefill is not None:
                receives = assignment.decode_seq.external > 0
                self._carry_out(request, request.machine.decode_opened(opening.attempt, now, receives=receives), now)

    def _open_prefill(self, request: SimRequest, opening: OpenPrefill, now: float) -> None:
        """Both sides begin at once: the decode side, asked before, takes it up here too."""
        deployment, assignment = self._deployments[request.service], request.assignment
        assert assignment is not None
        prefill, decode, key = deployment.hosts[opening.prefill], assignment.decode, assignment.decode_seq.key
        sequence = EngineSequence(key, opening.split, 0, sends_kv=True)
        if prefill.is_lost:
            prefill.stranded.append(assignment)
        elif not prefill.engine.can_fit(sequence):
            ready = request.machine.open_failed(
                opening.attempt, opening.prefill, "it is longer than the KV memory", prefill.number, now
            )
            self._carry_out(request, ready, now)
            return
        else:
            links = deployment.transfer_links(prefill.replica, decode.replica)
            transfer = KVTransfer(key, links, deployment.token_bytes, deployment.service.model.layers)
            assignment.split, assignment.prefill_number = Split(prefill, sequence, transfer), prefill.number
            prefill.outstanding += 1
            prefill.prefill_tokens += sequence.known
            prefill.engine.submit(sequence, now)
            self._on_load(prefill)
        assignment.submit(now)
        self._on_load(decode)
        if assignment.split is not None:
            assignment.split.transfer.has_room = decode.engine.has_blocks_for(assignment.decode_seq)

    def _prefill_at_decode(self, request: SimRequest, now: float) -> None:
        assignment = request.assignment
        assert assignment is not None
        if not assignment.decode.is_lost:
            assignment.prefill_number = assignment.decode.number
            assignment.prefill_at_decode(now)
            self._on_load(assignment.decode)

    # ---- what engines say -----------------------------------------------------------------------------------

    def _end_prefill(
        self, replica: ReplicaHost, assignment: Assignment | None, sequence: EngineSequence, now: float
    ) -> None:
        replica.outstanding -= 1
        replica.prefill_tokens -= sequence.known
        if assignment is None or assignment.split is None:
            replica.engine.release_kv(sequence, now)
            return
        request, opening = assignment.request, assignment.opening
        if opening.first_token:
            first = range(assignment.start, assignment.start + 1)
            self._carry_out(request, request.machine.first_token(opening.attempt, first, None, now), now)
        self._kv_transfers.end_prefill(assignment.split.transfer, now)

    def _end_decode(self, assignment: Assignment, now: float) -> None:
        request = assignment.request
        assignment.remove_load()
        del self._assigned[assignment.decode_seq.key]
        log = self._deployments[request.service].log
        log.decode[request.row] = assignment.decode.number
        log.prefill[request.row] = assignment.prefill_number
        attempt, first_at = assignment.opening.attempt, assignment.first_at
        ready = request.machine.decoded(attempt, assignment.tokens, "length", now, first_at=first_at)
        self._carry_out(request, ready, now)

    def _end(self, request: SimRequest, end: EndRequest, now: float) -> None:
        log, row, record = self._deployments[request.service].log, request.row, end.record
        request.end()
        if record is not None:
            log.replays[row] = len(record.recovered)
            if end.finish != "error":
                log.ttft_s[row], log.e2e_s[row] = record.ttft_s, record.e2e_s
        self._on_end(request, now)
