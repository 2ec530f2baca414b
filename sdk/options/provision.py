"""The options of `p2pserve provision`. Imports nothing heavy, so that `--help` is instant."""

from __future__ import annotations

import argparse
from typing import Final

import click

from .command import combine, option
from .planning import SPECS
from .values import ABOVE_ZERO, COUNT, POSITIVE, SECONDS, Parsed

LIMITS: Final = "What the cluster must do, and may cost"
SEARCH: Final = "Simulation and search"

METRICS: Final = ("ttft", "tbt", "e2e")
MAX_SLOWDOWN: Final = 1e6


def slowdowns(text: str) -> dict[str, tuple[float, float, float]]:
    """`ttft=2/3/6,tbt=1.25/1.5/5`: by metric, limits at p50, p90 and p99."""
    found: dict[str, tuple[float, float, float]] = {}
    for part in text.split(","):
        name, _, figures = part.strip().partition("=")
        try:
            p50, p90, p99 = (float(figure) for figure in figures.split("/"))
        except ValueError:
            raise _no_slowdowns(part) from None
        if name not in METRICS or not all(0.0 < figure <= MAX_SLOWDOWN for figure in (p50, p90, p99)):
            raise _no_slowdowns(part)
        if name in found:
            raise argparse.ArgumentTypeError(f"{name} is there twice")
        found[name] = (p50, p90, p99)
    return found


def _no_slowdowns(part: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(
        f"{part!r} is not like tbt=1.25/1.5/5, which are slowdowns at p50, p90 and p99 of {', '.join(METRICS)}"
    )


provision_options: Final = combine(
    option(
        "--design",
        multiple=True,
        metavar="TYPES",
        help="machines for prompts and for tokens: HH, HHcap, HA, AA, or the baselines baseA, baseH (A: DGX-A100, H: "
        "DGX-H100, Hcap: one at 70 % of its power); or types like H/8xA40, with cards of the GPU table, or 8xA40 for "
        "both; may be given several times (default: the paper's six)",
    ),
    option("--model", metavar="NAME", help="llama2-70b or bloom-176b; for cards of the GPU table any known model"),
    option(
        "--times",
        type=click.Choice(("measured", "released")),
        default="measured",
        help="steps of A, H and Hcap: by what was measured (default), or as in Splitwise's released simulator, where "
        "decoding takes as long for any batch",
    ),
    option(
        "--workload", metavar="WHAT", help="coding, conversation (Azure's traces), or a CSV with prompt,output columns"
    ),
    option(
        "--slo",
        type=Parsed("slo", slowdowns),
        metavar="LIMITS",
        help="slowdowns over a request alone on 8 A100 at p50/p90/p99; those not named stay (default: "
        "ttft=2/3/6,tbt=1.25/1.5/5,e2e=1.25/1.5/5, the paper's Table VI)",
    ),
    option(
        "--goal",
        type=click.Choice(("cost", "power", "throughput")),
        default="cost",
        help="the least cost (default) or power at --rate, or the highest rate within limits",
        section=LIMITS,
    ),
    option("--rate", type=ABOVE_ZERO, metavar="R", help="requests per second to be served", section=LIMITS),
    option("--max-usd-per-h", type=ABOVE_ZERO, metavar="USD", help="of all machines", section=LIMITS),
    option("--max-kw", type=ABOVE_ZERO, metavar="KW", help="what all cards may draw", section=LIMITS),
    option(
        "--max-machines", type=POSITIVE, default=200, metavar="N", help="of both kinds (default: 200)", section=LIMITS
    ),
    option(
        "--cost-ratio",
        type=click.Choice(("table1", "table5", "notebook")),
        default="table1",
        help="which of the paper's prices: table1, $17.6 and $38 an hour, a ratio of 2.16 (default); table5, 2.35 for "
        "prompt and 2.5 for token machines; notebook, 2.15, of its published plots",
        section=LIMITS,
    ),
    option(
        "--specs",
        type=click.Choice(SPECS),
        default=SPECS[0],
        help="which figures of the GPU table's cards count (default: measured)",
        section=SEARCH,
    ),
    option(
        "--kv-gbps",
        type=ABOVE_ZERO,
        metavar="GBPS",
        help="a KV cache goes from machine to machine at so many Gb/s (default: 1718, the released simulator's 200 "
        "GiB/s)",
        section=SEARCH,
    ),
    option(
        "--seconds",
        type=ABOVE_ZERO,
        default=120.0,
        metavar="S",
        help="of arrivals in every simulation; shorter is faster, and says less of p99 (default: 120, as in the paper)",
        section=SEARCH,
    ),
    option(
        "--rate-step",
        type=ABOVE_ZERO,
        default=5.0,
        metavar="R",
        help="the goal throughput tries multiples of it (default: 5)",
        section=SEARCH,
    ),
    option(
        "--budget-s",
        type=SECONDS,
        default=300.0,
        metavar="S",
        help="stop after so long, with the best so far (default: 300)",
        section=SEARCH,
    ),
    option(
        "--seed", type=COUNT, default=0, metavar="N", help="the same seed draws the same requests (default: 0)",
        section=SEARCH,
    ),
)  # fmt: skip
"""The options of `p2pserve provision`."""
