"""How the requests of a period would have fared under a placement: a simulation of requests rather than of steps.

    judged = PeriodReplay(problem).judge(groups)
    judged.attainment, judged.normalized

Who steps in a shared engine is decided by the doubling budget (see `sharing/doubling_budget`), as it is live; an engine
of one service computes chunks of prompts beside its decodes. Decodes of a service run together until one of them ends,
its budget is used up, or a request comes: so many steps are one event, in closed form, which is what makes it fast
enough to judge thousands of placements. For that it is coarser than engines are: KV is reserved for whole answers, so
that nobody loses any; and starvation is looked at where turns begin. A request goes to the engine of its service that
has the fewest.

Services that have no engine in common do not meet. Judgements are kept for each set of engines that do, so a placement
that differs in one group costs only the replay of those around it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ..costs.step_times import StepTimes, chunk_pairs
from ..sharing.doubling_budget import STARVED_AFTER
from .values import GpuGroup, GroupKind, PlacementProblem

MAX_TOKENS: Final = 2048
"""Of prompts in a step."""

MAX_REQUESTS: Final = 256
"""That decode in a step."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """By service: requests, those that were late or not served, those not served, and the sum of normalized latencies
    of those that were."""

    requests: NDArray[np.int64]
    late: NDArray[np.int64]
    unserved: NDArray[np.int64]
    normalized_sum: NDArray[np.float64]

    @property
    def attainment(self) -> float:
        """Of all requests, those in time."""
        return 1.0 - float(self.late.sum()) / float(self.requests.sum())

    @property
    def by_service(self) -> NDArray[np.float64]:
        """Attainment of each service; 1 where nobody asked."""
        found: NDArray[np.float64] = 1.0 - self.late / np.maximum(1, self.requests)
        return found

    @property
    def normalized(self) -> float:
        """Mean of latency over the service's usual execution alone (section 6.1), of requests that were served;
        infinite where none was."""
        served = int((self.requests - self.unserved).sum())
        return float(self.normalized_sum.sum()) / served if served else inf

    @property
    def is_complete(self) -> bool:
        """Whether every request was served, in time or not (equation 3)."""
        return not self.unserved.any()

    def of(self, services: Sequence[int]) -> Judged:
        """Of some services only."""
        rows = list(services)
        return Judged(self.requests[rows], self.late[rows], self.unserved[rows], self.normalized_sum[rows])

    def unserved_index(self, alpha: float) -> NDArray[np.float64]:
        """Equation 6. The normalized latency of requests that were not served is left out: they are late already."""
        served = np.maximum(1, self.requests - self.unserved)
        return np.asarray(self.late + alpha * self.normalized_sum / served)


class _Hosting(NamedTuple):
    """A group as it matters here: which of several boxes of a kind it is on does not."""

    kind: GroupKind
    tp: int
    services: tuple[int, ...]


class _Fates(NamedTuple):
    """Of one service's requests."""

    late: int
    unserved: int
    normalized_sum: float


@final
class PeriodReplay:
    """See the module."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.replays = 0  # of sets of engines: what judging has cost
        period = problem.period
        self._arrivals = period.arrival_s.tolist()
        self._prompts = period.prompt.tolist()
        self._outputs = period.output.tolist()
        self._of = period.service.tolist()
        self._rows: defaultdict[int, list[int]] = defaultdict(list)
        for row, service in enumerate(self._of):
            self._rows[service].append(row)
        self._known: dict[tuple[_Hosting, ...], dict[int, _Fates]] = {}

    def judge(self, groups: Sequence[GpuGroup]) -> Judged:
        """All services under these groups."""
        counts = np.array(self.problem.counts)
        fates = {number: _Fates(count, count, 0.0) for number, count in enumerate(self.problem.counts)}
        for part in self._connected(groups):
            found = self._known.get(part)
            if found is None:
                found = self._known[part] = self._replay(part)
            fates |= found
        rows = [fates[number] for number in range(len(counts))]
        return Judged(
            counts,
            np.array([each.late for each in rows]),
            np.array([each.unserved for each in rows]),
            np.array([each.normalized_sum for each in rows]),
        )

    def _connected(self, groups: Sequence[GpuGroup]) -> list[tuple[_Hosting, ...]]:
        """Sets of engines that have services in common, directly or through others."""
        parent = list(range(len(self.problem.services)))

        def root(service: int) -> int:
            while parent[service] != service:
                parent[service] = parent[parent[service]]
                service = parent[service]
            return service

        hosting = [group for group in groups if group.services]
        for group in hosting:
            for other in group.services[1:]:
                parent[root(other)] = root(group.services[0])
        parts: defaultdict[int, list[_Hosting]] = defaultdict(list)
        for group in hosting:
            kind = self.problem.boxes[group.box].kind
            parts[root(group.services[0])].append(_Hosting(kind, group.tp, group.services))
        return [tuple(sorted(part, key=_place)) for part in parts.values()]

    def _replay(self, part: tuple[_Hosting, ...]) -> dict[int, _Fates]:
        """Every request of the services of engines that belong together."""
        self.replays += 1
        engines = [_Engine(self, hosting) for hosting in part]
        hosts: defaultdict[int, list[_Engine]] = defaultdict(list)
        for engine in engines:
            for service in engine.lines:
                hosts[service].append(engine)
        ended = [inf] * len(self._of)
        wakes: list[tuple[float, int]] = []
        rows = [self._rows[service] for service in hosts]
        for row in rows[0] if len(rows) == 1 else sorted(row for some in rows for row in some):
            now = self._arrivals[row]
            self._advance(engines, wakes, now, ended)
            service = self._of[row]
            chosen = min(hosts[service], key=_open_requests)
            if chosen.take(row, now):
                heappush(wakes, (chosen.wake_at, engines.index(chosen)))
        self._advance(engines, wakes, inf, ended)
        return {service: self._fates(service, ended) for service in hosts}

    def _advance(
        self, engines: list[_Engine], wakes: list[tuple[float, int]], until: float, ended: list[float]
    ) -> None:
        while wakes and wakes[0][0] <= until:
            now, number = heappop(wakes)
            engine = engines[number]
            if engine.wake_at != now or now == inf:
                continue  # it was cut short, or has nothing to do
            engine.end_turn(now, ended)
            if engine.begin_turn(now):
                heappush(wakes, (engine.wake_at, number))

    def _fates(self, service: int, ended: list[float]) -> _Fates:
        problem, late, unserved, total = self.problem, 0, 0, 0.0
        alone, usual = problem.alone_s, problem.usual_s[service]
        for row in self._rows[service]:
            latency = ended[row] - self._arrivals[row]
            if latency == inf:
                unserved += 1
            else:
                total += latency
            late += latency > problem.slo_scale * alone[row]
        return _Fates(late, unserved, total / usual)

    def request(self, row: int) -> tuple[int, int, int]:
        """Its service, and tokens of its prompt and of its answer."""
        return self._of[row], self._prompts[row], self._outputs[row]

    def arrival(self, row: int) -> float:
        """When it came."""
        at: float = self._arrivals[row]
        return at


def _place(hosting: _Hosting) -> tuple[str, float, int, tuple[int, ...]]:
    return hosting.kind.gpu.name, hosting.kind.link_gbps, -hosting.tp, hosting.services


def _open_requests(engine: _Engine) -> int:
    return engine.open


@final
class _ServiceLine:
    """One service in an engine: prompts that wait, and requests that decode, all of them in each of its steps."""

    __slots__ = (
        "budget", "budgets", "charged", "computed", "context", "decoding", "ends", "last_s", "starved_s", "steps",
        "times", "token_bytes", "usual", "waiting",
    )  # fmt: skip

    def __init__(self, times: StepTimes, token_bytes: int, usual: float, deviation: float) -> None:
        self.times = times
        self.token_bytes = token_bytes
        self.usual = usual
        self.budget = usual + deviation
        self.starved_s = STARVED_AFTER * usual
        self.waiting: deque[int] = deque()
        self.computed = 0  # tokens of the first that waits: more than 0 once it has room
        self.decoding = 0
        self.context = 0
        self.steps = 0  # that have been done
        self.charged = 0.0  # seconds of those steps
        self.ends: list[tuple[int, int, int]] = []  # heap of the step after which each ends, its row and tokens then
        self.budgets: list[tuple[float, float, int]] = []  # heap of what is charged when it is used up, the budget, row
        self.last_s = 0.0  # of its last turn

    def score(self, now: float, ended: set[int], arrival: float) -> float:
        """O of its first request, or of one that has starved less than any."""
        since = max(self.last_s, arrival) if self.waiting and not self.decoding else self.last_s
        if now - since > self.starved_s:
            return -1.0 / (1.0 + now - since)
        left = self.budget if self.waiting else inf
        while self.budgets:
            limit, budget, row = self.budgets[0]
            if row in ended:
                heappop(self.budgets)
            elif limit <= self.charged:
                heappop(self.budgets)
                heappush(self.budgets, (self.charged + 2.0 * budget, 2.0 * budget, row))
            else:
                left = min(left, limit - self.charged)
                break
        return left * self.usual


@final
class _Engine:
    """One group's. `wake_at`: when its turn ends; infinite: nothing to do. `open`: its requests."""

    __slots__ = (
        "_began", "_chunks", "_decodes", "_done", "_free", "_line", "_replay", "_room", "_steps", "lines", "open",
        "wake_at",
    )  # fmt: skip

    def __init__(self, replay: PeriodReplay, hosting: _Hosting) -> None:
        problem = replay.problem
        self._replay = replay
        self.lines = {
            service: _ServiceLine(
                problem.times(hosting.kind, hosting.tp, service),
                problem.services[service].model.kv_bytes_per_token,
                *problem.execution_s(hosting.kind, hosting.tp, service),
            )
            for service in hosting.services
        }
        self.open = 0
        self.wake_at = inf
        self._room = self._free = problem.kv_room(hosting.kind, hosting.tp, hosting.services)
        self._done: set[int] = set()
        self._line: _ServiceLine | None = None  # whose turn it is
        self._began = 0.0
        self._steps = 0  # of its decodes in this turn
        self._decodes = False  # whether its decodes step
        self._chunks: list[tuple[int, int]] = []  # rows of prompts in this turn, and how many tokens of each

    def take(self, row: int, now: float) -> bool:
        """A request has come; whether `wake_at` has changed. One that could never be served is not taken."""
        service, prompt, output = self._replay.request(row)
        line = self.lines[service]
        if (prompt + output) * line.token_bytes > self._room:
            return False
        self.open += 1
        line.waiting.append(row)
        if self._line is None:
            return self.begin_turn(now)
        if self._steps > 1:
            return self._cut(now)
        return False

    def begin_turn(self, now: float) -> bool:
        """Whoever is to step begins; whether anybody does."""
        self.wake_at, self._line = inf, None
        if not self.open:
            return False
        lines = [line for line in self.lines.values() if line.waiting or line.decoding]
        if len(self.lines) == 1:
            return self._begin_mixed(lines[0], now)
        if len(lines) > 1:
            firsts = [(self._replay.arrival(line.waiting[0]) if line.waiting else 0.0) for line in lines]
            scores = [line.score(now, self._done, first) for line, first in zip(lines, firsts, strict=True)]
            lines = [lines[place] for place in sorted(range(len(lines)), key=scores.__getitem__)]
        for line in lines:
            tokens = self._admit(line, MAX_TOKENS)
            if tokens:
                self._begin(line, now, line.times.prefill_s(tokens, self._pairs(line)), decodes=False)
                return True
            if line.decoding:
                if len(self.lines) > 1:
                    line.score(now, self._done, 0.0)  # doubles what is used up
                self._begin_run(line, now)
                return True
        return False

    def end_turn(self, now: float, ended: list[float]) -> None:
        """It has ended: tokens have come."""
        line = self._line
        assert line is not None
        seconds = now - self._began
        line.last_s = now
        if self._decodes:
            line.steps += self._steps
            line.context += line.decoding * self._steps
            line.charged += seconds
            while line.ends and line.ends[0][0] <= line.steps:
                _, row, tokens = heappop(line.ends)
                line.decoding -= 1
                line.context -= tokens
                self._end(row, line, now, ended)
        for row, tokens in self._chunks:
            self._compute(row, tokens, line, seconds, now, ended)
        self._chunks = []

    def _compute(
        self, row: int, tokens: int, line: _ServiceLine, seconds: float, now: float, ended: list[float]
    ) -> None:
        """Of a prompt: with its last token it joins the decodes."""
        _, prompt, output = self._replay.request(row)
        line.computed += tokens
        if line.computed < prompt:
            return
        line.computed = 0
        line.waiting.popleft()
        if output == 1:
            self._end(row, line, now, ended)
            return
        line.decoding += 1
        line.context += prompt
        heappush(line.ends, (line.steps + output - 1, row, prompt + output - 1))
        if len(self.lines) > 1:
            heappush(line.budgets, (line.charged + max(1e-9, line.budget - seconds), line.budget, row))

    def _end(self, row: int, line: _ServiceLine, now: float, ended: list[float]) -> None:
        _, prompt, output = self._replay.request(row)
        self._free += (prompt + output) * line.token_bytes
        self.open -= 1
        ended[row] = now
        if len(self.lines) > 1:
            self._done.add(row)

    def _admit(self, line: _ServiceLine, tokens: int) -> int:
        """Prompts of a step of at most so many tokens; how many they have."""
        found, places, computed = 0, MAX_REQUESTS - line.decoding, line.computed
        for row in line.waiting:
            _, prompt, output = self._replay.request(row)
            size = (prompt + output) * line.token_bytes
            if found >= tokens or not places or (not computed and size > self._free):
                break
            if not computed:
                self._free -= size
            part = min(tokens - found, prompt - computed)
            self._chunks.append((row, part))
            found += part
            places -= 1
            computed = 0
        return found

    def _pairs(self, line: _ServiceLine) -> float:
        first = line.computed
        return sum(chunk_pairs(0 if number else first, part) for number, (_, part) in enumerate(self._chunks))

    def _begin_mixed(self, line: _ServiceLine, now: float) -> bool:
        """An engine of one service: prompts beside decodes."""
        tokens = self._admit(line, MAX_TOKENS - line.decoding)
        if tokens and not line.decoding:
            self._begin(line, now, line.times.prefill_s(tokens, self._pairs(line)), decodes=False)
        elif tokens:
            seconds = line.times.mixed_s(tokens, self._pairs(line), line.decoding, line.context)
            self._begin(line, now, seconds, decodes=True)
        elif line.decoding:
            self._begin_run(line, now)
        return self._line is not None

    def _begin(self, line: _ServiceLine, now: float, seconds: float, *, decodes: bool) -> None:
        self._line, self._began, self._decodes, self._steps = line, now, decodes, 1
        self.wake_at = now + seconds

    def _begin_run(self, line: _ServiceLine, now: float) -> None:
        """Decodes alone, until one ends or its budget does."""
        decode = line.times.decode_line(line.decoding)
        steps = line.ends[0][0] - line.steps
        if line.budgets and len(self.lines) > 1:
            within = (line.budgets[0][0] - line.charged) / decode.step_s(line.context)
            steps = min(steps, max(1, int(within) + 1))
        self._begin(line, now, decode.run_s(line.decoding, line.context, steps), decodes=True)
        self._steps = steps

    def _cut(self, now: float) -> bool:
        """End the run under way with the step under way."""
        line = self._line
        assert line is not None
        done = (now - self._began) / (self.wake_at - self._began) * self._steps
        steps = max(1, int(done) + 1)
        if steps >= self._steps:
            return False
        self._steps = steps
        decode = line.times.decode_line(line.decoding)
        self.wake_at = max(now, self._began + decode.run_s(line.decoding, line.context, steps))
        return True
