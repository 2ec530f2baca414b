"""The owner's questions over the socket in a node's home, however long its path is."""

import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from p2pserve.node.box.errors import NodeError, NodeUsageError
from p2pserve.node.box.home import lock_home
from p2pserve.node.owner.answering import answer_owner
from p2pserve.node.owner.messages import Drained
from p2pserve.node.owner.questions import SOCKET, OwnerAnswer, OwnerQuestion, OwnerRefused, ask_node, socket_path


def with_node(home: Path, answer: OwnerAnswer, check: Callable[[], None]) -> list[OwnerQuestion]:
    """What a node in `home` was asked while `check` ran beside it."""
    asked: list[OwnerQuestion] = []

    async def reply(question: OwnerQuestion) -> OwnerAnswer:
        asked.append(question)
        return answer

    async def main() -> None:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer_owner, home, reply, pytest.fail)
                while not (home / SOCKET).exists():  # noqa: ASYNC110 (a file)
                    await trio.sleep(0.01)
                await trio.to_thread.run_sync(check)
                nursery.cancel_scope.cancel()

    with lock_home(home):
        trio.run(main)
    return asked


def test_a_question_is_answered_and_others_of_the_box_cannot_ask(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 30) / "node"  # longer than a socket's address may be
    said = OwnerAnswer(node="n", drained=Drained(draining=True, since=1.0, requests=3, left_s=4.0))

    def check() -> None:
        assert ask_node(home, OwnerQuestion(box="b", draining=False)) == said
        assert stat.S_IMODE((home / SOCKET).stat().st_mode) == 0o600

    assert with_node(home, said, check) == [OwnerQuestion(box="b", draining=False)]
    assert not (home / SOCKET).exists()


@pytest.mark.parametrize(
    ("fault", "kind"), [("usage", NodeUsageError), ("refused", OwnerRefused), ("failed", NodeError), ("?", NodeError)]
)
def test_a_refusal_says_whose_fault_it_is(tmp_path: Path, fault: str, kind: type[NodeError]) -> None:
    def check() -> None:
        with pytest.raises(NodeError, match="why not") as caught:
            ask_node(tmp_path, OwnerQuestion())
        assert type(caught.value) is kind

    with_node(tmp_path, OwnerAnswer(failed="why not", fault=fault), check)


@pytest.mark.parametrize("line", [b"\xff\xfe\n", b"{}", b'{"later": 1}\n', b"[" * 20_000])
def test_what_is_no_question_is_told_so_and_costs_nothing_else(tmp_path: Path, line: bytes) -> None:
    said = OwnerAnswer(node="n")

    def check() -> None:
        with socket_path(tmp_path) as path, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(path)
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.makefile("rb").readline()
        assert b"does not understand" in answer or line == b"{}"
        assert ask_node(tmp_path, OwnerQuestion()) == said

    with_node(tmp_path, said, check)


def test_without_a_node_or_its_socket_the_error_names_the_home(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=f"home {tmp_path}: no node is running there"):
        ask_node(tmp_path, OwnerQuestion())
    with lock_home(tmp_path), pytest.raises(NodeError, match=f"home {tmp_path}: the node there cannot be asked"):
        ask_node(tmp_path, OwnerQuestion())


def test_a_socket_that_a_killed_node_has_left_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left, socket_path(tmp_path) as path:
        left.bind(path)
    said = OwnerAnswer(node="n")

    def check() -> None:
        trio.from_thread.run(trio.testing.wait_all_tasks_blocked)
        assert ask_node(tmp_path, OwnerQuestion()) == said

    with_node(tmp_path, said, check)
