"""What a node does with its engine for others: decode requests, prefill requests, and their KV transfers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterable
from typing import final

import msgspec

from ...bootstrap import NetworkError, NetworkSettings, PeerId, PeerLost, RemoteError, Role
from ...bootstrap.methods import Body, Messenger, Notice
from ...kvtransport.errors import TransferError
from ...kvtransport.wire.channel import parse_link_hello
from ...kvtransport.wire.dial_path import DialPath
from .. import messages, methods
from ..engine import protocol
from ..engine.agent_side.engine_link import EngineHandle, EngineLost
from ..learning import Learner
from ..observing.event_log import Record, ignore
from ..observing.values import EventKind, Served
from ..prefixes.telling import PrefixDesk
from ..settings import WAN, NodeTuning
from .hung import ReplicaWatch
from .jobs import Job, JobLog, decode_id, first_token_of, prefill_id, refuse_known, refuse_senseless, tokens_of
from .kv_transfers import KvTransfers, TransferEnd
from .place import Place
from .slot_desk import SlotDesk

UNREAD_SAMPLING = protocol.Sampling(max_tokens=1)  # of a part of a prompt: vLLM must sample something


@final
class Worker:
    """The engine's side of requests, called from the event loop. `transfers` agrees with other
    boxes how KV passes; `record` tells the node's log."""

    def __init__(
        self,
        *,
        service: str,
        transfers: KvTransfers,
        messenger: Messenger,
        tuning: NodeTuning = WAN,
        record: Record = ignore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._transfers = transfers
        self._messenger = messenger
        self._engine: EngineHandle | None = None
        self._pipes: dict[bytes, EngineHandle] = {}  # the engine of each link to another stage
        self._decodes: dict[str, Job] = {}
        self._prefills: dict[str, Job] = {}
        self._watch = ReplicaWatch(messenger.peer_id, NetworkSettings())
        self._accepting, self._migrates = True, False
        self.is_moving = False
        """Whether the box is about to take another part of the plan: it finishes what is running, and refuses what is
        new, in a way that lets others take it."""
        self._step_tokens = 0
        self._log = JobLog(record, clock)
        self.stats: protocol.EngineStats | None = None
        self.learner = Learner(tuning.profile_interval_s)
        self.slots = SlotDesk()
        self._prefixes = PrefixDesk(service)
        self.on_request: Callable[[], None] = lambda: None
        """Hears that there is one more in the engine."""
        messenger.handle(methods.DECODE_OPEN, self.open_decode)
        messenger.handle(methods.PREFILL_OPEN, self.open_prefill)
        messenger.handle(methods.PREFIXES, self._prefixes.answer)
        messenger.on_notice(methods.REQUEST_STOP, self.stop_request)
        messenger.on_notice(methods.TRANSFER_STOP, self.stop_transfer)
        messenger.on_notice(methods.DECODE_FIRST, self.first_token)
        messenger.on_notice(methods.STAGE_TRANSFER, self.stage_transfer)
        messenger.on_notice(methods.STAGE_ABORT, self.stage_abort)
        messenger.on_notice(methods.STAGE_HUNG, self.stage_hung)

    def __repr__(self) -> str:
        return f"<Worker {self._service} decoding={len(self._decodes)} prefilling={len(self._prefills)}>"

    @property
    def idle(self) -> bool:
        """Whether no request is in the engine."""
        return not self._decodes and not self._prefills

    @property
    def jobs(self) -> tuple[Collection[Job], Collection[Job]]:
        """Requests that are decoded here, and those that are prefilled for other replicas."""
        return self._decodes.values(), self._prefills.values()

    @property
    def is_hung(self) -> bool:
        """Whether the engine does not get on with the work that it has."""
        return self._watch.is_engine_hung

    @property
    def served(self) -> Served:
        """What it has done since this node was started."""
        return self._log.served

    @property
    def _present(self) -> int:
        return len(self._decodes) + len(self._prefills)

    def add_pipes(self, engine: EngineHandle, links: Iterable[bytes]) -> None:
        """This engine, which need not be in use yet, gets the connections of these links to other stages."""
        self._pipes |= dict.fromkeys(links, engine)

    def drop_pipes(self, engine: EngineHandle) -> None:
        self._pipes = {link: each for link, each in self._pipes.items() if each is not engine}

    def use(self, engine: EngineHandle, place: Place) -> None:
        """Send work to this engine from now on."""
        self._engine, self._migrates = engine, False
        self._transfers.use(place, engine.ready.dtype if engine.ready is not None else "")
        self._prefixes.use(engine.ready)
        self._watch.forget()
        self._tell_hung()
        if self._step_tokens:
            self._send(protocol.LimitSteps(tokens=self._step_tokens))

    def limit_steps(self, tokens: int) -> None:
        """A step of this engine, and of those that follow it, computes so many tokens at most (0: as they start)."""
        if tokens != self._step_tokens:
            self._step_tokens = tokens
            self._send(protocol.LimitSteps(tokens=tokens))

    def drain(self) -> None:
        """Finish what is running, refuse what is new."""
        self._accepting, self._migrates = False, False

    def resume(self) -> None:
        """Take what is new again."""
        self._accepting, self._migrates = True, False

    def migrate(self) -> None:
        """Tell gateways that what runs here is to go on elsewhere, with its KV: that alone is still sent from here."""
        self._migrates = True
        for job in list(self._decodes.values()):
            leaving = messages.Tokens(request=job.request, leaves=True, busy_s=self._log.busy_s(job))
            self._tell(job.gateway, methods.TOKENS, leaving)

    def count_requests_of_others(self) -> int:
        """How many requests are in the engine whose gateways are other nodes."""
        return len({job.request for jobs in self.jobs for job in jobs if job.gateway != self._messenger.peer_id})

    def engine_lost(self, how: str) -> None:
        """The engine process is gone: tell every gateway, so that its requests go on elsewhere."""
        self._engine = None
        self.stats = None
        self._prefixes.use(None)
        self._watch.forget()
        self._tell_hung()
        self._transfers.engine_lost()
        decodes, self._decodes = self._decodes, {}
        prefills, self._prefills = self._prefills, {}
        self.slots.clear()
        failed = f"the engine process {how}"
        for job in decodes.values():
            self._log.note_end(EventKind.DECODE_ENDED, job, failed=failed)
            body = messages.Tokens(request=job.request, failed=failed, busy_s=self._log.busy_s(job))
            self._tell(job.gateway, methods.TOKENS, body)
        for job in prefills.values():
            self._log.note_end(EventKind.PREFILL_ENDED, job, failed=failed)
            ended = messages.PrefillEnded(request=job.request, failed=failed, busy_s=self._log.busy_s(job))
            self._tell(job.gateway, methods.PREFILL_ENDED, ended)

    def peer_lost(self, peer: PeerId) -> None:
        """Nobody waits for these requests any more, and no KV goes to or comes from there."""
        for request in [request for request, job in self._decodes.items() if job.gateway == peer]:
            self._cancel_decode(request)
        for request in [request for request, job in self._prefills.items() if job.gateway == peer]:
            self._cancel_prefill(request)
        for link in self._transfers.peer_lost(peer):
            self._send(protocol.CloseLink(link=link, reason="the node at the other end is gone"))

    @property
    def awaited(self) -> tuple[PeerId, ...]:
        """The other boxes of this replica, while they work for a request."""
        place = self._transfers.place
        return place.others if place is not None and place.is_head and not self.idle else ()

    def peer_hung(self, peer: PeerId, hung: bool) -> None:
        """A box that is awaited does not answer, or does again."""
        place = self._transfers.place
        if hung and (place is None or not place.is_head or peer not in place.others):
            return
        self._watch.note(peer, hung)
        self._tell_hung()

    def stage_hung(self, stage: PeerId, role: Role, body: messages.ReplicaHung) -> None:
        """A stage of this replica says that it does not get on, or does again."""
        self.peer_hung(stage, body.hung)

    def look_at_engine(self, now: float) -> float:
        """See whether the engine gets on, where that is waited for; returns when to look again at the latest."""
        place, engine = self._transfers.place, self._engine
        is_used = place is not None and engine is not None and engine.running
        if self._watch.look(now, has_work=is_used and place is not None and not (place.is_head and self.idle)):
            self._send(protocol.AskBeat())
        self._tell_hung()
        return self._watch.wake_at

    def _tell_hung(self) -> None:
        """Whoever waits for this replica hears whether it gets on: gateways, and of a stage its head."""
        place = self._transfers.place
        is_stage = place is not None and not place.is_head
        gateways = {job.gateway for jobs in self.jobs for job in jobs}
        listeners = {place.head} if place is not None and is_stage else gateways
        for peer, hung in self._watch.take_news(listeners):
            notice = methods.STAGE_HUNG if is_stage else methods.REPLICA_HUNG
            self._tell(peer, notice, messages.ReplicaHung(hung=hung))

    def set_paths(self, link: bytes, paths: tuple[DialPath, ...]) -> None:
        """Take other paths for what the engine sends over a link."""
        self._send(protocol.SetLinkPaths(link=link, paths=paths))

    async def open_decode(self, gateway: PeerId, role: Role, body: messages.DecodeOpen) -> messages.DecodeOpened:
        """Queue a request; with `receive_tokens`, first make tickets for its KV."""
        self._engine_for(body.service)
        refuse_known(body.request, self._decodes)
        refuse_senseless(body)
        # Known from here on, so that it can be stopped while the other stages are being asked.
        job = self._decodes[body.request] = self._log.begin(gateway, body.request, self._present)
        job.unread = len(body.prompt) - body.receive_tokens
        self.slots.claims.leave((gateway, body.request))
        self.on_request()
        receives = body.receive_tokens or None
        prefill = body.prefill[0].peer if body.prefill else None
        self._log.note(
            EventKind.DECODE_BEGUN, job, prompt_tokens=len(body.prompt), receive_tokens=receives, prefill=prefill
        )
        self._tell_hung()
        inlets: tuple[protocol.Inlet, ...] = ()
        slices: tuple[messages.TicketedSlice, ...] = ()
        try:
            if body.receive_tokens and body.prefill:
                inlets, slices = await self._transfers.receive(body)
                job.transfer = slices[0].ticket.transfer
            self._submit(
                job,
                self._decodes,
                protocol.Submit(
                    request=decode_id(body.request),
                    prompt=body.prompt,
                    sampling=body.sampling,
                    deadline_s=body.deadline_s,
                    receive=inlets,
                    receive_tokens=body.receive_tokens if inlets else 0,
                    awaits_first_token=body.awaits_first_token and bool(inlets),
                    cache_salt=body.cache_salt,
                ),
            )
        except BaseException as error:
            if self._decodes.get(body.request) is job:
                del self._decodes[body.request]
                self._log.note(EventKind.DECODE_ENDED, job, failed=str(error) or type(error).__name__)
            if isinstance(error, NetworkError) and not isinstance(error, RemoteError):
                raise RemoteError("no-stage", f"a stage of this replica does not answer: {error}") from error
            raise
        return messages.DecodeOpened(slices=slices)

    async def open_prefill(self, gateway: PeerId, role: Role, body: messages.PrefillOpen) -> messages.Opened:
        """Compute a prompt's KV and push it where the slices say; tell the gateway the first token if it is wanted."""
        self._engine_for(body.service, sends_kv=True)
        refuse_known(body.request, self._prefills)
        transfer = body.slices[0].ticket.transfer
        job = self._prefills[body.request] = self._log.begin(gateway, body.request, self._present)
        self.slots.enter((gateway, body.request))
        self.on_request()
        job.transfer, job.unread, job.wants_first_token = transfer, len(body.prompt), body.sampling is not None
        decode = body.slices[0].rank_slice.target_peer
        self._log.note(EventKind.PREFILL_BEGUN, job, prompt_tokens=len(body.prompt), decode=decode)
        self._tell_hung()
        try:
            outlets = await self._transfers.send(body.slices, len(body.prompt))
            self._submit(
                job,
                self._prefills,
                protocol.Submit(
                    request=prefill_id(body.request),
                    prompt=body.prompt,
                    sampling=first_token_of(body.sampling) if body.sampling is not None else UNREAD_SAMPLING,
                    deadline_s=body.deadline_s,
                    send=outlets,
                    cache_salt=body.cache_salt,
                ),
            )
        except BaseException as error:
            self._transfers.abort(transfer, "the prefill did not begin")
            self.slots.leave((gateway, body.request))
            if self._prefills.get(body.request) is job:
                del self._prefills[body.request]
                self._log.note(EventKind.PREFILL_ENDED, job, failed=str(error) or type(error).__name__)
            if isinstance(error, NetworkError | TransferError) and not isinstance(error, RemoteError):
                raise RemoteError("no-path", f"no KV can be pushed to {decode}: {error}") from error
            raise
        return messages.Opened()

    def first_token(self, gateway: PeerId, role: Role, body: messages.FirstToken) -> None:
        """The answer to this request has begun at its prefill node."""
        job = self._decodes.get(body.request)
        if job is not None and job.gateway == gateway and job.transfer is not None:
            told = protocol.SetFirstToken(request=decode_id(body.request), token=body.token)
            self._send(told)

    def stop_request(self, gateway: PeerId, role: Role, body: messages.StopRequest) -> None:
        """Forget a request of this gateway's."""
        decode, prefill = self._decodes.get(body.request), self._prefills.get(body.request)
        if decode is not None and decode.gateway == gateway:
            self._cancel_decode(body.request)
        if prefill is not None and prefill.gateway == gateway:
            self._cancel_prefill(body.request)
        self.slots.leave((gateway, body.request))

    def stop_transfer(self, gateway: PeerId, role: Role, body: messages.StopTransfer) -> None:
        """No KV will come for this request: its engine computes the prompt."""
        job = self._decodes.get(body.request)
        if job is not None and job.gateway == gateway and job.transfer is not None:
            self._abort(job.transfer, body.reason)

    def stage_abort(self, head: PeerId, role: Role, body: messages.StageAbort) -> None:
        """The head of this replica calls a transfer off."""
        if self._transfers.is_head(head):
            self._transfers.forget(body.transfer)
            self._send(protocol.AbortTransfer(transfer=body.transfer, reason=body.reason))

    def stage_transfer(self, stage: PeerId, role: Role, body: messages.StageTransfer) -> None:
        """A stage of this replica says how its part of a transfer ended."""
        self._on_ended(self._transfers.on_stage_transfer(stage, body))

    def attach(self, hello: bytes, connection: socket.socket) -> bool:
        """Give an accepted connection of a KV link or a pipe to the engine, if it is one of ours; closes this process's
        copy. Raises TransferError for a hello that is none."""
        link = parse_link_hello(hello).link
        with connection:
            engine = self._pipes.get(link) or (self._engine if self._transfers.knows(link) else None)
            if engine is not None and engine.running:
                try:
                    engine.attach(hello, connection)
                except EngineLost:
                    pass  # the sender sees its connection end and dials again
        return True

    def on_engine_message(self, message: protocol.FromEngine) -> None:
        """Pass on what the engine says."""
        self._watch.on_engine_message()
        match message:
            case protocol.Step(outputs=outputs, stats=stats, iterations=iterations):
                self.stats = stats
                self._log.advance(self._present)
                if iterations is not None:
                    self.learner.add(iterations)
                    self._log.note_steps(iterations)
                for output in outputs:
                    self._on_tokens(output)
            case protocol.HeldBlocks():
                self._prefixes.note(message)
            case protocol.TransferReport():
                self._on_ended(self._transfers.on_report(message))
            case protocol.LinkReport():
                self._transfers.on_link_report(message)
            case protocol.EngineReady() | protocol.StartFailed() | protocol.Beat():
                pass  # the link has dealt with these

    def _on_tokens(self, output: protocol.NewTokens) -> None:
        kind, _, request = output.request.partition(":")
        if kind == "prefill":
            self._on_prefilled(request, output)
            return
        job = self._decodes.get(request)
        if job is None:
            return
        if output.tokens and not job.tokens:
            self._log.note(EventKind.DECODE_FIRST_TOKEN, job, cached_tokens=output.cached_tokens)
            if job.transfer is None:  # else they are those whose KV has come
                self._log.note_cached(output.cached_tokens)
        job.tokens += len(output.tokens)
        if output.finish is not None:
            del self._decodes[request]
            self._log.note_end(EventKind.DECODE_ENDED, job, finish=output.finish, failed=output.reason or None)
        if not self._tell(job.gateway, methods.TOKENS, tokens_of(request, output, self._log.busy_s(job))):
            self._cancel_decode(request)  # an answer with a gap would be worse than none

    def _on_prefilled(self, request: str, output: protocol.NewTokens) -> None:
        """A prompt has been read, or never will be. Its KV may still be on its way: the transfer's own report ends the
        job then."""
        job = self._prefills.get(request)
        if job is not None and output.tokens and not job.tokens:
            job.tokens = len(output.tokens)
            self.slots.leave((job.gateway, request))  # what is left is the transfer of its KV
            self._log.note(EventKind.PREFILL_DONE, job)
            self._log.note_cached(output.cached_tokens)
        if output.finish in ("deadline", "error", "refused"):
            self._end_prefill(request, f"prefill ended with {output.finish}", None)
        elif job is not None and job.wants_first_token and output.tokens:
            job.wants_first_token = False
            # It ends by its length here: of the answer, the gateway knows that.
            finish = "stop" if output.finish == "stop" else None
            first = messages.Tokens(
                request=request,
                tokens=output.tokens,
                finish=finish,
                logprobs=output.logprobs,
                stop_reason=output.stop_reason,
                busy_s=self._log.busy_s(job),
            )
            if not self._tell(job.gateway, methods.TOKENS, first):
                self._cancel_prefill(request)
            elif job.figures is not None:
                self._end_prefill(request, "", job.figures)

    def _on_ended(self, ended: TransferEnd | None) -> None:
        if ended is None:
            return
        found = next((request for request, job in self._prefills.items() if job.transfer == ended.transfer), None)
        if found is not None:
            self._log.note_transfer(self._prefills[found], ended)
            figures = msgspec.structs.replace(ended.figures, layers=())  # of use to nobody but the log
            if not ended.failed and self._prefills[found].wants_first_token:
                self._prefills[found].figures = figures  # all layers are there before the token is
                return
            self._end_prefill(found, ended.failed, figures)
            # It may go on all the same: because its KV failed, or is not needed.
            self._send(protocol.Cancel(request=prefill_id(found)))
            if ended.failed:
                self._send(protocol.AbortTransfer(transfer=ended.transfer, reason=ended.failed))

    def _end_prefill(self, request: str, failed: str, figures: messages.TransferFigures | None) -> None:
        job = self._prefills.pop(request, None)
        if job is not None:
            self.slots.leave((job.gateway, request))
            if failed and job.transfer is not None:
                self._transfers.abort(job.transfer, failed)
            self._log.note_end(EventKind.PREFILL_ENDED, job, failed=failed or None)
            busy_s = self._log.busy_s(job)
            ended = messages.PrefillEnded(request=request, failed=failed, figures=figures, busy_s=busy_s)
            self._tell(job.gateway, methods.PREFILL_ENDED, ended)

    def _tell(self, gateway: PeerId, notice: Notice[Body], message: Body) -> bool:
        try:
            self._messenger.notify(gateway, notice, message)
        except PeerLost:
            return False
        return True

    def describe_engine(self, service: str) -> protocol.EngineReady:
        """Of the engine that takes requests here, its steps as they are limited now. Raises RemoteError for none."""
        ready = self._engine_for(service).ready
        if ready is None:
            raise RemoteError("no-engine", "the engine process of this node is not ready")
        least = min(filter(None, (ready.step_tokens, self._step_tokens)), default=0)
        return msgspec.structs.replace(ready, step_tokens=least)

    def _engine_for(self, service: str, *, sends_kv: bool = False) -> EngineHandle:
        if service != self._service:
            raise RemoteError("wrong-service", f"this node serves {self._service}, not {service}")
        is_migrating = sends_kv and self._migrates
        if not (self._accepting or is_migrating):
            raise RemoteError("draining", "this node is draining and takes no new requests")
        if self.is_moving and not is_migrating:
            raise RemoteError("draining", "this node is about to take another part of the plan")
        place = self._transfers.place
        if self._engine is None or not self._engine.running or place is None:
            raise RemoteError("no-engine", "the engine process of this node is not running")
        if not place.is_head:
            raise RemoteError("not-head", f"this node is a stage of a replica whose requests {place.head} takes")
        return self._engine

    def _submit(self, job: Job, jobs: dict[str, Job], submit: protocol.Submit) -> None:
        if jobs.get(job.request) is not job:
            raise RemoteError("stopped", "the request was stopped before it had begun")
        try:
            self._engine_for(self._service, sends_kv=bool(submit.send)).send(submit)
        except EngineLost as error:
            raise RemoteError("no-engine", str(error)) from error

    def _cancel_decode(self, request: str) -> None:
        decode = self._decodes.pop(request, None)
        if decode is not None:
            self._log.note_end(EventKind.DECODE_ENDED, decode, finish="cancelled")
            self._send(protocol.Cancel(request=decode_id(request)))

    def _cancel_prefill(self, request: str) -> None:
        prefill = self._prefills.pop(request, None)
        if prefill is not None and prefill.transfer is not None:
            self.slots.leave((prefill.gateway, request))
            self._log.note_end(EventKind.PREFILL_ENDED, prefill, failed="cancelled")
            self._send(protocol.Cancel(request=prefill_id(request)))
            # The prompt may be done while its KV is still being sent.
            self._abort(prefill.transfer, "the request was cancelled")

    def _abort(self, transfer: bytes, reason: str) -> None:
        self._send(protocol.AbortTransfer(transfer=transfer, reason=reason))
        self._transfers.abort(transfer, reason)

    def _send(self, message: protocol.EngineMessage) -> None:
        if self._engine is not None and self._engine.running:
            self._engine.send(message)
