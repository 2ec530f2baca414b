"""Replicas whose stages are processes of their own: the same tokens as one engine's, KV straight from stage to stage,
and an end with a reason when a stage is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import trio
from safetensors.numpy import save_file

from p2pserve.kvtransport.routing.reslice import ShardLayout, reslice
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineStartError
from p2pserve.node.engine.agent_side.fork_server import open_fork_server
from p2pserve.node.engine.trials.trial import Trial, TrialEngine, open_trial

from ...conftest import WAIT_LIMIT_S
from .devices import SETTINGS, require_devices
from .transfers.pieces import transfer_between

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCABULARY = 6, 4, 2, 32, 128, 256, 512
CHUNK = 64  # less than most prompts: prefill comes in chunks, several of them under way at once
COUNT = 12
LENGTHS = (1, 5, 17, 63, 64, 65, 100, 128, 129, 150, 200, 31, 90, 11, 2, 77)


def uniform(tp: int, *stages: int) -> ShardLayout:
    return ShardLayout.uniform(tp, stages, KV_HEADS)


Body = Callable[[Trial, protocol.EngineConfig], Awaitable[None]]


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(1, VOCABULARY) for _ in range(length)] for length in LENGTHS]


def write_model(folder: Path) -> None:
    """A tiny random Llama, with a file for each layer, as large models are cut up."""
    rng = np.random.default_rng(5)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    shapes = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    files = {
        f"layer-{layer}.safetensors": {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        for layer in range(LAYERS)
    }
    files["first.safetensors"] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    files["last.safetensors"] = {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for file, tensors in files.items():
        values = {
            name: (rng.standard_normal(shape) * 0.2 if len(shape) == 2 else rng.uniform(0.5, 1.5, shape))
            for name, shape in tensors.items()
        }
        save_file({n: v.astype(np.float32) for n, v in values.items()}, folder / file, metadata={"format": "pt"})
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder)
    return folder


@pytest.fixture
def run(engine_channels: list[int], model: Path) -> Callable[[Body], None]:
    """Runs a body with a trial of its own, on the module's fork server."""

    async def main(body: Body) -> None:
        config = protocol.EngineConfig(
            model=str(model), kv_cache_mib=32, max_batched_tokens=CHUNK, max_requests=32, **SETTINGS
        )
        async with (
            open_fork_server(log=None, threads=1, channel=engine_channels.pop()) as server,
            open_trial(server) as trial,
        ):
            await server.wait_ready()
            with trio.fail_after(2 * WAIT_LIMIT_S):  # on a GPU the first engine of a shape compiles for a minute
                await body(trial, config)

    return lambda body: trio.run(main, body)


async def answers(engine: TrialEngine) -> list[list[int]]:
    """To all prompts, asked at the same time."""
    requests = [engine.submit(prompt, COUNT) for prompt in prompts()]
    return [(await engine.answer(request)).tokens for request in requests]


@asynccontextmanager
async def replica(
    trial: Trial, config: protocol.EngineConfig, *partition: int, tp: tuple[int, ...] = ()
) -> AsyncIterator[list[TrialEngine]]:
    """Stages, the head first; one engine if there is no partition to speak of. They end with the block."""
    if len(partition) == 1:
        stages = [await trial.start(config)]
    else:
        stages = await trial.start_stages(config, partition, tp=tp)
    try:
        yield stages
    finally:
        for stage in stages:
            stage.stop()


@pytest.fixture(scope="module")
def known() -> list[list[int]]:
    """What one engine answers to all prompts, from the first test that asks for it on."""
    return []


async def expected(trial: Trial, config: protocol.EngineConfig, known: list[list[int]]) -> list[list[int]]:
    if not known:
        async with replica(trial, config, LAYERS) as (engine,):
            known += await answers(engine)
    assert len({*map(tuple, known)}) == len(LENGTHS)
    return known


def pid_of(engine: TrialEngine) -> int:
    return engine.ready.pid


def other_worker_of(engine: TrialEngine) -> psutil.Process:
    """The other worker of a stage of two: a fork, as the stage's process is one (vLLM has helpers of other kinds)."""
    process = psutil.Process(pid_of(engine))
    (other,) = (child for child in process.children() if child.cmdline() == process.cmdline())
    return other


def wait_for_end(process: psutil.Process) -> None:
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)


async def how_it_ended(engine: TrialEngine) -> str:
    assert engine.link is not None
    with trio.fail_after(30):
        return await engine.link.wait_gone()


@pytest.mark.parametrize(
    ("partition", "tp"), [((2, 4), (1, 1)), ((5, 1), (2, 1)), ((3, 3), (1, 2)), ((1, 3, 2), (1, 1, 1))]
)
def test_tokens_are_those_of_one_engine(
    run: Callable[[Body], None], known: list[list[int]], partition: tuple[int, ...], tp: tuple[int, ...]
) -> None:
    require_devices(max(tp))

    async def body(trial: Trial, config: protocol.EngineConfig) -> None:
        one = await expected(trial, config, known)
        async with replica(trial, config, *partition, tp=tp) as stages:
            assert await answers(stages[0]) == one
            assert [stage.ready.layers for stage in stages] == [LAYERS, *partition[1:]]

    run(body)


def test_seeded_answers_do_not_depend_on_how_prompts_are_cut_nor_on_the_stages(run: Callable[[Body], None]) -> None:
    require_devices(2)

    async def drawn(engine: TrialEngine) -> list[list[int]]:
        requests = [
            engine.submit(prompt, COUNT, temperature=0.7, seed=seed) for seed, prompt in enumerate(prompts()[:12])
        ]
        return [(await engine.answer(request)).tokens for request in requests]

    async def body(trial: Trial, config: protocol.EngineConfig) -> None:
        async with replica(trial, msgspec.structs.replace(config, max_batched_tokens=2048), LAYERS) as (engine,):
            whole = await drawn(engine)
            assert await drawn(engine) == whole
            assert await answers(engine) != whole
        async with replica(trial, config, LAYERS) as (engine,):
            assert await drawn(engine) == whole
        async with replica(trial, config, 3, 3, tp=(1, 2)) as stages:
            assert await drawn(stages[0]) == whole

    run(body)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (uniform(1, 2, 4), uniform(1, 6)),
        (uniform(1, 6), uniform(1, 4, 2)),
        (uniform(1, 2, 4), uniform(1, 5, 1)),
        (ShardLayout((2, 1), (2, 4), KV_HEADS), ShardLayout((1, 2), (3, 3), KV_HEADS)),
    ],
)
def test_kv_goes_from_each_worker_to_the_workers_that_need_it(
    run: Callable[[Body], None], known: list[list[int]], source: ShardLayout, target: ShardLayout
) -> None:
    require_devices(max(*source.tp, *target.tp))

    async def body(trial: Trial, config: protocol.EngineConfig) -> None:
        one = await expected(trial, config, known)
        async with (
            replica(trial, config, *source.stages, tp=source.tp) as prefill,
            replica(trial, config, *target.stages, tp=target.tp) as decode,
        ):
            pieces = reslice(source, target)
            links = [trial.join(decode[piece.target.stage]) for piece in pieces]
            requests: list[tuple[str, bytes]] = []
            for prompt in prompts():
                send, receive = transfer_between(trial, pieces, links)
                request = decode[0].submit(prompt, COUNT, receive=receive, receive_tokens=len(prompt))
                prefill[0].submit(prompt, 1, send=send)
                requests.append((request, send[0].ticket.transfer))
            for tokens, prompt, (request, _) in zip(one, prompts(), requests, strict=True):
                answer = await decode[0].answer(request)
                assert answer.tokens == tokens
                assert answer.cached >= len(prompt) - 1  # the last position is computed again, for its logits
            # Each stage has told its own agent of what its workers have sent themselves.
            senders = {piece.source.stage for piece in pieces}
            for stage in senders:
                for _, transfer in requests:
                    report = await prefill[stage].report(transfer)
                    assert report.delivered

    run(body)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_stage_ends_the_replica(run: Callable[[Body], None], lost: int) -> None:
    async def body(trial: Trial, config: protocol.EngineConfig) -> None:
        async with replica(trial, config, 2, 2, 2) as stages:
            request = stages[0].submit(prompts()[9], 300)  # under way while it happens
            head = stages[0]
            await head.until(lambda: request in head.answers and len(head.answers[request].tokens) >= 3)
            os.kill(pid_of(stages[lost]), signal.SIGKILL)
            for number, stage in enumerate(stages):
                ended = await how_it_ended(stage)
                if number == lost:
                    assert "SIGKILL" in ended
                else:
                    assert "is lost" in ended, ended

    run(body)


@pytest.mark.parametrize(("lost", "worker"), [(0, 0), (0, 1), (1, 1)])
def test_a_lost_worker_ends_the_replica_and_leaves_no_other_behind(
    run: Callable[[Body], None], lost: int, worker: int
) -> None:
    require_devices(2)

    async def body(trial: Trial, config: protocol.EngineConfig) -> None:
        async with replica(trial, config, 3, 3, tp=(2, 2)) as stages:
            head = stages[0]
            request = head.submit(prompts()[9], 300)
            await head.until(lambda: request in head.answers and len(head.answers[request].tokens) >= 3)
            others = [other_worker_of(stage) for stage in stages]
            os.kill((pid_of(stages[lost]), others[lost].pid)[worker], signal.SIGKILL)
            for number, stage in enumerate(stages):
                ended = await how_it_ended(stage)
                if worker:
                    assert f"worker 1 of stage {lost} is lost" in ended, ended
                else:
                    assert ("SIGKILL" if number == lost else "is lost") in ended, ended
            for other in others:
                await trio.to_thread.run_sync(wait_for_end, other)

    run(body)


def test_each_stage_needs_its_own_files_only(
    run: Callable[[Body], None], known: list[list[int]], model: Path, tmp_path: Path
) -> None:
    async def body(trial: Trial, config: protocol.EngineConfig) -> None:
        one = await expected(trial, config, known)
        partition = (2, 4)
        needed = ({"first", "layer-0", "layer-1"}, {"layer-2", "layer-3", "layer-4", "layer-5", "last"})
        folders = []
        for stage, names in enumerate(needed):
            folder = tmp_path / str(stage)
            folder.mkdir()
            for name in ("config.json", "model.safetensors.index.json", *(f"{name}.safetensors" for name in names)):
                (folder / name).symlink_to(model / name)
            folders.append(str(folder))
        stages = await trial.start_stages(config, partition, folders)
        assert await answers(stages[0]) == one

    run(body)


def test_what_a_stage_cannot_load_is_told_at_the_head(run: Callable[[Body], None], tmp_path: Path) -> None:
    async def body(trial: Trial, config: protocol.EngineConfig) -> None:
        with pytest.raises(EngineStartError, match=r"stage 1 is lost: .*nothing"):
            await trial.start_stages(config, (3, 3), [config.model, str(tmp_path / "nothing")])

    run(body)
