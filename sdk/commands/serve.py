"""`p2pserve serve`: a network of this one box, with an OpenAI API at once."""

from __future__ import annotations

from types import SimpleNamespace

import click

from ..options.arguments import FLAGS, MODEL, VLLM, ConfigArgument
from ..options.command import combine, command, option
from ..options.engine import engine_options, link_options
from ..options.shared import admin_options, api_options, http_options, place_options
from ..options.values import PORT


@command(
    "serve",
    example=(
        "p2pserve serve Qwen/Qwen3-0.6B",
        "p2pserve serve ~/models/llama --port 8001 --tool-call-parser hermes",
    ),
    formats=("text", "json"),
    passes_unknown=True,
)
@combine(
    click.argument(MODEL, cls=ConfigArgument, key=MODEL, metavar="MODEL"),
    click.argument(
        FLAGS, cls=ConfigArgument, key=VLLM, nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF vllm serve]"
    ),
    http_options("127.0.0.1:8000"),
    admin_options,
    api_options,
    option("--host", instead_of="http", metavar="HOST", help="short for --http HOST:8000, as vLLM has it"),
    option("--port", type=PORT, instead_of="http", metavar="PORT", help="short for --http 127.0.0.1:PORT"),
    place_options(port=4001, folder="bootstrap", has_short=False),
    link_options,
    engine_options,
)
def serve(arguments: SimpleNamespace) -> int:
    from ..actions.serve import serve as run

    return run(arguments)
