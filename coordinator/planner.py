"""Which box prefills, which decodes, and how requests are shared among them.

`make_plan` is a pure function of what it is given. It decides in this order: who can be used, which boxes hold the
model together (`pipelines`), who keeps a role, who takes a new one, how requests are shared, whether any of that is
worth a new plan.

The share of prefill boxes comes from a balance of two costs. A request costs compute to read its prompt and
memory traffic to write its tokens, so the boxes that prefill carry

    requests/s <= sum(compute_tflops) / prefill_tflop      and those that decode
    requests/s <= sum(memory_gbps)    / decode_gb

and the split with the highest smaller side wins. Only the quotient `prefill_tflop / decode_gb` matters
(`PREFILL_TFLOP_PER_DECODE_GB`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from .capacity import BoxView, LinkView, RoundTrips
from .pipelines import Group, group_boxes
from .plan import Pairing, Phase, Plan, PlanError, Replica

PREFILL_TFLOP_PER_DECODE_GB = 0.14
"""Prefill work over decode work of an average request, in TFLOP per GB of memory traffic.

An 8 B model in 16 bit, 1000 tokens in and 250 out, 32 requests decoded together: reading costs 16 TFLOP, at
half of the peak 32; each token moves 16/32 GB of weights and 0.13 GB of KV, 160 GB in all, at 70 % of the
peak 225. 32 / 225 = 0.14. Longer prompts or shorter answers raise it, and with it the share of prefill
boxes."""

RTT_SCALE_S = 0.05
"""A link of this round trip gets half the weight of one without any: weight ~ 1 / (1 + rtt / RTT_SCALE_S)."""

WEIGHT_HYSTERESIS = 0.1
"""Weights that all moved by less than this are not worth a new plan: every plan is signed and gossiped."""


def make_plan(
    boxes: Iterable[BoxView],
    links: Iterable[LinkView],
    *,
    service: str,
    epoch: int,
    version: int,
    previous: Plan | None,
    codec: str,
    prefill_tflop_per_decode_gb: float = PREFILL_TFLOP_PER_DECODE_GB,
) -> Plan | None:
    """The plan for a service, `previous` itself where nothing changes, None where no box or group of boxes is ready.

    The order of `boxes` and `links` does not matter; ties go by peer id. A replica keeps its role while both
    roles stay filled. A new epoch is a change: its coordinator states the decisions again under its own
    number. Raises `PlanError` if a new plan would not be newer than `previous`.
    """
    if previous is not None and previous.service != service:
        raise PlanError(f"the previous plan is of service {previous.service!r}, not {service!r}")
    if not prefill_tflop_per_decode_gb > 0.0:
        raise PlanError(f"prefill_tflop_per_decode_gb is {prefill_tflop_per_decode_gb}; it must be above 0")
    why: list[str] = []
    offered = sorted((box for box in boxes if box.service == service and box.usable), key=_by_peer)
    round_trips = RoundTrips(links)
    groups = group_boxes(_usable(offered, why), round_trips, previous, why)
    if not groups:
        return None
    why += _departures(offered, previous)
    phases = _phases(groups, previous, prefill_tflop_per_decode_gb, why)
    replicas = tuple(Replica(id=group.head, phase=phases[group.head], stages=group.stages) for group in groups)
    pairings = _pairings(groups, phases, round_trips, why)
    if previous is not None:
        same = replicas == previous.replicas and _close(pairings, previous.pairings)
        if same and (epoch, codec) == (previous.epoch, previous.codec):
            return previous
        if codec != previous.codec:
            why.append(f"KV travels as {codec}, before as {previous.codec}")
    plan = Plan(
        epoch=epoch,
        version=version,
        service=service,
        replicas=replicas,
        pairings=pairings,
        codec=codec,
        why=tuple(why),
    )
    if not plan.newer_than(previous):
        raise PlanError(f"the new plan {plan.number} would not be newer than {previous and previous.number}")
    return plan


def _usable(offered: list[BoxView], why: list[str]) -> list[BoxView]:
    """The boxes to plan with, in the order given: of one model, and all real or all emulated."""
    for box, following in pairwise(offered):
        if box.peer == following.peer:
            raise PlanError(f"box {box.peer} is there twice")
    if any(box.emulated for box in offered) and not all(box.emulated for box in offered):
        emulated = [box.peer for box in offered if box.emulated]
        why.append(f"{', '.join(emulated)} left out: emulated boxes do not share requests with real ones")
        offered = [box for box in offered if not box.emulated]
    counts = Counter(box.layers for box in offered)
    layers = max(counts, key=lambda number: (counts[number], number), default=0)
    why += [
        f"{box.peer} left out: its model has {box.layers} layers, that of the others {layers}"
        for box in offered
        if box.layers != layers
    ]
    return [box for box in offered if box.layers == layers]


def _departures(offered: Sequence[BoxView], previous: Plan | None) -> list[str]:
    """One line where boxes of the previous plan no longer offer themselves; a plan does not name those."""
    here = {box.peer for box in offered}
    gone = set(previous.peers) - here if previous is not None else set()
    return [f"boxes of the previous plan that are gone, draining or not ready: {len(gone)}"] if gone else []


def _phases(groups: Sequence[Group], previous: Plan | None, ratio: float, why: list[str]) -> dict[str, Phase]:
    """Every replica's role: what it had, then what the balance asks of the new ones, then what must be filled."""
    if len(groups) == 1:
        why.append(f"{groups[0].head} does both phases: it is the only replica")
        return {groups[0].head: Phase.MIXED}
    phases = _kept(groups, previous)
    why += [f"{group.head} keeps {phases[group.head]}" for group in groups if group.head in phases]
    fresh = sorted((group for group in groups if group.head not in phases), key=_by_intensity)
    prefills = _best_split(groups, phases, fresh, ratio)
    for rank, group in enumerate(fresh):
        phases[group.head] = Phase.PREFILL if rank < prefills else Phase.DECODE
        why.append(
            f"{group.head} takes {phases[group.head]}: {group.compute_intensity:.0f} FLOP per byte is rank "
            f"{rank + 1} of {len(fresh)} new ones, of which the balance puts {prefills} to prefill"
        )
    for missing in (Phase.PREFILL, Phase.DECODE):
        if missing not in phases.values():
            ranked = sorted(groups, key=_by_intensity)
            chosen = ranked[0] if missing is Phase.PREFILL else ranked[-1]
            phases[chosen.head] = missing
            why.append(f"{chosen.head} changes to {missing}: none was left for it")
    return phases


def _kept(groups: Sequence[Group], previous: Plan | None) -> dict[str, Phase]:
    """The roles that go on. A mixed replica has none to keep: with a second one there is a choice to make."""
    if previous is None:
        return {}
    before = {group.head: previous.phase_of(group.head) for group in groups}
    return {peer: phase for peer, phase in before.items() if phase in (Phase.PREFILL, Phase.DECODE)}


def _best_split(groups: Sequence[Group], kept: dict[str, Phase], fresh: Sequence[Group], ratio: float) -> int:
    """How many of `fresh`, from its front, should prefill: the most requests per second, then the fewest.

    A split that fills both roles carries more than none, so it wins over one that does not, wherever one
    exists.
    """
    tflops = sum(group.compute_tflops for group in groups if kept.get(group.head) is Phase.PREFILL)
    gbps = sum(group.memory_gbps for group in groups if kept.get(group.head) is Phase.DECODE)

    def carried(prefills: int) -> float:
        compute = tflops + sum(group.compute_tflops for group in fresh[:prefills])
        memory = gbps + sum(group.memory_gbps for group in fresh[prefills:])
        return min(compute / ratio, memory)

    return max(range(len(fresh) + 1), key=lambda prefills: (carried(prefills), -prefills))


def _pairings(
    groups: Sequence[Group], phases: dict[str, Phase], round_trips: RoundTrips, why: list[str]
) -> tuple[Pairing, ...]:
    """X by compute; Y by memory bandwidth and nearness of the heads. A single replica is paired with itself."""
    if len(groups) == 1:
        return (Pairing(prefill=groups[0].head, decode=groups[0].head, weight=1.0),)
    prefills = [group for group in groups if phases[group.head] is Phase.PREFILL]
    decodes = [group for group in groups if phases[group.head] is Phase.DECODE]
    all_compute = sum(group.compute_tflops for group in prefills)
    pairs: list[Pairing] = []
    for source in prefills:
        pull = [
            target.memory_gbps / (1.0 + round_trips.between(source.head, target.head) / RTT_SCALE_S)
            for target in decodes
        ]
        share = source.compute_tflops / all_compute
        for target, force in zip(decodes, pull, strict=True):
            weight = share * force / sum(pull)
            pairs.append(Pairing(prefill=source.head, decode=target.head, weight=weight))
    why.append(
        f"requests go over {len(prefills)} x {len(decodes)} pairs: prefill by compute, "
        "decode by memory bandwidth and round trip"
    )
    return tuple(pairs)


def _close(new: tuple[Pairing, ...], old: tuple[Pairing, ...]) -> bool:
    """Whether two sets of weights are too alike to tell the network about the difference."""
    before = {(pair.prefill, pair.decode): pair.weight for pair in old}
    after = {(pair.prefill, pair.decode): pair.weight for pair in new}
    return before.keys() == after.keys() and all(
        abs(weight - before[pair]) <= WEIGHT_HYSTERESIS for pair, weight in after.items()
    )


def _by_peer(box: BoxView) -> str:
    return box.peer


def _by_intensity(group: Group) -> tuple[float, str]:
    """The most compute per byte first."""
    return (-group.compute_intensity, group.head)
