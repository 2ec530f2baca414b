"""vLLM's API server whose engine is the network: all that is imported of vLLM's front end, for one version of it.

One level below vLLM's `EngineClient`: its `AsyncLLM` over an `EngineCoreClient` that asks the agent. What is text stays
here and is vLLM's own (templates, tools, detokenising, stop strings, n); the network takes tokens and gives tokens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from argparse import Namespace
from collections.abc import AsyncGenerator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Final, NoReturn, final

import numpy as np
import torch
import vllm
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from .. import protocol as engine
from ..process import StartError, explain
from ..vllm_program.sampling import RefusedSampling, from_vllm
from .agent_link import AgentLink
from .carrying import Carry
from .exchange import Exchange, current_exchange
from .protocol import ApiAnswers, ApiCancel, ApiConfig, ApiOutcome, ApiRefused, ApiSubmit, ServiceState, ToApi

_log = logging.getLogger(__name__)

TESTED: Final = ("0.32.",)
"""Releases of vLLM whose front end this fits; others are refused at the start, and not by a traceback later."""
TASKS: Final = ("generate",)
MAX_N: Final = 16
NOBODY_RETRY_S: Final = 2.0
_FINISH: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_NOT_STARTED: Final = (VLLMError, ValueError, TypeError, KeyError, OSError, ImportError, NotImplementedError)
"""What vLLM raises for options and models that it cannot serve."""


def require_tested_version() -> None:
    """Raise StartError for a vLLM whose front end this was not written for."""
    if not vllm.__version__.startswith(TESTED):
        raise StartError(
            f"vLLM {vllm.__version__} is installed, and its API server fits releases {TESTED[0]}x; "
            "install that one, or leave --http out"
        )


# ---- its engine ---------------------------------------------------------------------------------------------------


@final
class NetworkCore(EngineCoreClient):
    """The network, for vLLM's front end. It never dies: a request that fails ends alone, and the next may do better."""

    def __init__(self, link: AgentLink, config: ApiConfig, reasoning_parser: str) -> None:
        self.network = ServiceState(serving=False, reason="the agent has not said yet who serves")
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self._link = link
        self._deadline_s = config.deadline_s
        self._reasoning_parser = reasoning_parser  # "": the model does not reason, or nothing is made of that
        self._exchanges: dict[str, Exchange] = {}  # by request
        self._begun: set[str] = set()  # requests whose first token has come
        self._outputs: list[EngineCoreOutput] = []
        self._changed = asyncio.Event()

    def take(self, message: ToApi) -> None:
        """News from the agent."""
        match message:
            case ServiceState():
                self.network = message
            case ApiAnswers(outputs=outputs, served=served):
                for output in outputs:
                    self._take_tokens(output)
                for one in served:
                    self._forget(one.request, one)
            case ApiRefused(request=request):
                self._forget(request, message)
                self._outputs.append(EngineCoreOutput(request, [], finish_reason=FinishReason.ERROR))
        self._changed.set()

    async def get_output_async(self) -> EngineCoreOutputs:
        await self._changed.wait()
        self._changed.clear()
        outputs, self._outputs = self._outputs, []
        running = len(self._begun)
        stats = SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=len(self._exchanges) - running,
            kv_cache_usage=self.network.kv_usage,
        )
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=stats)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if request.mm_features or request.prompt_embeds is not None or request.prompt_token_ids is None:
            raise VLLMValidationError("prompt: this network takes text and tokens; leave images and embeddings out")
        exchange = current_exchange.get() or Exchange(request.request_id, "", self._deadline_s)
        sampling = _to_sampling(
            request.sampling_params, request.reasoning_ended, request.reasoning_parser_kwargs, self._reasoning_parser
        )
        exchange.begin(request.request_id)
        self._exchanges[request.request_id] = exchange
        self._link.send(
            ApiSubmit(
                request=request.request_id,
                exchange=exchange.id,
                key=exchange.key,
                prompt=tuple(request.prompt_token_ids),
                sampling=sampling,
                deadline_s=exchange.deadline_s,
                priority=request.priority,
                cache_salt=request.cache_salt or "",
            )
        )

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        gone = tuple(request for request in request_ids if request in self._exchanges)
        if gone:
            self._link.send(ApiCancel(requests=gone))
            self._begun.difference_update(gone)
            self._changed.set()  # or the number of running requests stays where it was

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        return TASKS

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    async def reset_prefix_cache_async(self, *_: Any, **__: Any) -> bool:
        return False  # it is the boxes'

    async def is_sleeping_async(self) -> bool:
        return False

    async def is_scheduler_paused_async(self) -> bool:
        return False

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """The agent ends this process."""

    def refuse_nobody(self) -> NoReturn:
        """Nobody serves this model now."""
        reason = self.network.reason or "no node of this network serves this model now"
        if (exchange := current_exchange.get()) is not None:
            exchange.refusal = ApiRefused(request="", status=503, reason=reason, retry_after_s=NOBODY_RETRY_S)
        raise GracefulHTTPError(reason, HTTPStatus.SERVICE_UNAVAILABLE)

    def _take_tokens(self, new: engine.NewTokens) -> None:
        if new.request not in self._exchanges:
            return  # cancelled before, and its end has been told
        output = EngineCoreOutput(
            new.request,
            list(new.tokens),
            finish_reason=_FINISH.get(new.finish, FinishReason.ERROR) if new.finish is not None else None,
            stop_reason=new.stop_reason,
        )
        if new.logprobs is not None:
            output.new_logprobs = _to_lists(new.logprobs)
        if new.prompt_logprobs is not None:
            ids, logprobs, ranks, *_ = _to_lists(new.prompt_logprobs)
            output.new_prompt_logprobs_tensors = LogprobsTensors(
                torch.tensor(ids), torch.tensor(logprobs), torch.tensor(ranks)
            )
        if new.request not in self._begun:
            self._begun.add(new.request)
            output.prefill_stats = PrefillStats(num_cached_tokens=new.cached_tokens)
        self._outputs.append(output)

    def _forget(self, request: str, outcome: ApiOutcome | ApiRefused) -> None:
        self._begun.discard(request)
        exchange = self._exchanges.pop(request, None)
        if exchange is not None:
            exchange.end(request, outcome)


@final
class NetworkLLM(AsyncLLM):
    """vLLM's engine client over a `NetworkCore`. Its parent's constructor would start an engine process: what it sets
    beside that is set here."""

    def __init__(
        self, config: VllmConfig, core: NetworkCore, carry: Carry, *, log_stats: bool, log_requests: bool
    ) -> None:
        self.vllm_config = config
        self._elastic_ep_lock = asyncio.Lock()
        self.model_config = config.model_config
        self.scheduler_config = config.scheduler_config
        self.observability_config = config.observability_config
        self.log_requests = log_requests
        self.log_stats = log_stats
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self.admission_stats = None
        self.output_processor = OutputProcessor(
            self.renderer.tokenizer, log_stats=log_stats, stream_interval=config.scheduler_config.stream_interval
        )
        self.engine_core = core
        self.carry = carry
        self.logger_manager = StatLoggerManager(vllm_config=config, engine_idxs=[0]) if log_stats else None
        self._client_count = 1
        self.output_handler = None
        self.profiler = None
        self._profile_lock = asyncio.Lock()
        self._run_output_handler()  # type: ignore[no-untyped-call]

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        if not self.engine_core.network.serving:
            self.engine_core.refuse_nobody()
        super().check_admission(n, request_id)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        # Not a generator itself: what is refused here is no answer of status 200 that then fails.
        if sampling_params.n > MAX_N:
            raise VLLMValidationError(f"n: {sampling_params.n} answers; at most {MAX_N}", parameter="n")
        _to_sampling(sampling_params, None, None, "")
        if not self.engine_core.network.serving:
            self.engine_core.refuse_nobody()
        return super().generate(prompt, sampling_params, request_id, **options)

    @property
    def network(self) -> ServiceState:
        """What the network can do now."""
        return self.engine_core.network  # type: ignore[no-any-return]

    async def probe(self) -> bool:
        """Whether the network generates a token now."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, output_kind=RequestOutputKind.FINAL_ONLY)
        request = f"health-{time.monotonic_ns():x}"
        try:
            async for output in self.generate(TokensPrompt(prompt_token_ids=[1]), sampling, request):
                if output.finished:
                    return bool(output.outputs[0].token_ids)
        except (VLLMError, EngineGenerateError) as error:
            _log.warning("no token could be generated: %s", error)
        return False


def _to_sampling(
    params: SamplingParams | None, ended: bool | None, arguments: dict[str, Any] | None, parser: str
) -> engine.Sampling:
    """What crosses to the engine. Raises VLLMValidationError naming a field that cannot."""
    if params is None:
        raise VLLMValidationError("prompt: this network generates text; it computes no embeddings")
    try:
        return from_vllm(params, reasoning_ended=ended, reasoning_kwargs=arguments, reasoning_parser=parser)
    except RefusedSampling as error:
        raise VLLMValidationError(str(error), parameter=error.field) from error


def _to_lists(top: engine.TopTokens) -> LogprobsLists:
    return LogprobsLists(
        np.frombuffer(top.ids, "<i4").reshape(-1, top.width),
        np.frombuffer(top.logprobs, "<f4").reshape(-1, top.width),
        np.frombuffer(top.ranks, "<i4"),
    )


# ---- its server ---------------------------------------------------------------------------------------------------


@final
class _Parser(FlexibleArgumentParser):
    """vLLM's command line, whose mistakes are one line and no exit."""

    def error(self, message: str) -> NoReturn:
        raise StartError(message)


def parse_options(config: ApiConfig) -> Namespace:
    """The options as vLLM understands them. Raises StartError."""
    parser = make_arg_parser(_Parser())  # type: ignore[no-untyped-call]
    given = ["--model", config.model, "--served-model-name", *config.names, *config.options]
    try:
        args = parser.parse_args(given)
        validate_parsed_serve_args(args)
    except _NOT_STARTED as error:
        raise StartError(explain(error)) from error
    return args  # type: ignore[no-any-return]


def _configure(args: Namespace) -> VllmConfig:
    """As `vllm launch render` does, which needs neither weights nor a device."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    model = engine_args.create_model_config()
    model.quantization = None  # of weights, which are not here
    structured = engine_args.create_structured_outputs_config()
    structured.backend = "xgrammar"  # the engines': what it cannot do is refused here
    config = VllmConfig(model_config=model, structured_outputs_config=structured)
    config.scheduler_config.stream_interval = args.stream_interval
    return config


VERSION: Final = str(vllm.__version__)


async def build_server(config: ApiConfig, link: AgentLink, carry: Carry) -> tuple[Any, NetworkLLM]:
    """vLLM's app (FastAPI) over this link, and its engine client. Raises StartError."""
    require_tested_version()
    os.environ.pop("VLLM_API_KEY", None)  # keys are looked at in front of vLLM, for every path
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    args = parse_options(config)
    try:
        vllm_config = _configure(args)
        core = NetworkCore(link, config, vllm_config.structured_outputs_config.reasoning_parser or "")
        llm = NetworkLLM(
            vllm_config, core, carry, log_stats=not args.disable_log_stats, log_requests=args.enable_log_requests
        )
        app = build_app(args, TASKS, vllm_config.model_config)
        await init_app_state(llm, app.state, args, TASKS)
    except _NOT_STARTED as error:
        _log.exception("vLLM's API server does not start")
        raise StartError(explain(error)) from error
    longest = vllm_config.model_config.max_model_len

    def take(message: ToApi) -> None:
        if isinstance(message, ServiceState) and message.max_model_len:
            vllm_config.model_config.max_model_len = min(longest, message.max_model_len)
        core.take(message)

    link.on_message = take
    app.state.server = SimpleNamespace()
    return app, llm
