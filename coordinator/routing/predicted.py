"""The route on which a request is expected in time, or else soonest, by queues, speeds, room for KV and links.

The plan says which pairs of replicas there are, and how much their links should carry. What is predicted of a request
on a route, in seconds, by the replicas' fitted times (`ReplicaProfile`) and live queues:

    its first token    prompts ahead of it, and what is not cached of its own, at the prefill replica's rate, with the
                       steps of answers that they are computed beside; where the decode replica has no room for its KV,
                       all that is ahead of it there
    TOKENS more        steps of the batch in which it decodes, and the prompts that are computed in between

Where the plan has deadlines, a route costs what is likely to be missed on it: the first token and the time from token
to token by the sixth power of their parts of their deadlines, the end by the share of the latest answers that would be
too long for it (`AnswerTail`). What caches save decides among routes on which little is missed.

What waits and what decodes together counts twice (MARGINAL): for this request, and for those that it holds up. With its
own time alone every request would go to the fastest replica until that is as slow as the others. A request counts as
holding up others as a mean one does, whatever its length: else long prompts would all go to where few decode, which are
the slow replicas, and their first tokens come late enough anyway.

A prefill and a decode replica may also share the prompt (`cronus`): each takes as long for its part, one after the
other. That is chosen where it is sooner, and the plan's deadlines, if it has some, say that it is needed and bearable.
Where prompts wait for long and sharing does not help, any replica may take a request whole, also one that the plan has
for the other phase.

A pair whose KV leaves its boxes, and that had more than its share of the latest requests, counts as that much later, as
in `plan_and_queues`: that is what the plan knows of links; where there are deadlines, its times count as so much
longer. Of routes that are expected to be nearly as good, the one on cheaper boxes is taken, where their prices are
known; and where there are several gateways, one by lot: all hear the same reports, and would go to the same replica
until the next.

Where there are several gateways, the replica that is to compute the prompt is asked first (`pools`): it refuses where
it has more ahead than this gateway takes it to have, and says how much; then the choice is made anew. That takes a
round trip, so nobody is asked where the prompt would begin soon (ASKED_FROM). With 4 gateways of Splitwise's machines
and 130 requests/s, TTFT at p99 was 0.59 s without questions and is 0.40 s with them; with one gateway it is 0.35 s.

Without a coordinator a gateway goes on by the last plan. State and work are of the order of the plan's pairs.
"""

from __future__ import annotations

from typing import ClassVar, Final, NamedTuple, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..plan import Plan
from ..profile import ReplicaProfile
from .estimates.lengths import AnswerTail, LearnedLengths
from .estimates.speeds import LEAST_S, Floats, ReplicaSpeeds, StepSeconds, tabulate_speeds
from .interface import ReplicaLoads, RequestFacts, RequestId, Route, RoutingPolicy, RoutingSettings
from .plan_and_queues import PlanAndQueues, RouteTable
from .pools import MOST_REFUSALS, PoolClaim, Work

Indices = NDArray[np.intp]
Bools = NDArray[np.bool_]

REMEMBERED: Final = 128
"""About how many of this gateway's latest requests stand for those that others have sent."""

MOST_REQUESTS: Final = 256
"""A batch has no more than vLLM's `max_num_seqs`."""

STEP_TOKENS: Final = 2048
"""Of a step whose budget the plan leaves to the engine: vLLM's `max_num_batched_tokens`."""

LEAST_CHUNK: Final = 0.25
"""Of a step's budget, what is left for prompts however many decode."""

TOKENS: Final = 10.0
"""Of an answer, that count beside its first one. More: requests go to where answers are generated fast; fewer: to where
prompts are computed soon."""

LATELY_S: Final = 10.0
"""For so long others' prompts count that a replica was sent. Longer: steadier; shorter: it follows bursts."""

BUSIEST: Final = 0.9
"""Of a replica's time, what prompts take at most: a tenth is left for answers, in steps that have both."""

SOON: Final = 0.1
"""Requests that count as missed where a time is just as long as its deadline, as times are guessed high: at half of it
a 64th of that. More: queues are avoided sooner; less: answers that would take too long to end."""

CACHED: Final = 15.0
"""A token of a prompt that a replica holds counts as the time for so many, beside its own: what is not computed again
leaves room for others. More of it finds more in caches, and lets queues grow longer beside idle replicas."""

BEARABLE: Final = 0.02
"""So much of a request may be missed for what a cache saves. More: more is found, and answers there come later."""

SHARED_FROM: Final = 0.5
"""Of the plan's deadline for the first token: where that is expected sooner, decoding is not disturbed for it."""

LENT_FROM: Final = 8.0
"""Mean prompts. A replica takes requests that its phase is not for where prompts wait for longer."""

MARGINAL: Final = 2.0
"""What waits, and what decodes together, counts so many times: a request that waits for n others makes about n others
wait for itself, while queues and batches stay as long as they are."""

AS_GOOD: Final = 0.02
"""Of routes that are worse than the best by no more than this, the cheapest is taken, or one by lot."""

ASKED_FROM: Final = 4.0
"""Round trips. A replica is asked where others' requests may delay a prompt for longer. Less: more are asked, and mean
times grow by a round trip; more: over links as long as that, gateways meet at the same replicas."""

NEVER_S: Final = 1e9
"""A replica that cannot hold a prompt comes after all others."""


class _Shapes(NamedTuple):
    """By replica, of the plan: its stages, which compute as many prompts at once; whether answers are decoded, and
    prompts computed beside them; tokens of a step."""

    stages: Floats
    decodes: Bools
    is_mixed: Bools
    step_tokens: Floats


class _NotedRoute(NamedTuple):
    """What was noted of a route whose replica is asked first: its pair, and tokens of the prompt at the replica that
    computes them for another one."""

    pair: int
    prefill: int
    tokens: float


class _Routes(NamedTuple):
    """The pairs of the `table`, and then each replica that has none with itself, alone. By route: the replicas;
    `is_whole`: both are the same; `can_share`: two boxes, so that they may share a prompt: a pipeline's stages would
    idle with so few prompts at a time. `lent_from`: the first route that the plan does not have."""

    table: RouteTable
    prefill: Indices
    decode: Indices
    is_whole: Bools
    can_share: Bools
    lent_from: int


class _Backlog(NamedTuple):
    """By replica, what is there: `tokens` of prompts that wait, requests `running` or waiting to run, the batch that
    runs at once, this request in it, and the `most` that it may have; each of them holds `held` tokens."""

    tokens: Floats
    running: Floats
    batch: Floats
    most: Floats
    held: float


class _Forecast(NamedTuple):
    """By replica, in seconds: `prefill_s` until it would have computed a prompt that comes now, `own_s` of it for
    that; `room_s` until it would have room for its KV. From token to token `decode_s`, and `beside_s` more where a
    mean prompt is computed as often as an answer ends; `prompt_s`: for a mean prompt. `chunk_s`: a step with a chunk of
    a prompt beside what decodes; `chunked_token_s`: of such steps, per token of the prompt."""

    prefill_s: Floats
    own_s: Floats
    room_s: Floats
    decode_s: Floats
    beside_s: Floats
    prompt_s: Floats
    chunk_s: Floats
    chunked_token_s: Floats
    tokens: Floats


@final
class PredictedTimes(RoutingPolicy):
    """See the module. Until a replica's times are known, the queues decide as in `PlanAndQueues`; one of several that
    is not known counts as slow as the slowest."""

    needs_profiles: ClassVar[bool] = True
    mixes_phases: ClassVar[bool] = True

    def __init__(self, plan: Plan, settings: RoutingSettings) -> None:
        self._plan = plan
        self._queues = PlanAndQueues(plan, settings)
        self.lengths, self.tail = LearnedLengths(), AnswerTail()
        self.prompts: dict[RequestId, int] = {}  # of requests that have not ended
        self.mean_prompt = self.mean_output = 0.0
        self.routed = 0  # lately
        self._computed = np.zeros(len(plan.replicas))  # tokens of others' prompts, sent from here, those before fading
        self._faded_at = 0.0
        self._asked: dict[RequestId, _NotedRoute] = {}  # of those whose replica was asked last
        self._known: list[ReplicaProfile | None] = []
        self._speeds: ReplicaSpeeds | None = None
        self._routes: _Routes | None = None
        self._shapes = _Shapes(
            stages=np.array([float(len(replica.stages)) for replica in plan.replicas]),
            decodes=np.array([replica.decodes for replica in plan.replicas]),
            is_mixed=np.array([replica.decodes and replica.prefills for replica in plan.replicas]),
            step_tokens=np.array([float(replica.step_tokens or STEP_TOKENS) for replica in plan.replicas]),
        )

    def __repr__(self) -> str:
        mean = f"{self.mean_prompt:.0f} + {self.mean_output:.0f} tokens"
        return f"<PredictedTimes requests={len(self.prompts)} of {mean}>"

    def choose(self, request: RequestFacts, loads: ReplicaLoads, *, now: float, rng: np.random.Generator) -> Route:
        """See `RoutingPolicy`."""
        prompt, output = max(1, request.prompt_tokens), self._predict(request, rng)
        if self._asked:
            self._take_back(request)
        if not (request.answers and self.routed):
            self._remember(request, prompt, output)
        speeds = self._read_speeds(loads)
        if speeds is None:
            return self._queues.choose(request, loads, now=now, rng=rng)
        routes = self._read_routes(self._queues.table_without(request.excluded, loads))
        cached = np.zeros(len(loads.ids)) if request.cached_tokens is None else request.cached_tokens
        uncached = prompt - cached
        forecast = self._forecast(request, uncached, speeds, loads)
        # `take` is twice as fast as an index, and a plan may have thousands of routes.
        prefill_s = forecast.prefill_s.take(routes.prefill)
        shared_s = self._shared_prefill_s(uncached, routes, speeds, forecast)
        is_shared = shared_s < prefill_s
        first_s = np.maximum(np.where(is_shared, shared_s, prefill_s), forecast.room_s.take(routes.decode))
        beside_s = self._beside_s(forecast, speeds, loads, now).take(routes.decode)
        beside_s += routes.is_whole * (uncached / prompt * forecast.beside_s).take(routes.decode)
        pace_s = forecast.decode_s.take(routes.decode) + beside_s
        saved_s = CACHED * (cached * speeds.token_s).take(routes.prefill) if cached.any() else None
        later = np.ones(len(first_s))
        beyond_share = self._queues.beyond_share()
        later[: len(beyond_share)] += beyond_share
        cost = self._cost(first_s * later, pace_s * later, min(output, TOKENS), saved_s)
        if routes.lent_from < len(cost):
            cost[routes.lent_from :][~self._may_lend(routes, first_s, forecast, is_shared)] = np.inf
        best = _pick(cost, loads.usd_per_hour[routes.prefill] + loads.usd_per_hour[routes.decode], loads, rng)
        ends = loads.ids[routes.prefill[best]], loads.ids[routes.decode[best]]
        route = Route.between(*ends, 0 if routes.is_whole[best] else routes.table.split(best, prompt))
        if is_shared[best]:
            route = Route(prefill=ends[0], decode=ends[1], split=prompt, splits_there=True)
        elif loads.gateways > 1.0:
            route = self._ask_first(route, request, forecast, loads)
        self._note_sent(request, routes, best, uncached, is_asked=bool(route.claims))
        return route

    def _note_sent(
        self, request: RequestFacts, routes: _Routes, best: int, uncached: Floats, *, is_asked: bool
    ) -> None:
        """Until it is taken back."""
        prefill = int(routes.prefill[best])
        tokens = 0.0 if routes.is_whole[best] else float(uncached[prefill])
        pair = self._queues.note_sent(best)
        self._computed[prefill] += tokens
        if is_asked and request.id is not None:
            self._asked[request.id] = _NotedRoute(pair, prefill, tokens)

    def _take_back(self, request: RequestFacts) -> None:
        """What was noted of the route before this one, if its replica has refused the request."""
        sent = self._asked.pop(request.id, None) if request.id is not None else None
        if sent is not None and request.answers:
            self._queues.take_back(sent.pair)
            self._computed[sent.prefill] = max(0.0, self._computed[sent.prefill] - sent.tokens)

    def _ask_first(self, route: Route, request: RequestFacts, forecast: _Forecast, loads: ReplicaLoads) -> Route:
        """With a claim to the replica that computes the prompt, where other gateways' part of what is ahead of it there
        may take much longer than a question. Nobody is asked twice, nor after MOST_REFUSALS: then it goes where it is
        expected soonest."""
        replica = route.prefill or route.decode
        at = loads.index[replica]
        others_s = float(forecast.prefill_s[at] - forecast.own_s[at]) * (1.0 - 1.0 / loads.gateways)
        asked = {claim.replica for claim in request.answers}
        if others_s <= ASKED_FROM * loads.round_trip_s[at] or replica in asked or len(asked) >= MOST_REFUSALS:
            return route
        found = 0 if request.cached_tokens is None else int(request.cached_tokens[at])
        claim = PoolClaim(
            replica=replica,
            work=Work.PROMPT if route.prefill else Work.BOTH,
            pool=self._plan.replicas[at].phase,
            prompt_tokens=max(1, (route.split or request.prompt_tokens) - found),
            most_ahead=int(forecast.tokens[at]),
        )
        return msgspec.structs.replace(route, claims=(claim,))

    def _beside_s(self, forecast: _Forecast, speeds: ReplicaSpeeds, loads: ReplicaLoads, now: float) -> Floats:
        """By replica, from token to token, for prompts that it computes in between: as many as answers end there, and
        those that it was sent lately for answers that others generate."""
        self._computed *= np.exp(min(0.0, self._faded_at - now) / LATELY_S)
        self._faded_at = now
        busy = loads.gateways * self._computed / LATELY_S * speeds.token_s / self._shapes.stages
        busy = np.minimum(busy, BUSIEST)
        return np.asarray(self._shapes.is_mixed * forecast.beside_s + forecast.decode_s * busy / (1.0 - busy))

    def _cost(self, first_s: Floats, pace_s: Floats, tokens: float, saved_s: Floats | None) -> Floats:
        """By route, of a first token after so long and of each one more: in seconds, or by the plan's deadlines in
        requests that miss them. `saved_s`: what its cache counts for."""
        seconds = first_s + tokens * pace_s
        gain = 0.0 if saved_s is None else saved_s
        deadlines = self._plan.deadlines
        if not (deadlines.ttft_s or deadlines.tpot_s or deadlines.e2e_s):
            return np.asarray(seconds - gain)
        missed = LEAST_S * seconds  # of routes that are likely to miss nothing, the soonest
        for limit_s, expected_s in ((deadlines.ttft_s, first_s), (deadlines.tpot_s, pace_s)):
            if limit_s:
                missed += SOON * _raise(expected_s / max(limit_s, LEAST_S))
        if deadlines.e2e_s:
            too_long = self.tail.share_beyond((deadlines.e2e_s - first_s) / np.maximum(pace_s, LEAST_S))
            too_long += np.maximum(first_s / max(deadlines.e2e_s, LEAST_S) - 1.0, 0.0)
            missed += too_long - too_long.min()  # what no route has time for says nothing of them
        if saved_s is None:
            return missed
        part = 1.0 - saved_s / np.maximum(seconds, LEAST_S)
        little = np.where(part > 0.0, missed * _raise(part), LEAST_S * part)
        return np.asarray(little + np.maximum(missed - BEARABLE, 0.0))

    def on_end(self, request: RequestId, output_tokens: int | None) -> None:
        """Learn from its answer."""
        self._asked.pop(request, None)
        prompt = self.prompts.pop(request, None)
        if prompt is not None and output_tokens:
            self.lengths.record(prompt, output_tokens)
            self.tail.record(output_tokens)

    def take_over(self, earlier: RoutingPolicy) -> None:
        """Keep what is known of lengths."""
        if isinstance(earlier, PredictedTimes):
            self.lengths, self.tail, self.prompts = earlier.lengths, earlier.tail, earlier.prompts
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

    def _read_speeds(self, loads: ReplicaLoads) -> ReplicaSpeeds | None:
        """None while no profile is known."""
        if loads.profiles != self._known:
            self._known = list(loads.profiles)
            self._speeds = tabulate_speeds(self._known)
        return self._speeds

    def _read_routes(self, table: RouteTable) -> _Routes:
        if self._routes is None or self._routes.table is not table:
            self._routes = _add_lone_replicas(table, self._shapes.stages == 1.0)
        return self._routes

    def _forecast(
        self, request: RequestFacts, uncached: Floats, speeds: ReplicaSpeeds, loads: ReplicaLoads
    ) -> _Forecast:
        backlog = self._read_backlog(request, speeds, loads)
        batch, held, stages, step_tokens = backlog.batch, backlog.held, self._shapes.stages, self._shapes.step_tokens
        chunk = np.maximum(step_tokens - batch / stages, LEAST_CHUNK * step_tokens)
        steps_of = speeds.at_context(held)
        chunk_s = steps_of.mixed_step_s(chunk, batch)
        # Beside answers a prompt begins when a step ends, and each of its own steps takes their time as well.
        # A pipeline's stages work on a prompt's parts one behind the other, so that it takes less than their sum.
        parts = np.maximum(np.ceil(uncached / chunk), 1.0)
        in_line = (stages + parts - 1.0) / (stages * parts)
        steps = np.ceil(backlog.tokens / stages / chunk + parts * in_line)
        beside_s = 0.5 * steps_of.decode_step_s(batch) + steps * steps_of.mixed_step_s(0.0, batch)
        own_s = uncached * speeds.token_s * in_line + speeds.prompt_s
        queue_s = backlog.tokens * speeds.token_s / stages
        prompt_s = speeds.token_s * self.mean_prompt + speeds.prompt_s
        forecast = _Forecast(
            prefill_s=MARGINAL * queue_s + np.where(backlog.running > 0.0, beside_s, speeds.begin_s) + own_s,
            own_s=own_s,
            room_s=self._room_s(max(1, request.prompt_tokens), backlog, speeds, steps_of, loads),
            decode_s=steps_of.decode_step_s(MARGINAL * batch),
            beside_s=batch / self.mean_output * prompt_s / stages,
            prompt_s=prompt_s,
            chunk_s=chunk_s,
            chunked_token_s=chunk_s / chunk,
            tokens=backlog.tokens,
        )
        return _add_turns(forecast, backlog, speeds, steps_of, loads) if loads.beside_requests.any() else forecast

    def _read_backlog(self, request: RequestFacts, speeds: ReplicaSpeeds, loads: ReplicaLoads) -> _Backlog:
        tokens, requests = self._queues.guess_queues(loads)
        for claim in request.answers:  # a round trip ago: nothing of it is a guess
            at = loads.index.get(claim.replica)
            if at is not None and (told := loads.told[at]) is not None:
                tokens[at] = told.prefill_tokens
        running = np.where(self._shapes.decodes, requests, loads.decodes)
        # Who takes long is met more often: what a batch holds is more than half of a mean answer for each request.
        held = self.mean_prompt + self.mean_output
        most = np.minimum(np.maximum(speeds.kv_tokens / held, 1.0), MOST_REQUESTS)
        # Of steps that compute prompts as well, so many tokens are left for answers, in the long run.
        fed = np.maximum(self._shapes.stages * self._shapes.step_tokens * self.mean_output / held, 1.0)
        most = np.where(self._shapes.is_mixed, np.minimum(most, fed), most)
        return _Backlog(tokens, running, np.minimum(running + 1.0, most), most, held)

    def _room_s(
        self, prompt: int, backlog: _Backlog, speeds: ReplicaSpeeds, steps_of: StepSeconds, loads: ReplicaLoads
    ) -> Floats:
        """By replica, until requests have ended whose KV is in the way: those beyond its batch; those whose room this
        one needs, as it is long or they are longer than most by what the replica reports; at least one where that is
        full. Their steps are as many as their answers need, or as the budget of a step allows for prompts and answers
        together."""
        is_full = loads.kv_free_tokens < prompt
        taken = np.maximum(backlog.running * backlog.held, speeds.kv_tokens - loads.kv_free_tokens)
        lacking = (taken + prompt + self.mean_output - speeds.kv_tokens) / backlog.held
        ahead = np.maximum(np.maximum(backlog.running + 1.0 - backlog.most, lacking), is_full.astype(np.float64))
        answers = np.maximum(ahead, 0.0) * self.mean_output
        step_tokens = self._shapes.stages * self._shapes.step_tokens
        steps = np.maximum(answers / backlog.batch, (answers + backlog.tokens) / step_tokens)
        queue_s = backlog.tokens * speeds.token_s / self._shapes.stages
        mixed_s = queue_s + steps * steps_of.mixed_step_s(0.0, backlog.batch)
        waits = np.maximum(steps * steps_of.decode_step_s(backlog.batch), mixed_s)
        return np.where(speeds.kv_tokens < prompt, NEVER_S, np.where(ahead > 0.0, MARGINAL * waits, 0.0))

    def _shared_prefill_s(
        self, uncached: Floats, routes: _Routes, speeds: ReplicaSpeeds, forecast: _Forecast
    ) -> Floats:
        """By route, until the second of its replicas would have computed the rest of this prompt. Infinite where the
        prompt is not to be shared: see `_Routes.can_share`; where the steps of the decode replica would be too long;
        and where the first token is early enough without."""
        prefill, decode = routes.prefill, routes.decode
        can = routes.can_share & self._is_bearable(decode, forecast)
        if self._plan.deadlines.ttft_s > 0.0:
            can &= (forecast.prefill_s > SHARED_FROM * self._plan.deadlines.ttft_s).take(prefill)
        if not can.any():
            return np.full(len(can), np.inf)
        chunked_token_s = forecast.chunked_token_s.take(decode)
        token_s, own_tokens = speeds.token_s.take(prefill), uncached.take(prefill)
        # Both take as long for their parts of a prompt, which is this per token of all of it.
        part_s = 1.0 / (1.0 / token_s + 1.0 / chunked_token_s)
        first_part_s = forecast.prefill_s.take(prefill) - own_tokens * (token_s - part_s)
        seconds = np.maximum(first_part_s, forecast.tokens.take(decode) * chunked_token_s) + own_tokens * part_s
        return np.where(can, seconds, np.inf)

    def _may_lend(self, routes: _Routes, first_s: Floats, forecast: _Forecast, is_shared: Bools) -> Bools:
        """By lent route, whether its replica may do what is not of its phase: on the plan's routes prompts wait for
        long, and the answers beside it can bear that."""
        by_plan = int(first_s[: routes.lent_from].argmin()) if routes.lent_from else 0
        prefill, lent = routes.prefill[by_plan], routes.decode[routes.lent_from :]
        long_s = max(SHARED_FROM * self._plan.deadlines.ttft_s, LENT_FROM * forecast.prompt_s[prefill])
        if first_s[by_plan] - forecast.own_s[prefill] > long_s and not is_shared[by_plan]:
            return self._is_bearable(lent, forecast)
        return np.zeros(len(lent), dtype=bool)

    def _is_bearable(self, decode: Indices, forecast: _Forecast) -> Bools:
        """By route, whether a prompt in chunks keeps the plan's deadline from token to token, if it has one."""
        limit_s = self._plan.deadlines.tpot_s or np.inf
        return np.asarray((forecast.chunk_s <= limit_s).take(decode))


def _add_turns(
    forecast: _Forecast, backlog: _Backlog, speeds: ReplicaSpeeds, steps_of: StepSeconds, loads: ReplicaLoads
) -> _Forecast:
    """With the turns of other services' engines on the same GPUs: one of their steps before the first token and in
    between, and their prompts. Where no answer of this service is decoded yet, its steps hold up theirs as well. Their
    models are taken for as fast as this one."""
    others = loads.beside_requests
    turn_s = np.where(others > 0.0, steps_of.decode_step_s(others), 0.0)
    added_s = np.where((others > 0.0) & (backlog.running <= 0.0), steps_of.decode_step_s(backlog.batch), 0.0)
    return forecast._replace(
        prefill_s=forecast.prefill_s + MARGINAL * loads.beside_tokens * speeds.token_s + turn_s,
        decode_s=forecast.decode_s + turn_s + added_s,
    )


def _raise(part: Floats) -> Floats:
    """To the sixth power, many times as fast as by `**`."""
    square = part * part
    return square * square * square


def _add_lone_replicas(table: RouteTable, is_one_box: Bools) -> _Routes:
    """The table's routes, and those of single replicas that it does not have."""
    paired = table.prefill.replica[table.prefill.replica == table.decode.replica]
    alone = np.setdiff1d(table.usable, paired)
    prefill, decode = (np.concatenate((side.replica, alone)) for side in (table.prefill, table.decode))
    return _Routes(
        table=table,
        prefill=prefill,
        decode=decode,
        is_whole=prefill == decode,
        can_share=(prefill != decode) & is_one_box[prefill] & is_one_box[decode],
        lent_from=len(table.split_share),
    )


def _pick(cost: Floats, usd: Floats, loads: ReplicaLoads, rng: np.random.Generator) -> int:
    """The best route, or of those that are hardly worse a cheaper one. Where there are several gateways, one of these
    by lot: all of them hear the same reports, and would go to the same replica until the next."""
    best = int(cost.argmin())
    if loads.gateways <= 1.0 and not usd.any():
        return best
    near = np.flatnonzero(cost <= cost[best] + AS_GOOD * abs(cost[best]))
    cheapest = near[usd[near] == usd[near].min()]
    if loads.gateways > 1.0:
        return int(rng.choice(cheapest))
    return best if best in cheapest else int(cheapest[cost[cheapest].argmin()])
