"""What can go wrong for a client. `str(error)` is one line that says what is wrong and what to do."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class ClientError(Exception):
    """Base of all errors of the client."""


class InvalidAddress(ClientError):
    """The bootstrap address or the join token is malformed, or is not for this network."""


class InvalidRequest(ClientError):
    """A parameter of a request is wrong; the text names it."""


class ConnectionFailed(ClientError):
    """The network cannot be reached, or does not let us in."""


class AccessRefused(ConnectionFailed):
    """The network answers, and does not let us in."""


class RequestFailed(ClientError):
    """The network accepted a request and could not answer it."""


class NotReady(RequestFailed):
    """No node of the network serves the model yet."""


class Busy(RequestFailed):
    """Every gateway has too much to do, or this client has too much there; one may take the request in `retry_after_s`.

    Clients try again by themselves, unless the request's deadline is before that."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(RequestFailed):
    """The answer was not complete in time."""


class ClientClosed(ClientError):
    """The client has been closed."""


def first_of(error: BaseException, kinds: tuple[type[E], ...]) -> E | None:
    """The first error of these kinds in `error` or, as tasks fail in groups, anywhere inside it."""
    if isinstance(error, kinds):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            found = first_of(inner, kinds)
            if found is not None:
                return found
    return None


class UsageError(Exception):
    """A command was given something it cannot work with. The text is one line for the user."""


class DemoFailed(Exception):
    """The demo did not get to its end. The text is one line for the user."""
