"""One stage of a pipeline of ours as a process in a box of its own, for comparisons over real or emulated links.

    python -m p2pserve.node.engine.dev.stage_box STAGE PARTITION PORT HOST...

PARTITION: layers of each stage, such as 4,4. HOST...: the address of each stage's box, in order; all listen at
PORT. The stages after the first are to be ready before that is started, which dials them. The model is the bundled
one.

A process says that it is ready, the head only when all stages are. Then the head answers each `StageOrder` with a
`StageAnswer`, a line of JSON each, until its input ends; the others end with theirs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import trio

from ....kvtransport.wire.dial_path import DialPath
from ....kvtransport.wire.tickets import LinkTicket
from ...models import open_model
from .. import protocol
from ..agent_side.engine_link import EngineError
from ..agent_side.fork_server import open_fork_server
from ..trials.trial import Trial, TrialEngine, open_trial
from .bench import first_error

THREADS: Final = 1
LEASE_S: Final = 3600.0


class StageOrder(msgspec.Struct, frozen=True):
    """A prompt, and how many tokens are to be made of it."""

    prompt: list[int]
    count: int


class StageAnswer(msgspec.Struct, frozen=True):
    """What the head says: that it is ready, or what it made of an order and the time between two tokens."""

    ready: bool = False
    tokens: list[int] = []
    ms_per_token: float = 0.0
    error: str = ""


def pipe_ticket(kind: Literal["control", "data"], low: int, high: int) -> LinkTicket:
    """Of the pipe between two stages. All of them are ours: it needs no secret."""
    return LinkTicket(f"{kind:8}{low:4}{high:4}".encode(), bytes(32), LEASE_S)


def pipe_ends(stage: int, addresses: Sequence[tuple[str, int]]) -> tuple[protocol.PipeEnd, ...]:
    """A stage's ends of the pipes of a pipeline: control from the head to every other, data from each to the next.
    The lower dials."""
    last = len(addresses) - 1
    pairs: list[tuple[Literal["control", "data"], int, int]] = [("control", 0, high) for high in range(1, last + 1)]
    pairs += [("data", low, low + 1) for low in range(last)]
    ends = []
    for kind, low, high in pairs:
        ticket = pipe_ticket(kind, low, high)
        if stage == low:
            ends.append(protocol.PipeEnd(stage=high, kind=kind, ticket=ticket, dial=DialPath(*addresses[high])))
        elif stage == high:
            ends.append(protocol.PipeEnd(stage=low, kind=kind, ticket=ticket))
    return tuple(ends)


def say(answer: StageAnswer) -> None:
    """One line on the standard output, at once."""
    os.write(1, msgspec.json.encode(answer) + b"\n")


async def run(stage: int, partition: tuple[int, ...], addresses: Sequence[tuple[str, int]]) -> None:
    """Be that stage until the input ends. Raises EngineError, ModelError, OSError."""
    with tempfile.TemporaryDirectory(prefix="p2pserve-stage-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "engine.log"
        model = str(open_model("bundled").fetch())
        pipes = pipe_ends(stage, addresses)
        config = protocol.EngineConfig(
            model=model, threads=THREADS, log_file=str(log), partition=partition, stage=stage, pipes=pipes
        )
        async with (
            open_fork_server(log=log, threads=THREADS) as server,
            open_trial(server, addresses[stage]) as trial,
        ):
            await _serve(trial, config)


async def _serve(trial: Trial, config: protocol.EngineConfig) -> None:
    engine = TrialEngine()
    for pipe in config.pipes:
        if pipe.dial is None:
            trial.listen(pipe.ticket, engine)
    await trial.start_as(engine, config)
    say(StageAnswer(ready=True))
    while line := await trio.to_thread.run_sync(sys.stdin.buffer.readline, abandon_on_cancel=True):
        order = msgspec.json.decode(line, type=StageOrder)
        answer = await engine.generate(order.prompt, order.count)
        took = (answer.last_at - answer.first_at) / max(1, order.count - 1)
        say(StageAnswer(tokens=answer.tokens, ms_per_token=1e3 * took))


def main(arguments: Sequence[str]) -> int:
    """Run one stage; what goes wrong is said in one line."""
    try:
        stage, layers, port, *hosts = arguments
        partition = tuple(int(count) for count in layers.split(","))
        addresses = [(host, int(port)) for host in hosts]
        if not 0 <= int(stage) < len(partition) == len(addresses):
            raise ValueError(f"{len(partition)} stages at {len(addresses)} addresses, of which this is {stage}")
    except ValueError as error:
        sys.stderr.write(f"{__doc__}\nstage_box: {error}\n")
        return 2
    code = 0
    try:
        trio.run(run, int(stage), partition, addresses)
    except* (EngineError, OSError) as errors:
        say(StageAnswer(error=str(first_error(errors))))
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
