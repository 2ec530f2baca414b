"""The environment variables that stand for options, for the command line and for `Client()` alike."""

from __future__ import annotations

import os
from typing import Final

from .errors import InvalidAddress

BOOTSTRAP: Final = "P2PSERVE_BOOTSTRAP"
TOKEN: Final = "P2PSERVE_TOKEN"
HOME: Final = "P2PSERVE_HOME"
ADMIN_TOKEN: Final = "P2PSERVE_ADMIN_TOKEN"


def network_address(bootstrap: str | None, token: str | None) -> tuple[str, str | None]:
    """Address (or join token) and token of a network, given or from the environment. Raises
    InvalidAddress if there is neither, or no text."""
    where = os.environ.get(BOOTSTRAP) if bootstrap is None else bootstrap
    secret = os.environ.get(TOKEN) if token is None else token
    for name, value in (("bootstrap", where), ("token", secret)):
        if value is not None and not isinstance(value, str):
            raise InvalidAddress(f"{name}: {value!r} is no text; give the line that `p2pserve bootstrap` printed")
    if not where or not where.strip():
        raise InvalidAddress(
            "bootstrap: give the token that `p2pserve bootstrap` printed (--bootstrap, Client(...)), or set "
            f"{BOOTSTRAP}"
        )
    return where.strip(), secret or None
