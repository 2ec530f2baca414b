"""Every error this room raises on purpose. ``str(error)`` is one line: what is wrong and how to fix
it.

:data:`DECODE_ERRORS` is what decoders raise about what somebody sent."""

from typing import Final

import msgspec

# All that decoding a stranger's bytes may raise. Only the first is msgspec's own: text that is no UTF-8 and nesting
# without end (in a field that is skipped, too) come as Python's, and would otherwise pass for a bug of this node.
DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class NetworkError(Exception):
    """Base of all errors of the peer-to-peer network."""


class AddressError(NetworkError):
    """A text that should be ``host:port`` is not, or the address cannot be used on this box."""


class TokenError(NetworkError):
    """A join token is malformed, forged, expired, or belongs to another network."""


class TokenSpent(TokenError):
    """A join token was revoked, or as many boxes as it is for have used it. Not all members may know yet."""


class Unreachable(NetworkError):
    """Nobody answered at an address, or somebody else did."""


class Refused(NetworkError):
    """The other side answered, and does not let us in."""


class IdentityInUse(Refused):
    """Another living node has this identity. ``holder_born`` says when that one came to life."""

    def __init__(self, text: str, holder_born: int) -> None:
        super().__init__(text)
        self.holder_born = holder_born


class PortInUse(NetworkError):
    """Another process already listens on the port."""


class IdentityError(NetworkError):
    """A key file cannot be read, written or understood."""


class PeerLost(NetworkError):
    """There is no connection to the peer, or it closed before the answer came."""


class RequestTimeout(NetworkError):
    """The peer is connected but did not answer in time."""


class ProtocolError(NetworkError):
    """A message breaks the protocol: too large, malformed, or of another version."""


class OtherProtocol(ProtocolError):
    """The peer speaks another version of the protocol: one of the two boxes has to be upgraded."""


class RemoteError(NetworkError):
    """The peer's handler refused the request: ``code`` is for programs, ``message`` for people.

    ``retry_after_s``: the same request may be taken so many seconds from now; None where that is not
    the matter."""

    def __init__(self, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"{message} [{code}]")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
