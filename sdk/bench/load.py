"""What a benchmark asks of a network, and when: from options and a seed. No I/O but reading a trace, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Final

import numpy as np

from ...coordinator.planning.model.slo import read_slo
from ...coordinator.planning.model.workload import Slo
from ...node.messages import Status
from ...node.models import ModelInfo
from ...node.view import NetworkView
from ...sims.records import Trace, TraceError
from ...sims.workloads import Lengths, draw, read_requests
from ..errors import NotReady, UsageError

CONCURRENCY: Final = 8
REQUESTS: Final = 100
PROMPT_TOKENS, MAX_TOKENS = 512, 128
TOKEN_IDS: Final = 2048  # the first of a vocabulary, which every tokenizer has; a model's own may be padded beyond it
OF_A_TRACE: Final = ("rate", "prompt_tokens", "max_tokens")
"""What a trace says itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """Requests of `service` and what counts as in time. `concurrency`: so many at a time, each sent when one before it
    has ended; None: at the moments of the trace, however many wait. `emulated`: boxes whose GPUs are modelled."""

    service: str
    vocabulary: int
    trace: Trace
    concurrency: int | None
    seed: int
    slo: Slo | None
    emulated: tuple[str, ...]

    def prompt(self, row: int) -> list[int]:
        """The token ids of a request: random, so that no prompt begins as another, and the same for a seed."""
        rng = np.random.default_rng((self.seed, row))
        found: list[int] = rng.integers(min(self.vocabulary, TOKEN_IDS), size=int(self.trace.prompt[row])).tolist()
        return found


def check_options(arguments: SimpleNamespace) -> None:
    """Raise UsageError for options that contradict each other."""
    if arguments.rate is not None and arguments.concurrency is not None:
        raise UsageError("rate: give either --rate or --concurrency, and not both")
    given = [name for name in OF_A_TRACE if getattr(arguments, name) is not None]
    if arguments.trace is not None and given:
        raise UsageError(f"{given[0].replace('_', '-')}: the requests of --trace have their own; leave it out")


def read_deadlines(text: str | None) -> Slo | None:
    """What counts as in time. Raises WorkloadError or UsageError."""
    if text is None:
        return None
    found = read_slo(text)
    if not isinstance(found, Slo):
        raise UsageError(f"slo: {text!r} is a multiple; give deadlines of the requests, like ttft=2s,tpot=100ms")
    return found


def read_trace(arguments: SimpleNamespace) -> Trace:
    """The requests: those of a file, or drawn by the seed. Raises UsageError."""
    if arguments.trace is not None:
        try:
            return cut(read_requests(arguments.trace), arguments.requests)
        except TraceError as error:
            raise UsageError(f"trace: {error}") from error
    prompt, output = arguments.prompt_tokens or PROMPT_TOKENS, arguments.max_tokens or MAX_TOKENS
    lengths = Lengths(np.array([prompt]), np.array([output]), f"{prompt} + {output} tokens")
    rng = np.random.default_rng(arguments.seed)
    return draw(lengths, rate=arguments.rate or 1.0, rng=rng, requests=arguments.requests or REQUESTS)


def cut(trace: Trace, requests: int | None) -> Trace:
    """The first so many requests of it, from the moment of the first on."""
    kept = slice(0, requests)
    return replace(
        trace,
        ids=trace.ids[kept],
        arrival_s=trace.arrival_s[kept] - trace.arrival_s[0],
        prompt=trace.prompt[kept],
        output=trace.output[kept],
    )


def plan_load(arguments: SimpleNamespace, trace: Trace, slo: Slo | None, status: Status) -> BenchLoad:
    """The load for the network of this status. Raises NotReady, or UsageError for requests that it cannot take."""
    view = NetworkView.of_status(status)
    model = choose_model(view, arguments.service)
    longest = view.max_model_len(model)
    total = trace.prompt + trace.output
    if total.max() > longest:
        row = int(total.argmax())
        field = "trace" if arguments.trace is not None else "prompt-tokens"
        raise UsageError(
            f"{field}: request {trace.ids[row]} has {trace.prompt[row]} + {trace.output[row]} tokens, and "
            f"{model.service} takes {longest} in all; ask for fewer"
        )
    is_open = arguments.rate is not None or (arguments.trace is not None and arguments.concurrency is None)
    return BenchLoad(
        service=model.service,
        vocabulary=model.shape.vocabulary,
        trace=trace,
        concurrency=None if is_open else arguments.concurrency or CONCURRENCY,
        seed=arguments.seed,
        slo=slo,
        emulated=tuple(_emulated(view, model.service)),
    )


def choose_model(view: NetworkView, wanted: str | None) -> ModelInfo:
    """The model that is asked: the only one, or that of this name. Raises NotReady or UsageError."""
    models = {each.model.service: each.model for each in view.adverts.values() if each.model is not None}
    if not models:
        raise NotReady("no box of the network serves a model; start one with `p2pserve join`")
    served = ", ".join(sorted(models))
    if wanted is None and len(models) > 1:
        raise UsageError(f"service: the network serves several models, choose one with --service: {served}")
    if wanted is not None and wanted not in models:
        raise UsageError(f"service: nobody serves {wanted}; this network serves {served}")
    return models[wanted] if wanted is not None else next(iter(models.values()))


def _emulated(view: NetworkView, service: str) -> Sequence[str]:
    boxes = [each for each in view.adverts.values() if each.model is not None and each.model.service == service]
    return sorted({each.hardware.summary() for each in boxes if each.hardware.emulated})
