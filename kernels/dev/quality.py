"""What the codecs cost in quality, in one table:
`python -m p2pserve.kernels.quality [--format json] [--quick]`.

`--quick` measures the same on a small sample, in a minute or two, to see that nothing is broken:
its figures are not those of the docs. Exits with 1 where a figure is beyond its bound
(`broken_bounds`).

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
from ..codecs import CODEC_NAMES
from ..fp8 import FP8
from ..kivi4 import KIVI4
from ..kv4 import KV4
from ..raw import RAW
from .quality_model import HELD_OUT, PROMPT_TOKENS, BundledModel, TokenScores
from .quality_paired import Difference, difference
from .quality_rouge import Rouge, mean_rouge, rouge
from .quality_tensors import KINDS, Errors, bits_per_element, block_errors, tensors

BATCH = 10  # continuations at once
KV4_BITS, KV4_PERPLEXITY, FP8_PERPLEXITY = 4.5, 3.0, 1.0
"""Most bits per element, and most percent of perplexity lost to `raw`: catches a broken codec."""
ROUGES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rouge_l": "ROUGE-L"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How much is measured; more takes longer and says it more exactly."""

    name: str
    modules: tuple[str, ...]
    windows: int | None
    """Of 2048 tokens, from each module's beginning; None: all."""
    continuations: int
    """From each module."""
    continuation_tokens: int
    tensor_tokens: int
    """Of each kind of synthetic tensor."""

    def __str__(self) -> str:
        windows = "all windows" if self.windows is None else f"{self.windows} window(s)"
        return (
            f"{self.name}: {windows} of {', '.join(self.modules)}; {self.continuations} continuations of each, "
            f"{self.continuation_tokens} tokens long; synthetic tensors of {self.tensor_tokens} tokens"
        )

    def labels(self) -> dict[str, str]:
        """What each figure was measured on."""
        return {
            "bits_per_element": "measured: payload bytes of a 1500-token prompt in blocks of 512 tokens, "
            "8 heads of 128, bf16",
            "logit_error_db": f"measured on synthetic bf16 tensors, {self.tensor_tokens} x 4 x 128: "
            "error variance of q.k over its variance",
            "relative_error": "measured on the same tensors: length of the error over length of the tensor",
            "perplexity": "measured on the bundled model, its held-out modules: K (after RoPE) and V of all layers "
            "sent",
            "divergence": "measured on the same tokens: mean of KL(prediction after `raw` || after the codec), nats",
            "accuracy": "measured on the same tokens: how many a greedy answer gets right, each after what really came "
            "before it",
            "rouge": f"measured on the bundled model: {self.continuation_tokens} greedy tokens after sent prompts of "
            f"{PROMPT_TOKENS}, against those after `raw`",
            "kv4_minus_kivi4": "measured on the same tokens and continuations, pair by pair",
        }


FULL = Sample(name="full", modules=HELD_OUT, windows=None, continuations=60, continuation_tokens=64, tensor_tokens=2048)
QUICK = Sample(
    name="quick, a small sample",
    modules=("heapq",),
    windows=1,
    continuations=3,
    continuation_tokens=16,
    tensor_tokens=512,
)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The model's figures by codec; of `kv4` minus `kivi4`, figure -> mean and standard error."""

    perplexity: dict[str, float]
    divergence: dict[str, float]
    accuracy: dict[str, float]
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
    sample: Sample

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
            "accuracy": self.model.accuracy,
            "rouge": {codec: asdict(scores) for codec, scores in self.model.rouge.items()},
            "kv4_minus_kivi4": {figure: asdict(found) for figure, found in self.model.kv4_minus_kivi4.items()},
            "held_out_modules": self.sample.modules,
            "continuations": self.sample.continuations * len(self.sample.modules),
            "sample": str(self.sample),
            "broken_bounds": broken_bounds(self),
            "labels": self.sample.labels(),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. 2 where the model's part cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m p2pserve.kernels.quality", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="a table, or one JSON object (text)")
    parser.add_argument("--quick", action="store_true", help=f"a small sample, to see that nothing is broken ({QUICK})")
    parser.add_argument("--threads", type=count, help="threads for the model (torch's own choice)")
    arguments = parser.parse_args(argv)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    codecs = list(CODEC_NAMES)
    try:
        report = _measure(codecs, QUICK if arguments.quick else FULL)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"quality: the bundled model needs {error.name}; install p2pserve[cpu] or p2pserve[gpu]\n")
        return 2
    text = json.dumps(report.as_json(), indent=2) if arguments.format == "json" else render(report)
    sys.stdout.write(text + "\n")
    return 1 if broken_bounds(report) else 0


def count(text: str) -> int:
    """An option's whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def broken_bounds(report: Report) -> list[str]:
    """What is worse than it may be, one line each."""
    found = []
    if report.bits[KV4.name] > KV4_BITS:
        found.append(f"kv4 takes {report.bits[KV4.name]:.3f} bits per element, more than {KV4_BITS}")
    for kind, row in report.errors.items():
        if row[KV4.name].logit_db > row[KIVI4.name].logit_db:
            found.append(f"kv4's attention-logit error on {kind} tensors is larger than kivi4's")
    for codec, most in ((KV4.name, KV4_PERPLEXITY), (FP8.name, FP8_PERPLEXITY)):
        change = report.model.change(codec)
        if not change <= most:
            found.append(f"{codec} makes the perplexity {change:.2f} % worse, more than {most} %")
    return found


def measure_tensors(
    codecs: Sequence[str], tokens: int = FULL.tensor_tokens
) -> tuple[dict[str, float], dict[str, dict[str, Errors]]]:
    """Bits per element of every codec; errors of those that make any."""
    bits = {codec: bits_per_element(codec) for codec in codecs}
    lossy = [codec for codec in codecs if codec != RAW.name]
    errors = {}
    for kind in KINDS:
        k, v = tensors(kind, tokens)
        errors[kind] = {codec: block_errors(codec, k, v) for codec in lossy}
    return bits, errors


def measure_model(codecs: Sequence[str], sample: Sample) -> ModelReport:
    """What the model says of every codec, `kv4` and `kivi4` among them."""
    tokens, rouges = score_model(codecs, sample)
    return report_scores(tokens, rouges, _kv4_minus_kivi4(tokens, rouges))


def score_model(codecs: Sequence[str], sample: Sample) -> tuple[dict[str, TokenScores], dict[str, list[Rouge]]]:
    """By codec, `raw` among them: every token that is scored, and every continuation."""
    model = BundledModel()
    batches = model.prompts(sample.modules, sample.continuations).split(BATCH)
    windows = model.windows(sample.modules, sample.windows)
    progress = _Progress(len(codecs) * (len(windows) + len(batches)))
    tokens = model.scores(codecs, windows, progress.advance)
    texts: dict[str, list[str]] = {codec: [] for codec in codecs}
    for codec in codecs:
        for batch in batches:
            texts[codec] += model.continuations(codec, batch, sample.continuation_tokens)
            progress.advance()
    progress.close()
    rouges = {codec: [rouge(*pair) for pair in zip(texts["raw"], texts[codec], strict=True)] for codec in codecs}
    return tokens, rouges


def report_scores(
    tokens: Mapping[str, TokenScores], rouges: Mapping[str, list[Rouge]], kv4_minus_kivi4: dict[str, Difference]
) -> ModelReport:
    """Their means."""
    return ModelReport(
        {codec: scores.perplexity for codec, scores in tokens.items()},
        {codec: float(scores.divergence.mean()) for codec, scores in tokens.items()},
        {codec: scores.accuracy for codec, scores in tokens.items()},
        {codec: mean_rouge(scores) for codec, scores in rouges.items()},
        kv4_minus_kivi4,
    )


def render(report: Report) -> str:
    """The table for people."""
    codecs = list(report.bits)
    lines = ["Quality of the KV codecs", ""]
    bits = ("bits per element", [f"{value:.3f}" for value in report.bits.values()])
    lines += format_table("", codecs, [bits, *summarise(report.model)])
    lossy = [codec for codec in codecs if codec != RAW.name]
    tables: dict[str, Callable[[Errors], str]] = {
        "Attention-logit error of K, dB": lambda found: f"{found.logit_db:.1f}",
        "Relative error of K, %": lambda found: f"{100 * found.key:.2f}",
        "Relative error of V, %": lambda found: f"{100 * found.value:.2f}",
    }
    for title, cell in tables.items():
        rows = [(kind, [cell(row[codec]) for codec in lossy]) for kind, row in report.errors.items()]
        lines += ["", *format_table(title, lossy, rows)]
    lines += ["", "kv4 minus kivi4, mean ± standard error", *_differences(report.model.kv4_minus_kivi4)]
    lines += ["", *(f"{name}: {label}" for name, label in report.sample.labels().items())]
    lines.append(f"sample: {report.sample}")
    lines += [f"BROKEN: {line}" for line in broken_bounds(report)]
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


def _measure(codecs: Sequence[str], sample: Sample) -> Report:
    before = accelerate.mode()
    # The same bytes as the plain code's, which would take more time than the model does.
    accelerate.set_mode(accelerate.KernelMode.COMPILED)
    try:
        bits, errors = measure_tensors(codecs, sample.tensor_tokens)
        model = measure_model(codecs, sample)
    finally:
        accelerate.set_mode(before)
    return Report(bits, errors, model, sample)


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


def summarise(model: ModelReport) -> Iterator[tuple[str, list[str]]]:
    """Rows of a table, each with a figure for every codec."""
    yield "perplexity", [f"{value:.4f}" for value in model.perplexity.values()]
    yield "  change, %", [f"{model.change(codec):+.2f}" for codec in model.perplexity]
    yield "divergence, 0.001 nats a token", [f"{1000 * value:.2f}" for value in model.divergence.values()]
    yield "next token right, %", [f"{100 * value:.2f}" for value in model.accuracy.values()]
    for figure, label in ROUGES.items():
        yield f"{label} of continuations", [f"{getattr(scores, figure):.3f}" for scores in model.rouge.values()]


def _differences(found: Mapping[str, Difference]) -> Iterator[str]:
    for figure in ("loss", "divergence"):
        mean, error = 1000 * found[figure].mean, 1000 * found[figure].standard_error
        yield f"{figure + ', 0.001 nats a token':<32}{mean:>+10.3f} ± {error:.3f}"
    for figure, label in ROUGES.items():
        yield f"{label + ' of continuations':<32}{found[figure].mean:>+10.4f} ± {found[figure].standard_error:.4f}"


def format_table(title: str, columns: Sequence[str], rows: Iterable[tuple[str, list[str]]]) -> list[str]:
    """Lines of a table for people."""
    lines = [f"{title:<32}" + "".join(f"{column:>10}" for column in columns)]
    return lines + [f"{name:<32}" + "".join(f"{cell:>10}" for cell in cells) for name, cells in rows]


if __name__ == "__main__":
    sys.exit(main())
