"""A run: the network, its clients and what happens to it. The rim around `schedule`, `records` and `report`.

Nothing that was started outlives `run_chaos`, however that ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, final

import msgspec
import psutil
import trio

from .. import environment
from ..errors import ClientError, DemoFailed
from ..requests import TextDelta, build_request
from ..session import Session, open_session
from .boxes import ChaosNetwork, Say
from .disks import open_disks
from .engines import EngineSetup, choose_setup
from .harming import FaultInjector
from .links import ChaosLinks, find_loopback_places, open_links
from .looking import NetworkLook
from .records import AnswerRecord, find_recovery_s, find_wrong, is_lie, spread_of
from .report import AgentFigures, ChaosReport
from .schedule import WAN, ChaosSettings, PlannedFault, PlannedRequest, draw_schedule

WHOLE_S: Final = 90.0
GRACE_S: Final = 5.0  # after its deadline, until a request that has not ended counts as lost
SETTLE_S: Final = 60.0  # after everything, until all is as in the beginning
WARM_UP: Final = 24  # requests before memory and files are first counted


async def run_chaos(settings: ChaosSettings, say: Say) -> ChaosReport:
    """Run the schedule of `settings.seed`. Raises DemoFailed or ClientError where there is no network to harm."""
    setup = await trio.to_thread.run_sync(choose_setup, settings)
    schedule = draw_schedule(settings, setup.draw_prompt)
    with _folder() as home, ExitStack() as stack:
        count = settings.boxes + 1 + settings.liar
        links = stack.enter_context(open_links(count)) if settings.links == WAN else None
        places = links.places() if links is not None else find_loopback_places(count)
        network = ChaosNetwork(home, places, setup.options, setup.codec, settings.closed)
        if links is not None:
            stack.enter_context(open_disks([box.home for box in network.boxes]))
        try:
            say(f"seed {settings.seed}; starting a bootstrap and {settings.boxes} boxes")
            await network.start()
            async with (
                _open_sessions(network.tokens["client"], settings.clients) as sessions,
                open_session(network.tokens["admin"], None, WHOLE_S) as admin,
            ):
                run = _ChaosRun(settings, setup, network, links, sessions, admin, say)
                await run.begin()
                await run.inflict(schedule.faults, schedule.requests)
                await run.settle()
            run.left_over += await network.leave()
            run.left_over += await network.find_leaked()
            run.left_over += [f"file {path.name} was left" for path in (home / "tmp").iterdir()]
            return run.report()
        finally:
            with trio.CancelScope(shield=True):
                await network.end()


@contextmanager
def _folder() -> Iterator[Path]:
    """The folder of a run, in which its clients remember members as well."""
    home = Path(tempfile.mkdtemp(prefix="p2pserve-chaos-"))
    before = os.environ.get(environment.HOME)
    os.environ[environment.HOME] = os.fspath(home / "clients")
    try:
        yield home
    finally:
        if before is None:
            del os.environ[environment.HOME]
        else:
            os.environ[environment.HOME] = before
        shutil.rmtree(home, ignore_errors=True)


@asynccontextmanager
async def _open_sessions(token: str, count: int) -> AsyncIterator[list[Session]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(open_session(token, None, WHOLE_S)) for _ in range(count)]


@final
class _ChaosRun:
    """What is done to a network that runs, and what comes of it."""

    def __init__(
        self,
        settings: ChaosSettings,
        setup: EngineSetup,
        network: ChaosNetwork,
        links: ChaosLinks | None,
        sessions: list[Session],
        admin: Session,
        say: Say,
    ) -> None:
        self._settings = settings
        self._network = network
        self._sessions = sessions
        self._setup = setup
        self._say = say
        self._began = trio.current_time()
        self._look = NetworkLook(network, sessions)
        self._injector = FaultInjector(network, links, self._look, admin, self._now, say)
        self._records: list[AnswerRecord] = []
        self._wrong: list[str] = []
        self._lied: set[int] = set()
        self._before = self._after = (0.0, 0)
        self._took = 0.0
        self.left_over: list[str] = []

    # ---- its three parts ----------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Wait until the network is whole, and ask some requests."""
        await self._look.wait_whole(WHOLE_S)
        warm = msgspec.structs.replace(self._settings, seed=-1, requests=WARM_UP, faults=0)
        async with trio.open_nursery() as nursery:
            for request in draw_schedule(warm, self._setup.draw_prompt).requests:
                nursery.start_soon(self._ask, request)
        failed = [record.error for record in self._records if record.error]
        if failed:
            raise DemoFailed(f"a request failed before any fault: {failed[0]}")
        self._records.clear()
        await self._look.wait_whole(WHOLE_S)
        self._before = self._count_kept()

    async def inflict(self, faults: tuple[PlannedFault, ...], requests: tuple[PlannedRequest, ...]) -> None:
        """Ask, and do what is planned, until all requests have ended and all boxes are back."""
        self._began = trio.current_time()
        self._say(f"{len(requests)} requests and {len(faults)} faults in {self._settings.seconds:g} s")
        async with trio.open_nursery() as watchers:
            watchers.start_soon(self._look.watch, self._injector.away)
            for box in self._network.boxes:
                watchers.start_soon(box.watch)
            if self._settings.liar:
                watchers.start_soon(self._network.run_liar, self._settings.seed)
            async with trio.open_nursery() as nursery:
                for request in requests:
                    nursery.start_soon(self._ask_at, request)
                for fault in faults:
                    nursery.start_soon(self._inflict_at, fault, watchers)
            watchers.cancel_scope.cancel()
        self._took = self._now()

    async def settle(self) -> None:
        """Wait until nothing is under way any more; what does not end is left over."""
        try:
            await self._look.wait_whole(SETTLE_S, idle=True)
        except DemoFailed as error:
            self.left_over.append(str(error))
        self._after = self._count_kept()

    def report(self) -> ChaosReport:
        """What there is to tell."""
        records, injector = self._records, self._injector
        done = injector.done
        complete = [record for record in records if record.is_complete and record.asked.number not in self._lied]
        moments = [each.at for each in done]
        recovered = [find_recovery_s(record, moments) for record in complete]
        kinds = Counter(f"{each.planned.kind.value}: {each.planned.victim.value}" for each in done)
        boxes = self._network.boxes
        return ChaosReport(
            seed=self._settings.seed,
            seconds=self._took,
            faults=dict(kinds),
            requests=len(records),
            completed=len(complete),
            lied=len(self._lied),
            liar=self._settings.liar,
            moved=sum(record.was_moved for record in complete),
            failed=dict(Counter(record.error for record in records if record.error)),
            wrong=tuple(self._wrong),
            lost=tuple(f"request {each.asked.number} did not end by its deadline" for each in records if each.late),
            left_over=tuple(self.left_over),
            troubles=(*injector.troubles, *(trouble for box in boxes for trouble in box.troubles)),
            recovery=spread_of([value for value in recovered if value is not None]),
            gap=spread_of([record.find_longest_gap_s() for record in complete]),
            ttft=spread_of([record.times[0] - record.asked_at for record in complete if record.times]),
            away=spread_of(injector.away_s),
            starts=sum(box.starts for box in boxes),
            agent=AgentFigures(
                memory_before_mib=self._before[0],
                memory_after_mib=self._after[0],
                files_before=self._before[1],
                files_after=self._after[1],
            ),
        )

    async def _inflict_at(self, fault: PlannedFault, watchers: trio.Nursery) -> None:
        await trio.sleep_until(self._began + fault.at_s)
        await self._injector.inflict(fault, watchers)

    # ---- clients ------------------------------------------------------------------------------------------------

    async def _ask_at(self, request: PlannedRequest) -> None:
        await trio.sleep_until(self._began + request.at_s)
        await self._ask(request)

    async def _ask(self, request: PlannedRequest) -> None:
        record = AnswerRecord(request, self._now())
        self._records.append(record)
        deadline_s = self._settings.deadline_s
        body = build_request(
            None,
            None,
            {
                "prompt_token_ids": request.prompt,
                "max_tokens": request.output,
                "deadline_s": deadline_s,
                "ignore_eos": True,
            },
        )

        def take(delta: TextDelta) -> None:
            record.take(delta.tokens, self._now())

        with trio.move_on_after(deadline_s + GRACE_S) as limit:
            try:
                found = await self._sessions[request.client].generate(body, take)
                if found.figures is not None:
                    record.attempts, record.recovered = found.figures.attempts, found.figures.recovered
            except ClientError as error:
                record.error = str(error)
        record.late = limit.cancelled_caught
        record.ended_at = self._now()
        expected = self._setup.expect(request.prompt, request.output)
        wrong = find_wrong(record, expected)
        if wrong and self._settings.liar and is_lie(record, expected):
            self._lied.add(request.number)
        elif wrong:
            self._wrong.append(wrong)
            self._say(f"WRONG: {wrong}")
        if record.error:
            self._say(
                f"request {request.number} failed after {record.ended_at - record.asked_at:.1f} s: {record.error}"
            )

    def _count_kept(self) -> tuple[float, int]:
        """Of an agent that has run all the time: MiB of memory, and open files, sockets among them."""
        pid = self._injector.kept.pid
        if pid is None:
            return 0.0, 0
        process = psutil.Process(pid)
        return process.memory_info().rss / 2**20, process.num_fds()

    def _now(self) -> float:
        return trio.current_time() - self._began
