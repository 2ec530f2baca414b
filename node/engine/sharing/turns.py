"""Who steps next in a process of several engines: `coordinator.sharing`, and what each engine tells of its requests.

    turns = ProcessTurns("db", time.monotonic)
    chat = turns.open_service("chat", expected)    # an engine has loaded its model
    chat.add("request-1", prompt_tokens)           # it can be computed from now on
    turn = turns.choose(room)
    turns.charge(turn, seconds, prompt_tokens)

What waits for something else than its turn, such as KV that comes from another box, is added when it is ready.

All engines have one budget of KV memory (`open_memory`). When it is short, `make_room` has KV of requests go, of this
engine or of another one, by the code that the simulator runs (`coordinator.sharing.evictions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Final, NamedTuple, Protocol, final

from ....coordinator.plan import Phase
from ....coordinator.sharing.evictions import RoomWanted, plan_evictions
from ....coordinator.sharing.kv_shares import KvShares
from ....coordinator.sharing.orders import DOUBLING_BUDGET, FCFS, TURN_ORDERS
from ....coordinator.sharing.service_profile import (
    GUESS_WEIGHT,
    PRIOR_WEIGHT,
    ExpectedMoments,
    ExpectedService,
    ServiceProfile,
)
from ....coordinator.sharing.turn_queue import TurnQueue
from ....coordinator.sharing.values import SharedRequest, SharingError, Turn, TurnRoom

LIVE_ORDERS: Final = (DOUBLING_BUDGET, FCFS)
"""Those that take services which come later."""

GUESSED_TOKENS: Final = (512, 128)
"""Of a prompt and an answer of a service of which nobody knows what it is asked, before any has ended."""


def expect_requests(
    prefill_token_s: float, decode_step_s: float, lengths: tuple[int, int] | None = None
) -> ExpectedService:
    """Of a service on an engine whose tokens of prompts and decode steps take so long. `lengths`: means of its prompts
    and answers in tokens; None: nobody knows them."""
    prompt, output = lengths or GUESSED_TOKENS
    execution_s = prompt * prefill_token_s + output * decode_step_s
    return ExpectedService(
        execution=ExpectedMoments(execution_s, execution_s / 2),
        prompt_tokens=ExpectedMoments(prompt, prompt / 2),
        output_tokens=ExpectedMoments(output, output / 2),
        prefill_token=ExpectedMoments(prefill_token_s, 0.0),
        decode_step=ExpectedMoments(decode_step_s, 0.0),
        weight=PRIOR_WEIGHT if lengths is not None else GUESS_WEIGHT,
    )


class KvHolder(Protocol):
    """An engine, as far as KV of its requests goes."""

    def can_lose_kv(self, request: str) -> bool:
        """Whether a request holds any that need not stay."""

    def freed_bytes(self, requests: Sequence[str], *, for_others: bool) -> int:
        """How many this engine could take, or the others, without the KV of all of these that can lose it."""

    def evict(self, request: str) -> None:
        """Its KV goes, and is computed again; nobody reads it any more when this returns."""


@final
class ServiceTurns:
    """The requests of one engine in the turn order, by their ids; others are passed over. What happens to those of a
    turn is told to the order when the turn has been charged to them."""

    def __init__(self, process: ProcessTurns, queue: TurnQueue, service: str, clock: Callable[[], float]) -> None:
        self.service = service
        self._process = process
        self._queue = queue
        self._clock = clock
        self._requests: dict[str, SharedRequest] = {}
        self._turn: frozenset[SharedRequest] = frozenset()
        self._later: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<ServiceTurns {self.service} {len(self._requests)} requests>"

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def add(self, request: str, prompt_tokens: int, deadline: float = inf) -> None:
        """It can be computed from now on, and is given up at its deadline, on the clock of the process."""
        key = (self.service, request)
        self._requests[request] = self._queue.add(key, self.service, prompt_tokens, self._clock(), deadline)

    def hold_kv(self, request: str) -> None:
        """It holds KV from now on, which `pick_victim` may take from it."""
        if (shared := self._requests.get(request)) is not None:
            self._tell(shared, self._queue.hold_kv)

    def lose_kv(self, request: str) -> None:
        """Its KV is gone."""
        if (shared := self._requests.get(request)) is not None:
            self._tell(shared, self._queue.lose_kv)

    def begin_decode(self, request: str) -> None:
        """All of its tokens so far have KV, but for the last."""
        if (shared := self._requests.get(request)) is not None:
            self._tell(shared, self._queue.begin_decode)

    def knows_decode(self, request: str) -> bool:
        """Whether the order has been told that it decodes, and nothing else is yet to be told."""
        shared = self._requests.get(request)
        decodes = shared is not None and shared.phase is Phase.DECODE and shared.holds_kv
        return decodes and not (self._later or self._process.until_chosen)

    def finish(self, request: str, output_tokens: int) -> None:
        """It has been answered in full."""
        if (shared := self._requests.pop(request, None)) is not None:
            self._tell(shared, partial(self._queue.finish, output_tokens=output_tokens))

    def remove(self, request: str) -> None:
        """It is gone, answered or not."""
        if (shared := self._requests.pop(request, None)) is not None:
            self._tell(shared, self._queue.remove)

    def begin_turn(self, turn: Turn) -> None:
        """It is this engine's turn."""
        self._turn = frozenset(turn.requests)

    def end_turn(self) -> None:
        """It has been charged."""
        self._turn = frozenset()
        for tell in self._later:
            tell()
        self._later.clear()

    def make_room(self, asker: str, size: int) -> bool:
        """Have so many bytes become free for a request, or none where that is not possible."""
        shared = self._requests.get(asker)
        return shared is not None and self._process.make_room(RoomWanted(self.service, size, shared))

    def make_room_for_kv(self, size: int) -> bool:
        """The same for KV that comes from another box, which only engines that hold more than their quota make."""
        return self._process.make_room(RoomWanted(self.service, size, None))

    def clear(self) -> None:
        """The engine is gone."""
        for request in tuple(self._requests):
            self.remove(request)

    def _tell(self, request: SharedRequest, what: Callable[[SharedRequest], None]) -> None:
        if request in self._turn:
            self._later.append(partial(what, request))
        elif self._process.is_choosing:
            self._process.until_chosen.append(partial(what, request))
        else:
            what(request)


def _id_of(request: SharedRequest) -> str:
    assert isinstance(request.key, tuple)
    return str(request.key[1])


def ids_of(turn: Turn) -> tuple[str, ...]:
    """The requests of a turn, by the ids that their engine knows them by, in order."""
    return tuple(map(_id_of, turn.requests))


class _RoomOfOthers(NamedTuple):
    """Of a turn that is chosen, for all but those whose KV has just gone."""

    room: TurnRoom
    evicted: list[SharedRequest]

    def take(self, request: SharedRequest) -> bool:
        """See `TurnRoom`."""
        return request not in self.evicted and self.room.take(request)


@final
class ProcessTurns:
    """Of one process. `holder_of`: the engine of a service. Raises SharingError for an order that is none of
    `LIVE_ORDERS`."""

    def __init__(self, order: str, clock: Callable[[], float], holder_of: Callable[[str], KvHolder]) -> None:
        if order not in LIVE_ORDERS:
            raise SharingError(f"order: {order!r} is none of {', '.join(LIVE_ORDERS)}")
        self.shares: KvShares | None = None
        """Who has how much of the KV memory, and may have."""
        self.token_bytes: dict[str, int] = {}
        """Of the KV of a token, by service."""
        self.is_choosing = False
        self.until_chosen: list[Callable[[], None]] = []
        """To be told to the order when the turn is chosen: requests do not change places while it is gone through."""
        self._order = order
        self._clock = clock
        self._holder_of = holder_of
        self._profiles: dict[str, ServiceProfile] = {}
        self._queue: TurnQueue | None = None
        self._services: dict[str, ServiceTurns] = {}
        self._evicted: list[SharedRequest] = []  # while a turn is chosen

    def __repr__(self) -> str:
        return f"<ProcessTurns {self._queue}, {self.shares}>"

    @property
    def profiles(self) -> Mapping[str, ServiceProfile]:
        """What has been learned of each service."""
        return self._profiles

    def open_memory(self, budget: int) -> KvShares:
        """The KV memory of the process; the bytes that its first engine says count."""
        if self.shares is None:
            self.shares = KvShares(budget, self._need)
        return self.shares

    def open_service(self, service: str, expected: ExpectedService) -> ServiceTurns:
        """An engine joins, or comes back; nothing is left of an earlier one's requests."""
        self._profiles[service] = ServiceProfile(expected)
        if self._queue is None:
            self._queue = TurnQueue(TURN_ORDERS[self._order](self._profiles), self._profiles)
        self._queue.open_service(service)
        opened = self._services[service] = ServiceTurns(self, self._queue, service, self._clock)
        return opened

    def close_service(self, service: str) -> None:
        """Its engine has left, and has no requests any more: what was learned of it is forgotten."""
        assert self._queue is not None, "it was opened"
        self._queue.close_service(service)
        del self._profiles[service], self._services[service]
        self.token_bytes.pop(service, None)

    def choose(self, room: TurnRoom) -> Turn | None:
        """Who steps next; None: nobody can."""
        if self._queue is None:
            return None
        self.is_choosing = True
        turn = self._queue.choose(self._clock(), _RoomOfOthers(room, self._evicted))
        self.is_choosing = False
        self._evicted.clear()
        for tell in self.until_chosen:
            tell()
        self.until_chosen.clear()
        if turn is not None:
            self._services[turn.service].begin_turn(turn)
        return turn

    @property
    def changes(self) -> int:
        """See `TurnQueue.changes`."""
        return self._queue.changes if self._queue is not None else 0

    @property
    def sole_turn(self) -> Turn | None:
        """See `TurnQueue.sole_turn`."""
        return self._queue.sole_turn if self._queue is not None else None

    def choose_again(self, turn: Turn) -> None:
        """See `TurnQueue.choose_again`."""
        assert self._queue is not None, "a turn was chosen"
        self._queue.choose_again(turn)
        self._services[turn.service].begin_turn(turn)

    @property
    def sole_decoder(self) -> str | None:
        """See `TurnQueue.sole_decoder`."""
        return self._queue.sole_decoder if self._queue is not None else None

    def charge_ahead(self, turn: Turn) -> None:
        """A decode step of the turn is the first to run ahead: it is charged as others have lasted, and what it does
        last is charged as that of the next one, or told to `note_decode`."""
        self.charge(turn, self._profiles[turn.service].decode_step.mean, 0, is_expected=True)

    def note_decode(self, service: str, seconds: float) -> None:
        """The output of the last step that ran ahead came after so long, which has been charged."""
        self._profiles[service].decode_step.note(seconds)

    def charge(self, turn: Turn, seconds: float, prompt_tokens: int, *, is_expected: bool = False) -> None:
        """The turn has taken so long, by the wall, and computed so many tokens of prompts. `is_expected`: see
        `TurnQueue.charge`."""
        assert self._queue is not None, "a turn was chosen"
        self._queue.charge(turn, seconds, self._clock(), prompt_tokens, is_expected=is_expected)
        self._services[turn.service].end_turn()

    def make_room(self, wanted: RoomWanted) -> bool:
        """Have bytes become free for a request, or none where that is not possible."""
        if self._queue is None or self.shares is None:
            return False
        victims = plan_evictions(self._queue, self.shares, wanted, self._freed_bytes)
        for each in victims or ():
            if self.is_choosing:
                self._evicted.append(each)
            self._holder_of(each.service).evict(_id_of(each))
        return victims is not None

    def evict_last(self) -> bool:
        """Who came last of those that hold KV loses it, for when nobody can step; False: nobody holds any."""
        holders = [each for each in self._queue.requests.values() if each.holds_kv] if self._queue is not None else []
        for each in sorted(holders, key=lambda each: each.number, reverse=True):
            if self._holder_of(each.service).can_lose_kv(_id_of(each)):
                self._holder_of(each.service).evict(_id_of(each))
                return True
        return False

    def _freed_bytes(self, asker: str, requests: list[SharedRequest]) -> int:
        service = requests[0].service
        return self._holder_of(service).freed_bytes(tuple(map(_id_of, requests)), for_others=service != asker)

    def _need(self, service: str) -> float:
        if self._queue is None or service not in self._profiles:
            return 0.0
        return self._queue.need_tokens(service) * self.token_bytes.get(service, 0)
