"""The clusters and models that the public Splitwise simulator is run with, and its constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# A machine is a DGX: 8 GPUs of 80 GiB under tensor parallelism 8.
TENSOR_PARALLEL = 8
MACHINE_BYTES = 8 * 80 * 2**30
KV_TRANSFER_BYTES_S = 200 * 2**30
MAX_PENDING_TOKENS = 8192
"""The longest queue of a prompt machine before another pool is asked."""

A100, H100, H100_CAPPED = "a100-80gb", "h100-80gb", "h100-80gb-pcap"
WORKLOADS = ("conv", "code")


class SetupError(ValueError):
    """A setup, model, workload or number of machines that cannot be; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitwiseModel:
    """A model of `perf_model.csv`. `kv_width`: of its key heads (grouped-query: fewer)."""

    name: str
    weight_bytes: int
    layers: int
    hidden: int
    kv_width: int

    def kv_bytes(self, *, real: bool) -> int:
        """Of one token, 16 bit; `hidden` as the simulator counts, not `real` for llama2-70b."""
        return 2 * (self.kv_width if real else self.hidden) * self.layers * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A cluster of the paper's iso-power set: GPUs, and machines for prompts and for decoding, by
    workload.

    Without `decode_gpu`, all machines do both.
    """

    name: str
    prompt_gpu: str
    decode_gpu: str | None
    conv: tuple[int, int]
    code: tuple[int, int]

    def machines(self, workload: str) -> tuple[int, int]:
        """How many, for a workload of `WORKLOADS`."""
        if workload not in WORKLOADS:
            raise SetupError(f"no workload {workload}; there are {', '.join(WORKLOADS)}")
        return self.conv if workload == "conv" else self.code


MODELS: Mapping[str, SplitwiseModel] = {
    model.name: model
    for model in (
        SplitwiseModel(name="llama2-70b", weight_bytes=135_000_000_000, layers=80, hidden=8192, kv_width=8 * 128),
        SplitwiseModel(name="bloom-176b", weight_bytes=329_000_000_000, layers=70, hidden=14336, kv_width=14336),
    )
}

SETUPS: Mapping[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup(name="baseA", prompt_gpu=A100, decode_gpu=None, conv=(70, 0), code=(70, 0)),
        Setup(name="baseH", prompt_gpu=H100, decode_gpu=None, conv=(40, 0), code=(40, 0)),
        Setup(name="AA", prompt_gpu=A100, decode_gpu=A100, conv=(45, 25), code=(55, 15)),
        Setup(name="HH", prompt_gpu=H100, decode_gpu=H100, conv=(25, 15), code=(35, 5)),
        Setup(name="HHcap", prompt_gpu=H100, decode_gpu=H100_CAPPED, conv=(25, 21), code=(35, 7)),
        Setup(name="HA", prompt_gpu=H100, decode_gpu=A100, conv=(25, 26), code=(35, 8)),
    )
}


def find_setup(name: str) -> Setup:
    """The setup of that name; SetupError if there is none."""
    if name not in SETUPS:
        raise SetupError(f"no setup {name}; there are {', '.join(SETUPS)}")
    return SETUPS[name]


def find_model(name: str) -> SplitwiseModel:
    """The model of that name; SetupError if there is none."""
    if name not in MODELS:
        raise SetupError(f"no model {name} in perf_model.csv; there are {', '.join(MODELS)}")
    return MODELS[name]
