"""The process that plans, as the agent starts it."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.kvtransport.probing.figures import LinkFigures
from p2pserve.node.messages import LinkTable
from p2pserve.node.planning.services import Coordinator
from p2pserve.node.planning.worker import HURRY, LENGTH, PlannerAnswer, PlannerTask

from .test_coordination import OWN, view_of


@pytest.mark.parametrize(("services", "needs_solver"), [(("x",), False), (("x", "x"), True)])
def test_a_box_alone_is_planned_for_without_a_solver_in_memory(services: tuple[str, ...], needs_solver: bool) -> None:
    task = Coordinator(PeerId(OWN), "raw").next(view_of(*services), (OWN, 1), 0.0)
    assert task is not None
    asked = msgspec.msgpack.encode(PlannerTask(task=task, search_s=1.0))
    command = [sys.executable, "-m", "p2pserve.node.planning.worker", "2048"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(LENGTH.pack(len(asked)) + asked)
        worker.stdin.flush()
        (size,) = LENGTH.unpack(worker.stdout.read(LENGTH.size))
        answer = msgspec.msgpack.decode(worker.stdout.read(size), type=PlannerAnswer)
        mapped = Path(f"/proc/{worker.pid}/maps").read_text()
    assert answer.plan is not None
    assert {peer for replica in answer.plan.replicas for peer in replica.peers} == {box.peer for box in task.boxes}
    assert ("_highspy" in mapped) is needs_solver


def test_a_search_that_is_hurried_ends_with_what_it_has_and_the_next_task_is_searched_for_as_usual() -> None:
    view = view_of(*"xxxx")
    for number, peer in enumerate(view.adverts):  # what one is good at, the next one is not
        each = view.adverts[peer]
        assert each.engine is not None
        figures = {"tflops": 300.0 if number % 2 else 1.0, "memory_gbps": 5.0 if number % 2 else 1000.0}
        view.adverts[peer] = msgspec.structs.replace(each, engine=msgspec.structs.replace(each.engine, **figures))
    over_slow_links = Coordinator(PeerId(OWN), "raw").next(view, (OWN, 1), 0.0)
    assert over_slow_links is not None
    fast = LinkFigures(rtt_s=1e-5, one_stream_gbps=400.0, capacity_gbps=400.0)
    view.links_told = {
        peer: LinkTable(links=dict.fromkeys(view.adverts.keys() - {peer}, fast)) for peer in view.adverts
    }
    plan = over_slow_links.run(lambda: False)
    assert plan is not None
    view.plans[plan.service] = plan
    task = Coordinator(PeerId(OWN), "raw").next(view, (OWN, 1), 0.0)
    assert task is not None
    at_once, searched = task.run(lambda: True), task.run(lambda: False)
    assert at_once != searched
    asked = msgspec.msgpack.encode(PlannerTask(task=task, search_s=60.0))
    command = [sys.executable, "-m", "p2pserve.node.planning.worker", "2048"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        found = []
        for hurry in (HURRY, b"", HURRY + HURRY):
            worker.stdin.write(LENGTH.pack(len(asked)) + asked + hurry)
            worker.stdin.flush()
            (size,) = LENGTH.unpack(worker.stdout.read(LENGTH.size))
            found.append(msgspec.msgpack.decode(worker.stdout.read(size), type=PlannerAnswer).plan)
    assert found == [at_once, searched, at_once]
