"""What gateways do, in a simulation: each request's machine, whose actions are carried out by simulated engines.

The machine is the network's own, so what happens to a request is decided here as it is there: who samples the first
token, what is computed again when a box is lost, and where. Nobody answers late here, and no client has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import final

from ..coordinator.requests import (
    CancelTransfer,
    EndRequest,
    FindRoute,
    OpenDecode,
    OpenPrefill,
    Ready,
    RequestSettings,
)
from ..coordinator.routing import NoRoute
from .deployment import Deployment
from .engine.sequence import Sequence
from .engine.values import EngineSignal, SignalKind
from .kv_transfers import KVTransfer, KVTransfers
from .results.outcomes import TransferRecord
from .scenario import SimSettings
from .serving import Assignment, SimReplica, SimRequest, Split

__all__ = ["SimGateway"]


@final
class SimGateway:
    """Of one service. `on_load` is called for each replica whose load has changed, `on_end` for each request that has
    ended; `transfers` takes a record of every KV transfer."""

    def __init__(
        self,
        deployment: Deployment,
        kv_transfers: KVTransfers,
        settings: SimSettings,
        *,
        on_load: Callable[[SimReplica], None],
        on_end: Callable[[float], None],
        transfers: list[TransferRecord] | None,
    ) -> None:
        self._deployment = deployment
        self._kv_transfers = kv_transfers
        self._settings = RequestSettings(first_token_at_prefill=not settings.decode_writes_first)
        self._on_load = on_load
        self._on_end = on_end
        self._transfers = transfers
        self._assigned: dict[int, Assignment] = {}  # by the key of both sides' sequences
        self._keys = count()
        self._waiting: list[SimRequest] = []  # nobody can take them now

    def arrived(self, row: int, prompt: int, output: int, now: float) -> None:
        """A request of the trace."""
        service = self._deployment.service.name
        request = SimRequest(row, prompt, output, service=service, now=now, settings=self._settings)
        self._carry_out(request, request.machine.start(now), now)

    def on_signals(self, replica: SimReplica, signals: Iterable[EngineSignal], now: float) -> None:
        """What the engine of a replica has to tell."""
        kv_transfers = self._kv_transfers
        for signal in signals:
            assignment = self._assigned.get(signal.sequence.key)
            if signal.kind is SignalKind.READ:
                self._prefilled(replica, assignment, signal.sequence, now)
            elif assignment is None:  # the request has another route now
                continue
            elif signal.kind is SignalKind.DONE:
                self._done(assignment, now)
            elif signal.kind is SignalKind.FIRST:
                assignment.first_at = signal.at
                assignment.computed()
            elif assignment.split is None:
                continue
            elif signal.kind is SignalKind.ROOM:
                kv_transfers.room_made(assignment.split.transfer, now)
            else:
                kv_transfers.reading(assignment.split.transfer, signal.tokens, signal.at, now)

    def landed(self, transfer: KVTransfer, now: float) -> None:
        """All of a request's KV is where its answer will be decoded."""
        assignment = self._assigned.get(transfer.request)
        if assignment is None or assignment.split is None:
            return  # one side was lost while the last bits were under way
        (prefill, sequence, _), decode, request = assignment.split, assignment.decode, assignment.request
        assignment.split = None
        self._deployment.log.kv_s[request.row] = now - transfer.read_at
        if self._transfers is not None:
            self._transfers.append(
                TransferRecord(request.row, prefill.number, decode.number, transfer.begun_at, now, sequence.known)
            )
        prefill.engine.release(sequence, now)
        decode.engine.land(assignment.sequence, now)
        self._on_load(prefill)
        self._on_load(decode)
        ready = request.machine.prefill_ended(assignment.opening.attempt, "", prefill.number, now)
        self._carry_out(request, ready, now)

    def lost(self, replica: SimReplica, now: float) -> None:
        """A replica is gone with all that it had. The links to it are seen to break; gateways do not know yet."""
        for sequence in replica.engine.lose(now):
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
            if split is not None and not split.replica.lost and split.transfer.read:
                split.replica.engine.release(split.sequence, now)
                self._on_load(split.replica)

    def noticed(self, replica: SimReplica, now: float) -> None:
        """It is known now that a replica is gone."""
        stranded, replica.stranded = replica.stranded, []
        for assignment in stranded:
            request, opening = assignment.request, assignment.opening
            name = opening.decode if assignment.decode is replica else opening.prefill
            if name is not None:
                self._carry_out(request, request.machine.peer_lost(name, replica.number, now), now)

    def retry(self, now: float) -> None:
        """There may be a route for those that wait."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._carry_out(request, request.machine.network_changed(now), now)

    # ---- actions --------------------------------------------------------------------------------------------

    def _carry_out(self, request: SimRequest, ready: Ready, now: float) -> None:
        for action in ready.actions:
            # Nobody is shown anything, the decode side knows of the first token beforehand, and broken links have told
            # engines of what is not to be done any more. The others, most frequent first:
            kind = type(action)
            if kind is FindRoute:
                self._find_route(request, action, now)
            elif kind is OpenDecode:
                self._open_decode(request, action, now)
            elif kind is EndRequest:
                self._end(request, action, now)
            elif kind is OpenPrefill:
                self._open_prefill(request, action, now)
            elif kind is CancelTransfer:
                self._cancel_transfer(request, now)
