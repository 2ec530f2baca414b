"""A network of real processes that is harmed in every way, under streams of clients.

    python -m p2pserve.sdk.chaos --faults 20 --requests 200 --seconds 90

Starts a bootstrap and boxes with emulated engines on this machine. Clients ask while boxes are killed, stopped,
restarted and told to leave. Every answer must have exactly the right tokens, or end with an error by its deadline;
nothing may be left over. The seed chooses everything. Exits with 1 where something was not as it must be.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import trio

from ..failures import explain
from .links import why_no_links
from .report import table_lines
from .running import run_chaos
from .schedule import EMULATED, LOOPBACK, VLLM, WAN, ChaosSettings, check_settings


def main(argv: Sequence[str] | None = None) -> int:
    """0: all was right; 1: something was not, or the run failed; 2: wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m p2pserve.sdk.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = ChaosSettings()
    parser.add_argument("--seed", type=int, help="of a run that is to be repeated (default: a new one)")
    for name in default.__struct_fields__:
        if name not in ("seed", "links", "engine", "liar"):
            value = getattr(default, name)
            parser.add_argument(
                f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value}"
            )
    parser.add_argument(
        "--links",
        choices=(LOOPBACK, WAN),
        help="wan: links are emulated, cut and slowed, and disks filled, which needs root (default: where it can be)",
    )
    parser.add_argument(
        "--engine", choices=(EMULATED, VLLM), default=EMULATED, help="vllm: real engines, with the bundled model"
    )
    parser.add_argument("--liar", action="store_true", help="one more box lies: about itself, plans and answers")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the report there, as JSON")
    given = vars(parser.parse_args(argv))
    form, path = given.pop("format"), given.pop("write")
    if given["seed"] is None:
        given["seed"] = random.SystemRandom().randrange(1_000_000)
    if given["links"] is None:
        given["links"] = WAN if why_no_links() is None else LOOPBACK
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    said = sys.stderr if form == "json" else sys.stdout

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", file=said, flush=True)

    settings = ChaosSettings(**given)
    try:
        check_settings(settings)
        report = trio.run(run_chaos, settings, say)
    except (Exception, KeyboardInterrupt) as error:
        explained = explain(error)
        print(f"error: seed {settings.seed}: {explained[1] if explained else repr(error)}", file=sys.stderr)
        if explained is None:
            raise
        return explained[0]
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    if path is not None:
        path.write_text(f"{text}\n", "utf-8")
    print(text if form == "json" else "\n".join(["", *table_lines(report)]))
    if report.problems:
        print(f"again: {repeat_command(settings)}", file=sys.stderr)
    return 1 if report.problems else 0


def repeat_command(settings: ChaosSettings) -> str:
    """The command that runs the same schedule."""
    default = ChaosSettings()
    given = {name.replace("_", "-"): getattr(settings, name) for name in settings.__struct_fields__}
    usual = {name.replace("_", "-"): getattr(default, name) for name in settings.__struct_fields__}
    changed = {name: value for name, value in given.items() if value != usual[name] or name in ("seed", "links")}
    options = [f"--{name}" if value is True else f"--{name} {value}" for name, value in changed.items()]
    return " ".join(["python -m p2pserve.sdk.chaos", *options])
