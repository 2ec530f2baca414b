"""The methods a node answers, and who may call them."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from .errors import DECODE_ERRORS, ProtocolError, RemoteError
from .streams.control import encode_body
from .trust.keys import PeerId
from .trust.tokens import Role

__all__ = ["Handlers"]

_log = logging.getLogger(__name__)

B = TypeVar("B", bound=msgspec.Struct)

AsyncHandler = Callable[[PeerId, Role, B], Awaitable[msgspec.Struct | None]]
NoticeHandler = Callable[[PeerId, Role, B], None]


@dataclass(frozen=True, slots=True)
class _Method:
    decoder: msgspec.msgpack.Decoder[Any]  # of the body type the handler was registered with
    handler: Callable[..., Any]
    client: bool


class Handlers:
    """Requests and notices by method name. A handler's own failure is logged here and costs only
    its request."""

    def __init__(self) -> None:
        self._requests: dict[str, _Method] = {}
        self._notices: dict[str, _Method] = {}
        self.served = 0
        self.failed = 0

    def add_request(self, method: str, body: type[B], handler: AsyncHandler[B], *, client: bool) -> None:
        """Answer a method; a second handler for it is a mistake."""
        _add(self._requests, method, _Method(msgspec.msgpack.Decoder(body), handler, client))

    def add_notice(self, method: str, body: type[B], handler: NoticeHandler[B], *, client: bool) -> None:
        """Take a notice; a second handler for it is a mistake."""
        _add(self._notices, method, _Method(msgspec.msgpack.Decoder(body), handler, client))

    async def serve(self, peer: PeerId, role: Role, method: str, body: bytes | msgspec.Raw) -> bytes:
        """The encoded answer. Raises RemoteError, or ProtocolError when the body is not of the
        method's type."""
        found = self._requests.get(method)
        if found is None:
            raise RemoteError("unknown_method", f"this node does not answer {method!r}; run the same p2pserve release")
        _check_role(found, role, method)
        message = _decode(found, method, body)
        self.served += 1
        try:
            answer = await found.handler(peer, role, message)
            return encode_body(answer)
        except (RemoteError, ProtocolError):
            self.failed += 1
            raise
        except Exception as error:
            self.failed += 1
            _log.exception("the handler of %r failed for %s", method, peer)
            raise RemoteError("internal", f"{method!r} failed on this node; its log has the details") from error

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


def _add(table: dict[str, _Method], method: str, entry: _Method) -> None:
    if method in table:
        raise ValueError(f"{method!r} has a handler already; register each method once")
    table[method] = entry


def _check_role(method: _Method, role: Role, name: str) -> None:
    if role is Role.CLIENT and not method.client:
        raise RemoteError("forbidden", f"clients may not call {name!r}; join with a worker or admin token")


def _decode(method: _Method, name: str, body: bytes | msgspec.Raw) -> Any:
    try:
        return method.decoder.decode(body)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"the body of {name!r} is malformed: {error}; run the same p2pserve release") from error
