"""What gateways say of their traffic, when they say it, and what is planned for."""

from random import Random

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator import Demand, DemandMeter
from p2pserve.coordinator.demand import MAX_LENGTHS
from p2pserve.coordinator.demand_meter import UNKNOWN_RATE, azure_lengths, demand_of, expected_workload
from p2pserve.coordinator.planning.model.workload import Workload
from p2pserve.coordinator.workload_profiler import REFERENCE, WINDOW


class Gateway:
    """One that sees requests at random; `said` has every demand, with the number of the request that it came at."""

    def __init__(self, seed: int) -> None:
        self.meter = DemandMeter()
        self.said: list[tuple[int, Demand]] = []
        self._rng, self._now, self._count = Random(seed), 0.0, 0

    def serve(self, count: int, rate: float, prompt: float, output: float) -> None:
        for _ in range(count):
            self._now += self._rng.expovariate(rate)
            self._count += 1
            lengths = [round(mean * self._rng.lognormvariate(-0.18, 0.6)) for mean in (prompt, output)]
            self.meter.record_start(self._now, lengths[0])
            before = self.demand
            self.meter.record_end(lengths[0], lengths[1])
            after = self.demand
            if after is not None and after != before:
                self.said.append((self._count, after))

    def wait(self, seconds: float) -> None:
        """No requests for so long."""
        self._now += seconds

    @property
    def demand(self) -> Demand | None:
        return self.meter.demand(self._now)


def mean(demand: Demand) -> tuple[float, float]:
    lengths = np.array(demand.lengths)
    return float(lengths[:, 0].mean()), float(lengths[:, 1].mean())


@pytest.mark.parametrize("seed", range(4))
def test_steady_traffic_is_told_of_when_it_is_known_and_hardly_ever_again(seed: int) -> None:
    gateway = Gateway(seed)
    gateway.serve(31, 2.0, 800, 200)
    assert gateway.demand is None
    gateway.serve(6000, 2.0, 800, 200)
    assert gateway.said[0][0] == 32
    assert REFERENCE in [at for at, _ in gateway.said]
    assert len(gateway.said) <= 4
    latest = gateway.said[-1][1]
    assert latest.requests_s == pytest.approx(2.0, rel=0.2)
    assert latest.arrival_cv == pytest.approx(1.0, abs=0.2)
    assert mean(latest) == pytest.approx((800, 200), rel=0.1)
    assert len(latest.lengths) == MAX_LENGTHS


@pytest.mark.parametrize(
    ("rate", "prompt", "output"), [(8.0, 800, 200), (2.0, 3000, 200), (2.0, 800, 25), (0.4, 800, 200)]
)
def test_a_shift_is_news_within_a_window(rate: float, prompt: float, output: float) -> None:
    gateway = Gateway(7)
    gateway.serve(2 * WINDOW, 2.0, 800, 200)
    known = len(gateway.said)
    gateway.serve(2 * WINDOW, rate, prompt, output)
    news = [(at - 2 * WINDOW, demand) for at, demand in gateway.said[known:]]
    assert news
    assert news[0][0] <= WINDOW
    latest = news[-1][1]
    assert latest.requests_s == pytest.approx(rate, rel=0.3)
    assert mean(latest) == pytest.approx((prompt, output), rel=0.2)


def test_lengths_keep_their_mean_and_most_of_their_spread() -> None:
    gateway = Gateway(3)
    gateway.serve(WINDOW, 2.0, 800, 200)
    said = gateway.said[-1][1]
    prompts = np.array(said.lengths)[:, 0]
    assert prompts.std() / prompts.mean() == pytest.approx(0.66, abs=0.15)


@pytest.mark.parametrize("kind", ["coding", "conversation"])
def test_plans_are_made_for_the_lengths_that_were_asked(kind: str) -> None:
    """From the shortest to the longest, both as gateways tell of them and as they are filled in."""
    prompts, outputs = azure_lengths(kind)
    demand = demand_of(Workload(name=kind, prompts=prompts, outputs=outputs, rate=1.0))
    assert len(demand.lengths) == MAX_LENGTHS
    assert mean(demand) == pytest.approx((prompts.mean(), outputs.mean()), rel=0.01)
    planned = expected_workload([demand], 1 << 20)
    for asked, found in ((prompts, planned.prompts), (outputs, planned.outputs)):
        shares = [10, 25, 50, 75, 90, 95]
        assert np.percentile(found, shares) == pytest.approx(np.percentile(asked, shares), rel=0.05)
        assert float((found**2).mean()) == pytest.approx(float((asked**2).mean()), rel=0.2)


def test_long_prompts_keep_their_long_answers() -> None:
    prompts = np.tile(np.arange(1, 513), 4)
    demand = demand_of(Workload(name="w", prompts=prompts, outputs=prompts // 2 + 1, rate=1.0))
    found = np.array(demand.lengths)
    assert np.corrcoef(found.T)[0, 1] > 0.95


def test_nothing_is_filled_in_between_two_kinds_of_requests() -> None:
    prompts = np.repeat([100, 4000], 256)
    demand = demand_of(Workload(name="w", prompts=prompts, outputs=np.repeat([20, 500], 256), rate=1.0))
    planned = expected_workload([demand], 1 << 20)
    assert set(zip(planned.prompts.tolist(), planned.outputs.tolist(), strict=True)) == {(100, 20), (4000, 500)}


def test_of_few_more_requests_than_are_told_of_the_latest_are_told_as_they_were() -> None:
    prompts = np.arange(1, MAX_LENGTHS + 37)
    found = demand_of(Workload(name="w", prompts=prompts, outputs=prompts % 7 + 1, rate=1.0)).lengths
    assert found == tuple((prompt, prompt % 7 + 1) for prompt in prompts.tolist()[-MAX_LENGTHS:])


def test_requests_without_an_answer_or_a_prompt_count_as_one_token() -> None:
    meter = DemandMeter()
    for second in range(40):
        meter.record_start(float(second), 0)
        meter.record_end(0, 0)
    demand = meter.demand(40.0)
    assert demand is not None
    assert set(demand.lengths) == {(1, 1)}


def test_a_gateway_that_nobody_asks_any_more_says_so_and_keeps_its_lengths() -> None:
    gateway = Gateway(5)
    gateway.serve(WINDOW, 2.0, 800, 200)
    busy = gateway.demand
    assert busy is not None
    gateway.wait(50.0)
    assert gateway.demand is busy  # requests end, and others may yet come
    gateway.wait(50.0)
    assert gateway.demand == msgspec.structs.replace(busy, requests_s=0.0)


def test_one_request_now_and_again_does_not_bring_back_a_load_that_has_gone() -> None:
    gateway = Gateway(5)
    gateway.serve(WINDOW, 2.0, 800, 200)
    for _ in range(31):
        gateway.wait(300.0)
        gateway.serve(1, 2.0, 800, 200)
        assert gateway.demand is not None
        assert gateway.demand.requests_s == 0.0
    gateway.wait(300.0)
    gateway.serve(1, 2.0, 800, 200)
    assert gateway.demand is not None
    assert gateway.demand.requests_s == pytest.approx(1 / 300, rel=0.05)


def test_after_a_silence_traffic_is_told_of_as_it_is() -> None:
    gateway = Gateway(6)
    gateway.serve(WINDOW, 2.0, 800, 200)
    gateway.wait(3600.0)
    known = len(gateway.said)
    gateway.serve(32, 2.0, 3000, 50)
    assert [at for at, _ in gateway.said[known:]] == [WINDOW + 32]
    latest = gateway.said[-1][1]
    assert latest.requests_s == pytest.approx(2.0, rel=0.5)  # an hour of silence is no gap between requests
    assert mean(latest) == pytest.approx((3000, 50), rel=0.3)


def test_rare_requests_and_bursts_are_no_silence() -> None:
    rare = Gateway(8)
    rare.serve(64, 0.01, 800, 200)
    rare.wait(1500.0)
    bursts = Gateway(8)
    for _ in range(40):
        bursts.serve(10, 50.0, 800, 200)
        bursts.wait(90.0)
    for gateway in (rare, bursts):
        assert gateway.demand is not None
        assert gateway.demand.requests_s > 0.0


def test_a_demand_survives_the_wire_and_nonsense_does_not() -> None:
    demand = Demand(requests_s=2.0, arrival_cv=1.5, lengths=((800, 200), (30, 4)))
    sent = msgspec.msgpack.encode(demand)
    assert msgspec.msgpack.decode(sent, type=Demand) == demand
    fields = msgspec.to_builtins(demand)
    wrong: tuple[dict[str, object], ...] = (
        {"requests_s": -1.0},
        {"requests_s": float("nan")},
        {"arrival_cv": -1.0},
        {"lengths": []},
        {"lengths": [(1, 1)] * (MAX_LENGTHS + 1)},
        {"lengths": [(0, 1)]},
    )
    for bad in wrong:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(fields | bad, Demand)


def test_what_nobody_has_seen_is_assumed() -> None:
    workload = expected_workload([], 1 << 20)
    assert workload.rate == UNKNOWN_RATE
    assert "Azure" in workload.name
    assert 900 < workload.mean_prompt < 1500
    short = expected_workload([], 512)
    assert int((short.prompts + short.outputs).max()) == 512
    assert short.mean_output > 30  # shortened in proportion: answers are not lost to prompts


def test_all_gateways_count_by_their_rates_in_any_order() -> None:
    busy = Demand(requests_s=9.0, arrival_cv=1.0, lengths=((1000, 100),))
    quiet = Demand(requests_s=1.0, arrival_cv=3.0, lengths=((100, 500), (100, 700)))
    workload = expected_workload([busy, quiet], 4096)
    assert workload.rate == 10.0
    assert workload.mean_prompt == pytest.approx(0.9 * 1000 + 0.1 * 100, rel=0.02)
    assert workload.mean_output == pytest.approx(0.9 * 100 + 0.1 * 600, rel=0.02)
    assert workload.arrival_cv == pytest.approx((0.9 * 1.0 + 0.1 * 9.0) ** 0.5)
    again = expected_workload([quiet, busy], 4096)
    assert (again.prompts.tolist(), again.outputs.tolist()) == (workload.prompts.tolist(), workload.outputs.tolist())


def test_only_gateways_that_are_asked_now_count_if_there_are_any() -> None:
    busy = Demand(requests_s=9.0, arrival_cv=1.0, lengths=((1000, 100),))
    quiet = Demand(requests_s=0.0, arrival_cv=3.0, lengths=((100, 500),))
    workload = expected_workload([busy, quiet], 4096)
    assert (workload.rate, workload.mean_prompt, workload.arrival_cv) == (9.0, 1000.0, 1.0)
    idle = expected_workload([quiet, msgspec.structs.replace(busy, requests_s=0.0)], 4096)
    assert idle.rate == pytest.approx(UNKNOWN_RATE)
    assert idle.mean_prompt == pytest.approx((1000 + 100) / 2)
    assert "last" in idle.name


@pytest.mark.parametrize("longest", [0, 1, 2, 3, 100])
def test_no_request_is_longer_than_what_can_be_served(longest: int) -> None:
    demand = Demand(requests_s=1.0, arrival_cv=1.0, lengths=((5000, 1), (1, 5000), (1, 1), (60, 39)))
    workload = expected_workload([demand], longest)
    total = workload.prompts + workload.outputs
    assert int(total.max()) <= max(2, longest)
    assert int(min(workload.prompts.min(), workload.outputs.min())) >= 1
