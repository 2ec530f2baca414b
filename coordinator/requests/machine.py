"""The life of one request at its gateway: events in, actions out.

    machine = RequestMachine(answer, prompt_tokens=20, now=0.0, deadline=60.0)
    ready = machine.start(0.0)              # FindRoute(tokens=20)
    ready = machine.routed(route, 0.0)      # OpenDecode(...)
    ready = machine.decode_opened(1, 0.1, receives=True)
    ...                                     # and at last EndRequest(finish="length", ...)

Engines come and go; the gateway keeps the prompt and the answer so far. A request makes one attempt
after the other, each on a route of its own, until its answer is complete. When the decode replica
of an attempt is lost, the next attempt has the answer so far as part of its prompt, and the
client's stream goes on. When the prefill replica is lost, the decode replica is told to compute the
prompt itself, and the attempt goes on.

A replica that does not answer may be hung, or only its link slow. One that answers, but has added
nothing for much longer than was expected of its route, has stalled (`stalls`): its engine may hang,
or it lies. A decode replica in doubt keeps its attempt until there is another route; if it answers,
or gets on, before that, nothing has happened. One that is about to leave keeps it as well, and then
sends the KV that it has to the next one. ::

    start -> ROUTING --routed--> SERVING --answer complete--> CLOSING --figures, or not--> OVER
                ^                   |                (only while the KV transfer's report is awaited)
                +--decode failed----+

What the client has seen is what counts. A replica that has all of the prompt samples the first
token as well, and the client sees it at once; the decode replica is told, and begins with it.
Should that begin with another token all the same, the request is tried again from the one that was
shown.

Nothing here reads a clock or does I/O: every event comes with `now`, in seconds, which never goes
back. Events of an attempt that is over are not heard. `engine` in an event of failure says which of
the engines of that replica it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from math import inf
from types import MappingProxyType
from typing import Final, final

from ..names import name_of
from ..routing.interface import Route
from .attempt import Attempt
from .placement import place
from .stalls import ExpectedTimes
from .values import (
    Answer,
    CancelTransfer,
    CancelWork,
    EndRequest,
    FindRoute,
    NoteStall,
    OpenDecode,
    OpenPrefill,
    PassFirstToken,
    Ready,
    RequestRecord,
    RequestSettings,
    Tokens,
)

_DEFAULTS: Final = RequestSettings()
_NOBODY: Final[Mapping[str, int]] = MappingProxyType({})
_NOTHING_EXPECTED: Final = ExpectedTimes()


class _State(Enum):
    ROUTING = "looks for a route"
    SERVING = "has an attempt under way"
    CLOSING = "has a complete answer, and waits for the figures of its KV transfer"
    OVER = "is over"


@final
class RequestMachine:
    """See the module. Each public method is one event and returns what is to be done; `wake` is to
    be called at `wake_at`, unless another event has changed that."""

    __slots__ = (
        "_answer", "_arrived", "_attempt", "_blamed", "_cached", "_deadline", "_failures", "_first_at",
        "_give_up_at", "_last_at", "_opening", "_prompt", "_recovered", "_service", "_settings", "_stalls", "_state",
        "attempts", "wake_at",
    )  # fmt: skip

    def __init__(
        self,
        answer: Answer,
        *,
        service: str,
        prompt_tokens: int,
        now: float,
        deadline: float = inf,
        settings: RequestSettings = _DEFAULTS,
    ) -> None:
        self._answer = answer
        self._service = service  # for people
        self._prompt = prompt_tokens
        self._arrived = now
        self._deadline = deadline
        self._settings = settings
        self._state = _State.ROUTING
        self._attempt: Attempt | None = None
        self.attempts = 0  # that have begun
        self._opening: OpenDecode | None = None  # of the latest attempt
        self.wake_at = deadline
        """When it wants to be woken, in seconds; infinite: never. Any event may change that."""
        self._give_up_at = inf  # while there is no route, and one has been looked for
        self._blamed: Mapping[str, int] = _NOBODY
        self._recovered: tuple[str, ...] = ()
        self._stalls = 0  # in all attempts
        self._failures = 0  # of engines that were to decode it, since one has added to the answer
        self._first_at: float | None = None
        self._last_at = now
        self._cached: int | None = None

    def __repr__(self) -> str:
        return (
            f"<RequestMachine {self._prompt}+{self._answer.count} tokens {self._state.value}, attempt {self.attempts}>"
        )

    @property
    def is_over(self) -> bool:
        """Whether nothing follows."""
        return self._state is _State.OVER

    @property
    def is_prefilling(self) -> bool:
        """Whether a prefill replica other than the decode replica may be at work."""
        return self._attempt is not None and self._attempt.prefilling

    @property
    def recovered(self) -> tuple[str, ...]:
        """What has gone wrong with it so far, and did not end it: a line each."""
        return self._recovered

    def list_work(self) -> Iterator[tuple[str, int]]:
        """The replicas at work on it, as far as is known, each with the tokens of the prompt that
        it has yet to compute."""
        attempt = self._attempt
        if attempt is None:
            return
        where = attempt.opening
        if where.prefill is not None and not attempt.prefill_over:
            yield where.prefill, 0 if attempt.shown else where.split - where.cached
        has = where.cached if where.prefill is None else 0 if attempt.without_kv else where.split
        yield where.decode, 0 if attempt.decoding else attempt.tokens - has

    # ---- routes ---------------------------------------------------------------------------------------------

    def start(self, now: float) -> Ready:
        """It has come."""
        if self._answer.finish is not None:  # the answer was complete elsewhere, but for its end
            return self._end(self._answer.finish, "", now)
        return self._look_for_route(now)

    def routed(self, route: Route, now: float, expected: ExpectedTimes = _NOTHING_EXPECTED) -> Ready:
        """This is the route that was asked for, and what is expected of it."""
        left: Ready = ()
        source = None  # of the KV so far
        if self._attempt is not None and self._attempt.in_doubt:
            doubted = self._attempt
            decode = doubted.opening.decode
            source = decode if doubted.can_send_kv else None
            self._recovered = (*self._recovered, f"decode node {name_of(decode)}: {doubted.doubt}")
            left, self._state = self._leave(), _State.ROUTING
        if self._state is not _State.ROUTING:
            return ()
        answer, settings = self._answer, self._settings
        tokens = self._prompt + answer.count
        self.attempts += 1
        opening = place(route, self.attempts, tokens, answer.left, settings, source)
        self._opening, self._attempt = opening, Attempt(opening, tokens, expected, now)
        self._state, self.wake_at = _State.SERVING, self._look_at(self._attempt)
        return (*left, opening)

    def held(self, now: float) -> Ready:
        """Its turn has not come: no route is looked for until `network_changed` says that it has."""
        if self._state is _State.ROUTING:
            self._give_up_at, self.wake_at = inf, self._deadline
        return ()

    def not_routed(self, reason: str, now: float, *, is_hopeful: bool) -> Ready:
        """There is no route now; `is_hopeful`: an engine is being started, so that waiting makes
        sense."""
        settings = self._settings
        if self._is_in_doubt:
            self.wake_at = min(self._deadline, now + settings.route_retry_s)
        if self._state is not _State.ROUTING:
            return ()
        if is_hopeful or self._give_up_at == inf:
            self._give_up_at = now + settings.no_engine_grace_s
        elif now >= self._give_up_at:
            reasons = f" ({'; '.join(self._recovered)})" if self._recovered else ""
            return self._end("error", f"no engine is left for {self._service}{reasons}: {reason}", now)
        self.wake_at = min(self._deadline, self._give_up_at, now + settings.route_retry_s)
        return ()

    def network_changed(self, now: float) -> Ready:
        """There may be a route where there was none."""
        if self._state is not _State.ROUTING and not self._is_in_doubt:
            return ()
        return (self._wanted(),)

    def wake(self, now: float) -> Ready:
        """It is `wake_at`, or later."""
        if now < self.wake_at:
            return ()
        if self._state is _State.CLOSING:
            return self._end(self._answer.finish, "", now)
        if now >= self._deadline and self._state is not _State.OVER:
            reasons = f" ({'; '.join(self._recovered)})" if self._recovered else ""
            waited = self._deadline - self._arrived
            return self._end("error", f"deadline: the answer was not complete after {waited:.1f} s{reasons}", now)
        if self._state is _State.SERVING and self._attempt is not None and not self._attempt.in_doubt:
            return self._look(self._attempt, now)
        return self.network_changed(now)

    # ---- what the replicas say ------------------------------------------------------------------------------

    def decode_opened(self, attempt: int, now: float, *, receives: bool) -> Ready:
        """The decode replica has accepted; `receives`: it is ready for the KV that it was to
        receive."""
        current = self._current(attempt)
        if current is None:
            return ()
        current.got_on_at = now
        if current.opening.prefill is None or current.without_kv:
            return ()
        where = current.opening
        assert where.prefill is not None
        if not receives:
            current.prefill_over = current.without_kv = True
            return ()
        # From now on it may be at work, whether or not its answer gets here.
        current.prefilling = True
        if current.prefill_hung:
            return (self._go_without_kv(current, "it did not answer", None, now),)
        opening = OpenPrefill(current.opening.attempt, where.prefill, where.split, where.first_token)
        return (opening,)

    def open_failed(self, attempt: int, replica: str, why: str, engine: int, now: float) -> Ready:
        """A replica has refused the attempt, or has not answered; it may be at work all the same."""
        current = self._current(attempt)
        if current is None:
            return ()
        if replica == current.opening.decode:
            self._blame(replica, engine, f"decode node {name_of(replica)}: {why}")
            return self._try_again(now)
        if not current.prefilling:
            return ()
        forget = CancelWork(current.opening.attempt, replica)
        return (forget, self._go_without_kv(current, why, engine, now))

    def first_token(self, attempt: int, tokens: Tokens, finish: str | None, now: float) -> Ready:
        """The prefill replica has sampled the first token of what is left of the answer."""
        current = self._current(attempt)
        if current is None or not current.opening.first_token or current.shown or not tokens:
            return ()
        if current.decoding or not current.prefilling:
            return ()  # the decode replica does without this prefill, and has begun or is about to
        current.shown, current.got_on_at = tokens[:1], now
        actions = self._show(current.shown, finish, now, now)
        if self._answer.finish is not None:
            return self._finish(actions, now, is_decode_over=False, wait=False)
        passed = PassFirstToken(current.opening.attempt, current.opening.decode, current.shown[0])
        return (*actions, passed)

    def decoded(
        self,
        attempt: int,
        tokens: Tokens,
        finish: str | None,
        now: float,
        *,
        cached: int = 0,
        first_at: float | None = None,
    ) -> Ready:
        """The decode replica has more tokens, of which the first was there at `first_at` (None:
        now)."""
        current = self._current(attempt)
        if current is None or finish == "deadline":
            return ()  # the request's own deadline is the same moment, and says it better
        self._trust(current, now, gets_on=bool(tokens))
        if tokens and not current.decoding:
            current.decoding = True
            self.wake_at = self._look_at(current)
            shown = len(current.shown)
            if shown and tokens[:shown] != current.shown:
                prefill = current.opening.prefill or current.opening.decode
                began = f"decode node {name_of(current.opening.decode)}: it began with another token than prefill node"
                self._recovered = (*self._recovered, f"{began} {name_of(prefill)}")
                return self._try_again(now)
            tokens = tokens[shown:]
            if self._cached is None:
                self._cached = cached
        if tokens:
            self._failures = 0
        actions = self._show(tokens, finish, now if first_at is None else first_at, now)
        if self._answer.finish is None:
            return actions
        return self._finish(actions, now, is_decode_over=finish is not None, wait=True)

    def decode_failed(self, attempt: int, why: str, engine: int, now: float) -> Ready:
        """The decode replica cannot go on with it; another one may."""
        current = self._current(attempt)
        if current is None:
            return ()
        decode = current.opening.decode
        self._blame(decode, engine, f"decode node {name_of(decode)}: {why}")
        self._failures += 1
        if self._failures == self._settings.max_failures:
            reasons = "; ".join(self._recovered)
            return self._end("error", f"given up: {self._failures} engines in a row failed with it ({reasons})", now)
        return self._try_again(now)

    def refused(self, attempt: int, why: str, now: float) -> Ready:
        """The decode replica can never serve it: another one would say the same."""
        if self._current(attempt) is None:
            return ()
        return self._end("error", f"the engine refuses the request: {why}", now)

    def prefill_ended(self, attempt: int, failed: str, engine: int, now: float) -> Ready:
        """The decode replica has all KV that it was to get, or (`failed`) will not get it."""
        current = self._attempt
        if current is None or current.opening.attempt != attempt or not current.prefilling:
            return ()  # it was given up before it said so
        if failed:
            cancelled = self._go_without_kv(current, failed, engine, now)
            if self._state is _State.SERVING:
                return (cancelled,)
        current.prefilling, current.prefill_over, current.got_on_at = False, True, now
        return () if self._state is _State.SERVING else self._end(self._answer.finish, "", now)

    def peer_lost(self, replica: str, engine: int, now: float) -> Ready:
        """The connection to a replica's head is gone."""
        current = self._attempt
        if current is None or self._state is not _State.SERVING:
            return ()
        if replica == current.opening.decode:
            self._blame(replica, engine, f"decode node {name_of(replica)} was lost")
            return self._try_again(now)
        if replica == current.opening.prefill and current.prefilling:  # else its part was over
            return (self._go_without_kv(current, "it was lost", engine, now),)
        return ()

    def peer_hung(self, replica: str, now: float, *, leaves: bool = False) -> Ready:
        """A replica's head does not answer, or one of its stages or its engine does not; or it answers, and leaves."""
        current = self._attempt
        if current is None or self._state is not _State.SERVING:
            return ()
        if replica == current.opening.decode and not (current.leaves if leaves else current.is_hung):
            was_in_doubt = current.in_doubt
            current.is_hung, current.leaves = current.is_hung or not leaves, current.leaves or leaves
            return () if was_in_doubt else (self._wanted(),)
        if replica == current.opening.prefill and current.prefilling:
            forget = CancelWork(current.opening.attempt, replica)
            return (forget, self._go_without_kv(current, "it did not answer", None, now))
        current.prefill_hung = current.prefill_hung or replica == current.opening.prefill
        return ()

    def peer_answers(self, replica: str, now: float) -> Ready:
        """It does again."""
        current = self._attempt
        if current is not None and replica == current.opening.decode:
            self._trust(current, now, gets_on=False)
        if current is not None and replica == current.opening.prefill:
            current.prefill_hung = False
        return ()

    def stop(self, now: float) -> Ready:
        """The client is gone, or wants no more of it."""
        if self._state is _State.OVER:
            return ()
        return self._end(None, "", now)

    # ---- inside ---------------------------------------------------------------------------------------------

    def _current(self, number: int) -> Attempt | None:
        """The attempt under way, if that is its number."""
        attempt = self._attempt
        if attempt is None or attempt.opening.attempt != number or self._state is not _State.SERVING:
            return None
        return attempt

    @property
    def _is_in_doubt(self) -> bool:
        return self._state is _State.SERVING and self._attempt is not None and self._attempt.in_doubt

    def _trust(self, attempt: Attempt, now: float, *, gets_on: bool) -> None:
        """Its decode replica answers; `gets_on`: with tokens. Signs of life alone do not end a stall."""
        was_in_doubt, attempt.is_hung = attempt.in_doubt, False
        if gets_on:
            attempt.got_on_at, attempt.stalled_s = now, 0.0
        if was_in_doubt and not attempt.in_doubt:
            self.wake_at = self._look_at(attempt)

    def _look_at(self, attempt: Attempt) -> float:
        """When the silence of the attempt's replicas, if it lasts, is too long, or the deadline is over."""
        return min(self._deadline, attempt.stalls_at(self._stalls, self._settings))

    def _look(self, attempt: Attempt, now: float) -> Ready:
        """See whether the attempt has stalled. Tokens that have come meanwhile did not move `wake_at`: that would wake
        the request's task for each of them."""
        self.wake_at = self._look_at(attempt)
        if now < self.wake_at:
            return ()
        opening, silent_s = attempt.opening, now - attempt.got_on_at
        self._stalls += 1
        if opening.prefill is not None and attempt.awaits_prefill:
            forget = CancelWork(opening.attempt, opening.prefill)
            cancelled = self._go_without_kv(attempt, f"it stalled for {silent_s:.0f} s", None, now)
            self.wake_at = self._look_at(attempt)
            return (NoteStall(opening.prefill), forget, cancelled)
        attempt.stalled_s = silent_s
        self.wake_at = min(self._deadline, now + self._settings.route_retry_s)
        return (NoteStall(opening.decode), self._wanted())

    def _wanted(self) -> FindRoute:
        leaving = self._attempt.opening.decode if self._attempt is not None and self._attempt.in_doubt else ""
        return FindRoute(self._prompt + self._answer.count, self._blamed, leaving)

    def _look_for_route(self, now: float) -> Ready:
        self._state = _State.ROUTING
        self._give_up_at = now + self._settings.no_engine_grace_s
        self.wake_at = min(self._deadline, now + self._settings.route_retry_s)
        return (self._wanted(),)

    def _show(self, tokens: Tokens, finish: str | None, first_at: float, now: float) -> Ready:
        """Add to the answer."""
        if tokens:
            self._last_at = now
            if self._first_at is None:
                self._first_at = first_at
        shown = self._answer.take(tokens, finish)
        return () if shown is None else (shown,)

    def _blame(self, replica: str, engine: int, what: str) -> None:
        self._blamed = {**self._blamed, replica: engine}
        self._recovered = (*self._recovered, what)

    def _go_without_kv(self, attempt: Attempt, reason: str, engine: int | None, now: float) -> CancelTransfer:
        """The prefill replica has failed: let the decode replica compute what it did not get. `engine` None: another
        attempt may use it."""
        prefill = attempt.opening.prefill
        assert prefill is not None
        attempt.prefilling, attempt.prefill_over, attempt.without_kv = False, True, True
        attempt.got_on_at = now  # the decode replica begins only now
        if engine is not None:
            self._blamed = {**self._blamed, prefill: engine}
        self._recovered = (*self._recovered, f"prefill node {name_of(prefill)}: {reason}")
        return CancelTransfer(attempt.opening.attempt, attempt.opening.decode, reason)

    def _leave(self, *, is_decode_over: bool = False) -> Ready:
        """End the attempt, and whatever may still be at work on it."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return ()
        opening = attempt.opening
        actions: Ready = () if is_decode_over else (CancelWork(opening.attempt, opening.decode),)
        if attempt.prefilling and opening.prefill is not None:
            actions = (*actions, CancelWork(opening.attempt, opening.prefill))
        return actions

    def _try_again(self, now: float) -> Ready:
        """On another route, from what the client has seen."""
        actions = self._leave()
        return (*actions, *self._look_for_route(now))

    def _finish(self, shown: Ready, now: float, *, is_decode_over: bool, wait: bool) -> Ready:
        """The answer is complete."""
        attempt = self._attempt
        assert attempt is not None
        if not (wait and attempt.prefilling):
            return shown + self._end(self._answer.finish, "", now, is_decode_over=is_decode_over)
        # The report of the KV transfer comes from another node, and may be on its way.
        self._state = _State.CLOSING
        self.wake_at = min(self._deadline, now + self._settings.figures_grace_s)
        if is_decode_over:
            return shown
        return (*shown, CancelWork(attempt.opening.attempt, attempt.opening.decode))

    def _end(self, finish: str | None, error: str, now: float, *, is_decode_over: bool = False) -> Ready:
        # While it was closing, the decode replica had nothing to do any more, or has been told so.
        actions = self._leave(is_decode_over=is_decode_over or self._state is _State.CLOSING)
        self._state, self.wake_at = _State.OVER, inf
        return (*actions, EndRequest(finish, error, self._record(now)))

    def _record(self, now: float) -> RequestRecord | None:
        opening = self._opening
        if opening is None:
            return None
        first, last = self._first_at, self._last_at
        if first is None:
            first = last = now
        return RequestRecord(
            opening.prefill, opening.decode, self.attempts, self._recovered, self._cached or 0, self._answer.count,
            self._arrived, first, last,
        )  # fmt: skip
