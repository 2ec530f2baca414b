"""`p2pserve join` with several models, or without one and --max-services: a node for each, whose engines share one
process and step one at a time."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Final, final

import trio

from ...bootstrap import JoinToken, parse_join_target
from ...bootstrap.addresses import names_one_place
from ...coordinator.names import name_of
from ...node.box.hardware import probe
from ...node.box.home import lock_home
from ...node.engine.agent_side.engine_link import EngineStartError
from ...node.engine.agent_side.fork_server import open_fork_server
from ...node.settings import WAN
from ..environment import require_network
from ..errors import UsageError
from ..options.secrets import STDIN
from ..options.values import BOX, folder_of_node
from .dividing import check_places, emulated_cards, share_box
from .processes import BoxNodes, Tell
from .running import READ_ALREADY, find_announced_part, run_until_signal, show_lines
from .running_box import identify

_BACKLOG: Final = 16


def join_with_models(arguments: SimpleNamespace, models: Sequence[str | None]) -> int:
    """Run a node for each model (None: one that the network gives it) until all of them have left; the exit code.
    Raises UsageError, AddressError, TokenError, GpuError or NodeError."""
    given = vars(arguments)
    if given["api_key_file"] == STDIN:
        raise UsageError("api_key_file: several nodes do not read standard input; give a file")
    where, token = require_network(given["bootstrap"], given["token"])
    cards, hardware = emulated_cards(given), probe()
    parts = share_box(given, models, len(hardware.gpus) if cards is None else cards.count)
    target = parse_join_target(where, token)
    if target.token is not None:  # without one, the first node says what is missing
        check_places(JoinToken.parse(target.token).grant, len(parts))
    options = {name: value for name, value in given.items() if name not in READ_ALREADY}
    home: Path = options["home"].expanduser()
    with lock_home(home / BOX), tempfile.TemporaryDirectory(prefix="p2pserve-") as folder:
        if not options["site"] and not names_one_place(find_announced_part(parts[0]).address.host):
            options["site"] = name_of(identify(home, parts[0]))  # see `running`: they are at one place all the same
        options["beside"] = tuple(str(identify(home, part)) for part in parts)
        print(_describe(models), file=sys.stderr, flush=True)
        tell, greet = show_lines(len(folder_of_node(len(parts))), arguments.format)
        options["engine_socket"] = at = Path(folder) / "engines"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(at))
            listener.listen(_BACKLOG)
            nodes = BoxNodes(parts, options, tell=tell, greet=greet, tuning=WAN)
            server = SharedServer(
                listener,
                log=home / BOX / "engine.log",
                threads=options["threads"] or max(1, hardware.cores - 1),
                backend=options["backend"],
                serves_api=options["http"] is not None,
            )
            return trio.run(run_until_signal, SharedBox(nodes, server, tell))


def _describe(models: Sequence[str | None]) -> str:
    given = [model for model in models if model is not None]
    if not given:
        return f"{len(models)} services at most share this box, as the network says"
    return f"{len(given)} models share this box: {', '.join(given)}"


@final
class SharedServer:
    """The fork server of all nodes, which they dial; another one when it has ended."""

    def __init__(self, listener: socket.socket, *, log: Path, threads: int, backend: str, serves_api: bool) -> None:
        self._listener = listener
        self._log = log
        self._threads = threads
        self._backend = backend
        self._serves_api = serves_api

    async def keep(self) -> None:
        """Until cancelled. Raises EngineStartError where its engine cannot be imported."""
        while True:
            async with open_fork_server(
                log=self._log,
                threads=self._threads,
                listener=self._listener,
                backend=self._backend,
                serves_api=self._serves_api,
            ) as server:
                await server.wait_ready()
                await server.wait_ended()


@final
class SharedBox:
    """The nodes, and the process that forks their engines."""

    def __init__(self, nodes: BoxNodes, server: SharedServer, tell: Tell) -> None:
        self._nodes = nodes
        self._server = server
        self._tell = tell
        self._failed = False

    def leave(self) -> None:
        """Let all nodes finish their requests and leave; a second time, let them end at once."""
        self._nodes.leave()

    async def run(self) -> int:
        """Run them until all have left; the exit code."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_server)
            code = await self._nodes.run()
            nursery.cancel_scope.cancel()
        return code or int(self._failed)

    async def _keep_server(self) -> None:
        try:
            await self._server.keep()
        except EngineStartError as error:
            self._failed = True
            self._tell(BOX, str(error))
            self._nodes.end()
            self._nodes.leave()
