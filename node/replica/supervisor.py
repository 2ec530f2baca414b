"""Keeps one engine process running: first start, restarts with back-off, and giving up with a reason.

Which process, the plan says: the whole model where the box has room for it, else a stage of a replica that spans
several boxes, else none yet. States as the advert shows them:

    waiting    no plan gives this box layers                    -> loading
    loading    weights are fetched, processes start and load    -> ready | restarting | waiting
    starting   the same, for the first time, on a box alone     -> ready
    ready      requests can be served                           -> restarting | waiting
    restarting it ended, or did not start; again after a pause  -> ready | failed
    failed     it ended too often in a row

A second process may be started beside the one that serves, for the next place (`load_beside`): the box then goes over
to it as soon as it is assigned that place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final, final

import msgspec
import trio

from ...coordinator.regrouping.parts import PartBeside
from ..engine import protocol
from ..engine.agent_side.engine_link import EngineHandle, EngineStarter, EngineStartError
from ..engine.agent_side.fork_server import OpenForkServer, open_fork_server
from ..engine.backends import find_backend
from ..messages import EngineAdvert
from ..models import ModelError
from ..settings import WAN, NodeTuning
from .loading import LoadingWorkers, describe_starting
from .place import Place
from .prefetch import Fetch
from .stages import StageCall, Stages, limits_of, with_limits, with_stage
from .sweep import EngineSweep
from .worker import Worker

QUICK_IMPORT_S: Final = 1.0
"""An engine that takes longer to import is told of: vLLM may take half a minute."""

MAX_REASON: Final = 400
"""Characters of why nothing could be loaded beside what serves."""


@final
class EngineLife:
    """One engine process, from its preparation to its end; `scope` is of the time from when it is to serve."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.scope = trio.CancelScope()
        self.begun = False  # beside another, in this scope:
        self.preparing = trio.CancelScope()
        self.prepared = trio.Event()  # or failed, by then
        self.failure = ""
        self.call: StageCall | None = None  # by which the head of its replica has asked for it
        self.link: EngineHandle | None = None
        self.max_requests = 0
        self.is_loaded = trio.Event()  # all of its replica is
        self.serves = False

    def __repr__(self) -> str:
        return f"<EngineLife {self.place} serves={self.serves} {self.failure}>"

    @property
    def leaves_with_head(self) -> bool:
        """Whether it is a stage that serves, so that the head may still have requests in it."""
        return self.serves and self.call is not None and self.is_loaded.is_set()

    def close(self) -> None:
        """Hang up, and call off what prepares it."""
        self.preparing.cancel()
        if self.call is not None:
            self.call.refuse("it has been called off")
        if self.link is not None:
            self.link.close()


@final
class Supervisor:
    """Runs the engine of a node. `on_change` is called with each new state."""

    def __init__(
        self,
        config: protocol.EngineConfig,
        *,
        worker: Worker,
        stages: Stages,
        fetch: Fetch,
        channel: int | None,
        on_change: Callable[[EngineAdvert], None],
        tuning: NodeTuning = WAN,
        open_server: OpenForkServer = open_fork_server,
    ) -> None:
        self._config = config
        self._worker = worker
        self._stages = stages
        self._fetch = fetch
        self._log = Path(config.log_file) if config.log_file is not None else None
        self._channel = channel
        self._on_change = on_change
        self.waits_for = "no plan gives this box layers yet"
        """What the box needs as long as it has no place, for people."""
        self.config_of_stage: Callable[[int], protocol.EngineConfig] = lambda layers: config
        """The settings of a stage with so many layers."""
        self.sweep = EngineSweep(worker.learner, 0.0)
        """By which the first engine is measured before it gets requests."""
        self._tuning = tuning
        self._open_server = open_server
        self._place: Place | None = None
        self.count_room_beside: Callable[[Place], int] = lambda serving: 0
        """How many layers a second engine has memory for, beside one that serves in this place."""
        self._life: EngineLife | None = None  # of the engine that serves, or is to
        self._beside: EngineLife | None = None
        self._told_beside = PartBeside()
        self._beside_changed = trio.Event()
        self._closing: list[EngineHandle] = []  # processes that end, whose memory is needed for what comes
        self._changed = trio.Event()
        self._failures = 0  # in a row
        self._failure = ""  # the last of them
        self._starts = 0
        self._max_requests = config.max_requests  # of the latest engine
        self._ready: protocol.EngineReady | None = None
        self._advert: EngineAdvert | None = None
        self._server: EngineStarter | None = None  # that forks now
        self._served = trio.Event()
        stages.on_call = self._on_call
        stages.on_loaded = self._on_loaded

    def __repr__(self) -> str:
        state = self._advert.state if self._advert is not None else "new"
        return f"<Supervisor {state} {self._place or ''} starts={self._starts} failures={self._failures}>"

    @property
    def place(self) -> Place | None:
        """What the box has to run."""
        return self._place

    def assign(self, place: Place | None) -> bool:
        """What the box has to run from now on. What runs for another place ends, but a loaded stage
        ends with its head, which may still have requests; one that is wanted elsewhere does not wait
        for it without end. Returns whether what runs goes on for a while."""
        if place == self._place:
            return False
        life = self._life
        self._place = place
        self._failures, self._failure = 0, ""
        self.keep_beside(place)
        if self._beside is None:
            self._stages.expect(None)  # until this box is ready for it
        self._changed.set()
        if life is None:
            return False
        if not life.leaves_with_head:
            life.scope.cancel()
        elif place is not None:
            life.scope.deadline = trio.current_time() + 2.0 * self._tuning.move_s
        return life.leaves_with_head

    def load_beside(self, place: Place) -> None:
        """Start an engine for this place beside the one that serves, where there is room. It serves when the place is
        assigned; adverts say how far it is. Asked again for the same, it goes on, or has failed already."""
        if place == self._place or self._told_beside.stages == place.stages:
            return
        self.keep_beside(None)
        self._tell_beside(place)
        if self._life is None or not self._life.serves or place.stage.layers > self._told_beside.room:
            self._tell_beside(place, failed="it has no room for it")
            return
        self._beside = EngineLife(place)
        self._beside_changed.set()

    def keep_beside(self, place: Place | None) -> None:
        """Nothing is to be loaded beside what serves, unless it is for this place."""
        if self._beside is not None and self._beside.place != place:
            self._drop_beside()
        if self._beside is None and self._told_beside.stages:
            self._tell_beside(None)

    async def run(self) -> None:
        """Serve until cancelled. Raises EngineStartError when the very first start fails on a box that serves alone:
        nothing runs yet, and the user is watching."""
        threads, backend = self._config.threads, self._config.backend
        while True:
            channel, self._channel = self._channel, None
            async with self._open_server(log=self._log, threads=threads, channel=channel, backend=backend) as server:
                self._server = server
                self._served.set()
                while not server.gone:
                    await self._run_once(server)
                self._server, self._served = None, trio.Event()

    async def wait_server(self) -> EngineStarter:
        """Wait for the server that forks this box's processes; it may have to import their libraries first."""
        while (server := self._server) is None or server.gone:
            await self._served.wait()
            await trio.lowlevel.checkpoint()
        return server

    # ---- one life of an engine --------------------------------------------------------------------------------

    async def _run_once(self, server: EngineStarter) -> None:
        """Wait for something to run, and run it until it ends or something else is to run."""
        self._changed = trio.Event()
        place = self._place
        if place is None:
            self._report("waiting", self.waits_for)
        if place is None or self._failures > self._tuning.max_failures:
            await self._changed.wait()
            return
        life = self._life = self._take_beside(place) or EngineLife(place)
        with life.scope:
            failure = await self._live(server, life)
            if failure is not None:
                await self._pause(failure, counts=life.link is None or not life.link.ended_by_other)
        self._life = None

    async def _live(self, server: EngineStarter, life: EngineLife) -> str | None:
        """Prepare, start and serve; returns what went wrong, or None for a stage that ended with
        its head, which knows why."""
        place = life.place
        alone = len(place.stages) == 1
        state = "loading" if not alone else "restarting" if self._starts else "starting"

        def say(detail: str) -> None:
            self._report(state, detail)

        self._worker.learner.begin(place)
        try:
            if not life.begun:
                say(self._failure)
                await self._prepare(server, life, say)
            elif not life.prepared.is_set():
                say("loads the model")
                await life.prepared.wait()
            return life.failure or await self._serve(life)
        except (EngineStartError, ModelError) as error:
            # Nothing has ever worked here: the owner has to change something, so the node ends with
            # the reason. Later failures are retried.
            if alone and self._starts == 0:
                raise
            if life.call is not None:
                life.call.refuse(str(error), code="failed")
            return str(error)
        finally:
            life.close()
            life.serves = False
            if life.link is not None:
                self._closing.append(life.link)
                self._worker.drop_pipes(life.link)
                self._worker.engine_lost(life.link.exit_text())

    async def _prepare(self, server: EngineStarter, life: EngineLife, say: Callable[[str], None]) -> None:
        """Start the process; for a stage, when its head asks for it. Raises EngineStartError or ModelError."""
        place, pipes = life.place, tuple[protocol.PipeEnd, ...]()
        alone = len(place.stages) == 1
        config = self._config if alone else self.config_of_stage(place.stage.layers)
        folder = await self._fetch(place, say)
        with trio.move_on_after(QUICK_IMPORT_S):
            await server.wait_ready()
        if not server.version:
            say(f"imports {config.backend}")
        await find_backend(config.backend).self_test(server)
        if not place.is_head:
            self._stages.expect(place)
            life.call = await self._stages.called()
            pipes, config = life.call.pipes, with_limits(config, life.call.limits)
        elif not alone:
            pipes = await self._stages.open_others(place, limits_of(config), say)
        config = with_stage(msgspec.structs.replace(config, model=str(folder)), place, pipes)
        life.max_requests = config.max_requests
        while self._closing:
            ended = tuple(self._closing)
            for each in ended:
                await each.wait_gone()  # its memory is needed for what comes now
            self._closing = [each for each in self._closing if each not in ended]
        await server.wait_ready()
        say("loads the model")
        workers = LoadingWorkers()
        life.link = await server.start_engine(
            config,
            partial(self._on_message, life),
            lambda said: say(describe_starting(workers.take(said))),
        )
        if place.is_head and not self.sweep.is_over:  # later engines of this box are waited for by requests
            say("measures how fast it is")
            await self.sweep.run(life.link, config.max_requests)
        self._worker.add_pipes(life.link, (end.ticket.link for end in pipes))
        if life.call is not None:
            life.call.answer()
            say("the head of its replica loads the model")
        else:
            self._stages.tell_loaded(place)

    async def _serve(self, life: EngineLife) -> str | None:
        """From when an engine process is to serve to its end; as `_live` returns it."""
        link, started = life.link, trio.current_time()
        assert link is not None
        self._starts += 1
        self._ready, self._max_requests = link.ready, life.max_requests
        self._worker.use(link, life.place)
        life.serves = True
        told = self._told_beside if self._beside is not None else PartBeside()
        self._told_beside = msgspec.structs.replace(told, room=self.count_room_beside(life.place))
        if life.call is None or life.is_loaded.is_set():
            self._report("ready")
        how = await link.wait_gone()
        if life.call is not None:
            return None
        if trio.current_time() - started > self._tuning.healthy_after_s:
            self._failures = 0
        return f"the engine process {how}"

    # ---- beside the one that serves ---------------------------------------------------------------------------

    async def run_beside(self) -> None:
        """Load what is wanted beside what serves, one after the other, until cancelled."""
        while True:
            self._beside_changed, life = trio.Event(), self._beside
            if life is not None and not life.begun:
                await self._prepare_beside(await self.wait_server(), life)
            else:
                await self._beside_changed.wait()

    async def _prepare_beside(self, server: EngineStarter, life: EngineLife) -> None:
        """Until it is ready to serve, and then until it does or has ended."""
        life.begun = True
        how = "was called off"
        with life.preparing:
            try:
                await self._prepare(server, life, self.tell_beside)
                assert life.link is not None
                if life.call is not None:
                    await _wait_any(life.is_loaded.wait, life.link.wait_gone)
                if life.link.running:
                    life.prepared.set()
                    if self._beside is not life:
                        return
                    self._tell_beside(life.place, is_loaded=True)
                how = f"the engine process {await life.link.wait_gone()}"
            except (EngineStartError, ModelError) as error:
                how = str(error)
                if life.call is not None:
                    life.call.refuse(how, code="failed")
        if life.preparing.cancelled_caught and life.prepared.is_set():
            return  # it serves, or is not wanted any more
        life.failure = how
        life.prepared.set()
        if self._beside is life:
            self._drop_beside()
            self._tell_beside(life.place, failed=how)

    def _take_beside(self, place: Place) -> EngineLife | None:
        """What has been loaded beside for this place, or is being loaded, if anything."""
        life = self._beside
        if life is None or life.place != place or not life.begun:
            return None
        self._beside = None
        if life.prepared.is_set():
            life.preparing.cancel()  # nobody but who serves waits for its end now
        return life

    def _drop_beside(self) -> None:
        life, self._beside = self._beside, None
        if life is not None:
            life.close()
            if life.link is not None:
                self._closing.append(life.link)
                self._worker.drop_pipes(life.link)

    def _tell_beside(self, place: Place | None, *, is_loaded: bool = False, failed: str = "") -> None:
        """How far what is loaded beside is; None: nothing is."""
        self._told_beside = PartBeside(
            room=self._told_beside.room,
            stages=place.stages if place is not None else (),
            is_loaded=is_loaded,
            failed=failed[:MAX_REASON],
        )
        if self._advert is not None:
            self._publish(msgspec.structs.replace(self._advert, beside=self._told_beside))

    def _on_message(self, life: EngineLife, message: protocol.FromEngine) -> None:
        if not self.sweep.take(message) and life is self._life:
            self._worker.on_engine_message(message)

    def tell_beside(self, detail: str) -> None:
        """What is done beforehand while the engine serves, and how far; empty: nothing."""
        if self._advert is not None and self._advert.state == "ready":
            # Nothing but this has changed: what runs may still be for the place before.
            told = f"for its next part: {detail}" if detail else ""
            self._publish(msgspec.structs.replace(self._advert, detail=told))

    async def _pause(self, failure: str, *, counts: bool) -> None:
        """Before the next start. What was another engine's doing does not count."""
        self._failures, self._failure = self._failures + counts, failure
        if self._failures > self._tuning.max_failures:
            self._report("failed", f"gave up after {self._failures} failures, at last: {failure}; see {self._log}")
        else:
            self._report("restarting", failure)
            await trio.sleep(self._tuning.backoff_s(self._failures) if counts else 0.0)

    def _on_call(self, place: Place) -> None:
        """The head wants a new process: what was started for an earlier call has lost its head."""
        beside = self._beside
        if self._life is not None and self._life.place == place and self._life.call is not None:
            self._life.scope.cancel()
        elif beside is not None and beside.place == place and beside.call is not None:
            self._drop_beside()
            self._beside = EngineLife(place)
            self._tell_beside(place)
            self._beside_changed.set()

    def _on_loaded(self, place: Place) -> None:
        for life in (self._life, self._beside):
            if life is not None and life.place == place and life.call is not None and life.link is not None:
                life.is_loaded.set()
                if life.serves:
                    self._report("ready")

    def _report(self, state: str, detail: str = "") -> None:
        place, ready = self._place, self._ready
        advert = EngineAdvert(
            state=state,
            detail=detail,
            starts=self._starts,
            stages=place.stages if place is not None and len(place.stages) > 1 else (),
            failures=self._failures,
            beside=self._told_beside if self._life is not None and self._life.serves else PartBeside(),
        )
        if ready is not None:
            advert = msgspec.structs.replace(
                advert,
                engine=ready.engine,
                device=ready.device,
                dtype=ready.dtype,
                tflops=ready.tflops,
                memory_gbps=ready.memory_gbps,
                kv_tokens=ready.kv_tokens,
                max_requests=self._max_requests,
                max_model_len=ready.max_model_len,
                pid=ready.pid if state in ("ready", "loading") else 0,
            )
        self._publish(advert)

    def _publish(self, advert: EngineAdvert) -> None:
        if advert != self._advert:
            self._advert = advert
            self._on_change(advert)


async def _wait_any(*waits: Callable[[], Awaitable[object]]) -> None:
    """Until the first of these is over."""
    async with trio.open_nursery() as nursery:

        async def wait(one: Callable[[], Awaitable[object]]) -> None:
            await one()
            nursery.cancel_scope.cancel()

        for each in waits:
            nursery.start_soon(wait, each)
