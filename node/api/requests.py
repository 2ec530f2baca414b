"""Requests of the API process at this node's own gateway: what it submits becomes a client's request, and what the
gateway tells that client goes back to it, many updates in one message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import trio

from ...bootstrap import PeerId, RemoteError, Role
from ..engine.api.protocol import ApiAnswers, ApiCancel, ApiOutcome, ApiRefused, ApiSubmit
from ..engine.protocol import EngineMessage, NewTokens, Sampling
from ..messages import AnswerUpdate, Generate, StopRequest
from ..requests.gateway import Gateway
from ..requests.local_clients import LocalClients, local_client
from .keys import KeyAccounts, KeyUsage, OverLimit

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
    asked: int  # tokens, at most
    cached_tokens: int = 0


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
        self._running: dict[tuple[PeerId, str], _Running] = {}
        self._clients: dict[str, PeerId] = {}  # by request
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
        client = local_client(submit.key)
        asked = len(submit.prompt) + submit.sampling.max_tokens
        now = trio.current_time()
        if submit.request in self._clients:
            self._refuse(submit.request, 400, "request: this id is in use")
            return
        try:
            self._accounts.begin(submit.key, submit.exchange, asked, now)
        except OverLimit as error:
            self._refuse(submit.request, 429, str(error), error.retry_after_s)
            return
        self._running[client, submit.request] = _Running(submit, client, asked)
        self._clients[submit.request] = client
        self._nursery.start_soon(self._accept, client, submit, name=f"api request {submit.request}")

    def cancel(self, cancel: ApiCancel) -> None:
        """Nobody waits for these any more."""
        for request in cancel.requests:
            if (client := self._clients.get(request)) is not None:
                self._gateway.stop(client, Role.CLIENT, StopRequest(request=request))

    def stop_all(self) -> None:
        """The API process is gone."""
        self.cancel(ApiCancel(requests=tuple(self._clients)))

    async def _accept(self, client: PeerId, submit: ApiSubmit) -> None:
        body = Generate(
            request=submit.request,
            prompt_token_ids=submit.prompt,
            deadline_s=submit.deadline_s,
            detokenize=False,
            **{field: getattr(submit.sampling, field) for field in _CARRIED},
        )
        try:
            await self._gateway.generate(client, Role.CLIENT, body)
        except RemoteError as error:
            self._end(client, submit.request, KeyUsage())
            retry_after_s = error.retry_after_s if error.code != "draining" else NOBODY_RETRY_S
            self._refuse(submit.request, STATUSES.get(error.code, 502), error.message, retry_after_s)

    def _on_stopped(self, client: PeerId, update: AnswerUpdate) -> None:
        if (client, update.request) in self._running:
            self._tell_outcome(client, update)

    def _on_update(self, client: PeerId, update: AnswerUpdate) -> None:
        running = self._running.get((client, update.request))
        if running is None:
            return
        running.cached_tokens = update.cached_tokens or running.cached_tokens
        if update.error:
            self._end(client, update.request, _usage(update))
            status = status_of_failure(update.error)
            self._refuse(update.request, status, update.error, NOBODY_RETRY_S if status == 503 else None)
            return
        self._outputs.append(
            NewTokens(
                request=update.request,
                tokens=update.tokens,
                finish=update.finish,
                cached_tokens=running.cached_tokens,
                logprobs=update.logprobs,
                prompt_logprobs=update.prompt_logprobs,
                stop_reason=update.stop_reason,
            )
        )
        self._news.set()
        if update.finish is not None:
            self._tell_outcome(client, update)

    def _tell_outcome(self, client: PeerId, update: AnswerUpdate) -> None:
        usage = _usage(update)
        self._outcomes.append(_outcome(update, usage))
        self._end(client, update.request, usage)
        self._news.set()

    def _end(self, client: PeerId, request: str, usage: KeyUsage) -> None:
        running = self._running.pop((client, request), None)
        self._clients.pop(request, None)
        if running is not None:
            submit = running.submit
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
        usd=getattr(figures, "usd", 0.0),
    )


def _outcome(update: AnswerUpdate, usage: KeyUsage) -> ApiOutcome:
    figures = update.figures
    return ApiOutcome(
        request=update.request,
        prefill_node=(figures.prefill_node or figures.decode_node) if figures is not None else "",
        decode_node=figures.decode_node if figures is not None else "",
        kv_bytes=usage.kv_bytes,
        usd=usage.usd,
        attempts=figures.attempts if figures is not None else 0,
    )
