"""The methods a node answers, and who may call them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import trio

from .errors import DECODE_ERRORS, ProtocolError, RemoteError, RequestTimeout
from .methods import Answer, AsyncHandler, Body, Method, Notice, NoticeHandler
from .streams.control import encode_body
from .trust.keys import PeerId
from .trust.tokens import Role

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Registered:
    decoder: msgspec.msgpack.Decoder[Any]  # of the method's body type
    handler: Callable[..., Any]
    callers: frozenset[Role]


class Handlers:
    """Handlers by method name. A handler's own failure is logged and costs only its request."""

    def __init__(self) -> None:
        self._requests: dict[str, _Registered] = {}
        self._notices: dict[str, _Registered] = {}
        self.served = 0
        self.failed = 0

    def add_request(self, method: Method[Body, Answer], handler: AsyncHandler[Body, Answer]) -> None:
        """Answer a method; a second handler for it is a mistake."""
        _add(self._requests, method, handler)

    def add_notice(self, notice: Notice[Body], handler: NoticeHandler[Body]) -> None:
        """Take a notice; a second handler for it is a mistake."""
        _add(self._notices, notice, handler)

    async def serve(self, peer: PeerId, role: Role, method: str, body: bytes | msgspec.Raw) -> bytes:
        """The encoded answer. Raises RemoteError, or ProtocolError for a body of another type."""
        found = self._requests.get(method)
        if found is None:
            raise RemoteError("unknown_method", f"this node does not answer {method!r}; run the same p2pserve release")
        # The role first: what may not be asked need not be decoded.
        _check_role(found, role, method)
        message = _decode(found, method, body)
        self.served += 1
        try:
            handling = found.handler(peer, role, message)
            # What came may have megabytes: it is not to be kept for as long as the handler runs.
            del body, message
            return encode_body(await handling)
        except (RemoteError, ProtocolError):
            self.failed += 1
            raise
        except Exception as error:
            self.failed += 1
            _log.exception("the handler of %r failed for %s", method, peer)
            raise RemoteError("internal", f"{method!r} failed on this node; its log has the details") from error

    async def serve_own(self, me: PeerId, role: Role, method: str, body: bytes, timeout: float) -> bytes:
        """The answer to this node's own question. Raises RequestTimeout, and what :meth:`serve` does."""
        with trio.move_on_after(max(timeout, 0.0)):
            return await self.serve(me, role, method, body)
        raise RequestTimeout(f"this node did not answer {method!r} within {timeout:g} s; its own handler is too slow")

    def notify(self, peer: PeerId, role: Role, method: str, body: bytes | msgspec.Raw) -> None:
        """Deliver a notice. Unknown ones are dropped: a newer peer may have more to tell."""
        found = self._notices.get(method)
        if found is None:
            _log.debug("dropped an unknown notice %.40r from %s", method, peer)
            return
        try:
            _check_role(found, role, method)
        except RemoteError as error:
            raise ProtocolError(error.message) from error
        message = _decode(found, method, body)
        try:
            found.handler(peer, role, message)
        except ProtocolError:
            raise
        except Exception:
            self.failed += 1
            _log.exception("the handler of notice %r failed for %s", method, peer)

    def __repr__(self) -> str:
        return f"Handlers(requests={sorted(self._requests)}, notices={sorted(self._notices)}, failed={self.failed})"


def _add(
    table: dict[str, _Registered], method: Method[Body, Answer] | Notice[Body], handler: Callable[..., Any]
) -> None:
    if method.name in table:
        raise ValueError(f"{method.name!r} has a handler already; register each method once")
    table[method.name] = _Registered(msgspec.msgpack.Decoder(method.body), handler, method.callers)


def _check_role(method: _Registered, role: Role, name: str) -> None:
    if role not in method.callers:
        others = " or ".join(sorted(each.value for each in method.callers))
        raise RemoteError(
            "forbidden", f"{role.value}s may not call {name!r}; it is for those with a token for {others}"
        )


def _decode(method: _Registered, name: str, body: bytes | msgspec.Raw) -> Any:
    try:
        return method.decoder.decode(body)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"the body of {name!r} is malformed: {error}; run the same p2pserve release") from error
