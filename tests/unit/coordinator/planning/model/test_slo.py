"""Deadlines, as multiples of a lone request on A100s or in seconds."""

from math import inf

import numpy as np
import pytest

from p2pserve.coordinator.costs.model_shape import ModelShape, model_shape
from p2pserve.coordinator.plan import Deadlines
from p2pserve.coordinator.planning.model.slo import lone_a100s, parse_slo, slo_of_deadlines
from p2pserve.coordinator.planning.model.workload import Slo, Workload, WorkloadError

LLAMA = model_shape("llama-30b")


def workload(prompt: int = 1155, output: int = 211) -> Workload:
    return Workload(name="test", prompts=np.array([prompt]), outputs=np.array([output]), rate=1.0)


def test_a_scale_multiplies_what_a_lone_request_takes() -> None:
    once, thrice = (parse_slo(text, LLAMA, workload()) for text in ("1x", "scale=3, target=0.99"))
    assert thrice.ttft_s == pytest.approx(3 * once.ttft_s)
    assert thrice.tpot_s == pytest.approx(3 * once.tpot_s)
    assert thrice.e2e_s == pytest.approx(3 * once.e2e_s)
    assert (once.target, thrice.target) == (0.9, 0.99)
    assert once.e2e_s == pytest.approx(once.ttft_s + 210 * once.tpot_s)


def test_a_longer_prompt_may_take_longer() -> None:
    assert parse_slo("2x", LLAMA, workload(prompt=4000)).ttft_s > parse_slo("2x", LLAMA, workload()).ttft_s


def test_as_few_a100s_as_hold_the_model() -> None:
    assert [lone_a100s(model_shape(name), 1000)[0] for name in ("llama-7b", "llama2-70b", "bloom-176b")] == [1, 2, 8]
    huge = ModelShape(
        name="huge", layers=200, hidden=20480, heads=160, kv_heads=160, head_dim=128, intermediate=81920, vocabulary=9
    )
    with pytest.raises(WorkloadError, match="huge does not fit eight A100-80GB: give deadlines in seconds"):
        parse_slo("5x", huge, workload())


def test_deadlines_do_not_depend_on_how_engines_keep_kv() -> None:
    kept = LLAMA.with_kv_cache_dtype("fp8")
    assert parse_slo("5x", kept, workload()) == parse_slo("5x", LLAMA, workload())


def test_deadlines_in_seconds_leave_the_others_open() -> None:
    assert parse_slo("ttft=2, tpot=0.1", LLAMA, workload()) == Slo(ttft_s=2.0, tpot_s=0.1, e2e_s=inf)


@pytest.mark.parametrize("text", ["", "target=0.9", "x", "5", "-5x", "nanx", "ttft=0", "ttft=1,ttft=2", "5x,6x",
                                  "5x,ttft=1", "tbt=1", "ttft=fast", "ttft=1,target=1"])  # fmt: skip
def test_what_is_no_deadline_is_said_in_one_line(text: str) -> None:
    with pytest.raises(WorkloadError, match=r"^slo[:.]") as caught:
        parse_slo(text, LLAMA, workload())
    assert "\n" not in str(caught.value)


def test_the_deadlines_of_a_plan_are_an_objective_where_it_has_any() -> None:
    assert slo_of_deadlines(Deadlines(ttft_s=2.0)) == Slo(ttft_s=2.0, tpot_s=inf, e2e_s=inf)
    assert slo_of_deadlines(Deadlines()) is None
