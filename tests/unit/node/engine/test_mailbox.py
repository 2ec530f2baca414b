"""What an engine says to its agent, when that reads and when it does not."""

import queue
import socket

from p2pserve.node.engine import protocol
from p2pserve.node.engine.mailbox import Outbox, await_message

STATS = protocol.EngineStats(0, 0, 0.0, 0)


def step(number: int, size: int = 0) -> protocol.Step:
    return protocol.Step(outputs=(protocol.NewTokens(f"{number}", (1,) * size),), stats=STATS)


def test_what_an_agent_reads_late_comes_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        outbox = Outbox(ours)
        sent = [step(0), *(step(number, 100_000) for number in range(1, 20)), step(20)]
        for message in sent:
            outbox.send(message)  # more than any socket buffer holds, and nobody reads yet
        unframer, heard = protocol.Unframer(), list[protocol.FromEngine]()
        while len(heard) < len(sent):
            heard += [protocol.from_engine.decode(body) for body in unframer.feed(theirs.recv(1 << 20))]
        assert heard == sent
        outbox.flush()
        outbox.send(step(21))
        assert [protocol.from_engine.decode(body) for body in unframer.feed(theirs.recv(1 << 20))] == [step(21)]


def test_what_the_kernel_takes_is_there_when_send_returns() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        Outbox(ours).send(step(1))
        assert protocol.Unframer().feed(theirs.recv(1 << 20))


def test_a_worker_tells_of_its_weights_whole_or_not_at_all_and_waits_for_nobody() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        outbox = Outbox(ours)
        outbox._lock.acquire()  # as a thread may have that is not there after the fork
        told = 0
        while told < 5000:  # far more than a socket buffer holds
            told += 1
            outbox.tell_worker_weights(1, 2, told, 5000)
        outbox.tell_worker_weights(1, 2, 0, 0)
        theirs.setblocking(False)
        unframer, heard = protocol.Unframer(), list[protocol.FromEngine]()
        while heard[-1:] != [protocol.Starting(part="warm-up", worker=1, workers=2)]:
            try:
                data = theirs.recv(1 << 20)
            except BlockingIOError:
                outbox.tell_worker_weights(1, 2, 0, 0)
                continue
            heard += [protocol.from_engine.decode(body) for body in unframer.feed(data)]
        files = [said.file for said in heard[:-1] if isinstance(said, protocol.Starting)]
        assert files == list(range(1, len(files) + 1))
        assert len(files) < 5000


def test_whoever_waits_rests_once_until_the_next_message() -> None:
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
    rests = []

    def rest() -> None:
        rests.append(inbox.empty())
        inbox.put("late")

    inbox.put("at once")
    assert await_message(inbox, 60.0, rest) == "at once"
    assert rests == []
    assert await_message(inbox, 0.01, rest) == "late"
    assert rests == [True]
