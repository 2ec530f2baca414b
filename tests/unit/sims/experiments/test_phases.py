"""Figures 1 and 2: prices and batches of a card whose times are simple."""

import pytest

from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.step_times import DecodeLine
from p2pserve.sims.experiments import phases
from p2pserve.sims.experiments.setting import Scope


class SimpleTimes:
    """A prefill takes a millisecond and a microsecond a pair, a decode step 10 ms and a microsecond for each
    token of context."""

    source = "made up"

    def prefill_s(self, tokens: int, pairs: float) -> float:
        return 1e-3 + 1e-6 * pairs

    def prefill_interval_s(self, tokens: int, pairs: float) -> float:
        raise NotImplementedError

    def decode_line(self, requests: int) -> DecodeLine:
        return DecodeLine(0.01, 1e-6)

    def mixed_s(self, tokens: int, pairs: float, requests: int, context: float) -> float:
        raise NotImplementedError


def test_a_batch_below_1024_tokens_is_one_prompt_and_above_it_several() -> None:
    times = SimpleTimes()
    assert phases.prefill_tokens_s(times, 100) == pytest.approx(100 / (1e-3 + 1e-6 * 100 * 101 / 2))
    whole = 1024 * 1025 / 2
    assert phases.prefill_tokens_s(times, 1024) == pytest.approx(1024 / (1e-3 + 1e-6 * whole))
    # No prompt looks at another's tokens: four times the pairs, not sixteen times.
    assert phases.prefill_tokens_s(times, 4096) == pytest.approx(4096 / (1e-3 + 4e-6 * whole))


def test_every_decoding_request_has_its_context() -> None:
    assert phases.decode_tokens_s(SimpleTimes(), 1) == pytest.approx(1 / (0.01 + 1024e-6))
    assert phases.decode_tokens_s(SimpleTimes(), 8) == pytest.approx(8 / (0.01 + 8 * 1024e-6))


def test_a_price_is_the_time_at_the_papers_rent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_times", lambda gpu: SimpleTimes())
    phases.price_rows.cache_clear()
    rows = {(row.column, row.gpu): row for row in phases.price_rows()}
    phases.price_rows.cache_clear()
    assert len(rows) == 2 * 5
    row = rows[Specs.MEASURED.value, "A40-48GB"]
    assert row.usd_per_h == 0.403, "Table 1's, under either column"
    assert row.prefill_ms == pytest.approx(1 + 1e-3 * 512 * 513 / 2)
    # 15 steps, since the prefill has brought the first token; each adds one to the context.
    assert row.decode_ms == pytest.approx(15 * 10 + 1e-3 * (15 * 512 + 15 * 14 / 2))
    assert row.prefill_usd == pytest.approx(1e6 * row.prefill_ms / 1e3 * 0.403 / 3600)
    assert row.both_usd == pytest.approx(row.prefill_usd + row.decode_usd)


def test_batches_end_where_memory_does() -> None:
    rows = {(row.column, row.gpu): row for row in phases.batch_rows()}
    small = rows[Specs.MEASURED.value, "RTX-A5000-24GB"]
    # 24 GiB at 0.9 less 13.5 GB of weights, over 1024 contexts of 0.52 MB: 18 of them.
    assert small.requests == 16
    assert len(small.decode) == 5
    assert small.decode_gain == pytest.approx(small.decode[-1] / small.decode[0])
    assert small.prefill_gain == pytest.approx(small.prefill[7] / small.prefill[4])
    assert len(rows[Specs.MEASURED.value, "A100-SXM4-80GB"].decode) == 7


def test_the_picture_has_prefill_beside_decode_for_each_column() -> None:
    (picture,) = phases.phases(Scope()).pictures
    assert [[curves.y for curves in row] for row in picture.panels] == [["prefill tokens/s", "decode tokens/s"]] * 2
    for row in picture.panels:
        for curves in row:
            assert list(curves.lines) == list(phases.CARDS)
            assert curves.log_x
            assert curves.log_y
