"""A process that imports vLLM once and forks engine processes from itself in under a second each.

    python -m p2pserve.node.engine.forkserver [--emulated] FD [FD ...]

With `--emulated` it does without vLLM and forks emulated engines only.

Each FD is one end of a `SOCK_SEQPACKET` pair; an agent at the other end sends `Spawn` with the two sockets
of the new engine and hears of `Preloaded` and `EngineExited`. Several agents on one box may share a server,
each over its own descriptor. It leaves no file behind, and it ends when the last agent has closed.

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
from pathlib import Path
from typing import Any

import msgspec

from . import protocol
from .emulated.process import run_emulated_engine
from .logfile import redirect_output

_log = logging.getLogger(__name__)

# What vLLM imports only while it builds an engine: most of a second in each of them.
_IMPORTED_LATE = (
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.renderers.hf",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.pool.flash_maxsim",
)
# The same on a GPU, without what imports FlashInfer (its attention backend, the compiler's passes): that initialises
# CUDA (`capability`).
_IMPORTED_LATE_ON_CUDA = (
    "vllm.compilation.caching",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.model_states.default",
    "vllm.v1.worker.gpu_worker",
)
LAST_EXITS_S = 3.0
EMULATED_ONLY = "--emulated"
REAP_INTERVAL_S = 0.1  # how late an exit may be reported; the engine's own socket tells of it at once


def preload() -> str:
    """Import everything an engine needs and return vLLM's version. Raises ImportError."""
    import vllm
    import vllm.engine.arg_utils
    import vllm.model_executor.models.llama
    import vllm.v1.attention.backends.registry
    import vllm.v1.engine.llm_engine
    from vllm.platforms import current_platform

    late = _IMPORTED_LATE if current_platform.is_cpu() else (*_IMPORTED_LATE, *_IMPORTED_LATE_ON_CUDA)
    for name in late:
        with contextlib.suppress(ImportError):  # each child would find that out for itself
            importlib.import_module(name)
    if current_platform.is_cpu():
        import vllm.v1.attention.backends.cpu_attn
        import vllm.v1.worker.cpu_worker

        from .pipeline import cpu_worker  # noqa: F401  (imported for the children)

        _rebind_kernels(current_platform)
    _install_model_runners()

    from .vllm import process  # noqa: F401  (imported for the children)

    gc.collect()
    gc.freeze()  # children then share these pages instead of copying them at their first collection
    return str(vllm.__version__)


def _install_model_runners() -> None:
    """For the workers of this process and of those that it forks."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from .vllm import seeded_cpu

        seeded_cpu.install()
    else:
        from .vllm import seeded

        seeded.install()


def _rebind_kernels(platform: Any) -> None:
    """Do once what each worker would: vLLM looks through all modules (half a second) for Triton kernels that have a
    C++ version on a CPU. Modules that a child imports later find them replaced already."""
    platform.register_triton_kernel_overrides()
    type(platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


class ForkServer:
    """The loop: spawn on request, report exits, end with the last channel."""

    def __init__(self, channels: list[socket.socket], *, emulated_only: bool = False) -> None:
        self._emulated_only = emulated_only
        self._selector = selectors.DefaultSelector()
        self._channels = set(channels)
        for channel in channels:
            self._selector.register(channel, selectors.EVENT_READ)
        self._children: dict[int, tuple[socket.socket, int]] = {}

    def run(self) -> None:
        """Serve until every channel is closed."""
        started = time.monotonic()
        try:
            version = "" if self._emulated_only else preload()
        except ImportError as error:
            self._tell_all(protocol.PreloadFailed(reason=f"vLLM cannot be imported: {error}"))
            return
        seconds = time.monotonic() - started
        self._tell_all(protocol.Preloaded(pid=os.getpid(), version=version, seconds=seconds))
        while self._channels:
            for key, _ in self._selector.select(REAP_INTERVAL_S):
                self._receive(key.fileobj)  # type: ignore[arg-type]
            self._reap()
        self._bury()

    def _bury(self) -> None:
        """The agents are gone, so the engines end too: see them off, or they stay as zombies of nobody."""
        give_up = time.monotonic() + LAST_EXITS_S
        while self._children and time.monotonic() < give_up:
            self._reap()
            time.sleep(REAP_INTERVAL_S / 10)
        for pid in self._children:
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

    def _receive(self, channel: socket.socket) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 2)
        except ConnectionError:
            packet, descriptors = b"", []
        if not packet:
            self._drop(channel)
            return
        try:
            request = protocol.spawn.decode(packet)
        except msgspec.MsgspecError as error:
            _log.warning("refused a packet: %s", error)
            for descriptor in descriptors:
                os.close(descriptor)
            return
        messages, sockets = (socket.socket(fileno=descriptor) for descriptor in descriptors)
        pid = os.fork()
        if pid == 0:
            self._become_engine(request, messages, sockets)
        messages.close()
        sockets.close()
        self._children[pid] = (channel, request.engine)

    def _become_engine(self, request: protocol.Spawn, messages: socket.socket, sockets: socket.socket) -> None:
        for channel in self._channels:
            channel.close()
        self._selector.close()
        status = 1
        try:
            if request.config.emulation is not None:
                status = run_emulated_engine(request.config, messages, sockets)
            else:
                from .vllm.process import run_engine

                status = run_engine(request.config, messages, sockets)
        except BaseException:
            traceback.print_exc()  # nobody else would: the process ends below
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: the parent's frames below must not run again in the child.
            os._exit(status)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            channel, engine = self._children.pop(pid)
            exited = protocol.EngineExited(engine=engine, status=os.waitstatus_to_exitcode(status))
            self._tell(channel, exited)


def main() -> None:
    """Command line: `--emulated`, descriptors of the channels; `P2PSERVE_ENGINE_LOG` names the file for output."""
    # Ctrl-C goes to the whole terminal; only the agent acts on it, and closes the channel in time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.environ.get("P2PSERVE_ENGINE_LOG")
    if log:
        redirect_output(Path(log))
    descriptors = [text for text in sys.argv[1:] if text != EMULATED_ONLY]
    channels = [socket.socket(fileno=int(text)) for text in descriptors]
    ForkServer(channels, emulated_only=EMULATED_ONLY in sys.argv).run()


if __name__ == "__mp_main__":  # in a worker that vLLM spawns, since it must not fork (WSL): it inherits nothing
    _install_model_runners()
elif __name__ == "__main__":
    main()
