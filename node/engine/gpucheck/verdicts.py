"""The order of the parts, the time of each, and what counts as passed. Pure: texts and numbers in, verdicts out."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal
from xml.etree import ElementTree

import msgspec

Status = Literal["passed", "failed", "skipped"]
NOT_RUN: Final = "not run on a GPU"
WIDTH: Final = 80
CODEC_SHARE: Final = 0.7  # of what a copy on the device moves
ENGINE_TARGETS: Final[tuple[tuple[str, Literal[">=", "<="], float], ...]] = (
    ("throughput_ratio_32", ">=", 0.97),
    ("ttft_added_ms", "<=", 10.0),
    ("handoff_link_ratio_4000", ">=", 0.8),
    ("step_beside_transfer_ratio", "<=", 1.05),
)
SHOWN: Final = 5  # failed tests, or places that synchronise, that a reason names


class CheckPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the check. `share_s`: its part of the half an hour, in seconds."""

    name: str
    what: str
    share_s: float


PARTS: Final = (
    CheckPart(name="box", what="driver, headers, compiler and versions", share_s=30),
    CheckPart(name="untouched", what="torch is not patched, and CUDA not touched, by the fork server", share_s=90),
    CheckPart(name="tests", what="tests/gpu: tokens, transfers, losses", share_s=840),
    CheckPart(name="kernels", what="codecs beside a copy on the device", share_s=120),
    CheckPart(name="engines", what="engines beside plain vLLM", share_s=540),
    CheckPart(name="synchronisations", what="where a step waits for the device", share_s=180),
)
"""What is cheap and explains the failure of what follows comes first. 30 minutes in all."""


class TargetFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A measured figure beside its target, as in `>= 0.97`."""

    name: str
    value: float
    target: str
    reached: bool


class PartResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a part ended. `reason` is empty when it passed; `found` is what its program said."""

    part: str
    what: str
    status: Status
    reason: str = ""
    seconds: float | None = None
    figures: tuple[TargetFigure, ...] = ()
    found: Any = None


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `cards` are empty where there is no GPU; `began` is a date and time in UTC."""

    passed: bool
    began: str
    seconds: float
    cards: tuple[str, ...]
    versions: dict[str, str]
    parts: tuple[PartResult, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a part's process ended. `status` is None if it was ended for taking longer than `limit_s`; `output` is what
    it wrote for the verdict, `log` the end of everything else."""

    status: int | None
    output: str
    log: str
    seconds: float
    limit_s: float


def time_limit(position: int, spent_s: float) -> float:
    """Seconds for the part at this position, when those before it took `spent_s`: what they left over is added."""
    return max(0.0, sum(part.share_s for part in PARTS[: position + 1]) - spent_s)


def not_run(part: CheckPart, reason: str = NOT_RUN) -> PartResult:
    """A part that was left out."""
    return PartResult(part=part.name, what=part.what, status="skipped", reason=reason)


def judge(part: CheckPart, outcome: Outcome) -> PartResult:
    """What a part's process has shown."""
    figures: tuple[TargetFigure, ...] = ()
    found: Any = None
    if outcome.status is None:
        reason = f"ended because it was not done after {outcome.limit_s:.0f} s"
    else:
        try:
            found, reason, figures = _JUDGES[part.name](outcome.output)
        except (ValueError, KeyError, TypeError, ElementTree.ParseError):
            reason = f"ended with status {outcome.status} and without a result: {_last_line(outcome.log)}"
        else:
            missed = [f"{each.name} is {each.value:.3g}, not {each.target}" for each in figures if not each.reached]
            reason = reason or "; ".join(missed)
            if not reason and outcome.status:
                reason = f"ended with status {outcome.status}: {_last_line(outcome.log)}"
    return PartResult(
        part=part.name,
        what=part.what,
        status="failed" if reason else "passed",
        reason=reason,
        seconds=round(outcome.seconds, 1),
        figures=figures,
        found=found,
    )


def report_of(
    parts: Sequence[PartResult], *, began: str, seconds: float, cards: Sequence[str], versions: Mapping[str, str]
) -> CheckReport:
    """It passed only if every part was run and passed."""
    return CheckReport(
        passed=len(parts) == len(PARTS) and all(part.status == "passed" for part in parts),
        began=began,
        seconds=round(seconds, 1),
        cards=tuple(cards),
        versions=dict(versions),
        parts=tuple(parts),
    )


# ---- each part: what its program wrote -> (what is kept of it, why it failed or "", figures) -----------------------

_Judged = tuple[Any, str, tuple[TargetFigure, ...]]


def _beside(name: str, value: float, sign: Literal[">=", "<="], bound: float) -> TargetFigure:
    reached = value >= bound if sign == ">=" else value <= bound
    return TargetFigure(name=name, value=value, target=f"{sign} {bound:g}", reached=reached)


def _judge_box(output: str) -> _Judged:
    found = json.loads(output)
    return found, "; ".join(found["complaints"]), ()


def _judge_untouched(output: str) -> _Judged:
    found = json.loads(output)
    wrong = [f"{name} is {owner}'s" for name, owner in found["patched"].items()]
    if found["cuda_initialised"]:
        wrong.append("CUDA is initialised in the fork server: its engines could not use it")
    return found, "; ".join(wrong), ()


def _judge_tests(output: str) -> _Judged:
    root = ElementTree.fromstring(output)
    cases = root.findall(".//testcase")
    failed = [_name(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = {_name(case): skip.get("message", "") for case in cases if (skip := case.find("skipped")) is not None}
    found = {"tests": len(cases), "failed": failed, "skipped": skipped}
    if failed:
        return found, f"{len(failed)} of {len(cases)} failed: {_some(failed)}", ()
    return found, "" if len(skipped) < len(cases) else "no test was run", ()


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}"


def _judge_kernels(output: str) -> _Judged:
    rows = [row for row in json.loads(output)["rows"] if row["device"] == "cuda"]
    figures = tuple(_codec_figure(row) for row in rows if row["codec"] != "raw")
    return rows, "" if figures else "no codec was measured on a GPU", figures


def _codec_figure(row: dict[str, Any]) -> TargetFigure:
    ratio = round(row["gbps_16bit"] / row["memcpy_gbps"], 3)
    return _beside(f"{row['codec']} {row['op']} {row['tokens']}", ratio, ">=", CODEC_SHARE)


def _judge_engines(output: str) -> _Judged:
    found = json.loads(output)
    figures = tuple(_beside(name, float(found[name]), sign, bound) for name, sign, bound in ENGINE_TARGETS)
    del found["steps"]  # hundreds of lines that only the profile needs
    return found, "", figures


def _judge_synchronisations(output: str) -> _Judged:
    found = json.loads(output)
    if not found["armed"]:
        return found, "vLLM's check for synchronisations was not active: nothing can be said", ()
    own = [f"{each['own'][-1]} ({each['message']})" for each in found["ours"]]
    return found, f"{len(own)} of ours: {_some(own)}" if own else "", ()


_JUDGES: Final[dict[str, Callable[[str], _Judged]]] = {
    "box": _judge_box,
    "untouched": _judge_untouched,
    "tests": _judge_tests,
    "kernels": _judge_kernels,
    "engines": _judge_engines,
    "synchronisations": _judge_synchronisations,
}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


# ---- for people -----------------------------------------------------------------------------------------------------


def table(report: CheckReport) -> str:
    """At most 80 columns."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items() if version)
    lines = _wrapped(f"{', '.join(report.cards) or 'no GPU'}; {versions}", "")
    lines.append(f"{'part':<18}{'verdict':<9}{'seconds':>8}")
    for part in report.parts:
        seconds = "" if part.seconds is None else f"{part.seconds:.1f}"
        lines.append(f"{part.part:<18}{part.status:<9}{seconds:>8}  {part.what}"[:WIDTH].rstrip())
        for figure in part.figures:
            mark = "" if figure.reached else "   not reached"
            lines.append(f"  {figure.name:<30}{figure.value:>10.3f}  {figure.target:<8}{mark}".rstrip())
        if part.reason:
            lines += _wrapped(part.reason, "  ")
    passed = sum(part.status == "passed" for part in report.parts)
    lines.append(f"{passed} of {len(report.parts)} parts passed, in {report.seconds:.0f} s")
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
