"""How much of a KV transfer between two real engines is hidden behind prefill: `python -m p2pserve.node.bench`.

The link is held to the rate at which the KV takes as long as the prefill itself, the hardest case for hiding it: a
faster one leaves less to hide, a slower one cannot be hidden. Layer by layer and at once are measured in turn,
in one run, on prompts that no cache has seen; then the engine is asked what it would choose for prompts of several
lengths on an unthrottled link, from what it has measured of itself.

Visible: from the end of prefill until the decode engine has the KV in its cache and the prefill side knows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import final

import msgspec
import trio

from ...kvtransport.errors import TransferError
from ..engine import protocol
from ..engine.agent_side.engine_link import EngineError
from ..engine.agent_side.fork_server import open_fork_server
from ..engine.dev.bench import first_error
from ..engine.trials.trial import Trial, TrialEngine, open_trial
from ..models import ModelError, open_model

AUTO_TOKENS = (16, 64, 256, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """One way of sending, medians over its repeats. `visible_part`: of the time the bytes need on the link."""

    mode: str
    visible_s: float
    visible_part: float
    span_s: float
    hidden_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapReport:
    """All figures of a run. `auto`: prompt tokens -> what the engine chose on the unthrottled link."""

    model: str
    codec: str
    prompt_tokens: int
    prefill_s: float
    wire_bytes: int
    link_mbit_s: float
    throttle: str
    layerwise: Overlap
    serialised: Overlap
    auto: dict[int, str]


@final
class _Bench:
    """Two engines on this machine, and the link from the first to the second."""

    def __init__(self, trial: Trial, prefill: TrialEngine, decode: TrialEngine, codec: str) -> None:
        self._trial = trial
        self._prefill, self._decode = prefill, decode
        self._codec = codec
        self._rng = random.Random(1)
        self._link = trial.join(decode)

    def prompt(self, tokens: int) -> list[int]:
        """Tokens that no cache has seen."""
        return [self._rng.randrange(self._prefill.ready.vocabulary) for _ in range(tokens)]

    async def prefill_s(self, tokens: int) -> float:
        """Seconds for a prompt alone, without any transfer."""
        begun = time.monotonic()
        return (await self._prefill.generate(self.prompt(tokens), 1)).last_at - begun

    async def transfer(self, tokens: int, mode: protocol.WantedSendMode, bytes_s: int) -> protocol.TransferReport:
        """One prompt's KV from the first engine to the second, at most `bytes_s` (0: unthrottled)."""
        prompt = self.prompt(tokens)
        (outlet,), receive = self._trial.transfer_ends(self._link, self._codec, self._decode.ready, pacing=mode)
        if bytes_s:
            path = msgspec.structs.replace(self._trial.path, pace_bytes_s=bytes_s)
            outlet = msgspec.structs.replace(outlet, paths=(path,), gbps=bytes_s / 1.25e8)
        answer = self._decode.submit(prompt, 1, receive=receive, receive_tokens=tokens)
        begun = self._prefill.submit(prompt, 1, send=(outlet,))
        report = await self._prefill.report(outlet.ticket.transfer)
        await self._prefill.answer(begun)
        await self._decode.answer(answer)
        return report


async def _measure(bench: _Bench, model: str, codec: str, tokens: int, repeats: int) -> OverlapReport:
    await bench.prefill_s(tokens)  # both engines warm, the link dialled
    whole = await bench.transfer(tokens, "layerwise", 0)
    prefill_s = statistics.median([await bench.prefill_s(tokens) for _ in range(repeats)])
    bytes_s = max(1, round(whole.wire_bytes / prefill_s))
    found: dict[protocol.WantedSendMode, list[protocol.TransferReport]] = {"layerwise": [], "serialised": []}
    for _ in range(repeats):
        for mode, reports in found.items():
            reports.append(await bench.transfer(tokens, mode, bytes_s))
    auto = {}
    for length in AUTO_TOKENS:
        if length <= tokens:
            auto[length] = (await bench.transfer(length, "auto", 0)).mode
    return OverlapReport(
        model=model,
        codec=codec,
        prompt_tokens=tokens,
        prefill_s=prefill_s,
        wire_bytes=whole.wire_bytes,
        link_mbit_s=bytes_s * 8 / 1e6,
        throttle="pacing by the kernel (SO_MAX_PACING_RATE) on loopback: no round-trip time, no loss",
        layerwise=_overlap(found["layerwise"], whole.wire_bytes / bytes_s),
        serialised=_overlap(found["serialised"], whole.wire_bytes / bytes_s),
        auto=auto,
    )


def _overlap(reports: list[protocol.TransferReport], link_s: float) -> Overlap:
    visible = statistics.median(report.visible_s for report in reports)
    return Overlap(
        mode=reports[0].mode,
        visible_s=visible,
        visible_part=visible / link_s,
        span_s=statistics.median(report.span_s for report in reports),
        hidden_fraction=statistics.median(report.hidden_fraction for report in reports),
    )


async def run(model: str, codec: str, tokens: int, repeats: int) -> OverlapReport:
    """Start two engines and measure. Raises ModelError, EngineError or TransferError."""
    opened = open_model(model)
    with tempfile.TemporaryDirectory(prefix="p2pserve-bench-", ignore_cleanup_errors=True) as folder:
        log = FilePath(folder) / "engine.log"
        config = protocol.EngineConfig(model=str(opened.fetch()), kv_cache_mib=256, threads=1, log_file=str(log))
        async with open_fork_server(log=log, threads=1) as server, open_trial(server) as trial:
            prefill, decode = await trial.start(config), await trial.start(config)
            return await _measure(_Bench(trial, prefill, decode, codec), model, codec, tokens, repeats)


def table(report: OverlapReport) -> str:
    """For people."""
    lines = [
        f"{report.model}, {report.prompt_tokens} tokens, {report.codec}: prefill {report.prefill_s:.3f} s",
        f"{report.wire_bytes / 1e6:.2f} MB on a link held to {report.link_mbit_s:.0f} Mb/s",
        f"({report.throttle})",
        f"{'':12} {'visible':>9} {'of link time':>13} {'span':>9} {'hidden':>8}",
    ]
    for each in (report.layerwise, report.serialised):
        visible = f"{each.visible_s:8.3f}s {each.visible_part:12.1%}"
        lines.append(f"{each.mode:12} {visible} {each.span_s:8.3f}s {each.hidden_fraction:8.1%}")
    chosen = ", ".join(f"{tokens} tokens {mode}" for tokens, mode in report.auto.items())
    return "\n".join([*lines, f"chosen by measurement on an unthrottled link: {chosen}"])


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.node.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled", help="a folder, or bundled (the default)")
    parser.add_argument("--codec", default="kv4", help="raw, fp8, kv4 (the default) or kivi4")
    parser.add_argument("--tokens", type=int, default=1500, help="length of the prompts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if options.tokens < 2 or options.repeats < 1:
        parser.error("--tokens must be at least 2 and --repeats at least 1")
    report: OverlapReport | None = None
    try:
        report = trio.run(run, options.model, options.codec, options.tokens, options.repeats)
    except* (ModelError, EngineError, TransferError, ValueError) as errors:
        sys.stderr.write(f"bench: {first_error(errors)}\n")
    if report is None:
        return 1
    sys.stdout.write(json.dumps(asdict(report), indent=2) if options.format == "json" else table(report))
    sys.stdout.write("\n")
    return 0
