"""What nodes say to each other about links and stages: it arrives unchanged, and what cannot be is refused before
anybody acts."""

from typing import Any

import msgspec
import pytest

from p2pserve.bootstrap import DECODE_ERRORS, PeerId
from p2pserve.coordinator import Stage
from p2pserve.kvtransport.probing.burst_ticket import BurstTicket
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures
from p2pserve.kvtransport.probing.probe import BurstRequest
from p2pserve.kvtransport.wire.permits import Permit
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket
from p2pserve.node import messages
from p2pserve.node.box.batch_limits import BatchLimits
from p2pserve.node.engine.protocol import Inlet, KvSlice, Outlet, PipeEnd, Sampling, WorkerRank
from p2pserve.node.view import NetworkView

LINK = LinkTicket(link=b"l" * 16, secret=b"s" * 32, lease_s=600.0)
TRANSFER = TransferTicket(transfer=b"t" * 16, link=LINK.link, codec="kv4", deadline_s=30.0)
PERMIT = Permit(
    permit=b"p" * 16,
    secret=b"r" * 32,
    next_host="192.0.2.9",
    next_port=9,
    byte_budget=1 << 40,
    bytes_per_s=1e9,
    expires_at=2e9,
)
BURST = BurstRequest(peer="p", streams=4, seconds=1.0, max_bytes=1 << 20, overdue=False)
TICKET = BurstTicket(b"b" * 16, b"k" * 32, 4, 1.0, 1 << 20, 0.01)
FIGURES = LinkFigures(rtt_s=0.1, one_stream_gbps=0.2, capacity_gbps=1.0)
TABLE = messages.LinkTable(site="fra", box=BoxFigures(up_gbps=1.0, relay_budget_bytes=5), links={"p": FIGURES})
STAGES = (Stage(peer="p", tp=1, first_layer=0, last_layer=3), Stage(peer="q", tp=1, first_layer=3, last_layer=4))
RANK, SLICE = WorkerRank(stage=1), KvSlice(first_layer=3, last_layer=4, first_head=0, last_head=2)
PIECE = messages.RankSlice(source_peer="q", source=RANK, target_peer="d", target=WorkerRank(tp=1), slice=SLICE)
PART = messages.TicketedSlice(rank_slice=PIECE, ticket=TRANSFER)
OUTLET = Outlet(rank=RANK, slice=SLICE, ticket=TRANSFER, link=LINK, paths=(), gbps=1.0, rtt_s=0.1)
TRANSFERRED = messages.TransferFigures(
    raw_bytes=1, wire_bytes=1, frames=1, span_s=0.1, visible_s=0.1, hidden_fraction=0.0
)
OPENING = messages.StageOpen(
    service="tiny",
    stages=STAGES,
    stage=1,
    pipes=(PipeEnd(stage=0, kind="control", ticket=LINK),),
    limits=BatchLimits(max_model_len=None, max_batched_tokens=512, max_requests=64),
)
KEPT_IN_8_BITS = msgspec.structs.replace(
    OPENING,
    limits=BatchLimits(max_model_len=None, max_batched_tokens=512, max_requests=64, kv_cache_dtype="fp8"),
)
DECODING = messages.DecodeOpen(
    request="r",
    service="tiny",
    prompt=(1, 2),
    sampling=Sampling(max_tokens=1),
    deadline_s=1.0,
    receive_tokens=2,
    codec="kv4",
    prefill=STAGES,
)
MESSAGES: list[messages.Message] = [
    TABLE,
    messages.LinkTable(),
    messages.LinkOpen(service="tiny"),
    messages.LinkOpen(service="tiny", source=RANK, target=WorkerRank(tp=3)),
    OPENING,
    KEPT_IN_8_BITS,
    messages.StageLoaded(),
    messages.StageInlets(transfer=TRANSFER.transfer, codec="raw", deadline_s=1.0, slices=(PIECE,)),
    messages.StageInletsOpened(inlets=(Inlet(rank=RANK, slice=SLICE, ticket=TRANSFER, link=LINK),)),
    messages.StageOutlets(tokens=5, slices=(PART,)),
    messages.StageOutletsOpened(outlets=(OUTLET,)),
    messages.StageTransfer(transfer=TRANSFER.transfer, link=LINK.link, figures=TRANSFERRED),
    messages.StageAbort(transfer=TRANSFER.transfer, reason="x"),
    messages.LinkOpened(link=LINK),
    messages.RelayOpen(target="q"),
    messages.RelayOpened(permit=PERMIT),
    messages.ProbeOpen(burst=BURST),
    messages.ProbeOpened(ticket=TICKET),
    messages.ProbeOpened(refused="busy", retry_s=20.0),
    DECODING,
    messages.DecodeOpened(slices=(PART,)),
    messages.FirstToken(request="r", token=5),
    messages.PrefillOpen(request="r", service="tiny", prompt=(1, 2), deadline_s=1.0, slices=(PART,)),
]


def changed(value: msgspec.Struct, **changes: Any) -> dict[str, Any]:
    """Its fields on the wire, some of them forged."""
    fields: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    return {**fields, **changes}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_unchanged_whatever_a_newer_release_adds(message: messages.Message) -> None:
    data = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(data, type=type(message)) == message
    fields = msgspec.msgpack.decode(data)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode({**fields, "extra": 1}), type=type(message)) == message


def test_stages_of_an_older_release_are_told_of_kv_only_where_it_is_not_kept_as_usual() -> None:
    assert "kv_cache_dtype" not in changed(OPENING.limits)
    assert changed(KEPT_IN_8_BITS.limits)["kv_cache_dtype"] == "fp8"


GENERATE = messages.Generate(request="r", messages=(messages.ChatMessage(role="user", content="hello"),))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (messages.Generate, changed(GENERATE, extra=1)),
        (messages.Generate, changed(GENERATE, messages=[{"role": "user", "content": "hello", "extra": 1}])),
        (messages.ContinueGenerate, {"generate": changed(GENERATE), "tokens": [1], "extra": 1}),
        (messages.DecodeOpen, changed(DECODING, sampling={"max_tokens": 1, "extra": 1})),
        (messages.LinkOpened, {"link": changed(LINK, extra=1)}),
        (messages.RelayOpened, {"permit": changed(PERMIT, extra=1)}),
        (messages.ProbeOpened, {"ticket": changed(TICKET, extra=1)}),
    ],
)
def test_what_may_not_be_missed_is_refused_by_its_name(kind: type[messages.Message], fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `extra`"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=kind)


NAN, INF = float("nan"), float("inf")
HOSTILE: list[tuple[type[messages.Message], dict[str, Any]]] = [
    *((messages.LinkTable, {"links": {"p": changed(FIGURES, rtt_s=bad)}}) for bad in (NAN, INF, -1.0, 1e9)),
    *((messages.LinkTable, {"links": {"p": changed(FIGURES, capacity_gbps=bad)}}) for bad in (NAN, INF, -1.0, 1e9)),
    *((messages.LinkTable, {"links": {"p": changed(FIGURES, loss=bad)}}) for bad in (NAN, 1.1, -0.1)),
    *((messages.LinkTable, {"box": {name: bad}}) for name in ("up_gbps", "up_usd_per_gb") for bad in (NAN, -1.0)),
    (messages.LinkTable, {"links": {"": changed(FIGURES)}}),
    (messages.LinkTable, {"links": {"p": changed(FIGURES, reason="x" * 201)}}),
    (messages.LinkTable, {"box": {"relay_budget_bytes": -1}}),
    (messages.LinkOpened, {"link": changed(LINK, link=b"short")}),
    (messages.LinkOpened, {"link": changed(LINK, secret=b"")}),
    (messages.LinkOpened, {"link": changed(LINK, lease_s=INF)}),
    (messages.RelayOpen, {"target": ""}),
    *((messages.RelayOpened, {"permit": changed(PERMIT, next_port=bad)}) for bad in (0, 65536, -1)),
    *((messages.RelayOpened, {"permit": changed(PERMIT, next_host=bad)}) for bad in ("", "a\nb", "x" * 256)),
    *((messages.RelayOpened, {"permit": changed(PERMIT, bytes_per_s=bad)}) for bad in (0.0, -1.0, NAN)),
    (messages.RelayOpened, {"permit": changed(PERMIT, expires_at=INF)}),
    *((messages.ProbeOpen, {"burst": changed(BURST, streams=bad)}) for bad in (0, 65, 1 << 40)),
    *((messages.ProbeOpen, {"burst": changed(BURST, seconds=bad)}) for bad in (0.0, 11.0, NAN)),
    *((messages.ProbeOpen, {"burst": changed(BURST, max_bytes=bad)}) for bad in (0, 5_000_000_000)),
    (messages.ProbeOpened, {"ticket": changed(TICKET, burst=b"")}),
    (messages.ProbeOpened, {"ticket": changed(TICKET, rtt_s=NAN)}),
    *(
        (messages.DecodeOpened, {"slices": [changed(PART, ticket=changed(TRANSFER, **bad))]})
        for bad in ({"transfer": bytes(16)}, {"codec": "zip"}, {"deadline_s": NAN}, {"link": b""})
    ),
    *(
        (messages.DecodeOpened, {"slices": [changed(PART, rank_slice=changed(PIECE, **bad))]})
        for bad in ({"source_peer": ""}, {"target": {"stage": -1}}, {"slice": changed(SLICE, last_layer=3)})
    ),
    (messages.DecodeOpened, {"slices": [changed(PART)] * (messages.MAX_SLICES + 1)}),
    (messages.PrefillOpen, changed(MESSAGES[-1], slices=[])),
    (messages.StageAbort, {"transfer": b"short", "reason": "x"}),
    (messages.StageInlets, {"transfer": bytes(17), "codec": "raw", "deadline_s": 1.0, "slices": []}),
    (messages.StageOpen, changed(OPENING, stage=0)),
    *(
        (messages.StageOpen, changed(OPENING, limits=changed(OPENING.limits, **bad)))
        for bad in (
            {"max_requests": 0},
            {"max_batched_tokens": 1 << 21},
            {"max_model_len": 0},
            {"kv_cache_dtype": "int4"},
        )
    ),
]


@pytest.mark.parametrize(("kind", "fields"), HOSTILE)
def test_what_cannot_be_is_refused(kind: type[messages.Message], fields: dict[str, Any]) -> None:
    with pytest.raises(DECODE_ERRORS):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=kind)


def test_a_member_that_says_nonsense_of_its_links_says_nothing() -> None:
    view = NetworkView()
    good = msgspec.msgpack.encode(TABLE)
    a, b = PeerId("a"), PeerId("b")
    for kind, fields in HOSTILE:
        if kind is messages.LinkTable:
            view.update_links({a: good, b: msgspec.msgpack.encode(fields)})
            assert view.links_told == {a: TABLE}
    for garbage in (b"", b"\xff", good[:-1], b"\xc1" * 50):
        view.update_links({a: good, b: garbage})
        assert view.links_told == {a: TABLE}
    kept = view.links_told[a]
    view.update_links({a: good, b: good})
    assert view.links_told[a] is kept  # only what has changed is decoded
    assert view.links_told[b] == TABLE
    view.update_links({b: good})
    assert set(view.links_told) == {b}
    view.update_links({b: b"\xff"})
    assert view.links_told == {}


def test_no_secret_is_shown() -> None:
    for message in MESSAGES:
        for secret in ("s" * 32, "r" * 32, "k" * 32):
            assert secret not in repr(message)
