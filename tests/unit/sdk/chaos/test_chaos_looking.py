"""What an engine must not have when all is over."""

import msgspec
import pytest

from p2pserve.node.box.hardware import Hardware
from p2pserve.node.engine.protocol import EngineStats
from p2pserve.node.messages import Advert, NodeStatus
from p2pserve.sdk.chaos.looking import describe_busy, find_relay

IDLE = EngineStats(running=0, waiting=0, kv_usage=0.0, kv_free_tokens=100)


def node(stats: EngineStats | None) -> NodeStatus:
    advert = Advert(hardware=Hardware(cores=4, memory_gib=8.0, processor="x"), draining=False, stats=stats)
    return NodeStatus(peer="p", role="worker", state="alive", address="127.0.0.1:1", rtt_s=None, advert=advert)


def test_an_idle_engine_or_one_that_has_not_run_has_nothing() -> None:
    assert describe_busy(node(IDLE)) == describe_busy(node(None)) == ""


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("running", 1, "1 + 0 requests"), ("waiting", 2, "0 + 2 requests"), ("kv_usage", 0.25, "25.0% of its KV blocks")],
)
def test_a_request_or_a_kv_block_that_is_left_is_said(field: str, value: float, said: str) -> None:
    assert said in describe_busy(node(msgspec.structs.replace(IDLE, **{field: value})))


def test_the_relay_is_whom_others_ask_first_to_reach_a_box_that_nobody_can_dial() -> None:
    members = [msgspec.structs.replace(node(None), peer=peer) for peer in "abcd"]
    assert find_relay(members) is None
    members[0] = msgspec.structs.replace(members[0], closed=True)
    assert find_relay(members) == "b"
    members[1] = msgspec.structs.replace(members[1], state="dead")
    assert find_relay(members) == "c"
    assert find_relay(members[:2]) is None
