"""The options of `p2pserve join` that an engine is started with, and what is said of its box's links."""

from __future__ import annotations

from functools import partial
from typing import Final

import click

from ...coordinator.costs.model_shape import KV_CACHE_DTYPES
from ...node.engine.backends import BACKENDS
from ...node.engine.emulated.backend import EMULATED
from .command import combine, option
from .shared import price_options
from .values import FIGURE, FILE, POSITIVE, THROTTLE


def _chosen(ctx: click.Context, parameter: click.Parameter, engine: str | None) -> str:
    """The engine asked for, or that which models GPUs where such are named."""
    emulate = ctx.params.get("emulate")
    if emulate is not None and engine not in (None, EMULATED.name):
        raise click.BadParameter(f"{engine} does not emulate; leave --engine or --emulate out", ctx, parameter)
    return engine or (EMULATED.name if emulate is not None else "vllm")


_engine: Final = partial(option, section="Engine", shared=True)
_hosting: Final = partial(option, section="Without --model")
_link: Final = partial(option, section="Links", shared=True)

engine_options: Final = combine(
    _engine(
        "--dtype",
        type=click.Choice(("auto", "float32", "bfloat16", "float16")),
        default="auto",
        help="auto (default): the model's own on a GPU, float32 without one",
    ),
    _engine(
        "--kv-cache-mib",
        type=POSITIVE,
        metavar="MIB",
        help="KV cache (default: 256 on a CPU, what is free on a GPU)",
    ),
    _engine(
        "--kv-cache-dtype",
        type=click.Choice((*KV_CACHE_DTYPES, "choose")),
        default="auto",
        help="what the KV cache holds: auto (default): as the model's files say, mostly 16 bits; fp8 or fp8_e5m2: 8 "
        "bits, for twice as many tokens, at some cost in quality; choose: fp8 where that cost is known for the model",
    ),
    _engine(
        "max_batched_tokens",
        "--max-num-batched-tokens",
        type=POSITIVE,
        metavar="N",
        help="tokens per step at most: more is faster prefill and slower decode beside it, so the plan may take "
        "fewer (default: 2048 to 8192 by the GPU, 512 without one)",
    ),
    _engine(
        "--max-requests",
        type=POSITIVE,
        metavar="N",
        help="requests at once, at most (default: 64 to 256 by the GPUs' room for KV, 64 without a GPU)",
    ),
    _engine(
        "--max-model-len",
        type=POSITIVE,
        metavar="N",
        help="prompt and answer together (default: the model's, or as much as fits beside its weights)",
    ),
    _engine(
        "--async-scheduling/--no-async-scheduling",
        default=None,
        help="schedule a step while the one before it computes, unless the model spans boxes (default: on a GPU)",
    ),
    _engine(
        "--tp",
        type=POSITIVE,
        metavar="N",
        help="GPUs that share each layer (default: all of the box; 1 without any)",
    ),
    _engine(
        "--memory-gib",
        type=FIGURE,
        metavar="GIB",
        help="for weights and KV, at most (default: what the box has); a box without room for the whole model "
        "waits for others to hold it together with",
    ),
    _engine(
        "--phase",
        type=click.Choice(("prefill", "decode", "mixed")),
        help="the only thing that this box is to do (default: what the planner finds best, which may change)",
    ),
    _engine(
        "backend",
        "--engine",
        type=click.Choice(tuple(BACKENDS)),
        callback=_chosen,
        help="what runs the model (default: vllm)",
    ),
    _engine(
        "--emulate",
        metavar="GPUS",
        is_eager=True,  # for --engine
        help="serve with GPUs that are only modelled, like 4xA40, or 4xA40/2 at half their rates: real network, "
        "modelled time, made-up answers; --model may then be one whose dimensions are known, like llama-30b",
    ),
    _engine(
        "--emulate-specs",
        type=click.Choice(("dense", "thunderserve-table1", "measured")),
        default="dense",
        help="the figures of those GPUs: the datasheet's (default), those of ThunderServe's table 1, or measured ones",
    ),
    _engine(
        "--emulate-load-gb-s",
        type=FIGURE,
        default=0.0,
        metavar="N",
        help="GB/s that weights are read at whenever the engine starts (default: in no time)",
    ),
    _engine(
        "--emulate-throttle",
        type=THROTTLE,
        metavar="S:FACTOR",
        help="so many seconds after its first step, steps of the emulated engine take so many times as long, like "
        "60:1.5 (default: never)",
    ),
    _engine(
        "--sweep-s",
        type=FIGURE,
        default=3.0,
        metavar="S",
        help="before it serves, the engine is measured with batches of several sizes and lengths for so long at most; "
        "0: not at all (default: 3)",
    ),
    _engine("--threads", type=POSITIVE, metavar="N", help="of a CPU engine (default: all cores but one)"),
)
"""What a node is told of its engine."""

hosting_options: Final = combine(
    _hosting(
        "--only",
        multiple=True,
        metavar="NAME",
        help="host this service of the catalogue and no other; may be given several times (default: any)",
    ),
    _hosting("excluded", "--not", multiple=True, metavar="NAME", help="do not host this one; likewise"),
    _hosting(
        "--models-dir",
        type=FILE,
        metavar="FOLDER",
        help="where models are looked for, by their folders' names, and downloads go (default: the Hugging Face cache)",
    ),
    _hosting(
        "--max-services",
        type=click.IntRange(1, 2),
        default=1,
        metavar="N",
        help="host so many services at once, 1 or 2: their engines share one GPU, and take turns; the network says "
        "which (default: 1)",
    ),
    _hosting(
        "--max-disk-gib",
        type=FIGURE,
        metavar="GIB",
        help="that downloads may take there (default: what the disk has)",
    ),
)
"""What a box's owner says of the models that it may be given."""

link_options: Final = combine(
    _link(
        "--site",
        default="",
        metavar="NAME",
        help="boxes of one site measure the others for each other (default: boxes behind one public address)",
    ),
    _link(
        "--usd-per-hour",
        type=FIGURE,
        default=0.0,
        metavar="USD",
        help="what the box costs, for reports (default: 0)",
    ),
    _link(
        "--relay-private",
        is_flag=True,
        help="forward for others to private addresses, too (default: only where this box has such a one itself)",
    ),
    _link("--up-gbps", type=FIGURE, metavar="G", help="what the box can send (default: as measured)"),
    _link("--down-gbps", type=FIGURE, metavar="G", help="what it can receive (default: as measured)"),
    _link(
        "up_usd_per_gb",
        "--usd-per-gb-up",
        type=FIGURE,
        default=0.0,
        metavar="USD",
        help="billed for what it sends (default: 0)",
    ),
    _link(
        "down_usd_per_gb",
        "--usd-per-gb-down",
        type=FIGURE,
        default=0.0,
        metavar="USD",
        help="billed for what it receives (default: 0)",
    ),
    _link(
        "--relay-gbps",
        type=FIGURE,
        metavar="G",
        help="forward at most so much between other nodes, who encrypt it; 0: nothing (default: no limit)",
    ),
    price_options("Links"),
)
"""What the box's owner says of its links."""
