"""A process that imports an engine once and forks engine processes from itself in under a second each.

    python -m p2pserve.node.engine.forkserver BACKEND [with-api] FD [FD ...]

BACKEND, one of `backends`, is what it imports ahead, and with `with-api` vLLM's API server; engines of other backends
import what they need themselves, and so does an API process where it was not expected.

Each FD is one end of a `SOCK_SEQPACKET` pair; an agent at the other end sends `Spawn` with the two sockets of the new
engine and hears of `Preloaded` and `EngineExited`. Several agents on one box may share a server, each over its own
descriptor, or by dialling one that listens. It leaves no file behind, and it ends when the last agent has closed.

Engines that are started with `sharing` share one process (`sharing.process`); each other one has a process for itself.

The server must stay single-threaded and must never run a torch operation or touch CUDA: a forked child
would inherit locks without the threads that hold them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..box.heap import release_library_pages, return_freed_memory
from . import protocol
from .api.protocol import WITH_API, ApiConfig, spawn
from .backend import EngineBackend
from .backends import find_backend
from .process import AgentSockets, enter_process, redirect_output
from .sharing.children import SharedChildren, SharingEngine

_log = logging.getLogger(__name__)

LAST_EXITS_S = 3.0
REAP_INTERVAL_S = 0.1  # how late an exit may be reported; the engine's own socket tells of it at once


class ForkServer:
    """The loop: spawn on request, report exits, end with the last channel."""

    def __init__(self, backend: EngineBackend, channels: list[socket.socket], *, serves_api: bool = False) -> None:
        self._backend = backend
        self._serves_api = serves_api
        self._selector = selectors.DefaultSelector()
        self._channels = {channel for channel in channels if not _listens(channel)}
        self._listeners = set(channels) - self._channels
        for channel in self._channels:  # who dials waits until all is imported
            self._selector.register(channel, selectors.EVENT_READ)
        self._preloaded: protocol.Preloaded | None = None
        self._children: dict[int, tuple[socket.socket, int]] = {}
        self._shared = SharedChildren()

    def run(self) -> None:
        """Serve until every channel is closed."""
        started = time.monotonic()
        try:
            version = self._backend.preload()
            if self._serves_api:
                with contextlib.suppress(ImportError):  # the API process says so itself, and engines do without
                    importlib.import_module(".api.preload", __package__)
        except ImportError as error:
            self._tell_all(
                protocol.PreloadFailed(reason=f"the engine {self._backend.name} cannot be imported: {error}")
            )
            return
        gc.collect()
        gc.freeze()  # children then share these pages instead of copying them at their first collection
        return_freed_memory()
        release_library_pages()  # this process computes nothing, and its children map what they use
        seconds = time.monotonic() - started
        self._preloaded = protocol.Preloaded(pid=os.getpid(), version=version, seconds=seconds)
        self._tell_all(self._preloaded)
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)
        while self._channels:
            for key, _ in self._selector.select(REAP_INTERVAL_S):
                self._receive(key.fileobj)  # type: ignore[arg-type]
            self._reap()
        self._wait_for_engines()

    def _wait_for_engines(self) -> None:
        """The agents are gone, so the engines end too: see them off, or they stay as zombies of nobody."""
        give_up = time.monotonic() + LAST_EXITS_S
        while (self._children or self._shared.pid) and time.monotonic() < give_up:
            self._reap()
            time.sleep(REAP_INTERVAL_S / 10)
        for pid in (*self._children, *([self._shared.pid] if self._shared.pid else ())):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _tell_all(self, event: protocol.EngineMessage) -> None:
        for channel in tuple(self._channels):
            self._tell(channel, event)

    def _tell(self, channel: socket.socket, event: protocol.EngineMessage) -> None:
        try:
            channel.send(protocol.pack(event))
        except OSError:  # that agent is gone; its engines end by themselves
            self._drop(channel)

    def _drop(self, channel: socket.socket) -> None:
        if channel in self._channels:
            self._channels.discard(channel)
            self._selector.unregister(channel)
            channel.close()

    def _accept(self, listener: socket.socket) -> None:
        channel, _ = listener.accept()
        self._channels.add(channel)
        self._selector.register(channel, selectors.EVENT_READ)
        if self._preloaded is not None:
            self._tell(channel, self._preloaded)

    def _receive(self, channel: socket.socket) -> None:
        if channel in self._listeners:
            self._accept(channel)
            return
        try:
            packet, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 2)
        except ConnectionError:
            packet, descriptors = b"", []
        if not packet:
            self._drop(channel)
            return
        try:
            request = spawn.decode(packet)
        except msgspec.MsgspecError as error:
            _log.warning("refused a packet: %s", error)
            for descriptor in descriptors:
                os.close(descriptor)
            return
        messages, sockets = (socket.socket(fileno=descriptor) for descriptor in descriptors)
        ends = AgentSockets(messages, sockets)
        if isinstance(request, protocol.Spawn) and request.config.sharing is not None:
            self._share(SharingEngine(channel, request), ends)
        else:
            pid = os.fork()
            if pid == 0:
                self._become(request.config.log_file, lambda: _run(request.config, ends))
            self._children[pid] = (channel, request.engine)
            ends.close()

    def _share(self, engine: SharingEngine, ends: AgentSockets) -> None:
        """Have it join the others that share a process, or make that."""
        if not self._shared.pass_on(engine, ends):
            control, spawn = self._shared.prepare(), engine.spawn
            pid = os.fork()
            if pid == 0:
                self._become(spawn.config.log_file, lambda: self._shared.run(control, spawn, ends))
            control.close()
            self._shared.add(pid, engine)
        ends.close()

    def _become(self, log_file: str | None, run: Callable[[], int]) -> None:
        for channel in self._channels | self._listeners:
            channel.close()
        self._selector.close()
        status = 1
        try:
            enter_process(log_file)
            status = run()
        except BaseException:
            traceback.print_exc()  # nobody else would: the process ends below
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: the parent's frames below must not run again in the child.
            os._exit(status)

    def _reap(self) -> None:
        for channel, exited in self._shared.look():
            self._tell(channel, exited)
        while self._children or self._shared.pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self._shared.pid:
                ended = self._shared.end(code)
                for channel, exited in ended.exits:
                    self._tell(channel, exited)
                for each, ends in ended.left_over:
                    self._share(each, ends)
            else:
                channel, engine = self._children.pop(pid)
                self._tell(channel, protocol.EngineExited(engine=engine, status=code))


def _listens(channel: socket.socket) -> bool:
    return bool(channel.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _run(config: protocol.EngineConfig | ApiConfig, sockets: AgentSockets) -> int:
    if isinstance(config, protocol.EngineConfig):
        return find_backend(config.backend).run(config, sockets)
    from .api.process import run_api  # web servers, which engines do without

    return run_api(config, sockets)


def main() -> None:
    """Command line: backend, descriptors of the channels; `P2PSERVE_ENGINE_LOG` names the file for output."""
    # Ctrl-C goes to the whole terminal; only the agent acts on it, and closes the channel in time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.environ.get("P2PSERVE_ENGINE_LOG")
    if log:
        redirect_output(Path(log))
    name, *descriptors = sys.argv[1:]
    serves_api = descriptors[0] == WITH_API
    if serves_api:
        del descriptors[0]
    channels = [socket.socket(fileno=int(text)) for text in descriptors]
    ForkServer(find_backend(name), channels, serves_api=serves_api).run()


if __name__ == "__mp_main__":  # in a worker that vLLM spawns, since it must not fork (WSL): it inherits nothing
    from .vllm_program.preload import install_model_runners

    install_model_runners()
elif __name__ == "__main__":
    main()
