"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from ...kernels.codecs import CODEC_NAMES
from .. import environment
from .command import OPTIONS, Decorated, combine, option
from .values import COUNT, FIGURE, FILE, POSITIVE, SECONDS


class _Text(click.ParamType[str]):
    """Text of which several may be given; a variable of the environment is one, whatever is in it."""

    name = "text"

    def split_envvar_value(self, rv: str) -> list[str]:
        """The whole value."""
        return [rv]


def home_option(what: str) -> Decorated:
    """Where this box keeps what it knows."""
    return option(
        "--home",
        type=FILE,
        envvar=environment.HOME,
        default=Path("~/.p2pserve"),
        metavar="FOLDER",
        help=f"{what} (default: ~/.p2pserve, or {environment.HOME})",
    )


def network_options(token: str) -> Decorated:
    """Where the network is."""
    return combine(
        option(
            "--bootstrap",
            type=_Text(),
            multiple=True,
            envvar=environment.BOOTSTRAP,
            callback=_joined,
            metavar="WHERE",
            help=f"the join token ({token}); beside it, after a comma or with --bootstrap again, host:port of other "
            f"members to ask (default: {environment.BOOTSTRAP})",
        ),
        option(
            "--token",
            envvar=environment.TOKEN,
            metavar="TOKEN",
            help=f"the join token, when --bootstrap names addresses only (default: {environment.TOKEN})",
        ),
    )


timeout_option: Final = option(
    "--timeout-s", type=SECONDS, default=10.0, metavar="S", help="to reach the network (default: 10)"
)

codec_option: Final = option(
    "--codec",
    type=click.Choice(CODEC_NAMES),
    default="kv4",
    help="how KV travels: kv4 in 4 bits and a little (default), kivi4 as published, fp8, or raw bit by bit",
)


def price_options(section: str = OPTIONS) -> Decorated:
    """What saving time may cost."""
    return combine(
        option(
            "--usd-per-s",
            type=FIGURE,
            section=section,
            metavar="USD",
            help="what a second of waiting saved may cost (default: anything)",
        ),
        option(
            "--max-usd-per-gb",
            type=FIGURE,
            section=section,
            metavar="USD",
            help="never take a path that costs more (default: no limit)",
        ),
    )


def place_options(*, port: int, folder: str, has_short: bool = True) -> Decorated:
    """Where a node keeps its files, listens, and is reached. `has_short`: --port says the same as --listen."""
    short = option("--port", type=COUNT, callback=_alone, metavar="PORT", help="short for --listen 0.0.0.0:PORT")
    return combine(
        home_option(f"keys, lock and logs go to `{folder}` in this folder"),
        option(
            "--listen",
            default=f"0.0.0.0:{port}",
            callback=_alone if has_short else None,
            metavar="HOST:PORT",
            help=f"the one TCP port of this node; port 0 picks a free one (default: 0.0.0.0:{port})",
        ),
        *([short] if has_short else []),
        option(
            "--announce",
            metavar="HOST:PORT",
            help="where others reach it when ports are mapped (default: what Vast or RunPod set, else the interface)",
        ),
        codec_option,
        option(
            "--drain-s",
            type=SECONDS,
            default=30.0,
            metavar="S",
            help="on Ctrl-C or SIGTERM let requests finish for so long; a second one leaves at once (default: 30)",
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
            type=_Text(),
            metavar="KEY",
            help="who asks there must show this key, or another one that is given so; without any, only this machine "
            "may reach the port",
        ),
        option("--api-key-file", type=FILE, metavar="FILE", help="the same from a file, a key in each line"),
        option("--no-api-key", is_flag=True, help="let whoever reaches the port ask, also from other machines"),
    )


admin_options: Final = combine(
    option(
        "--admin-token",
        envvar=environment.ADMIN_TOKEN,
        metavar="TOKEN",
        help="what /dashboard and /p2p/v1 ask for, at least 16 characters; without it they answer to this machine "
        "alone",
    ),
    option("--admin-token-file", type=FILE, metavar="FILE", help="the same from a file"),
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
        type=POSITIVE,
        default=16,
        section="API",
        metavar="MIB",
        help="refuse longer requests with 413 (default: 16)",
    ),
    option(
        "--request-timeout-s",
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


def _alone(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Refuse --listen and --port together; one on the command line counts before the environment's other."""
    other = "port" if parameter.name == "listen" else "listen"
    given = ctx.get_parameter_source(other) is ParameterSource.COMMANDLINE  # what is given there is looked at first
    if given and ctx.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE:
        raise click.UsageError("--listen: give either --listen or --port, and not both", ctx)
    return None if given and parameter.name == "port" else value
