"""Options that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import click

from ...kernels.codecs import CODEC_NAMES
from .. import environment
from .command import OPTIONS, Decorated, combine, option
from .secrets import warn_on_stderr
from .values import AGE, FIGURE, FILE, PORT, POSITIVE, SECONDS, Parsed, ttft_limit


class _Text(click.ParamType[str]):
    """Text of which several may be given; a variable of the environment is one, whatever is in it."""

    name = "text"

    def split_envvar_value(self, rv: str) -> list[str]:
        """The whole value."""
        return [rv]


def home_option(what: str, *, tells: bool = False) -> Decorated:
    """Where this box keeps what it knows. `tells`: say it where that is the folder of an earlier release."""
    return option(
        "--home",
        type=FILE,
        shared=True,
        envvar=environment.HOME,
        callback=_find_home_and_tell if tells else _find_home,
        metavar="FOLDER",
        help=f"{what} (default: ~/.local/share/p2pserve, or {environment.HOME})",
    )


def network_options(token: str) -> Decorated:
    """Where the network is."""
    return combine(
        option(
            "--bootstrap",
            type=_Text(),
            multiple=True,
            shared=True,
            envvar=environment.BOOTSTRAP,
            callback=_joined,
            metavar="WHERE",
            help=f"the join token ({token}); beside it, after a comma or with --bootstrap again, host:port of other "
            f"members to ask (default: {environment.BOOTSTRAP})",
        ),
        option(
            "--token",
            shared=True,
            envvar=environment.TOKEN,
            metavar="TOKEN",
            help=f"the join token, where --bootstrap has none (default: {environment.TOKEN})",
        ),
        option(
            "--token-file",
            type=FILE,
            shared=True,
            instead_of="token",
            envvar=environment.TOKEN_FILE,
            metavar="FILE",
            help=f"the join token from a file; `-` is stdin (default: {environment.TOKEN_FILE})",
        ),
    )


timeout_option: Final = option(
    "--timeout-s", type=SECONDS, shared=True, default=10.0, metavar="S", help="to reach the network (default: 10)"
)

codec_option: Final = option(
    "--codec",
    shared=True,
    type=click.Choice(CODEC_NAMES),
    default="kv4",
    help="how KV travels: kv4 in 4 bits and a little (default), kivi4 as published, fp8, or raw bit by bit",
)


def _slo(text: str) -> str:
    """Deadlines that plans can be made for, unchanged. Raises ArgumentTypeError."""
    from ...coordinator.planning.model.slo import read_slo  # numpy, for which nobody should wait who asks for help
    from ...coordinator.planning.model.workload import WorkloadError

    try:
        read_slo(text)
    except WorkloadError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("slo: ")) from None
    return text


slo_option: Final = option(
    "--slo",
    shared=True,
    type=Parsed("slo", _slo),
    default="5x",
    help="deadlines that this node plans for if it is elected: multiples of a lone request on the fastest replica, "
    "like 5x (default), or seconds: ttft=2,tpot=0.1,e2e=60",
)

NETWORK_POLICIES: Final = ("predicted", "plan", "hetero", "splitwise", "cronus", "round-robin", "least-tokens")
"""Who may choose the replicas of requests at a gateway, as `coordinator/routing/policies.py` has them: importing that
takes numpy, for which nobody should wait who asks for help."""

SIMULATED_POLICIES: Final = (
    *NETWORK_POLICIES,
    "shares",
    "random",
    "weighted-round-robin",
    "single",
    "memory",
)
"""Likewise in a simulation, as `sims/policies` has them."""

routing_option: Final = option(
    "--routing",
    shared=True,
    type=click.Choice(NETWORK_POLICIES),
    default="predicted",
    help="how this node's gateway chooses replicas: predicted, by when first tokens would come, prompts split where "
    "that is sooner (default); plan, by the plan's shares and the queues; hetero, the "
    "least loaded by its speed and KV memory (Xiong et al.); splitwise, pools that borrow from each other (Splitwise); "
    "cronus, prompts split where they are prefilled (Cronus); to compare with: round-robin, and least-tokens, the "
    "fewest tokens waiting",
)

max_ttft_option: Final = option(
    "--max-ttft",
    shared=True,
    type=Parsed("limit", ttft_limit),
    metavar="TIMES|S",
    help="refuse (429) whose first token this node's gateway expects later: multiples of the plan's deadline for it, "
    "like 2x, or seconds (default: 10x, and at least 30 s; urgent requests 2x and 5 s)",
)


def price_options(section: str = OPTIONS) -> Decorated:
    """What saving time may cost."""
    return combine(
        option(
            "--usd-per-s",
            shared=True,
            type=FIGURE,
            section=section,
            metavar="USD",
            help="what a second of waiting saved may cost (default: anything)",
        ),
        option(
            "--max-usd-per-gb",
            shared=True,
            type=FIGURE,
            section=section,
            metavar="USD",
            help="never take a path that costs more (default: no limit)",
        ),
    )


def place_options(*, port: int, folder: str, has_short: bool = True) -> Decorated:
    """Where a node keeps its files, listens, and is reached. `has_short`: --port says the same as --listen."""
    short = option("--port", type=PORT, instead_of="listen", metavar="PORT", help="short for --listen 0.0.0.0:PORT")
    return combine(
        home_option(f"keys, lock and logs go to `{folder}` in this folder", tells=True),
        option(
            "--listen",
            default=f"0.0.0.0:{port}",
            metavar="HOST:PORT",
            help=f"the one TCP port of this node; port 0 picks a free one (default: 0.0.0.0:{port})",
        ),
        *([short] if has_short else []),
        option(
            "--announce",
            shared=True,
            metavar="HOST:PORT",
            help="where others reach it when ports are mapped (default: what Vast or RunPod set, else the interface)",
        ),
        codec_option,
        slo_option,
        routing_option,
        max_ttft_option,
        option(
            "--drain-s",
            shared=True,
            type=SECONDS,
            default=30.0,
            metavar="S",
            help="on Ctrl-C or SIGTERM let requests finish for so long; a second one leaves at once (default: 30)",
        ),
        option(
            "--replace-every",
            shared=True,
            type=AGE,
            default=60.0,
            metavar="TIME",
            help="while this node coordinates, services are placed anew on boxes of --max-services 2 so often at most; "
            "less often while traffic stays as it is (default: 1m)",
        ),
    )


def http_options(default: str | None) -> Decorated:
    """Where HTTP is served, and who may ask there."""
    said = f"default: {default}" if default is not None else "default: nowhere"
    return combine(
        option(
            "--http",
            default=default,
            metavar="HOST:PORT",
            help=f"serve the OpenAI API here; port 0 picks a free one ({said})",
        ),
        option(
            "--api-key",
            multiple=True,
            shared=True,
            type=_Text(),
            metavar="KEY",
            help="who asks there must show this key, or another one that is given so; without any, only this machine "
            "may reach the port",
        ),
        option(
            "--api-key-file",
            type=FILE,
            shared=True,
            metavar="FILE",
            help="the same from a file, a key in each line; `-` is stdin",
        ),
        option(
            "--no-api-key",
            is_flag=True,
            shared=True,
            help="let whoever reaches the port ask, also from other machines",
        ),
    )


admin_options: Final = combine(
    option(
        "--admin-token",
        shared=True,
        envvar=environment.ADMIN_TOKEN,
        metavar="TOKEN",
        help="what /dashboard and /p2p/v1 ask for, at least 16 characters; without it they answer to this machine "
        "alone",
    ),
    option(
        "--admin-token-file",
        type=FILE,
        shared=True,
        instead_of="admin_token",
        metavar="FILE",
        help="the same from a file; `-` is stdin",
    ),
)


api_options: Final = combine(
    option(
        "--served-model-name",
        multiple=True,
        type=_Text(),
        metavar="NAME",
        section="API",
        help="by which requests may call the model; may be given several times, and the first one is in answers "
        "(default: the model's own)",
    ),
    option(
        "--max-body-mib",
        shared=True,
        type=POSITIVE,
        default=16,
        section="API",
        metavar="MIB",
        help="refuse longer requests with 413 (default: 16)",
    ),
    option(
        "--request-timeout-s",
        shared=True,
        type=SECONDS,
        default=3600.0,
        section="API",
        metavar="S",
        help="end an answer that is not complete by then with 504; a request may ask for less with the header "
        "X-P2P-Deadline-S (default: 3600)",
    ),
)
"""What the API of a box that has a model takes beside vLLM's own options."""


def _joined(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    return ",".join(values) or None


def _find_home(ctx: click.Context, parameter: click.Parameter, given: Path | None) -> Path:
    return environment.find_home() if given is None else given.expanduser()


def _find_home_and_tell(ctx: click.Context, parameter: click.Parameter, given: Path | None) -> Path:
    line = environment.describe_home() if given is None and not ctx.resilient_parsing else None
    if line is not None:
        warn_on_stderr(line)
    return _find_home(ctx, parameter, given)
