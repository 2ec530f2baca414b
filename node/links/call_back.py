"""Connections to boxes that nobody can dial: the box is asked over its control stream, and dials itself.

    asker                                          the box
    call.back(call)       -- control stream -->
                          <-- TCP to the port --   "p2pCB/1\\n" call(16)
    a link, a burst, libp2p ... as ever        -->   as on a connection that was accepted

The relay (`kvtransport.link.relay`) calls back like that where it would dial: this node's own one for what starts here,
another node's where neither end can be dialled.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

import trio

from ...bootstrap import Address, NetworkError, PeerId, RemoteError, Role
from ...bootstrap.members.allowance import Allowance
from ...bootstrap.methods import Messenger
from ...bootstrap.streams.hosts import open_connection
from ..methods import CALL_BACK
from ..settings import WAN, NodeTuning
from .messages import CALL_ID_BYTES, CallBack, CalledBack

_log = logging.getLogger(__name__)

CALL_MAGIC: Final = b"p2pCB/1\n"
CALL_HELLO_BYTES: Final = len(CALL_MAGIC) + CALL_ID_BYTES

ProveAnywhere = Callable[[PeerId, Address], Awaitable[Address]]
"""The IP address at which a peer has just proved its key. Raises NetworkError."""


class _Met(NamedTuple):
    announced: Address
    at: Address | None  # None: nobody, or somebody else, was there
    until: float


@dataclass(slots=True, eq=False)
class _Call:
    target: PeerId
    connection: Future[socket.socket]
    came: trio.Event = field(default_factory=trio.Event)


@final
class CallBacks:
    """Both ends of it. `prove` meets a peer at an address, `adopt` serves a connection as if it had been accepted.
    Tasks run in `nursery`."""

    def __init__(
        self,
        *,
        messenger: Messenger,
        where: Callable[[PeerId], Address | None],
        prove: ProveAnywhere,
        adopt: Callable[[trio.SocketStream], None],
        nursery: trio.Nursery,
        tuning: NodeTuning = WAN,
    ) -> None:
        self._messenger = messenger
        self._where = where
        self._prove = prove
        self._adopt = adopt
        self._nursery = nursery
        self._tuning = tuning
        self._trio = trio.lowlevel.current_trio_token()
        self._calls: dict[bytes, _Call] = {}
        self._met: dict[PeerId, _Met] = {}
        self._allowances: dict[PeerId, Allowance] = {}
        messenger.handle(CALL_BACK, self.on_call)

    def __repr__(self) -> str:
        return f"<CallBacks waiting={len(self._calls)}>"

    # ---- asking -------------------------------------------------------------------------------------------------

    def connect(self, target: PeerId) -> socket.socket:
        """A connection to the port of a node, which dials this one. For threads. Raises OSError."""
        connection: Future[socket.socket] = Future()
        try:
            self._trio.run_sync_soon(self._begin, _Call(target, connection))
        except trio.RunFinishedError:
            raise OSError("this node has ended") from None
        wait([connection], 2 * self._tuning.ask_s)
        if connection.cancel():
            raise OSError("it did not dial back in time")
        return connection.result()

    def take(self, hello: bytes, connection: socket.socket) -> bool:
        """An accepted connection begins with the number of a call; whether it is one of ours."""
        call = self._calls.pop(hello[len(CALL_MAGIC) :], None)
        if call is None or not call.connection.set_running_or_notify_cancel():
            return False
        call.connection.set_result(connection)
        call.came.set()
        return True

    def _begin(self, call: _Call) -> None:
        try:
            self._nursery.start_soon(self._ask, call)
        except RuntimeError:  # the node ends, and the relay's threads with it
            _fail(call, "this node is leaving")

    async def _ask(self, call: _Call) -> None:
        number = secrets.token_bytes(CALL_ID_BYTES)
        self._calls[number] = call
        try:
            await self._messenger.request(call.target, CALL_BACK, CallBack(call=number), self._tuning.ask_s)
            with trio.move_on_after(self._tuning.ask_s):
                await call.came.wait()  # the answer may be faster than the connection
            reason = "it did not dial back in time"
        except NetworkError as error:
            reason = str(error)
        finally:
            is_open = self._calls.pop(number, None) is not None
        if is_open:
            _fail(call, reason)

    # ---- being asked --------------------------------------------------------------------------------------------

    async def on_call(self, peer: PeerId, role: Role, body: CallBack) -> CalledBack:
        """A member wants a connection to this node's port."""
        allowance = self._allowances.setdefault(peer, Allowance(self._tuning.calls_s, self._tuning.calls_burst))
        if not allowance.take(trio.current_time()):
            raise RemoteError("busy", "too many connections were asked for", retry_after_s=1.0)
        announced = self._where(peer)
        if announced is None or not announced.port:
            raise RemoteError("unknown-caller", f"this node knows no address of {peer}")
        at = await self._meet(peer, announced)
        if at is None:
            raise RemoteError("unreachable-caller", f"{announced} was not reached from here")
        try:
            with trio.fail_after(self._tuning.ask_s):
                self._adopt(await _begin_call(at, body.call))
        except (NetworkError, OSError, trio.TooSlowError, trio.BrokenResourceError) as error:
            _log.info("%s was not called back: %s", peer, error)
            self._met.pop(peer, None)
            raise RemoteError("unreachable-caller", f"{announced} was not reached from here") from error
        return CalledBack()

    def keep(self, present: frozenset[PeerId]) -> None:
        """These are the members now."""
        self._met = {peer: met for peer, met in self._met.items() if peer in present}
        self._allowances = {peer: each for peer, each in self._allowances.items() if peer in present}

    async def _meet(self, peer: PeerId, announced: Address) -> Address | None:
        """Where this peer has proved its key lately: its word alone sends nobody to a third party's port."""
        met = self._met.get(peer)
        if met is None or met.announced != announced or trio.current_time() >= met.until:
            at, known_s = None, self._tuning.ask_s
            try:
                at, known_s = await self._prove(peer, announced), self._tuning.proof_s
            except NetworkError as error:
                _log.info("%s was not met at %s: %s", peer, announced, error)
            met = self._met[peer] = _Met(announced, at, trio.current_time() + known_s)
        return met.at


async def _begin_call(at: Address, call: bytes) -> trio.SocketStream:
    stream = await open_connection(at)
    try:
        await stream.send_all(CALL_MAGIC + call)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


def _fail(call: _Call, reason: str) -> None:
    if call.connection.set_running_or_notify_cancel():
        call.connection.set_exception(OSError(reason))
