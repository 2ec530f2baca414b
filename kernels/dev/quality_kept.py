"""What it costs in quality to keep KV in 8 bits in the engine's memory, on the tokens and continuations that codecs are
measured on, or on fewer: `python -m p2pserve.kernels.dev.quality_kept [--windows N] [--continuations N]`.

Emulated: K and V are rounded as `kept_formats` says, in the bundled model by transformers, not in vLLM. Against `raw`,
where they are bf16."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from .. import accelerate
from ..raw import RAW
from .kept_formats import KEPT
from .quality import FULL, Sample, count, format_table, report_scores, score_model, summarise


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. 2 where the model cannot run."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.kernels.dev.quality_kept", description=__doc__)
    parser.add_argument("--windows", type=count, help="of 2048 tokens, from each module's beginning (all)")
    parser.add_argument("--continuations", type=count, help=f"from each module ({FULL.continuations})")
    parser.add_argument("--threads", type=count, help="threads for the model (torch's own choice)")
    arguments = parser.parse_args(argv)
    sample = replace(
        FULL,
        name="full" if arguments.windows is arguments.continuations is None else "part of it",
        windows=arguments.windows,
        continuations=arguments.continuations or FULL.continuations,
    )
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    before = accelerate.mode()
    accelerate.set_mode(accelerate.KernelMode.COMPILED)
    try:
        lines = measure(sample)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"quality: the bundled model needs {error.name}; install p2pserve[cpu] or p2pserve[gpu]\n")
        return 2
    finally:
        accelerate.set_mode(before)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def measure(sample: Sample) -> list[str]:
    """The table, and what its columns are."""
    columns = [RAW.name, *KEPT]
    tokens, rouges = score_model(columns, sample)
    lines = ["Quality of KV kept in 8 bits (emulated)", ""]
    lines += format_table("", columns, summarise(report_scores(tokens, rouges, {})))
    lines += ["", *(f"{name}: {kept.about}" for name, kept in KEPT.items()), f"sample: {sample}"]
    return lines


if __name__ == "__main__":
    sys.exit(main())
