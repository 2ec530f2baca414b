"""Machines that a cluster can be made of: the paper's three, and boxes of cards of the GPU table.

    catalogue = MachineCatalogue("bloom-176b", trace, mode="measured", cost_ratio=CostRatio.TABLE_1)
    catalogue.find("H"), catalogue.find("8xA40")

`A`, `H` and `Hcap` are DGX-A100, DGX-H100, and a DGX-H100 whose power is capped at 70 %: their
times are of `perf_model.csv`, their prices and watts the paper's. `8xA40` is eight cards of that
name: times by the roofline, rents and watts of the table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

import numpy as np

from ...coordinator.costs.gpus import GpuError, GpuSpec, Specs, gpu_table
from ...coordinator.costs.model_shape import ModelShape, ModelShapeError, model_shape
from ...coordinator.costs.replica import StageHardware, kv_capacity_tokens, replica_times
from ...coordinator.costs.step_times import StepTimes, chunk_pairs
from ...coordinator.costs.tables import SplitwiseTimes
from ...coordinator.planning.model.cluster_file import card_link_gbps
from ..records import Trace
from .machine import IterationTimes
from .metrics import LoneRequests, lone_requests
from .setups import A100, H100, H100_CAPPED, MACHINE_BYTES, MODELS, TENSOR_PARALLEL, SetupError
from .step_lookup import CachedIterations, Mode, decode_axis, mean_context, mean_prompt

MAX_CARDS: Final = 16
LONE_CARDS: Final = "8xA100-SXM4-80GB"
"""Whose lone requests deadlines are multiples of, for a model that `perf_model.csv` does not have."""


class CostRatio(StrEnum):
    """What the paper's machines cost. It has three ratios of an H100 machine to an A100 one.

    - `table1`: $17.6 and $38 an hour, 2.16.
    - `table5`: 2.35 as a prompt machine, 2.5 as a token machine.
    - `notebook`: $2.21 and $4.76 an hour for a card, 2.15, of the notebook that draws its figures.
    """

    TABLE_1 = "table1"
    TABLE_5 = "table5"
    NOTEBOOK = "notebook"


_A100_USD: Final = 17.6
_USD_PER_H: Final = {  # as a prompt machine, as a token machine
    CostRatio.TABLE_1: {"A": (_A100_USD, _A100_USD), "H": (38.0, 38.0)},
    CostRatio.TABLE_5: {"A": (_A100_USD, _A100_USD), "H": (2.35 * _A100_USD, 2.5 * _A100_USD)},
    CostRatio.NOTEBOOK: {"A": (8 * 2.21, 8 * 2.21), "H": (8 * 4.76, 8 * 4.76)},
}
_WATTS: Final = {"A": 8 * 400.0, "H": 8 * 700.0, "Hcap": 0.7 * 8 * 700.0}
_GPUS: Final = {"A": A100, "H": H100, "Hcap": H100_CAPPED}
PAPER_MACHINES: Final = tuple(_GPUS)


@dataclass(frozen=True, slots=True, eq=False)
class MachineType:
    """A kind of machine, for one model and one workload: times of an iteration, KV tokens that it
    holds, price in either pool, and watts of its cards."""

    name: str
    iterations: IterationTimes
    kv_tokens: float
    prompt_usd_per_h: float
    token_usd_per_h: float
    watts: float
    source: str


@final
class MachineCatalogue:
    """Machine types by name, each made once. `mode`: how the paper's machines are timed (see
    `run.py`). Raises SetupError for a model that nothing is known of."""

    def __init__(
        self,
        model: str,
        trace: Trace,
        *,
        mode: Mode = "measured",
        cost_ratio: CostRatio = CostRatio.TABLE_1,
        specs: Specs = Specs.MEASURED,
    ) -> None:
        self.model = model
        self._mode = mode
        self._cost_ratio = cost_ratio
        self._specs = specs
        self._mean_prompt = mean_prompt(trace)
        self._mean_context = mean_context(trace)
        self._made: dict[str, MachineType] = {}
        try:
            self._shape: ModelShape | None = model_shape(model)
        except ModelShapeError as error:
            if model not in MODELS:
                raise SetupError(str(error)) from None
            self._shape = None

    @property
    def kv_token_bytes(self) -> float:
        """What the KV of one token takes on the way."""
        if self.model in MODELS:
            return MODELS[self.model].kv_bytes(real=self._mode == "measured")
        assert self._shape is not None, "refused when the catalogue was made"
        return self._shape.kv_bytes_per_token

    def find(self, name: str) -> MachineType:
        """Raises SetupError for a name or a model that it cannot be made for."""
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._paper(name) if name in _GPUS else self._cards(name)
        return found

    def lone_requests(self, trace: Trace) -> LoneRequests:
        """What each request takes alone on eight A100 of 80 GB: by `perf_model.csv`, or else by the
        roofline."""
        if self.model in MODELS:
            return lone_requests(trace, self.model)
        return lone_requests_on(self.step_times(LONE_CARDS), trace)

    def step_times(self, name: str) -> StepTimes:
        """Of a machine. Raises SetupError."""
        if name not in _GPUS:
            return self._roofline(name)[0]
        if self.model not in MODELS:
            raise SetupError(
                f"machine {name}: perf_model.csv has no {self.model}, but {', '.join(MODELS)}; "
                "give machines of the GPU table, like 8xA40"
            )
        return SplitwiseTimes(self.model, _GPUS[name], TENSOR_PARALLEL, decode_axis(self._mode))

    def _paper(self, name: str) -> MachineType:
        times = self.step_times(name)
        prompt_usd, token_usd = _USD_PER_H[self._cost_ratio]["A" if name == "A" else "H"]
        return MachineType(
            name=name,
            iterations=CachedIterations(times),
            kv_tokens=(MACHINE_BYTES - MODELS[self.model].weight_bytes) / self.kv_token_bytes,
            prompt_usd_per_h=prompt_usd,
            token_usd_per_h=token_usd,
            watts=_WATTS[name],
            source=times.source,
        )

    def _cards(self, name: str) -> MachineType:
        times, gpu, cards, kv_tokens = self._roofline(name)
        return MachineType(
            name=f"{cards}x{gpu.name}",
            iterations=CachedIterations(times, self._mean_prompt, self._mean_context),
            kv_tokens=kv_tokens,
            prompt_usd_per_h=cards * gpu.usd_per_hour,
            token_usd_per_h=cards * gpu.usd_per_hour,
            watts=cards * gpu.tdp_w,
            source=times.source,
        )

    def _roofline(self, name: str) -> tuple[StepTimes, GpuSpec, int, float]:
        parsed = re.fullmatch(r"([0-9]{1,3})x(.{1,64})", name)
        if parsed is None or not 1 <= int(parsed[1]) <= MAX_CARDS:
            raise SetupError(
                f"machine {name[:64]!r} is none of {', '.join(PAPER_MACHINES)}, and not like 8xA40 (1 to {MAX_CARDS} "
                "cards of the GPU table)"
            )
        if self._shape is None:
            raise SetupError(f"machine {name}: the roofline has no model {self.model}")
        cards = int(parsed[1])
        try:
            gpu = gpu_table().find(parsed[2], self._specs)
        except GpuError as error:
            raise SetupError(f"machine {name}: {error}") from None
        stage = StageHardware(gpu=gpu, tp=cards, layers=self._shape.layers, link_gbps=card_link_gbps(gpu))
        kv_tokens = kv_capacity_tokens(self._shape, (stage,))
        if kv_tokens < 1:
            raise SetupError(f"machine {name}: {self.model} does not fit its memory")
        return replica_times(self._shape, (stage,)), gpu, cards, float(kv_tokens)


def lone_requests_on(times: StepTimes, trace: Trace) -> LoneRequests:
    """What each request takes alone on a machine with these times."""
    prompts, outputs = trace.prompt.tolist(), trace.output.tolist()
    line = times.decode_line(1)
    return LoneRequests(
        ttft_s=np.array([times.prefill_s(prompt, chunk_pairs(0, prompt)) for prompt in prompts]),
        tbt_s=np.array([line.step_s(prompt + output / 2) for prompt, output in zip(prompts, outputs, strict=True)]),
    )
