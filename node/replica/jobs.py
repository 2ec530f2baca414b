"""A replica's part in one try at a request: what is known of it, what it is billed for, and what the log says of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from msgspec.structs import replace

from ...bootstrap import PeerId, RemoteError
from .. import messages
from ..engine.protocol import EngineStats, Iterations, NewTokens, Sampling
from ..links.path_selection import DIRECT
from ..observing.costs import ShareClock
from ..observing.event_log import Record
from ..observing.values import MAX_TARGETS, EventKind, Fact, KvTally, Served
from .kv_transfers import TransferEnd


@dataclass(slots=True)
class Job:
    """One of this box's engine, for a gateway."""

    gateway: PeerId
    request: str
    transfer: bytes | None = None
    wants_first_token: bool = False  # of a prefill: the client still waits for it
    figures: messages.TransferFigures | None = None  # of one whose KV was delivered before that
    since_s: float = 0.0  # the share clock when it came
    tokens: int = 0  # that it has
    unread: int = 0  # tokens of its prompt that are computed here, before it has any


def count_untold(stats: EngineStats | None, decodes: Collection[Job], prefills: Collection[Job]) -> EngineStats | None:
    """What the engine has told after its last step, with the requests that have come since: the step that it is in may
    take long, and gateways that hear of them only then send theirs to a box that looks idle. A prefill that has its
    token is no load any more, though its KV may still be on its way."""
    requests = len(decodes) + sum(not job.tokens for job in prefills)
    untold = requests - (stats.running + stats.waiting) if stats is not None else 0
    if stats is None or untold <= 0:
        return stats
    begun = sorted((job for job in (*decodes, *prefills) if not job.tokens), key=lambda job: job.since_s)
    return replace(
        stats,
        waiting=stats.waiting + untold,
        pending_prefill_tokens=stats.pending_prefill_tokens + sum(job.unread for job in begun[-untold:]),
        decodes=max(stats.decodes, len(decodes)),
    )


def refuse_known(request: str, jobs: dict[str, Job]) -> None:
    """An id names one request: another gateway's must not take over its tokens."""
    if request in jobs:
        raise RemoteError("invalid", f"request: the id {request} is in use")


def refuse_senseless(body: messages.DecodeOpen) -> None:
    """Not more KV can be received than the prompt has tokens, and not less where a first token follows it."""
    received, tokens = body.receive_tokens, len(body.prompt)
    if received > tokens or (body.awaits_first_token and received < tokens):
        raise RemoteError("invalid", f"receive_tokens: {received} of {tokens} tokens")


def decode_id(request: str) -> str:
    """What the engine calls the decode of a request."""
    return f"decode:{request}"


def prefill_id(request: str) -> str:
    """What the engine calls its prefill."""
    return f"prefill:{request}"


def first_token_of(sampling: Sampling) -> Sampling:
    """Of the next token alone, as this sampling would take it."""
    # Limits must not contradict each other; an end token is as impossible when fewer than the least are wanted.
    least = min(sampling.min_tokens, sampling.answered + 1)
    return replace(sampling, max_tokens=1, min_tokens=least)


def tokens_of(request: str, output: NewTokens, busy_s: float) -> messages.Tokens:
    """What its gateway is told of new tokens of an answer, or of none to come."""
    failed = "the engine gave the request up" if output.finish == "error" else ""
    refused = (output.reason or "no reason given") if output.finish == "refused" else ""
    return messages.Tokens(
        request=request,
        tokens=output.tokens,
        finish=None if failed or refused else output.finish,
        cached_tokens=output.cached_tokens,
        failed=failed,
        refused=refused,
        busy_s=busy_s,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        stop_reason=output.stop_reason,
    )


def split_attempt(request: str) -> tuple[str, int | None]:
    """The network's id of a request and the number of the attempt, from the id that replicas know."""
    token, _, number = request.partition(".")
    return token, int(number[:9]) if number.isdecimal() else None


@final
class JobLog:
    """Tells the node's log of jobs, and shares its time out among them. `clock` has seconds."""

    def __init__(self, record: Record, clock: Callable[[], float]) -> None:
        self._record = record
        self._clock = clock
        self._shares = ShareClock()
        self.served = Served()
        """What this box has done so far."""

    def __repr__(self) -> str:
        return f"<JobLog {self._shares.shares_s:.3f} s>"

    def begin(self, gateway: PeerId, request: str, present: int) -> Job:
        """One comes, to so many others: from here on it shares this box's time."""
        return Job(gateway, request, since_s=self.advance(present))

    def advance(self, present: int) -> float:
        """So many jobs have shared the time since this was called last."""
        return self._shares.advance(self._clock(), present)

    def busy_s(self, job: Job) -> float:
        """Its share of this box's time so far, as of the engine's last step."""
        return max(0.0, self._shares.shares_s - job.since_s)

    def note(self, kind: EventKind, job: Job, **facts: Fact | None) -> None:
        """Tell what becomes of it."""
        request, attempt = split_attempt(job.request)
        self._record(kind, request=request, peer=job.gateway, layers=(), attempt=attempt, **facts)

    def note_end(self, kind: EventKind, job: Job, **facts: Fact | None) -> None:
        """The same, with what it had."""
        self.note(kind, job, tokens=job.tokens, busy_s=self.busy_s(job), **facts)

    def note_transfer(self, job: Job, ended: TransferEnd) -> None:
        """Its KV has been delivered, or will not be."""
        request, attempt = split_attempt(job.request)
        figures = ended.figures
        self._count_transfer(ended)
        self._record(
            EventKind.TRANSFER_FAILED if ended.failed else EventKind.TRANSFER_ENDED,
            request=request,
            peer=ended.target,
            layers=figures.layers,
            attempt=attempt,
            failed=ended.failed or None,
            mode=figures.mode,
            raw_bytes=figures.raw_bytes,
            wire_bytes=figures.wire_bytes,
            resent_bytes=figures.resent_bytes,
            frames=figures.frames,
            span_s=figures.span_s,
            visible_s=figures.visible_s,
            hidden_fraction=figures.hidden_fraction,
            codec_s=figures.codec_s,
            blocked_s=figures.blocked_s,
            paths=" ".join(f"{label}:{size}" for label, size in figures.paths.items()),
            usd=figures.usd,
        )

    def note_steps(self, iterations: Iterations) -> None:
        """Steps of the engine."""
        self.served = replace(
            self.served,
            prefilled_tokens=self.served.prefilled_tokens + iterations.prefill_tokens,
            decoded_tokens=self.served.decoded_tokens + iterations.decode_tokens,
        )

    def note_cached(self, tokens: int) -> None:
        """So many tokens of a prompt were in the prefix cache."""
        self.served = replace(self.served, cached_tokens=self.served.cached_tokens + tokens)

    def _count_transfer(self, ended: TransferEnd) -> None:
        """Of many boxes, those are told of that were sent to last."""
        before = self.served.kv_sent.get(ended.target, KvTally())
        figures = ended.figures
        relayed = sum(size for label, size in figures.paths.items() if label != DIRECT)
        sent = KvTally(
            transfers=before.transfers + 1,
            failed=before.failed + bool(ended.failed),
            wire_bytes=before.wire_bytes + figures.wire_bytes,
            relayed_bytes=before.relayed_bytes + relayed,
        )
        others = [(peer, each) for peer, each in self.served.kv_sent.items() if peer != ended.target]
        latest = dict([*others[-MAX_TARGETS + 1 :], (ended.target, sent)])
        self.served = replace(self.served, kv_sent=latest)
