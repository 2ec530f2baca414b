"""The protocol between a node's agent and its API process: frames as in `engine.protocol`, over a Unix socket pair.

    API process     ApiSubmit, ApiCancel, ApiQuestion   -> agent
    agent           ServiceState, ApiAnswers, ApiRefused, ApiReply -> API process

Sockets travel beside it on a second, packet-preserving pair, named by the packet's bytes: `LISTENER`, which the agent
has opened, and `STREAM`, one connection of somebody whom the agent vouches for.

This module imports neither torch nor vLLM: the agent loads it.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ....coordinator.bounds import MAX_SERVICES, Count, Figure, ModelName
from ...web.keys import MAX_KEYS
from ..protocol import EngineMessage, NewTokens, Sampling, Spawn, StartFailed

LISTENER: Final = b"listener"
STREAM: Final = b"stream"
CARRY: Final = b"carry"
"""A question: the agent answers with the name under which it has passed a socket, for one request that it carries to a
box of another service."""
WITH_API: Final = "with-api"
"""Has a fork server import what API processes need, too."""
MAX_NAMES: Final = 64
DIGEST_BYTES: Final = 32

Name = Annotated[str, msgspec.Meta(max_length=256)]
RequestId = Annotated[str, msgspec.Meta(max_length=256)]
Line = Annotated[str, msgspec.Meta(max_length=4096)]
Status = Annotated[int, msgspec.Meta(ge=400, le=599)]


class KeyDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key that lets in: whose it is, and SHA-256 of it."""

    name: Name
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an API process is started with. `options` are of vLLM's own command line."""

    model: str  # a local folder with configuration and tokenizer
    names: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=MAX_NAMES)]  # that requests may give
    options: tuple[str, ...] = ()
    keys: Annotated[tuple[KeyDigest, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()  # none: whoever reaches it
    is_open: bool = False  # without keys: under any name, and not this machine's alone
    max_body_bytes: int = 16 << 20
    deadline_s: float = 3600.0  # of a request that says nothing else, and the most that one may say
    admin_token: str | None = None  # that admin API and dashboard ask for; None: they answer to this box alone
    log_file: str | None = None


class SpawnApi(EngineMessage, frozen=True, kw_only=True, tag="spawn-api"):
    """To the fork server, with two descriptors: message socket and descriptor socket of the new process."""

    engine: int
    config: ApiConfig


class ApiReady(EngineMessage, frozen=True, kw_only=True, tag="api-ready"):
    """It serves."""

    pid: int
    version: str


class ApiSubmit(EngineMessage, frozen=True, kw_only=True, tag="api-submit"):
    """Run a request: prompt and answer are tokens. `exchange`: the HTTP request that it is part of; `key`: whose.
    `priority`: vLLM's."""

    request: RequestId
    exchange: RequestId
    key: Name
    prompt: tuple[int, ...]
    sampling: Sampling
    deadline_s: float
    priority: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    cache_salt: str = ""


class ApiCancel(EngineMessage, frozen=True, kw_only=True, tag="api-cancel"):
    """Nobody waits for these any more. Each is answered with what it was, as far as it came."""

    requests: tuple[RequestId, ...]


class ApiQuestion(EngineMessage, frozen=True, kw_only=True, tag="api-question"):
    """Ask the agent; answered by the `ApiReply` of the same number."""

    number: int
    what: Name
    body: bytes = b""


class OtherService(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service of the network that this box does not have, by what requests may call it. `is_placed`: a box has it,
    or did when it was planned for."""

    names: Annotated[tuple[ModelName, ...], msgspec.Meta(min_length=1, max_length=3)]
    max_model_len: Count = 0  # 0: not known
    is_placed: bool = True


class ServiceState(EngineMessage, frozen=True, kw_only=True, tag="api-network"):
    """What the network can do now: whether somebody serves this model (else `reason`), how long requests may be, and
    which `others` there are. `entry`: what the catalogue calls this box's own; `removed`: it has it no more."""

    serving: bool
    reason: Line = ""
    max_model_len: Count = 0  # 0: not known
    kv_usage: Figure = 0.0  # of this box's engine
    service: Annotated[str, msgspec.Meta(max_length=512)] = ""  # its own
    entry: Annotated[str, msgspec.Meta(max_length=512)] = ""
    removed: bool = False
    others: Annotated[tuple[OtherService, ...], msgspec.Meta(max_length=3 * MAX_SERVICES)] = ()

    @property
    def own_names(self) -> tuple[str, ...]:
        """What requests may call this box's own service, beside the names that its owner gives it."""
        return tuple(filter(None, (self.service, self.entry)))


class ApiOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request was: where it ran, the KV bytes that it moved, and what it cost."""

    request: RequestId
    prefill_node: Name = ""
    decode_node: Name = ""
    kv_bytes: Count = 0
    usd: Figure = 0.0
    attempts: Count = 0


class ApiAnswers(EngineMessage, frozen=True, kw_only=True, tag="api-answers"):
    """What has come since the last. What a request was comes with its last tokens."""

    outputs: tuple[NewTokens, ...] = ()
    served: tuple[ApiOutcome, ...] = ()


class ApiRefused(EngineMessage, frozen=True, kw_only=True, tag="api-refused"):
    """A request has no answer, or no more of it, for this reason; `status` is what HTTP calls it."""

    request: RequestId
    status: Status
    reason: Line
    retry_after_s: float | None = None


class ApiReply(EngineMessage, frozen=True, kw_only=True, tag="api-reply"):
    """The answer to a question; with `error`, a line, there is none."""

    number: int
    body: bytes = b""
    error: Line = ""


FromApi = ApiReady | StartFailed | ApiSubmit | ApiCancel | ApiQuestion
ToApi = ServiceState | ApiAnswers | ApiRefused | ApiReply

from_api = msgspec.msgpack.Decoder(FromApi)
to_api = msgspec.msgpack.Decoder(ToApi)
spawn = msgspec.msgpack.Decoder(Spawn | SpawnApi)
