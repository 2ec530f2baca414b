"""How little of a prompt's KV a prefill box must change to change the token after it, beside what codecs change:
`python -m p2pserve.kernels.dev.quality_lies`. A check that recomputes KV and compares it has to tell the two apart."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

import torch

from .quality_model import HELD_OUT, BundledModel, Kv

TOKENS: Final = 257  # of a prompt; its last one is decoded
CODECS: Final = ("raw", "fp8", "kv4")
_HALVINGS: Final = 20


def relative_change(honest: Kv, found: Kv) -> float:
    """The root mean square of what differs, over that of the honest values."""
    pairs = [(a, b) for one, other in zip(honest, found, strict=True) for a, b in zip(one, other, strict=True)]
    changed = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((changed / sum(float(a.square().sum()) for a, _ in pairs)) ** 0.5)


def find_least(changes_token: Callable[[float], bool]) -> float:
    """The least step that changes the token, of steps of which all larger ones do."""
    low, high = 0.0, 1e-3
    while not changes_token(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if changes_token(middle) else (middle, high)
    return high


def smallest_lie(model: BundledModel, ids: torch.Tensor) -> float:
    """The relative change of the KV of `ids[:-1]` after which the greedy token behind `ids` is another one, along the
    gradient of the second-best token's lead. No smaller one is looked for: it is an upper bound."""
    kv = model.prefill(ids[:-1])
    leaves = [(k.clone().requires_grad_(), v.clone().requires_grad_()) for k, v in kv]
    logits = model.decode(leaves, ids[-1:])
    best, second = logits.topk(2).indices.tolist()
    (logits[second] - logits[best]).backward()

    def moved(step: float) -> Kv:
        return [tuple(x.detach() + step * grad_of(x) for x in pair) for pair in leaves]  # type: ignore[misc]

    with torch.inference_mode():
        step = find_least(lambda step: int(model.decode(moved(step), ids[-1:]).argmax()) != best)
        return relative_change(kv, moved(step))


def grad_of(leaf: torch.Tensor) -> torch.Tensor:
    """Its gradient."""
    assert leaf.grad is not None
    return leaf.grad


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.kernels.dev.quality_lies", description=__doc__)
    parser.add_argument("--each", type=int, default=4, help="prompts of each of three held-out modules (default: 4)")
    each = parser.parse_args(arguments).each
    model = BundledModel()
    found: dict[str, list[float]] = {}
    for ids in model.prompts(HELD_OUT[:3], each)[:, -TOKENS:]:
        kv = model.prefill(ids[:-1])
        for codec in CODECS:
            found.setdefault(codec, []).append(relative_change(kv, model.send(codec, kv)))
        found.setdefault("a lie", []).append(smallest_lie(model, ids))
    for name, values in found.items():
        ordered = sorted(values)
        middle = ordered[len(ordered) // 2]
        sys.stdout.write(f"{name:8} least {ordered[0]:.4%}  median {middle:.4%}  most {ordered[-1]:.4%}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
