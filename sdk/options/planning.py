"""Options for planning and simulating. Imports nothing heavy, so that `--help` is instant."""

from __future__ import annotations

import argparse
from typing import Final

import click

from ...kernels.codecs import CODEC_NAMES
from .command import combine, option
from .shared import NETWORK_POLICIES, SIMULATED_POLICIES
from .values import ABOVE_ZERO, COUNT, FIGURE, FILE, POSITIVE, Parsed

CHANGES: Final = "What changes meanwhile"
"""A section of the help."""

ADMISSIONS: Final = ("none", "network", "deadline")

KV_CHOICES: Final = ("auto", "fp8", "choose")

PLACEMENTS: Final = ("default", "seallm")

SPECS: Final = ("measured", "dense", "thunderserve-table1")


def _machines(text: str) -> tuple[int, int]:
    prompt, _, token = text.partition(",")
    if not (prompt.isdecimal() and token.isdecimal() and int(prompt) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 15,25")
    return int(prompt), int(token)


_MACHINES: Final = Parsed("pair of numbers", _machines)

plan_options: Final = combine(
    option(
        "--cluster", metavar="FILE", help="boxes and links: a JSON file, or the name of one that comes with p2pserve"
    ),
    option("--model", metavar="NAME", help="a known model like llama-30b, or a config.json (or its folder)"),
    option(
        "--workload", metavar="WHAT", help="coding, conversation (Azure's traces), or a CSV with prompt,output columns"
    ),
    option("--rate", type=float, metavar="R", help="requests per second"),
    option(
        "--slo",
        default="5x",
        help="multiples of a lone request on A100s, like 5x (default), or seconds: ttft=2,tpot=0.1,e2e=60",
    ),
    option(
        "--services",
        type=FILE,
        metavar="FILE",
        help="several models at once: a JSON list of {name, model, workload, rate, slo} instead of these",
    ),
    option(
        "--specs",
        type=click.Choice(SPECS),
        default=SPECS[0],
        help="which figures of the GPUs count (default: measured)",
    ),
    option("--codec", type=click.Choice(CODEC_NAMES), default="kv4", help="how KV travels (default: kv4)"),
    option(
        "--kv-cache-dtype",
        type=click.Choice(KV_CHOICES),
        help="what engines keep KV as: auto (default): 16 bits; fp8: 8, for twice as many tokens; choose: 8 where what "
        "that costs in quality is known for the model",
    ),
    option("--pin", multiple=True, metavar="BOX=PHASE", help="a box does only prefill, decode or mixed"),
    option("--exclude", multiple=True, metavar="BOX", help="a box that may not be used"),
    option(
        "--price-weight",
        type=float,
        default=0.0,
        metavar="W",
        help="share of attainment that a dollar per hour is worth: 0.01 gives up a percent for it (default: 0)",
    ),
    option(
        "--budget-s",
        type=ABOVE_ZERO,
        metavar="S",
        help="stop after so long with the best plan so far (default: by size)",
    ),
    option("--seed", type=COUNT, default=0, metavar="N", help="the same seed gives the same plan (default: 0)"),
)
"""The options of `p2pserve plan`."""

trials_option: Final = option(
    "--trials",
    type=COUNT,
    metavar="N",
    help="simulate the N best plans, the best colocated one among them, and choose by that; takes seconds for each; 0: "
    "by the estimate alone (default: 4 for up to 32 GPUs, 2 for up to 128, else 0, and 0 with --budget-s)",
)
"""Whether `p2pserve plan` chooses among simulated plans."""

placement_option: Final = option(
    "--placement",
    type=click.Choice(PLACEMENTS),
    help="with --services: engines that two services may share, each within a box; default: a search, beside plans "
    "with phases and over several boxes, the best by simulation; seallm: as that paper places",
)
"""Whether `p2pserve plan` has services share GPUs."""

explain_option: Final = option(
    "--explain",
    is_flag=True,
    help="also why each replica is as it is, what else it could be, and what the words mean, with this plan's figures",
)

live_option: Final = option(
    "--live",
    is_flag=True,
    help="the running network: its plan, and the best one for its boxes, links and traffic as they are now; takes "
    "--model, --rate and --slo (whose multiples are then of a lone request on its fastest replica)",
)
"""What makes `p2pserve plan` look at a network instead of a file."""

apply_option: Final = option(
    "--apply",
    is_flag=True,
    help="with --live: where other groups of boxes would serve more, have the coordinator begin with them; takes an "
    "admin's token, and boxes load layers anew, a few at a time",
)
"""What makes `p2pserve plan --live` change the network."""

sim_options: Final = combine(
    plan_options,
    option(
        "--plan", type=FILE, metavar="FILE", help="what `p2pserve plan --format json` printed, instead of planning now"
    ),
    option(
        "--arrivals",
        section="Requests",
        type=click.Choice(("poisson", "bursty", "replay", "recorded")),
        default="poisson",
        help="poisson (default); bursty: with the trace's own variation; replay: Azure's own moments at --rate; "
        "recorded: those of the file of --workload",
    ),
    option("--seconds", type=ABOVE_ZERO, metavar="S", help="of arrivals (default: 300)", section="Requests"),
    option("--count", type=int, metavar="N", help="so many requests instead of --seconds", section="Requests"),
    option(
        "--serialised",
        is_flag=True,
        help="KV leaves when all of the prompt is read, not layer by layer",
        section="Engines and network",
    ),
    option(
        "--gateways",
        metavar="BOX,...",
        default="all",
        help="the boxes that requests come to, in turn: what they and the replicas say to each other takes half a "
        "round trip; all (default); none: it takes no time",
        section="Engines and network",
    ),
    option(
        "--dispatch",
        type=click.Choice(SIMULATED_POLICIES),
        metavar="POLICY",
        default=NETWORK_POLICIES[0],
        help=f"who chooses replicas: {', '.join(NETWORK_POLICIES)} as on the network, or to compare with, "
        f"{', '.join(SIMULATED_POLICIES[len(NETWORK_POLICIES) :])} (default: {NETWORK_POLICIES[0]})",
        section="Engines and network",
    ),
    option(
        "--admission",
        type=click.Choice(ADMISSIONS),
        metavar="HOW",
        default="none",
        help="what gateways do with more than can be served: none (default) gives all to engines at once, network has "
        "them wait and refuses some, as gateways do; deadline refuses who would miss the deadline for the first token",
        section="Engines and network",
    ),
    option(
        "--urgent",
        type=FIGURE,
        metavar="SHARE",
        default=0.0,
        help="of requests that are urgent, with --admission (default: 0)",
        section="Engines and network",
    ),
    option(
        "--batch",
        type=FIGURE,
        metavar="SHARE",
        default=0.0,
        help="of requests that are batch, with --admission (default: 0)",
        section="Engines and network",
    ),
    option("--lose", multiple=True, metavar="BOX@S", help="a box is gone from second S on", section=CHANGES),
    option(
        "--join",
        multiple=True,
        metavar="BOX@S",
        help="a box of the cluster joins at second S, and begins to load the model; it is not there before",
        section=CHANGES,
    ),
    option(
        "--degrade",
        multiple=True,
        metavar="BOX[:BOX]=GBPS@S",
        help="from second S on the link between two boxes, or all links of one, carry so many Gb/s",
        section=CHANGES,
    ),
    option(
        "--shift",
        multiple=True,
        metavar="WHAT@S",
        help="from second S on other requests come: coding, rate=5 or both with a comma; --slo 5x follows",
        section=CHANGES,
    ),
    option(
        "--loss",
        type=click.Choice(("silent", "killed")),
        default="silent",
        help="how boxes are lost: they fall silent (default), or their processes end, which is noticed at once",
        section=CHANGES,
    ),
    option(
        "--replan",
        type=click.Choice(("none", "light", "full", "best", "all")),
        help="what the coordinator does about it: nothing; phases and shares alone (default); new groups, which load "
        "weights, wherever they serve more; the first at once and the second where it pays; or all, to compare",
        section=CHANGES,
    ),
    option(
        "--reload",
        type=FIGURE,
        metavar="S",
        help="a replica that loads is away for so long (default: by its weights, --disk and --download)",
        section=CHANGES,
    ),
    option(
        "--disk", type=ABOVE_ZERO, metavar="GB/S", help="weights are read at so many GB/s (default: 1)", section=CHANGES
    ),
    option(
        "--download",
        type=ABOVE_ZERO,
        metavar="GBPS",
        help="layers that a box has not had come at so many Gb/s (default: 1)",
        section=CHANGES,
    ),
    option(
        "--payback",
        type=ABOVE_ZERO,
        default=600.0,
        metavar="S",
        help="with --replan best, within so many seconds new groups must pay for loading (default: 600)",
        section=CHANGES,
    ),
    option("--requests", type=FILE, metavar="FILE", help="write every request: .csv or .parquet", section="Output"),
    option("--plots", type=FILE, metavar="FOLDER", help="write SLO attainment and timelines as PNG", section="Output"),
    option(
        "--chrome-trace",
        type=FILE,
        metavar="FILE",
        help="write every step, to be looked at in chrome://tracing",
        section="Output",
    ),
    option(
        "--compat",
        type=click.Choice(("splitwise",)),
        help="by that simulator's own rules, with --setup, --trace, --model",
        section="The public Splitwise simulator's setups",
    ),
    option(
        "--measured",
        is_flag=True,
        help="the same setups with measured decode times and real KV sizes",
        section="The public Splitwise simulator's setups",
    ),
    option(
        "--setup",
        metavar="NAME",
        help="baseA, baseH, AA, HH, HHcap or HA",
        section="The public Splitwise simulator's setups",
    ),
    option(
        "--trace",
        type=FILE,
        metavar="FILE",
        help="requests in that simulator's format",
        section="The public Splitwise simulator's setups",
    ),
    option(
        "--machines",
        type=_MACHINES,
        metavar="P,T",
        help="machines for prompts and for tokens (default: the setup's)",
        section="The public Splitwise simulator's setups",
    ),
    option(
        "--batch-tokens",
        type=POSITIVE,
        metavar="N",
        help="with --measured: tokens of a batch; a prompt counts its length, a decode 1 (default: 2048)",
        section="The public Splitwise simulator's setups",
    ),
    option(
        "--max-preemptions",
        type=POSITIVE,
        metavar="N",
        help="with --measured: prompts pass a decode over so often (default: 4)",
        section="The public Splitwise simulator's setups",
    ),
)
"""The options of `p2pserve sim`: those of the plan that is simulated, and the simulation's own."""
