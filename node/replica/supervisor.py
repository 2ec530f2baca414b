"""Keeps one engine process running: first start, restarts with back-off, and giving up with a reason.

Which process, the plan says: the whole model where the box has room for it, else a stage of a replica that spans
several boxes, else none yet. States as the advert shows them:

    waiting    no plan gives this box layers                    -> loading
    loading    weights are fetched, processes start and load    -> ready | restarting | waiting
    starting   the same, for the first time, on a box alone     -> ready
    ready      requests can be served                           -> restarting | waiting
    restarting it ended, or did not start; again after a pause  -> ready | failed
    failed     it ended too often in a row
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import msgspec
import trio

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
        self._life = trio.CancelScope()  # of one engine process, from its preparation to its end
        self._changed = trio.Event()
        self._fulfilling = False  # a head's call: the process runs, or is being started
        self._loaded = False  # and serves in its replica
        self._failures = 0  # in a row
        self._failure = ""  # the last of them
        self._starts = 0
        self._max_requests = config.max_requests  # of the latest engine
        self._ready: protocol.EngineReady | None = None
        self._link: EngineHandle | None = None
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
        leaves_with_head = self._loaded
        self._place = place
        self._failures, self._failure = 0, ""
        self._stages.expect(None)  # until this box is ready for it
        self._changed.set()
        if not leaves_with_head:
            self._life.cancel()
        elif place is not None:
            self._life.deadline = trio.current_time() + 2.0 * self._tuning.move_s
        return leaves_with_head

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
        with trio.CancelScope() as self._life:
            failure = await self._live(server, place)
            if failure is not None:
                await self._pause(failure)
        if self._life.cancelled_caught and self._link is not None:
            await self._link.wait_gone()  # its memory is needed for what comes now
        self._link = None

    async def _live(self, server: EngineStarter, place: Place) -> str | None:
        """Prepare, start and serve; returns what went wrong, or None for a stage that ended with
        its head, which knows why."""
        alone = len(place.stages) == 1
        state = "loading" if not alone else "restarting" if self._starts else "starting"
        config = self._config if alone else self.config_of_stage(place.stage.layers)
        call: StageCall | None = None
        link: EngineHandle | None = None

        def say(detail: str) -> None:
            self._report(state, detail)

        say(self._failure)
        self._worker.learner.begin(place)
        try:
            folder = await self._fetch(place, say)
            with trio.move_on_after(QUICK_IMPORT_S):
                await server.wait_ready()
            if not server.version:
                say(f"imports {config.backend}")
            await find_backend(config.backend).self_test(server)
            if place.is_head:
                pipes = await self._stages.open_others(place, limits_of(config), say) if not alone else ()
            else:
                self._stages.expect(place)
                call = await self._stages.called()
                self._fulfilling = True
                pipes = call.pipes
                config = with_limits(config, call.limits)
            config = with_stage(msgspec.structs.replace(config, model=str(folder)), place, pipes)
            await server.wait_ready()
            say("loads the model")
            workers = LoadingWorkers()
            self._max_requests = config.max_requests
            link = self._link = await server.start_engine(
                config, self._on_message, lambda said: self._tell_starting(state, workers.take(said))
            )
            if place.is_head and not self.sweep.is_over:  # later engines of this box are waited for by requests
                say("measures how fast it is")
                await self.sweep.run(link, config.max_requests)
            self._worker.use(link, place, frozenset(end.ticket.link for end in pipes))
            return await self._serve(link, place, call)
        except (EngineStartError, ModelError) as error:
            # Nothing has ever worked here: the owner has to change something, so the node ends with
            # the reason. Later failures are retried.
            if alone and self._starts == 0:
                raise
            if call is not None:
                call.refuse(str(error), code="failed")
            return str(error)
        finally:
            self._fulfilling = self._loaded = False
            if call is not None:
                call.refuse("it has been called off")
            if link is not None:
                link.close()
                self._worker.engine_lost(link.exit_text())

    async def _serve(self, link: EngineHandle, place: Place, call: StageCall | None) -> str | None:
        """From the start of an engine process to its end; as `_live` returns it."""
        started = trio.current_time()
        self._starts += 1
        self._ready = link.ready
        if call is not None:
            call.answer()
            self._report("loading", "the head of its replica loads the model")
            await link.wait_gone()
            return None
        self._stages.tell_loaded(place)
        self._report("ready")
        how = await link.wait_gone()
        if trio.current_time() - started > self._tuning.healthy_after_s:
            self._failures = 0
        return f"the engine process {how}"

    def _on_message(self, message: protocol.FromEngine) -> None:
        if not self.sweep.take(message):
            self._worker.on_engine_message(message)

    def tell_beside(self, detail: str) -> None:
        """What is done beforehand while the engine serves, and how far; empty: nothing."""
        if self._advert is not None and self._advert.state == "ready":
            # Nothing but this has changed: what runs may still be for the place before.
            told = f"for its next part: {detail}" if detail else ""
            self._publish(msgspec.structs.replace(self._advert, detail=told))

    def _tell_starting(self, state: str, progress: protocol.Starting) -> None:
        """How far the engine is, until it serves."""
        if self._advert is not None and self._advert.state == state:
            self._report(state, describe_starting(progress))

    async def _pause(self, failure: str) -> None:
        self._failures, self._failure = self._failures + 1, failure
        if self._failures > self._tuning.max_failures:
            self._report("failed", f"gave up after {self._failures} failures, at last: {failure}; see {self._log}")
        else:
            self._report("restarting", failure)
            await trio.sleep(self._tuning.backoff_s(self._failures))

    def _on_call(self) -> None:
        """The head wants a new process: what was started for an earlier call has lost its head."""
        if self._fulfilling:
            self._life.cancel()

    def _on_loaded(self) -> None:
        if self._fulfilling and self._link is not None:
            self._loaded = True
            self._report("ready")

    def _report(self, state: str, detail: str = "") -> None:
        place, ready = self._place, self._ready
        advert = EngineAdvert(
            state=state,
            detail=detail,
            starts=self._starts,
            stages=place.stages if place is not None and len(place.stages) > 1 else (),
            failures=self._failures,
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
