"""What a front and a box say to each other about one HTTP exchange: one request and its answer.

front -> box `http.open` with the request and the beginning of its body, answered when the box's API server has it;
then pieces in both directions, `http.more` and `http.answer`, and at any time front -> box `http.stop`. Either side
sends at most WINDOW_PIECES pieces beyond those whose taking the other has granted: that bounds what each of them
holds of an exchange, however slowly the far end reads.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ...coordinator.bounds import Text
from ..messages import ExactMessage, Label, Message, RequestId

PIECE_BYTES: Final = 16 << 10
WINDOW_PIECES: Final = 8
FIRST_BYTES: Final = 256 << 10  # of a body that go with its request: most are whole then
MAX_TARGET_BYTES: Final = 8 << 10
MAX_HEADERS: Final = 128
MAX_HEADER_BYTES: Final = 16 << 10  # of one value
MAX_HEADERS_BYTES: Final = 64 << 10  # of all names and values
MAX_NAME_BYTES: Final = 128

Granted = Annotated[int, msgspec.Meta(ge=0, le=WINDOW_PIECES)]
Piece = Annotated[bytes, msgspec.Meta(max_length=PIECE_BYTES)]


class HttpHeader(msgspec.Struct, frozen=True, array_like=True):
    """One field as it stood, but for the case of its name."""

    name: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_HEADER_BYTES)]


HttpHeaders = Annotated[tuple[HttpHeader, ...], msgspec.Meta(max_length=MAX_HEADERS)]


class HttpOpen(ExactMessage, frozen=True, kw_only=True):
    """Have the box's API server answer this. `data` is the beginning of the body, all of it if `ended`."""

    exchange: RequestId
    method: Annotated[str, msgspec.Meta(min_length=1, max_length=16)]
    target: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TARGET_BYTES)]
    headers: HttpHeaders = ()
    data: Annotated[bytes, msgspec.Meta(max_length=FIRST_BYTES)] = b""
    ended: bool = True


class HttpMore(Message, frozen=True, kw_only=True):
    """More of a request's body, or (`granted`) room for more pieces of its answer."""

    exchange: RequestId
    data: Piece = b""
    ended: bool = False
    granted: Granted = 0


class HttpAnswer(Message, frozen=True, kw_only=True):
    """What is new of an answer: its head where `status` is not 0, a piece of its body, room for more of the request's.

    `failed`: there will be no more of it, and why.
    """

    exchange: RequestId
    status: Annotated[int, msgspec.Meta(ge=0, le=599)] = 0
    reason: Label = ""
    headers: HttpHeaders = ()
    data: Piece = b""
    ended: bool = False
    granted: Granted = 0
    failed: Text = ""
