"""Whether others reach this node at the address that it announces: it asks members to dial it, and follows its address.

The answers are judged by `judge`, and put into a line for the owner by `describe_closed`. A node that nobody can dial
tells so in its member record; it then dials the others itself, or a relay connects the two (`reach`).

Being dialled back is a favour that could be misused to have a third party dialled. So a member dials only what the
asker has in its signed record, only a public address or the one that it sees the asker come from, once a minute and a
few times at once; the key is asked for, and why it failed is told only to who comes from that very address.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple, final

import trio

from ...bootstrap import Address, NetworkError, PeerId, RemoteError, Role
from ...bootstrap.addresses import AnnouncedBy, FoundAddress, plain_ip
from ...bootstrap.members.allowance import Allowance
from ...bootstrap.methods import Messenger
from ...coordinator.names import name_of
from ..methods import DIAL_BACK
from ..observing.traces import clock_from_round_trip
from ..observing.values import BoxClock
from ..settings import WAN, NodeTuning
from .messages import DialBack, DialledBack

_log = logging.getLogger(__name__)

ASKED: Final = 3  # members, until one has met this node: one alone may be behind the same router, or cut off
CLOCK_S: Final = 2.0  # so far apart, times of two boxes in one trace mislead
_WHY_CHARS: Final = 300
_EACH_S, _EACH_BURST = 1 / 60, 4  # dials for one asker: at the start, and for the address that others see it come from
_ALL_S, _ALL_BURST = 2.0, 32  # dials for all of them
_NEWS_S: Final = 2.0  # in which the record that a question is about has to come
_POLL_S: Final = 0.05

Prove = Callable[[PeerId, Address, Callable[[str], bool]], Awaitable[Address]]


# ---- decisions --------------------------------------------------------------------------------------------------


class ReachVerdict(Enum):
    """What the answers come to."""

    OPEN = "open"
    CLOSED = "closed"
    UNKNOWN = "unknown"  # nobody could say


def judge(answers: Sequence[DialledBack]) -> ReachVerdict:
    """One that met this node has shown that it can be met; that nobody did counts as soon as anybody has tried."""
    if any(answer.met for answer in answers):
        return ReachVerdict.OPEN
    return ReachVerdict.CLOSED if answers else ReachVerdict.UNKNOWN


def may_dial_back(host: str, seen: str | None, role: Role) -> bool:
    """Whether a member dials this IP address for whoever it sees come from `seen`. Others than members have only that
    one dialled."""
    there = plain_ip(host)
    if there is None or there.is_multicast or there.is_unspecified or there.is_reserved:
        return False
    if seen is not None and there == plain_ip(seen):
        return True
    return there.is_global and role is not Role.CLIENT


def choose_askable(boxes: Mapping[PeerId, str], own_host: str) -> list[PeerId]:
    """Whom to ask, of members by the hosts that they announce: those elsewhere first, since a router may not lead from
    inside to its own outside."""
    here = plain_ip(own_host)
    return sorted(boxes, key=lambda peer: (here is not None and plain_ip(boxes[peer]) == here, peer))[:ASKED]


def choose_seen(found: FoundAddress, answers: Iterable[DialledBack]) -> Address | None:
    """The address to try next, where the announced one leads nowhere: that from which members see this node come, at
    the same port. A provider's variables are as old as the box; what the owner says is left as it is."""
    if found.by not in (AnnouncedBy.INTERFACE, AnnouncedBy.PROVIDER):
        return None
    seen = {answer.seen for answer in answers if answer.seen and plain_ip(answer.seen) != plain_ip(found.address.host)}
    if len(seen) != 1:
        return None
    (host,) = seen
    return Address(host, found.address.port)


def describe_closed(found: FoundAddress, listen: Address, answers: Sequence[DialledBack]) -> str:
    """A line for the owner: which port, which mapping was expected, and how to open it."""
    why = next((answer.why.partition("; ")[0] for answer in answers if answer.why), "nobody met it there")
    seen = next((answer.seen for answer in answers if answer.seen), "")
    return (
        f"others cannot dial this node at {found.address} ({why}): {found.describe(listen)}; "
        f"{found.advise(listen, seen)}. It goes on without: it dials, and relays connect it with who cannot be dialled"
    )


def describe_clock(clock: BoxClock) -> str:
    """A line for the owner, where a member's clock is further off than can be told from its answer; else ""."""
    error_s = clock.error_s or 0.0
    if abs(clock.offset_s) - error_s <= CLOCK_S:
        return ""
    way = "behind" if clock.offset_s > 0 else "ahead of"
    return (
        f"this box's clock is {abs(clock.offset_s):.1f} s {way} that of {name_of(clock.node)}: ends of tokens and "
        "times in traces go by it; set the wrong one of the two (timedatectl set-ntp true)"
    )


# ---- answering --------------------------------------------------------------------------------------------------


@final
class DialBackDesk:
    """Dials members that ask for it. `where`: what a peer announces now; `seen_host`: where its session comes from."""

    def __init__(
        self,
        *,
        messenger: Messenger,
        where: Callable[[PeerId], Address | None],
        seen_host: Callable[[PeerId], str | None],
        prove: Prove,
        clock: Callable[[], float] = time.time,
        tuning: NodeTuning = WAN,
    ) -> None:
        self._clock = clock
        self._where = where
        self._seen_host = seen_host
        self._prove = prove
        self._tuning = tuning
        self._each: dict[PeerId, Allowance] = {}
        self._all = Allowance(_ALL_S, _ALL_BURST)
        messenger.handle(DIAL_BACK, self.on_ask)

    def __repr__(self) -> str:
        return f"<DialBackDesk askers={len(self._each)}>"

    async def on_ask(self, peer: PeerId, role: Role, body: DialBack) -> DialledBack:
        """A node wants to know whether it is met where it says."""
        now = trio.current_time()
        self._each = {each: known for each, known in self._each.items() if known.at > now - _EACH_BURST / _EACH_S}
        if not self._each.setdefault(peer, Allowance(_EACH_S, _EACH_BURST)).take(now) or not self._all.take(now):
            raise RemoteError("busy", "nodes were dialled back too often", retry_after_s=1 / _EACH_S)
        wanted = Address(body.host, body.port)
        with trio.move_on_after(_NEWS_S):
            while self._where(peer) != wanted:  # noqa: ASYNC110 (twice a day, and seldom for long)
                await trio.sleep(_POLL_S)
        if self._where(peer) != wanted:
            raise RemoteError("stale", f"{peer} does not announce {wanted}, as far as this node knows")
        seen = self._seen_host(peer)
        why = f"no answer within {self._tuning.ask_s:g} s"
        with trio.move_on_after(self._tuning.ask_s):
            try:
                await self._prove(peer, wanted, lambda host: may_dial_back(host, seen, role))
            except NetworkError as error:
                why = str(error).removeprefix(f"cannot reach a member at {wanted}: ").rpartition("): ")[2]
            else:
                return DialledBack(met=True, seen=seen or "", now=self._clock())
        is_own = seen is not None and plain_ip(wanted.host) == plain_ip(seen)
        return DialledBack(met=False, seen=seen or "", why=why[:_WHY_CHARS] if is_own else "", now=self._clock())


# ---- asking -----------------------------------------------------------------------------------------------------


class Announcing(NamedTuple):
    """What this node tells of itself: `move_to` changes it; `now` is what it tells now, and whether it is closed."""

    move_to: Callable[[Address, bool], None]
    now: Callable[[], tuple[Address, bool]]


@final
class Reachability:
    """One per node: keeps what it announces true.

    Args:
        find: the address to announce as of now; raises NetworkError.
        boxes: the connected members that can be dialled, with the hosts that they announce.
        say: tells the owner.
        clock: this box's own, in unix seconds.
    """

    def __init__(
        self,
        *,
        messenger: Messenger,
        announcing: Announcing,
        find: Callable[[], FoundAddress],
        listen: Address,
        boxes: Callable[[], dict[PeerId, str]],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        tuning: NodeTuning = WAN,
    ) -> None:
        self._clock = clock
        self._told_clock = False
        self._messenger = messenger
        self._announcing = announcing
        self._find = find
        self._listen = listen
        self._boxes = boxes
        self._say = say
        self._tuning = tuning
        self._found = find()
        self._told_closed = False
        self._lost = trio.Event()

    def __repr__(self) -> str:
        address, closed = self._announcing.now()
        return f"<Reachability {address} {'closed' if closed else 'open'}>"

    def on_peer_lost(self, peer: PeerId) -> None:
        """A session broke, as all of them do when this box gets another address."""
        self._lost.set()

    async def run(self) -> None:
        """Ask at the start, when the address changes, after sessions broke, and now and then."""
        ask_at = float("-inf")
        while True:
            if self._follow() or (trio.current_time() >= ask_at and self._boxes()):
                is_known = await self._check() is not ReachVerdict.UNKNOWN
                ask_at = trio.current_time() + (self._tuning.reach_s if is_known else 1 / _EACH_S)
            with trio.move_on_after(self._tuning.address_s):
                await self._lost.wait()
            if self._lost.is_set():
                self._lost = trio.Event()
                ask_at = min(ask_at, trio.current_time() + 1 / _EACH_S)  # by then others have been dialled anew
                await trio.sleep(self._tuning.address_s)  # many may break one after the other

    def _follow(self) -> bool:
        """Announce another address once this box has another one; whether that is so."""
        try:
            found = self._find()
        except NetworkError as error:
            _log.info("this box's address was not found: %s", error)
            return False
        if found == self._found:
            return False
        self._say(f"this box is at {found.address} now, and no longer at {self._found.address}; others are told")
        self._found = found
        self._announcing.move_to(found.address, self._announcing.now()[1])
        return True

    async def _check(self) -> ReachVerdict:
        """Have this node dialled, and tell everybody and its owner what comes of it, which is returned."""
        before, was_closed = self._announcing.now()
        answers = await self._ask(before)
        verdict = judge(answers)
        seen = choose_seen(self._found, answers) if verdict is ReachVerdict.CLOSED else None
        if seen is not None and seen != before:
            self._announcing.move_to(seen, True)
            if judge(await self._ask(seen)) is ReachVerdict.OPEN:
                self._announcing.move_to(seen, False)
                self._say(f"others reach this node at {seen}, where they see it come from: that is announced now")
                self._told_closed = False
                return ReachVerdict.OPEN
        if verdict is ReachVerdict.UNKNOWN:
            return verdict
        at = before if verdict is ReachVerdict.OPEN else self._found.address
        self._announcing.move_to(at, verdict is ReachVerdict.CLOSED)
        if verdict is ReachVerdict.CLOSED and not self._told_closed:
            self._say(describe_closed(self._found, self._listen, answers))
        elif verdict is ReachVerdict.OPEN and was_closed:
            self._say(f"others reach this node at {before} now")
        self._told_closed = verdict is ReachVerdict.CLOSED
        return verdict

    async def _ask(self, address: Address) -> list[DialledBack]:
        """What members say, until one of them has met this node. Those of earlier releases cannot say."""
        answers: list[DialledBack] = []
        body = DialBack(host=address.host, port=address.port)
        for peer in choose_askable(self._boxes(), address.host):
            asked = self._clock()
            try:
                answer = await self._messenger.request(peer, DIAL_BACK, body, 2 * self._tuning.ask_s)
            except NetworkError as error:
                _log.info("%s did not dial back: %s", peer, error)
                continue
            answers.append(answer)
            self._compare_clocks(peer, answer, asked)
            if answer.met:
                break
        return answers

    def _compare_clocks(self, peer: PeerId, answer: DialledBack, asked: float) -> None:
        if answer.now and not self._told_clock:
            line = describe_clock(clock_from_round_trip(peer, answer.now, asked, self._clock()))
            self._told_clock = bool(line)
            if line:
                self._say(line)
