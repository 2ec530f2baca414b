"""Bits per byte of a bundled model on what it was not trained on: modules of the standard library, or texts that its
folder has in `held_out`."""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ..models import BUNDLED_MODELS

CONTEXT = 2048
HELD_OUT = ("argparse", "dataclasses", "tarfile", "heapq", "difflib")


def stdlib_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_sources() -> dict[str, str]:
    """The held-out modules' texts as this interpreter ships them."""
    return {name: (stdlib_root() / f"{name}.py").read_text("utf-8") for name in HELD_OUT}


def held_out_texts(folder: Path) -> dict[str, str]:
    """What a model is measured on, by name: its own held-out texts, or the modules."""
    texts = {path.stem: path.read_text("utf-8") for path in sorted((folder / "held_out").glob("*.txt"))}
    return texts or held_out_sources()


@torch.no_grad()
def bits_per_byte(model: Any, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Negative log2-likelihood of `texts` per UTF-8 byte.

    Each text starts from the end-of-text token; windows of CONTEXT tokens overlap by half."""
    bits, size = 0.0, 0
    for text in texts:
        ids = torch.tensor([0, *tokenizer.encode(text).ids])
        size += len(text.encode())
        scored = 1  # ids[:scored] need no more scoring; ids[0] is given
        start = 0
        while scored < len(ids):
            window = ids[start : start + CONTEXT + 1]
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
            first = scored - start - 1
            losses = torch.nn.functional.cross_entropy(logits[first:].float(), window[first + 1 :], reduction="sum")
            bits += losses.item() / math.log(2)
            scored = start + len(window)
            start += CONTEXT // 2
    return bits / size


def main() -> None:
    """Command line: measure a model folder and print one JSON object."""
    parser = argparse.ArgumentParser(description="Bits per byte on texts that a bundled model was not trained on.")
    parser.add_argument("--model", default="bundled", help=f"a folder, or {', '.join(BUNDLED_MODELS)} (bundled)")
    parser.add_argument("--modules", nargs="+", help="which modules, or which of the folder's texts (all)")
    parser.add_argument("--threads", type=int, default=1, help="threads (1)")
    arguments = parser.parse_args()
    folder = BUNDLED_MODELS.get(arguments.model) or Path(arguments.model)
    sources = held_out_texts(folder)
    if unknown := set(arguments.modules or ()) - sources.keys():
        parser.error(f"--modules: {', '.join(sorted(unknown))} is none of {', '.join(sources)}")
    if arguments.modules:
        sources = {name: text for name, text in sources.items() if name in arguments.modules}
    torch.set_num_threads(arguments.threads)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    started = time.monotonic()
    figure = bits_per_byte(model, tokenizer, list(sources.values()))
    print(
        json.dumps(
            {
                "bits_per_byte": figure,
                "modules": list(sources),
                "bytes": sum(len(text.encode()) for text in sources.values()),
                "seconds": time.monotonic() - started,
            }
        )
    )


if __name__ == "__main__":
    main()
