"""No secret of a box stands in what `ps` shows, of any process of it: keys, tokens, the key of its network."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from .servers import Server, start_p2pserve, wait_ready

KEY, ADMIN = "sk-of-this-test-0123456789", "an admin token of this test"

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]


def command_lines(server: Server) -> dict[int, str]:
    """Of the box's processes, those that others have forked too, by their ids."""
    main = psutil.Process(server.process.pid)
    found = {}
    for process in (main, *main.children(recursive=True)):
        try:
            found[process.pid] = Path(f"/proc/{process.pid}/cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended meanwhile
            continue
    return found


def test_no_secret_stands_in_the_command_line_of_a_process_of_a_box(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with start_p2pserve(home, "--api-key", KEY, "--admin-token", ADMIN) as server:
        wait_ready(server)
        key = {"Authorization": f"Bearer {KEY}"}
        answer = server.post("/v1/completions", {"model": "bundled", "prompt": "def f(", "max_tokens": 1}, **key)
        assert answer.status_code == 200
        assert server.ask("GET", "/p2p/v1/nodes", headers={"authorization": f"Bearer {ADMIN}"}).status_code == 200

        lines = command_lines(server)
        assert "--api-key ... --admin-token ..." in lines[server.process.pid]
        (api,) = server.pids("api.log")
        engines = [pid for pid in server.pids("engine.log") if pid in lines]
        assert api in lines
        assert len(engines) >= 2  # the fork server and the engine that it has forked
        assert [line for line in lines.values() if "p2pserve.node.planning.worker" in line] != []
        assert sum("p2pserve.node.engine.forkserver" in line for line in lines.values()) >= 2

        tokens = re.findall(r"p2p_[a-z]+_(\S+)", server.log.read_text())
        assert tokens != []
        secrets = [KEY, ADMIN, *(token[:20] for token in tokens)]
        assert [line for line in lines.values() if any(secret in line for secret in secrets)] == []
