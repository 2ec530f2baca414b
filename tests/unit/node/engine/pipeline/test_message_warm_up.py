"""The way of a message, once more, while its thread looks for the next one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from p2pserve.node.engine.pipeline import warm_up
from p2pserve.node.engine.pipeline.vocabulary import CODEC, Activations, CallResult
from p2pserve.node.engine.pipeline.warm_up import MessageWarmUp
from p2pserve.node.engine.settings import PipelineSettings

SETTINGS = PipelineSettings()


class Counting:
    """The codec, and what went through it."""

    def __init__(self) -> None:
        self.decoded: list[Any] = []

    def encode(self, value: object) -> Sequence[bytes | bytearray | memoryview]:
        return CODEC.encode(value)

    def decode(self, buffers: Sequence[memoryview]) -> object:
        self.decoded.append(CODEC.decode(buffers))
        return self.decoded[-1]


class Stage:
    """One warm_up and its time."""

    def __init__(self, codec: Counting) -> None:
        self.now = 100.0
        self.codec = codec
        self.warm_up = MessageWarmUp(SETTINGS, lambda: self.now)

    def remember(self, value: object) -> None:
        self.warm_up.remember([memoryview(buffer) for buffer in CODEC.encode(value)])

    def run_if_due(self) -> list[Any]:
        """What has gone to and fro."""
        self.codec.decoded.clear()
        self.warm_up.run_if_due()
        return self.codec.decoded


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    codec = Counting()
    monkeypatch.setattr(warm_up, "CODEC", codec)
    made = Stage(codec)
    yield made
    made.warm_up.close()


def test_the_last_message_goes_to_and_fro_now_and_then(stage: Stage) -> None:
    assert stage.run_if_due() == []  # nothing has come yet
    stage.remember(CallResult(1, "first"))
    assert stage.run_if_due() == [CallResult(1, "first")] * 2
    stage.remember(CallResult(2, "second"))
    stage.now += SETTINGS.message_warm_up_s / 2
    assert stage.run_if_due() == []
    stage.now += SETTINGS.message_warm_up_s
    assert stage.run_if_due() == [CallResult(2, "second")] * 2


def test_a_pause_of_hours_does_not_matter(stage: Stage) -> None:
    stage.remember(CallResult(1, None))
    for _ in range(3):
        stage.now += 10_000
        assert len(stage.run_if_due()) == 2


def activations(size: int) -> Activations:
    return Activations(True, {"hidden_states": torch.zeros(size, dtype=torch.uint8)})


@pytest.mark.parametrize(
    ("message", "expected"),
    [(activations(SETTINGS.max_message_bytes // 2), 2), (activations(SETTINGS.max_message_bytes), 0)],
    ids=["small", "large"],
)
def test_a_large_message_is_not_repeated(stage: Stage, message: Activations, expected: int) -> None:
    stage.remember(CallResult(1, None))
    stage.remember(message)
    assert len(stage.run_if_due()) == expected


def test_after_the_end_nothing_is(stage: Stage) -> None:
    stage.remember(CallResult(1, None))
    stage.warm_up.close()
    assert stage.run_if_due() == []
