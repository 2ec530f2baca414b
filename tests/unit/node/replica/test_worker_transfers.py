"""What a worker makes of KV transfers, first tokens and the connections of links."""

import socket

import msgspec
import pytest

from p2pserve.bootstrap import Role
from p2pserve.kvtransport.wire.channel import LinkHello, LinkRole
from p2pserve.node import messages
from p2pserve.node.engine import protocol

from .worker_world import WANTED, A, B, P, World, refusal, ticket, ticket_of, tokens


@pytest.fixture
def world() -> World:
    return World()


def test_the_transfers_report_ends_the_prefill_and_its_sampled_token_does_not(world: World) -> None:
    world.prefill("r", A, seed=1)
    world.prefill("s", B, seed=2)
    world.step(protocol.NewTokens("prefill:r", (5,), "length"))
    assert world.news() == []
    assert "prefilling=2" in repr(world.worker)
    world.report(ticket_of(1).transfer)
    figures = messages.TransferFigures(
        raw_bytes=100,
        wire_bytes=50,
        frames=4,
        span_s=0.2,
        visible_s=0.1,
        hidden_fraction=0.5,
        mode="serialised",
        paths={"direct": 30, "relay": 20},
        resent_bytes=5,
        usd=0.25,
    )
    assert world.news() == [(A, "prefill.ended", messages.PrefillEnded(request="r", figures=figures))]
    world.asked()
    world.report(ticket_of(2).transfer, "cut")
    ((peer, method, message),) = world.news()
    assert (peer, method) == (B, "prefill.ended")
    assert isinstance(message, messages.PrefillEnded)
    assert message.failed == "cut"
    assert world.worker.idle
    assert world.asked() == [  # the rest of the prompt is for nobody
        protocol.Cancel(request="prefill:s"),
        protocol.AbortTransfer(transfer=ticket_of(2).transfer, reason="cut"),
    ]
    world.report(ticket_of(2).transfer, "cut")
    assert world.news() == []


def test_a_first_token_that_is_wanted_is_sampled_as_the_answer_and_told_once(world: World) -> None:
    world.prefill(sampling=WANTED)
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert submit.sampling == msgspec.structs.replace(WANTED, max_tokens=1)
    world.step(protocol.NewTokens("prefill:r", (5,), "length"))
    assert world.news() == [(A, "tokens", tokens("r", 5))]  # it is not the answer that ends by its length
    assert not world.worker.idle
    world.step(protocol.NewTokens("prefill:r", (6,)))
    assert world.news() == []
    world.report(ticket_of().transfer)
    assert [method for _, method, _ in world.news()] == ["prefill.ended"]
    assert world.worker.idle


def test_an_answer_that_ends_with_its_first_token_is_told_to(world: World) -> None:
    world.prefill(sampling=WANTED)
    world.step(protocol.NewTokens("prefill:r", (0,), "stop"))
    assert world.news() == [(A, "tokens", tokens("r", 0, finish="stop"))]


def test_kv_that_is_delivered_before_the_first_token_is_written_does_not_end_the_prefill(world: World) -> None:
    world.prefill(sampling=WANTED)
    world.asked()
    world.report(ticket_of().transfer)
    assert world.news() == []
    assert world.asked() == []
    world.step(protocol.NewTokens("prefill:r", (5,), "length"))
    (_, _, token), (_, method, ended) = world.news()
    assert token == tokens("r", 5)
    assert method == "prefill.ended"
    assert isinstance(ended, messages.PrefillEnded)
    assert ended.failed == ""
    assert ended.figures is not None
    assert world.worker.idle


def test_kv_that_fails_ends_the_prefill_whether_or_not_its_token_is_written(world: World) -> None:
    world.prefill(sampling=WANTED)
    world.asked()
    world.report(ticket_of().transfer, "cut")
    assert [method for _, method, _ in world.news()] == ["prefill.ended"]
    assert protocol.Cancel(request="prefill:r") in world.asked()
    world.step(protocol.NewTokens("prefill:r", (5,), "length"))
    assert world.news() == []


def test_a_gateway_that_cannot_be_told_the_first_token_loses_its_prefill(world: World) -> None:
    world.prefill(sampling=WANTED)
    world.asked()
    world.exchange.lost.add(A)
    world.step(protocol.NewTokens("prefill:r", (5,), "length"))
    assert world.asked()[0] == protocol.Cancel(request="prefill:r")
    assert world.worker.idle


def test_the_first_token_is_passed_on_by_its_gateway_only(world: World) -> None:
    world.decode(awaits_first_token=True)
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert submit.awaits_first_token
    body = messages.FirstToken(request="r", token=5)
    world.worker.first_token(B, Role.WORKER, body)
    world.worker.first_token(A, Role.WORKER, messages.FirstToken(request="unknown", token=5))
    assert world.asked() == []
    world.worker.first_token(A, Role.WORKER, body)
    assert world.asked() == [protocol.SetFirstToken(request="decode:r", token=5)]


def test_nobody_waits_for_a_first_token_without_kv_of_the_whole_prompt(world: World) -> None:
    world.decode(awaits_first_token=True, prefill=())
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert not submit.awaits_first_token
    assert refusal(world, "decode", request="s", awaits_first_token=True, receive_tokens=2) == "invalid"


@pytest.mark.parametrize("finish", ["deadline", "error", "refused"])
@pytest.mark.parametrize("sampling", [None, WANTED])
def test_a_prefill_that_ends_early_is_reported(world: World, finish: str, sampling: protocol.Sampling | None) -> None:
    world.prefill(sampling=sampling)
    world.step(protocol.NewTokens("prefill:r", (), finish))
    ((_, _, message),) = world.news()
    assert isinstance(message, messages.PrefillEnded)
    assert finish in message.failed
    assert world.worker.idle


def test_no_more_kv_is_passed_on_by_its_gateway_only(world: World) -> None:
    found = ticket(world.decode())
    world.asked()
    body = messages.StopTransfer(request="r", reason="prefill failed")
    world.worker.stop_transfer(B, Role.WORKER, body)
    assert world.asked() == []
    world.worker.stop_transfer(A, Role.WORKER, body)
    assert world.asked() == [protocol.AbortTransfer(transfer=found.transfer, reason="prefill failed")]
    world.decode("alone", receive_tokens=0)
    world.asked()
    world.worker.stop_transfer(A, Role.WORKER, messages.StopTransfer(request="alone", reason="x"))
    world.worker.stop_transfer(A, Role.WORKER, messages.StopTransfer(request="unknown", reason="x"))
    assert world.asked() == []


def hello_of(link: bytes) -> bytes:
    return LinkHello(link, b"n" * 16, LinkRole.SENDER).pack()


def test_an_accepted_socket_goes_to_the_engine_with_its_hello(world: World) -> None:
    found = ticket(world.decode())
    hello = hello_of(found.link)
    near, far = socket.socketpair()
    assert world.worker.attach(hello, near)
    assert near.fileno() == -1  # this process's copy is closed
    assert world.engine.hellos == [hello]
    far.close()


def test_the_connections_of_a_link_outlive_its_requests(world: World) -> None:
    """They are kept warm for the next one."""
    world.link(P)
    world.decode()
    world.step(protocol.NewTokens("decode:r", (1,), "length"))
    near, far = socket.socketpair()
    with far:
        world.worker.attach(hello_of(world.link(P).link), near)
    assert len(world.engine.hellos) == 1


@pytest.mark.parametrize("case", ["unknown", "sender gone", "engine lost", "engine killed", "engine does not read"])
def test_a_socket_that_nobody_waits_for_is_closed(world: World, case: str) -> None:
    found = ticket(world.decode())
    link = b"?" * 16 if case == "unknown" else found.link
    if case == "sender gone":
        world.worker.peer_lost(P)
    elif case == "engine lost":
        world.worker.engine_lost("ended")
    elif case == "engine killed":
        world.engine.end("was killed by SIGKILL")
    elif case == "engine does not read":
        world.engine.takes_connections = False
    near, far = socket.socketpair()
    with far:
        assert world.worker.attach(hello_of(link), near)
        assert near.fileno() == -1
        far.settimeout(1)
        assert far.recv(1) == b""
