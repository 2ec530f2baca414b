"""What both ends of a link do alike: confirm, keep alive, measure, repeat what got lost, end what
is overdue. Pure.

`Connection` is the record of one authenticated connection. `LinkMachine` is the half of a link's
end that does not depend on who sends KV; `sending` and `receiving` are the two others. Bytes never
pass through here, and `now` is always a parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ..errors import KVProtocolError, TransferError
from ..wire.signals import Abort, Ack, Goodbye, Ping, Pong, Result, Signal
from .settings import LinkSettings
from .transfers import (
    CloseConnection,
    EarlyNews,
    LinkEnded,
    LinkEvent,
    Transfer,
    TransferEnded,
    TransferEvent,
    TransferTable,
)

_RATE_WINDOW_S = 2.0
_SAMPLE_S = 0.05
_ACK_BYTES = 1 << 17
_MAX_OWED_PONGS = 16
_MAX_LABELS = 64  # a peer names paths as it likes

T = TypeVar("T", bound=Transfer)


@dataclass(frozen=True, slots=True)
class PathStatistics:
    """All connections of a path; `bytes_acknowledged` includes dead ones. `rate_bytes_s`: KV
    confirmed in the last two seconds; `rtt_s`: by pong, of the nearest connection."""

    label: str
    connections: int
    bytes_acknowledged: int
    bytes_in_flight: int
    rate_bytes_s: float
    rtt_s: float | None


@dataclass(slots=True, eq=False)
class ControlRecord:
    """A control signal in flight, said again if its connection dies or is late. `news` is made anew
    each time: what the other end has to know now. `last` is how the transfer ended here, and kept
    until it is confirmed."""

    kind: Literal["news", "last"]
    transfer: bytes
    repeated: bool = False


class Connection:
    """One connection. `flight`: what it has not confirmed: record, bytes, time sent."""

    def __init__(self, number: int, label: str, now: float) -> None:
        self.number = number
        self.label = label
        self.heard_at = now
        self.flight: deque[tuple[object, int, float]] = deque()
        self.flight_bytes = 0
        self.sent = self.confirmed = 0
        self.handled = self.told = 0
        self.bytes_in = self.bytes_told = 0
        self.told_at = now
        self.bytes_acknowledged = 0
        self.rtt: float | None = None
        self.said_goodbye = False
        self._peer_bytes = 0
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])
        self._pings: dict[int, float] = {}
        self._next_ping = 0
        self.pinged_at = now
        self.owed: deque[int] = deque()

    def carry(self, item: object, size: int, now: float) -> None:
        """A reliable record has been handed to this connection."""
        if not self.flight:
            self.heard_at = max(self.heard_at, now)  # silence counts from when there is something to answer
        self.flight.append((item, size, now))
        self.flight_bytes += size
        self.sent += 1

    def confirm(self, ack: Ack, now: float) -> list[tuple[object, int]]:
        """What the peer has newly dealt with, and its bytes. Raises KVProtocolError if impossible."""
        if ack.records > self.sent:
            raise KVProtocolError(f"{ack.records} records confirmed of {self.sent} sent")
        done: list[tuple[object, int]] = []
        while self.confirmed < ack.records:
            item, size, _ = self.flight.popleft()
            self.confirmed += 1
            self.flight_bytes -= size
            self.bytes_acknowledged += size
            done.append((item, size))
        self._sample(max(ack.bytes, self._peer_bytes), now)
        return done

    def drop(self) -> list[object]:
        """The connection is dead: what it had not confirmed."""
        items = [item for item, _, _ in self.flight]
        self.flight.clear()
        self.flight_bytes = 0
        return items

    def ping(self, now: float) -> Ping:
        self._next_ping += 1
        self._pings[self._next_ping] = self.pinged_at = now
        if len(self._pings) > 8:
            del self._pings[next(iter(self._pings))]
        return Ping(self._next_ping)

    def pong(self, token: int, now: float) -> None:
        asked = self._pings.pop(token, None)
        if asked is not None:
            self.rtt = now - asked

    def is_ack_due(self, now: float) -> bool:
        """Whether to confirm now: at once when it is much or the last for now, else soon."""
        if self.handled == self.told:
            return self.bytes_in - self.bytes_told >= _ACK_BYTES and now - self.told_at >= _SAMPLE_S
        return True

    def ack(self, now: float) -> Ack:
        """Say it."""
        self.told, self.bytes_told, self.told_at = self.handled, self.bytes_in, now
        return Ack(self.handled, self.bytes_in)

    @property
    def waits(self) -> bool:
        """Whether the peer has something to answer."""
        return bool(self.flight) or bool(self._pings)

    def is_stuck(self, now: float, stuck_s: float) -> bool:
        """Whether what it sent, or a ping, has had no answer for so long."""
        since = min(self.flight[0][2] if self.flight else now, *self._pings.values(), now)
        return now - since >= stuck_s

    def rate(self, now: float) -> float:
        """Bytes per second that the peer has read from this connection over the last two seconds."""
        while len(self._samples) > 1 and self._samples[1][0] <= now - _RATE_WINDOW_S:
            self._samples.popleft()
        began, base = self._samples[0]
        seconds = min(_RATE_WINDOW_S, max(now - began, _SAMPLE_S))
        return (self._peer_bytes - base) / seconds

    def _sample(self, count: int, now: float) -> None:
        self._peer_bytes = count
        if now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, count))
            while self._samples[1][0] <= now - _RATE_WINDOW_S:
                self._samples.popleft()


class LinkMachine(ABC, Generic[T]):
    """One end of a link. Feed it connections, signals and time; `next_signal` gives each connection
    what to send, `take_events` what else there is to do. A KVProtocolError that a call raises is
    the peer's fault: hand it to `end_for_violation`.

    An end adds four things: what a signal means to it, what it has to tell about a transfer, how it
    says that it gives one up, and what an ended transfer still holds."""

    def __init__(self, settings: LinkSettings, lease_s: float, now: float) -> None:
        self.settings = settings
        self.connections: dict[int, Connection] = {}
        self.transfers: TransferTable[T] = TransferTable()
        self.ended: str | None = None
        self.bytes_resent = 0
        self._lease_s = lease_s
        self._used_at = now
        self._alone_since = now
        self._events: list[LinkEvent] = []
        self._next_number = 0
        self._past: dict[str, int] = {}  # label -> bytes that dead connections have confirmed
        self._to_say: OrderedDict[tuple[Literal["news", "last"], bytes], None] = OrderedDict()
        self._last_words: dict[bytes, Signal] = {}

    def __repr__(self) -> str:
        state = self.ended or "open"
        return f"<{type(self).__name__} {state} connections={len(self.connections)} transfers={len(self.transfers)}>"

    # ---- connections ----------------------------------------------------------------------------------------

    def add_connection(self, label: str, now: float) -> int:
        """A connection has authenticated. Its number, for all other calls."""
        self._next_number += 1
        self.connections[self._next_number] = Connection(self._next_number, label, now)
        return self._next_number

    def remove_connection(self, number: int, now: float) -> None:
        """A connection is gone: others get its unconfirmed records. Unknown numbers are ignored."""
        connection = self.connections.pop(number, None)
        if connection is None:
            return
        label = connection.label if connection.label in self._past or len(self._past) < _MAX_LABELS else ""
        self._past[label] = self._past.get(label, 0) + connection.bytes_acknowledged
        if not self.connections:
            self._alone_since = now
        for item in connection.drop():
            self._return_unconfirmed(item)

    def retire(self, number: int, reason: str, now: float) -> None:
        """Take a connection out of use: close it; others get its unconfirmed records."""
        if number in self.connections:
            self._events.append(CloseConnection(number, reason, self.is_stuck(number, now)))
            self.remove_connection(number, now)

    def is_stuck(self, number: int, now: float) -> bool:
        """Whether what this connection carries has not arrived for long."""
        connection = self.connections.get(number)
        return connection is not None and connection.is_stuck(now, self.settings.silence_s / 2)

    def note_heard(self, number: int, count: int, now: float) -> None:
        """`count` bytes have been read from a connection."""
        connection = self.connections.get(number)
        if connection is not None:
            connection.heard_at = now
            connection.bytes_in += count

    def receive(self, number: int, signal: Signal, now: float) -> None:
        """Anything but a chunk has come in on a connection."""
        connection = self.connections.get(number)
        if connection is None or self.ended is not None:
            return
        match signal:
            case Ack():
                for item, size in connection.confirm(signal, now):
                    self._confirm(connection, item, size, now)
            case Ping(token):
                if len(connection.owed) >= _MAX_OWED_PONGS:
                    raise KVProtocolError("pings come faster than they can be answered")
                connection.owed.append(token)
            case Pong(token):
                connection.pong(token, now)
            case Goodbye(reason):
                self._end(f"the other side closed the link: {reason}" if reason else "the other side closed the link")
            case _:
                self._take(signal, now)
                connection.handled += 1

    def next_signal(self, number: int, now: float) -> Signal | None:
        """What this connection sends next, None if there is nothing. It counts as sent."""
        connection = self.connections.get(number)
        if connection is None:
            return None
        if self.ended is not None:
            return self._goodbye(connection)
        # In this order: what the peer measures by, what lets it go on sending, then what takes long.
        if connection.owed:
            return Pong(connection.owed.popleft())
        if connection.is_ack_due(now):
            return connection.ack(now)
        if now - connection.pinged_at >= self.settings.ping_s:
            return connection.ping(now)
        return self._next_record(connection, now)

    # ---- transfers ------------------------------------------------------------------------------------------

    def abort(self, transfer: bytes, reason: str) -> None:
        """Give a transfer up; the other end is told why. An unknown or ended one stays as it is."""
        record = self.transfers.get_open(transfer)
        if record is not None:
            self._give_up(record, reason)

    def forget(self, transfer: bytes) -> None:
        """Drop the record of an ended transfer."""
        self.transfers.forget(transfer)

    # ---- time and the end -----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed: close silent connections, end what is overdue."""
        if self.ended is not None:
            return
        for connection in list(self.connections.values()):
            if connection.waits and now - connection.heard_at >= self.settings.silence_s:
                self.retire(connection.number, f"nothing heard for {self.settings.silence_s:g} s", now)
        for connection in self.connections.values():
            for item, _, sent_at in connection.flight:
                if sent_at > now - self.settings.hedge_s:
                    break  # they are in the order of sending
                # Chunks are overtaken by idle connections instead, when those ask for work.
                if isinstance(item, ControlRecord) and not item.repeated:
                    item.repeated = True
                    self._say(item.kind, item.transfer)
        self._expire(now)
        if self.transfers.list_open():
            self._used_at = now
        elif now - self._used_at >= self._lease_s:
            self.close(f"the link's lease of {self._lease_s:g} s without a transfer is over")

    def wake_at(self, now: float) -> float:
        """When `tick` is next worth calling; at the latest in a ping's time."""
        times = [now + self.settings.ping_s, self.transfers.next_deadline()]
        times += [each.heard_at + self.settings.silence_s for each in self.connections.values() if each.waits]
        return max(min(times), now)

    def close(self, reason: str = "") -> None:
        """End the link from this side: open transfers fail, each connection says goodbye."""
        self._end(reason or "closed by this side")

    def end_for_violation(self, error: KVProtocolError) -> None:
        """The peer, under its own key, has said what it must not: the link is over."""
        self._end(f"protocol violation by the other side: {error}")

    def take_events(self) -> list[LinkEvent]:
        """What has come up since the last call, in order."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    @property
    def has_control(self) -> bool:
        """Whether there is more than chunks to send."""
        return bool(self._to_say)

    def path_statistics(self, now: float) -> dict[str, PathStatistics]:
        """By label: live connections and the bytes of dead ones."""
        found: dict[str, PathStatistics] = {}
        labels = {each.label for each in self.connections.values()} | self._past.keys()
        for label in sorted(labels):
            live = [each for each in self.connections.values() if each.label == label]
            rtts = [each.rtt for each in live if each.rtt is not None]
            found[label] = PathStatistics(
                label=label,
                connections=len(live),
                bytes_acknowledged=self._past.get(label, 0) + sum(each.bytes_acknowledged for each in live),
                bytes_in_flight=sum(each.flight_bytes for each in live),
                rate_bytes_s=sum(each.rate(now) for each in live),
                rtt_s=min(rtts) if rtts else None,
            )
        return found

    # ---- what depends on who sends --------------------------------------------------------------------------

    @abstractmethod
    def _take(self, signal: Signal, now: float) -> None:
        """A reliable signal has arrived. Raises KVProtocolError for one that this end must not get."""

    @abstractmethod
    def _news(self, transfer: bytes) -> Signal | None:
        """What is to be told about a transfer now; None if nothing is any more."""

    @abstractmethod
    def _refusal(self, transfer: bytes, reason: str) -> Abort | Result:
        """How this end says that it gives a transfer up."""

    @abstractmethod
    def _drop_held(self, transfer: T) -> None:
        """A transfer has ended: let go of what it holds."""

    # ---- for both ends --------------------------------------------------------------------------------------

    def _begin(self, transfer: T) -> EarlyNews:
        """Register a transfer; returns the peer's early news of it. A refusal has ended it."""
        if self.ended is not None:
            raise TransferError(f"the link is over: {self.ended}")
        news = self.transfers.add(transfer)
        if news.refused is not None:
            self._end_transfer(transfer, TransferEvent.REFUSED, news.refused)
        return news

    def _end_transfer(self, transfer: T, event: TransferEvent, reason: str = "") -> None:
        """The one place where a transfer ends."""
        self.transfers.apply(transfer, event, reason)
        self._drop_held(transfer)
        self._events.append(TransferEnded(transfer.id, transfer.end_state))

    def _give_up(self, transfer: T, reason: str) -> None:
        self._end_transfer(transfer, TransferEvent.ABORTED, reason)
        self._say_last(self._refusal(transfer.id, reason))

    def _take_refusal(self, transfer: bytes, reason: str) -> None:
        """The other end has given a transfer up, perhaps before this end knows it."""
        text = f"the other side gave up: {reason}"
        known = self.transfers.get(transfer)
        if known is None:
            news = self.transfers.note_early(transfer)
            if news is not None:
                news.refused = text
        elif known.is_open:
            self._end_transfer(known, TransferEvent.REFUSED, text)

    def _say(self, kind: Literal["news", "last"], transfer: bytes) -> None:
        self._to_say[kind, transfer] = None

    def _say_last(self, signal: Abort | Result) -> None:
        self._last_words[signal.transfer] = signal
        self._say("last", signal.transfer)

    def _next_record(self, connection: Connection, now: float) -> Signal | None:
        """The next reliable signal for a connection."""
        while self._to_say and self._is_prompt(connection, now):
            (kind, transfer), _ = self._to_say.popitem(last=False)
            signal = self._last_words.get(transfer) if kind == "last" else self._news(transfer)
            if signal is not None:
                connection.carry(ControlRecord(kind, transfer), 0, now)
                return signal
        return None

    def _confirm(self, connection: Connection, item: object, size: int, now: float) -> None:
        """The peer has dealt with a record."""
        if isinstance(item, ControlRecord) and item.kind == "last":
            self._last_words.pop(item.transfer, None)

    def _return_unconfirmed(self, item: object) -> None:
        """The connection that carried a record died before the peer confirmed it."""
        if isinstance(item, ControlRecord):
            self._say(item.kind, item.transfer)

    def _is_prompt(self, connection: Connection, now: float) -> bool:
        """Whether a connection may carry control signals: not if it alone is late."""
        late = now - self.settings.hedge_s
        if not connection.flight or connection.flight[0][2] > late:
            return True
        return all(other.flight and other.flight[0][2] <= late for other in self.connections.values())

    def _expire(self, now: float) -> None:
        grace_s = self.settings.grace_s
        alone = not self.connections and now - self._alone_since >= grace_s
        for transfer in self.transfers.list_open():
            if now >= transfer.deadline:
                self._give_up(transfer, "the deadline of the ticket has passed")
            # One that was opened a moment ago has had no time to see its connections come up.
            elif alone and now - transfer.opened_at >= grace_s:
                self._give_up(transfer, f"no connection for {grace_s:g} s")

    def _end(self, reason: str) -> None:
        if self.ended is not None:
            return
        for transfer in self.transfers.list_open():
            self._give_up(transfer, reason)
        self.ended = reason
        self._events.append(LinkEnded(reason))

    def _goodbye(self, connection: Connection) -> Signal | None:
        if connection.said_goodbye:
            return None
        connection.said_goodbye = True
        return Goodbye(self.ended or "")
