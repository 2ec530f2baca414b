"""What people are shown of a network that serves two models: status, summaries of boxes, the topology."""

import msgspec

from p2pserve.coordinator import Phase
from p2pserve.coordinator.names import name_of
from p2pserve.node.box.hardware import Gpu
from p2pserve.node.messages import Advert
from p2pserve.node.observing.summaries import summarise_nodes
from p2pserve.sdk.actions.status_view import node_row, plan_lines, shared_gpu_lines
from p2pserve.sdk.seeing.topology import build_topology
from p2pserve.sdk.seeing.topology_view import plan_line

from .test_reports import FIRST, MODEL, SECOND, advert, node, plan, status

OTHER = msgspec.structs.replace(MODEL, service="other-2")
ONE, TWO = (
    plan((FIRST, Phase.MIXED)),
    msgspec.structs.replace(plan((SECOND, Phase.MIXED), version=2), service="other-2"),
)
BOXES = (node(FIRST, advert=advert()), node(SECOND, advert=advert(model=OTHER)))
BOTH = msgspec.structs.replace(status(*BOXES, plan=ONE), other_plans=(TWO,))


def test_status_shows_a_plan_for_each_service() -> None:
    lines = plan_lines(BOTH)
    heads = [line for line in lines if line.startswith("plan ")]
    assert heads == ["plan 3.1 for m-1, KV as kv4", "plan 3.2 for other-2, KV as kv4"]
    assert not any("none yet" in line or "not serving" in line for line in lines)
    assert [node_row(each, BOTH)[2] for each in BOXES] == ["mixed", "mixed"]


def test_status_names_a_service_that_has_no_plan_yet() -> None:
    lines = plan_lines(status(*BOXES, plan=ONE))
    assert "plan: none yet for other-2" in lines
    assert not any("none yet for m-1" in line for line in lines)


def test_a_box_of_another_service_does_not_serve_a_plan_that_names_it() -> None:
    lines = plan_lines(status(*BOXES, plan=plan((SECOND, Phase.MIXED))))
    assert any(line.startswith("  not serving: ") for line in lines)


def test_summaries_and_the_topology_have_every_box_with_its_phase_and_both_plans() -> None:
    assert {each.id: (each.phase, each.service) for each in summarise_nodes(BOTH)} == {
        FIRST: ("mixed", "m-1"),
        SECOND: ("mixed", "other-2"),
    }
    shown = list(plan_line(build_topology(BOTH, 0.0)))
    assert shown[:2] == ["plan 3.1 for m-1, KV as kv4", "plan 3.2 for other-2, KV as kv4"]


def test_an_earlier_releases_reader_of_a_status_sees_one_plan() -> None:
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(BOTH))
    assert told["plan"]["service"] == "m-1"
    assert [each["service"] for each in told["other_plans"]] == ["other-2"]


def with_gpu(uuid: str, *beside: str) -> Advert:
    told = advert(beside=beside)
    gpus = (Gpu(name="A40", memory_gib=45, uuid=uuid),)
    return msgspec.structs.replace(told, hardware=msgspec.structs.replace(told.hardware, gpus=gpus))


def test_status_says_when_two_nodes_were_started_apart_on_one_gpu() -> None:
    names = ", ".join(map(name_of, (FIRST, SECOND)))
    twice = status(node(FIRST, advert=with_gpu("GPU-1")), node(SECOND, advert=with_gpu("GPU-1")))
    (line,) = shared_gpu_lines(twice)
    assert line.startswith(f"on one GPU: {names}: plans count it for each")
    apart = status(node(FIRST, advert=with_gpu("GPU-1")), node(SECOND, advert=with_gpu("GPU-2")))
    emulated = status(*(node(peer, advert=with_gpu("emulated-0")) for peer in (FIRST, SECOND)))
    together = status(*(node(peer, advert=with_gpu("GPU-1", FIRST, SECOND)) for peer in (FIRST, SECOND)))
    assert [shared_gpu_lines(each) for each in (apart, emulated, together, BOTH)] == [[], [], [], []]


def test_what_members_say_of_their_gpus_makes_few_lines() -> None:
    told = [node(f"12D3-{number}", advert=with_gpu(f"GPU-{number // 2}")) for number in range(100)]
    assert len(shared_gpu_lines(status(*told))) == 3
