"""`/metrics` of an API process: vLLM's families untouched, and behind them those of the node, `p2pserve:*`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, final

from ...web.fields import KEYS_TOLD

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Render = Callable[[tuple[str, ...] | None], Awaitable[str]]
"""The metrics of the node, with the costs of these API keys, or of all."""

PATHS: Final = frozenset({"/metrics", "/metrics/"})
NEGOTIATED: Final = frozenset({b"accept", b"accept-encoding"})
"""Headers by which vLLM's page would be compressed, or in a format that says where it ends."""


@final
class NodeMetrics:
    """An ASGI app around another: puts what `render` returns behind the page of metrics. Where it raises `silent`,
    since the agent does not answer, that page is vLLM's alone, and says so in a comment."""

    def __init__(self, app: App, render: Render, silent: type[Exception]) -> None:
        self._app = app
        self._render = render
        self._silent = silent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in PATHS or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        plain = {**scope, "headers": [field for field in scope["headers"] if field[0] not in NEGOTIATED]}
        started: MutableMapping[str, Any] = {}

        async def extend(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                started.update(message)
            elif message.get("more_body"):
                started["body"] = started.get("body", b"") + message.get("body", b"")
            else:
                body = started.pop("body", b"") + message.get("body", b"")
                if started["status"] == 200:
                    body += (await self._text(scope.get(KEYS_TOLD, ()))).encode()
                await _send_whole(started, body, send)

        await self._app(plain, receive, extend)

    async def _text(self, keys: tuple[str, ...] | None) -> str:
        try:
            return await self._render(keys)
        except self._silent as error:
            _log.warning("no metrics of the node: %s", error)
            return f"# p2pserve: {' '.join(str(error).split())}\n"


async def _send_whole(started: MutableMapping[str, Any], body: bytes, send: Send) -> None:
    fields = [field for field in started["headers"] if field[0].lower() != b"content-length"]
    await send({**started, "headers": [*fields, (b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})
