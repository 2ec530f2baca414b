"""Errors as the clients of OpenAI and of Anthropic expect them. No I/O."""

from __future__ import annotations

import json
from typing import Final

TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
}
"""By status; the others are `api_error`. Both clients go by the status, and show the text."""


def describe_error(status: int, message: str, path: str) -> bytes:
    """The body of an error at this path."""
    kind = TYPES.get(status, "api_error")
    if is_anthropic(path):
        return _encode({"type": "error", "error": {"type": kind, "message": message}})
    return _encode({"error": {"message": message, "type": kind, "param": _param(message), "code": status}})


def describe_event(status: int, message: str, path: str) -> bytes:
    """How a stream of events at this path ends that cannot go on."""
    data = describe_error(status, message, path)
    if is_anthropic(path):
        return b"event: error\ndata: " + data + b"\n\n"
    if path.startswith("/v1/responses"):
        event = {"type": "error", "code": str(status), "message": message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: " + _encode(event) + b"\n\n"
    return b"data: " + data + b"\n\ndata: [DONE]\n\n"


def is_anthropic(path: str) -> bool:
    """Whether clients of Anthropic ask there."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def _param(message: str) -> str | None:
    """The field that a message of ours begins with."""
    name, colon, _ = message.partition(": ")
    return name if colon and name.isidentifier() else None


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
