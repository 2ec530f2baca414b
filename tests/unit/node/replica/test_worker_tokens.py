"""What a worker tells gateways of tokens, and how requests and engines end."""

import random

import pytest

from p2pserve.bootstrap import PeerId, Role
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.tickets import issue_link
from p2pserve.node import messages
from p2pserve.node.engine import protocol

from .worker_world import LINK, STATS, A, B, P, World, ticket_of, tokens

PATHS = (DialPath("192.0.2.7", 4321, streams=2),)


@pytest.fixture
def world() -> World:
    return World()


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
    world.exchange.lost.add(A)
    world.step(protocol.NewTokens("decode:r", (5,)))
    assert world.asked() == [protocol.Cancel(request="decode:r")]
    assert world.worker.idle
    world.exchange.lost.clear()
    world.step(protocol.NewTokens("decode:r", (6,)))
    assert world.news() == []


def test_a_lost_engine_is_told_to_every_gateway_even_when_one_is_gone(world: World) -> None:
    world.decode("r", A)
    world.decode("s", B)
    world.prefill("t", B)
    world.step()
    world.asked()
    world.exchange.lost.add(A)
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
    world.worker.peer_lost(A)
    assert world.asked() == [
        protocol.Cancel(request="decode:r"),
        protocol.Cancel(request="prefill:s"),
        protocol.AbortTransfer(transfer=ticket_of(2).transfer, reason="the request was cancelled"),
    ]
    world.step(protocol.NewTokens("decode:r", (1,)), protocol.NewTokens("decode:u", (2,), "stop"))
    world.report(ticket_of(1).transfer)
    assert [(peer, method) for peer, method, _ in world.news()] == [(B, "tokens"), (B, "prefill.ended")]
    assert world.worker.idle


def test_a_lost_node_takes_its_links_along(world: World) -> None:
    """In both directions; the requests that wait for its KV compute it, and their gateways are still there."""
    inlet = world.link(P)
    world.decode("r", A)
    outgoing = issue_link(600.0, random.Random(5).randbytes)
    world.outlets.links = {P: outgoing}
    world.asked()
    world.worker.peer_lost(P)
    gone = "the node at the other end is gone"
    assert world.asked() == [
        protocol.CloseLink(link=inlet.link, reason=gone),
        protocol.CloseLink(link=outgoing.link, reason=gone),
    ]
    assert world.outlets.links == {}
    assert world.link(P) != inlet
    world.worker.peer_lost(PeerId("stranger"))
    assert world.asked() == []
    world.step(protocol.NewTokens("decode:r", (1,), "length"))
    assert [peer for peer, _, _ in world.news()] == [A]


def test_paths_and_reports_of_links_pass_between_engine_and_outlets(world: World) -> None:
    world.worker.set_paths(LINK.link, PATHS)
    assert world.asked() == [protocol.SetLinkPaths(link=LINK.link, paths=PATHS)]
    report = protocol.LinkReport(link=LINK.link, paths=(), transfers=1, waiting_bytes=5, blocked=False)
    world.worker.on_engine_message(report)
    assert world.outlets.reports == [report]
    assert world.outlets.dtype == "float32"
    world.outlets.links = {P: LINK}
    world.worker.engine_lost("ended")
    assert world.outlets.links == {}
    world.worker.set_paths(LINK.link, PATHS)
    assert world.asked() == []


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
