"""Every way to be wrong on the command line ends in one line, the right exit code, and no traceback."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from p2pserve.node.box.start_checks import installed_build

from ..node.engine.figures import measured_again

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "p2pserve.sdk.cli"]
WAIT_LIMIT_S = 120.0

pytestmark = [pytest.mark.beside, pytest.mark.timeout(400)]


def environment() -> dict[str, str]:
    kept = {"P2PSERVE_HOME", "P2PSERVE_CONFIG"}
    return {key: value for key, value in os.environ.items() if key in kept or not key.startswith("P2PSERVE_")}


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        cwd=ROOT,
        env=environment(),
        timeout=WAIT_LIMIT_S,
        check=False,
    )


def fails(code: int, *arguments: str, says: str, stdin: bytes = b"") -> None:
    done = run(*arguments, stdin=stdin)
    errors = done.stderr.decode()
    assert done.returncode == code, errors
    # A node is told beside its start what of the box is unfit, which may come first.
    *unfit, error = errors.splitlines()
    assert all(line.startswith("gpu: ") for line in unfit), errors
    assert error.startswith("p2pserve: error: ")
    assert "Traceback" not in errors
    assert says in errors
    assert done.stdout == b""


@dataclass
class Running:
    """A bootstrap process and what it has printed."""

    process: subprocess.Popen[bytes]
    address: str
    tokens: dict[str, str]

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=WAIT_LIMIT_S)
        return self.process.returncode


def start_bootstrap(home: Path, listen: str = "127.0.0.1:0") -> Running:
    process = subprocess.Popen(
        [*COMMAND, "bootstrap", "--home", str(home), "--listen", listen, "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env=environment(),
    )
    assert process.stdout is not None
    greeting = json.loads(process.stdout.readline())
    return Running(process, greeting["address"], greeting["tokens"])


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A bootstrap without engines; it must leave in order when the tests are over."""
    running = start_bootstrap(tmp_path_factory.mktemp("network"))
    yield running
    assert running.stop() == 0


@pytest.fixture
def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_help_is_quick_because_it_loads_nothing() -> None:
    heavy = {"torch", "libp2p", "vllm", "trio", "rich", "msgspec", "tokenizers"}
    code = f"import sys; from p2pserve.sdk.cli import main; main(['--help']); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True)
    assert done.stdout.endswith(b"set()\n")
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("redirection", "says"),
    [(">&-", "output: standard output is closed"), (">/dev/full", "output: it cannot be written: No space left")],
)
@pytest.mark.parametrize("command", ["--help", "status", "status --format json"])
def test_output_that_goes_nowhere(network: Running, command: str, redirection: str, says: str) -> None:
    words = f"exec {shlex.join(COMMAND)} {command} {redirection}"
    variables = {**environment(), "P2PSERVE_BOOTSTRAP": network.tokens["client"]}
    done = subprocess.run(["sh", "-c", words], capture_output=True, cwd=ROOT, env=variables, check=False)
    assert done.returncode == 1
    assert done.stderr.decode().startswith(f"p2pserve: error: {says}")
    assert done.stderr.count(b"\n") == 1


def test_version() -> None:
    assert run("--version").stdout.startswith(b"p2pserve 0.")


@pytest.mark.parametrize("command", [["status"], ["generate", "x"], ["join", "--listen", "127.0.0.1:0"]])
def test_nobody_at_the_address(command: list[str], free_port: str, tmp_path: Path) -> None:
    home = ["--home", str(tmp_path)] if command[0] == "join" else ["--timeout-s", "1"]
    model = ["--model", _not_needed(tmp_path)] if command[0] == "join" else []
    fails(1, *command, *home, *model, "--bootstrap", f"127.0.0.1:{free_port}", says=free_port)


def _not_needed(folder: Path) -> str:
    """A model that passes the checks which need no engine."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 1,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 9,
    }
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_bytes((ROOT / "node" / "bundled" / "tokenizer.json").read_bytes())
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.norm.weight", "lm_head.weight")
    (model / "model.safetensors").write_bytes(save({name: np.zeros(8, np.float16) for name in names}))
    return str(model)


def test_a_token_is_missing(network: Running) -> None:
    fails(4, "status", "--bootstrap", network.address, says="wants a token")


@pytest.fixture
def stranger() -> Iterator[str]:
    """An address where somebody listens who is no member of any network."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_only_a_stranger_listens_there(stranger: str, tmp_path: Path) -> None:
    gone = start_bootstrap(tmp_path)  # the token names this member too, and it is away
    token = gone.tokens["client"]
    assert gone.stop() == 0
    fails(1, "status", "--bootstrap", stranger, "--token", token, "--timeout-s", "1", says=stranger)


def test_a_stranger_at_one_address_does_not_hide_the_members_that_the_token_names(
    stranger: str, network: Running
) -> None:
    done = run("status", "--bootstrap", stranger, "--token", network.tokens["client"], "--timeout-s", "20")
    assert done.returncode == 0, done.stderr.decode()
    assert b"clients of the answering node: 1" in done.stdout


def test_a_token_of_another_network(tmp_path: Path) -> None:
    before = start_bootstrap(tmp_path)
    assert before.stop() == 0
    (tmp_path / "bootstrap" / "network.key").unlink()
    after = start_bootstrap(tmp_path, before.address)
    try:
        done = run("status", "--bootstrap", before.tokens["client"], "--timeout-s", "2")
        assert done.returncode in (2, 4)
        assert b"another network" in done.stderr
        assert done.stderr.count(b"\n") == 1
        assert run("status", "--bootstrap", after.tokens["client"]).returncode == 0
    finally:
        after.stop()


def test_a_worker_token_is_no_client_token_and_the_other_way_round(network: Running, tmp_path: Path) -> None:
    fails(2, "status", "--bootstrap", network.tokens["worker"], says="worker's token")
    arguments = ["--home", str(tmp_path), "--listen", "127.0.0.1:0", "--model", _not_needed(tmp_path)]
    fails(2, "join", *arguments, "--bootstrap", network.tokens["client"], says="client's token")


def test_a_port_in_use(network: Running, tmp_path: Path) -> None:
    fix = "is in use; stop what holds it, or name another one (--listen)"
    fails(1, "bootstrap", "--home", str(tmp_path), "--listen", f"127.0.0.1:{network.port}", says=fix)
    fails(
        1,
        "join",
        *["--home", str(tmp_path), "--listen", f"127.0.0.1:{network.port}"],
        *["--model", _not_needed(tmp_path), "--bootstrap", network.tokens["worker"]],
        says="is in use",
    )


def test_an_address_that_is_not_of_this_box(tmp_path: Path) -> None:
    fails(2, "bootstrap", "--home", str(tmp_path), "--listen", "192.0.2.1:4001", says="192.0.2.1")


@pytest.mark.parametrize("where", ["nonsense", "a b:4001", "[::1:4001", "host:port", "p2p_client_xyz", "p2p_worker_"])
def test_a_malformed_address_or_token(where: str, tmp_path: Path) -> None:
    fails(2, "status", "--bootstrap", where, says="")
    if where in ("nonsense", "p2p_client_xyz"):
        arguments = ["--home", str(tmp_path), "--model", _not_needed(tmp_path), "--listen", "127.0.0.1:0"]
        fails(2, "join", *arguments, "--bootstrap", where, says="")


def test_a_model_that_is_none(network: Running, tmp_path: Path) -> None:
    arguments = ["join", "--home", str(tmp_path / "home"), "--listen", "127.0.0.1:0"]
    arguments += ["--bootstrap", network.tokens["worker"], "--model"]
    fails(2, *arguments, str(tmp_path / "missing"), says="no such folder")
    fails(2, *arguments, str(tmp_path), says="config.json")
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    fails(2, *arguments, str(tmp_path), says="not a causal language model")


GPU_BOX = """
from types import SimpleNamespace

class NVMLError(Exception):
    pass

def refuse(handle):
    raise NVMLError("not supported")

nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 2
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetName = lambda handle: "NVIDIA A40"
nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=45 * 2**30)
nvmlDeviceGetMigMode = refuse
"""


@pytest.mark.parametrize("command", [["selftest"], ["demo"], ["bootstrap", "--model", "bundled"]])
def test_an_engine_for_processors_on_a_box_with_gpus(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = installed_build()
    if build is None or build.device != "cpu":
        pytest.skip("another engine is installed")
    (tmp_path / "pynvml.py").write_text(GPU_BOX)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    home = ["--home", str(tmp_path / "home"), "--listen", "127.0.0.1:0"] if command[0] == "bootstrap" else []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fails(1, *command, *home, says=f"engine: this box has 2x NVIDIA A40 (45 GiB), and {build} serves from processors")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7")
    fails(1, *command, *home, says="CUDA_VISIBLE_DEVICES: '7' in '0,7' is no GPU of this box")


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        ([""], b"", "prompt: it is empty"),
        (["-"], b"", "prompt: it is empty"),
        (["-"], b"caf\xe9", "not UTF-8"),
        (["-"], b"x" * (3 * 2**20 + 1), "at most"),
        (["--messages", "-"], b"[{]", "not JSON"),
        (["x", "--max-tokens", "-5"], b"", "max_tokens: -5"),
        (["x", "--temperature", "nan"], b"", "temperature: nan"),
        (["x", "--top-p", "2"], b"", "top_p"),
        (["x", "--deadline-s", "inf"], b"", "deadline_s"),
    ],
)
def test_a_request_that_is_none(network: Running, arguments: list[str], stdin: bytes, says: str) -> None:
    fails(2, "generate", *arguments, "--bootstrap", network.tokens["client"], stdin=stdin, says=says)


def test_a_network_without_a_model_and_its_status(network: Running) -> None:
    where = ["--bootstrap", network.tokens["client"]]

    def check() -> None:  # it has to join in that time
        fails(3, "generate", "x", *where, "--timeout-s", "3", says="serves a model")

    measured_again(check)
    page = run("status", *where)
    assert page.returncode == 0
    assert b"plan: none yet" in page.stdout
    found = json.loads(run("status", *where, "--format", "json").stdout)
    assert found["coordinator"] == found["answered_by"]


def test_a_second_signal_is_not_needed_and_leave_works(tmp_path: Path) -> None:
    running = start_bootstrap(tmp_path)
    fails(1, "bootstrap", "--home", str(tmp_path), "--listen", "127.0.0.1:0", says="is running there already")
    done = run("leave", "bootstrap", "--home", str(tmp_path))
    assert done.returncode == 0
    assert (done.stdout, done.stderr) == (b"the bootstrap of this box has left its network\n", b"")
    running.process.communicate(timeout=WAIT_LIMIT_S)
    assert running.process.returncode == 0
    fails(1, "leave", "bootstrap", "--home", str(tmp_path), says="no node is running there")


def test_a_node_drains_and_serves_again_and_its_log_says_so(tmp_path: Path) -> None:
    running = start_bootstrap(tmp_path)
    home = ["--home", str(tmp_path)]
    drained = json.loads(run("drain", "bootstrap", *home, "--format", "json").stdout)
    assert (drained["draining"], drained["requests"]) == (True, 0)
    assert run("drain", drained["node"], *home).stdout.count(b"is draining") == 1  # itself, by its id
    fails(2, "drain", "no-such-box", *home, says="no box is called no-such-box")
    back = run("drain", "bootstrap", "--undo", *home)
    assert (back.returncode, back.stdout.endswith(b" takes new requests\n")) == (0, True)
    lines = [json.loads(line) for line in run("logs", "bootstrap", *home, "--format", "json").stdout.splitlines()]
    told = [line["text"] for line in lines if line["part"] == "node"]
    assert [text for text in told if "new requests" in text] == [
        "draining: takes no new requests; `p2pserve drain --undo` ends that",
        "takes new requests again",
    ]
    assert running.stop() == 0
    fails(1, "drain", "bootstrap", *home, says="no node is running there")


def test_a_price_changes_while_the_node_runs(tmp_path: Path) -> None:
    running = start_bootstrap(tmp_path)
    home = ["--home", str(tmp_path)]
    assert run("price", *home).stdout.endswith(b": no price\n")
    told = json.loads(run("price", "0.35", *home, "--format", "json").stdout)
    assert told["usd_per_hour"] == 0.35
    assert run("price", "--node", "bootstrap", *home).stdout.endswith(b": $0.35/h\n")
    fails(2, "price", "cheap", *home, says="USD: 'cheap' is not a number")
    fails(2, "price", "nan", *home, says="USD")
    seen: list[float] = []
    while 0.35 not in seen:
        status = json.loads(run("status", "--bootstrap", running.tokens["client"], "--format", "json").stdout)
        seen = [node["advert"]["usd_per_hour"] for node in status["nodes"] if node["peer"] == told["node"]]
    assert running.stop() == 0
    fails(1, "price", *home, says="no node is running there")


def test_a_reader_who_has_had_enough(network: Running) -> None:
    command = [*COMMAND, "status", "--bootstrap", network.tokens["client"]]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment()
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(WAIT_LIMIT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
