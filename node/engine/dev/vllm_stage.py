"""One stage of vLLM's own pipeline (over Gloo) as a process in a box of its own: what `stage_box` is compared with.

    python -m p2pserve.node.engine.dev.vllm_stage STAGE PARTITION PORT HOST...

The same arguments, orders and answers; all stages are to be started at once. The model and the settings are those
that our engines give vLLM, without anything of ours in it, with one exception: on a CPU vLLM does not make the
buffers of a later stage unless it compiles, so it is asked for its own profile run once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ...models import open_model
from ..agent_side.fork_server import fork_server_command
from ..vllm.device import choose_setup
from .stage_box import THREADS, StageAnswer, StageOrder

# Gloo and c10d look up the names of addresses, of which a box without a name server has none: twenty seconds a stage.
NO_NAMES: Final = "timeout:1 attempts:1"
MAX_BATCHED_TOKENS, MAX_REQUESTS = 512, 64


class StageBuffers:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def make_buffers(self) -> None:
        """Have the buffers made into which a later stage copies what it gets."""
        self.model_runner.profile_run()


def set_environment(stages: int, host: str) -> dict[str, Any]:
    """What vLLM, torch and Gloo read when they are imported; returns arguments that go with it."""
    _, environment = fork_server_command([], log=None, threads=THREADS)
    setup = choose_setup("cpu", dtype="auto", kv_cache_mib=None, stages=stages, tp=1)
    here = {"VLLM_HOST_IP": host, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RES_OPTIONS": NO_NAMES}
    os.environ.update({**environment, **setup.environment, **here})
    return {
        **setup.arguments,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "max_num_seqs": MAX_REQUESTS,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "pipeline_parallel_size": stages,
        "nnodes": stages,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": f"{__name__ if __name__ != '__main__' else NAME}.{StageBuffers.__name__}",
    }


NAME: Final = "p2pserve.node.engine.dev.vllm_stage"


def run_later_stage(arguments: dict[str, Any]) -> None:
    """Be a stage whose orders come from the first, until killed."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor(EngineArgs(**arguments).create_engine_config(headless=True), monitor_workers=False)
    executor.start_worker_monitor(inline=True)


def run_first_stage(arguments: dict[str, Any], say: Any) -> None:
    """Be the stage that has the scheduler: answer orders until the input ends."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    engine.collective_rpc("make_buffers")
    say(StageAnswer(ready=True))
    for number, line in enumerate(sys.stdin.buffer):
        say(answer_order(engine, str(number), msgspec.json.decode(line, type=StageOrder)))


def answer_order(engine: Any, request: str, order: StageOrder) -> StageAnswer:
    """Step until the order is carried out."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        max_tokens=order.count,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine.add_request(request, {"prompt_token_ids": order.prompt}, sampling)
    tokens: list[int] = []
    times: list[float] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens += output.outputs[0].token_ids
            times.append(time.monotonic())
    return StageAnswer(tokens=tokens, ms_per_token=1e3 * (times[-1] - times[0]) / max(1, order.count - 1))


def main(arguments: Sequence[str]) -> int:
    """Run one stage."""
    stage, layers, port, *hosts = arguments
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM writes to standard output as it pleases

    def say(answer: StageAnswer) -> None:
        os.write(answers, msgspec.json.encode(answer) + b"\n")

    try:
        own = set_environment(len(hosts), hosts[int(stage)])
        os.environ["VLLM_PP_LAYER_PARTITION"] = layers
        model = str(open_model("bundled").fetch())
        own |= {"model": model, "node_rank": int(stage), "master_addr": hosts[0], "master_port": int(port)}
        if int(stage):
            run_later_stage(own)
        else:
            run_first_stage(own, say)
    except Exception as error:
        say(StageAnswer(error=f"{type(error).__name__}: {error}".splitlines()[0]))
        raise
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
