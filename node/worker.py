"""What a node does with its engine for others: decode requests, prefill requests, and their KV hand-off."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from ..bootstrap import NetworkError, PeerId, PeerLost, RemoteError, Role
from ..kvtransport.dialling import Path
from ..kvtransport.errors import TicketError, TransferError
from ..kvtransport.tickets import TransferTicket, issue_transfer
from . import messages
from .engine import protocol
from .engine_link import EngineLink, EngineLost
from .kv_links import IncomingLinks
from .kv_ways import KvWays

# A decode engine waits this long for KV at most; then it computes the prompt itself.
MAX_TRANSFER_S = 120.0
PREFILL_SAMPLING = protocol.Sampling(max_tokens=1)  # vLLM must sample something; nobody reads it

Notify = Callable[[PeerId, str, messages.Message], None]


@dataclass(frozen=True, slots=True)
class _Job:
    gateway: PeerId
    request: str
    transfer: bytes | None
    other: PeerId | None  # the node at the other end of the transfer


@final
class Worker:
    """The engine's side of requests. Called from the agent's event loop.

    `notify(gateway, method, message)` sends to a gateway; it raises PeerLost for one that is gone or does not read.
    `ways` knows how KV gets to other nodes.
    """

    def __init__(self, *, service: str, ways: KvWays, notify: Notify) -> None:
        self._service = service
        self._ways = ways
        self._inlets = IncomingLinks(secrets.token_bytes)
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
        if engine.ready is not None:
            self._ways.engine_ready(engine.ready.dtype)

    def drain(self) -> None:
        """Finish what is running, refuse what is new."""
        self._accepting = False

    def engine_lost(self, how: str) -> None:
        """The engine process is gone: tell every gateway, so that its requests go on elsewhere."""
        self._engine = None
        self.stats = None
        self._inlets.forget_all()
        self._ways.engine_lost()
        decodes, self._decodes = self._decodes, {}
        prefills, self._prefills = self._prefills, {}
        failed = f"the engine process {how}"
        for job in decodes.values():
            self._tell(job.gateway, "tokens", messages.Tokens(request=job.request, failed=failed))
        for job in prefills.values():
            self._tell(job.gateway, "prefill.ended", messages.PrefillEnded(request=job.request, failed=failed))

    def peer_lost(self, peer: PeerId) -> None:
        """Nobody waits for these requests any more, and no KV goes to or comes from there."""
        for request in [request for request, job in self._decodes.items() if job.gateway == peer]:
            self._cancel_decode(request)
        for request in [request for request, job in self._prefills.items() if job.gateway == peer]:
            self._cancel_prefill(request)
        for ticket in (self._inlets.forget_peer(peer), self._ways.peer_lost(peer)):
            if ticket is not None:
                self._send(protocol.CloseLink(link=ticket.link, reason="the node at the other end is gone"))

    def set_paths(self, link: bytes, paths: tuple[Path, ...]) -> None:
        """Take other ways for what the engine sends over a link."""
        self._send(protocol.SetPaths(link=link, paths=paths))

    async def open_link(self, peer: PeerId, role: Role, body: messages.LinkOpen) -> messages.LinkOpened:
        """The link over which this peer's engine may push KV into ours."""
        self._engine_for(body.service)
        return messages.LinkOpened(link=self._inlets.of(peer))

    async def open_decode(self, gateway: PeerId, role: Role, body: messages.DecodeOpen) -> messages.DecodeOpened:
        """Queue a request; with `receive_tokens`, first make a ticket for its KV."""
        engine = self._engine_for(body.service)
        _refuse_known(body.request, self._decodes)
        source = PeerId(body.prefill) if body.receive_tokens and body.prefill else None
        inlet = self._inlets.of(source) if source is not None else None
        ticket = _ticket(body, inlet.link) if inlet is not None else None
        self._submit(
            engine,
            protocol.Submit(
                request=_decode_id(body.request),
                prompt=body.prompt,
                sampling=body.sampling,
                deadline_s=body.deadline_s,
                receive=ticket,
                inlet=inlet,
                receive_tokens=body.receive_tokens if ticket is not None else 0,
            ),
        )
        transfer = ticket.transfer if ticket is not None else None
        self._decodes[body.request] = _Job(gateway, body.request, transfer, source)
        return messages.DecodeOpened(ticket=ticket)

    async def open_prefill(self, gateway: PeerId, role: Role, body: messages.PrefillOpen) -> messages.Opened:
        """Compute a prompt's KV and push it under the ticket."""
        self._engine_for(body.service)
        _refuse_known(body.request, self._prefills)
        decode = PeerId(body.decode)
        if decode == self._ways.own:
            raise RemoteError("invalid", "decode: this node prefills; name another one to decode")
        # Known from here on, so that it can be stopped while the link is being agreed on.
        job = self._prefills[body.request] = _Job(gateway, body.request, body.ticket.transfer, decode)
        try:
            outlet = await self._ways.outlet(decode, body.service, body.ticket, len(body.prompt))
            if self._prefills.get(body.request) is not job:
                raise RemoteError("stopped", "the request was stopped before its prefill had begun")
            self._submit(
                self._engine_for(body.service),
                protocol.Submit(
                    request=_prefill_id(body.request),
                    prompt=body.prompt,
                    sampling=PREFILL_SAMPLING,
                    deadline_s=body.deadline_s,
                    send=body.ticket,
                    outlet=outlet,
                ),
            )
        except BaseException as error:
            if self._prefills.get(body.request) is job:
                del self._prefills[body.request]
            if isinstance(error, NetworkError | TransferError) and not isinstance(error, RemoteError):
                raise RemoteError("no-path", f"no KV can be pushed to {decode}: {error}") from error
            raise
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

    def attach(self, link: bytes, hello: bytes, connection: socket.socket) -> None:
        """Hand an accepted connection of a KV link to the engine, if the link is one of ours; closes this process's
        copy."""
        with connection:
            if self._inlets.knows(link) and self._engine is not None and self._engine.running:
                try:
                    self._engine.attach(hello, connection)
                except EngineLost:
                    pass  # the sender sees its connection end and dials again

    def on_engine_message(self, message: protocol.FromEngine) -> None:
        """Pass on what the engine says."""
        match message:
            case protocol.Step(outputs=outputs, stats=stats):
                self.stats = stats
                for output in outputs:
                    self._on_tokens(output)
            case protocol.TransferReport():
                self._on_transfer(message)
            case protocol.LinkReport():
                self._ways.on_link_report(message)
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
                    mode=report.mode,
                    paths=report.paths,
                    resent_bytes=report.resent_bytes,
                    usd=self._ways.on_transfer(job.other, report) if job.other is not None else 0.0,
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


def _ticket(body: messages.DecodeOpen, link: bytes) -> TransferTicket:
    deadline_s = min(body.deadline_s / 2, MAX_TRANSFER_S)
    try:
        return issue_transfer(link, body.codec, deadline_s, secrets.token_bytes)
    except TicketError as error:
        raise RemoteError("invalid", str(error)) from error
