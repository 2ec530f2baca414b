"""The worker between gateways and a scripted engine: who is told what, and what the engine is asked for."""

import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import trio

from p2pserve.bootstrap import Address, PeerId, PeerLost, RemoteError, Role
from p2pserve.kvtransport.testing import ticket_for_tests
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.engine_link import EngineLink, EngineLost
from p2pserve.node.worker import MAX_TRANSFER_S, Worker

A, B = PeerId("gateway-a"), PeerId("gateway-b")
SERVICE = "tiny-1234"
SAMPLING = protocol.Sampling(max_tokens=5)
STATS = protocol.EngineStats(1, 0, 0.5, 100)
READY = protocol.Ready(
    pid=1,
    engine="scripted",
    device="cpu",
    dtype="float32",
    layers=4,
    kv_heads=2,
    head_dim=64,
    vocabulary=4096,
    max_model_len=512,
    kv_tokens=1000,
    eos_tokens=(0,),
    load_s=0.1,
    tflops=1.0,
    memory_gbps=1.0,
)

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a handler that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("the handler waited")


class World:
    """A worker, its engine's end of the link, and what gateways were told."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.sockets, self.engine_sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.engine_messages = theirs
        self.told: list[tuple[PeerId, str, messages.Message]] = []
        self.gone: set[PeerId] = set()
        self.worker = Worker(service=SERVICE, announce=Address("192.0.2.7", 4321), notify=self._notify)
        self.link = EngineLink(trio.socket.from_stdlib_socket(ours), self.sockets, self.worker.on_engine_message)
        self.link.ready = READY
        self.worker.use(self.link)

    def _notify(self, peer: PeerId, method: str, message: messages.Message) -> None:
        if peer in self.gone:
            raise PeerLost("gone")
        self.told.append((peer, method, message))

    def close(self) -> None:
        async def hang_up() -> None:
            self.link.close()

        trio.run(hang_up)  # trio closes its sockets only inside a run
        self.engine_messages.close()
        self.engine_sockets.close()

    def asked(self) -> list[protocol.Message]:
        """What the engine has been sent since the last call."""
        found = []
        while True:
            try:
                found.append(self.link._outbox.receive_nowait())
            except trio.WouldBlock:
                return found

    def news(self) -> list[tuple[PeerId, str, messages.Message]]:
        told, self.told = self.told, []
        return told

    def decode(self, request: str = "r", gateway: PeerId = A, **changes: Any) -> messages.DecodeOpened:
        fields: dict[str, Any] = {
            "request": request,
            "service": SERVICE,
            "prompt": (1, 2, 3),
            "sampling": SAMPLING,
            "deadline_s": 60.0,
            "receive_tokens": 3,
            "codec": "raw",
        }
        body = messages.DecodeOpen(**{**fields, **changes})
        return run(self.worker.open_decode(gateway, Role.WORKER, body))

    def prefill(self, request: str = "r", gateway: PeerId = A, seed: int = 0, **changes: Any) -> messages.Opened:
        fields: dict[str, Any] = {
            "request": request,
            "service": SERVICE,
            "prompt": (1, 2, 3),
            "deadline_s": 60.0,
            "ticket": ticket_for_tests(seed),
        }
        body = messages.PrefillOpen(**{**fields, **changes})
        return run(self.worker.open_prefill(gateway, Role.WORKER, body))

    def step(self, *outputs: protocol.NewTokens) -> None:
        self.worker.on_engine_message(protocol.Step(outputs=outputs, stats=STATS))

    def report(self, transfer: bytes, reason: str = "") -> None:
        self.worker.on_engine_message(
            protocol.TransferReport(
                transfer=transfer,
                delivered=not reason,
                reason=reason,
                frames=4,
                raw_bytes=100,
                wire_bytes=50,
                span_s=0.2,
                visible_s=0.1,
                hidden_fraction=0.5,
            )
        )


@contextmanager
def open_world() -> Iterator[World]:
    made = World()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def world() -> Iterator[World]:
    with open_world() as made:
        yield made


def tokens(request: str = "r", *ids: int, **fields: Any) -> messages.Tokens:
    return messages.Tokens(request=request, tokens=ids, **fields)


# ---- opening ----------------------------------------------------------------------------------------------


def test_a_decode_request_gets_a_ticket_for_this_box_and_reaches_the_engine(world: World) -> None:
    ticket = world.decode(deadline_s=60.0, codec="kv4").ticket
    assert ticket is not None
    assert (ticket.host, ticket.port, ticket.codec, ticket.deadline_s) == ("192.0.2.7", 4321, "kv4", 30.0)
    expected = protocol.Submit(
        request="decode:r",
        prompt=(1, 2, 3),
        sampling=SAMPLING,
        deadline_s=60.0,
        receive=ticket,
        receive_tokens=3,
    )
    assert world.asked() == [expected]
    assert not world.worker.idle


def test_every_ticket_has_an_id_and_a_key_of_its_own(world: World) -> None:
    tickets = [world.decode(str(i)).ticket for i in range(20)]
    assert len({ticket.transfer for ticket in tickets if ticket}) == 20
    assert len({ticket.key for ticket in tickets if ticket}) == 20


def test_kv_is_not_awaited_for_hours(world: World) -> None:
    ticket = world.decode(deadline_s=86400.0).ticket
    assert ticket is not None
    assert ticket.deadline_s == MAX_TRANSFER_S


def test_a_request_of_one_box_needs_no_ticket(world: World) -> None:
    assert world.decode(receive_tokens=0).ticket is None
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert (submit.receive, submit.send, submit.receive_tokens) == (None, None, 0)


def test_a_prefill_request_takes_its_ticket_along(world: World) -> None:
    assert world.prefill() == messages.Opened()
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert (submit.request, submit.send, submit.sampling.max_tokens) == ("prefill:r", ticket_for_tests(0), 1)


def opened_on(world: World, kind: str, **changes: Any) -> object:
    opener: Callable[..., object] = world.decode if kind == "decode" else world.prefill
    return opener(**changes)


def refusal(world: World, kind: str, **changes: Any) -> str:
    with pytest.raises(RemoteError) as caught:
        opened_on(world, kind, **changes)
    assert world.asked() == []
    assert "\n" not in caught.value.message
    return caught.value.code


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_what_is_refused_never_reaches_the_engine(world: World, kind: str) -> None:
    assert refusal(world, kind, service="another") == "wrong-service"
    world.worker.engine_lost("ended")
    assert refusal(world, kind) == "no-engine"
    world.worker.use(world.link)
    world.worker.drain()
    assert refusal(world, kind) == "draining"
    assert world.worker.idle


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_an_engine_that_has_just_died_gets_nothing(world: World, kind: str) -> None:
    """Its process is gone, and nobody has told the worker yet."""
    world.link._gone.set()
    assert refusal(world, kind) == "no-engine"
    assert world.worker.idle


def test_a_node_whose_engine_never_started_refuses() -> None:
    worker = Worker(service=SERVICE, announce=Address("192.0.2.7", 1), notify=lambda *_: None)
    body = messages.PrefillOpen(request="r", service=SERVICE, prompt=(1,), deadline_s=1.0, ticket=ticket_for_tests())
    with pytest.raises(RemoteError) as caught:
        run(worker.open_prefill(A, Role.WORKER, body))
    assert caught.value.code == "no-engine"


def test_a_codec_that_is_none_is_the_askers_fault(world: World) -> None:
    assert refusal(world, "decode", codec="zip") == "invalid"
    assert world.worker.idle


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_nobody_takes_over_the_id_of_anothers_request(world: World, kind: str) -> None:
    opened_on(world, kind)
    world.asked()
    assert refusal(world, kind, gateway=B) == "invalid"
    world.worker.engine_lost("ended")
    assert [peer for peer, _, _ in world.news()] == [A]


# ---- tokens -----------------------------------------------------------------------------------------------


def test_tokens_go_to_the_gateway_that_asked(world: World) -> None:
    world.decode("r", A)
    world.decode("s", B)
    world.step(protocol.NewTokens("decode:r", (5,), None, 2), protocol.NewTokens("decode:s", (6, 7)))
    assert world.news() == [
        (A, "tokens", tokens("r", 5, cached_tokens=2)),
        (B, "tokens", tokens("s", 6, 7)),
    ]
    assert world.worker.stats == STATS
    world.step(protocol.NewTokens("decode:r", (8,), "length"))
    assert world.news() == [(A, "tokens", tokens("r", 8, finish="length"))]
    world.step(protocol.NewTokens("decode:r", (9,)), protocol.NewTokens("decode:nobody", (1,)))
    assert world.news() == []
    world.step(protocol.NewTokens("decode:s", (), "deadline"))
    assert world.news() == [(B, "tokens", tokens("s", finish="deadline"))]
    assert world.worker.idle


def test_an_engine_that_gives_up_a_request_lets_another_have_it(world: World) -> None:
    world.decode()
    world.step(protocol.NewTokens("decode:r", (), "error"))
    ((_, _, message),) = world.news()
    assert isinstance(message, messages.Tokens)
    assert message.failed
    assert message.finish is None
    assert world.worker.idle


def test_what_an_engine_refuses_is_said_with_its_reason(world: World) -> None:
    world.decode()
    world.step(protocol.NewTokens("decode:r", (), "refused", reason="the prompt is too long"))
    assert world.news() == [(A, "tokens", tokens("r", refused="the prompt is too long"))]
    assert world.worker.idle


def test_a_gateway_that_does_not_read_loses_its_request(world: World) -> None:
    """An answer with a gap would be worse than none."""
    world.decode()
    world.asked()
    world.gone.add(A)
    world.step(protocol.NewTokens("decode:r", (5,)))
    assert world.asked() == [protocol.Cancel(request="decode:r")]
    assert world.worker.idle
    world.gone.clear()
    world.step(protocol.NewTokens("decode:r", (6,)))
    assert world.news() == []


# ---- transfers --------------------------------------------------------------------------------------------


def test_the_transfers_report_ends_the_prefill_and_its_sampled_token_does_not(world: World) -> None:
    world.prefill("r", A, seed=1)
    world.prefill("s", B, seed=2)
    world.step(protocol.NewTokens("prefill:r", (5,), "length"))
    assert world.news() == []
    assert "prefilling=2" in repr(world.worker)
    world.report(ticket_for_tests(1).transfer)
    figures = messages.TransferFigures(
        raw_bytes=100, wire_bytes=50, frames=4, span_s=0.2, visible_s=0.1, hidden_fraction=0.5
    )
    assert world.news() == [(A, "prefill.ended", messages.PrefillEnded(request="r", figures=figures))]
    world.asked()
    world.report(ticket_for_tests(2).transfer, "cut")
    ((peer, method, message),) = world.news()
    assert (peer, method) == (B, "prefill.ended")
    assert isinstance(message, messages.PrefillEnded)
    assert message.failed == "cut"
    assert world.worker.idle
    assert world.asked() == [protocol.Cancel(request="prefill:s")]  # the rest of the prompt is for nobody
    world.report(ticket_for_tests(2).transfer, "cut")
    assert world.news() == []


@pytest.mark.parametrize("finish", ["deadline", "error", "refused"])
def test_a_prefill_that_ends_early_is_reported(world: World, finish: str) -> None:
    world.prefill()
    world.step(protocol.NewTokens("prefill:r", (), finish))
    ((_, _, message),) = world.news()
    assert isinstance(message, messages.PrefillEnded)
    assert finish in message.failed
    assert world.worker.idle


def test_no_more_kv_is_passed_on_by_its_gateway_only(world: World) -> None:
    ticket = world.decode().ticket
    assert ticket is not None
    world.asked()
    body = messages.StopTransfer(request="r", reason="prefill failed")
    world.worker.stop_transfer(B, Role.WORKER, body)
    assert world.asked() == []
    world.worker.stop_transfer(A, Role.WORKER, body)
    assert world.asked() == [protocol.AbortTransfer(transfer=ticket.transfer, reason="prefill failed")]
    world.decode("alone", receive_tokens=0)
    world.asked()
    world.worker.stop_transfer(A, Role.WORKER, messages.StopTransfer(request="alone", reason="x"))
    world.worker.stop_transfer(A, Role.WORKER, messages.StopTransfer(request="unknown", reason="x"))
    assert world.asked() == []


def test_an_accepted_socket_goes_to_the_engine_whose_request_waits_for_it(world: World) -> None:
    ticket = world.decode().ticket
    assert ticket is not None
    near, far = socket.socketpair()
    world.worker.attach(ticket.transfer, near)
    assert near.fileno() == -1  # this process's copy is closed
    transfer, descriptors, _, _ = socket.recv_fds(world.engine_sockets, 64, 1)
    with far, socket.socket(fileno=descriptors[0]) as handed:
        assert transfer == ticket.transfer
        far.sendall(b"hello")
        assert handed.recv(5) == b"hello"


def fill(link: EngineLink) -> None:
    """Hand over sockets until the engine's end takes no more."""
    with socket.socket() as spare:
        for _ in range(10_000):
            try:
                link.attach(b"x" * 16, spare)
            except EngineLost:
                return
    raise AssertionError("the link took 10,000 sockets that nobody read")


@pytest.mark.parametrize("case", ["unknown", "finished", "engine lost", "engine does not read", "engine hung up"])
def test_a_socket_that_nobody_waits_for_is_closed(world: World, case: str) -> None:
    ticket = world.decode().ticket
    assert ticket is not None
    transfer = b"?" * 16 if case == "unknown" else ticket.transfer
    if case == "finished":
        world.step(protocol.NewTokens("decode:r", (1,), "length"))
    elif case == "engine lost":
        world.worker.engine_lost("ended")
    elif case == "engine hung up":
        world.engine_sockets.close()
    elif case == "engine does not read":
        fill(world.link)
    near, far = socket.socketpair()
    with far:
        world.worker.attach(transfer, near)
        assert near.fileno() == -1
        far.settimeout(1)
        assert far.recv(1) == b""


# ---- ends -------------------------------------------------------------------------------------------------


def test_a_lost_engine_is_told_to_every_gateway_even_when_one_is_gone(world: World) -> None:
    world.decode("r", A)
    world.decode("s", B)
    world.prefill("t", B)
    world.step()
    world.asked()
    world.gone.add(A)
    world.worker.engine_lost("was killed by SIGKILL")
    failed = "the engine process was killed by SIGKILL"
    assert world.news() == [
        (B, "tokens", messages.Tokens(request="s", failed=failed)),
        (B, "prefill.ended", messages.PrefillEnded(request="t", failed=failed)),
    ]
    assert world.worker.idle
    assert world.worker.stats is None
    assert world.asked() == []


def test_a_lost_gateway_cancels_its_requests_and_no_others(world: World) -> None:
    world.decode("r", A)
    world.prefill("r", B, seed=1)
    world.prefill("s", A, seed=2)
    world.decode("u", B)
    world.asked()
    world.worker.gateway_lost(A)
    assert world.asked() == [
        protocol.Cancel(request="decode:r"),
        protocol.Cancel(request="prefill:s"),
        protocol.AbortTransfer(transfer=ticket_for_tests(2).transfer, reason="the request was cancelled"),
    ]
    world.step(protocol.NewTokens("decode:r", (1,)), protocol.NewTokens("decode:u", (2,), "stop"))
    world.report(ticket_for_tests(1).transfer)
    assert [(peer, method) for peer, method, _ in world.news()] == [(B, "tokens"), (B, "prefill.ended")]
    assert world.worker.idle


def test_only_the_gateway_that_asked_may_stop_a_request(world: World) -> None:
    world.decode("r", A)
    world.prefill("r", B, seed=1)
    world.asked()
    world.worker.stop_request(PeerId("stranger"), Role.WORKER, messages.StopRequest(request="r"))
    world.worker.stop_request(A, Role.WORKER, messages.StopRequest(request="unknown"))
    assert world.asked() == []
    world.worker.stop_request(A, Role.WORKER, messages.StopRequest(request="r"))
    assert world.asked() == [protocol.Cancel(request="decode:r")]
    world.worker.stop_request(B, Role.WORKER, messages.StopRequest(request="r"))
    assert world.asked()[0] == protocol.Cancel(request="prefill:r")
    assert world.worker.idle
    assert world.news() == []


def test_draining_finishes_what_is_running(world: World) -> None:
    world.decode()
    world.worker.drain()
    assert not world.worker.idle
    world.step(protocol.NewTokens("decode:r", (5,), "stop"))
    assert world.news() == [(A, "tokens", tokens("r", 5, finish="stop"))]
    assert world.worker.idle


# ---- the link ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", protocol.frame(protocol.Cancel(request="x"))],
    ids=["absurd length", "no message", "wrong direction"],
)
def test_an_engine_that_talks_nonsense_is_hung_up_on(world: World, garbage: bytes) -> None:
    """It must not take its agent with it."""

    async def main() -> None:
        world.engine_messages.sendall(garbage)
        with trio.fail_after(5):
            await world.link.serve()

    trio.run(main)
    assert not world.link.running
    with pytest.raises(EngineLost):
        world.link.send(protocol.Stop())
