"""The systems that Cronus is compared with, added up by hand, and its page."""

from collections import Counter
from math import inf

import numpy as np
import pytest

from p2pserve.sims.engine.engine import Engine
from p2pserve.sims.engine.sequence import Sequence
from p2pserve.sims.engine.values import SimEngineSettings, StepRecord
from p2pserve.sims.experiments.papers import cronus_systems
from p2pserve.sims.experiments.papers.cronus import PAPERS_RATES, SYSTEMS, cronus
from p2pserve.sims.experiments.papers.cronus_systems import (
    ALONE_TOKENS,
    HIGH,
    IN_CHUNKS,
    PAIRS,
    PAPERS,
    QUEUES,
    WHOLE_STEP_TOKENS,
    Floats,
    ServedTrace,
    StepSizes,
    _between_tokens,
    _choose_engine,
    decode_rate,
    prefill_rate,
    run_cronus,
    run_data_parallel,
    take_rows,
)
from p2pserve.sims.experiments.setting import Scope

from ....linear_times import LinearTimes

SMALL = Scope(seconds=15.0)  # a tenth of the requests


def engine() -> Engine:
    return Engine(LinearTimes(step=1.0), SimEngineSettings(max_sequences=1, max_batched_tokens=16), kv_tokens=10_000)


def test_the_requests_are_the_papers() -> None:
    trace = take_rows(1000, interval_s=0.5)
    assert (round(float(trace.prompt.mean())), round(float(trace.output.mean()))) == (1014, 247)
    assert trace.arrival_s[:3].tolist() == [0.0, 0.5, 1.0]
    assert not take_rows(3).arrival_s.any()


def test_a_token_takes_as_long_as_the_step_that_decoded_it() -> None:
    steps = [
        StepRecord(0.0, 5.0, "prefill", 100, 0, 1),  # nobody waits for a token
        StepRecord(5.0, 6.0, "mixed", 10, 2, 1),
        StepRecord(6.0, 12.0, "decode", 0, 1, 3),
    ]
    assert _between_tokens(steps).tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]


def test_a_token_takes_longer_where_its_request_stands_still_for_prompts() -> None:
    steps = [
        StepRecord(0.0, 1.0, "prefill", 100, 0, 1, 0),
        StepRecord(1.0, 5.0, "decode", 0, 2, 4),
        StepRecord(5.0, 8.0, "prefill", 100, 0, 1, 2),
        StepRecord(8.0, 10.0, "prefill", 100, 0, 1, 3),  # the third has its first token at 8
        StepRecord(10.0, 12.0, "decode", 0, 4, 2),  # and the fourth at 10
        StepRecord(12.0, 17.0, "prefill", 100, 0, 1, 4),
        StepRecord(17.0, 18.0, "decode", 0, 1, 1),  # three are preempted
        StepRecord(18.0, 19.0, "decode", 0, 1, 1),
    ]
    assert _between_tokens(steps).tolist() == [1.0] * 8 + [6.0, 6.0, 3.0] + [1.0] * 5 + [6.0, 1.0]


def test_the_percentiles_and_the_rate() -> None:
    served = ServedTrace(np.arange(101, dtype=np.float64), np.arange(201, dtype=np.float64), 50.0)
    assert (served.ttft_p99_s, served.tbt_p99_s, served.rate) == (99.0, 198.0, 101 / 50)


def test_data_parallel_sends_by_weight_to_those_whose_queue_is_not_full() -> None:
    engines, sent, order = [engine(), engine()], [0, 0], []
    while (number := _choose_engine(engines, sent)) is not None:
        sent[number] += 1
        order.append(number)
        engines[number].submit(Sequence(len(order), 5, 5), 0.0)
    # 3:1, until each queue is full: nobody has begun
    assert order == [0, 0, 0, 1]
    assert tuple(one.waiting for one in engines) == QUEUES
    engines[1].advance(0.0)  # its request is in a batch now
    assert _choose_engine(engines, sent) == 1


def test_all_requests_are_served_and_first_tokens_are_timed_from_their_arrival() -> None:
    trace = take_rows(60, interval_s=0.3)
    for run in SYSTEMS.values():
        served = run(PAIRS[0], trace, PAPERS)
        assert np.isfinite(served.ttft_s).all()
        assert (served.ttft_s > 0.0).all()
        assert served.end_s > float(trace.arrival_s[-1])
        # one for each token after the first; those of preempted requests are computed again
        assert len(served.tbt_s) >= int((trace.output - 1).sum()) - len(trace)


@pytest.mark.parametrize("system", ["H-L", "L-H"])
def test_the_papers_disaggregated_prefill_has_no_chunks(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are computed whole and one after the other, those of preempted requests on the card that decodes
    together, and nothing decodes beside them."""

    def keep_steps(found: list[StepRecord]) -> Floats:
        steps.extend(found)
        return _between_tokens(found)

    monkeypatch.setattr(cronus_systems, "_between_tokens", keep_steps)
    trace, kinds = take_rows(300), dict[StepSizes, dict[str, list[StepRecord]]]()
    for sizes in (PAPERS, IN_CHUNKS):
        steps = list[StepRecord]()
        SYSTEMS[system](PAIRS[0], trace, sizes)
        kinds[sizes] = {kind: [step for step in steps if step.kind == kind] for kind in ("prefill", "decode", "mixed")}
    assert kinds[PAPERS]["mixed"] == []
    assert kinds[PAPERS]["decode"]
    assert all(step.prompt_tokens <= WHOLE_STEP_TOKENS for step in kinds[PAPERS]["prefill"])
    computed = Counter(step.prompt_tokens for step in kinds[PAPERS]["prefill"])
    alone = Counter(tokens for tokens in trace.prompt.tolist() if tokens > ALONE_TOKENS)
    assert alone <= computed, "each has a step of its own"
    if system == "H-L":  # the A10 has too little room for what the A100 sends it
        assert len(kinds[IN_CHUNKS]["mixed"]) > 10
    else:
        assert sum(step.prompt_tokens for step in kinds[PAPERS]["prefill"]) == sum(trace.prompt.tolist())


def test_a_card_that_does_one_half_alone_is_as_fast_as_that_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cronus_systems, "times_on", lambda name, model: LinearTimes(step=0.0, token=0.01))
    trace = take_rows(50)
    assert prefill_rate(HIGH, "llama3-8b", trace) == pytest.approx(50 / (0.01 * trace.prompt.sum()))
    monkeypatch.setattr(cronus_systems, "times_on", lambda name, model: LinearTimes(step=0.5))
    assert decode_rate(HIGH, "llama3-8b", trace) == pytest.approx(50 / (0.5 * trace.output.max()))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_cronus_carries_more_than_data_parallel_and_splits_prompts(pair: cronus_systems.PairOfCards) -> None:
    trace = take_rows(400)
    ours = run_cronus(pair, trace)
    assert ours.rate > run_data_parallel(pair, trace).rate
    assert ours.first_share is not None
    assert 0.3 < ours.first_share < 0.8


def test_the_page_has_the_papers_figures_beside_ours() -> None:
    page = cronus(SMALL)
    throughput, use, chunks, latencies, lower, fits, equal, equal_latencies = page.records()["tables"].values()
    assert "The first 100 conversations" in " ".join(page.markdown().split())
    assert [len(rows) for rows in (throughput, use, chunks, latencies, lower, fits, equal)] == [20, 8, 8, 60, 7, 2, 4]
    carried = {(row["cards_and_model"], system): row[system] for row in equal for system in ("dp", "cronus")}
    for row in equal_latencies:
        system = row["system"].lower()
        if system in ("dp", "cronus"):
            assert row["load"] == pytest.approx(row["rate"] / carried[row["cards_and_model"], system])
    assert len(equal_latencies) == 60
    rates = {(row["cards_and_model"], row["system"]): row for row in throughput}
    for name, papers in PAPERS_RATES.items():
        for pair, paper in zip(PAIRS, papers, strict=True):
            row = rates[pair.name, name]
            assert row["paper_rate"] == paper
            assert row["over_paper"] == pytest.approx(row["rate"] / paper)
            assert 0.0 < row["rate"] < inf
    for row in chunks:
        assert row["whole"] == rates[row["cards_and_model"], row["system"]]["rate"]
        assert row["whole_over_in_chunks"] == pytest.approx(row["whole"] / row["in_chunks"])
    assert all(0.0 < row["prefill_pct"] <= 105.0 and 0.0 < row["decode_pct"] <= 105.0 for row in use)
    compared = [row for row in latencies if row["cronus_ttft_lower_pct"] is not None]
    assert all(row["system"] != "Cronus" and row["load"] <= 0.9 for row in compared)
    assert {(row["time"], row["than"]) for row in lower} == {
        ("TTFT", "DP"), ("TTFT", "L-H"), ("TTFT", "PP"), ("TBT", "PP"), ("TBT", "DP"), ("TBT", "H-L"),
    }  # fmt: skip
    assert all(0.95 < row["r2"] <= 1.0 for row in fits)
    assert [row["cards_and_model"] for row in equal] == [pair.name for pair in PAIRS]
