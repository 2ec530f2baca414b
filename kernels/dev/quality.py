"""What the codecs cost in quality, in one table: `python -m p2pserve.kernels.quality [--format json] [--quick]`.

Three parts, each labelled in the output with what it was measured on:

- bits per element of a 1500-token prompt in blocks of 512 tokens (real payloads);
- errors on synthetic tensors of known difficulty;
- the bundled model on modules it was not trained on: perplexity with K and V of every layer sent through the
  codec, divergence from the 16-bit predictions, and ROUGE of greedy continuations from a sent cache against those
  from the 16-bit one; and by how much `kv4` and `kivi4` differ in each, token by token and text by text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from .. import accelerate
from ..codecs import CODEC_NAMES, KIVI4, KV4, RAW
from .quality_model import CONTINUATION_TOKENS, HELD_OUT, PROMPT_TOKENS, BundledModel, TokenScores
from .quality_paired import Difference, difference
from .quality_rouge import Rouge, mean_rouge, rouge
from .quality_tensors import KINDS, Errors, bits_per_element, block_errors, tensors

__all__ = ["ModelReport", "Report", "main", "measure_model", "measure_tensors", "render"]

QUICK_MODULES = ("heapq",)
BATCH = 10  # continuations at once
LABELS = {
    "bits_per_element": "measured: payload bytes of a 1500-token prompt in blocks of 512 tokens, 8 heads of 128, bf16",
    "logit_error_db": "measured on synthetic bf16 tensors, 2048 x 4 x 128: error variance of q.k over its variance",
    "relative_error": "measured on the same tensors: length of the error over length of the tensor",
    "perplexity": "measured on the bundled model, its held-out modules: K (after RoPE) and V of all layers sent",
    "divergence": "measured on the same tokens: mean of KL(prediction after `raw` || after the codec), nats",
    "rouge": f"measured on the bundled model: {CONTINUATION_TOKENS} greedy tokens after sent prompts of {PROMPT_TOKENS}"
    ", against those after `raw`",
    "kv4_minus_kivi4": "measured on the same tokens and continuations, pair by pair",
}
ROUGES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rouge_l": "ROUGE-L"}


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What the model says: codec -> value; of `kv4` minus `kivi4`, figure -> mean and standard error."""

    perplexity: dict[str, float]
    divergence: dict[str, float]
    rouge: dict[str, Rouge]
    kv4_minus_kivi4: dict[str, Difference]

    def change(self, codec: str) -> float:
        """How much worse than `raw` the perplexity is, in percent."""
        return 100 * (self.perplexity[codec] / self.perplexity["raw"] - 1)


@dataclass(frozen=True, slots=True)
class Report:
    """All figures: codec -> value, or tensor kind -> codec -> value."""

    bits: dict[str, float]
    errors: dict[str, dict[str, Errors]]
    model: ModelReport
    modules: tuple[str, ...]
    continuations: int

    def as_json(self) -> dict[str, object]:
        """The figures under plain names, with what each was measured on."""
        relative = {
            kind: {codec: {"k": found.key, "v": found.value} for codec, found in row.items()}
            for kind, row in self.errors.items()
        }
        return {
            "bits_per_element": self.bits,
            "logit_error_db": {
                kind: {codec: found.logit_db for codec, found in row.items()} for kind, row in self.errors.items()
            },
            "relative_error": relative,
            "perplexity": self.model.perplexity,
            "perplexity_change_percent": {codec: self.model.change(codec) for codec in self.model.perplexity},
            "divergence": self.model.divergence,
            "rouge": {codec: asdict(scores) for codec, scores in self.model.rouge.items()},
            "kv4_minus_kivi4": {figure: asdict(found) for figure, found in self.model.kv4_minus_kivi4.items()},
            "held_out_modules": self.modules,
            "continuations": self.continuations,
            "labels": LABELS,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. 2 where the model's part cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m p2pserve.kernels.quality", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="a table, or one JSON object (text)")
    parser.add_argument("--quick", action="store_true", help="one held-out module and fewer continuations")
    parser.add_argument("--threads", type=int, default=0, help="threads for the model (torch's own choice)")
    arguments = parser.parse_args(argv)
    if arguments.threads > 0:
        torch.set_num_threads(arguments.threads)
    codecs = list(CODEC_NAMES)
    try:
        report = _measure(codecs, quick=arguments.quick)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"quality: the bundled model needs {error.name}; install p2pserve[cpu] or p2pserve[gpu]\n")
        return 2
    text = json.dumps(report.as_json(), indent=2) if arguments.format == "json" else render(report)
    sys.stdout.write(text + "\n")
    return 0


def measure_tensors(codecs: Sequence[str]) -> tuple[dict[str, float], dict[str, dict[str, Errors]]]:
    """Bits per element of every codec; errors of those that make any."""
    bits = {codec: bits_per_element(codec) for codec in codecs}
    lossy = [codec for codec in codecs if codec != RAW.name]
    errors = {}
    for kind in KINDS:
        k, v = tensors(kind)
        errors[kind] = {codec: block_errors(codec, k, v) for codec in lossy}
    return bits, errors


def measure_model(codecs: Sequence[str], modules: Sequence[str], continuations: int) -> ModelReport:
    """What the model says of every codec, `kv4` and `kivi4` among them; `continuations` prompts from each module."""
    model = BundledModel()
    batches = model.prompts(modules, continuations).split(BATCH)
    progress = _Progress(len(codecs) * (model.windows(modules) + len(batches)))
    tokens = model.scores(codecs, modules, progress.advance)
    texts: dict[str, list[str]] = {codec: [] for codec in codecs}
    for codec in codecs:
        for batch in batches:
            texts[codec] += model.continuations(codec, batch)
            progress.advance()
    progress.close()
    rouges = {codec: [rouge(*pair) for pair in zip(texts["raw"], texts[codec], strict=True)] for codec in codecs}
    return ModelReport(
        {codec: scores.perplexity for codec, scores in tokens.items()},
        {codec: float(scores.divergence.mean()) for codec, scores in tokens.items()},
        {codec: mean_rouge(scores) for codec, scores in rouges.items()},
        _kv4_minus_kivi4(tokens, rouges),
    )


def render(report: Report) -> str:
    """The table for people."""
    codecs = list(report.bits)
    lines = ["Quality of the KV codecs", ""]
    lines += _table("", codecs, _summary(report))
    lossy = [codec for codec in codecs if codec != RAW.name]
    tables: dict[str, Callable[[Errors], str]] = {
        "Attention-logit error of K, dB": lambda found: f"{found.logit_db:.1f}",
        "Relative error of K, %": lambda found: f"{100 * found.key:.2f}",
        "Relative error of V, %": lambda found: f"{100 * found.value:.2f}",
    }
    for title, cell in tables.items():
        rows = [(kind, [cell(row[codec]) for codec in lossy]) for kind, row in report.errors.items()]
        lines += ["", *_table(title, lossy, rows)]
    lines += ["", "kv4 minus kivi4, mean ± standard error", *_differences(report.model.kv4_minus_kivi4)]
    lines += ["", *(f"{name}: {label}" for name, label in LABELS.items())]
    lines.append(f"modules: {', '.join(report.modules)}; continuations: {report.continuations}")
    return "\n".join(lines)


class _Progress:
    """One line on standard error, where that is a terminal."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._started = steps, 0, time.monotonic()

    def advance(self) -> None:
        self._done += 1
        if sys.stderr.isatty():
            passed = time.monotonic() - self._started
            sys.stderr.write(f"\rmodel: {100 * self._done // self._steps} %, {passed:.0f} s ")
            sys.stderr.flush()

    def close(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\n")


def _measure(codecs: Sequence[str], *, quick: bool) -> Report:
    modules, each = (QUICK_MODULES, 4) if quick else (HELD_OUT, 60)
    before = accelerate.mode()
    accelerate.set_mode(accelerate.KernelMode.EAGER)  # the same bytes, without building anything for so little data
    try:
        bits, errors = measure_tensors(codecs)
        model = measure_model(codecs, modules, each)
    finally:
        accelerate.set_mode(before)
    return Report(bits, errors, model, tuple(modules), each * len(modules))


def _kv4_minus_kivi4(tokens: Mapping[str, TokenScores], rouges: Mapping[str, Sequence[Rouge]]) -> dict[str, Difference]:
    ours, theirs = tokens[KV4.name], tokens[KIVI4.name]
    found = {
        "loss": difference(ours.loss, theirs.loss),
        "divergence": difference(ours.divergence, theirs.divergence),
    }
    for figure in ROUGES:
        pair = (torch.tensor([getattr(score, figure) for score in rouges[codec]]) for codec in (KV4.name, KIVI4.name))
        found[figure] = difference(*pair)
    return found


def _summary(report: Report) -> Iterator[tuple[str, list[str]]]:
    model = report.model
    yield "bits per element", [f"{value:.3f}" for value in report.bits.values()]
    yield "perplexity", [f"{value:.4f}" for value in model.perplexity.values()]
    yield "  change, %", [f"{model.change(codec):+.2f}" for codec in model.perplexity]
    yield "divergence, 0.001 nats a token", [f"{1000 * value:.2f}" for value in model.divergence.values()]
    for figure, label in ROUGES.items():
        yield f"{label} of continuations", [f"{getattr(scores, figure):.3f}" for scores in model.rouge.values()]


def _differences(found: Mapping[str, Difference]) -> Iterator[str]:
    for figure in ("loss", "divergence"):
        mean, error = 1000 * found[figure].mean, 1000 * found[figure].standard_error
        yield f"{figure + ', 0.001 nats a token':<32}{mean:>+10.3f} ± {error:.3f}"
    for figure, label in ROUGES.items():
        yield f"{label + ' of continuations':<32}{found[figure].mean:>+10.4f} ± {found[figure].standard_error:.4f}"


def _table(title: str, columns: Sequence[str], rows: Iterable[tuple[str, list[str]]]) -> list[str]:
    lines = [f"{title:<32}" + "".join(f"{column:>10}" for column in columns)]
    return lines + [f"{name:<32}" + "".join(f"{cell:>10}" for cell in cells) for name, cells in rows]


if __name__ == "__main__":
    sys.exit(main())
