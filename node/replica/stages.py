"""How the boxes of a replica that spans several start its engine processes together.

The head issues the tickets of all pipes and asks the others, the last stage first, so that whoever dials finds somebody
to talk to. Each other stage answers when its process can be dialled. A pipe that breaks ends the processes at both its
ends; the head then begins anew, with new tickets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, final

import msgspec
import trio

from ...bootstrap import NetworkError, PeerId, PeerLost, RemoteError, Role
from ...bootstrap.methods import Messenger
from ...kvtransport.wire.dial_path import DialPath
from ...kvtransport.wire.tickets import issue_link
from .. import messages
from ..box.batch_limits import BatchLimits
from ..engine.agent_side.engine_link import EngineStartError
from ..engine.protocol import EngineConfig, PipeEnd
from ..links.reach import PathTo
from ..methods import STAGE_LOADED, STAGE_OPEN
from ..settings import WAN, NodeTuning
from .place import Place

_log = logging.getLogger(__name__)

NOT_YET = "not-yet"


@final
class StageCall:
    """A head's wish for the process of a stage, until it is answered. `pipes` are the stage's ends, `limits` those of
    the whole replica."""

    def __init__(self, pipes: tuple[PipeEnd, ...], limits: BatchLimits) -> None:
        self.pipes = pipes
        self.limits = limits
        self._done = trio.Event()
        self._refusal: tuple[str, str] | None = None

    def answer(self) -> None:
        """The process can be dialled."""
        self._done.set()

    def refuse(self, reason: str, *, code: str = NOT_YET) -> None:
        """There will be none for this wish, unless it has been answered."""
        if not self._done.is_set():
            self._refusal = code, reason
            self._done.set()

    async def wait(self) -> None:
        """Wait for the answer. Raises RemoteError with a refusal."""
        await self._done.wait()
        if self._refusal is not None:
            raise RemoteError(*self._refusal)


@final
class Stages:
    """One per node. `path_to` says how a member is dialled, `random` unpredictable bytes."""

    def __init__(
        self,
        *,
        service: str,
        messenger: Messenger,
        path_to: PathTo,
        random: Callable[[int], bytes],
        tuning: NodeTuning = WAN,
    ) -> None:
        self._service = service
        self._messenger = messenger
        self._path_to = path_to
        self._random = random
        self._tuning = tuning
        self._expecting: Place | None = None
        self._call: StageCall | None = None  # nobody has begun to fulfil it
        self._called = trio.Event()
        self.on_call: Callable[[Place], None] = lambda place: None
        self.on_loaded: Callable[[Place], None] = lambda place: None
        messenger.handle(STAGE_OPEN, self.on_open)
        messenger.on_notice(STAGE_LOADED, self.on_stage_loaded)

    # ---- on the head ------------------------------------------------------------------------------------------

    async def open_others(self, place: Place, limits: BatchLimits, say: Callable[[str], None]) -> tuple[PipeEnd, ...]:
        """Have all other stages start with the head's limits, waiting for those not ready; returns
        the head's pipe ends. Raises EngineStartError."""
        ends = self._issue(len(place.stages))
        for stage in range(len(place.stages) - 1, 0, -1):
            peer = PeerId(place.stages[stage].peer)
            body = messages.StageOpen(
                service=self._service, stages=place.stages, stage=stage, pipes=tuple(ends[stage]), limits=limits
            )
            while (wait := await self._open(peer, stage, body)) is not None:
                say(f"waits for stage {stage + 1}/{len(place.stages)}: {wait}")
                await trio.sleep(self._tuning.stage_retry_s)
        return await self._dialling(place, 0, tuple(ends[0]))

    def tell_loaded(self, place: Place) -> None:
        """The engine of the whole replica is ready."""
        for peer in place.others:
            try:
                self._messenger.notify(peer, STAGE_LOADED, messages.StageLoaded())
            except PeerLost:
                _log.info("stage %s is gone already", peer)  # its pipes say so to the engine

    async def _open(self, peer: PeerId, stage: int, body: messages.StageOpen) -> str | None:
        """Ask once; returns why it is too early, or None when the process is there."""
        try:
            await self._messenger.request(peer, STAGE_OPEN, body, self._tuning.stage_open_s)
        except RemoteError as error:
            if error.code == NOT_YET:
                return error.message
            raise EngineStartError(f"stage {stage + 1} on {peer}: {error.message}") from error
        except NetworkError as error:
            raise EngineStartError(f"stage {stage + 1} on {peer}: {error}") from error
        return None

    def _issue(self, stages: int) -> list[list[PipeEnd]]:
        """Both ends of every pipe, by stage: control between the head and each other, data from each to the next."""
        ends: list[list[PipeEnd]] = [[] for _ in range(stages)]
        for higher in range(1, stages):
            kinds: tuple[tuple[Literal["control", "data"], int], ...] = (("control", 0), ("data", higher - 1))
            for kind, lower in kinds:
                ticket = issue_link(self._tuning.pipe_lease_s, self._random)
                ends[lower].append(PipeEnd(stage=higher, kind=kind, ticket=ticket))
                ends[higher].append(PipeEnd(stage=lower, kind=kind, ticket=ticket))
        return ends

    # ---- on another stage -------------------------------------------------------------------------------------

    def expect(self, place: Place | None) -> None:
        """From now on the head may have this place opened, and no other."""
        if place != self._expecting:
            self._expecting = place
            self._refuse("the plan has changed")

    async def called(self) -> StageCall:
        """Wait until the head of the expected place wants a process. For one waiter at a time."""
        while self._call is None:
            self._called = trio.Event()
            await self._called.wait()
        call, self._call = self._call, None
        return call

    async def on_open(self, peer: PeerId, role: Role, body: messages.StageOpen) -> messages.Opened:
        """The head wants this stage's process started, in place of one that may be running."""
        place = self._expecting
        if place is None or place != Place(body.stages, body.stage) or place.head != peer:
            raise RemoteError(NOT_YET, "it has no such stage to start, or has not heard of the plan yet")
        if not all(end.stage < len(body.stages) and end.stage != body.stage for end in body.pipes):
            raise RemoteError("invalid", "pipes: they lead to stages that do not exist")
        try:
            call = StageCall(await self._dialling(place, place.index, body.pipes), body.limits)
        except EngineStartError as error:
            raise RemoteError("no-address", str(error)) from error
        self._refuse("the head has asked anew")
        self._call = call
        self.on_call(place)
        self._called.set()
        await call.wait()
        return messages.Opened()

    def on_stage_loaded(self, peer: PeerId, role: Role, body: messages.StageLoaded) -> None:
        """The head says that the replica is ready."""
        if self._expecting is not None and self._expecting.head == peer:
            self.on_loaded(self._expecting)

    # ---- inside -----------------------------------------------------------------------------------------------

    def _refuse(self, reason: str) -> None:
        if self._call is not None:
            self._call.refuse(reason)
            self._call = None

    async def _dialling(self, place: Place, stage: int, ends: tuple[PipeEnd, ...]) -> tuple[PipeEnd, ...]:
        """The ends with the addresses of those stages that this one dials. Raises EngineStartError."""
        found = []
        for end in ends:
            dial: DialPath | None = None
            if end.stage > stage:
                peer = PeerId(place.stages[end.stage].peer)
                try:
                    dial = await self._path_to(peer)
                except NetworkError as error:
                    raise EngineStartError(f"stage {end.stage + 1}: {error}") from error
            found.append(msgspec.structs.replace(end, dial=dial))
        return tuple(found)


def limits_of(config: EngineConfig) -> BatchLimits:
    """What the other stages are to be started with, if this is the head's."""
    return msgspec.convert(config, BatchLimits, from_attributes=True)


def with_limits(config: EngineConfig, limits: BatchLimits) -> EngineConfig:
    """The settings of a stage that follows the head's limits."""
    return msgspec.structs.replace(config, **msgspec.structs.asdict(limits))


def with_stage(config: EngineConfig, place: Place, pipes: tuple[PipeEnd, ...]) -> EngineConfig:
    """The settings of an engine process for this place. One of several stages has its process for itself."""
    if place.partition:
        config = msgspec.structs.replace(config, sharing=None)
    return msgspec.structs.replace(config, tp=place.stage.tp, partition=place.partition, stage=place.index, pipes=pipes)
