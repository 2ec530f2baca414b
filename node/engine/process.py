"""The main program of an engine process: one vLLM engine, driven by messages from the node's agent.

One thread owns the engine and runs the loop; a reader and a writer thread serve the message socket, a third
receives sockets of KV transfers, and each transfer has its own (see `transfers`). When the agent closes the
message socket, or dies, the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from . import protocol
from .connector import P2PConnector, receive_params, send_params
from .hub import TransferHub
from .logfile import redirect_output

_log = logging.getLogger(__name__)

SUPPORTED_VLLM = "0.32."
CPU_KV_CACHE_MIB = 256
MAX_REASON = 400  # characters of an error that are shown; the log has all of it
IDLE_WAIT_S = 0.001  # between steps while only KV transfers are awaited


class StartError(Exception):
    """The engine cannot start; the text is one line for the user."""


def run_engine(config: protocol.EngineConfig, messages: socket.socket, sockets: socket.socket) -> int:
    """Load the model and serve until told to stop. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if config.log_file:
        redirect_output(Path(config.log_file))
    outbox = Outbox(messages)
    inbox: queue.SimpleQueue[protocol.ToEngine] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(messages, inbox), name="agent-reader", daemon=True).start()
    started = time.monotonic()
    try:
        with own_temporary_folder():
            runner = EngineRunner(config, outbox)
    except StartError as error:
        _log.exception("the engine does not start")
        outbox.send(protocol.StartFailed(reason=str(error)))
        outbox.flush()
        return 1
    threading.Thread(target=_accept, args=(sockets, runner.hub), name="kv-acceptor", daemon=True).start()
    outbox.send(runner.ready(time.monotonic() - started))
    runner.loop(inbox)
    outbox.flush()
    return 0


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[None]:
    """Where vLLM puts the rendezvous file that it needs while it starts, and does not remove."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="p2pserve-engine-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


class Outbox:
    """Messages to the agent, written by a thread of their own so that a slow agent cannot stall a step."""

    def __init__(self, messages: socket.socket) -> None:
        self._socket = messages
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="agent-writer", daemon=True).start()

    def send(self, message: protocol.Message) -> None:
        """Queue a message."""
        self._queue.put(protocol.frame(message))

    def flush(self) -> None:
        """Wait until everything queued so far has been written (at most 5 s)."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(5)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._socket.sendall(item)
            except OSError:
                os._exit(0)  # the agent is gone, and with it the reason for this process


def _read(messages: socket.socket, inbox: queue.SimpleQueue[protocol.ToEngine]) -> None:
    unframer = protocol.Unframer()
    while True:
        try:
            data = messages.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        for body in unframer.feed(data):
            try:
                inbox.put(protocol.to_engine.decode(body))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                _log.warning("refused a message of the agent: %s", error)


def _accept(sockets: socket.socket, hub: TransferHub) -> None:
    """Take over accepted sockets; each packet is what the connection said first, with the descriptor beside it."""
    while True:
        try:
            hello, descriptors, _, _ = socket.recv_fds(sockets, 64, 1)
        except OSError:
            return
        if not hello:
            return
        for descriptor in descriptors:
            hub.attach(hello, socket.socket(fileno=descriptor))


class EngineRunner:
    """A vLLM engine and the loop around it. Everything but the constructor runs on one thread."""

    def __init__(self, config: protocol.EngineConfig, outbox: Outbox) -> None:
        self._config = config
        self._outbox = outbox
        self._engine = build_engine(config)
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler  # in-process engine core
        geometry = P2PConnector.geometry
        assert geometry is not None  # register_kv_caches has run
        self.hub = TransferHub(geometry, config.transfer_buffer_mib << 20, outbox.send)
        P2PConnector.hub = self.hub
        self._geometry = geometry
        self._live: dict[str, float] = {}  # request -> its deadline, on this process's clock
        self._eos = eos_tokens(self._engine.model_config)
        self._vocabulary = int(self._engine.model_config.get_vocab_size())
        self._reported: protocol.EngineStats | None = None

    def ready(self, load_s: float) -> protocol.Ready:
        """Describe the engine, with the speed of its device measured now."""
        import vllm
        from vllm.platforms import current_platform

        model = self._engine.model_config
        tflops, memory_gbps = measure_device(current_platform.device_type, model.dtype)
        cache = self._engine.vllm_config.cache_config
        return protocol.Ready(
            pid=os.getpid(),
            engine=f"vllm{'-cpu' if current_platform.is_cpu() else ''} {vllm.__version__}",
            device=current_platform.device_type,
            dtype=str(model.dtype).removeprefix("torch."),
            layers=self._geometry.layers,
            kv_heads=self._geometry.heads,
            head_dim=self._geometry.head_dim,
            vocabulary=self._vocabulary,
            max_model_len=model.max_model_len,
            kv_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
            eos_tokens=self._eos,
            load_s=load_s,
            tflops=tflops,
            memory_gbps=memory_gbps,
        )

    def loop(self, inbox: queue.SimpleQueue[protocol.ToEngine]) -> None:
        """Serve until `Stop`. An exception of vLLM's ends the process: its state cannot be trusted any more."""
        while True:
            while not inbox.empty() or not self._busy():
                message = inbox.get()
                if isinstance(message, protocol.Stop):
                    return
                self._handle(message)
            outputs = self._engine.step()
            late = self._expire()
            self._publish(outputs, late)
            if not outputs and not late and not self._scheduler.running:
                time.sleep(IDLE_WAIT_S)

    def _busy(self) -> bool:
        # Not has_unfinished_requests(): finished requests whose cleanup the connector has not seen count too.
        return bool(self._scheduler.has_requests())

    def _handle(self, message: protocol.ToEngine) -> None:
        match message:
            case protocol.Submit(request=request):
                try:
                    self._submit(message)
                except Exception as error:
                    # Whatever vLLM has against a request, it says so before the scheduler has it (its own errors are
                    # no ValueErrors): that costs the request, not the others.
                    _log.warning("refused request %s: %s", request, error)
                    self._give_up(message, " ".join(str(error).split())[:MAX_REASON])
            case protocol.Cancel(request=request):
                if self._live.pop(request, None) is not None:
                    self._engine.abort_request([request])
            case protocol.AbortTransfer(transfer=transfer, reason=reason):
                self.hub.abort(transfer, reason)
            case protocol.SetPaths(link=link, paths=paths):
                self.hub.set_paths(link, paths)
            case protocol.CloseLink(link=link, reason=reason):
                self.hub.close_link(link, reason)
            case protocol.Stop():
                raise AssertionError("handled by the loop")

    def _submit(self, submit: protocol.Submit) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        worst = max(submit.prompt)
        if worst >= self._vocabulary:  # would fail inside a step, and take the engine with it
            raise ValueError(f"token {worst} is beyond the model's vocabulary of {self._vocabulary}")
        params: dict[str, Any] | None = None
        if submit.send is not None and submit.outlet is not None:
            params = send_params(submit.send.transfer)
            self.hub.send(submit.send, submit.outlet, len(submit.prompt))
        elif submit.receive is not None and submit.inlet is not None:
            params = receive_params(submit.receive.transfer, submit.receive_tokens)
            self.hub.expect(submit.receive, submit.inlet, submit.receive_tokens)
        sampling = submit.sampling
        self._live[submit.request] = time.monotonic() + submit.deadline_s
        self._engine.add_request(
            submit.request,
            {"prompt_token_ids": list(submit.prompt)},
            SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                ignore_eos=sampling.ignore_eos,
                stop_token_ids=[] if sampling.ignore_eos else list(self._eos),
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args={"kv_transfer_params": params} if params else None,
            ),
        )

    def _give_up(self, submit: protocol.Submit, reason: str) -> None:
        self._live.pop(submit.request, None)
        for ticket in (submit.send, submit.receive):
            if ticket is not None:
                self.hub.abort(ticket.transfer, "the request was refused")
                self.hub.close_incoming(ticket.transfer)
        refused = protocol.NewTokens(submit.request, (), "refused", reason=reason)
        self._outbox.send(protocol.Step(outputs=(refused,), stats=self._stats()))

    def _expire(self) -> list[protocol.NewTokens]:
        now = time.monotonic()
        late = [request for request, deadline in self._live.items() if now > deadline]
        for request in late:
            del self._live[request]
        if late:
            self._engine.abort_request(late)
        return [protocol.NewTokens(request, (), "deadline") for request in late]

    def _publish(self, outputs: list[Any], late: list[protocol.NewTokens]) -> None:
        news = list(late)
        for output in outputs:
            if output.request_id not in self._live:
                continue
            completion = output.outputs[0]
            finish = completion.finish_reason if output.finished else None
            if output.finished:
                del self._live[output.request_id]
            news.append(
                protocol.NewTokens(
                    output.request_id, tuple(completion.token_ids), finish, output.num_cached_tokens or 0
                )
            )
        stats = self._stats()
        if news or stats != self._reported:  # also when requests have gone without a word: routes follow the load
            self._reported = stats
            self._outbox.send(protocol.Step(outputs=tuple(news), stats=stats))

    def _stats(self) -> protocol.EngineStats:
        running, waiting = self._scheduler.get_request_counts()
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return protocol.EngineStats(
            running, waiting, self._scheduler.get_kv_cache_usage(), free * self._scheduler.block_size
        )


def build_engine(config: protocol.EngineConfig) -> Any:
    """Make a single-process vLLM engine with the KV connector. Raises StartError with the first cause."""
    import vllm
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    if not vllm.__version__.startswith(SUPPORTED_VLLM):
        raise StartError(f"vLLM {vllm.__version__} is installed; p2pserve works with {SUPPORTED_VLLM}x")
    on_cpu = current_platform.is_cpu()
    # On a CPU 16-bit products round differently with each batch shape, and greedy answers would depend on who
    # else is being served; float32 costs little there and makes a replayed request exact.
    dtype = config.dtype if config.dtype != "auto" else "float32" if on_cpu else "auto"
    settings: dict[str, Any] = {"dtype": dtype}
    kv_cache_mib = config.kv_cache_mib or (CPU_KV_CACHE_MIB if on_cpu else None)
    if kv_cache_mib is not None:
        settings["kv_cache_memory_bytes"] = kv_cache_mib << 20
    if config.max_model_len is not None:
        settings["max_model_len"] = config.max_model_len
    try:
        return LLMEngine.from_engine_args(
            EngineArgs(
                **settings,
                model=config.model,
                max_num_batched_tokens=config.max_batched_tokens,
                max_num_seqs=config.max_requests,
                gpu_memory_utilization=0.01 if on_cpu else 0.92,
                enforce_eager=on_cpu,
                skip_tokenizer_init=True,
                disable_log_stats=True,
                enable_prefix_caching=True,
                kv_transfer_config=KVTransferConfig(
                    kv_connector="P2PConnector",
                    kv_connector_module_path="p2pserve.node.engine.connector",
                    kv_role="kv_both",
                    kv_load_failure_policy="recompute",
                ),
            )
        )
    except Exception as error:
        # vLLM's configuration errors come wrapped in pages of context; the first line says what is wrong.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = " ".join(lines[:3]) or type(error).__name__
        if len(text) > MAX_REASON:
            text = f"{text[:MAX_REASON]}..."
        raise StartError(f"vLLM cannot load {config.model}: {text}") from error


def eos_tokens(model_config: Any) -> tuple[int, ...]:
    """The token ids that end an answer: the model's and those of its generation settings."""
    found: set[int] = set()
    generation = model_config.try_get_generation_config() or {}
    for value in (getattr(model_config.hf_config, "eos_token_id", None), generation.get("eos_token_id")):
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list):
            found.update(value)
    return tuple(sorted(found))


def measure_device(device: str, dtype: Any, budget_s: float = 0.1) -> tuple[float, float]:
    """Return (TFLOP/s of a 1024^3 matrix product, GB/s of a 64 MiB copy, read and write counted), medians."""
    import torch

    a = torch.rand(1024, 1024, device=device).to(dtype)
    source = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def median_seconds(work: Any) -> float:
        work()
        samples: list[float] = []
        until = time.perf_counter() + budget_s
        while time.perf_counter() < until or len(samples) < 3:
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            samples.append(time.perf_counter() - begin)
        return sorted(samples)[len(samples) // 2]

    product_s = median_seconds(lambda: a @ a)
    copy_s = median_seconds(lambda: target.copy_(source))
    return 2 * 1024**3 / product_s / 1e12, 2 * source.numel() / copy_s / 1e9
