"""Which machines would serve more with their GPUs divided among other numbers of nodes, and what the change costs.

A machine in another cut is imagined as other boxes in the place of its nodes: each with its share of the GPUs, and with
as much room for KV as memory leaves, by the model that plans are made with, corrected by what its engines have found
there now. The whole network is planned with them: what counts is what all boxes serve together, and not one machine.

Importing this takes a solver with it: import it where plans are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from ..calibration import calibrate_boxes
from ..capacity import BoxView, KvCodec, LinkView
from ..costs.loading import LoadRates, load_seconds
from ..costs.replica import StageHardware, kv_capacity_tokens
from ..demand import Demand
from ..network_plan import search_phases
from ..network_problem import NetworkProblem, build_network_problem, make_card
from ..plan import BoxRecut, Phase, Plan, PlanError, Replica, Stage
from ..planning.lower.parallel import MEMORY_SHARE
from ..planning.model.errors import NoPlan, UnservedError
from ..planning.rescheduling import pays_reload, reschedule_phases
from ..planning.upper.scorer import never
from .divisions import BoxDivision, CutOffer
from .proposal import LOAD, at_rate, serve_without
from .steps import PAYBACK_S, RegroupProposal, make_recutting


class NetworkFigures(NamedTuple):
    """What is told of the boxes that a plan may use, the links between them, and what clients ask."""

    boxes: Sequence[BoxView]
    links: Sequence[LinkView]
    demands: Sequence[Demand]


def propose_recuts(
    network: NetworkProblem,
    plan: Plan,
    figures: NetworkFigures,
    divided: Mapping[str, BoxDivision],
    *,
    rate: float | None = None,
    rates: LoadRates | None = None,
    spent: Callable[[], bool] = never,
    keeping: Collection[str] = (),
) -> RegroupProposal | None:
    """The best cuts found for the machines of a network that runs a plan until `spent()`, one machine after the other;
    None where none serves more than new phases alone. `divided`: the machines that may be divided anew, by head; those
    of `keeping` are not. `rate`: requests per second to compare at, instead of LOAD times what runs."""
    if plan.regrouping is not None:
        return None
    rate = rate or LOAD * (network.colocated_rate or network.service.workload.rate)
    problem = at_rate(network, rate)
    try:
        light = reschedule_phases(problem, [plan])
    except (NoPlan, UnservedError):
        return None
    views = {box.peer: box for box in figures.boxes}
    figures = figures._replace(boxes=list(calibrate_boxes(views, network.service.workload).values()))
    same = _attainment(network, plan, figures, rate, spent)
    level = light_level = max(light.after, same or 0.0)
    recuts: list[BoxRecut] = []
    for head in sorted(divided.keys() - set(keeping)):
        division, best = divided[head], None
        for offer, imagined in _imagine_cuts(division, figures):
            if spent():
                break
            served = _attainment(network, plan, imagined, rate, spent)
            # Of cuts that are as good the one with the fewest nodes, which is looked at first: each one more takes a
            # port, and memory for its processes.
            if served is not None and served > level + network.settings.margin:
                best, level = (offer, imagined), served
        if best is not None:
            recuts.append(BoxRecut(head=head, replicas=best[0].replicas, was=len(division.nodes)))
            figures = best[1]
    try:
        found = make_recutting(plan, recuts, divided, views.values(), before=0.0, after=0.0, reload_s=0.0)
    except PlanError:
        return None  # there are none, or a node is about to leave
    reload_s = tuple(_reload_seconds(network, recut.head, rates or LoadRates()) for recut in recuts)
    meanwhile = tuple(serve_without(problem, plan, step) for step in found.steps)
    total_s = sum(reload_s)
    lost = sum(share * seconds for share, seconds in zip(meanwhile, reload_s, strict=True)) / total_s
    light = replace(light, after=light_level)
    pays = pays_reload(light, replace(light, after=level, meanwhile=lost), reload_s=total_s, payback_s=PAYBACK_S)
    found = msgspec.structs.replace(
        found, before=light.before * rate, after=level * rate, reload_s=max(reload_s)
    )  # fmt: skip
    return RegroupProposal(
        regrouping=found, recuts=tuple(recuts), rate=rate, light=light_level * rate,
        meanwhile=tuple(share * rate for share in meanwhile), reload_s=reload_s, pays=pays,
    )  # fmt: skip


def _attainment(
    network: NetworkProblem, plan: Plan, figures: NetworkFigures, rate: float, spent: Callable[[], bool]
) -> float | None:
    """The share of so many requests per second that is in time with these boxes, by today's deadlines; None where they
    cannot be planned with, or would take shorter requests only."""
    service = network.service
    try:
        other = build_network_problem(
            figures.boxes, figures.links, figures.demands, service=service.name,
            codec=KvCodec(service.codec, service.kv_bits), previous=plan, slo=service.slo, rate=rate,
        )  # fmt: skip
    except PlanError:
        return None
    if other is None:
        return None
    asked, taken = service.workload, other.service.workload
    if not (np.array_equal(asked.prompts, taken.prompts) and np.array_equal(asked.outputs, taken.outputs)):
        return None
    return other.evaluator.score(search_phases(other, spent)).attainment


def _imagine_cuts(division: BoxDivision, figures: NetworkFigures) -> Iterator[tuple[CutOffer, NetworkFigures]]:
    """The other cuts of a machine that take requests as long as now, the fewest nodes first, and the network with it
    in each."""
    views = {box.peer: box for box in figures.boxes}
    now, head = division.offer(len(division.nodes)), views.get(division.head)
    if head is None or not head.whole or any(node not in views for node in division.nodes):
        return
    for offer in sorted(division.offers, key=lambda each: each.replicas):
        if offer.replicas == len(division.nodes) or (now is not None and offer.longest < now.longest):
            continue
        kv_tokens = _imagine_room(head, offer.tp)
        if kv_tokens <= 0:
            continue
        nodes = _name_nodes(division, offer.replicas)
        usd = sum(views[node].usd_per_hour for node in division.nodes) / offer.replicas
        share = offer.tp / head.tp
        others = [
            msgspec.structs.replace(
                head, peer=node, tp=offer.tp, compute_tflops=head.compute_tflops * share,
                memory_gbps=head.memory_gbps * share, memory_gib=head.memory_gib * share, kv_tokens=kv_tokens,
                usd_per_hour=usd, profile=None, stages=(),
            )
            for node in nodes
        ]  # fmt: skip
        rest = [box for box in figures.boxes if box.peer not in division.nodes]
        links = tuple(_imagine_links(division, nodes, figures.links))
        yield offer, figures._replace(boxes=[*rest, *others], links=links)


def _name_nodes(division: BoxDivision, replicas: int) -> list[str]:
    """Those that are there, as far as they go on, and names for those that are not there yet."""
    new = [f"{division.head[:100]}/{number}" for number in range(len(division.nodes), replicas)]
    return [*division.nodes[:replicas], *new]


def _imagine_room(head: BoxView, tp: int) -> int:
    """Tokens of KV of a node with so many of these GPUs: by memory, off by as much as where it is known."""

    def estimate(count: int) -> int:
        card = make_card(head, head.memory_gib / head.tp)
        stage = StageHardware(card, count, head.layers, head.card_link_gbps)
        return kv_capacity_tokens(head.model, [stage], memory_share=MEMORY_SHARE)

    now, then = estimate(head.tp), estimate(tp)
    return round(then * head.kv_tokens / now) if head.kv_tokens and now > 0 else then


def _imagine_links(division: BoxDivision, nodes: Sequence[str], links: Iterable[LinkView]) -> Iterator[LinkView]:
    """All links, with those of new nodes: like the head's to others, and among each other like those of nodes that are
    there, if any. Links of which nothing is known count as such."""
    new = [node for node in nodes if node not in division.nodes]
    inside = None
    for link in links:
        yield link
        if link.source == division.head and link.target in division.nodes:
            inside = link
        elif link.source == division.head:
            yield from (msgspec.structs.replace(link, source=node) for node in new)
        elif link.target == division.head and link.source not in division.nodes:
            yield from (msgspec.structs.replace(link, target=node) for node in new)
    if inside is not None:
        for node in new:
            for other in nodes:
                if other != node:
                    yield msgspec.structs.replace(inside, source=node, target=other)
                    yield msgspec.structs.replace(inside, source=other, target=node)


def _reload_seconds(network: NetworkProblem, head: str, rates: LoadRates) -> float:
    """Until the nodes of a machine are ready in another cut: it has the weights, and reads them once for all."""
    model = network.service.model
    stage = Stage(peer=head, tp=1, first_layer=0, last_layer=model.layers)
    coming = Replica(id=head, phase=Phase.MIXED, stages=(stage,))
    return load_seconds(model, [coming], {head: frozenset(range(model.layers))}, rates)[head]
