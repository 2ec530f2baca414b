"""K and V rounded as engines that keep them in 8 bits do."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from p2pserve.kernels.dev import quality_kept
from p2pserve.kernels.dev.kept_formats import KEPT, round_to_nearest, round_towards_zero
from p2pserve.kernels.dev.quality import QUICK, Sample
from p2pserve.kernels.dev.quality_model import TokenScores
from p2pserve.kernels.dev.quality_rouge import Rouge, rouge

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("dtype", "value", "nearest", "towards_zero"),
    [
        (E4M3, 1.0, 1.0, 1.0),
        (E4M3, 1.09, 1.125, 1.0),
        (E4M3, -1.09, -1.125, -1.0),
        (E4M3, 1.05, 1.0, 1.0),
        (E4M3, 1000.0, 448.0, 448.0),
        (E4M3, -1000.0, -448.0, -448.0),
        (E4M3, 0.0, 0.0, 0.0),
        (E4M3, 2.0**-9 * 0.9, 2.0**-9, 0.0),
        (E5M2, 1.2, 1.25, 1.0),
        (E5M2, 1e6, 57344.0, 57344.0),
    ],
)
def test_values_by_hand(dtype: torch.dtype, value: float, nearest: float, towards_zero: float) -> None:
    values = torch.tensor([value])
    assert round_to_nearest(dtype, values).item() == nearest
    assert round_towards_zero(dtype, values).item() == towards_zero


@pytest.mark.parametrize("rounding", [round_to_nearest, round_towards_zero])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_rounded_stays_what_it_is(rounding: partial[torch.Tensor], dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    once = rounding(dtype, values)
    assert once.dtype == values.dtype
    assert torch.equal(rounding(dtype, once), once)
    assert not torch.equal(once, values)


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """What the model would be asked for; it answers at once."""
    found = []

    def score(names: list[str], sample: Sample) -> tuple[dict[str, TokenScores], dict[str, list[Rouge]]]:
        found.append(sample)
        losses = {name: torch.full((4,), 1.0 + 0.01 * number) for number, name in enumerate(names)}
        tokens = {name: TokenScores(loss, loss - 1.0, loss > 0.0) for name, loss in losses.items()}
        return tokens, {name: [rouge("a b c", "a b c")] for name in names}

    monkeypatch.setattr(quality_kept, "score_model", score)
    return found


def test_the_table_has_a_column_for_each_format(samples: list[Sample]) -> None:
    title, _, columns, *rows = quality_kept.measure(QUICK)
    assert samples == [QUICK]
    assert "emulated" in title
    assert columns.split() == ["raw", *KEPT]
    found = {row[:32].strip(): row[32:].split() for row in rows}
    assert found["perplexity"] == ["2.7183", "2.7456", "2.7732", "2.8011", "2.8292"]
    assert found["change, %"][:2] == ["+0.00", "+1.01"]
    assert found["divergence, 0.001 nats a token"][1] == "10.00"
    assert all(any(row.startswith(f"{name}: ") for row in rows) for name in KEPT)


def test_a_smaller_sample_says_that_it_is_one(samples: list[Sample], capsys: pytest.CaptureFixture[str]) -> None:
    assert quality_kept.main([]) == 0
    assert quality_kept.main(["--windows", "2", "--continuations", "3"]) == 0
    assert [(sample.windows, sample.continuations) for sample in samples] == [(None, 60), (2, 3)]
    assert "sample: part of it: 2 window(s) of argparse" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--threads", "--windows", "--continuations"])
def test_wrong_options_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        quality_kept.main([option, "0"])
    assert "'0' is not a whole number of at least 1" in capsys.readouterr().err
