"""What a client is made of: it imports none of what only nodes need, and nothing that only Unix has."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from p2pserve.sdk.failures import explain

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

NODES_ONLY = (
    *("numpy", "scipy", "psutil", "tokenizers", "jinja2", "huggingface_hub", "safetensors", "pynvml", "torch", "vllm"),
    *("libp2p", "multiaddr", "google", "grpc", "nicegui", "fastapi", "uvicorn", "PIL", "yaml", "prometheus_client"),
)
UNIX_ONLY = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "curses", "_posixshmem")
UNIX_NAMES = {
    "os": ("fork", "sched_getaffinity", "register_at_fork", "getuid", "geteuid", "mkfifo", "setsid", "killpg"),
    "signal": ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGCHLD", "SIGSTOP", "setitimer", "pthread_sigmask"),
    "socket": ("AF_UNIX", "send_fds", "recv_fds", "SO_REUSEPORT", "socketpair"),
}

PROGRAM = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import trio  # which knows the systems; what it took of the names below it has
for module, names in {names!r}.items():
    for name in names:
        if hasattr(__import__(module), name):
            delattr(__import__(module), name)
{program}
"""

EVERYTHING = """
import p2pserve
from p2pserve import *
import p2pserve.bootstrap.streams.dialling, p2pserve.bootstrap.join_targets, p2pserve.node.http.front
import p2pserve.sdk.failures, p2pserve.sdk.cli, p2pserve.sdk.actions.gateway, p2pserve.sdk.actions.network
import p2pserve.sdk.commands.network, p2pserve.sdk.commands.completion
import p2pserve.sdk.actions.chat, p2pserve.sdk.seeing.actions, p2pserve.sdk.live.running_plan
for name in p2pserve.__all__:
    getattr(p2pserve, name)
print("fine")
"""


def run(program: str, *absent: str) -> str:
    code = PROGRAM.format(absent=set(absent), names=UNIX_NAMES, program=program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip() or done.stderr.strip()[-500:]


def test_a_client_imports_nothing_of_nodes_and_of_unix() -> None:
    assert run(EVERYTHING, *NODES_ONLY, *UNIX_ONLY) == "fine"


def test_the_check_finds_what_is_imported() -> None:
    assert "No module named 'fcntl'" in run("import p2pserve.node.box.home", "fcntl")
    assert "No module named 'numpy'" in run("from p2pserve.coordinator import Router", "numpy")


def test_errors_of_a_client_are_explained_without_the_rest() -> None:
    program = """
from p2pserve.sdk.failures import explain
from p2pserve import InvalidRequest, ConnectionFailed
found = [ExceptionGroup("", [InvalidRequest("top_p: no")]), ConnectionFailed("gone"), KeyError()]
print(*map(explain, found))
print("numpy" in sys.modules)
"""
    assert run(program, *NODES_ONLY) == "(2, 'top_p: no') (1, 'gone') None\nFalse"


def test_what_is_not_installed_is_said_in_a_line() -> None:
    found = [explain(ModuleNotFoundError("no", name=name)) for name in ("numpy.linalg", "fcntl", "nonsense")]
    assert found[0] is not None
    assert found[0][0] == 2
    assert "make setup for all of it, or pip install '.[node]' to plan" in found[0][1]
    assert found[1] is not None
    assert "run on Linux" in found[1][1]
    assert found[2] is None


def test_what_a_client_imports_is_what_it_is_installed_with() -> None:
    """Each requirement is for the client; what nodes need stands in an extra."""
    names = {re.split(r"[<>=!~;\[ ]", each)[0].lower() for each in PROJECT["dependencies"]}
    assert names.isdisjoint(name.lower() for name in NODES_ONLY)
    loaded = set(run(EVERYTHING.replace('"fine"', "*sys.modules")).split())
    for module, package in {"base58": "base58", "cryptography": "cryptography", "h11": "h11", "msgpack": "msgpack",
                            "msgspec": "msgspec", "noise": "noiseprotocol", "sniffio": "sniffio",
                            "trio": "trio"}.items():  # fmt: skip
        assert module in loaded, module
        assert package in names, package


def test_all_that_only_nodes_need_is_absent_in_these_tests() -> None:
    names = {re.split(r"[<>=!~;\[ ]", each)[0] for each in PROJECT["optional-dependencies"]["node"]}
    modules = {"nvidia-ml-py": "pynvml"}
    assert {modules.get(name, name) for name in names} <= set(NODES_ONLY)


@pytest.mark.parametrize("extra", ["node", "gpu", "cpu"])
def test_extras_hold_what_nodes_need(extra: str) -> None:
    found = " ".join(PROJECT["optional-dependencies"][extra])
    assert "numpy" in found or "p2pserve[node]" in found


def test_every_module_can_be_read_by_the_oldest_python() -> None:
    for path in (ROOT / "sdk").rglob("*.py"):
        ast.parse(path.read_text("utf-8"), feature_version=(3, 11))
