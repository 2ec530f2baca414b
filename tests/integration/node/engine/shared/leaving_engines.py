"""Engines of one process, of which all but one leave: prints how many of those are still there after each. For a test,
which starts it as a process of its own, with a model's folder."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import weakref

from p2pserve.node.engine import protocol
from p2pserve.node.engine.mailbox import Outbox
from p2pserve.node.engine.settings import Sharing
from p2pserve.node.engine.sharing.turns import KvHolder, ProcessTurns, expect_requests
from p2pserve.node.engine.vllm_program.backend import VLLM


def no_engine(service: str) -> KvHolder:
    """Nobody has to give room."""
    raise AssertionError(service)


def main() -> None:
    """The program."""
    os.environ.update(VLLM.environment)
    VLLM.preload()
    from vllm.distributed.parallel_state import get_pp_group

    from p2pserve.node.engine.vllm_program.shared import VllmSharing

    turns = ProcessTurns("db", time.monotonic, no_engine)
    share = VllmSharing(turns)
    left: list[weakref.ref[object]] = []
    for service in ("stays", "first", "second", "third"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = protocol.EngineConfig(
            model=sys.argv[1], sharing=Sharing(service=service), kv_cache_mib=96, max_requests=4, threads=1
        )
        engine = share(config, Outbox(theirs, lambda: None), threading.Event()).load()
        engine.begin(turns.open_service(service, expect_requests(0.0001, 0.001)))
        if service != "stays":
            engine.close()
            engine.leave()
            left.append(weakref.ref(engine._runner))
        del engine
        sys.stdout.write(f"left: {sum(each() is not None for each in left)} of {len(left)}\n")
        ours.close()
    sys.stdout.write(f"stages: {get_pp_group().world_size}\n")


if __name__ == "__main__":
    main()
