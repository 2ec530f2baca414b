"""Requests of the API process at this node's own gateway: what it submits becomes a client's request, and what the
gateway tells that client goes back to it, many updates in one message."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, final

import trio

from ...bootstrap import PeerId, RemoteError, Role
from ..engine.api.protocol import ApiAnswers, ApiCancel, ApiOutcome, ApiRefused, ApiSubmit
from ..engine.protocol import EngineMessage, NewTokens, Sampling
from ..messages import AnswerUpdate, Generate, StopRequest
from ..requests.gateway import Gateway
from ..requests.local_clients import LocalClients, local_client
from .accounts import KeyAccounts, KeyUsage, OverLimit

STATUSES: Final = {"busy": 429, "draining": 503, "invalid": 400, "stopped": 499, "forbidden": 403}
"""What HTTP calls the codes of a gateway's refusals."""
ENDINGS: Final = (("deadline: ", 504), ("the engine refuses the request: ", 400), ("no engine is left ", 503))
"""How a gateway says that an answer has failed, and what HTTP calls that; whatever else it is, an engine failed."""
ENGINE_FAILED: Final = 502
_CARRIED: Final = tuple(field for field in Sampling.__struct_fields__ if field in Generate.__struct_fields__)
NOBODY_RETRY_S: Final = 2.0


def status_of_failure(error: str) -> int:
    """What HTTP calls the end of an answer that failed."""
    return next((status for begin, status in ENDINGS if error.startswith(begin)), ENGINE_FAILED)


@dataclass(slots=True, eq=False)
class _Running:
    submit: ApiSubmit
    client: PeerId
    id: str  # of the gateway's: the API process's may be as long as its client likes
    asked: int  # tokens, at most


@final
class ApiRequests:
    """Those of one API process, until it is gone. `send` queues a message for it; `nursery` runs a task for each."""

    def __init__(
        self,
        gateway: Gateway,
        clients: LocalClients,
        accounts: KeyAccounts,
        send: Callable[[EngineMessage], None],
        nursery: trio.Nursery,
    ) -> None:
        self._gateway = gateway
        self._accounts = accounts
        self._send = send
        self._nursery = nursery
        self._running: dict[str, _Running] = {}  # by the gateway's id
        self._ids: dict[str, str] = {}  # by the API process's
        self._count = 0
        self._prefix = f"{secrets.token_hex(4)}-"  # what is left of an earlier process is not taken for its own
        self._outputs: list[NewTokens] = []
        self._outcomes: list[ApiOutcome] = []
        self._news = trio.Event()
        clients.open(self._on_update)
        gateway.on_stopped = self._on_stopped

    def __repr__(self) -> str:
        return f"<ApiRequests {len(self._running)}>"

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._running

    async def run(self) -> None:
        """Send what has come, as often as the event loop turns while it comes."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            self._flush()

    def submit(self, submit: ApiSubmit) -> None:
        """Give a request to the gateway, or say why not."""
        asked = len(submit.prompt) + submit.sampling.max_tokens
        if submit.request in self._ids:
            self._refuse(submit.request, 400, "request: this id is in use")
            return
        try:
            self._accounts.begin(submit.key, submit.exchange, asked, trio.current_time())
        except OverLimit as error:
            self._refuse(submit.request, 429, str(error), error.retry_after_s)
            return
        self._count += 1
        running = _Running(submit, local_client(submit.key), f"{self._prefix}{self._count:x}", asked)
        self._running[running.id], self._ids[submit.request] = running, running.id
        self._nursery.start_soon(self._accept, running, name=f"api request {submit.request}")

    def cancel(self, cancel: ApiCancel) -> None:
        """Nobody waits for these any more."""
        for request in cancel.requests:
            running = self._running.get(self._ids.get(request, ""))
            if running is not None:
                self._gateway.stop(running.client, Role.CLIENT, StopRequest(request=running.id))

    def stop_all(self) -> None:
        """The API process is gone."""
        self.cancel(ApiCancel(requests=tuple(self._ids)))

    async def _accept(self, running: _Running) -> None:
        submit = running.submit
        body = Generate(
            request=running.id,
            prompt_token_ids=submit.prompt,
            deadline_s=submit.deadline_s,
            detokenize=False,
            priority=submit.priority,
            # as long as its client likes there
            cache_salt=sha256(submit.cache_salt.encode()).hexdigest() if submit.cache_salt else "",
            **{field: getattr(submit.sampling, field) for field in _CARRIED},
        )
        try:
            await self._gateway.generate(running.client, Role.CLIENT, body)
        except RemoteError as error:
            self._end(running, KeyUsage())
            retry_after_s = error.retry_after_s if error.code != "draining" else NOBODY_RETRY_S
            self._refuse(submit.request, STATUSES.get(error.code, ENGINE_FAILED), error.message, retry_after_s)

    def _on_stopped(self, client: PeerId, update: AnswerUpdate) -> None:
        if (running := self._running.get(update.request)) is not None and running.client == client:
            self._tell_outcome(running, update)

    def _on_update(self, client: PeerId, update: AnswerUpdate) -> None:
        running = self._running.get(update.request)
        if running is None or running.client != client:
            return
        if update.error:
            self._end(running, _usage(update))
            status = status_of_failure(update.error)
            retry_after_s = NOBODY_RETRY_S if status == 503 else None
            self._refuse(running.submit.request, status, update.error, retry_after_s)
            return
        self._outputs.append(
            NewTokens(
                request=running.submit.request,
                tokens=update.tokens,
                finish=update.finish,
                cached_tokens=update.cached_tokens,
                logprobs=update.logprobs,
                prompt_logprobs=update.prompt_logprobs,
                stop_reason=update.stop_reason,
            )
        )
        self._news.set()
        if update.finish is not None:
            self._tell_outcome(running, update)

    def _tell_outcome(self, running: _Running, update: AnswerUpdate) -> None:
        usage = _usage(update)
        self._outcomes.append(_outcome(running.submit.request, update, usage))
        self._end(running, usage)
        self._news.set()

    def _end(self, running: _Running, usage: KeyUsage) -> None:
        submit = running.submit
        del self._running[running.id], self._ids[submit.request]
        self._accounts.end(submit.key, submit.exchange, running.asked, usage, trio.current_time())

    def _refuse(self, request: str, status: int, reason: str, retry_after_s: float | None = None) -> None:
        self._flush()  # what it was told before comes first
        self._send(ApiRefused(request=request, status=status, reason=reason[:4096], retry_after_s=retry_after_s))

    def _flush(self) -> None:
        if self._outputs or self._outcomes:
            self._send(ApiAnswers(outputs=tuple(self._outputs), served=tuple(self._outcomes)))
            self._outputs, self._outcomes = [], []


def _usage(update: AnswerUpdate) -> KeyUsage:
    figures = update.figures
    if figures is None:
        return KeyUsage()
    wire_bytes = figures.transfer.wire_bytes if figures.transfer is not None else 0
    return KeyUsage(
        prompt_tokens=figures.prompt_tokens,
        completion_tokens=figures.completion_tokens,
        kv_bytes=wire_bytes,
        usd=figures.usd,
    )


def _outcome(request: str, update: AnswerUpdate, usage: KeyUsage) -> ApiOutcome:
    figures = update.figures
    return ApiOutcome(
        request=request,
        prefill_node=(figures.prefill_node or figures.decode_node) if figures is not None else "",
        decode_node=figures.decode_node if figures is not None else "",
        kv_bytes=usage.kv_bytes,
        usd=usage.usd,
        attempts=figures.attempts if figures is not None else 0,
    )
