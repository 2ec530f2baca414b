"""Boxes that host what they are given, as processes with emulated engines: a catalogue that is added to, removed from
and survives a restart of everybody, and clients that ask meanwhile."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from p2pserve import Client
from p2pserve.sdk import InvalidRequest
from p2pserve.sdk.cli import main

from ..node.api.servers import free_port
from .test_replicas import Command, tokens, wait_until

__all__ = ["tokens"]

pytestmark = [pytest.mark.beside, pytest.mark.timeout(400)]

PROMPT = "def fibonacci(n):"
BOX = ("--listen", "127.0.0.1:0", "--drain-s", "15", "--sweep-s", "0")
ANY = ("--emulate", "1xA40", *BOX)
Said = pytest.CaptureFixture[str]


@contextmanager
def boxes(folder: Path, token: str, *options: tuple[str, ...]) -> Iterator[list[Command]]:
    with ExitStack() as stack:
        started = []
        for number, each in enumerate(options):
            home = folder / f"box-{number}"
            home.mkdir(exist_ok=True)
            command = Command(home, "join", "--home", str(home), *each, token=token)
            stack.callback(command.end)
            started.append(command)
        yield started


@contextmanager
def asking(client_token: str, service: str) -> Iterator[list[str]]:
    """A client that asks one request after the other while the body runs, none of which may fail."""
    answers: list[str] = []
    failed: list[BaseException] = []
    is_over = threading.Event()

    def ask() -> None:
        try:
            with closing(Client(client_token)) as client:
                while not is_over.is_set():
                    answers.append(client.generate(PROMPT, max_tokens=40, service=service, deadline_s=120).text)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        for thread in threads:
            thread.join(150)
    assert not failed
    assert len(set(answers)) == 1


def change(*arguments: str, token: str, code: int = 0) -> None:
    assert main(["models", *arguments, "--bootstrap", token]) == code


def listed(token: str, capsys: Said) -> dict[str, Any]:
    """What `models list` says, by what requests call it."""
    capsys.readouterr()
    assert main(["models", "list", "--format", "json", "--bootstrap", token]) == 0
    return {each["entry"] or each["service"]: each for each in json.loads(capsys.readouterr().out)}


def ready(token: str, capsys: Said) -> dict[str, int]:
    """How many boxes serve each."""
    return {name: each["ready"] for name, each in listed(token, capsys).items()}


def test_boxes_host_what_the_catalogue_has_and_no_request_fails_while_they_change(
    tmp_path: Path, tokens: dict[str, str], capsys: Said
) -> None:
    admin, client, http = tokens["admin"], tokens["client"], f"127.0.0.1:{free_port()}"
    with boxes(tmp_path, tokens["worker"], ANY, (*ANY, "--http", http)) as (one, two):
        change("add", "chat", "--model", "llama-7b", "--weight", "2", token=admin)
        wait_until(lambda: ready(client, capsys) == {"chat": 2}, one)
        with asking(client, "chat") as answers:
            change("add", "code", "--model", "qwen2-7b", token=admin)
            wait_until(lambda: ready(client, capsys) == {"chat": 1, "code": 1}, one)
            with closing(Client(client)) as asked:
                assert asked.generate(PROMPT, max_tokens=4, service="code").text
                assert asked.generate(PROMPT, max_tokens=4, service="qwen2-7b").text
            count = len(answers)
            wait_until(lambda: len(answers) > count + 2, one)
        change("add", "none", "--model", "llama3-70b", token=admin)
        wait_until(lambda: "none cannot be hosted here" in one.err.read_text() + two.err.read_text(), one)
        url = f"http://{http}/v1"
        names = {each["id"] for each in httpx.get(f"{url}/models", timeout=30).json()["data"]}
        assert {"chat", "code"} <= names
        assert "none" not in names
        assert status_of(url, "none") == (503, True)
        assert status_of(url, "prose") == (404, False)

        change("remove", "code", token=admin)
        wait_until(lambda: ready(client, capsys) == {"chat": 2, "none": 0}, one)
        assert status_of(url, "code") == (404, False)
        with closing(Client(client)) as asked, pytest.raises(InvalidRequest, match=r"nobody serves .*; this network"):
            asked.generate(PROMPT, max_tokens=4, service="code")
        assert asked_once(client, "chat")


def asked_once(token: str, service: str) -> str:
    with closing(Client(token)) as client:
        return client.generate(PROMPT, max_tokens=4, service=service).text


def status_of(url: str, model: str) -> tuple[int, bool]:
    """Of an answer, and whether it says when to ask again."""
    answer = httpx.post(f"{url}/completions", json={"model": model, "prompt": "x", "max_tokens": 2}, timeout=60)
    return answer.status_code, "retry-after" in answer.headers


def test_the_catalogue_outlives_everybody_and_a_box_with_a_model_of_its_own_keeps_it(
    tmp_path: Path, capsys: Said
) -> None:
    own = ("--emulate", "1xA40", "--model", "llama-7b", *BOX)
    first, text = ["bootstrap", "--home", str(tmp_path / "b"), "--listen", "127.0.0.1:0", "--format", "json"], []
    for life in range(2):
        boot = Command(tmp_path, *first)
        try:
            wait_until(lambda: bool(boot.greetings()), boot)  # noqa: B023 (called here)
            found = boot.greetings()[0]["tokens"]
            with boxes(tmp_path, found["worker"], own, (*ANY, "--not", "chat")) as (pinned, free):
                if life == 0:
                    change("add", "chat", "--model", "llama-7b", "--slo", "5x", token=found["admin"])
                    change("add", "code", "--model", "qwen2-7b", token=found["admin"])
                wait_until(lambda: ready(found["client"], capsys) == {"chat": 1, "code": 1}, free)  # noqa: B023 (called here)
                assert listed(found["client"], capsys)["chat"]["slo"] == "5x"
                text.append(asked_once(found["client"], "chat"))
                assert re.search(r"chat cannot be hosted here: its owner has said --not", free.err.read_text())
                assert "hosted" not in pinned.err.read_text()
        finally:
            boot.end()
    assert text[0] == text[1]
