"""The route on which a request is expected to end first, by what is known of queues, speeds, memory and links.

The plan says which pairs of replicas there are, and how much their links should carry. What is predicted of a request
on a route, in seconds, by the replicas' fitted times (`ReplicaProfile`) and live queues:

    its first token    prompts ahead of it, and what is not cached of its own, at the prefill replica's rate; where
                       the decode replica has no room for its KV, the requests ahead of it there, at the rate at which
                       those end
    all others         the predicted length of its answer, in steps over all requests that decode there with it

A prefill and a decode replica may also share the prompt (`cronus`): then both compute what lies before them, and the
first token is expected when both together have. That is chosen where it is sooner, and the plan's deadlines, if it has
some, say that it is needed and bearable.

The plan also says how fast replicas are beside each other, by the shares that it gives them: that is the prior of the
fitted times, which may be off by a fifth.

A pair whose KV leaves its boxes, and that had more than its share of the latest requests, counts as that much later, as
in `plan_and_queues`: that is what the plan knows of links. Of routes that are expected to end at nearly the same time,
the one on cheaper boxes is taken, where their prices are known.

Nothing here needs a coordinator that is alive: a gateway goes on by the last plan, with what it sees. State and work
are of the order of the plan's pairs.
"""

from __future__ import annotations

from typing import ClassVar, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ..plan import Plan
from ..profile import ReplicaProfile
from .interface import ReplicaLoads, RequestFacts, RequestId, Route, RoutingPolicy, RoutingSettings
from .lengths import LengthPredictor, make_predictor
from .plan_and_queues import PlanAndQueues, RouteTable

Floats = NDArray[np.float64]

REMEMBERED: Final = 128
"""About how many of this gateway's latest requests stand for those that others have sent."""

MOST_REQUESTS: Final = 256
"""A batch has no more than vLLM's `max_num_seqs`."""

STEP_TOKENS: Final = 2048
"""Of a step whose budget the plan leaves to the engine: vLLM's `max_num_batched_tokens`."""

MOST_OFF: Final = 8.0
"""A share of the plan that differs by more from what a replica can do is for another reason, such as its links."""

SPLIT_FROM: Final = 0.5
"""Of the plan's deadline for the first token: where that is expected sooner, decoding is not disturbed for it."""

PRICE_WITHIN: Final = 0.02
"""Of routes that are expected to end within so much of the first one, the cheapest is taken."""

NEVER_S: Final = 1e9
"""A replica that cannot hold a prompt comes after all others."""

LEAST_S: Final = 1e-9
"""No prompt's token takes less: what is divided by it stays finite."""


class _Speeds(NamedTuple):
    """The replicas' times as arrays, in the order of the live state.

    Seconds: `token_s` per token of a prompt, `prompt_s` for each besides, `begin_s` for a step of prompts alone; of a
    decode step `step_s`, with `request_s` and `context_s` for each request and each token that it holds, and `length_s`
    for each token of their mean length. `kv_tokens`:
    room, infinite where it is not known; `prefills`: whether prompts are computed beside answers, by the plan;
    `chunk_tokens`: of a step.
    """

    token_s: Floats
    prompt_s: Floats
    begin_s: Floats
    step_s: Floats
    request_s: Floats
    context_s: Floats
    length_s: Floats
    kv_tokens: Floats
    prefills: Floats
    chunk_tokens: Floats

    def decode_step_s(self, requests: Floats, context: float) -> Floats:
        """Of a step over so many requests of this context, by replica."""
        return np.asarray(
            self.step_s + self.length_s * context + (self.context_s * context + self.request_s) * requests
        )


class _Shares(NamedTuple):
    """By replica, of all prompts and of all answers, what the plan gives it; 0: none."""

    prefill: Floats
    decode: Floats


class _Forecast(NamedTuple):
    """By replica, in seconds: `prefill_s` until it would have computed a prompt that comes now, `room_s` until it would
    have room for its KV, `decode_s` from the first token to the last. `chunk_s`: a step with a chunk of a prompt beside
    what decodes; `chunked_token_s`: of such steps, per token of the prompt. `tokens`: of prompts that wait."""

    prefill_s: Floats
    room_s: Floats
    decode_s: Floats
    chunk_s: Floats
    chunked_token_s: Floats
    tokens: Floats


@final
class PredictedTimes(RoutingPolicy):
    """See the module. Until a replica's times are known, the queues decide as in `PlanAndQueues`; one of several that
    is not known counts as slow as the slowest."""

    needs_profiles: ClassVar[bool] = True

    def __init__(self, plan: Plan, settings: RoutingSettings) -> None:
        self._plan = plan
        self._queues = PlanAndQueues(plan, settings)
        self.lengths: LengthPredictor = make_predictor(settings.length_predictor)
        self.prompts: dict[RequestId, int] = {}  # of requests that have not ended
        self.mean_prompt = self.mean_output = 0.0
        self.routed = 0  # lately
        self._known: list[ReplicaProfile | None] = []
        self._speeds: _Speeds | None = None
        self._table: RouteTable | None = None  # that the shares are of
        self._shares = _Shares(np.zeros(0), np.zeros(0))
        self._is_one_box = np.array([len(replica.stages) == 1 for replica in plan.replicas])

    def __repr__(self) -> str:
        return (
            f"<PredictedTimes requests={len(self.prompts)} of {self.mean_prompt:.0f} + {self.mean_output:.0f} tokens>"
        )

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """See `RoutingPolicy`."""
        prompt, output = max(1, request.prompt_tokens), self._predict(request, rng)
        self._remember(request, prompt, output)
        speeds = self._read_speeds(loads)
        if speeds is None:
            return self._queues.choose(request, loads, now=now, rng=rng)
        table = self._queues.table_without(request.excluded, loads)
        cached = np.zeros(len(loads.ids)) if request.cached_tokens is None else request.cached_tokens
        forecast = self._forecast(
            prompt, prompt - cached, output, speeds, loads, self._read_shares(table, len(loads.ids))
        )
        prefill, decode = table.prefill.replica, table.decode.replica
        prefill_s = forecast.prefill_s[prefill]
        shared_s = self._shared_prefill_s(prompt - cached, table, speeds, forecast)
        first_s = np.maximum(np.minimum(prefill_s, shared_s), forecast.room_s[decode])
        end_s = (first_s + forecast.decode_s[decode]) * (1.0 + self._queues.beyond_share())
        best = _cheapest(end_s, loads.usd_per_hour[prefill] + loads.usd_per_hour[decode])
        self._queues.note_sent(best)
        ends = loads.ids[prefill[best]], loads.ids[decode[best]]
        if shared_s[best] < prefill_s[best]:
            return Route(prefill=ends[0], decode=ends[1], split=prompt, splits_there=True)
        return Route.between(*ends, table.split(best, prompt))

    def on_end(self, request: RequestId, output_tokens: int | None) -> None:
        """Learn from its answer."""
        prompt = self.prompts.pop(request, None)
        if prompt is not None and output_tokens:
            self.lengths.record(prompt, output_tokens)

    def take_over(self, earlier: RoutingPolicy) -> None:
        """Keep what is known of lengths."""
        if isinstance(earlier, PredictedTimes):
            self.lengths, self.prompts = earlier.lengths, earlier.prompts
            self.mean_prompt, self.mean_output = earlier.mean_prompt, earlier.mean_output
            self.routed = earlier.routed

    def _predict(self, request: RequestFacts, rng: np.random.Generator) -> float:
        if request.output_tokens is not None:
            return float(max(1, request.output_tokens))
        output = self.lengths.predict(request.prompt_tokens, rng)
        return output if request.max_output_tokens is None else min(output, float(max(1, request.max_output_tokens)))

    def _remember(self, request: RequestFacts, prompt: int, output: float) -> None:
        if request.id is not None:
            self.prompts[request.id] = prompt
        self.routed = min(self.routed + 1, REMEMBERED)
        self.mean_prompt += (prompt - self.mean_prompt) / self.routed
        self.mean_output += (output - self.mean_output) / self.routed

    def _read_speeds(self, loads: ReplicaLoads) -> _Speeds | None:
        """None while no profile is known."""
        if loads.profiles != self._known:
            self._known = list(loads.profiles)
            self._speeds = _tabulate(self._plan, self._known)
        return self._speeds

    def _read_shares(self, table: RouteTable, replicas: int) -> _Shares:
        if table is not self._table:
            self._table, self._shares = table, _Shares(np.zeros(replicas), np.zeros(replicas))
            for shares, side in zip(self._shares, (table.prefill, table.decode), strict=True):
                shares[side.replica] = 1.0 / side.inverse_share
        return self._shares

    def _forecast(
        self, prompt: int, uncached: Floats, output: float, speeds: _Speeds, loads: ReplicaLoads, shares: _Shares
    ) -> _Forecast:
        tokens, requests = self._queues.guess_queues(loads)
        # Who takes long is met more often: what a batch holds is more than half of a mean answer for each request.
        held = self.mean_prompt + self.mean_output
        room = np.clip(speeds.kv_tokens / held, 1.0, MOST_REQUESTS)
        batch = np.minimum(requests + 1.0, room)
        step_s = speeds.decode_step_s(batch, held)
        one_prompt_s = speeds.token_s * self.mean_prompt + speeds.prompt_s
        # So often a request of the batch ends meanwhile, and another one's prompt is computed beside this one's answer.
        follow = speeds.prefills * batch / self.mean_output
        decode_s = output * (step_s + follow * one_prompt_s)
        turn_s = self.mean_output * step_s / batch + speeds.prefills * one_prompt_s
        # Of answers the mean of plan and times is off by less than either. Of prompts the plan knows better: the stages
        # of a pipeline compute several at once, of which the time of one says nothing.
        turn_s = np.maximum(turn_s, LEAST_S)
        turn_s = turn_s * np.sqrt(_off_plan(shares.decode, turn_s))
        queue_token_s = speeds.token_s * _off_plan(shares.prefill, speeds.token_s)
        chunk = np.maximum(speeds.chunk_tokens - requests, 1.0)
        chunk_s = chunk * speeds.token_s + step_s
        return _Forecast(
            prefill_s=tokens * queue_token_s + uncached * speeds.token_s + speeds.prompt_s + speeds.begin_s,
            room_s=self._room_s(prompt, requests + 1.0 - room, turn_s, speeds, loads),
            decode_s=decode_s,
            chunk_s=chunk_s,
            chunked_token_s=chunk_s / chunk,
            tokens=tokens,
        )

    def _room_s(self, prompt: int, excess: Floats, turn_s: Floats, speeds: _Speeds, loads: ReplicaLoads) -> Floats:
        """By replica, until requests have ended whose KV is in the way: `excess` of them, by their mean length, or at
        least one where the replica itself reports that it has no room."""
        is_full = loads.kv_free_tokens < prompt
        waits = np.maximum(np.maximum(excess, 0.0), is_full.astype(np.float64)) * turn_s
        return np.where(speeds.kv_tokens < prompt, NEVER_S, waits)

    def _shared_prefill_s(self, uncached: Floats, table: RouteTable, speeds: _Speeds, forecast: _Forecast) -> Floats:
        """By route, until both of its replicas together have computed what waits for them, and this prompt. Infinite
        where that is not to be: between pipelines, whose stages would idle with so few prompts at a time; where the
        steps of the decode replica would be too long; and where the first token is early enough without."""
        prefill, decode = table.prefill.replica, table.decode.replica
        rate = 1.0 / speeds.token_s[prefill] + 1.0 / forecast.chunked_token_s[decode]
        seconds = (forecast.tokens[prefill] + forecast.tokens[decode] + uncached[prefill]) / rate + speeds.begin_s[
            prefill
        ]
        can = (prefill != decode) & self._is_one_box[prefill] & self._is_one_box[decode]
        deadlines = self._plan.deadlines
        if deadlines.tpot_s > 0.0:
            can = can & (forecast.chunk_s[decode] <= deadlines.tpot_s)
        if deadlines.ttft_s > 0.0:
            can = can & (forecast.prefill_s[prefill] > SPLIT_FROM * deadlines.ttft_s)
        return np.where(can, seconds, np.inf)


def _cheapest(end_s: Floats, usd: Floats) -> int:
    """The route that ends first, or a cheaper one of those that end hardly later."""
    best = int(end_s.argmin())
    if not usd.any():
        return best
    near = end_s <= end_s[best] * (1.0 + PRICE_WITHIN)
    return int(np.where(near, usd, np.inf).argmin()) if usd[near].min() < usd[best] else best


def _off_plan(shares: Floats, seconds: Floats) -> Floats:
    """By replica, what its seconds are to be multiplied with so that it is as fast beside the others as its share of
    the plan says; 1 where it has none."""
    has_share = shares > 0.0
    by_plan = np.where(has_share, shares * seconds, 1.0) * (1.0 / seconds)[has_share].sum()
    return np.asarray(np.clip(1.0 / np.where(has_share, by_plan, 1.0), 1.0 / MOST_OFF, MOST_OFF))


def _tabulate(plan: Plan, profiles: list[ReplicaProfile | None]) -> _Speeds | None:
    known = [each for each in profiles if each is not None]
    if not known:
        return None
    slowest = max(known, key=lambda each: sum(each.batch_s(8.0, 512.0, 128.0)))
    rows = [each if each is not None else slowest for each in profiles]
    return _Speeds(
        token_s=np.array([max(each.prefill.token_s, LEAST_S) for each in rows]),
        prompt_s=np.array([each.prefill.request_s for each in rows]),
        begin_s=np.array([each.prefill.step_s for each in rows]),
        step_s=np.array([each.decode.step_s for each in rows]),
        request_s=np.array([each.decode.request_s for each in rows]),
        context_s=np.array([each.decode.token_s for each in rows]),
        length_s=np.array([each.decode.length_s for each in rows]),
        kv_tokens=np.array([float(each.kv_tokens) or np.inf for each in rows]),
        prefills=np.array([float(replica.prefills) for replica in plan.replicas]),
        chunk_tokens=np.array([float(replica.step_tokens or STEP_TOKENS) for replica in plan.replicas]),
    )
