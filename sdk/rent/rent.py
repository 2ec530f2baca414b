"""`p2pserve rent`: what to rent for a model, within a budget."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ...coordinator.costs.gpus import Specs
from ...coordinator.names import count_of
from ...coordinator.planning.model.slo import parse_slo
from ...coordinator.planning.model.workload import Service
from ...coordinator.renting.choice import RentAnswers, RentSearch, RentSettings, RentWish
from ...coordinator.renting.needs import Needs, usable_offers
from ...coordinator.renting.offer_file import parse_offers
from ...coordinator.renting.offers import OfferError, Offers
from ...kernels.codecs import codec_named
from ..actions.plan_options import read_model, read_workload
from ..actions.status_view import open_console
from ..errors import UsageError
from .launch import Launch, write_scripts
from .report import Found, print_found, rent_json

LARGEST_FILE: Final = 256 << 20
"""Bytes: some ten times what all of vast.ai's offers take."""


def run_rent(arguments: SimpleNamespace) -> int:
    """Read, search, and print what was found. Returns the exit code."""
    wish = read_wish(arguments)
    offers = _usable(arguments, wish)
    if arguments.scripts is not None and arguments.scripts.exists() and not arguments.scripts.is_dir():
        raise UsageError(f"scripts: {arguments.scripts} is no folder")
    started = time.monotonic()
    answers = _search(arguments, wish, offers)
    found = Found(
        wish=wish, offers=offers, answers=answers, hosted=arguments.hosted_usd_per_mtok, seed=arguments.seed,
        seconds=time.monotonic() - started,
        launch=Launch(arguments.image, arguments.join_model or arguments.model, wish.needs),
    )  # fmt: skip
    if arguments.scripts is not None:
        _write_scripts(arguments.scripts, found)
    if arguments.format == "json":
        print(json.dumps(rent_json(found)))
    else:
        print_found(found, open_console(), scripts=arguments.scripts)
    sys.stdout.flush()
    return 0


def read_wish(arguments: SimpleNamespace) -> RentWish:
    """What the options ask for, at any rate. Raises UsageError, or the planner's own errors."""
    missing = [f"--{name}" for name in ("offers", "budget", "model") if getattr(arguments, name) is None]
    if missing:
        raise UsageError(f"{missing[0].removeprefix('--')}: give {' and '.join(missing)}")
    model = read_model(arguments.model)
    workload = read_workload(arguments.workload, arguments.rate or 1.0)
    codec = codec_named(arguments.codec)
    service = Service(
        name=Path(arguments.model).stem, model=model, workload=workload,
        slo=parse_slo(arguments.slo, model, workload), codec=codec.name, kv_bits=codec.bits,
    )  # fmt: skip
    needs = Needs(
        model=model, cuda=arguments.cuda, reliability=arguments.min_reliability,
        max_usd_per_gb=inf if arguments.max_usd_per_gb is None else arguments.max_usd_per_gb,
    )  # fmt: skip
    return RentWish(
        service=service, needs=needs, budget=arguments.budget, rate=arguments.rate, max_boxes=arguments.max_boxes
    )


def _usable(arguments: SimpleNamespace, wish: RentWish) -> Offers:
    """The offers that can do; all others are left out. Raises OfferError where none can."""
    found = parse_offers(_read(arguments.offers), Specs(arguments.specs), interruptible=arguments.interruptible)
    taken, refused = usable_offers(found.taken, wish.needs)
    left_out = tuple(sorted((*found.left_out, *refused), key=lambda one: one.record))
    if not taken:
        raise OfferError(f"offers: none of {len(found.taken)} can serve {wish.service.name}; {left_out[0]}")
    return replace(found, taken=taken, left_out=left_out)


def _read(path: Path) -> bytes:
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise UsageError("offers: standard input is closed")
            text = sys.stdin.buffer.read(LARGEST_FILE + 1)
        else:
            with path.open("rb") as file:
                text = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise UsageError(f"offers: {path} cannot be read: {error.strerror}") from error
    if len(text) > LARGEST_FILE:
        raise OfferError(f"offers: {path} is larger than {LARGEST_FILE >> 20} MiB; ask the market for fewer offers")
    return text


def _search(arguments: SimpleNamespace, wish: RentWish, offers: Offers) -> RentAnswers:
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True,
        disable=arguments.format == "json" or not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(f"looking at {len(offers.taken)} offers")

        def progress(planned: int, most: float) -> None:
            bar.update(task, description=f"{count_of(planned, 'plan')} made, {most:.3g} requests/s at most so far")

        settings = RentSettings(plans=arguments.plans, draws=5 * arguments.plans)
        return RentSearch(offers.taken, wish, np.random.default_rng(arguments.seed), settings).run(progress)


def _write_scripts(folder: Path, found: Found) -> None:
    try:
        write_scripts(folder, found.recommended, found.launch)
    except OSError as error:
        raise UsageError(f"scripts: {folder} cannot be written: {error.strerror}") from error
