"""Both ends of a transfer between engines that are cut differently."""

from __future__ import annotations

import os
from collections.abc import Sequence

from p2pserve.kvtransport.routing.reslice import ShardTransfer
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket, issue_transfer
from p2pserve.node.engine.protocol import Inlet, KvSlice, Outlet, WorkerRank
from p2pserve.node.engine.trials.trial import Trial


def transfer_between(
    trial: Trial, pieces: Sequence[ShardTransfer], links: Sequence[LinkTicket]
) -> tuple[tuple[Outlet, ...], tuple[Inlet, ...]]:
    """One transfer of all pieces, each on a link of its own."""
    ticket = issue_transfer(links[0].link, "raw", 60, os.urandom)
    outlets, inlets = [], []
    for piece, link in zip(pieces, links, strict=True):
        own = TransferTicket(ticket.transfer, link.link, ticket.codec, ticket.deadline_s)
        part = KvSlice(
            first_layer=piece.layers.start,
            last_layer=piece.layers.stop,
            first_head=piece.heads.start,
            last_head=piece.heads.stop,
        )
        source = WorkerRank(stage=piece.source.stage, tp=piece.source.tp)
        target = WorkerRank(stage=piece.target.stage, tp=piece.target.tp)
        outlets.append(
            Outlet(rank=source, slice=part, ticket=own, link=link, paths=(trial.path,), gbps=10, rtt_s=0.0001)
        )
        inlets.append(Inlet(rank=target, slice=part, ticket=own, link=link))
    return tuple(outlets), tuple(inlets)
