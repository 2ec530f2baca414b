"""What `p2pserve rent` has found, for people and for programs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Column, Table

from ...coordinator.planning.model.problem import Percentiles, Proposal
from ...coordinator.renting.choice import Rental, RentAnswers, RentWish
from ...coordinator.renting.links import Outlook
from ...coordinator.renting.offers import Offer, Offers
from ..options.renting import IMAGE, HostedPrice
from .launch import Launch, rent_commands

COLUMNS: Final = 80
LEFT_OUT_SHOWN: Final = 6
BROKEN_SHOWN: Final = 20
FRONT_SHOWN: Final = 8
HOUR_S: Final = 3600.0
MTOK: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All that there is to tell."""

    wish: RentWish
    offers: Offers
    answers: RentAnswers
    hosted: HostedPrice | None
    seed: int
    seconds: float
    launch: Launch

    @property
    def recommended(self) -> Rental:
        """The cheapest that meets the rate where one does, else the best within the budget."""
        return self.answers.cheapest or self.answers.best

    @property
    def named(self) -> list[tuple[str, Rental]]:
        """Answers under their headings, none of them twice."""
        answers, budget = self.answers, f"${self.wish.budget:g}/h"
        found: dict[tuple[str, ...], tuple[str, Rental]] = {}
        for title, rental in (
            (f"cheapest for {self.wish.rate or 0.0:g} requests/s", answers.cheapest),
            (f"best within {budget}", answers.best),
            ("best box alone", answers.single),
        ):
            if rental is not None:
                key = tuple(offer.id for offer in rental.offers)
                found[key] = (f"{found[key][0]}, and {title}" if key in found else title, rental)
        return list(found.values())


class TokenPrices(msgspec.Struct, frozen=True, kw_only=True):
    """$ per million tokens at the rate that an answer is planned for, and what a hosted API takes
    for the same traffic per hour."""

    input_usd: float
    output_usd: float
    hosted_usd_per_hour: float | None


def token_prices(rental: Rental, wish: RentWish, hosted: HostedPrice | None) -> TokenPrices:
    """The cost of prefill over the tokens in, that of decode over the tokens out."""
    workload = wish.service.workload
    requests_h = min(rental.rate, rental.plans[Outlook.EXPECTED].max_rate) * HOUR_S
    in_mtok, out_mtok = requests_h * workload.mean_prompt / MTOK, requests_h * workload.mean_output / MTOK
    spent = rental.usd_per_hour
    return TokenPrices(
        input_usd=spent * rental.input_share / in_mtok, output_usd=spent * (1.0 - rental.input_share) / out_mtok,
        hosted_usd_per_hour=None if hosted is None else hosted.input_usd * in_mtok + hosted.output_usd * out_mtok,
    )  # fmt: skip


def rent_json(found: Found) -> dict[str, Any]:
    """Everything, for programs."""
    wish, answers = found.wish, found.answers
    return {
        "model": wish.service.name,
        "lengths": wish.service.workload.name,
        "slo": msgspec.to_builtins(wish.service.slo),
        "budget_usd_per_hour": wish.budget,
        "rate": wish.rate,
        "offers": len(found.offers.taken),
        "left_out": [{"record": one.record, "why": one.why} for one in found.offers.left_out],
        "planned": answers.planned,
        "seed": found.seed,
        "seconds": found.seconds,
        "assumed": "no box is measured; links are ranges by distance, pessimistic to optimistic",
        "cheapest": None if answers.cheapest is None else _rental_json(answers.cheapest, found),
        "best": _rental_json(answers.best, found),
        "single": None if answers.single is None else _rental_json(answers.single, found),
        "front": [
            {"usd_per_hour": one.usd_per_hour, "max_rate": one.max_rate, "expected": one.expected, "offers": one.offers}
            for one in answers.front
        ],
        "commands": rent_commands(found.recommended.offers, found.launch),
    }


def _rental_json(rental: Rental, found: Found) -> dict[str, Any]:
    needs, prices = found.wish.needs, token_prices(rental, found.wish, found.hosted)
    phases = _phases(rental.plans[Outlook.EXPECTED])
    return {
        "boxes": [
            {
                "offer": offer.name, "market": offer.market.value, "record": offer.record, "host": offer.host,
                "place": offer.place.text, "gpu": offer.gpu.name, "gpus": offer.gpus,
                "usd_per_hour": offer.hourly_usd(needs.disk_gb(offer)), "disk_gb": needs.disk_gb(offer),
                "phases": phases[offer.id], "away": offer.away, "interruptible": offer.interruptible,
            }
            for offer in rental.offers
        ],
        "usd_per_hour": rental.usd_per_hour,
        "rate": rental.rate,
        "expected_rate": rental.expected,
        "max_rate": {outlook.value: plan.max_rate for outlook, plan in rental.plans.items()},
        "usd_per_million_input": prices.input_usd,
        "usd_per_million_output": prices.output_usd,
        "hosted_usd_per_hour": prices.hosted_usd_per_hour,
        "plans": {outlook.value: msgspec.to_builtins(plan) for outlook, plan in rental.plans.items()},
    }  # fmt: skip


def print_found(found: Found, console: Console, *, scripts: Path | None) -> None:
    """For people, in 80 columns but for the commands, which are to be copied."""
    wish, workload = found.wish, found.wish.service.workload
    records = len({offer.record for offer in found.offers.taken}) + len(found.offers.left_out)
    console.print(
        f"{wish.service.name}, {workload.name}:\n  {workload.mean_prompt:.0f} tokens in and {workload.mean_output:.0f} "
        f"out on average; {_deadlines(found)}\n"
        f"{len({offer.record for offer in found.offers.taken})} of {records} records can serve it; "
        f"{found.answers.planned} sets of boxes were planned\n"
        "Estimates: no box has been measured, and links are guessed by distance."
    )
    _print_left_out(found, console)
    if wish.rate is not None and found.answers.cheapest is None:
        console.print(f"\nNothing found within ${wish.budget:g}/h meets {wish.rate:g} requests/s: raise --budget.")
    for title, rental in found.named:
        console.print(f"\n{title}: ${rental.usd_per_hour:.2f}/h")
        _print_rental(rental, found, console)
    _print_front(found, console)
    console.print(f"\nsearched for {found.seconds:.0f} s, seed {found.seed}")
    _print_commands(found, console, scripts)


def _deadlines(found: Found) -> str:
    slo = found.wish.service.slo
    figures = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    told = ", ".join(f"{name} {_time(value)}" for name, value in figures if value < 1e9)
    return f"{slo.target:.0%} within {told}"


def _print_left_out(found: Found, console: Console) -> None:
    """Every broken record, and of those that cannot do, one for each reason."""
    broken = [one for one in found.offers.left_out if one.broken]
    for one in broken[:BROKEN_SHOWN]:
        _say(console, f"broken: {one}", "  ")
    if len(broken) > BROKEN_SHOWN:
        _say(console, f"broken: {len(broken) - BROKEN_SHOWN} more; --format json has all", "  ")
    by_field = defaultdict(list)
    for one in found.offers.left_out:
        if not one.broken:
            by_field[one.why.partition(":")[0]].append(one)
    for _, those in sorted(by_field.items(), key=lambda item: -len(item[1]))[:LEFT_OUT_SHOWN]:
        more = f" (and {len(those) - 1} like it)" if len(those) > 1 else ""
        _say(console, f"left out: {those[0]}{more}", "  ")


def _print_rental(rental: Rental, found: Found, console: Console) -> None:
    plan, prices = rental.plans[Outlook.EXPECTED], token_prices(rental, found.wish, found.hosted)
    phases = _phases(plan)
    table = Table(box=None, pad_edge=False)
    for name, most in (("offer", 16), ("host", 9), ("place", 8), ("GPUs", 24), ("phases", 10), ("$/h", 9), ("away", 5)):
        table.add_column(name, max_width=most, overflow="fold")
    for offer in rental.offers:
        table.add_row(*_row(offer, found, phases[offer.id]))
    console.print(table)
    rates = [rental.plans[outlook].max_rate for outlook in Outlook]
    _say(
        console,
        f"{rates[1]:.3g} requests/s in time; links at their worst {rates[0]:.3g}, at their best {rates[2]:.3g}; less "
        f"boxes that are away {rental.expected:.3g}",
        "  ",
    )
    _say(
        console,
        f"at {rental.rate:.3g} requests/s: TTFT {_times(plan.ttft_s)}, TPOT {_times(plan.tpot_s)} (p50/p90), "
        f"{plan.attainment:.1%} in time{_attainment_range(rental)}",
        "  ",
    )
    boxes = sum(offer.hourly_usd(found.wish.needs.disk_gb(offer)) for offer in rental.offers)
    _say(
        console,
        f"${max(0.0, rental.usd_per_hour - boxes):.2f}/h of that is traffic; per million tokens "
        f"${prices.input_usd:.3f} in, ${prices.output_usd:.3f} out",
        "  ",
    )
    if prices.hosted_usd_per_hour is not None and found.hosted is not None:
        _say(
            console,
            f"the API at ${found.hosted.input_usd:g}/{found.hosted.output_usd:g} takes "
            f"${prices.hosted_usd_per_hour:.2f}/h for the same tokens: {_compared(prices.hosted_usd_per_hour, rental)}",
            "  ",
        )


def _say(console: Console, text: str, indent: str = "") -> None:
    """A sentence, in lines of 80 columns."""
    console.print(fill(text, COLUMNS, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))


def _compared(hosted: float, rental: Rental) -> str:
    ratio = hosted / rental.usd_per_hour
    return f"{ratio:.1f} times as much" if ratio >= 1.0 else f"{1.0 - ratio:.0%} less"


def _attainment_range(rental: Rental) -> str:
    worst, best = (rental.plans[end].attainment for end in (Outlook.PESSIMISTIC, Outlook.OPTIMISTIC))
    return "" if abs(best - worst) < 5e-4 else f" ({min(worst, best):.1%} to {max(worst, best):.1%} by how links are)"


def _row(offer: Offer, found: Found, phases: str) -> tuple[str, ...]:
    usd = offer.hourly_usd(found.wish.needs.disk_gb(offer))
    place = offer.place.country or offer.place.text or "-"
    bid = " bid" if offer.interruptible else ""
    return (
        offer.name, offer.host or "-", place, f"{offer.gpus} x {offer.gpu.name}", phases, f"{usd:.3f}{bid}",
        f"{offer.away:.1%}",
    )  # fmt: skip


def _phases(plan: Proposal) -> dict[str, str]:
    """By box: how many replicas of each phase it has a part of."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for replica in plan.plan.replicas:
        for peer in {stage.peer for stage in replica.stages}:
            counts[peer][replica.phase.value] += 1
    return defaultdict(
        lambda: "idle",
        {box: ", ".join(f"{n} {phase}" for phase, n in sorted(of.items())) for box, of in counts.items()},
    )


def _print_front(found: Found, console: Console) -> None:
    front = found.answers.front
    if len(front) < 2:
        return
    console.print("\nwhat more money buys (estimates by shorter searches):")
    table = Table("$/h", "requests/s", Column("boxes", max_width=60), box=None, pad_edge=False)
    step = max(1, -(-len(front) // FRONT_SHOWN))
    for one in front[len(front) - 1 :: -step][::-1]:
        kinds = Counter(one.offers.values())
        boxes = ", ".join(f"{many} of {kind}" if many > 1 else kind for kind, many in kinds.items())
        table.add_row(f"{one.usd_per_hour:.2f}", f"{one.expected:.3g}", boxes)
    console.print(table)


def _print_commands(found: Found, console: Console, scripts: Path | None) -> None:
    title = found.named[0][0]
    if scripts is not None:
        console.print(f"\n{scripts}/rent.sh rents {title}; it uses {scripts}/onstart.sh")
    else:
        console.print(f"\nto rent {title} (--scripts FOLDER writes this, with new_token and onstart.sh):")
        for line in rent_commands(found.recommended.offers, found.launch):
            console.print(line)
    if found.launch.image == IMAGE:
        console.print("Name the image that you have pushed with --image (docs/renting.md).")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1.0 else f"{seconds:.3g} s"


def _times(figures: Percentiles) -> str:
    return f"{_time(figures.p50)}/{_time(figures.p90)}"
