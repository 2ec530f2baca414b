"""What went wrong below the network, in words that a person can act on."""

import logging
from collections.abc import Awaitable, Callable

import trio

from .errors import PeerLost
from .trust.keys import PeerId

_log = logging.getLogger(__name__)


class MappedErrors:
    """Everything libp2p raises (some forty classes, a few undocumented), as PeerLost."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            raise PeerLost(f"{self._doing} ({type(error).__name__}: {error})") from error


async def close_quietly(close: Callable[[], Awaitable[None]]) -> None:
    """Close something of libp2p's, for a bounded moment."""
    with trio.move_on_after(2.0):
        try:
            with MappedErrors("closing a connection"):
                await close()
        except PeerLost as error:
            _log.debug("%s", error)


def explain(error: BaseException, peer_id: PeerId | None) -> str:
    """The innermost reason, in words a person can act on."""
    reasons: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        reasons.append(str(cause) or type(cause).__name__)
        # Somebody was there who hung up: that the system calls it a reset says nothing of why.
        is_reset = isinstance(cause, ConnectionResetError | BrokenPipeError)
        if isinstance(cause, OSError) and cause.strerror and not is_reset:
            return f"{cause.strerror.lower()}; check the address, and that the node there is running"
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__
    text = " ".join(reasons)
    if "mismatch" in text or "does not correspond" in text:
        return f"another peer answers there; check that the node still has the identity {peer_id}"
    if "refused" in text:
        return "connection refused; check the address, and that the node there is running"
    return "something other than a p2pserve node answers there; check the address"
