"""The front door and the lock: what users import and install."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import p2pserve

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "requirements" / "lock.txt").read_text(encoding="utf-8")
TORCH = (ROOT / "requirements" / "torch.txt").read_text(encoding="utf-8")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


PINS = {normal(name): pin for name, pin in re.findall(r"^([\w.-]+)==(\S+)", LOCK, flags=re.MULTILINE)}


def test_the_version_is_said_once() -> None:
    assert p2pserve.__version__ == PROJECT["version"]


def test_only_public_names_are_there() -> None:
    assert set(p2pserve.__all__) <= set(dir(p2pserve))
    with pytest.raises(AttributeError, match="'p2pserve' has no attribute 'Sever'"):
        _ = p2pserve.Sever


def test_every_line_of_the_lock_is_a_pin_or_a_hash() -> None:
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    pin, digest = r"[\w.-]+==[\w.+!]+ \\", r"    --hash=sha256:[0-9a-f]{64}( \\)?"
    assert not [line for line in lines if not re.fullmatch(f"{pin}|{digest}", line)]
    assert len(PINS) == sum("==" in line for line in lines)


@pytest.mark.parametrize("absent", ["torch", "torchvision", "torchaudio", "torchcodec"])
def test_what_the_lock_leaves_out(absent: str) -> None:
    assert absent not in PINS


def test_torch_is_the_one_pin_without_a_hash() -> None:
    assert [line for line in TORCH.splitlines() if not line.startswith("#")] == ["torch==2.13.0"]


def test_the_lock_holds_all_that_the_project_asks_for() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["dev"], *extras["cpu"]]
    names = {normal(re.split(r"[<>=!~ ;\[]", item, maxsplit=1)[0]) for item in wanted}
    assert names <= PINS.keys()


def test_what_is_installed_is_what_is_pinned() -> None:
    """Reads versions only of what this test run uses, so it also holds where the engine is another build."""
    for name in ("trio", "libp2p", "msgspec", "msgpack", "hypothesis", "pytest"):
        try:
            assert version(name) == PINS[name]
        except PackageNotFoundError:
            pytest.fail(f"{name} is not installed: run make setup")
