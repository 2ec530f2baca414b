"""Write the golden payloads beside this file: `python tests/unit/kernels/data/make_kernels_golden.py`.

Run it again only when the format changes on purpose, together with a new FORMAT_VERSION.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from p2pserve.kernels.codec import encode

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    codec: str
    dtype: torch.dtype
    start: int
    tokens: int
    heads: int
    head_dim: int

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.bin"

    def block(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K with channels of very different size and offset, V with heavy tails; a constant row in each."""
        rng = random.Random(self.name)
        shape = (self.tokens, self.heads, self.head_dim)
        count = self.tokens * self.heads * self.head_dim
        # Python's generator gives the same numbers everywhere and always; torch guarantees neither.
        k = torch.tensor([rng.gauss(0, 1) for _ in range(count)]).view(shape)
        v = torch.tensor([rng.gauss(0, 1) ** 3 for _ in range(count)]).view(shape)
        channel = torch.arange(self.head_dim)
        k = k * 2.0 ** (channel % 7 - 3) + 8 * (channel % 5 == 0)
        k[:, 0, 1] = 0.75
        v[-1, 0] = -1.5
        return k.to(self.dtype), v.to(self.dtype)

    def payload(self) -> bytes:
        k, v = self.block()
        return bytes(encode(self.codec, k, v, start=self.start, layer=0))


CASES = (
    Case("raw_fp32", "raw", torch.float32, 3, 5, 2, 16),
    Case("raw_bf16", "raw", torch.bfloat16, 0, 5, 2, 16),
    Case("kv4_bf16_from_0", "kv4", torch.bfloat16, 0, 70, 2, 16),
    Case("kv4_fp16_from_100", "kv4", torch.float16, 100, 33, 1, 80),
    Case("kv4_fp32_two_spans", "kv4", torch.float32, 252, 9, 1, 256),
    Case("kv4_three_groups", "kv4", torch.bfloat16, 250, 40, 1, 96),
    Case("kv4_odd", "kv4", torch.bfloat16, 2, 7, 1, 3),
    Case("fp8_bf16_from_100", "fp8", torch.bfloat16, 100, 70, 2, 16),
    Case("fp8_fp16_from_0", "fp8", torch.float16, 0, 33, 1, 80),
    Case("kivi4_bf16_from_5", "kivi4", torch.bfloat16, 5, 70, 2, 16),
    Case("kivi4_fp16_from_32", "kivi4", torch.float16, 32, 33, 1, 80),
)


def main() -> None:
    for case in CASES:
        case.path.write_bytes(case.payload())


if __name__ == "__main__":
    main()
