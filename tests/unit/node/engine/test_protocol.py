"""The protocol between agent and engine: frames, bounds, and that every message survives the trip unchanged."""

import itertools
import random
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.permits import Permit
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket
from p2pserve.node.engine import protocol
from p2pserve.node.engine.api.protocol import spawn
from p2pserve.node.engine.protocol import EngineMessage, EngineProtocolError, Unframer

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
PATHS = (
    DialPath("192.0.2.1", 4000, streams=8),
    DialPath("relay.example", 1, label="p2", streams=64, relay=PERMIT, congestion="bbr", pace_bytes_s=10),
)
PART = protocol.KvSlice(first_layer=4, last_layer=8, first_head=0, last_head=1)
OUTLET = protocol.Outlet(
    rank=protocol.WorkerRank(stage=1, tp=2),
    slice=PART,
    ticket=TRANSFER,
    link=LINK,
    paths=PATHS,
    gbps=0.7,
    rtt_s=0.1,
    pacing="serialised",
)
INLET = protocol.Inlet(slice=PART, ticket=TRANSFER, link=LINK)
OTHER_LINK = LinkTicket(link=b"o" * 16, secret=b"s" * 32, lease_s=600.0)
OTHER_INLET = protocol.Inlet(
    rank=protocol.WorkerRank(tp=1),
    slice=protocol.KvSlice(first_layer=4, last_layer=8, first_head=1, last_head=2),
    ticket=TransferTicket(transfer=b"t" * 16, link=OTHER_LINK.link, codec="kv4", deadline_s=30.0),
    link=OTHER_LINK,
)
SAMPLING = protocol.Sampling(max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=11, ignore_eos=True)
STATS = protocol.EngineStats(running=1, waiting=2, kv_usage=0.25, kv_free_tokens=4096)
TO_ENGINE: list[EngineMessage] = [
    protocol.Submit(request="a", prompt=(1, 2, 3), sampling=SAMPLING, deadline_s=1.5, send=(OUTLET,)),
    protocol.Submit(
        request="b", prompt=(0,), sampling=SAMPLING, deadline_s=9, receive=(INLET, OTHER_INLET), receive_tokens=1
    ),
    protocol.Cancel(request="a"),
    protocol.AbortTransfer(transfer=b"t" * 16, reason="no route"),
    protocol.SetLinkPaths(link=LINK.link, paths=PATHS),
    protocol.SetLinkPaths(link=LINK.link, paths=()),
    protocol.CloseLink(link=LINK.link, reason="gone"),
    protocol.Stop(),
    protocol.LimitSteps(tokens=384),
    protocol.SetFirstToken(request="b", token=5),
    protocol.AskBeat(),
]
FROM_ENGINE: list[EngineMessage] = [
    protocol.HeldBlocks(held=bytes(16), lost=bytes(8)),
    protocol.EngineReady(
        pid=1,
        engine="vllm 0.32.0",
        device="cpu",
        dtype="float32",
        layers=4,
        kv_heads=2,
        head_dim=64,
        vocabulary=4096,
        max_model_len=512,
        kv_tokens=8192,
        eos_tokens=(0, 2),
        load_s=0.5,
        tflops=0.1,
        memory_gbps=9.5,
    ),
    protocol.StartFailed(reason="no such folder"),
    protocol.Step(
        outputs=(protocol.NewTokens("a", (5, 6), None, 128), protocol.NewTokens("b", (), "deadline")), stats=STATS
    ),
    protocol.TransferReport(
        transfer=b"t" * 16,
        delivered=False,
        reason="cut",
        frames=3,
        raw_bytes=1000,
        wire_bytes=400,
        span_s=0.2,
        visible_s=0.1,
        hidden_fraction=0.5,
        link=LINK.link,
        mode="layerwise",
        paths={"direct": 300, "p2": 100},
        resent_bytes=7,
        blocked_s=0.25,
    ),
    protocol.LinkReport(
        link=LINK.link,
        paths=(protocol.PathReport("direct", 4, 1000, 50, 1e9, None), protocol.PathReport("p2", 0, 0, 0, 0.0, 0.1)),
        transfers=2,
        waiting_bytes=5,
        blocked=True,
    ),
    protocol.EngineFailed(reason="a stage is gone"),
    protocol.Beat(),
    protocol.Starting(part="weights", file=3, files=8),
    protocol.Starting(part="warm-up"),
]
PACKETS: list[EngineMessage] = [
    protocol.Spawn(engine=3, config=protocol.EngineConfig(model="/models/a", kv_cache_mib=64, log_file="engine.log")),
    protocol.Preloaded(pid=9, version="0.32.0", seconds=4.5),
    protocol.PreloadFailed(reason="no module"),
    protocol.EngineExited(engine=3, status=-9),
]
DECODERS: dict[str, msgspec.msgpack.Decoder[protocol.ToEngine] | msgspec.msgpack.Decoder[protocol.FromEngine]] = {
    "to": protocol.to_engine,
    "from": protocol.from_engine,
}


def test_every_message_of_the_protocol_is_in_these_lists() -> None:
    listed = {type(message) for message in (*TO_ENGINE, *FROM_ENGINE, *PACKETS)}
    assert listed == {kind for kind in EngineMessage.__subclasses__() if kind.__module__ == protocol.__name__}


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_messages_to_an_engine_arrive_unchanged(message: EngineMessage) -> None:
    (body,) = Unframer().feed(protocol.frame(message))
    assert protocol.to_engine.decode(body) == message
    with pytest.raises(msgspec.ValidationError):
        protocol.from_engine.decode(body)


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_messages_of_an_engine_arrive_unchanged(message: EngineMessage) -> None:
    (body,) = Unframer().feed(protocol.frame(message))
    assert protocol.from_engine.decode(body) == message
    with pytest.raises(msgspec.ValidationError):
        protocol.to_engine.decode(body)


@pytest.mark.parametrize("message", PACKETS, ids=lambda message: type(message).__name__)
def test_packets_of_the_fork_server_arrive_unchanged(message: EngineMessage) -> None:
    decoder = spawn if isinstance(message, protocol.Spawn) else protocol.fork_server_event
    assert decoder.decode(protocol.pack(message)) == message


@pytest.mark.parametrize("message", [*TO_ENGINE, *FROM_ENGINE], ids=lambda message: type(message).__name__)
def test_an_unknown_field_is_refused(message: EngineMessage) -> None:
    fields = msgspec.msgpack.decode(protocol.pack(message))
    body = msgspec.msgpack.encode({**fields, "extra": 1})
    for decoder in DECODERS.values():
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(body)


@pytest.mark.parametrize("name", DECODERS)
@given(body=st.binary(max_size=40))
def test_garbage_is_refused_or_is_a_message(name: str, body: bytes) -> None:
    """Nothing but msgspec's own error comes out of a decoder."""
    try:
        found = DECODERS[name].decode(body)
    except msgspec.MsgspecError:
        return
    assert isinstance(found, EngineMessage)


def with_(value: msgspec.Struct, **changes: object) -> dict[str, object]:
    """The fields of a value as they are packed, some of them changed."""
    return {**msgspec.to_builtins(value, builtin_types=(bytes,)), **changes}


def other_transfer() -> dict[str, object]:
    """A ticket of another transfer than that of the inlet beside it."""
    return with_(OTHER_INLET.ticket, transfer=b"u" * 16)


@pytest.mark.parametrize(
    ("message", "field", "bad"),
    [
        (FROM_ENGINE[2], "stats", [-1, 0, 0.0, 0]),
        (FROM_ENGINE[2], "stats", [0, 0, float("nan"), 0]),
        (FROM_ENGINE[2], "stats", [0, 0, 0.0, -5]),
        (FROM_ENGINE[0], "layers", "four"),
        (TO_ENGINE[0], "prompt", "abc"),
        (TO_ENGINE[0], "send", [with_(OUTLET, gbps=float("inf"))]),
        (TO_ENGINE[0], "send", [with_(OUTLET, rtt_s=-0.1)]),
        (TO_ENGINE[0], "send", [with_(OUTLET, pacing="sometimes")]),
        (TO_ENGINE[0], "send", [with_(OUTLET, rank={"tp": -1})]),
        (TO_ENGINE[0], "send", [with_(OUTLET, slice=with_(PART, last_layer=4))]),
        (TO_ENGINE[0], "send", [with_(OUTLET, slice=with_(PART, first_head=1))]),
        (TO_ENGINE[0], "send", [with_(OUTLET, ticket=with_(TRANSFER, transfer=bytes(16)))]),
        (TO_ENGINE[0], "send", [with_(OUTLET, ticket=with_(TRANSFER, codec="zip"))]),
        (TO_ENGINE[0], "send", [with_(OUTLET, ticket=with_(TRANSFER, deadline_s=float("nan")))]),
        (TO_ENGINE[0], "send", [with_(OUTLET, ticket=with_(TRANSFER, link=b"o" * 16))]),
        (TO_ENGINE[0], "receive", [with_(INLET)]),
        (TO_ENGINE[1], "receive", [with_(INLET, link=with_(LINK, link=b"l" * 15))]),
        (TO_ENGINE[1], "receive", [with_(INLET, link=with_(LINK, secret=b""))]),
        (TO_ENGINE[1], "receive", [with_(INLET), with_(OTHER_INLET, ticket=other_transfer())]),
        (TO_ENGINE[0], "awaits_first_token", True),
        (msgspec.structs.replace(TO_ENGINE[1], prompt=(0, 1)), "awaits_first_token", True),
        (TO_ENGINE[-1], "token", -1),
        (TO_ENGINE[4], "paths", [{"host": "", "port": 1}]),
        (TO_ENGINE[4], "paths", [{"host": "h\n", "port": 1}]),
        (TO_ENGINE[4], "paths", [{"host": "h", "port": 0}]),
        (TO_ENGINE[4], "paths", [{"host": "h", "port": 1, "streams": 65}]),
        (TO_ENGINE[4], "paths", [{"host": "h", "port": 1, "label": ""}]),
        (TO_ENGINE[4], "paths", [{"host": "h", "port": 1, "pace_bytes_s": -1}]),
        (FROM_ENGINE[4], "paths", [["direct", -1, 0, 0.0, None]]),
        (FROM_ENGINE[4], "paths", [{"label": "direct", "connections": -1, "bytes_acknowledged": 0}]),
        (FROM_ENGINE[4], "waiting_bytes", -1),
        (FROM_ENGINE[4], "waiting_bytes", 1 << 62),
    ],
)
def test_a_figure_that_cannot_be_is_refused(message: EngineMessage, field: str, bad: object) -> None:
    fields = msgspec.msgpack.decode(protocol.pack(message))
    if field == "stats":
        bad = dict(zip(("running", "waiting", "kv_usage", "kv_free_tokens"), bad, strict=True))  # type: ignore[call-overload]
    for decoder in DECODERS.values():
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(msgspec.msgpack.encode({**fields, field: bad}))


@pytest.mark.parametrize("figure", [-1.0, float("nan"), float("inf"), 1e13])
@pytest.mark.parametrize("at", ["rate_bytes_s", "rtt_s"])
def test_a_path_whose_figure_cannot_be_is_refused(at: str, figure: float) -> None:
    path = {
        "label": "direct",
        "connections": 1,
        "bytes_acknowledged": 1,
        "bytes_in_flight": 0,
        "rate_bytes_s": 1.0,
        "rtt_s": 1.0,
    }
    report = next(message for message in FROM_ENGINE if isinstance(message, protocol.LinkReport))
    fields = msgspec.msgpack.decode(protocol.pack(report))
    assert protocol.from_engine.decode(msgspec.msgpack.encode({**fields, "paths": [path]}))
    with pytest.raises(msgspec.ValidationError):
        protocol.from_engine.decode(msgspec.msgpack.encode({**fields, "paths": [{**path, at: figure}]}))


def test_no_secret_is_shown() -> None:
    """What a log or a traceback may hold of a message."""
    for message in TO_ENGINE:
        text = repr(message)
        assert "s" * 32 not in text
        assert "r" * 32 not in text


@pytest.mark.parametrize("message", [*TO_ENGINE, *FROM_ENGINE], ids=lambda message: type(message).__name__)
def test_a_damaged_message_is_refused_or_is_a_message(message: EngineMessage) -> None:
    """The other process is ours, but it may have gone wrong."""
    rng = random.Random(1)
    whole = protocol.pack(message)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        for decoder in DECODERS.values():
            try:
                found = decoder.decode(bytes(damaged[: rng.choice((len(damaged), rng.randrange(len(damaged))))]))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            assert isinstance(found, EngineMessage)


def test_frames_may_be_split_at_every_byte() -> None:
    stream = b"".join(map(protocol.frame, TO_ENGINE))
    bodies = [protocol.pack(message) for message in TO_ENGINE]
    for cut in range(len(stream) + 1):
        unframer = Unframer()
        assert unframer.feed(stream[:cut]) + unframer.feed(stream[cut:]) == bodies
    unframer = Unframer()
    assert [body for byte in stream for body in unframer.feed(bytes([byte]))] == bodies


@given(bodies=st.lists(st.binary(max_size=30), max_size=6), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_frames_survive_any_cutting(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    unframer = Unframer()
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    assert [body for piece in pieces for body in unframer.feed(piece)] == bodies


@pytest.mark.parametrize("size", [protocol.MAX_MESSAGE + 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_an_absurd_length_is_an_error_before_its_bytes_come(size: int) -> None:
    unframer = Unframer()
    assert unframer.feed(struct.pack("<I", size)[:3]) == []
    with pytest.raises(EngineProtocolError, match=str(size)):
        unframer.feed(struct.pack("<I", size)[3:])


def test_a_length_at_the_bound_waits_for_its_bytes() -> None:
    assert Unframer().feed(struct.pack("<I", protocol.MAX_MESSAGE)) == []


def test_a_message_above_the_bound_is_not_sent() -> None:
    framing = len(protocol.frame(protocol.StartFailed(reason="x" * (1 << 20)))) - (1 << 20) - 4  # 4: the length itself
    most = protocol.MAX_MESSAGE - framing
    assert len(protocol.frame(protocol.StartFailed(reason="x" * most))) == protocol.MAX_MESSAGE + 4
    with pytest.raises(EngineProtocolError, match=f"of {protocol.MAX_MESSAGE + 1} bytes exceeds the bound"):
        protocol.frame(protocol.StartFailed(reason="x" * (most + 1)))
