"""What stands before every request to the dashboard: who may look, and what a browser may load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


@final
class Guard:
    """ASGI middleware. `admit` answers who may not look; `headers` go with every answer; paths that begin with one of
    `open_to_all` are for everybody."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        admit: Callable[[Request], Response | None],
        headers: Mapping[str, str],
        open_to_all: tuple[str, ...],
    ) -> None:
        self._app = app
        self._admit = admit
        self._headers = headers
        self._open_to_all = open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there are no others here
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        refusal = None if path.startswith(self._open_to_all) else self._admit(Request(scope, receive))
        await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)
