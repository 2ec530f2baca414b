"""`p2pserve selftest`: whether this box's engine works."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import msgspec
import trio

from ...node.box.hardware import probe
from ...node.box.start_checks import require_engine
from ...node.engine.agent_side.fork_server import open_fork_server
from ...node.engine.gpucheck.run import run_check, write_report
from ...node.engine.gpucheck.verdicts import table
from ...node.engine.trials.selftest import check_installation, selftest_log
from ..errors import UsageError


def selftest(arguments: SimpleNamespace) -> int:
    """`p2pserve selftest`."""
    if arguments.full:
        return _check_gpu(arguments)
    require_engine(probe(), os.environ)
    verdict = trio.run(check_installation, open_fork_server)
    if arguments.format == "json":
        print(json.dumps(msgspec.to_builtins(verdict)))
    elif verdict.passed:
        print(f"vLLM {verdict.versions.vllm} works with p2pserve ({verdict.seconds:.1f} s)")
    else:
        print(f"vLLM {verdict.versions.vllm} does not work with p2pserve: {verdict.reason}; see {selftest_log()}")
    return 0 if verdict.passed else 1


def _check_gpu(arguments: SimpleNamespace) -> int:
    """`p2pserve selftest --full`: findings to stdout; progress to stderr if they are JSON."""
    as_json = arguments.format == "json"
    if not arguments.report.parent.is_dir():
        raise UsageError(f"--report {arguments.report}: there is no folder {arguments.report.parent}")
    report = run_check(lambda text: print(text, file=sys.stderr if as_json else sys.stdout, flush=True))
    write_report(report, arguments.report)
    if as_json:
        print(json.dumps(msgspec.to_builtins(report)))
    elif report.cards:
        print(f"{table(report)}\nsee {arguments.report}")
    return 0 if report.passed else 1
