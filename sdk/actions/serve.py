"""What `p2pserve serve` does: it runs the first node of a network, which serves HTTP."""

from __future__ import annotations

from types import SimpleNamespace

from ..errors import UsageError
from .http_options import read_http
from .node import bootstrap


def serve(arguments: SimpleNamespace) -> int:
    """`p2pserve serve`. Others may join at `--listen`."""
    if arguments.model.startswith("-"):
        raise UsageError(f"model: {arguments.model} stands where the model is expected; p2pserve serve MODEL [OPTIONS]")
    listen = read_http(arguments.http)
    host = arguments.host or listen.host
    port = arguments.port if arguments.port is not None else listen.port
    given = SimpleNamespace(**vars(arguments))
    given.http, given.port = f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}", None
    return bootstrap(given)
