"""The KV transfer between two replicas, from one box of one of them.

Each worker of the prefill replica sends straight to the workers of the decode replica that need its share.
The head of each replica puts the ends together: it knows its own box's, and asks the boxes of its other stages for
theirs. The transfer of a request has ended when all its slices have, or when one has failed.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, final

import msgspec
import trio
from msgspec.structs import replace

from ...bootstrap import NetworkError, PeerId, PeerLost, RemoteError, Role
from ...bootstrap.methods import Body, Messenger, Notice
from ...coordinator.bounds import MAX_STAGES
from ...kvtransport.errors import TicketError, TransferError
from ...kvtransport.wire.tickets import LinkTicket, TransferTicket, issue_transfer
from .. import messages, methods
from ..engine import protocol
from ..engine.protocol import MAX_LAYER_TIMES
from ..links.kv_links import Ends, IncomingLinks
from ..models import ModelInfo
from ..settings import WAN, NodeTuning
from .place import Place, PlaceError, check_sends, slices_between

Item = TypeVar("Item")
End = TypeVar("End")


class Outlets(Protocol):
    """The sending ends of this box: `links.kv_outlets.KvOutlets`; see there."""

    def use_dtype(self, dtype: str) -> None: ...
    async def open(self, ticketed: messages.TicketedSlice, tokens: int) -> protocol.Outlet: ...
    def on_link_report(self, report: protocol.LinkReport) -> None: ...
    def end_transfer(self, peer: PeerId, report: protocol.TransferReport) -> float: ...
    def forget_all(self) -> None: ...
    def forget_peer(self, peer: PeerId) -> list[LinkTicket]: ...


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """A transfer has ended as a whole; `failed` says why when it was not delivered."""

    transfer: bytes
    failed: str
    figures: messages.TransferFigures
    target: str = ""  # the box that it went to; of several, one


@dataclass(slots=True)
class _Sending:
    """A transfer that this box sends a part of. A head waits for all of its links, a stage for its own."""

    targets: dict[bytes, PeerId]  # own link -> the box it leads to
    pending: set[bytes]
    head: PeerId | None  # who wants to know, on a stage
    figures: list[messages.TransferFigures] = field(default_factory=list)


@final
class KvTransfers:
    """One per node with an engine; asks and tells other boxes through `messenger`."""

    def __init__(self, *, model: ModelInfo, outlets: Outlets, messenger: Messenger, tuning: NodeTuning = WAN) -> None:
        self._model = model
        self._outlets = outlets
        self._own = messenger.peer_id
        self._tuning = tuning
        self._messenger = messenger
        self.place: Place | None = None
        self._incoming = IncomingLinks(secrets.token_bytes, tuning.link_lease_s)
        self._sending: dict[bytes, _Sending] = {}
        messenger.handle(methods.LINK_OPEN, self.open_link)
        messenger.handle(methods.STAGE_INLETS, self.open_inlets)
        messenger.handle(methods.STAGE_OUTLETS, self.open_outlets)

    def __repr__(self) -> str:
        return f"<KvTransfers sending={self.sending} {self._incoming}>"

    @property
    def sending(self) -> int:
        """How many transfers this box sends a part of."""
        return len(self._sending)

    def use(self, place: Place, dtype: str) -> None:
        """The engine of this box has this place, and keeps KV in that dtype."""
        self.place = place
        self._outlets.use_dtype(dtype)

    def engine_lost(self) -> None:
        """Both ends of every link here are gone."""
        self.place = None
        self._incoming.forget_all()
        self._sending.clear()
        self._outlets.forget_all()

    def peer_lost(self, peer: PeerId) -> list[bytes]:
        """A node is gone; returns the links that end with it."""
        self._sending = {transfer: one for transfer, one in self._sending.items() if one.head != peer}
        return [ticket.link for ticket in (*self._incoming.forget_peer(peer), *self._outlets.forget_peer(peer))]

    def knows(self, link: bytes) -> bool:
        """Whether a connection that names this link is expected."""
        return self._incoming.knows(link)

    def forget(self, transfer: bytes) -> None:
        """No report of this transfer will be waited for."""
        self._sending.pop(transfer, None)

    # ---- on a head --------------------------------------------------------------------------------------------

    async def receive(
        self, body: messages.DecodeOpen
    ) -> tuple[tuple[protocol.Inlet, ...], tuple[messages.TicketedSlice, ...]]:
        """The receiving ends of a request's KV on every worker here, and what senders must know.
        Raises RemoteError, NetworkError."""
        place = self._place_here()
        try:
            slices = slices_between(
                body.prefill, place.stages, layers=self._model.layers, kv_heads=self._model.kv_heads
            )
            # Half of the deadline, so that time is left to compute what does not arrive.
            wanted = issue_transfer(
                bytes(16), body.codec, min(body.deadline_s / 2, self._tuning.max_transfer_s), secrets.token_bytes
            )
        except (PlaceError, TicketError) as error:
            raise RemoteError("invalid", str(error)) from error

        async def open_at(peer: PeerId, theirs: tuple[messages.RankSlice, ...]) -> tuple[protocol.Inlet, ...]:
            request = messages.StageInlets(
                transfer=wanted.transfer, codec=wanted.codec, deadline_s=wanted.deadline_s, slices=theirs
            )
            if peer == self._own:
                inlets = self._open_inlets(request)
            else:
                opened = await self._messenger.request(peer, methods.STAGE_INLETS, request, self._tuning.stage_ask_s)
                inlets = opened.inlets
            # A stage may not redirect the KV of other layers or heads to itself.
            answered = [(inlet.rank, inlet.slice, inlet.ticket.transfer) for inlet in inlets]
            if answered != [(rank_slice.target, rank_slice.slice, wanted.transfer) for rank_slice in theirs]:
                raise RemoteError("invalid", f"{peer} has opened other inlets than it was asked for")
            return inlets

        inlets = await _ask_each_box(open_at, [(PeerId(rank_slice.target_peer), rank_slice) for rank_slice in slices])
        ticketed = tuple(
            messages.TicketedSlice(rank_slice=rank_slice, ticket=inlet.ticket)
            for rank_slice, inlet in zip(slices, inlets, strict=True)
        )
        return inlets, ticketed

    async def send(self, slices: tuple[messages.TicketedSlice, ...], tokens: int) -> tuple[protocol.Outlet, ...]:
        """The sending ends for so many tokens' KV on every worker here. Raises RemoteError;
        NetworkError or TransferError without a path."""
        place = self._place_here()
        try:
            check_sends(slices, place, kv_heads=self._model.kv_heads)
        except PlaceError as error:
            raise RemoteError("invalid", str(error)) from error

        async def open_at(peer: PeerId, theirs: tuple[messages.TicketedSlice, ...]) -> tuple[protocol.Outlet, ...]:
            request = messages.StageOutlets(tokens=tokens, slices=theirs)
            if peer == self._own:
                outlets = await self._open_outlets(request)
            else:
                opened = await self._messenger.request(peer, methods.STAGE_OUTLETS, request, self._tuning.stage_ask_s)
                outlets = opened.outlets
            answered = [(outlet.rank, outlet.slice, outlet.ticket) for outlet in outlets]
            if answered != [
                (ticketed.rank_slice.source, ticketed.rank_slice.slice, ticketed.ticket) for ticketed in theirs
            ]:
                raise RemoteError("invalid", f"{peer} has opened other outlets than it was asked for")
            return outlets

        sources = [(PeerId(ticketed.rank_slice.source_peer), ticketed) for ticketed in slices]
        outlets = await _ask_each_box(open_at, sources)
        if self.place == place:  # else the engine is gone meanwhile, and its requests with it
            targets = _links_to(ticketed for source, ticketed in sources if source == self._own)
            self._sending[slices[0].ticket.transfer] = _Sending(
                targets, {ticketed.ticket.link for ticketed in slices}, None
            )
        return outlets

    def abort(self, transfer: bytes, reason: str) -> None:
        """Tell the other stages of this replica that nothing more will be sent or expected."""
        self.forget(transfer)
        for peer in self.place.others if self.place is not None else ():
            self._tell(peer, methods.STAGE_ABORT, messages.StageAbort(transfer=transfer, reason=reason))

    def on_stage_transfer(self, peer: PeerId, body: messages.StageTransfer) -> TransferEnd | None:
        """A stage of this replica says how its part ended; returns the end of the whole, when this is it."""
        sending = self._sending.get(body.transfer)
        if sending is None or self.place is None or peer not in self.place.others:
            return None
        return self._part_ended(sending, body)

    # ---- on any stage -----------------------------------------------------------------------------------------

    def on_report(self, report: protocol.TransferReport) -> TransferEnd | None:
        """This box's engine says how a part ended; returns the end of the whole, when this is it."""
        sending = self._sending.get(report.transfer)
        target = sending.targets.get(report.link) if sending is not None else None
        if sending is None or target is None:
            return None
        figures = msgspec.convert(report, messages.TransferFigures, from_attributes=True)
        body = messages.StageTransfer(
            transfer=report.transfer,
            link=report.link,
            failed="" if report.delivered else report.reason or "not delivered",
            figures=msgspec.structs.replace(figures, usd=self._outlets.end_transfer(target, report)),
        )
        if sending.head is not None:
            self._tell(sending.head, methods.STAGE_TRANSFER, body)
        return self._part_ended(sending, body)

    def on_link_report(self, report: protocol.LinkReport) -> None:
        """What this box's engine sends gets on."""
        self._outlets.on_link_report(report)

    async def open_link(self, peer: PeerId, role: Role, body: messages.LinkOpen) -> messages.LinkOpened:
        """The link over which a worker of this peer's engine may push KV into one of ours."""
        place = self._place_here()
        if body.service != self._model.service:
            raise RemoteError("wrong-service", f"this node serves {self._model.service}, not {body.service}")
        here = place.index == body.target.stage and body.target.tp < place.stage.tp
        if not here or max(body.source.stage, body.source.tp) >= MAX_STAGES:
            raise RemoteError("invalid", f"this node has no worker {body.target.tp} of stage {body.target.stage}")
        return messages.LinkOpened(link=self._incoming.of(Ends(peer, body.source, body.target)))

    async def open_inlets(self, peer: PeerId, role: Role, body: messages.StageInlets) -> messages.StageInletsOpened:
        """The head wants KV received here."""
        self._require_head(peer)
        self._require_own(rank_slice.target_peer for rank_slice in body.slices)
        return messages.StageInletsOpened(inlets=self._open_inlets(body))

    async def open_outlets(self, peer: PeerId, role: Role, body: messages.StageOutlets) -> messages.StageOutletsOpened:
        """The head wants KV sent from here."""
        place = self._require_head(peer)
        self._require_own(ticketed.rank_slice.source_peer for ticketed in body.slices)
        try:
            check_sends(body.slices, place, kv_heads=self._model.kv_heads)
        except PlaceError as error:
            raise RemoteError("invalid", str(error)) from error
        try:
            outlets = await self._open_outlets(body)
        except RemoteError:
            raise
        except (NetworkError, TransferError) as error:  # else the head would only hear that something failed here
            raise RemoteError("no-path", str(error)) from error
        if self.place != place:
            raise RemoteError("no-engine", "the engine process of this stage has ended")
        targets = _links_to(body.slices)
        self._sending[body.slices[0].ticket.transfer] = _Sending(targets, set(targets), peer)
        return messages.StageOutletsOpened(outlets=outlets)

    def is_head(self, peer: PeerId) -> bool:
        """Whether this is the head of the replica of which this box is another stage."""
        return self.place is not None and not self.place.is_head and self.place.head == peer

    # ---- inside -----------------------------------------------------------------------------------------------

    def _open_inlets(self, body: messages.StageInlets) -> tuple[protocol.Inlet, ...]:
        """Our own ends, each on the link of its two workers."""
        inlets = []
        for rank_slice in body.slices:
            link = self._incoming.of(Ends(PeerId(rank_slice.source_peer), rank_slice.source, rank_slice.target))
            ticket = TransferTicket(body.transfer, link.link, body.codec, body.deadline_s)
            inlets.append(protocol.Inlet(rank=rank_slice.target, slice=rank_slice.slice, ticket=ticket, link=link))
        return tuple(inlets)

    async def _open_outlets(self, body: messages.StageOutlets) -> tuple[protocol.Outlet, ...]:
        return tuple([await self._outlets.open(ticketed, body.tokens) for ticketed in body.slices])

    def _part_ended(self, sending: _Sending, body: messages.StageTransfer) -> TransferEnd | None:
        if body.link not in sending.pending:
            return None
        sending.pending.remove(body.link)
        sending.figures.append(body.figures)
        if sending.pending and not body.failed:
            return None
        self.forget(body.transfer)
        if sending.head is not None:
            return None
        target = next(iter(sending.targets.values()), "")
        return TransferEnd(body.transfer, body.failed, _sum_figures(sending.figures), target)

    def _place_here(self) -> Place:
        if self.place is None:
            raise RemoteError("no-engine", "the engine process of this node is not running")
        return self.place

    def _require_head(self, peer: PeerId) -> Place:
        if not self.is_head(peer):
            raise RemoteError("not-head", "this node is no stage of a replica of which you are the head")
        return self._place_here()

    def _require_own(self, peers: Iterable[str]) -> None:
        other = next((peer for peer in peers if peer != self._own), None)
        if other is not None:
            raise RemoteError("invalid", f"that is for {other} to do, not for this node")

    def _tell(self, peer: PeerId, notice: Notice[Body], message: Body) -> None:
        try:
            self._messenger.notify(peer, notice, message)
        except PeerLost:
            pass  # nobody is left there who would care


def _links_to(slices: Iterable[messages.TicketedSlice]) -> dict[bytes, PeerId]:
    """The links that they go over, each with the box that it leads to."""
    return {ticketed.ticket.link: PeerId(ticketed.rank_slice.target_peer) for ticketed in slices}


async def _ask_each_box(
    action: Callable[[PeerId, tuple[Item, ...]], Awaitable[Sequence[End]]], items: list[tuple[PeerId, Item]]
) -> tuple[End, ...]:
    """Do something once for each box with all that concerns it, at all boxes at the same time; returns what came of
    each item. Raises the first of their NetworkErrors and TransferErrors when all are done."""
    groups: dict[PeerId, tuple[Item, ...]] = {}
    for peer, item in items:
        groups[peer] = (*groups.get(peer, ()), item)
    found: dict[Item, End] = {}
    failures: list[NetworkError | TransferError] = []

    async def attempt(peer: PeerId) -> None:
        try:
            found.update(zip(groups[peer], await action(peer, groups[peer]), strict=True))
        except (NetworkError, TransferError) as error:
            failures.append(error)

    if len(groups) == 1:
        await attempt(*groups)
    else:
        async with trio.open_nursery() as nursery:
            for peer in groups:
                nursery.start_soon(attempt, peer)
    if failures:
        raise failures[0]
    return tuple(found[item] for _, item in items)


def _sum_figures(figures: Sequence[messages.TransferFigures]) -> messages.TransferFigures:
    """The figures of a transfer from those of its slices, which ran beside each other."""
    first = figures[0]
    if len(figures) == 1:
        return first
    paths: dict[str, int] = {}
    for each in figures:
        for label, size in each.paths.items():
            paths[label] = paths.get(label, 0) + size
    return messages.TransferFigures(
        raw_bytes=sum(each.raw_bytes for each in figures),
        wire_bytes=sum(each.wire_bytes for each in figures),
        frames=sum(each.frames for each in figures),
        span_s=max(each.span_s for each in figures),
        visible_s=max(each.visible_s for each in figures),
        hidden_fraction=min(each.hidden_fraction for each in figures),
        mode=first.mode,
        paths=paths,
        resent_bytes=sum(each.resent_bytes for each in figures),
        usd=sum(each.usd for each in figures),
        codec_s=sum(each.codec_s for each in figures),
        blocked_s=max(each.blocked_s for each in figures),
        layers=_merge_layers(times for each in figures for times in each.layers),
    )


def _merge_layers(found: Iterable[protocol.LayerTimes]) -> tuple[protocol.LayerTimes, ...]:
    """When layers were on their way that several slices have a part of; each counts from its own first frame."""
    merged: dict[tuple[int, int], protocol.LayerTimes] = {}
    for times in found:
        key = (times.first_layer, times.last_layer)
        known = merged.get(key, times)
        size = times.wire_bytes + (known.wire_bytes if known is not times else 0)
        begin_s, end_s = min(known.begin_s, times.begin_s), max(known.end_s, times.end_s)
        merged[key] = replace(times, begin_s=begin_s, end_s=end_s, wire_bytes=size)
    return tuple(merged[key] for key in sorted(merged))[:MAX_LAYER_TIMES]
