"""Mutated messages against everything that reads the control plane, through to the planner.

    python -m p2pserve.node.fuzz --count 1000000 --seed 1 [--format json]

The attacker is a member: what it says carries valid signatures, and is made up within the bounds of
each type and at their edges, or mutated in its structure or its bytes. It is read as a node reads
it: frames and the control stream with all handlers, tokens and certificates, membership
(`bootstrap.dev.fuzz_members`), each message of `messages`, and adverts, link tables and plans,
which a view takes in, a coordinator plans with, and a router follows.

Any exception but those declared, an input that takes a second or 100 MiB, or a broken invariant ends
the run. Progress is on standard error.
Ctrl-C ends it with its report.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from ...bootstrap.dev.fuzz_members import MemberAttack, membership_payloads
from ...bootstrap.dev.fuzz_report import ControlFuzzReport
from ...bootstrap.dev.fuzz_wire import StreamAttack, WireAttack
from ..messages import ADVERT, LINKS, PLAN
from ..planning.manifest import PLAN_RULES
from ..planning.messages import PLAN_BUNDLE
from .fuzz_messages import MessageAttack, add_catalogue, bodies_of_catalogue
from .fuzz_planning import PlanningAttack, make_advert, make_bundle, make_links, make_manifest, read_entries

# Of turns: one against members is of 60 inputs, one of a stream of 120.
_WEIGHTS = (("messages", 60), ("wire", 25), ("members", 0.3), ("stream", 0.1), ("views", 8), ("planning", 0.1))
_STEP = 100_000  # inputs between two lines of progress


def fuzz(count: int, seed: int, progress: Callable[[int], None] | None = None) -> ControlFuzzReport:
    """Read so many hostile inputs. Any exception that is not declared, or broken invariant, is raised."""
    import_module("...coordinator.network_plan", __package__)  # its 60 MB are no input's fault
    gc.freeze()  # nor are collections of what this process had before, which take a second in a large one
    rng = random.Random(seed)
    report = ControlFuzzReport()
    payloads = {**membership_payloads(), ADVERT: make_advert, LINKS: make_links, PLAN: make_manifest}
    payloads[PLAN_BUNDLE] = make_bundle
    messages, wire = MessageAttack(rng, report), WireAttack(rng, report)
    stream = StreamAttack(rng, report, bodies_of_catalogue(), add_catalogue)
    planning = PlanningAttack(rng, report)

    def attack_members() -> None:
        MemberAttack(rng, report, payloads, PLAN_RULES, read_entries).run()

    attacks = {
        "messages": messages.run,
        "wire": wire.run,
        "members": attack_members,
        "stream": stream.run,
        "views": planning.view,
        "planning": planning.plan,
    }
    names, weights = zip(*_WEIGHTS, strict=True)
    began, said = time.monotonic(), 0
    with suppress(KeyboardInterrupt):  # what was done until then is reported
        while report.inputs < count:
            attacks[rng.choices(names, weights)[0]]()
            if progress is not None and report.inputs >= said + _STEP:
                said = report.inputs
                progress(said)
    report.seconds = time.monotonic() - began
    gc.unfreeze()
    return report


def main(arguments: list[str] | None = None) -> int:
    """The command line. What the fuzzer finds ends the run with its traceback."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.node.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="hostile inputs to run")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same run")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error(f"--count is {options.count}; it must be at least 1")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell, too
    logging.getLogger("p2pserve").setLevel(logging.CRITICAL)  # a line for each refusal is what it is for

    began = time.monotonic()

    def show(done: int) -> None:
        sys.stderr.write(f"{done:,} of {options.count:,} inputs after {time.monotonic() - began:,.0f} s\n")
        sys.stderr.flush()

    report = fuzz(options.count, options.seed, show)
    if options.format == "json":
        sys.stdout.write(json.dumps({"seed": options.seed, **report.to_dict()}) + "\n")
    else:
        for name, value in report.to_dict().items():
            sys.stdout.write(f"{name:20} {value}\n")
    return 0
