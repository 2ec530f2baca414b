"""The recipe of docs/extending.md for an engine of one's own, followed in a real fork server."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineStartError
from p2pserve.node.engine.agent_side.fork_server import fork_server_command, open_fork_server
from p2pserve.node.engine.settings import Sharing
from p2pserve.node.engine.trials.trial import open_trial

RECIPES = Path(__file__).parents[4] / "docs" / "extending.md"

# What the file and the edit of the recipe come to, then what `python -m p2pserve.node.engine.forkserver` does.
START = """
import importlib.util, sys
from p2pserve.node.engine import backends, forkserver
spec = importlib.util.spec_from_file_location("p2pserve.node.engine.echo", sys.argv.pop(1))
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
backends.BACKENDS["echo"] = module.ECHO
forkserver.main()
"""


def test_an_engine_of_ones_own_costs_one_file_and_one_edit(tmp_path: Path) -> None:
    section = RECIPES.read_text(encoding="utf-8").partition("## An engine\n")[2].partition("\n## ")[0]
    file, edit = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    (tmp_path / "echo.py").write_text(file)
    assert edit.strip() == "BACKENDS: Final = {backend.name: backend for backend in (VLLM, EMULATED, ECHO)}"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _, environment = fork_server_command([], log=None, threads=1)
    command = [sys.executable, "-c", START, str(tmp_path / "echo.py"), "echo", str(theirs.fileno())]

    async def main() -> None:
        async with open_fork_server(log=None, threads=1, channel=ours.detach()) as server, open_trial(server) as trial:
            with trio.fail_after(60):
                engine = await trial.start(protocol.EngineConfig(model="", backend="echo"))
                assert (server.version, engine.ready.engine) == ("1.0", "echo")
                assert (await engine.generate([5, 6, 7, 8], 3)).tokens == [5, 6, 7]
                engine.stop()
                shared = protocol.EngineConfig(model="", backend="echo", sharing=Sharing(service="one"))
                with pytest.raises(EngineStartError, match="do not share a process: take one model"):
                    await trial.start(shared)

    with subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        trio.run(main)
        assert process.wait(30) == 0
