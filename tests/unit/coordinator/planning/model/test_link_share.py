"""How full a link may be planned to be."""

from dataclasses import replace
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.planning.model.kv_cost import kv_gigabits
from p2pserve.coordinator.planning.model.length_classes import classify_lengths
from p2pserve.coordinator.planning.model.link_share import LEAST, MOST, LinkShares
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload

RATES = np.array([0.0, 0.1, 1.0, 5.0, 10.0, 20.0, 40.0, 100.0, 1000.0])
SHORT, LONG = 12, 250


def service(output: int, slo: Slo, prompt: int = 1024) -> Service:
    workload = Workload(name="even", prompts=np.full(64, prompt), outputs=np.full(64, output), rate=1.0)
    return Service(name="s", model=model_shape("llama-30b"), workload=workload, slo=slo)


def shares(*services: Service) -> LinkShares:
    return LinkShares([(one, classify_lengths(one.workload)) for one in services])


PACED = Slo(ttft_s=3.0, tpot_s=0.4, e2e_s=100.0)


def test_fast_links_may_be_filled_and_slow_ones_for_short_answers_not() -> None:
    found = shares(service(SHORT, PACED)).of(RATES)
    assert (np.diff(found) >= 0.0).all()
    assert found[0] == LEAST
    assert found[-1] == MOST
    assert LEAST < float(shares(service(SHORT, PACED)).of(np.array(20.0))) < MOST


def test_long_answers_leave_kv_time_to_wait() -> None:
    short, long = (shares(service(output, PACED)).of(RATES) for output in (SHORT, LONG))
    assert (long >= short).all()
    assert long[4] > short[4] + 0.2


def test_answers_of_one_token_and_services_without_deadlines_wait_for_nothing() -> None:
    assert (shares(service(1, Slo(tpot_s=0.4))).of(RATES[1:]) == MOST).all()
    assert (shares(service(SHORT, Slo())).of(RATES[1:]) == MOST).all()


def test_a_first_token_behind_the_kv_has_the_tighter_deadline() -> None:
    plain = service(LONG, PACED)
    behind = replace(plain, first_token_at_decode=True)
    assert shares(behind).of(np.array(10.0)) < shares(plain).of(np.array(10.0))


def test_of_several_services_the_strictest_counts() -> None:
    short, long = service(SHORT, PACED), service(LONG, PACED)
    assert shares(long, short).of(RATES) == pytest.approx(shares(short).of(RATES))


@given(st.floats(0.5, 200.0), st.integers(2, 400), st.integers(16, 8000))
def test_at_the_share_found_few_wait_too_long(gbps: float, output: int, prompt: int) -> None:
    """Against the formula for one class of requests: 2 % find others, and wait longer than half of their deadline.
    Shares are tabulated in steps of 0.02, between which lines are drawn, to LEAST as well."""
    asked = service(output, PACED, prompt)
    share = float(shares(asked).of(np.array(gbps)))
    slack = 0.5 * min((output - 1) * PACED.tpot_s, PACED.e2e_s)
    alone_s = float(kv_gigabits(asked.model, prompt, asked.kv_bits)) / gbps

    def late(part: float) -> float:
        return part * exp(-slack * (1.0 - part) / alone_s)

    assert share < LEAST + 0.02 or late(share - 0.02) <= 0.02
    assert share == MOST or late(share + 0.04) > 0.02
