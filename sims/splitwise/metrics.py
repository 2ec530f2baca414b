"""Figures of a run, by the definitions of the public Splitwise simulator.

TBT is (E2E - TTFT) / output, over all output tokens, and so a little less than the TPOT of
`Outcomes`. A slowdown is a figure over that of the same request alone on one DGX-A100; the paper's
SLO is a limit to nine percentiles of slowdowns. Requests that were not completed do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...coordinator.costs.tables import SplitwiseTimes
from ..records import Outcomes, Trace
from .setups import A100, TENSOR_PARALLEL

Floats = NDArray[np.float64]

PERCENTILES = (50, 90, 99)
Slo = Mapping[str, tuple[float, float, float]]
"""By `ttft`, `tbt` and `e2e`: what the slowdowns at PERCENTILES must stay below."""

SLO: Slo = {
    "ttft": (2.0, 3.0, 6.0),
    "tbt": (1.25, 1.5, 5.0),
    "e2e": (1.25, 1.5, 5.0),
}
"""The paper's Table VI."""


class LoneRequests(NamedTuple):
    """Seconds that each request of a trace takes alone: to its first token, and for each one after
    it."""

    ttft_s: Floats
    tbt_s: Floats

    def e2e_s(self, output: NDArray[np.int64]) -> Floats:
        """To the last token of answers of so many tokens."""
        found: Floats = self.ttft_s + self.tbt_s * (output - 1)
        return found


def summary(outcomes: Outcomes) -> dict[str, float]:
    """`rps`, `out_tok_s` (1/s), and `ttft_p50` ... `e2e_p99` (s)."""
    done = outcomes.completed
    arrival, output = outcomes.trace.arrival_s[done], outcomes.trace.output[done]
    makespan_s = float(np.max(arrival + outcomes.e2e_s[done]) - np.min(arrival))
    rates = {"rps": len(output) / makespan_s, "out_tok_s": float(np.sum(output)) / makespan_s}
    return rates | _percentiles(_latencies(outcomes))


def slowdowns(outcomes: Outcomes, model: str) -> dict[str, float]:
    """`ttft_p50` ... `e2e_p99`, each over the lone request's on a DGX-A100, as released."""
    return slowdowns_over(outcomes, lone_requests(outcomes.trace, model))


def slowdowns_over(outcomes: Outcomes, lone: LoneRequests) -> dict[str, float]:
    """The same over these lone requests."""
    done = outcomes.completed
    alone = LoneRequests(lone.ttft_s[done], lone.tbt_s[done])
    base = {"ttft": alone.ttft_s, "tbt": alone.tbt_s, "e2e": alone.e2e_s(outcomes.trace.output[done])}
    return _percentiles({name: values / base[name] for name, values in _latencies(outcomes).items()})


def lone_requests(trace: Trace, model: str) -> LoneRequests:
    """On a DGX-A100, whose decode time is looked up by the prompt's length, as released."""
    alone = SplitwiseTimes(model, A100, TENSOR_PARALLEL, "released")
    prompts = trace.prompt.tolist()
    return LoneRequests(
        ttft_s=np.array([alone.prefill_s(prompt, 0.0) for prompt in prompts]),
        tbt_s=np.array([alone.decode_line(prompt).fixed_s for prompt in prompts]),
    )


def missed_slos(slowdown: Mapping[str, float], slo: Slo = SLO) -> list[str]:
    """Those of the nine percentiles that are not below their limit, like `tbt_p90`."""
    return [
        f"{name}_p{percentile}"
        for name, limits in slo.items()
        for percentile, limit in zip(PERCENTILES, limits, strict=True)
        if not slowdown[f"{name}_p{percentile}"] < limit
    ]


def _latencies(outcomes: Outcomes) -> dict[str, Floats]:
    done = outcomes.completed
    ttft, e2e = outcomes.ttft_s[done], outcomes.e2e_s[done]
    return {"ttft": ttft, "tbt": (e2e - ttft) / outcomes.trace.output[done], "e2e": e2e}


def _percentiles(values: Mapping[str, Floats]) -> dict[str, float]:
    return {
        f"{name}_p{percentile}": float(value)
        for name, column in values.items()
        for percentile, value in zip(PERCENTILES, np.percentile(column, PERCENTILES), strict=True)
    }
