"""`p2pserve bench`: load on a running network. Running it imports the client, and numpy."""

from __future__ import annotations

from types import SimpleNamespace

from ..options.command import combine, command, option
from ..options.shared import network_options, timeout_option
from ..options.values import ABOVE_ZERO, COUNT, FILE, POSITIVE, SECONDS


@command(
    "bench",
    example=[
        "p2pserve bench --concurrency 16 --requests 200",
        "p2pserve bench --rate 2 --prompt-tokens 1024 --max-tokens 128 \\\n      --slo ttft=2s,tpot=100ms",
        "p2pserve bench --trace requests.csv --format json",
    ],
    formats=("table", "json"),
)
@combine(
    network_options("p2p_client_..."),
    option("--rate", type=ABOVE_ZERO, metavar="R", help="requests per second, at random moments (Poisson)"),
    option("--concurrency", type=POSITIVE, metavar="N", help="so many at a time instead (default: 8)"),
    option("--requests", type=POSITIVE, metavar="N", help="so many in all (default: 100, or all of --trace)"),
    option("--prompt-tokens", type=POSITIVE, metavar="P", help="of each prompt (default: 512)"),
    option("--max-tokens", type=POSITIVE, metavar="M", help="of each answer, exactly (default: 128)"),
    option(
        "--trace",
        type=FILE,
        metavar="FILE",
        help="requests with moments and lengths instead: CSV or JSON lines with arrival, prompt and output",
    ),
    option("--slo", metavar="SLO", help="what counts as in time: ttft=2s,tpot=100ms,e2e=60s, any of them"),
    option("--seed", type=COUNT, default=0, metavar="S", help="the same seed sends the same requests (default: 0)"),
    option("--service", metavar="NAME", help="which of several models of the network"),
    option("--deadline-s", type=SECONDS, default=300.0, metavar="S", help="for each answer (default: 300)"),
    timeout_option,
)
def bench(arguments: SimpleNamespace) -> int:
    from ..bench.bench import run_bench

    return run_bench(arguments)
