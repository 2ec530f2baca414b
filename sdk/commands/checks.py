"""`p2pserve demo`, `doctor` and `selftest`: whether it all works on this machine. Running one imports much."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from ..errors import UsageError
from ..options.command import combine, command, option
from ..options.shared import codec_option, home_option, network_options, timeout_option
from ..options.values import FILE, PORT, POSITIVE, SECONDS


@command(
    "demo",
    example=["p2pserve demo --nodes 4 --codec kv4 --format json", "p2pserve demo --models", "p2pserve demo --wan"],
    formats=("table", "json"),
)
@combine(
    option("--nodes", type=int, default=4, metavar="N", help="engines to start, 1 to 16 (default: 4)"),
    option("--prompt", metavar="TEXT", help="instead of Python code from the standard library"),
    codec_option,
    option("--max-tokens", type=POSITIVE, default=64, metavar="N", help="for each answer (default: 64)"),
    option("--model", default="bundled", metavar="MODEL", help="a folder, a Hugging Face id, or `bundled` (default)"),
    option(
        "--models",
        "two_models",
        is_flag=True,
        help="instead: one box with two bundled models, whose engines share a process, and two clients at once",
    ),
    option(
        "--wan",
        is_flag=True,
        help="instead: six boxes with emulated GPUs at three sites, a link that degrades and a box that is lost; "
        "needs root, for an emulated network",
    ),
    option("--timeout-s", type=SECONDS, default=120.0, metavar="S", help="give up after this long (default: 120)"),
)
def demo(arguments: SimpleNamespace) -> int:
    if arguments.two_models and arguments.wan:
        raise UsageError("models: --wan is another demo; give one of the two")
    if arguments.two_models:
        from ..demo.models_demo import run_models_demo

        return run_models_demo(arguments)
    if arguments.wan:
        from ..demo.wan_demo import run_wan_demo

        return run_wan_demo(arguments)
    from ..demo.demo import run_demo

    return run_demo(arguments)


@command(
    "doctor",
    example=["p2pserve doctor", "p2pserve doctor --bootstrap p2p_worker_... --model Qwen/Qwen3-0.6B --port 4002"],
    formats=("table", "json"),
)
@combine(
    network_options("p2p_worker_... or p2p_client_..."),
    option("--model", metavar="MODEL", help="a folder, a Hugging Face id, or `bundled`: whether it fits here"),
    option("--port", type=PORT, default=4002, metavar="PORT", help="where the node would listen (default: 4002)"),
    option("--announce", metavar="HOST:PORT", help="where others would reach it, as with `join`"),
    option(
        "--replicas",
        type=POSITIVE,
        default=1,
        metavar="N",
        help="so many nodes, as with `join`: their folders, ports and GPUs (default: 1)",
    ),
    home_option("the node's own folder would be inside it"),
    timeout_option,
)
def doctor(arguments: SimpleNamespace) -> int:
    from ..doctor.doctor import run_doctor

    return run_doctor(arguments)


@command("selftest", example="p2pserve selftest", formats=("text", "json"))
@combine(
    option("--full", is_flag=True, help="all that is checked once on a GPU: tests, kernels, engines; half an hour"),
    option(
        "--report",
        type=FILE,
        default=Path("gpu-check.json"),
        metavar="FILE",
        help="where --full writes what it found (default: gpu-check.json)",
    ),
)
def selftest(arguments: SimpleNamespace) -> int:
    from ..actions.selftest import selftest as run

    return run(arguments)


@command("version", example="p2pserve version --format json", formats=("text", "json"))
def version(arguments: SimpleNamespace) -> int:
    from ..actions.version import print_versions

    return print_versions(arguments)
