"""What the connector's instances tell each other: the scheduler's every worker's with each step,
and back. Plain values: workers may be other processes or boxes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from ..protocol import AbortTransfer, CloseLink, Inlet, Outlet, SetLinkPaths

PARAMS_KEY = "p2pserve"


class OpenTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """The ends of one request's transfer; each worker opens its own rank's. `tokens`: positions
    sent or expected. `awaits_first_token`: whether the token after them is told."""

    transfer: bytes
    tokens: int
    awaits_first_token: bool = False
    send: tuple[Outlet, ...] = ()
    receive: tuple[Inlet, ...] = ()


class YieldBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Give up the transfer of a prompt that blocks KV here, unless the receiver has a place."""

    transfer: bytes


Order = OpenTransfer | YieldBlocks | AbortTransfer | SetLinkPaths | CloseLink


def transfer_params(opening: OpenTransfer) -> dict[str, Any]:
    """`kv_transfer_params` of a request: how it finds its transfer. vLLM's request ids differ between engines."""
    return {PARAMS_KEY: opening}


@dataclass(frozen=True, slots=True)
class SendWork:
    """This step computes a prompt up to `last`, in these blocks; `final`: no more is sent."""

    request: str
    transfer: bytes
    block_ids: list[int]
    computed: int
    last: int
    final: bool


@dataclass(frozen=True, slots=True)
class LoadWork:
    """Positions `[first, last)` that are to be loaded into a request's blocks. `all_or_nothing`: a sliding window has
    left positions before `first` behind, so if the load fails, the prompt must be computed from its beginning."""

    request: str
    transfer: bytes
    block_ids: list[int]
    first: int
    last: int
    all_or_nothing: bool


@dataclass
class StepWork(KVConnectorMetadata):
    """What the scheduler's instance tells the workers' with a step. `orders` are carried out first, as they come;
    `withdrawn` names transfers whose prompt has lost its blocks, which this step may overwrite; `cancelled`, those that
    nobody wants any more, after the loads that this step begins; `present`, those of which all is here already.
    `computing`: a model runs in this step, and what is written beside it holds it up. `report_progress`: say how far
    all loads are (`LoadProgress`), so that the answers of all workers are of the same step.
    """

    orders: list[Order] = field(default_factory=list)
    sends: list[SendWork] = field(default_factory=list)
    loads: list[LoadWork] = field(default_factory=list)
    withdrawn: list[bytes] = field(default_factory=list)
    cancelled: list[bytes] = field(default_factory=list)
    present: list[bytes] = field(default_factory=list)
    computing: bool = False
    report_progress: bool = False


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """How much of a load is there: `part` of everything, and `tokens` complete from the first."""

    part: float
    tokens: int


@dataclass
class LoadProgress(KVConnectorWorkerMetadata):
    """The loads a worker still waits for, by request; of several workers, the slowest counts."""

    arrived: dict[str, LoadedPart] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.arrived)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LoadProgress:
        """With what another worker says."""
        assert isinstance(other, LoadProgress)
        merged = dict(self.arrived)
        for request, one in other.arrived.items():
            two = merged.get(request, one)
            merged[request] = LoadedPart(min(one.part, two.part), min(one.tokens, two.tokens))
        return LoadProgress(merged)
