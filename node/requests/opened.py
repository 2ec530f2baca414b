"""A client's request as its gateway holds it: what replicas say becomes events of its machine, what the machine wants
becomes messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, assert_never, final

from ...bootstrap import PeerId
from ...bootstrap.methods import Body, Notice
from ...coordinator import Plan, Replica
from ...coordinator.requests.machine import RequestMachine
from ...coordinator.requests.values import (
    CancelTransfer,
    CancelWork,
    EndRequest,
    OpenDecode,
    OpenPrefill,
    PassFirstToken,
    Ready,
    ShowTokens,
)
from .. import messages
from ..engine.sampling import TopTokens
from ..methods import ANSWER, DECODE_FIRST, REQUEST_STOP, TRANSFER_STOP
from .live_request import LiveRequest
from .rated_tokens import RatedTokens

LEAST_DEADLINE_S = 0.05  # that an engine is given: a deadline that is over cannot be sent


@final
@dataclass(frozen=True, slots=True)
class Telling(Generic[Body]):
    """A notice, and whom it is for."""

    peer: PeerId
    notice: Notice[Body]
    body: Body


@final
class OpenedRequest:
    """From its arrival to its end."""

    def __init__(
        self, client: PeerId, live: LiveRequest, machine: RequestMachine, deadline: float, *, token: str
    ) -> None:
        self.client = client
        self.id = live.id  # as the client calls it
        self.live = live
        self.machine = machine
        self.token = token  # the id by which its replicas know an attempt begins with it
        self._deadline = deadline
        self._opening: OpenDecode | None = None  # the latest attempt
        self._opened_at = 0.0
        self._asked: messages.DecodeOpen | None = None  # of its decode replica
        self._slices: tuple[messages.TicketedSlice, ...] = ()  # with tickets for its KV
        self.transfer: messages.TransferFigures | None = None  # of its KV, once that has been delivered
        self.traffic_usd = 0.0  # of all its transfers
        self.usd = 0.0  # what it has cost, once it is over
        self._busy: dict[tuple[int, PeerId], float] = {}  # attempt, head of a replica -> its share of time there
        self._replicas: dict[PeerId, Replica] = {}  # by their heads; one may not be in the plan any more
        self._prompt_logprobs: TopTokens | None = None  # until the client has been told
        self._cached_tokens = 0  # the same
        self._stop_reason: int | None = None  # of the replica that said the end

    def __repr__(self) -> str:
        return f"<OpenedRequest {self.id} of {self.client}: {self.machine!r}>"

    @property
    def attempt(self) -> str:
        """The id by which the replicas know the latest attempt: late messages of another are told apart by it."""
        return self._asked.request if self._asked is not None else ""

    @property
    def next_attempt(self) -> str:
        """The id that the next attempt will have."""
        return f"{self.token}.{self.machine.attempts + 1}"

    # ---- events ---------------------------------------------------------------------------------------------

    def on_decode_opened(self, attempt: int, opened: messages.DecodeOpened, now: float) -> Ready:
        """The decode replica has accepted, with tickets for the KV that it expects."""
        self._slices = opened.slices
        return self.machine.decode_opened(attempt, now, receives=bool(opened.slices))

    def on_tokens(self, peer: PeerId, body: messages.Tokens, engine: int, now: float) -> Ready:
        """New tokens, or none to come, from the decode replica; or the first token from the prefill replica."""
        machine, opening = self.machine, self._opening
        if opening is None or body.request != self.attempt:
            return ()
        if peer not in (opening.prefill, opening.decode):
            return ()
        self._note_busy(peer, opening, body.busy_s, now)
        tokens = RatedTokens(body.tokens, body.logprobs)
        if body.finish is not None:
            self._stop_reason = body.stop_reason
        if peer == opening.prefill:
            return machine.first_token(opening.attempt, tokens, body.finish, now)
        if body.refused:
            return machine.refused(opening.attempt, body.refused, now)
        if body.failed:
            return machine.decode_failed(opening.attempt, body.failed, engine, now)
        if body.leaves:
            return machine.peer_hung(peer, now, leaves=True)
        self._prompt_logprobs = body.prompt_logprobs
        self._cached_tokens = body.cached_tokens if not self.live.count else 0
        return machine.decoded(opening.attempt, tokens, body.finish, now, cached=body.cached_tokens)

    def on_prefill_ended(self, peer: PeerId, body: messages.PrefillEnded, engine: int, now: float) -> Ready:
        """The prefill replica says how its part has ended."""
        opening = self._opening
        if opening is None or opening.prefill != peer or body.request != self.attempt:
            return ()
        self._note_busy(peer, opening, body.busy_s, now)
        if self.machine.is_prefilling and body.figures is not None:
            self.traffic_usd += body.figures.usd
            self.transfer = body.figures if not body.failed else self.transfer
        return self.machine.prefill_ended(opening.attempt, body.failed, engine, now)

    def on_peer_lost(self, peer: PeerId, engine: int, now: float) -> Ready:
        """The connection to its client or to a node is gone."""
        return self.machine.stop(now) if peer == self.client else self.machine.peer_lost(peer, engine, now)

    def busy(self) -> list[tuple[tuple[str, ...], float]]:
        """The shares of time that it is billed for, each with the boxes of the replica."""
        boxes = {head: replica.peers for head, replica in self._replicas.items()}
        return [(boxes.get(head, (head,)), seconds) for (_, head), seconds in self._busy.items()]

    def _note_busy(self, peer: PeerId, opening: OpenDecode, seconds: float, now: float) -> None:
        """A replica says what it bills: not more than the time since the attempt began."""
        if peer in (opening.prefill, opening.decode):
            self._busy[opening.attempt, peer] = min(seconds, max(0.0, now - self._opened_at))

    # ---- actions --------------------------------------------------------------------------------------------

    def begin_attempt(self, opening: OpenDecode, plan: Plan, now: float) -> messages.DecodeOpen:
        """What the decode replica is asked."""
        self._opening, self._slices, self._opened_at = opening, (), now
        for replica in filter(None, (plan.replica_of(opening.decode), plan.replica_of(opening.prefill or ""))):
            self._replicas[PeerId(replica.head)] = replica
        prefill = self._replicas.get(PeerId(opening.prefill)) if opening.prefill is not None else None
        prompt, sampling = self.live.replay()
        self._asked = messages.DecodeOpen(
            request=f"{self.token}.{opening.attempt}",
            service=plan.service,
            prompt=prompt,
            sampling=sampling,
            deadline_s=max(LEAST_DEADLINE_S, self._deadline - now),
            receive_tokens=opening.split,
            codec=plan.codec,
            prefill=prefill.stages if prefill is not None else (),
            awaits_first_token=opening.first_token,
            cache_salt=self.live.cache_salt,
        )
        return self._asked

    def prefill_open(self, opening: OpenPrefill) -> messages.PrefillOpen:
        """What the prefill replica is asked, once the decode replica has issued its tickets."""
        asked = self._asked
        assert asked is not None  # a machine opens the decode replica first
        return messages.PrefillOpen(
            request=asked.request,
            service=asked.service,
            prompt=asked.prompt[: opening.split],
            deadline_s=asked.deadline_s,
            slices=self._slices,
            sampling=asked.sampling if opening.first_token else None,
            cache_salt=asked.cache_salt,
        )

    def telling(self, action: ShowTokens | PassFirstToken | CancelTransfer | CancelWork | EndRequest) -> Telling[Any]:
        """What somebody is to be told."""
        match action:
            case ShowTokens():
                return Telling(self.client, ANSWER, self._update(action))
            case PassFirstToken(_, decode, token):
                first = messages.FirstToken(request=self.attempt, token=token)
                return Telling(PeerId(decode), DECODE_FIRST, first)
            case CancelTransfer(_, decode, reason):
                stop = messages.StopTransfer(request=self.attempt, reason=reason)
                return Telling(PeerId(decode), TRANSFER_STOP, stop)
            case CancelWork(_, replica):
                return Telling(PeerId(replica), REQUEST_STOP, messages.StopRequest(request=self.attempt))
            case EndRequest():
                return Telling(self.client, ANSWER, self.describe_end(action))
            case _:
                assert_never(action)

    def news(self) -> Telling[messages.AnswerUpdate]:
        """The client is told that the request is under way."""
        return Telling(self.client, ANSWER, messages.AnswerUpdate(request=self.id))

    def _update(self, shown: ShowTokens) -> messages.AnswerUpdate:
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        cached_tokens, self._cached_tokens = self._cached_tokens, 0
        tokens = shown.tokens
        return messages.AnswerUpdate(
            request=self.id,
            text=shown.text,
            tokens=tuple(tokens),
            logprobs=tokens.logprobs if isinstance(tokens, RatedTokens) else None,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=cached_tokens,
        )

    def describe_end(self, end: EndRequest) -> messages.AnswerUpdate:
        """The last update of its answer."""
        record, figures = end.record, None
        if record is not None:
            figures = messages.RequestFigures(
                prompt_tokens=len(self.live.prompt),
                completion_tokens=self.live.count,
                ttft_s=record.ttft_s,
                tpot_s=record.tpot_s,
                e2e_s=record.e2e_s,
                prefill_node=record.prefill,
                decode_node=record.decode,
                codec=self._asked.codec if self._asked is not None else "raw",
                attempts=record.attempts,
                recovered=record.recovered,
                cached_tokens=record.cached_tokens,
                transfer=self.transfer,
                id=self.token,
                usd=self.usd,
            )
        rest = self.live.take_rest()
        return messages.AnswerUpdate(
            request=self.id,
            text=rest,
            finish=end.finish,
            error=end.error,
            figures=figures,
            stop_reason=self._stop_reason if end.finish == "stop" and not self.live.stopped_by_text else None,
        )
