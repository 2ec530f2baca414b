"""The asking end: an HTTP request, carried to a box that serves, and to another one where that is lost."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol, final

import trio

from ...bootstrap import NetworkError, PeerId, RemoteError, Role
from ...bootstrap.errors import ProtocolError
from ...bootstrap.network import Network
from ...coordinator.names import name_of
from .. import messages, methods
from ..requests.gateway_choice import GatewayCandidate, GatewayFinder
from .bodies import BodyInlet, BodyOutlet
from .messages import FIRST_BYTES, PIECE_BYTES, HttpAnswer, HttpHeader, HttpMore, HttpOpen

OPEN_TIMEOUT_S: Final = 65.0  # more than a box takes to start its API server
EXCHANGES: Final = 128  # at once; the others wait in turn
NOBODY_RETRY_S: Final = 5.0
ELSEWHERE: Final = frozenset({"draining", "busy", "no-engine", "internal", "unknown_method"})  # another box may do it
_OF_HTTP: Final = "http-"  # how the codes of refusals begin that say their status


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedRequest:
    """One request, whole. `service`: the model that it names, where it names one."""

    method: str
    target: str
    headers: tuple[HttpHeader, ...]
    body: bytes = b""
    service: str | None = None


class NotCarried(Exception):
    """No box answers this request: the status and the text for whoever asks, and when to ask again."""

    def __init__(self, status: int, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after_s = retry_after_s


class AnswerLost(Exception):
    """The rest of an answer that has begun will not come."""


class _BoxFailed(Exception):
    """This box does not answer; another one may."""


@final
class CarriedAnswer:
    """An answer whose head has come. `read` gives its body."""

    def __init__(self, box: PeerId, exchange: str, notify: Callable[[HttpMore], None]) -> None:
        self.box = box
        self.exchange = exchange
        self.status = 0
        self.reason = ""
        self.headers: tuple[HttpHeader, ...] = ()
        self.upload = BodyOutlet()
        self.opening = trio.CancelScope()  # the wait for the box to take it
        self.asked_at = trio.current_time()
        self.is_lost = False
        self._body = BodyInlet()
        self._notify = notify
        self._headed = trio.Event()
        self._failure = ""

    @property
    def failure(self) -> str:
        """Why it is lost."""
        return self._failure

    async def wait_head(self) -> None:
        """Until its status is known. Raises _BoxFailed."""
        await self._headed.wait()
        if not self.status:
            raise _BoxFailed(self._failure)

    async def read(self) -> bytes:
        """More of the body; none at its end. Raises AnswerLost."""
        data = await self._body.take()
        if granted := self._body.take_grant():
            try:
                self._notify(HttpMore(exchange=self.exchange, granted=granted))
            except NetworkError as error:
                raise AnswerLost(str(error)) from error
        return data

    @property
    def has_ended(self) -> bool:
        """Whether the box has said all of it."""
        return self._body.has_ended

    def on_answer(self, said: HttpAnswer) -> None:
        """News from the box. Raises ProtocolError for what there was no room for, or is out of turn."""
        self.upload.grant(said.granted)
        if said.status:
            if self.status or said.status < 200:
                raise ProtocolError(f"an answer of status {said.status} after one of {self.status}")
            self.status, self.reason, self.headers = said.status, said.reason, said.headers
            self._headed.set()
        if said.data or said.ended:
            if not self.status:
                raise ProtocolError("an answer's body came before its head")
            self._body.put(said.data, said.ended)
        if said.failed:
            self.lose(said.failed)

    def lose(self, reason: str, *, is_gone: bool = True) -> None:
        """No more will come, or no more is waited for of a box that may be there: it is told so."""
        self.is_lost = is_gone
        self._failure = self._failure or reason
        self.upload.end()
        self.opening.cancel()
        self._headed.set()
        self._body.fail(AnswerLost(reason))


class Boxes(Protocol):
    """Which boxes may be asked, best first."""

    def candidates(self) -> list[GatewayCandidate]: ...
    def rank(self, service: str | None) -> list[PeerId]: ...
    async def pick(self, usable: list[PeerId], service: str | None) -> PeerId: ...
    def describe_dead(self) -> str: ...


@final
class HttpAsking:
    """Carries requests over the sessions of a network. Constructed before the network is entered; `nursery` sends
    bodies."""

    def __init__(self, network: Network, nursery: trio.Nursery, boxes: Boxes | None = None) -> None:
        self._network = network
        self._nursery = nursery
        self._boxes: Boxes = boxes or GatewayFinder(network)
        self._answers: dict[str, CarriedAnswer] = {}
        self._hung: set[PeerId] = set()  # boxes that answer no pings
        self._turns = trio.CapacityLimiter(EXCHANGES)
        network.on_notice(methods.HTTP_ANSWER, self._on_answer)
        network.on_peer_lost(self._on_peer_lost)
        network.on_hung(self._on_hung)

    def __repr__(self) -> str:
        return f"<HttpAsking exchanges={len(self._answers)}>"

    @property
    def is_served(self) -> bool:
        """Whether a box of the network has an engine that is ready."""
        return any(
            candidate.advert is not None
            and not candidate.advert.draining
            and candidate.advert.engine is not None
            and candidate.advert.engine.state == "ready"
            for candidate in self._boxes.candidates()
        )

    @asynccontextmanager
    async def carry(self, request: CarriedRequest) -> AsyncIterator[CarriedAnswer]:
        """An answer whose head has come, of the first box that gives one. Leaving the body calls it off at the box
        unless it is whole. Raises NotCarried."""
        lost: dict[PeerId, str] = {}
        async with self._turns:
            while True:
                box = await self._pick(request, lost)
                answer = await self._ask(box, request, lost)
                if answer is None:
                    continue
                try:
                    try:
                        await answer.wait_head()
                    except _BoxFailed as error:
                        lost[box] = str(error)
                        continue
                    if answer.status == 503 and self._others(request, lost, box):
                        lost[box] = "it serves nobody now"
                        continue
                    yield answer
                    return
                finally:
                    self._end(answer)

    # ---- inside ---------------------------------------------------------------------------------------------

    def _rank(self, request: CarriedRequest) -> list[PeerId]:
        """By the model that it names where a box offers it under that name; others may know it by a name of theirs."""
        return self._boxes.rank(request.service) or self._boxes.rank(None)

    def _others(self, request: CarriedRequest, lost: dict[PeerId, str], box: PeerId) -> list[PeerId]:
        return [peer for peer in self._rank(request) if peer not in lost and peer != box]

    async def _pick(self, request: CarriedRequest, lost: dict[PeerId, str]) -> PeerId:
        usable = [peer for peer in self._rank(request) if peer not in lost]
        if not usable:
            reasons = "; ".join(f"{name_of(peer)}: {reason}" for peer, reason in lost.items())
            dead = self._boxes.describe_dead()
            known = f" ({dead})" if dead else ""
            nobody = f"no node of this network serves a model now{known}; start one with `p2pserve join`"
            raise NotCarried(503, f"{reasons}{known}" if reasons else nobody, NOBODY_RETRY_S)
        return await self._boxes.pick(usable, request.service)

    async def _ask(self, box: PeerId, request: CarriedRequest, lost: dict[PeerId, str]) -> CarriedAnswer | None:
        """Open an exchange; None, and a reason in `lost`, where another box may do better. Raises NotCarried."""
        exchange = secrets.token_hex(12)

        def tell(said: HttpMore) -> None:
            self._network.notify(box, methods.HTTP_MORE, said)

        answer = self._answers[exchange] = CarriedAnswer(box, exchange, tell)
        self._expect()
        opened = False
        body = request.body
        try:
            first = HttpOpen(
                exchange=exchange,
                method=request.method,
                target=request.target,
                headers=request.headers,
                data=body[:FIRST_BYTES],
                ended=len(body) <= FIRST_BYTES,
            )
            with answer.opening:
                await self._network.request(box, methods.HTTP_OPEN, first, OPEN_TIMEOUT_S)
                opened = True
            if not opened:
                lost[box] = answer.failure
                return None
        except RemoteError as error:
            if error.code not in ELSEWHERE:
                raise NotCarried(_status_of(error), error.message, error.retry_after_s) from error
            lost[box] = error.message
            return None
        except NetworkError as error:
            lost[box] = str(error)
            return None
        finally:
            if not opened:
                self._end(answer)
        if len(body) > FIRST_BYTES:
            self._nursery.start_soon(self._send_rest, answer, body[FIRST_BYTES:])
        return answer

    async def _send_rest(self, answer: CarriedAnswer, body: bytes) -> None:
        """What did not go with the request, as the box takes it."""
        for start in range(0, len(body), PIECE_BYTES):
            if not await answer.upload.reserve():
                return
            end = start + PIECE_BYTES
            more = HttpMore(exchange=answer.exchange, data=body[start:end], ended=end >= len(body))
            try:
                self._network.notify(answer.box, methods.HTTP_MORE, more)
            except NetworkError as error:
                answer.lose(str(error))
                return

    def _end(self, answer: CarriedAnswer) -> None:
        """Forget an exchange, and have the box do so unless it has said all."""
        if self._answers.pop(answer.exchange, None) is None:
            return
        self._expect()
        answer.upload.end()
        if not (answer.has_ended or answer.is_lost):
            try:
                self._network.notify(answer.box, methods.HTTP_STOP, messages.StopRequest(request=answer.exchange))
            except NetworkError:
                return  # it has lost us as well

    def _expect(self) -> None:
        self._network.expect("http", frozenset(answer.box for answer in self._answers.values()))

    def _on_answer(self, peer: PeerId, role: Role, said: HttpAnswer) -> None:
        answer = self._answers.get(said.exchange)
        if answer is not None and answer.box == peer:
            answer.on_answer(said)

    def _on_peer_lost(self, peer: PeerId) -> None:
        self._hung.discard(peer)
        for answer in self._answers.values():
            if answer.box == peer:
                answer.lose("the connection to it broke")

    def _on_hung(self, peer: PeerId, hung: bool) -> None:
        """A box answers no pings: what it has not begun to say, another one is asked for."""
        (self._hung.add if hung else self._hung.discard)(peer)
        for answer in self._answers.values() if hung else ():
            if answer.box == peer and not answer.status:
                self._nursery.start_soon(self._leave_hung, answer)

    async def _leave_hung(self, answer: CarriedAnswer) -> None:
        """After as long as it has taken so far, which another box would take, too: it may be back in a moment."""
        await trio.sleep(trio.current_time() - answer.asked_at)
        has_others = any(other != answer.box for other in self._boxes.rank(None))
        if answer.box in self._hung and not answer.status and has_others:
            answer.lose("it does not answer", is_gone=False)


def _status_of(error: RemoteError) -> int:
    status = error.code.removeprefix(_OF_HTTP)
    if status != error.code and status.isdecimal() and 400 <= int(status) <= 599:
        return int(status)
    return {"forbidden": 403, "invalid": 400}.get(error.code, 502)
