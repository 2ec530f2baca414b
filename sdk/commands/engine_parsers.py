"""The options of `p2pserve join` that an engine is started with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ...node.engine.backends import BACKENDS
from ...node.engine.emulated.backend import EMULATED
from .option_values import figure, positive


class _Emulate(argparse.Action):
    """Stores the GPUs, and takes the engine that models them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.backend = EMULATED.name


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What a node is told of its engine."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto (default): the model's own on a GPU, float32 without one",
    )
    engine.add_argument(
        "--kv-cache-mib", type=positive, metavar="MIB", help="KV cache (default: 256 on a CPU, what is free on a GPU)"
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        dest="max_batched_tokens",
        type=positive,
        metavar="N",
        help="tokens per step at most: more is faster prefill and slower decode beside it, so the plan may take fewer "
        "(default: 2048 to 8192 by the GPU, 512 without one)",
    )
    engine.add_argument(
        "--max-requests",
        type=positive,
        metavar="N",
        help="requests at once, at most (default: 64 to 256 by the GPUs' room for KV, 64 without a GPU)",
    )
    engine.add_argument(
        "--max-model-len",
        type=positive,
        metavar="N",
        help="prompt and answer together (default: the model's, or as much as fits beside its weights)",
    )
    engine.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="schedule a step while the one before it computes, unless the model spans boxes (default: on a GPU)",
    )
    engine.add_argument(
        "--tp", type=positive, metavar="N", help="GPUs that share each layer (default: all of the box; 1 without any)"
    )
    engine.add_argument(
        "--memory-gib",
        type=figure,
        metavar="GIB",
        help="for weights and KV, at most (default: what the box has); a box without room for the whole model waits "
        "for others to hold it together with",
    )
    engine.add_argument(
        "--phase",
        choices=("prefill", "decode", "mixed"),
        help="the only thing that this box is to do (default: what the planner finds best, which may change)",
    )
    engine.add_argument(
        "--engine", dest="backend", choices=tuple(BACKENDS), default="vllm", help="what runs the model (default: vllm)"
    )
    engine.add_argument(
        "--emulate",
        metavar="GPUS",
        action=_Emulate,
        help="serve with GPUs that are only modelled, like 4xA40: real network, modelled time, made-up answers; "
        "--model may then be one whose dimensions are known, like llama-30b",
    )
    engine.add_argument(
        "--emulate-specs",
        choices=("dense", "thunderserve-table1", "measured"),
        default="dense",
        help="the figures of those GPUs: the datasheet's (default), those of ThunderServe's table 1, or measured ones",
    )
    engine.add_argument("--threads", type=positive, metavar="N", help="of a CPU engine (default: all cores but one)")


def add_price_options(parser: argparse._ActionsContainer) -> None:
    """What saving time may cost."""
    parser.add_argument(
        "--usd-per-s", type=figure, metavar="USD", help="what a second of waiting saved may cost (default: anything)"
    )
    parser.add_argument(
        "--max-usd-per-gb", type=figure, metavar="USD", help="never take a path that costs more (default: no limit)"
    )


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """What the box's owner says of its links."""
    links = parser.add_argument_group("links")
    links.add_argument(
        "--site",
        default="",
        metavar="NAME",
        help="boxes of one site measure the others for each other (default: boxes behind one public address)",
    )
    links.add_argument(
        "--usd-per-hour", type=figure, default=0.0, metavar="USD", help="what the box costs, for reports (default: 0)"
    )
    links.add_argument(
        "--relay-private",
        action="store_true",
        help="forward for others to private addresses, too (default: only where this box has such a one itself)",
    )
    links.add_argument("--up-gbps", type=figure, metavar="G", help="what the box can send (default: as measured)")
    links.add_argument("--down-gbps", type=figure, metavar="G", help="what it can receive (default: as measured)")
    links.add_argument(
        "--usd-per-gb-up",
        dest="up_usd_per_gb",
        type=figure,
        default=0.0,
        metavar="USD",
        help="billed for what it sends (default: 0)",
    )
    links.add_argument(
        "--usd-per-gb-down",
        dest="down_usd_per_gb",
        type=figure,
        default=0.0,
        metavar="USD",
        help="billed for what it receives (default: 0)",
    )
    links.add_argument(
        "--relay-gbps",
        type=figure,
        metavar="G",
        help="forward at most so much between other nodes, who encrypt it; 0: nothing (default: no limit)",
    )
    add_price_options(links)
