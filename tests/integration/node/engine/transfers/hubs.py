"""Transfers between engine processes without engines: hubs in one process, over loopback, and the paged caches that
they read."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from p2pserve.kvtransport.wire.channel import LinkHello
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.sockets import read_link_hello
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket, issue_link, issue_transfer
from p2pserve.node.engine.protocol import Inlet, KvSlice, LinkReport, Outlet, TransferReport
from p2pserve.node.engine.transfers.hub import TransferHub, TransferMemory
from p2pserve.node.engine.transfers.incoming import LayerKv, PromptReceiver
from p2pserve.node.engine.transfers.outgoing import Prefilled, PromptSender
from p2pserve.node.engine.vllm.device import CpuDevice
from p2pserve.node.engine.vllm.layout import Shard

LAYERS, HEADS, HEAD_DIM = 2, 2, 64
SHARD = Shard(layers=range(LAYERS), heads=range(HEADS), head_dim=HEAD_DIM, dtype=torch.float32)
ALL = KvSlice(first_layer=0, last_layer=LAYERS, first_head=0, last_head=HEADS)
LINK = issue_link(600.0, random.Random(1).randbytes)
TOKENS = 8
ROW_BYTES = 2 * HEADS * HEAD_DIM * 4  # of one position in one layer
HOST_BYTES = STAGED_BYTES = 4 << 20
BLOCK = 4  # positions
WAIT_LIMIT_S = 30.0  # for what comes at once, unless the machine is very busy


def ticket_of(
    seed: int = 0, *, codec: str = "raw", deadline_s: float = 60.0, link: LinkTicket = LINK
) -> TransferTicket:
    return issue_transfer(link.link, codec, deadline_s, random.Random(seed).randbytes)


TICKET = ticket_of()


def until(condition: Callable[[], object]) -> None:
    """Wait for what threads do without a word."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


# ---- the paged cache ----------------------------------------------------------------------------------------


class Read(NamedTuple):
    """One look into a paged cache."""

    layer: int
    block_ids: tuple[int, ...]
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Of what was read."""
        return (self.last - self.first) * ROW_BYTES


def blocks_for(tokens: int, first: int = 0) -> list[int]:
    """A request's block table."""
    return list(range(first, first + -(-tokens // BLOCK)))


def expected_keys(layer: int, first: int, last: int, heads: range = SHARD.heads) -> torch.Tensor:
    """Keys whose every value tells its layer, its position and its head; values are their negatives."""
    positions = torch.arange(first, last, dtype=torch.float32)[:, None, None]
    numbers = torch.tensor(list(heads), dtype=torch.float32)[None, :, None]
    return (positions + 4096 * (1 + layer) + numbers / 4).expand(-1, -1, HEAD_DIM).clone()


class PagedCache:
    """K and V of each layer in blocks, and a record of what was read. `on_read` is called by the thread that reads,
    before it does."""

    def __init__(self, blocks: int = 1024, shard: Shard = SHARD) -> None:
        self._heads = shard.heads
        shape = (blocks, BLOCK, len(shard.heads), shard.head_dim)
        self._layers = {layer: (torch.zeros(shape), torch.zeros(shape)) for layer in shard.layers}
        self.reads: list[Read] = []
        self.on_read: Callable[[Read], None] = lambda read: None

    def fill(self, block_ids: list[int], tokens: int) -> None:
        """The model computes a prompt."""
        for layer, (k, v) in self._layers.items():
            keys = expected_keys(layer, 0, tokens, self._heads)
            where = self._slots(block_ids, 0, tokens)
            k[where], v[where] = keys, -keys

    def reuse(self, block_ids: list[int]) -> None:
        """The blocks go to another request."""
        for k, v in self._layers.values():
            k[block_ids] = v[block_ids] = -1.0

    def spoil(self, layer: int, block: int, value: float) -> None:
        """The model computes something wrong."""
        self._layers[layer][0][block, 1, 1, 5] = value

    def read(self, layer: int, block_ids: list[int], first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a worker gives its hub."""
        read = Read(layer, tuple(block_ids), first, last)
        self.on_read(read)
        self.reads.append(read)
        k, v = self._layers[layer]
        where = self._slots(block_ids, first, last)
        return k[where], v[where]

    @property
    def bytes_read(self) -> int:
        return sum(read.nbytes for read in self.reads)

    def _slots(self, block_ids: list[int], first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(first, last)
        return torch.tensor(block_ids)[positions // BLOCK], positions % BLOCK


# ---- hubs and their connections -----------------------------------------------------------------------------


@dataclass
class Reports:
    """What a hub tells its agent."""

    ends: list[TransferReport] = field(default_factory=list)
    links: list[LinkReport] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def tell(self, report: TransferReport | LinkReport) -> None:
        with self._news:
            self.ends.append(report) if isinstance(report, TransferReport) else self.links.append(report)
            self._news.notify_all()

    def until(self, condition: Callable[[], object], timeout: float = WAIT_LIMIT_S) -> None:
        with self._news:
            assert self._news.wait_for(condition, timeout), (self.ends, self.links)

    def end(self, ticket: TransferTicket) -> TransferReport:
        """Of a transfer, once it has been reported."""
        self.until(lambda: any(report.transfer == ticket.transfer for report in self.ends))
        (found,) = [report for report in self.ends if report.transfer == ticket.transfer]
        return found


def make_hub(
    reports: Reports | None = None,
    *,
    cache: PagedCache | None = None,
    shard: Shard = SHARD,
    host_bytes: int = HOST_BYTES,
    staged_bytes: int = STAGED_BYTES,
    grace_s: float = 10.0,
    on_news: Callable[[], None] = lambda: None,
) -> TransferHub:
    memory = TransferMemory(host_bytes=host_bytes, staged_bytes=staged_bytes)
    read = (cache or PagedCache(blocks=1, shard=shard)).read
    hub = TransferHub(shard, CpuDevice(), read, memory, (reports or Reports()).tell, on_news)
    hub.endpoint.settings = replace(hub.endpoint.settings, grace_s=grace_s)
    return hub


def assert_nothing_is_held(hub: TransferHub) -> None:
    """The sending side has given everything back. A connection that is just reading a payload keeps it a moment."""
    until(lambda: hub.memory_in_use.host_bytes == 0)
    hub.endpoint.check_integrity()


@dataclass
class Listener:
    """What an agent does with the connections of a link: reads whose each is and hands it over."""

    path: DialPath
    accepted: int = 0
    sockets: list[socket.socket] = field(default_factory=list)

    def cut(self) -> None:
        """The connections end in the middle of whatever they carry."""
        for sock in self.sockets:
            with suppress(OSError):  # it has gone already
                sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def listening(hub: TransferHub, streams: int = 1) -> Iterator[Listener]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = Listener(DialPath("127.0.0.1", server.getsockname()[1], streams=streams))

        def serve() -> None:
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                hello: LinkHello = read_link_hello(sock, WAIT_LIMIT_S)
                found.accepted += 1
                found.sockets.append(sock.dup())
                hub.attach(hello.pack(), sock)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield found
        server.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_LIMIT_S)
        for sock in found.sockets:
            sock.close()


@contextmanager
def path_to_nowhere() -> Iterator[DialPath]:
    """Its port is bound and nobody listens there: no other process can be there either."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield DialPath("127.0.0.1", taken.getsockname()[1], label="nowhere")


def outlet_of(
    *paths: DialPath, ticket: TransferTicket = TICKET, link: LinkTicket = LINK, part: KvSlice = ALL
) -> Outlet:
    return Outlet(slice=part, ticket=ticket, link=link, paths=paths, gbps=1.0, rtt_s=0.001)


def inlet_of(ticket: TransferTicket = TICKET, link: LinkTicket = LINK, part: KvSlice = ALL) -> Inlet:
    return Inlet(slice=part, ticket=ticket, link=link)


def heads_of(first: int, last: int) -> KvSlice:
    return KvSlice(first_layer=0, last_layer=LAYERS, first_head=first, last_head=last)


# ---- the engines' parts -------------------------------------------------------------------------------------


def slots_of(first: int, last: int) -> torch.Tensor:
    """Where positions lie in the receiver's paged cache."""
    return torch.arange(first, last) + 1000


def expected(hub: TransferHub, *inlets: Inlet, tokens: int = TOKENS) -> PromptReceiver:
    """A receiving end whose engine has no blocks yet."""
    inlets = inlets or (inlet_of(),)
    hub.expect(inlets, tokens)
    incoming = hub.incoming(inlets[0].ticket.transfer)
    assert incoming is not None
    return incoming


def started(hub: TransferHub, *inlets: Inlet, tokens: int = TOKENS, first: int = 0) -> PromptReceiver:
    """A receiving end whose engine has blocks."""
    incoming = expected(hub, *inlets, tokens=tokens)
    hub.start(incoming, first, slots_of)
    return incoming


def wait_for(incoming: PromptReceiver, *, pieces: int) -> None:
    """Until so many are in the inbox, or it has failed."""
    until(lambda: incoming.waiting_pieces >= pieces or incoming.outcome(0.0))


def take_all(incoming: PromptReceiver) -> list[LayerKv]:
    """What is in the inbox now."""
    pieces = []
    while (piece := incoming.take()) is not None:
        pieces.append(piece)
    return pieces


def receive_rest(incoming: PromptReceiver) -> list[LayerKv]:
    """Take until all has arrived, or the transfer has failed."""
    pieces: list[LayerKv] = []

    def over() -> bool:
        outcome = incoming.outcome(0.0)  # first: what comes after it is still taken
        pieces.extend(take_all(incoming))
        return outcome is not None

    until(over)
    return pieces


def assert_arrived_once(pieces: list[LayerKv], tokens: int, *, first: int = 0) -> None:
    """Every layer, head and position from `first` on, with the values that the model computed."""
    seen = torch.zeros(LAYERS, tokens, HEADS, dtype=torch.int)
    for piece in pieces:
        heads = range(piece.head, piece.head + piece.k.shape[1])
        last = piece.start + len(piece.k)
        seen[piece.layer, piece.start : last, heads.start : heads.stop] += 1
        assert torch.equal(piece.k, expected_keys(piece.layer, piece.start, last, heads))
        assert torch.equal(piece.v, -piece.k)
        assert torch.equal(piece.slots, slots_of(piece.start, last))
    assert (seen[:, :first] == 0).all()
    assert (seen[:, first:] == 1).all()


def settled(incoming: PromptReceiver) -> str | None:
    """Its outcome, once its threads have ended."""
    for thread in threading.enumerate():
        if thread.name == f"kv-decode-{incoming.transfer.hex()[:8]}":
            thread.join(WAIT_LIMIT_S)
    return incoming.outcome(0.0)


@dataclass
class TwoHubs:
    """A sending and a receiving engine's hubs. The model of the sending one computes a prompt of `tokens`."""

    sender: TransferHub
    receiver: TransferHub
    cache: PagedCache
    listener: Listener
    reports: Reports
    tokens: int
    opened: list[PromptReceiver] = field(default_factory=list)

    def open(self, ticket: TransferTicket = TICKET, *, start: bool = True) -> tuple[PromptSender, PromptReceiver]:
        incoming = (started if start else expected)(self.receiver, inlet_of(ticket), tokens=self.tokens)
        self.opened.append(incoming)
        self.sender.send(outlet_of(self.listener.path, ticket=ticket), self.tokens)
        (outgoing,) = self.sender.outgoing(ticket.transfer)
        return outgoing, incoming

    def announce(
        self, outgoing: PromptSender, last: int | None = None, *, layers: range = SHARD.layers, first_block: int = 0
    ) -> None:
        """The model has computed these layers up to `last`."""
        block_ids = blocks_for(self.tokens, first_block)
        computed = Prefilled(block_ids, self.tokens if last is None else last, CpuDevice().mark())
        outgoing.announce_layers(layers, computed)

    def prefill_done(self, outgoing: PromptSender) -> None:
        outgoing.prefill_done(self.tokens, CpuDevice().mark())

    def receive(self, outgoing: PromptSender, incoming: PromptReceiver, *, first: int = 0) -> TransferReport:
        """The receiving engine does its part."""
        assert_arrived_once(receive_rest(incoming), self.tokens, first=first)
        incoming.confirm_applied()
        return self.reports.end(outgoing.ticket)

    def finish(self, outgoing: PromptSender, incoming: PromptReceiver, *, first: int = 0) -> TransferReport:
        """Both engines do their part."""
        self.announce(outgoing)
        self.prefill_done(outgoing)
        return self.receive(outgoing, incoming, first=first)


@contextmanager
def two_hubs(
    streams: int = 1,
    *,
    tokens: int = TOKENS,
    host_bytes: int = HOST_BYTES,
    receiver: TransferMemory | None = None,
    on_news: Callable[[], None] = lambda: None,
) -> Iterator[TwoHubs]:
    reports, cache = Reports(), PagedCache(blocks=2 * len(blocks_for(tokens)))
    cache.fill(blocks_for(tokens), tokens)
    memory = receiver or TransferMemory(host_bytes=HOST_BYTES, staged_bytes=STAGED_BYTES)
    source = make_hub(reports, cache=cache, host_bytes=host_bytes)
    target = make_hub(host_bytes=memory.host_bytes, staged_bytes=memory.staged_bytes, on_news=on_news)
    with listening(target, streams) as listener:
        hubs = TwoHubs(source, target, cache, listener, reports, tokens)
        try:
            yield hubs
        finally:
            for incoming in hubs.opened:  # it may wait for room
                incoming.abort("the test is over")
            for hub in (source, target):
                hub.endpoint.close("the test is over")
