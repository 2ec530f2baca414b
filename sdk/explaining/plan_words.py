"""`--explain` of a plan: its words with their meaning and this plan's own figures, and why each replica is as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Console

from ...coordinator import Phase, Plan, Replica
from ...coordinator.names import count_of
from ..printing import printable
from .glossary import meaning_of

if TYPE_CHECKING:  # the planner, which a client may not have
    from ...coordinator.planning.model.problem import Percentiles, Proposal
    from ...coordinator.planning.model.workload import Service
    from ...coordinator.planning.reasons import Alternative, ReplicaReasons

Named = Callable[[str], str]

MAX_WIDTH: Final = 100
"""Longer lines are hard to read."""

LABEL: Final = 14
"""Columns of what stands before a text."""


class ExplainedWord(msgspec.Struct, frozen=True, kw_only=True):
    """A word of docs/words.md, and what it comes to in a plan."""

    word: str
    meaning: str
    here: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """`is_running`: of a network, whose boxes have loaded their weights."""

    words: tuple[ExplainedWord, ...]
    replicas: tuple[ReplicaReasons, ...]
    is_running: bool


def explain_plan(
    plan: Plan,
    service: Service | None = None,
    proposal: Proposal | None = None,
    reasons: Sequence[ReplicaReasons] = (),
    *,
    is_running: bool = False,
) -> Explanation:
    """Of a plan alone, or with what is expected of it."""
    said = [*_words_of_replicas(plan), *_words_of_requests(plan)]
    if service is not None and proposal is not None:
        said += _words_of_figures(service, proposal)
    else:
        said += _words_of_deadlines(plan)
    return Explanation(
        words=tuple(ExplainedWord(word=word, meaning=meaning_of(word), here=here) for word, here in said),
        replicas=tuple(reasons),
        is_running=is_running,
    )


def explanation_json(found: Explanation, named: Named = str) -> dict[str, Any]:
    """For programs, under the key `explain`."""
    replicas: list[dict[str, Any]] = msgspec.to_builtins(found.replicas)
    for each in replicas:
        each["name"] = named(each["id"])
    return {"words": msgspec.to_builtins(found.words), "replicas": replicas}


def print_explanation(found: Explanation, service: Service | None, console: Console, named: Named = str) -> None:
    """For people: a paragraph for each replica, then the words."""
    width = min(MAX_WIDTH, console.width)
    for replica in found.replicas:
        assert service is not None, "replicas are explained by what is expected of them"
        console.print(f"\n{named(replica.id)}")
        for label, text in _explain_replica(replica, service, is_running=found.is_running):
            _print_labelled(label, named(text), width, console)
    console.print("\nThe words, and what they come to here:")
    for each in found.words:
        _print_labelled(each.word, f"{each.meaning}.", width, console)
        _print_labelled("", f"Here: {named(each.here)}.", width, console)


def _print_labelled(label: str, text: str, width: int, console: Console) -> None:
    lines = wrap(printable(text), max(20, width - LABEL - 2), break_on_hyphens=False, break_long_words=False)
    for number, line in enumerate(lines):
        console.print(f"  {label if number == 0 else '':{LABEL}}{line}")


# --- replicas


def _explain_replica(replica: ReplicaReasons, service: Service, *, is_running: bool) -> Iterator[tuple[str, str]]:
    yield "GPUs", _explain_gpus(replica, service, is_running=is_running)
    if replica.other_groups is not None:
        yield "", f"Next best: {_compare(replica.other_groups, 'more, but less when boxes are away now and then')}"
    alone = (
        f"alone it could prefill {replica.could_prefill:.3g} requests/s or decode {replica.could_decode:.3g} in time"
    )
    yield "phase", f"{alone}{'; its owner has pinned it' * replica.is_pinned}."
    better = "more: `p2pserve plan --live` has the best" if is_running else "more: the search has not come by it"
    if not (replica.alternatives or replica.is_pinned):
        yield "", "Other phases are evaluated for the busiest replicas alone."
    for each in replica.alternatives:
        yield "", f"Instead {_compare(each, better)}"
    yield "limit", _explain_limit(replica)
    if (link := replica.kv_link) is not None:
        yield (
            "KV link",
            (
                f"the fullest, {link.source} to {link.target}, has {link.used_gbps:.2g} Gb/s of KV; plans may count on "
                f"{link.planned_gbps:.2g}."
            ),
        )


def _explain_gpus(replica: ReplicaReasons, service: Service, *, is_running: bool) -> str:
    cards = " + ".join(f"{gpus} x {card} of {box}" for box, card, gpus in replica.cards)
    weighs = f"{service.model.name} weighs {replica.weights_gib:.3g} GiB"
    if is_running:
        why = "this box holds it alone" if len(replica.cards) == 1 else "these boxes are too small alone"
        return f"{cards}. {weighs}; {why}. The network leaves weights where they are loaded."
    least = "one such GPU has" if replica.least_cards == 1 else f"{replica.least_cards} such GPUs have"
    room = replica.room_gib - replica.weights_gib
    return f"{cards}. {weighs}; {least} room for that and the longest request; these have {room:.3g} GiB for KV."


def _compare(other: Alternative, better: str) -> str:
    gives = f"{other.choice}: attainment {other.attainment:.1%}, capacity {other.capacity:.2f} x the rate"
    if other.gain > 0.0:
        return f"{gives} ({better})."
    return f"{gives}; the objective would be {-other.gain:.4f} lower."


def _explain_limit(replica: ReplicaReasons) -> str:
    halved = ", ".join(f"{part:.0%} with twice the {resource.value}" for resource, part in replica.halved.items())
    full = "" if replica.full_batch is None else f" Its memory holds {replica.full_batch:.0f} requests at once."
    return f"{replica.limit}. Its steps would take {halved}.{full}"


# --- words


def _words_of_replicas(plan: Plan) -> Iterator[tuple[str, str]]:
    replicas = plan.replicas
    gpus = sum(stage.tp for replica in replicas for stage in replica.stages)
    yield "replica", f"{count_of(len(replicas), 'replica')} on {count_of(gpus, 'GPU')}, of {plan.layers} layers each"
    phases = [(phase, [replica.id for replica in plan.in_phase(phase)]) for phase in Phase]
    yield "phase", "; ".join(f"{phase}: {', '.join(ids)}" for phase, ids in phases if ids)
    widest = max(replicas, key=lambda replica: max(stage.tp for stage in replica.stages))
    tp = max(stage.tp for stage in widest.stages)
    yield "TP", f"{widest.id} has TP {tp}" + ("; no layer is shared" if tp == 1 else "")
    longest = max(replicas, key=lambda replica: len(replica.stages))
    stages = len(longest.stages)
    yield "PP", f"{longest.id} has {stages} stages" if stages > 1 else "every replica has one stage"
    yield "layer range", _layer_ranges(longest)


def _layer_ranges(replica: Replica) -> str:
    spans = [f"[{stage.first_layer},{stage.last_layer}) on {stage.peer}" for stage in replica.stages]
    return f"{replica.id} holds {', '.join(spans)}"


def _words_of_requests(plan: Plan) -> Iterator[tuple[str, str]]:
    heaviest = max(plan.pairings, key=lambda pair: pair.weight)
    one, two = heaviest.prefill, heaviest.decode
    x = sum(pair.weight for pair in plan.pairings if pair.prefill == one)
    route = f"on {one}" if one == two else f"from {one} to {two}"
    yield (
        "share",
        f"{heaviest.weight:.1%} of requests go {route}, the most of {count_of(len(plan.pairings), 'pairing')}",
    )
    yield (
        "orchestration",
        f"X: {x:.3f} of requests prefill on {one}; Y: {heaviest.weight / x:.3f} of those decode on {two}",
    )
    chunked = [replica for replica in plan.replicas if replica.step_tokens]
    if chunked:
        most = max(chunked, key=lambda replica: replica.step_tokens)
        least = min(chunked, key=lambda replica: replica.step_tokens)
        further = f", {most.step_tokens} on {most.id}" if most.step_tokens > least.step_tokens else ""
        yield "prefill chunk", f"{least.step_tokens} tokens a step at most on {least.id}{further}"
    yield "codec", f"{plan.codec}"


def _words_of_figures(service: Service, proposal: Proposal) -> Iterator[tuple[str, str]]:
    slo, rate = service.slo, service.workload.rate
    yield "TTFT", _explain_time(proposal.ttft_s, slo.ttft_s)
    yield "TPOT", _explain_time(proposal.tpot_s, slo.tpot_s)
    yield "E2E", _explain_time(proposal.e2e_s, slo.e2e_s)
    yield "attainment", f"{proposal.attainment:.1%} expected at {rate:.3g} requests/s"
    yield (
        "goodput",
        (
            f"{proposal.attainment * rate:.3g} requests/s now; up to {proposal.max_rate:.3g} requests/s, "
            f"{slo.target:.0%} of them would be in time"
        ),
    )
    yield "limit", proposal.limits.removeprefix("limit: ")
    busiest = max(proposal.replicas, key=lambda replica: replica.utilisation)
    yield "busy", f"{busiest.utilisation:.0%} of the time on {busiest.id}, the busiest"
    fullest = max(proposal.replicas, key=lambda replica: replica.batch)
    yield "batch", f"{fullest.batch:.3g} on {fullest.id} on average, the most"
    yield "objective", f"{proposal.score.objective:.4f}"
    yield "capacity", f"{proposal.score.capacity:.2f} x the rate"


def _words_of_deadlines(plan: Plan) -> Iterator[tuple[str, str]]:
    limits = plan.deadlines
    for word, limit in (("TTFT", limits.ttft_s), ("TPOT", limits.tpot_s), ("E2E", limits.e2e_s)):
        if limit:
            yield word, f"the plan is for {limit:.3g} s"


def _explain_time(figures: Percentiles, limit: float) -> str:
    expected = f"{figures.p50:.3g} s p50, {figures.p90:.3g} s p90, {figures.p99:.3g} s p99"
    return f"{expected}; deadline {limit:.3g} s" if isfinite(limit) else f"{expected}; no deadline"
