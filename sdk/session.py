"""A client in the network, in trio: finds gateways, carries requests to them, and goes on when one is lost."""

from __future__ import annotations

import math
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
from ..bootstrap.members.states import MemberState
from ..bootstrap.methods import Answer, Body, Method
from ..bootstrap.network import Network
from ..node.messages import (
    ADVERT,
    MAX_CONTINUED_TOKENS,
    PLAN,
    AnswerUpdate,
    ContinueGenerate,
    Generate,
    Generating,
    Status,
    StatusQuery,
    StopRequest,
)
from ..node.methods import ANSWER, GENERATE, GENERATE_CONTINUE, GENERATE_STOP, STATUS
from ..node.planning.manifest import read_manifest
from ..node.view import NetworkView
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
from .requests import Diverged, GatewayCandidate, Generation, Replay, TextDelta, check_service, gateways, new_request_id

ACCEPT_TIMEOUT_S = 15.0  # a gateway accepts or refuses at once; tokenising a very long prompt takes seconds
STATUS_TIMEOUT_S = 5.0
DEADLINE_GRACE_S = 2.0  # the gateway says more about a missed deadline than the client can
LEAVE_S = 2.0
OPENINGS = 64  # requests that wait to be accepted at once; gateways accept them in turn, and refuse too many of them
HUNG_RETRY_S = 5.0  # a gateway that did not answer is asked again after so long, where no other is left
RACERS = 3  # a client knows how far its bootstrap is; of the rest it tries so many at once
ELSEWHERE = frozenset({"draining", "busy", "no-engine", "internal", "unknown_method"})  # another node may do better


def check_target(bootstrap: str, token: str | None) -> None:
    """Check what can be checked of a bootstrap address and a token without asking anybody. Raises InvalidAddress."""
    try:
        parse_join_target(bootstrap, token)
    except (AddressError, TokenError) as error:
        raise connection_error(error) from error


def client_folder() -> Path:
    """Where clients of this user remember the members they have seen."""
    return Path(os.environ.get(environment.HOME) or "~/.p2pserve").expanduser() / "client"


@asynccontextmanager
async def open_session(bootstrap: str, token: str | None, timeout_s: float) -> AsyncIterator[Session]:
    """Join as a client for the length of the body. Raises ConnectionFailed or InvalidAddress."""
    # Neither is needed before there is a network to join: 0.5 s and 90 MB.
    from ..bootstrap.streams.libp2p_host import Libp2pTransport
    from ..node.joining import read_join_target

    identity = Identity.generate()
    nowhere = Address("0.0.0.0", 0)  # clients are not dialled
    try:
        text, members = await read_join_target(bootstrap, token)
        parsed = JoinToken.parse(text)
        book = AddressBook(client_folder(), parsed.network)
        remembered = await trio.to_thread.run_sync(book.load)
        network = Network(
            transport=Libp2pTransport(identity, None, nowhere),
            identity=identity,
            token=text,
            network_key_public=parsed.network,
            role=parsed.role,
            announce=nowhere,
            bootstraps=members,
            remembered=remembered,
            book=book,
            rng=random.Random(),  # chooses gossip partners, makes no secrets
            settings=NetworkSettings(join_s=timeout_s),
        )
        if parsed.role is not Role.CLIENT:
            raise TokenError(
                f"this is a {parsed.role.value}'s token; use the client line that `p2pserve bootstrap` printed"
            )
    except NetworkError as error:
        raise connection_error(error) from error
    async with enter(network, timeout_s) as session:
        yield session


@asynccontextmanager
async def enter(network: Network, timeout_s: float) -> AsyncIterator[Session]:
    """A session in a network that has not been entered yet; says goodbye at the end. Raises ConnectionFailed."""
    session = Session(network, timeout_s)
    try:
        async with network:
            try:
                yield session
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


class _GatewayLost(Exception):
    """This gateway cannot answer, another one may; or it itself, after `retry_after_s`. The text says why."""

    def __init__(self, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class _GatewayRefuses(_GatewayLost):
    """It has answered, and has nothing of the request."""


@final
@dataclass(frozen=True, slots=True)
class _Loss:
    """Why a gateway is not asked, and from when on it is again; infinite: never."""

    reason: str
    retry_at: float


@final
@dataclass(frozen=True, slots=True)
class _Inbox:
    """Where the chunks of one attempt go; None is the loss of its gateway. `opening` is the wait for its acceptance,
    and cancelled when the gateway is hung; `others` are those that could be asked instead."""

    gateway: PeerId
    send: trio.MemorySendChannel[AnswerUpdate | None]
    opening: trio.CancelScope
    others: Callable[[], list[PeerId]]


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
        self._view = NetworkView()
        self._considered: tuple[tuple[PeerId, int], bytes] | None = None  # the plan that was looked at last
        self._planned: str | None = None  # its service
        self._inboxes: dict[str, _Inbox] = {}
        self._openings = trio.CapacityLimiter(OPENINGS)
        self._measured: dict[PeerId, float] = {}  # seconds that dialling and one answer took
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
            nearest = [candidate.peer for candidate in sorted(self._candidates(), key=_nearness)]
            for each in nearest if peer is None else [peer]:
                try:
                    return await self._network.request(each, method, body, timeout_s)
                except RemoteError as error:
                    if peer is not None:
                        raise RequestFailed(f"node {_short(peer)}: {error.message}") from error
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
        deadline = trio.current_time() + body.deadline_s
        with trio.move_on_at(deadline + DEADLINE_GRACE_S):
            while True:
                service = body.service if replay.service is None else replay.service
                gateway = await self._find_gateway(service, lost, deadline)
                left = max(0.05, deadline - trio.current_time())
                attempt = msgspec.structs.replace(body, request=new_request_id(), deadline_s=left, service=service)
                try:
                    return await self._attempt(gateway, attempt, replay, deliver, lost)
                except Diverged:
                    raise RequestFailed(
                        f"gateway {_short(gateway)} answers otherwise than the lost one began; ask again"
                        f" ({_reasons(lost)})"
                    ) from None
                except _GatewayLost as error:
                    wait_s = error.retry_after_s
                    lost[gateway] = _Loss(str(error), math.inf if wait_s is None else trio.current_time() + wait_s)
        raise DeadlineExceeded(f"deadline_s: the answer was not complete after {body.deadline_s:g} s")

    async def _attempt(
        self,
        gateway: PeerId,
        body: Generate,
        replay: Replay,
        deliver: Callable[[TextDelta], None],
        lost: Mapping[PeerId, _Loss],
    ) -> Generation:
        send, receive = trio.open_memory_channel[AnswerUpdate | None](float("inf"))

        def others() -> list[PeerId]:
            ranked = gateways(self._candidates(), body.service, self._planned_service())
            return [peer for peer in ranked if peer != gateway and peer not in lost]

        inbox = self._inboxes[body.request] = _Inbox(gateway, send, trio.CancelScope(), others)
        self._expect()
        running = True
        try:
            try:
                async with self._openings:
                    with inbox.opening:
                        replay.service = (await self._open(gateway, body, replay)).service
            except (_GatewayRefuses, ClientError):
                running = False
                raise
            if inbox.opening.cancelled_caught:
                raise _GatewayLost("it did not answer", HUNG_RETRY_S)
            async for update in receive:
                if update is None and inbox.opening.cancel_called:
                    raise _GatewayLost("it did not answer", HUNG_RETRY_S)
                if update is None:
                    running = False
                    raise _GatewayLost("the connection to it broke")
                delta = replay.take(update)
                if delta is not None:
                    deliver(delta)
                if update.finish is not None:
                    running = False
                    return _finished(update, replay)
        finally:
            del self._inboxes[body.request]
            self._expect()
            if running:
                self._stop(gateway, body.request)
        raise AssertionError("an open channel does not end")

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
                raise _GatewayRefuses(error.message, error.retry_after_s) from error
            if error.code == "invalid":
                raise InvalidRequest(error.message) from error
            raise RequestFailed(f"gateway {_short(gateway)} refuses: {error.message}") from error
        except NetworkError as error:
            raise _GatewayLost(str(error)) from error

    def _stop(self, gateway: PeerId, request: str) -> None:
        try:
            self._network.notify(gateway, GENERATE_STOP, StopRequest(request=request))
        except NetworkError:
            return  # it has lost us as well, and with us the reason for the request

    async def _find_gateway(self, service: str | None, lost: dict[PeerId, _Loss], deadline: float) -> PeerId:
        """The best gateway that has not failed this request; waits for the first one to appear, or until one that was
        busy may be asked again."""
        give_up = trio.current_time() + self._timeout_s
        while True:
            revision = self._network.revision
            candidates = self._candidates()
            if not lost:
                check_service(candidates, service)
            ranked = gateways(candidates, service, self._planned_service())
            now = trio.current_time()
            usable = [peer for peer in ranked if peer not in lost or lost[peer].retry_at <= now]
            if usable:
                await self._race(usable)
                ranked = gateways(self._candidates(), service, self._planned_service())
                return next((peer for peer in ranked if peer in usable), usable[0])
            again = min((lost[peer].retry_at for peer in ranked), default=math.inf)
            if lost and again == math.inf:
                raise RequestFailed(f"no gateway is left: {_reasons(lost)}")
            if lost and again >= deadline:
                raise Busy(_reasons(lost), again - now)
            if not lost and now >= give_up:
                nodes = len(self._candidates())
                model = f"the model {service}" if service is not None else "a model"
                raise NotReady(
                    f"no node of this network serves {model} ({nodes} alive); start one with `p2pserve join`"
                )
            with trio.move_on_at(again if lost else give_up):
                await self._network.wait_changed(revision)

    async def _race(self, usable: list[PeerId]) -> None:
        """Find out which gateway is near, unless one has been measured already: the first to answer ends it."""
        known = {candidate.peer for candidate in self._candidates() if candidate.rtt_s is not None}
        if len(usable) < 2 or not known.isdisjoint(usable):
            return
        async with trio.open_nursery() as nursery:

            async def ask(peer: PeerId) -> None:
                began = trio.current_time()
                try:
                    await self._network.request(peer, STATUS, StatusQuery(), STATUS_TIMEOUT_S)
                except NetworkError:
                    return  # whoever comes first is asked; if nobody does, the request itself finds out why
                self._measured[peer] = trio.current_time() - began
                nursery.cancel_scope.cancel()

            for peer in random.sample(usable, min(RACERS, len(usable))):
                nursery.start_soon(ask, peer)

    def _planned_service(self) -> str | None:
        """The service that the coordinator has a plan for, as far as this client has heard of it."""
        leader = self._network.coordinator
        entry = self._network.entries(PLAN).get(leader[0]) if leader is not None else None
        if leader is not None and entry is not None and (leader, entry) != self._considered:
            self._considered = leader, entry
            manifest = read_manifest(entry)
            if manifest is not None and manifest.epoch == leader[1]:
                self._planned = manifest.service
        return self._planned

    def _candidates(self) -> list[GatewayCandidate]:
        self._view.update(self._network.entries(ADVERT))
        return [
            GatewayCandidate(
                peer=member.peer_id,
                advert=self._view.adverts.get(member.peer_id),
                rtt_s=member.rtt_s if member.rtt_s is not None else self._measured.get(member.peer_id),
            )
            for member in self._network.members()
            if member.state is MemberState.ALIVE and member.role is not Role.CLIENT
        ]

    def _on_update(self, peer: PeerId, role: Role, update: AnswerUpdate) -> None:
        inbox = self._inboxes.get(update.request)
        if inbox is not None and inbox.gateway == peer:
            inbox.send.send_nowait(update)

    def _expect(self) -> None:
        self._network.expect("requests", self.asked)

    def _on_hung(self, peer: PeerId, hung: bool) -> None:
        """A gateway does not answer: its requests go to another one, where there is one."""
        for inbox in self._inboxes.values() if hung else ():
            if inbox.gateway == peer and inbox.others():
                inbox.opening.cancel()
                inbox.send.send_nowait(None)

    def _on_peer_lost(self, peer: PeerId) -> None:
        for inbox in self._inboxes.values():
            if inbox.gateway == peer:
                inbox.send.send_nowait(None)


def _finished(update: AnswerUpdate, replay: Replay) -> Generation:
    if update.finish == "error":
        if update.error.startswith("deadline"):
            raise DeadlineExceeded(update.error)
        raise RequestFailed(update.error or "the network gave the request up without a reason")
    return Generation(
        replay.text,
        tuple(replay.tokens),
        update.finish or "",
        update.figures,
        logprobs=tuple(replay.logprobs),
        prompt_logprobs=replay.prompt_logprobs,
        stop_reason=update.stop_reason,
    )


def _nearness(candidate: GatewayCandidate) -> tuple[float, str]:
    return (candidate.rtt_s if candidate.rtt_s is not None else float("inf"), candidate.peer)


def _reasons(lost: dict[PeerId, _Loss]) -> str:
    return "; ".join(f"{_short(peer)}: {loss.reason}" for peer, loss in lost.items())


def _short(peer: PeerId) -> str:
    return f"..{peer[-6:]}"
