"""The options of `p2pserve rent`. Imports nothing heavy, so that `--help` is instant."""

from __future__ import annotations

import argparse
from typing import Final, NamedTuple

import click

from ...kernels.codecs import CODEC_NAMES
from .command import combine, option
from .planning import SPECS
from .values import ABOVE_ZERO, COUNT, FIGURE, FILE, POSITIVE, Parsed

IMAGE: Final = "YOUR_REGISTRY/p2pserve"

_HOURS: Final = {"": 1.0, "/h": 1.0, "/d": 24.0}


class HostedPrice(NamedTuple):
    """Of somebody's API, in $ per million tokens."""

    input_usd: float
    output_usd: float


def budget(text: str) -> float:
    """$ per hour of `13.5/h`, `13.5` or `324/d`."""
    number, slash, unit = text.removeprefix("$").partition("/")
    try:
        value = float(number) / _HOURS[slash + unit]
    except (ValueError, KeyError):
        value = 0.0
    if not 0.0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no budget; write dollars per hour or per day: 13.5/h, 324/d")
    return value


def hosted_price(text: str) -> HostedPrice:
    """`0.6/2.4`: what a million tokens in and out cost; one number where they cost the same."""
    first, slash, second = text.partition("/")
    try:
        price = HostedPrice(float(first), float(second if slash else first))
    except ValueError:
        price = HostedPrice(-1.0, -1.0)
    if not (min(price) >= 0.0 and 0.0 < max(price) < 1e6):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no price; write dollars per million tokens in and out, like 0.6/2.4"
        )
    return price


def share(text: str) -> float:
    """From 0 to 1."""
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return value


rent_options: Final = combine(
    option(
        "--offers",
        type=FILE,
        metavar="FILE",
        help="what `vastai search offers --raw` printed, or RunPod's gpuTypes; `-` reads it from stdin",
    ),
    option("--budget", type=Parsed("budget", budget), metavar="USD", help="with traffic and disks: 13.5/h or 324/d"),
    option("--model", metavar="NAME", help="a known model like llama-30b, or a config.json (or its folder)"),
    option(
        "--workload",
        default="conversation",
        metavar="WHAT",
        help="coding, conversation (Azure's traces; default), or a CSV with prompt,output columns",
    ),
    option(
        "--slo",
        default="5x",
        help="multiples of a lone request on A100s, like 5x (default), or ttft=1s,tpot=60ms,e2e=60s",
    ),
    option(
        "--rate",
        type=ABOVE_ZERO,
        metavar="R",
        help="requests per second to be met as cheaply as possible (default: as many as the budget buys)",
    ),
    option(
        "--hosted-usd-per-mtok",
        type=Parsed("price", hosted_price),
        metavar="IN/OUT",
        help="an API's price per million tokens, to compare with: 0.6/2.4",
    ),
    option("--specs", type=click.Choice(SPECS[:2]), default=SPECS[0], help="which figures of the GPUs count"),
    option("--codec", type=click.Choice(CODEC_NAMES), default="kv4", help="how KV travels (default: kv4)"),
    option("--seed", type=COUNT, default=0, metavar="N", help="the same seed gives the same answers (default: 0)"),
    option(
        "--plans",
        type=POSITIVE,
        default=120,
        metavar="N",
        help="sets of boxes that are planned; more take longer and find a little more (default: 120)",
    ),
    option("--max-boxes", type=POSITIVE, default=8, metavar="N", section="Which offers", help="at most (default: 8)"),
    option(
        "--min-reliability",
        type=Parsed("share", share, float),
        default=0.0,
        metavar="R",
        section="Which offers",
        help="only boxes that are there so much of the time, like 0.98 (default: any)",
    ),
    option(
        "--max-usd-per-gb",
        type=FIGURE,
        metavar="USD",
        section="Which offers",
        help="only boxes whose traffic costs no more (default: any)",
    ),
    option(
        "--interruptible",
        is_flag=True,
        section="Which offers",
        help="at the least bid: cheaper, and taken away when somebody bids more (counted as a tenth of the time)",
    ),
    option(
        "--cuda",
        type=ABOVE_ZERO,
        default=13.0,
        metavar="V",
        section="Which offers",
        help="what drivers must be for (default: 13, what the engine of this release is built for)",
    ),
    option(
        "--image",
        default=IMAGE,
        metavar="NAME",
        section="How they are rented",
        help="what you pushed p2pserve's Dockerfile as, for the commands",
    ),
    option(
        "--join-model",
        metavar="ID",
        section="How they are rented",
        help="what the boxes serve, as `join --model` takes it (default: --model)",
    ),
    option(
        "--scripts",
        type=FILE,
        metavar="FOLDER",
        section="How they are rented",
        help="write onstart.sh and rent.sh, which rents the boxes when you run it",
    ),
)
"""The options of `p2pserve rent`."""
