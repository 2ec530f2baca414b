"""The way of a message, once more, while its thread looks for the next one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from p2pserve.node.engine.pipeline import rehearsal
from p2pserve.node.engine.pipeline.rehearsal import EVERY_S, MOST_BYTES, Rehearsal
from p2pserve.node.engine.pipeline.vocabulary import CODEC, Activations, Answer


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
    """One rehearsal and its time."""

    def __init__(self, codec: Counting) -> None:
        self.now = 100.0
        self.codec = codec
        self.rehearsal = Rehearsal(lambda: self.now)

    def remember(self, value: object) -> None:
        self.rehearsal.remember([memoryview(buffer) for buffer in CODEC.encode(value)])

    def perhaps(self) -> list[Any]:
        """What has gone to and fro."""
        self.codec.decoded.clear()
        self.rehearsal.perhaps()
        return self.codec.decoded


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    codec = Counting()
    monkeypatch.setattr(rehearsal, "CODEC", codec)
    made = Stage(codec)
    yield made
    made.rehearsal.close()


def test_the_last_message_goes_to_and_fro_now_and_then(stage: Stage) -> None:
    assert stage.perhaps() == []  # nothing has come yet
    stage.remember(Answer(1, "first"))
    assert stage.perhaps() == [Answer(1, "first")] * 2
    stage.remember(Answer(2, "second"))
    stage.now += EVERY_S / 2
    assert stage.perhaps() == []
    stage.now += EVERY_S
    assert stage.perhaps() == [Answer(2, "second")] * 2


def test_a_pause_of_hours_does_not_matter(stage: Stage) -> None:
    stage.remember(Answer(1, None))
    for _ in range(3):
        stage.now += 10_000
        assert len(stage.perhaps()) == 2


def activations(size: int) -> Activations:
    return Activations(True, {"hidden_states": torch.zeros(size, dtype=torch.uint8)})


@pytest.mark.parametrize(
    ("message", "expected"), [(activations(MOST_BYTES // 2), 2), (activations(MOST_BYTES), 0)], ids=["small", "large"]
)
def test_what_is_large_is_not_rehearsed(stage: Stage, message: Activations, expected: int) -> None:
    stage.remember(Answer(1, None))
    stage.remember(message)
    assert len(stage.perhaps()) == expected


def test_after_the_end_nothing_is(stage: Stage) -> None:
    stage.remember(Answer(1, None))
    stage.rehearsal.close()
    assert stage.perhaps() == []
