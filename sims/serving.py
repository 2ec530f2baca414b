"""Replicas at work, and the requests that they have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Final, NamedTuple, final

from ..coordinator.costs.step_times import StepTimes
from ..coordinator.plan import Phase, Replica
from ..coordinator.planning.model.cluster import Cluster
from ..coordinator.prefixes.held import HeldPrefixes
from ..coordinator.prefixes.index import PrefixIndex
from ..coordinator.requests.machine import RequestMachine
from ..coordinator.requests.values import OpenDecode, Tokens
from ..coordinator.routing.balancer import ChunkedPrefillState, ChunkLine, PrefillLine
from ..coordinator.routing.balancer_fit import expected_chunk_line, expected_prefill_line
from ..coordinator.routing.interface import Route
from ..coordinator.routing.pools import PoolClaims, PoolState, is_borrowed
from ..coordinator.routing.prefill_slots import PrefillSlots
from .engine.engine import Engine
from .engine.sequence import Sequence
from .engine.values import SimEngineError
from .events import Scheduled
from .kv_transfers import KVTransfer
from .results.outcomes import ReplicaOutcome
from .scenario import SimSettings

NEVER: Final = -1.0

AdvanceHost = Callable[["ReplicaHost", float], list[Scheduled]]
"""Called when a replica's engine is due; returns the events that follow."""


class SlotWaiter(NamedTuple):
    """A request that waits until a prefill replica takes it, and the route that it then has."""

    request: SimRequest
    route: Route


@final
class GatewayPlaces:
    """Where gateways are, and what messages to and from replicas take. `missing`: boxes that get no requests now."""

    def __init__(self, cluster: Cluster, settings: SimSettings) -> None:
        self.missing: frozenset[str] = frozenset()
        self._cluster = cluster
        self._boxes = tuple(cluster.index(box) for box in settings.gateways)
        self._message_s = settings.message_s

    def gateway_of(self, row: int) -> int | None:
        """Of a trace's request, the box whose gateway takes it: each in turn; None where they have no places."""
        here = [box for box in self._boxes if self._cluster.boxes[box].id not in self.missing]
        return here[row % len(here)] if here else None

    def message_s(self, gateway: int | None, replica: ReplicaHost) -> float:
        """Seconds that a message takes between a gateway and the replica's first box."""
        return self.round_trip_s(gateway, replica.replica) / 2

    def round_trip_s(self, gateway: int | None, replica: Replica) -> float:
        """Likewise, until a question of the gateway is answered."""
        if gateway is None:
            return 0.0
        head = self._cluster.index(replica.head)
        return 2 * self._message_s + (0.0 if gateway == head else float(self._cluster.rtt_s[gateway, head]))

    def rtt_s(self, one: ReplicaHost, other: ReplicaHost) -> float:
        """The round trip between two replicas' first boxes, where messages take time."""
        if not self._boxes:
            return 0.0
        return float(
            self._cluster.rtt_s[self._cluster.index(one.replica.head), self._cluster.index(other.replica.head)]
        )


@final
class ReplicaHost:
    """A replica of the plan with its engine and its load. As an event, it is the engine's alarm."""

    __slots__ = (
        "_advance", "_held", "_lines", "alarm", "claims", "decodes", "engine", "is_loading", "is_lost", "is_noticed",
        "number", "outstanding", "prefill_tokens", "replica", "service", "slots", "stranded", "unanswered", "waiting"
    )  # fmt: skip

    def __init__(self, number: int, service: int, replica: Replica, engine: Engine, advance: AdvanceHost) -> None:
        self.number = number
        self.service = service
        self.replica = replica
        self.engine = engine
        self.alarm = NEVER  # when the queue advances it next
        self.outstanding = 0  # requests
        self.decodes = 0  # those of them whose answers are generated here
        self.prefill_tokens = 0  # of their prompts, still to be computed here
        self.is_loading = False  # its weights; it gets no requests
        self.is_lost = False  # one of its boxes has failed
        self.is_noticed = False  # gateways know of that
        self.stranded: list[Assignment] = []  # held when it failed, or routed here before anybody noticed
        # A request has its slot until its prefill begins, then that prefill has it, by the key of its sequence.
        self.slots: PrefillSlots[SimRequest | int] = PrefillSlots(lease_s=inf)
        self.waiting: deque[SlotWaiter] = deque()  # for a slot, in order
        self.claims: PoolClaims[SimRequest] = PoolClaims()  # of requests that are about to come
        self.unanswered: list[Callable[[float], None]] = []  # who asked for a place when it had failed, until noticed
        self._advance = advance
        self._held = HeldPrefixes(life=number, block_tokens=max(1, engine.prefixes.piece_tokens))
        self._lines: tuple[StepTimes, int, PrefillLine, ChunkLine] | None = None

    def happen(self, now: float) -> Iterable[Scheduled]:
        """Advance the engine, unless its next event has moved since this alarm was set."""
        if self.engine.wake_at != now:
            return ()
        self.alarm = NEVER
        return self._advance(self, now)

    @property
    def prefill_line(self) -> PrefillLine:
        """What it expects of a prefill here."""
        return self._expected_lines()[2]

    @property
    def chunk_line(self) -> ChunkLine:
        """What it expects of a step here with a chunk of a prompt."""
        return self._expected_lines()[3]

    @property
    def pool_state(self) -> PoolState:
        """Its pool, by the requests that are here, and how it stands."""
        home, figures = self.replica.phase, (self.outstanding, self.prefill_tokens, self.decodes)
        return PoolState(
            pool=Phase.MIXED if is_borrowed(home, *figures) else home,
            requests=self.outstanding,
            prefill_tokens=self.prefill_tokens,
            kv_free_tokens=self.engine.free_tokens,
            decodes=self.decodes,
        )

    @property
    def chunked_prefill_state(self) -> ChunkedPrefillState:
        """How it stands here now."""
        engine = self.engine
        return ChunkedPrefillState(
            decoding=engine.decoding,
            context_tokens=engine.context_tokens,
            free_tokens=engine.free_tokens,
            block_tokens=engine.settings.block_tokens,
            step_tokens=engine.settings.max_batched_tokens,
        )

    def tell_prefixes(self, index: PrefixIndex) -> None:
        """Tell what is in its prefix cache, as far as that has not been told there."""
        held, lost = self.engine.prefixes.pieces.take_changes()
        if held or lost:
            self._held.change(held, lost)
        news = self._held.news_since(index.heard(self.replica.id))
        if news is not None:
            index.take(self.replica.id, news)

    def _expected_lines(self) -> tuple[StepTimes, int, PrefillLine, ChunkLine]:
        times, tokens, known = self.engine.times, self.engine.settings.max_batched_tokens, self._lines
        if known is None or known[0] is not times or known[1] != tokens:
            known = (times, tokens, expected_prefill_line(times), expected_chunk_line(times, tokens))
            self._lines = known
        return known

    def check_integrity(self) -> None:
        """Nothing is left when all requests have ended. Raises SimEngineError."""
        self.engine.check_integrity()
        if self.slots.used or self.waiting:
            raise SimEngineError(f"{self.replica.id} is left with {self.slots!r}")
        if self.outstanding or self.prefill_tokens:
            raise SimEngineError(
                f"{self.replica.id} is left with {self.outstanding} requests, {self.prefill_tokens} tokens to prefill"
            )

    def outcome(self, service: str) -> ReplicaOutcome:
        """Its figures for the result."""
        return ReplicaOutcome(
            id=self.replica.id,
            service=service,
            phase=self.replica.phase,
            boxes=self.replica.peers,
            times=self.engine.times.source,
            counts=self.engine.counts,
            blocks=self.engine.blocks,
        )


@final
class SimRequest:
    """A request while it runs: the `Answer` of its machine, with counts for tokens."""

    __slots__ = (
        "assignment", "count", "finish", "gateway", "is_over", "left", "machine", "prefix", "prompt", "row", "service",
        "slot_at"
    )  # fmt: skip

    def __init__(self, service: int, row: int, prompt: int, output: int, prefix: tuple[int, ...] = ()) -> None:
        self.prefix = prefix
        self.service = service
        self.row = row
        self.prompt = prompt
        self.count = 0
        self.left = output
        self.finish: str | None = None
        self.is_over = False
        self.gateway: int | None = None  # the box to whose gateway it came; None: one that is as near as can be
        self.machine: RequestMachine  # from its arrival to its end
        self.assignment: Assignment | None = None  # of the latest attempt
        self.slot_at: ReplicaHost | None = None  # has a slot for it, until its prefill begins there

    def take(self, tokens: Tokens, finish: str | None) -> None:
        """Count more tokens. Nobody looks at them."""
        taken = min(len(tokens), self.left)
        self.count += taken
        self.left -= taken
        self.finish = finish if self.left else "length"

    def end(self) -> None:
        """Nothing follows: let go of what refers back to it, or only the garbage collector could free it."""
        self.is_over = True
        self.assignment = self.slot_at = None
        del self.machine


class Split(NamedTuple):
    """The prefill half of a request on two replicas, until its KV has been transferred."""

    prefill: ReplicaHost
    prefill_seq: Sequence
    transfer: KVTransfer


@final
class Assignment:
    """One attempt at a request: its decode and perhaps prefill replica. `prefill_tokens`: of the
    prompt, computed at decode."""

    __slots__ = (
        "decode", "decode_seq", "first_at", "first_heard_at", "is_submitted", "opening", "prefill",
        "prefill_number", "prefill_tokens", "request", "split", "start",
    )  # fmt: skip

    def __init__(
        self, request: SimRequest, opening: OpenDecode, decode: ReplicaHost, prefill: ReplicaHost | None, key: int
    ) -> None:
        known, left = request.prompt + request.count, request.left
        self.request = request
        self.opening = opening
        self.decode = decode
        self.prefill = prefill  # of the plan by which it was routed
        self.prefill_number = decode.number
        self.split: Split | None = None
        self.start = request.count  # tokens of the answer before this attempt
        self.first_at: float | None = None  # when the first one after them is decoded; it may lie ahead by a step
        self.first_heard_at = 0.0  # when the gateway has the prefill replica's token
        self.is_submitted = False
        if opening.first_token:  # comes from the prefill replica, before the KV is here
            self.decode_seq = Sequence(key, known + 1, left - 1, fresh=False, external=known, prefix=request.prefix)
        else:
            # A decode replica computes the last token's KV itself.
            external = min(opening.split, known - 1)
            self.decode_seq = Sequence(key, known, left, fresh=not self.start, external=external, prefix=request.prefix)
        self.prefill_tokens = self.decode_seq.known - self.decode_seq.external

    @property
    def awaits_first_token(self) -> bool:
        """Whether the prefill replica has yet to generate it."""
        return self.opening.first_token and self.request.count == self.start

    @property
    def tokens(self) -> range:
        """Positions in the answer of the tokens that this attempt has generated."""
        request = self.request
        end = request.count + request.left - self.decode_seq.left
        return range(self.start, end - self.awaits_first_token)

    def submit(self, now: float) -> None:
        """Give it to the decode replica, and count it in the load there."""
        self.is_submitted = True
        self.decode.outstanding += 1
        self.decode.decodes += 1
        if not self.decode_seq.external:
            self.prefill_tokens -= self.decode.engine.prefixes.count_cached(self.decode_seq)
        self.decode.prefill_tokens += self.prefill_tokens
        self.decode.engine.submit(self.decode_seq, now)

    def prefill_at_decode(self, now: float) -> None:
        """No KV will come: the decode replica computes all of the prompt."""
        sequence = self.decode_seq
        if self.awaits_first_token:  # nor will that come
            sequence.known -= 1
            sequence.left += 1
            sequence.fresh = not self.start
        if not self.is_submitted:
            sequence.external, self.prefill_tokens = 0, sequence.known
            self.submit(now)
            return
        self.decode.prefill_tokens += sequence.known - self.prefill_tokens
        self.prefill_tokens = sequence.known
        self.decode.engine.expect_no_kv(sequence, now)

    def end_prefill(self) -> None:
        """The decode replica has computed all of the prompt that it has to."""
        self.decode.prefill_tokens -= self.prefill_tokens
        self.prefill_tokens = 0

    def remove_load(self) -> None:
        """Take it out of the decode replica's load."""
        self.end_prefill()
        self.decode.outstanding -= 1
        self.decode.decodes -= 1
