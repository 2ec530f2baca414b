"""A client in the network, in trio: finds gateways, carries requests to them, and goes on when one is lost."""

from __future__ import annotations

import math
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import final

import msgspec
import trio

from ..bootstrap import (
    Address,
    AddressError,
    Identity,
    JoinToken,
    NetworkError,
    NetworkSettings,
    PeerId,
    Refused,
    RemoteError,
    Role,
    TokenError,
    parse_join_target,
)
from ..bootstrap.address_book import AddressBook
from ..bootstrap.methods import Answer, Body, Method
from ..bootstrap.network import Network
from ..bootstrap.streams.transport import Transport
from ..coordinator.names import name_of
from ..node.links.reach import lead_client_around
from ..node.messages import (
    MAX_CONTINUED_TOKENS,
    AnswerUpdate,
    ContinueGenerate,
    Generate,
    Generating,
    Status,
    StatusQuery,
    StopRequest,
)
from ..node.methods import ANSWER, GENERATE, GENERATE_CONTINUE, GENERATE_STOP, STATUS
from ..node.observing.ages import describe_age
from ..node.requests.gateway_choice import STATUS_TIMEOUT_S, GatewayCandidate, GatewayFinder
from . import environment
from .errors import (
    AccessRefused,
    Busy,
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidAddress,
    InvalidRequest,
    NotReady,
    RequestFailed,
    first_of,
)
from .requests import (
    Diverged,
    GatewayBroken,
    GatewayLeaves,
    GatewayLost,
    GatewayRefuses,
    GatewayUnreachable,
    GatewayWaitLimits,
    Generation,
    Replay,
    TextDelta,
    add_attempts,
    check_service,
    describe_unserved,
    finish_answer,
    new_request_id,
)

ACCEPT_TIMEOUT_S = 15.0  # a gateway accepts or refuses at once; tokenising a very long prompt takes seconds
DEADLINE_GRACE_S = 2.0  # the gateway says more about a missed deadline than the client can
LEAVE_S = 2.0
OPENINGS = 64  # requests that wait to be accepted at once; gateways accept them in turn, and refuse too many of them
LOOK_S = 1.0  # between two looks for another gateway than one that is silent
HUNG_RETRY_S = 5.0  # a gateway that did not answer is asked again after so long, where no other is left
BROKEN_RETRY_S = 2.0  # one whose connection broke; sooner: it is still taken for alive, and the try is wasted
RETURN_S = 10.0  # after a gateway was lost, others may come back; longer: more answers go on, and errors come later
LEAVING = frozenset({"draining", "no-engine"})
ELSEWHERE = frozenset({"draining", "busy", "no-engine", "internal", "unknown_method"})  # another node may do better


def check_target(bootstrap: str, token: str | None) -> None:
    """Check what can be checked of a bootstrap address and a token without asking anybody. Raises InvalidAddress."""
    try:
        parse_join_target(bootstrap, token)
    except (AddressError, TokenError) as error:
        raise connection_error(error) from error


def client_folder() -> Path:
    """Where clients of this user remember the members they have seen."""
    named = os.environ.get(environment.HOME)
    return (Path(named).expanduser() if named else environment.find_home()) / "client"


@asynccontextmanager
async def open_session(bootstrap: str, token: str | None, timeout_s: float) -> AsyncIterator[Session]:
    """Join as a client for the length of the body. Raises ConnectionFailed or InvalidAddress."""
    async with enter(await find_network(bootstrap, token, timeout_s), timeout_s) as session:
        yield session


async def find_network(
    bootstrap: str,
    token: str | None,
    timeout_s: float,
    *,
    listening: tuple[Callable[[Identity], Transport], Address] | None = None,
    may_visit: bool = False,
) -> Network:
    """The network that a client's token is for, not entered yet. Raises ConnectionFailed or InvalidAddress. A client
    only dials; one that is `listening`, over another transport, announces that address. `may_visit`: with a worker's
    token, too, to look around."""
    # Neither is needed before there is a network to join.
    from ..bootstrap.join_targets import read_join_target
    from ..bootstrap.streams.dialling import DiallingTransport

    identity = Identity.generate()
    nowhere = Address("0.0.0.0", 0)  # clients are not dialled
    try:
        text, members = await read_join_target(bootstrap, token)
        parsed = JoinToken.parse(text)
        if parsed.role is Role.WORKER and not may_visit:
            raise TokenError(
                f"this is a {parsed.role.value}'s token; use the client line that `p2pserve bootstrap` printed"
            )
        book = AddressBook(client_folder(), parsed.network)
        transport = DiallingTransport(identity, nowhere) if listening is None else listening[0](identity)
        network = Network(
            transport=transport,
            identity=identity,
            token=text,
            network_key_public=parsed.network,
            role=Role.CLIENT,  # an admin's, too: it is not a member that others dial
            announce=nowhere if listening is None else listening[1],
            bootstraps=members,
            remembered=await trio.to_thread.run_sync(book.load),
            book=book,
            rng=random.Random(),  # chooses gossip partners, makes no secrets
            settings=NetworkSettings(join_s=timeout_s),
        )
        lead_client_around(network)
        return network
    except NetworkError as error:
        raise connection_error(error) from error


@asynccontextmanager
async def enter(network: Network, timeout_s: float) -> AsyncIterator[Session]:
    """A session in a network that has not been entered yet; says goodbye at the end. Raises ConnectionFailed."""
    session = Session(network, timeout_s)
    async with enter_network(network):
        yield session


@asynccontextmanager
async def enter_network(network: Network) -> AsyncIterator[None]:
    """Be in it for the length of the body, and say goodbye at the end. Raises ConnectionFailed or InvalidAddress."""
    try:
        async with network:
            try:
                yield
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(LEAVE_S):
                    await network.leave()
    except (NetworkError, ExceptionGroup) as error:
        found = first_of(error, (NetworkError,))
        if found is None:
            raise
        raise connection_error(found) from error


def connection_error(error: NetworkError) -> ClientError:
    """What a client is told about a failure to join."""
    if isinstance(error, AddressError | TokenError):
        return InvalidAddress(str(error))
    return (AccessRefused if isinstance(error, Refused) else ConnectionFailed)(str(error))


@final
@dataclass(frozen=True, slots=True)
class _Loss:
    """Why a gateway is not asked, and from when on it is again; infinite: never. `answered`: it said so itself."""

    reason: str
    retry_at: float
    at: float
    answered: bool


class _News(Enum):
    """What is no update."""

    LOST = "the gateway is gone"
    LOOK = "the limits have changed"


@final
class _Inbox:
    """Of one attempt at a request. `opening` is the wait for its acceptance, and cancelled when the gateway hangs;
    `others` are those that could be asked instead."""

    def __init__(self, gateway: PeerId, others: Callable[[], list[PeerId]]) -> None:
        self.gateway = gateway
        self.opening = trio.CancelScope()
        self._others = others
        self._limits: GatewayWaitLimits | None = None
        self._send, self._receive = trio.open_memory_channel[AnswerUpdate | _News](float("inf"))

    def __repr__(self) -> str:
        return f"<_Inbox {self.gateway} {self._limits}>"

    def accept(self, limits: GatewayWaitLimits) -> None:
        """The gateway has taken the request, and is waited for by these from now on."""
        self._limits = limits

    def put(self, update: AnswerUpdate) -> None:
        """It has said this."""
        self._send.send_nowait(update)

    def lose(self) -> None:
        """The connection to it is gone."""
        self._send.send_nowait(_News.LOST)

    def on_hung(self, hung: bool, now: float) -> None:
        """It does not answer, or does again."""
        if self._limits is not None:
            self._limits.note_hung(hung, now)
            self._send.send_nowait(_News.LOOK)
        elif hung and self._others():
            self.opening.cancel()

    async def next(self) -> AnswerUpdate | None:
        """What it says next; None: the connection to it is gone. Raises GatewayLost after too long a silence."""
        assert self._limits is not None, "it was accepted"
        look_at = self._limits.give_up_at
        while True:
            said: AnswerUpdate | _News = _News.LOOK
            with trio.move_on_at(look_at):
                said = await self._receive.receive()
            if said is _News.LOOK and self._receive.statistics().current_buffer_used:
                said = self._receive.receive_nowait()  # it has come while this process had no time
            now = trio.current_time()
            match said:
                case AnswerUpdate():
                    self._limits.note(said, now)
                    return said
                case _News.LOST:
                    return None
            look_at = self._limits.give_up_at
            if now >= look_at:
                if self._others():
                    raise GatewayLost(self._limits.explain(now), HUNG_RETRY_S)
                look_at = now + LOOK_S


@final
class Session:
    """Requests of one client. All methods run in the network's thread.

    Args:
        network: not entered yet, since its handlers are registered here.
        timeout_s: how long to look for a node that serves.
    """

    def __init__(self, network: Network, timeout_s: float) -> None:
        self._network = network
        self._timeout_s = timeout_s
        self._gateways = GatewayFinder(network)
        self._inboxes: dict[str, _Inbox] = {}
        self._openings = trio.CapacityLimiter(OPENINGS)
        network.on_notice(ANSWER, self._on_update)
        network.on_peer_lost(self._on_peer_lost)
        network.on_hung(self._on_hung)

    def __repr__(self) -> str:
        return f"<Session requests={len(self._inboxes)} connected={len(self._network.connected())}>"

    @property
    def asked(self) -> frozenset[PeerId]:
        """The gateways that requests wait for now."""
        return frozenset(inbox.gateway for inbox in self._inboxes.values())

    async def status(self) -> Status:
        """The network as the nearest node sees it. Raises ConnectionFailed."""
        return await self.ask(STATUS, StatusQuery(), STATUS_TIMEOUT_S)

    async def ask(
        self, method: Method[Body, Answer], body: Body, timeout_s: float, peer: PeerId | None = None
    ) -> Answer:
        """Ask a node something, or, without `peer`, the nearest that answers. Raises ConnectionFailed."""
        give_up = trio.current_time() + self._timeout_s
        reason = "no node of the network answers"
        while trio.current_time() < give_up:
            revision = self._network.revision
            nearest = [candidate.peer for candidate in sorted(self._gateways.candidates(), key=_nearness)]
            for each in nearest if peer is None else [peer]:
                try:
                    return await self._network.request(each, method, body, timeout_s)
                except RemoteError as error:
                    if peer is not None:
                        raise RequestFailed(f"node {name_of(peer)}: {error.message}") from error
                    reason = str(error)
                except NetworkError as error:
                    reason = str(error)
            with trio.move_on_at(min(give_up, trio.current_time() + 1.0)):
                await self._network.wait_changed(revision)
        raise ConnectionFailed(reason)

    async def generate(self, body: Generate, deliver: Callable[[TextDelta], None]) -> Generation:
        """Run a request to its end. Raises InvalidRequest, RequestFailed, Busy or DeadlineExceeded. A lost gateway is
        replaced, and where all are busy, tried again; `deliver` is not called twice for any part of the answer."""
        replay = Replay()
        lost: dict[PeerId, _Loss] = {}
        earlier: list[str] = []  # why gateways did not end it that had accepted it
        deadline = trio.current_time() + body.deadline_s
        with trio.move_on_at(deadline + DEADLINE_GRACE_S):
            while True:
                service = self._gateways.model_of(body.service if replay.service is None else replay.service)
                moves = self._gateways.is_awaited(body.service)
                gateway = await self._find_gateway(service, lost, deadline, moves=moves)
                left = max(0.05, deadline - trio.current_time())
                attempt = msgspec.structs.replace(body, request=new_request_id(), deadline_s=left, service=service)
                try:
                    return add_attempts(await self._attempt(gateway, attempt, replay, deliver, lost), earlier)
                except Diverged:
                    told = f"gateway {name_of(gateway)} answers otherwise than the lost one began; ask again"
                    raise RequestFailed(f"{told} ({_reasons(lost)})") from None
                except GatewayLost as error:
                    answered = isinstance(error, GatewayRefuses)
                    if not answered:
                        earlier.append(f"gateway {name_of(gateway)} was lost: {error}")
                    may_be_back = isinstance(error, GatewayUnreachable | GatewayBroken)
                    wait_s = None if may_be_back and gateway in lost else error.retry_after_s
                    if wait_s is None and moves and (may_be_back or isinstance(error, GatewayLeaves)):
                        wait_s = RETURN_S
                    now = trio.current_time()
                    lost[gateway] = _Loss(str(error), math.inf if wait_s is None else now + wait_s, now, answered)
        raise DeadlineExceeded(f"deadline_s: the answer was not complete after {body.deadline_s:g} s")

    async def _attempt(
        self,
        gateway: PeerId,
        body: Generate,
        replay: Replay,
        deliver: Callable[[TextDelta], None],
        lost: Mapping[PeerId, _Loss],
    ) -> Generation:
        def others() -> list[PeerId]:
            return [peer for peer in self._gateways.rank(body.service) if peer != gateway and peer not in lost]

        inbox = self._inboxes[body.request] = _Inbox(gateway, others)
        self._expect()
        running, accepted = True, None
        try:
            try:
                async with self._openings:
                    with inbox.opening:
                        accepted = await self._open(gateway, body, replay)
                        replay.service = accepted.service
            except (GatewayRefuses, ClientError):
                running = False
                raise
            if accepted is None:  # the wait was cancelled
                raise GatewayLost("it did not answer", HUNG_RETRY_S)
            inbox.accept(GatewayWaitLimits(trio.current_time(), body.deadline_s, accepted.news_s))
            while True:
                update = await inbox.next()
                if update is None:
                    running = False
                    raise GatewayBroken("the connection to it broke", BROKEN_RETRY_S)
                delta = replay.take(update)
                if delta is not None:
                    deliver(delta)
                if update.finish is not None:
                    running = False
                    return finish_answer(update, replay)
        finally:
            del self._inboxes[body.request]
            self._expect()
            if running:
                self._stop(gateway, body.request)

    async def _open(self, gateway: PeerId, body: Generate, replay: Replay) -> Generating:
        try:
            if 0 < len(replay.tokens) <= MAX_CONTINUED_TOKENS:
                replay.resume()
                continued = ContinueGenerate(generate=body, tokens=tuple(replay.tokens))
                try:
                    return await self._network.request(gateway, GENERATE_CONTINUE, continued, ACCEPT_TIMEOUT_S)
                except RemoteError as error:
                    if error.code != "unknown_method":
                        raise
            # Also of a gateway of an earlier release, which can only begin anew: it says the same, if it rounds alike.
            replay.restart()
            return await self._network.request(gateway, GENERATE, body, ACCEPT_TIMEOUT_S)
        except RemoteError as error:
            if error.code in ELSEWHERE:
                refuses = GatewayLeaves if error.code in LEAVING else GatewayRefuses
                raise refuses(error.message, error.retry_after_s) from error
            if error.code == "invalid":
                raise InvalidRequest(error.message) from error
            raise RequestFailed(f"gateway {name_of(gateway)} refuses: {error.message}") from error
        except NetworkError as error:
            raise GatewayUnreachable(str(error), HUNG_RETRY_S) from error

    def _stop(self, gateway: PeerId, request: str) -> None:
        try:
            self._network.notify(gateway, GENERATE_STOP, StopRequest(request=request))
        except NetworkError:
            return  # it has lost us as well, and with us the reason for the request

    async def _find_gateway(
        self, service: str | None, lost: dict[PeerId, _Loss], deadline: float, *, moves: bool
    ) -> PeerId:
        """The best gateway that has not failed this request; waits for the first one to appear, or until one that was
        busy may be asked again. `moves`: the catalogue has the service, so that other boxes may come to serve it."""
        give_up = trio.current_time() + self._timeout_s
        while True:
            revision = self._network.revision
            if not lost and not moves:
                check_service(self._gateways.candidates(), service)
            ranked = self._gateways.rank(service)
            now = trio.current_time()
            usable = [peer for peer in ranked if peer not in lost or lost[peer].retry_at <= now]
            if usable:
                return await self._gateways.pick(usable, service)
            again = min((lost[peer].retry_at for peer in ranked), default=math.inf)
            is_over = again == math.inf
            # Others may come back: a box that was started anew, the other side of a cut that heals.
            hope = max((loss.at + RETURN_S for loss in lost.values() if not loss.answered), default=-math.inf)
            if lost and not ranked and moves:
                give_up = hope = deadline
            is_hopeless = now >= hope and self._gateways.find_silent(service) <= lost.keys()
            if lost and is_over and (now >= give_up or is_hopeless):
                raise RequestFailed(f"no gateway is left: {_reasons(lost)}")
            if lost and not is_over and again >= deadline:
                raise Busy(_reasons(lost), again - now)
            if not lost and now >= give_up:
                nodes = len(self._gateways.candidates())
                model = f"the model {service}" if service is not None else "a model"
                others = await self._describe_others(service)
                raise NotReady(
                    f"no node of this network serves {model} ({nodes} alive{others}); start one with `p2pserve join`"
                )
            wake_at = min(give_up, hope) if now < hope else give_up
            with trio.move_on_at(wake_at if is_over else again):  # one that is silent is heard again, or found dead
                await self._network.wait_changed(revision)

    async def _describe_others(self, service: str | None) -> str:
        """Who would serve otherwise, as the nearest node that answers knows it."""
        for candidate in sorted(self._gateways.candidates(), key=_nearness)[:2]:
            try:
                found = await self._network.request(candidate.peer, STATUS, StatusQuery(), STATUS_TIMEOUT_S)
            except NetworkError:
                continue
            others = describe_unserved(found, service)
            return f"; {others}" if others else ""
        return ""

    def _on_update(self, peer: PeerId, role: Role, update: AnswerUpdate) -> None:
        inbox = self._inboxes.get(update.request)
        if inbox is not None and inbox.gateway == peer:
            inbox.put(update)

    def _expect(self) -> None:
        self._network.expect("requests", self.asked)

    def _on_hung(self, peer: PeerId, hung: bool) -> None:
        """A gateway does not answer, or does again."""
        for inbox in self._inboxes.values():
            if inbox.gateway == peer:
                inbox.on_hung(hung, trio.current_time())

    def _on_peer_lost(self, peer: PeerId) -> None:
        for inbox in self._inboxes.values():
            if inbox.gateway == peer:
                inbox.lose()


def _nearness(candidate: GatewayCandidate) -> tuple[float, str]:
    return (candidate.rtt_s if candidate.rtt_s is not None else float("inf"), candidate.peer)


def _reasons(lost: dict[PeerId, _Loss]) -> str:
    now = trio.current_time()
    ages = {peer: f", {describe_age(now - loss.at)} ago" if now - loss.at >= 1.0 else "" for peer, loss in lost.items()}
    return "; ".join(f"{name_of(peer)}: {loss.reason}{ages[peer]}" for peer, loss in lost.items())
