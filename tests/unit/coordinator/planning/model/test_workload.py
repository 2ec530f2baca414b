"""What is asked of a service: lengths, rates and deadlines that can be, and their means."""

from math import inf, nan
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.planning.model.length_classes import classify_lengths
from p2pserve.coordinator.planning.model.workload import Slo, Workload, WorkloadError


def workload(prompts: list[int], outputs: list[int], **more: Any) -> Workload:
    fields: dict[str, Any] = {"name": "w", "rate": 1.0} | more
    return Workload(prompts=np.array(prompts, dtype=np.int64), outputs=np.array(outputs, dtype=np.int64), **fields)


def test_means_by_hand() -> None:
    found = workload([1, 3], [10, 20])
    assert (found.mean_prompt, found.mean_output) == (2.0, 15.0)
    assert found.mean_pairs == (1 + 6) / 2
    assert found.arrival_cv == 1.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompts": [], "outputs": []}, "0 prompts and 0 outputs"),
        ({"prompts": [1, 2]}, "2 prompts and 1 outputs"),
        ({"prompts": [0]}, "at least one token"),
        ({"outputs": [0]}, "at least one token"),
        ({"rate": 0.0}, "rate is 0.0; it must be above 0"),
        ({"rate": inf}, "rate is inf"),
        ({"rate": nan}, "rate is nan"),
        ({"arrival_cv": -0.1}, "arrival_cv is -0.1"),
        ({"arrival_cv": inf}, "arrival_cv is inf"),
    ],
)
def test_a_workload_that_cannot_be_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError, match=rf"^workload w: .*{words}"):
        workload(**{"prompts": [1], "outputs": [1], **fields})


def test_even_arrivals_and_single_tokens_are_allowed() -> None:
    assert workload([1], [1], arrival_cv=0.0).mean_pairs == 1.0


@pytest.mark.parametrize("field", ["ttft_s", "tpot_s", "e2e_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, nan])
def test_deadlines_are_above_0(field: str, value: float) -> None:
    with pytest.raises(WorkloadError, match=rf"slo\.{field} is {value}; it must be above 0"):
        Slo(**{field: value})


@pytest.mark.parametrize("target", [0.0, 1.0, -0.5, nan])
def test_a_target_is_a_share(target: float) -> None:
    with pytest.raises(WorkloadError, match=r"slo\.target is .*; it is a share between 0 and 1"):
        Slo(target=target)


def test_no_deadline_is_none() -> None:
    assert (Slo().ttft_s, Slo().tpot_s, Slo().e2e_s, Slo().target) == (inf, inf, inf, 0.9)


def test_classes_are_cut_by_prompt_and_then_by_output() -> None:
    found = classify_lengths(workload([10, 40, 20, 30], [5, 8, 7, 6]), prompts=2, outputs=[0.5])
    assert found.prompt.tolist() == [10.0, 20.0, 30.0, 40.0]
    assert found.output.tolist() == [5.0, 7.0, 6.0, 8.0]
    assert found.share.tolist() == [0.25] * 4
    wide = classify_lengths(workload([10, 40, 20, 30], [5, 8, 7, 6]), prompts=2, outputs=[])
    assert wide.prompt.tolist() == [15.0, 35.0]
    assert wide.prompt_sd.tolist() == [5.0, 5.0]
    assert wide.output.tolist() == [6.0, 7.0]
    assert wide.output_sd.tolist() == [1.0, 1.0]


def test_pairs_of_a_class_are_the_mean_of_those_of_its_requests() -> None:
    found = classify_lengths(workload([10, 20], [1, 1]), prompts=1, outputs=[])
    assert found.pairs.tolist() == [(55 + 210) / 2]
    assert found.mean_pairs == (55 + 210) / 2


def test_the_context_that_is_held_varies_with_the_age_of_a_request() -> None:
    """One request of 100 + 60 tokens is met at any of its 60 steps: 100 to 160 tokens, evenly."""
    found = classify_lengths(workload([100], [60]))
    assert found.held == 130.0
    assert found.held_var == pytest.approx(60**2 / 12)
    assert found.uneven == pytest.approx(300 / 130**2)
    assert found.life == 30.0
    assert (found.mean_prompt, found.mean_output) == (100.0, 60.0)
