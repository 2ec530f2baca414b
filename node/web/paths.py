"""Which requests are carried to a box, and for whom. No I/O."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from ...bootstrap import Role

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
API: Final = (
    *("/v1", "/v2", "/tokenize", "/detokenize", "/tokenizer_info", "/health", "/live", "/ping", "/version", "/load"),
    *("/metrics", "/docs", "/redoc", "/openapi.json"),
)
DASHBOARD: Final = "/dashboard"
ADMIN: Final = ("/p2p/v1", DASHBOARD)
"""What shows other people's requests, or changes something: for admins."""

_TARGET: Final = re.compile(r"/[\x21-\x7e]*")


def path_of(target: str) -> str | None:
    """The path of a request's target; None where it is none that can be carried, like `*` or another site's URL."""
    if not _TARGET.fullmatch(target) or target.startswith("//"):
        return None
    path = urlsplit(target).path
    # What one server takes for a climb another may not: nobody needs it here.
    return None if "/." in path or "%2e" in path.lower() or "%2f" in path.lower() else path


def is_below(path: str, tops: tuple[str, ...]) -> bool:
    """Whether it is one of these paths, or below one."""
    return any(path == top or path.startswith(f"{top}/") for top in tops)


def find_refusal(method: str, target: str, role: Role) -> tuple[int, str] | None:
    """The status and the reason why a request is not carried for a peer of this role; None for one that is."""
    path = path_of(target)
    if method not in METHODS:
        return 405, f"method: {method} is not served"
    if path is None or not is_below(path, (*API, *ADMIN)):
        return 404, f"path: nothing is served at {target[:200]}"
    if is_below(path, ADMIN) and role is not Role.ADMIN:
        return 403, f"path: {path[:200]} is for admins; ask the network's owner, whose own endpoint has it"
    return None
