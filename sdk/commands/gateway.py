"""`p2pserve gateway`: the OpenAI endpoint of a network on this machine, which needs no engine for it."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio

from ...bootstrap import Address, parse_address
from ...node.http.admission import FrontRules, check_listen
from ...node.http.asking import HttpAsking
from ...node.http.front import HttpFront
from ..errors import UsageError
from ..session import check_target, enter_network, find_network

DEFAULT_HTTP: Final = "127.0.0.1:8000"
MIN_KEY_CHARS: Final = 8

Greet = Callable[[Address], None]


def serve_gateway(
    bootstrap: str, token: str | None, http: str, rules: FrontRules, timeout_s: float, output_format: str
) -> int:
    """Serve until a signal; returns the exit code. Raises AddressError, PortInUse and ClientError."""
    listen = parse_address(http)
    check_listen(listen, rules)
    check_target(bootstrap, token)
    greet = _greet_json if output_format == "json" else _greet
    return trio.run(_serve_until_signal, bootstrap, token, listen, rules, timeout_s, greet)


def read_keys(given: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    """The keys that were given, and those of a file, one in each line; `#` begins a comment. Raises UsageError."""
    lines: list[str] = []
    if file is not None:
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(f"api_key_file: {file} cannot be read: {reason}") from error
    keys = (*given, *(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")))
    if file is not None and not keys:
        raise UsageError(f"api_key_file: {file} holds no key; write one in each line")
    for key in keys:
        if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(f"api_key: a key has at least {MIN_KEY_CHARS} printable ASCII characters and no spaces")
    return keys


async def _serve_until_signal(
    bootstrap: str, token: str | None, listen: Address, rules: FrontRules, timeout_s: float, greet: Greet
) -> int:
    """0 when a signal ended it while it served, 130 before."""
    code = 130
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                async for _ in signals:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            network = await find_network(bootstrap, token, timeout_s)
            front = HttpFront(HttpAsking(network, nursery), rules)
            async with enter_network(network), trio.open_nursery() as serving:
                greet(await serving.start(front.serve, listen))
                code = 0
    return code


def _greet(at: Address) -> None:
    print(f"OpenAI API at http://{at}/v1")
    sys.stdout.flush()


def _greet_json(at: Address) -> None:
    print(json.dumps({"http": f"http://{at}"}), flush=True)
