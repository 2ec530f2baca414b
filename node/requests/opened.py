"""A client's request as its gateway holds it: its machine, and what the messages of its attempts
are made of."""

from __future__ import annotations

from typing import final

import trio

from ...bootstrap import PeerId
from ...coordinator import Plan
from ...coordinator.requests import OpenDecode, OpenPrefill, RequestMachine, RequestRecord
from .. import messages
from .request import LiveRequest

LEAST_DEADLINE_S = 0.05  # that an engine is given: a deadline that is over cannot be sent


@final
class OpenedRequest:
    """From its arrival to its end."""

    def __init__(self, client: PeerId, id: str, live: LiveRequest, machine: RequestMachine, deadline: float) -> None:  # noqa: A002
        self.client = client
        self.id = id  # as the client calls it
        self.live = live
        self.machine = machine
        self.is_over = False
        self.wake_at = machine.wake_at
        self.changed = trio.Event()  # `wake_at`, or that it is over
        self.opening: OpenDecode | None = None
        """The latest attempt."""
        self.attempt = ""
        """The id by which its replicas know it: new for each, so that late messages of another are
        told apart."""
        self.asks_for = 0
        """The number of the attempt whose replicas may be asked to begin; 0: of none."""
        self.asking = trio.CancelScope()
        """Around the latest question."""
        self.slices: tuple[messages.TicketedSlice, ...] = ()
        """Tickets for its KV."""
        self.transfer: messages.TransferFigures | None = None
        self._deadline = deadline
        self._codec = "raw"
        self._asked: messages.DecodeOpen | None = None

    def __repr__(self) -> str:
        return f"<OpenedRequest {self.id} of {self.client}: {self.machine!r}>"

    def note_wake_at(self) -> None:
        """Its machine may want to be woken at another moment now."""
        if self.wake_at != self.machine.wake_at:
            self.wake_at = self.machine.wake_at
            self.changed.set()

    def stop_asking(self) -> None:
        """A replica is told to forget the attempt: it must not be asked for it afterwards."""
        self.asks_for = 0
        self.asking.cancel()

    def begin_attempt(self, opening: OpenDecode, attempt: str, plan: Plan, now: float) -> messages.DecodeOpen:
        """What the decode replica is asked."""
        self.opening, self.attempt, self.slices, self._codec = opening, attempt, (), plan.codec
        self.asks_for = opening.attempt
        prefill = plan.replica_of(opening.prefill) if opening.prefill is not None else None
        prompt, sampling = self.live.replay()
        self._asked = messages.DecodeOpen(
            request=attempt,
            service=plan.service,
            prompt=prompt,
            sampling=sampling,
            deadline_s=max(LEAST_DEADLINE_S, self._deadline - now),
            receive_tokens=opening.split,
            codec=plan.codec,
            prefill=prefill.stages if prefill is not None else (),
            told_first=opening.first_token,
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
            slices=self.slices,
            sampling=asked.sampling if opening.first_token else None,
        )

    def figures(self, record: RequestRecord | None) -> messages.RequestFigures | None:
        """What the client is told at the end."""
        if record is None:
            return None
        return messages.RequestFigures(
            prompt_tokens=len(self.live.prompt),
            completion_tokens=self.live.count,
            ttft_s=record.ttft_s,
            tpot_s=record.tpot_s,
            e2e_s=record.e2e_s,
            prefill_node=record.prefill,
            decode_node=record.decode,
            codec=self._codec,
            attempts=record.attempts,
            recovered=record.recovered,
            cached_tokens=record.cached_tokens,
            transfer=self.transfer,
        )
