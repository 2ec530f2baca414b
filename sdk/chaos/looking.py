"""What the boxes of a run say of their network: who has which role, and whether all is as it should be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, final

import trio

from ...bootstrap import NetworkSettings, PeerId, Role
from ...coordinator.plan import Groups
from ...node.links.reach import choose_relays
from ...node.messages import NodeStatus, Status, StatusQuery
from ...node.methods import PLAN_REGROUP, STATUS
from ...node.planning.messages import RegroupOrder
from ..errors import ClientError, DemoFailed, NotReady
from ..session import Session
from .boxes import ChaosBox, ChaosNetwork
from .regrouping import GroupChange, choose_groups
from .schedule import BoxRoles, VictimRole

ASK_S: Final = 3.0
POLL_S: Final = 0.1
WATCH_S: Final = 0.5
BACK_S: Final = 90.0
BEGIN_S: Final = 10.0  # from an admin's order to a plan that begins with it


@final
class NetworkLook:
    """The latest that a box has said."""

    def __init__(self, network: ChaosNetwork, sessions: list[Session]) -> None:
        self._network = network
        self._sessions = sessions
        self._seen: Status | None = None

    def __repr__(self) -> str:
        return f"<NetworkLook coordinator={self._seen.coordinator if self._seen else None}>"

    async def watch(self, away: Collection[int]) -> None:
        """Ask a box that is not among these, again and again."""
        while True:
            here = [box for box in self._network.boxes if box.number not in away and box.peer]
            with trio.move_on_after(ASK_S):
                try:
                    self._seen = await self._ask(here[0])
                except ClientError:
                    pass  # it was lost in this moment, or is hung: the next one is asked soon
            await trio.sleep(WATCH_S)

    async def wait_whole(self, limit_s: float, *, idle: bool = False) -> None:
        """Wait until all see all and have one plan; `idle`: and nothing is under way. Raises DemoFailed."""
        lacking = "nobody answers"
        with trio.move_on_after(limit_s):
            while True:
                try:
                    lacking = self._find_lacking([await self._ask(box) for box in self._network.boxes], idle)
                except ClientError as error:
                    lacking = str(error)
                if not lacking:
                    return
                await trio.sleep(POLL_S)
        raise DemoFailed(f"the network was not whole within {limit_s:g} s: {lacking}")

    async def wait_back(self, box: ChaosBox) -> None:
        """Wait until others see that it is alive and its engine ready. Raises DemoFailed."""
        with trio.move_on_after(BACK_S):
            await trio.sleep(WATCH_S)
            while not self.is_ready(box):  # noqa: ASYNC110 (of other processes)
                await trio.sleep(POLL_S)
            return
        raise DemoFailed(f"box {box.number} did not serve again within {BACK_S:g} s")

    def choose_groups(self, here: Collection[str], pick: float) -> GroupChange | None:
        """What may be ordered now, of the boxes that are `here`."""
        seen = self._seen
        return choose_groups(seen.plan, seen.nodes, here, pick) if seen is not None and seen.plan is not None else None

    async def order(self, admin: Session, groups: Groups) -> None:
        """Tell the coordinator which groups are wanted. Raises ClientError where it takes no order now."""
        seen = self._seen
        if seen is None or seen.plan is None or seen.coordinator is None:
            raise NotReady("nobody coordinates the network")
        order = RegroupOrder(service=seen.plan.service, groups=groups)
        await admin.ask(PLAN_REGROUP, order, ASK_S, PeerId(seen.coordinator))

    async def wait_regrouped(self) -> None:
        """Wait until the plan is on its way to other groups, and then until it is no longer. Raises DemoFailed."""
        for is_under_way, limit_s in ((True, BEGIN_S), (False, BACK_S)):
            with trio.move_on_after(limit_s) as limit:
                while self._is_regrouping() is not is_under_way:  # noqa: ASYNC110 (of other processes)
                    await trio.sleep(POLL_S)
            if limit.cancelled_caught and not is_under_way:
                raise DemoFailed(f"the boxes had not taken their new parts within {BACK_S:g} s")

    def _is_regrouping(self) -> bool:
        return self._seen is not None and self._seen.plan is not None and self._seen.plan.regrouping is not None

    def is_ready(self, box: ChaosBox) -> bool:
        """Whether it is alive, with an engine that is ready if it has one."""
        node = self._node(box)
        if node is None or node.state != "alive" or node.advert is None:
            return False
        if box is self._network.bootstrap:
            return True
        return node.advert.engine is not None and node.advert.engine.state == "ready"

    def engine_pid(self, box: ChaosBox) -> int:
        """Of its engine, 0 where nothing is known of it."""
        node = self._node(box)
        engine = node.advert.engine if node is not None and node.advert is not None else None
        return engine.pid if engine is not None else 0

    def roles_of(self, box: ChaosBox, *, is_kept: bool) -> BoxRoles:
        """What it does just now."""
        roles = {VictimRole.BOOTSTRAP} if box is self._network.bootstrap else set()
        if self._seen is not None and box.peer == self._seen.coordinator:
            roles.add(VictimRole.COORDINATOR)
        if any(box.peer in session.asked for session in self._sessions):
            roles.add(VictimRole.GATEWAY)
        if self._seen is not None and box.peer == find_relay(self._seen.nodes):
            roles.add(VictimRole.RELAY)
        node = self._node(box)
        if node is not None and node.advert is not None and node.advert.phase is not None:
            roles.add(VictimRole(node.advert.phase.value))
        return BoxRoles(number=box.number, roles=frozenset(roles), is_kept=is_kept)

    async def _ask(self, box: ChaosBox) -> Status:
        return await self._sessions[0].ask(STATUS, StatusQuery(), ASK_S, PeerId(box.peer))

    def _find_lacking(self, seen: list[Status], idle: bool) -> str:
        """What is not yet as it should be, as these see it."""
        numbers = {box.peer: box.number for box in self._network.boxes}
        serving = {box.peer for box in self._network.serving}
        self._seen = seen[0]
        for box, status in zip(self._network.boxes, seen, strict=True):
            alive = {node.peer for node in status.nodes if node.state == "alive"}
            if missing := sorted(numbers[peer] for peer in numbers.keys() - alive):
                return f"box {box.number} does not see box {missing[0]}"
            if status.plan != seen[0].plan or status.coordinator != seen[0].coordinator:
                own, there = _describe_lead(status, numbers), _describe_lead(seen[0], numbers)
                return f"box {box.number} follows {own}, the bootstrap {there}"
        planned = set(seen[0].plan.peers) & serving if seen[0].plan is not None else set()
        # A box that has failed often is left out for a while: then a part of them is enough.
        if not planned or not (planned == serving or idle):
            return f"the plan has {len(planned)} of {len(serving)} boxes"
        for box in self._network.serving:
            if not self.is_ready(box):
                return f"the engine of box {box.number} is not ready"
            if idle and (busy := describe_busy(self._node(box))):
                return f"box {box.number} {busy}"
        return ""

    def _node(self, box: ChaosBox) -> NodeStatus | None:
        if self._seen is None:
            return None
        return next((node for node in self._seen.nodes if node.peer == box.peer), None)


def find_relay(nodes: Sequence[NodeStatus]) -> str | None:
    """Which box others ask first for a connection to one that nobody can dial; None where there is no such box."""
    alive = [PeerId(node.peer) for node in nodes if node.state == "alive" and node.role == Role.WORKER.value]
    closed = {PeerId(node.peer) for node in nodes if node.closed}
    for peer in sorted(closed.intersection(alive)):
        for relay in choose_relays(peer, alive, closed, alive, NetworkSettings().full_mesh):
            return relay
    return None


def _describe_lead(status: Status, numbers: Mapping[str, int]) -> str:
    """Which plan a box follows, and whom."""
    plan = f"plan {status.plan.epoch}.{status.plan.version}" if status.plan is not None else "no plan"
    leader = numbers.get(status.coordinator or "")
    return f"{plan} and {f'box {leader}' if leader is not None else 'nobody'} in epoch {status.epoch}"


def describe_busy(node: NodeStatus | None) -> str:
    """What an engine has at rest that should have nothing; "" for nothing. One that has not run a step since it was
    started tells nothing of itself, as all stages of a replica but the first do."""
    stats = node.advert.stats if node is not None and node.advert is not None else None
    if stats is not None and (stats.running or stats.waiting or stats.kv_usage):
        return f"holds {stats.running} + {stats.waiting} requests and {stats.kv_usage:.1%} of its KV blocks"
    return ""
