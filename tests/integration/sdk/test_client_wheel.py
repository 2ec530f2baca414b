"""The wheel, installed with pip into an empty environment: what a laptop gets, and that it can ask a network.

Needs a package index that pip reaches; skipped, with pip's reason, where there is none.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from p2pserve import __version__
from p2pserve.sdk.demo.box import open_box

ROOT = Path(__file__).resolve().parents[3]
MAX_MIB = 60  # installed, with all that it needs
LIMIT_S = 120.0
SHIPPED = ("p2pserve", "bootstrap", "kernels", "coordinator", "kvtransport", "node", "sdk", "sims", "docs")
OTHERS = {  # where else people sit; pip takes wheels for them without being there
    "macOS on Apple's processors": ("macosx_11_0_arm64", "macosx_12_0_arm64", "macosx_11_0_universal2"),
    "macOS on Intel's": ("macosx_10_13_x86_64", "macosx_11_0_x86_64", "macosx_10_12_universal2"),
    "Windows": ("win_amd64",),
}

pytestmark = [pytest.mark.beside, pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Laptop:
    """An environment with nothing but the client in it."""

    folder: Path
    wheel: Path

    @property
    def scripts(self) -> Path:
        return self.folder / "bin"

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("P2PSERVE_", "PYTHON"))}
        environment = {**kept, "P2PSERVE_HOME": str(self.folder / "home")}
        command = [str(self.scripts / program), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=self.folder, env=environment
        )


def pip(*arguments: str, python: str = sys.executable) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd="/")
    if done.returncode:
        raise AssertionError(done.stderr.strip()[-2000:])


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    place = tmp_path_factory.mktemp("wheel")
    probe = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "0", "download", "--no-deps"]
    reached = subprocess.run(
        [*probe, "-q", "-d", str(place / "probe"), "sniffio"], capture_output=True, text=True, timeout=60, check=False
    )
    if reached.returncode:
        pytest.skip(f"pip reaches no package index: {reached.stderr.strip().splitlines()[-1:]}")
    source = place / "source"  # a build leaves files beside what it is made from
    for name in SHIPPED:
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "__init__.py"):
        shutil.copy(ROOT / name, source / name)
    pip("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(place), str(source))
    (wheel,) = place.glob("p2pserve-*.whl")
    folder = place / "laptop"
    venv.create(folder, with_pip=True, symlinks=True)
    # Without bytecode, which is made when it is first run, by whichever Python that is.
    pip("install", "-q", "--no-compile", "--only-binary=:all:", str(wheel), python=str(folder / "bin" / "python"))
    yield Laptop(folder, wheel)
    shutil.rmtree(place)


def test_the_wheel_is_pure_python(laptop: Laptop) -> None:
    assert laptop.wheel.name == f"p2pserve-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(laptop.wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        assert tops == {"p2pserve", f"p2pserve-{__version__}.dist-info"}
        assert {"p2pserve/py.typed", "p2pserve/sdk/explaining/words.md"} <= set(archive.namelist())


def test_a_laptop_needs_few_megabytes(laptop: Laptop) -> None:
    (packages,) = laptop.folder.glob("lib/python3*/site-packages")
    of_venv = re.compile(r"(pip|setuptools|pkg_resources|_distutils_hack)\b")
    files = [
        path
        for top in packages.iterdir()
        if not of_venv.match(top.name)
        for path in (top.rglob("*") if top.is_dir() else [top])
    ]
    size = sum(path.stat().st_size for path in files if path.is_file() and path.parent.name != "__pycache__")
    assert size < MAX_MIB << 20, f"{size >> 20} MiB"
    assert not {path.name for path in packages.iterdir()} & {"numpy", "torch", "vllm", "libp2p", "tokenizers"}


@pytest.mark.parametrize("system", OTHERS)
def test_all_that_it_needs_has_wheels_elsewhere(laptop: Laptop, system: str, tmp_path: Path) -> None:
    platforms = [word for name in OTHERS[system] for word in ("--platform", name)]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    pip("download", "-q", "-d", str(tmp_path), "--only-binary=:all:", "--python-version", version,
        *platforms, str(laptop.wheel))  # fmt: skip
    assert any(path.name.startswith("cryptography-") for path in tmp_path.iterdir())


def test_the_command_and_the_sdk_start(laptop: Laptop) -> None:
    assert __version__ in laptop.run("p2pserve", "--version").stdout
    done = laptop.run("python", "-c", "from p2pserve import *; print(Client.__name__, AsyncClient.__name__)")
    assert (done.stdout, done.stderr) == ("Client AsyncClient\n", "")


@pytest.mark.parametrize(
    "command",
    [
        ["join", "--bootstrap", "127.0.0.1:1", "--model", "bundled"],
        ["bootstrap"],
        ["plan", "--cluster", "thunderserve-h-40gbps", "--model", "llama-30b"],
        ["demo"],
        ["serve", "bundled"],
    ],
    ids=lambda command: command[0],
)
def test_what_only_boxes_do_says_what_to_install(laptop: Laptop, command: list[str]) -> None:
    done = laptop.run("p2pserve", *command)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("p2pserve: error: only the client is installed here")
    assert done.stderr.count("\n") == 1


def test_it_asks_a_network_and_is_a_gateway_to_it(laptop: Laptop) -> None:
    async def main() -> None:
        async with open_box(watch_memory=False) as box:
            await box.start_fork_server(1, backend="emulated")
            bootstrap = await box.start_bootstrap("kv4")
            await box.join(1, bootstrap.tokens["leader"], ["--emulate", "4xA40", "--model", "llama-30b"])
            token = bootstrap.tokens["client"]
            ask = ["generate", "--bootstrap", token, "--max-tokens", "3", "--format", "json", "--timeout-s", "60", "hi"]
            done = await trio.to_thread.run_sync(laptop.run, "p2pserve", *ask)
            assert done.returncode == 0, done.stderr
            assert len(json.loads(done.stdout)["tokens"]) == 3
            done = await trio.to_thread.run_sync(laptop.run, "p2pserve", "status", "--bootstrap", token)
            assert "llama-30b" in done.stdout
            for seeing in ("topology", "events"):
                done = await trio.to_thread.run_sync(laptop.run, "p2pserve", seeing, "--bootstrap", token)
                assert done.returncode == 0, done.stderr
            await trio.to_thread.run_sync(be_a_gateway, laptop, token)

    trio.run(main)


def health_of(where: str) -> int:
    try:
        with urllib.request.urlopen(f"{where}/health", timeout=LIMIT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def be_a_gateway(laptop: Laptop, token: str) -> None:
    command = [str(laptop.scripts / "p2pserve"), "gateway", "--bootstrap", token, "--http", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--format", "json"], stdout=subprocess.PIPE, text=True, cwd=laptop.folder
    ) as process:
        try:
            assert process.stdout is not None
            where = json.loads(process.stdout.readline())["http"]
            until = time.monotonic() + LIMIT_S
            while (status := health_of(where)) != 200:
                assert status == 503
                assert time.monotonic() < until
        finally:
            process.terminate()
        assert process.wait(LIMIT_S) == 0
