"""More KV than there is memory for it crosses a slow link: LLaMA-30B's shape, 4 GB, between two processes.

The model's layers are made from one small tensor when they are read, so whatever memory grows is what transfers hold.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path as FilePath

import psutil
import pytest
import torch

from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.sockets import read_link_hello
from p2pserve.kvtransport.wire.tickets import issue_link, issue_transfer
from p2pserve.node.engine.protocol import Inlet, KvSlice, LinkReport, Outlet, TransferReport
from p2pserve.node.engine.transfers.hub import TransferHub, TransferMemory
from p2pserve.node.engine.transfers.outgoing import Prefilled
from p2pserve.node.engine.vllm.device import CpuDevice
from p2pserve.node.engine.vllm.layout import Shard

pytestmark = pytest.mark.timeout(300)

LAYERS, HEADS, HEAD_DIM, TOKENS = 60, 52, 128, 2560  # 1.6 MB a token
KV_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * TOKENS * 2
MEMORY = TransferMemory(host_bytes=64 << 20, staged_bytes=64 << 20)
LINK_BYTES_S = 500e6  # 4 Gb/s: less than either end can do
DEADLINE_S = 240.0

SHARD = Shard(layers=range(LAYERS), heads=range(HEADS), head_dim=HEAD_DIM, dtype=torch.bfloat16)
WHOLE = KvSlice(first_layer=0, last_layer=LAYERS, first_head=0, last_head=HEADS)
LINK = issue_link(600.0, random.Random(1).randbytes)
TICKET = issue_transfer(LINK.link, "raw", DEADLINE_S, random.Random(2).randbytes)


def values(layer: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer: every one tells its layer and its position."""
    positions = torch.arange(first, last, dtype=torch.int16).view(-1, 1, 1).expand(-1, HEADS, HEAD_DIM)
    k = (positions + 4096 * (layer % 4)).contiguous().view(torch.bfloat16)
    return k, k + 0


def peak_mib() -> float:
    """Of this process alone: what `getrusage` says includes the one that it was started from."""
    status = FilePath("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def now_mib() -> float:
    return float(psutil.Process().memory_info().rss) / (1 << 20)


def send(port: int) -> dict[str, object]:
    """A prefill engine: all layers are computed at once, far faster than the link."""
    done: list[TransferReport] = []
    over = threading.Event()

    def tell(report: TransferReport | LinkReport) -> None:
        if isinstance(report, TransferReport):
            done.append(report)
            over.set()

    device = CpuDevice()
    hub = TransferHub(SHARD, device, lambda layer, _, first, last: values(layer, first, last), MEMORY, tell)
    before = now_mib()
    outlet = Outlet(
        slice=WHOLE, ticket=TICKET, link=LINK, paths=(DialPath("127.0.0.1", port, streams=2),), gbps=4.0, rtt_s=0.001
    )
    hub.send(outlet, TOKENS)
    (outgoing,) = hub.outgoing(TICKET.transfer)
    for last in range(512, TOKENS + 1, 512):
        outgoing.announce_layers(range(LAYERS), Prefilled([0], last, device.mark()))
    outgoing.prefill_done(TOKENS, device.mark())
    held = 0
    while not over.wait(0.005):
        held = max(held, hub.memory_in_use.host_bytes)
    return {
        "delivered": done[0].delivered,
        "reason": done[0].reason,
        "raw_bytes": done[0].raw_bytes,
        "most_held": held,
        "left": hub.memory_in_use.host_bytes,
        "grown_mib": peak_mib() - before,
    }


def receive() -> dict[str, object]:
    """A decode engine: takes what comes, and looks at every value."""
    hub = TransferHub(SHARD, CpuDevice(), lambda *_: pytest.fail("nothing is sent"), MEMORY, lambda report: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        hub.expect([Inlet(slice=WHOLE, ticket=TICKET, link=LINK)], TOKENS)
        incoming = hub.incoming(TICKET.transfer)
        assert incoming is not None
        for _ in range(2):
            sock, _ = server.accept()
            hub.attach(read_link_hello(sock, 30.0).pack(), sock)
        before = now_mib()
        hub.start(incoming, 0, torch.arange)
        wrong = pieces = 0
        while incoming.outcome(time.monotonic()) is None or incoming.waiting_pieces:
            piece = incoming.take()
            if piece is None:
                time.sleep(0.001)
                continue
            pieces += 1
            k, v = values(piece.layer, piece.start, piece.start + piece.k.shape[0])
            wrong += not (torch.equal(piece.k.view(torch.int16), k.view(torch.int16)) and torch.equal(piece.v, v))
        outcome = incoming.outcome(time.monotonic())
        incoming.confirm_applied()
        until = time.monotonic() + 30.0
        while time.monotonic() < until:
            paths = (path for link in hub.endpoint.statistics() for path in link.paths.values())
            if not any(path.connections for path in paths):
                break
            time.sleep(0.01)  # the sender hangs up when it has been told
    return {"outcome": outcome, "pieces": pieces, "wrong": wrong, "grown_mib": peak_mib() - before}


def throttle(listener: socket.socket, port: int) -> None:
    """A link that carries so many bytes a second, of all its connections together."""
    turn = threading.Lock()

    def carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                with turn:
                    until = time.monotonic() + len(data) / LINK_BYTES_S
                    target.sendall(data)
                    time.sleep(max(0.0, until - time.monotonic()))
            target.shutdown(socket.SHUT_WR)

    def join(near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            back = threading.Thread(target=carry, args=(far, near), daemon=True)
            back.start()
            carry(near, far)
            back.join()

    with suppress(OSError):
        while True:
            threading.Thread(target=join, args=(listener.accept()[0],), daemon=True).start()


def test_four_gigabytes_cross_a_slow_link_in_little_memory() -> None:
    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.integration.node.engine.transfers.test_kv_memory", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    threads = set(threading.enumerate())
    with start("receive") as receiver, socket.create_server(("127.0.0.1", 0)) as listener:
        assert receiver.stdout is not None
        port = int(receiver.stdout.readline())
        threading.Thread(target=throttle, args=(listener, port), daemon=True).start()
        with start("send", str(listener.getsockname()[1])) as sender:
            assert sender.stdout is not None
            sent = json.loads(sender.stdout.read())
            received = json.loads(receiver.stdout.read())
        listener.shutdown(socket.SHUT_RDWR)
        for thread in set(threading.enumerate()) - threads:
            thread.join(10.0)
    assert (sent["delivered"], sent["reason"], sent["left"]) == (True, "", 0)
    assert KV_BYTES == sent["raw_bytes"] > 4e9
    assert (received["outcome"], received["wrong"]) == ("", 0)
    assert MEMORY.host_bytes / 2 < sent["most_held"] <= MEMORY.host_bytes  # the link held it back
    for grown in (sent["grown_mib"], received["grown_mib"]):
        assert grown < 320  # of 4,080 MiB of KV: the bounds, a window for each thread and the sockets' buffers


if __name__ == "__main__":
    sys.stdout.write(json.dumps(send(int(sys.argv[2])) if sys.argv[1] == "send" else receive()))
