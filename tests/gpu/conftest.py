"""What the scenarios of `tests/integration` are given on a GPU: their fixtures, and how engines schedule."""

from __future__ import annotations

import os
from typing import Any

import pytest

from p2pserve.node.engine import protocol

from ..integration.conftest import engine_channels, random_model
from ..integration.node.engine.devices import SETTINGS

__all__ = ["engine_channels", "random_model", "scheduling"]

# Triton multiplies float32 in TF32 unless told otherwise, attention of vLLM's with it: logits of the random models
# then differ by 0.01 with the shape of a step, and tokens that are nearly equal turn. Engines inherit it.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

FEW_REQUESTS = {"max_requests": 16}  # vLLM captures graphs of as many sizes, which takes longer than most tests
ASYNC = "async_scheduling"
CHOSEN = ASYNC in protocol.EngineConfig.__struct_fields__
CHOICES: list[dict[str, Any]] = [{ASYNC: False}, {ASYNC: True}] if CHOSEN else [{}]


@pytest.fixture(params=CHOICES, ids=[f"async={choice.get(ASYNC, 'not a choice')}" for choice in CHOICES])
def scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that schedule a step while the one before it is computed, and such as do not."""
    for name, value in {**FEW_REQUESTS, **request.param}.items():
        monkeypatch.setitem(SETTINGS, name, value)
