"""What `p2pserve doctor` looks at on a box, without a network."""

import socket
from pathlib import Path

import pytest
import trio

from p2pserve.bootstrap import Address, Identity, NetworkKey, PeerId, Role
from p2pserve.bootstrap.trust.tokens import Bootstrap, issue_token
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.box.home import lock_home
from p2pserve.node.requests.gateway_choice import GatewayCandidate
from p2pserve.sdk.doctor import probing
from p2pserve.sdk.doctor.checks import ModelFound


def test_memory_is_what_a_container_leaves(tmp_path: Path) -> None:
    without = probing.available_memory(tmp_path)
    assert without > 0
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert probing.available_memory(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert probing.available_memory(tmp_path) > 3000


def test_a_home_is_looked_at_and_not_made(tmp_path: Path) -> None:
    home = tmp_path / "a" / "node"
    assert probing.find_home(home) == (None, None)
    assert not home.parent.exists()
    (tmp_path / "file").write_text("")
    assert probing.find_home(tmp_path / "file" / "node") == (None, f"{tmp_path / 'file'} is no folder")
    with lock_home(home):
        pid, problem = probing.find_home(home)
    assert pid is not None
    assert problem is None


def test_the_key_in_a_home_is_read_and_not_made(tmp_path: Path) -> None:
    assert probing.find_own_peer(tmp_path) is None
    assert not list(tmp_path.iterdir())
    identity = Identity.load_or_create(tmp_path)
    assert probing.find_own_peer(tmp_path) == identity.peer_id
    (tmp_path / Identity.FILE).write_text("no key")
    assert probing.find_own_peer(tmp_path) is None


def test_a_port_that_is_taken_is_found() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        problem = trio.run(probing.find_port_problem, Address("127.0.0.1", taken.getsockname()[1]))
    assert problem is not None
    assert "in use" in problem
    assert trio.run(probing.find_port_problem, Address("127.0.0.1", 0)) is None


def test_nobody_at_an_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        member = Bootstrap("127.0.0.1", free.getsockname()[1])
        [found] = trio.run(probing.ask_members, [member], 5.0)
    assert found.member == member
    assert "nobody listens there" in found.problem


def test_tokens_and_addresses(tmp_path: Path) -> None:
    key = NetworkKey.load_or_create(tmp_path)
    member = Bootstrap("203.0.113.7", 4001)
    text = issue_token(key.sign, key.public, (member,), Role.WORKER, 2e9)
    token, members = probing.read_token(text, None)
    assert not isinstance(token, str)
    assert members == (member,)
    assert "give the join token" in str(probing.read_token("203.0.113.7:4001", None)[0])
    assert "malformed" in str(probing.read_token("p2p_worker_x", None)[0])


@pytest.mark.parametrize(("name", "says"), [("/nowhere", "no such folder"), ("bundled", "")])
def test_a_model_is_found_as_joining_finds_it(name: str, says: str) -> None:
    found = probing.find_model(name, Hardware(cores=2, memory_gib=16.0, processor="x"))
    if says:
        assert says in str(found)
        return
    assert isinstance(found, ModelFound)
    assert not isinstance(found.share, str)
    assert found.share.layers == found.info.layers
    assert found.missing_bytes == 0
    small = probing.find_model(name, Hardware(cores=2, memory_gib=0.01, processor="x"))
    assert isinstance(small, ModelFound)
    assert "not one of its" in str(small.share)


def test_members_on_the_same_box_say_nothing_of_the_way_to_it() -> None:
    """They are the nearest, and what they carry goes through no router."""
    seen = {"a": 0.1, "b": None, "c": 0.001}
    members = [GatewayCandidate(peer=PeerId(peer), advert=None, rtt_s=rtt_s) for peer, rtt_s in seen.items()]
    hosts = {PeerId("a"): "8.8.8.8", PeerId("b"): "name.example.org", PeerId("c"): "11.0.0.2"}
    assert probing.choose_neighbours(members, hosts, {"11.0.0.2", "::1"}) == ["a", "b"]
    assert probing.choose_neighbours(members, hosts, {"10.0.0.2", "name.example.org"}) == ["c", "a", "b"]
    assert probing.choose_neighbours(members[2:], hosts, {"11.0.0.2"}) == ["c"]
