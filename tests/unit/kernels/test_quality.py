"""The quality command: its metrics against cases worked out by hand, and what its report says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import nan
from typing import ClassVar

import pytest
import torch

from p2pserve.kernels import accelerate
from p2pserve.kernels.dev import quality, quality_lies, quality_model
from p2pserve.kernels.dev.kept_formats import KEPT, KeptFormat
from p2pserve.kernels.dev.quality import (
    FULL,
    QUICK,
    ModelReport,
    Report,
    broken_bounds,
    measure_model,
    measure_tensors,
    render,
)
from p2pserve.kernels.dev.quality_model import TokenScores, Window, cut_windows, divergence, module_source
from p2pserve.kernels.dev.quality_paired import Difference, difference
from p2pserve.kernels.dev.quality_rouge import Rouge, mean_rouge, rouge
from p2pserve.kernels.dev.quality_tensors import KINDS, Errors, block_errors, tensors, through

CODECS = ("raw", "kv4", "fp8", "kivi4")


class TestRouge:
    def test_the_police_and_the_gunman(self) -> None:
        """Lin's example: 3 of 4 words, 1 of 3 pairs, longest common subsequence
        `police the gunman`.
        """
        found = rouge("police killed the gunman", "police kill the gunman")
        assert (found.rouge1, found.rouge2, found.rouge_l) == pytest.approx((3 / 4, 1 / 3, 3 / 4))

    def test_order_counts_for_pairs_and_sequences_only(self) -> None:
        """`the gunman kill police`: the same words, one common pair, longest common subsequence of
        2.
        """
        found = rouge("police kill the gunman", "the gunman kill police")
        assert (found.rouge1, found.rouge2, found.rouge_l) == pytest.approx((1, 1 / 3, 1 / 2))

    def test_precision_and_recall_both_count(self) -> None:
        """2 of 2 words found, among 6: precision 1/3, recall 1, F1 1/2. Repeats count once per
        repeat.
        """
        assert rouge("a b", "a b a c c c").rouge1 == pytest.approx(0.5)
        assert rouge("a b", "a b a c c c").rouge_l == pytest.approx(0.5)

    def test_case_and_punctuation_do_not_count(self) -> None:
        assert rouge("def f(x): return X_1", "DEF F x return x 1") == Rouge(1.0, 1.0, 1.0)

    def test_texts_without_words(self) -> None:
        assert rouge("", "...") == Rouge(1.0, 1.0, 1.0)
        assert rouge("a", "") == Rouge(0.0, 0.0, 0.0)

    def test_the_mean_is_of_each_score(self) -> None:
        assert mean_rouge([Rouge(1.0, 0.5, 0.25), Rouge(0.0, 0.25, 0.75)]) == Rouge(0.5, 0.375, 0.5)


class TestDifference:
    def test_of_three_pairs_by_hand(self) -> None:
        """1, 2 and 6: mean 3, variance 7."""
        found = difference(torch.tensor([2.0, 4.0, 9.0]), torch.tensor([1.0, 2.0, 3.0]))
        assert found.mean == pytest.approx(3)
        assert found.standard_error == pytest.approx(math.sqrt(7 / 3))

    def test_of_equal_samples(self) -> None:
        sample = torch.tensor([0.3, 10.0, -4.0])
        assert difference(sample, sample.clone()) == Difference(0.0, 0.0)

    def test_what_pairs_have_in_common_falls_out(self) -> None:
        """Samples that spread over thousands, each pair 0.5 apart."""
        sample = torch.arange(0.0, 4000.0, 10.0)
        assert difference(sample, sample + 0.5) == Difference(-0.5, 0.0)

    def test_numbers_that_are_no_pairs(self) -> None:
        for one, other in ((2, 1), (1, 1), (0, 0)):
            with pytest.raises(ValueError, match="no standard error"):
                difference(torch.zeros(one), torch.zeros(other))


def test_divergence_by_hand() -> None:
    """Of a fair coin from one that falls 1 in 4, and the other way round; of a coin from itself."""
    fair, unfair = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    rows = divergence(torch.cat((fair, unfair, unfair)), torch.cat((unfair, fair, unfair)))
    assert rows[0] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert rows[1] == pytest.approx(0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2))
    assert rows[2] == 0


class TestTensors:
    @pytest.mark.parametrize("kind", KINDS)
    def test_are_the_same_every_time(self, kind: str) -> None:
        for one, other in zip(tensors(kind), tensors(kind), strict=True):
            assert torch.equal(one, other)
            assert one.dtype == torch.bfloat16

    def test_qwen2_has_a_large_constant_part(self) -> None:
        k, _ = tensors("qwen2-like")
        assert 500 < float(k.float().norm(dim=(1, 2)).mean()) < 700

    def test_errors_of_a_codec_that_makes_none(self) -> None:
        assert block_errors("raw", *tensors("normal")) == Errors(-math.inf, 0.0, 0.0)

    def test_logit_errors_of_noise_by_hand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Noise of a tenth of the size of white K is -20 dB and 10 %."""
        rng = torch.Generator().manual_seed(7)

        def noisy(codec: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return k.float() + 0.1 * torch.randn(k.shape, generator=rng), v.float() * 1.25

        monkeypatch.setattr("p2pserve.kernels.dev.quality_tensors.through", noisy)
        found = block_errors("noisy", *tensors("normal"))
        assert found.logit_db == pytest.approx(-20, abs=0.2)
        assert found.key == pytest.approx(0.1, rel=0.01)
        assert found.value == pytest.approx(0.25)

    def test_a_prompt_goes_in_blocks(self) -> None:
        k, v = (x[:600] for x in tensors("normal"))
        got_k, got_v = through("raw", k, v)
        assert torch.equal(got_k, k)
        assert torch.equal(got_v, v)

    def test_kv4_is_no_worse_than_kivi4_and_smaller(self) -> None:
        bits, errors = measure_tensors(CODECS)
        assert bits["kv4"] <= 4.5
        assert bits["raw"] == 16
        assert 8.1 <= bits["fp8"] <= 8.3
        for kind, row in errors.items():
            assert row["kv4"].logit_db <= row["kivi4"].logit_db, kind
            assert row["kv4"].key <= row["kivi4"].key, kind
            assert row["kv4"].value <= row["kivi4"].value, kind
            assert row["fp8"].logit_db < -30, kind


def test_the_least_step_is_found_to_a_part_in_thousands() -> None:
    assert quality_lies.find_least(lambda step: step >= 0.3) == pytest.approx(0.3, rel=1e-4)
    assert quality_lies.find_least(lambda step: step >= 1e-5) == pytest.approx(1e-5, rel=1e-2)


@pytest.fixture(autouse=True)
def nothing_compiles() -> Iterator[None]:
    """These tests code enough for `auto` to begin with it."""
    before = accelerate.mode()
    accelerate.set_mode("eager")
    yield
    accelerate.set_mode(before)


@pytest.fixture(scope="module")
def model() -> quality_model.BundledModel:
    pytest.importorskip("transformers")
    return quality_model.BundledModel(lambda module: module_source(module)[:2500])


class TestModel:
    def test_predictions_change_with_the_codec_and_only_with_it(self, model: quality_model.BundledModel) -> None:
        steps: list[int] = []
        windows = model.windows(("heapq",))
        found = model.scores(("raw", "fp8", "kivi4"), windows, lambda: steps.append(1))
        raw, fp8, kivi4 = found.values()
        assert len(steps) == 3 * len(windows)
        assert 2 < raw.perplexity < 100
        assert 0 < abs(fp8.perplexity / raw.perplexity - 1) < 0.02
        assert raw.loss.shape == fp8.loss.shape == fp8.divergence.shape
        assert not raw.divergence.any()
        assert 0 < fp8.divergence.mean() < kivi4.divergence.mean() < 0.1
        assert float(fp8.divergence.min()) > -1e-9
        assert 0.2 < raw.accuracy < 0.9
        assert raw.loss[raw.right].mean() < raw.loss[~raw.right].mean()

    def test_a_codec_that_changes_nothing_is_raw(
        self, model: quality_model.BundledModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(quality_model, "through", lambda codec, k, v: (k, v))
        found = model.scores(("kv4", "raw"), model.windows(("heapq",)))
        assert list(found) == ["kv4", "raw"]
        assert float(found["kv4"].divergence.abs().max()) < 1e-9
        assert found["kv4"].perplexity == pytest.approx(found["raw"].perplexity, rel=1e-6)

    def test_attention_sees_the_sent_cache(
        self, model: quality_model.BundledModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def nothing_of_kv4(codec: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (torch.zeros_like(k), torch.zeros_like(v)) if codec == "kv4" else (k, v)

        monkeypatch.setattr(quality_model, "through", nothing_of_kv4)
        found = model.scores(("raw", "kv4"), model.windows(("heapq",)))
        assert found["kv4"].perplexity > 1.5 * found["raw"].perplexity
        assert float(found["kv4"].divergence.mean()) > 0.1

    def test_kv_that_is_kept_in_8_bits_changes_predictions_by_its_rounding(
        self, model: quality_model.BundledModel
    ) -> None:
        found = model.scores(("raw", *KEPT), model.windows(("heapq",)))
        shift = {name: float(scores.divergence.mean()) for name, scores in found.items()}
        assert 0 < shift["kept-fp8"] < shift["kept-e5m2"]
        assert shift["kept-fp8"] < shift["kept-cpu"]
        assert shift["kept-fp8"] < shift["kept+kv4"]
        assert max(shift.values()) < 0.1

    def test_what_an_answer_adds_is_kept_in_8_bits_too(
        self, model: quality_model.BundledModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rounded: list[int] = []

        def note(values: torch.Tensor) -> torch.Tensor:
            rounded.append(values.shape[-2])
            return values

        monkeypatch.setitem(KEPT, "kept-fp8", KeptFormat("as it is", note))
        prompts = model.prompts(("heapq",), 1)
        assert model.continuations("kept-fp8", prompts, 3) == model.continuations("raw", prompts, 3)
        assert max(rounded) == 512 + 3

    def test_a_lie_about_kv_is_smaller_than_what_codecs_change(self, model: quality_model.BundledModel) -> None:
        ids = model.prompts(("heapq",), 1)[0, :65]
        kv = model.prefill(ids[:-1])
        assert quality_lies.relative_change(kv, kv) == 0.0
        changes = [quality_lies.relative_change(kv, model.send(codec, kv)) for codec in ("raw", "fp8", "kv4")]
        assert 0.0 < changes[0] < changes[1] < changes[2] < 0.1
        assert 0.0 < quality_lies.smallest_lie(model, ids) < changes[1]

    def test_continuations_of_a_cache_that_was_not_changed(self, model: quality_model.BundledModel) -> None:
        prompts = model.prompts(("heapq",), 2)
        assert prompts.shape == (2, 512)
        first, second = (model.continuations("raw", prompts, 8) for _ in range(2))
        assert first == second
        assert len(first) == 2

    def test_windows_score_every_token_once(self) -> None:
        for count in (2, 100, 2049, 2050, 5000):
            ids = torch.arange(count)
            scored = [
                i for window in cut_windows(ids) for i in range(window.first_scored, window.start + len(window.ids))
            ]
            assert scored == list(range(1, count))


class _Told:
    """A model that says of every codec what it was told; of `fp8` nothing."""

    texts: ClassVar = {"raw": ["a b c", "a b"], "kv4": ["a b c", "a c"], "kivi4": ["x y z", "a c"]}

    def prompts(self, modules: Sequence[str], each: int) -> torch.Tensor:
        return torch.zeros(len(modules) * each, 1)

    def windows(self, modules: Sequence[str], most: int | None) -> list[Window]:
        return [Window(0, 1, torch.zeros(3)) for _ in modules]

    def scores(
        self, codecs: Sequence[str], windows: Sequence[Window], advance: Callable[[], None]
    ) -> dict[str, TokenScores]:
        losses = {"raw": [1.0, 2.0, 3.0], "kv4": [1.5, 2.5, 3.5], "kivi4": [1.0, 1.0, 2.5]}
        divergences = {"raw": 0.0, "kv4": 0.25, "kivi4": 0.75}
        rights = {"raw": [True, True, False], "kv4": [True, False, False], "kivi4": [True, True, True]}
        return {
            codec: TokenScores(
                torch.tensor(losses[codec]), torch.full((3,), divergences[codec]), torch.tensor(rights[codec])
            )
            for codec in codecs
        }

    def continuations(self, codec: str, prompts: torch.Tensor, count: int) -> list[str]:
        return self.texts[codec]


def test_what_the_model_says_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses 0.5, 1.5 and 1 apart: mean 1, variance 1/4. ROUGE-1 of the texts: 1 and 1/2 against 0
    and 1/2.
    """
    monkeypatch.setattr(quality, "BundledModel", _Told)
    found = measure_model(("raw", "kv4", "kivi4"), replace(QUICK, continuations=2))
    assert found.perplexity == pytest.approx({"raw": math.exp(2), "kv4": math.exp(2.5), "kivi4": math.exp(1.5)})
    assert found.change("kv4") == pytest.approx(100 * (math.exp(0.5) - 1))
    assert found.divergence == {"raw": 0.0, "kv4": 0.25, "kivi4": 0.75}
    assert found.accuracy == pytest.approx({"raw": 2 / 3, "kv4": 1 / 3, "kivi4": 1.0})
    assert found.rouge["raw"] == Rouge(1.0, 1.0, 1.0)
    assert found.rouge["kv4"] == Rouge(0.75, 0.5, 0.75)
    apart = found.kv4_minus_kivi4
    assert apart["loss"].mean == pytest.approx(1)
    assert apart["loss"].standard_error == pytest.approx(0.5 / math.sqrt(3))
    assert apart["divergence"] == Difference(-0.5, 0.0)
    for figure in ("rouge1", "rouge2", "rouge_l"):
        assert apart[figure].mean == pytest.approx(0.5), figure
        assert apart[figure].standard_error == pytest.approx(0.5), figure


class TestReport:
    def report(self) -> Report:
        errors = {kind: {codec: Errors(-20.0, 0.1, 0.2) for codec in CODECS[1:]} for kind in KINDS}
        model = ModelReport(
            {"raw": 10.0, "kv4": 10.04, "fp8": 10.01, "kivi4": 10.08},
            {"raw": 0.0, "kv4": 0.00321, "fp8": 0.001, "kivi4": 0.00432},
            {"raw": 0.6123, "kv4": 0.6078, "fp8": 0.6123, "kivi4": 0.6},
            {codec: Rouge(0.9, 0.8, 0.85) for codec in CODECS},
            {
                "loss": Difference(-0.00123, 0.000456),
                "divergence": Difference(-0.00111, 0.000222),
                "rouge1": Difference(0.0125, 0.0256),
                "rouge2": Difference(0.0225, 0.0257),
                "rouge_l": Difference(-0.0325, 0.0258),
            },
        )
        return Report(dict.fromkeys(CODECS, 4.4), errors, model, QUICK)

    def test_json_names_every_figure(self) -> None:
        found = json.loads(json.dumps(self.report().as_json(), allow_nan=False))
        assert found["bits_per_element"]["kv4"] == 4.4
        assert found["perplexity"]["raw"] == 10.0
        assert found["perplexity_change_percent"]["kv4"] == pytest.approx(0.4)
        assert found["logit_error_db"]["qwen2-like"]["kivi4"] == -20.0
        assert found["relative_error"]["normal"]["fp8"] == {"k": 0.1, "v": 0.2}
        assert found["divergence"] == {"raw": 0.0, "kv4": 0.00321, "fp8": 0.001, "kivi4": 0.00432}
        assert found["kv4_minus_kivi4"].keys() == {"loss", "divergence", "rouge1", "rouge2", "rouge_l"}
        assert found["kv4_minus_kivi4"]["loss"] == {"mean": -0.00123, "standard_error": 0.000456}
        assert found["accuracy"]["kv4"] == 0.6078
        assert found["rouge"]["fp8"] == {"rouge1": 0.9, "rouge2": 0.8, "rouge_l": 0.85}

    def test_the_table_shows_every_codec_and_kind(self) -> None:
        text = render(self.report())
        assert all(name in text for name in (*CODECS, *KINDS, "+0.40", "ROUGE-L", "10.0400", "heapq"))

    def test_the_table_shows_divergences_and_differences(self) -> None:
        lines = [line.split() for line in render(self.report()).splitlines()]
        assert ["divergence,", "0.001", "nats", "a", "token", "0.00", "3.21", "1.00", "4.32"] in lines
        assert ["next", "token", "right,", "%", "61.23", "60.78", "61.23", "60.00"] in lines
        assert ["loss,", "0.001", "nats", "a", "token", "-1.230", "±", "0.456"] in lines
        assert ["divergence,", "0.001", "nats", "a", "token", "-1.110", "±", "0.222"] in lines
        assert ["ROUGE-1", "of", "continuations", "+0.0125", "±", "0.0256"] in lines
        assert ["ROUGE-L", "of", "continuations", "-0.0325", "±", "0.0258"] in lines

    def test_it_says_what_it_measured(self) -> None:
        """The quick figures are of a small sample, and the report says so wherever it is read."""
        found = self.report().as_json()
        assert found["sample"] == str(QUICK)
        assert found["held_out_modules"] == ("heapq",)
        assert found["continuations"] == QUICK.continuations
        assert "quick, a small sample: 1 window(s) of heapq; 3 continuations of each, 16 tokens" in render(
            self.report()
        )
        assert "512 x 4 x 128" in QUICK.labels()["logit_error_db"]
        assert "64 greedy tokens" in FULL.labels()["rouge"]
        assert str(FULL).startswith("full: all windows of argparse, dataclasses")

    @pytest.mark.parametrize(
        ("codec", "perplexity", "broken"),
        [("kv4", 10.29, False), ("kv4", 10.31, True), ("fp8", 10.09, False), ("fp8", 10.11, True), ("kv4", nan, True)],
    )
    def test_a_perplexity_beyond_its_bound_is_said(self, codec: str, perplexity: float, broken: bool) -> None:
        report = self.report()
        worse = {**report.model.perplexity, codec: perplexity}
        found = broken_bounds(replace(report, model=replace(report.model, perplexity=worse)))
        assert [line.split()[0] for line in found] == [codec] * broken

    def test_bits_and_errors_beyond_their_bounds_are_said(self) -> None:
        report = self.report()
        assert broken_bounds(report) == []
        assert "4.501 bits" in broken_bounds(replace(report, bits={**report.bits, "kv4": 4.501}))[0]
        errors = {**report.errors, "normal": {**report.errors["normal"], "kv4": Errors(-19.9, 0.1, 0.2)}}
        (line,) = broken_bounds(replace(report, errors=errors))
        assert line == "kv4's attention-logit error on normal tensors is larger than kivi4's"
        assert f"BROKEN: {line}" in render(replace(report, errors=errors))

    def test_a_broken_bound_is_the_exit_code(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report = self.report()
        monkeypatch.setattr(quality, "measure_tensors", lambda codecs, tokens: (report.bits, report.errors))
        monkeypatch.setattr(quality, "measure_model", lambda codecs, sample: report.model)
        assert quality.main(["--quick", "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["broken_bounds"] == []
        monkeypatch.setattr(quality, "measure_tensors", lambda codecs, tokens: ({**report.bits, "kv4": 5.0}, {}))
        assert quality.main(["--quick"]) == 1

    def test_threads_are_counted_from_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            quality.main(["--threads", "0"])
        assert "'0' is not a whole number of at least 1" in capsys.readouterr().err

    def test_without_transformers(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def missing(*_: object) -> None:
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

        monkeypatch.setattr(quality, "measure_tensors", lambda codecs, tokens: ({}, {}))
        monkeypatch.setattr(quality, "measure_model", missing)
        assert quality.main(["--quick"]) == 2
        assert "needs transformers; install p2pserve[cpu]" in capsys.readouterr().err
