"""What a node's log says of a request at its gateway, and what the request cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from ...coordinator import Plan
from ...coordinator.requests.values import Action, CancelTransfer, EndRequest, OpenDecode, ShowTokens
from ..observing.costs import price_request
from ..observing.event_log import Record
from ..observing.values import Cost, EventKind
from .opened import OpenedRequest

CANCELLED = "cancelled"


@final
class RequestLog:
    """Of one request, from its acceptance to its end. `usd_per_hour`: what a box says that it costs."""

    def __init__(
        self,
        request: OpenedRequest,
        record: Record,
        usd_per_hour: Callable[[str], float],
        plan: Callable[[], Plan | None],
    ) -> None:
        self._request = request
        self._record = record
        self._usd_per_hour = usd_per_hour
        self._plan = plan
        self._has_begun_answer = False

    def __repr__(self) -> str:
        return f"<RequestLog {self._request.token}>"

    def begin(self, service: str, deadline_s: float) -> None:
        """It is accepted, and waits for its turn."""
        request = self._request
        self._note(
            EventKind.REQUEST_BEGUN,
            peer=request.client,
            client_request=request.id,
            service=service,
            prompt_tokens=len(request.live.prompt),
            max_tokens=request.live.left,
            so_far_tokens=request.live.count or None,
            deadline_s=deadline_s,
        )

    def note_action(self, action: Action) -> None:
        """Its machine asks for this, which is about to be done."""
        match action:
            case OpenDecode():
                self._note_route(action)
            case CancelTransfer(attempt=attempt, decode=decode, reason=reason):
                self._note(EventKind.REQUEST_RECOVERED, peer=decode, attempt=attempt, type="prefill", why=reason)
            case ShowTokens(tokens=tokens) if tokens and not self._has_begun_answer:
                self._has_begun_answer = True
                self._note(EventKind.REQUEST_FIRST_TOKEN)
            case EndRequest():
                self._note_end(action)
            case _:
                pass  # what they come to is told by the replicas

    def note_opened(self, attempt: int, replica: str, part: str, failed: str = "") -> None:
        """A replica has accepted its part of an attempt, or refused."""
        self._note(EventKind.REQUEST_OPENED, peer=replica, attempt=attempt, part=part, failed=failed or None)

    def cost(self) -> Cost:
        """What it has cost so far."""
        return price_request(self._request.busy(), self._usd_per_hour, self._request.traffic_usd)

    def _note_route(self, opening: OpenDecode) -> None:
        plan = self._plan()
        if opening.attempt > 1:
            why = self._request.machine.recovered[-1:]
            self._note(EventKind.REQUEST_RECOVERED, attempt=opening.attempt, type="decode", why=why[0] if why else None)
        self._note(
            EventKind.REQUEST_ROUTED,
            peer=opening.decode,
            attempt=opening.attempt,
            prefill=opening.prefill,
            decode=opening.decode,
            split=opening.split or None,
            first_token_at="prefill" if opening.first_token else "decode",
            codec=plan.codec if plan is not None else None,
            plan=f"{plan.epoch}.{plan.version}" if plan is not None else None,
        )

    def _note_end(self, end: EndRequest) -> None:
        live, record, cost, transfer = self._request.live, end.record, self.cost(), self._request.transfer
        self._note(
            EventKind.REQUEST_ENDED,
            peer=self._request.client,
            finish=end.finish or CANCELLED,
            error=end.error or None,
            prompt_tokens=len(live.prompt),
            completion_tokens=live.count,
            attempts=record.attempts if record is not None else 0,
            recovered=len(record.recovered) if record is not None else 0,
            prefill=record.prefill if record is not None else None,
            decode=record.decode if record is not None else None,
            ttft_s=record.ttft_s if record is not None and record.tokens else None,
            tpot_s=record.tpot_s if record is not None and record.tokens > 1 else None,
            e2e_s=record.e2e_s if record is not None and record.tokens else None,
            raw_bytes=transfer.raw_bytes if transfer is not None else None,
            wire_bytes=transfer.wire_bytes if transfer is not None else None,
            box_usd=cost.box_usd,
            traffic_usd=cost.traffic_usd,
        )

    def _note(self, kind: EventKind, *, peer: str = "", **facts: str | float | None) -> None:
        self._record(kind, request=self._request.token, peer=peer, layers=(), **facts)
