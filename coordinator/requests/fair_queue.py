"""Whose request is served next: quotas of each client, and turns that are fair between clients by tokens. Pure.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with the costs of language models (the virtual token
counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Each client has a counter of what it
was given; of those that wait, the client with the lowest counter is next. A prompt's tokens are counted when its turn
comes, those of its answer as they are decoded. Who begins to wait after a pause starts from the counter of the latest
turn: idling saves nothing up. Of two clients that wait all the time, neither is given more than the other by more than
what is in service.

How much is served at once is bounded by a `ServiceRoom`, of which one client can have a part only, after Choudhury
and Hahne's dynamic thresholds (IEEE/ACM Transactions on Networking 6(2), 1998): `share` times what is left free. So a
client that is alone can have nearly all, and whoever comes next finds a place and need not wait for another's request
to end.

A client's own requests have classes. Each class has a weight, and of those that wait, the one is next that will have
been given least over its weight with its next request (weighted fair queueing; Demers, Keshav, Shenker, SIGCOMM 1989):
of a client's turns a class that waits all the time has at least its weight's part, so none starves whatever the others
ask. A class may also cost its client more in its
turns beside other clients', and be kept out of the last part of a queue that is bounded.

A prompt that is computed holds up the answers beside it. While others are served, a client therefore lets as much time
pass after each of its prompts as that took: of the replicas that decode for them, it takes half of the time at most.

    queue.start_in_s(client, tokens, now, room.rate)  # when its turn would come
    queue.add(client, key, tokens, now)      # or OverQuota
    while (key := queue.take(room, now)) is not None: ...
    queue.start(key, now)                    # its prompt has been computed
    queue.grow(key, tokens, cost)            # tokens of its answer
    queue.remove(key, now)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import ceil, exp, inf
from typing import Final, Generic, NamedTuple, NoReturn, TypeVar, final

from .drain_rate import DrainRate
from .retry_times import RetrySettings, RetryTimes

Key = TypeVar("Key", bound=Hashable)
MAX_IDLE: Final = 256  # clients without requests that have had more than their share: it is remembered of so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """How much a queue takes, waiting and served together: requests and their sizes, of one client and of all.

    A client that has nothing here may always add one request of any size, as far as all have room for it.
    """

    requests: int
    size: int
    all_requests: int
    all_size: int


class ServiceRoom(NamedTuple):
    """How much may be served at once, and what part of it one client can have.

    `share`: how many times what is left free of requests and size a client may have. `unstarted`: the size of what is
    served and has not started. On each of the `replicas` on which requests start, one of any size may, and a second one
    may wait for it once no more than `unstarted` should be left of those that do, at `rate` per second in all; others
    come to these where what is left has room for them as well, up to `most_unstarted` of all. On `mixed` of them a
    request that starts holds up others. `backlog_s`: of what other queues have given them, on the one that is free
    first.
    """

    requests: int
    size: float
    unstarted: float
    share: float
    mixed: int = 0
    replicas: int = 1
    rate: float = 0.0
    backlog_s: float = 0.0
    most_unstarted: float = 0.0

    def start_s(self, size: int) -> float:
        """How long a request of this size takes to start on one of the replicas, where that is known; else 0."""
        return size * self.replicas / self.rate if self.rate > 0.0 else 0.0


class QueueClass(NamedTuple):
    """Of a request, beside its client's others: `rank` tells classes apart, and goes first among equals. `weight` is of
    its client's turns, `cost` of its size in its client's counter, `share` of what the queue takes of all clients."""

    rank: int = 0
    weight: float = 1.0
    cost: float = 1.0
    share: float = 1.0


STARTS: Final = 16
"""Requests whose beginnings are averaged. More: steadier; fewer: it follows sooner what engines have to do besides."""

STARTS_S: Final = 2.0
"""Seconds in which what was seen of them fades, while there are no others."""

ANY_RATE: Final = 1e12
"""For a rate that is not known: nobody is refused for it."""

USUAL: Final = QueueClass()


class OverQuota(Exception):
    """There is no place for a request now. The text is a line for its client; `retry_after_s`: when one may be free."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


@dataclass(slots=True, eq=False)
class _Entry(Generic[Key]):
    client: Hashable
    key: Key
    size: int  # grows with the answer
    kind: QueueClass
    is_served: bool = False
    taken_at: float = 0.0
    mixed: int = 0  # of the room, when its turn came
    replicas: int = 1
    is_starting: bool = False
    unstarted: int = 0


@dataclass(slots=True, eq=False)
class _ClassLine(Generic[Key]):
    """A client's requests of one class that wait, in order of arrival. `passed`: what the class was given, over its
    weight."""

    kind: QueueClass
    passed: float = 0.0
    size: int = 0
    entries: deque[_Entry[Key]] = field(default_factory=deque)

    @property
    def next_passed(self) -> float:
        """What the class will have been given with its next request."""
        return self.passed + self.entries[0].size / self.kind.weight


@dataclass(slots=True, eq=False)
class _ClientAccount(Generic[Key]):
    """A client with requests here."""

    counter: float
    retries: RetryTimes
    lines: dict[int, _ClassLine[Key]] = field(default_factory=dict)  # by rank; one that has been used stays
    passed: float = 0.0  # of the line whose turn was the latest
    waiting: int = 0
    size: int = 0
    served: int = 0
    served_size: int = 0
    pauses: list[tuple[float, int]] = field(default_factory=list)  # until when a size that has started counts on

    @property
    def requests(self) -> int:
        return self.waiting + self.served

    @property
    def waiting_size(self) -> int:
        return sum(line.size for line in self.lines.values())

    def next_line(self) -> _ClassLine[Key]:
        """The class whose turn it is of those that wait."""
        lines = (line for line in self.lines.values() if line.entries)
        return min(lines, key=lambda line: (line.next_passed, line.kind.rank))

    def append(self, entry: _Entry[Key]) -> None:
        line = self.lines.setdefault(entry.kind.rank, _ClassLine(entry.kind))
        if not line.entries:  # a pause saves nothing up
            line.passed = max(line.passed, self.passed)
        line.kind = entry.kind
        line.entries.append(entry)
        line.size += entry.size
        self.waiting += 1

    def pop(self) -> _Entry[Key]:
        line = self.next_line()
        entry = line.entries.popleft()
        line.size -= entry.size
        self.waiting -= 1
        self.passed = line.passed
        line.passed += entry.size / line.kind.weight
        return entry

    def discard(self, entry: _Entry[Key]) -> None:
        line = self.lines[entry.kind.rank]
        line.entries.remove(entry)
        line.size -= entry.size
        self.waiting -= 1

    def before(self, size: int, kind: QueueClass) -> float:
        """How much of this client's own that waits has its turn before one more of this class."""
        own = self.lines.get(kind.rank)
        ahead, begun = (own.size, own.passed) if own is not None else (0, 0.0)
        reach = max(self.passed, begun) + (ahead + size) / kind.weight
        others = (line for line in self.lines.values() if line.entries and line is not own)
        return ahead + sum(min(float(line.size), max(0.0, reach - line.passed) * line.kind.weight) for line in others)


@final
class FairQueue(Generic[Key]):
    """See the module. `what`: its requests, as an error calls them; `unit`: what sizes count."""

    def __init__(self, what: str, unit: str, quota: Quota, retry: RetrySettings) -> None:
        self._what = what
        self._unit = unit
        self._quota = quota
        self._retry = retry
        self._retries = RetryTimes(retry)  # of a queue that is full
        self._entries: dict[Key, _Entry[Key]] = {}
        self._accounts: dict[Hashable, _ClientAccount[Key]] = {}
        self._idle: dict[Hashable, float] = {}  # counters above `_virtual` of clients that have nothing here
        self._virtual = 0.0  # the counter of whoever was last given a turn, before that
        self._size = self._served = self._served_size = 0
        self._starting = self._unstarted = 0  # requests, and their size
        self._waiting = 0
        self._drain = DrainRate()
        self._mean_start_s = self._started_at = 0.0  # of about the latest STARTS; the moment of the last
        self._left_at = 0.0, 0.0  # a moment, and what should have been left of that size then

    def __repr__(self) -> str:
        waiting = len(self._entries) - self._served
        return f"<FairQueue {self._what}: {waiting} wait, {self._served} served, of {len(self._accounts)} clients>"

    def __len__(self) -> int:
        return len(self._entries)

    def is_served(self, key: Key) -> bool:
        """Whether its turn has come."""
        return self._entries[key].is_served

    @property
    def waiting(self) -> int:
        """Requests whose turns have not come."""
        return self._waiting

    def is_starting(self, key: Key) -> bool:
        """Whether its turn has come, and it is not past its beginning."""
        return self._entries[key].is_starting

    def mean_start_s(self, now: float) -> float:
        """From a turn to the beginning that it was for, as it was lately. It fades while nothing begins: who is not
        given turns for it would never hear that it is over."""
        return self._mean_start_s * exp((self._started_at - now) / STARTS_S)

    def start_in_s(self, client: Hashable, size: int, now: float, prior: float, kind: QueueClass = USUAL) -> float:
        """About when the turn of a request would come that is added now: what waits and comes before it, at the rate at
        which turns have been given lately. `prior`: that rate, before much was seen; 0: not known. Infinite: nothing
        gets on."""
        if not self._waiting:
            return 0.0
        account = self._accounts.get(client)
        before = account.before(size, kind) if account is not None else 0.0
        counter = account.counter if account is not None and account.waiting else self._virtual
        reach = counter + before * kind.cost
        for other in self._accounts.values():
            if other is not account and other.waiting:
                before += min(other.waiting_size, max(0.0, reach - other.counter))
        if before <= 0.0:
            return 0.0
        rate = self._drain.rate(now, prior if prior > 0.0 else ANY_RATE)
        return before / rate if rate > 0.0 else inf

    def check(self, client: Hashable, size: int, now: float, kind: QueueClass = USUAL) -> None:
        """Raise OverQuota where `add` would."""
        quota, account = self._quota, self._accounts.get(client)
        what, unit = self._what, self._unit
        if account is not None and account.requests >= quota.requests:
            self._refuse(f"this client has {account.requests} {what} here, the most of one", account.retries, now)
        if account is not None and account.size + size > quota.size:
            text = f"this client's {what} have {account.size} {unit} here, and one client's may have {quota.size}"
            self._refuse(text, account.retries, now)
        most, most_size = kind.share * quota.all_requests, int(kind.share * quota.all_size)
        if len(self._entries) >= most:
            self._refuse(
                f"{len(self._entries)} {what} of all clients are here, the most of this node", self._retries, now
            )
        if self._entries and self._size + size > most_size:
            text = f"the {what} of all clients have {self._size} {unit} here, and may have {most_size}"
            self._refuse(text, self._retries, now)

    def refuse(self, text: str, now: float, least_s: float) -> NoReturn:
        """Raise OverQuota for another reason than a quota; in `least_s` at the soonest there is a place again."""
        self._refuse(text, self._retries, now, least_s)

    def add(self, client: Hashable, key: Key, size: int, now: float, kind: QueueClass = USUAL) -> None:
        """A request of a client begins to wait. Raises OverQuota; nothing has changed then."""
        self.check(client, size, now, kind)
        account = self._accounts.get(client)
        if account is None:
            counter = self._idle.pop(client, 0.0)
            account = self._accounts[client] = _ClientAccount(counter, RetryTimes(self._retry))
        if not account.waiting:
            account.counter = max(account.counter, self._virtual)
        entry = self._entries[key] = _Entry(client, key, size, kind)
        account.append(entry)
        self._note_waiting(1, 0, now)
        account.size += size
        self._size += size

    def take(self, room: ServiceRoom, now: float) -> Key | None:
        """The request whose turn it is, if there is room for it: it is served from now on."""
        next_ = self._find_next(room)
        # Nobody overtakes who is next: a large request would wait for ever for room that small ones take.
        if next_ is None or self._wait_s(next_, room, now) > 0.0:
            return None
        entry = next_.pop()
        self._note_waiting(-1, entry.size, now)
        entry.is_served = entry.is_starting = True
        entry.taken_at, entry.unstarted = now, entry.size
        entry.mixed, entry.replicas = room.mixed, room.replicas
        self._virtual = max(self._virtual, next_.counter)
        next_.counter += entry.size * entry.kind.cost
        next_.served += 1
        next_.served_size += entry.size
        self._served += 1
        self._served_size += entry.size
        self._left_at = now, self._left(room, now) + entry.size
        self._starting += 1
        self._unstarted += entry.size
        return entry.key

    def take_in_s(self, room: ServiceRoom, now: float) -> float:
        """Seconds until `take` may find somebody though nothing else happens; infinite: not by that."""
        next_ = self._find_next(room)
        return inf if next_ is None else self._wait_s(next_, room, now)

    def start(self, key: Key, now: float) -> None:
        """A served request is past its beginning: what holds up others has been done."""
        entry = self._entries[key]
        if not entry.is_starting:
            return
        account = self._accounts[entry.client]
        self._mean_start_s += (now - entry.taken_at - self._mean_start_s) / STARTS
        self._started_at = now
        # Others' requests are on so many of the mixed replicas, as far as is known here.
        held_up = min(entry.mixed, self._served - account.served) / entry.replicas
        account.pauses = [pause for pause in account.pauses if pause[0] > now]
        account.pauses.append((now + held_up * (now - entry.taken_at), entry.unstarted))
        self._stop_starting(entry)

    def grow(self, key: Key, size: int, cost: float) -> None:
        """A served request has become larger, which cost its client so much."""
        entry = self._entries[key]
        account = self._accounts[entry.client]
        entry.size += size
        account.size += size
        account.served_size += size
        account.counter += cost * entry.kind.cost
        self._size += size
        self._served_size += size

    def remove(self, key: Key, now: float) -> None:
        """A request has ended, or waits no more."""
        entry = self._entries.pop(key)
        account = self._accounts[entry.client]
        self._size -= entry.size
        account.size -= entry.size
        if entry.is_served:
            account.served -= 1
            account.served_size -= entry.size
            self._served -= 1
            self._served_size -= entry.size
            self._stop_starting(entry)
        else:
            account.discard(entry)
            self._note_waiting(-1, 0, now)
        account.retries.freed(now)
        self._retries.freed(now)
        if not account.requests:
            self._forget(entry.client, account.counter)

    def check_integrity(self) -> None:
        """Raise AssertionError where the sums are not those of the requests."""
        entries = list(self._entries.values())
        served = [entry for entry in entries if entry.is_served]
        assert self._size == sum(entry.size for entry in entries)
        assert (self._served, self._served_size) == (len(served), sum(entry.size for entry in served))
        assert self._starting == sum(entry.is_starting for entry in served)
        assert self._unstarted == sum(entry.unstarted for entry in served)
        assert sum(account.requests for account in self._accounts.values()) == len(entries)
        for client, account in self._accounts.items():
            own = [entry for entry in entries if entry.client == client]
            assert own, f"{client} has an account and no requests"
            assert account.size == sum(entry.size for entry in own)
            assert account.served == sum(entry.is_served for entry in own)
            waiting = [entry for entry in own if not entry.is_served]
            assert account.waiting == len(waiting)
            assert account.waiting_size == sum(entry.size for entry in waiting)
            for rank, line in account.lines.items():
                assert list(line.entries) == [entry for entry in waiting if entry.kind.rank == rank]
        assert self._waiting == sum(account.waiting for account in self._accounts.values())
        assert len(self._idle) <= MAX_IDLE

    # ---- inside ---------------------------------------------------------------------------------------------

    def _find_next(self, room: ServiceRoom) -> _ClientAccount[Key] | None:
        """Whose request is next; nobody's, where none waits or all have their shares."""
        next_: _ClientAccount[Key] | None = None
        for account in self._accounts.values():  # ties go to who has been here longest
            is_behind = next_ is None or account.counter < next_.counter
            if is_behind and account.waiting and not self._has_its_share(account, room):
                next_ = account
        return next_

    def _has_its_share(self, account: _ClientAccount[Key], room: ServiceRoom) -> bool:
        """Whether what is left free is for others. Who has nothing is served as long as there is room at all."""
        return account.served > 0 and (
            account.served >= room.share * (room.requests - self._served)
            or account.served_size >= room.share * (room.size - self._served_size)
        )

    def _wait_s(self, account: _ClientAccount[Key], room: ServiceRoom, now: float) -> float:
        """Until there may be room for a client's next request though nothing else happens: 0 where there is, infinite
        where that will not do. An empty room takes any."""
        if not self._served:
            return 0.0
        size = account.next_line().entries[0].size
        if self._served >= room.requests or self._served_size + size > room.size:
            return inf
        if not account.served:  # it need not wait until others' work has begun
            return 0.0
        is_alone = account.served == self._served
        pauses = [] if is_alone else [pause for pause in account.pauses if pause[0] > now]
        starting, unstarted = self._starting + len(pauses), self._unstarted + sum(begun for _, begun in pauses)
        if starting < room.replicas or unstarted + size <= room.unstarted:
            return 0.0
        if pauses:
            return min(until for until, _ in pauses) - now
        over = self._left(room, now) - room.unstarted
        if starting >= 2 * room.replicas:  # of short ones that make up for a long one, or fill its steps
            if unstarted + size > room.most_unstarted:
                return inf
            over += min(size, room.unstarted)
        if over <= 0.0:
            return 0.0
        return over / room.rate if room.rate > 0.0 else inf

    def _stop_starting(self, entry: _Entry[Key]) -> None:
        if entry.is_starting:
            self._starting -= 1
            self._unstarted -= entry.unstarted
            entry.is_starting, entry.unstarted = False, 0
            at, left = self._left_at
            self._left_at = at, min(left, float(self._unstarted))

    def _left(self, room: ServiceRoom, now: float) -> float:
        """What should be left of the requests that start."""
        at, left = self._left_at
        return max(0.0, left - room.rate * (now - at))

    def _forget(self, client: Hashable, counter: float) -> None:
        """A client has no requests here any more."""
        del self._accounts[client]
        if not self._entries:  # a new beginning for everybody
            self._idle.clear()
            self._virtual = 0.0
            return
        if counter > self._virtual:
            self._idle[client] = counter
        if len(self._idle) > MAX_IDLE:
            self._idle = {each: found for each, found in self._idle.items() if found > self._virtual}
        if len(self._idle) > MAX_IDLE:
            del self._idle[min(self._idle, key=self._idle.__getitem__)]

    def _note_waiting(self, more: int, taken: int, now: float) -> None:
        self._waiting += more
        self._drain.note(now, taken, self._waiting > 0)

    def _refuse(self, text: str, retries: RetryTimes, now: float, least_s: float = 0.0) -> NoReturn:
        # the later of both: places are told one after the other, to as many as there will be
        retry_after_s = ceil(10.0 * max(retries.next(now), least_s)) / 10.0
        raise OverQuota(f"busy: {text}; try again in {retry_after_s:g} s", retry_after_s)
