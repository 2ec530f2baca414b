"""A run of `demo --wan` as its client would tell it, made of a few lines."""

from __future__ import annotations

import msgspec

from p2pserve.coordinator import Pairing, Plan, Replica, Stage
from p2pserve.coordinator.names import name_of
from p2pserve.kvtransport.probing.figures import LinkFigures, Source, prior
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.messages import Advert, EngineAdvert, LinkTable, NodeStatus, Status
from p2pserve.sdk.demo.ocean import BOXES, build_scenario, kv_links
from p2pserve.sdk.demo.wan_client import AnsweredRequest, ClientOrders, LostRequest, WanLook
from p2pserve.sdk.demo.wan_report import WanEvents
from p2pserve.sdk.demo.wan_timeline import WanTimeline

PEERS = {box.name: f"12D3Koo{box.name}" for box in BOXES}
HOME = BOXES[-1].name
ORDERS = ClientOrders(prompt=1200, output=51, every_s=1.0)
SLOW = ("virginia-1", "virginia-2")
DEAD = "frankfurt-2"
BEFORE = {SLOW: 0.6, ("frankfurt-1", "frankfurt-2"): 0.4}
AROUND = {("virginia-1", "frankfurt-2"): 0.6, ("frankfurt-1", "frankfurt-2"): 0.4}
WITHOUT = {SLOW: 0.2, ("frankfurt-1", "mumbai-1"): 0.8}
EVENTS = WanEvents(began_at=10.0, degraded=SLOW, degraded_at=20.0, died=DEAD, died_at=30.0, ended_at=40.0)
RATES = {ends: (build_scenario().pair(*ends).rtt_ms, build_scenario().carried_gbps(*ends)) for ends in kv_links()}


def plan(version: int, shares: dict[tuple[str, str], float], *, why: str = "") -> Plan:
    """A plan of all boxes but the dead one where it sends nothing there."""
    boxes = [box for box in BOXES if box.name != DEAD or any(DEAD in link for link in shares)]
    return Plan(
        epoch=1,
        version=version,
        service="m",
        replicas=tuple(
            Replica(
                id=PEERS[box.name],
                phase=box.phase,
                stages=(Stage(peer=PEERS[box.name], tp=1, first_layer=0, last_layer=2),),
            )
            for box in boxes
        ),
        pairings=tuple(
            Pairing(prefill=PEERS[source], decode=PEERS[target], weight=share)
            for (source, target), share in shares.items()
        ),
        codec="kv4",
        why=(why,) if why else (),
    )


def node(name: str, *, state: str = "alive", gbps: float = 1.0, engine: str = "ready") -> NodeStatus:
    """A box, whose one link that is known is that of the degraded pair."""
    figures: LinkFigures = msgspec.structs.replace(prior(2.0, 0.5, gbps), source=Source.MEASURED)
    links = {PEERS[SLOW[1]]: figures} if name == SLOW[0] else {}
    return NodeStatus(
        peer=PEERS[name],
        role="worker",
        state=state,
        address="11.77.0.1:4001",
        rtt_s=0.01,
        advert=Advert(
            hardware=Hardware(cores=1, memory_gib=1.0, processor="x", gpus=()),
            draining=False,
            engine=EngineAdvert(state=engine),
        ),
        links=LinkTable(site=name, links=links),
        closed=name == HOME,
    )


def look(at: float, running: Plan | None, *, gbps: float = 1.0, dead: str = "", engine: str = "ready") -> WanLook:
    """What the client sees at a moment."""
    nodes = tuple(
        node(box.name, state=dead if dead and box.name == DEAD else "alive", gbps=gbps, engine=engine) for box in BOXES
    )
    client = NodeStatus(peer="12D3client", role="client", state="alive", address="c:1", rtt_s=0.0, advert=None)
    first = PEERS[BOXES[0].name]
    status = Status(answered_by=first, coordinator=first, epoch=1, nodes=(*nodes, client), plan=running)
    return WanLook(at=at, status=status)


def answer(
    asked_at: float, *, ttft: float = 0.5, tpot: float = 0.02, recovered: str = "", **more: object
) -> AnsweredRequest:
    """An answer of 51 tokens."""
    made = AnsweredRequest(
        asked_at=asked_at,
        first_at=asked_at + ttft,
        last_at=asked_at + ttft + 50 * tpot,
        tokens=51,
        prefill=PEERS[SLOW[0]],
        decode=PEERS[SLOW[1]],
        attempts=1,
        recovered=(recovered,) if recovered else (),
        digest="same",
    )
    return msgspec.structs.replace(made, **more)


def whole_run(*requests: AnsweredRequest | LostRequest) -> WanTimeline:
    """A link degrades at 20 s, is noticed after 2 and planned around after 3; a box is lost at 30 s, suspected after 1
    and planned without after 4."""
    timeline = WanTimeline({peer: name for name, peer in PEERS.items()})
    link = f"{name_of(PEERS[SLOW[0]])} -> {name_of(PEERS[SLOW[1]])}"
    news = f"planned at once: the link {link} went from 1 to 0.03 Gb/s"
    first, second, third = plan(1, BEFORE), plan(2, AROUND, why=news), plan(3, WITHOUT)
    for each in (
        look(9.0, first),
        look(22.0, first, gbps=0.03),
        look(23.0, second, gbps=0.03),
        look(31.0, second, gbps=0.03, dead="suspect"),
        look(34.0, third, gbps=0.03, dead="dead"),
    ):
        timeline.on_look(each)
    for request in requests:
        timeline.on_request(request)
    return timeline
