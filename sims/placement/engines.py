"""Engines of a fleet, which have one service or several, and the requests that go to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...coordinator.costs.step_times import StepTimes
from ...coordinator.routing.interface import WorkBeside
from ..engine.engine import Engine
from ..engine.sequence import Sequence as EngineSequence
from ..engine.shared_engine import SharedEngine


@dataclass(frozen=True, slots=True)
class FleetEngine:
    """An engine of either kind."""

    engine: Engine | SharedEngine
    names: Mapping[int, str]  # of the services that it has, by number

    def submit(self, service: int, sequence: EngineSequence, now: float) -> None:
        """Take it into the queue."""
        if isinstance(self.engine, SharedEngine):
            self.engine.submit(self.names[service], sequence, now)
        else:
            self.engine.submit(sequence, now)

    def can_fit(self, service: int, sequence: EngineSequence) -> bool:
        """Whether it has the service, and its KV would fit there alone."""
        if service not in self.names:
            return False
        if isinstance(self.engine, SharedEngine):
            return self.engine.can_fit(self.names[service], sequence)
        return self.engine.can_fit(sequence)

    def times_of(self, service: int) -> StepTimes:
        """Its step times here."""
        engine = self.engine
        return engine.times_of(self.names[service]) if isinstance(engine, SharedEngine) else engine.times

    def kv_tokens_of(self, service: int) -> int:
        """Room for its KV, where no other has any."""
        engine = self.engine
        if isinstance(engine, SharedEngine):
            return engine.kv_tokens_of(self.names[service])
        return engine.blocks * engine.settings.block_tokens

    def stop(self, now: float) -> list[EngineSequence]:
        """It ends: its requests, as of the last token."""
        return self.engine.stop() if isinstance(self.engine, SharedEngine) else self.engine.stop(now)


class FleetRequest(NamedTuple):
    """A request of a trace: its service, its row there, the length of its answer in tokens, and what is left of it."""

    service: int
    row: int
    output: int
    sequence: EngineSequence


class FleetState(Protocol):
    """What is where in a fleet."""

    @property
    def engines(self) -> Mapping[int, FleetEngine]:
        """By their ids."""
        ...

    @property
    def hosted(self) -> Mapping[int, Mapping[EngineSequence, int]]:
        """By engine, its requests and their services."""
        ...

    def count_work(self, id_: int) -> Mapping[int, WorkBeside]:
        """Of an engine, by service: requests, and tokens of prompts of which no token of an answer has come."""
        ...
