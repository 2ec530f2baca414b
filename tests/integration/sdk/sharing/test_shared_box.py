"""`join` with two models: a network whose one box serves both, from one process of two vLLM engines, and loses it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from p2pserve import Client
from p2pserve.node.messages import NodeStatus

from ..test_replicas import Command, ready, tokens, wait_until

__all__ = ["tokens"]  # a fixture

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]

TOKENS = 120


def pid_of(node: NodeStatus) -> int:
    assert node.advert is not None
    assert node.advert.engine is not None
    return node.advert.engine.pid


def service_of(node: NodeStatus) -> str:
    assert node.advert is not None
    assert node.advert.model is not None
    return node.advert.model.service


def ask_all(client: Client, services: list[str], each: int, meanwhile: Callable[[], None]) -> dict[str, set[str]]:
    """So many clients of each at once; the different answers of each."""

    def ask(service: str) -> str:
        return client.generate("def fibonacci(n):", service=service, max_tokens=TOKENS).text

    with ThreadPoolExecutor(2 * each) as pool:
        asked = [(service, pool.submit(ask, service)) for _ in range(each) for service in services]
        meanwhile()
        answers = [(service, answer.result(120)) for service, answer in asked]
    return {service: {answer for of, answer in answers if of == service} for service in services}


def test_two_models_share_a_box_and_no_request_is_lost_with_their_process(
    tmp_path: Path, tokens: dict[str, str], random_model: Path
) -> None:
    home = tmp_path / "n"
    models = ("--model", "bundled", "--model", str(random_model))
    box = Command(
        tmp_path, "join", "--home", str(home), "--listen", "127.0.0.1:0", "--drain-s", "5", "--threads", "1",
        "--kv-cache-mib", "128", *models, "--format", "json", token=tokens["worker"],
    )  # fmt: skip
    try:
        with closing(Client(tokens["client"])) as client:
            wait_until(lambda: len(ready(client)) == 2, box)
            nodes = ready(client)
            services = [service_of(node) for node in nodes]
            assert len({*services}) == 2
            (pid,) = {pid_of(node) for node in nodes}
            assert {each for node in nodes if node.advert is not None for each in node.advert.beside} == {
                node.peer for node in nodes
            }

            quiet = ask_all(client, services, 3, lambda: None)
            assert [len(answers) for answers in quiet.values()] == [1, 1]  # greedy, so all the same

            lost = ask_all(client, services, 3, lambda: os.kill(pid, signal.SIGKILL))
            assert lost == quiet
            wait_until(lambda: len(ready(client)) == 2, box)
            (again,) = {pid_of(node) for node in ready(client)}
            assert again != pid
        box.process.send_signal(signal.SIGINT)
        assert box.process.wait(60) == 0
    finally:
        box.end()


def test_what_cannot_be_shared_is_refused(tmp_path: Path, tokens: dict[str, str]) -> None:
    for options, why in (
        (("--model", "bundled", "--model", "bundled"), "each is given once"),
        (("--model", "bundled", "--model", "other", "--tp", "2"), "have one GPU"),
        (("--model", "bundled", "--model", "other", "--replicas", "2"), "are of one model"),
        (("--model", "llama-7b", "--model", "llama-13b", "--emulate", "1xA40"), "--kv-cache-mib"),
    ):
        box = Command(tmp_path, "join", "--home", str(tmp_path / "n"), *options, token=tokens["worker"])
        assert box.process.wait(60) == 2
        assert why in box.err.read_text()
