"""What nodes and clients say to each other on the control stream, above membership.

A request's life: client -> gateway `generate`; gateway -> decode node `decode.open` (answered with a ticket);
gateway -> prefill node `prefill.open` with that ticket; prefill node -> gateway `tokens`, the first one, where it reads
all of the prompt, and gateway -> decode node `decode.first` with it; prefill node -> gateway `prefill.ended`; decode
node -> gateway `tokens`; gateway -> client `answer`, the last one with the figures of the request.

KV needs more: sending node -> receiving node `link.open`, once for all transfers between two of their workers; sending
node -> a third `relay.open` where the way through it is better; any -> any `probe.open` before a burst on their link.

The head of a replica that spans boxes speaks for its stages: they start engine processes with `stage.open`, and hear
by `stage.loaded` that the model is ready; for a request's KV it asks them with `stage.inlets` and `stage.outlets` for
their ends, is told by `stage.transfer` how their part ended, and calls it off with `stage.abort`. A coordinator
publishes each plan's manifest; a plan that is not in it is fetched with `plan.piece`, in pieces.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ..coordinator import Demand, LatencyProfile, Phase, Plan, Stage
from ..coordinator.bounds import MAX_STAGES, Count, Counter, Degree, Figure, Layer, ModelName, Name, Seconds, Text
from ..coordinator.costs.box_worth import BoxWorth
from ..coordinator.plan import MorePlans
from ..coordinator.regrouping.divisions import BoxDivision
from ..coordinator.regrouping.parts import PartBeside
from ..coordinator.services.catalogue import ServiceCatalogue
from ..coordinator.services.hosting import HostingOffer, NodesOfBox
from ..kvtransport.probing.burst_ticket import BurstTicket
from ..kvtransport.probing.figures import BoxFigures, LinkFigures
from ..kvtransport.probing.probe import BurstRequest
from ..kvtransport.wire.permits import Permit
from ..kvtransport.wire.tickets import LINK_ID_BYTES, TRANSFER_ID_BYTES, LinkTicket, TransferTicket
from .box.batch_limits import BatchLimits
from .box.hardware import Hardware
from .engine.protocol import MAX_LAYER_TIMES, EngineStats, Inlet, KvSlice, LayerTimes, Outlet, PipeEnd, WorkerRank
from .engine.sampling import AllowedTokens, BadWords, Biases, Constraint, Reasoning, Sampling, StopTokens, TopTokens
from .models import ModelInfo
from .observing.values import Served
from .web.keys import MAX_KEYS

ADVERT: Final = "advert"
PLAN: Final = "plan"
LINKS: Final = "links"

MAX_PROMPT_BYTES: Final = 3 << 20  # below the control stream's frame bound
MAX_PROMPT_TOKENS: Final = 1 << 20
MAX_CONTINUED_TOKENS: Final = 1 << 17  # of 5 bytes each: beside a prompt of that size, below that bound too
MAX_TURNS: Final = 4096  # of a conversation
MAX_PEERS: Final = 4096  # that one node says something of
MAX_SLICES: Final = 4096
MAX_LABELS: Final = 256  # stop texts, paths that a request's KV took, times that it was recovered

Label = Annotated[str, msgspec.Meta(max_length=128)]
Content = Annotated[str, msgspec.Meta(max_length=4 << 20)]  # what is too long is refused by its bytes, in a clear line
# The same goes for a client's other parameters: any number that fits here is answered with its parameter's name.
AnyInteger = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
AnyNumber = Annotated[float, msgspec.Meta(extra={"checked_by": "node.requests.acceptance"})]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
LinkId = Annotated[bytes, msgspec.Meta(min_length=LINK_ID_BYTES, max_length=LINK_ID_BYTES)]
TransferId = Annotated[bytes, msgspec.Meta(min_length=TRANSFER_ID_BYTES, max_length=TRANSFER_ID_BYTES)]
MAX_DEADLINE_S: Final = 86_400.0
Deadline = Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_S)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
NewTokens = Annotated[tuple[Token, ...], msgspec.Meta(max_length=MAX_CONTINUED_TOKENS)]
Prompt = Annotated[tuple[Token, ...], msgspec.Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
Stages = Annotated[tuple[Stage, ...], msgspec.Meta(max_length=MAX_STAGES)]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages here. Unknown fields are ignored: a newer release may have more to say."""


class ExactMessage(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what a client asks for. Unknown fields are refused (in `Sampling`, tickets and permits too), and the
    client told which: who asks for stricter sampling must not get an answer that was made without it."""


class EngineAdvert(Message, frozen=True, kw_only=True):
    """The engine of a node. `state`: waiting (for layers), loading, starting, ready, restarting or failed, after so
    many `failures` in a row. `stages`: of its replica, when several; `beside`: of a second engine."""

    state: Label
    detail: Text = ""
    engine: Label = ""
    device: Label = ""
    dtype: Label = ""
    tflops: Figure = 0.0
    memory_gbps: Figure = 0.0
    kv_tokens: Count = 0
    max_requests: Count = 0  # that it runs at once; 0: not told
    max_model_len: Count = 0
    starts: Count = 0
    pid: Count = 0  # of the engine process, on its own box
    stages: Stages = ()
    failures: Count = 0
    beside: PartBeside = PartBeside()


class Advert(Message, frozen=True, kw_only=True):
    """What a node tells everyone about itself. Signed and versioned by the membership layer.

    `fits`: layers for which its `tp` GPUs have memory; `profile` is fitted to its engine's steps, `demand` is of its
    clients. Its owner says `phase` and `usd_per_hour`. It stays at least `ends_in_s`; `hung`: its engine is.
    `hosting`: it hosts what it is given. `beside`: the nodes of its box, itself among them, each started with a model,
    whose engines share a process and its GPU."""

    hardware: Hardware
    draining: bool
    model: ModelInfo | None = None
    engine: EngineAdvert | None = None
    stats: EngineStats | None = None
    fits: Layer = 0
    tp: Degree = 1
    profile: LatencyProfile | None = None
    demand: Demand | None = None
    phase: Phase | None = None
    usd_per_hour: Figure = 0.0
    served: Served | None = None
    ends_in_s: Seconds | None = None
    hung: bool = False
    division: BoxDivision | None = None
    hosting: HostingOffer | None = None
    beside: NodesOfBox = ()


class LinkTable(Message, frozen=True, kw_only=True):
    """What a node tells everyone about its links: its site, its own caps and prices, and links from it by peer. Of
    several peers at one site that its links to are alike, it tells of one: `links_to` fills in the others."""

    site: Label = ""
    box: BoxFigures = BoxFigures()
    links: Annotated[dict[Name, LinkFigures], msgspec.Meta(max_length=MAX_PEERS)] = {}


class RankSlice(Message, frozen=True, kw_only=True):
    """A rectangle of a prompt's KV, and the two workers between which it passes."""

    source_peer: Name
    source: WorkerRank
    target_peer: Name
    target: WorkerRank
    slice: KvSlice


class TicketedSlice(Message, frozen=True, kw_only=True):
    """A rank slice for which the target's box has issued a ticket."""

    rank_slice: RankSlice
    ticket: TransferTicket


RankSlices = Annotated[tuple[RankSlice, ...], msgspec.Meta(max_length=MAX_SLICES)]
TicketedSlices = Annotated[tuple[TicketedSlice, ...], msgspec.Meta(max_length=MAX_SLICES)]


class DecodeOpen(Message, frozen=True, kw_only=True):
    """Serve a request to its end. `receive_tokens` > 0 asks for tickets under which the replica of the stages `prefill`
    may push that prefix's KV. `awaits_first_token`: that replica computes it too, and `decode.first` tells it."""

    request: RequestId
    service: ModelName
    prompt: Prompt
    sampling: Sampling
    deadline_s: Deadline
    receive_tokens: Count
    codec: Name
    prefill: Stages = ()
    awaits_first_token: bool = False
    cache_salt: Label = ""


class DecodeOpened(Message, frozen=True, kw_only=True):
    """The request is queued at its engine; `slices` are for the prefill node. All are of one transfer."""

    slices: TicketedSlices = ()


class PrefillOpen(Message, frozen=True, kw_only=True):
    """Compute the KV of (part of) a prompt and push it to `slices`; with `sampling`, all of it and a first token."""

    request: RequestId
    service: ModelName
    prompt: Prompt
    deadline_s: Deadline
    slices: Annotated[TicketedSlices, msgspec.Meta(min_length=1)]
    sampling: Sampling | None = None
    cache_salt: Label = ""


class Opened(Message, frozen=True, kw_only=True):
    """Accepted."""


class StageOpen(Message, frozen=True, kw_only=True):
    """Start the engine process of a stage; answered when it can be dialled, before loading. `limits` are the head's."""

    service: ModelName
    stages: Stages
    stage: Annotated[int, msgspec.Meta(ge=1, lt=MAX_STAGES)]
    pipes: Annotated[tuple[PipeEnd, ...], msgspec.Meta(max_length=2 * MAX_STAGES)]
    limits: BatchLimits


class StageLoaded(Message, frozen=True, kw_only=True):
    """The replica is ready: all its stages have loaded their layers."""


class StageInlets(Message, frozen=True, kw_only=True):
    """Make ready to receive these slices of a transfer."""

    transfer: TransferId
    codec: Name
    deadline_s: Deadline
    slices: RankSlices


class StageInletsOpened(Message, frozen=True, kw_only=True):
    """The receiving ends, in the order of the slices."""

    inlets: Annotated[tuple[Inlet, ...], msgspec.Meta(max_length=MAX_SLICES)]


class StageOutlets(Message, frozen=True, kw_only=True):
    """Find paths for these slices of the KV of so many tokens."""

    tokens: Count
    slices: TicketedSlices


class StageOutletsOpened(Message, frozen=True, kw_only=True):
    """The sending ends, in the order of the slices."""

    outlets: Annotated[tuple[Outlet, ...], msgspec.Meta(max_length=MAX_SLICES)]


class StageAbort(Message, frozen=True, kw_only=True):
    """Send and expect nothing more of a transfer."""

    transfer: TransferId
    reason: Text


class LinkOpen(Message, frozen=True, kw_only=True):
    """Ask a node for the link over which the worker `source` of this node's engine may push KV into the worker `target`
    of the one of `service` there."""

    service: ModelName
    source: WorkerRank = WorkerRank()
    target: WorkerRank = WorkerRank()


class LinkOpened(Message, frozen=True, kw_only=True):
    """The link, good for the present life of that engine."""

    link: LinkTicket


class RelayOpen(Message, frozen=True, kw_only=True):
    """Ask a node to forward this node's KV to `target`."""

    target: Name


class RelayOpened(Message, frozen=True, kw_only=True):
    """Forwarding is permitted, within the permit's bounds."""

    permit: Permit


class ProbeOpen(Message, frozen=True, kw_only=True):
    """Ask a node to receive a burst, so that the link to it can be measured."""

    burst: BurstRequest


class ProbeOpened(Message, frozen=True, kw_only=True):
    """Either a ticket, or why not now and when to ask again."""

    ticket: BurstTicket | None = None
    refused: Text = ""
    retry_s: Seconds = 0.0


class TransferFigures(Message, frozen=True, kw_only=True):
    """How a prefill's KV transfer went, as its sender saw it. `paths`: KV bytes by path; `mode`: whether layers left
    one by one; `usd`: at advertised prices."""

    raw_bytes: Count
    wire_bytes: Count
    frames: Count
    span_s: Seconds
    visible_s: Seconds
    hidden_fraction: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    mode: Label = "layerwise"
    paths: Annotated[dict[Label, Count], msgspec.Meta(max_length=MAX_LABELS)] = {}
    resent_bytes: Count = 0
    usd: Figure = 0.0
    codec_s: Seconds = 0.0
    blocked_s: Figure = 0.0
    layers: Annotated[tuple[LayerTimes, ...], msgspec.Meta(max_length=MAX_LAYER_TIMES)] = ()


class StageTransfer(Message, frozen=True, kw_only=True):
    """How one part of a transfer ended, as the stage saw it that sent it over `link`."""

    transfer: TransferId
    link: LinkId
    failed: Text = ""
    figures: TransferFigures


class PrefillEnded(Message, frozen=True, kw_only=True):
    """The KV has been delivered, or (`failed`) will not be."""

    request: RequestId
    failed: Text = ""
    figures: TransferFigures | None = None
    busy_s: Seconds = 0.0


class Tokens(Message, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of a request. `failed`: this node cannot go on with it, another one may; `refused`: none can.
    `leaves`: it does until another one does, and sends it the KV. `busy_s`: its share of this node's time, billed."""

    request: RequestId
    tokens: NewTokens = ()
    finish: Label | None = None
    cached_tokens: Count = 0
    failed: Text = ""
    refused: Text = ""
    busy_s: Seconds = 0.0
    logprobs: TopTokens | None = None
    prompt_logprobs: TopTokens | None = None
    stop_reason: Token | None = None
    leaves: bool = False


class ReplicaHung(Message, frozen=True, kw_only=True):
    """This replica, or (to its head) this stage of it, does not get on with its work, or (`hung` False) does again."""

    hung: bool


class FirstToken(Message, frozen=True, kw_only=True):
    """The client has been shown this token, which the prefill node has written: go on from there."""

    request: RequestId
    token: Token


class StopRequest(Message, frozen=True, kw_only=True):
    """Forget a request."""

    request: RequestId


class StopTransfer(Message, frozen=True, kw_only=True):
    """No KV will come for this request any more."""

    request: RequestId
    reason: Text


class ChatMessage(ExactMessage, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: Label
    content: Content


class Generate(ExactMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A client's request: one of `prompt`, `messages`, `prompt_token_ids`. `deadline_s` bounds the whole answer; lower
    `priority` goes first. `detokenize` False: it is wanted as tokens alone, which are chosen as in `Sampling`."""

    request: RequestId
    prompt: Content | None = None
    messages: Annotated[tuple[ChatMessage, ...], msgspec.Meta(max_length=MAX_TURNS)] | None = None
    prompt_token_ids: Annotated[tuple[Token, ...], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)] | None = None
    max_tokens: AnyInteger | None = None
    temperature: AnyNumber = 0.0
    top_p: AnyNumber = 1.0
    top_k: AnyInteger = 0
    seed: AnyInteger | None = None
    stop: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_LABELS)] = ()
    deadline_s: Deadline = 300.0
    service: ModelName | None = None
    detokenize: bool = True
    ignore_eos: bool = False
    min_p: AnyNumber = 0.0
    min_tokens: AnyInteger = 0
    presence_penalty: AnyNumber = 0.0
    frequency_penalty: AnyNumber = 0.0
    repetition_penalty: AnyNumber = 1.0
    stop_token_ids: StopTokens = ()
    logprobs: AnyInteger | None = None
    prompt_logprobs: AnyInteger | None = None
    logit_bias: Biases = {}
    allowed_token_ids: AllowedTokens = ()
    bad_words_token_ids: BadWords = ()
    constraint: Constraint | None = None
    reasoning: Reasoning | None = None
    priority: AnyInteger = 0
    cache_salt: Text = ""


class ContinueGenerate(ExactMessage, frozen=True, kw_only=True):
    """A client's request whose gateway was lost when these tokens of the answer had come: go on from there."""

    generate: Generate
    tokens: Annotated[tuple[Token, ...], msgspec.Meta(min_length=1, max_length=MAX_CONTINUED_TOKENS)]


class Generating(Message, frozen=True, kw_only=True):
    """Accepted: chunks follow, one every `news_s` at least, which may be empty; None: earlier releases did not."""

    service: ModelName
    prompt_tokens: Count
    news_s: Seconds | None = None


class RequestFigures(Message, frozen=True, kw_only=True):
    """What a request was, once it is over. Times are the gateway's, in seconds from its arrival there. `id`: what all
    boxes call it; `usd`: what it cost, traffic included."""

    prompt_tokens: Count
    completion_tokens: Count
    ttft_s: Seconds
    tpot_s: Seconds
    e2e_s: Seconds
    prefill_node: Name | None
    decode_node: Name
    codec: Name
    attempts: Count
    recovered: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_LABELS)]
    cached_tokens: Count
    transfer: TransferFigures | None
    id: Label = ""
    usd: Figure = 0.0


class AnswerUpdate(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What is new of an answer, if anything. `finish` ends it: stop, length or error, which `error` explains. Logprobs
    have a row for each of `tokens`, and once for each of the prompt's but the first; with those, `cached_tokens`."""

    request: RequestId
    text: Content = ""
    tokens: NewTokens = ()
    finish: Label | None = None
    error: Text = ""
    figures: RequestFigures | None = None
    logprobs: TopTokens | None = None
    prompt_logprobs: TopTokens | None = None
    stop_reason: Token | None = None
    cached_tokens: Count = 0


class StatusQuery(Message, frozen=True, kw_only=True):
    """Ask a node what it knows."""


class NodeStatus(Message, frozen=True, kw_only=True):
    """One member as the answering node sees it. `gone_s`: for so long it has been dead, or away; `tokens_s`: that its
    engine writes per second now, where that is known. `closed`: nobody can dial it."""

    peer: Name
    role: Label
    state: Label
    address: Annotated[str, msgspec.Meta(max_length=300)]
    rtt_s: Seconds | None
    advert: Advert | None
    links: LinkTable | None = None
    gone_s: Seconds | None = None
    tokens_s: Figure | None = None
    closed: bool = False


class Status(Message, frozen=True, kw_only=True):
    """The network as one node sees it. `key_usd`: costs there by API key, for admins; `other_plans`: of others;
    `catalogue`: what the network is to serve, where an admin has said so."""

    answered_by: Name
    coordinator: Name | None
    epoch: Counter
    nodes: Annotated[tuple[NodeStatus, ...], msgspec.Meta(max_length=2 * MAX_PEERS)]
    plan: Plan | None
    other_plans: MorePlans = ()
    worth: Annotated[dict[Name, BoxWorth], msgspec.Meta(max_length=MAX_PEERS)] = {}
    key_usd: Annotated[dict[Label, Figure], msgspec.Meta(max_length=2 * MAX_KEYS)] = {}
    catalogue: ServiceCatalogue | None = None
