"""What the commands do that run a node on this box."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import trio

from ...bootstrap import parse_address
from ...bootstrap.trust.targets import parse_member
from ...coordinator import Phase, RoutingSettings
from ...coordinator.requests.admission import AdmissionSettings
from ...kvtransport.probing.figures import BoxFigures
from ...node.agent import Started, run_node
from ...node.box.hardware import probe
from ...node.box.heap import release_library_pages, return_freed_memory, share_one_heap
from ...node.engine.api.options import OptionRefused, check_options
from ...node.engine.vllm_program.backend import VLLM
from ...node.messages import MAX_DEADLINE_S
from ...node.observing.node_log import TOLD
from ...node.owner.dividing import Tell, tell_nobody
from ...node.settings import WAN, ApiSettings, BoxEngineSettings, BoxLinkSettings, NodeSettings, NodeTuning
from ..doctor.at_join import describe_unfit, examine_box
from ..environment import require_network
from ..errors import UsageError
from ..live_line import LiveLine
from ..options.hosting import read_hosting
from ..options.values import JOINED, MADE, settings_of
from .greeting import describe_greeting, greeting_of
from .http_options import read_admin_token, read_http, read_keys

SWITCH_S: Final = 0.0005
"""Longest a planning or measuring thread may hold up the event loop; a tenth of the default."""
SETTLED_S: Final = 20.0
"""After joining, before memory that only the start has needed is given back. Sooner: the first exchanges with other
members need it again."""


def bootstrap(arguments: SimpleNamespace) -> int:
    """`p2pserve bootstrap`."""
    return _run_node(_settings(arguments, arguments.home.expanduser() / MADE, None), arguments)


def join(arguments: SimpleNamespace) -> int:
    """`p2pserve join`."""
    where = require_network(arguments.bootstrap, arguments.token)[0]
    folder = getattr(arguments, "folder", JOINED)  # of several nodes of a box each has its own
    hosting = read_hosting(arguments)
    settings = _settings(arguments, arguments.home.expanduser() / folder, where)
    return _run_node(replace(settings, hosting=hosting), arguments)


def _check_tp(arguments: SimpleNamespace) -> None:
    """Refuse more GPUs than this box has before it joins. Raises UsageError."""
    if arguments.tp is None or arguments.tp == 1 or arguments.model is None or arguments.emulate is not None:
        return
    gpus = len(probe().gpus)
    if not gpus:
        raise UsageError(f"tp: {arguments.tp} GPUs are to share each layer, and this box has none; leave --tp out")
    if arguments.tp > gpus:
        raise UsageError(f"tp: {arguments.tp} GPUs are to share each layer, and this box has {gpus}")


def _check_threads(arguments: SimpleNamespace) -> None:
    """Refuse more threads than cores, which would wait for each other. Raises UsageError."""
    if arguments.threads is None or arguments.model is None or arguments.emulate is not None:
        return
    cores = probe().cores
    if arguments.threads > cores:
        raise UsageError(f"threads: {arguments.threads} are more than the {cores} cores of this box")


def _http_of(arguments: SimpleNamespace) -> dict[str, Any]:
    """Where this node serves HTTP, and how. Raises UsageError."""
    http, options, model = arguments.http, arguments.vllm_options, getattr(arguments, "model", None)
    if options and model is None:
        raise UsageError(f"model: {options[0]} is for the API of a model; say which with --model")
    try:
        passed = check_options(options)
    except OptionRefused as error:
        raise UsageError(str(error)) from error
    given = arguments.api_key or tuple(filter(None, [os.environ.get("VLLM_API_KEY", "")]))
    api = ApiSettings(
        keys=read_keys(given, arguments.api_key_file) if http is not None else (),
        admin_token=read_admin_token(arguments.admin_token),
        needs_no_key=arguments.no_api_key,
        names=arguments.served_model_name,
        options=passed,
        max_body_bytes=arguments.max_body_mib << 20,
        deadline_s=min(arguments.request_timeout_s, MAX_DEADLINE_S),
    )
    return {"http": read_http(http) if http is not None else None, "api": api}


def _settings(arguments: SimpleNamespace, home: Path, where: str | None) -> NodeSettings:
    _check_tp(arguments)
    _check_threads(arguments)
    listen = f"0.0.0.0:{arguments.port}" if arguments.port is not None else arguments.listen
    return replace(
        settings_of(NodeSettings, arguments),
        home=home,
        listen=parse_address(listen),
        bootstrap=where,
        **_http_of(arguments),
        also=tuple(parse_member(text, "also") for text in getattr(arguments, "also", ())),
        links=replace(settings_of(BoxLinkSettings, arguments), box=settings_of(BoxFigures, arguments)),
        engine=settings_of(BoxEngineSettings, arguments),
        routing=RoutingSettings(policy=arguments.routing),
        phase=Phase(arguments.phase) if arguments.phase is not None else None,
        tuning=_tuning(arguments.max_ttft, arguments.replace_every),
    )


def _tuning(max_ttft: tuple[float, float] | None, replace_every: float) -> NodeTuning:
    tuning = replace(WAN, replace_s=replace_every)
    if max_ttft is None:
        return tuning
    return replace(tuning, clients=replace(WAN.clients, admission=AdmissionSettings.with_limit(*max_ttft)))


def _run_node(settings: NodeSettings, arguments: SimpleNamespace) -> int:
    _let_nodes_log(arguments.debug)
    greet = _greet_json if arguments.format == "json" else _greet
    sys.setswitchinterval(SWITCH_S)
    share_one_heap()
    tell = _tell_parent if settings.divided is not None else tell_nobody
    return trio.run(_serve_until_signal, settings, greet, tell)


def _let_nodes_log(debug: bool) -> None:
    """A node keeps a log in its home. Without --debug the terminal has errors alone."""
    if not debug:
        logging.disable(logging.NOTSET)
        terminal = logging.StreamHandler()
        terminal.setLevel(logging.ERROR)
        terminal.addFilter(lambda record: record.name != TOLD)  # the command says it itself
        logging.getLogger().addHandler(terminal)


def _examine(settings: NodeSettings) -> list[str]:
    """What of this box is not as it should be. What cannot be looked at keeps no node from running."""
    has_engine = settings.model is not None and settings.engine.backend == VLLM.name
    try:
        return describe_unfit(examine_box(settings.home, settings.engine.tp, has_engine=has_engine))
    except OSError as error:
        return [f"home: this box was not looked at: {error}; p2pserve doctor says more"]


async def _serve_until_signal(settings: NodeSettings, greet: Callable[[Started], None], tell: Tell) -> int:
    """Run a node. The first signal drains it; a second, or one before it has joined, ends it."""
    stop = trio.Event()
    code = 0
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        line = LiveLine(sys.stderr, time.monotonic)
        async with trio.open_nursery() as nursery:
            joined = False

            async def watch() -> None:
                nonlocal code
                async for _ in signals:
                    if not joined or stop.is_set():
                        code = 130
                        nursery.cancel_scope.cancel()
                    else:
                        stop.set()
                        line.say("leaving; once more to leave at once")

            async def serve(*, task_status: trio.TaskStatus[Started]) -> None:
                await run_node(
                    settings, say=line.say, show=line.show, tell=tell, stop=stop, task_status=task_status
                )  # fmt: skip
                nursery.cancel_scope.cancel()

            async def tell_unfit() -> None:
                for text in await trio.to_thread.run_sync(_examine, settings, abandon_on_cancel=True):
                    line.say(text)

            nursery.start_soon(watch)
            nursery.start_soon(tell_unfit)
            with line:
                if sys.stderr.isatty():  # anywhere else it would be a line too many where joining fails
                    line.show("joins the network")
                started: Started = await nursery.start(serve)
                joined = True
            greet(started)
            nursery.start_soon(_release_memory)
    return code


async def _release_memory() -> None:
    """Give back what has been used to start, and is not used to serve: about a quarter of the process."""
    await trio.sleep(SETTLED_S)
    await trio.to_thread.run_sync(return_freed_memory)
    await trio.to_thread.run_sync(release_library_pages)


def _greet(started: Started) -> None:
    for line in describe_greeting(greeting_of(started)):
        print(line)
    sys.stdout.flush()


def _greet_json(started: Started) -> None:
    print(json.dumps(greeting_of(started)), flush=True)


def _tell_parent(told: dict[str, Any]) -> None:
    """The command that runs the nodes of this box reads what they print."""
    print(json.dumps(told), flush=True)
