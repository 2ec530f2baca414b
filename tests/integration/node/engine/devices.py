"""What tests of engines need to know of the device, so that one text serves CPUs and, from `tests/gpu`, GPUs."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

BLOCK: Final = 128  # vLLM's own choice on a CPU; a GPU's is smaller, and may be as large

SETTINGS: Final[dict[str, Any]] = {"dtype": "float32", "block_size": BLOCK}
"""With what the engines of the tests are started that compare tokens for equality. In 16 bits a GPU's sums depend on
how many requests are computed together and on which graph is replayed, and a token turns where two are nearly equal; in
float32 such differences are far smaller than the distances between tokens of these models. What 16 bits do to answers
is held by `test_engine_answers`, against logits."""


def require_devices(count: int) -> None:
    """Skip a test that needs so many GPUs, where engines compute on GPUs and there are fewer. Not inside of trio."""
    if torch.version.cuda is not None and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, and this box has {torch.cuda.device_count()}")
