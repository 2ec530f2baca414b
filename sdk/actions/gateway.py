"""`p2pserve gateway`: the OpenAI endpoint of a network on this machine, which needs no engine for it."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import trio

from ...bootstrap import Address, Role
from ...bootstrap.network import Network
from ...node.http.admission import FrontRules, check_listen
from ...node.http.asking import HttpAsking
from ...node.http.front import HttpFront
from ..environment import require_network
from ..errors import UsageError
from ..session import check_target, enter_network, find_network
from .http_options import read_admin_token, read_http, read_keys

Greet = Callable[[Address], None]


def gateway(arguments: SimpleNamespace) -> int:
    """`p2pserve gateway`. Serves until a signal."""
    listen = read_http(arguments.http)
    keys = read_keys(arguments.api_key, arguments.api_key_file)
    rules = FrontRules(
        keys=tuple(key.secret for key in keys),
        needs_no_key=arguments.no_api_key,
        admin_token=read_admin_token(arguments.admin_token),
    )
    check_listen(listen, rules)
    where, token = require_network(arguments.bootstrap, arguments.token)
    check_target(where, token)
    greet = _greet_json if arguments.format == "json" else _greet
    return trio.run(_serve_until_signal, where, token, listen, rules, arguments.timeout_s, greet)


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
            front = HttpFront(HttpAsking(network, nursery), rules_of(network, rules))
            async with enter_network(network), trio.open_nursery() as serving:
                greet(await serving.start(front.serve, listen))
                code = 0
    return code


def rules_of(network: Network, rules: FrontRules) -> FrontRules:
    """With what the join token lets it carry, and whose sessions its admins have. Raises UsageError."""
    if rules.admin_token is not None and network.asks_as is not Role.ADMIN:
        raise UsageError(
            f"admin_token: with a {network.asks_as.value}'s join token this gateway carries neither /dashboard nor "
            "/p2p/v1; leave it out (P2PSERVE_ADMIN_TOKEN, too), or join with an admin's: p2pserve token create "
            "--role admin"
        )
    return replace(rules, role=network.asks_as, realm=network.peer_id)


def _greet(at: Address) -> None:
    print(f"OpenAI API at http://{at}/v1")
    sys.stdout.flush()


def _greet_json(at: Address) -> None:
    print(json.dumps({"http": f"http://{at}"}), flush=True)
