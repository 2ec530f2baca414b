"""Compiled versions of a codec's heavy functions, made while the plain ones serve (`kv4` has C++ instead: `native`).

A function handed to `Accelerated` is traced and compiled by TorchInductor into vector code, without
TorchDynamo: its guards and caches depend on grad mode, thread count and how often a function was compiled,
while the codecs' functions depend on nothing but their arguments. The compiled code releases the GIL.

Three modes, from the environment variable P2PSERVE_KERNELS or `set_mode`:

- `auto` (the default): nothing is compiled until 64 MiB of KV have gone through this process; then each function
  is compiled in a background thread when it is first needed, and takes over when it is ready. Both give the same
  bytes, so it may do so at any moment.
- `eager`: only the reference.
- `compiled`: compile at the first call and wait for it (some 10 seconds for each codec and shape of heads).

Where no C++ compiler is found, or it fails, the reference goes on and one line of the log says why. Inductor keeps
what it compiled in the folder TORCHINDUCTOR_CACHE_DIR, by default one of this user in the temporary folder.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from queue import SimpleQueue
from subprocess import SubprocessError

import torch

from .errors import CodecError

__all__ = ["AUTO_AFTER_BYTES", "MODE_VARIABLE", "Accelerated", "Mode", "failure", "mode", "ready", "set_mode", "submit"]

MODE_VARIABLE = "P2PSERVE_KERNELS"

AUTO_AFTER_BYTES = 64 * 2**20
"""16-bit KV that a process codes before it is worth some seconds of one core."""

Outputs = tuple[torch.Tensor, ...]
Function = Callable[..., Outputs]
Signature = tuple[tuple[torch.dtype, tuple[int, ...]], ...]

_log = logging.getLogger(__name__)

# What compiling can raise: the compiler's absence or failure, a full disk, an operation inductor does not know.
_FAILURES = (
    *(RuntimeError, OSError, ImportError, SubprocessError, SyntaxError, Warning),
    *(AttributeError, LookupError, TypeError, ValueError, AssertionError),
)


class Mode(StrEnum):
    """Which code runs the codecs on a CPU."""

    AUTO = "auto"
    EAGER = "eager"
    COMPILED = "compiled"


class _Process:
    """What all `Accelerated` of a process share. The lock guards every field."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.mode: Mode | None = None
        self.coded_bytes = 0
        self.failed = ""
        self._jobs: SimpleQueue[tuple[Callable[[], None], threading.Event]] = SimpleQueue()
        self._worker: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> threading.Event:
        """Do `job` after those before it; the event says when. A process may end without waiting for that."""
        done = threading.Event()
        with self.lock:
            self._jobs.put((job, done))
            if self._worker is None or not self._worker.is_alive():
                self._worker = threading.Thread(target=self._work, name="kernels-compile", daemon=True)
                self._worker.start()
        return done

    def _work(self) -> None:
        while True:
            job, done = self._jobs.get()
            try:
                job()
            finally:
                done.set()


_PROCESS = _Process()


def mode() -> Mode:
    """The mode in force. Raises `CodecError` where the environment names none."""
    with _PROCESS.lock:
        if _PROCESS.mode is None:
            _PROCESS.mode = _named(os.environ.get(MODE_VARIABLE, Mode.AUTO))
        return _PROCESS.mode


def set_mode(wanted: Mode | str) -> None:
    """Use this mode from now on, in all threads."""
    named = _named(wanted)
    with _PROCESS.lock:
        _PROCESS.mode = named


def ready(nbytes: int) -> bool:
    """Whether a block of `nbytes` of 16-bit KV, now counted, should ask for compiled functions."""
    chosen = mode()
    with _PROCESS.lock:
        _PROCESS.coded_bytes += nbytes
        return chosen is not Mode.EAGER and (chosen is Mode.COMPILED or _PROCESS.coded_bytes >= AUTO_AFTER_BYTES)


def submit(job: Callable[[], None]) -> threading.Event:
    """Do `job` in the thread that compiles, after what is waiting there; the event says when it is done."""
    return _PROCESS.submit(job)


def failure() -> str:
    """Why this process stays with the reference; empty if nothing failed."""
    with _PROCESS.lock:
        return _PROCESS.failed


def _named(wanted: str) -> Mode:
    try:
        return Mode(wanted)
    except ValueError:
        known = ", ".join(Mode)
        raise CodecError(f"{MODE_VARIABLE}={wanted!r} is not a mode of the kernels; known are {known}") from None


class Accelerated:
    """One function of CPU tensors and what it is compiled to, once for each shape that does not vary.

    `function` takes tensors, returns a tuple of new tensors, and takes no decision that depends on data.
    `varies` names, for each argument, the dimension whose size differs from call to call; it is the same size in
    all of them.
    """

    def __init__(self, name: str, function: Function, *, varies: Sequence[int]) -> None:
        self._name = name
        self._function = function
        self._varies = tuple(varies)
        self._lock = threading.Lock()
        self._compiled: dict[Signature, Function | None] = {}

    def __call__(self, *tensors: torch.Tensor) -> Outputs | None:
        """What `function` returns, or None while it is not compiled: run the reference then."""
        signature = tuple(
            (tensor.dtype, (*tensor.shape[:varies], -1, *tensor.shape[varies + 1 :]))
            for tensor, varies in zip(tensors, self._varies, strict=True)
        )
        # Threads get torch's number of threads from this call; compiled code asks OpenMP, which knows only of those
        # that did.
        torch.get_num_threads()
        if signature not in self._compiled:
            self._ask_for(signature)
        compiled = self._compiled.get(signature)
        return None if compiled is None else tuple(compiled(*(tensor.contiguous() for tensor in tensors)))

    def _ask_for(self, signature: Signature) -> None:
        chosen = mode()
        with self._lock:
            if signature in self._compiled or chosen is Mode.EAGER:
                return
            if chosen is Mode.AUTO:
                self._compiled[signature] = None
        done = _PROCESS.submit(lambda: self._compile(signature))
        if chosen is Mode.COMPILED:
            done.wait()

    def _compile(self, signature: Signature) -> None:
        compiled: Function | None = None
        if not _PROCESS.failed:
            try:
                compiled = _compiled(self._function, signature)
            except _FAILURES as failure:
                _PROCESS.failed = f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"
                _log.warning("KV codecs stay with plain torch: compiling %s: %s", self._name, _PROCESS.failed)
        with self._lock:
            self._compiled[signature] = compiled


def _compiled(function: Function, signature: Signature) -> Function:
    """`function` as vector code for these dtypes and shapes; -1 stands for the size that varies."""
    # Inductor takes a second to import and is not needed by a process that only ever runs the reference.
    from torch import _inductor as inductor
    from torch._dynamo.source import ConstantSource
    from torch._functorch import config as functorch
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    fake = FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=False))
    arguments = []
    for i, (dtype, shape) in enumerate(signature):
        example = torch.empty([_EXAMPLE_SIZE if size < 0 else size for size in shape], dtype=dtype)
        sizes = [DimDynamic.DUCK if size < 0 else DimDynamic.STATIC for size in shape]
        context: StatelessSymbolicContext[..., None] = StatelessSymbolicContext(dynamic_sizes=sizes)
        arguments.append(fake.from_tensor(example, symbolic_context=context, source=ConstantSource(f"argument{i}")))
    # Graphs are traced here, not by TorchDynamo, whose cache wants more of them than there is; inductor's own serves.
    with torch.no_grad(), functorch.patch(enable_autograd_cache=False):
        graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*arguments)
        run: Function = inductor.compile(graph, list(arguments), options=_OPTIONS)
    return run


# Not the size of anything else, and no multiple of a vector: what holds for it holds in general.
_EXAMPLE_SIZE = 1037

_OPTIONS = {
    "cpp.dynamic_threads": True,  # ask at run time how many threads to use
    "cpp_wrapper": True,  # releases the GIL
    "compile_threads": 1,  # no pool of processes beside a server
    # Expressions are written once for all their uses: what must be in memory in between is a function of its own.
    "realize_opcount_threshold": 1 << 20,
    "realize_reads_threshold": 1 << 20,
}
