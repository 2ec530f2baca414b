"""Whether peers from whom something is awaited still answer. Pure.

A peer is dead when nobody hears it, and that takes its time: a pause is no reason to forget a box.
Whoever waits for an answer wants to know sooner, and loses little by looking elsewhere meanwhile.
So peers that are awaited are pinged after half a second of silence; one that has not answered for a
second and a half more is *hung*, until anything comes from it again::

    awaited, silent for watch_ping_s          nothing came for hung_s, and
    or without a session: asked               twice its slowest recent answer
    ------------------------------> asked ------------------------------------> hung
              ^                        |                                           |
              +------ heard again -----+-------------------------------------------+
"""

from collections.abc import Collection, Mapping
from typing import Final

from ..settings import NetworkSettings
from ..trust.keys import PeerId

_PAUSE_S: Final = 0.1  # so late, a tick shows that this node itself had no time
_READING_S: Final = 0.5  # so long it may take after that to read what has come
_SLOWNESS: Final = 2.0  # times its slowest recent answer that a peer is given more
_KEPT_S: Final = 60.0  # how long one without a session stays hung, when nobody waits for it any more


class AnswerWatch:
    """Peers that are awaited. Methods get the time as ``now``, in seconds."""

    def __init__(self, settings: NetworkSettings) -> None:
        self._settings = settings
        self._awaited: dict[str, frozenset[PeerId]] = {}
        self._asked: dict[PeerId, float] = {}  # since when a sign of life of each is waited for
        self._hung: set[PeerId] = set()
        self.wake_at = float("inf")
        """When to tick again, unless an event comes first."""

    def __repr__(self) -> str:
        return f"AnswerWatch(asked={len(self._asked)}, hung={len(self._hung)})"

    @property
    def hung(self) -> frozenset[PeerId]:
        """Those that do not answer, as of the last :meth:`tick`."""
        return frozenset(self._hung)

    @property
    def is_idle(self) -> bool:
        """Whether nobody is awaited, and nobody was at the last :meth:`tick`: another one would change nothing."""
        return not (self._asked or self._hung or any(self._awaited.values())) and self.wake_at == float("inf")

    def expect(self, waiter: str, peers: Collection[PeerId]) -> bool:
        """From now on this ``waiter`` awaits something of these peers, and of no others; whether some are new."""
        before = self._awaited.get(waiter, frozenset())
        self._awaited[waiter] = frozenset(peers)
        return not self._awaited[waiter] <= before

    def tick(
        self,
        now: float,
        heard: Mapping[PeerId, float],
        slowest: Mapping[PeerId, float],
        unanswered: Mapping[PeerId, float],
    ) -> tuple[PeerId, ...]:
        """Look who has answered; returns whom to ping now.

        Args:
            now: the time.
            heard: when anything last came from each connected peer.
            slowest: seconds that the slowest of its recent answers took, of each that has answered.
            unanswered: when those were first pinged, for whatever reason, that have been silent since.
        """
        late_s = now - self.wake_at
        if late_s > _PAUSE_S:
            # What they have answered meanwhile may lie unread, and takes a moment to be read.
            least = now - self._settings.hung_s + _READING_S
            self._asked = {
                peer: at if peer in self._hung else max(at + late_s, least) for peer, at in self._asked.items()
            }
        awaited = frozenset[PeerId]().union(*self._awaited.values())
        pinged = []
        moments = []
        for peer in awaited | self._hung:
            heard_at, asked_at = heard.get(peer), self._asked.get(peer)
            if asked_at is not None and heard_at is not None and heard_at > asked_at:
                self._hung.discard(peer)
                del self._asked[peer]
                asked_at = None
            if asked_at is None and peer in awaited:
                silent_at = now if heard_at is None else heard_at + self._settings.watch_ping_s
                if now < silent_at:
                    moments.append(silent_at)
                    continue
                # It may have been silent for long before anybody waited for it; but this node may have got no time.
                asked_at = max(unanswered.get(peer, now), now - self._settings.hung_s + _READING_S)
                self._asked[peer] = asked_at
                if heard_at is not None:
                    pinged.append(peer)
            if asked_at is None or peer in self._hung:
                continue
            hung_at = asked_at + self._settings.hung_s + _SLOWNESS * slowest.get(peer, 0.0)
            if now < hung_at:
                moments.append(hung_at)
            else:
                self._hung.add(peer)
        self._forget(awaited, heard, now)
        self.wake_at = min(moments, default=float("inf"))
        return tuple(pinged)

    def _forget(self, awaited: Collection[PeerId], heard: Collection[PeerId], now: float) -> None:
        for peer, asked_at in list(self._asked.items()):
            if peer not in awaited and (peer not in self._hung or (peer not in heard and now > asked_at + _KEPT_S)):
                del self._asked[peer]
                self._hung.discard(peer)
