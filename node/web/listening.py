"""Where a server may listen, which names it answers to, and how it refuses. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import final

from .fields import RawHeaders, find_header


@final
@dataclass(frozen=True, slots=True)
class HttpRefusal:
    """The status and the text for whoever asked, when to ask again, where that helps, and where a browser goes
    instead."""

    status: int
    text: str
    retry_after_s: float | None = None
    location: str | None = None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def host_of(headers: RawHeaders) -> str:
    """Without its port; of HTTP/1.0, which need not say it, this machine's."""
    host = (find_header(headers, b"host") or b"localhost").decode("latin-1")
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
