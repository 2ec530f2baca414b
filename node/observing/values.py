"""What is shown of a network, as frozen values: the admin API, the dashboard, the command line and exporters are made
of them.

Times are unix seconds, durations seconds, sizes bytes, rates Gb/s of 10**9 bits, money US dollars. Boxes are named by
their peer ids. What a box says of itself travels in these types, so everything in them has a bound.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from ...coordinator.bounds import Count, Counter, Figure, ModelName, Name, Seconds, Text
from ..engine.protocol import MAX_LAYER_TIMES, LayerTimes

MAX_FACTS: Final = 32  # of one event
MAX_SPANS: Final = 4096  # of one request
MAX_BOXES: Final = 64  # that had a part in one request
MAX_EVENTS: Final = 512  # that one answer has
MAX_REASONS: Final = 256
MAX_TARGETS: Final = 64  # of KV, that one box tells of

UnixTime = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
Word = Annotated[str, msgspec.Meta(max_length=128)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Offset = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
Number = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Fact = bool | Whole | Number | Text
Facts = Annotated[dict[Word, Fact], msgspec.Meta(max_length=MAX_FACTS)]
Reasons = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_REASONS)]


class EventKind(StrEnum):
    """All that an event log has. What stands before the point is a group, and may be asked for as one."""

    MEMBER_JOINED = "member.joined"
    MEMBER_LEFT = "member.left"
    MEMBER_DEAD = "member.dead"
    MEMBER_HUNG = "member.hung"
    MEMBER_STALLED = "member.stalled"
    MEMBER_ANSWERS = "member.answers"
    MEMBER_DRAINING = "member.draining"
    MEMBER_RESUMED = "member.resumed"
    COORDINATOR_ELECTED = "coordinator.elected"
    COORDINATOR_LOST = "coordinator.lost"
    PLAN_MADE = "plan.made"
    PLAN_FAILED = "plan.failed"
    PLAN_FOLLOWED = "plan.followed"
    PLAN_OBJECTED = "plan.objected"
    PHASE_CHANGED = "phase.changed"
    ENGINE_STATE = "engine.state"
    ENGINE_SPEED = "engine.speed"
    LINK_MEASURED = "link.measured"
    LINK_FAILED = "link.failed"
    PATHS_CHANGED = "link.paths"
    REQUEST_BEGUN = "request.begun"
    REQUEST_ROUTED = "request.routed"
    REQUEST_OPENED = "request.opened"
    REQUEST_FIRST_TOKEN = "request.first_token"
    REQUEST_RECOVERED = "request.recovered"
    REQUEST_ENDED = "request.ended"
    PREFILL_BEGUN = "prefill.begun"
    PREFILL_DONE = "prefill.done"
    PREFILL_ENDED = "prefill.ended"
    DECODE_BEGUN = "decode.begun"
    DECODE_FIRST_TOKEN = "decode.first_token"
    DECODE_ENDED = "decode.ended"
    TRANSFER_ENDED = "transfer.ended"
    TRANSFER_FAILED = "transfer.failed"


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at a node, as its log has it.

    `number` counts the events of this log; `time` is by the node's own clock. `kind` is an `EventKind`, or what a newer
    release calls one. `request` is the network's id of the request that it is about, the same on all boxes; `peer`
    the other box, or the client, where there is one. `facts` are plain values by name, in the units of this module;
    `layers`: of a KV transfer that ends with this event.
    """

    number: Counter
    time: UnixTime
    node: Name
    kind: Word
    request: Word = ""
    peer: Word = ""
    facts: Facts = {}
    layers: Annotated[tuple[LayerTimes, ...], msgspec.Meta(max_length=MAX_LAYER_TIMES)] = ()


class KvTally(msgspec.Struct, frozen=True, kw_only=True):
    """KV transfers to one box since this node was started: how many, their bytes on the wire, and those that went
    through a relay."""

    transfers: Count = 0
    failed: Count = 0
    wire_bytes: Count = 0
    relayed_bytes: Count = 0


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine of a node has done since the node was started; `refused_s`: requests per second that its gateway
    refuses lately, for want of a place."""

    prefilled_tokens: Count = 0
    decoded_tokens: Count = 0
    cached_tokens: Count = 0  # of prompts: in the prefix cache, and not computed
    kv_sent: Annotated[dict[Name, KvTally], msgspec.Meta(max_length=MAX_TARGETS)] = {}
    refused_s: Figure = 0.0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What something cost: the boxes' time at their prices by the hour, and traffic at prices by the GB."""

    box_usd: Figure = 0.0
    traffic_usd: Figure = 0.0
    by_node: Annotated[dict[Name, Figure], msgspec.Meta(max_length=MAX_BOXES)] = {}

    @property
    def usd(self) -> float:
        """All of it."""
        return self.box_usd + self.traffic_usd


class BoxClock(msgspec.Struct, frozen=True, kw_only=True):
    """What a box's clock shows beyond the gateway's, at most `error_s` off: half a round trip; None: not known."""

    node: Name
    offset_s: Offset = 0.0
    error_s: Seconds | None = None


class TraceSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a request at one box, by the gateway's clock.

    `name`: queue, route, open, prefill, kv (a transfer), kv.layers (a part of one), decode, replay or answer; one that
    has not ended yet has `end` None.
    """

    name: Word
    node: Name
    begin: UnixTime
    end: UnixTime | None = None
    attempt: Count = 0
    facts: Facts = {}


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One request across boxes, put together from their event logs. `missing`: boxes that had a part in it, and whose
    events are not here, with the reason."""

    id: Word
    gateway: Word = ""
    client: Word = ""
    outcome: Word = ""  # stop, length, error or cancelled; empty while it runs
    error: Text = ""
    spans: Annotated[tuple[TraceSpan, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()
    boxes: Annotated[tuple[BoxClock, ...], msgspec.Meta(max_length=MAX_BOXES)] = ()
    recovered: Reasons = ()
    missing: Annotated[dict[Name, Text], msgspec.Meta(max_length=MAX_BOXES)] = {}
    facts: Facts = {}  # prompt_tokens, completion_tokens, ttft_s, tpot_s, e2e_s, raw_bytes, wire_bytes, ...
    cost: Cost = Cost()


class NodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A box as the answering node knows it. Figures that nobody has told are None."""

    id: Name
    name: Word = ""  # short and unique, for people
    role: Word
    state: Word  # alive, draining, suspect, dead or left
    address: Annotated[str, msgspec.Meta(max_length=300)]
    is_coordinator: bool = False
    site: Word = ""
    phase: Word = ""  # prefill, decode or mixed, by the plan; empty: it has no part in it
    pinned: Word = ""  # the phase that its owner wants
    hardware: Text = ""
    gpus: Count = 0
    gpu: Word = ""
    emulated: bool = False
    service: Annotated[str, msgspec.Meta(max_length=512)] = ""
    engine: Text = ""
    engine_state: Word = ""
    engine_detail: Text = ""
    layers: tuple[Count, Count] | None = None  # of the model, that it holds by the plan
    running: Count | None = None
    waiting: Count | None = None
    kv_usage: Share | None = None  # of the KV memory, which models of one box share
    kv_quota: Share = 1.0  # that it may have when others need it, too
    kv_tokens: Count | None = None
    requests_s: Figure | None = None  # that clients ask of it
    refused_s: Figure = 0.0  # requests per second that its gateway has no place for
    prefilled_tokens: Count = 0  # since it was started
    decoded_tokens: Count = 0
    cached_tokens: Count = 0  # of prompts, that were in its prefix cache
    usd_per_hour: Figure = 0.0
    up_usd_per_gb: Figure = 0.0
    down_usd_per_gb: Figure = 0.0
    rtt_s: Seconds | None = None  # from the answering node
    gone_s: Seconds | None = None  # for which it has been dead or away
    tokens_s: Figure | None = None  # of answers, that it writes now
    ends_in_s: Seconds | None = None  # it will be there at least so long, if its owner has said


class LinkSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A directed link as the box at its beginning tells of it, or as its site does.

    `gbps` is its capacity over `streams`, at least that much where `is_floor`; `source`: measured, inferred (from
    links between the same sites) or prior (nothing is known). `age_s`: since its rate was last measured."""

    source: Name
    target: Name
    gbps: Figure
    one_stream_gbps: Figure
    streams: Count
    rtt_s: Seconds
    loss: Share = 0.0
    jitter_s: Seconds = 0.0
    usd_per_gb: Figure = 0.0
    reachable: bool = True
    is_floor: bool = False
    known: Word = "measured"
    confidence: Share = 0.0
    reason: Text = ""
    age_s: Figure | None = None
    kv_transfers: Count = 0  # from the one box to the other since the former was started, by whatever path
    kv_failed: Count = 0
    kv_bytes: Count = 0  # on the wire
    relayed_bytes: Count = 0


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A request as its gateway's log has it. What has not happened yet is None."""

    id: Word
    gateway: Name
    client: Word = ""
    client_request: Word = ""  # what the client calls it
    service: ModelName | None = None
    state: Word = "queued"  # queued, routed, answering, or its outcome: stop, length, error, cancelled
    arrived: UnixTime
    prefill: Word = ""
    decode: Word = ""
    prompt_tokens: Count = 0
    completion_tokens: Count | None = None
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    e2e_s: Seconds | None = None
    attempts: Count = 0
    recovered: Reasons = ()
    raw_bytes: Count = 0
    wire_bytes: Count = 0
    error: Text = ""
    cost: Cost = Cost()
