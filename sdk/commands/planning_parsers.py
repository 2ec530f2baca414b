"""Options for planning and simulating. Imports nothing heavy, so that `--help` is instant."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from ...kernels.codecs import CODEC_NAMES
from .option_values import count

SPECS: Final = ("measured", "dense", "thunderserve-table1")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """The options of `p2pserve plan`."""
    add = parser.add_argument
    add("--cluster", metavar="FILE", help="boxes and links: a JSON file, or the name of one that comes with p2pserve")
    add("--model", metavar="NAME", help="a known model like llama-30b, or a config.json (or its folder)")
    add("--workload", metavar="WHAT", help="coding, conversation (Azure's traces), or a CSV with prompt,output columns")
    add("--rate", type=float, metavar="R", help="requests per second")
    add(
        "--slo",
        default="5x",
        help="multiples of a lone request on A100s, like 5x (default), or seconds: ttft=2,tpot=0.1,e2e=60",
    )
    add(
        "--services",
        type=Path,
        metavar="FILE",
        help="several models at once: a JSON list of {name, model, workload, rate, slo} instead of these",
    )
    add(
        "--specs",
        choices=SPECS,
        default=SPECS[0],
        help="which figures of the GPUs count (default: measured)",
    )
    add("--codec", choices=CODEC_NAMES, default="kv4", help="how KV travels (default: kv4)")
    add("--pin", action="append", default=[], metavar="BOX=PHASE", help="a box does only prefill, decode or mixed")
    add("--exclude", action="append", default=[], metavar="BOX", help="a box that may not be used")
    add(
        "--price-weight",
        type=float,
        default=0.0,
        metavar="W",
        help="share of attainment that a dollar per hour is worth: 0.01 gives up a percent for it (default: 0)",
    )
    add(
        "--budget-s",
        type=_above_zero,
        metavar="S",
        help="stop after so long with the best plan so far (default: by size)",
    )
    add("--seed", type=count, default=0, metavar="N", help="the same seed gives the same plan (default: 0)")


def add_live_option(parser: argparse.ArgumentParser) -> None:
    """What makes `p2pserve plan` look at a network instead of a file."""
    parser.add_argument(
        "--live",
        action="store_true",
        help="the running network: its plan, and the best one for its boxes, links and traffic as they are now; takes "
        "--model, --rate and --slo (whose multiples are then of a lone request on its fastest replica)",
    )


def add_sim_options(parser: argparse.ArgumentParser) -> None:
    """The options of `p2pserve sim`: those of the plan that is simulated, and the simulation's own."""
    add_plan_options(parser)
    add = parser.add_argument
    add("--plan", type=Path, metavar="FILE", help="what `p2pserve plan --format json` printed, instead of planning now")
    requests = parser.add_argument_group("requests")
    more = requests.add_argument
    more(
        "--arrivals",
        choices=("poisson", "bursty", "replay", "recorded"),
        default="poisson",
        help="poisson (default); bursty: with the trace's own variation; replay: Azure's own moments at --rate; "
        "recorded: those of the file of --workload",
    )
    more("--seconds", type=_above_zero, metavar="S", help="of arrivals (default: 300)")
    more("--count", type=int, metavar="N", help="so many requests instead of --seconds")
    engine = parser.add_argument_group("engines and network")
    more = engine.add_argument
    more("--serialised", action="store_true", help="KV leaves when all of the prompt is read, not layer by layer")
    more("--dispatch", choices=("plan", "random", "round-robin"), default="plan", help="who chooses (default: plan)")
    more("--lose", action="append", default=[], metavar="BOX@S", help="a box is gone from second S on")
    output = parser.add_argument_group("output")
    more = output.add_argument
    more("--requests", type=Path, metavar="FILE", help="write every request: .csv or .parquet")
    more("--plots", type=Path, metavar="FOLDER", help="write SLO attainment and timelines as PNG")
    more("--chrome-trace", type=Path, metavar="FILE", help="write every step, to be looked at in chrome://tracing")
    splitwise = parser.add_argument_group("the public Splitwise simulator's setups")
    more = splitwise.add_argument
    more("--compat", choices=("splitwise",), help="by that simulator's own rules, with --setup, --trace, --model")
    more("--measured", action="store_true", help="the same setups with measured decode times and real KV sizes")
    more("--setup", metavar="NAME", help="baseA, baseH, AA, HH, HHcap or HA")
    more("--trace", type=Path, metavar="FILE", help="requests in that simulator's format")
    more("--machines", type=_machines, metavar="P,T", help="machines for prompts and for tokens (default: the setup's)")


def _machines(text: str) -> tuple[int, int]:
    prompt, _, token = text.partition(",")
    if not (prompt.isdecimal() and token.isdecimal() and int(prompt) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 15,25")
    return int(prompt), int(token)


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


_above_zero.__name__ = "number"
