"""Which GPUs of a machine an engine will see, and in which order."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from p2pserve.node.box.errors import NodeError
from p2pserve.node.box.hardware import Card, Gpu, cuda_environment, probe, select_visible


def gpu(uuid: str, name: str = "NVIDIA A40", memory_gib: float = 45.0) -> Gpu:
    return Gpu(name=name, memory_gib=memory_gib, uuid=uuid)


FIRST, SECOND, THIRD = gpu("GPU-aa11"), gpu("GPU-ab22"), gpu("GPU-cc33", "NVIDIA RTX A5000", 24.0)
PART, OTHER_PART = gpu("MIG-1111", "NVIDIA A100 MIG 3g.20gb", 19.5), gpu("MIG-2222", "NVIDIA A100 MIG 3g.20gb", 19.5)
CARDS = (Card(FIRST), Card(SECOND), Card(THIRD))
CUT = (Card(FIRST), Card(gpu("GPU-dd44", "NVIDIA A100", 40.0), (PART, OTHER_PART)))


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, {"0": FIRST, "1": SECOND, "2": THIRD}),
        ("", {}),
        (" ", {}),
        ("-1", {}),
        ("NoDevFiles", {}),
        ("1", {"1": SECOND}),
        ("2,0", {"2": THIRD, "0": FIRST}),
        (" 2 , 0 ", {"2": THIRD, "0": FIRST}),
        ("2,-1,0", {"2": THIRD}),
        ("GPU-cc33,GPU-aa", {"2": THIRD, "0": FIRST}),
        ("GPU-ab22,0", {"1": SECOND, "0": FIRST}),
    ],
)
def test_what_cuda_shows_and_in_which_order(variable: str | None, expected: dict[str, Gpu]) -> None:
    assert list(select_visible(CARDS, variable).items()) == list(expected.items())


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, {"0": FIRST, "1": PART}),
        ("1", {"1": PART}),
        ("MIG-2222", {"MIG-2222": OTHER_PART}),
        ("MIG-2,0", {"MIG-2222": OTHER_PART, "0": FIRST}),
    ],
)
def test_a_card_in_slices(variable: str | None, expected: dict[str, Gpu]) -> None:
    assert list(select_visible(CUT, variable).items()) == list(expected.items())


@pytest.mark.parametrize(
    ("variable", "what"),
    [
        ("3", "'3' in '3' is no GPU of this box; name each once, by an index from 0 to 2 or a UUID (nvidia-smi -L)"),
        ("0,x", "'x' in '0,x' is no GPU"),
        ("0,", "'' in '0,' is no GPU"),
        ("-2", "'-2' in '-2' is no GPU"),
        ("all", "'all' in 'all' is no GPU"),
        ("GPU-ff", "'GPU-ff' in 'GPU-ff' is no GPU"),
        ("MIG-1111", "'MIG-1111' in 'MIG-1111' is no GPU"),
        ("GPU-a", "'GPU-a' in 'GPU-a' is several GPUs"),
        ("1,0,1", "'1' in '1,0,1' is named twice"),
        ("1,GPU-ab22", "'GPU-ab22' in '1,GPU-ab22' is named twice"),
    ],
)
def test_what_cuda_would_leave_out_without_a_word_is_refused(variable: str, what: str) -> None:
    with pytest.raises(NodeError) as refused:
        select_visible(CARDS, variable)
    assert str(refused.value).startswith(f"CUDA_VISIBLE_DEVICES: {what}")


def test_a_machine_without_gpus_does_not_mind_the_variable() -> None:
    assert select_visible((), "0") == select_visible((), None) == {}


class NvmlError(Exception):
    """Stands for pynvml's."""


class NotFoundError(NvmlError):
    """A number that no slice has."""


def nvml(*cards: Card, mig: bool = False) -> SimpleNamespace:
    """A driver with these cards; without any it does not start."""

    def init() -> None:
        if not cards:
            raise NvmlError

    def mode(handle: Card) -> list[int]:
        if not mig:
            raise NvmlError  # the card has no such thing
        return [int(bool(handle.slices)), 0]

    def slice_of(handle: Card, index: int) -> Card:
        if index % 2:
            raise NotFoundError
        return Card(handle.slices[index // 2])

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVMLError_NotFound=NotFoundError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=lambda index: cards[index],
        nvmlDeviceGetName=lambda handle: handle.gpu.name.encode(),
        nvmlDeviceGetUUID=lambda handle: handle.gpu.uuid,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=int(handle.gpu.memory_gib * 2**30)),
        nvmlDeviceGetMigMode=mode,
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 4,
        nvmlDeviceGetMigDeviceHandleByIndex=slice_of,
    )


@pytest.mark.parametrize(
    ("driver", "environ", "gpus", "environment"),
    [
        (nvml(*CARDS), {}, (FIRST, SECOND, THIRD), None),
        (nvml(*CARDS), {"CUDA_VISIBLE_DEVICES": "GPU-cc,0"}, (THIRD, FIRST), "2,0"),
        (nvml(*CARDS), {"CUDA_VISIBLE_DEVICES": ""}, (), ""),
        (nvml(*CUT, mig=True), {"CUDA_VISIBLE_DEVICES": "MIG-22"}, (OTHER_PART,), "MIG-2222"),
        (nvml(), {"CUDA_VISIBLE_DEVICES": "0"}, (), ""),
    ],
)
def test_engines_are_told_what_the_probe_reports(
    monkeypatch: pytest.MonkeyPatch,
    driver: SimpleNamespace,
    environ: dict[str, str],
    gpus: tuple[Gpu, ...],
    environment: str | None,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert probe(environ).gpus == gpus
    expected: dict[str, Any] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if environment is not None:
        expected["CUDA_VISIBLE_DEVICES"] = environment
    assert cuda_environment(environ) == expected
