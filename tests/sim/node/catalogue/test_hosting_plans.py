"""Whose word counts of who is to host what: that of the coordinator, in its own epoch."""

from contextlib import AsyncExitStack

import trio
from trio.testing import MockClock

from p2pserve.node.catalogue.messages import HOSTING, HostedService, HostingPlan

from ..test_joined import Member, join_both


def plan(epoch: int, name: str) -> HostingPlan:
    return HostingPlan(epoch=epoch, serial=1, services=(HostedService(name=name, boxes=("box",)),))


async def settle() -> None:
    with trio.move_on_after(3.0):
        await trio.sleep_forever()


def test_only_the_coordinators_plan_of_its_epoch_is_followed() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            members = await join_both(stack)
            for member in members:
                member.look()
            leader = members[0].joined.leader
            assert leader is not None
            leading, other = sorted(members, key=lambda member: member.joined.own != leader[0])
            assert leading.joined.own == leader[0]

            async def told(by: Member, said: HostingPlan) -> HostingPlan | None:
                by.joined.publish(HOSTING, said)
                await settle()
                other.look()
                return other.joined.view.hosting

            assert await told(other, plan(leader[1], "another's")) is None
            assert await told(leading, plan(leader[1] + 1, "another epoch's")) is None
            right = plan(leader[1], "chat")
            assert await told(leading, right) == right
            leading.joined.network.publish(HOSTING, b"\xc1")
            await settle()
            other.look()
            assert other.joined.view.hosting == right, "what is malformed changes nothing"

    trio.run(main, clock=MockClock(autojump_threshold=0))
