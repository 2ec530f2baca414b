"""Letters from one thread to a consumer of any kind."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import trio

from p2pserve.sdk.mailbox import Mailbox, MailboxClosed

Runner = Callable[[Callable[[], Awaitable[list[int]]]], list[int]]


def run_asyncio(function: Callable[[], Awaitable[list[int]]]) -> list[int]:
    async def main() -> list[int]:
        return await function()

    return asyncio.run(main())


@pytest.mark.parametrize("run", [trio.run, run_asyncio], ids=["trio", "asyncio"])
def test_a_task_takes_letters_of_another_thread_in_order(run: Runner) -> None:
    mailbox: Mailbox[int] = Mailbox()
    asked = threading.Event()

    def write() -> None:
        asked.wait(5)
        for item in range(100):
            mailbox.put(item)
        mailbox.close()

    async def read() -> list[int]:
        asked.set()
        found = []
        while True:
            try:
                found.append(await mailbox.take_async())
            except MailboxClosed:
                return found

    thread = threading.Thread(target=write)
    thread.start()
    assert run(read) == list(range(100))
    thread.join()


def test_a_thread_takes_letters_of_another_thread_in_order() -> None:
    mailbox: Mailbox[int] = Mailbox()
    threads = [threading.Thread(target=partial(mailbox.put, 1)), threading.Thread(target=mailbox.close)]
    for thread in threads:
        thread.start()
        thread.join()
    assert mailbox.take() == 1
    with pytest.raises(MailboxClosed):
        mailbox.take()


def test_a_sleeping_thread_is_woken_by_a_letter_and_by_the_end() -> None:
    mailbox: Mailbox[str] = Mailbox()
    taken: list[str] = []

    def read() -> None:
        taken.append(mailbox.take())
        with pytest.raises(MailboxClosed):
            mailbox.take()
        taken.append("end")

    thread = threading.Thread(target=read)
    thread.start()
    mailbox.put("a")
    mailbox.close()
    thread.join(5)
    assert taken == ["a", "end"]


def test_letters_come_before_the_error_and_the_first_close_counts() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    mailbox.close(ValueError("first"))
    mailbox.close()
    mailbox.put(2)
    assert mailbox.take() == 1
    with pytest.raises(ValueError, match="first"):
        mailbox.take()


def test_a_letter_after_the_loop_has_ended_is_no_error() -> None:
    for run in (trio.run, run_asyncio):
        mailbox: Mailbox[int] = Mailbox()

        async def give_up(mailbox: Mailbox[int] = mailbox) -> list[int]:
            waiter = mailbox.take_async()
            waiter.send(None)  # asleep, like a task that the end of its loop abandons
            waiter.close()
            return []

        run(give_up)
        mailbox.put(1)
        assert mailbox.take() == 1


def test_a_task_without_a_loop_is_told_what_is_needed() -> None:
    mailbox: Mailbox[int] = Mailbox()
    with pytest.raises(RuntimeError, match="runs under trio and asyncio"):
        mailbox.take_async().send(None)


def test_closing_from_within_a_put_does_not_block() -> None:
    """The garbage collector may run a finaliser in the middle of anything: here, at each line."""
    lines: list[int] = []

    def close(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code is not Mailbox.put.__code__:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            mailbox.close()
        return close

    mailbox: Mailbox[int] = Mailbox()
    before = sys.gettrace()
    sys.settrace(close)
    try:
        mailbox.put(1)
    finally:
        sys.settrace(before)
    assert len(lines) > 3
    assert "closed" in repr(mailbox)
