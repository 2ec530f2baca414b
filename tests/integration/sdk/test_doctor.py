"""`p2pserve doctor` on this machine, against a network that runs."""

import json
import socket
from collections.abc import Iterator

import pytest

from .test_cli_errors import Running, run, start_bootstrap

pytestmark = [pytest.mark.beside, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start_bootstrap(tmp_path_factory.mktemp("network"))
    yield running
    assert running.stop() == 0


def examine(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = run("doctor", "--format", "json", *arguments)
    assert done.stderr == b""
    found = json.loads(done.stdout)
    assert found["fit"] is (done.returncode == 0)
    return done.returncode, {each["check"]: each for each in found["checks"]}


def test_a_client_sees_members_models_and_clocks(network: Running) -> None:
    _, found = examine("--bootstrap", network.tokens["client"], "--model", "bundled", "--port", "0")
    assert {
        name: found[name]["fitness"] for name in ("python", "model", "member", "network", "clock")
    } == dict.fromkeys(("python", "model", "member", "network", "clock"), "ok")
    assert "Mb/s back" in found["bandwidth"]["found"]
    assert found["served"]["fitness"] == "warning"
    assert "1 box alive" in found["network"]["found"]
    assert "ms away" in found["member"]["found"]


def test_members_dial_the_port_that_a_node_would_listen_on(network: Running) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = ("--bootstrap", network.tokens["client"], "--port", str(port), "--announce")
    _, found = examine(*told, f"127.0.0.1:{port}")
    assert found["reach"]["fitness"] == "ok"
    assert f"members reach port {port} at 127.0.0.1:{port}" in found["reach"]["found"]
    assert "come from" in found["nat"]["found"]
    _, found = examine(*told, "127.0.0.1:1")
    assert found["reach"]["fitness"] == "warning"
    assert f"forward TCP port 1 there to port {port} here" in found["reach"]["fix"]


def test_a_worker_takes_no_place_and_a_port_that_is_taken_fails(network: Running) -> None:
    before = run("status", "--bootstrap", network.tokens["client"], "--format", "json").stdout
    code, found = examine("--bootstrap", network.tokens["worker"], "--port", network.port)
    after = run("status", "--bootstrap", network.tokens["client"], "--format", "json").stdout
    assert code == 1
    assert {found[name]["fitness"] for name in ("token", "places", "network", "clock")} == {"ok"}
    assert "of 256 places left" in found["places"]["found"]
    assert "Mb/s back" in found["bandwidth"]["found"]
    assert "in use" in found["port"]["found"]
    assert [len([n for n in json.loads(text)["nodes"] if n["role"] != "client"]) for text in (before, after)] == [1, 1]


def test_members_dial_a_worker_that_has_not_joined(network: Running) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = ("--bootstrap", network.tokens["worker"], "--port", str(port), "--announce", f"127.0.0.1:{port}")
    _, found = examine(*told)
    assert {found[name]["fitness"] for name in ("places", "reach", "clock")} == {"ok"}


def test_a_token_that_is_none_and_a_model_that_is_nowhere() -> None:
    code, found = examine("--bootstrap", "p2p_worker_x", "--model", "/nowhere")
    assert code == 1
    assert {found[name]["fitness"] for name in ("token", "model")} == {"failed"}
    assert "copy the whole string" in found["token"]["fix"]
