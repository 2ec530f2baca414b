"""What a gateway, or a client, knows of boxes that would serve and are dead."""

from typing import Any

from p2pserve.bootstrap import Address, PeerId, Role
from p2pserve.bootstrap.members.states import Member, MemberState
from p2pserve.node.requests.gateway_choice import GatewayFinder


class Members:
    """As much of a network as is looked at: who is in it."""

    def __init__(self, *found: Member) -> None:
        self._found = found

    def members(self) -> tuple[Member, ...]:
        return self._found


def member(peer: str, state: MemberState, gone_s: float | None = None, role: Role = Role.WORKER) -> Member:
    return Member(
        peer_id=PeerId(peer), role=role, state=state, address=Address("192.0.2.1", 4001), incarnation=1, gone_s=gone_s
    )


def test_dead_boxes_are_named_with_their_age_and_nobody_else() -> None:
    network: Any = Members(
        member("12D3first1", MemberState.DEAD, 130.0),
        member("12D3second", MemberState.ALIVE),
        member("12D3boot01", MemberState.LEFT, 10.0),
        member("12D3client", MemberState.DEAD, 10.0, Role.CLIENT),
        member("12D3unsure", MemberState.DEAD),
    )
    assert GatewayFinder(network).describe_dead() == "solar-deer is dead since 2 min"
    nobody: Any = Members()
    assert GatewayFinder(nobody).describe_dead() == ""
