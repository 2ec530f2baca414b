"""Run, inspect and calibrate emulated wide-area networks: `python -m p2pserve.sims.wan --help`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..experiments.page import write_index, write_page
from . import calibrate, namespaces
from .emulated import EmulatedWan, Kind, unavailable
from .errors import WanError
from .kv import alpha_beta, paths
from .peers import comparing, figures
from .scenario import Scenario, ScenarioError, link_classes

KINDS: tuple[Kind, ...] = ("tun", "proxy")
EPILOG = """\
while `run` holds a network, these lines on its input change it:
  pair A B rtt_ms=200 loss=0.01     fields of a pair: rtt_ms, loss, jitter_ms, gbps
  box A up_gbps=0.1                 caps of a box: up_gbps, down_gbps
  outage A B SECONDS                nothing passes
  route A B PORT                    where a process in A dials PORT of B
  stats                             what passed, what was dropped
  quit

exit codes: 0 done; 1 it failed at run time, or a figure was out of its tolerance; 2 wrong input."""


class Usage(ValueError):
    """A line or option that cannot be carried out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = list(sys.argv[1:] if argv is None else argv)
    # What follows `--` is another program's command line, not ours to parse.
    split = options.index("--") if "--" in options else len(options)
    arguments = _parser().parse_args(options[:split])
    arguments.command = options[split + 1 :]
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except (ScenarioError, Usage) as error:
        sys.stderr.write(f"wan: error: {error}\n")
        return 2
    except (WanError, OSError, ImportError) as error:
        sys.stderr.write(f"wan: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m p2pserve.sims.wan",
        description="An emulated wide-area network on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    add("check", _check, "say which kinds of emulation run here, and why not the others")
    classes = add("classes", _classes, "typical links, for `Scenario.from_classes`")
    _add_format(classes)
    sketch = add("sketch", _sketch, "print a scenario of typical links, to be edited: paris-nyc=transatlantic ...")
    sketch.add_argument("link", nargs="+", metavar="A-B=CLASS")
    calibration = add("calibrate", _calibrate, "measure an emulated network against what real ones were measured to do")
    _add_kind(calibration)
    _add_format(calibration)
    cases = add("paths", _paths, "move real KV between three boxes in five situations; which path was taken, and why")
    cases.add_argument("--case", choices=sorted(paths.CASES), action="append", help="only this one; may be repeated")
    _add_kind(cases)
    _add_format(cases)
    model = add(
        alpha_beta.NAME, _alpha_beta, "move real KV of many sizes over four links, beside the planner's estimate of it"
    )
    model.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the page (%(default)s)")
    _add_kind(model)
    _add_format(model)
    peers = add(
        figures.NAME, _peers, "ours beside NIXL, Mooncake, rsync, TCP, vLLM's pipeline and etcd, on the same links"
    )
    _add_peer_options(peers)
    _add_format(peers)
    run = add("run", _run, "hold a network until its input ends, or run one command in a box of it")
    run.add_argument("scenario", metavar="SCENARIO.json")
    _add_kind(run)
    run.add_argument("--in", dest="box", metavar="BOX", help="run `-- COMMAND ...` in this box, then end")
    execute = add("exec", _exec, "run `-- COMMAND ...` in a box of a network that `run` holds; a shell without one")
    execute.add_argument("box")
    add("clean", _clean, "remove what killed emulators have left")
    return parser


def _add_peer_options(parser: argparse.ArgumentParser) -> None:
    options = comparing.PeerOptions()
    parser.add_argument("--only", choices=comparing.PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--mib", type=int, default=options.mib, help="MiB of a transfer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=options.rounds, help="turns of each contender (%(default)s)")
    parser.add_argument("--seconds", type=float, default=options.seconds, help="for all of it (%(default)g)")
    parser.add_argument("--stages", default=",".join(map(str, options.stages)), help="of pipelines (%(default)s)")
    parser.add_argument("--folder", type=Path, default=options.folder, help="of the peers' environment (%(default)s)")
    parser.add_argument("--no-install", action="store_true", help="take only peers that are installed there already")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the page (%(default)s)")


def _add_kind(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=KINDS, help="default: tun where it runs, else proxy")


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("table", "json"), default="table")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _tell(text: str) -> None:
    """How far it is, beside what is printed at the end."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _check(arguments: argparse.Namespace) -> int:
    for kind in KINDS:
        reason = unavailable(kind)
        _say(f"{kind}: {'runs here' if reason is None else reason}")
    return 0


def _classes(arguments: argparse.Namespace) -> int:
    rows = list(link_classes().values())
    if arguments.format == "json":
        _say(msgspec.json.encode(rows).decode())
        return 0
    width = max(len(row.name) for row in rows)
    _say(f"{'class':<{width}}  rtt ms  1 stream  many Gb/s")
    for row in rows:
        figures = f"{row.rtt_ms:>6g}  {row.one_stream_gbps:>8g}  {row.multi_stream_gbps:>9g}"
        _say(f"{row.name:<{width}}  {figures}")
    return 0


def _sketch(arguments: argparse.Namespace) -> int:
    links = {}
    for link in arguments.link:
        ends, _, name = link.partition("=")
        a, _, b = ends.partition("-")
        if not (a and b and name):
            raise Usage(f"{link!r} is no link: write it as paris-nyc=transatlantic")
        links[a, b] = name
    document = Scenario.from_classes(links).to_json().encode()
    _say(msgspec.json.format(document, indent=2).decode())
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    measured = calibrate.calibrate(arguments.kind)
    _say(measured.to_json() if arguments.format == "json" else calibrate.table(measured))
    return 0 if measured.ok else 1


def _paths(arguments: argparse.Namespace) -> int:
    cases = []
    for case in paths.run_cases(arguments.case or tuple(paths.CASES), kind=arguments.kind):
        cases.append(case)
        sys.stderr.write(f"({case.name}) {case.what}: {'as it must be' if case.ok else 'NOT as it must be'}\n")
    _say(msgspec.json.encode(cases).decode() if arguments.format == "json" else paths.table(cases))
    return 0 if all(case.ok for case in cases) else 1


def _alpha_beta(arguments: argparse.Namespace) -> int:
    arguments.out.mkdir(parents=True, exist_ok=True)  # that it cannot be written is told before minutes of measuring
    rows = []
    for row in alpha_beta.measure_links(arguments.kind):
        rows.append(row)
        size = f"{row.rtt_ms:g} ms, {row.link_gbps:g} Gb/s, {row.mib} MiB"
        sys.stderr.write(f"{size}: {row.seconds:.3f} s, {row.over_estimate:.2f} of the estimate\n")
    page = alpha_beta.make_page(rows)
    write_page(page, arguments.out)
    write_index(arguments.out)
    _say(json.dumps(page.records()) if arguments.format == "json" else page.tables[0].markdown())
    return 0


def _peers(arguments: argparse.Namespace) -> int:
    options = _peer_options(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = comparing.PeerComparison(options, _tell).run()
    page = figures.make_page(found)
    write_page(page, arguments.out)
    write_index(arguments.out)
    tables = "\n\n".join(table.markdown() for table in page.tables)
    _say(json.dumps(page.records()) if arguments.format == "json" else f"{tables}\n\n{' '.join(found.circumstances)}")
    return 0


def _peer_options(arguments: argparse.Namespace) -> comparing.PeerOptions:
    for name, least, most in (("mib", 1, 4096), ("rounds", 1, 50), ("seconds", 10, 7200)):
        value = getattr(arguments, name)
        if not least <= value <= most:
            raise Usage(f"--{name} {value:g}: it must be from {least} to {most}")
    try:
        stages = tuple(int(word) for word in arguments.stages.split(","))
    except ValueError:
        raise Usage(f"--stages {arguments.stages!r}: write numbers of stages as 2,3,4") from None
    if not all(2 <= each <= 8 for each in stages):
        raise Usage(f"--stages {arguments.stages}: a pipeline here has 2 to 8 stages")
    return comparing.PeerOptions(
        parts=tuple(arguments.only or comparing.PARTS),
        mib=arguments.mib,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        stages=stages,
        folder=arguments.folder,
        install=not arguments.no_install,
    )


def _run(arguments: argparse.Namespace) -> int:
    command: list[str] = arguments.command
    if bool(command) != bool(arguments.box):
        raise Usage("--in BOX and -- COMMAND go together")
    scenario = Scenario.from_json(Path(arguments.scenario).read_bytes())
    # A terminal that goes away, or a polite kill, ends the network as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with EmulatedWan(scenario, kind=arguments.kind) as wan:
        if command:
            code: int = wan.popen(arguments.box, command).wait()
            return code
        _say(f"{wan.kind} network of {len(scenario.boxes)} boxes; cannot show:")
        _say("\n".join(f"- {limit}" for limit in wan.cannot_show))
        for box in scenario.boxes:
            _say(f"{box}: {wan.address(box)}   {' '.join(wan.command(box, ['...'])) if wan.kind == 'tun' else ''}")
        for line in sys.stdin:
            words = line.split()
            if words == ["quit"]:
                break
            try:
                _say(_obey(wan, words))
            except (Usage, ScenarioError) as error:
                _say(f"error: {error}")
    return 0


def _obey(wan: EmulatedWan, words: list[str]) -> str:
    """Carry out one line of `run`'s input and say what happened."""
    match words:
        case []:
            return ""
        case ["pair", a, b, *changes] if changes:
            wan.set_pair(a, b, **_changes(changes))
        case ["box", box, *changes] if changes:
            wan.set_box(box, **_changes(changes))
        case ["outage", a, b, seconds]:
            wan.outage(a, b, _number("SECONDS", seconds))
        case ["route", a, b, port]:
            host, local = wan.route(a, b, int(_number("PORT", port)))
            return f"{host}:{local}"
        case ["stats"]:
            return _statistics(wan)
        case _:
            raise Usage(f"{' '.join(words)!r} is no command: pair, box, outage, route, stats, quit (see --help)")
    return "done"


def _statistics(wan: EmulatedWan) -> str:
    report = wan.statistics()
    lines = [f"{'':<24}  MB       lost  dropped  dead  queue ms mean  max"]
    for (a, b), line in report.lines.items():
        counts = f"{line.bytes / 1e6:<7.1f}  {line.lost:>4}  {line.dropped:>7}  {line.dead:>4}"
        lines.append(f"{a + ' -> ' + b:<24}  {counts}  {line.queue_ms_mean:>13.1f}  {line.queue_ms_max:.1f}")
    lines.append(f"late {report.late_ms_mean:.2f} ms, at most {report.late_ms_max:.1f}; CPU {report.cpu_s:.1f} s")
    return "\n".join(lines)


def _changes(words: list[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        changes[name] = _number(name, value)
    return changes


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Usage(f"{name}: {text!r} is no number") from None


def _exec(arguments: argparse.Namespace) -> int:
    found = [name for name, (_, box) in namespaces.running().items() if box == arguments.box]
    if not found:
        boxes = ", ".join(sorted({box for _, box in namespaces.running().values()})) or "no network is running"
        raise Usage(f"there is no box {arguments.box!r} here: {boxes}")
    if len(found) > 1:
        raise Usage(
            f"several networks have a box {arguments.box!r}: use `ip netns exec` with one of {', '.join(found)}"
        )
    command = arguments.command or [os.environ.get("SHELL", "/bin/sh")]
    return subprocess.run(namespaces.command(found[0], command), check=False).returncode


def _clean(arguments: argparse.Namespace) -> int:
    removed = namespaces.sweep()
    _say("\n".join(f"removed {name}" for name in removed) or "nothing was left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
