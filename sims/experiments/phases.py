"""What each phase costs on which card, and what batches do for it: figures 1 and 2."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

from ...coordinator.costs.gpus import GpuSpec, Specs, gpu_table
from ...coordinator.costs.model_shape import model_shape
from ...coordinator.costs.replica import StageHardware, kv_capacity_tokens, replica_times
from ...coordinator.costs.step_times import StepTimes, chunk_pairs
from .page import Curves, Page, PageTable, Picture, ResultRow
from .setting import COLUMNS, Scope

PRICES: Final = "Figure 1"
BATCHES: Final = "Figure 2"
MODEL: Final = "llama-7b"
PROMPT: Final = 512
OUTPUT: Final = 16
LENGTH: Final = 1024
"""Tokens of each prompt of a batch, and of each context."""

PREFILLS: Final = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
DECODES: Final = (1, 2, 4, 8, 16, 32, 64)
PLATEAU: Final = 1024
"""Tokens from which on the paper's prefill gains nothing from batches."""

FIGURE_1_CARDS: Final = {"RTX-3090TI-24GB": "3090Ti", "A40-48GB": "A40"}
"""As the paper calls them."""

CARDS: Final = (*FIGURE_1_CARDS, "RTX-A5000-24GB", "RTX-A6000-48GB", "A100-SXM4-80GB")


class PriceRow(ResultRow, frozen=True):
    """A lone request on one card: milliseconds, and dollars for a million of them."""

    column: str
    gpu: str
    usd_per_h: float
    prefill_ms: float
    decode_ms: float
    prefill_usd: float
    decode_usd: float
    both_usd: float


class BatchRow(ResultRow, frozen=True):
    """Tokens per second of a step by batch. `prefill_gain`: from 1,024 tokens to 8,192;
    `decode_gain`: from one request to `requests`, as many (of 1, 2, 4 ... 64) as have room."""

    column: str
    gpu: str
    prefill_256: float
    prefill_1024: float
    prefill_8192: float
    prefill_gain: float
    decode_1: float
    requests: int
    decode_most: float
    decode_gain: float
    prefill: list[float]
    decode: list[float]


@cache
def price_rows() -> tuple[PriceRow, ...]:
    """All cards under both columns."""
    return tuple(_price_row(_card(name, specs)) for specs in COLUMNS for name in CARDS)


@cache
def batch_rows() -> tuple[BatchRow, ...]:
    """All cards under both columns."""
    return tuple(_batch_row(_card(name, specs)) for specs in COLUMNS for name in CARDS)


def _card(name: str, specs: Specs) -> GpuSpec:
    return gpu_table().find(name, specs)


def _stage(gpu: GpuSpec) -> StageHardware:
    return StageHardware(gpu=gpu, tp=1, layers=model_shape(MODEL).layers, link_gbps=1.0)  # one card uses no link


def _times(gpu: GpuSpec) -> StepTimes:
    return replica_times(model_shape(MODEL), (_stage(gpu),))


def _price_row(gpu: GpuSpec) -> PriceRow:
    times = _times(gpu)
    prefill_s = times.prefill_s(PROMPT, chunk_pairs(0, PROMPT))
    decode_s = times.decode_line(1).run_s(1, PROMPT, OUTPUT - 1)  # the prefill has brought the first token
    usd_per_h = _card(gpu.name, Specs.TABLE1).usd_per_hour  # the paper's under both columns: rents change
    usd_s = usd_per_h / 3600.0 * 1e6
    return PriceRow(
        column=gpu.specs.value,
        gpu=gpu.name,
        usd_per_h=usd_per_h,
        prefill_ms=1e3 * prefill_s,
        decode_ms=1e3 * decode_s,
        prefill_usd=prefill_s * usd_s,
        decode_usd=decode_s * usd_s,
        both_usd=(prefill_s + decode_s) * usd_s,
    )


def prefill_tokens_s(times: StepTimes, tokens: int) -> float:
    """Of a step of so many prompt tokens: one prompt, or several of LENGTH."""
    prompts, size = max(1, tokens // LENGTH), min(tokens, LENGTH)
    return prompts * size / times.prefill_s(prompts * size, prompts * chunk_pairs(0, size))


def decode_tokens_s(times: StepTimes, requests: int) -> float:
    """Of a step of so many requests, each with LENGTH tokens of context."""
    return requests / times.decode_line(requests).step_s(float(requests * LENGTH))


def _batch_row(gpu: GpuSpec) -> BatchRow:
    times = _times(gpu)
    room = kv_capacity_tokens(model_shape(MODEL), (_stage(gpu),)) // LENGTH
    prefill = [prefill_tokens_s(times, tokens) for tokens in PREFILLS]
    decode = [decode_tokens_s(times, requests) for requests in DECODES if requests <= room]
    by_tokens = dict(zip(PREFILLS, prefill, strict=True))
    return BatchRow(
        column=gpu.specs.value,
        gpu=gpu.name,
        prefill_256=by_tokens[256],
        prefill_1024=by_tokens[PLATEAU],
        prefill_8192=prefill[-1],
        prefill_gain=prefill[-1] / by_tokens[PLATEAU],
        decode_1=decode[0],
        requests=DECODES[len(decode) - 1],
        decode_most=decode[-1],
        decode_gain=decode[-1] / decode[0],
        prefill=prefill,
        decode=decode,
    )


def phases(scope: Scope) -> Page:
    """The page. Nothing in it is simulated: the scope does not count."""
    return Page(
        name="phases",
        title="What each phase costs on which card",
        assumes=(
            f"LLaMA-7B on one card (figure 1 does not name its model, figure 2 its card), by the tables that planner "
            f"and simulator have of iterations. Figure 1: {PROMPT} tokens in, {OUTPUT} out, a request that is alone, "
            f"prices of Table 1. Figure 2: prompts and contexts of {LENGTH} tokens; below that one shorter prompt."
        ),
        tables=(
            PageTable(PRICES, price_rows(), "Prices are dollars for a million such requests."),
            PageTable(
                BATCHES,
                batch_rows(),
                "Tokens per second of a step; `requests`: as many contexts as have room beside the weights, up to 64.",
            ),
        ),
        remarks=REMARKS,
        pictures=(_picture(batch_rows()),),
    )


def _picture(rows: Sequence[BatchRow]) -> Picture:
    """Figure 2: a row for each column of figures, prefill beside decode."""
    panels = []
    for specs in COLUMNS:
        of_column = [row for row in rows if row.column == specs.value]
        prefill = {row.gpu: (PREFILLS, row.prefill) for row in of_column}
        decode = {row.gpu: (DECODES[: len(row.decode)], row.decode) for row in of_column}
        by = "Table 1" if specs is Specs.TABLE1 else specs.value
        panels.append(
            (
                Curves(f"prompt tokens, {by}", "prefill tokens/s", prefill, log_x=True, log_y=True),
                Curves(f"decoding requests, {by}", "decode tokens/s", decode, log_x=True, log_y=True),
            )
        )
    return Picture("phases", "tokens/s of prefill and of decode over the size of a batch, by card", tuple(panels))


REMARKS: Final = """\
- Agrees: of the two cards of figure 1 the A40 is the cheaper for prefill and the 3090Ti for decode,
  under both columns. By Table 1 the A40's prefill costs 0.67 of the 3090Ti's, by measured figures
  0.89; the 3090Ti's decode costs 0.54 and 0.53 of the A40's.
- The A5000, which figure 1 leaves out, is by measured figures the cheapest of the five for both
  phases. By Table 1, which has its shader rate, its prefill costs nearly twice the 3090Ti's.
- Agrees: prefill gains nothing from more than 1,024 tokens (1 to 7 % up to 8,192). It is near its
  plateau much sooner: at 256 tokens 0.72 to 0.99 of it.
- Agrees: decode gains from every request that joins, 10 to 24 times as much with as many as have
  room. On cards of 24 GB that is 16 contexts of 1,024 tokens.
"""
