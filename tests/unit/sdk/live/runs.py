"""A plan of two nodes, requests to it, and a live run that took as long as the simulator says."""

import msgspec
import numpy as np

from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.plan import Deadlines
from p2pserve.kvtransport.probing.figures import LinkFigures
from p2pserve.node import messages
from p2pserve.sdk.live.network import LiveRun
from p2pserve.sdk.live.nodes import LiveSettings
from p2pserve.sdk.live.simulated import SimulatedNetwork, cluster_of, service_of
from p2pserve.sims.records import Outcomes, Trace
from p2pserve.sims.workloads import workload_of

NUMBERS = {1: "p", 2: "q"}
TRACE = Trace(
    ids=np.arange(4),
    arrival_s=np.array([1.0, 2.0, 4.0, 5.0]),
    prompt=np.array([100, 800, 300, 50]),
    output=np.array([11, 1, 21, 5]),
    lengths="made up",
    arrivals="made up",
)
SETTINGS = LiveSettings(nodes=2, cards=["1xL4"], specs="dense", model="qwen2-7b", codec="kv4", max_batched_tokens=2048)


def plan() -> Plan:
    """`p` prefills, `q` decodes."""
    phases = {"p": Phase.PREFILL, "q": Phase.DECODE}
    replicas = tuple(
        Replica(id=peer, phase=phase, stages=(Stage(peer=peer, tp=1, first_layer=0, last_layer=28),))
        for peer, phase in phases.items()
    )
    pairing = Pairing(prefill="p", decode="q", weight=1.0)
    return Plan(
        epoch=1, version=1, service="s", replicas=replicas, pairings=(pairing,), codec="kv4", why=(),
        deadlines=Deadlines(ttft_s=2.0, tpot_s=0.5),
    )  # fmt: skip


def mixed_plan() -> Plan:
    """Each serves by itself, from the second plan on."""
    mixed = tuple(msgspec.structs.replace(replica, phase=Phase.MIXED) for replica in plan().replicas)
    pairings = tuple(Pairing(prefill=peer, decode=peer, weight=0.5) for peer in NUMBERS.values())
    return msgspec.structs.replace(plan(), version=2, replicas=mixed, pairings=pairings)


def link(gbps: float, rtt_s: float = 0.001, **changes: object) -> LinkFigures:
    """As measured."""
    made = LinkFigures(rtt_s=rtt_s, one_stream_gbps=gbps, capacity_gbps=gbps)
    return msgspec.structs.replace(made, **changes)


def status(*links: LinkFigures) -> messages.Status:
    """What `p` says of its links to as many others."""
    table = messages.LinkTable(links={f"n{number}": link for number, link in enumerate(links)})
    node = messages.NodeStatus(
        peer="p", role="worker", state="alive", address="127.0.0.1:1", rtt_s=None, advert=None, links=table
    )
    return messages.Status(answered_by="p", coordinator=None, epoch=0, nodes=(node,), plan=plan())


def network_of(gbps: float, settings: LiveSettings = SETTINGS, *, is_silent: bool = False) -> SimulatedNetwork:
    """Both nodes, joined at so many Gb/s."""
    return SimulatedNetwork(
        cluster=cluster_of(status(link(gbps)), NUMBERS, settings),
        service=service_of(settings, workload_of(TRACE), "s"),
        max_batched_tokens=2048,
        is_silent=is_silent,
        client_s=0.001,
    )


def live(ttft_factor: float) -> LiveRun:
    """A run that took as long as the simulator says, but for the first tokens."""
    expected = network_of(5.0).run(TRACE, [(0.0, plan())])
    more = expected.ttft_s * (ttft_factor - 1.0)
    seen = Outcomes(trace=TRACE, ttft_s=expected.ttft_s + more, e2e_s=expected.e2e_s + more)
    return LiveRun(
        outcomes=seen, plans=((0.0, plan()),), before=status(link(5.0)), numbers=NUMBERS, recovered=0, late=0,
        cores=1.0, own_cores=0.5,
    )  # fmt: skip
