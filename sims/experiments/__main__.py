"""Run experiments and write their pages: `python -m p2pserve.sims.experiments --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Final

import msgspec

from .ablation import ablation
from .baselines import baselines, deadlines, strictness
from .convergence import convergence
from .deployments import deployments
from .headline import headline
from .links import links
from .load.expectations import expectations
from .load.options import options
from .load.overload import overload
from .page import COMMAND, Page, write_index, write_page
from .papers.cronus import cronus
from .papers.hetero import hetero
from .papers.placement import placement
from .papers.policies import policies
from .papers.prefixes import prefixes
from .papers.sharing import sharing
from .phases import phases
from .ratios import ratios
from .recovery import recovery
from .rescheduling import rescheduling
from .setting import Scope
from .splitwise.pools import pools
from .splitwise.provision import provision

EXPERIMENTS: Final[Mapping[str, Callable[[Scope], Page]]] = {
    experiment.__name__: experiment
    for experiment in (
        phases,
        links,
        ratios,
        ablation,
        rescheduling,
        recovery,
        deployments,
        strictness,
        baselines,
        deadlines,
        convergence,
        cronus,
        hetero,
        policies,
        prefixes,
        provision,
        pools,
        overload,
        expectations,
        options,
        sharing,
        placement,
    )
}
SUMMARY: Final = "headline"
EPILOG: Final = """\
headline sums up the pages that are in the folder already

exit codes: 0 written; 1 a page could not be read or written; 2 wrong input"""


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _scope(arguments: argparse.Namespace) -> tuple[Scope, list[str]]:
    """How much of everything, and the options that say so, for the page to name."""
    scope, named = (Scope.quick(), ["--quick"]) if arguments.quick else (Scope(), [])
    if arguments.seeds is not None:
        scope, named = replace(scope, seeds=tuple(range(arguments.seeds))), [*named, f"--seeds {arguments.seeds}"]
    if arguments.seconds is not None:
        scope = replace(scope, seconds=float(arguments.seconds))
        named = [*named, f"--seconds {arguments.seconds}"]
    return replace(scope, kept=arguments.keep), named


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m p2pserve.sims.experiments",
        description="The papers' figures and tables from this project's planner and simulator.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*EXPERIMENTS, SUMMARY, "all"]
    parser.add_argument("name", nargs="*", choices=names, default="all", metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the pages (%(default)s)")
    parser.add_argument("--seeds", type=_at_least_one, help=f"seeds of simulated runs ({len(Scope().seeds)})")
    parser.add_argument("--seconds", type=_at_least_one, help=f"seconds of arrivals in each ({Scope().seconds:g})")
    parser.add_argument("--quick", action="store_true", help="a look at whether it works; the figures say little")
    parser.add_argument("--keep", type=Path, help="file of finished parts to go on from (options, strictness)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what is printed (%(default)s)")
    arguments = parser.parse_args(argv)
    scope, named = _scope(arguments)
    chosen = [*EXPERIMENTS, SUMMARY] if "all" in arguments.name else list(dict.fromkeys(arguments.name))
    try:
        for name in chosen:
            start = process_time()
            page = headline(arguments.out) if name == SUMMARY else EXPERIMENTS[name](scope)
            if named and name != SUMMARY:
                page = replace(page, command=" ".join([COMMAND, name, *named]))
            write_page(page, arguments.out)
            if arguments.format == "json":
                sys.stdout.write(json.dumps(page.records()) + "\n")
            else:
                sys.stdout.write(f"{arguments.out / name}.md: {process_time() - start:.0f} CPU s\n")
            sys.stdout.flush()
        write_index(arguments.out)
    except (OSError, ImportError, msgspec.ValidationError) as error:
        sys.stderr.write(f"experiments: error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
