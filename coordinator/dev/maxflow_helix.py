"""What a node passes per second by Helix's own accounting, for LLaMA-30B (60 layers).

A node with k layers has KV blocks for so many tokens, of which requests fill 30 % when it runs
well; a request holds 750 prompt and 240 output tokens (means of the Azure conversations, prompts
above 2,048 tokens left out). Of the requests in flight a node computes as many at a time as its
share of the round trip through all layers: b. So for each prompt it prefills there are 240 / b steps
that decode b tokens, and it passes

    (750 + 240) / (k * (prompt_s(750) + decode_s(b) * 240 / b))    tokens per second,

prompt and decode tokens both counted. The round trip depends on how fast all nodes are, which is
iterated ten times. Rounding is Helix's as well: with it, the compute bound of the 32 nodes comes
out at 2,557 tokens per second, the figure that its authors' code gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from ..costs.tables import packaged_rows
from .maxflow import NodeKind

LAYERS: Final = 60
PROMPT: Final = 750
OUTPUT: Final = 240
BLOCK_TOKENS: Final = 16
FILLED: Final = 0.3

CLUSTER_32: Final = {"a100": 4, "v100": 8, "l4": 8, "t4": 12}
"""Nodes with one card each: A100-40G, V100-16G, L4, T4."""

LINK_TOKENS_S: Final = 1e9 / (6656 * 2)
"""What a link of 1 GB/s passes: a token's activations are 6,656 numbers of 16 bits."""

_TYPICAL_LAYERS: Final = {"a100": 12, "v100": 4, "l4": 8, "t4": 4}
_TIGHT_LAYERS: Final = {"a100": 18, "v100": 7, "l4": 11, "t4": 7}  # where the typical ones hold the model barely
_BARELY: Final = 1.2
_FIRST_GUESS: Final = {"a100": 48.0, "v100": 25.0, "l4": 9.0, "t4": 8.0}
_ROUNDS: Final = 10

Speeds = Mapping[str, float]  # tokens * layers per second, by machine


class _Tables:
    """Milliseconds per layer and KV blocks, as measured by Helix's authors."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
        for row in packaged_rows("helix_llama30b_layer_times.csv"):
            sizes, times = self._times.setdefault((row["machine"], row["phase"]), ([], []))
            sizes.append(float(row["batch_tokens"]))
            times.append(float(row["ms_per_layer"]) / 1000)
        self.blocks: dict[str, list[int]] = {}
        for row in packaged_rows("helix_llama30b_kv_blocks.csv"):
            self.blocks.setdefault(row["machine"], []).append(int(row["kv_blocks"]))

    def layer_s(self, machine: str, phase: str, tokens: int) -> float:
        """Seconds of one layer, between the measured points on a line."""
        return float(np.interp(tokens, *self._times[machine, phase]))


def helix_kinds(nodes: Mapping[str, int]) -> list[NodeKind]:
    """The kinds of a cluster of so many nodes of each machine (a100, v100, l4, t4)."""
    tables = _Tables()
    typical = {name: _TYPICAL_LAYERS[name] for name in nodes}
    if sum(count * typical[name] for name, count in nodes.items()) < _BARELY * LAYERS:
        typical = {name: _TIGHT_LAYERS[name] for name in nodes}
    speeds: Speeds = {name: _FIRST_GUESS[name] for name in nodes}

    def share(machine: str, layers: int) -> float:
        """Of the round trip that a node takes for its layers, if others have average speed."""
        held = sum(count * typical[name] for name, count in nodes.items())
        layer_s = sum(count * typical[name] / speeds[name] for name, count in nodes.items()) / held
        own_s = layers / speeds[machine]
        return own_s / (own_s + (LAYERS - layers) * layer_s)

    def tokens_s(machine: str, layers: int) -> float:
        return _tokens_s(tables, machine, layers, share(machine, layers))

    for _ in range(_ROUNDS):
        speeds = {name: tokens_s(name, typical[name]) * typical[name] for name in nodes}
    return [
        NodeKind(name, count, tuple(tokens_s(name, layers) for layers in range(1, len(tables.blocks[name]) + 1)))
        for name, count in nodes.items()
    ]


def _tokens_s(tables: _Tables, machine: str, layers: int, share: float) -> float:
    in_flight = int(FILLED * BLOCK_TOKENS * tables.blocks[machine][layers - 1]) / (PROMPT + OUTPUT)
    prompts = min(1.0, in_flight * share / OUTPUT)
    read = round(prompts * PROMPT)
    written = round(prompts * OUTPUT)
    prompt_s = tables.layer_s(machine, "prompt", int(read * (1 / prompts)))
    decode_s = tables.layer_s(machine, "decode", written) * (1 / prompts)
    return (read + written) * (1 / prompts) / (layers * (prompt_s + decode_s))
