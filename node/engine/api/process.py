"""An API process from its fork to its end: vLLM's app behind a `Door`, on the sockets that the agent passes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from functools import partial
from typing import Any, final

import uvicorn

from ...box.heap import return_freed_memory
from ..process import AgentSockets, StartError
from ..protocol import StartFailed, frame
from .agent_link import AgentLink
from .carrying import Carrier
from .door import Door
from .mounts import mount
from .protocol import CARRY, LISTENER, ApiConfig, ApiReady

_log = logging.getLogger(__name__)

KEEP_ALIVE_S = 5  # an idle connection of a client


def run_api(config: ApiConfig, sockets: AgentSockets) -> int:
    """Serve until the agent hangs up; returns the exit status."""
    import uvloop

    try:
        return uvloop.run(_serve(config, sockets))
    except StartError as error:
        _log.exception("the API process does not start")
        sockets.messages.setblocking(True)
        sockets.messages.sendall(frame(StartFailed(reason=str(error))))
        return 1


async def _serve(config: ApiConfig, sockets: AgentSockets) -> int:
    from .vllm_front import VERSION, build_server  # seconds, where the fork server has not imported it

    link = AgentLink(sockets)
    carrier = Carrier(link)
    app, llm = await build_server(config, link, carrier.carry)
    whole, open_paths = mount(app, link, config)
    server = _Server(app, partial(Door, whole, config, llm, open_paths), carrier)
    link.on_socket = server.take
    return_freed_memory()
    await link.open()
    link.send(ApiReady(pid=os.getpid(), version=VERSION))
    await server.serve(sockets=[])
    return 0


@final
class _Server(uvicorn.Server):
    """Uvicorn on sockets that come while it runs: who comes through the agent is vouched for, and needs no key."""

    def __init__(self, app: Any, door: Any, carrier: Carrier) -> None:
        public, vouched = (
            uvicorn.Config(
                door(is_vouched=is_vouched),
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                ws="none",
                lifespan="on",
            )
            for is_vouched in (False, True)
        )
        super().__init__(public)
        vouched.load()
        self._configs = {True: public, False: vouched}
        self._carrier = carrier
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, kind: bytes, given: socket.socket) -> None:
        """Serve on a socket that the agent has passed, unless it is to carry a request of ours."""
        if kind.startswith(CARRY):
            self._carrier.take(kind, given)
            return
        task = asyncio.get_running_loop().create_task(self._take(kind == LISTENER, given))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, is_listener: bool, given: socket.socket) -> None:
        while not self.started:  # noqa: ASYNC110 (uvicorn has no event for that, and it is a moment)
            await asyncio.sleep(0.005)
        config = self._configs[is_listener]
        given.setblocking(False)
        loop = asyncio.get_running_loop()

        def make_protocol() -> asyncio.Protocol:
            made: Any = config.http_protocol_class
            found: asyncio.Protocol = made(config=config, server_state=self.server_state, app_state=self.lifespan.state)
            return found

        if is_listener:
            self.servers.append(await loop.create_server(make_protocol, sock=given))
        else:
            await loop.connect_accepted_socket(make_protocol, given)
