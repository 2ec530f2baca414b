"""The sending ends of KV transfers: agrees on links and permits with other nodes, readies what
`PathSelector` chooses, and tells the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

import msgspec
import trio

from ...bootstrap import NetworkError, PeerId, Unreachable
from ...bootstrap.methods import Messenger
from ...kernels.codecs import codec_named
from ...kernels.format import WireDtype, payload_bytes
from ...kvtransport.errors import TicketError
from ...kvtransport.routing.paths import KVPath, PathChoice
from ...kvtransport.wire.dial_path import DialPath
from ...kvtransport.wire.permits import Permit
from ...kvtransport.wire.tickets import LinkTicket
from .. import messages
from ..engine import protocol
from ..methods import LINK_OPEN, RELAY_OPEN
from ..models import ModelInfo
from ..observing.event_log import Record, ignore
from ..observing.values import EventKind
from ..settings import WAN, NodeTuning
from .kv_links import Ends, OutgoingLinks
from .path_selection import DIRECT, NewPaths, PathSelector
from .reach import PathTo

_log = logging.getLogger(__name__)

_DTYPES = {"float32": WireDtype.FP32, "float16": WireDtype.FP16, "bfloat16": WireDtype.BF16}


@final
class KvOutlets:
    """One per node with an engine, for KV of `model`; tasks run in `nursery`. `path_to`: how a member
    is dialled; `starts`: count of engine starts; `set_paths` tells the engine."""

    def __init__(
        self,
        model: ModelInfo,
        selector: PathSelector,
        *,
        messenger: Messenger,
        path_to: PathTo,
        starts: Callable[[PeerId], int],
        nursery: trio.Nursery,
        tuning: NodeTuning = WAN,
    ) -> None:
        self.own = messenger.peer_id
        self.set_paths: Callable[[bytes, tuple[DialPath, ...]], None] = lambda link, paths: None
        self.record: Record = ignore
        """Tells the node's log."""
        self._model = model
        self._selector = selector
        self._messenger = messenger
        self._path_to = path_to
        self._starts = starts
        self._nursery = nursery
        self._tuning = tuning
        self._dtype = WireDtype.BF16
        self._links = OutgoingLinks(self._ask_for_link)
        self._permits: dict[tuple[PeerId, PeerId], tuple[Permit, float]] = {}  # with when to ask anew

    def __repr__(self) -> str:
        return f"<KvOutlets {self._selector} permits={len(self._permits)}>"

    def use_dtype(self, dtype: str) -> None:
        """This node's engine keeps KV in that dtype, by torch's name for it."""
        self._dtype = _DTYPES.get(dtype, WireDtype.BF16)

    async def open(self, ticketed: messages.TicketedSlice, tokens: int) -> protocol.Outlet:
        """The link for a slice of the KV of so many tokens, and its paths. Raises NetworkError
        without link, TransferError without path."""
        wanted, ticket = ticketed.rank_slice, ticketed.ticket
        ends = Ends(PeerId(wanted.target_peer), wanted.source, wanted.target)
        link = await self._agree_on_link(ends, ticket.link)
        query = self._selector.query(ends.peer, self._kv_bytes(ticket.codec, tokens, wanted.slice))
        cache = self._selector.cache_of(link.link)
        while True:
            choice = self._selector.choose(query, link.link, cache, trio.current_time())
            paths = await self._dial_all(ends.peer, choice)
            if paths is not None:
                break
        self._selector.begin(link.link, ends, query, cache, choice, trio.current_time())
        return protocol.Outlet(
            rank=wanted.source,
            slice=wanted.slice,
            # What the receiver may ask for is bounded here too: our engine holds the prompt's blocks for so long.
            ticket=msgspec.structs.replace(ticket, deadline_s=min(ticket.deadline_s, self._tuning.max_transfer_s)),
            link=link,
            paths=paths,
            gbps=choice.taken.gbps,
            rtt_s=max(path.rtt_s for path in choice.paths),
        )

    def on_link_report(self, report: protocol.LinkReport) -> None:
        """The engine says what its link has moved."""
        new = self._selector.on_report(report, trio.current_time())
        if new is not None:
            _log.info("link to %s: %s", new.peer, new.reason)
            self._nursery.start_soon(self._change_paths, new)

    def end_transfer(self, peer: PeerId, report: protocol.TransferReport) -> float:
        """A transfer has ended; returns what the boxes on its paths are billed for it, in dollars."""
        return self._selector.end_transfer(peer, report, trio.current_time())

    def forget_all(self) -> None:
        """This node's engine, and the sending end of every link, is gone."""
        self._links.forget_all()
        self._selector.forget_all()

    def forget_peer(self, peer: PeerId) -> list[LinkTicket]:
        """A node is gone; returns the links that ended with it."""
        for pair in [pair for pair in self._permits if peer in pair]:
            del self._permits[pair]
        self._selector.forget_peer(peer)
        return self._links.forget_peer(peer)

    async def _agree_on_link(self, ends: Ends, wanted: bytes) -> LinkTicket:
        """The link that the ticket is for. The one known here may be of an earlier life of either end: the next
        question is then answered with the present one."""
        link = await self._links.to(ends, self._starts(ends.peer))
        if link.link != wanted:
            self._links.forget(ends)
            link = await self._links.to(ends, self._starts(ends.peer))
        if link.link != wanted:
            raise TicketError(f"link {wanted.hex()} of the ticket is not the one that {ends.peer} has opened")
        for old in self._selector.replace_links(ends, link.link):
            self.set_paths(old, ())  # nobody answers there any more
        return link

    async def _ask_for_link(self, ends: Ends) -> LinkTicket:
        body = messages.LinkOpen(service=self._model.service, source=ends.source, target=ends.target)
        return (await self._messenger.request(ends.peer, LINK_OPEN, body, self._tuning.ask_s)).link

    def _kv_bytes(self, codec: str, tokens: int, held: protocol.KvSlice) -> int:
        """On the wire."""
        layer = payload_bytes(
            codec_named(codec),
            self._dtype,
            start=0,
            tokens=tokens,
            heads=len(held.heads),
            head_dim=self._model.head_dim,
        )
        return layer * len(held.layers)

    async def _dial_all(self, peer: PeerId, choice: PathChoice) -> tuple[DialPath, ...] | None:
        """The chosen paths with addresses and permits; None when a relay refuses, which is then
        left out. Raises Unreachable for the peer."""
        found: list[DialPath] = []
        for path in choice.paths:
            try:
                found.append(await self._dial(peer, path))
            except NetworkError as error:
                if path.via is None:
                    raise
                _log.info("no path to %s through %s for now: %s", peer, path.via, error)
                self._selector.refuse(PeerId(path.via), peer, trio.current_time())
                return None
        return tuple(found)

    async def _dial(self, peer: PeerId, path: KVPath) -> DialPath:
        streams = self._selector.limit_streams(path.streams, trio.current_time())
        if path.via is None:
            return msgspec.structs.replace(await self._path_to(peer), label=DIRECT, streams=streams)
        relay = PeerId(path.via)
        there = await self._path_to(relay)
        if there.relay is not None:
            raise Unreachable(f"{relay} cannot be dialled, so it is no relay")
        permit = await self._permit(relay, peer)
        return msgspec.structs.replace(there, label=path.via, streams=streams, relay=permit)

    async def _permit(self, relay: PeerId, target: PeerId) -> Permit:
        permit, until = self._permits.get((relay, target), (None, 0.0))
        if permit is None or trio.current_time() >= until:
            # Counted from the question, by this node's own clock: the relay's may be days apart.
            until = trio.current_time() + self._tuning.permit_life_s - self._tuning.permit_margin_s
            body = messages.RelayOpen(target=target)
            permit = (await self._messenger.request(relay, RELAY_OPEN, body, self._tuning.permit_ask_s)).permit
            self._permits[relay, target] = permit, until
        return permit

    async def _change_paths(self, new: NewPaths) -> None:
        paths: tuple[DialPath, ...] | None = None
        try:
            paths = await self._dial_all(new.peer, new.choice)
        except NetworkError as error:
            _log.info("link to %s stays as it is: %s", new.peer, error)
        if paths is None:
            self._selector.reject(new, trio.current_time())
        elif self._selector.confirm(new):
            self.record(EventKind.PATHS_CHANGED, peer=new.peer, why=new.reason)
            self.set_paths(new.link, paths)
