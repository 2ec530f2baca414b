"""Emulated engines: real processes, real links and real bytes; only the time and the tokens are made up."""

from __future__ import annotations

import os
import queue
import random
import secrets
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Phase
from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.kernels.codecs import codec_named
from p2pserve.kernels.format import WireDtype, payload_bytes
from p2pserve.kvtransport.errors import TransferError
from p2pserve.kvtransport.wire.dial_path import DialPath as KvPath
from p2pserve.kvtransport.wire.sockets import read_link_hello
from p2pserve.kvtransport.wire.tickets import issue_link, issue_transfer
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineError, EngineLost, EngineStartError
from p2pserve.node.engine.agent_side.fork_server import open_fork_server
from p2pserve.node.engine.emulated.tokens import EmulatedAnswer
from p2pserve.node.engine.emulated.transfers import ComputedSpan, EmulatedTransfers
from p2pserve.node.engine.trials.trial import Trial, TrialEngine, open_trial

from ...conftest import WAIT_LIMIT_S, open_cluster

pytestmark = pytest.mark.timeout(300)

SHAPE = ModelShape(
    name="small", layers=6, hidden=1024, heads=8, kv_heads=4, head_dim=128, intermediate=4096, vocabulary=1000
)
EMULATION = protocol.Emulation(model=SHAPE, gpu=gpu_table().find("H100"), gpu_link_gbps=100.0, vocabulary=1000)
CONFIG = protocol.EngineConfig(
    model="small", backend="emulated", options=msgspec.to_builtins(EMULATION), max_batched_tokens=256
)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(random.Random(length).choices(range(1, 1000), k=length))


def answer_to(prompt: tuple[int, ...], tokens: int) -> list[int]:
    answer = EmulatedAnswer(prompt, 1000)
    return [answer.next() for _ in range(tokens)]


def on_trial(work: Any) -> None:
    """Run `work(trial)` with a fork server that has no vLLM."""

    async def main() -> None:
        async with open_fork_server(log=None, threads=1, backend="emulated") as server, open_trial(server) as trial:
            with trio.fail_after(WAIT_LIMIT_S):
                await work(trial)

    trio.run(main)


async def transfer_prompt(
    trial: Trial, first: TrialEngine, second: TrialEngine, prompt: tuple[int, ...], codec: str, *, split: int = 0
) -> tuple[Any, protocol.TransferReport]:
    """The prompt, or its first `split` tokens, on one engine, the rest and the answer on the other."""
    given = split or len(prompt)
    send, receive = trial.transfer_ends(trial.join(second), codec, second.ready)
    request = second.submit(prompt, 5, receive=receive, receive_tokens=given)
    first.submit(prompt[:given], 1, send=send)
    return await second.answer(request), await first.report(send[0].ticket.transfer)


def test_kv_of_the_right_size_goes_from_engine_to_engine() -> None:
    async def work(trial: Trial) -> None:
        first, second = await trial.start(CONFIG), await trial.start(CONFIG)
        for length, codec in ((1, "raw"), (200, "kv4"), (900, "raw"), (700, "kv4"), (300, "fp8")):
            prompt = prompt_of(length)
            answer, report = await transfer_prompt(trial, first, second, prompt, codec)
            assert answer.tokens == answer_to(prompt, 5)
            assert answer.cached == length
            assert report.raw_bytes == length * SHAPE.kv_bytes_per_token
            chunks = [min(256, length - start) for start in range(0, length, 256)]
            sizes = [
                payload_bytes(codec_named(codec), WireDtype.BF16, start=256 * n, tokens=tokens, heads=4, head_dim=128)
                for n, tokens in enumerate(chunks)
            ]
            assert sum(report.paths.values()) == SHAPE.layers * sum(sizes)
            assert (report.mode, report.frames) == ("layerwise", SHAPE.layers * len(chunks))
        prompt = prompt_of(500)
        answer, report = await transfer_prompt(trial, first, second, prompt, "kv4", split=333)
        assert (answer.tokens, answer.cached) == (answer_to(prompt, 5), 333)
        assert report.raw_bytes == 333 * SHAPE.kv_bytes_per_token

    on_trial(work)


def test_stages_answer_as_one_engine_and_end_together() -> None:
    async def work(trial: Trial) -> None:
        head, other = await trial.start_stages(CONFIG, (4, 2))
        assert head.ready.engine.startswith("emulated 2 boxes with 1x H100")
        assert (other.ready.layers, head.ready.layers) == (2, SHAPE.layers)
        alone = await trial.start(CONFIG)
        assert head.ready.kv_tokens > alone.ready.kv_tokens
        prompt = prompt_of(300)
        assert (await head.answer(head.submit(prompt, 5))).tokens == answer_to(prompt, 5)
        send, _ = trial.transfer_ends(trial.join(alone), "raw", alone.ready)
        with pytest.raises(EngineError, match="emulated stages transfer no KV"):
            await head.answer(head.submit(prompt, 1, send=send))
        os.kill(other.ready.pid, signal.SIGKILL)
        with pytest.raises(EngineLost, match="stage 2 is lost"):
            await head.until(lambda: False)

    on_trial(work)


def test_stages_with_other_cards_are_refused() -> None:
    async def work(trial: Trial) -> None:
        with pytest.raises(EngineStartError, match=r"stage 2 emulates 2x H100.*emulated stages have the same cards"):
            await trial.start_stages(CONFIG, (3, 3), tp=(1, 2))

    on_trial(work)


def test_a_transfer_all_at_once_and_one_that_is_called_off() -> None:
    async def work(trial: Trial) -> None:
        first, second = await trial.start(CONFIG), await trial.start(CONFIG)
        prompt = prompt_of(600)
        send, receive = trial.transfer_ends(trial.join(second), "raw", second.ready)
        send = tuple(msgspec.structs.replace(outlet, pacing="serialised") for outlet in send)
        request = second.submit(prompt, 5, receive=receive, receive_tokens=600)
        first.submit(prompt, 1, send=send)
        assert (await second.answer(request)).tokens == answer_to(prompt, 5)
        report = await first.report(send[0].ticket.transfer)
        assert (report.mode, report.frames, report.hidden_fraction) == ("serialised", SHAPE.layers, 0.0)

        send, receive = trial.transfer_ends(trial.join(second), "raw", second.ready)
        prompt = tuple(reversed(prompt))  # nothing of it is cached
        transfer = send[0].ticket.transfer
        request = second.submit(prompt, 5, receive=receive, receive_tokens=600)
        assert second.link is not None
        second.link.send(protocol.AbortTransfer(transfer=transfer, reason="the test wants it so"))
        answer = await second.answer(request)
        assert (answer.tokens, answer.cached) == (answer_to(prompt, 5), 0)
        first.submit(prompt, 1, send=send)
        with pytest.raises(TransferError, match="the test wants it so"):
            await first.report(transfer)

    on_trial(work)


def test_prompts_wait_for_the_room_of_kv_that_nobody_has_taken_yet() -> None:
    """Nothing of it is given up; it is free when it was delivered, aborted, or late."""
    room = 1024

    async def work(trial: Trial) -> None:
        narrow = msgspec.structs.replace(CONFIG, kv_cache_mib=room * SHAPE.kv_bytes_per_token >> 20)
        first, second = await trial.start(narrow), await trial.start(CONFIG)
        assert first.ready.kv_tokens == room
        link, prompts = trial.join(second), [(number, *prompt_of(399)) for number in range(1, 7)]
        rates_found = [trial.transfer_ends(link, "raw", second.ready) for _ in range(6)]
        soon = msgspec.structs.replace(rates_found[2][0][0].ticket, deadline_s=1.0)
        rates_found[2] = (msgspec.structs.replace(rates_found[2][0][0], ticket=soon),), ()
        requests = [first.submit(prompt, 1, send=send) for prompt, (send, _) in zip(prompts, rates_found, strict=True)]
        transfers = [send[0].ticket.transfer for send, _ in rates_found]

        async def decode(number: int) -> None:
            prompt, receive = prompts[number], rates_found[number][1]
            answer = await second.answer(second.submit(prompt, 5, receive=receive, receive_tokens=400))
            assert (answer.tokens, answer.cached) == (answer_to(prompt, 5), 400)
            assert (await first.report(transfers[number])).delivered

        def waiting() -> tuple[int, int, int]:
            assert first.stats is not None
            return first.stats.running, first.stats.waiting, first.stats.kv_free_tokens

        for number in (0, 1):
            await first.answer(requests[number])
        await first.until(lambda: waiting() == (0, 4, room - 800))
        assert not first.answers
        await decode(1)  # whichever is delivered: the oldest that waits comes next
        await first.answer(requests[2])
        with pytest.raises(TransferError, match="deadline"):
            await first.report(transfers[2])
        await first.answer(requests[3])
        await first.until(lambda: waiting() == (0, 2, room - 800))
        assert not first.answers
        assert first.link is not None
        first.link.send(protocol.AbortTransfer(transfer=transfers[0], reason="the test wants it so"))
        with pytest.raises(TransferError, match="the test wants it so"):
            await first.report(transfers[0])
        await first.answer(requests[4])
        for number in (3, 4):
            await decode(number)
        await first.answer(requests[5])
        await decode(5)
        await first.until(lambda: waiting() == (0, 0, room))

    on_trial(work)


def test_a_slow_link_slows_down_and_nothing_is_given_up() -> None:
    """Six prompts at once, each larger than all that links may hold."""
    limit, tokens, bytes_s = 2 << 20, 300, 30_000_000
    reports: queue.SimpleQueue[protocol.TransferReport | protocol.LinkReport] = queue.SimpleQueue()
    sender, receiver = (
        EmulatedTransfers(layers=SHAPE.layers, head_dim=SHAPE.head_dim, limit_bytes=limit, report=report)
        for report in (reports.put, lambda _: None)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        path = KvPath("127.0.0.1", listener.getsockname()[1], pace_bytes_s=bytes_s)
        link = issue_link(600.0, secrets.token_bytes)
        whole = protocol.KvSlice(first_layer=0, last_layer=SHAPE.layers, first_head=0, last_head=SHAPE.kv_heads)
        ended, whole_prompts = threading.Semaphore(0), threading.Semaphore(0)
        arrivals = []
        for _ in range(6):
            ticket = issue_transfer(link.link, "raw", WAIT_LIMIT_S, secrets.token_bytes)
            inlet = protocol.Inlet(slice=whole, ticket=ticket, link=link)
            arrivals.append(receiver.expect([inlet], tokens, whole_prompts.release))
            outlet = protocol.Outlet(slice=whole, ticket=ticket, link=link, paths=(path,), gbps=1.0, rtt_s=0.001)
            sender.send([outlet], ended.release)
            now = time.monotonic()
            sender.send_span(ticket.transfer, ComputedSpan(0, tokens, now, now, final=True))
        connection, _ = listener.accept()
        receiver.attach(read_link_hello(connection, WAIT_LIMIT_S).pack(), connection)
        for each in reversed(arrivals):  # whoever has a place first goes first, whatever was computed first
            each.start()
        held = 0
        while any(each.progress()[0] < 1.0 for each in arrivals):
            held = max(held, sender.endpoint.budget.held)
            time.sleep(0.001)
        for count in (ended, whole_prompts):
            assert all(count.acquire(timeout=WAIT_LIMIT_S) for _ in arrivals)
    assert 0 < held <= limit
    told = [reports.get_nowait() for _ in range(reports.qsize())]
    found = [report for report in told if isinstance(report, protocol.TransferReport)]
    assert [report.reason for report in found] == [""] * 6
    assert sum(report.raw_bytes for report in found) == 6 * tokens * SHAPE.kv_bytes_per_token > 6 * limit
    for end in (sender, receiver):
        end.endpoint.close("the test is over")


def test_workers_of_different_widths() -> None:
    """Four workers send to two: each pair of heads on a link of its own."""

    async def work(trial: Trial) -> None:
        wide = await trial.start(msgspec.structs.replace(CONFIG, tp=4))
        narrow = await trial.start(msgspec.structs.replace(CONFIG, tp=2))
        send: list[protocol.Outlet] = []
        receive: list[protocol.Inlet] = []
        transfer = b""
        for rank in range(4):
            (outlet,), (inlet,) = trial.transfer_ends(trial.join(narrow), "kv4", narrow.ready)
            transfer = transfer or outlet.ticket.transfer
            part = protocol.KvSlice(first_layer=0, last_layer=SHAPE.layers, first_head=rank, last_head=rank + 1)
            ticket = msgspec.structs.replace(outlet.ticket, transfer=transfer)
            source, target = protocol.WorkerRank(tp=rank), protocol.WorkerRank(tp=rank // 2)
            send.append(msgspec.structs.replace(outlet, rank=source, slice=part, ticket=ticket))
            receive.append(msgspec.structs.replace(inlet, rank=target, slice=part, ticket=ticket))
        prompt = prompt_of(400)
        request = narrow.submit(prompt, 5, receive=tuple(receive), receive_tokens=400)
        wide.submit(prompt, 1, send=tuple(send))
        answer = await narrow.answer(request)
        assert (answer.tokens, answer.cached) == (answer_to(prompt, 5), 400)

    on_trial(work)


def test_a_model_that_does_not_fit_is_one_line() -> None:
    async def work(trial: Trial) -> None:
        big = msgspec.structs.replace(SHAPE, layers=4000)
        options = msgspec.to_builtins(msgspec.structs.replace(EMULATION, model=big))
        with pytest.raises(EngineStartError, match="no room for KV"):
            await trial.start(msgspec.structs.replace(CONFIG, options=options))

    on_trial(work)


def test_a_network_of_emulated_nodes_survives_the_loss_of_one(tmp_path: Path) -> None:
    """KV goes from prefill to decode; kill -9 of the decoding engine changes no token; everything says `emulated`."""
    knobs = ({"backend": "emulated", "emulate": "2xL4", "kv_cache_mib": None},) * 2

    async def main() -> None:
        async with open_cluster(None, tmp_path, "qwen2-7b", 2, codec="kv4", knobs=knobs) as network:
            status = await network.wait_plan(2)
            plan = status.plan
            assert plan is not None
            assert plan.service == "qwen2-7b-emulated"
            heads = {replica.phase: replica.head for replica in plan.replicas}
            adverts = {node.peer: node.advert for node in status.nodes}
            for peer in heads.values():
                advert = adverts[peer]
                assert advert is not None
                assert advert.engine is not None
                assert advert.engine.engine == "emulated 2x L4-24GB (roofline, dense)"
                assert advert.hardware.summary().startswith("emulated 2x L4")
                assert "libtorch" not in mapped(advert.engine.pid)
            gateway = PeerId(heads[Phase.PREFILL])
            attempts = await network.ask_until_undisturbed(
                lambda number: [f" {'xyz'[number]}" * 300], gateways=[gateway], max_tokens=30
            )
            ((prompt, whole),) = attempts[-1]
            assert whole.figures is not None
            assert whole.figures.transfer is not None
            assert (whole.figures.prefill_node, whole.figures.attempts) == (gateway, 1)
            assert whole.figures.transfer.raw_bytes == 300 * 28 * 2 * 4 * 128 * 2
            victim: list[int] = []

            async def kill(count: int) -> None:
                if victim and count >= 3:
                    os.kill(victim.pop(), signal.SIGKILL)

            async def interrupted() -> messages.RequestFigures:
                await network.wait_plan(2)
                victim.append(await network.engine_pid(heads[Phase.DECODE]))
                again = await network.client.generate(
                    gateway, prompt, max_tokens=60, deadline_s=WAIT_LIMIT_S, on_tokens=kill
                )
                assert not victim
                assert again.error == ""
                assert again.tokens[:30] == whole.tokens
                assert len(again.tokens) == 60
                assert again.figures is not None
                return again.figures

            figures = await interrupted()
            if figures.attempts == 1:  # all of it was on its way before this process looked at its beginning
                figures = await interrupted()
            assert figures.attempts >= 2
            assert any("SIGKILL" in line for line in figures.recovered)

    trio.run(main)


def mapped(pid: int) -> str:
    """What a process has loaded."""
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
