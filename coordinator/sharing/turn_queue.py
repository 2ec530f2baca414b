"""The requests of an engine process that several services share, and which of them step next. Pure.

    queue = TurnQueue(DoublingBudget(profiles), profiles)
    request = queue.add(key, "chat", prompt_tokens, now)
    turn = queue.choose(now, room)            # before every iteration
    queue.charge(turn, seconds, now, tokens)  # after it
    queue.begin_decode(request)               # all of its tokens have KV
    queue.finish(request, output_tokens)

A turn is one iteration of one service in one phase, so that weights are read for one model and a decode step is not
held up by a prompt. Who gets it is decided anew before each iteration, also among requests of one service: a request
that is not in the turn is paused and keeps its KV. When memory is short, `pick_victim` says whose KV goes; that request
computes it again in a later turn. What goes first is the `TurnOrder`'s choice; all else is alike for every order.

Nobody starves. A request that has been in no turn for the starvation threshold of its service is promoted, or for
`WAIT_SHARE` of the time that it then had until its deadline, if that is shorter: a threshold follows what requests of
the service take, and before any has ended it is a guess that may be longer than a deadline. Lines (a service's requests
in one phase) with promoted requests have their turns before all others, the line first whose first promoted request was
in a turn longest ago, and in it who was promoted first. So a request waits for the threshold, one turn of each other
line, and as many turns of its own line as those promoted before it fill. It stays promoted until its order moves it
(its budget is used up).

A decision costs the same however many requests wait: lines are sorted, their heads are compared, and what is taken is
looked at once. Starvation is found by a heap of the moments since which requests wait, brought up to date only where a
threshold seems to have passed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Final, Protocol, final

from ..plan import Phase
from .service_profile import ServiceProfile
from .values import SharedRequest, SharingError, Turn, TurnRoom

PHASES: Final = (Phase.PREFILL, Phase.DECODE)

WAIT_SHARE: Final = 0.25
"""Of the time that a request has left, so much may pass without a turn. Less: more requests are served in time while
another service could use all turns; more: short requests wait less for late ones."""

_Wait = tuple[float, int, SharedRequest]
"""For a heap: a moment, and the number of the request that it is of."""


class TurnOrder(Protocol):
    """What goes first. `prompts_first`: in the service whose turn it is, prompts that fit go before its decodes."""

    @property
    def prompts_first(self) -> bool:
        """See the class."""
        ...

    def join(self, request: SharedRequest) -> None:
        """A request has come: give it its rank among those of its service and phase, the lowest first."""
        ...

    def score(self, request: SharedRequest) -> float:
        """To compare the first requests of lines, the lowest first; of equal ones, who came first."""
        ...

    def charge(self, requests: list[SharedRequest], seconds: float) -> list[SharedRequest]:
        """These were in a turn. Ranks may fall by the same amount; whose rank changes otherwise is returned."""
        ...

    def starvation_s(self, service: str) -> float:
        """How long a request of this service waits at most before it is promoted; infinite: it never is."""
        ...

    def may_evict(self, asker: SharedRequest, victim: SharedRequest) -> bool:
        """Whether the KV of one may go so that the other has room."""
        ...


@final
class _Line:
    """Requests of one service in one phase, by rank and arrival."""

    __slots__ = ("holders", "promoted", "requests")

    def __init__(self) -> None:
        self.requests: list[SharedRequest] = []
        self.promoted: dict[int, SharedRequest] = {}  # by number, in order of promotion
        self.holders: dict[int, SharedRequest] = {}  # those in prefill that hold KV, by number

    def insert(self, request: SharedRequest) -> None:
        insort(self.requests, request, key=_sort_key)
        if request.is_starved:
            self.promoted[request.number] = request
        if request.holds_kv and request.phase is Phase.PREFILL:
            self.holders[request.number] = request

    def remove(self, request: SharedRequest) -> None:
        del self.requests[bisect_left(self.requests, _sort_key(request), key=_sort_key)]
        self.promoted.pop(request.number, None)
        self.holders.pop(request.number, None)

    def take_out(self, taken: list[SharedRequest]) -> tuple[list[SharedRequest], bool]:
        """Those of a turn that are still open, and whether they were the first of the line, in its order. They mostly
        are, which spares looking for each."""
        requests, size = self.requests, len(taken)
        if requests[:size] == taken or (len(requests) == size and {*map(id, requests)} == {*map(id, taken)}):
            members = requests[:size]
            del requests[:size]
            return members, True
        members = [each for each in taken if each.is_open]
        for each in members:
            del requests[bisect_left(requests, _sort_key(each), key=_sort_key)]
        return members, False

    def put_back(self, members: list[SharedRequest], moved: list[SharedRequest], *, is_head: bool) -> None:
        """With their new ranks: those of the first of a line are still the lowest, but for those `moved`."""
        if is_head and not moved:
            self.requests[:0] = members
            return
        if is_head:
            away = {*map(id, moved)}
            self.requests[:0] = [each for each in members if id(each) not in away]
        for each in moved if is_head else members:
            insort(self.requests, each, key=_sort_key)

    def in_order(self) -> Iterator[SharedRequest]:
        """Promoted ones first."""
        if not self.promoted:
            return iter(self.requests)
        return self._promoted_first()

    def worst(self, turn: int) -> SharedRequest | None:
        """The last that holds KV, without those of a turn."""
        if self.holders:
            return max((each for each in self.holders.values() if each.turn != turn), key=_sort_key, default=None)
        decoding = (each for each in reversed(self.requests) if each.holds_kv and each.turn != turn)
        return next(decoding, None) if self.requests and self.requests[-1].phase is Phase.DECODE else None

    def _promoted_first(self) -> Iterator[SharedRequest]:
        yield from list(self.promoted.values())
        for request in self.requests:
            if not request.is_starved:
                yield request


@final
class TurnQueue:
    """See the module. `profiles` has every service; what happens here is noted there."""

    def __init__(self, order: TurnOrder, profiles: Mapping[str, ServiceProfile]) -> None:
        if not profiles:
            raise SharingError("an engine process needs a service to share")
        self.order = order
        self.profiles = profiles
        self.requests: dict[Hashable, SharedRequest] = {}
        self._lines = {(service, phase): _Line() for service in profiles for phase in PHASES}
        self._prompts = Counter[str]()  # tokens of the open requests, by service
        self._open = Counter[str]()
        self._numbers = count()
        self._turn = 0
        self._sole: Turn | None = None
        self.changes = 0
        """How often a service or a request has come or gone, or a request needed another phase than before."""
        # By service: since when those wait that are not promoted; times may have passed since.
        self._waits: dict[str, list[_Wait]] = {service: [] for service in profiles}
        self._by_deadline: list[_Wait] = []  # likewise, of all services: when each is promoted for its deadline's sake

    def __repr__(self) -> str:
        counts = ", ".join(f"{service} {phase.value} {len(line.requests)}"
                           for (service, phase), line in self._lines.items() if line.requests)  # fmt: skip
        return f"<TurnQueue {counts or 'empty'}>"

    def open_service(self, service: str) -> None:
        """A service joins the others, or comes back; `profiles` has it by now. Its order must be one that takes any."""
        for phase in PHASES:
            self._lines.setdefault((service, phase), _Line())
        self._waits.setdefault(service, [])
        self._note_change()

    def close_service(self, service: str) -> None:
        """It is gone, with all of its requests."""
        for phase in PHASES:
            del self._lines[service, phase]
        del self._waits[service], self._prompts[service], self._open[service]
        self._note_change()

    def add(self, key: Hashable, service: str, prompt_tokens: int, now: float, deadline: float = inf) -> SharedRequest:
        """A request has come, whose answer is of use until its deadline. Raises SharingError for a service that is not
        here, or a key that is."""
        if service not in self.profiles:
            raise SharingError(f"service {service!r} is none of {', '.join(self.profiles)}")
        if key in self.requests:
            raise SharingError(f"request {key!r} is here already")
        request = SharedRequest(key, service, next(self._numbers), prompt_tokens, now, deadline)
        self.requests[key] = request
        self._note_change()
        self.order.join(request)
        self._line(request).insert(request)
        self._prompts[service] += prompt_tokens
        self._open[service] += 1
        self._watch(request)
        return request

    def choose(self, now: float, room: TurnRoom) -> Turn | None:
        """Who steps next; None: nobody waits for whom there is room."""
        self._promote_starved(now)
        self._turn += 1
        self._sole = None
        for service, phase, line in self._lines_by_turn():
            if phase is Phase.DECODE and self.order.prompts_first and not line.promoted:
                prompts = self._fill(service, Phase.PREFILL, room)
                if prompts is not None:
                    return prompts
            turn = self._fill(service, phase, room)
            if turn is not None:
                if phase is Phase.DECODE and len(turn.requests) == len(self.requests):
                    self._sole = turn
                return turn
        return None

    @property
    def sole_turn(self) -> Turn | None:
        """The last turn, if it had all requests, all of them decoded, and nothing has changed since: it is the next one
        as well, if there is room."""
        return self._sole

    def choose_again(self, turn: Turn) -> None:
        """The `sole_turn` is the next one."""
        self._turn += 1
        for request in turn.requests:
            request.turn = self._turn

    @property
    def sole_decoder(self) -> str | None:
        """The service of which all requests are, if all of them decode."""
        if self._sole is not None:
            return self._sole.service
        sole = None
        for (service, phase), line in self._lines.items():
            if line.requests:
                if sole is not None or phase is Phase.PREFILL:
                    return None
                sole = service
        return sole

    def charge(self, turn: Turn, seconds: float, now: float, tokens: int = 0, *, is_expected: bool = False) -> None:
        """The turn has taken so long, and computed so many tokens of prompts: each of its requests is charged all of
        it. `is_expected`: it may yet take another time, and nothing is learned of it."""
        if not is_expected:
            self._learn(turn, seconds, tokens)
        line = self._lines[turn.service, turn.phase]
        members, is_head = line.take_out(turn.requests)
        for each in members:
            each.waits_since = now
            each.charged_s += seconds
        moved = self.order.charge(members, seconds)
        for each in moved:
            if each.is_starved:
                self._demote(line, each)
        line.put_back(members, moved, is_head=is_head)
        self._turn += 1  # nobody is in a turn now

    def begin_decode(self, request: SharedRequest) -> None:
        """All of its tokens so far have KV."""
        if request.phase is not Phase.DECODE:
            self._change(request, Phase.DECODE)

    def hold_kv(self, request: SharedRequest) -> None:
        """It holds KV from now on."""
        if not request.holds_kv:
            request.holds_kv = True
            if request.phase is Phase.PREFILL:
                self._line(request).holders[request.number] = request

    def lose_kv(self, request: SharedRequest) -> None:
        """Its KV is gone: it needs prefill again, of all of its tokens so far."""
        request.holds_kv = False
        self._change(request, Phase.PREFILL)

    def finish(self, request: SharedRequest, output_tokens: int) -> None:
        """It has been answered in full."""
        profile = self.profiles[request.service]
        profile.execution.note(request.charged_s)
        profile.prompt_tokens.note(request.prompt_tokens)
        profile.output_tokens.note(output_tokens)
        self.remove(request)

    def remove(self, request: SharedRequest) -> None:
        """It is gone, answered or not."""
        self._note_change()
        self._line(request).remove(request)
        self._prompts[request.service] -= request.prompt_tokens
        self._open[request.service] -= 1
        del self.requests[request.key]
        request.is_open = False

    def need_tokens(self, service: str) -> float:
        """Positions that its open requests will have when their answers are as long as those before them."""
        answer = self.profiles[service].output_tokens.mean if service in self.profiles else 0.0
        return self._prompts[service] + self._open[service] * answer

    def pick_victim(self, asker: SharedRequest | None, may_lose: Callable[[str], bool]) -> SharedRequest | None:
        """Whose KV goes so that `asker` has room: the last in order, of services that may lose some, if the order has
        it behind the asker; None: whoever asks is before all."""
        worst: SharedRequest | None = None
        for (service, _), line in self._lines.items():
            found = line.worst(self._turn) if may_lose(service) else None
            if found is None or found is asker or not (asker is None or self._may_evict(asker, found)):
                continue
            if worst is None or self._place(found) > self._place(worst):
                worst = found
        return worst

    def find_last_holder(self) -> SharedRequest | None:
        """Who came last of those that hold KV, for an engine that cannot go on in any other way: an order that changes
        with the turns could have two evict each other for ever."""
        holders = (each for each in self.requests.values() if each.holds_kv)
        return max(holders, key=lambda each: each.number, default=None)

    def set_aside(self, victim: SharedRequest) -> None:
        """While a turn is chosen: it will lose its KV, and is neither picked again nor part of the turn."""
        victim.turn = self._turn

    def spare(self, victim: SharedRequest) -> None:
        """It was set aside, and keeps its KV after all."""
        victim.turn = -1

    # What goes on

    def _learn(self, turn: Turn, seconds: float, tokens: int) -> None:
        profile = self.profiles[turn.service]
        if turn.phase is Phase.DECODE:
            profile.decode_step.note(seconds)
        elif tokens > 0:
            profile.prefill_token.note(seconds / tokens)

    def _lines_by_turn(self) -> list[tuple[str, Phase, _Line]]:
        """Those with requests, in the order in which they may have the turn."""
        found = []
        for (service, phase), line in self._lines.items():
            if line.promoted:
                first = next(iter(line.promoted.values()))
                found.append((0, first.waits_since, first.number, service, phase, line))
            elif line.requests:
                head = line.requests[0]
                found.append((1, self.order.score(head), head.number, service, phase, line))
        found.sort(key=lambda each: each[:3])
        return [each[3:] for each in found]

    def _fill(self, service: str, phase: Phase, room: TurnRoom) -> Turn | None:
        """As many of the line as there is room for. Algorithm 2 as printed takes requests from the queue of a phase
        until nothing more fits, and leaves the first of another service in place, so it never ends; here the others of
        the service follow, and it ends with them."""
        taken: list[SharedRequest] = []
        number = self._turn
        for request in self._lines[service, phase].in_order():
            if not room.take(request):
                break
            request.turn = number
            taken.append(request)
        return Turn(service, phase, taken) if taken else None

    def _note_change(self) -> None:
        self.changes += 1
        self._sole = None

    def _change(self, request: SharedRequest, phase: Phase) -> None:
        self._note_change()
        self._line(request).remove(request)
        request.phase = phase
        self._line(request).insert(request)

    def _line(self, request: SharedRequest) -> _Line:
        return self._lines[request.service, request.phase]

    def _watch(self, request: SharedRequest) -> None:
        """For starvation."""
        if self.order.starvation_s(request.service) < inf:
            heappush(self._waits[request.service], (_waits_since(request), request.number, request))
            if request.deadline < inf:
                heappush(self._by_deadline, (_waits_until(request), request.number, request))

    def _promote_starved(self, now: float) -> None:
        for service, waits in self._waits.items():
            if waits:
                self._promote(waits, _waits_since, now - self.order.starvation_s(service), now)
        self._promote(self._by_deadline, _waits_until, now, now)

    def _promote(self, waits: list[_Wait], when: Callable[[SharedRequest], float], overdue: float, now: float) -> None:
        """Those of a heap by `when` for which that is not after `overdue`."""
        while waits and waits[0][0] <= overdue:
            request = heappop(waits)[2]
            if not request.is_open or request.is_starved:
                continue
            if (at := when(request)) > overdue:
                heappush(waits, (at, request.number, request))
                continue
            request.promoted_at = now
            self._line(request).promoted[request.number] = request

    def _demote(self, line: _Line, request: SharedRequest) -> None:
        request.promoted_at = inf
        line.promoted.pop(request.number, None)
        self._watch(request)

    def _may_evict(self, asker: SharedRequest, victim: SharedRequest) -> bool:
        if asker.is_starved or victim.is_starved:
            return (asker.promoted_at, asker.number) < (victim.promoted_at, victim.number)
        return self.order.may_evict(asker, victim)

    def _place(self, request: SharedRequest) -> tuple[bool, float, int]:
        return not request.is_starved, self.order.score(request), request.number


def _waits_since(request: SharedRequest) -> float:
    return request.waits_since


def _waits_until(request: SharedRequest) -> float:
    return request.waits_since + WAIT_SHARE * (request.deadline - request.waits_since)


def _sort_key(request: SharedRequest) -> tuple[float, int]:
    return request.rank, request.number
