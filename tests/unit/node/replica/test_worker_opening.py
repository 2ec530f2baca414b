"""What a worker takes on, and what it refuses: requests, tickets and links."""

from typing import Any

import msgspec
import pytest

from p2pserve.bootstrap import PeerId, RemoteError, RequestTimeout, Role, Unreachable
from p2pserve.coordinator import Stage
from p2pserve.kvtransport.errors import TransferError
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.methods import TOKENS
from p2pserve.node.replica.kv_transfers import KvTransfers
from p2pserve.node.replica.worker import Worker
from p2pserve.node.settings import WAN
from p2pserve.node.testing import MemoryExchange, MemoryOutlets

from .worker_world import (
    MODEL,
    OWN,
    RANK,
    SAMPLING,
    SERVICE,
    WHOLE,
    A,
    B,
    D,
    P,
    World,
    alone,
    fault_of_outlets,
    opened_on,
    part_of,
    refusal,
    run,
    ticket,
    ticket_of,
)


@pytest.fixture
def world() -> World:
    return World()


def test_every_engine_of_the_replica_hears_how_much_a_step_may_compute(world: World) -> None:
    world.worker.limit_steps(0)
    assert world.asked() == []
    world.worker.limit_steps(768)
    world.worker.limit_steps(768)
    assert world.asked() == [protocol.LimitSteps(tokens=768)]
    world.use()  # it has been started again
    assert world.asked() == [protocol.LimitSteps(tokens=768)]
    world.worker.limit_steps(0)
    assert world.asked() == [protocol.LimitSteps(tokens=0)]


def test_a_decode_request_gets_a_ticket_for_the_link_of_its_prefill_node(world: World) -> None:
    (part,) = world.decode(deadline_s=60.0, codec="kv4").slices
    assert (part.ticket.codec, part.ticket.deadline_s) == ("kv4", 30.0)
    assert part.rank_slice == messages.RankSlice(source_peer=P, source=RANK, target_peer=OWN, target=RANK, slice=WHOLE)
    link = world.link(P)
    expected = protocol.Submit(
        request="decode:r",
        prompt=(1, 2, 3),
        sampling=SAMPLING,
        deadline_s=60.0,
        receive=(protocol.Inlet(slice=WHOLE, ticket=part.ticket, link=link),),
        receive_tokens=3,
    )
    assert world.asked() == [expected]
    assert not world.worker.idle


def test_every_ticket_has_an_id_of_its_own_and_the_link_of_its_sender(world: World) -> None:
    tickets = [ticket(world.decode(str(i), prefill=alone(f"p{i % 2}"))) for i in range(20)]
    assert len({each.transfer for each in tickets}) == 20
    assert [each.link for each in tickets] == [world.link(PeerId(f"p{i % 2}")).link for i in range(20)]
    assert world.link(PeerId("p0")) != world.link(PeerId("p1"))


def test_a_gateway_never_sees_the_secret_of_a_link(world: World) -> None:
    """Its answer goes through the gateway, and on to the prefill node from there."""
    opened = world.decode()
    secret = world.link(P).secret
    assert secret not in msgspec.msgpack.encode(opened)
    assert any(secret in protocol.pack(message) for message in world.asked())  # the engine needs it


def test_links_are_opened_for_the_service_that_is_served_here(world: World) -> None:
    def refused(service: str = SERVICE) -> str:
        with pytest.raises(RemoteError) as caught:
            world.link(P, service)
        return caught.value.code

    assert refused("another") == "wrong-service"
    first = world.link(P)
    assert world.link(P) == first
    world.worker.engine_lost("ended")
    assert refused() == "no-engine"
    world.use()
    again = world.link(P)
    assert again != first  # the receiving end of the first one is gone
    world.worker.drain()
    assert world.link(P) == again  # for what is still being finished


def test_kv_is_not_awaited_for_hours(world: World) -> None:
    assert ticket(world.decode(deadline_s=86400.0)).deadline_s == WAN.max_transfer_s


@pytest.mark.parametrize("changes", [{"receive_tokens": 0}, {"prefill": ()}, {"receive_tokens": 0, "prefill": ()}])
def test_a_request_of_one_box_needs_no_ticket(world: World, changes: dict[str, Any]) -> None:
    assert world.decode(**changes).slices == ()
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert (submit.receive, submit.send, submit.receive_tokens) == ((), (), 0)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_any_part_of_a_prompt_may_be_prefilled_elsewhere(world: World, split: int) -> None:
    world.decode(receive_tokens=split)
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert (submit.prompt, submit.receive_tokens, len(submit.receive)) == ((1, 2, 3), split, 1)


def test_more_tokens_than_there_are_cannot_come(world: World) -> None:
    assert refusal(world, "decode", receive_tokens=4) == "invalid"


@pytest.mark.parametrize(
    "stages",
    [
        (Stage(peer="p", tp=1, first_layer=0, last_layer=5),),
        (Stage(peer="p", tp=1, first_layer=1, last_layer=4),),
        (Stage(peer="p", tp=1, first_layer=0, last_layer=2), Stage(peer="p", tp=1, first_layer=2, last_layer=4)),
        (Stage(peer="p", tp=3, first_layer=0, last_layer=4),),
    ],
    ids=["too many layers", "a gap", "a box twice", "heads that cannot be shared"],
)
def test_stages_that_are_no_replica_of_this_model_are_the_askers_fault(world: World, stages: tuple[Stage, ...]) -> None:
    assert refusal(world, "decode", prefill=stages) == "invalid"
    assert world.worker.idle


def test_a_prefill_request_takes_its_ticket_along(world: World) -> None:
    assert world.prefill() == messages.Opened()
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert (submit.request, submit.sampling.max_tokens) == ("prefill:r", 1)
    (outlet,) = submit.send
    assert (outlet.slice, outlet.ticket, outlet.paths[0].host) == (WHOLE, ticket_of(), f"{D}.example")
    assert submit.receive == ()
    assert world.outlets.opened == [(part_of(), 3)]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (Unreachable("nobody answers"), "no-path", "nobody answers"),
        (RequestTimeout("link.open took too long"), "no-path", "link.open took too long"),
        (TransferError("every path costs too much"), "no-path", "every path costs too much"),
        (RemoteError("draining", "this node is leaving"), "draining", "this node is leaving"),
    ],
)
def test_a_prefill_without_a_path_to_its_decode_node_is_refused(
    world: World, error: Exception, code: str, said: str
) -> None:
    with fault_of_outlets(world, error), pytest.raises(RemoteError) as caught:
        world.prefill()
    assert caught.value.code == code
    assert said in caught.value.message
    assert world.asked() == []
    assert world.worker.idle
    assert world.prefill() == messages.Opened()  # its id is free again


def test_a_bug_on_the_way_to_an_outlet_leaves_nothing_behind(world: World) -> None:
    with fault_of_outlets(world, ZeroDivisionError("a bug")), pytest.raises(ZeroDivisionError):
        world.prefill()
    assert world.worker.idle


def test_kv_for_this_very_node_is_the_askers_fault(world: World) -> None:
    assert refusal(world, "prefill", slices=(part_of(target=OWN),)) == "invalid"
    assert world.outlets.opened == []
    assert world.worker.idle


@pytest.mark.parametrize("how", ["stopped", "gateway lost", "engine lost"])
def test_a_prefill_that_is_stopped_while_its_link_is_agreed_on_never_starts(world: World, how: str) -> None:
    def end(ticketed: messages.TicketedSlice) -> None:
        if how == "stopped":
            world.worker.stop_request(A, Role.WORKER, messages.StopRequest(request="r"))
        elif how == "gateway lost":
            world.worker.peer_lost(A)
        else:
            world.worker.engine_lost("ended")

    world.outlets.before = end
    with pytest.raises(RemoteError) as caught:
        world.prefill()
    assert caught.value.code == "stopped"
    assert not any(isinstance(message, protocol.Submit) for message in world.asked())
    assert world.worker.idle


def test_an_id_that_another_has_taken_meanwhile_stays_anothers(world: World) -> None:
    """Stopped and opened again while the first one's link was being agreed on."""

    def again(ticketed: messages.TicketedSlice) -> None:
        world.outlets.before = lambda ticketed: None
        world.worker.stop_request(A, Role.WORKER, messages.StopRequest(request="r"))
        world.prefill("r", B, seed=1)

    world.outlets.before = again
    with pytest.raises(RemoteError):
        world.prefill("r", A)
    (submit,) = [message for message in world.asked() if isinstance(message, protocol.Submit)]
    assert [outlet.ticket for outlet in submit.send] == [ticket_of(1)]
    world.report(ticket_of(1).transfer)
    assert [peer for peer, _, _ in world.news()] == [B]
    assert world.worker.idle


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_what_is_refused_never_reaches_the_engine(world: World, kind: str) -> None:
    assert refusal(world, kind, service="another") == "wrong-service"
    world.worker.engine_lost("ended")
    assert refusal(world, kind) == "no-engine"
    world.use()
    world.worker.drain()
    assert refusal(world, kind) == "draining"
    assert world.worker.idle


@pytest.mark.parametrize("moves", [False, True])
def test_what_migrates_is_told_to_its_gateway_and_its_kv_alone_is_still_sent(world: World, moves: bool) -> None:
    world.decode("r.1", receive_tokens=0)
    world.asked()
    if moves:
        world.worker.is_moving = True
    else:
        world.worker.drain()
    assert refusal(world, "prefill", request="r.2") == "draining"
    world.news()
    world.worker.migrate()
    assert world.news() == [(A, TOKENS.name, messages.Tokens(request="r.1", leaves=True))]
    assert refusal(world, "decode", request="s.1") == "draining"
    assert world.prefill("r.2") == messages.Opened()
    (submit,) = world.asked()
    assert isinstance(submit, protocol.Submit)
    assert submit.send
    world.worker.resume()
    world.use()  # another part, or the same again: what is over is over
    world.worker.drain()
    assert refusal(world, "prefill", request="t.2") == "draining"


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_an_engine_that_has_just_died_gets_nothing(world: World, kind: str) -> None:
    """Its process is gone, and nobody has told the worker yet."""
    world.engine.end("was killed by SIGKILL")
    assert refusal(world, kind) == "no-engine"
    assert world.worker.idle


def test_a_node_whose_engine_never_started_refuses() -> None:
    messenger = MemoryExchange().join(OWN)
    transfers = KvTransfers(model=MODEL, outlets=MemoryOutlets(), messenger=messenger)
    worker = Worker(service=SERVICE, transfers=transfers, messenger=messenger)
    body = messages.PrefillOpen(request="r", service=SERVICE, prompt=(1,), deadline_s=1.0, slices=(part_of(),))
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
