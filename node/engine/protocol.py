"""The protocol between a node's agent and its engine processes.

Length-prefixed MessagePack over a Unix socket pair: `u32 little-endian length | message`. Both ends are
on one box and belong to one user, yet every message is typed, bounded and validated: an engine process
that goes wrong must not take its agent with it. Sockets accepted by the agent travel beside it on a
second, packet-preserving pair, because a file descriptor needs a message of its own.

This module imports neither torch nor vLLM: the agent loads it.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Final, Literal

import msgspec

from ...coordinator.bounds import Count, Figure, Layer
from ...coordinator.costs.model_shape import KvCacheDtype
from ...coordinator.profile import StepSample
from ...kvtransport.wire.dial_path import DialPath
from ...kvtransport.wire.tickets import LinkTicket, TransferTicket
from .emulation import Emulation as Emulation
from .emulation import Throttling as Throttling
from .sampling import Sampling as Sampling
from .sampling import TopTokens as TopTokens
from .settings import PIPELINE_DEFAULTS, TRANSFER_DEFAULTS, PipelineSettings, Sharing, TransferSettings

MAX_MESSAGE: Final = 64 << 20
HOST_SHARE: Final = 64  # of a box's memory, for the KV that an engine sends, and as much for what it receives
WantedSendMode = Literal["auto", "layerwise", "serialised"]
Head = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=64)]
MAX_PATHS: Final = 16  # of one link
MAX_LAYER_TIMES: Final = 64  # of one transfer: where there are more layers, several are told of together
_LENGTH: Final = struct.Struct("<I")


class EngineProtocolError(Exception):
    """The other end of an engine's socket sent something that is not a message."""


class EngineMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages of this protocol."""


class PipeEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """This end of an encrypted message pipe between two stages. The lower dials the higher: without
    `dial` the socket comes over the descriptor socket.

    `control` joins the head and every other stage; `data` each stage and the next."""

    stage: Count  # at the other end
    kind: Literal["control", "data"]
    ticket: LinkTicket
    dial: DialPath | None = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine process is started with.

    `kv_cache_mib` and `max_batched_tokens` trade memory and step time for throughput: the first bounds how
    many tokens are held at once, the second how long one chunk of a prefill may delay the decodes beside it.

    `async_scheduling`: a step is scheduled while the device computes the one before it, which then need not wait for
    the scheduler. On one box only: an engine of several stages has other batches to compute meanwhile.

    `tp` workers share each layer of this box. A replica that spans boxes has one process for each of its stages:
    `partition` names the layers of all of them, `stage` which one this is, `pipes` its ways to the others.
    """

    model: str  # a local folder in Hugging Face format
    dtype: str = "auto"  # auto: the model's own on a GPU, float32 on a CPU
    max_model_len: int | None = None  # None: the model's own
    shorten_to_fit: bool = False  # a request may get less than that, if that is what fits into the KV cache
    kv_cache_mib: int | None = None  # None: what vLLM finds free on a GPU, 256 MiB on a CPU
    kv_cache_dtype: KvCacheDtype = "auto"  # what it keeps KV as; on the wire it is in the model's dtype, then coded
    block_size: int | None = None  # positions in a block of the paged cache; None: vLLM's choice for the device
    max_batched_tokens: int = 512
    max_requests: int = 64
    async_scheduling: bool | None = None  # None: on a GPU
    threads: int = 1
    codec: str = "kv4"  # that transfers are expected to use: a GPU compiles it while it starts
    transfer_buffer_mib: int | None = None  # host memory for KV on its way, in each direction; None: by the box's
    log_file: str | None = None
    tp: Annotated[int, msgspec.Meta(ge=1)] = 1
    partition: tuple[Annotated[int, msgspec.Meta(ge=1)], ...] = ()
    stage: Count = 0
    pipes: tuple[PipeEnd, ...] = ()
    transfers: TransferSettings = TRANSFER_DEFAULTS
    pipeline: PipelineSettings = PIPELINE_DEFAULTS
    backend: str = "vllm"  # the engine: a name of `backends`
    options: dict[str, Any] = {}  # for that engine alone, which knows their type
    sharing: Sharing | None = None  # None: it has its process for itself


def transfer_buffer_bytes(config: EngineConfig, memory_bytes: int) -> int:
    """Host memory for KV on its way, in each direction, of a box that has so much in all. The least keeps a link of
    10 Gb/s and 50 ms busy; more than the most would not be sent any sooner."""
    if config.transfer_buffer_mib is not None:
        return config.transfer_buffer_mib << 20
    return max(64 << 20, min(memory_bytes // HOST_SHARE, 1 << 30))


class WorkerRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker of an engine: pipeline stage and place in the tensor-parallel group of that stage."""

    stage: Rank = 0
    tp: Rank = 0


class KvSlice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rectangle of KV: layers `[first_layer, last_layer)`, heads `[first_head, last_head)`."""

    first_layer: Layer
    last_layer: Layer
    first_head: Head
    last_head: Head

    def __post_init__(self) -> None:
        if self.first_layer >= self.last_layer or self.first_head >= self.last_head:
            raise ValueError(
                f"a slice of layers [{self.first_layer}, {self.last_layer}) and heads "
                f"[{self.first_head}, {self.last_head}) is empty"
            )

    @property
    def layers(self) -> range:
        """The layers, as numbered in the model."""
        return range(self.first_layer, self.last_layer)

    @property
    def heads(self) -> range:
        """The KV heads, as numbered in the model."""
        return range(self.first_head, self.last_head)


class Outlet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one worker of this replica sends to one worker of another, the link that it takes and the ways to dial it.

    The paths of a link are those named last. `gbps` and `rtt_s` are what the node predicts of them together. `pacing`
    auto lets the engine decide, by what it has measured, whether layers leave one by one; `layerwise` and `serialised`
    decide it.
    """

    rank: WorkerRank = WorkerRank()
    slice: KvSlice
    ticket: TransferTicket
    link: LinkTicket
    paths: Annotated[tuple[DialPath, ...], msgspec.Meta(max_length=MAX_PATHS)]
    gbps: Figure
    rtt_s: Figure
    pacing: WantedSendMode = "auto"


class Inlet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one worker of this replica receives from one worker of another, and on which link."""

    rank: WorkerRank = WorkerRank()
    slice: KvSlice
    ticket: TransferTicket
    link: LinkTicket


class Submit(EngineMessage, frozen=True, kw_only=True, tag="submit"):
    """Run a request. With `send`, its prompt's KV is pushed over these outlets.

    With `receive`, the first `receive_tokens` positions of KV are expected from another engine at these inlets, and
    are computed here as far as they do not arrive. All tickets of a request name the same transfer; each, its link.
    `awaits_first_token`: that engine computes the first token too. Once all KV is here, the request waits for
    `SetFirstToken`, or for `AbortTransfer`, after which it computes its own. Prefix caches are shared by requests of
    one `cache_salt`.
    """

    request: str
    prompt: tuple[int, ...]
    sampling: Sampling
    deadline_s: float
    send: tuple[Outlet, ...] = ()
    receive: tuple[Inlet, ...] = ()
    receive_tokens: int = 0
    awaits_first_token: bool = False
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if self.sampling.answered >= max(1, len(self.prompt)):
            raise ValueError(f"{self.sampling.answered} tokens of an answer in a prompt of {len(self.prompt)}")
        if self.receive and self.sampling.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: whoever computes all of the prompt knows them, and nobody else")
        if self.send and self.receive:
            raise ValueError("a request either sends the KV of its prompt or receives it")
        ends: tuple[Outlet | Inlet, ...] = (*self.send, *self.receive)
        if len({end.ticket.transfer for end in ends}) > 1:
            raise ValueError("the tickets of a request name different transfers")
        for end in ends:
            if end.ticket.link != end.link.link:
                raise ValueError("a ticket is for another link than the one beside it")
        if self.awaits_first_token and (not self.receive or self.receive_tokens != len(self.prompt)):
            raise ValueError("who writes the first token elsewhere has read all of the prompt")


class SetFirstToken(EngineMessage, frozen=True, kw_only=True, tag="first-token"):
    """What another engine has produced first for a request that waits for it: go on from there. The answer begins with
    this token all the same. It comes too late for a request that is being computed, because its KV has not come as a
    whole; that one begins with a token of its own."""

    request: str
    token: Count


class Cancel(EngineMessage, frozen=True, kw_only=True, tag="cancel"):
    """Forget a request, whatever its state."""

    request: str


class AbortTransfer(EngineMessage, frozen=True, kw_only=True, tag="abort-transfer"):
    """No more KV will come for this transfer: compute what is missing."""

    transfer: bytes
    reason: str


class SetLinkPaths(EngineMessage, frozen=True, kw_only=True, tag="set-paths"):
    """Another way for a link, for what is under way on it too."""

    link: bytes
    paths: tuple[DialPath, ...]


class CloseLink(EngineMessage, frozen=True, kw_only=True, tag="close-link"):
    """A link will not be used again: its peer is gone."""

    link: bytes
    reason: str


class LimitSteps(EngineMessage, frozen=True, kw_only=True, tag="limit-steps"):
    """From now on a step computes so many tokens at most, but never more than the engine was started with; 0: that."""

    tokens: Count


class Stop(EngineMessage, frozen=True, kw_only=True, tag="stop"):
    """Leave at once."""


class AskBeat(EngineMessage, frozen=True, kw_only=True, tag="ask-beat"):
    """Give a sign of life, whatever you compute."""


class EngineReady(EngineMessage, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded. Figures are the engine's own; `tflops` and `memory_gbps` were measured just now. A stage
    that is not the head says it before it loads, without figures."""

    pid: int
    engine: str  # name and version, as shown to people
    device: str
    dtype: str
    layers: int
    max_model_len: int
    kv_heads: int = 0
    head_dim: int = 0
    vocabulary: int = 0
    kv_tokens: int = 0
    eos_tokens: tuple[int, ...] = ()
    load_s: float = 0.0
    tflops: float = 0.0
    memory_gbps: float = 0.0
    async_scheduling: bool = False
    block_tokens: int = 1  # KV memory is given out in blocks of so many tokens
    step_tokens: int = 0  # that a step computes at most, as it has started


class Starting(EngineMessage, frozen=True, kw_only=True, tag="starting"):
    """What the engine is doing before it can serve. Of `weights`: the file that it reads, and of how many. Which of its
    worker processes says so, and of how many that do."""

    part: Literal["weights", "warm-up"]
    file: Count = 0
    files: Count = 0
    worker: Count = 0
    workers: Count = 1


class StartFailed(EngineMessage, frozen=True, kw_only=True, tag="start-failed"):
    """The model could not be loaded. `reason` is one line for the user."""

    reason: str


class EngineFailed(EngineMessage, frozen=True, kw_only=True, tag="failed"):
    """The process ends, because a replica that spans boxes is broken. `reason` is one line for the user."""

    reason: str


class NewTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one step added to a request. `finish`: stop, length, deadline, error or refused; None while it runs.
    `logprobs`: a row for each of `tokens`, but for a first one that was told. `prompt_logprobs`: for each of the
    prompt's but the first, told once. `stop_reason`: the stop token of the request's own that ended it."""

    request: str
    tokens: tuple[int, ...]
    finish: str | None = None
    cached_tokens: int = 0  # prompt positions whose KV was not computed here
    reason: str = ""  # why it was refused
    logprobs: TopTokens | None = None
    prompt_logprobs: TopTokens | None = None
    stop_reason: int | None = None


class EngineStats(msgspec.Struct, frozen=True):
    """The scheduler after a step. `pending_prefill_tokens`: to be prefilled here; `decodes`: requests decoded here.
    `kv_usage` and `kv_quota`: the parts of the KV memory that it has in use and may have when others need it, too."""

    running: Count
    waiting: Count
    kv_usage: Figure
    kv_free_tokens: Count
    pending_prefill_tokens: Count = 0
    decodes: Count = 0
    kv_quota: Figure = 1.0


class Iterations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's steps since last told: count, sums, and a few as they were.

    `decode_tokens` and `decode_context` (positions held) count each request of each step;
    `preemptions`: restarts for lack of blocks."""

    steps: Count
    seconds: Figure
    longest_s: Figure
    prefill_tokens: Count
    decode_tokens: Count
    decode_context: Count
    preemptions: Count
    samples: tuple[StepSample, ...]


class Step(EngineMessage, frozen=True, kw_only=True, tag="step"):
    """One message for all requests of a step. `iterations` comes every 100 ms, and at rest."""

    outputs: tuple[NewTokens, ...]
    stats: EngineStats
    iterations: Iterations | None = None


class HeldBlocks(EngineMessage, frozen=True, kw_only=True, tag="held-blocks"):
    """Names of prefixes (`coordinator.prefixes`) that are in the prefix cache, or are not any more, since last told."""

    held: bytes = b""
    lost: bytes = b""


class Beat(EngineMessage, frozen=True, kw_only=True, tag="beat"):
    """The engine process lives."""


class LayerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When the KV of layers `[first_layer, last_layer)` was on its way, in seconds from the transfer's first frame:
    from the first frame of theirs that was given to the link to the last that was acknowledged."""

    first_layer: Layer
    last_layer: Layer
    begin_s: Figure
    end_s: Figure
    wire_bytes: Count = 0


class TransferReport(EngineMessage, frozen=True, kw_only=True, tag="transfer"):
    """How a transfer ended, from the sending engine.

    `mode` is layerwise or serialised, `paths` the KV bytes that went each way, `blocked_s` how long it waited for the
    receiver's credit. `raw_bytes` is what the KV occupies in the sender's cache, `wire_bytes` what was sent for it.
    `span_s` runs from the first frame to the acknowledgement, `visible_s` is the part of it after prefill had ended.
    `codec_s` is what encoding took, by the clock of its thread; `layers` are at most MAX_LAYER_TIMES.
    """

    transfer: bytes
    link: bytes
    mode: str
    delivered: bool
    reason: str
    frames: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    span_s: float = 0.0
    visible_s: float = 0.0
    hidden_fraction: float = 1.0
    paths: dict[str, int] = {}
    resent_bytes: int = 0
    blocked_s: float = 0.0
    codec_s: float = 0.0
    layers: tuple[LayerTimes, ...] = ()


class PathReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One path of a link, over all its connections since the link began."""

    label: str
    connections: Count
    bytes_acknowledged: Count
    bytes_in_flight: Count
    rate_bytes_s: Figure
    rtt_s: Figure | None


class LinkReport(EngineMessage, frozen=True, kw_only=True, tag="link"):
    """A link with open transfers. `waiting_bytes`: unconfirmed; `blocked`: waits for credit."""

    link: bytes
    paths: tuple[PathReport, ...]
    transfers: Count
    waiting_bytes: Count
    blocked: bool


ToEngine = Submit | SetFirstToken | Cancel | AbortTransfer | SetLinkPaths | CloseLink | LimitSteps | AskBeat | Stop
FromEngine = (
    EngineReady | Starting | StartFailed | EngineFailed | Step | HeldBlocks | TransferReport | LinkReport | Beat
)

to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
_encoder = msgspec.msgpack.Encoder()


class Spawn(EngineMessage, frozen=True, kw_only=True, tag="spawn"):
    """To the fork server, with two descriptors: message socket and descriptor socket of the new engine."""

    engine: int
    config: EngineConfig


class Preloaded(EngineMessage, frozen=True, kw_only=True, tag="preloaded"):
    """From the fork server: its engine is imported (`version`), so that processes start quickly from now on."""

    pid: int
    version: str
    seconds: float


class PreloadFailed(EngineMessage, frozen=True, kw_only=True, tag="preload-failed"):
    """From the fork server: its engine cannot be imported here."""

    reason: str


class EngineExited(EngineMessage, frozen=True, kw_only=True, tag="exited"):
    """From the fork server: an engine process is gone. `status` is as of `os.waitstatus_to_exitcode`. `culprit`: in
    which engine a process that several shared has ended, where that is another one."""

    engine: int
    status: int
    culprit: str = ""


ForkServerEvent = Preloaded | PreloadFailed | EngineExited

fork_server_event = msgspec.msgpack.Decoder(ForkServerEvent)


def pack(message: EngineMessage) -> bytes:
    """One message without a frame, for packet sockets."""
    return _encoder.encode(message)


def frame(message: EngineMessage) -> bytes:
    """One message with its length in front, for stream sockets."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE:
        raise EngineProtocolError(f"a message of {len(body)} bytes exceeds the bound of {MAX_MESSAGE}")
    return _LENGTH.pack(len(body)) + body


class Unframer:
    """Bytes in, bodies of messages out; keeps what is incomplete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies completed by `data`. Raises EngineProtocolError on an absurd length."""
        self._buffer += data
        bodies = []
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MAX_MESSAGE:
                raise EngineProtocolError(f"a message of {size} bytes was announced; the bound is {MAX_MESSAGE}")
            if len(self._buffer) < _LENGTH.size + size:
                break
            bodies.append(bytes(self._buffer[_LENGTH.size : _LENGTH.size + size]))
            del self._buffer[: _LENGTH.size + size]
        return bodies
