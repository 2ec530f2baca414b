"""The command line's parser. Commands are imported when one runs, so that `--help` is instant."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .. import __version__
from ..kernels.codecs import CODEC_NAMES
from . import environment
from .commands.engine_parsers import add_engine_options, add_link_options, add_price_options
from .commands.option_values import Listed, count, figure, positive, seconds
from .commands.planning_parsers import add_live_option, add_plan_options, add_sim_options
from .commands.token_parsers import ABOUT_TOKENS, add_also_option, add_token_verbs

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

DESCRIPTION = "A peer-to-peer network that serves large language models from GPU boxes rented in different places."
EPILOG = """\
examples:
  p2pserve demo                                     a whole network on this machine, in a minute
  p2pserve bootstrap --listen 0.0.0.0:4001          start a network; prints the lines to join it with
  p2pserve join --bootstrap p2p_worker_... --model Qwen/Qwen3-0.6B
  p2pserve generate --bootstrap p2p_client_... "def fibonacci(n):"
  p2pserve status --bootstrap p2p_client_... --format json
  p2pserve token create --uses 1 --expires 7d       a join token for one box, on the box that ran bootstrap
  p2pserve leave                                    drain and stop the node of this box

environment: P2PSERVE_HOME, P2PSERVE_BOOTSTRAP and P2PSERVE_TOKEN stand for the options of that name;
CUDA_VISIBLE_DEVICES names the GPUs to serve from, as nvidia-smi counts them, and hides all when it is empty.
exit codes: 0 done; 1 it failed at run time (unreachable, refused, port in use, engine died);
2 wrong input (option, address, token, prompt, model); 130 interrupted."""

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What writing to a file that has no room, or to a terminal that is gone, ends with."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Write the help; argparse's own says nothing where that fails."""
        print(self.format_help(), end="", file=file or sys.stdout)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to look, and exit with 2."""
        line = " ".join(message.split())
        self.exit(2, f"p2pserve: error: {line} (see `{self.prog} --help`)\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    debug = False
    if sys.stderr is None:
        # Or else the next file that is opened would be descriptor 2, and what libraries say would go there.
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (as long as the process)
    if sys.stdout is None:
        print("p2pserve: error: output: standard output is closed; send it to a file or /dev/null", file=sys.stderr)
        return 1
    try:
        try:
            arguments = build_parser().parse_args(argv)
            debug = arguments.debug
            code = _run(arguments)
        except SystemExit as ended:  # argparse, after --help, --version and errors
            code = ended.code if isinstance(ended.code, int) else 0
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        if debug:
            raise
        explained = _explain(error)
        if explained is None:
            raise
        return explained


def _explain(error: BaseException) -> int | None:
    """Say in one line what went wrong, wherever it is in a group of errors; None for a bug of ours."""
    from .errors import first_of

    if first_of(error, (KeyboardInterrupt,)) is not None:
        return 130
    if first_of(error, (BrokenPipeError,)) is not None:  # whoever read our output has had enough
        _discard_output()
        return 0
    failed = first_of(error, (OSError,))
    if failed is not None and failed.errno in UNWRITABLE and failed.filename is None:
        _discard_output()
        print(f"p2pserve: error: output: it cannot be written: {failed.strerror}", file=sys.stderr)
        return 1
    from .failures import explain  # takes half a second, and only failures need it
    from .printing import printable

    found = explain(error)
    if found is None:
        return None
    code, line = found
    print(f"p2pserve: error: {printable(line)}", file=sys.stderr)
    return code


def _discard_output() -> None:
    """Discard unwritten output: flushing it at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "demo":
        from .demo.demo import run_demo  # a second's worth of imports

        return run_demo(arguments)
    if arguments.command == "plan" and arguments.live:
        from .live.plan import run_live_plan  # scipy

        return run_live_plan(arguments)
    if arguments.command == "plan":
        from .commands.plan import run_plan  # scipy, and nothing of the network

        return run_plan(arguments)
    if arguments.command == "sim":
        from .commands.sim import run_sim  # numpy

        return run_sim(arguments)
    _set_up_logging(arguments)
    if arguments.command == "selftest":
        from .commands.selftest import selftest  # engines

        return selftest(arguments)
    if arguments.command in {"bootstrap", "join", "leave"}:
        from .commands.node import NODE_COMMANDS  # all of a node

        return NODE_COMMANDS[arguments.command](arguments)
    if arguments.command == "token":
        from .commands.token import TOKEN_COMMANDS  # the network's key, and no node

        return TOKEN_COMMANDS[arguments.verb](arguments)
    from .commands.network import COMMANDS  # the network's client

    return COMMANDS[arguments.command](arguments)


def _set_up_logging(arguments: argparse.Namespace) -> None:
    """Without --debug log only errors: what concerns the user is printed, or ends the command."""
    if arguments.debug:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    else:
        logging.disable(logging.WARNING)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="p2pserve",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"p2pserve {__version__}")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    _add_bootstrap(commands)
    _add_join(commands)
    _add_leave(commands)
    _add_token(commands)
    _add_generate(commands)
    _add_status(commands)
    _add_path(commands)
    _add_selftest(commands)
    _add_plan(commands)
    _add_sim(commands)
    _add_demo(commands)
    return parser


Commands = argparse._SubParsersAction  # noqa: SLF001 (argparse names the type nowhere else)


def _command(
    commands: Commands[_Parser], name: str, what: str, example: str, formats: tuple[str, str] | None
) -> _Parser:
    parser: _Parser = commands.add_parser(
        name,
        help=what,
        description=f"{what[:1].upper()}{what[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if formats is not None:
        parser.add_argument("--format", choices=formats, default=formats[0], help=f"default: {formats[0]}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and the log")
    return parser


def _add_bootstrap(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "bootstrap",
        "start a new network and be the place where others join it",
        "p2pserve bootstrap --listen 0.0.0.0:4001 --announce 203.0.113.7:40123",
        ("text", "json"),
    )
    _add_node(parser, port=4001, folder="bootstrap")
    parser.add_argument("--model", help="serve a model here as well (default: none)")
    add_also_option(parser)


def _add_join(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "join",
        "join a network with this box and serve a model",
        "p2pserve join --bootstrap p2p_worker_... --model ~/models/llama --port 4002",
        ("text", "json"),
    )
    _add_network(parser, "p2p_worker_...")
    parser.add_argument(
        "--join-timeout",
        dest="join_timeout_s",
        type=seconds,
        default=60.0,
        metavar="S",
        help="how long to ask members that do not answer (default: 60)",
    )
    _add_node(parser, port=4002, folder="node")
    parser.add_argument(
        "--model",
        default="bundled",
        help="a folder in Hugging Face format, a Hugging Face id, or `bundled`, a small one (default)",
    )
    parser.add_argument("--engine-channel", type=count, help=argparse.SUPPRESS)


def _add_leave(commands: Commands[_Parser]) -> None:
    parser = _command(commands, "leave", "let a node of this box finish its requests and stop", "p2pserve leave", None)
    add = parser.add_argument
    add("node", nargs="?", choices=("node", "bootstrap"), default="node", help="which (default: node)")
    _add_home(parser, "the node's own folder is inside it")
    add("--timeout-s", type=seconds, default=60.0, metavar="S", help="give up after this long (default: 60)")


def _add_token(commands: Commands[_Parser]) -> None:
    parser: _Parser = commands.add_parser(
        "token",
        help="make, show, revoke and renew join tokens, on the box that ran `bootstrap`",
        description=ABOUT_TOKENS,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="create|list|revoke|renew", required=True, parser_class=_Parser)

    def add_verb(name: str, what: str, example: str) -> _Parser:
        added = _command(verbs, name, what, f"p2pserve token {example}", ("text", "json"))
        _add_home(added, "the key lies in `bootstrap` in this folder")
        return added

    add_token_verbs(add_verb)


def _add_generate(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "generate",
        "continue a prompt or a conversation; the text goes to stdout as it comes, figures to stderr",
        'p2pserve generate --max-tokens 40 "def fibonacci(n):"',
        ("text", "json"),
    )
    parser.add_argument("prompt", nargs="?", help="the text to continue; `-` reads it from stdin (UTF-8)")
    parser.add_argument(
        "--messages",
        type=Path,
        metavar="FILE",
        help='a conversation instead: JSON, a list of {"role": ..., "content": ...}; `-` is stdin',
    )
    _add_network(parser, "p2p_client_...")
    add = parser.add_argument
    add("--max-tokens", type=int, metavar="N", help="at most this many new tokens (default: what fits, up to 256)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default) takes the likeliest token")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from this share of likely tokens (default: 1)")
    add("--top-k", type=int, default=0, metavar="K", help="sample from so many likely tokens (default: 0, all)")
    add("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    add("--deadline-s", type=float, default=300.0, metavar="S", help="for the whole answer (default: 300)")
    add("--service", metavar="NAME", help="which of several models of the network")
    add("--timeout-s", type=seconds, default=10.0, metavar="S", help="to reach the network (default: 10)")


def _add_status(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "status",
        "show nodes, coordinator and plan of a network",
        "p2pserve status --format json",
        ("table", "json"),
    )
    _add_network(parser, "p2p_client_...")
    parser.add_argument("--links", action="store_true", help="also what is known of each link between two nodes")
    _add_timeout(parser)


def _add_path(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "path",
        "explain by which path KV would go from one node to another, and why",
        "p2pserve path ..x7Gk2P ..9fQm1A --megabytes 80",
        ("table", "json"),
    )
    parser.add_argument("source", help="a node: its id, or the end of it as `p2pserve status` shows it")
    parser.add_argument("target", help="the other node")
    parser.add_argument(
        "--megabytes", type=figure, default=80.0, metavar="MB", help="how much to move (default: 80, a long prompt)"
    )
    add_price_options(parser)
    _add_network(parser, "p2p_client_...")
    _add_timeout(parser)


def _add_selftest(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "selftest",
        "check that the vLLM of this box works with p2pserve; a node does so by itself with versions it does not know",
        "p2pserve selftest",
        ("text", "json"),
    )
    add = parser.add_argument
    add("--full", action="store_true", help="all that is checked once on a GPU: tests, kernels, engines; half an hour")
    report = "where --full writes what it found (default: %(default)s)"
    add("--report", type=Path, default=Path("gpu-check.json"), metavar="FILE", help=report)


def _add_plan(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "plan",
        "say which GPUs should form replicas, what each should do and what to expect, for a described cluster or, with "
        "--live, for the running network",
        "p2pserve plan --cluster thunderserve-cloud-32 --model llama-30b --workload coding --rate 10",
        ("table", "json"),
    )
    add_plan_options(parser)
    add_live_option(parser)
    _add_network(parser, "p2p_client_...")
    _add_timeout(parser)


def _add_sim(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "sim",
        "simulate requests against a plan for a described cluster, in virtual time (for the running network: "
        "p2pserve plan --live)",
        "p2pserve sim --cluster thunderserve-cloud-32 --model llama-30b --workload coding --rate 3 --plots out",
        ("table", "json"),
    )
    add_sim_options(parser)


def _add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout-s", type=seconds, default=10.0, metavar="S", help="to reach the network (default: 10)"
    )


def _add_demo(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "demo",
        "run a whole network on this machine, for real, and compare it with a single engine",
        "p2pserve demo --nodes 4 --codec kv4 --format json",
        ("table", "json"),
    )
    add = parser.add_argument
    add("--nodes", type=int, default=4, metavar="N", help="engines to start, 1 to 16 (default: 4)")
    add("--prompt", metavar="TEXT", help="instead of Python code from the standard library")
    _add_codec(parser)
    add("--max-tokens", type=positive, default=64, metavar="N", help="for each answer (default: 64)")
    add("--model", default="bundled", help="a folder, a Hugging Face id, or `bundled` (default)")
    add("--timeout-s", type=seconds, default=120.0, metavar="S", help="give up after this long (default: 120)")


def _add_home(parser: argparse.ArgumentParser, what: str) -> None:
    home = os.environ.get(environment.HOME) or "~/.p2pserve"
    parser.add_argument(
        "--home", type=Path, default=Path(home), help=f"{what} (default: ~/.p2pserve, or P2PSERVE_HOME)"
    )


def _add_network(parser: argparse.ArgumentParser, token: str) -> None:
    parser.add_argument(
        "--bootstrap",
        action=Listed,
        default=os.environ.get(environment.BOOTSTRAP),
        metavar="WHERE",
        help=f"the join token ({token}); beside it, after a comma or with --bootstrap again, host:port of other "
        f"members to ask (default: {environment.BOOTSTRAP})",
    )
    parser.add_argument(
        "--token",
        default=os.environ.get(environment.TOKEN),
        help=f"the join token, when --bootstrap names addresses only (default: {environment.TOKEN})",
    )


def _add_codec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--codec",
        choices=CODEC_NAMES,
        default="kv4",
        help="how KV travels: kv4 in 4 bits and a little (default), kivi4 as published, fp8, or raw bit by bit",
    )


def _add_node(parser: argparse.ArgumentParser, *, port: int, folder: str) -> None:
    _add_home(parser, f"keys, lock and logs go to `{folder}` in this folder")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--listen",
        default=f"0.0.0.0:{port}",
        metavar="HOST:PORT",
        help=f"the one TCP port of this node; port 0 picks a free one (default: 0.0.0.0:{port})",
    )
    where.add_argument("--port", type=count, metavar="PORT", help="short for --listen 0.0.0.0:PORT")
    parser.add_argument(
        "--announce",
        metavar="HOST:PORT",
        help="where others reach it when ports are mapped (default: what Vast or RunPod set, else the interface)",
    )
    _add_codec(parser)
    parser.add_argument(
        "--drain-s",
        type=seconds,
        default=30.0,
        metavar="S",
        help="on Ctrl-C or SIGTERM let requests finish for so long; a second one leaves at once (default: 30)",
    )
    add_link_options(parser)
    add_engine_options(parser)


if __name__ == "__main__":
    sys.exit(main())
