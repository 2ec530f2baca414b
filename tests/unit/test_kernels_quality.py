"""The quality command: its metrics against cases worked out by hand, and what its report says."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
import torch

from p2pserve.kernels import accelerate, quality, quality_model
from p2pserve.kernels.quality import Report, measure_tensors, render
from p2pserve.kernels.quality_rouge import Rouge, rouge
from p2pserve.kernels.quality_tensors import KINDS, Errors, block_errors, tensors, through

CODECS = ("raw", "kv4", "fp8", "kivi4")


class TestRouge:
    def test_the_police_and_the_gunman(self) -> None:
        """Lin's example: 3 of 4 words, 1 of 3 pairs, longest common subsequence `police the gunman`."""
        found = rouge("police killed the gunman", "police kill the gunman")
        assert (found.rouge1, found.rouge2, found.rouge_l) == pytest.approx((3 / 4, 1 / 3, 3 / 4))

    def test_order_counts_for_pairs_and_sequences_only(self) -> None:
        """`the gunman kill police`: the same words, one common pair, longest common subsequence of 2."""
        found = rouge("police kill the gunman", "the gunman kill police")
        assert (found.rouge1, found.rouge2, found.rouge_l) == pytest.approx((1, 1 / 3, 1 / 2))

    def test_precision_and_recall_both_count(self) -> None:
        """2 of 2 words found, among 6: precision 1/3, recall 1, F1 1/2. Repeats count once per repeat."""
        assert rouge("a b", "a b a c c c").rouge1 == pytest.approx(0.5)
        assert rouge("a b", "a b a c c c").rouge_l == pytest.approx(0.5)

    def test_case_and_punctuation_do_not_count(self) -> None:
        assert rouge("def f(x): return X_1", "DEF F x return x 1") == Rouge(1.0, 1.0, 1.0)

    def test_texts_without_words(self) -> None:
        assert rouge("", "...") == Rouge(1.0, 1.0, 1.0)
        assert rouge("a", "") == Rouge(0.0, 0.0, 0.0)


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

        monkeypatch.setattr("p2pserve.kernels.quality_tensors.through", noisy)
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
    return quality_model.BundledModel()


class TestModel:
    def test_perplexity_changes_with_the_codec_and_only_with_it(
        self, model: quality_model.BundledModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = quality_model._source("heapq")[:2500]
        monkeypatch.setattr(quality_model, "_source", lambda _: text)
        raw = model.perplexity("raw", ("heapq",))
        assert 2 < raw < 100
        change = abs(model.perplexity("fp8", ("heapq",)) / raw - 1)
        assert 0 < change < 0.02

        def nothing(codec: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros_like(k), torch.zeros_like(v)

        monkeypatch.setattr(quality_model, "through", nothing)
        assert model.perplexity("raw", ("heapq",)) > 1.5 * raw  # it is the sent cache that attention sees

    def test_continuations_of_a_cache_that_was_not_changed(
        self, model: quality_model.BundledModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(quality_model, "CONTINUATION_TOKENS", 8)
        prompts = model.prompts(("heapq",), 2)
        assert prompts.shape == (2, 512)
        first, second = (model.continuations("raw", prompts) for _ in range(2))
        assert first == second
        assert len(first) == 2
        assert quality_model.mean_rouge(first, second) == Rouge(1.0, 1.0, 1.0)

    def test_windows_score_every_token_once(self) -> None:
        for count in (2, 100, 2049, 2050, 5000):
            ids = torch.arange(count)
            scored = [
                i for start, first, window in quality_model._windows(ids) for i in range(first, start + len(window))
            ]
            assert scored == list(range(1, count))


class TestReport:
    def report(self) -> Report:
        errors = {kind: {codec: Errors(-20.0, 0.1, 0.2) for codec in CODECS[1:]} for kind in KINDS}
        perplexity = {"raw": 10.0, "kv4": 10.04, "fp8": 10.01, "kivi4": 10.08}
        scores = {codec: Rouge(0.9, 0.8, 0.85) for codec in CODECS}
        return Report(dict.fromkeys(CODECS, 4.4), errors, perplexity, scores, ("heapq",), 4)

    def test_json_names_every_figure(self) -> None:
        found = json.loads(json.dumps(self.report().as_json(), allow_nan=False))
        assert found["bits_per_element"]["kv4"] == 4.4
        assert found["perplexity"]["raw"] == 10.0
        assert found["perplexity_change_percent"]["kv4"] == pytest.approx(0.4)
        assert found["logit_error_db"]["qwen2-like"]["kivi4"] == -20.0
        assert found["relative_error"]["normal"]["fp8"] == {"k": 0.1, "v": 0.2}
        assert found["rouge"]["fp8"] == {"rouge1": 0.9, "rouge2": 0.8, "rouge_l": 0.85}

    def test_the_table_shows_every_codec_and_kind(self) -> None:
        text = render(self.report())
        assert all(name in text for name in (*CODECS, *KINDS, "+0.40", "ROUGE-L", "10.0400", "heapq"))

    def test_without_transformers(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def missing(*_: object) -> None:
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

        monkeypatch.setattr(quality, "measure_tensors", lambda codecs: ({}, {}))
        monkeypatch.setattr(quality, "measure_model", missing)
        assert quality.main(["--quick"]) == 2
        assert "needs transformers; install p2pserve[cpu]" in capsys.readouterr().err
