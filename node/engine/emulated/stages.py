"""Emulated engines as the stages of one replica: all have the same cards, so the head knows what a step takes.

The other stages compute nothing. Their processes and the pipes are real: a stage that is lost ends the replica, and the
round trips between the boxes count in each step.

    head                                        another stage
      |-- control: its cards ----------------------> |
      | <------------------------------ its own cards |      (some times: the shortest is the round trip)
      |-- control, data: nothing more, until one end is lost
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Final, NoReturn, final

import msgspec

from ....coordinator.costs.replica import Hop
from ....kvtransport.errors import TransferError
from ....kvtransport.wire.pipe import Pipe
from .. import protocol
from ..mailbox import Outbox
from ..stage_pipes import PipeConnections, PipelineError, open_pipes

ROUND_TRIPS: Final = 5
HOP_GBPS: Final = 1.0
"""Gb/s at which activations go from box to box: nothing is sent that could be measured."""
LOST_STATUS: Final = 3  # of a process that has told its agent why
WEIGHT_FILES: Final = 8  # in so many parts a load tells how far it is

Word = Annotated[str, msgspec.Meta(max_length=80)]
OnLost = Callable[[str], NoReturn]


class StageCards(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stage emulates: the cards of its box, and how the model is cut."""

    gpu: Word
    specs: Word
    tp: int
    partition: tuple[int, ...]


def cards_of(config: protocol.EngineConfig, emulation: protocol.Emulation) -> StageCards:
    """Of this process."""
    gpu = emulation.gpu
    return StageCards(gpu=gpu.name, specs=gpu.specs.value, tp=config.tp, partition=config.partition)


def join_stages(
    config: protocol.EngineConfig, emulation: protocol.Emulation, arrivals: PipeConnections, outbox: Outbox
) -> Hop:
    """On the head: reach all other stages, and watch them from then on: one that is lost ends this process. Returns
    what lies between two stages, the slowest for all. Raises PipelineError where a stage is not reached, or has other
    cards."""
    pipes, own = open_pipes(config.pipes, arrivals, config.pipeline), cards_of(config, emulation)
    try:
        rtt_s = max(_greet(own, end, pipe) for end, pipe in pipes.items() if end.kind == "control")
    except (TransferError, PipelineError) as error:
        for pipe in pipes.values():
            pipe.close(str(error))
        raise PipelineError(str(error)) from error
    _watch(pipes, _end_process(outbox, pipes))
    return Hop(rtt_s, HOP_GBPS)


def sleep_while_loading(emulation: protocol.Emulation, partition: tuple[int, ...], outbox: Outbox) -> None:
    """Take as long as the largest stage takes to read its weights, and tell how far that is."""
    model = emulation.model
    if not emulation.load_gb_s:
        return
    layers = partition or (model.layers,)
    last = len(layers) - 1
    largest = max(
        model.stage_weight_bytes(count, first=stage == 0, last=stage == last) for stage, count in enumerate(layers)
    )
    for part in range(WEIGHT_FILES):
        outbox.tell_weights(part + 1, WEIGHT_FILES)
        time.sleep(largest / (emulation.load_gb_s * 1e9) / WEIGHT_FILES)
    outbox.tell_weights(0, 0)


@final
class EmulatedStage:
    """See `process.LoadedEngine`: a stage that is not the head."""

    def __init__(
        self,
        config: protocol.EngineConfig,
        emulation: protocol.Emulation,
        arrivals: PipeConnections,
        outbox: Outbox,
    ) -> None:
        self._config = config
        self._emulation = emulation
        self._arrivals = arrivals
        self._outbox = outbox

    def ready(self, load_s: float) -> protocol.EngineReady:
        """Said before the head is there: the process can be dialled from now on. What only the head knows is 0."""
        config, gpu = self._config, self._emulation.gpu
        return protocol.EngineReady(
            pid=os.getpid(),
            engine=f"emulated {config.tp}x {gpu.name}, stage {config.stage + 1} of {len(config.partition)}",
            device="cpu",
            dtype="bfloat16",
            layers=config.partition[config.stage],
            max_model_len=config.max_model_len or 0,
        )

    def serve(self) -> None:
        """Answer the head until it is lost, which ends this process."""
        try:
            pipes = open_pipes(self._config.pipes, self._arrivals, self._config.pipeline)
        except PipelineError as error:
            _end_process(self._outbox, {})(str(error))
        on_lost = _end_process(self._outbox, pipes)
        _watch({end: pipe for end, pipe in pipes.items() if end.kind == "data"}, on_lost)
        control = next(pipe for end, pipe in pipes.items() if end.kind == "control")
        cards = msgspec.msgpack.encode(cards_of(self._config, self._emulation))
        try:
            while True:
                control.receive()
                control.send([cards])
        except TransferError as error:
            on_lost(f"the head is lost: {error}")

    def close(self) -> None:
        """No other process is in it."""


def _greet(own: StageCards, end: protocol.PipeEnd, pipe: Pipe) -> float:
    """The round trip to another stage. Raises PipelineError for one with other cards, TransferError for a loss."""
    cards, answer, shortest = msgspec.msgpack.encode(own), b"", float("inf")
    for _ in range(ROUND_TRIPS):
        sent = time.monotonic()
        pipe.send([cards])
        answer = b"".join(pipe.receive())
        shortest = min(shortest, time.monotonic() - sent)
    try:
        theirs = msgspec.msgpack.decode(answer, type=StageCards)
    except msgspec.MsgspecError as error:
        raise PipelineError(f"stage {end.stage + 1} is no emulated engine: {error}") from error
    if theirs != own:
        raise PipelineError(
            f"stage {end.stage + 1} emulates {theirs.tp}x {theirs.gpu} ({theirs.specs}), the head {own.tp}x {own.gpu} "
            f"({own.specs}): emulated stages have the same cards"
        )
    return shortest


def _watch(pipes: Mapping[protocol.PipeEnd, Pipe], on_lost: OnLost) -> None:
    """A thread for each: both ends of a pipe hear that the other is alive as long as somebody reads."""
    for end, pipe in pipes.items():
        name = f"watch-{end.kind}-{end.stage}"
        threading.Thread(target=partial(_read_until_lost, end, pipe, on_lost), name=name, daemon=True).start()


def _read_until_lost(end: protocol.PipeEnd, pipe: Pipe, on_lost: OnLost) -> None:
    try:
        while True:
            pipe.receive()
    except TransferError as error:
        on_lost(f"stage {end.stage + 1} is lost: {error}")


def _end_process(outbox: Outbox, pipes: Mapping[protocol.PipeEnd, Pipe]) -> OnLost:
    """What to do on the loss of a stage: tell the others and the agent why, and end this process."""
    first = threading.Lock()

    def end(reason: str) -> NoReturn:
        first.acquire()  # who comes second waits for the end
        for pipe in pipes.values():
            pipe.close(reason)
        outbox.send(protocol.EngineFailed(reason=reason))
        outbox.flush()
        os._exit(LOST_STATUS)

    return end
