"""Who is alive: whoever can be reached from here by what members say they hear. Pure.

Each member says, signed, whom it hears itself (an entry of kind ``hears``, told anew when it
changes). A member is alive when this node hears it, or one that is alive does. So a broken link
makes nobody dead who is heard elsewhere; a member that dies is dropped by all who heard it, and is
then out of everybody's reach; and of a partition's other side nothing is reachable any more.

That others hear a member is not enough for ever: now and then it has to say something itself, which
nobody can say for it, and at once when its connection to this node has broken.

States of a member::

            silent for 3 s, or its connection    nobody in reach
            closed and it is being dialled       hears it
    alive ------------------------------> suspect --------------> dead
      ^--------------------------------------+----------------------'  heard again
    left: it said so itself, in a signed member record; only a newer life undoes that
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ..settings import NetworkSettings
from ..trust.keys import PeerId
from .overlay import place_on_ring

HEARS_KIND: Final = "hears"
MAX_HEARD: Final = 256
_PLACE_BYTES: Final = 8
_NEVER: Final = float("-inf")
_LOOK_S: Final = 1.0
_LOOK_EACH_S: Final = 0.001
_PINGS_S: Final = 0.25
_DOUBT_S: Final = 1.0
_SILENT_BEATS: Final = 3  # of its own that may be lost before only being heard here counts
_OVERDUE_BEATS: Final = 1.5  # after so many without a word one was missed, or is about to be

Places = frozenset[int]  # members as they stand on the ring: eight bytes each instead of fifty


def encode_heard(peers: Iterable[PeerId]) -> bytes:
    """The payload of an entry: the same peers make the same bytes."""
    places = sorted(place_on_ring(peer) for peer in peers)[:MAX_HEARD]
    return b"".join(place.to_bytes(_PLACE_BYTES, "big") for place in places)


def decode_heard(payload: bytes) -> Places:
    """Whom a member says that it hears; nobody when that is malformed."""
    if len(payload) % _PLACE_BYTES or len(payload) > _PLACE_BYTES * MAX_HEARD:
        return frozenset()
    starts = range(0, len(payload), _PLACE_BYTES)
    return frozenset(int.from_bytes(payload[at : at + _PLACE_BYTES], "big") for at in starts)


def find_living(heard: Collection[int], says: Mapping[int, Places], silent: Collection[int]) -> set[int]:
    """The places of everybody alive.

    Args:
        heard: the members that this node hears itself.
        says: whom each member says that it hears.
        silent: members of whom nothing of their own has come for too long; they live only while this node hears them.
    """
    living = set(heard)
    edge = living
    while edge:
        edge = set().union(*(says.get(place, ()) for place in edge)).difference(living, silent)
        living |= edge
    return living


@dataclass(slots=True)
class _Session:
    """The open control stream to one peer."""

    heard_at: float
    counts: bool  # whether the peer is one that others are told of: not a client
    pinged_at: float = _NEVER


class Liveness:
    """Sessions, and what follows from them and from what others say. Methods get the time as ``now``."""

    def __init__(self, me: PeerId, settings: NetworkSettings) -> None:
        self._me = me
        self._settings = settings
        self._sessions: dict[PeerId, _Session] = {}
        self._redialled: dict[PeerId, float] = {}  # closed a moment ago: until when they are given the chance
        self._lost_at: dict[PeerId, float] = {}  # when a session closed: what its peer said before does not count
        self._word_at: dict[PeerId, float] = {}  # when something new of its own last came
        self._in_doubt: dict[PeerId, float] = {}  # silent for too long, and alive here alone until then
        self._says: dict[int, Places] = {}
        self._known: dict[int, PeerId] = {}
        self._living: set[PeerId] = set()
        self.is_news = True  # what may change who is alive
        self.look_at = self._looked_at = _NEVER  # when to look again, if nothing happens before

    # -- what happens -------------------------------------------------------------------------------------------------

    def on_opened(self, peer: PeerId, now: float, *, counts: bool) -> None:
        """A session with this peer is open. It ``counts`` unless it is a client's."""
        self._sessions[peer] = _Session(now, counts)
        for table in (self._redialled, self._in_doubt, self._lost_at):
            table.pop(peer, None)
        self.is_news = True

    def on_closed(self, peer: PeerId, now: float, *, redialled: bool) -> None:
        """Its session closed. It may only be a broken link: one that is ``redialled`` counts as heard until that has
        failed. After that, and at once otherwise, it lives only by what it has said itself since."""
        session = self._sessions.pop(peer, None)
        if session is None:
            return
        self.is_news = True
        was_silent = now - session.heard_at >= self._settings.suspect_s
        self._lost_at[peer] = session.heard_at if was_silent else now
        if redialled and session.counts:
            self._redialled[peer] = now + self._settings.redial_s
        elif was_silent:
            # If it was the link alone, those who hear both ends tell each of the other in a moment.
            self._in_doubt[peer] = now + _DOUBT_S

    def on_parted(self, peer: PeerId) -> None:
        """Its session was closed because neither end needs it: it lives by what others hear."""
        self._sessions.pop(peer, None)
        self.is_news = True

    def on_unreachable(self, peer: PeerId) -> None:
        """Nobody answers at the address of this peer."""
        if self._redialled.pop(peer, None) is not None:
            self.is_news = True

    def on_heard(self, peer: PeerId, at: float) -> None:
        """Anything at all came over the session with this peer."""
        session = self._sessions.get(peer)
        if session is not None:
            session.heard_at = max(session.heard_at, at)

    def on_word(self, peer: PeerId, now: float) -> None:
        """Something new that this peer has signed came, by whatever way."""
        self._word_at[peer] = now
        self._known[place_on_ring(peer)] = peer
        self.is_news = self.is_news or peer not in self._living

    def on_hears(self, peer: PeerId, payload: bytes) -> None:
        """A peer says whom it hears."""
        self._says[place_on_ring(peer)] = decode_heard(payload)
        # In a large network that happens all the time, and looking takes the longer the larger it is.
        self.look_at = min(self.look_at, self._looked_at + _LOOK_EACH_S * len(self._known))

    def forget(self, peer: PeerId) -> None:
        """Nothing of it is held any more."""
        place = place_on_ring(peer)
        for table in (self._redialled, self._in_doubt, self._lost_at, self._word_at):
            table.pop(peer, None)
        self._says.pop(place, None)
        self._known.pop(place, None)
        self._living.discard(peer)

    def on_paused(self, seconds: float) -> None:
        """This node itself got no time for so long: what others said meanwhile lies unread, so nobody is blamed."""
        for session in self._sessions.values():
            session.heard_at += seconds
        self._redialled = {peer: until + seconds for peer, until in self._redialled.items()}
        self._word_at = {peer: at + seconds for peer, at in self._word_at.items()}

    # -- what follows --------------------------------------------------------------------------------------------------

    def find_heard(self, now: float) -> frozenset[PeerId]:
        """Whom this node hears itself: what it tells others."""
        alive = (peer for peer, each in self._sessions.items() if each.counts and not self._is_over(each, now))
        return frozenset(alive) | self._redialled.keys()

    def find_silent(self, now: float) -> tuple[PeerId, ...]:
        """Peers to hang up on: their sessions live by what comes over them alone, whatever others say."""
        return tuple(peer for peer, session in self._sessions.items() if self._is_over(session, now))

    def find_overdue(self, now: float, beat_s: float) -> tuple[PeerId, ...]:
        """Living members whose last sign of life may have missed this node: it hears them only through others, who
        have told it nothing of theirs for longer than they are silent, where members say something every ``beat_s``."""
        oldest = now - _OVERDUE_BEATS * beat_s
        through_others = self._living - self._sessions.keys()
        return tuple(peer for peer in sorted(through_others) if self._word_at.get(peer, now) <= oldest)

    def take_pings(self, now: float) -> tuple[PeerId, ...]:
        """Whom to ping now: those whose turn is soon, too, or this node would wake for each of them."""
        soon = now + _PINGS_S
        due = tuple(peer for peer, session in self._sessions.items() if self._ping_at(peer, session) <= soon)
        for peer in due:
            self._sessions[peer].pinged_at = now
        return due

    def update(self, now: float, beat_s: float) -> bool:
        """Look again who is alive, where members say something at least every ``beat_s``; whether that is others than
        before. Looks when there is news, and once a second."""
        given = (*self._redialled.values(), *self._in_doubt.values())
        if not self.is_news and now < min((self.look_at, *given)):
            return False
        self.is_news, self._looked_at, self.look_at = False, now, now + _LOOK_S
        self._redialled = {peer: until for peer, until in self._redialled.items() if now < until}
        self._in_doubt = {peer: until for peer, until in self._in_doubt.items() if now < until}
        heard = {place_on_ring(peer): peer for peer in self.find_heard(now) | self._in_doubt.keys()}
        oldest = now - _SILENT_BEATS * beat_s
        silent = {
            place
            for place, peer in self._known.items()
            if self._word_at[peer] <= max(oldest, self._lost_at.get(peer, _NEVER))
        }
        places = find_living(heard, self._says, silent)
        places.discard(place_on_ring(self._me))
        found = {heard.get(place) or self._known.get(place) for place in places}
        living = {peer for peer in found if peer is not None}
        living |= {peer for peer, session in self._sessions.items() if not session.counts}
        changed = living != self._living
        self._living = living
        return changed

    @property
    def living(self) -> frozenset[PeerId]:
        """Everybody alive but this node, as of the last :meth:`update`."""
        return frozenset(self._living)

    @property
    def redialled(self) -> frozenset[PeerId]:
        """Peers whose sessions have closed, and which are given the chance to be reached anew."""
        return frozenset(self._redialled)

    @property
    def watched(self) -> frozenset[PeerId]:
        """Those whose sessions this node has, or had a moment ago."""
        return frozenset(self._sessions) | self._redialled.keys() | self._in_doubt.keys()

    def is_living(self, peer: PeerId) -> bool:
        """Whether a peer, or this node, is alive, as of the last :meth:`update`."""
        return peer == self._me or peer in self._living

    def is_suspect(self, peer: PeerId, now: float) -> bool:
        """Whether its session is silent, or closed and being dialled again."""
        session = self._sessions.get(peer)
        return (
            peer in self._redialled
            or peer in self._in_doubt
            or (session is not None and now - session.heard_at >= self._settings.suspect_s)
        )

    def hears(self, peer: PeerId) -> Places:
        """Whom a peer says that it hears: they have what it says from itself."""
        return self._says.get(place_on_ring(peer), frozenset())

    def heard_at(self, peer: PeerId) -> float:
        """When it was last heard of: over its session, or by something that it signed."""
        session = self._sessions.get(peer)
        return max(session.heard_at if session is not None else _NEVER, self._word_at.get(peer, _NEVER))

    def wake_at(self) -> float:
        """When silence, a ping or a redial is next to be looked at."""
        dead_s = self._settings.dead_s
        moments = [min(self._ping_at(peer, each), each.heard_at + dead_s) for peer, each in self._sessions.items()]
        return min((self.look_at, *moments, *self._redialled.values(), *self._in_doubt.values()))

    def __repr__(self) -> str:
        return f"Liveness(sessions={len(self._sessions)}, living={len(self._living)})"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_over(self, session: _Session, now: float) -> bool:
        return now - session.heard_at >= self._settings.dead_s

    def _ping_at(self, peer: PeerId, session: _Session) -> float:
        """When to ping. Of two ends one notices silence sooner; its pings satisfy the other."""
        wait_s = self._settings.ping_s * (1.0 if self._me < peer else 1.5)
        return min(max(session.heard_at, session.pinged_at) + wait_s, session.pinged_at + self._settings.rtt_s)
