"""What a node does with its engine for others: decode requests, prefill requests, and their KV hand-off."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from ..bootstrap import Address, PeerId, PeerLost, RemoteError, Role
from ..kvtransport.errors import TicketError
from ..kvtransport.tickets import Ticket, issue
from . import messages
from .engine import protocol
from .engine_link import EngineLink, EngineLost

# A decode engine waits this long for KV at most; then it computes the prompt itself.
MAX_TRANSFER_S = 120.0
PREFILL_SAMPLING = protocol.Sampling(max_tokens=1)  # vLLM must sample something; nobody reads it

Notify = Callable[[PeerId, str, messages.Message], None]


@dataclass(frozen=True, slots=True)
class _Job:
    gateway: PeerId
    request: str
    transfer: bytes | None


@final
class Worker:
    """The engine's side of requests. All methods are synchronous and called from the agent's event loop.

    `notify(gateway, method, message)` sends to a gateway; it raises PeerLost for one that is gone or does not read.
    """

    def __init__(self, *, service: str, announce: Address, notify: Notify) -> None:
        self._service = service
        self._announce = announce
        self._notify = notify
        self._engine: EngineLink | None = None
        self._decodes: dict[str, _Job] = {}
        self._prefills: dict[str, _Job] = {}
        self._accepting = True
        self.stats: protocol.EngineStats | None = None

    def __repr__(self) -> str:
        return f"<Worker {self._service} decoding={len(self._decodes)} prefilling={len(self._prefills)}>"

    @property
    def idle(self) -> bool:
        """Whether no request is in the engine."""
        return not self._decodes and not self._prefills

    def use(self, engine: EngineLink) -> None:
        """Send work to this engine from now on."""
        self._engine = engine

    def drain(self) -> None:
        """Finish what is running, refuse what is new."""
        self._accepting = False

    def engine_lost(self, how: str) -> None:
        """The engine process is gone: tell every gateway, so that its requests go on elsewhere."""
        self._engine = None
        self.stats = None
        decodes, self._decodes = self._decodes, {}
        prefills, self._prefills = self._prefills, {}
        failed = f"the engine process {how}"
        for job in decodes.values():
            self._tell(job.gateway, "tokens", messages.Tokens(request=job.request, failed=failed))
        for job in prefills.values():
            self._tell(job.gateway, "prefill.ended", messages.PrefillEnded(request=job.request, failed=failed))

    def gateway_lost(self, gateway: PeerId) -> None:
        """Nobody waits for these requests any more."""
        for request in [request for request, job in self._decodes.items() if job.gateway == gateway]:
            self._cancel_decode(request)
        for request in [request for request, job in self._prefills.items() if job.gateway == gateway]:
            self._cancel_prefill(request)

    async def open_decode(self, gateway: PeerId, role: Role, body: messages.DecodeOpen) -> messages.DecodeOpened:
        """Queue a request; with `receive_tokens`, first make a ticket for its KV."""
        engine = self._engine_for(body.service)
        _refuse_known(body.request, self._decodes)
        ticket = self._ticket(body) if body.receive_tokens else None
        self._submit(
            engine,
            protocol.Submit(
                request=_decode_id(body.request),
                prompt=body.prompt,
                sampling=body.sampling,
                deadline_s=body.deadline_s,
                receive=ticket,
                receive_tokens=body.receive_tokens,
            ),
        )
        transfer = ticket.transfer if ticket is not None else None
        self._decodes[body.request] = _Job(gateway, body.request, transfer)
        return messages.DecodeOpened(ticket=ticket)

    async def open_prefill(self, gateway: PeerId, role: Role, body: messages.PrefillOpen) -> messages.Opened:
        """Compute a prompt's KV and push it under the ticket."""
        engine = self._engine_for(body.service)
        _refuse_known(body.request, self._prefills)
        self._submit(
            engine,
            protocol.Submit(
                request=_prefill_id(body.request),
                prompt=body.prompt,
                sampling=PREFILL_SAMPLING,
                deadline_s=body.deadline_s,
                send=body.ticket,
            ),
        )
        self._prefills[body.request] = _Job(gateway, body.request, body.ticket.transfer)
        return messages.Opened()

    def stop_request(self, gateway: PeerId, role: Role, body: messages.StopRequest) -> None:
        """Forget a request of this gateway's."""
        decode, prefill = self._decodes.get(body.request), self._prefills.get(body.request)
        if decode is not None and decode.gateway == gateway:
            self._cancel_decode(body.request)
        if prefill is not None and prefill.gateway == gateway:
            self._cancel_prefill(body.request)

    def stop_transfer(self, gateway: PeerId, role: Role, body: messages.StopTransfer) -> None:
        """No KV will come for this request: its engine computes the prompt."""
        job = self._decodes.get(body.request)
        if job is not None and job.gateway == gateway and job.transfer is not None:
            self._send(protocol.AbortTransfer(transfer=job.transfer, reason=body.reason))

    def attach(self, transfer: bytes, connection: socket.socket) -> None:
        """Hand an accepted KV socket to the engine, if a request waits for it; closes this process's copy."""
        with connection:
            known = any(job.transfer == transfer for job in self._decodes.values())
            if known and self._engine is not None and self._engine.running:
                try:
                    self._engine.attach(transfer, connection)
                except EngineLost:
                    pass  # the sender sees its connection end and reports the transfer as failed

    def on_engine_message(self, message: protocol.FromEngine) -> None:
        """Pass on what the engine says."""
        match message:
            case protocol.Step(outputs=outputs, stats=stats):
                self.stats = stats
                for output in outputs:
                    self._on_tokens(output)
            case protocol.TransferReport():
                self._on_transfer(message)
            case protocol.Ready() | protocol.StartFailed():
                pass  # the link has dealt with these

    def _on_tokens(self, output: protocol.NewTokens) -> None:
        kind, _, request = output.request.partition(":")
        if kind == "prefill":
            # The KV is still on its way; the transfer's own report ends the job, unless it never started.
            if output.finish in ("deadline", "error", "refused"):
                self._end_prefill(request, f"prefill ended with {output.finish}", None)
            return
        job = self._decodes.get(request)
        if job is None:
            return
        if output.finish is not None:
            del self._decodes[request]
        failed = "the engine gave the request up" if output.finish == "error" else ""
        refused = (output.reason or "no reason given") if output.finish == "refused" else ""
        told = self._tell(
            job.gateway,
            "tokens",
            messages.Tokens(
                request=request,
                tokens=output.tokens,
                finish=None if failed or refused else output.finish,
                cached_tokens=output.cached_tokens,
                failed=failed,
                refused=refused,
            ),
        )
        if not told:
            self._cancel_decode(request)  # an answer with a gap would be worse than none

    def _on_transfer(self, report: protocol.TransferReport) -> None:
        for request, job in self._prefills.items():
            if job.transfer == report.transfer:
                figures = messages.TransferFigures(
                    raw_bytes=report.raw_bytes,
                    wire_bytes=report.wire_bytes,
                    frames=report.frames,
                    span_s=report.span_s,
                    visible_s=report.visible_s,
                    hidden_fraction=report.hidden_fraction,
                )
                self._end_prefill(request, "" if report.delivered else report.reason or "not delivered", figures)
                if not report.delivered:
                    self._send(protocol.Cancel(request=_prefill_id(request)))  # nobody will read the rest of it
                return

    def _end_prefill(self, request: str, failed: str, figures: messages.TransferFigures | None) -> None:
        job = self._prefills.pop(request, None)
        if job is not None:
            ended = messages.PrefillEnded(request=request, failed=failed, figures=figures)
            self._tell(job.gateway, "prefill.ended", ended)

    def _tell(self, gateway: PeerId, method: str, message: messages.Message) -> bool:
        try:
            self._notify(gateway, method, message)
        except PeerLost:
            return False
        return True

    def _engine_for(self, service: str) -> EngineLink:
        if service != self._service:
            raise RemoteError("wrong-service", f"this node serves {self._service}, not {service}")
        if not self._accepting:
            raise RemoteError("draining", "this node is leaving and takes no new requests")
        if self._engine is None or not self._engine.running:
            raise RemoteError("no-engine", "the engine process of this node is not running")
        return self._engine

    def _submit(self, engine: EngineLink, submit: protocol.Submit) -> None:
        try:
            engine.send(submit)
        except EngineLost as error:
            raise RemoteError("no-engine", str(error)) from error

    def _ticket(self, body: messages.DecodeOpen) -> Ticket:
        host, port = self._announce.host, self._announce.port
        deadline_s = min(body.deadline_s / 2, MAX_TRANSFER_S)
        try:
            return issue(host, port, body.codec, deadline_s, secrets.token_bytes)
        except TicketError as error:
            raise RemoteError("invalid", str(error)) from error

    def _cancel_decode(self, request: str) -> None:
        if self._decodes.pop(request, None) is not None:
            self._send(protocol.Cancel(request=_decode_id(request)))

    def _cancel_prefill(self, request: str) -> None:
        prefill = self._prefills.pop(request, None)
        if prefill is not None:
            self._send(protocol.Cancel(request=_prefill_id(request)))
            if prefill.transfer is not None:  # the prompt may be done while its KV is still being sent
                self._send(protocol.AbortTransfer(transfer=prefill.transfer, reason="the request was cancelled"))

    def _send(self, message: protocol.Message) -> None:
        if self._engine is not None and self._engine.running:
            self._engine.send(message)


def _refuse_known(request: str, jobs: dict[str, _Job]) -> None:
    """An id names one request: another gateway's must not take over its tokens."""
    if request in jobs:
        raise RemoteError("invalid", f"request: the id {request} is in use")


def _decode_id(request: str) -> str:
    return f"decode:{request}"


def _prefill_id(request: str) -> str:
    return f"prefill:{request}"
