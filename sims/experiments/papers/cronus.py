"""Cronus (partially disaggregated prefill) against DP, PP and disaggregated prefill: its tables 2 and 3, its 99th
percentiles, and how well its predictors fit."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Final

from ....coordinator.costs.step_times import chunk_pairs
from ....coordinator.routing.balancer_fit import expected_chunk_line, expected_prefill_line, quality
from ...records import Trace
from ..page import Page, PageTable, ResultRow
from ..setting import Scope
from .cronus_systems import (
    EQUAL,
    HIGH,
    IN_CHUNKS,
    PAIRS,
    PAPERS,
    PairOfCards,
    Run,
    ServedTrace,
    StepSizes,
    decode_rate,
    prefill_rate,
    run_cronus,
    run_data_parallel,
    run_high_low,
    run_low_high,
    run_pipeline,
    take_rows,
    times_on,
)

CRONUS: Final = "Cronus"
SYSTEMS: Final[Mapping[str, Run]] = {
    "DP": run_data_parallel,
    "PP": run_pipeline,
    "H-L": run_high_low,
    "L-H": run_low_high,
    CRONUS: run_cronus,
}

REQUESTS: Final = 1000
FEWEST: Final = 100

RATES: Final = (2.0, 4.0, 6.0)
"""Requests per second, at fixed intervals: the paper does not say at which it took its percentiles."""

MOST_LOAD: Final = 0.9
"""Of what a system carries, up to which its percentiles are compared: beyond it they only say for how long requests
came."""

PAPERS_RATES: Final[Mapping[str, tuple[float, ...]]] = {
    "DP": (7.28, 8.70, 8.54, 10.85),
    "PP": (3.86, 4.08, 3.96, 3.97),
    "H-L": (1.31, 3.45, 2.93, 6.74),
    "L-H": (4.11, 4.35, 6.14, 6.59),
    CRONUS: (7.39, 8.29, 8.70, 10.27),
}
"""Table 2, in the order of PAIRS."""

PAPERS_USE: Final = {
    "H-L": ((11, 28, 25, 54), (97, 101, 96, 100)),
    "L-H": ((99, 104, 98, 99), (32, 25, 47, 38)),
}
"""Table 3, in per cent: of what the prefill and the decode card could do alone."""

PAPERS_LESS: Final = {
    ("TTFT", "DP", "A10"): 55, ("TTFT", "DP", "A30"): 26, ("TTFT", "L-H", ""): 84, ("TTFT", "PP", ""): 58,
    ("TBT", "PP", ""): 70, ("TBT", "DP", ""): 63, ("TBT", "H-L", ""): 51,
}  # fmt: skip
"""By how many per cent Cronus' 99th percentile is lower at most: of which time, than whose, on which card."""


class RateRow(ResultRow, frozen=True):
    """Most requests per second, all sent at once. `cronus_over`: times this system's."""

    cards_and_model: str
    system: str
    paper_rate: float
    rate: float
    over_paper: float
    paper_cronus_over: float
    cronus_over: float
    on_first_card_pct: float | None


class UseRow(ResultRow, frozen=True):
    """Of what each card could do alone, in per cent."""

    cards_and_model: str
    system: str
    paper_prefill_pct: int
    prefill_pct: float
    paper_decode_pct: int
    decode_pct: float


class LatencyRow(ResultRow, frozen=True):
    """99th percentiles at fixed intervals; `load`: over what the system carries. By how much Cronus' are lower, up to
    MOST_LOAD."""

    cards_and_model: str
    rate: float
    system: str
    load: float
    ttft_p99_s: float
    tbt_p99_ms: float
    cronus_ttft_lower_pct: float | None
    cronus_tbt_lower_pct: float | None


class LowerRow(ResultRow, frozen=True):
    """By how much Cronus' 99th percentile is lower at most."""

    time: str
    than: str
    cards: str
    paper_up_to_pct: int
    up_to_pct: float


class ChunksRow(ResultRow, frozen=True):
    """Requests per second under disaggregated prefill, in chunks and without."""

    cards_and_model: str
    system: str
    whole: float
    in_chunks: float
    whole_over_in_chunks: float


class EqualRow(ResultRow, frozen=True):
    """Requests per second with steps of the same size for all."""

    cards_and_model: str
    dp: float
    pp: float
    h_l: float
    l_h: float
    cronus: float


class FitRow(ResultRow, frozen=True):
    """How well a predictor says what it is for."""

    predictor: str
    card: str
    paper_r2: float
    r2: float
    paper_error_pct: float
    error_pct: float


def cronus(scope: Scope) -> Page:
    """All tables; with fewer seconds than by default, of fewer requests."""
    count = max(FEWEST, round(REQUESTS * min(1.0, scope.seconds / Scope().seconds)))
    at_once = take_rows(count)
    served, equal = (
        {pair: {name: run(pair, at_once, sizes) for name, run in SYSTEMS.items()} for pair in PAIRS}
        for sizes in (PAPERS, EQUAL)
    )
    latencies, equal_latencies = (
        [row for pair in PAIRS for row in _latency_rows(pair, found[pair], count, sizes)]
        for found, sizes in ((served, PAPERS), (equal, EQUAL))
    )
    return Page(
        name="cronus",
        title="Cronus: prompts split between a lesser card and an A100",
        assumes=f"""The first {count} conversations of Azure's 2023 trace, as in the paper (its mean lengths of 1014 and
            247 are those of the first 1,000), sent all at once for throughput, and at fixed intervals for latencies.
            One A100 (80 GB) and one A10 or A30, 100 Gb/s between them; LLaMA3-8B and Qwen2-7B in 16 bit. 512 tokens a
            batch, 256 on the lesser card under DP, whose weights are 3:1 and whose queues hold 3 and 1; PP by the
            paper's layers.

            H-L and L-H have no chunks, which the paper enables in PP and DP, and prefill one prompt after the other, as
            Cronus' first card, whose code they are in the paper.

            All first tokens come from who decodes, after the KV transfer. Times are the simulator's
            roofline with the shares of each card's rates that were measured (on the A10 and the A30: those of other
            cards). Nothing is drawn by lot: there are no seeds.""",
        tables=(
            PageTable("Table 2: throughput", _rate_rows(served), "`on first card`: of all prompt tokens."),
            PageTable("Table 3: use of the cards under disaggregated prefill", _use_rows(served, count)),
            PageTable(
                "Disaggregated prefill, whole and in chunks",
                _chunks_rows(served, at_once),
                f"In chunks: steps of {IN_CHUNKS.tokens} tokens on the card that decodes, several prompts at once on "
                "the other.",
            ),
            PageTable(
                "Figure 4: 99th percentiles",
                latencies,
                "`load`: the rate over the throughput in table 2. TBT: the steps in which tokens were decoded.",
            ),
            PageTable(
                "By how much Cronus' 99th percentiles are lower",
                _lower_rows(latencies),
                f"At most, at these rates, of systems loaded up to {MOST_LOAD:g}. Negative: they are higher.",
            ),
            PageTable("The balancer's predictors", _fit_rows(count), "Lines fitted to the times of the simulator."),
            PageTable(
                "Steps of equal size",
                [_equal_row(pair, found) for pair, found in equal.items()],
                f"Throughput with {EQUAL.tokens:,} tokens a batch for all, which is vLLM's own setting today.",
            ),
            PageTable(
                "Figure 4 with steps of equal size",
                equal_latencies,
                f"99th percentiles with {EQUAL.tokens:,} tokens a batch for all; `load`: over the throughput above.",
            ),
        ),
        remarks=REMARKS,
    )


def _rate_rows(served: Mapping[PairOfCards, Mapping[str, ServedTrace]]) -> list[RateRow]:
    rows = []
    for number, pair in enumerate(PAIRS):
        ours, papers = served[pair][CRONUS].rate, PAPERS_RATES[CRONUS][number]
        for name, one in served[pair].items():
            paper, share = PAPERS_RATES[name][number], one.first_share
            rows.append(
                RateRow(
                    cards_and_model=pair.name,
                    system=name,
                    paper_rate=paper,
                    rate=one.rate,
                    over_paper=one.rate / paper,
                    paper_cronus_over=papers / paper,
                    cronus_over=ours / one.rate,
                    on_first_card_pct=None if share is None else 100.0 * share,
                )
            )
    return rows


def _use_rows(served: Mapping[PairOfCards, Mapping[str, ServedTrace]], count: int) -> list[UseRow]:
    rows, trace = [], take_rows(count)
    for number, pair in enumerate(PAIRS):
        for name, (first, second) in {"H-L": (HIGH, pair.low), "L-H": (pair.low, HIGH)}.items():
            rate = served[pair][name].rate
            prefill, decode = PAPERS_USE[name]
            rows.append(
                UseRow(
                    cards_and_model=pair.name,
                    system=name,
                    paper_prefill_pct=prefill[number],
                    prefill_pct=100.0 * rate / prefill_rate(first, pair.model, trace),
                    paper_decode_pct=decode[number],
                    decode_pct=100.0 * rate / decode_rate(second, pair.model, trace),
                )
            )
    return rows


def _chunks_rows(served: Mapping[PairOfCards, Mapping[str, ServedTrace]], trace: Trace) -> list[ChunksRow]:
    rows = []
    for pair in PAIRS:
        for name in PAPERS_USE:
            whole, chunks = served[pair][name].rate, SYSTEMS[name](pair, trace, IN_CHUNKS).rate
            rows.append(
                ChunksRow(
                    cards_and_model=pair.name, system=name, whole=whole, in_chunks=chunks,
                    whole_over_in_chunks=whole / chunks,
                )
            )  # fmt: skip
    return rows


def _latency_rows(
    pair: PairOfCards, at_once: Mapping[str, ServedTrace], count: int, sizes: StepSizes
) -> list[LatencyRow]:
    rows = []
    for rate in RATES:
        trace = take_rows(count, interval_s=1.0 / rate)
        found = {name: run(pair, trace, sizes) for name, run in SYSTEMS.items()}
        ours = found[CRONUS]
        for name, one in found.items():
            load = rate / at_once[name].rate
            compared = name != CRONUS and load <= MOST_LOAD
            rows.append(
                LatencyRow(
                    cards_and_model=pair.name,
                    rate=rate,
                    system=name,
                    load=load,
                    ttft_p99_s=one.ttft_p99_s,
                    tbt_p99_ms=1e3 * one.tbt_p99_s,
                    cronus_ttft_lower_pct=_lower_pct(ours.ttft_p99_s, one.ttft_p99_s) if compared else None,
                    cronus_tbt_lower_pct=_lower_pct(ours.tbt_p99_s, one.tbt_p99_s) if compared else None,
                )
            )
    return rows


def _lower_pct(ours: float, other: float) -> float:
    return 100.0 * (1.0 - ours / other)


def _lower_rows(latencies: list[LatencyRow]) -> list[LowerRow]:
    rows = []
    for (time, name, card), paper in PAPERS_LESS.items():
        found = [
            row.cronus_ttft_lower_pct if time == "TTFT" else row.cronus_tbt_lower_pct
            for row in latencies
            if row.system == name and card in row.cards_and_model
        ]
        up_to = max(each for each in found if each is not None)
        rows.append(LowerRow(time=time, than=name, cards=card or "both", paper_up_to_pct=paper, up_to_pct=up_to))
    return rows


def _equal_row(pair: PairOfCards, found: Mapping[str, ServedTrace]) -> EqualRow:
    dp, pp, h_l, l_h, cronus = (found[name].rate for name in SYSTEMS)
    return EqualRow(cards_and_model=pair.name, dp=dp, pp=pp, h_l=h_l, l_h=l_h, cronus=cronus)


def _fit_rows(count: int) -> list[FitRow]:
    """On the paper's cards with LLaMA3-8B, over the prompts of the trace and over contexts up to 4,096 and 65,536."""
    low, high = times_on("A30-24GB", "llama3-8b"), times_on(HIGH, "llama3-8b")
    prompts = take_rows(count).prompt.tolist()
    prefill = expected_prefill_line(low)
    alone = quality(
        [prefill.seconds(tokens) for tokens in prompts],
        [low.prefill_s(tokens, chunk_pairs(0, tokens)) for tokens in prompts],
    )
    chunk = expected_chunk_line(high, PAPERS.tokens)
    contexts = list(product(range(0, 4097, 256), range(0, 65_537, 4096)))
    beside = quality([chunk.seconds(*each) for each in contexts], [_chunk_s(*each) for each in contexts])
    return [
        FitRow(
            predictor="partial prefill, by tokens", card="A30", paper_r2=0.993, r2=alone.r_squared,
            paper_error_pct=7.4, error_pct=100.0 * alone.mean_error,
        ),
        FitRow(
            predictor="step of 512 tokens, by contexts", card="A100", paper_r2=0.990, r2=beside.r_squared,
            paper_error_pct=0.8, error_pct=100.0 * beside.mean_error,
        ),
    ]  # fmt: skip


def _chunk_s(prefill_context: int, decode_context: int) -> float:
    """Of a full step on the A100, with decoding requests of 1,262 tokens, the mean of a conversation's end."""
    requests = decode_context // 1262
    tokens = PAPERS.tokens - requests
    pairs = chunk_pairs(prefill_context, tokens)
    return times_on(HIGH, "llama3-8b").mixed_s(tokens, pairs, requests, decode_context)


REMARKS: Final = """\
- Throughput agrees in its order and in most ratios. Cronus carries 1.01 to 1.15 times what DP does
  (paper: 0.95 to 1.02), 1.5 to 1.9 times L-H (1.4 to 1.9) and 1.2 to 3.5 times H-L (1.5 to 5.6). As
  in the paper it gains most where the lesser card is weakest. Absolute rates are 1.2 to 1.4 times
  the paper's for DP, L-H and Cronus, and 1.6 to 2.3 times for H-L: its engine is vLLM 0.6.1, whose
  scheduler costs milliseconds a step, which the roofline of an engine of today does not have.
- H-L and L-H are read from three sentences of the paper: they are the code of Cronus with the first
  part as long as the prompt, chunks are enabled in PP and DP, and Cronus' first card holds two
  requests. Where the card that decodes is taken for Cronus' second, with chunks, and the first
  batches prompts, H-L carries 7 to 16 % less and L-H 3 to 4 % more.

  The small memory of a lesser card
  is why: H-L preempts there, and a step with chunks takes preempted requests back at once, beside
  those that go on to fill it. So 17 to 23 % of all prompt tokens are computed again; without chunks,
  which wait for room and for a step of their own, 1 to 5 %. Either way H-L is further above the
  paper than the others are.
- On Qwen2-7B the paper's Cronus is below DP (0.95); here it is above by 4 to 15 %. Under DP the
  lesser card reads all weights for a few decoding requests, and ends its last ones alone: LLaMA3-8B
  on the A10 8 s after the A100, of 112.
- PP does not agree: the paper measured 3.9 to 4.1 requests/s whatever the cards and the model, less
  than the A100 alone carries under DP. Here it carries nearly as much as Cronus. 100 Gb/s cost a
  step of 512 tokens a third of a millisecond, so bandwidth cannot be the reason. Such a constant
  suggests a cost per step of the pipeline of vLLM 0.6.1, which nothing here models. So neither do
  its latencies: its TTFT is lower here, not higher.
- The use of cards under disaggregated prefill agrees within 6 points under L-H, and on the busy
  card of H-L (94 to 100 %). The idle A100 of H-L is used 23 to 76 % here, 11 to 54 % in the paper:
  the lesser cards decode faster in the roofline than they did there, most of all the A10 (datasheet
  bandwidth, 600 GB/s).
- TTFT against DP agrees: lower by up to 50 % on the A10 (55) and by up to 35 % on the A30 (26).
  Against L-H as well: by up to 71 % (84), at rates near the most that L-H carries; at 2 requests/s
  by 17 to 31 %.
- TBT is lower than DP's by up to 23 % on the A10, not 63 %, and not lower on the A30. A batch of
  256 tokens on an A10 takes 1.3 times as long here as one of 512 on an A100; the paper's 63 % would
  need 2.7 times. H-L has a larger TBT than Cronus only on the A10 and near its limit, by up to 13 %
  (51 in the paper), with what a token waits for prompts counted; with chunks, and beyond its limit,
  by as much as that (105 ms against 46). The paper does not say at which rates it measured.
- Both predictors fit as well as in the paper. A line is not quite right for partial prefills (5 %
  off in the mean), as attention grows with the square of a prompt.
- With 2,048 tokens a batch for all, Cronus falls below DP: by 13 to 28 %. Its balancer takes each
  step with a chunk for a full one. The second part of a prompt is 500 tokens here, a quarter of
  such a step, and is expected to take four times as long as it does: too much is left to the lesser
  card (76 instead of 55 % of all prompt tokens, LLaMA3-8B on the A10). The paper's setting of 512
  is a condition of the method, not only a choice of it.
"""
