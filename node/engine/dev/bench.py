"""What our engine processes cost over vLLM itself: `python -m p2pserve.node.engine.bench`.

Everything is measured beside the same vLLM with the same settings, driven in this process by the plainest loop there
is: no connector, no agent protocol, no process of ours. Both take turns, so that a busy machine falls on both; figures
are medians over the pairs.

- throughput_ratio_32: tokens per second of 32 requests at once, ours over vLLM's.
- ttft_added_ms: until the agent has the first token of one prompt; idle engines, prefill and decode on two of them, KV
  in `raw`. It is the prefill engine's, as the network shows it; the messages between boxes are not in it. Hand-overs by
  which the engine finds out how KV leaves best come before.
- second_token_added_ms: the same until the decode engine's own first token, the second of the answer.
- pipeline_step_added_ms: per token of one request; a replica of two stages, joined over loopback.
- second_engine_s: from asking a fork server that has started an engine for another one, until that is ready.
- handoff_link_ratio_4000: bytes per second of transferring the KV of a prompt of 4,000 tokens (`handoff_tokens`, where
  the model is shorter) in `raw` over loopback, over those of plain bytes on the same kind of link between two processes
  that do nothing else.
- step_beside_transfer_ratio: time per token of one request while KV comes in, or goes out, at full speed all the time,
  over the same without; the worse of the two.
- api_throughput_ratio_32, api_ttft_added_ms_32: the same load as 32 streams of HTTP, of `p2pserve serve` and of vLLM's
  own API server in turn, and the median of the times to their first tokens. `api_ttft_added_ms`: of a request alone.
- box_memory_mib: what all processes of that `p2pserve serve` take beside weights and KV cache (`bench_servers`).

On a GPU the model is, if none is named, one with random weights of the shape of Llama-3.2-1B, made on the spot.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, final

import msgspec
import trio

from ....coordinator.costs.profile_tracker import ProfileTracker
from ....coordinator.profile import LatencyProfile, PhaseFit, StepSample
from ....coordinator.profile_fit import fit
from ....kvtransport.dev.bench import open_plain_link
from ....kvtransport.errors import TransferError
from ...models import BUNDLED, ModelError, OpenedModel, open_model
from .. import protocol
from ..agent_side.engine_link import EngineError
from ..agent_side.fork_server import fork_server_command, open_fork_server
from ..gpus import has_gpu
from ..process import redirect_output
from ..settings import TransferSettings
from ..trials.random_model import ONE_BILLION, make_model
from ..trials.trial import Trial, TrialEngine, open_trial
from .bench_orders import OrdersReport, measure_orders
from .bench_servers import ServerReport, measure_servers
from .bench_sharing import SharingReport, measure_sharing
from .bench_transfers import BesideTransfer, TransferBench, TransferRate
from .pairs import EnginePair, describe_pairs, median_added, median_ratio

THREADS: Final = 1
LATER_ENGINES: Final = 3
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 32, 64, 128
TTFT_PROMPT: Final = 256
TRIES: Final = 2 * TransferSettings().prefills_enough + 1  # transfers of both kinds, and a first that warms everything
STEP_PROMPT, STEP_TOKENS = 32, 65
STEP_TIMES: Final = 3  # as many pairs: the smallest difference of all, and what else the machine does is in it
# Batches for the profile: (requests, prompt tokens of each)
SWEEP: Final = ((1, 16), (1, 100), (1, 200), (1, 400), (2, 64), (3, 150), (4, 32), (8, 60), (16, 30), (32, 16))
SWEEP_TOKENS: Final = 24
GPU_KV_CACHE_MIB: Final = 768  # of each engine: five share the card; 24,576 positions of the random model


class FirstTokens(msgspec.Struct, frozen=True, kw_only=True):
    """When both came, from when the request was made."""

    first: EnginePair
    second: EnginePair


class EngineBenchReport(ServerReport, frozen=True, kw_only=True):
    """All figures, what they were computed from, and the profile of our engine's own steps."""

    engine: str
    throughput_ratio_32: float
    ttft_added_ms: float
    second_token_added_ms: float
    pipeline_step_added_ms: float
    second_engine_s: float
    handoff_link_ratio_4000: float
    step_beside_transfer_ratio: float
    handoff_tokens: int
    throughput_tokens_s: list[EnginePair]
    ttft_ms: list[EnginePair]
    second_token_ms: list[EnginePair]
    step_ms: list[EnginePair]
    handoff_bytes_s: list[TransferRate]
    step_receiving_ms: list[BesideTransfer]
    step_sending_ms: list[BesideTransfer]
    later_engines_s: list[float]
    first_engine_s: float
    preload_s: float
    profile: LatencyProfile
    steps: list[StepSample]


@final
class PlainEngine:
    """vLLM in this process."""

    def __init__(self, config: protocol.EngineConfig) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from ..scratch import own_temporary_folder
        from ..vllm_program.arguments import engine_arguments

        torch.set_num_threads(config.threads)
        arguments = _with_same_graphs(config, engine_arguments(config))
        with own_temporary_folder():
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._requests = 0

    def run(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[float]]:
        """Answer all prompts at once, with `count` tokens each: the seconds after which each token came."""
        from vllm import RequestOutput, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=count,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        times: dict[str, list[float]] = {}
        began = time.monotonic()
        for prompt in prompts:
            self._requests += 1
            times[str(self._requests)] = []
            self._engine.add_request(str(self._requests), {"prompt_token_ids": list(prompt)}, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                assert isinstance(output, RequestOutput)
                times[output.request_id] += [time.monotonic() - began] * len(output.outputs[0].token_ids)
        return list(times.values())


def _with_same_graphs(config: protocol.EngineConfig, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the CUDA graphs that vLLM leaves to an engine of ours, whose connector has a say in it."""
    from ..vllm_program.arguments import device_kind, stage_config

    if device_kind() == "cpu":
        return arguments
    mode = stage_config(config, "").compilation_config.cudagraph_mode.name
    return {**arguments, "compilation_config": {**arguments.get("compilation_config", {}), "cudagraph_mode": mode}}


@final
class Bench:
    """Measures ours and vLLM's in turn."""

    def __init__(self, trial: Trial, plain: PlainEngine, vocabulary: int, repeats: int) -> None:
        self._trial = trial
        self._plain = plain
        self._vocabulary = vocabulary
        self._repeats = repeats
        self._rng = random.Random(1)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Prompts that no prefix cache has seen."""
        return [[self._rng.randrange(1, self._vocabulary) for _ in range(tokens)] for _ in range(count)]

    async def _pairs(
        self, ours: Callable[[], Awaitable[float]], vllm: Callable[[], float], times: int = 1
    ) -> list[EnginePair]:
        await ours()  # both warm
        vllm()
        return [EnginePair(ours=await ours(), vllm=vllm()) for _ in range(times * self._repeats)]

    async def throughput(self, engine: TrialEngine) -> list[EnginePair]:
        """Tokens per second of many requests that come at once."""

        async def ours() -> float:
            prompts = self.prompts(STREAMS, STREAM_PROMPT)
            began = time.monotonic()
            requests = [engine.submit(prompt, STREAM_TOKENS) for prompt in prompts]
            last = max([(await engine.answer(request)).last_at for request in requests])
            return STREAMS * STREAM_TOKENS / (last - began)

        def vllm() -> float:
            times = self._plain.run(self.prompts(STREAMS, STREAM_PROMPT), STREAM_TOKENS)
            return STREAMS * STREAM_TOKENS / max(each[-1] for each in times)

        return await self._pairs(ours, vllm)

    async def first_tokens(self, prefill: TrialEngine, decode: TrialEngine) -> list[FirstTokens]:
        """Milliseconds until the first two tokens of one answer, begun by one engine and gone on with by the other."""
        link = self._trial.join(decode)

        async def ours() -> tuple[float, float]:
            (prompt,) = self.prompts(1, TTFT_PROMPT)
            send, receive = self._trial.transfer_ends(link, "raw", decode.ready)
            began = time.monotonic()
            request = decode.submit(prompt, 2, receive=receive, receive_tokens=len(prompt), awaits_first_token=True)
            begun = await prefill.answer(prefill.submit(prompt, 1, send=send))
            decode.send_first_token(request, begun.tokens[0])
            answer = await decode.answer(request)
            await prefill.report(send[0].ticket.transfer)
            if answer.cached < len(prompt) or answer.tokens[:1] != begun.tokens:
                raise TransferError(f"{answer.cached} of {len(prompt)} positions and no token were transferred")
            return (begun.first_at - began) * 1e3, (answer.first_at - began) * 1e3

        def vllm() -> tuple[float, float]:
            ((first, second),) = self._plain.run(self.prompts(1, TTFT_PROMPT), 2)
            return first * 1e3, second * 1e3

        pairs = []
        for _ in range(TRIES + self._repeats):
            first, second = zip(await ours(), vllm(), strict=True)
            pairs.append(
                FirstTokens(
                    first=EnginePair(ours=first[0], vllm=first[1]), second=EnginePair(ours=second[0], vllm=second[1])
                )
            )
        return pairs[TRIES:]

    async def step(self, head: TrialEngine) -> list[EnginePair]:
        """Milliseconds per token of one request."""

        async def ours() -> float:
            (prompt,) = self.prompts(1, STEP_PROMPT)
            answer = await head.generate(prompt, STEP_TOKENS)
            return (answer.last_at - answer.first_at) / (STEP_TOKENS - 1) * 1e3

        def vllm() -> float:
            (times,) = self._plain.run(self.prompts(1, STEP_PROMPT), STEP_TOKENS)
            return (times[-1] - times[0]) / (STEP_TOKENS - 1) * 1e3

        return await self._pairs(ours, vllm, STEP_TIMES)

    async def steps(self, engine: TrialEngine) -> list[StepSample]:
        """Samples of the engine's own steps, over batches of many shapes."""
        del engine.iterations[:]
        for requests, tokens in SWEEP * 2:
            asked = [engine.submit(prompt, SWEEP_TOKENS) for prompt in self.prompts(requests, tokens)]
            for request in asked:
                await engine.answer(request)
        return [sample for told in engine.iterations for sample in told.samples]


async def run(
    model: OpenedModel, repeats: int, config: protocol.EngineConfig, servers: ServerReport
) -> EngineBenchReport:
    """Start the engines and measure, for a report that also has what was found of servers. Raises ModelError,
    EngineError, TransferError, OSError."""
    with tempfile.TemporaryDirectory(prefix="p2pserve-bench-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "engine.log"
        config = msgspec.structs.replace(config, model=str(model.fetch()), log_file=str(log))
        async with open_fork_server(log=log, threads=THREADS) as server, open_trial(server) as trial:
            plain = PlainEngine(config)
            await server.wait_ready()
            started: list[TrialEngine] = []
            seconds: list[float] = []
            for _ in range(1 + LATER_ENGINES):
                began = time.monotonic()
                started.append(await trial.start(config))
                seconds.append(time.monotonic() - began)
            first, second, *others = started
            for engine in others:
                engine.stop()
            bench = Bench(trial, plain, model.info.shape.vocabulary, repeats)
            throughput = await bench.throughput(first)
            tokens = await bench.first_tokens(first, second)
            samples = await bench.steps(first)
            half = model.info.layers // 2
            head = await trial.start_pipeline(config, (half, model.info.layers - half))
            step = await bench.step(head)
            head.stop()
            transfers = TransferBench(trial, first, second, bench.prompts)
            with open_plain_link() as send_plain:
                rates_found = await transfers.measure_rates(send_plain, repeats)
            receiving = await transfers.steps(second, STEP_TOKENS, repeats)
            sending = await transfers.steps(first, STEP_TOKENS, repeats)
            tracker = ProfileTracker()
            tracker.add(samples)
            return EngineBenchReport(
                **msgspec.structs.asdict(servers),
                engine=first.ready.engine,
                throughput_ratio_32=median_ratio(throughput),
                ttft_added_ms=median_added([each.first for each in tokens]),
                second_token_added_ms=median_added([each.second for each in tokens]),
                pipeline_step_added_ms=median_added(step),
                second_engine_s=statistics.median(seconds[1:]),
                handoff_link_ratio_4000=statistics.median(pair.kv / pair.link for pair in rates_found),
                step_beside_transfer_ratio=max(
                    statistics.median(pair.beside / pair.alone for pair in pairs) for pairs in (receiving, sending)
                ),
                handoff_tokens=transfers.tokens,
                throughput_tokens_s=throughput,
                ttft_ms=[each.first for each in tokens],
                second_token_ms=[each.second for each in tokens],
                step_ms=step,
                handoff_bytes_s=rates_found,
                step_receiving_ms=receiving,
                step_sending_ms=sending,
                later_engines_s=seconds[1:],
                first_engine_s=seconds[0],
                preload_s=server.preload_s or 0.0,
                profile=fit(tracker.samples()),
                steps=samples,
            )


def table(report: EngineBenchReport) -> str:
    """For people."""
    starts = ", ".join(f"{seconds:.2f}" for seconds in report.later_engines_s)
    before = f"the first {report.first_engine_s:.2f} s, after {report.preload_s:.1f} s of imports"
    ratio, ttft = f"{report.throughput_ratio_32:.3f}", f"{report.ttft_added_ms:.2f} ms"
    later = f"{report.second_token_added_ms:.2f} ms"
    step, second = f"{report.pipeline_step_added_ms:.2f} ms", f"{report.second_engine_s:.2f} s"
    throughput = describe_pairs(report.throughput_tokens_s, "tokens/s")
    return "\n".join(
        [
            f"{report.model}, {report.engine}, medians of {len(report.ttft_ms)} pairs",
            _line("", "", "target", ""),
            _line(f"throughput of {STREAMS} streams", ratio, ">= 0.85", throughput),
            _line("added to the first token", ttft, "<= 10 ms", describe_pairs(report.ttft_ms, "ms")),
            _line("added to the second token", later, "", describe_pairs(report.second_token_ms, "ms")),
            _line("added to a step by two stages", step, "<= 3 ms", describe_pairs(report.step_ms, "ms")),
            _line("another engine is ready after", second, "<= 2 s", f"{starts} s; {before}"),
            _line("of the link, by a KV transfer", f"{report.handoff_link_ratio_4000:.3f}", ">= 0.8", _rates(report)),
            _line("a step beside a transfer", f"{report.step_beside_transfer_ratio:.3f}", "<= 1.05", _beside(report)),
            *_server_lines(report),
            "profile of our engine's steps, in microseconds:",
            _phase("prefill", report.profile.prefill),
            _phase("decode", report.profile.decode),
        ]
    )


def server_table(report: ServerReport) -> str:
    """Of servers alone, for people."""
    head = f"{report.model}, medians of {len(report.api_ttft_ms)} pairs"
    return "\n".join([head, _line("", "", "target", ""), *_server_lines(report)])


def _server_lines(report: ServerReport) -> list[str]:
    ratio, added = f"{report.api_throughput_ratio_32:.3f}", f"{report.api_ttft_added_ms_32:.2f} ms"
    alone, start = f"{report.api_ttft_added_ms:.2f} ms", report.api_start_s
    each = ", ".join(f"{name} {size:.0f}" for name, size in report.box_processes_mib.items())
    held = f"weights {report.box_weights_mib:.0f} MiB, KV cache {report.box_kv_cache_mib:.0f} MiB"
    throughput = describe_pairs(report.api_throughput_tokens_s, "tokens/s")
    return [
        _line(f"{STREAMS} streams of HTTP, throughput", ratio, ">= 0.9", throughput),
        _line("added to their first tokens", added, "<= 10 ms", describe_pairs(report.api_ttft_ms_32, "ms")),
        _line("added to that of one alone", alone, "", describe_pairs(report.api_ttft_ms, "ms")),
        _line("a server is ready after", f"{start.ours:.1f} s", "", f"vLLM {start.vllm:.1f} s"),
        _line("memory beside weights and KV", f"{report.box_memory_mib:.0f} MiB", "<= 700", held),
        f"  of all, in MiB: {each}",
    ]


def _line(what: str, figure: str, target: str, beside: str) -> str:
    return f"{what:32} {figure:>9}  {target:>8}   {beside}"


def _rates(report: EngineBenchReport) -> str:
    kv, link = (
        statistics.median(getattr(pair, name) / 1e9 for pair in report.handoff_bytes_s) for name in ("kv", "link")
    )
    return f"{report.handoff_tokens} tokens of KV at {kv:.2f} GB/s, plain bytes {link:.2f} GB/s"


def _beside(report: EngineBenchReport) -> str:
    def medians(pairs: Sequence[BesideTransfer]) -> str:
        alone, beside = (statistics.median(getattr(pair, name) for pair in pairs) for name in ("alone", "beside"))
        return f"{beside:.1f} ms, alone {alone:.1f}"

    return f"receiving {medians(report.step_receiving_ms)}; sending {medians(report.step_sending_ms)}"


def _phase(name: str, fit: PhaseFit | None) -> str:
    if fit is None:
        return f"  {name}: not enough steps"
    constants = (fit.cost.token_s, fit.cost.request_s, fit.cost.length_s, fit.cost.step_s)
    token, request, length, step = (value * 1e6 for value in constants)
    return (
        f"  {name:8} {token:.2f} a token, {request:.1f} a request, {length:.2f} a position of length, {step:.0f} a "
        f"step; off by {fit.error:.1%} (median of {fit.samples} steps)"
    )


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.node.engine.bench", description=__doc__.splitlines()[0])
    default = "default: bundled; on a GPU a random one of a billion parameters"
    parser.add_argument("--model", help=f"a folder, a Hugging Face id, or bundled ({default})")
    pairs = f"pairs for each figure, {STEP_TIMES} times as many for a step (default: 9)"
    parser.add_argument("--repeats", type=int, default=9, help=pairs)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--servers-only", action="store_true", help="measure the servers and the box's memory alone")
    parser.add_argument("--sharing-only", action="store_true", help="measure a second model in the process alone")
    parser.add_argument("--orders-only", action="store_true", help="measure whose turn it is, of two models, alone")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    report: ServerReport | SharingReport | OrdersReport | None = None
    on_gpu = has_gpu()
    config = protocol.EngineConfig(model="", threads=THREADS, kv_cache_mib=GPU_KV_CACHE_MIB if on_gpu else None)
    try:
        with ExitStack() as stack:
            model = open_model(options.model or (stack.enter_context(_random_model()) if on_gpu else "bundled"))
            # What our engines find in theirs. torch, OpenMP and vLLM read it when they are imported, which is later.
            _, environment = fork_server_command([], log=None, threads=THREADS)
            os.environ.update(environment)
            stack.enter_context(_quiet())
            if options.orders_only:
                report = measure_orders(options.repeats, config)
            elif options.sharing_only:
                report = measure_sharing(str(model.fetch()), options.repeats, config, _folder(stack))
            else:
                report = _measure(model, options.repeats, config, servers_only=options.servers_only)
    except* (ModelError, EngineError, TransferError, OSError) as errors:
        sys.stderr.write(f"bench: {first_error(errors)}\n")
    if report is None:
        return 1
    if options.format == "json":
        text = msgspec.json.format(msgspec.json.encode(report)).decode()
    elif isinstance(report, SharingReport | OrdersReport):
        text = report.describe()
    else:
        text = table(report) if isinstance(report, EngineBenchReport) else server_table(report)
    sys.stdout.write(f"{text}\n")
    return 0


def _measure(model: OpenedModel, repeats: int, config: protocol.EngineConfig, *, servers_only: bool) -> ServerReport:
    with ExitStack() as stack:
        servers = measure_servers(model, repeats, config, _folder(stack))
    return servers if servers_only else trio.run(run, model, repeats, config, servers)


def _folder(stack: ExitStack) -> Path:
    """One for what a measurement writes."""
    made = tempfile.TemporaryDirectory(prefix="p2pserve-bench-", ignore_cleanup_errors=True)
    return Path(stack.enter_context(made))


@contextmanager
def _random_model() -> Iterator[str]:
    """A folder with a model that is some work for a GPU, and the bundled one's words."""
    with tempfile.TemporaryDirectory(prefix="p2pserve-random-", ignore_cleanup_errors=True) as folder:
        make_model(Path(folder), ONE_BILLION)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(BUNDLED / name, Path(folder) / name)
        yield folder


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what vLLM writes, C++ code's included, out of the report."""
    kept = os.dup(1), os.dup(2)
    redirect_output(Path(os.devnull))
    try:
        yield
    finally:
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def first_error(error: BaseException) -> BaseException:
    """The first that is no group of others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
